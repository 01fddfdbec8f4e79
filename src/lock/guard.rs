//! Guards of a mutex, and what the guards of all locks can do.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use super::mutex::Mutex;
use super::thread_holds::{Leave, Side, ThreadHold};
use super::view::View;
use crate::client::{Txn, TxnResult};
use crate::contend::{Hold as HoldCore, guarded};
use crate::error::{Error, Result};

/// What came of a guarded transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "a fenced transaction has written nothing"]
pub enum FencedTxn {
    /// The hold stood and every compare held.
    Applied(TxnResult),
    /// The hold stood, a compare of the caller's did not hold; the `or_else` operations ran.
    CompareFailed(TxnResult),
    /// The hold no longer stands in etcd; nothing was done.
    Fenced,
}

/// Writes a key if all the holds stand; `false`: fenced, nothing was written.
pub(crate) fn put_if_held(
    op: &'static str,
    holds: Vec<Arc<HoldCore>>,
    key: Vec<u8>,
    value: Vec<u8>,
) -> Result<bool> {
    let Some(lead) = holds.first().map(|hold| hold.contender().clone()) else { return Ok(false) };
    let key = lead.core.physical(&key);
    let put = etcd_client::TxnOp::put(key.clone(), value, None);
    Ok(guarded(op, &lead.recipe, holds, key, vec![put])?.is_some())
}

/// Runs the caller's own transaction if all the holds stand.
pub(crate) fn txn_if_held(
    op: &'static str,
    holds: Vec<Arc<HoldCore>>,
    txn: Txn,
) -> Result<FencedTxn> {
    let Some(lead) = holds.first().map(|hold| hold.contender().clone()) else {
        return Ok(FencedTxn::Fenced);
    };
    let inner = etcd_client::TxnOp::txn(txn.for_etcd(&lead.core));
    let Some(response) = guarded(op, &lead.recipe, holds, Vec::new(), vec![inner])? else {
        return Ok(FencedTxn::Fenced);
    };
    match TxnResult::from_etcd(&lead.core, &response).nested() {
        Some(result) if result.succeeded => Ok(FencedTxn::Applied(result)),
        Some(result) => Ok(FencedTxn::CompareFailed(result)),
        None => Err(Error::internal("a guarded transaction answered without its inner one")),
    }
}

/// What every guard can tell. The guard has a method `view`.
macro_rules! guard_methods {
    () => {
        /// Whether the hold stands: compares this machine's boot-time clock at the call, asks
        /// nobody, allocates nothing. While it says `true`, nobody whom it keeps out has been let
        /// in because of an expiry, a partition, a restart of etcd or a pause of this process.
        /// Once `false` it stays `false`.
        pub fn is_held(&self) -> bool {
            self.view().is_held()
        }

        /// The time left before the hold is lost, if no renewal counts meanwhile. Zero once it is
        /// not held.
        pub fn remaining(&self) -> std::time::Duration {
            self.view().remaining()
        }

        /// Cancelled when the hold is lost; not when it is released.
        pub fn cancel_token(&self) -> &crate::CancelToken {
            self.view().hold.cancel_token()
        }

        /// The key that stands in etcd for this hold.
        pub fn lock_key(&self) -> String {
            self.view().hold.shown_key()
        }

        /// How it was lost, if it was.
        pub fn loss(&self) -> Option<crate::Loss> {
            self.view().loss()
        }

        /// Asks etcd whether the key still stands. `Ok(false)` if it does not, and then the hold
        /// is lost here too.
        ///
        /// # Errors
        ///
        /// `Unreachable` after the operation timeout, `Interrupted`, `Closed`, `Forked`.
        pub fn verify(&self) -> crate::Result<bool> {
            Ok(self.view().hold.verify()? && self.view().is_held())
        }
    };
}

/// What the guard of an exclusive hold can do. The guard has a method `view`.
macro_rules! exclusive_guard_methods {
    () => {
        /// The fencing token: the key's create revision. It grows from exclusive hold to exclusive
        /// hold on this path, across processes, restarts and languages, as long as etcd keeps its
        /// data.
        pub fn fencing_token(&self) -> i64 {
            self.view().hold.token()
        }

        /// A view of the hold for other threads.
        pub fn hold(&self) -> crate::Hold {
            crate::Hold { view: self.view().clone() }
        }

        /// Writes a key if the hold stands, decided inside etcd. `Ok(false)`: fenced, nothing was
        /// written; a lost hold answers so at once.
        ///
        /// # Errors
        ///
        /// `OutcomeUnknown` if the write was sent and not answered; `Unreachable`,
        /// `PermissionDenied`, `Rejected`, `Interrupted`, `Closed`, `Forked`.
        pub fn put(
            &self,
            key: impl Into<Vec<u8>>,
            value: impl Into<Vec<u8>>,
        ) -> crate::Result<bool> {
            let holds = vec![self.view().hold.clone()];
            crate::lock::guard::put_if_held("guard.put", holds, key.into(), value.into())
        }

        /// Runs a transaction if the hold stands, decided inside etcd together with the caller's
        /// own compares. A lost hold answers [`FencedTxn::Fenced`](crate::FencedTxn::Fenced) at
        /// once.
        ///
        /// # Errors
        ///
        /// As [`put`](Self::put).
        pub fn txn(&self, txn: crate::Txn) -> crate::Result<crate::FencedTxn> {
            let holds = vec![self.view().hold.clone()];
            crate::lock::guard::txn_if_held("guard.txn", holds, txn)
        }
    };
}

pub(super) use {exclusive_guard_methods, guard_methods};

/// A hold of the current thread, released when the last guard of its re-entries is dropped.
///
/// It stays on its thread; [`hold`](MutexGuard::hold) gives a view for others, and
/// [`Mutex::lock_owned`] a guard that can move.
///
/// Dropping releases without saying whether the hold had been lost meanwhile; `unlock` says it.
/// Neither waits longer than 2 s for an etcd that is away: the rest is done in the background.
/// A guard that is leaked keeps its lock for as long as the client lives.
#[must_use = "the lock is released as soon as the guard is dropped"]
pub struct MutexGuard<'a> {
    mutex: &'a Mutex,
    held: Arc<ThreadHold>,
    view: View,
    done: bool,
    /// As std's guard: bound to its thread, but fit to be looked at from others.
    bound: PhantomData<std::sync::MutexGuard<'static, ()>>,
}

impl<'a> MutexGuard<'a> {
    pub(super) fn new(mutex: &'a Mutex, held: Arc<ThreadHold>) -> MutexGuard<'a> {
        let view = View::exclusive(held.hold.clone());
        MutexGuard { mutex, held, view, done: false, bound: PhantomData }
    }

    pub(super) fn view(&self) -> &View {
        &self.view
    }

    guard_methods!();
    exclusive_guard_methods!();

    /// Releases, and says whether the hold stood until now: `false` if it had been lost, or if
    /// etcd answers that its key was gone. With re-entries, each inner call only says whether the
    /// hold stands, and the last one releases. Never an error, never interrupted, and with etcd
    /// away back within 2 s (the rest is done in the background).
    pub fn unlock(mut self) -> bool {
        self.done = true;
        self.end()
    }

    fn end(&self) -> bool {
        if self.view.hold.is_forked() {
            return false;
        }
        match self.held.leave(Side::Exclusive) {
            Leave::Last => self.mutex.base().release(&self.view.hold),
            Leave::Inner | Leave::LastWriter => self.view.is_held(),
        }
    }
}

impl Drop for MutexGuard<'_> {
    fn drop(&mut self) {
        if !self.done {
            self.end();
        }
    }
}

impl fmt::Debug for MutexGuard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.view.debug(f, "MutexGuard")
    }
}

/// A hold that belongs to no thread: it may be stored and sent, and is released when dropped.
///
/// It is not reentrant: a second `lock` by whoever has it waits like any other contender. It is a
/// handle of its mutex and thereby of the client, so one that is leaked keeps both alive, and its
/// lock with them, until the client is closed or the process ends. One that is the client's last
/// handle closes the client when it is dropped; with etcd away that takes up to 2 s more.
#[must_use = "the lock is released as soon as the guard is dropped"]
pub struct OwnedMutexGuard {
    mutex: Mutex,
    view: View,
    done: bool,
}

impl OwnedMutexGuard {
    pub(super) fn new(mutex: Mutex, hold: Arc<HoldCore>) -> OwnedMutexGuard {
        OwnedMutexGuard { mutex, view: View::exclusive(hold), done: false }
    }

    fn view(&self) -> &View {
        &self.view
    }

    guard_methods!();
    exclusive_guard_methods!();

    /// Releases, and says whether the hold stood until now; see [`MutexGuard::unlock`].
    pub fn unlock(mut self) -> bool {
        self.done = true;
        self.mutex.base().release(&self.view.hold)
    }
}

impl Drop for OwnedMutexGuard {
    fn drop(&mut self) {
        if !self.done {
            self.mutex.base().release(&self.view.hold);
        }
    }
}

impl fmt::Debug for OwnedMutexGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.view.debug(f, "OwnedMutexGuard")
    }
}
