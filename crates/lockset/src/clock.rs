//! The clock that leases are judged by.
//!
//! Rust's `Instant` and tokio's timers stop while a Linux machine sleeps; a lease does not. So
//! every lease is judged on a clock that goes on during suspend (`CLOCK_BOOTTIME`), and every
//! sleep is cut into short pieces after which that clock is asked again. On platforms without such
//! a clock the monotonic one is used. In tests the clock is tokio's, which can be paused and
//! advanced: a day of renewals then takes milliseconds.

use std::ops::Add;
use std::time::Duration;

/// A sleep is never longer than this before the clock is asked again, so that a deadline which
/// passed while the machine slept is noticed soon after it wakes.
const LONGEST_NAP: Duration = Duration::from_millis(500);

/// A point in time on a [`Clock`]. Comparable only with moments of the same clock, in particular
/// not with those of another machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment(u64);

impl Moment {
    /// Later than any moment that can be reached.
    pub const NEVER: Moment = Moment(u64::MAX);

    /// The moment that lies `nanos` nanoseconds after the origin of its clock.
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Nanoseconds since the origin of the clock.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// How much later `self` is than `earlier`; zero if it is not later.
    pub const fn saturating_duration_since(self, earlier: Moment) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// The moment `span` before this one, or the origin of the clock.
    pub fn saturating_sub(self, span: Duration) -> Self {
        Self(self.0.saturating_sub(nanos(span)))
    }
}

impl Add<Duration> for Moment {
    type Output = Moment;

    /// Saturates at [`Moment::NEVER`].
    fn add(self, span: Duration) -> Moment {
        Moment(self.0.saturating_add(nanos(span)))
    }
}

/// In nanoseconds, as many as fit.
pub(crate) fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

/// Tells the time and sleeps; see the [module documentation](self).
#[derive(Clone, Debug, Default)]
pub struct Clock(ClockSource);

#[derive(Clone, Debug, Default)]
enum ClockSource {
    #[default]
    Boot,
    Tokio {
        origin: tokio::time::Instant,
    },
}

impl Clock {
    /// The machine's clock, which also counts the time the machine sleeps.
    pub const fn boot() -> Self {
        Self(ClockSource::Boot)
    }

    /// tokio's clock, for tests on a runtime whose time is paused. Must be made, and used, inside
    /// that runtime.
    pub fn tokio() -> Self {
        // Some room before the origin, so that moments "before now" do not all meet in zero.
        let origin = tokio::time::Instant::now() - Duration::from_secs(3600);
        Self(ClockSource::Tokio { origin })
    }

    /// Whether this is tokio's clock, so that its users must run on the same runtime.
    pub(crate) fn is_virtual(&self) -> bool {
        matches!(self.0, ClockSource::Tokio { .. })
    }

    /// The current time.
    pub fn now(&self) -> Moment {
        match &self.0 {
            ClockSource::Boot => boot_time(),
            ClockSource::Tokio { origin } => Moment(nanos(origin.elapsed())),
        }
    }

    /// The output of `work`, if it is ready before `deadline`.
    ///
    /// # Cancel safety
    /// As cancel safe as `work`.
    pub async fn timeout_at<T>(
        &self,
        deadline: Moment,
        work: impl Future<Output = T>,
    ) -> Option<T> {
        tokio::select! {
            // A finished `work` counts, even if this is polled only after the deadline.
            biased;
            done = work => Some(done),
            () = self.sleep_until(deadline) => None,
        }
    }

    /// Sleeps for `span` on this clock, whatever the machine did in between.
    pub(crate) async fn sleep(&self, span: Duration) {
        self.sleep_until(self.now() + span).await;
    }

    /// Sleeps until `deadline` has passed on this clock, whatever the machine did in between.
    ///
    /// # Cancel safety
    /// Cancel safe; nothing but time is involved.
    pub async fn sleep_until(&self, deadline: Moment) {
        if deadline == Moment::NEVER {
            return std::future::pending().await;
        }
        loop {
            let left = deadline.saturating_duration_since(self.now());
            if left.is_zero() {
                return;
            }
            let nap = if self.is_virtual() { left } else { left.min(LONGEST_NAP) };
            tokio::time::sleep(nap).await;
        }
    }
}

#[cfg(any(target_os = "linux", target_os = "android"))]
const LEASE_CLOCK: rustix::time::ClockId = rustix::time::ClockId::Boottime;
#[cfg(not(any(target_os = "linux", target_os = "android")))]
const LEASE_CLOCK: rustix::time::ClockId = rustix::time::ClockId::Monotonic;

fn boot_time() -> Moment {
    let now = rustix::time::clock_gettime(LEASE_CLOCK);
    // Neither field is ever negative on these clocks.
    Moment((now.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(now.tv_nsec as u64))
}

/// The wall clock in microseconds since 1970. It only helps tokens to go on growing after lost
/// state; no lease is ever judged by it.
pub fn wall_micros() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| u64::try_from(since.as_micros()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_saturate_instead_of_wrapping() {
        assert_eq!(Moment(5) + Duration::MAX, Moment::NEVER);
        assert_eq!(Moment(5).saturating_sub(Duration::from_secs(1)), Moment(0));
        assert_eq!(Moment(5).saturating_duration_since(Moment(9)), Duration::ZERO);
    }

    #[test]
    fn the_boot_clock_moves_forward() {
        let clock = Clock::boot();
        let before = clock.now();
        std::thread::sleep(Duration::from_millis(2));
        assert!(clock.now().saturating_duration_since(before) >= Duration::from_millis(2));
    }

    #[tokio::test(start_paused = true)]
    async fn the_tokio_clock_follows_virtual_time() {
        let clock = Clock::tokio();
        let start = clock.now();
        clock.sleep_until(start + Duration::from_secs(86_400)).await;
        assert!(clock.now().saturating_duration_since(start) >= Duration::from_secs(86_400));
    }
}
