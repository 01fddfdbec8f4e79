//! The moments at which etcd answers again after all of its members had failed us, for those who
//! wait to try again: their pause need not last longer than the outage.

use std::convert::Infallible;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{Mutex, Notify};

use super::call::UNREACHABLE_PAUSE;
use super::core::Core;
use super::member::{Connection, Purpose};
use crate::race::{Either, race};
use crate::resilience::random_unit;

/// Whoever waited for etcd, in however many processes, comes back within this time of its return,
/// and not all in one moment.
const SPREAD: Duration = Duration::from_millis(100);

/// How long etcd may take to answer the question whether it is there. A connection on which it
/// does not is given up, so this is also how long one that died in the outage is waited for.
const ASK_LIMIT: Duration = Duration::from_millis(500);

/// Counts the returns, and wakes those who wait for one.
#[derive(Default)]
pub(crate) struct Returns {
    count: AtomicU64,
    notify: Notify,
    /// Held by the one who asks whether etcd is back, for all who wait.
    asking: Mutex<()>,
}

impl Returns {
    /// How often etcd has come back so far.
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Ordering::Acquire)
    }

    pub(super) fn announce(&self) {
        self.count.fetch_add(1, Ordering::AcqRel);
        self.notify.notify_waiters();
    }

    /// Ready once etcd has come back more often than `seen` says.
    async fn beyond(&self, seen: u64) {
        loop {
            let mut notified = std::pin::pin!(self.notify.notified());
            // Registered before the count is read, so a return in between is not missed.
            notified.as_mut().enable();
            if self.count() != seen {
                return;
            }
            notified.await;
        }
    }
}

impl Core {
    /// The pause after a try that found no etcd: as long as given, or shorter if etcd has come
    /// back since `seen` was counted, or does now.
    pub(crate) async fn pause_unless_back(&self, pause: Duration, seen: u64, lease: i64) {
        let ends = self.clock.now() + pause;
        let wait = race(self.returns.beyond(seen), self.clock.sleep_until(ends));
        if let Either::First(()) = self.asking_for_etcd(lease, wait).await {
            let soon = self.clock.now() + SPREAD.mul_f64(random_unit());
            self.clock.sleep_until(ends.min(soon)).await;
        }
    }

    /// Does `work`, and meanwhile finds out when a silent etcd is back, by asking for `lease` (any
    /// will do). One asks for all: neither pauses nor requests on dead connections notice.
    pub(crate) async fn asking_for_etcd<T>(&self, lease: i64, work: impl Future<Output = T>) -> T {
        // On the heap, like every attempt.
        match race(work, Box::pin(self.ask_for_etcd(lease))).await {
            Either::First(outcome) => outcome,
            Either::Second(never) => match never {},
        }
    }

    /// Asks the silent members one after the other. An answer is announced like any other.
    async fn ask_for_etcd(&self, lease: i64) -> Infallible {
        let _turn = self.returns.asking.lock().await;
        let count = self.members.len();
        let mut member = self.pick_member();
        loop {
            if self.endpoints.lock().is_silent() {
                let limit = self.clock.now() + ASK_LIMIT.min(self.config.attempt_limit());
                let ask = |connection: Arc<Connection>| async move {
                    connection.lease().time_to_live(lease, None).await
                };
                // Why it failed, if it did, is of no interest here.
                drop(self.attempt(member, Purpose::Calls, limit, &ask).await);
                member = (member + 1) % count;
            }
            self.clock.sleep(UNREACHABLE_PAUSE / count as u32).await;
        }
    }

    /// Ready once etcd is back while `connection` is one that was given up: what was asked on it
    /// had better be asked anew.
    pub(super) async fn superseded(&self, member: usize, connection: &Connection) {
        loop {
            let seen = self.returns.count();
            self.returns.beyond(seen).await;
            if !self.members[member].is_current(Purpose::Calls, connection.number()) {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn is_ready(future: std::pin::Pin<&mut impl Future<Output = ()>>) -> bool {
        future.poll(&mut Context::from_waker(Waker::noop())) == Poll::Ready(())
    }

    #[test]
    fn a_return_wakes_everyone_who_has_not_seen_it() {
        let returns = Returns::default();
        let mut waits = [pin!(returns.beyond(0)), pin!(returns.beyond(0))];
        assert!(waits.iter_mut().all(|wait| !is_ready(wait.as_mut())));
        returns.announce();
        assert!(waits.iter_mut().all(|wait| is_ready(wait.as_mut())));
        assert!(is_ready(pin!(returns.beyond(0))), "it happened before the wait");
        assert!(!is_ready(pin!(returns.beyond(returns.count()))), "seen already");
    }
}
