//! The laws on one ZooKeeper server, which many laws use one after the other.

#[macro_use]
mod zookeeper_laws;

use lockset_testkit::stage::ZooKeeperStage;

laws_of_zookeeper!(zookeeper, ZooKeeperStage);
