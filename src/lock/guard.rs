//! Guards: a hold on a mutex, as long as they live.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use super::mutex::Mutex;
use super::thread_holds::ThreadHold;
use crate::CancelToken;
use crate::client::{Txn, TxnResult};
use crate::contend::Hold as HoldCore;
use crate::error::{Error, Result};
use crate::lease::Loss;

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

/// A view of a hold that can go anywhere: it asks, and does not keep the lock.
///
/// # Example: a worker thread that stops when the lock is lost
///
/// ```
/// # use etcd_recipes::testing::EtcdServer;
/// # use etcd_recipes::{Client, Mutex};
/// # fn main() -> etcd_recipes::Result<()> {
/// # let etcd = EtcdServer::start()?;
/// # let client = Client::connect([etcd.endpoint()])?;
/// let mutex = Mutex::new(&client, "/locks/report")?;
/// let guard = mutex.lock()?;
/// let hold = guard.hold();
/// let worker = std::thread::spawn(move || {
///     let mut pages = 0;
///     while hold.is_held() && pages < 100 {
///         pages += 1;
///     }
///     pages
/// });
/// assert_eq!(worker.join().expect("the worker ends"), 100);
/// assert!(guard.unlock());
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Hold {
    core: Arc<HoldCore>,
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        debug(f, "Hold", &self.core)
    }
}

fn debug(f: &mut fmt::Formatter<'_>, name: &str, core: &HoldCore) -> fmt::Result {
    f.debug_struct(name)
        .field("key", &core.shown_key())
        .field("token", &core.token())
        .field("held", &core.is_held())
        .finish()
}

impl Hold {
    /// Whether the hold stands, by this machine's clock at the call; asks nobody. Once `false` it
    /// stays `false`.
    pub fn is_held(&self) -> bool {
        self.core.is_held()
    }

    /// The time left before the hold is lost, if no renewal counts meanwhile. Zero once it is not
    /// held.
    pub fn remaining(&self) -> Duration {
        self.core.remaining()
    }

    /// The fencing token.
    pub fn token(&self) -> i64 {
        self.core.token()
    }

    /// The fencing token.
    pub fn fencing_token(&self) -> i64 {
        self.core.token()
    }

    /// Cancelled when the hold is lost; not when it is released.
    pub fn cancel_token(&self) -> &CancelToken {
        self.core.cancel_token()
    }

    /// How it was lost, if it was.
    pub fn loss(&self) -> Option<Loss> {
        self.core.is_lost().then(|| self.core.loss().cloned()).flatten()
    }
}

macro_rules! guard_methods {
    () => {
        /// Whether the hold stands: compares this machine's boot-time clock at the call, asks
        /// nobody, allocates nothing. While it says `true`, no rival has been let in because of
        /// an expiry, a partition, a restart of etcd or a pause of this process. Once `false` it
        /// stays `false`.
        pub fn is_held(&self) -> bool {
            self.core().is_held()
        }

        /// The time left before the hold is lost, if no renewal counts meanwhile. Zero once it is
        /// not held.
        pub fn remaining(&self) -> Duration {
            self.core().remaining()
        }

        /// The fencing token: the key's create revision. It grows from hold to hold on this path,
        /// across processes, restarts and languages, as long as etcd keeps its data.
        pub fn fencing_token(&self) -> i64 {
            self.core().token()
        }

        /// Cancelled when the hold is lost; not when it is released.
        pub fn cancel_token(&self) -> &CancelToken {
            self.core().cancel_token()
        }

        /// The key that stands in etcd for this hold.
        pub fn lock_key(&self) -> String {
            self.core().shown_key()
        }

        /// How it was lost, if it was.
        pub fn loss(&self) -> Option<Loss> {
            self.core().is_lost().then(|| self.core().loss().cloned()).flatten()
        }

        /// A view of the hold for other threads.
        pub fn hold(&self) -> Hold {
            Hold { core: self.core().clone() }
        }

        /// Asks etcd whether the key still stands. `Ok(false)` if it does not, and then the hold
        /// is lost here too.
        ///
        /// # Errors
        ///
        /// `Unreachable` after the operation timeout, `Interrupted`, `Closed`, `Forked`.
        pub fn verify(&self) -> Result<bool> {
            self.core().verify()
        }

        /// Writes a key if the hold stands, decided inside etcd. `Ok(false)`: fenced, nothing was
        /// written; a lost hold answers so at once.
        ///
        /// # Errors
        ///
        /// `OutcomeUnknown` if the write was sent and not answered; `Unreachable`,
        /// `PermissionDenied`, `Rejected`, `Interrupted`, `Closed`, `Forked`.
        pub fn put(&self, key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>) -> Result<bool> {
            let key = self.mutex().core().physical(&key.into());
            let put = etcd_client::TxnOp::put(key.clone(), value.into(), None);
            Ok(self.core().guarded("guard.put", key, vec![put])?.is_some())
        }

        /// Runs a transaction if the hold stands, decided inside etcd together with the caller's
        /// own compares. A lost hold answers [`FencedTxn::Fenced`] at once.
        ///
        /// # Errors
        ///
        /// As [`put`](Self::put).
        pub fn txn(&self, txn: Txn) -> Result<FencedTxn> {
            let core = self.mutex().core().clone();
            let inner = etcd_client::TxnOp::txn(txn.for_etcd(&core));
            let Some(response) = self.core().guarded("guard.txn", Vec::new(), vec![inner])? else {
                return Ok(FencedTxn::Fenced);
            };
            match TxnResult::from_etcd(&core, &response).nested() {
                Some(result) if result.succeeded => Ok(FencedTxn::Applied(result)),
                Some(result) => Ok(FencedTxn::CompareFailed(result)),
                None => {
                    Err(Error::internal("a guarded transaction answered without its inner one"))
                }
            }
        }
    };
}

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
    done: bool,
    /// As std's guard: bound to its thread, but fit to be looked at from others.
    bound: PhantomData<std::sync::MutexGuard<'static, ()>>,
}

impl<'a> MutexGuard<'a> {
    pub(super) fn new(mutex: &'a Mutex, held: Arc<ThreadHold>) -> MutexGuard<'a> {
        MutexGuard { mutex, held, done: false, bound: PhantomData }
    }

    pub(super) fn core(&self) -> &Arc<HoldCore> {
        &self.held.hold
    }

    fn mutex(&self) -> &Mutex {
        self.mutex
    }

    guard_methods!();

    /// Releases, and says whether the hold stood until now: `false` if it had been lost, or if
    /// etcd answers that its key was gone. With re-entries, each inner call only says whether the
    /// hold stands, and the last one releases. Never an error, never interrupted, and with etcd
    /// away back within 2 s (the rest is done in the background).
    pub fn unlock(mut self) -> bool {
        self.done = true;
        self.end()
    }

    fn end(&self) -> bool {
        if self.core().is_forked() {
            return false;
        }
        if self.held.leave() { self.mutex.release(self.core()) } else { self.core().is_held() }
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
        debug(f, "MutexGuard", self.core())
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
    hold: Arc<HoldCore>,
    done: bool,
}

impl OwnedMutexGuard {
    pub(super) fn new(mutex: Mutex, hold: Arc<HoldCore>) -> OwnedMutexGuard {
        OwnedMutexGuard { mutex, hold, done: false }
    }

    fn core(&self) -> &Arc<HoldCore> {
        &self.hold
    }

    fn mutex(&self) -> &Mutex {
        &self.mutex
    }

    guard_methods!();

    /// Releases, and says whether the hold stood until now; see [`MutexGuard::unlock`].
    pub fn unlock(mut self) -> bool {
        self.done = true;
        self.mutex.release(&self.hold)
    }
}

impl Drop for OwnedMutexGuard {
    fn drop(&mut self) {
        if !self.done {
            self.mutex.release(&self.hold);
        }
    }
}

impl fmt::Debug for OwnedMutexGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        debug(f, "OwnedMutexGuard", &self.hold)
    }
}
