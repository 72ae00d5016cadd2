//! Replies of a Redis server, as bytes from the socket.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| lockset::fuzzing::redis_reply(bytes));
