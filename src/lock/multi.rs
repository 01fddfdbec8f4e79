//! Several mutexes locked as one.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::guard::{FencedTxn, put_if_held, txn_if_held};
use super::mutex::Mutex;
use super::thread_holds::ThreadHold;
use super::view::{Hold, View};
use crate::CancelToken;
use crate::client::Txn;
use crate::client::core::Core;
use crate::contend::{self, ContenderMode, HoldSet, Patience, Wish};
use crate::error::{Error, ErrorKind, Result};
use crate::lease::Loss;
use crate::recipe::RecipeCore;

/// How many locks one set may have: what one transaction of etcd can hold.
const MOST: usize = 60;

/// A set of mutexes that is locked as one: all of them or none.
///
/// One transaction puts a key into every queue, so whoever came first did so everywhere, and two
/// sets that overlap cannot wait for each other in a circle. The set is held once its key is first
/// in every queue. Others may go on using the single mutexes. It is made of clones, so it borrows
/// nothing; clones of it are one set. It is not reentrant. An uncontended lock and unlock are one
/// request each, whatever the number of locks.
///
/// # Losing it
///
/// Each mutex is lost as it is alone, with its own listeners and its own
/// [`MultiLockGuard::hold`]; and with one all are lost: the others' losses have the reason
/// [`SetLost`](crate::LossReason::SetLost), their keys are removed, the guard's
/// [`is_held`](MultiLockGuard::is_held) is `false`, its cancel token fires, and
/// [`unlock`](MultiLockGuard::unlock) returns `false`. Guarded writes depend on all of them.
///
/// # Differences from `std` and `parking_lot`
///
/// They have no lock of several mutexes; with theirs the order of locking is the caller's care.
/// Here the order in which the mutexes are named is of no importance.
///
/// # Differences from Curator's `InterProcessMultiLock`
///
/// Curator locks one after the other and gives back what it has when one fails; here one
/// transaction does it, so nothing is ever half locked and nobody can deadlock.
///
/// # Example: move something from one account to the other
///
/// ```
/// # use etcd_recipes::testing::EtcdServer;
/// use etcd_recipes::{Client, MultiLock, Mutex};
///
/// # fn main() -> etcd_recipes::Result<()> {
/// # let etcd = EtcdServer::start()?;
/// # let endpoint = etcd.endpoint();
/// let client = Client::connect([endpoint])?;
/// let from = Mutex::new(&client, "/locks/accounts/7")?;
/// let to = Mutex::new(&client, "/locks/accounts/9")?;
///
/// let both = MultiLock::new([from.clone(), to.clone()])?;
/// let guard = both.lock()?;
/// assert!(guard.put("/transfers/last", "7 to 9")?, "written only while both are ours");
/// assert!(guard.unlock(), "held to the end");
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct MultiLock {
    /// In the order of their keys in etcd.
    mutexes: Arc<Vec<Mutex>>,
}

impl fmt::Debug for MultiLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.mutexes.iter()).finish()
    }
}

impl MultiLock {
    /// A set of these mutexes. No I/O.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for none, for more than 60, for two of one path, and for mutexes of
    /// different clients. `Closed`, `Forked`.
    pub fn new(mutexes: impl IntoIterator<Item = Mutex>) -> Result<MultiLock> {
        let mut mutexes: Vec<Mutex> = mutexes.into_iter().collect();
        if mutexes.is_empty() || mutexes.len() > MOST {
            return Err(Error::invalid(format!(
                "a set of {} mutexes; it takes 1 to {MOST}",
                mutexes.len()
            )));
        }
        let path = |mutex: &Mutex| mutex.base().contender.layout.entries();
        mutexes.sort_by_key(path);
        for pair in mutexes.windows(2) {
            if path(&pair[0]) == path(&pair[1]) {
                let twice = pair[0].base().recipe().path();
                return Err(Error::invalid(format!("the path `{twice}` is in the set twice")));
            }
            if !Arc::ptr_eq(pair[0].base().core(), pair[1].base().core()) {
                return Err(Error::invalid("the mutexes of a set have to be of one client"));
            }
        }
        mutexes[0].base().core().check_usable()?;
        Ok(MultiLock { mutexes: Arc::new(mutexes) })
    }

    /// The mutexes, in the order in which the set has sorted them.
    pub fn mutexes(&self) -> &[Mutex] {
        &self.mutexes
    }

    fn core(&self) -> &Arc<Core> {
        self.mutexes[0].base().core()
    }

    fn lead(&self) -> &Arc<RecipeCore> {
        &self.mutexes[0].base().contender.recipe
    }

    /// Locks all, waiting as long as others hold any of them.
    ///
    /// # Errors
    ///
    /// As [`Mutex::lock`], save `Lost`; `WouldDeadlock` at once on a thread that has a guard of
    /// one of the mutexes.
    pub fn lock(&self) -> Result<MultiLockGuard> {
        let guard = self.enter("multi.lock", Patience::Endless)?;
        guard.ok_or_else(|| Error::internal("a wait without a limit ended without a hold"))
    }

    /// Locks all if nobody holds any of them or waits for it. When one is busy nothing is written,
    /// and etcd's revision stays as it is.
    ///
    /// # Errors
    ///
    /// As [`lock`](MultiLock::lock); `Unreachable` after the operation timeout or 5 s, whichever
    /// is less.
    pub fn try_lock(&self) -> Result<Option<MultiLockGuard>> {
        self.enter("multi.try_lock", Patience::Never)
    }

    /// Locks all, waiting at most this long. `Ok(None)` says that somebody was ahead all the time.
    ///
    /// # Errors
    ///
    /// As [`lock`](MultiLock::lock); `Unreachable` also when the limit passed before etcd answered.
    pub fn try_lock_for(&self, limit: Duration) -> Result<Option<MultiLockGuard>> {
        self.enter("multi.try_lock_for", Patience::For(limit))
    }

    /// Locks all, runs `section`, unlocks, and says if the holds did not last.
    ///
    /// # Errors
    ///
    /// Those of [`lock`](MultiLock::lock), before `section` has run; `Lost` if one of the holds
    /// was lost while it ran: what it did may have overlapped with a rival, and its result is
    /// dropped.
    ///
    /// # Panics
    ///
    /// If `section` panics; the locks are released.
    pub fn with_lock<R>(&self, section: impl FnOnce(&MultiLockGuard) -> R) -> Result<R> {
        let guard = self.lock()?;
        let result = section(&guard);
        let set = guard.set.clone();
        if guard.unlock() {
            return Ok(result);
        }
        let holds = set.holds();
        let lost = holds.iter().find(|hold| hold.is_lost()).unwrap_or(&holds[0]);
        Err(lost.lost_error())
    }

    fn enter(&self, op: &'static str, patience: Patience) -> Result<Option<MultiLockGuard>> {
        let held = |mutex: &&Mutex| ThreadHold::find(mutex.base().number).is_some();
        if let Some(held) = self.mutexes.iter().find(held) {
            let identity = held.base().recipe().identity();
            return Err(Error::new(
                ErrorKind::WouldDeadlock,
                format!("{identity}: this thread holds it, so the set would wait for itself"),
            ));
        }
        let wish = |mutex: &Mutex| Wish {
            contender: mutex.base().contender.clone(),
            mode: ContenderMode::Exclusive,
            keys: 1,
        };
        let wishes = self.mutexes.iter().map(wish).collect();
        let acquired = contend::enter(self.core(), self.lead(), op, wishes, patience)?;
        Ok(acquired.map(|acquired| MultiLockGuard {
            set: HoldSet::new(acquired.into_holds()),
            locks: self.clone(),
            done: false,
        }))
    }
}

/// The holds of a whole set. They belong to no thread, and are released together when it is
/// dropped.
///
/// Dropping releases without saying whether a hold had been lost meanwhile; `unlock` says it.
/// Neither waits longer than 2 s for an etcd that is away: the rest is done in the background.
#[must_use = "the locks are released as soon as the guard is dropped"]
pub struct MultiLockGuard {
    set: Arc<HoldSet>,
    locks: MultiLock,
    done: bool,
}

impl MultiLockGuard {
    /// Whether all the holds stand, by this machine's clock at the call; asks nobody. Once `false`
    /// it stays `false`.
    pub fn is_held(&self) -> bool {
        self.set.is_held()
    }

    /// The time left before the first of them is lost, if no renewal counts meanwhile.
    pub fn remaining(&self) -> Duration {
        self.set.remaining()
    }

    /// Cancelled when one of the holds is lost; not when they are released.
    pub fn cancel_token(&self) -> &CancelToken {
        self.set.cancel_token()
    }

    /// The fencing token for one of the paths; `None` for a path that is not of the set.
    pub fn fencing_token(&self, path: &str) -> Option<i64> {
        self.hold(path).map(|hold| hold.token())
    }

    /// A view of the hold on one of the paths, for other threads.
    pub fn hold(&self, path: &str) -> Option<Hold> {
        let holds = self.locks.mutexes.iter().zip(self.set.holds());
        let (_, hold) = holds.into_iter().find(|(lock, _)| lock.base().recipe().path() == path)?;
        Some(Hold { view: View::exclusive(hold.clone()) })
    }

    /// How one of them was lost that was not lost with the set only.
    pub fn loss(&self) -> Option<Loss> {
        let lost = self.set.holds().iter().filter(|hold| hold.is_lost());
        let losses: Vec<&Loss> = lost.filter_map(|hold| hold.loss()).collect();
        let first = losses.iter().find(|loss| loss.reason != crate::LossReason::SetLost);
        first.or(losses.first()).map(|loss| (*loss).clone())
    }

    /// Asks etcd whether all the keys still stand. `Ok(false)` if one does not, and then all are
    /// lost here too.
    ///
    /// # Errors
    ///
    /// `Unreachable` after the operation timeout, `Interrupted`, `Closed`, `Forked`.
    pub fn verify(&self) -> Result<bool> {
        self.set.verify()
    }

    /// Writes a key if all the holds stand, decided inside etcd. `Ok(false)`: fenced, nothing was
    /// written; a lost set answers so at once.
    ///
    /// # Errors
    ///
    /// As [`MutexGuard::put`](crate::MutexGuard::put).
    pub fn put(&self, key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>) -> Result<bool> {
        put_if_held("multi.put", self.set.holds().to_vec(), key.into(), value.into())
    }

    /// Runs a transaction if all the holds stand, decided inside etcd together with the caller's
    /// own compares. A lost set answers [`FencedTxn::Fenced`] at once.
    ///
    /// # Errors
    ///
    /// As [`put`](MultiLockGuard::put).
    pub fn txn(&self, txn: Txn) -> Result<FencedTxn> {
        txn_if_held("multi.txn", self.set.holds().to_vec(), txn)
    }

    /// Releases all, and says whether they stood until now: `false` if one had been lost, or if
    /// etcd answers that a key was gone. Never an error, never interrupted, and with etcd away
    /// back within 2 s (the rest is done in the background).
    pub fn unlock(mut self) -> bool {
        self.done = true;
        self.end()
    }

    fn end(&self) -> bool {
        if self.locks.core().is_forked() {
            return false;
        }
        let stood = self.set.release();
        for hold in self.set.holds() {
            hold.let_go();
        }
        stood
    }
}

impl Drop for MultiLockGuard {
    fn drop(&mut self) {
        if !self.done {
            self.end();
        }
    }
}

impl fmt::Debug for MultiLockGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MultiLockGuard")
            .field("locks", &self.locks)
            .field("held", &self.is_held())
            .finish()
    }
}
