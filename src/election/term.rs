//! One term of leadership, from the moment in which it is won to its end.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::cancel::{CancelToken, Hook};
use crate::client::Txn;
use crate::contend::Hold;
use crate::error::Result;
use crate::lease::Loss;
use crate::lock::FencedTxn;
use crate::lock::base::LockBase;
use crate::lock::guard::{put_if_held, txn_if_held};

/// One term of leadership; its clones are one.
///
/// The number of a term is its [fencing token](LeadershipTerm::fencing_token): it grows from leader
/// to leader of a path, across processes, restarts and languages, as long as etcd keeps its data.
///
/// # Example: work that ends with the term
///
/// ```
/// use std::time::Duration;
/// use etcd_recipes::LeadershipTerm;
///
/// fn work(term: &LeadershipTerm) -> etcd_recipes::Result<()> {
///     while term.is_leader() {
///         if !term.put("/jobs/heartbeat", "alive")? {
///             break;
///         }
///         term.sleep(Duration::from_secs(1))?;
///     }
///     Ok(())
/// }
/// ```
#[derive(Clone)]
pub struct LeadershipTerm {
    inner: Arc<Term>,
}

struct Term {
    /// As a guard does, a term keeps its client open.
    _base: Arc<LockBase>,
    hold: Arc<Hold>,
    /// Somebody has asked for the end: the leader is none from then on, whatever etcd says.
    asked_to_end: AtomicBool,
    /// Cancelled when the term is over, in any way.
    over: CancelToken,
    /// What interrupts the leader.
    scope: CancelToken,
    /// Cancelled when the leader's own code has ended, where there is such code.
    work: CancelToken,
    loss: Mutex<Option<Hook>>,
}

impl LeadershipTerm {
    /// `interrupt`: whether a loss cancels the term's scope.
    pub(super) fn begin(base: &Arc<LockBase>, hold: Arc<Hold>, interrupt: bool) -> LeadershipTerm {
        let (over, scope) = (CancelToken::new(), CancelToken::new());
        let lost = {
            let (over, scope) = (over.clone(), scope.clone());
            move || {
                over.cancel();
                if interrupt {
                    scope.cancel();
                }
            }
        };
        let term = LeadershipTerm {
            inner: Arc::new(Term {
                _base: base.clone(),
                hold: hold.clone(),
                asked_to_end: AtomicBool::new(false),
                over,
                scope,
                work: CancelToken::new(),
                loss: Mutex::new(None),
            }),
        };
        let hook = hold.cancel_token().on_cancel(lost);
        *term.inner.loss.lock() = Some(hook);
        term
    }

    pub(super) fn hold(&self) -> &Arc<Hold> {
        &self.inner.hold
    }

    /// Ends it by the leader's will. The key stays until the work has ended.
    pub(super) fn end(&self) {
        self.inner.asked_to_end.store(true, Ordering::Release);
        self.inner.over.cancel();
        self.inner.scope.cancel();
    }

    /// From now on the key is for code of the leader's, which must have ended before it may go.
    pub(super) fn work_begins(&self) {
        self.inner.hold.protect(&self.inner.work);
    }

    /// That code has ended.
    pub(super) fn work_ended(&self) {
        self.inner.work.cancel();
    }

    /// Whether the leadership stands: compares this machine's boot-time clock at the call, asks
    /// nobody. While it says `true`, no rival leads because of an expiry, a partition, a restart
    /// of etcd or a pause of this process. Once `false` it stays `false`.
    pub fn is_leader(&self) -> bool {
        !self.inner.asked_to_end.load(Ordering::Acquire) && self.inner.hold.is_held()
    }

    /// The time left before the leadership is lost, if no renewal counts meanwhile. Zero once it
    /// is over.
    pub fn remaining(&self) -> Duration {
        if self.is_leader() { self.inner.hold.remaining() } else { Duration::ZERO }
    }

    /// The number of the term: the key's create revision.
    pub fn fencing_token(&self) -> i64 {
        self.inner.hold.token()
    }

    /// The key that stands in etcd for this candidate.
    pub fn lock_key(&self) -> String {
        self.inner.hold.shown_key()
    }

    /// How the leadership was lost, if it was.
    pub fn loss(&self) -> Option<Loss> {
        self.inner.hold.is_lost().then(|| self.inner.hold.loss().cloned()).flatten()
    }

    /// Cancelled when the term ends: lost, resigned or closed. A callback runs in its scope. With
    /// `interrupt_on_lease_loss(false)` a loss does not cancel it.
    pub fn cancel_token(&self) -> &CancelToken {
        &self.inner.scope
    }

    /// Blocks until the term is over, whether lost, resigned or closed.
    ///
    /// # Errors
    ///
    /// `Interrupted` when another scope of the thread was cancelled while the term goes on.
    pub fn wait_until_finished(&self) -> Result<()> {
        match self.inner.over.wait() {
            Err(_) if self.inner.over.is_cancelled() => Ok(()),
            waited => waited,
        }
    }

    /// Blocks until the term is over (`true`) or `limit` has passed (`false`).
    ///
    /// # Errors
    ///
    /// As [`wait_until_finished`](LeadershipTerm::wait_until_finished).
    pub fn wait_until_finished_for(&self, limit: Duration) -> Result<bool> {
        match self.inner.over.wait_for(limit) {
            Err(_) if self.inner.over.is_cancelled() => Ok(true),
            waited => waited,
        }
    }

    /// Sleeps, unless the term's [`cancel_token`](LeadershipTerm::cancel_token) or a scope of the
    /// thread is cancelled.
    ///
    /// # Errors
    ///
    /// `Interrupted` when the sleep was cut short, or would have been.
    pub fn sleep(&self, duration: Duration) -> Result<()> {
        self.inner.scope.sleep(duration)
    }

    /// Asks etcd whether the key still stands. `Ok(false)` if it does not, and then the leadership
    /// is lost here too.
    ///
    /// # Errors
    ///
    /// `Unreachable` after the operation timeout, `Interrupted`, `Closed`, `Forked`.
    pub fn verify(&self) -> Result<bool> {
        Ok(self.inner.hold.verify()? && self.is_leader())
    }

    /// Writes a key if the leadership stands, decided inside etcd. `Ok(false)`: fenced, nothing
    /// was written; a term that is over answers so at once.
    ///
    /// # Errors
    ///
    /// As [`MutexGuard::put`](crate::MutexGuard::put).
    pub fn put(&self, key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>) -> Result<bool> {
        if self.inner.asked_to_end.load(Ordering::Acquire) {
            return Ok(false);
        }
        let holds = vec![self.inner.hold.clone()];
        put_if_held("term.put", holds, key.into(), value.into())
    }

    /// Runs a transaction if the leadership stands, decided inside etcd together with the caller's
    /// own compares. A term that is over answers [`FencedTxn::Fenced`] at once.
    ///
    /// # Errors
    ///
    /// As [`put`](LeadershipTerm::put).
    pub fn txn(&self, txn: Txn) -> Result<FencedTxn> {
        if self.inner.asked_to_end.load(Ordering::Acquire) {
            return Ok(FencedTxn::Fenced);
        }
        txn_if_held("term.txn", vec![self.inner.hold.clone()], txn)
    }

    /// Publishes a value as the leader's proposal, if the leadership stands, decided inside etcd.
    /// Observers see it with this term; `etcdctl elect --listen` prints it. `Ok(false)`: fenced,
    /// nothing was written.
    ///
    /// # Errors
    ///
    /// As [`put`](LeadershipTerm::put).
    pub fn proclaim(&self, value: impl Into<Vec<u8>>) -> Result<bool> {
        if self.inner.asked_to_end.load(Ordering::Acquire) {
            return Ok(false);
        }
        let hold = &self.inner.hold;
        let key = hold.key().to_vec();
        let options = etcd_client::PutOptions::new().with_lease(hold.lease());
        let put = etcd_client::TxnOp::put(key.clone(), value.into(), Some(options));
        Ok(hold.guarded("term.proclaim", key, vec![put])?.is_some())
    }
}

impl fmt::Debug for LeadershipTerm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeadershipTerm")
            .field("key", &self.lock_key())
            .field("term", &self.fencing_token())
            .field("leader", &self.is_leader())
            .finish()
    }
}
