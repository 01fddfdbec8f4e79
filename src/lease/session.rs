//! The shared exclusive lease: one per client and TTL, carrying every hold of that TTL.
//!
//! Sharing makes a lock two round trips instead of five, and mass expiry cheap. It never heals:
//! when its deadline passes, every hold on it is lost for good. An attempt whose outcome is
//! unknown *taints* the session: it takes no new holds, and its lease is revoked with the last
//! one, because only the end of the lease proves that the attempt can no longer be applied.
//!
//! Names of keys are used again: etcd keeps every name that ever was in its memory until the next
//! compaction, and a read of a queue looks at all of them. A name is free once its key was seen
//! and its delete was answered; that of an open attempt never is. So whoever speaks of a key says
//! which of its lives is meant, by its create revision (the token).

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;

use super::keeper::{self, Ended, Lessee};
use super::loss::LossReason;
use super::renewal::{Proof, Renewal};
use super::word::{DeadlineWord, Life};
use crate::CancelToken;
use crate::client::core::{BoxFuture, Core, Owned};
use crate::clock::Instant;
use crate::contend::{Contender, Inbox};
use crate::error::{Error, Result};
use crate::recipe::{RecipeCore, Signal};
use crate::resilience::LeaseTiming;
use crate::whitebox;

/// Which recipes may share a lease: those that ask for the same timing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct SessionKey(pub(crate) LeaseTiming);

/// One hold, as its session knows it.
pub(crate) trait Tenant: Send + Sync {
    /// The hold is over against its holder's will. Called once per cause, from any thread.
    fn lose(&self, reason: LossReason, last_renewal: SystemTime);

    /// A linearizable read of the hold's key, made to prove a renewal at a revision at which the
    /// key had been created.
    fn probed(self: Arc<Self>, found: Option<&etcd_client::KeyValue>);

    /// Somebody asks for the hold, politely.
    fn asked(&self, from: String);

    /// Somebody takes the hold away: it is lost, and then its keys are removed.
    fn forced(self: Arc<Self>) -> BoxFuture<()>;

    /// The create revision of its keys.
    fn token(&self) -> i64;

    /// Whose hold it is.
    fn recipe(&self) -> &Arc<RecipeCore>;

    /// Cancelled when the code that the hold protects has ended; `None` where nobody says so.
    fn work(&self) -> Option<CancelToken>;
}

/// Something that has to be kept while an attempt is open (the watch that deletes its key).
pub(crate) type OpenAttempt = Box<dyn Send>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Serving,
    /// Takes no new holds; ends with the last one.
    Retired,
    /// Lost, or given back: the lease is being revoked.
    Over,
    /// The lease is known to have ended.
    Ended,
}

struct Book {
    phase: Phase,
    /// How many names there have been.
    numbers: u64,
    /// Keys of attempts under way and of holds: what may stand in etcd with our lease.
    live: HashSet<Vec<u8>>,
    tenants: HashMap<Vec<u8>, Weak<dyn Tenant>>,
    /// Those of attempts that must not become holds any more, each with its token.
    condemned: HashMap<Vec<u8>, i64>,
    /// Numbers whose names are free again. The last to come is the first to go, so that a path
    /// sees no more names than it has had contenders at a time.
    free: Vec<u64>,
    open: HashMap<Vec<u8>, OpenAttempt>,
    idle_since: Option<Instant>,
    /// The recipes whose connection state follows this session.
    followers: HashMap<usize, Weak<RecipeCore>>,
    /// What to read in proof of a renewal while nothing is held.
    probe: Vec<u8>,
    /// Turns the proof reads over the holds.
    probes: usize,
    /// After a close: the code under its holds. The lease stays for as long as that runs, so that
    /// no rival runs beside it, and is left to its TTL if it runs on.
    work: Vec<CancelToken>,
}

impl Book {
    fn next_number(&mut self) -> u64 {
        self.free.pop().unwrap_or_else(|| {
            self.numbers += 1;
            self.numbers - 1
        })
    }

    fn tenant(&self, key: &[u8]) -> Option<Arc<dyn Tenant>> {
        self.tenants.get(key).and_then(Weak::upgrade)
    }
}

pub(crate) struct Session {
    core: Arc<Core>,
    lease: i64,
    timing: LeaseTiming,
    word: DeadlineWord,
    last_counted: AtomicU64,
    /// Since then etcd has refused our login or our read of the key.
    refused: AtomicBool,
    stop: CancelToken,
    book: Mutex<Book>,
    /// Where requests for its holds arrive.
    pub(crate) inbox: Inbox,
    _counted: whitebox::GaugeGuard<'static>,
}

impl Session {
    /// Grants the lease and starts its keeper. The deadline counts from the grant's send.
    async fn start(
        core: &Arc<Core>,
        key: SessionKey,
        probe: &[u8],
        until: Instant,
    ) -> Result<Arc<Session>> {
        let asked = key.0.ttl.as_secs();
        let granted =
            core.grant("lease grant", i64::try_from(asked).unwrap_or(i64::MAX), until).await?;
        let timing = key.0.granted(Duration::from_secs(granted.ttl.unsigned_abs()));
        let renewal = Renewal::new(Proof::Required, timing, granted.sent);
        let session = Arc::new(Session {
            core: core.clone(),
            lease: granted.id,
            timing,
            word: DeadlineWord::new(renewal.deadline()),
            last_counted: AtomicU64::new(granted.sent.as_nanos()),
            refused: AtomicBool::new(false),
            stop: CancelToken::new(),
            book: Mutex::new(Book {
                phase: Phase::Serving,
                numbers: 0,
                live: HashSet::new(),
                tenants: HashMap::new(),
                condemned: HashMap::new(),
                free: Vec::new(),
                open: HashMap::new(),
                idle_since: Some(core.clock.now()),
                followers: HashMap::new(),
                probe: probe.to_vec(),
                probes: 0,
                work: Vec::new(),
            }),
            inbox: Inbox::default(),
            _counted: whitebox::SESSIONS.enter(),
        });
        let weak: Weak<dyn Owned> = Arc::<Session>::downgrade(&session);
        core.register(weak);
        core.sessions.by_lease.lock().insert(granted.id, Arc::downgrade(&session));
        core.runtime.spawn(session.clone().run(renewal));
        Ok(session)
    }

    async fn run(self: Arc<Session>, renewal: Renewal) {
        let limit = self.timing.attempt_limit;
        let ended =
            keeper::keep(self.core.clone(), self.clone(), renewal, limit, self.stop.clone()).await;
        match ended {
            Ended::Stopped => {}
            Ended::DeadlinePassed => self.end_by(LossReason::DeadlinePassed),
            Ended::Refused => self.end_by(LossReason::AuthRevoked),
            Ended::LeaseGone => self.end_by(LossReason::LeaseGone),
            Ended::WrongCluster => self.end_by(LossReason::WrongCluster),
        }
    }

    pub(crate) fn lease(&self) -> i64 {
        self.lease
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// Whether holds on this session stand; the first to find the deadline passed tells them all.
    pub(crate) fn is_alive(self: &Arc<Session>) -> bool {
        match self.word.check(self.core.clock.now()) {
            Life::Alive => true,
            Life::Lost => false,
            Life::JustLost => {
                // Whoever asks may be quicker than the keeper, and is to hear the same reason.
                let refused = self.refused.load(Ordering::Acquire);
                self.lost(if refused {
                    LossReason::AuthRevoked
                } else {
                    LossReason::DeadlinePassed
                });
                false
            }
        }
    }

    /// The time until the deadline.
    pub(crate) fn remaining(&self) -> Duration {
        let now = self.core.clock.now();
        self.word.deadline().map_or(Duration::ZERO, |deadline| deadline.saturating_since(now))
    }

    /// When the last counted renewal was sent, by the wall clock.
    pub(crate) fn last_renewal(&self) -> SystemTime {
        let age = self.core.clock.now().saturating_since(self.last_counted_at());
        SystemTime::now().checked_sub(age).unwrap_or(SystemTime::UNIX_EPOCH)
    }

    /// The same on the boot-time clock: when etcd last proved to be there.
    pub(crate) fn last_counted_at(&self) -> Instant {
        Instant::from_nanos(self.last_counted.load(Ordering::Acquire))
    }

    /// Cancelled once this session carries nothing any more.
    pub(crate) fn stopped(&self) -> &CancelToken {
        &self.stop
    }

    /// Whether the lease is known to have ended, and every key on it with it.
    pub(crate) fn has_ended(&self) -> bool {
        self.book.lock().phase == Phase::Ended
    }

    // ----- attempts and holds -----------------------------------------------------------------

    /// Places for `count` keys of one attempt, or `None` if this session takes no more.
    fn enter(self: &Arc<Session>, contender: &Contender, count: usize) -> Option<Vec<Ticket>> {
        if !self.is_alive() {
            return None;
        }
        let mut book = self.book.lock();
        if book.phase != Phase::Serving {
            return None;
        }
        let mut numbers: Vec<u64> = (0..count).map(|_| book.next_number()).collect();
        // Keys of one attempt stand in the order of their tickets.
        numbers.sort_unstable();
        let tickets = numbers
            .into_iter()
            .map(|number| {
                let key = contender.key_name(self.lease, number);
                book.live.insert(key.clone());
                Ticket { session: self.clone(), number, key, settled: false }
            })
            .collect();
        book.idle_since = None;
        let probe = contender.layout.watched();
        if book.probe != probe {
            book.probe = probe.to_vec();
        }
        let recipe = &contender.recipe;
        book.followers
            .entry(Arc::as_ptr(recipe) as usize)
            .or_insert_with(|| Arc::downgrade(recipe));
        Some(tickets)
    }

    /// Whether a key that carries our lease belongs to an attempt or a hold that is alive.
    pub(crate) fn is_live(&self, key: &[u8]) -> bool {
        self.book.lock().live.contains(key)
    }

    /// The hold with this key, in the life that this token names.
    pub(crate) fn tenant(&self, key: &[u8], token: i64) -> Option<Arc<dyn Tenant>> {
        self.book.lock().tenant(key).filter(|tenant| tenant.token() == token)
    }

    /// The hold with this key and token; if it is that of an attempt, it will not become one.
    pub(crate) fn condemn(&self, key: &[u8], token: i64) -> Option<Arc<dyn Tenant>> {
        let mut book = self.book.lock();
        let tenant = book.tenant(key);
        if tenant.is_none() && book.live.contains(key) {
            book.condemned.insert(key.to_vec(), token);
        }
        tenant.filter(|tenant| tenant.token() == token)
    }

    /// An open attempt's key was seen and deleted.
    pub(crate) fn close_open_attempt(&self, key: &[u8]) {
        let closed = self.book.lock().open.remove(key);
        drop(closed);
    }

    fn leave(self: &Arc<Session>, key: &[u8], parting: Parting) {
        let now = self.core.clock.now();
        let mut finish = false;
        let not_needed = {
            let mut book = self.book.lock();
            book.live.remove(key);
            book.tenants.remove(key);
            book.condemned.remove(key);
            let mut not_needed = None;
            match parting {
                Parting::Settled => {}
                Parting::Free(number) => book.free.push(number),
                Parting::Open(keeper) => {
                    if book.phase == Phase::Serving {
                        book.phase = Phase::Retired;
                    }
                    if book.phase == Phase::Ended {
                        not_needed = Some(keeper);
                    } else {
                        book.open.insert(key.to_vec(), keeper);
                    }
                }
            }
            if book.live.is_empty() {
                book.idle_since = Some(now);
                finish = book.phase == Phase::Retired;
            }
            not_needed
        };
        // Dropped without the book's lock: it takes locks of its own.
        drop(not_needed);
        if finish {
            self.finish_retired();
        }
    }

    /// Takes no more holds from now on; the lease goes with the last one.
    pub(crate) fn retire(self: &Arc<Session>) {
        let mut book = self.book.lock();
        if book.phase == Phase::Serving {
            book.phase = Phase::Retired;
        }
        let finish = book.phase == Phase::Retired && book.live.is_empty();
        drop(book);
        if finish {
            self.finish_retired();
        }
    }

    // ----- the end ----------------------------------------------------------------------------

    /// Nothing stands on the lease any more: give it back.
    fn finish_retired(self: &Arc<Session>) {
        {
            let mut book = self.book.lock();
            if book.phase != Phase::Retired || !book.live.is_empty() {
                return;
            }
            book.phase = Phase::Over;
        }
        self.word.lose();
        self.stop.cancel();
        self.core.runtime.spawn(self.clone().revoke_until_done());
    }

    /// Loses by a cause that the clock did not find.
    pub(crate) fn end_by(self: &Arc<Session>, reason: LossReason) {
        if self.word.lose() {
            self.lost(reason);
        }
    }

    /// The word says `LOST` and this call made it so: tell everyone, in order, then clean up.
    fn lost(self: &Arc<Session>, reason: LossReason) {
        let last_renewal = self.last_renewal();
        let (tenants, followers) = {
            let mut book = self.book.lock();
            if book.phase != Phase::Ended {
                book.phase = Phase::Over;
            }
            let tenants: Vec<_> = book.tenants.drain().map(|(_, tenant)| tenant).collect();
            let followers: Vec<_> = book.followers.drain().map(|(_, recipe)| recipe).collect();
            (tenants, followers)
        };
        let tenants: Vec<_> = tenants.iter().filter_map(Weak::upgrade).collect();
        if reason != LossReason::Closed {
            // A recipe with a hold hears of it as the third thing, after flag and token; the
            // others now. Nobody hears twice: the second could come after the next acquire.
            let idle = |recipe: &Arc<RecipeCore>| {
                !tenants.iter().any(|tenant| Arc::ptr_eq(tenant.recipe(), recipe))
            };
            for recipe in followers.iter().filter_map(Weak::upgrade).filter(idle) {
                recipe.signal(Signal::Lost);
            }
            log::warn!("lease {:x} of {:?} lost: {reason:?}", self.lease, self.timing.ttl);
        } else {
            let work = tenants.iter().filter_map(|tenant| tenant.work()).collect();
            self.book.lock().work = work;
        }
        for tenant in &tenants {
            tenant.lose(reason, last_renewal);
        }
        self.stop.cancel();
        self.core.runtime.spawn(self.clone().revoke_until_done());
    }

    /// Asks etcd to end the lease until it has: with it go the keys, so that a rival is not kept
    /// waiting, and every open attempt.
    async fn revoke_until_done(self: Arc<Session>) {
        self.work_ended().await;
        let mut pause = FIRST_REVOKE_PAUSE;
        loop {
            let until = self.core.clock.now() + REVOKE_LIMIT;
            match self.core.revoke("lease revoke", self.lease, until).await {
                Ok(()) => break,
                Err(error) if gives_up(&error) => {
                    log::warn!("lease {:x} is left to its TTL: {error}", self.lease);
                    break;
                }
                Err(_) => self.core.clock.sleep(pause).await,
            }
            pause = (pause * 2).min(REVOKE_LIMIT);
        }
        self.ended();
    }

    async fn work_ended(&self) {
        let work = self.book.lock().work.clone();
        for one in work {
            one.cancelled().await;
        }
    }

    fn ended(&self) {
        let open = {
            let mut book = self.book.lock();
            book.phase = Phase::Ended;
            std::mem::take(&mut book.open)
        };
        drop(open);
        self.inbox.close();
        self.core.sessions.by_lease.lock().remove(&self.lease);
    }

    fn signal_followers(&self, signal: Signal) {
        let followers: Vec<_> = {
            let mut book = self.book.lock();
            book.followers.retain(|_, recipe| recipe.strong_count() > 0);
            book.followers.values().filter_map(Weak::upgrade).collect()
        };
        for recipe in followers {
            recipe.signal(signal);
        }
    }
}

const FIRST_REVOKE_PAUSE: Duration = Duration::from_millis(250);
const REVOKE_LIMIT: Duration = Duration::from_secs(5);

/// A refusal that another try does not change; the lease then ends by itself.
fn gives_up(error: &Error) -> bool {
    use crate::ErrorKind::{AuthenticationFailed, PermissionDenied, WrongCluster};
    matches!(error.kind(), AuthenticationFailed | PermissionDenied | WrongCluster)
}

impl Lessee for Session {
    fn lease(&self) -> i64 {
        self.lease
    }

    fn word(&self) -> &DeadlineWord {
        &self.word
    }

    fn probe(&self) -> Option<Vec<u8>> {
        let mut book = self.book.lock();
        book.probes += 1;
        let held = book.tenants.len();
        match held {
            0 => Some(book.probe.clone()),
            _ => book.tenants.keys().nth(book.probes % held).cloned(),
        }
    }

    fn probed(&self, key: &[u8], revision: i64, found: Option<&etcd_client::KeyValue>) {
        let tenant = self.book.lock().tenant(key);
        // An older read is about somebody who had the name before.
        if let Some(tenant) = tenant.filter(|tenant| tenant.token() <= revision) {
            tenant.probed(found);
        }
    }

    fn counted(&self, sent: Instant) {
        self.last_counted.fetch_max(sent.as_nanos(), Ordering::AcqRel);
        self.refused.store(false, Ordering::Release);
    }

    fn refused(&self) {
        self.refused.store(true, Ordering::Release);
    }

    fn suspended(&self) {
        self.signal_followers(Signal::Suspended);
    }

    fn reconnected(&self) {
        // A recipe that lost a hold stays `Lost` until it acquires again.
        let followers: Vec<_> =
            self.book.lock().followers.values().filter_map(Weak::upgrade).collect();
        for recipe in followers {
            if recipe.state() == crate::ConnectionState::Suspended {
                recipe.signal(Signal::Restored);
            }
        }
    }

    fn is_done(&self, now: Instant) -> bool {
        let mut book = self.book.lock();
        let idle = book.idle_since.is_some_and(|since| now >= since + self.timing.ttl);
        if idle && book.phase == Phase::Serving {
            book.phase = Phase::Over;
            drop(book);
            self.word.lose();
            // The keeper ends with this answer; the lease is given back behind it.
            if let Some(me) = self.core.sessions.find(self.lease) {
                self.core.runtime.spawn(me.revoke_until_done());
            }
            return true;
        }
        false
    }
}

impl Owned for Session {
    fn lose(&self) {
        if let Some(me) = self.core.sessions.find(self.lease) {
            me.end_by(LossReason::Closed);
        }
    }

    fn cleanup(self: Arc<Self>, until: Instant) -> BoxFuture<Result<()>> {
        Box::pin(async move {
            if self.book.lock().phase == Phase::Ended {
                return Ok(());
            }
            self.work_ended().await;
            self.core.revoke("lease revoke", self.lease, until).await?;
            self.ended();
            Ok(())
        })
    }

    fn finish(&self, _limit: Duration) {}
}

/// One attempt's place in a session: the name of its key, and the duty to say how it ended.
/// Dropped without a word (a panic, the end of the runtime), it counts as open.
pub(crate) struct Ticket {
    session: Arc<Session>,
    number: u64,
    key: Vec<u8>,
    settled: bool,
}

impl Ticket {
    pub(crate) fn session(&self) -> &Arc<Session> {
        &self.session
    }

    pub(crate) fn key(&self) -> &[u8] {
        &self.key
    }

    /// From now on the session tells this hold when it is lost. `false`: it must not be one.
    pub(crate) fn install(&self, tenant: Weak<dyn Tenant>, token: i64) -> bool {
        let mut book = self.session.book.lock();
        book.tenants.insert(self.key.clone(), tenant);
        book.condemned.get(&self.key) != Some(&token)
    }

    /// Nothing of this attempt stands in etcd, nor can it come to; the same cannot be said of its
    /// name.
    pub(crate) fn settle(self) {
        self.part(Parting::Settled);
    }

    /// No request of this attempt is under way any more, and its key does not stand: the answers
    /// say so. The next may have its name.
    pub(crate) fn free(self) {
        let number = self.number;
        self.part(Parting::Free(number));
    }

    /// The attempt may still be applied: `keeper` lives until that is decided.
    pub(crate) fn leave_open(self, keeper: OpenAttempt) {
        self.part(Parting::Open(keeper));
    }

    fn part(mut self, parting: Parting) {
        self.settled = true;
        self.session.leave(&self.key, parting);
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.settled {
            self.session.leave(&self.key, Parting::Open(Box::new(())));
        }
    }
}

/// How an attempt leaves its session.
enum Parting {
    Settled,
    /// With a number that may be used again.
    Free(u64),
    Open(OpenAttempt),
}

/// Where the session of one timing stands; locked while its lease is being granted.
type Slot = Arc<tokio::sync::Mutex<Option<Arc<Session>>>>;

/// The sessions of one client.
#[derive(Default)]
pub(crate) struct SessionPool {
    slots: Mutex<HashMap<SessionKey, Slot>>,
    by_lease: Mutex<HashMap<i64, Weak<Session>>>,
}

impl SessionPool {
    /// Tickets for `count` keys in a living session of the contender's timing; grants a lease if
    /// there is none.
    pub(crate) async fn tickets(
        &self,
        contender: &Contender,
        count: usize,
        until: Instant,
    ) -> Result<Vec<Ticket>> {
        let Contender { core, session: key, layout, .. } = contender;
        let slot = self.slots.lock().entry(*key).or_default().clone();
        // One grant at a time: who comes meanwhile shares its lease.
        let mut current = slot.lock().await;
        loop {
            if let Some(tickets) = current.as_ref().and_then(|s| s.enter(contender, count)) {
                return Ok(tickets);
            }
            *current = None;
            if core.closed.is_cancelled() {
                return Err(Error::closed("the client"));
            }
            *current = Some(Session::start(core, *key, layout.watched(), until).await?);
        }
    }

    /// Lets go of every session, so that the client can be freed.
    pub(crate) fn clear(&self) {
        let slots = std::mem::take(&mut *self.slots.lock());
        drop(slots);
    }

    /// The session of a lease that has not ended.
    pub(crate) fn find(&self, lease: i64) -> Option<Arc<Session>> {
        self.by_lease.lock().get(&lease).and_then(Weak::upgrade)
    }
}

#[cfg(test)]
#[cfg(all(unix, feature = "testing"))]
#[path = "session_tests.rs"]
mod tests;
