//! Faulty engines for the laws of `laws/several.rs`.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use lockset::engine::Engine;

use crate::layer::Layer;

/// Its clients do not agree on the identity of their backend, so they order it differently.
#[derive(Debug)]
pub(crate) struct InconsistentIdentity(pub(crate) Arc<dyn Engine>, pub(crate) &'static str);

impl InconsistentIdentity {
    /// The first backend is "m"; the clients of the second call it "a" and "z" in turn.
    pub(crate) fn new(inner: Arc<dyn Engine>, made: Arc<AtomicUsize>) -> Self {
        let name = match made.fetch_add(1, Ordering::Relaxed) {
            0 => "m",
            odd if odd % 2 == 1 => "a",
            _ => "z",
        };
        Self(inner, name)
    }
}

impl Layer for InconsistentIdentity {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    fn identity(&self) -> String {
        self.1.to_owned()
    }
}
