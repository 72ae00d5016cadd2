//! The laws on PostgreSQL, each in a schema of its own.

#[macro_use]
mod common_laws;

use lockset_testkit::stage::PostgresStage;

common_laws!(
    postgres,
    PostgresStage::start,
    and: [
        a_token_floor_is_exact,
        raise_lifts_the_fence_and_never_lowers_it,
        a_cut_connection_is_reported_by_the_guard,
        latches_and_barriers_survive_a_cut_connection,
    ],
    not: []
);
