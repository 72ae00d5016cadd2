//! The laws on an ensemble of three ZooKeeper servers, which many laws use one after the other.

#[macro_use]
mod zookeeper_laws;

use lockset_testkit::stage::ZooKeeperEnsembleStage;

laws_of_zookeeper!(zookeeper_ensemble, ZooKeeperEnsembleStage);
