//! One acquire, from the first request to the hold: what happens on the runtime while the caller
//! waits.
//!
//! However it ends, its key is accounted for: it is the hold's, or it was deleted, or (no answer)
//! it is left open with its session, which sees to it that a late key blocks nobody.

use std::sync::Arc;
use std::time::Duration;

use super::Contender;
use super::hold::{Hold, leave};
use super::queue::Verdict;
use super::requests::{self, Enqueued, Place, Tried};
use crate::client::call::Kind;
use crate::client::runtime::Abandon;
use crate::clock::Instant;
use crate::error::{Error, ErrorKind, Result};
use crate::lease::Ticket;
use crate::race::{Either, race};
use crate::recipe::Signal;

/// How long an unfinished request or clean-up is still waited for once the caller has to go.
const LAST_MOMENT: Duration = Duration::from_millis(60);

/// How often a waiter looks whether etcd is still there.
const LOOK_AROUND: Duration = Duration::from_millis(500);

/// `try_lock` does not wait for others; this is how long it waits for etcd.
const TRY_LIMIT: Duration = Duration::from_secs(5);

/// A hold on its way to the caller; released if the caller is gone.
pub(crate) struct Acquired(Option<Arc<Hold>>);

impl Acquired {
    pub(crate) fn into_hold(mut self) -> Result<Arc<Hold>> {
        self.0.take().ok_or_else(|| Error::internal("a hold was handed out twice"))
    }
}

impl Drop for Acquired {
    fn drop(&mut self) {
        if let Some(hold) = self.0.take() {
            hold.release_in_background();
        }
    }
}

/// Why the caller does not wait any longer.
#[derive(Clone, Copy)]
enum Leaving {
    Limit,
    Abandoned,
}

/// What became of one try to join the queue.
enum Joined {
    In(Ticket, Enqueued),
    /// Nothing stands; try again with a new key.
    Again,
    Out(Leaving),
}

struct Acquire {
    contender: Arc<Contender>,
    limit: Option<Instant>,
    abandon: Abandon,
    /// When etcd last answered anything of this call.
    heard: Instant,
    /// An answer has placed a key of this call behind somebody.
    placed: bool,
}

/// Waits for the turn, until `limit`; `Ok(None)` only if somebody was seen ahead.
pub(crate) async fn acquire(
    contender: Arc<Contender>,
    limit: Option<Instant>,
    abandon: Abandon,
) -> Result<Option<Acquired>> {
    let heard = contender.core.clock.now();
    let mut call = Acquire { contender, limit, abandon, heard, placed: false };
    loop {
        let ticket = match call.ticket().await? {
            Either::First(ticket) => ticket,
            Either::Second(leaving) => return call.leave_empty_handed(leaving),
        };
        let (ticket, enqueued) = match call.join(ticket).await? {
            Joined::In(ticket, enqueued) => (ticket, enqueued),
            Joined::Again => continue,
            Joined::Out(leaving) => return call.leave_empty_handed(leaving),
        };
        let turn = match enqueued.place {
            Place::First => Turn::Ours(ticket),
            Place::Behind | Place::Unclear => call.wait_for_turn(ticket, &enqueued).await?,
        };
        match turn {
            Turn::Ours(ticket) => {
                if let Some(acquired) = call.hold(ticket, enqueued.create_revision) {
                    return Ok(Some(acquired));
                }
            }
            Turn::Again => {}
            Turn::Out(leaving) => return call.leave_empty_handed(leaving),
        }
    }
}

/// Takes the hold if nobody has it or waits for it; writes nothing otherwise.
pub(crate) async fn try_acquire(
    contender: Arc<Contender>,
    abandon: Abandon,
) -> Result<Option<Acquired>> {
    let core = contender.core.clone();
    let heard = core.clock.now();
    let limit = heard + TRY_LIMIT.min(core.operation_timeout());
    let mut call =
        Acquire { contender: contender.clone(), limit: Some(limit), abandon, heard, placed: false };
    loop {
        let ticket = match call.ticket().await? {
            Either::First(ticket) => ticket,
            Either::Second(leaving) => return call.leave_empty_handed(leaving),
        };
        let (prefix, key) = (&contender.prefix, ticket.key().to_vec());
        let lease = ticket.session().lease();
        let txn = requests::enqueue_if_empty(prefix, &key, &contender.identity(), lease);
        let request = core.txn("try_lock", &key, Kind::Write, txn, call.until());
        let answer = match call.in_time(request).await {
            Either::First(answer) => answer,
            Either::Second((leaving, None)) => {
                contender.leave_open(ticket);
                return call.leave_empty_handed(leaving);
            }
            // Answered in the last moment: as good as in time.
            Either::Second((_, Some(answer))) => answer,
        };
        let create_revision = match answer {
            Ok(response) => match requests::tried(&response, prefix) {
                Tried::Held { create_revision } => create_revision,
                Tried::Busy => {
                    ticket.settle();
                    return Ok(None);
                }
                Tried::OnlyDeeperKeys => return call.try_past_deeper_keys(ticket).await,
            },
            // Applied only if the queue was empty, so a key that is seen holds.
            Err(error) => match call.recognise(ticket, error).await? {
                Joined::In(ticket, enqueued) => match call.hold(ticket, enqueued.create_revision) {
                    Some(acquired) => return Ok(Some(acquired)),
                    None => continue,
                },
                Joined::Again => continue,
                Joined::Out(leaving) => return call.leave_empty_handed(leaving),
            },
        };
        if let Some(acquired) = call.hold(ticket, create_revision) {
            return Ok(Some(acquired));
        }
    }
}

enum Turn {
    Ours(Ticket),
    Again,
    Out(Leaving),
}

impl Acquire {
    /// When this call gives up if etcd stays silent.
    fn silent_at(&self) -> Instant {
        self.heard + self.contender.core.operation_timeout()
    }

    fn until(&self) -> Instant {
        self.limit.map_or(self.silent_at(), |limit| limit.min(self.silent_at()))
    }

    fn hear(&mut self) {
        self.heard = self.contender.core.clock.now();
    }

    /// Ready when the caller's limit has passed or the caller has left.
    async fn leaving(&self) -> Leaving {
        let limit = self.limit.unwrap_or(Instant::FAR_FUTURE);
        match race(self.abandon.fired(), self.contender.core.clock.sleep_until(limit)).await {
            Either::First(()) => Leaving::Abandoned,
            Either::Second(()) => Leaving::Limit,
        }
    }

    /// Awaits a request, and for a last moment beyond the point at which the caller leaves: cut
    /// short it would leave behind an attempt whose outcome nobody knows.
    async fn in_time<T>(
        &self,
        request: impl Future<Output = T>,
    ) -> Either<T, (Leaving, Option<T>)> {
        let mut request = std::pin::pin!(request);
        match race(&mut request, self.leaving()).await {
            Either::First(answer) => Either::First(answer),
            Either::Second(leaving) => {
                let last_moment = self.contender.core.clock.sleep(LAST_MOMENT);
                let answer = match race(&mut request, last_moment).await {
                    Either::First(answer) => Some(answer),
                    Either::Second(()) => None,
                };
                Either::Second((leaving, answer))
            }
        }
    }

    fn leave_empty_handed(&self, leaving: Leaving) -> Result<Option<Acquired>> {
        match leaving {
            Leaving::Limit if self.placed => Ok(None),
            Leaving::Limit => Err(self.unreachable("the limit passed before etcd answered")),
            Leaving::Abandoned => Err(Error::interrupted("acquire")),
        }
    }

    fn unreachable(&self, why: &str) -> Error {
        let identity = self.contender.recipe.identity();
        Error::new(ErrorKind::Unreachable, format!("{identity}: {why}"))
    }

    /// A refusal that came because time was up is the limit's doing.
    fn judge_error(&self, error: Error) -> Result<Leaving> {
        let past = |limit| self.contender.core.clock.now() >= limit;
        if error.is_unreachable() && self.limit.is_some_and(past) {
            return Ok(Leaving::Limit);
        }
        Err(error)
    }

    async fn ticket(&self) -> Result<Either<Ticket, Leaving>> {
        let Contender { core, recipe, session, prefix, .. } = &*self.contender;
        let ticket = core.sessions.ticket(core, *session, prefix, recipe, self.until());
        match race(ticket, self.leaving()).await {
            Either::First(Ok(ticket)) => Ok(Either::First(ticket)),
            Either::First(Err(error)) => self.judge_error(error).map(Either::Second),
            Either::Second(leaving) => Ok(Either::Second(leaving)),
        }
    }

    /// Sends the key and finds out where it stands.
    async fn join(&mut self, ticket: Ticket) -> Result<Joined> {
        let contender = self.contender.clone();
        let key = ticket.key().to_vec();
        let lease = ticket.session().lease();
        let txn = requests::enqueue(&contender.prefix, &key, &contender.identity(), lease);
        let request = contender.core.txn("lock", &key, Kind::Write, txn, self.until());
        let (answer, leaving) = match self.in_time(request).await {
            Either::First(answer) => (answer, None),
            Either::Second((leaving, Some(answer))) => (answer, Some(leaving)),
            Either::Second((leaving, None)) => {
                contender.leave_open(ticket);
                return Ok(Joined::Out(leaving));
            }
        };
        let response = match answer {
            Ok(response) => response,
            Err(error) => return self.recognise(ticket, error).await,
        };
        self.hear();
        let Some(enqueued) = requests::enqueued(&response, &contender.prefix, &key) else {
            contender.leave_open(ticket);
            return Err(Error::internal("a contender's key existed before it was made"));
        };
        self.placed |= enqueued.place == Place::Behind;
        match leaving {
            None => Ok(Joined::In(ticket, enqueued)),
            // The turn came in the very last moment.
            Some(_) if enqueued.place == Place::First => Ok(Joined::In(ticket, enqueued)),
            Some(leaving) => {
                self.withdraw(ticket, enqueued.create_revision).await;
                Ok(Joined::Out(leaving))
            }
        }
    }

    /// An enqueue failed. If its outcome is unknown, the own key decides: seen, it counts; not
    /// seen decides nothing, so the attempt stays open and the next uses another key and lease.
    async fn recognise(&mut self, ticket: Ticket, error: Error) -> Result<Joined> {
        let contender = self.contender.clone();
        if error.kind() == ErrorKind::LeaseGone {
            ticket.session().end_by(crate::LossReason::LeaseGone);
            ticket.settle();
            return Ok(Joined::Again);
        }
        if !error.is_ambiguous() {
            ticket.settle();
            return self.judge_error(error).map(Joined::Out);
        }
        let read = contender.core.range("lock", ticket.key(), None, self.until());
        let found = match race(read, self.leaving()).await {
            Either::First(Ok(response)) => {
                self.hear();
                response.kvs().first().map(|kv| (kv.create_revision(), kv.lease()))
            }
            Either::First(Err(error)) => {
                contender.leave_open(ticket);
                return self.judge_error(error).map(Joined::Out);
            }
            Either::Second(leaving) => {
                contender.leave_open(ticket);
                return Ok(Joined::Out(leaving));
            }
        };
        match found {
            Some((create_revision, lease)) if lease == ticket.session().lease() => {
                Ok(Joined::In(ticket, Enqueued { create_revision, place: Place::Unclear }))
            }
            _ => {
                contender.leave_open(ticket);
                Ok(Joined::Again)
            }
        }
    }

    fn hold(&self, ticket: Ticket, create_revision: i64) -> Option<Acquired> {
        let hold = Hold::begin(&self.contender, ticket, create_revision)?;
        self.contender.recipe.signal(Signal::Restored);
        if hold.is_lost() {
            // Lost in between, the loss told first.
            self.contender.recipe.signal(Signal::Lost);
        }
        Some(Acquired(Some(hold)))
    }

    /// Takes the key back, waiting for it only a moment; the rest happens in the background.
    async fn withdraw(&self, ticket: Ticket, create_revision: i64) {
        let task = tokio::spawn(leave(self.contender.clone(), ticket, create_revision));
        race(task, self.contender.core.clock.sleep(LAST_MOMENT)).await;
    }

    async fn wait_for_turn(&mut self, ticket: Ticket, enqueued: &Enqueued) -> Result<Turn> {
        let contender = self.contender.clone();
        let core = &contender.core;
        let created = enqueued.create_revision;
        let session = ticket.session().clone();
        let attached = core.queues.attach(core, &contender.prefix);
        let queue = attached.queue();
        let mut waiting = queue.wait_for(ticket.key(), created);
        let mut orphan_since = None;
        loop {
            let elsewhere = race(session.stopped().cancelled(), core.clock.sleep(LOOK_AROUND));
            match race(waiting.verdict(), race(self.leaving(), elsewhere)).await {
                Either::First(Verdict::First) => {
                    self.hear();
                    return Ok(Turn::Ours(ticket));
                }
                Either::First(Verdict::Vanished) => {
                    self.hear();
                    ticket.settle();
                    return Ok(Turn::Again);
                }
                Either::First(Verdict::Blocked(key)) => {
                    self.withdraw(ticket, created).await;
                    return Err(contender.foreign_key(&key));
                }
                Either::First(Verdict::Failed(error)) => {
                    self.withdraw(ticket, created).await;
                    return Err(error);
                }
                Either::Second(Either::First(leaving)) => {
                    self.placed |= queue.is_loaded();
                    self.withdraw(ticket, created).await;
                    return Ok(Turn::Out(leaving));
                }
                // The lease was lost with the place in the queue.
                Either::Second(Either::Second(Either::First(()))) => {
                    ticket.settle();
                    return Ok(Turn::Again);
                }
                Either::Second(Either::Second(Either::Second(()))) => {}
            }
            let now = core.clock.now();
            self.heard = self.heard.max(queue.heard_at()).max(session.last_counted_at());
            if now >= self.silent_at() {
                self.withdraw(ticket, created).await;
                return Err(self.unreachable("etcd went silent while waiting"));
            }
            match queue.orphan_ahead(ticket.key(), created) {
                None => orphan_since = None,
                Some(key) => {
                    let since = *orphan_since.get_or_insert(now);
                    if now >= since + contender.session.0.ttl {
                        self.withdraw(ticket, created).await;
                        return Err(contender.foreign_key(&key));
                    }
                }
            }
        }
    }

    /// Only keys of other recipes stand below the path: join the queue after all, and leave it
    /// at once unless nobody is ahead.
    async fn try_past_deeper_keys(&mut self, ticket: Ticket) -> Result<Option<Acquired>> {
        let contender = self.contender.clone();
        let (ticket, enqueued) = match self.join(ticket).await? {
            Joined::In(ticket, enqueued) => (ticket, enqueued),
            Joined::Again => return Err(self.unreachable("the lease was lost meanwhile")),
            Joined::Out(leaving) => return self.leave_empty_handed(leaving),
        };
        let read = requests::read_queue(&contender.core, "try_lock", &contender.prefix);
        let first = match race(read, self.leaving()).await {
            Either::First(Ok(entries)) => {
                entries.first().is_some_and(|first| first.key == ticket.key())
            }
            Either::First(Err(error)) => {
                self.withdraw(ticket, enqueued.create_revision).await;
                return Err(error);
            }
            Either::Second(leaving) => {
                self.withdraw(ticket, enqueued.create_revision).await;
                return self.leave_empty_handed(leaving);
            }
        };
        if first {
            return match self.hold(ticket, enqueued.create_revision) {
                Some(acquired) => Ok(Some(acquired)),
                None => Err(self.unreachable("the lease was lost meanwhile")),
            };
        }
        self.withdraw(ticket, enqueued.create_revision).await;
        Ok(None)
    }
}
