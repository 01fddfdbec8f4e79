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
use super::ages::LASTING;
use super::hold::Hold;
use super::identity::ContenderMode;
use super::inbox::{Inbox, Reachable};
use super::leave::{Leaver, leave_all};
use super::queue::{Attached, Verdict, Waiting};
use super::requests::{self, Enqueued, Part, Place, Tried};
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

/// How often a waiter looks whether etcd is still there.
const LOOK_AROUND: Duration = Duration::from_millis(500);

/// `try_lock` does not wait for others; this is how long it waits for etcd.
const TRY_LIMIT: Duration = Duration::from_secs(5);

/// What is asked for on one path.
#[derive(Clone)]
pub(crate) struct Wish {
    pub(crate) contender: Arc<Contender>,
    pub(crate) mode: ContenderMode,
    /// How many keys: one, save for several permits at once.
    pub(crate) keys: usize,
}

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
enum Leaving {
    Limit,
    Abandoned,
}

/// One wish with its place in a session: a ticket per key.
struct Lane {
    wish: Wish,
    tickets: Vec<Ticket>,
}

impl Lane {
    fn part(&self) -> Part<'_> {
        let contender = &self.wish.contender;
        Part {
            layout: &contender.layout,
            mode: self.wish.mode,
            keys: self.tickets.iter().map(Ticket::key).collect(),
            value: contender.identity(self.wish.mode),
            lease: self.tickets[0].session().lease(),
            count: contender.count.as_ref().map_or(0, |count| count.current()),
        }
    }
}

/// A try's keys. They are put, looked at and taken away together.
struct Lanes(Vec<Lane>);

impl Lanes {
    fn parts(&self) -> Vec<Part<'_>> {
        self.0.iter().map(Lane::part).collect()
    }

    /// A key that stands for all of them.
    fn first_key(&self) -> &[u8] {
        self.first().key()
    }

    fn first(&self) -> &Ticket {
        &self.0[0].tickets[0]
    }

    fn tickets(&self) -> impl Iterator<Item = &Ticket> {
        self.0.iter().flat_map(|lane| &lane.tickets)
    }

    /// Why the key with this number could never be let in by such a count.
    fn misfit(&self, at: usize, count: Option<usize>) -> Option<Error> {
        let mut lanes = self.0.iter().flat_map(|lane| lane.tickets.iter().map(move |_| lane));
        let Wish { contender, keys, .. } = &lanes.nth(at)?.wish;
        contender.check_fit(*keys, count?).err()
    }

    /// Each session once.
    fn sessions(&self) -> Vec<Arc<Session>> {
        let mut sessions: Vec<Arc<Session>> = Vec::new();
        for session in self.tickets().map(Ticket::session) {
            if !sessions.iter().any(|known| Arc::ptr_eq(known, session)) {
                sessions.push(session.clone());
            }
        }
        sessions
    }

    /// Nothing of this try stands in etcd, nor can it come to.
    fn settle(self) {
        self.0.into_iter().flat_map(|lane| lane.tickets).for_each(Ticket::settle);
    }

    /// The try may still be applied.
    fn leave_open(self) {
        for lane in self.0 {
            for ticket in lane.tickets {
                lane.wish.contender.leave_open(ticket);
            }
        }
    }

    fn into_leavers(self) -> Vec<Leaver> {
        let leaver = |lane: Lane| Leaver { contender: lane.wish.contender, tickets: lane.tickets };
        self.0.into_iter().map(leaver).collect()
    }
}

/// What became of one try to join the queue.
enum Joined {
    In {
        lanes: Lanes,
        create_revision: i64,
        places: Vec<Place>,
    },
    /// Nothing stands; try again with new keys.
    Again,
    Out(Leaving),
}

struct Acquire {
    /// Never empty.
    wishes: Vec<Wish>,
    limit: Option<Instant>,
    abandon: Abandon,
    /// When etcd last answered anything of this call.
    heard: Instant,
    /// An answer has placed a key of this call behind somebody.
    placed: bool,
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
            call.wait_for_turn(lanes, create_revision).await?
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

/// Takes the hold if nobody is in the way; writes nothing otherwise.
pub(crate) async fn try_acquire(wishes: Vec<Wish>, abandon: Abandon) -> Result<Option<Acquired>> {
    let core = match wishes.first() {
        Some(wish) => wish.contender.core.clone(),
        None => return Err(Error::internal("an acquire of nothing")),
    };
    let limit = core.clock.now() + TRY_LIMIT.min(core.operation_timeout());
    let counted = wishes.iter().any(|wish| wish.contender.count.is_some());
    let mut call = Acquire::new(wishes, Some(limit), abandon)?;
    if counted {
        // How many stand there cannot be compared inside etcd: look first.
        return match call.look_for_room().await? {
            Either::First(true) => call.try_by_joining().await,
            Either::First(false) => Ok(None),
            Either::Second(leaving) => call.leave_empty_handed(leaving),
        };
    }
    loop {
        let lanes = match call.lanes().await? {
            Either::First(lanes) => lanes,
            Either::Second(leaving) => return call.leave_empty_handed(leaving),
        };
        let txn = requests::enqueue_if_empty(&lanes.parts());
        let request = core.txn("try_lock", lanes.first_key(), Kind::Write, txn, call.until());
        let answer = match call.in_time(request).await {
            Either::First(answer) => answer,
            Either::Second((leaving, None)) => {
                lanes.leave_open();
                return call.leave_empty_handed(leaving);
            }
            // Answered in the last moment: as good as in time.
            Either::Second((_, Some(answer))) => answer,
        };
        let joined = match answer {
            Ok(response) => match requests::tried(&response, &lanes.parts()) {
                Tried::Held { create_revision } => {
                    Joined::In { lanes, create_revision, places: Vec::new() }
                }
                Tried::Busy => {
                    lanes.settle();
                    return Ok(None);
                }
                Tried::NothingInTheWay => {
                    lanes.settle();
                    return call.try_by_joining().await;
                }
            },
            // Applied only if the queue was empty, so a key that is seen holds.
            Err(error) => call.recognise(lanes, error).await?,
        };
        match joined {
            Joined::In { lanes, create_revision, .. } => {
                if let Some(acquired) = call.hold(lanes, create_revision) {
                    return Ok(Some(acquired));
                }
            }
            Joined::Again => {}
            Joined::Out(leaving) => return call.leave_empty_handed(leaving),
        }
    }
}

enum Turn {
    Ours(Lanes),
    Again,
    Out(Leaving),
}

impl Acquire {
    fn new(wishes: Vec<Wish>, limit: Option<Instant>, abandon: Abandon) -> Result<Acquire> {
        let Some(first) = wishes.first() else {
            return Err(Error::internal("an acquire of nothing"));
        };
        let heard = first.contender.core.clock.now();
        Ok(Acquire { wishes, limit, abandon, heard, placed: false })
    }

    /// The contender that speaks for all.
    fn lead(&self) -> &Arc<Contender> {
        &self.wishes[0].contender
    }

    /// When this call gives up if etcd stays silent.
    fn silent_at(&self) -> Instant {
        self.heard + self.lead().core.operation_timeout()
    }

    fn until(&self) -> Instant {
        self.limit.map_or(self.silent_at(), |limit| limit.min(self.silent_at()))
    }

    fn hear(&mut self) {
        self.heard = self.lead().core.clock.now();
    }

    /// Ready when the caller's limit has passed or the caller has left.
    async fn leaving(&self) -> Leaving {
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
    async fn in_time<T>(
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

    fn leave_empty_handed(&self, leaving: Leaving) -> Result<Option<Acquired>> {
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

    fn unreachable(&self, why: &str) -> Error {
        let identity = self.lead().recipe.identity();
        Error::new(ErrorKind::Unreachable, format!("{identity}: {why}"))
    }

    /// A refusal that came because time was up is the limit's doing.
    fn judge_error(&self, error: Error) -> Result<Leaving> {
        let past = |limit| self.lead().core.clock.now() >= limit;
        if error.is_unreachable() && self.limit.is_some_and(past) {
            return Ok(Leaving::Limit);
        }
        Err(error)
    }

    /// A place in a living session for every key.
    async fn lanes(&self) -> Result<Either<Lanes, Leaving>> {
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
            Lanes(lanes).settle();
            return stopped;
        }
        Ok(Either::First(Lanes(lanes)))
    }

    async fn tickets(&self, wish: &Wish) -> Result<Either<Vec<Ticket>, Leaving>> {
        let Contender { core, recipe, .. } = &*wish.contender;
        recipe.check_open()?;
        let tickets = core.sessions.tickets(&wish.contender, wish.keys, self.until());
        match race(tickets, self.leaving()).await {
            Either::First(Ok(tickets)) => Ok(Either::First(tickets)),
            Either::First(Err(error)) => self.judge_error(error).map(Either::Second),
            Either::Second(leaving) => Ok(Either::Second(leaving)),
        }
    }

    /// Sends the keys and finds out where they stand.
    async fn join(&mut self, lanes: Lanes) -> Result<Joined> {
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
                return self.recognise(lanes, error).await;
            }
        };
        self.hear();
        let enqueued = requests::enqueued(&response, &parts);
        drop(parts);
        let (create_revision, places) = match enqueued {
            Enqueued::In { create_revision, places } => (create_revision, places),
            Enqueued::OtherCount(found) => {
                lanes.settle();
                let until = self.until();
                self.lead().settle_count(found, until).await?;
                self.check_fit()?;
                return Ok(leaving.map_or(Joined::Again, Joined::Out));
            }
            Enqueued::Existed => {
                lanes.leave_open();
                return Err(Error::internal("a contender's key existed before it was made"));
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
                self.withdraw(lanes, create_revision).await;
                Ok(Joined::Out(leaving))
            }
            _ => Ok(Joined::In { lanes, create_revision, places }),
        }
    }

    /// Whether what is wanted could still be had on every counted path.
    fn check_fit(&self) -> Result<()> {
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
    async fn recognise(&mut self, lanes: Lanes, error: Error) -> Result<Joined> {
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
    fn hold(&self, lanes: Lanes, create_revision: i64) -> Option<Acquired> {
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
    async fn withdraw(&self, lanes: Lanes, create_revision: i64) {
        let leavers = lanes.into_leavers();
        let gone: Vec<_> = leavers.iter().map(|leaver| leaver.contender.leaves()).collect();
        let task = tokio::spawn(async move {
            leave_all(leavers, create_revision).await;
            gone.iter().for_each(CancelToken::cancel);
        });
        race(task, self.lead().core.clock.sleep(LAST_MOMENT)).await;
    }

    async fn wait_for_turn(&mut self, lanes: Lanes, created: i64) -> Result<Turn> {
        let core = self.lead().core.clone();
        let attached: Vec<_> = lanes
            .0
            .iter()
            .map(|lane| core.queues.attach(&core, &lane.wish.contender.layout))
            .collect();
        let stay = |(attached, lane): (&Attached, &Lane)| {
            lane.wish.contender.stay(attached.queue(), lane.tickets[0].key(), created)
        };
        let _stays: Vec<_> = attached.iter().zip(&lanes.0).map(stay).collect();
        let reach = |ticket: &Ticket| Reachable::new(ticket.session(), created);
        let _reachable: Vec<_> = lanes.tickets().map(reach).collect();
        let begun = core.clock.now();
        let sessions = lanes.sessions();
        let mut places: Vec<_> = attached
            .iter()
            .zip(&lanes.0)
            .flat_map(|(attached, lane)| {
                let wait = |ticket: &Ticket| attached.queue().wait_for(ticket.key(), created);
                lane.tickets.iter().map(wait).collect::<Vec<_>>()
            })
            .collect();
        // Once inside, a key stays inside as long as it stands, so each is waited for once.
        let mut waiting: Vec<usize> = (0..places.len()).collect();
        let mut orphan_since = None;
        while !waiting.is_empty() {
            let stopped = any_cancelled(sessions.iter().map(|session| session.stopped()));
            let elsewhere = race(stopped, core.clock.sleep(LOOK_AROUND));
            let told = next_told(&mut places, &waiting);
            match race(told, race(self.leaving(), elsewhere)).await {
                Either::First((at, Verdict::Inside)) => {
                    self.hear();
                    waiting.retain(|other| *other != at);
                    continue;
                }
                Either::First((_, Verdict::Vanished)) => {
                    self.hear();
                    drop(places);
                    return self.start_over(lanes, created).await;
                }
                Either::First((_, Verdict::Blocked(key))) => {
                    let error = self.lead().foreign_key(&key);
                    drop(places);
                    self.withdraw(lanes, created).await;
                    return Err(error);
                }
                Either::First((_, Verdict::Failed(error))) => {
                    drop(places);
                    self.withdraw(lanes, created).await;
                    return Err(error);
                }
                Either::Second(Either::First(leaving)) => {
                    self.placed |= waiting.iter().any(|at| places[*at].queue().is_loaded());
                    drop(places);
                    self.withdraw(lanes, created).await;
                    return Ok(Turn::Out(leaving));
                }
                // A lease was lost with the place in the queue.
                Either::Second(Either::Second(Either::First(()))) => {
                    drop(places);
                    return self.start_over(lanes, created).await;
                }
                Either::Second(Either::Second(Either::Second(()))) => {}
            }
            // Those that are inside are not told any more when they go.
            if waiting.len() < places.len() && !places.iter().all(|place| place.stands()) {
                drop(places);
                return self.start_over(lanes, created).await;
            }
            let now = core.clock.now();
            if now >= begun + LASTING {
                sessions.iter().for_each(|session| Inbox::open(session, created));
            }
            let heard = places.iter().map(|place| place.queue().heard_at());
            let counted = sessions.iter().map(|session| session.last_counted_at());
            self.heard = heard.chain(counted).fold(self.heard, Instant::max);
            let orphan = waiting.iter().find_map(|at| places[*at].orphan_ahead());
            let misfit = waiting.iter().find_map(|at| lanes.misfit(*at, places[*at].count()));
            let failed = if now >= self.silent_at() {
                Some(self.unreachable("etcd went silent while waiting"))
            } else if misfit.is_some() {
                misfit
            } else if let Some(key) = orphan {
                let since = *orphan_since.get_or_insert(now);
                let given_up = now >= since + self.lead().session.0.ttl;
                given_up.then(|| self.lead().foreign_key(&key))
            } else {
                orphan_since = None;
                None
            };
            if let Some(error) = failed {
                drop(places);
                self.withdraw(lanes, created).await;
                return Err(error);
            }
        }
        // While the last was waited for, the first may have gone.
        let all_stand = places.len() == 1 || places.iter().all(|place| place.stands());
        drop(places);
        if all_stand { Ok(Turn::Ours(lanes)) } else { self.start_over(lanes, created).await }
    }

    /// A key of the set is gone: whatever else stands has to go too.
    async fn start_over(&self, lanes: Lanes, created: i64) -> Result<Turn> {
        if lanes.tickets().count() == 1 {
            lanes.settle();
        } else {
            self.withdraw(lanes, created).await;
        }
        Ok(Turn::Again)
    }

    /// Whether a counted path has room for what is wanted, from one read.
    async fn look_for_room(&mut self) -> Result<Either<bool, Leaving>> {
        let Wish { contender, keys, .. } = self.wishes[0].clone();
        let read = requests::read_queue(&contender.core, "try_lock", &contender.layout);
        let read = match race(read, self.leaving()).await {
            Either::First(Ok(read)) => read,
            Either::First(Err(error)) => return self.judge_error(error).map(Either::Second),
            Either::Second(leaving) => return Ok(Either::Second(leaving)),
        };
        self.hear();
        let count = match read.count {
            Some(count) => {
                contender.take_over(&super::layout::encode_count(count))?;
                contender.check_fit(keys, count as usize)?;
                count
            }
            // The enqueue writes it.
            None => contender.count.as_ref().map_or(0, |count| count.current()),
        };
        Ok(Either::First(read.line.len() + keys <= count as usize))
    }

    /// Nobody seems to be in the way: joins the queue, and leaves it at once unless that is so.
    async fn try_by_joining(&mut self) -> Result<Option<Acquired>> {
        loop {
            let lanes = match self.lanes().await? {
                Either::First(lanes) => lanes,
                Either::Second(leaving) => return self.leave_empty_handed(leaving),
            };
            let (lanes, created, places) = match self.join(lanes).await? {
                Joined::In { lanes, create_revision, places } => (lanes, create_revision, places),
                Joined::Again => continue,
                Joined::Out(leaving) => return self.leave_empty_handed(leaving),
            };
            let mut inside = true;
            for (lane, place) in lanes.0.iter().zip(places) {
                inside &= match place {
                    Place::Inside => true,
                    Place::Behind => false,
                    Place::Unclear => match race(is_inside(lane), self.leaving()).await {
                        Either::First(Ok(inside)) => inside,
                        Either::First(Err(error)) => {
                            self.withdraw(lanes, created).await;
                            return Err(error);
                        }
                        Either::Second(leaving) => {
                            self.withdraw(lanes, created).await;
                            return self.leave_empty_handed(leaving);
                        }
                    },
                };
                if !inside {
                    break;
                }
            }
            if !inside {
                self.withdraw(lanes, created).await;
                return Ok(None);
            }
            if let Some(acquired) = self.hold(lanes, created) {
                return Ok(Some(acquired));
            }
        }
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

/// What the first of those that still wait is told, and which of the places it is.
async fn next_told(places: &mut [Waiting<'_>], waiting: &[usize]) -> (usize, Verdict) {
    poll_fn(|context| {
        let told = waiting.iter().find_map(|at| match places[*at].poll_verdict(context) {
            Poll::Ready(verdict) => Some((*at, verdict)),
            Poll::Pending => None,
        });
        told.map_or(Poll::Pending, Poll::Ready)
    })
    .await
}

/// Whether all keys of the lane may be inside, from one full read.
async fn is_inside(lane: &Lane) -> Result<bool> {
    let contender = &lane.wish.contender;
    let read = requests::read_queue(&contender.core, "try_lock", &contender.layout).await?;
    let inside = read.inside(&contender.layout);
    let is_inside = |ticket: &Ticket| inside.iter().any(|s| s.entry.key == ticket.key());
    Ok(lane.tickets.iter().all(is_inside))
}
