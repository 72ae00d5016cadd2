//! Maps whose keys bring their hash along: names hash once when they are parsed, claim ids are
//! random already. A lock is looked up several times on its way; hashing text each time would
//! cost more than the rest of the look-up.

use std::collections::HashMap;
use std::hash::{BuildHasher, BuildHasherDefault, Hasher, RandomState};
use std::sync::OnceLock;

/// A map by [`Name`](crate::Name) or [`ClaimId`](crate::ClaimId).
pub(crate) type FastMap<K, V> = HashMap<K, V, BuildHasherDefault<Prehashed>>;

/// The hash of a text, seeded at random per process, so that colliding names cannot be chosen.
pub(crate) fn hash_of(text: &str) -> u64 {
    static SEED: OnceLock<RandomState> = OnceLock::new();
    SEED.get_or_init(RandomState::new).hash_one(text)
}

/// Takes what a key writes for its hash.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Prehashed(u64);

impl Hasher for Prehashed {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 ^= hash;
    }

    fn write_u128(&mut self, bits: u128) {
        self.0 ^= bits as u64;
    }

    fn write(&mut self, bytes: &[u8]) {
        // No key of ours comes here; any other is hashed slowly but not wrongly.
        for byte in bytes {
            self.0 = self.0.rotate_left(8).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ u64::from(*byte);
        }
    }
}
