//! Names and data of ZooKeeper nodes.
#![no_main]

libfuzzer_sys::fuzz_target!(|node: (&str, &[u8])| {
    lockset::fuzzing::zookeeper_node(node.0, node.1);
});
