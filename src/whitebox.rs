//! Counters of what is alive inside the library, so that a test can see that nothing leaks.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Healer threads that are alive, over all recipes of the process.
pub(crate) static HEALER_THREADS: Gauge = Gauge::new();

/// Exclusive sessions that are alive.
pub(crate) static SESSIONS: Gauge = Gauge::new();

/// Presence leases that are kept.
pub(crate) static PRESENCES: Gauge = Gauge::new();

/// Clients whose shared part is still in memory.
pub(crate) static CLIENTS: Gauge = Gauge::new();

/// Threads that drive I/O.
pub(crate) static IO_THREADS: Gauge = Gauge::new();

/// Watches that are kept going.
pub(crate) static WATCHES: Gauge = Gauge::new();

/// Contended paths whose queue is mirrored.
pub(crate) static QUEUES: Gauge = Gauge::new();

/// Exclusive holds, released and lost ones included as long as somebody has them.
pub(crate) static HOLDS: Gauge = Gauge::new();

/// Cancel tokens.
pub(crate) static TOKENS: Gauge = Gauge::new();

/// How many of something are alive.
pub(crate) struct Gauge(AtomicUsize);

impl Gauge {
    pub(crate) const fn new() -> Gauge {
        Gauge(AtomicUsize::new(0))
    }

    /// Counts one more until the guard is dropped.
    pub(crate) fn enter(&self) -> GaugeGuard<'_> {
        self.0.fetch_add(1, Ordering::Relaxed);
        GaugeGuard(self)
    }

    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn get(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// One of the things a [`Gauge`] counts.
pub(crate) struct GaugeGuard<'a>(&'a Gauge);

impl Drop for GaugeGuard<'_> {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gauge_counts_what_is_alive() {
        static GAUGE: Gauge = Gauge::new();
        let first = GAUGE.enter();
        let second = GAUGE.enter();
        assert_eq!(GAUGE.get(), 2);
        drop(first);
        assert_eq!(GAUGE.get(), 1);
        drop(second);
        assert_eq!(GAUGE.get(), 0);
    }
}
