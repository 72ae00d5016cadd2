//! The laws on a Redis Cluster of three masters of its own, one for each law.

#[macro_use]
mod redis_laws;

use lockset_testkit::stage::ClusterStage;

laws_of_redis!(redis_cluster, ClusterStage);
