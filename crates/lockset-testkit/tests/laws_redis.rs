//! The laws on a Redis server of their own, one for each law.

#[macro_use]
mod common_laws;

use lockset_testkit::stage::RedisStage;

common_laws!(
    redis,
    RedisStage::start,
    and: [
        a_given_floor_is_exact,
        raising_lifts_the_fence_and_refuses_to_lower_it,
        a_cut_session_is_told,
        a_cut_connection_counts_nothing_twice,
    ],
    not: []
);
