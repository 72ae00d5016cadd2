//! The laws about loss on a Redis service whose master dies in the middle of them.

#[macro_use]
mod leader_laws;

use lockset_testkit::stage::SentinelStage;

leader_laws!(
    SentinelStage::start(env!("CARGO_BIN_EXE_actor")).with_master_change(),
    a_forced_release_is_reported_at_once: [Mutex, Writer, OnePermit],
    a_revocation_takes_effect_when_the_lease_ends: [Mutex, Writer, OnePermit],
    a_stopped_process_sees_its_loss_on_resume: [Mutex]
);
