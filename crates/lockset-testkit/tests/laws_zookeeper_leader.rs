//! The laws about loss on an ensemble of three ZooKeeper servers whose leader dies in the middle of
//! them.

#[macro_use]
mod leader_laws;

use lockset_testkit::stage::ZooKeeperEnsembleStage;

leader_laws!(ZooKeeperEnsembleStage::start);
