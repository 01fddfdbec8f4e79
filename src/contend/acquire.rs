//! One acquire, from the first request to the hold: what happens on the runtime while the caller
//! waits.
//!
//! What is asked for may stand on several paths (a set of locks) or in several keys of one path
//! (several permits). One transaction queues for all of it, so whoever came first did so
//! everywhere, and two who want overlapping sets cannot wait for each other.
//!
//! However it ends, its keys are accounted for: they are the hold's, or they were deleted, or (no
//! answer) they are left open with their session, which sees to it that a late key blocks nobody.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use super::Contender;
use super::hold::Hold;
use super::lanes::{Lane, Lanes, Wish};
use super::leave::leave_all;
use super::requests::{self, Enqueued, Place};
use super::turn::Turn;
use crate::cancel::CancelToken;
use crate::client::call::Kind;
use crate::client::runtime::Abandon;
use crate::clock::Instant;
use crate::error::{Error, ErrorKind, Result};
use crate::lease::{LossReason, Session, Ticket};
use crate::race::{Either, race};
use crate::recipe::Signal;

/// How long an unfinished request or clean-up is still waited for once the caller has to go.
const LAST_MOMENT: Duration = Duration::from_millis(60);

/// Holds on their way to the caller, one per wish; released if the caller is gone.
pub(crate) struct Acquired(Vec<Arc<Hold>>);

impl Acquired {
    pub(crate) fn into_holds(mut self) -> Vec<Arc<Hold>> {
        std::mem::take(&mut self.0)
    }
}

impl Drop for Acquired {
    fn drop(&mut self) {
        for hold in self.0.drain(..) {
            hold.release_in_background();
        }
    }
}

/// Why the caller does not wait any longer.
#[derive(Clone, Copy)]
pub(super) enum Leaving {
    Limit,
    Abandoned,
}

/// What became of one try to join the queue.
pub(super) enum Joined {
    In {
        lanes: Lanes,
        create_revision: i64,
        places: Vec<Place>,
    },
    /// Nothing stands; try again with new keys.
    Again,
    Out(Leaving),
}

pub(super) struct Acquire {
    /// Never empty.
    pub(super) wishes: Vec<Wish>,
    pub(super) limit: Option<Instant>,
    pub(super) abandon: Abandon,
    /// When etcd last answered anything of this call.
    pub(super) heard: Instant,
    /// An answer has placed a key of this call behind somebody.
    pub(super) placed: bool,
}

/// Waits for the turn, until `limit`; `Ok(None)` only if somebody was seen ahead.
pub(crate) async fn acquire(
    wishes: Vec<Wish>,
    limit: Option<Instant>,
    abandon: Abandon,
) -> Result<Option<Acquired>> {
    let mut call = Acquire::new(wishes, limit, abandon)?;
    loop {
        let lanes = match call.lanes().await? {
            Either::First(lanes) => lanes,
            Either::Second(leaving) => return call.leave_empty_handed(leaving),
        };
        let (lanes, create_revision, places) = match call.join(lanes).await? {
            Joined::In { lanes, create_revision, places } => (lanes, create_revision, places),
            Joined::Again => continue,
            Joined::Out(leaving) => return call.leave_empty_handed(leaving),
        };
        let turn = if places.iter().all(|place| *place == Place::Inside) {
            Turn::Ours(lanes)
        } else {
            // These on the heap: most acquires do without, and each is as large as all the rest.
            Box::pin(call.wait_for_turn(lanes, create_revision)).await?
        };
        match turn {
            Turn::Ours(lanes) => {
                if let Some(acquired) = call.hold(lanes, create_revision) {
                    return Ok(Some(acquired));
                }
            }
            Turn::Again => {}
            Turn::Out(leaving) => return call.leave_empty_handed(leaving),
        }
    }
}

impl Acquire {
    pub(super) fn new(
        wishes: Vec<Wish>,
        limit: Option<Instant>,
        abandon: Abandon,
    ) -> Result<Acquire> {
        let Some(first) = wishes.first() else {
            return Err(Error::internal("an acquire of nothing"));
        };
        let heard = first.contender.core.clock.now();
        Ok(Acquire { wishes, limit, abandon, heard, placed: false })
    }

    /// The contender that speaks for all.
    pub(super) fn lead(&self) -> &Arc<Contender> {
        &self.wishes[0].contender
    }

    /// When this call gives up if etcd stays silent.
    pub(super) fn silent_at(&self) -> Instant {
        self.heard + self.lead().core.operation_timeout()
    }

    pub(super) fn until(&self) -> Instant {
        self.limit.map_or(self.silent_at(), |limit| limit.min(self.silent_at()))
    }

    pub(super) fn hear(&mut self) {
        self.heard = self.lead().core.clock.now();
    }

    /// Ready when the caller's limit has passed or the caller has left.
    pub(super) async fn leaving(&self) -> Leaving {
        let limit = self.limit.unwrap_or(Instant::FAR_FUTURE);
        let gone = race(self.abandon.fired(), self.one_is_closed());
        match race(gone, self.lead().core.clock.sleep_until(limit)).await {
            Either::First(_) => Leaving::Abandoned,
            Either::Second(()) => Leaving::Limit,
        }
    }

    /// Ready when a recipe of a set is closed. Of a single one the caller hears by itself.
    async fn one_is_closed(&self) {
        if self.wishes.len() == 1 {
            return std::future::pending().await;
        }
        any_cancelled(self.wishes.iter().map(|wish| wish.contender.recipe.closed())).await;
    }

    /// Awaits a request, and for a last moment beyond the point at which the caller leaves: cut
    /// short it would leave behind an attempt whose outcome nobody knows.
    pub(super) async fn in_time<T>(
        &self,
        request: impl Future<Output = T>,
    ) -> Either<T, (Leaving, Option<T>)> {
        let mut request = std::pin::pin!(request);
        match race(&mut request, self.leaving()).await {
            Either::First(answer) => Either::First(answer),
            Either::Second(leaving) => {
                let last_moment = self.lead().core.clock.sleep(LAST_MOMENT);
                let answer = match race(&mut request, last_moment).await {
                    Either::First(answer) => Some(answer),
                    Either::Second(()) => None,
                };
                Either::Second((leaving, answer))
            }
        }
    }

    pub(super) fn leave_empty_handed(&self, leaving: Leaving) -> Result<Option<Acquired>> {
        match leaving {
            Leaving::Limit if self.placed => Ok(None),
            Leaving::Limit => Err(self.unreachable("the limit passed before etcd answered")),
            Leaving::Abandoned => {
                for wish in &self.wishes {
                    wish.contender.recipe.check_open()?;
                }
                Err(Error::interrupted("acquire"))
            }
        }
    }

    pub(super) fn unreachable(&self, why: &str) -> Error {
        let identity = self.lead().recipe.identity();
        Error::new(ErrorKind::Unreachable, format!("{identity}: {why}"))
    }

    /// A refusal that came because time was up is the limit's doing.
    pub(super) fn judge_error(&self, error: Error) -> Result<Leaving> {
        let past = |limit| self.lead().core.clock.now() >= limit;
        if error.is_unreachable() && self.limit.is_some_and(past) {
            return Ok(Leaving::Limit);
        }
        Err(error)
    }

    /// A place in a living session for every key.
    pub(super) async fn lanes(&self) -> Result<Either<Lanes, Leaving>> {
        let mut lanes = Vec::with_capacity(self.wishes.len());
        for wish in &self.wishes {
            let stopped = match self.tickets(wish).await {
                Ok(Either::First(tickets)) => {
                    lanes.push(Lane { wish: wish.clone(), tickets });
                    continue;
                }
                Ok(Either::Second(leaving)) => Ok(Either::Second(leaving)),
                Err(error) => Err(error),
            };
            // Nothing was sent, so the places of the others are not open attempts.
            Lanes(lanes).free();
            return stopped;
        }
        Ok(Either::First(Lanes(lanes)))
    }

    async fn tickets(&self, wish: &Wish) -> Result<Either<Vec<Ticket>, Leaving>> {
        let Contender { core, recipe, .. } = &*wish.contender;
        recipe.check_open()?;
        let tickets = core.sessions.tickets(&wish.contender, wish.keys, self.until());
        self.unless_leaving(tickets).await
    }

    /// Awaits what leaves nothing behind when it is cut short.
    pub(super) async fn unless_leaving<T>(
        &self,
        request: impl Future<Output = Result<T>>,
    ) -> Result<Either<T, Leaving>> {
        match race(request, self.leaving()).await {
            Either::First(Ok(answer)) => Ok(Either::First(answer)),
            Either::First(Err(error)) => self.judge_error(error).map(Either::Second),
            Either::Second(leaving) => Ok(Either::Second(leaving)),
        }
    }

    /// Sends the keys and finds out where they stand.
    pub(super) async fn join(&mut self, lanes: Lanes) -> Result<Joined> {
        let core = self.lead().core.clone();
        let parts = lanes.parts();
        let txn = requests::enqueue(&parts);
        let request = core.txn("lock", lanes.first_key(), Kind::Write, txn, self.until());
        let (answer, leaving) = match self.in_time(request).await {
            Either::First(answer) => (answer, None),
            Either::Second((leaving, Some(answer))) => (answer, Some(leaving)),
            Either::Second((leaving, None)) => {
                drop(parts);
                lanes.leave_open();
                return Ok(Joined::Out(leaving));
            }
        };
        let response = match answer {
            Ok(response) => response,
            Err(error) => {
                drop(parts);
                return Box::pin(self.recognise(lanes, error)).await;
            }
        };
        self.hear();
        let enqueued = requests::enqueued(&response, &parts);
        drop(parts);
        let (create_revision, places) = match enqueued {
            Enqueued::In { create_revision, places } => (create_revision, places),
            Enqueued::OtherCount(found) => {
                lanes.free();
                let until = self.until();
                Box::pin(self.lead().settle_count(found, until)).await?;
                self.check_fit()?;
                return Ok(leaving.map_or(Joined::Again, Joined::Out));
            }
            // No name is used again before its key is known to be gone; but a store that has lost
            // its latest data may have it once more. Another lease has other names.
            Enqueued::Existed => {
                lanes.leave_open();
                return Ok(leaving.map_or(Joined::Again, Joined::Out));
            }
        };
        for lane in &lanes.0 {
            if let Some(count) = &lane.wish.contender.count {
                count.agree(count.current());
            }
        }
        self.placed |= places.contains(&Place::Behind);
        match leaving {
            // The turn came in the very last moment.
            Some(leaving) if places.iter().any(|place| *place != Place::Inside) => {
                Box::pin(self.withdraw(lanes, create_revision)).await;
                Ok(Joined::Out(leaving))
            }
            _ => Ok(Joined::In { lanes, create_revision, places }),
        }
    }

    /// Whether what is wanted could still be had on every counted path.
    pub(super) fn check_fit(&self) -> Result<()> {
        for Wish { contender, keys, .. } in &self.wishes {
            if let Some(count) = &contender.count {
                contender.check_fit(*keys, count.current() as usize)?;
            }
        }
        Ok(())
    }

    /// An enqueue failed. If its outcome is unknown, an own key decides for all: seen, it counts;
    /// not seen decides nothing, so the attempt stays open and the next uses other keys and
    /// another lease.
    pub(super) async fn recognise(&mut self, lanes: Lanes, error: Error) -> Result<Joined> {
        if error.kind() == ErrorKind::LeaseGone {
            let sessions = lanes.sessions();
            lanes.settle();
            return self.end_those_gone(sessions).await;
        }
        if !error.is_ambiguous() {
            lanes.settle();
            return self.judge_error(error).map(Joined::Out);
        }
        let core = self.lead().core.clone();
        let read = core.range("lock", lanes.first_key(), None, self.until());
        let found = match race(read, self.leaving()).await {
            Either::First(Ok(response)) => {
                self.hear();
                response.kvs().first().map(|kv| (kv.create_revision(), kv.lease()))
            }
            Either::First(Err(error)) => {
                lanes.leave_open();
                return self.judge_error(error).map(Joined::Out);
            }
            Either::Second(leaving) => {
                lanes.leave_open();
                return Ok(Joined::Out(leaving));
            }
        };
        match found {
            Some((create_revision, lease)) if lease == lanes.first().session().lease() => {
                let places = vec![Place::Unclear; lanes.0.len()];
                Ok(Joined::In { lanes, create_revision, places })
            }
            _ => {
                lanes.leave_open();
                Ok(Joined::Again)
            }
        }
    }

    /// etcd says that a lease is gone, not which; the others carry holds that stand.
    async fn end_those_gone(&self, sessions: Vec<Arc<Session>>) -> Result<Joined> {
        if let [session] = sessions.as_slice() {
            session.end_by(LossReason::LeaseGone);
            return Ok(Joined::Again);
        }
        let core = &self.lead().core;
        for session in &sessions {
            let asked = core.time_to_live("lock", session.lease(), self.until());
            match race(asked, self.leaving()).await {
                Either::First(Ok(None)) => session.end_by(LossReason::LeaseGone),
                Either::First(Ok(Some(_))) => {}
                Either::First(Err(error)) => return self.judge_error(error).map(Joined::Out),
                Either::Second(leaving) => return Ok(Joined::Out(leaving)),
            }
        }
        Ok(Joined::Again)
    }

    /// All holds or none.
    pub(super) fn hold(&self, lanes: Lanes, create_revision: i64) -> Option<Acquired> {
        let mut acquired = Acquired(Vec::with_capacity(lanes.0.len()));
        let mut lanes = lanes.0.into_iter();
        while let Some(Lane { wish, tickets }) = lanes.next() {
            let Some(hold) = Hold::begin(&wish.contender, wish.mode, tickets, create_revision)
            else {
                // Those that were begun are released as they are dropped.
                let others = Lanes(lanes.collect()).into_leavers();
                tokio::spawn(leave_all(others, create_revision));
                return None;
            };
            acquired.0.push(hold);
        }
        for hold in &acquired.0 {
            let recipe = &hold.contender().recipe;
            recipe.signal(Signal::Restored);
            if hold.is_lost() {
                // Lost in between, the loss told first.
                recipe.signal(Signal::Lost);
            }
        }
        Some(acquired)
    }

    /// Takes the keys back, waiting for it only a moment; the rest happens in the background.
    pub(super) async fn withdraw(&self, lanes: Lanes, create_revision: i64) {
        let leavers = lanes.into_leavers();
        let gone: Vec<_> = leavers.iter().map(|leaver| leaver.contender.leaves()).collect();
        let task = tokio::spawn(async move {
            leave_all(leavers, create_revision).await;
            gone.iter().for_each(CancelToken::cancel);
        });
        race(task, self.lead().core.clock.sleep(LAST_MOMENT)).await;
    }
}

/// Ready when one of them is cancelled.
pub(super) async fn any_cancelled<'a>(tokens: impl Iterator<Item = &'a CancelToken>) {
    let mut all: Vec<_> = tokens.map(|token| Box::pin(token.cancelled())).collect();
    poll_fn(|context| {
        let one = all.iter_mut().any(|token| token.as_mut().poll(context).is_ready());
        if one { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}
