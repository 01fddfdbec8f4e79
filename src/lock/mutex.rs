//! The mutex: one holder among all processes that name the same path.

use std::sync::Arc;
use std::time::Duration;

use super::base::{LockBase, lock_surface};
use super::guard::{MutexGuard, OwnedMutexGuard};
use super::options::{LockOptions, lock_options, max_hold_option};
use super::thread_holds::{Side, ThreadHold};
use crate::client::Client;
use crate::contend::ContenderMode::Exclusive;
use crate::contend::{ContenderInfo, Hold, Layout};
use crate::error::Result;
use crate::lease::Loss;

/// Hears of lost holds, for those who prefer a type to a closure.
pub trait LossListener: Send + Sync + 'static {
    /// Runs on the mutex's healer thread.
    fn on_loss(&self, loss: &Loss);
}

/// A lock on a path in etcd, shared by every process that names it.
///
/// Cheap to clone; clones are one mutex, and re-entry is counted per mutex and thread: a thread
/// that locks again what it holds gets another guard of the same hold. Two mutexes made for one
/// path exclude each other like strangers, also on one thread. Waiters are served in the order in
/// which their keys were created. An uncontended lock and unlock are one request each.
///
/// # Losing it
///
/// A hold hangs on a lease that the client renews in the background. When no renewal has counted
/// by the local deadline (the send of the last one + TTL − margin, on a clock that goes on while
/// the machine sleeps), when the lease or the key is gone, or when the key is written over, the
/// hold is lost for good: [`is_held`](MutexGuard::is_held) turns `false`, the guard's cancel token
/// fires, the loss listeners run, the connection state is `Lost`, and
/// [`unlock`](MutexGuard::unlock) returns `false`. Nothing is interrupted unless
/// [`interrupt_on_lock_loss`](MutexBuilder::interrupt_on_lock_loss) asks for it. A rival gets in
/// only after that, save where this machine cannot know in time: an operator deletes the key or
/// revokes the lease, etcd loses its data, or the machine's clock is stopped from outside. For
/// those there is the [fencing token](MutexGuard::fencing_token) and the guarded
/// [`put`](MutexGuard::put) and [`txn`](MutexGuard::txn).
///
/// # Differences from `std::sync::Mutex` and `parking_lot::Mutex`
///
/// It protects a path, not a value; locking can fail; it is reentrant; it is fair; it is not
/// poisoned by a panic; and a guard can lose what it guards.
///
/// # Differences from Go's `concurrency.Mutex` and `etcdctl lock`
///
/// The keys are the same, so they exclude each other. Here a waiter whose lease died queues anew
/// instead of failing, threads of one process exclude each other, and the holder is told of a
/// loss before a rival can be inside.
///
/// # Example: a section that one process at a time may enter
///
/// ```
/// # use etcd_recipes::testing::EtcdServer;
/// use etcd_recipes::{Client, Mutex};
///
/// # fn main() -> etcd_recipes::Result<()> {
/// # let etcd = EtcdServer::start()?;
/// # let endpoint = etcd.endpoint();
/// let client = Client::connect([endpoint])?;
/// let mutex = Mutex::new(&client, "/locks/orders")?;
///
/// let guard = mutex.lock()?;
/// assert!(guard.put("/orders/next", "17")?, "written only while the lock is ours");
/// assert!(guard.unlock(), "held to the end");
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Mutex {
    base: Arc<LockBase>,
}

lock_surface!(Mutex);

/// Options of a [`Mutex`]; each states its default.
///
/// # Example: a short lease, and a thread that is interrupted when it ends
///
/// ```
/// # use etcd_recipes::{Client, Mutex};
/// # use std::time::Duration;
/// # fn main() -> etcd_recipes::Result<()> {
/// # let client = Client::connect(["http://127.0.0.1:2379"])?;
/// let mutex = Mutex::builder(&client, "/locks/orders")
///     .ttl(Duration::from_secs(5))
///     .interrupt_on_lock_loss(true)
///     .build()?;
/// # drop(mutex);
/// # Ok(()) }
/// ```
#[must_use = "a builder does nothing until `build`"]
pub struct MutexBuilder {
    options: LockOptions,
}

lock_options!(MutexBuilder);
max_hold_option!(MutexBuilder);

impl MutexBuilder {
    /// Whether the holding thread's blocking calls of this library return `Interrupted` once the
    /// hold is lost, until its outermost guard is gone. Default: `false`, since a holder is in the
    /// middle of its own code: it is told, and decides. An owned guard belongs to no thread and
    /// only carries its token.
    pub fn interrupt_on_lock_loss(mut self, interrupt: bool) -> Self {
        self.options.interrupt_on_loss = interrupt;
        self
    }

    /// Checks the options. No I/O.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` naming the value: an empty path, one with `//`, a trailing `/` or a NUL,
    /// a TTL of zero or beyond etcd's limit, one below 2 s without explicit timing, a margin of
    /// half the TTL or more, renewals that do not fit the TTL. `Closed`, `Forked`.
    pub fn build(self) -> Result<Mutex> {
        let base = self.options.build("Mutex", Layout::line, None)?;
        Ok(Mutex { base: Arc::new(base) })
    }
}

impl Mutex {
    /// A mutex with default options; see [`builder`](Mutex::builder) for the rest. No I/O.
    ///
    /// # Errors
    ///
    /// As [`MutexBuilder::build`].
    pub fn new(client: &Client, path: impl Into<String>) -> Result<Mutex> {
        Mutex::builder(client, path).build()
    }

    /// Options, then [`build`](MutexBuilder::build).
    pub fn builder(client: &Client, path: impl Into<String>) -> MutexBuilder {
        MutexBuilder { options: LockOptions::new(client, path.into()) }
    }

    pub(crate) fn base(&self) -> &LockBase {
        &self.base
    }

    // ----- acquiring --------------------------------------------------------------------------

    /// Locks, waiting as long as others hold it. On a thread that holds it already: another guard
    /// of the same hold.
    ///
    /// When the lease dies in the queue, it queues anew at the end. When etcd is silent for the
    /// whole operation timeout the call ends; nothing is left behind once etcd answers again.
    ///
    /// # Errors
    ///
    /// `Unreachable`; `Interrupted` within 100 ms of the cancellation of the thread's scope, and
    /// at once if it was cancelled before; `Lost` while a guard of a lost hold of this thread is
    /// around; `ForeignKey` naming a key without a lease that stands ahead; `PermissionDenied`,
    /// `AuthenticationFailed`, `Closed`, `Forked`.
    pub fn lock(&self) -> Result<MutexGuard<'_>> {
        if let Some(again) = self.again()? {
            return Ok(again);
        }
        let hold = self.base.acquire("mutex.lock", Exclusive, 1)?;
        Ok(self.guard(hold))
    }

    /// Locks if nobody holds the lock or waits for it. When it is busy nothing is written, and
    /// etcd's revision stays as it is.
    ///
    /// # Errors
    ///
    /// As [`lock`](Mutex::lock); `Unreachable` after the operation timeout or 5 s, whichever is
    /// less.
    pub fn try_lock(&self) -> Result<Option<MutexGuard<'_>>> {
        if let Some(again) = self.again()? {
            return Ok(Some(again));
        }
        let hold = self.base.try_acquire("mutex.try_lock", Exclusive, 1)?;
        Ok(hold.map(|hold| self.guard(hold)))
    }

    /// Locks, waiting at most this long. `Ok(None)` says that somebody was ahead all the time.
    /// The limit governs the wait, not the hold.
    ///
    /// # Errors
    ///
    /// As [`lock`](Mutex::lock); `Unreachable` also when the limit passed before etcd answered.
    pub fn try_lock_for(&self, limit: Duration) -> Result<Option<MutexGuard<'_>>> {
        if let Some(again) = self.again()? {
            return Ok(Some(again));
        }
        let hold = self.base.acquire_for("mutex.try_lock_for", Exclusive, 1, limit)?;
        Ok(hold.map(|hold| self.guard(hold)))
    }

    /// As [`lock`](Mutex::lock), for a guard that belongs to no thread. Not reentrant.
    ///
    /// # Errors
    ///
    /// As [`lock`](Mutex::lock), save `Lost`.
    pub fn lock_owned(&self) -> Result<OwnedMutexGuard> {
        let hold = self.base.acquire("mutex.lock_owned", Exclusive, 1)?;
        Ok(OwnedMutexGuard::new(self.clone(), hold))
    }

    /// As [`try_lock`](Mutex::try_lock), for a guard that belongs to no thread. Not reentrant.
    ///
    /// # Errors
    ///
    /// As [`try_lock`](Mutex::try_lock), save `Lost`.
    pub fn try_lock_owned(&self) -> Result<Option<OwnedMutexGuard>> {
        let hold = self.base.try_acquire("mutex.try_lock_owned", Exclusive, 1)?;
        Ok(hold.map(|hold| OwnedMutexGuard::new(self.clone(), hold)))
    }

    /// As [`try_lock_for`](Mutex::try_lock_for), for a guard that belongs to no thread. Not
    /// reentrant.
    ///
    /// # Errors
    ///
    /// As [`try_lock_for`](Mutex::try_lock_for), save `Lost`.
    pub fn try_lock_owned_for(&self, limit: Duration) -> Result<Option<OwnedMutexGuard>> {
        let hold = self.base.acquire_for("mutex.try_lock_owned_for", Exclusive, 1, limit)?;
        Ok(hold.map(|hold| OwnedMutexGuard::new(self.clone(), hold)))
    }

    /// Locks, runs `section`, unlocks, and says if the hold did not last.
    ///
    /// # Errors
    ///
    /// Those of [`lock`](Mutex::lock), before `section` has run; `Lost` if the hold was lost while
    /// it ran: what it did may have overlapped with a rival, and its result is dropped.
    ///
    /// # Panics
    ///
    /// If `section` panics; the lock is released.
    pub fn with_lock<R>(&self, section: impl FnOnce(&MutexGuard<'_>) -> R) -> Result<R> {
        let guard = self.lock()?;
        let result = section(&guard);
        let hold = guard.view().hold.clone();
        if guard.unlock() { Ok(result) } else { Err(hold.lost_error()) }
    }

    /// A guard of the hold that this thread has already.
    fn again(&self) -> Result<Option<MutexGuard<'_>>> {
        let Some(held) = ThreadHold::find(self.base.number) else { return Ok(None) };
        self.base.core().check_usable()?;
        if !held.hold.is_held() {
            return Err(held.hold.lost_error());
        }
        held.enter_again(Side::Exclusive);
        Ok(Some(MutexGuard::new(self, held)))
    }

    fn guard(&self, hold: Arc<Hold>) -> MutexGuard<'_> {
        let Mutex { base } = self;
        let held = ThreadHold::begin(base.number, hold, Side::Exclusive, base.interrupt_on_loss);
        MutexGuard::new(self, held)
    }

    /// Releases a guard; the same as [`MutexGuard::unlock`].
    pub fn unlock(guard: MutexGuard<'_>) -> bool {
        guard.unlock()
    }

    // ----- looking ----------------------------------------------------------------------------

    /// Whether anybody holds the lock or waits for it, from one linearizable read.
    ///
    /// # Errors
    ///
    /// `Unreachable`, `PermissionDenied`, `Interrupted`, `Closed`, `Forked`.
    pub fn is_locked(&self) -> Result<bool> {
        Ok(!self.base.list("mutex.is_locked")?.is_empty())
    }

    /// Whether this thread has a guard whose hold stands. Asks nobody.
    pub fn is_held_by_current_thread(&self) -> bool {
        ThreadHold::find(self.base.number).is_some_and(|held| held.hold.is_held())
    }

    /// How many guards this thread has, their hold lost or not.
    pub fn hold_count(&self) -> usize {
        ThreadHold::find(self.base.number).map_or(0, |held| held.count(Side::Exclusive))
    }

    /// Everyone who holds or waits, first to last, from one consistent read.
    ///
    /// # Errors
    ///
    /// As [`is_locked`](Mutex::is_locked).
    pub fn contenders(&self) -> Result<Vec<ContenderInfo>> {
        self.base.list("mutex.contenders")
    }
}
