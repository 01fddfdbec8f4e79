//! Ending a hold that may be anybody's: at once, or through the library that has it.

use std::sync::Arc;
use std::time::Duration;

use etcd_client::{Compare, CompareOp, PutOptions, Txn, TxnOp};
use tokio::sync::watch;

use super::Contender;
use super::inbox::{self, Request, Wanted};
use super::leave::tell_heads;
use super::requests::{self, read_queue};
use crate::client::call::Kind;
use crate::client::core::Core;
use crate::clock::Instant;
use crate::error::{Error, ErrorKind, Result};
use crate::race::race;
use crate::watch::{Entry, Event, EventKind, Flow, Range, Sink, Snapshot, Spec, Watching};

/// By how much a request's lease outlasts the wait for its acknowledgement.
const SPARE: Duration = Duration::from_secs(3);

/// How long the request's lease is waited for at the end; its TTL does it otherwise.
const CLEAN_UP: Duration = Duration::from_secs(2);

/// Deletes the keys with this create revision, whatever their holder thinks.
pub(crate) async fn force_now(
    contender: Arc<Contender>,
    op: &'static str,
    token: i64,
) -> Result<bool> {
    let Contender { core, layout, .. } = &*contender;
    loop {
        let read = read_queue(core, op, layout).await?;
        let here = read.line.iter().map(|standing| &standing.entry);
        let keys: Vec<&[u8]> = here
            .filter(|entry| entry.create_revision == token)
            .map(|entry| entry.key.as_slice())
            .collect();
        let Some(first) = keys.first().copied() else { return Ok(false) };
        let txn = requests::leave(&[(layout, keys)], token);
        let response = core.txn(op, first, Kind::Write, txn, core.operation_limit()).await?;
        tell_heads(core, [&contender], &response);
        // Otherwise one of several went meanwhile, if not all.
        if response.succeeded() {
            return Ok(true);
        }
    }
}

/// Puts a request into the inbox of the hold's session, and waits until it is taken up and, where
/// the hold is to end, until its key is gone.
pub(crate) async fn request(
    contender: Arc<Contender>,
    op: &'static str,
    token: i64,
    wanted: Wanted,
    limit: Duration,
) -> Result<bool> {
    let Contender { core, layout, recipe, .. } = &*contender;
    let read = read_queue(core, op, layout).await?;
    let has_token = |entry: &Entry| entry.create_revision == token;
    let is_inside = || read.inside(layout).iter().any(|standing| has_token(&standing.entry));
    let target = read.line.iter().map(|standing| &standing.entry).find(|entry| has_token(entry));
    let Some(target) = target.filter(|_| wanted == Wanted::Force || is_inside()) else {
        return Ok(false);
    };
    let unheard = || {
        let key = core.shown(&target.key);
        let text = format!("{}: the holder of `{key}` did not take it up", recipe.identity());
        Error::on_key(ErrorKind::NotAcknowledged, text, &key)
    };
    let Some(key) = String::from_utf8(target.key.clone()).ok().filter(|_| target.lease != 0) else {
        return Err(unheard());
    };
    let request = Request { kind: wanted, from: recipe.client_id().to_owned(), token, key };
    let value = serde_json::to_vec(&request).map_err(|error| Error::internal(error.to_string()))?;
    let slip = Slip::new(core, op, limit).await?;
    let outcome = match slip.post(target, value).await {
        Ok(Some(posted)) => slip.wait(posted, target, wanted, limit).await,
        Ok(None) => Ok(Some(false)),
        Err(error) => Err(error),
    };
    slip.end().await;
    outcome?.ok_or_else(unheard)
}

/// What has become of a request and of the key it is about.
#[derive(Debug, Clone, Default)]
struct Seen {
    taken: bool,
    target_gone: bool,
    failed: Option<Error>,
}

/// A request under way, on a lease of its own; nothing of it stays behind.
struct Slip {
    core: Arc<Core>,
    op: &'static str,
    lease: i64,
    ends: Instant,
    ended: bool,
}

/// A request that stands in an inbox.
struct Posted {
    key: Vec<u8>,
    revision: i64,
}

impl Slip {
    async fn new(core: &Arc<Core>, op: &'static str, limit: Duration) -> Result<Slip> {
        let ttl = i64::try_from((limit + SPARE).as_secs()).unwrap_or(i64::MAX);
        let granted = core.grant(op, ttl, core.operation_limit()).await?;
        let ends = granted.sent + Duration::from_secs(granted.ttl.unsigned_abs());
        Ok(Slip { core: core.clone(), op, lease: granted.id, ends, ended: false })
    }

    /// Writes the request, if the hold it is about still stands.
    async fn post(&self, target: &Entry, value: Vec<u8>) -> Result<Option<Posted>> {
        let Slip { core, op, lease, .. } = self;
        let token = target.create_revision;
        let mut key = inbox::inbox(core, target.lease);
        key.extend_from_slice(format!("{token}-{lease:x}").as_bytes());
        let put = PutOptions::new().with_lease(*lease);
        let txn = Txn::new()
            .when([Compare::create_revision(target.key.clone(), CompareOp::Equal, token)])
            .and_then([TxnOp::put(key.clone(), value, Some(put))]);
        let response = core.txn(op, &key, Kind::Write, txn, core.operation_limit()).await?;
        let revision = response.header().map_or(0, |header| header.revision());
        Ok(response.succeeded().then_some(Posted { key, revision }))
    }

    /// `None`: nobody has taken it up, and it is taken back.
    async fn wait(
        &self,
        posted: Posted,
        target: &Entry,
        wanted: Wanted,
        limit: Duration,
    ) -> Result<Option<bool>> {
        let Slip { core, op, .. } = self;
        let until = core.clock.now() + limit;
        let (tell, mut seen) = watch::channel(Seen::default());
        let tell = Arc::new(tell);
        let _watches = [
            self.look_at(&posted.key, posted.revision, posted.revision, &tell, Seen::take),
            self.look_at(&target.key, target.create_revision, posted.revision, &tell, Seen::lose),
        ];
        let decided = seen.wait_for(|seen| seen.taken || seen.target_gone || seen.failed.is_some());
        race(async { drop(decided.await) }, core.clock.sleep_until(until)).await;
        let Seen { taken, target_gone, failed } = seen.borrow().clone();
        // Gone with its own lease, it was not taken up either.
        let is_late = || core.clock.now() >= self.ends;
        let taken = (taken && !is_late())
            || (!inbox::take_out(core, op, &posted.key, posted.revision).await? && !is_late());
        if !taken {
            return match failed {
                Some(error) => Err(error),
                None => Ok(target_gone.then_some(false)),
            };
        }
        if wanted == Wanted::Force {
            let gone = seen.wait_for(|seen| seen.target_gone || seen.failed.is_some());
            race(async { drop(gone.await) }, core.clock.sleep_until(core.operation_limit())).await;
            if !seen.borrow().target_gone {
                return Err(Error::new(
                    ErrorKind::OutcomeUnknown,
                    format!("`{}`: taken up, but not known to be gone", core.shown(&target.key)),
                ));
            }
        }
        Ok(Some(true))
    }

    fn look_at(
        &self,
        key: &[u8],
        create_revision: i64,
        after: i64,
        tell: &Arc<watch::Sender<Seen>>,
        gone: fn(&mut Seen),
    ) -> Watching {
        let spec =
            Spec { range: Range::Key(key.to_vec()), from: after + 1, group: "release-requests" };
        let eye = Eye { create_revision, tell: tell.clone(), gone };
        self.core.watches.watch(spec, Arc::new(eye))
    }

    async fn end(mut self) {
        self.ended = true;
        let until = self.core.clock.now() + CLEAN_UP;
        if let Err(error) = self.core.revoke(self.op, self.lease, until).await {
            log::debug!("the lease of a request is left to its TTL: {error}");
        }
    }
}

impl Drop for Slip {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        // The caller has left.
        let (core, op, lease) = (self.core.clone(), self.op, self.lease);
        self.core.runtime.spawn(async move {
            let until = core.clock.now() + CLEAN_UP;
            drop(core.revoke(op, lease, until).await);
        });
    }
}

impl Seen {
    fn take(&mut self) {
        self.taken = true;
    }

    fn lose(&mut self) {
        self.target_gone = true;
    }
}

/// Looks out for the end of one key.
struct Eye {
    create_revision: i64,
    tell: Arc<watch::Sender<Seen>>,
    gone: fn(&mut Seen),
}

impl Sink for Eye {
    fn deliver(&self, _revision: i64, events: Vec<Event>) -> Flow {
        let ends = |event: &Event| {
            event.kind == EventKind::Delete || event.create_revision != self.create_revision
        };
        if events.iter().any(ends) {
            self.tell.send_modify(self.gone);
        }
        Flow::Continue
    }

    fn resync(&self, snapshot: Snapshot) {
        let stands = |entry: &Entry| entry.create_revision == self.create_revision;
        if !snapshot.entries.iter().any(stands) {
            self.tell.send_modify(self.gone);
        }
    }

    fn failed(&self, error: Error) {
        self.tell.send_modify(|seen| seen.failed = Some(error));
    }
}
