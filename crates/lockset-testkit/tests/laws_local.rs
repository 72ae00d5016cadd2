//! The laws on the local engine: one file, several real processes, the machine's own time.

#[macro_use]
mod common_laws;

use lockset_testkit::stage::LocalStage;

// There is no connection that could be cut.
common_laws!(
    local,
    LocalStage::start,
    and: [a_given_floor_is_exact, raising_lifts_the_fence_and_refuses_to_lower_it],
    not: [a_cut_session_is_told, a_cut_connection_counts_nothing_twice]
);
