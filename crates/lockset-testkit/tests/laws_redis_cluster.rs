//! The laws on a Redis Cluster of three masters of its own, one for each law.

#[macro_use]
mod common_laws;

use lockset_testkit::stage::ClusterStage;

// Its client is told by the servers where they are, so a proxy would not stay in the way.
common_laws!(
    redis_cluster,
    ClusterStage::start,
    and: [a_given_floor_is_exact, raising_lifts_the_fence_and_refuses_to_lower_it],
    not: [a_cut_session_is_told, a_cut_connection_counts_nothing_twice]
);
