//! What every clone of a client and every recipe made with it shares.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use super::builder::Config;
use super::endpoints::Endpoints;
use super::member::Member;
use super::returns::Returns;
use super::runtime::{Abandon, Runtime, Slot};
use crate::cancel::{self, CancelToken};
use crate::clock::{Clock, Instant};
use crate::contend::{Ages, Queues};
use crate::error::{Error, ErrorKind, Result};
use crate::fork;
use crate::lease::SessionPool;
use crate::race::{Either, race};
use crate::recipe::{Healer, RecipeCore};
use crate::wait::{Stop, wait, wait_shielded};
use crate::watch::Hub;
use crate::whitebox;

/// How long an interrupted or closed call may take to clean up after itself before its caller
/// gets control back; the rest happens in the background.
const GRACE: Duration = Duration::from_millis(80);

/// How long closing may take beyond the time it gives etcd.
const CLOSE_SLACK: Duration = Duration::from_millis(300);

/// How long closing waits for etcd to confirm that everything was removed.
const CLOSE_LIMIT: Duration = Duration::from_secs(2);

/// Mass expiry must not become a mass of simultaneous grants.
const HEALS_IN_FLIGHT: usize = 256;

pub(crate) type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Something that lives as long as the client and has to end before it does.
pub(crate) trait Owned: Send + Sync {
    /// The client closes: flip flags, fire tokens, queue listeners. Does not block.
    fn lose(&self);

    /// Removes what stands in etcd; an error says that it could not be confirmed.
    fn cleanup(self: Arc<Self>, until: Instant) -> BoxFuture<Result<()>>;

    /// Ends threads, waiting no longer than `limit`.
    fn finish(&self, limit: Duration);
}

pub(crate) struct Core {
    pub(crate) config: Config,
    pub(crate) clock: Clock,
    pub(crate) runtime: Runtime,
    /// The thread of `with_raw`, once it was asked for.
    pub(super) raw: Mutex<Option<Runtime>>,
    pub(super) members: Vec<Member>,
    pub(super) endpoints: Mutex<Endpoints>,
    pub(crate) returns: Returns,
    pub(crate) closed: CancelToken,
    closing: AtomicBool,
    born: u64,
    pub(super) cluster: AtomicU64,
    pub(super) highest_term: AtomicU64,
    pub(crate) sessions: SessionPool,
    pub(crate) queues: Queues,
    /// The holds that have not lasted yet.
    pub(crate) young: Arc<Ages>,
    pub(crate) watches: Hub,
    /// Places for heals: however many leases die at once, this many are mended at a time.
    pub(crate) heals: tokio::sync::Semaphore,
    /// Runs the user's closures that no recipe owns (a custom retry policy).
    pub(super) user_code: Healer,
    owned: Mutex<Vec<Weak<dyn Owned>>>,
    _counted: whitebox::GaugeGuard<'static>,
}

impl Core {
    pub(super) fn start(config: Config) -> Result<Arc<Core>> {
        fork::watch();
        let runtime = Runtime::start("etcd-rx-io")?;
        let members: Vec<Member> = config.endpoints.iter().cloned().map(Member::new).collect();
        let core = Arc::new_cyclic(|weak: &Weak<Core>| Core {
            clock: config.clock.clone(),
            endpoints: Mutex::new(Endpoints::new(members.len())),
            returns: Returns::default(),
            members,
            runtime,
            raw: Mutex::new(None),
            closed: CancelToken::new(),
            closing: AtomicBool::new(false),
            born: fork::generation(),
            cluster: AtomicU64::new(0),
            highest_term: AtomicU64::new(0),
            sessions: SessionPool::default(),
            queues: Queues::default(),
            young: Ages::lasting(&config.clock),
            watches: Hub::new(weak.clone()),
            heals: tokio::sync::Semaphore::new(HEALS_IN_FLIGHT),
            user_code: Healer::new(
                "etcd-rx-user",
                Arc::new(|message| log::warn!("a retry policy panicked: {message}")),
            ),
            owned: Mutex::new(Vec::new()),
            _counted: whitebox::CLIENTS.enter(),
            config,
        });
        Ok(core)
    }

    // ----- what a call may assume -------------------------------------------------------------

    /// Whether this process is a fork's child, in which nothing of this client may be touched.
    pub(crate) fn is_forked(&self) -> bool {
        self.born != fork::generation()
    }

    /// Refuses calls in a fork's child and after the close.
    pub(crate) fn check_usable(&self) -> Result<()> {
        if self.is_forked() {
            return Err(Error::new(
                ErrorKind::Forked,
                "this client belongs to the parent process; connect a new one after a fork",
            ));
        }
        if self.closed.is_cancelled() {
            return Err(Error::closed("the client"));
        }
        Ok(())
    }

    /// The highest raft term seen in any answer.
    pub(crate) fn highest_term(&self) -> u64 {
        self.highest_term.load(Ordering::Acquire)
    }

    /// How long a call waits for etcd.
    pub(crate) fn operation_timeout(&self) -> Duration {
        self.config.resilience.get_rpc().get_operation_timeout()
    }

    /// When a call that starts now has waited long enough for etcd.
    pub(crate) fn operation_limit(&self) -> Instant {
        self.clock.now() + self.operation_timeout()
    }

    pub(crate) fn member_count(&self) -> usize {
        self.members.len()
    }

    pub(crate) fn pick_member(&self) -> usize {
        self.endpoints.lock().pick(self.clock.now())
    }

    pub(crate) fn member_after(&self, member: usize) -> usize {
        self.endpoints.lock().after(member, self.clock.now())
    }

    pub(crate) fn member_url(&self, member: usize) -> &str {
        self.members[member].url()
    }

    // ----- the namespace ----------------------------------------------------------------------

    /// A caller's key as etcd knows it.
    pub(crate) fn physical(&self, key: &[u8]) -> Vec<u8> {
        [self.config.namespace.as_bytes(), key].concat()
    }

    /// Etcd's key as the caller knows it.
    pub(crate) fn logical<'a>(&self, key: &'a [u8]) -> &'a [u8] {
        key.strip_prefix(self.config.namespace.as_bytes()).unwrap_or(key)
    }

    /// Etcd's key for a message.
    pub(crate) fn shown(&self, key: &[u8]) -> String {
        String::from_utf8_lossy(self.logical(key)).into_owned()
    }

    // ----- waiting for the runtime ------------------------------------------------------------

    /// Runs `task` on the runtime and waits for its result on this thread: the one way in for
    /// every blocking call. When the caller's scope is cancelled, or the client or the recipe is
    /// closed, the task is told through its [`Abandon`] and gets a moment to clean up.
    pub(crate) fn block<T, Fut>(
        &self,
        op: &'static str,
        recipe: Option<&RecipeCore>,
        task: impl FnOnce(Abandon) -> Fut,
    ) -> Result<T>
    where
        T: Send + 'static,
        Fut: Future<Output = Result<T>> + Send + 'static,
    {
        self.check_usable()?;
        if let Some(recipe) = recipe {
            recipe.check_open()?;
        }
        if cancel::interrupted() {
            return Err(Error::interrupted(op));
        }
        let abandon = Abandon::default();
        let slot = self.runtime.run(task(abandon.clone()));
        let closed: &[&CancelToken] = match recipe {
            Some(recipe) => &[&self.closed, recipe.closed()],
            None => &[&self.closed],
        };
        let stop = match wait(op, &self.clock, None, closed, slot.parker(), || slot.take()) {
            Ok(result) => return result,
            Err(stop) => stop,
        };
        abandon.fire();
        let late = self.await_slot(op, &slot, Some(self.clock.now() + GRACE));
        match (stop, late) {
            // The task had already succeeded when it was told; its result stands.
            (Stop::Interrupted, Some(Ok(value))) => Ok(value),
            (Stop::Closed(1), _) => {
                Err(Error::closed(recipe.map_or("the recipe", |r| r.identity())))
            }
            (Stop::Closed(_), _) => Err(Error::closed("the client")),
            (Stop::Interrupted | Stop::Limit, _) => Err(Error::interrupted(op)),
        }
    }

    /// `block` for a task that has nothing to clean up: it is dropped when its caller leaves.
    pub(crate) fn block_on<T, Fut>(
        &self,
        op: &'static str,
        recipe: Option<&RecipeCore>,
        task: Fut,
    ) -> Result<T>
    where
        T: Send + 'static,
        Fut: Future<Output = Result<T>> + Send + 'static,
    {
        self.block(op, recipe, |abandon| async move {
            match race(task, abandon.fired()).await {
                Either::First(result) => result,
                Either::Second(()) => Err(Error::interrupted(op)),
            }
        })
    }

    /// Runs `task` to its end whatever happens to the caller, and waits for it until `limit`;
    /// `None` means that it goes on in the background. For what is never interrupted: releases
    /// and closes.
    pub(crate) fn block_shielded<T, Fut>(
        &self,
        op: &'static str,
        limit: Instant,
        task: Fut,
    ) -> Option<Result<T>>
    where
        T: Send + 'static,
        Fut: Future<Output = Result<T>> + Send + 'static,
    {
        let slot = self.runtime.run(task);
        self.await_slot(op, &slot, Some(limit))
    }

    fn await_slot<T>(
        &self,
        op: &'static str,
        slot: &Slot<T>,
        limit: Option<Instant>,
    ) -> Option<Result<T>> {
        wait_shielded(op, &self.clock, limit, &[], slot.parker(), || slot.take()).ok()
    }

    // ----- what must end before the client ----------------------------------------------------

    pub(crate) fn register(&self, owned: Weak<dyn Owned>) {
        let mut list = self.owned.lock();
        // Amortised: the dead are swept when the list is about to grow.
        if list.len() == list.capacity() {
            list.retain(|weak| weak.strong_count() > 0);
        }
        list.push(owned);
    }

    pub(crate) fn register_recipe(&self, recipe: &Arc<RecipeCore>) {
        let weak: Weak<dyn Owned> = Arc::<RecipeCore>::downgrade(recipe);
        self.register(weak);
    }

    /// Ends everything, in the order that cannot hang: refuse new calls, wake the waiting, lose
    /// the holds, tell etcd within a bound, end user threads, end the runtime.
    pub(crate) fn close(&self) -> Result<()> {
        if self.is_forked() {
            return self.check_usable();
        }
        if self.closing.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let until = self.clock.now() + CLOSE_LIMIT;
        self.closed.cancel();
        let owned: Vec<Arc<dyn Owned>> =
            self.owned.lock().drain(..).filter_map(|weak| weak.upgrade()).collect();
        for one in &owned {
            one.lose();
        }
        let confirmed = self.cleanup_all(&owned, until);
        let slack_ends = self.clock.now() + CLOSE_SLACK;
        for one in &owned {
            one.finish(slack_ends.saturating_since(self.clock.now()));
        }
        self.user_code.close(slack_ends.saturating_since(self.clock.now()));
        let raw = self.raw.lock().take();
        if let Some(raw) = raw {
            raw.stop(CLOSE_SLACK);
        }
        self.runtime.stop(CLOSE_SLACK);
        self.sessions.clear();
        self.queues.clear();
        confirmed
    }

    fn cleanup_all(&self, owned: &[Arc<dyn Owned>], until: Instant) -> Result<()> {
        let cleanups: Vec<_> = owned.iter().map(|one| one.clone().cleanup(until)).collect();
        if cleanups.is_empty() {
            return Ok(());
        }
        let all = async move {
            let tasks: Vec<_> = cleanups.into_iter().map(tokio::spawn).collect();
            let mut outcome = Ok(());
            for task in tasks {
                match task.await {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => outcome = Err(error),
                    Err(error) => outcome = Err(Error::internal(error.to_string())),
                }
            }
            outcome
        };
        match self.block_shielded("client.close", until, all) {
            Some(Ok(())) => Ok(()),
            Some(Err(error)) => Err(unconfirmed(error.to_string())),
            None => Err(unconfirmed("etcd did not answer in time")),
        }
    }

    /// Whether this is the thread that drives the I/O, on which nothing may block.
    pub(crate) fn on_io_thread(&self) -> bool {
        self.runtime.is_current()
    }
}

pub(crate) fn unconfirmed(why: impl std::fmt::Display) -> Error {
    Error::new(
        ErrorKind::CleanupUnconfirmed,
        format!("closed, but not everything is known to be removed from etcd: {why}"),
    )
}

impl Owned for RecipeCore {
    fn lose(&self) {
        self.closed().cancel();
    }

    fn cleanup(self: Arc<Self>, _until: Instant) -> BoxFuture<Result<()>> {
        Box::pin(async { Ok(()) })
    }

    fn finish(&self, limit: Duration) {
        self.close(limit);
    }
}
