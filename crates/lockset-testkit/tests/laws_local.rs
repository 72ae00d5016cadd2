//! The laws on the local engine: one file, several real processes, the machine's own time.

#[macro_use]
mod common_laws;

use lockset_testkit::stage::LocalStage;

// There is no connection that could be cut.
common_laws!(
    local,
    LocalStage::start,
    and: [a_token_floor_is_exact, raise_lifts_the_fence_and_never_lowers_it],
    not: [a_cut_connection_is_reported_by_the_guard, latches_and_barriers_survive_a_cut_connection]
);
