//! What several engines need: each mechanism once.
//!
//! * `admission` decides which claims of a queue hold;
//! * `backoff` has the pauses between attempts;
//! * `batch` sends requests together that were made while another was in flight;
//! * `tombstones` remembers withdrawn claims;
//! * `hints` tells a watch which names may have changed, and `watch` reads them.

pub(super) mod admission;
pub(crate) mod backoff;
#[cfg(any(feature = "redis", feature = "etcd"))]
pub(super) mod batch;
pub(super) mod hints;
pub(super) mod tombstones;
pub(super) mod watch;
