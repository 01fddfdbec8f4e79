//! One contended path: its mirror, kept by one long-lived watch, and who in this process waits.
//!
//! A watch opened per wait would start at a revision that has passed, and etcd serves such
//! watchers only every 100 ms. So there is one watch per path and client; it stays open while
//! the path is contended and a while longer, and while an attempt under it is open, since it is
//! the watch that sees a late key of ours and takes it away.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use etcd_client::GetOptions;
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};

use super::Contender;
use super::layout::Layout;
use super::mirror::{Gone, Mirror, Turn};
use super::places::QueueProgress;
use super::requests;
use crate::client::core::Core;
use crate::clock::Instant;
use crate::error::{Error, Result};
use crate::recipe::Listener;
use crate::watch::{Entry, Event, EventKind, Flow, Range, Sink, Snapshot, Spec, Watching};
use crate::whitebox;

/// How long a path is watched after the last waiter has gone.
const KEEP_OPEN: Duration = Duration::from_secs(10);

/// When a new watch is helped out by reads, unless it is known to be live: if a write came between,
/// etcd serves it for the first time after up to 100 ms.
const PACED_READS: [Duration; 3] =
    [Duration::from_millis(20), Duration::from_millis(45), Duration::from_millis(70)];

/// The pause before an unreachable etcd is asked for the queue again.
const READ_PAUSE: Duration = Duration::from_millis(250);

/// What a waiter is told, once.
#[derive(Debug)]
pub(crate) enum Verdict {
    /// Its turn has come.
    Inside,
    /// Its key is gone.
    Vanished,
    /// The key in the way has no lease and would block for ever.
    Blocked(Vec<u8>),
    /// The path cannot be watched.
    Failed(Error),
}

/// Somebody of this process who waits with a key.
struct Waiter {
    create_revision: i64,
    tell: oneshot::Sender<Verdict>,
}

struct State {
    mirror: Mirror,
    /// The mirror has been filled once.
    loaded: bool,
    /// The watch is known to be a live one: it has delivered something, or nothing was written
    /// before it stood.
    proven: bool,
    failed: Option<Error>,
    /// By their keys, of which no two are the same at a time.
    waiters: HashMap<Vec<u8>, Waiter>,
    /// Recipes of whose waits somebody wants to hear.
    onlookers: Vec<Weak<Contender>>,
    users: usize,
    idle_since: Instant,
    heard: Instant,
    warned_of_deeper_key: bool,
}

pub(crate) struct PathQueue {
    core: Weak<Core>,
    layout: Layout,
    state: Mutex<State>,
    /// A user came or went, or a waiter registered.
    changed: Notify,
    _counted: whitebox::GaugeGuard<'static>,
}

/// The contended paths of one client.
#[derive(Default)]
pub(crate) struct Queues {
    paths: Mutex<HashMap<Layout, Arc<PathQueue>>>,
}

impl Queues {
    /// Joins the path's queue, opening it if need be; it stays open as long as the returned
    /// handle and a while longer.
    pub(crate) fn attach(&self, core: &Arc<Core>, layout: &Layout) -> Attached {
        let mut paths = self.paths.lock();
        let queue = paths.entry(layout.clone()).or_insert_with(|| {
            let queue = Arc::new(PathQueue::new(core, layout));
            core.runtime.spawn(queue.clone().run());
            queue
        });
        queue.state.lock().users += 1;
        Attached { queue: queue.clone() }
    }

    /// The path's queue, if it is open.
    pub(crate) fn find(&self, layout: &Layout) -> Option<Arc<PathQueue>> {
        self.paths.lock().get(layout).cloned()
    }

    /// Forgets a queue that nobody used for a while; `false` if somebody came back.
    fn remove_if_idle(&self, queue: &Arc<PathQueue>) -> bool {
        let mut paths = self.paths.lock();
        if queue.state.lock().users > 0 {
            return false;
        }
        paths.remove(&queue.layout);
        true
    }

    /// Forgets a queue that failed; one that was opened anew meanwhile stays.
    fn remove(&self, queue: &PathQueue) {
        let mut paths = self.paths.lock();
        if paths.get(&queue.layout).is_some_and(|open| std::ptr::eq(&**open, queue)) {
            let removed = paths.remove(&queue.layout);
            drop(paths);
            drop(removed);
        }
    }

    pub(crate) fn clear(&self) {
        let paths = std::mem::take(&mut *self.paths.lock());
        drop(paths);
    }
}

/// A stay in a path's queue.
pub(crate) struct Attached {
    queue: Arc<PathQueue>,
}

impl Attached {
    pub(crate) fn queue(&self) -> &PathQueue {
        &self.queue
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        {
            let mut state = self.queue.state.lock();
            state.users -= 1;
            if let Some(core) = self.queue.core.upgrade() {
                state.idle_since = core.clock.now();
            }
        }
        self.queue.changed.notify_one();
    }
}

/// A waiter's place in the list of those to be told; dropped, it is told nothing more.
pub(crate) struct Waiting<'a> {
    queue: &'a PathQueue,
    key: Vec<u8>,
    create_revision: i64,
    verdict: oneshot::Receiver<Verdict>,
}

impl Waiting<'_> {
    pub(crate) fn queue(&self) -> &PathQueue {
        self.queue
    }

    /// Told once; not to be asked again after that.
    pub(crate) fn poll_verdict(&mut self, context: &mut Context<'_>) -> Poll<Verdict> {
        let gone = |_| Verdict::Failed(Error::closed("the client"));
        Pin::new(&mut self.verdict).poll(context).map(|told| told.unwrap_or_else(gone))
    }
}

impl Waiting<'_> {
    /// Whether its key is still there.
    pub(crate) fn stands(&self) -> bool {
        self.turn() != Turn::Vanished
    }

    /// How many its path lets in now, where they are counted.
    pub(crate) fn count(&self) -> Option<usize> {
        let state = self.queue.state.lock();
        let turn = state.mirror.turn(&self.key, self.create_revision);
        (turn != Turn::TooEarly).then(|| state.mirror.count()).flatten()
    }

    /// A contender's key in the way that a stranger wrote over, so that it has no lease. Its
    /// owner will take it away, if there is one.
    pub(crate) fn orphan_ahead(&self) -> Option<Vec<u8>> {
        match self.turn() {
            Turn::Blocked { key, fresh: false } => Some(key),
            _ => None,
        }
    }

    fn turn(&self) -> Turn {
        self.queue.state.lock().mirror.turn(&self.key, self.create_revision)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut state = self.queue.state.lock();
        let mine = state.waiters.get(&self.key);
        if mine.is_some_and(|waiter| waiter.create_revision == self.create_revision) {
            state.waiters.remove(&self.key);
        }
    }
}

impl PathQueue {
    fn new(core: &Arc<Core>, layout: &Layout) -> PathQueue {
        let now = core.clock.now();
        PathQueue {
            core: Arc::downgrade(core),
            layout: layout.clone(),
            state: Mutex::new(State {
                mirror: Mirror::new(layout.clone()),
                loaded: false,
                proven: false,
                failed: None,
                waiters: HashMap::new(),
                onlookers: Vec::new(),
                users: 0,
                idle_since: now,
                heard: now,
                warned_of_deeper_key: false,
            }),
            changed: Notify::new(),
            _counted: whitebox::QUEUES.enter(),
        }
    }

    /// Registers the contender whose key was created at this revision.
    pub(crate) fn wait_for(&self, key: &[u8], create_revision: i64) -> Waiting<'_> {
        let (tell, verdict) = oneshot::channel();
        {
            let mut state = self.state.lock();
            state.waiters.insert(key.to_vec(), Waiter { create_revision, tell });
            state.judge_one(key);
        }
        self.changed.notify_one();
        Waiting { queue: self, key: key.to_vec(), create_revision, verdict }
    }

    /// Whether the queue has been read, so that whoever still waits is known to be behind.
    pub(crate) fn is_loaded(&self) -> bool {
        self.state.lock().loaded
    }

    /// A release's answer named the head of the queue. If that is a waiter of this process, it
    /// holds from now on: no watch is needed for a neighbour.
    pub(crate) fn head_seen(&self, key: &[u8], create_revision: i64) {
        let told;
        {
            let mut state = self.state.lock();
            state.tell(key, create_revision, Verdict::Inside);
            let is_this = |other: &[u8], created| other == key && created == create_revision;
            told = state.tell_progress(|_, key, created| is_this(key, created).then_some(0));
        }
        drop(told);
    }

    /// Tells this recipe of the places of its waits, from now on; a newcomer among its listeners
    /// hears also what the others know.
    pub(super) fn look_on(
        &self,
        contender: &Arc<Contender>,
        newcomer: Option<&Listener<QueueProgress>>,
    ) {
        let mut state = self.state.lock();
        let State { mirror, onlookers, .. } = &mut *state;
        let position = |key: &[u8], created| mirror.position(key, created);
        let is_new =
            || !onlookers.iter().any(|one| std::ptr::eq(one.as_ptr(), Arc::as_ptr(contender)));
        if contender.tell_progress(newcomer, position) && is_new() {
            onlookers.push(Arc::downgrade(contender));
        }
    }

    /// How many stand ahead of this contender, if its key is here.
    pub(crate) fn position(&self, key: &[u8], create_revision: i64) -> Option<usize> {
        self.state.lock().mirror.position(key, create_revision)
    }

    /// When etcd last said anything about this path.
    pub(crate) fn heard_at(&self) -> Instant {
        self.state.lock().heard
    }

    // ----- the task that keeps the mirror -----------------------------------------------------

    async fn run(self: Arc<PathQueue>) {
        let Some(core) = self.core.upgrade() else { return };
        let Some(watching) = self.open(&core).await else { return };
        self.bridge(&core).await;
        loop {
            let idle_since = {
                let state = self.state.lock();
                (state.users == 0).then_some(state.idle_since)
            };
            match idle_since {
                None => self.changed.notified().await,
                Some(since) => {
                    let closing = since + KEEP_OPEN;
                    if core.clock.now() >= closing && core.queues.remove_if_idle(&self) {
                        break;
                    }
                    core.clock.sleep_until(closing).await;
                }
            }
        }
        drop(watching);
    }

    /// Reads the queue and watches from there; `None` when that is refused or nobody wants it
    /// any more.
    async fn open(self: &Arc<PathQueue>, core: &Arc<Core>) -> Option<Watching> {
        loop {
            match self.read(core).await {
                Ok(revision) => {
                    let spec = Spec {
                        range: Range::Prefix(self.layout.watched().to_vec()),
                        from: revision + 1,
                        group: "queues",
                    };
                    return Some(core.watches.watch_at_once(spec, self.clone()));
                }
                Err(error) if error.is_unreachable() => {
                    if self.state.lock().users == 0 && core.queues.remove_if_idle(self) {
                        return None;
                    }
                    // The retry policy may be to give up at once.
                    core.clock.sleep(READ_PAUSE).await;
                }
                Err(error) => {
                    self.failed(error);
                    return None;
                }
            }
        }
    }

    /// Reads alongside a watch that etcd may not serve yet.
    async fn bridge(&self, core: &Arc<Core>) {
        let opened = core.clock.now();
        for pause in PACED_READS {
            core.clock.sleep_until(opened + pause).await;
            {
                let state = self.state.lock();
                if state.proven || state.waiters.is_empty() {
                    return;
                }
            }
            if let Err(error) = self.read(core).await {
                log::debug!(
                    "reading {} ahead of its watch: {error}",
                    core.shown(self.layout.watched())
                );
            }
        }
    }

    async fn read(&self, core: &Arc<Core>) -> Result<i64> {
        let options = GetOptions::new().with_prefix();
        let until = core.operation_limit();
        let response = core.range("queue", self.layout.watched(), Some(options), until).await?;
        let revision = response.header().map_or(0, |header| header.revision());
        let entries: Vec<Entry> = response.kvs().iter().map(Entry::from).collect();
        self.take_in(core, false, |mirror| mirror.reset(revision, entries, false));
        self.sweep(core);
        Ok(revision)
    }

    fn take_in(&self, core: &Arc<Core>, proven: bool, change: impl FnOnce(&mut Mirror) -> Gone) {
        let told;
        {
            let mut state = self.state.lock();
            let gone = change(&mut state.mirror);
            state.loaded = true;
            state.proven |= proven;
            state.heard = core.clock.now();
            state.judge(gone);
            told = state.tell_progress(|mirror, key, created| mirror.position(key, created));
        }
        drop(told);
    }

    /// Removes what stands here of attempts that were given up for lost.
    pub(crate) fn sweep(&self, core: &Arc<Core>) {
        let keys: Vec<_> = {
            let state = self.state.lock();
            let marks = |entry: &Entry| (entry.key.clone(), entry.create_revision, entry.lease);
            state.mirror.entries().map(marks).collect()
        };
        for (key, create_revision, lease) in keys {
            remove_if_stray(core, key, create_revision, lease);
        }
    }

    fn fail(&self, error: Error) {
        let mut state = self.state.lock();
        for (_, waiter) in state.waiters.drain() {
            let _ = waiter.tell.send(Verdict::Failed(error.clone()));
        }
        state.failed = Some(error);
    }

    fn warn_of_deeper_keys(&self, core: &Core, events: &[Event]) {
        let Some(deeper) = events.iter().find(|event| !self.layout.is_known(&event.key)) else {
            return;
        };
        let first = !std::mem::replace(&mut self.state.lock().warned_of_deeper_key, true);
        if first {
            log::warn!(
                "`{}` lies below the queue `{}`: it is skipped here, but Go programs wait for it",
                core.shown(&deeper.key),
                core.shown(self.layout.watched())
            );
        }
    }
}

/// A key with a lease of ours that belongs to no attempt or hold of ours comes from a request
/// that was given up for lost and applied after all. Nobody will ever use it.
fn remove_if_stray(core: &Arc<Core>, key: Vec<u8>, create_revision: i64, lease: i64) {
    let Some(session) = core.sessions.find(lease) else { return };
    if !session.is_live(&key) {
        core.runtime.spawn(requests::remove_stray(core.clone(), session, key, create_revision));
    }
}

impl State {
    fn tell(&mut self, key: &[u8], create_revision: i64, verdict: Verdict) {
        if self.waiters.get(key).is_some_and(|waiter| waiter.create_revision == create_revision)
            && let Some(waiter) = self.waiters.remove(key)
        {
            let _ = waiter.tell.send(verdict);
        }
    }

    /// Tells every waiter for whom the change decides something. Only those who may be inside are
    /// looked at, so it costs the same however many wait.
    fn judge(&mut self, gone: Gone) {
        match gone {
            Gone::Keys(keys) => {
                for (create_revision, key) in keys {
                    self.tell(&key, create_revision, Verdict::Vanished);
                }
            }
            Gone::Unknown => return self.judge_all(),
        }
        if self.mirror.has_leaseless() {
            return self.judge_all();
        }
        let is_waiting = |key: &[u8]| self.waiters.contains_key(key);
        let inside: Vec<_> = self
            .mirror
            .inside()
            .into_iter()
            .filter(|standing| is_waiting(&standing.entry.key))
            .map(|standing| (standing.entry.key.clone(), standing.entry.create_revision))
            .collect();
        for (key, create_revision) in inside {
            self.tell(&key, create_revision, Verdict::Inside);
        }
    }

    /// Tells those who want to hear it of the places that have changed. Returns the recipes it has
    /// looked at, to be dropped where no lock is held.
    fn tell_progress(
        &mut self,
        position: impl Fn(&Mirror, &[u8], i64) -> Option<usize>,
    ) -> Vec<Arc<Contender>> {
        let State { mirror, onlookers, .. } = self;
        let mut told = Vec::new();
        onlookers.retain(|onlooker| {
            let Some(contender) = onlooker.upgrade() else { return false };
            let goes_on =
                contender.tell_progress(None, |key, created| position(mirror, key, created));
            told.push(contender);
            goes_on
        });
        told
    }

    fn judge_all(&mut self) {
        let keys: Vec<_> = self.waiters.keys().cloned().collect();
        for key in keys {
            self.judge_one(&key);
        }
    }

    fn judge_one(&mut self, key: &[u8]) {
        let Some(create_revision) = self.waiters.get(key).map(|waiter| waiter.create_revision)
        else {
            return;
        };
        let verdict = match &self.failed {
            Some(error) => Verdict::Failed(error.clone()),
            None if !self.loaded => return,
            None => match self.mirror.turn(key, create_revision) {
                Turn::Inside => Verdict::Inside,
                Turn::Vanished => Verdict::Vanished,
                Turn::Blocked { key, fresh: true } => Verdict::Blocked(key),
                Turn::TooEarly | Turn::Behind | Turn::Blocked { .. } => return,
            },
        };
        self.tell(key, create_revision, verdict);
    }
}

impl Sink for PathQueue {
    fn deliver(&self, revision: i64, events: Vec<Event>) -> Flow {
        if let Some(core) = self.core.upgrade() {
            self.warn_of_deeper_keys(&core, &events);
            let puts: Vec<_> = events
                .iter()
                .filter(|event| event.kind == EventKind::Put)
                .map(|event| (event.key.clone(), event.create_revision, event.lease))
                .collect();
            self.take_in(&core, true, |mirror| mirror.apply(revision, events));
            for (key, create_revision, lease) in puts {
                remove_if_stray(&core, key, create_revision, lease);
            }
        }
        Flow::Continue
    }

    fn resync(&self, snapshot: Snapshot) {
        if let Some(core) = self.core.upgrade() {
            let Snapshot { revision, entries } = snapshot;
            self.take_in(&core, false, |mirror| mirror.reset(revision, entries, true));
            self.sweep(&core);
        }
    }

    fn in_step(&self) {
        self.state.lock().proven = true;
    }

    fn heard(&self) {
        if let Some(core) = self.core.upgrade() {
            self.state.lock().heard = core.clock.now();
        }
    }

    fn failed(&self, error: Error) {
        self.fail(error);
        // The next to come opens the path anew.
        if let Some(core) = self.core.upgrade() {
            core.queues.remove(self);
        }
    }
}
