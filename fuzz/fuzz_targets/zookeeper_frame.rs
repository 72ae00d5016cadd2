//! Frames of a ZooKeeper server.
#![no_main]

libfuzzer_sys::fuzz_target!(|frame: &[u8]| lockset::fuzzing::zookeeper_frame(frame));
