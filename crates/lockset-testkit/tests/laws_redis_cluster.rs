//! The laws on a Redis Cluster of three masters of its own, one for each law.

#[macro_use]
mod common_laws;

use lockset_testkit::stage::ClusterStage;

// Its client is told by the servers where they are, so a proxy would not stay in the way.
common_laws!(
    redis_cluster,
    ClusterStage::start,
    and: [a_token_floor_is_exact, raise_lifts_the_fence_and_never_lowers_it],
    not: [a_cut_connection_is_reported_by_the_guard, latches_and_barriers_survive_a_cut_connection]
);
