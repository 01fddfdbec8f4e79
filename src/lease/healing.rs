//! A presence lease: kept while it lives, and made anew with its keys when it dies.
//!
//! Healing restores what is still free and never reclaims: the owner re-creates its keys by
//! compare-and-set and says no when somebody else has them now. An old lease that turns out to be
//! alive (etcd gives every lease its full TTL again after a restart) is adopted, so that watchers
//! of its keys see nothing at all.

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use super::keeper::{self, Ended, Lessee};
use super::renewal::{Proof, Renewal};
use super::word::DeadlineWord;
use crate::CancelToken;
use crate::client::core::{BoxFuture, Core, Owned, unconfirmed};
use crate::client::runtime::Abandon;
use crate::clock::Instant;
use crate::error::{Error, ErrorKind, Result};
use crate::race::{Either, race};
use crate::recipe::{Events, Listeners, RecipeCore, Signal};
use crate::resilience::{LeaseResilience, LeaseTiming, random_unit};
use crate::whitebox;

/// What happened to a presence lease.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum LeaseEvent {
    /// Renewals are overdue; the keys still stand.
    Suspended {
        /// The lease.
        lease: i64,
        /// What is wrong.
        cause: Error,
    },
    /// The lease passed its deadline or its key was taken away; others may have seen the keys
    /// vanish. Healing starts.
    Expired {
        /// The lease.
        lease: i64,
        /// Why.
        cause: Error,
    },
    /// The keys stand again.
    Restored {
        /// The lease before.
        old: i64,
        /// The lease now; equal to `old` where the old one turned out to be alive.
        new: i64,
    },
    /// Healing ended without success: somebody else owns a key now, or the policy gave up. The
    /// last event.
    Failed {
        /// The last lease.
        lease: i64,
        /// Why.
        cause: Error,
    },
}

/// A lease that was just granted, as an `establish` hook sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lease {
    pub(crate) id: i64,
    pub(crate) ttl: Duration,
}

impl Lease {
    /// The id to put keys under.
    pub fn id(&self) -> i64 {
        self.id
    }

    /// The TTL that etcd granted.
    pub fn ttl(&self) -> Duration {
        self.ttl
    }
}

/// What a read of a presence key found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sighting {
    /// Our key, on this lease.
    Ours,
    /// No key, or one that is not as we left it.
    Amiss,
}

/// Whoever owns the keys of a presence lease.
pub(crate) trait Owner: Send + Sync + 'static {
    /// Creates the keys under `lease` where they are free. `Ok(false)`: somebody else has them.
    fn establish(&self, lease: Lease) -> BoxFuture<Result<bool>>;

    /// A key to look after, if the owner knows one.
    fn key(&self) -> Option<Vec<u8>>;

    /// Whether the key, as it was found, is as it should be.
    fn judge(&self, lease: i64, found: Option<&etcd_client::KeyValue>) -> Sighting;
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Healthy,
    Healing,
    Failed,
    Closed,
}

pub(crate) struct Presence {
    core: Arc<Core>,
    recipe: Arc<RecipeCore>,
    owner: Arc<dyn Owner>,
    timing: LeaseTiming,
    resilience: LeaseResilience,
    lease: AtomicI64,
    state: Mutex<State>,
    stop: CancelToken,
    revoked: AtomicBool,
    pub(crate) listeners: Listeners<LeaseEvent>,
    pub(crate) events: Events<LeaseEvent>,
    _counted: whitebox::GaugeGuard<'static>,
}

/// A lease and when its grant or last renewal was sent.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fresh {
    pub(crate) lease: Lease,
    pub(crate) sent: Instant,
}

impl Presence {
    pub(crate) fn new(
        core: Arc<Core>,
        recipe: Arc<RecipeCore>,
        owner: Arc<dyn Owner>,
        timing: LeaseTiming,
        resilience: LeaseResilience,
    ) -> Arc<Presence> {
        Arc::new(Presence {
            core,
            recipe,
            owner,
            timing,
            resilience,
            lease: AtomicI64::new(NO_LEASE),
            state: Mutex::new(State::Healing),
            stop: CancelToken::new(),
            revoked: AtomicBool::new(false),
            listeners: Listeners::new(),
            events: Events::new(),
            _counted: whitebox::PRESENCES.enter(),
        })
    }

    /// The first lease. Not kept until [`run`](Presence::run).
    pub(crate) async fn grant(&self, until: Instant) -> Result<Fresh> {
        let asked = i64::try_from(self.timing.ttl.as_secs()).unwrap_or(i64::MAX);
        let granted = self.core.grant("lease grant", asked, until).await?;
        let ttl = Duration::from_secs(granted.ttl.unsigned_abs());
        Ok(Fresh { lease: Lease { id: granted.id, ttl }, sent: granted.sent })
    }

    /// Grants and establishes, or leaves nothing behind; so it does when it is dropped half way, and
    /// when its caller leaves.
    pub(crate) async fn start(
        self: &Arc<Presence>,
        until: Instant,
        abandon: &Abandon,
    ) -> Result<()> {
        let establish = async {
            let fresh = self.grant(until).await?;
            let doomed = Doomed { presence: self, leases: vec![fresh.lease.id] };
            if self.owner.establish(fresh.lease).await? {
                Ok((fresh, doomed))
            } else {
                Err(not_ours(self.recipe.identity()))
            }
        };
        let gave_up = race(abandon.fired(), self.core.clock.sleep_until(until));
        match race(establish, gave_up).await {
            Either::First(Ok(_)) | Either::Second(Either::First(())) if abandon.is_fired() => {
                Err(Error::interrupted("starting"))
            }
            Either::First(established) => {
                let (fresh, mut doomed) = established?;
                doomed.spare(fresh.lease.id);
                self.run(fresh);
                Ok(())
            }
            Either::Second(_) => Err(Error::new(
                ErrorKind::Unreachable,
                format!("{}: the key could not be written in time", self.recipe.identity()),
            )),
        }
    }

    /// Notes a lease that is to be given back at the close although it is not kept yet.
    pub(crate) fn adopt_unkept(&self, fresh: Fresh) {
        self.lease.store(fresh.lease.id, Ordering::Release);
    }

    /// Starts to keep a lease whose keys stand.
    pub(crate) fn run(self: &Arc<Presence>, fresh: Fresh) {
        let weak: Weak<dyn Owned> = Arc::<Presence>::downgrade(self);
        self.core.register(weak);
        self.lease.store(fresh.lease.id, Ordering::Release);
        if !self.move_to(State::Healthy) {
            // Closed while it was starting: the close knew of no lease.
            return self.revoke_in_background(fresh.lease.id);
        }
        self.core.runtime.spawn(self.clone().keep_and_heal(fresh));
    }

    /// The lease now kept, or -1 before the first.
    pub(crate) fn current_lease(&self) -> i64 {
        self.lease.load(Ordering::Acquire)
    }

    /// Whether there is, or was, a lease to keep.
    pub(crate) fn is_started(&self) -> bool {
        self.current_lease() != NO_LEASE
    }

    pub(crate) fn is_healthy(&self) -> bool {
        *self.state.lock() == State::Healthy
    }

    pub(crate) fn is_failed(&self) -> bool {
        *self.state.lock() == State::Failed
    }

    async fn keep_and_heal(self: Arc<Presence>, mut fresh: Fresh) {
        loop {
            let (old, cause) = match self.keep(fresh).await {
                Some(cause) => (fresh.lease.id, cause),
                None => return,
            };
            if !self.move_to(State::Healing) {
                return;
            }
            self.recipe.record_error(cause.clone());
            self.recipe.signal(Signal::Lost);
            self.emit(LeaseEvent::Expired { lease: old, cause });
            match race(self.heal(old), self.stop.cancelled()).await {
                Either::First(Ok(healed)) => fresh = healed,
                Either::First(Err(cause)) => return self.fail(old, cause),
                Either::Second(()) => return,
            }
            self.lease.store(fresh.lease.id, Ordering::Release);
            if !self.move_to(State::Healthy) {
                // Closed at this very moment: the close revoked the lease it knew of.
                self.revoke_in_background(fresh.lease.id);
                return;
            }
            self.emit(LeaseEvent::Restored { old, new: fresh.lease.id });
            self.recipe.signal(Signal::Restored);
        }
    }

    /// Renews until something is wrong, and returns what; `None` when closed.
    async fn keep(self: &Arc<Presence>, fresh: Fresh) -> Option<Error> {
        let timing = self.timing.granted(fresh.lease.ttl);
        let renewal = Renewal::new(Proof::Advisory, timing, fresh.sent);
        let life = Arc::new(Life {
            presence: self.clone(),
            lease: fresh.lease.id,
            word: DeadlineWord::new(renewal.deadline()),
            amiss: AtomicBool::new(false),
            suspended: AtomicBool::new(false),
        });
        let limit = timing.attempt_limit;
        let ended =
            keeper::keep(self.core.clone(), life.clone(), renewal, limit, self.stop.clone()).await;
        let say = |kind, text: &str| {
            Some(Error::new(kind, format!("{}: {text}", self.recipe.identity())))
        };
        match ended {
            Ended::Stopped if life.amiss.load(Ordering::Acquire) => {
                say(ErrorKind::Lost, "the key was deleted or overwritten")
            }
            Ended::Stopped => None,
            Ended::DeadlinePassed => {
                say(ErrorKind::Unreachable, "no renewal was answered before the deadline")
            }
            Ended::Refused => say(ErrorKind::PermissionDenied, "etcd refuses our login"),
            Ended::LeaseGone => say(ErrorKind::LeaseGone, "etcd ended the lease"),
            Ended::WrongCluster => {
                say(ErrorKind::WrongCluster, "the endpoints lead to another cluster")
            }
        }
    }

    /// Tries, at the policy's pace, until the keys stand again.
    async fn heal(self: &Arc<Presence>, old: i64) -> Result<Fresh> {
        let policy = self.resilience.get_retry_policy();
        let started = self.core.clock.now();
        if matches!(policy.next(1, Duration::ZERO, 0.0), crate::resilience::Next::Stop) {
            return Err(Error::new(
                ErrorKind::Lost,
                format!("{}: healing is switched off", self.recipe.identity()),
            ));
        }
        let mut doomed = Doomed { presence: self, leases: vec![old] };
        let mut attempt = 0;
        let mut told = None;
        loop {
            let (error, returns) = {
                // Mass expiry: heal some at a time, and let the rest wait their turn.
                let _place = self.core.heals.acquire().await;
                let returns = self.core.returns.count();
                match self.core.asking_for_etcd(old, self.try_heal(old, &mut doomed)).await {
                    Ok(Some(fresh)) => return Ok(fresh),
                    Ok(None) => return Err(not_ours(self.recipe.identity())),
                    Err(error) => (error, returns),
                }
            };
            if error.kind() == ErrorKind::WrongCluster {
                return Err(error);
            }
            // Told once per kind of trouble, not once per try.
            if told != Some(error.kind()) {
                told = Some(error.kind());
                self.recipe.record_error(error.clone());
            }
            attempt += 1;
            let elapsed = self.core.clock.now().saturating_since(started);
            let next = policy.next(attempt, elapsed, random_unit());
            match self.core.decide(next, attempt, elapsed).await {
                Some(pause) if found_no_etcd(&error) => {
                    self.core.pause_unless_back(pause, returns, old).await;
                }
                Some(pause) => self.core.clock.sleep(pause).await,
                None => return Err(error),
            }
        }
    }

    /// One try: adopt the old lease if it lives, else grant a new one. `None`: not ours any more.
    ///
    /// Before a new lease's keys are created, every earlier lease of ours has to be over. One that
    /// etcd has not come to end yet, or one on which an earlier try put keys without hearing of
    /// it, still has its keys, and to an owner who creates them where they are free our own look
    /// like somebody else's.
    async fn try_heal(
        self: &Arc<Presence>,
        old: i64,
        doomed: &mut Doomed<'_>,
    ) -> Result<Option<Fresh>> {
        let until = self.core.clock.now() + self.resilience.get_heal_operation_timeout();
        if let Some(fresh) = self.revive(old, until).await? {
            let ours = match self.owner.key() {
                Some(key) => {
                    let read = self.core.range("lease revival", &key, None, until).await?;
                    self.owner.judge(old, read.kvs().first()) == Sighting::Ours
                }
                None => true,
            };
            if ours || self.owner.establish(fresh.lease).await? {
                doomed.spare(old);
                return Ok(Some(fresh));
            }
            return Ok(None);
        }
        doomed.end_all(until).await?;
        let fresh = self.grant(until).await?;
        doomed.leases.push(fresh.lease.id);
        let limit = self.core.clock.sleep_until(until);
        match race(self.owner.establish(fresh.lease), limit).await {
            Either::First(Ok(true)) => {
                doomed.spare(fresh.lease.id);
                Ok(Some(fresh))
            }
            Either::First(Ok(false)) => Ok(None),
            Either::First(Err(error)) => Err(error),
            Either::Second(()) => Err(Error::new(
                ErrorKind::TimedOut,
                format!("{}: establishing took too long", self.recipe.identity()),
            )),
        }
    }

    /// Renews the old lease once, if etcd still has it. Whether it does is not for its remaining
    /// time to say: that comes in whole seconds, so the last of them looks like none.
    async fn revive(&self, old: i64, until: Instant) -> Result<Option<Fresh>> {
        if self.core.time_to_live("lease revival", old, until).await?.is_none() {
            return Ok(None);
        }
        let Some((sent, ttl)) = keeper::renew_once(&self.core, old, until).await? else {
            return Ok(None);
        };
        Ok(Some(Fresh { lease: Lease { id: old, ttl }, sent }))
    }

    fn fail(&self, lease: i64, cause: Error) {
        if self.move_to(State::Failed) {
            self.recipe.record_error(cause.clone());
            self.recipe.signal(Signal::Lost);
            self.listeners_hear(LeaseEvent::Failed { lease, cause: cause.clone() });
            self.events.publish_final(LeaseEvent::Failed { lease, cause });
            self.revoke_in_background(lease);
        }
    }

    fn emit(&self, event: LeaseEvent) {
        self.listeners_hear(event.clone());
        self.events.publish(event);
    }

    fn listeners_hear(&self, event: LeaseEvent) {
        self.recipe.notify(&self.listeners, event);
    }

    fn move_to(&self, next: State) -> bool {
        let mut state = self.state.lock();
        let open = *state != State::Closed;
        if open {
            *state = next;
        }
        open
    }

    fn revoke_in_background(&self, lease: i64) {
        let core = self.core.clone();
        self.core.runtime.spawn(async move {
            let until = core.clock.now() + Duration::from_secs(10);
            if let Err(error) = core.revoke("lease revoke", lease, until).await {
                log::debug!("lease {lease:x} is left to its TTL: {error}");
            }
        });
    }

    /// Whether it was stopped, for whatever reason.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.is_cancelled()
    }

    /// Stops keeping and healing. The keys go with the lease, in [`give_back`](Self::give_back).
    pub(crate) fn stop(&self) {
        let already = {
            let mut state = self.state.lock();
            std::mem::replace(&mut *state, State::Closed) == State::Closed
        };
        if !already {
            self.stop.cancel();
            self.events.close();
        }
    }

    /// Revokes the lease, so that the keys go now and not at the TTL.
    pub(crate) async fn give_back(self: Arc<Presence>, until: Instant) -> Result<()> {
        let lease = self.current_lease();
        if lease == NO_LEASE || self.revoked.load(Ordering::Acquire) {
            return Ok(());
        }
        self.core.revoke("lease revoke", lease, until).await?;
        self.revoked.store(true, Ordering::Release);
        Ok(())
    }

    /// Stops and gives back, within the time that a close may take. Never interrupted.
    pub(crate) fn close(self: &Arc<Presence>, op: &'static str) -> Result<()> {
        if self.core.is_forked() {
            return self.core.check_usable();
        }
        self.stop();
        if self.core.on_io_thread() {
            self.core.runtime.spawn({
                let until = self.core.clock.now() + CLOSE_LIMIT;
                let me = self.clone();
                async move { drop(me.give_back(until).await) }
            });
            return Ok(());
        }
        let until = self.core.clock.now() + CLOSE_LIMIT.min(self.timing.ttl);
        match self.core.block_shielded(op, until, self.clone().give_back(until)) {
            Some(Ok(())) => Ok(()),
            // A closed client has seen to it.
            Some(Err(error)) if error.is_closed() => Ok(()),
            Some(Err(error)) => Err(unconfirmed(error)),
            None => Err(unconfirmed("etcd did not answer in time")),
        }
    }
}

/// What [`Presence::current_lease`] says before the first grant.
pub(crate) const NO_LEASE: i64 = -1;

const CLOSE_LIMIT: Duration = Duration::from_secs(2);

/// Whether a try failed for a reason that is over when etcd answers again.
fn found_no_etcd(error: &Error) -> bool {
    error.is_unreachable() || error.is_ambiguous() || error.is_timeout()
}

fn not_ours(identity: &str) -> Error {
    Error::new(
        ErrorKind::NotEstablished,
        format!("{identity}: somebody else owns the key now; it is left alone"),
    )
}

/// Leases that are to end, unless one of them is spared. Dropped half way (a failure, a close),
/// they are ended in the background.
struct Doomed<'a> {
    presence: &'a Presence,
    leases: Vec<i64>,
}

impl Doomed<'_> {
    fn spare(&mut self, lease: i64) {
        self.leases.retain(|doomed| *doomed != lease);
    }

    async fn end_all(&mut self, until: Instant) -> Result<()> {
        while let Some(lease) = self.leases.last() {
            self.presence.core.revoke("lease revoke", *lease, until).await?;
            self.leases.pop();
        }
        Ok(())
    }
}

impl Drop for Doomed<'_> {
    fn drop(&mut self) {
        for lease in self.leases.drain(..) {
            self.presence.revoke_in_background(lease);
        }
    }
}

/// One lease of a presence, from grant to end.
struct Life {
    presence: Arc<Presence>,
    lease: i64,
    word: DeadlineWord,
    amiss: AtomicBool,
    suspended: AtomicBool,
}

impl Lessee for Life {
    fn lease(&self) -> i64 {
        self.lease
    }

    fn word(&self) -> &DeadlineWord {
        &self.word
    }

    fn probe(&self) -> Option<Vec<u8>> {
        self.presence.owner.key()
    }

    fn probed(&self, _key: &[u8], _revision: i64, found: Option<&etcd_client::KeyValue>) {
        if self.presence.owner.judge(self.lease, found) == Sighting::Amiss {
            self.amiss.store(true, Ordering::Release);
        }
    }

    fn counted(&self, _sent: Instant) {}

    fn refused(&self) {}

    fn suspended(&self) {
        self.suspended.store(true, Ordering::Release);
        let presence = &self.presence;
        let cause = Error::new(
            ErrorKind::Unreachable,
            format!("{}: renewals are not answered", presence.recipe.identity()),
        );
        presence.recipe.signal(Signal::Suspended);
        presence.emit(LeaseEvent::Suspended { lease: self.lease, cause });
    }

    fn reconnected(&self) {
        if self.suspended.swap(false, Ordering::AcqRel) {
            self.presence.emit(LeaseEvent::Restored { old: self.lease, new: self.lease });
            self.presence.recipe.signal(Signal::Restored);
        }
    }

    fn is_done(&self, _now: Instant) -> bool {
        self.amiss.load(Ordering::Acquire)
    }
}

impl Owned for Presence {
    fn lose(&self) {
        self.stop();
    }

    fn cleanup(self: Arc<Self>, until: Instant) -> BoxFuture<Result<()>> {
        Box::pin(self.give_back(until))
    }

    fn finish(&self, _limit: Duration) {}
}
