//! What several engines need: each mechanism once.
//!
//! * `admission` decides which claims of a queue hold;
//! * `batch` sends requests together that were made while another was in flight;
//! * `tombstones` remembers withdrawn claims;
//! * `hints` tells a watch which names may have changed, and `watch` reads them.

pub(super) mod admission;
#[cfg(any(feature = "redis", feature = "etcd"))]
pub(super) mod batch;
pub(super) mod hints;
pub(super) mod tombstones;
pub(super) mod watch;
