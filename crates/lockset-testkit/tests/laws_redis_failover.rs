//! The laws about loss on a Redis service whose master dies in the middle of them.

#[macro_use]
mod leader_laws;

use lockset_testkit::stage::SentinelStage;

leader_laws!(
    SentinelStage::start(env!("CARGO_BIN_EXE_actor")).whose_master_is_succeeded(),
    a_break_now_is_told_at_once: [Mutex, Writer, OnePermit],
    a_gentle_break_ends_with_the_lease: [Mutex, Writer, OnePermit],
    a_stopped_process_knows_that_it_lost: [Mutex]
);
