//! The observer: sees who leads, without standing for election.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use etcd_client::GetOptions;
use parking_lot::Mutex;

use super::participant::Participant;
use crate::client::{Client, identity};
use crate::contend::{Gone, Layout, Mirror};
use crate::error::{Error, Result};
use crate::lock::base::CLOSE_LIMIT;
use crate::recipe::{Broadcast, HasCore, ListenerId, Recipe, RecipeCore, Signal, Subscription};
use crate::watch::{Entry, Event, Flow, Range, Sink, Snapshot, Spec, Watching};

/// What an observer sees.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum LeaderChange {
    /// A candidate leads, in another term than the last one seen.
    Elected(Participant),
    /// The leader has published another value.
    Proclaimed(Participant),
    /// Nobody leads.
    Vacated,
    /// It sees nothing any more; the last event, unless it is started again.
    WatchFailed(Error),
}

/// Sees who leads a path, and every change of it, without standing for election.
///
/// The leader is the candidate whose key was created first, whichever program it belongs to.
///
/// # Losing it
///
/// An observer holds nothing. While etcd is out of its reach it goes on showing what it saw last,
/// and its connection state says `Suspended`. When it is back it catches up; leaders that came and
/// went meanwhile may be passed over, the present one never is. After a restart of etcd or a
/// compaction it reads anew. Only a refusal ends it: then the state is `Lost` and the last event
/// is [`WatchFailed`](LeaderChange::WatchFailed).
///
/// # Differences from Go's `Election.Observe`
///
/// It tells when nobody leads, names the term and the candidate, and survives a compaction.
///
/// # Example: follow the leader
///
/// ```
/// # use etcd_recipes::testing::EtcdServer;
/// use etcd_recipes::{Client, LeaderChange, LeaderObserver};
///
/// # fn main() -> etcd_recipes::Result<()> {
/// # let etcd = EtcdServer::start()?;
/// # let endpoint = etcd.endpoint();
/// let client = Client::connect([endpoint])?;
/// let observer = LeaderObserver::new(&client, "/elections/scheduler")?;
/// observer.add_listener(|change| match change {
///     LeaderChange::Elected(leader) => println!("{} leads", leader.client_id),
///     change => println!("{change:?}"),
/// });
/// observer.start()?;
/// assert!(observer.current_leader().is_none());
/// # Ok(()) }
/// ```
pub struct LeaderObserver {
    client: Client,
    seen: Arc<Seen>,
    watching: Mutex<Option<Watching>>,
    start_event: bool,
}

impl fmt::Debug for LeaderObserver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaderObserver")
            .field("path", &self.seen.recipe.path())
            .field("leader", &self.current_leader())
            .finish_non_exhaustive()
    }
}

/// Options of a [`LeaderObserver`]; each states its default.
///
/// # Example: hear of the present leader too
///
/// ```
/// # use etcd_recipes::{Client, LeaderObserver};
/// # fn main() -> etcd_recipes::Result<()> {
/// # let client = Client::connect(["http://127.0.0.1:2379"])?;
/// let observer =
///     LeaderObserver::builder(&client, "/elections/scheduler").start_event(true).build()?;
/// # drop(observer);
/// # Ok(()) }
/// ```
#[must_use = "a builder does nothing until `build`"]
pub struct LeaderObserverBuilder {
    client: Client,
    path: String,
    start_event: bool,
}

impl fmt::Debug for LeaderObserverBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaderObserverBuilder").field("path", &self.path).finish_non_exhaustive()
    }
}

impl LeaderObserverBuilder {
    /// Whether [`start`](LeaderObserver::start) tells of the state it finds: `Elected` if somebody
    /// leads, or else `Vacated`. Default: `false`.
    pub fn start_event(mut self, start_event: bool) -> Self {
        self.start_event = start_event;
        self
    }

    /// Checks the options. No I/O.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` naming the value: an empty path, one with `//`, a trailing `/` or a NUL.
    /// `Closed`, `Forked`.
    pub fn build(self) -> Result<LeaderObserver> {
        let path = identity::checked_path(self.path)?;
        self.client.check_usable()?;
        let core = self.client.core();
        let layout = Layout::candidates(core.physical(format!("{path}/").as_bytes()));
        let recipe = RecipeCore::new("LeaderObserver", path, self.client.client_id().to_owned());
        core.register_recipe(&recipe);
        let seen = Arc::new(Seen {
            mirror: Mutex::new(Mirror::new(layout.clone())),
            leader: Mutex::new(None),
            told: Broadcast::default(),
            failed: AtomicBool::new(false),
            layout,
            recipe,
        });
        let weak: Weak<Seen> = Arc::downgrade(&seen);
        seen.recipe.at_end(move || {
            if let Some(seen) = weak.upgrade() {
                seen.told.close();
            }
        });
        let start_event = self.start_event;
        Ok(LeaderObserver { client: self.client, seen, watching: Mutex::new(None), start_event })
    }
}

impl LeaderObserver {
    /// An observer with default options; see [`builder`](LeaderObserver::builder). No I/O.
    ///
    /// # Errors
    ///
    /// As [`LeaderObserverBuilder::build`].
    pub fn new(client: &Client, path: impl Into<String>) -> Result<LeaderObserver> {
        LeaderObserver::builder(client, path).build()
    }

    /// Options, then [`build`](LeaderObserverBuilder::build).
    pub fn builder(client: &Client, path: impl Into<String>) -> LeaderObserverBuilder {
        LeaderObserverBuilder { client: client.clone(), path: path.into(), start_event: false }
    }

    /// Reads who leads, and watches from there. Starting again does nothing, unless the watch has
    /// failed: then it begins anew, and tells what has changed since.
    ///
    /// # Errors
    ///
    /// `Unreachable` after the operation timeout, `PermissionDenied`, `Interrupted`, `Closed`,
    /// `Forked`; it may be started again.
    pub fn start(&self) -> Result<()> {
        let core = self.client.core().clone();
        let mut watching = self.watching.lock();
        core.check_usable()?;
        self.seen.recipe.check_open()?;
        let again = watching.is_some();
        if again && !self.seen.failed.load(Ordering::Acquire) {
            return Ok(());
        }
        let (seen, start_event) = (self.seen.clone(), self.start_event);
        let op = "observer.start";
        let started = core.clone().block_on(op, Some(&self.seen.recipe), async move {
            let options = GetOptions::new().with_prefix();
            let until = core.operation_limit();
            let read = core.range(op, seen.layout.watched(), Some(options), until).await?;
            let revision = read.header().map_or(0, |header| header.revision());
            let entries = read.kvs().iter().map(Entry::from).collect();
            if again {
                seen.resync(Snapshot { revision, entries });
                seen.resumed();
            } else {
                seen.begin(revision, entries, start_event);
            }
            seen.failed.store(false, Ordering::Release);
            let spec = Spec {
                range: Range::Prefix(seen.layout.watched().to_vec()),
                from: revision + 1,
                group: "elections",
            };
            Ok(core.watches.watch(spec, seen))
        })?;
        *watching = Some(started);
        Ok(())
    }

    /// Who leads, as far as the watch has told; `None` if nobody does, and before the start.
    pub fn current_leader(&self) -> Option<Participant> {
        self.seen.leader.lock().as_ref().map(|leader| leader.participant.clone())
    }

    /// Adds a listener for changes from now on. It runs on the observer's healer thread.
    pub fn add_listener(
        &self,
        listener: impl Fn(&LeaderChange) + Send + Sync + 'static,
    ) -> ListenerId {
        self.seen.told.add(Arc::new(listener)).id()
    }

    /// Removes a listener; once this has returned, no new call of it starts (one that is running
    /// may be finishing).
    pub fn remove_listener(&self, id: ListenerId) -> bool {
        self.seen.told.remove(id)
    }

    /// The same changes as a channel, for `select!`.
    pub fn events(&self) -> Subscription<LeaderChange> {
        self.seen.told.subscribe()
    }

    /// Sees nothing from now on.
    ///
    /// # Errors
    ///
    /// `Forked`.
    pub fn close(&self) -> Result<()> {
        let core = self.client.core();
        if core.is_forked() {
            return core.check_usable();
        }
        self.seen.recipe.closed().cancel();
        let watching = self.watching.lock().take();
        drop(watching);
        self.seen.recipe.close(CLOSE_LIMIT);
        Ok(())
    }
}

impl Drop for LeaderObserver {
    fn drop(&mut self) {
        if !self.client.core().is_forked() {
            self.seen.recipe.close(std::time::Duration::ZERO);
        }
    }
}

impl HasCore for LeaderObserver {
    fn core(&self) -> &RecipeCore {
        &self.seen.recipe
    }
}

impl Recipe for LeaderObserver {
    fn ping(&self) -> bool {
        self.client.ping()
    }

    fn close(&self) -> Result<()> {
        LeaderObserver::close(self)
    }
}

struct Seen {
    recipe: Arc<RecipeCore>,
    layout: Layout,
    mirror: Mutex<Mirror>,
    leader: Mutex<Option<Leader>>,
    told: Broadcast<LeaderChange>,
    /// The watch has ended by itself.
    failed: AtomicBool,
}

/// A leader as it was seen. The key tells it from another with the same term, which there can be
/// once etcd has lost its data.
#[derive(Clone)]
struct Leader {
    key: Vec<u8>,
    participant: Participant,
}

/// What an observer has to tell of two looks at the leader.
fn difference(before: Option<&Leader>, now: Option<&Leader>) -> Option<LeaderChange> {
    let (before, now) = match (before, now) {
        (None, None) => return None,
        (Some(_), None) => return Some(LeaderChange::Vacated),
        (None, Some(now)) => return Some(LeaderChange::Elected(now.participant.clone())),
        (Some(before), Some(now)) => (before, now),
    };
    let leader = &now.participant;
    if before.key != now.key || before.participant.term != leader.term {
        return Some(LeaderChange::Elected(leader.clone()));
    }
    (before.participant.proposal != leader.proposal)
        .then(|| LeaderChange::Proclaimed(leader.clone()))
}

impl Seen {
    fn begin(&self, revision: i64, entries: Vec<Entry>, tell: bool) {
        let found = self.look(|mirror| mirror.reset(revision, entries, true));
        *self.leader.lock() = found.clone();
        if tell {
            self.tell(difference(None, found.as_ref()).unwrap_or(LeaderChange::Vacated));
        }
    }

    /// Takes in a change, and says who leads after it.
    fn look(&self, change: impl FnOnce(&mut Mirror) -> Gone) -> Option<Leader> {
        let mut mirror = self.mirror.lock();
        let _ = change(&mut mirror);
        let first = mirror.entries().next()?;
        let participant = Participant::new(&self.layout, 0, first);
        Some(Leader { key: first.key.clone(), participant })
    }

    fn take_in(&self, change: impl FnOnce(&mut Mirror) -> Gone) {
        let found = self.look(change);
        let before = std::mem::replace(&mut *self.leader.lock(), found.clone());
        if let Some(change) = difference(before.as_ref(), found.as_ref()) {
            self.tell(change);
        }
    }

    fn tell(&self, change: LeaderChange) {
        self.told.tell(&self.recipe, change);
    }
}

impl Sink for Seen {
    fn deliver(&self, _revision: i64, events: Vec<Event>) -> Flow {
        // Revision by revision, so that a leader who was followed at once is told too.
        let mut rest = events.into_iter().peekable();
        while let Some(first) = rest.next() {
            let revision = first.mod_revision;
            let mut together = vec![first];
            while let Some(next) = rest.next_if(|event| event.mod_revision == revision) {
                together.push(next);
            }
            self.take_in(|mirror| mirror.apply(revision, together));
        }
        Flow::Continue
    }

    fn resync(&self, snapshot: Snapshot) {
        let Snapshot { revision, entries } = snapshot;
        self.take_in(|mirror| mirror.reset(revision, entries, true));
    }

    fn suspended(&self, cause: &Error) {
        log::debug!("{}: {cause}", self.recipe.identity());
        self.recipe.signal(Signal::Suspended);
    }

    fn resumed(&self) {
        self.recipe.signal(Signal::Restored);
    }

    fn failed(&self, error: Error) {
        // A client that closes ends its watches a moment before its recipes.
        if error.is_closed() || self.recipe.closed().is_cancelled() {
            return;
        }
        self.failed.store(true, Ordering::Release);
        self.recipe.signal(Signal::Lost);
        self.recipe.record_error(error.clone());
        self.told.tell_final(&self.recipe, LeaderChange::WatchFailed(error));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leader(key: &str, term: i64, proposal: &str) -> Leader {
        let participant = Participant {
            client_id: "me".to_owned(),
            is_leader: true,
            position: 0,
            term,
            proposal: proposal.into(),
        };
        Leader { key: key.into(), participant }
    }

    #[test]
    fn every_pair_of_looks() {
        let (a, b) = (leader("a", 1, "a"), leader("b", 2, "b"));
        let (again, other) = (leader("a", 1, "other"), leader("c", 1, "a"));
        let elected = |change: Option<LeaderChange>, leader: &Leader| matches!(change, Some(LeaderChange::Elected(p)) if p == leader.participant);
        assert!(difference(None, None).is_none());
        assert!(difference(Some(&a), Some(&a)).is_none());
        assert!(elected(difference(None, Some(&a)), &a));
        assert!(elected(difference(Some(&a), Some(&b)), &b));
        assert!(elected(difference(Some(&a), Some(&other)), &other));
        assert!(matches!(difference(Some(&a), None), Some(LeaderChange::Vacated)));
        let proclaimed = difference(Some(&a), Some(&again));
        assert!(matches!(proclaimed, Some(LeaderChange::Proclaimed(p)) if p == again.participant));
    }
}
