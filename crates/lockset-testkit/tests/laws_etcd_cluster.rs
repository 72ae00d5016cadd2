//! The laws on a cluster of three etcd servers, each with a prefix of its own.

#[macro_use]
mod etcd_laws;

use lockset_testkit::stage::EtcdStage;

laws_of_etcd!(etcd_cluster, EtcdStage::start_cluster);
