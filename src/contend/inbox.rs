//! Requests to end a hold, as they reach the client that has it.
//!
//! Each session has an inbox: a prefix that is named after its lease and lies below no recipe's
//! path. Whoever takes a request out of it decides what becomes of it: taken out by the client
//! that it is for, it is acknowledged and will be acted upon; taken back by its writer, it is not.
//!
//! The inbox is watched from when a hold or a wait has lasted a moment, so short ones pay nothing.

use std::collections::BTreeSet;
use std::sync::{Arc, Weak};
use std::time::Duration;

use etcd_client::GetOptions;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::requests;
use crate::client::call::Kind;
use crate::client::core::Core;
use crate::error::{Error, Result};
use crate::lease::Session;
use crate::recipe::{Broadcast, Callback, ListenerId, RecipeCore, Subscription};
use crate::watch::{Entry, Event, EventKind, Flow, Range, Sink, Snapshot, Spec, Watching};

const PAUSE: Duration = Duration::from_millis(100);

/// Where requests for the holds on this lease are put.
pub(super) fn inbox(core: &Core, lease: i64) -> Vec<u8> {
    core.physical(format!("/__etcd-recipes/requests/{lease:x}/").as_bytes())
}

/// What is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Wanted {
    /// The end of the hold, whatever its holder thinks.
    Force,
    /// That the holder hears of it.
    Ask,
}

/// A request as it stands in an inbox.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Request {
    pub(super) kind: Wanted,
    /// The client id of whoever wrote it.
    pub(super) from: String,
    pub(super) token: i64,
    /// The contender's key as etcd knows it.
    pub(super) key: String,
}

/// A polite request to release a hold.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReleaseRequest {
    /// The hold that is asked for: its key's create revision.
    pub token: i64,
    /// The path of the recipe.
    pub path: String,
    /// The client id of whoever asks.
    pub from: String,
}

/// Who of a recipe hears of polite requests.
#[derive(Default)]
pub(crate) struct Requests(Broadcast<ReleaseRequest>);

impl Requests {
    pub(super) fn tell(&self, recipe: &RecipeCore, token: i64, from: String) {
        self.0.tell(recipe, ReleaseRequest { token, path: recipe.path().to_owned(), from });
    }

    pub(crate) fn add(&self, callback: Callback<ReleaseRequest>) -> ListenerId {
        self.0.add(callback).id()
    }

    pub(crate) fn remove(&self, id: ListenerId) -> bool {
        self.0.remove(id)
    }

    pub(crate) fn subscribe(&self) -> Subscription<ReleaseRequest> {
        self.0.subscribe()
    }

    pub(super) fn close(&self) {
        self.0.close();
    }
}

/// A session's inbox, once it is watched.
#[derive(Default)]
pub(crate) struct Inbox(Mutex<State>);

#[derive(Default)]
struct State {
    open: Option<Open>,
    /// The create revisions of those who wait, so that one watch covers them all.
    waits: BTreeSet<i64>,
}

/// A wait that will open the inbox if it lasts; over when dropped.
pub(super) struct Reachable {
    session: Arc<Session>,
    create_revision: i64,
}

impl Reachable {
    pub(super) fn new(session: &Arc<Session>, create_revision: i64) -> Reachable {
        session.inbox.0.lock().waits.insert(create_revision);
        Reachable { session: session.clone(), create_revision }
    }
}

impl Drop for Reachable {
    fn drop(&mut self) {
        self.session.inbox.0.lock().waits.remove(&self.create_revision);
    }
}

struct Open {
    /// The first revision that is covered.
    from: i64,
    _watching: Watching,
}

impl Inbox {
    /// Sees to it that every request for a key that was created at this revision is found.
    pub(super) fn open(session: &Arc<Session>, create_revision: i64) {
        let core = session.core();
        let prefix = inbox(core, session.lease());
        let mut state = session.inbox.0.lock();
        let oldest = state.waits.first().map_or(create_revision, |wait| *wait);
        let from = create_revision.min(oldest) + 1;
        match &mut state.open {
            None => {
                let spec = Spec { range: Range::Prefix(prefix), from, group: "inboxes" };
                let watching = core.watches.watch(spec, Arc::new(Reader(Arc::downgrade(session))));
                state.open = Some(Open { from, _watching: watching });
            }
            Some(open) if from < open.from => {
                // Opened for a younger key: what came for this one before that is read.
                open.from = from;
                core.runtime.spawn(catch_up(session.clone(), prefix));
            }
            Some(_) => {}
        }
    }

    pub(crate) fn close(&self) {
        let open = self.0.lock().open.take();
        drop(open);
    }
}

struct Reader(Weak<Session>);

impl Sink for Reader {
    fn deliver(&self, _revision: i64, events: Vec<Event>) -> Flow {
        if let Some(session) = self.0.upgrade() {
            for event in events.into_iter().filter(|event| event.kind == EventKind::Put) {
                receive(&session, event.key, event.create_revision, &event.value);
            }
        }
        Flow::Continue
    }

    fn resync(&self, snapshot: Snapshot) {
        if let Some(session) = self.0.upgrade() {
            for entry in snapshot.entries {
                receive(&session, entry.key, entry.create_revision, &entry.value);
            }
        }
    }

    fn failed(&self, error: Error) {
        // Not permitted, say. Then nobody is heard, and whoever asks is told so.
        log::debug!("watching for requests to release: {error}");
    }
}

async fn catch_up(session: Arc<Session>, prefix: Vec<u8>) {
    let core = session.core();
    let options = GetOptions::new().with_prefix();
    match core.range("inbox", &prefix, Some(options), core.operation_limit()).await {
        Ok(response) => {
            for entry in response.kvs().iter().map(Entry::from) {
                receive(&session, entry.key, entry.create_revision, &entry.value);
            }
        }
        Err(error) => log::debug!("reading requests to release: {error}"),
    }
}

fn receive(session: &Arc<Session>, key: Vec<u8>, create_revision: i64, value: &[u8]) {
    match serde_json::from_slice::<Request>(value) {
        Ok(request) => {
            let taking = take_up(session.clone(), key, create_revision, request);
            session.core().runtime.spawn(taking);
        }
        Err(error) => {
            log::debug!("`{}` is no request: {error}", session.core().shown(&key));
        }
    }
}

async fn take_up(session: Arc<Session>, key: Vec<u8>, create_revision: i64, request: Request) {
    let core = session.core();
    let wanted = request.key.as_bytes();
    let is_here = match request.kind {
        Wanted::Ask => session.tenant(wanted, request.token).is_some(),
        Wanted::Force => session.is_live(wanted),
    };
    if !is_here {
        return;
    }
    match take_out(core, "inbox", &key, create_revision).await {
        Ok(true) => {}
        Ok(false) => return,
        Err(error) => {
            log::debug!("taking up `{}`: {error}", core.shown(&key));
            return;
        }
    }
    match request.kind {
        Wanted::Ask => {
            if let Some(tenant) = session.tenant(wanted, request.token) {
                tenant.asked(request.from);
            }
        }
        Wanted::Force => {
            log::warn!("`{}` is released by force, for {}", request.key, request.from);
            match session.condemn(wanted, request.token) {
                Some(tenant) => tenant.forced().await,
                None => remove(core, wanted, request.token).await,
            }
        }
    }
}

/// Takes away the key of somebody who waits: it will not become a hold, and queues anew.
async fn remove(core: &Core, key: &[u8], token: i64) {
    let txn = requests::delete_if(key, token);
    if let Err(error) = core.txn("inbox", key, Kind::Repeatable, txn, core.operation_limit()).await
    {
        log::debug!("removing `{}`: {error}", core.shown(key));
    }
}

/// Takes a request out of its inbox; `false` if the other side was quicker.
pub(super) async fn take_out(
    core: &Core,
    op: &'static str,
    key: &[u8],
    create_revision: i64,
) -> Result<bool> {
    let until = core.operation_limit();
    // An earlier try may have done it although its answer was lost.
    let mut maybe_done = false;
    loop {
        let txn = requests::delete_if(key, create_revision);
        match core.txn(op, key, Kind::Write, txn, until).await {
            Ok(response) => return Ok(response.succeeded() || maybe_done),
            Err(error) if error.is_ambiguous() && core.clock.now() < until => maybe_done = true,
            Err(error) => return Err(error),
        }
        core.clock.sleep(PAUSE).await;
    }
}
