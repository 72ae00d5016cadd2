//! The laws about loss on a cluster of three etcd servers whose leader dies in the middle of them.

#[macro_use]
mod leader_laws;

use lockset_testkit::stage::EtcdStage;

leader_laws!(EtcdStage::start_cluster);
