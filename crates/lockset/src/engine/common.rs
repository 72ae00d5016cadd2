//! What several engines need: each mechanism once.
//!
//! * `admission` decides which claims of a queue hold;
//! * `backoff` has the pauses between attempts;
//! * `batch` sends requests together that were made while another was in flight;
//! * `waiters` has the rules by which a claim that was queued may assume that it holds;
//! * `tombstones` remembers withdrawn claims;
//! * `hints` tells a watch which names may have changed, and `watch` reads them.

pub(super) mod admission;
pub(crate) mod backoff;
#[cfg(any(feature = "redis", feature = "etcd", feature = "postgres"))]
pub(super) mod batch;
pub(super) mod hints;
pub(super) mod tombstones;
#[cfg(any(feature = "redis", feature = "postgres"))]
pub(super) mod waiters;
pub(super) mod watch;
