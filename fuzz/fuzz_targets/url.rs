//! URLs of engines: parsing, showing, hiding passwords.
#![no_main]

libfuzzer_sys::fuzz_target!(|text: &str| lockset::fuzzing::url(text));
