//! The laws on an ensemble of three ZooKeeper servers, which many laws use one after the other.

#[macro_use]
mod common_laws;

use lockset_testkit::stage::ZooKeeperEnsembleStage;

// Its tokens are transactions of the servers.
common_laws!(
    zookeeper_ensemble,
    ZooKeeperEnsembleStage::start,
    and: [a_cut_session_is_told, a_cut_connection_counts_nothing_twice],
    not: [a_given_floor_is_exact, raising_lifts_the_fence_and_refuses_to_lower_it]
);
