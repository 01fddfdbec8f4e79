//! The read/write lock: many readers or one writer among all processes that name the same path.

use std::sync::Arc;
use std::time::Duration;

use super::base::{LockBase, lock_surface};
use super::options::{LockOptions, lock_options, max_hold_option};
use super::rwlock_guards::{
    OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLockReadGuard, RwLockWriteGuard,
};
use super::thread_holds::{Side, ThreadHold};
use crate::client::Client;
use crate::contend::ContenderMode::{Read, Write};
use crate::contend::{ContenderInfo, Hold, Layout};
use crate::error::{Error, ErrorKind, Result};

/// A read/write lock on a path in etcd: readers share it, a writer has it alone.
///
/// It is fair: everyone is served in the order in which the keys were created, and readers share
/// it as long as no writer stands between them. So a stream of readers cannot keep a writer out. A
/// release wakes only those whom it lets in. Cheap to clone; clones are one lock. An uncontended
/// lock and unlock are one request each, and so are those of a reader beside a few others.
///
/// It is reentrant on each side, counted per lock and thread. A thread that writes may also read:
/// the read guard stands on the writer's place, and when the last write guard goes while read
/// guards are left, the hold becomes a reader's, in its place. A thread that only reads and asks to
/// write would wait for itself, and gets `WouldDeadlock`.
///
/// A mutex of the same path counts as a writer, and so does whoever else says nothing about
/// itself, such as `etcdctl lock`.
///
/// # Losing it
///
/// Both kinds of hold are lost as a [`Mutex`](crate::Mutex)'s is: the flag turns `false`, the
/// guard's cancel token fires, the loss listeners run, the connection state is `Lost`, `unlock`
/// returns `false`; nothing heals. No writer gets in while a reader's
/// [`is_held`](RwLockReadGuard::is_held) says `true`, and nobody at all while a writer's does, with
/// the exceptions that the mutex names. Those are covered by the writer's
/// [fencing token](RwLockWriteGuard::fencing_token) and its guarded
/// [`put`](RwLockWriteGuard::put) and [`txn`](RwLockWriteGuard::txn); readers overlap, so they have
/// no token and no guarded writes. What a writer's guarded writes depend on ends with a downgrade:
/// one that is still on its way then is refused.
///
/// # Differences from `std::sync::RwLock` and `parking_lot::RwLock`
///
/// It protects a path, not a value; locking can fail; it is reentrant on both sides; it is strictly
/// fair; it is not poisoned by a panic; and a guard can lose what it guards. Of `parking_lot`'s
/// lock it has the downgrade, but no upgradable read.
///
/// # Differences from the JVM library's read/write lock
///
/// The keys are not the same, so the two do not exclude each other. Here a reader may be taken
/// under the own write lock while other writers are queued, and a path never blocks another that
/// begins with the same letters.
///
/// # Example: rebuild alone, then go on reading
///
/// ```
/// # use etcd_recipes::testing::EtcdServer;
/// use etcd_recipes::{Client, RwLock, RwLockWriteGuard};
///
/// # fn main() -> etcd_recipes::Result<()> {
/// # let etcd = EtcdServer::start()?;
/// # let endpoint = etcd.endpoint();
/// let client = Client::connect([endpoint])?;
/// let index = RwLock::new(&client, "/locks/index")?;
///
/// let write = index.write()?;
/// assert!(write.put("/index/built", "17")?, "written only while we are alone");
/// let read = RwLockWriteGuard::downgrade(write).map_err(|(_, error)| error)?;
/// // … readers are let in from here on, and nobody has written in between …
/// assert!(read.unlock());
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct RwLock {
    base: Arc<LockBase>,
}

lock_surface!(RwLock);

/// Options of an [`RwLock`]; each states its default.
///
/// # Example: a short lease
///
/// ```
/// # use etcd_recipes::{Client, RwLock};
/// # use std::time::Duration;
/// # fn main() -> etcd_recipes::Result<()> {
/// # let client = Client::connect(["http://127.0.0.1:2379"])?;
/// let lock = RwLock::builder(&client, "/locks/index").ttl(Duration::from_secs(5)).build()?;
/// # drop(lock);
/// # Ok(()) }
/// ```
#[must_use = "a builder does nothing until `build`"]
pub struct RwLockBuilder {
    options: LockOptions,
}

lock_options!(RwLockBuilder);
max_hold_option!(RwLockBuilder);

impl RwLockBuilder {
    /// Whether the holding thread's blocking calls of this library return `Interrupted` once its
    /// hold, of either kind, is lost, until its outermost guard is gone. Default: `false`. An
    /// owned guard belongs to no thread and only carries its token.
    pub fn interrupt_on_lock_loss(mut self, interrupt: bool) -> Self {
        self.options.interrupt_on_loss = interrupt;
        self
    }

    /// Checks the options. No I/O.
    ///
    /// # Errors
    ///
    /// As [`MutexBuilder::build`](crate::MutexBuilder::build).
    pub fn build(self) -> Result<RwLock> {
        let base = self.options.build("RwLock", Layout::line, None)?;
        Ok(RwLock { base: Arc::new(base) })
    }
}

impl RwLock {
    /// A lock with default options; see [`builder`](RwLock::builder) for the rest. No I/O.
    ///
    /// # Errors
    ///
    /// As [`RwLockBuilder::build`].
    pub fn new(client: &Client, path: impl Into<String>) -> Result<RwLock> {
        RwLock::builder(client, path).build()
    }

    /// Options, then [`build`](RwLockBuilder::build).
    pub fn builder(client: &Client, path: impl Into<String>) -> RwLockBuilder {
        RwLockBuilder { options: LockOptions::new(client, path.into()) }
    }

    pub(super) fn base(&self) -> &LockBase {
        &self.base
    }

    // ----- reading ----------------------------------------------------------------------------

    /// Locks for reading, waiting as long as a writer has it or stands ahead in the queue. On a
    /// thread that holds it already, for reading or for writing: another guard of the same hold.
    ///
    /// When the lease dies in the queue, it queues anew at the end. When etcd is silent for the
    /// whole operation timeout the call ends; nothing is left behind once etcd answers again.
    ///
    /// # Errors
    ///
    /// As [`Mutex::lock`](crate::Mutex::lock).
    pub fn read(&self) -> Result<RwLockReadGuard<'_>> {
        if let Some(again) = self.read_again()? {
            return Ok(again);
        }
        let hold = self.base.acquire("rwlock.read", Read, 1)?;
        Ok(self.read_guard(hold))
    }

    /// Locks for reading if no writer has it or waits for it. When one does, nothing is written.
    ///
    /// # Errors
    ///
    /// As [`Mutex::try_lock`](crate::Mutex::try_lock).
    pub fn try_read(&self) -> Result<Option<RwLockReadGuard<'_>>> {
        if let Some(again) = self.read_again()? {
            return Ok(Some(again));
        }
        let hold = self.base.try_acquire("rwlock.try_read", Read, 1)?;
        Ok(hold.map(|hold| self.read_guard(hold)))
    }

    /// Locks for reading, waiting at most this long. `Ok(None)` says that somebody was in the way
    /// all the time. The limit governs the wait, not the hold.
    ///
    /// # Errors
    ///
    /// As [`Mutex::try_lock_for`](crate::Mutex::try_lock_for).
    pub fn try_read_for(&self, limit: Duration) -> Result<Option<RwLockReadGuard<'_>>> {
        if let Some(again) = self.read_again()? {
            return Ok(Some(again));
        }
        let hold = self.base.acquire_for("rwlock.try_read_for", Read, 1, limit)?;
        Ok(hold.map(|hold| self.read_guard(hold)))
    }

    /// As [`read`](RwLock::read), for a guard that belongs to no thread. Not reentrant.
    ///
    /// # Errors
    ///
    /// As [`read`](RwLock::read), save `Lost`.
    pub fn read_owned(&self) -> Result<OwnedRwLockReadGuard> {
        let hold = self.base.acquire("rwlock.read_owned", Read, 1)?;
        Ok(OwnedRwLockReadGuard::new(self.clone(), hold))
    }

    /// As [`try_read`](RwLock::try_read), for a guard that belongs to no thread. Not reentrant.
    ///
    /// # Errors
    ///
    /// As [`try_read`](RwLock::try_read), save `Lost`.
    pub fn try_read_owned(&self) -> Result<Option<OwnedRwLockReadGuard>> {
        let hold = self.base.try_acquire("rwlock.try_read_owned", Read, 1)?;
        Ok(hold.map(|hold| OwnedRwLockReadGuard::new(self.clone(), hold)))
    }

    /// As [`try_read_for`](RwLock::try_read_for), for a guard that belongs to no thread. Not
    /// reentrant.
    ///
    /// # Errors
    ///
    /// As [`try_read_for`](RwLock::try_read_for), save `Lost`.
    pub fn try_read_owned_for(&self, limit: Duration) -> Result<Option<OwnedRwLockReadGuard>> {
        let hold = self.base.acquire_for("rwlock.try_read_owned_for", Read, 1, limit)?;
        Ok(hold.map(|hold| OwnedRwLockReadGuard::new(self.clone(), hold)))
    }

    /// Locks for reading, runs `section`, unlocks, and says if the hold did not last.
    ///
    /// # Errors
    ///
    /// Those of [`read`](RwLock::read), before `section` has run; `Lost` if the hold was lost
    /// while it ran, and its result is dropped.
    ///
    /// # Panics
    ///
    /// If `section` panics; the lock is released.
    pub fn with_read<R>(&self, section: impl FnOnce(&RwLockReadGuard<'_>) -> R) -> Result<R> {
        let guard = self.read()?;
        let result = section(&guard);
        let hold = guard.view().hold.clone();
        if guard.unlock() { Ok(result) } else { Err(hold.lost_error()) }
    }

    // ----- writing ----------------------------------------------------------------------------

    /// Locks for writing, waiting as long as anybody has it or stands ahead in the queue. On a
    /// thread that holds it for writing already: another guard of the same hold.
    ///
    /// # Errors
    ///
    /// As [`Mutex::lock`](crate::Mutex::lock); `WouldDeadlock` at once on a thread that holds it
    /// for reading only.
    pub fn write(&self) -> Result<RwLockWriteGuard<'_>> {
        if let Some(again) = self.write_again()? {
            return Ok(again);
        }
        let hold = self.base.acquire("rwlock.write", Write, 1)?;
        Ok(self.write_guard(hold))
    }

    /// Locks for writing if nobody has it or waits for it. When it is busy nothing is written, and
    /// etcd's revision stays as it is.
    ///
    /// # Errors
    ///
    /// As [`Mutex::try_lock`](crate::Mutex::try_lock); `WouldDeadlock` as [`write`](RwLock::write).
    pub fn try_write(&self) -> Result<Option<RwLockWriteGuard<'_>>> {
        if let Some(again) = self.write_again()? {
            return Ok(Some(again));
        }
        let hold = self.base.try_acquire("rwlock.try_write", Write, 1)?;
        Ok(hold.map(|hold| self.write_guard(hold)))
    }

    /// Locks for writing, waiting at most this long. `Ok(None)` says that somebody was in the way
    /// all the time. The limit governs the wait, not the hold.
    ///
    /// # Errors
    ///
    /// As [`Mutex::try_lock_for`](crate::Mutex::try_lock_for); `WouldDeadlock` as
    /// [`write`](RwLock::write).
    pub fn try_write_for(&self, limit: Duration) -> Result<Option<RwLockWriteGuard<'_>>> {
        if let Some(again) = self.write_again()? {
            return Ok(Some(again));
        }
        let hold = self.base.acquire_for("rwlock.try_write_for", Write, 1, limit)?;
        Ok(hold.map(|hold| self.write_guard(hold)))
    }

    /// As [`write`](RwLock::write), for a guard that belongs to no thread. Not reentrant.
    ///
    /// # Errors
    ///
    /// As [`Mutex::lock_owned`](crate::Mutex::lock_owned).
    pub fn write_owned(&self) -> Result<OwnedRwLockWriteGuard> {
        let hold = self.base.acquire("rwlock.write_owned", Write, 1)?;
        Ok(OwnedRwLockWriteGuard::new(self.clone(), hold))
    }

    /// As [`try_write`](RwLock::try_write), for a guard that belongs to no thread. Not reentrant.
    ///
    /// # Errors
    ///
    /// As [`Mutex::try_lock_owned`](crate::Mutex::try_lock_owned).
    pub fn try_write_owned(&self) -> Result<Option<OwnedRwLockWriteGuard>> {
        let hold = self.base.try_acquire("rwlock.try_write_owned", Write, 1)?;
        Ok(hold.map(|hold| OwnedRwLockWriteGuard::new(self.clone(), hold)))
    }

    /// As [`try_write_for`](RwLock::try_write_for), for a guard that belongs to no thread. Not
    /// reentrant.
    ///
    /// # Errors
    ///
    /// As [`Mutex::try_lock_owned_for`](crate::Mutex::try_lock_owned_for).
    pub fn try_write_owned_for(&self, limit: Duration) -> Result<Option<OwnedRwLockWriteGuard>> {
        let hold = self.base.acquire_for("rwlock.try_write_owned_for", Write, 1, limit)?;
        Ok(hold.map(|hold| OwnedRwLockWriteGuard::new(self.clone(), hold)))
    }

    /// Locks for writing, runs `section`, unlocks, and says if the hold did not last.
    ///
    /// # Errors
    ///
    /// Those of [`write`](RwLock::write), before `section` has run; `Lost` if the hold was lost
    /// while it ran: what it did may have overlapped with others, and its result is dropped.
    ///
    /// # Panics
    ///
    /// If `section` panics; the lock is released.
    pub fn with_write<R>(&self, section: impl FnOnce(&RwLockWriteGuard<'_>) -> R) -> Result<R> {
        let guard = self.write()?;
        let result = section(&guard);
        let hold = guard.view().hold.clone();
        if guard.unlock() { Ok(result) } else { Err(hold.lost_error()) }
    }

    // ----- what the thread has already --------------------------------------------------------

    /// This thread's hold, if it has one; one that is lost is an error.
    fn held(&self) -> Result<Option<Arc<ThreadHold>>> {
        let Some(held) = ThreadHold::find(self.base.number) else { return Ok(None) };
        self.base.core().check_usable()?;
        if !held.hold.is_held() {
            return Err(held.hold.lost_error());
        }
        Ok(Some(held))
    }

    fn read_again(&self) -> Result<Option<RwLockReadGuard<'_>>> {
        let Some(held) = self.held()? else { return Ok(None) };
        held.enter_again(Side::Shared);
        Ok(Some(RwLockReadGuard::new(self, held)))
    }

    fn write_again(&self) -> Result<Option<RwLockWriteGuard<'_>>> {
        let Some(held) = self.held()? else { return Ok(None) };
        if held.count(Side::Exclusive) == 0 {
            let identity = self.base.recipe().identity();
            return Err(Error::new(
                ErrorKind::WouldDeadlock,
                format!("{identity}: this thread reads, so its write would wait for itself"),
            ));
        }
        held.enter_again(Side::Exclusive);
        Ok(Some(RwLockWriteGuard::new(self, held)))
    }

    fn read_guard(&self, hold: Arc<Hold>) -> RwLockReadGuard<'_> {
        RwLockReadGuard::new(self, self.begin(hold, Side::Shared))
    }

    fn write_guard(&self, hold: Arc<Hold>) -> RwLockWriteGuard<'_> {
        RwLockWriteGuard::new(self, self.begin(hold, Side::Exclusive))
    }

    fn begin(&self, hold: Arc<Hold>, side: Side) -> Arc<ThreadHold> {
        ThreadHold::begin(self.base.number, hold, side, self.base.interrupt_on_loss)
    }

    // ----- looking ----------------------------------------------------------------------------

    /// How many read guards this thread has, their hold lost or not.
    pub fn read_count(&self) -> usize {
        ThreadHold::find(self.base.number).map_or(0, |held| held.count(Side::Shared))
    }

    /// How many write guards this thread has, their hold lost or not.
    pub fn write_count(&self) -> usize {
        ThreadHold::find(self.base.number).map_or(0, |held| held.count(Side::Exclusive))
    }

    /// Everyone who holds or waits, first to last, from one consistent read.
    ///
    /// # Errors
    ///
    /// `Unreachable`, `PermissionDenied`, `Interrupted`, `Closed`, `Forked`.
    pub fn contenders(&self) -> Result<Vec<ContenderInfo>> {
        self.base.list("rwlock.contenders")
    }
}
