//! Keys and values below the prefix of the locks in etcd.
#![no_main]

libfuzzer_sys::fuzz_target!(|pair: (&[u8], &[u8])| {
    lockset::fuzzing::etcd_key_value(pair.0, pair.1);
});
