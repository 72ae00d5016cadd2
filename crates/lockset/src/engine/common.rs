//! What several engines need: each mechanism once.
//!
//! * `admission` decides which claims of a queue hold;
//! * `backoff` has the pauses between attempts;
//! * `batch` sends requests together that were made while another was in flight;
//! * `tombstones` remembers withdrawn claims;
//! * `watch` turns hints of changes into states;
//! * `pem` reads certificates and keys.

pub(super) mod admission;
pub(crate) mod backoff;
#[cfg(any(feature = "redis", feature = "etcd"))]
pub(super) mod batch;
#[cfg(any(feature = "redis", feature = "etcd"))]
pub(super) mod pem;
pub(super) mod tombstones;
pub(super) mod watch;
