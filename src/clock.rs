//! The clock every deadline is kept on: one that goes on while the machine sleeps.
//!
//! `std::time::Instant` stops during a suspend on Linux, so a lease measured with it would look
//! alive after the lid was opened again. Here an instant is a number of nanoseconds read from
//! `CLOCK_BOOTTIME` on Linux and Android, from `CLOCK_MONOTONIC` on macOS and iOS (there it counts
//! sleep), and from the standard library's monotonic clock elsewhere (on Windows that is the
//! performance counter, which counts sleep too).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A point on the boot-time clock, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Instant(u64);

impl Instant {
    pub(crate) const FAR_FUTURE: Instant = Instant(u64::MAX);

    pub(crate) const fn from_nanos(nanos: u64) -> Instant {
        Instant(nanos)
    }

    pub(crate) const fn as_nanos(self) -> u64 {
        self.0
    }

    pub(crate) fn saturating_since(self, earlier: Instant) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl std::ops::Add<Duration> for Instant {
    type Output = Instant;

    fn add(self, rhs: Duration) -> Instant {
        Instant(self.0.saturating_add(u64::try_from(rhs.as_nanos()).unwrap_or(u64::MAX)))
    }
}

impl std::ops::Sub<Duration> for Instant {
    type Output = Instant;

    fn sub(self, rhs: Duration) -> Instant {
        Instant(self.0.saturating_sub(u64::try_from(rhs.as_nanos()).unwrap_or(u64::MAX)))
    }
}

/// Where a client reads the time: the boot-time clock, plus what a test has added to it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Clock {
    skew: Option<Arc<AtomicU64>>,
}

impl Clock {
    /// A clock that a test can push forward by adding nanoseconds to `skew`.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn skewed(skew: Arc<AtomicU64>) -> Clock {
        Clock { skew: Some(skew) }
    }

    pub(crate) fn now(&self) -> Instant {
        let real = boot_nanos();
        match &self.skew {
            None => Instant(real),
            Some(skew) => Instant(real.saturating_add(skew.load(Ordering::Acquire))),
        }
    }

    /// Sleeps on the runtime until `deadline`, in slices, since the runtime's own timers stop
    /// while the machine is suspended.
    pub(crate) async fn sleep_until(&self, deadline: Instant) {
        loop {
            let left = deadline.saturating_since(self.now());
            if left.is_zero() {
                return;
            }
            tokio::time::sleep(left.min(SLICE)).await;
        }
    }

    pub(crate) async fn sleep(&self, duration: Duration) {
        self.sleep_until(self.now() + duration).await;
    }
}

/// The longest that any timer sleeps without looking at the boot-time clock.
pub(crate) const SLICE: Duration = Duration::from_millis(250);

#[cfg(any(target_os = "linux", target_os = "android"))]
fn boot_nanos() -> u64 {
    nanos_of(rustix::time::ClockId::Boottime)
}

#[cfg(all(unix, not(any(target_os = "linux", target_os = "android"))))]
fn boot_nanos() -> u64 {
    nanos_of(rustix::time::ClockId::Monotonic)
}

#[cfg(unix)]
fn nanos_of(clock: rustix::time::ClockId) -> u64 {
    let time = rustix::time::clock_gettime(clock);
    (time.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(time.tv_nsec as u64)
}

#[cfg(not(unix))]
fn boot_nanos() -> u64 {
    use std::sync::LazyLock;
    static START: LazyLock<std::time::Instant> = LazyLock::new(std::time::Instant::now);
    u64::try_from(START.elapsed().as_nanos()).unwrap_or(u64::MAX).saturating_add(1_000_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_advances_and_a_jump_is_seen_at_once() {
        let skew = Arc::new(AtomicU64::new(0));
        let clock = Clock::skewed(skew.clone());
        let before = clock.now();
        assert!(clock.now() >= before);
        skew.store(Duration::from_secs(10).as_nanos() as u64, Ordering::Release);
        assert!(clock.now() >= before + Duration::from_secs(10));
    }

    #[test]
    fn instants_saturate_instead_of_wrapping() {
        assert_eq!(Instant::FAR_FUTURE + Duration::MAX, Instant::FAR_FUTURE);
        assert_eq!(Instant::from_nanos(5) - Duration::from_secs(1), Instant::from_nanos(0));
        assert_eq!(Instant::from_nanos(1).saturating_since(Instant::from_nanos(9)), Duration::ZERO);
    }
}
