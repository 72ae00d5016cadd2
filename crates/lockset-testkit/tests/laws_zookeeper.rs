//! The laws on one ZooKeeper server, which many laws use one after the other.

#[macro_use]
mod common_laws;

use lockset_testkit::stage::ZooKeeperStage;

// Its tokens are transactions of the servers.
common_laws!(
    zookeeper,
    ZooKeeperStage::start,
    and: [a_cut_connection_is_reported_by_the_guard, latches_and_barriers_survive_a_cut_connection],
    not: [a_token_floor_is_exact, raise_lifts_the_fence_and_never_lowers_it]
);
