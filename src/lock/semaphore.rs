//! The semaphore: as many holders as it has permits, among all processes that name the same path.

use std::sync::Arc;
use std::time::Duration;

use etcd_client::{Compare, CompareOp, Txn, TxnOp, TxnOpResponse};

use super::base::{LockBase, lock_surface};
use super::options::{LockOptions, lock_options, max_hold_option};
use super::permit::Permit;
use crate::client::call::Kind;
use crate::client::{Client, identity};
use crate::contend::ContenderMode::Permit as PermitMode;
use crate::contend::{ContenderInfo, Count, Layout, decode_count, encode_count, read_queue};
use crate::error::{Error, Result};

/// How many permits one call may take: what one transaction of etcd can hold.
const MOST_AT_ONCE: u32 = 100;

/// A counted lock on a path in etcd: at most as many holders at a time as it has permits.
///
/// Cheap to clone; clones are one semaphore. It is fair: permits are given in the order in which
/// the keys were created, and a call that waits for several permits is not passed by one that
/// wants fewer. A permit belongs to no thread: any thread may release it. An uncontended acquire
/// and release are one request each; the first acquire on a new path makes two more.
///
/// # The number of permits
///
/// The first to come fixes the number, and it stays at the path. Whoever names another one gets
/// `PermitMismatch` at its first acquire. [`resize`](Semaphore::resize) is an act of
/// administration: every semaphore of this library that is in use follows it, waiters included;
/// one that is made afterwards has to name the new number, and programs of the JVM library, which
/// read the number once, have to be restarted. Shrinking takes no permit away from anybody: new
/// ones are given once few enough are out.
///
/// # Losing it
///
/// A permit is lost as the hold of a [`Mutex`](crate::Mutex) is: its flag turns `false`, its cancel
/// token fires, the loss listeners run, the connection state is `Lost`,
/// [`release`](Permit::release) returns `false`; nothing heals. Nobody is given the place of a
/// permit whose [`is_held`](Permit::is_held) still says `true`, with the exceptions that the mutex
/// names. Permits of one `acquire_many` stand and fall together. Permits overlap, so they have no
/// fencing token and no guarded writes.
///
/// # Differences from `std` and `parking_lot`
///
/// They have no semaphore. In the terms of their locks: acquiring can fail; a permit is `Send`; it
/// is strictly fair; and a permit can be lost while it is held.
///
/// # Differences from the JVM library's semaphore
///
/// The keys are the same, so both can be mixed. Here an acquire that is given up leaves no key
/// behind, another number of permits is an error, and a change of the number is noticed.
///
/// # Example: three downloads at a time, in all processes together
///
/// ```
/// # use etcd_recipes::testing::EtcdServer;
/// use etcd_recipes::{Client, Semaphore};
///
/// # fn main() -> etcd_recipes::Result<()> {
/// # let etcd = EtcdServer::start()?;
/// # let endpoint = etcd.endpoint();
/// let client = Client::connect([endpoint])?;
/// let downloads = Semaphore::new(&client, "/limits/downloads", 3)?;
///
/// let permit = downloads.acquire()?;
/// assert_eq!(downloads.available_permits()?, 2);
/// assert!(permit.release(), "held to the end");
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Semaphore {
    base: Arc<LockBase>,
}

lock_surface!(Semaphore);

/// Options of a [`Semaphore`]; each states its default.
///
/// # Example: a short lease
///
/// ```
/// # use etcd_recipes::{Client, Semaphore};
/// # use std::time::Duration;
/// # fn main() -> etcd_recipes::Result<()> {
/// # let client = Client::connect(["http://127.0.0.1:2379"])?;
/// let downloads =
///     Semaphore::builder(&client, "/limits/downloads", 3).ttl(Duration::from_secs(5)).build()?;
/// # drop(downloads);
/// # Ok(()) }
/// ```
#[must_use = "a builder does nothing until `build`"]
pub struct SemaphoreBuilder {
    options: LockOptions,
    permits: u32,
}

lock_options!(SemaphoreBuilder);
max_hold_option!(SemaphoreBuilder);

impl SemaphoreBuilder {
    /// Whether the blocking calls of this library on the thread that acquired a permit return
    /// `Interrupted` once the permit is lost, until it is released or dropped, by whichever
    /// thread. Default: `false`, since a holder is in the middle of its own code: it is told, and
    /// decides. A thread that the permit was sent to is never interrupted by it.
    pub fn interrupt_on_permit_loss(mut self, interrupt: bool) -> Self {
        self.options.interrupt_on_loss = interrupt;
        self
    }

    /// Checks the options. No I/O.
    ///
    /// # Errors
    ///
    /// As [`MutexBuilder::build`](crate::MutexBuilder::build); `InvalidArgument` for no permits.
    pub fn build(self) -> Result<Semaphore> {
        check_permits(self.permits)?;
        let count = Some(Count::new(self.permits));
        let base = self.options.build("Semaphore", Layout::counted, count)?;
        Ok(Semaphore { base: Arc::new(base) })
    }
}

fn check_permits(permits: u32) -> Result<()> {
    if permits == 0 {
        return Err(Error::invalid("a semaphore of 0 permits would let nobody in"));
    }
    Ok(())
}

impl Semaphore {
    /// A semaphore with default options; see [`builder`](Semaphore::builder) for the rest. No I/O.
    ///
    /// # Errors
    ///
    /// As [`SemaphoreBuilder::build`].
    pub fn new(client: &Client, path: impl Into<String>, permits: u32) -> Result<Semaphore> {
        Semaphore::builder(client, path, permits).build()
    }

    /// Options, then [`build`](SemaphoreBuilder::build).
    pub fn builder(client: &Client, path: impl Into<String>, permits: u32) -> SemaphoreBuilder {
        SemaphoreBuilder { options: LockOptions::new(client, path.into()), permits }
    }

    pub(super) fn base(&self) -> &LockBase {
        &self.base
    }

    // ----- acquiring --------------------------------------------------------------------------

    /// Takes a permit, waiting as long as all are out or promised to others who came before.
    ///
    /// When the lease dies in the queue, it queues anew at the end. When etcd is silent for the
    /// whole operation timeout the call ends; nothing is left behind once etcd answers again.
    ///
    /// # Errors
    ///
    /// As [`Mutex::lock`](crate::Mutex::lock), save `Lost`; `PermitMismatch` if the path has
    /// another number of permits than this semaphore was made for.
    pub fn acquire(&self) -> Result<Permit> {
        Ok(self.permit(self.base.acquire("semaphore.acquire", PermitMode, 1)?))
    }

    /// Takes a permit if one is free and nobody waits for it. When none is, nothing is written,
    /// and etcd's revision stays as it is.
    ///
    /// # Errors
    ///
    /// As [`acquire`](Semaphore::acquire); `Unreachable` after the operation timeout or 5 s,
    /// whichever is less.
    pub fn try_acquire(&self) -> Result<Option<Permit>> {
        let hold = self.base.try_acquire("semaphore.try_acquire", PermitMode, 1)?;
        Ok(hold.map(|hold| self.permit(hold)))
    }

    /// Takes a permit, waiting at most this long. `Ok(None)` says that none was free all the time.
    /// The limit governs the wait, not the hold.
    ///
    /// # Errors
    ///
    /// As [`acquire`](Semaphore::acquire); `Unreachable` also when the limit passed before etcd
    /// answered.
    pub fn try_acquire_for(&self, limit: Duration) -> Result<Option<Permit>> {
        let hold = self.base.acquire_for("semaphore.try_acquire_for", PermitMode, 1, limit)?;
        Ok(hold.map(|hold| self.permit(hold)))
    }

    /// Takes so many permits at once, all or none, waiting as [`acquire`](Semaphore::acquire)
    /// does. They are one [`Permit`].
    ///
    /// # Errors
    ///
    /// As [`acquire`](Semaphore::acquire); `InvalidArgument` for none, for more than 100, and for
    /// more than the semaphore has, also when it is made smaller than that during the wait.
    pub fn acquire_many(&self, permits: u32) -> Result<Permit> {
        let op = "semaphore.acquire_many";
        let keys = self.checked(op, permits)?;
        Ok(self.permit(self.base.acquire(op, PermitMode, keys)?))
    }

    /// Takes so many permits at once if they are free and nobody waits for them.
    ///
    /// # Errors
    ///
    /// As [`try_acquire`](Semaphore::try_acquire) and [`acquire_many`](Semaphore::acquire_many).
    pub fn try_acquire_many(&self, permits: u32) -> Result<Option<Permit>> {
        let op = "semaphore.try_acquire_many";
        let keys = self.checked(op, permits)?;
        let hold = self.base.try_acquire(op, PermitMode, keys)?;
        Ok(hold.map(|hold| self.permit(hold)))
    }

    /// Takes so many permits at once, waiting at most this long; afterwards all are taken or none.
    ///
    /// # Errors
    ///
    /// As [`try_acquire_for`](Semaphore::try_acquire_for) and
    /// [`acquire_many`](Semaphore::acquire_many).
    pub fn try_acquire_many_for(&self, permits: u32, limit: Duration) -> Result<Option<Permit>> {
        let op = "semaphore.try_acquire_many_for";
        let keys = self.checked(op, permits)?;
        let hold = self.base.acquire_for(op, PermitMode, keys, limit)?;
        Ok(hold.map(|hold| self.permit(hold)))
    }

    /// Takes a permit, runs `section`, releases, and says if the permit did not last.
    ///
    /// # Errors
    ///
    /// Those of [`acquire`](Semaphore::acquire), before `section` has run; `Lost` if the permit
    /// was lost while it ran, and its result is dropped.
    ///
    /// # Panics
    ///
    /// If `section` panics; the permit is released.
    pub fn with_permit<R>(&self, section: impl FnOnce(&Permit) -> R) -> Result<R> {
        let permit = self.acquire()?;
        let result = section(&permit);
        let hold = permit.view().hold.clone();
        if permit.release() { Ok(result) } else { Err(hold.lost_error()) }
    }

    fn permit(&self, hold: Arc<crate::contend::Hold>) -> Permit {
        Permit::new(self.clone(), hold)
    }

    /// How many of its permits this semaphore has, as far as it knows.
    fn known(&self) -> u32 {
        self.count().map_or(0, Count::current)
    }

    fn count(&self) -> Option<&Count> {
        self.base.contender.count.as_ref()
    }

    fn checked(&self, op: &'static str, permits: u32) -> Result<usize> {
        if permits == 0 || permits > MOST_AT_ONCE {
            let identity = self.base.recipe().identity();
            return Err(Error::invalid(format!(
                "{identity}: {permits} permits at once, of 1 to {MOST_AT_ONCE}"
            )));
        }
        let keys = permits as usize;
        if permits > self.known() {
            let contender = self.base.contender.clone();
            let recipe = Some(self.base.recipe());
            let check = async move { contender.check_keys(op, keys).await };
            self.base.core().block_on(op, recipe, check)?;
        }
        Ok(keys)
    }

    // ----- looking ----------------------------------------------------------------------------

    /// How many permits are free and not promised to anybody, from one consistent read.
    ///
    /// # Errors
    ///
    /// `Unreachable`, `PermissionDenied`, `Interrupted`, `Closed`, `Forked`.
    pub fn available_permits(&self) -> Result<u32> {
        let contender = self.base.contender.clone();
        let known = self.known();
        let op = "semaphore.available_permits";
        self.base.core().block_on(op, Some(self.base.recipe()), async move {
            let read = read_queue(&contender.core, op, &contender.layout).await?;
            let out = u32::try_from(read.line.len()).unwrap_or(u32::MAX);
            Ok(read.count.unwrap_or(known).saturating_sub(out))
        })
    }

    /// Everyone who has a permit or waits for one, first to last, from one consistent read: one
    /// entry per permit.
    ///
    /// # Errors
    ///
    /// As [`available_permits`](Semaphore::available_permits).
    pub fn contenders(&self) -> Result<Vec<ContenderInfo>> {
        self.base.list("semaphore.contenders")
    }

    // ----- administration ---------------------------------------------------------------------

    /// Changes the number of permits for everyone who uses the path, and returns the former
    /// number, if there was one. Growing lets in waiters at once; shrinking takes nothing away.
    ///
    /// See [the number of permits](Semaphore#the-number-of-permits) for who has to be restarted.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for 0; `OutcomeUnknown` if it was sent and not answered; `Unreachable`,
    /// `PermissionDenied`, `Interrupted`, `Closed`, `Forked`.
    pub fn resize(&self, permits: u32) -> Result<Option<u32>> {
        check_permits(permits)?;
        let contender = self.base.contender.clone();
        let op = "semaphore.resize";
        let former = self.base.core().block_on(op, Some(self.base.recipe()), async move {
            let core = &contender.core;
            let key = contender.layout.count_key().unwrap_or_default();
            let put = TxnOp::put(key.clone(), encode_count(permits), None);
            let txn = Txn::new().and_then([TxnOp::get(key.clone(), None), put]);
            let response = core.txn(op, &key, Kind::Write, txn, core.operation_limit()).await?;
            Ok(response.op_responses().iter().find_map(|one| match one {
                TxnOpResponse::Get(get) => {
                    get.kvs().first().and_then(|kv| decode_count(kv.value()))
                }
                _ => None,
            }))
        })?;
        if let Some(count) = self.count() {
            count.agree(permits);
        }
        Ok(former)
    }

    /// Deletes the number of permits that stands at a path which nobody uses any more. `Ok(false)`:
    /// somebody has a permit or waits for one, or there was no number; nothing was deleted.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a path that is none; `OutcomeUnknown` if it was sent and not
    /// answered; `Unreachable`, `PermissionDenied`, `Interrupted`, `Closed`, `Forked`.
    pub fn delete(client: &Client, path: impl Into<String>) -> Result<bool> {
        let path = identity::checked_path(path.into())?;
        let core = client.core().clone();
        let layout = Layout::counted(core.physical(format!("{path}/").as_bytes()));
        let op = "semaphore.delete";
        core.clone().block_on(op, None, async move {
            let key = layout.count_key().unwrap_or_default();
            let nobody = Compare::create_revision(layout.entries(), CompareOp::Equal, 0);
            let stands = Compare::create_revision(key.clone(), CompareOp::Greater, 0);
            let txn = Txn::new()
                .when([nobody.with_prefix(), stands])
                .and_then([TxnOp::delete(key.clone(), None)]);
            let response = core.txn(op, &key, Kind::Write, txn, core.operation_limit()).await?;
            Ok(response.succeeded())
        })
    }
}
