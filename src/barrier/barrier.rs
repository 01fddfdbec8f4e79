//! The simple barrier: set by one, waited for by many, lifted by its removal.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use etcd_client::GetOptions;

use super::keeping::Keeping;
use super::waiting::{Gate, Line};
use crate::client::{Client, identity};
use crate::clock::Instant;
use crate::error::{Error, ErrorKind, Result};
use crate::recipe::{HasCore, Recipe, RecipeCore, Signal};
use crate::resilience::{LeaseResilience, LeaseTiming};
use crate::wait::{Stop, wait};
use crate::watch::{Item, Range, Spec};

/// A barrier on a path in etcd: while it is set, everyone who waits is held up.
///
/// It is set as long as there is a key at the path, whoever wrote it, and it is lifted when that
/// key goes. Whoever set it owns it: the key hangs on a lease that this object keeps, and only the
/// object that set a barrier can [`remove`](Barrier::remove) it. One object may set, remove and set
/// again, and wait, from any thread.
///
/// # Losing it
///
/// An owner that dies lifts its barrier when its TTL has passed. The same happens to an owner
/// that is alive but cut off from etcd for longer than the TTL: **etcd deletes the key, every
/// waiter sees that and goes on, and nothing can call it back.** When the owner reaches etcd
/// again it sets the barrier anew if the path is free, so those who come later are held up again;
/// if somebody else has set it meanwhile, theirs is left alone and this object is no longer an
/// owner. The owner is told: `Lost` in the [connection state](Recipe::connection_state) and an
/// entry in [`errors`](Recipe::errors) at its deadline, `Reconnected` once the barrier stands
/// again. When etcd was only stopped and started with its data, the key is still there, is taken
/// up again, and no waiter notices.
///
/// So between the loss and the new setting the barrier is open although nobody opened it. Where a
/// start that comes too early does harm, choose a TTL well above any outage to be outlived, and let
/// those who were released check a fact that stands elsewhere before they act.
///
/// # Differences from Curator's `DistributedBarrier`
///
/// The barrier goes with its owner instead of standing until somebody removes it; another's
/// barrier cannot be removed; and `set` says whose it is.
///
/// # Differences from the JVM library's `DistributedBarrier`
///
/// The key and the form of its value are the same, so both can be mixed. Here `remove` leaves
/// other owners' barriers alone, the object can be used again afterwards, and a barrier that etcd
/// kept over a restart is known as one's own.
///
/// # Example: workers that wait for the migration
///
/// ```
/// # use etcd_recipes::testing::EtcdServer;
/// use etcd_recipes::{Barrier, Client};
///
/// # fn main() -> etcd_recipes::Result<()> {
/// # let etcd = EtcdServer::start()?;
/// # let endpoint = etcd.endpoint();
/// let client = Client::connect([endpoint])?;
/// let barrier = Barrier::new(&client, "/barriers/migration")?;
/// assert!(barrier.set()?, "nobody else has set it");
///
/// std::thread::scope(|scope| {
///     let worker = scope.spawn(|| Barrier::new(&client, "/barriers/migration")?.wait());
///     // … migrate …
///     assert!(barrier.remove()?);
///     worker.join().unwrap()
/// })
/// # }
/// ```
pub struct Barrier {
    client: Client,
    keeping: Arc<Keeping>,
    wait_on_missing: bool,
}

impl fmt::Debug for Barrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Barrier")
            .field("path", &self.recipe().path())
            .field("state", &self.recipe().state())
            .finish_non_exhaustive()
    }
}

/// Options of a [`Barrier`]; each states its default.
///
/// # Example: waiting for a barrier that is yet to be set
///
/// ```
/// # use etcd_recipes::{Barrier, Client};
/// # use std::time::Duration;
/// # fn main() -> etcd_recipes::Result<()> {
/// # let client = Client::connect(["http://127.0.0.1:2379"])?;
/// let barrier = Barrier::builder(&client, "/barriers/migration")
///     .ttl(Duration::from_secs(30))
///     .wait_on_missing(true)
///     .build()?;
/// # drop(barrier);
/// # Ok(()) }
/// ```
#[must_use = "a builder does nothing until `build`"]
pub struct BarrierBuilder {
    client: Client,
    path: String,
    ttl: Duration,
    client_id: Option<String>,
    wait_on_missing: bool,
    resilience: LeaseResilience,
}

impl fmt::Debug for BarrierBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BarrierBuilder")
            .field("path", &self.path)
            .field("ttl", &self.ttl)
            .field("wait_on_missing", &self.wait_on_missing)
            .finish_non_exhaustive()
    }
}

impl BarrierBuilder {
    /// How long the barrier outlives an owner that died, and an outage may last before waiters
    /// are let through. Rounded up to whole seconds. Default: 10 s.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// The name in front of the value. Default: the client's.
    pub fn client_id(mut self, id: impl Into<String>) -> Self {
        self.client_id = Some(id.into());
        self
    }

    /// Whether a wait for a barrier that is not set waits until it was set and lifted. Default:
    /// `false`; such a wait returns at once.
    ///
    /// A barrier that is set and lifted while this side is cut off counts, unless etcd has
    /// compacted the two revisions away by the time it is back: then the next one is waited for.
    pub fn wait_on_missing(mut self, wait: bool) -> Self {
        self.wait_on_missing = wait;
        self
    }

    /// Pace and limits of healing, margin and timing of the renewals. Default: the client's.
    pub fn resilience(mut self, resilience: LeaseResilience) -> Self {
        self.resilience = resilience;
        self
    }

    /// Checks the options. No I/O.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` naming the value: an empty path, one with `//`, a trailing `/` or a NUL,
    /// a TTL of zero or beyond etcd's limit, one below 2 s without explicit timing, a margin of
    /// half the TTL or more, renewals that do not fit the TTL. `Closed`, `Forked`.
    pub fn build(self) -> Result<Barrier> {
        let path = identity::checked_path(self.path)?;
        let client_id = self.client.recipe_id(self.client_id)?;
        let timing = LeaseTiming::for_ttl(self.ttl, &self.resilience)?;
        self.client.check_usable()?;
        let core = self.client.core().clone();
        let key = core.physical(path.as_bytes());
        let recipe = RecipeCore::new("Barrier", path, client_id);
        core.register_recipe(&recipe);
        let keeping = Arc::new(Keeping {
            core,
            recipe,
            key,
            timing,
            resilience: self.resilience,
            standing: parking_lot::Mutex::default(),
            turn: tokio::sync::Mutex::default(),
        });
        Ok(Barrier { client: self.client, keeping, wait_on_missing: self.wait_on_missing })
    }
}

impl Barrier {
    /// A barrier with default options; see [`builder`](Barrier::builder) for the rest. No I/O.
    ///
    /// # Errors
    ///
    /// As [`BarrierBuilder::build`].
    pub fn new(client: &Client, path: impl Into<String>) -> Result<Barrier> {
        Barrier::builder(client, path).build()
    }

    /// Options, then [`build`](BarrierBuilder::build).
    pub fn builder(client: &Client, path: impl Into<String>) -> BarrierBuilder {
        BarrierBuilder {
            client: client.clone(),
            path: path.into(),
            ttl: Duration::from_secs(10),
            client_id: None,
            wait_on_missing: false,
            resilience: client.core().config.resilience.get_lease().clone(),
        }
    }

    fn recipe(&self) -> &RecipeCore {
        &self.keeping.recipe
    }

    // ----- owning -----------------------------------------------------------------------------

    /// Sets the barrier and keeps it set. `true`: it stands and is this object's, now or already;
    /// `false`: somebody else's stands.
    ///
    /// A call that fails or is interrupted leaves nothing behind, as far as etcd answers; what
    /// cannot be removed at once ends with its lease, which nobody renews.
    ///
    /// # Errors
    ///
    /// `Unreachable`; `Lost` if this object's own barrier is missing and did not come back within
    /// the operation timeout; `PermissionDenied` naming the key, `AuthenticationFailed`,
    /// `Interrupted`, `Closed`, `Forked`.
    pub fn set(&self) -> Result<bool> {
        let until = self.keeping.core.operation_limit();
        let keeping = self.keeping.clone();
        let task = |abandon| keeping.set(until, abandon);
        self.keeping.core.block("barrier.set", Some(self.recipe()), task)
    }

    /// Lifts the barrier if it is this object's; it may be set again afterwards. `false`: this
    /// object had set none, or its key was not there any more; another's barrier is left alone.
    ///
    /// From the call on the barrier is not kept any more: whatever comes of the call, it is gone
    /// at the TTL. Interrupted, it is finished in the background.
    ///
    /// # Errors
    ///
    /// `Unreachable`, or `OutcomeUnknown` if the request was sent: call again, or let the TTL do
    /// it. `PermissionDenied`, `AuthenticationFailed`, `Interrupted`, `Closed`, `Forked`.
    pub fn remove(&self) -> Result<bool> {
        let until = self.keeping.core.operation_limit();
        let keeping = self.keeping.clone();
        self.keeping.core.block("barrier.remove", Some(self.recipe()), |_| keeping.remove(until))
    }

    // ----- waiting ----------------------------------------------------------------------------

    /// Whether anybody's barrier stands, from one linearizable read.
    ///
    /// # Errors
    ///
    /// `Unreachable`, `PermissionDenied`, `AuthenticationFailed`, `Interrupted`, `Closed`,
    /// `Forked`.
    pub fn is_set(&self) -> Result<bool> {
        let keeping = self.keeping.clone();
        let until = keeping.core.operation_limit();
        self.keeping.core.block_on("barrier.is_set", Some(self.recipe()), async move {
            let options = GetOptions::new().with_count_only();
            let op = "barrier.is_set";
            let found = keeping.core.range(op, &keeping.key, Some(options), until).await?;
            Ok(found.count() > 0)
        })
    }

    /// Waits until the barrier is lifted. If it is not set, returns at once, or waits until it was
    /// set and lifted, as [`wait_on_missing`](BarrierBuilder::wait_on_missing) says.
    ///
    /// A lift is not missed, even if the barrier is set again right after it. An outage shorter
    /// than the operation timeout is waited out.
    ///
    /// # Errors
    ///
    /// `Unreachable` when etcd was silent for the operation timeout, and for as long as it takes
    /// to notice (8 s by default, see [`WatchResilience`](crate::WatchResilience)) if that is
    /// longer. `Interrupted` and `Closed` within 100 ms; `PermissionDenied`,
    /// `AuthenticationFailed`, `WrongCluster`, `Forked`.
    pub fn wait(&self) -> Result<()> {
        self.wait_until("barrier.wait", None).map(drop)
    }

    /// As [`wait`](Barrier::wait), for at most `limit`. `false`: it is still set (or was not set
    /// yet), as far as etcd's last answer goes.
    ///
    /// # Errors
    ///
    /// As [`wait`](Barrier::wait); `Unreachable` also if etcd did not answer at all within `limit`.
    pub fn wait_for(&self, limit: Duration) -> Result<bool> {
        let limit = self.keeping.core.clock.now() + limit;
        self.wait_until("barrier.wait_for", Some(limit))
    }

    fn wait_until(&self, op: &'static str, limit: Option<Instant>) -> Result<bool> {
        let core = &self.keeping.core;
        let (mut gate, revision) = self.look(op, limit)?;
        if gate == Gate::NeverSet && !self.wait_on_missing {
            return Ok(true);
        }
        let line = Line::new(&core.clock);
        let range = Range::Key(self.keeping.key.clone());
        let spec = Spec { range, from: revision + 1, group: "barrier" };
        let _watching = core.watches.watch(spec, line.clone());
        let mut suspended = false;
        while gate != Gate::Lifted {
            let silent = line.heard_at() + self.patience(suspended);
            let until = limit.map_or(silent, |limit| limit.min(silent));
            let closed = [&core.closed, self.recipe().closed()];
            match wait(op, &core.clock, Some(until), &closed, line.parker(), || line.poll()) {
                Ok(Item::Events(events)) => {
                    gate = events.iter().fold(gate, Gate::event);
                }
                Ok(Item::Resync(snapshot)) => gate = gate.snapshot(&snapshot),
                Ok(Item::Suspended(cause)) => {
                    log::debug!("{}: {cause}", self.recipe().identity());
                    suspended = true;
                    self.recipe().signal(Signal::Suspended);
                }
                Ok(Item::Resumed) => {
                    suspended = false;
                    self.recipe().signal(Signal::Restored);
                }
                Ok(Item::Failed(error)) => {
                    self.recipe().signal(Signal::Lost);
                    return Err(error);
                }
                Err(Stop::Interrupted) => return Err(Error::interrupted(op)),
                Err(Stop::Closed(0)) => return Err(Error::closed("the client")),
                Err(Stop::Closed(_)) => return Err(Error::closed(self.recipe().identity())),
                Err(Stop::Limit) => {
                    let now = core.clock.now();
                    if limit.is_some_and(|limit| now >= limit) {
                        return Ok(false);
                    }
                    if now >= line.heard_at() + self.patience(suspended) {
                        return Err(Error::new(
                            ErrorKind::Unreachable,
                            format!("{op} of `{}`: etcd went silent", self.recipe().path()),
                        ));
                    }
                }
            }
        }
        Ok(true)
    }

    /// The barrier now, and at which revision.
    fn look(&self, op: &'static str, limit: Option<Instant>) -> Result<(Gate, i64)> {
        let keeping = self.keeping.clone();
        let mut until = keeping.core.operation_limit();
        if let Some(limit) = limit {
            // Even a wait of no time is worth one question.
            until = until.min(limit.max(keeping.core.clock.now() + SHORTEST_READ));
        }
        self.keeping.core.block_on(op, Some(self.recipe()), async move {
            let found = keeping.core.range(op, &keeping.key, None, until).await?;
            let revision = found.header().map_or(0, |header| header.revision());
            Ok((Gate::read(found.kvs().first().map(|kv| kv.create_revision())), revision))
        })
    }

    /// How long etcd may be silent. An idle watch says nothing until it is asked, so only of one
    /// that is known to be broken silence for the operation timeout means anything.
    fn patience(&self, suspended: bool) -> Duration {
        let core = &self.keeping.core;
        let watch = core.config.resilience.get_watch();
        let notice = watch.get_progress_interval() + watch.get_progress_timeout();
        let timeout = core.operation_timeout();
        if suspended { timeout } else { timeout.max(notice + NOTICE_SLACK) }
    }

    // ----- ending -----------------------------------------------------------------------------

    /// Lifts the barrier if it is this object's, and ends the object: blocked calls return
    /// `Closed`. Closing again does nothing.
    ///
    /// # Errors
    ///
    /// `CleanupUnconfirmed` if etcd did not confirm within 2 s (or the TTL, if that is shorter);
    /// then the key goes at the TTL. `Forked`.
    pub fn close(&self) -> Result<()> {
        let core = &self.keeping.core;
        if core.is_forked() {
            return core.check_usable();
        }
        self.recipe().closed().cancel();
        let standing = self.keeping.standing.lock().take();
        let closed = standing.map_or(Ok(()), |standing| standing.presence.close("barrier.close"));
        self.recipe().close(LISTENER_LIMIT);
        closed
    }
}

/// How long a wait with a very short limit may take to ask once.
const SHORTEST_READ: Duration = Duration::from_millis(200);

/// What the watch's own timers may be late by.
const NOTICE_SLACK: Duration = Duration::from_millis(500);

/// How long a close waits for a listener that is running.
const LISTENER_LIMIT: Duration = Duration::from_millis(300);

impl Drop for Barrier {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            log::debug!("{}: {error}", self.recipe().identity());
        }
    }
}

impl HasCore for Barrier {
    fn core(&self) -> &RecipeCore {
        self.recipe()
    }
}

impl Recipe for Barrier {
    fn ping(&self) -> bool {
        self.client.ping()
    }

    fn close(&self) -> Result<()> {
        Barrier::close(self)
    }
}
