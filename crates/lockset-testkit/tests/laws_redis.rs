//! The laws on a Redis server of their own, one for each law.

#[macro_use]
mod redis_laws;

use lockset_testkit::stage::RedisStage;

laws_of_redis!(redis, RedisStage, link: [a_cut_session_is_told], no_link: []);
