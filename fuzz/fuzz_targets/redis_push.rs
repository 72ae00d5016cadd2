//! Messages and invalidations that a Redis server pushes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| lockset::fuzzing::redis_push(bytes));
