//! The laws on one etcd server, each with a prefix of its own.

#[macro_use]
mod etcd_laws;

use lockset_testkit::stage::EtcdStage;

laws_of_etcd!(etcd, EtcdStage::start);
