//! The laws on a Redis Cluster of three masters of its own, one for each law.

#[macro_use]
mod redis_laws;

use lockset_testkit::stage::ClusterStage;

// Its client is told by the servers where they are, so a proxy would not stay in the way.
laws_of_redis!(redis_cluster, ClusterStage, link: [], no_link: [a_cut_session_is_told]);
