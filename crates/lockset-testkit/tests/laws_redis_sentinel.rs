//! The laws on a Redis master with replicas and sentinels, all of their own, for each law.

#[macro_use]
mod redis_laws;

use lockset_testkit::stage::SentinelStage;

// Its client is told by the sentinels where the master is, so a proxy would not stay in the way.
laws_of_redis!(redis_sentinel, SentinelStage, link: [], no_link: [a_cut_session_is_told]);
