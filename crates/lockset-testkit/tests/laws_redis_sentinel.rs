//! The laws on a Redis master with replicas and sentinels, all of their own, for each law.

#[macro_use]
mod redis_laws;

use lockset_testkit::stage::SentinelStage;

laws_of_redis!(redis_sentinel, SentinelStage);
