//! The one place where a calling thread parks.
//!
//! Whatever blocks comes through here, so interruption, closing and time limits mean the same in
//! every call. A value wins over any reason to stop: what has arrived is never thrown away.

use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use crate::cancel::{self, CancelToken, Hook};
use crate::clock::{Clock, Instant, SLICE};

/// What a waiting thread sleeps on; a notification that comes before the sleep is kept.
#[derive(Default)]
pub(crate) struct Parker {
    notified: Mutex<bool>,
    condvar: Condvar,
}

impl Parker {
    pub(crate) fn new() -> Arc<Parker> {
        Arc::new(Parker::default())
    }

    /// Wakes the waiting thread, or the next one that is about to wait.
    pub(crate) fn notify(&self) {
        *self.notified.lock() = true;
        self.condvar.notify_all();
    }

    /// Sleeps until notified or, with a deadline, for one slice at most.
    fn park(&self, clock: &Clock, limit: Option<Instant>) {
        let mut notified = self.notified.lock();
        if !*notified {
            match limit {
                None => self.condvar.wait(&mut notified),
                Some(limit) => {
                    let left = limit.saturating_since(clock.now());
                    self.condvar.wait_for(&mut notified, left.min(SLICE));
                }
            }
        }
        *notified = false;
    }
}

/// Why a wait ended without a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stop {
    /// A scope of the calling thread was cancelled.
    Interrupted,
    /// The token at this index of `closed` was cancelled.
    Closed(usize),
    /// The limit passed.
    Limit,
}

/// Parks the calling thread until `poll` gives a value, its scope is cancelled, one of `closed`
/// is cancelled or `limit` has passed; in that order where several are true.
///
/// `op` names the call and is always a literal: the table of outcomes has a row for each.
pub(crate) fn wait<T>(
    op: &'static str,
    clock: &Clock,
    limit: Option<Instant>,
    closed: &[&CancelToken],
    parker: &Arc<Parker>,
    poll: impl FnMut() -> Option<T>,
) -> Result<T, Stop> {
    wait_on(op, clock, limit, &cancel::active(), closed, parker, poll)
}

/// As [`wait`], but deaf to the thread's scope: for releasing and closing.
pub(crate) fn wait_shielded<T>(
    op: &'static str,
    clock: &Clock,
    limit: Option<Instant>,
    closed: &[&CancelToken],
    parker: &Arc<Parker>,
    poll: impl FnMut() -> Option<T>,
) -> Result<T, Stop> {
    wait_on(op, clock, limit, &[], closed, parker, poll)
}

fn wait_on<T>(
    op: &'static str,
    clock: &Clock,
    limit: Option<Instant>,
    scope: &[CancelToken],
    closed: &[&CancelToken],
    parker: &Arc<Parker>,
    mut poll: impl FnMut() -> Option<T>,
) -> Result<T, Stop> {
    debug_assert!(!op.is_empty(), "a wait without a name");
    let _wake_me: Vec<Hook> = scope
        .iter()
        .chain(closed.iter().copied())
        .map(|token| {
            let parker = parker.clone();
            token.on_cancel(move || parker.notify())
        })
        .collect();
    let stop = || {
        if scope.iter().any(CancelToken::is_cancelled) {
            return Some(Stop::Interrupted);
        }
        if let Some(index) = closed.iter().position(|token| token.is_cancelled()) {
            return Some(Stop::Closed(index));
        }
        limit.filter(|limit| clock.now() >= *limit).map(|_| Stop::Limit)
    };
    loop {
        if let Some(value) = poll() {
            return Ok(value);
        }
        if let Some(stop) = stop() {
            // The value may have come between the poll and the look at the reasons to stop.
            return poll().ok_or(stop);
        }
        parker.park(clock, limit);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::time::{Duration, Instant as Wall};

    use super::*;

    fn never() -> Option<()> {
        None
    }

    #[test]
    fn a_notification_before_the_wait_is_not_lost() {
        let parker = Parker::new();
        let ready = AtomicBool::new(false);
        parker.notify();
        let mut polls = 0;
        let answer = wait("test", &Clock::default(), None, &[], &parker, || {
            polls += 1;
            // Set after the first look, as a racing thread would: only the kept notification
            // makes the wait look again.
            ready.swap(true, Ordering::Relaxed).then_some(7)
        });
        assert_eq!(answer, Ok(7));
        assert_eq!(polls, 2);
    }

    #[test]
    fn a_value_wins_over_every_reason_to_stop() {
        let token = CancelToken::new();
        token.cancel();
        let clock = Clock::default();
        let past = Some(Instant::from_nanos(0));
        let answer =
            token.scope(|| wait("test", &clock, past, &[&token], &Parker::new(), || Some("value")));
        assert_eq!(answer, Ok("value"));

        let mut polls = 0;
        let late = wait("test", &clock, past, &[&token], &Parker::new(), || {
            polls += 1;
            (polls == 2).then_some("came between")
        });
        assert_eq!(late, Ok("came between"));
    }

    #[test]
    fn interrupted_comes_before_closed_and_closed_before_the_limit() {
        let token = CancelToken::new();
        token.cancel();
        let open = CancelToken::new();
        let clock = Clock::default();
        let past = Some(Instant::from_nanos(0));
        let parker = Parker::new();
        let closed = [&open, &token];
        token.scope(|| {
            let stop = wait("test", &clock, past, &closed, &parker, never);
            assert_eq!(stop, Err(Stop::Interrupted));
            let stop = wait_shielded("test", &clock, past, &closed, &parker, never);
            assert_eq!(stop, Err(Stop::Closed(1)));
        });
        let stop = wait("test", &clock, past, &[&open], &parker, never);
        assert_eq!(stop, Err(Stop::Limit));
    }

    #[test]
    fn the_limit_follows_the_boot_time_clock() {
        let skew = Arc::new(AtomicU64::new(0));
        let clock = Clock::skewed(skew.clone());
        let limit = clock.now() + Duration::from_secs(3600);
        let begun = Wall::now();
        let waiter = std::thread::spawn(move || {
            wait("test", &clock, Some(limit), &[], &Parker::new(), never)
        });
        skew.store(Duration::from_secs(3601).as_nanos() as u64, Ordering::Release);
        assert_eq!(waiter.join().unwrap(), Err(Stop::Limit));
        assert!(begun.elapsed() < Duration::from_secs(5));
    }

    #[test]
    fn a_short_limit_is_kept() {
        let clock = Clock::default();
        let begun = clock.now();
        let limit = begun + Duration::from_millis(20);
        let stop = wait("test", &clock, Some(limit), &[], &Parker::new(), never);
        assert_eq!(stop, Err(Stop::Limit));
        assert!(clock.now() >= limit);
        assert!(clock.now().saturating_since(begun) < Duration::from_millis(220));
    }

    #[test]
    fn closing_from_another_thread_wakes_an_unlimited_wait() {
        let token = CancelToken::new();
        let waiter = std::thread::spawn({
            let token = token.clone();
            move || wait("test", &Clock::default(), None, &[&token], &Parker::new(), never)
        });
        token.cancel();
        assert_eq!(waiter.join().unwrap(), Err(Stop::Closed(0)));
    }
}
