//! The latch: leads until it is closed, and joins again when it has lost.

use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;

use super::participant::{self, Participant};
use super::state::{CandidateState, Phase};
use super::term::LeadershipTerm;
use crate::cancel::CancelToken;
use crate::client::Client;
use crate::client::core::{BoxFuture, Owned, unconfirmed};
use crate::client::runtime::Abandon;
use crate::clock::Instant;
use crate::contend::{self, ContenderMode, Layout, Wish};
use crate::error::{Error, Result};
use crate::lock::base::{CLOSE_LIMIT, LockBase, loss_surface, recipe_surface};
use crate::lock::options::{LockOptions, lock_options};
use crate::race::{Either, race};
use crate::recipe::{Broadcast, ListenerId, Subscription};
use crate::wait::{Parker, Stop, wait};

/// The pause before an unreachable etcd is asked again, beyond what the calls themselves wait.
const PAUSE: Duration = Duration::from_millis(250);

/// How long a close waits for etcd.
const END_LIMIT: Duration = Duration::from_secs(2);

/// What a latch tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LatchEvent {
    /// It leads.
    IsLeader {
        /// The number of the term.
        term: i64,
    },
    /// It led, and does no more.
    NotLeader {
        /// The number of the term that is over.
        term: i64,
    },
}

/// Hears of a latch's terms, for those who prefer a type to a closure.
pub trait LatchListener: Send + Sync + 'static {
    /// It leads.
    fn is_leader(&self, term: i64);

    /// It led, and does no more.
    fn not_leader(&self, term: i64);
}

/// What a close tells the listeners.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CloseMode {
    /// A leader's listeners hear that it leads no more, so that the events come in pairs.
    #[default]
    Notify,
    /// Nothing.
    Silent,
}

/// Leads from its turn until it is closed: leadership as a role of the process.
///
/// [`start`](LeaderLatch::start) joins the queue in the background; no thread waits. Listeners
/// hear [`IsLeader`](LatchEvent::IsLeader) and [`NotLeader`](LatchEvent::NotLeader) in pairs, one
/// at a time; a listener that is added to a latch that leads hears so at once.
///
/// # Losing it
///
/// Leadership is lost as the hold of a [`Mutex`](crate::Mutex) is:
/// [`has_leadership`](LeaderLatch::has_leadership) turns `false` first, then the
/// [leadership's](LeaderLatch::leadership) cancel token is cancelled, the connection state is
/// `Lost`, the listeners hear `NotLeader`. Then the latch joins the queue again, at the end; what
/// it gets is another term. Guarded writes of the old one are refused.
///
/// # Differences from Curator's `LeaderLatch`
///
/// A term has a number and guarded writes; a wait is woken by `close`; and the listeners hear of
/// a close unless that is [`Silent`](CloseMode::Silent).
///
/// # Differences from Go's `concurrency.Election`
///
/// The keys are the same, so they stand in one queue. Here the candidacy outlives its lease.
///
/// # Example: wait for the role, then act in it
///
/// ```
/// # use etcd_recipes::testing::EtcdServer;
/// use etcd_recipes::{Client, LeaderLatch};
///
/// # fn main() -> etcd_recipes::Result<()> {
/// # let etcd = EtcdServer::start()?;
/// # let endpoint = etcd.endpoint();
/// let client = Client::connect([endpoint])?;
/// let latch = LeaderLatch::new(&client, "/elections/scheduler")?;
/// latch.start()?;
/// latch.wait()?;
/// if let Some(leadership) = latch.leadership() {
///     assert!(leadership.put("/scheduler/leader", "me")?, "written only while we lead");
/// }
/// latch.close()?;
/// # Ok(()) }
/// ```
pub struct LeaderLatch {
    shared: Arc<Shared>,
}

loss_surface!(LeaderLatch);
recipe_surface!(LeaderLatch);

/// Options of a [`LeaderLatch`]; each states its default.
///
/// # Example: a short lease
///
/// ```
/// # use etcd_recipes::{Client, LeaderLatch};
/// # use std::time::Duration;
/// # fn main() -> etcd_recipes::Result<()> {
/// # let client = Client::connect(["http://127.0.0.1:2379"])?;
/// let latch = LeaderLatch::builder(&client, "/elections/scheduler")
///     .ttl(Duration::from_secs(5))
///     .build()?;
/// # drop(latch);
/// # Ok(()) }
/// ```
#[must_use = "a builder does nothing until `build`"]
pub struct LeaderLatchBuilder {
    options: LockOptions,
}

lock_options!(LeaderLatchBuilder);

impl LeaderLatchBuilder {
    /// Whether a lost lease cancels the [leadership's](LeaderLatch::leadership) cancel token.
    /// Default: `true`.
    pub fn interrupt_on_lease_loss(mut self, interrupt: bool) -> Self {
        self.options.interrupt_on_loss = interrupt;
        self
    }

    /// Checks the options. No I/O.
    ///
    /// # Errors
    ///
    /// As [`MutexBuilder::build`](crate::MutexBuilder::build).
    pub fn build(self) -> Result<LeaderLatch> {
        let base = Arc::new(self.options.build("LeaderLatch", Layout::candidates, None)?);
        let shared = Arc::new(Shared {
            now: Mutex::new(Now {
                phase: Phase::Idle,
                term: None,
                changed: CancelToken::new(),
                ended: None,
            }),
            stop: CancelToken::new(),
            told: Broadcast::default(),
            base,
        });
        let weak: Weak<dyn Owned> = Arc::<Shared>::downgrade(&shared);
        shared.base.core().register(weak);
        let weak = Arc::downgrade(&shared);
        shared.base.contender.recipe.at_end(move || {
            if let Some(shared) = weak.upgrade() {
                shared.told.close();
            }
        });
        Ok(LeaderLatch { shared })
    }
}

struct Shared {
    base: Arc<LockBase>,
    now: Mutex<Now>,
    /// Cancelled by the close.
    stop: CancelToken,
    told: Broadcast<LatchEvent>,
}

struct Now {
    phase: Phase,
    term: Option<LeadershipTerm>,
    /// Cancelled and replaced whenever something changes, to wake those who wait.
    changed: CancelToken,
    /// Cancelled when the task that was started last has ended.
    ended: Option<CancelToken>,
}

impl LeaderLatch {
    /// A latch with default options; see [`builder`](LeaderLatch::builder) for the rest. No I/O.
    ///
    /// # Errors
    ///
    /// As [`LeaderLatchBuilder::build`].
    pub fn new(client: &Client, path: impl Into<String>) -> Result<LeaderLatch> {
        LeaderLatch::builder(client, path).build()
    }

    /// Options, then [`build`](LeaderLatchBuilder::build).
    pub fn builder(client: &Client, path: impl Into<String>) -> LeaderLatchBuilder {
        let mut options = LockOptions::new(client, path.into());
        options.interrupt_on_loss = true;
        LeaderLatchBuilder { options }
    }

    fn base(&self) -> &LockBase {
        &self.shared.base
    }

    /// Joins the queue, in the background.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if it was started before and has not failed; `Closed`, `Forked`.
    pub fn start(&self) -> Result<()> {
        let core = self.base().core();
        core.check_usable()?;
        self.base().recipe().check_open()?;
        let ended = CancelToken::new();
        {
            let mut now = self.shared.now.lock();
            if !matches!(now.phase, Phase::Idle | Phase::Failed(_)) {
                let identity = self.base().recipe().identity();
                return Err(Error::invalid(format!("{identity}: started already")));
            }
            now.phase = Phase::Waiting;
            now.ended = Some(ended.clone());
        }
        let task = Task { shared: Some(self.shared.clone()), ended };
        core.runtime.spawn(async move {
            if let Some(shared) = &task.shared {
                shared.run().await;
            }
        });
        Ok(())
    }

    /// Whether it leads at present. Asks nobody.
    pub fn has_leadership(&self) -> bool {
        self.leadership().is_some()
    }

    /// The present leadership, with its number and its guarded writes; `None` if it does not lead.
    pub fn leadership(&self) -> Option<LeadershipTerm> {
        let term = self.shared.now.lock().term.clone();
        term.filter(LeadershipTerm::is_leader)
    }

    /// What it is doing. Asks nobody.
    pub fn state(&self) -> CandidateState {
        let phase = self.shared.now.lock().phase.clone();
        phase.shown(&self.base().contender, self.leadership().as_ref())
    }

    /// Blocks until it leads.
    ///
    /// # Errors
    ///
    /// `Closed` when it is closed meanwhile; what it failed with; `Interrupted`;
    /// `InvalidArgument` if it was not started.
    pub fn wait(&self) -> Result<()> {
        self.wait_until("latch.wait", None).map(|_| ())
    }

    /// Blocks until it leads (`true`) or `limit` has passed (`false`).
    ///
    /// # Errors
    ///
    /// As [`wait`](LeaderLatch::wait).
    pub fn wait_for(&self, limit: Duration) -> Result<bool> {
        self.wait_until("latch.wait_for", Some(limit))
    }

    fn wait_until(&self, op: &'static str, limit: Option<Duration>) -> Result<bool> {
        let core = self.base().core();
        core.check_usable()?;
        self.base().recipe().check_open()?;
        let limit = limit.map(|limit| core.clock.now() + limit);
        loop {
            if self.has_leadership() {
                return Ok(true);
            }
            let (phase, changed) = {
                let now = self.shared.now.lock();
                (now.phase.clone(), now.changed.clone())
            };
            let identity = self.base().recipe().identity();
            match phase {
                Phase::Idle => return Err(Error::invalid(format!("{identity}: not started"))),
                Phase::Failed(error) => return Err(error),
                Phase::Closed => return Err(Error::closed(identity)),
                Phase::Waiting | Phase::Leading => {}
            }
            let closed = [&changed, &core.closed, self.base().recipe().closed()];
            let poll = || changed.is_cancelled().then_some(());
            match wait(op, &core.clock, limit, &closed, &Parker::new(), poll) {
                Ok(()) | Err(Stop::Closed(0)) => {}
                Err(Stop::Closed(1)) => return Err(Error::closed("the client")),
                Err(Stop::Closed(_)) => return Err(Error::closed(identity)),
                Err(Stop::Limit) => return Ok(false),
                Err(Stop::Interrupted) => return Err(Error::interrupted(op)),
            }
        }
    }

    /// All candidates, the leader first, from one consistent read.
    ///
    /// # Errors
    ///
    /// `Unreachable`, `PermissionDenied`, `Interrupted`, `Closed`, `Forked`.
    pub fn participants(&self) -> Result<Vec<Participant>> {
        let contender = self.base().contender.clone();
        let op = "latch.participants";
        self.base().core().block_on(op, Some(self.base().recipe()), async move {
            participant::list(&contender.core, op, &contender.layout).await
        })
    }

    /// Adds a listener. It runs on the latch's healer thread, one event at a time; one that is
    /// added while the latch leads hears so at once.
    pub fn add_listener(
        &self,
        listener: impl Fn(&LatchEvent) + Send + Sync + 'static,
    ) -> ListenerId {
        // Under the lock that orders the events, so that each listener hears whole pairs.
        let now = self.shared.now.lock();
        let listener = self.shared.told.add(Arc::new(listener));
        if let (Phase::Leading, Some(term)) = (&now.phase, &now.term) {
            let event = LatchEvent::IsLeader { term: term.fencing_token() };
            self.base().recipe().notify_one(&listener, event);
        }
        listener.id()
    }

    /// As [`add_listener`](LeaderLatch::add_listener), for a type of its own.
    pub fn add_listener_with(&self, listener: Box<dyn LatchListener>) -> ListenerId {
        self.add_listener(move |event| match *event {
            LatchEvent::IsLeader { term } => listener.is_leader(term),
            LatchEvent::NotLeader { term } => listener.not_leader(term),
        })
    }

    /// Removes a listener; once this has returned, no new call of it starts (one that is running
    /// may be finishing).
    pub fn remove_listener(&self, id: ListenerId) -> bool {
        self.shared.told.remove(id)
    }

    /// The same events as a channel, for `select!`.
    pub fn events(&self) -> Subscription<LatchEvent> {
        self.shared.told.subscribe()
    }

    /// Gives up the leadership or the candidacy, for good; a leader's listeners hear of it.
    ///
    /// # Errors
    ///
    /// `CleanupUnconfirmed` if etcd did not confirm in time that the key is gone; then the rest is
    /// done in the background. `Forked`.
    pub fn close(&self) -> Result<()> {
        self.close_with(CloseMode::default())
    }

    /// As [`close`](LeaderLatch::close), with a say in what the listeners hear.
    ///
    /// # Errors
    ///
    /// As [`close`](LeaderLatch::close).
    pub fn close_with(&self, mode: CloseMode) -> Result<()> {
        let core = self.base().core();
        if core.is_forked() {
            return core.check_usable();
        }
        let ended = self.shared.end(mode);
        let limit = END_LIMIT.min(self.base().contender.session.0.ttl);
        let until = core.clock.now() + limit;
        let closed = match ended {
            // A closed client has seen to it.
            Some(ended) if !core.on_io_thread() && !core.closed.is_cancelled() => {
                let contender = self.base().contender.clone();
                let ending = async move {
                    ended.cancelled().await;
                    contender.all_left().await;
                    Ok(())
                };
                match core.block_shielded("latch.close", until, ending) {
                    Some(Ok(())) => Ok(()),
                    _ => Err(unconfirmed("etcd did not answer in time")),
                }
            }
            _ => Ok(()),
        };
        self.base().recipe().close(CLOSE_LIMIT);
        closed
    }
}

impl Drop for LeaderLatch {
    fn drop(&mut self) {
        if self.base().core().is_forked() {
            return;
        }
        if let Err(error) = self.close_with(CloseMode::Notify) {
            log::debug!("{}: {error}", self.base().recipe().identity());
        }
    }
}

/// The task's hold on the latch, and its word that it has ended, also when it is dropped where it
/// stands.
struct Task {
    shared: Option<Arc<Shared>>,
    ended: CancelToken,
}

impl Drop for Task {
    fn drop(&mut self) {
        if let Some(shared) = &self.shared {
            shared.task_ended();
        }
        // The last owner drops the user's listeners, which has no place on the runtime's thread.
        if let Some(last) = self.shared.take().and_then(Arc::into_inner) {
            let spawned =
                thread::Builder::new().name("etcd-rx-close".to_owned()).spawn(move || drop(last));
            if let Err(error) = spawned {
                log::warn!("dropping a latch in the background: {error}");
            }
        }
        self.ended.cancel();
    }
}

impl Shared {
    /// Flips the flag and asks the task to end; what to wait for, if there is one.
    fn end(&self, mode: CloseMode) -> Option<CancelToken> {
        let mut now = self.now.lock();
        if let Some(term) = &now.term {
            term.end();
        }
        if let (Phase::Leading, Some(term), CloseMode::Notify) = (&now.phase, &now.term, mode) {
            self.tell(LatchEvent::NotLeader { term: term.fencing_token() });
        }
        now.phase = Phase::Closed;
        let ended = now.ended.clone();
        let changed = std::mem::take(&mut now.changed);
        drop(now);
        changed.cancel();
        self.stop.cancel();
        self.base.recipe().closed().cancel();
        ended
    }

    /// Called with the lock that orders the events.
    fn tell(&self, event: LatchEvent) {
        self.told.tell(self.base.recipe(), event);
    }

    /// Moves on unless it was closed; says whether it did.
    fn enter(&self, phase: Phase, term: Option<LeadershipTerm>) -> bool {
        let changed = {
            let mut now = self.now.lock();
            if matches!(now.phase, Phase::Closed) {
                return false;
            }
            if let (Phase::Leading, Some(over)) = (&now.phase, &now.term) {
                self.tell(LatchEvent::NotLeader { term: over.fencing_token() });
            }
            if let (Phase::Leading, Some(term)) = (&phase, &term) {
                self.tell(LatchEvent::IsLeader { term: term.fencing_token() });
            }
            now.phase = phase;
            now.term = term;
            std::mem::take(&mut now.changed)
        };
        changed.cancel();
        true
    }

    /// Without its task it does not look alive.
    fn task_ended(&self) {
        let (running, term) = {
            let now = self.now.lock();
            (matches!(now.phase, Phase::Waiting | Phase::Leading), now.term.clone())
        };
        if running {
            if let Some(term) = term {
                term.end();
            }
            self.enter(Phase::Failed(Error::internal("the latch's task has ended")), None);
        }
    }

    async fn run(&self) {
        loop {
            let term = match self.campaign().await {
                Ok(Some(term)) => term,
                Ok(None) => return,
                Err(error) => {
                    self.base.recipe().record_error(error.clone());
                    self.enter(Phase::Failed(error), None);
                    return;
                }
            };
            let hold = term.hold().clone();
            if self.enter(Phase::Leading, Some(term)) {
                race(hold.cancel_token().cancelled(), self.stop.cancelled()).await;
            }
            hold.release_here().await;
            hold.let_go();
            if !self.enter(Phase::Waiting, None) {
                return;
            }
        }
    }

    /// Waits for the turn, however long etcd is away; `None` when the latch was closed.
    async fn campaign(&self) -> Result<Option<LeadershipTerm>> {
        let core = self.base.core();
        loop {
            let contender = self.base.contender.clone();
            let wish = Wish { contender, mode: ContenderMode::Lead, keys: 1 };
            let abandon = Abandon::default();
            let campaign = contend::acquire(vec![wish], None, abandon.clone());
            let mut campaign = std::pin::pin!(campaign);
            let result = match race(&mut campaign, self.stop.cancelled()).await {
                Either::First(result) => result,
                Either::Second(()) => {
                    // It takes its key back before it ends.
                    abandon.fire();
                    drop(campaign.await);
                    return Ok(None);
                }
            };
            match result {
                Ok(Some(acquired)) => {
                    let Some(hold) = acquired.into_holds().pop() else { continue };
                    let interrupt = self.base.interrupt_on_loss;
                    return Ok(Some(LeadershipTerm::begin(&self.base, hold, interrupt)));
                }
                Ok(None) => {}
                Err(error) if error.is_closed() => return Ok(None),
                Err(error) if error.is_unreachable() => self.base.recipe().record_error(error),
                Err(error) => return Err(error),
            }
            if let Either::Second(()) = race(core.clock.sleep(PAUSE), self.stop.cancelled()).await {
                return Ok(None);
            }
        }
    }
}

impl Owned for Shared {
    fn lose(&self) {
        self.end(CloseMode::Notify);
    }

    fn cleanup(self: Arc<Self>, _until: Instant) -> BoxFuture<Result<()>> {
        // The key goes with its session.
        Box::pin(async { Ok(()) })
    }

    fn finish(&self, _limit: Duration) {}
}
