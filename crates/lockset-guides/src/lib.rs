//! The guides in `docs/`, compiled and run as doc tests, so that their code stays right.

#[cfg(doctest)]
#[doc = include_str!("../../../docs/web-service.md")]
struct WebService;

#[cfg(doctest)]
#[doc = include_str!("../../../docs/testing.md")]
struct Testing;

#[cfg(doctest)]
#[doc = include_str!("../../../docs/metrics.md")]
struct Metrics;

#[cfg(doctest)]
#[doc = include_str!("../../../docs/fencing-sql.md")]
struct FencingSql;
