//! The time as the library sees it, and a clock that a test can push forward.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::clock::Clock;

/// Nanoseconds on the boot-time clock, the one all deadlines of the library are kept on.
///
/// It goes on while the machine sleeps. Only differences have a meaning, and they hold between
/// processes of one machine.
pub fn boot_nanos() -> u64 {
    Clock::default().now().as_nanos()
}

/// A clock that runs with the boot-time clock and jumps ahead when told to.
///
/// It lets a lease age by minutes in no time. Clones share their jumps. It never goes back.
///
/// # Example: a minute passes
///
/// ```
/// use std::time::Duration;
/// use etcd_recipes::testing::TestClock;
///
/// let clock = TestClock::new();
/// clock.jump(Duration::from_secs(60));
/// assert_eq!(clock.jumped(), Duration::from_secs(60));
/// ```
#[derive(Debug, Clone, Default)]
pub struct TestClock {
    skew: Arc<AtomicU64>,
}

impl TestClock {
    /// A clock that shows the boot time until the first [`jump`](TestClock::jump).
    pub fn new() -> TestClock {
        TestClock::default()
    }

    /// Moves the clock ahead by `step`, seen at once by everybody who reads it.
    pub fn jump(&self, step: Duration) {
        let nanos = u64::try_from(step.as_nanos()).unwrap_or(u64::MAX);
        self.skew.fetch_add(nanos, Ordering::AcqRel);
    }

    /// The sum of all jumps so far.
    pub fn jumped(&self) -> Duration {
        Duration::from_nanos(self.skew.load(Ordering::Acquire))
    }

    pub(crate) fn clock(&self) -> Clock {
        Clock::skewed(self.skew.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_jump_moves_every_clone_and_the_inner_clock() {
        let clock = TestClock::new();
        let inner = clock.clock();
        let before = inner.now();
        clock.clone().jump(Duration::from_secs(60));
        assert!(inner.now() >= before + Duration::from_secs(60));
        assert!(boot_nanos() < inner.now().as_nanos());
    }
}
