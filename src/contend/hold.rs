//! One hold: a key with a known create revision, and the truth about it.
//!
//! A hold ends once, either by its holder's will or against it, and every path to an end goes
//! through one compare-and-set here. Several permits taken at once are one hold with as many keys.
//!
//! A hold that excludes may stop doing so without ending (a downgrade). The views that stand for
//! the exclusion are of an *epoch*, and are over as soon as it is: before etcd is told.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;

use super::Contender;
use super::identity::ContenderMode;
use super::leave::{Leaver, Left, leave_all};
use super::own_key::Found;
use super::set::HoldSet;
use crate::CancelToken;
use crate::client::core::BoxFuture;
use crate::clock::Instant;
use crate::error::{Error, ErrorKind};
use crate::lease::{Loss, LossReason, Session, Tenant, Ticket};
use crate::recipe::{RecipeCore, Signal};
use crate::watch::Watching;
use crate::whitebox;

/// Not handed out yet; a loss now is nobody's loss.
const PENDING: u8 = 0;
const HELD: u8 = 1;
const ENDED: u8 = 2;
const LOST: u8 = 3;
/// Not held any more because the key is gone, and not told yet: its lease is being asked about.
const FALLEN: u8 = 4;

/// How long a loss may wait for the answer that tells a deleted key from an ended lease.
const WHY_LIMIT: Duration = Duration::from_millis(500);

/// How long a release may wait for its answer; then it goes on in the background.
pub(super) const RELEASE_LIMIT: Duration = Duration::from_secs(2);

pub(crate) struct Hold {
    pub(super) contender: Arc<Contender>,
    pub(super) session: Arc<Session>,
    /// Never empty.
    pub(super) keys: Vec<Vec<u8>>,
    pub(super) create_revision: i64,
    pub(super) mode: ContenderMode,
    state: AtomicU8,
    pub(super) epoch: AtomicU32,
    /// What a downgrade writes, from before it is sent.
    pub(super) rewritten: Mutex<Option<Vec<u8>>>,
    cancel: CancelToken,
    loss: OnceLock<Loss>,
    guard_gone: AtomicBool,
    tickets: Mutex<Vec<Ticket>>,
    /// Cancelled once the keys are known to be gone, after an end of any kind.
    left: CancelToken,
    own_key_watches: Mutex<Vec<Watching>>,
    /// The set it is part of, if it is.
    set: OnceLock<Weak<HoldSet>>,
    /// Cancelled when the code that runs under its protection has ended, where that is known.
    work: OnceLock<CancelToken>,
    pub(super) acquired: Instant,
    /// When it ends although its holder lives.
    until: Option<Instant>,
    _counted: whitebox::GaugeGuard<'static>,
}

impl Hold {
    /// Turns keys that etcd showed to be inside into a hold; `None` if their lease is no longer
    /// good for one.
    pub(super) fn begin(
        contender: &Arc<Contender>,
        mode: ContenderMode,
        tickets: Vec<Ticket>,
        create_revision: i64,
    ) -> Option<Arc<Hold>> {
        let session = tickets.first()?.session().clone();
        let acquired = contender.core.clock.now();
        let hold = Arc::new(Hold {
            contender: contender.clone(),
            keys: tickets.iter().map(|ticket| ticket.key().to_vec()).collect(),
            create_revision,
            mode,
            state: AtomicU8::new(PENDING),
            epoch: AtomicU32::new(0),
            rewritten: Mutex::new(None),
            cancel: CancelToken::new(),
            loss: OnceLock::new(),
            guard_gone: AtomicBool::new(false),
            tickets: Mutex::new(Vec::new()),
            left: CancelToken::new(),
            own_key_watches: Mutex::new(Vec::new()),
            set: OnceLock::new(),
            work: OnceLock::new(),
            acquired,
            until: contender.max_hold.as_ref().map(|(limit, _)| acquired + *limit),
            _counted: whitebox::HOLDS.enter(),
            session,
        });
        let mut wanted = true;
        for ticket in &tickets {
            let weak: Weak<dyn Tenant> = Arc::<Hold>::downgrade(&hold);
            wanted &= ticket.install(weak, create_revision);
        }
        if !wanted && hold.moved(PENDING, ENDED) {
            // Released by force while it waited: its keys are about to go.
            hold.leave_in_background(tickets);
            return None;
        }
        *hold.tickets.lock() = tickets;
        // The deadline may have passed while the answer was on its way. Asked after the session
        // knows of the hold, so that every later loss reaches it.
        let stands = hold.session.is_alive() && hold.moved(PENDING, HELD);
        if !stands {
            hold.take_tickets().into_iter().for_each(Ticket::settle);
            return None;
        }
        contender.core.young.add(&hold, &contender.core);
        if let Some((_, overdue)) = &contender.max_hold {
            overdue.add(&hold, &contender.core);
        }
        contender.remember_hold(&hold);
        if contender.recipe.closed().is_cancelled() {
            // The close may have looked for holds before this one was there to be found.
            hold.release_in_background();
            return None;
        }
        Some(hold)
    }

    fn take_tickets(&self) -> Vec<Ticket> {
        std::mem::take(&mut *self.tickets.lock())
    }

    pub(crate) fn contender(&self) -> &Arc<Contender> {
        &self.contender
    }

    /// From now on the hold is lost with any other of the set.
    pub(super) fn join(&self, set: &Arc<HoldSet>) {
        let _ = self.set.set(Arc::downgrade(set));
    }

    /// Code that ends with `work` runs under this hold: a close of the client waits for it, within
    /// its bound, and gives the key back after it or not at all.
    pub(crate) fn protect(&self, work: &CancelToken) {
        let _ = self.work.set(work.clone());
    }

    /// The key, or the first of several.
    pub(crate) fn key(&self) -> &[u8] {
        &self.keys[0]
    }

    /// How many keys the hold has.
    pub(crate) fn key_count(&self) -> usize {
        self.keys.len()
    }

    pub(crate) fn lease(&self) -> i64 {
        self.session.lease()
    }

    /// Which exclusion a view that is made now stands for.
    pub(crate) fn epoch(&self) -> u32 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Whether the hold stands: a clock read and two atomic loads, asked of nobody.
    pub(crate) fn is_held(&self) -> bool {
        !self.contender.core.is_forked()
            && self.state.load(Ordering::Acquire) == HELD
            && self.session.is_alive()
            && !self.is_overdue()
    }

    /// Whether it has lasted as long as it may; whoever finds that ends it.
    fn is_overdue(&self) -> bool {
        let now = || self.contender.core.clock.now();
        let overdue = self.until.is_some_and(|until| now() >= until);
        if overdue {
            self.lose_and_leave(LossReason::MaxHoldExceeded);
        }
        overdue
    }

    pub(crate) fn is_forked(&self) -> bool {
        self.contender.core.is_forked()
    }

    pub(super) fn stands(&self) -> bool {
        self.state.load(Ordering::Acquire) == HELD
    }

    pub(crate) fn is_lost(&self) -> bool {
        // The look at the clock makes a passed deadline a loss.
        !self.is_held() && matches!(self.state.load(Ordering::Acquire), LOST | FALLEN)
    }

    pub(crate) fn remaining(&self) -> Duration {
        if !self.is_held() {
            return Duration::ZERO;
        }
        let left = self.session.remaining();
        let now = self.contender.core.clock.now();
        self.until.map_or(left, |until| left.min(until.saturating_since(now)))
    }

    pub(crate) fn token(&self) -> i64 {
        self.create_revision
    }

    pub(crate) fn cancel_token(&self) -> &CancelToken {
        &self.cancel
    }

    /// The key as its owner knows it.
    pub(crate) fn shown_key(&self) -> String {
        self.contender.core.shown(&self.keys[0])
    }

    pub(crate) fn loss(&self) -> Option<&Loss> {
        self.loss.get()
    }

    pub(crate) fn lost_error(&self) -> Error {
        let reason = match self.loss() {
            Some(loss) => format!("{:?}", loss.reason),
            None => "its key is gone".to_owned(),
        };
        Error::new(
            ErrorKind::Lost,
            format!("{}: the hold was lost ({reason})", self.contender.recipe.identity()),
        )
    }

    /// The guard has gone: whoever listens from now on need not hear of a loss.
    pub(crate) fn let_go(&self) {
        self.contender.losses.forget(self.create_revision, &self.guard_gone);
    }

    fn moved(&self, from: u8, to: u8) -> bool {
        self.state.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    // ----- the end ----------------------------------------------------------------------------

    /// Ends the hold by its holder's will, and says whether it stood until now. Waits for etcd no
    /// longer than its small budget; what is not answered by then is done in the background.
    pub(crate) fn release(self: &Arc<Hold>) -> bool {
        if !self.end() {
            return false;
        }
        let core = &self.contender.core;
        let budget = RELEASE_LIMIT.min(self.session.remaining());
        let tickets = self.take_tickets();
        if core.on_io_thread() {
            self.leave_in_background(tickets);
            return true;
        }
        let leaving = self.leaving(tickets);
        let until = core.clock.now() + budget;
        let left = core.block_shielded("release", until, async move { Ok(leaving.await) });
        !matches!(left, Some(Ok(Left::Gone)))
    }

    /// Ends the hold by its holder's will, and leaves its keys to the caller; `None` if it had
    /// ended before.
    pub(super) fn give_up(&self) -> Option<Leaver> {
        self.end()
            .then(|| Leaver { contender: self.contender.clone(), tickets: self.take_tickets() })
    }

    fn leavers(&self, tickets: Vec<Ticket>) -> Vec<Leaver> {
        if tickets.is_empty() {
            return Vec::new();
        }
        vec![Leaver { contender: self.contender.clone(), tickets }]
    }

    fn leaving(&self, tickets: Vec<Ticket>) -> impl Future<Output = Left> + Send + use<> {
        let leaving = Box::pin(leave_all(self.leavers(tickets), self.create_revision));
        let gone = self.left.clone();
        async move {
            let left = leaving.await;
            gone.cancel();
            left
        }
    }

    /// Cancelled once the keys are known to be gone, after an end of any kind.
    pub(crate) fn left(&self) -> &CancelToken {
        &self.left
    }

    /// Ends the hold by its holder's will, for a task on the runtime.
    pub(crate) async fn release_here(self: &Arc<Hold>) -> bool {
        if !self.end() {
            return false;
        }
        self.leaving(self.take_tickets()).await == Left::Deleted
    }

    /// Releases a hold that nobody will ever use, without waiting.
    pub(super) fn release_in_background(self: &Arc<Hold>) {
        if self.end() {
            self.leave_in_background(self.take_tickets());
        }
    }

    fn leave_in_background(&self, tickets: Vec<Ticket>) {
        let leaving = self.leaving(tickets);
        self.contender.core.runtime.spawn(async move {
            let _ = leaving.await;
        });
    }

    /// The flag flips before the delete is sent: nobody is inside while believing otherwise.
    fn end(&self) -> bool {
        if !self.is_held() {
            return false;
        }
        let ended = self.moved(HELD, ENDED);
        if ended {
            drop(std::mem::take(&mut *self.own_key_watches.lock()));
            self.contender.forget_hold(self);
        }
        ended
    }

    /// Ends the hold against its holder's will: flag, token, state and record, listeners; in this
    /// order. What is left to do is to dispose of the tickets, and of the keys with them.
    fn lose_by(&self, reason: LossReason, last_renewal: SystemTime) -> Option<Vec<Ticket>> {
        if self.moved(PENDING, ENDED) || !(self.moved(HELD, LOST) || self.moved(FALLEN, LOST)) {
            return None;
        }
        let contender = &self.contender;
        let loss = Loss {
            reason,
            path: contender.recipe.path().to_owned(),
            key: self.shown_key(),
            token: self.create_revision,
            last_renewal,
        };
        let _ = self.loss.set(loss.clone());
        self.cancel.cancel();
        let set = self.set.get().and_then(Weak::upgrade);
        if let Some(set) = &set {
            set.cancel();
        }
        contender.recipe.signal(Signal::Lost);
        contender.recipe.record_error(self.lost_error());
        contender.losses.tell(loss, &self.guard_gone);
        drop(std::mem::take(&mut *self.own_key_watches.lock()));
        contender.forget_hold(self);
        if let Some(set) = set {
            set.lose();
        }
        Some(self.take_tickets())
    }

    /// Loses by a cause that leaves the keys standing: they are to go.
    fn lose_and_leave(&self, reason: LossReason) {
        if let Some(tickets) = self.lose_by(reason, self.session.last_renewal()) {
            self.leave_in_background(tickets);
        }
    }

    /// The keys of a lost hold are gone, or go with their lease.
    fn settle(&self, tickets: Vec<Ticket>) {
        tickets.into_iter().for_each(Ticket::settle);
        self.left.cancel();
    }

    /// Another hold of the set was lost. This one would still stand, so its key is to go.
    pub(super) fn lose_with_set(&self) {
        if !self.session.is_alive() {
            // Lost by itself: its session tells it, with the reason.
            return;
        }
        self.lose_and_leave(LossReason::SetLost);
    }

    /// The recipe is being closed: the hold is lost, and its key is to be removed.
    pub(super) fn close(&self) -> Option<(Vec<Leaver>, i64)> {
        let tickets = self.lose_by(LossReason::Closed, self.session.last_renewal())?;
        Some((self.leavers(tickets), self.create_revision))
    }

    /// Something happened to the key alone; the lease lives on.
    pub(super) fn lose_key(&self, reason: LossReason) {
        let Some(tickets) = self.lose_by(reason, self.session.last_renewal()) else { return };
        if reason == LossReason::KeyOverwritten || tickets.len() > 1 {
            // A stranger's write keeps the create revision and drops the lease, so the key would
            // stay and block the queue; and of several permits only one may have gone.
            self.leave_in_background(tickets);
        } else {
            self.settle(tickets);
        }
    }

    /// The key is gone. The flag flips here and now; the caller sees to it that it is told.
    pub(super) fn fall(&self) -> bool {
        self.moved(HELD, FALLEN)
    }

    /// Keeps the watches on the own keys for as long as the hold stands.
    pub(super) fn keep(&self, watching: Vec<Watching>) {
        let mut slot = self.own_key_watches.lock();
        if self.state.load(Ordering::Acquire) == HELD {
            *slot = watching;
        }
    }

    /// Tells of a key that is gone, once it is known whether the key alone was deleted or the
    /// lease has ended, and with it every other hold on it.
    pub(super) async fn tell_why(self: Arc<Hold>) {
        let core = &self.contender.core;
        let until = core.clock.now() + WHY_LIMIT;
        if let Ok(None) = core.time_to_live("loss", self.session.lease(), until).await {
            self.session.end_by(LossReason::LeaseGone);
        }
        self.lose_key(LossReason::KeyDeleted);
    }

    pub(super) fn vanish(self: Arc<Hold>) {
        // Not handed out yet, it never is.
        if !self.moved(PENDING, ENDED) && self.fall() {
            self.contender.core.clone().runtime.spawn(self.tell_why());
        }
    }
}

impl Tenant for Hold {
    fn lose(&self, reason: LossReason, last_renewal: SystemTime) {
        if let Some(tickets) = self.lose_by(reason, last_renewal) {
            self.settle(tickets);
        }
    }

    fn probed(self: Arc<Hold>, found: Option<&etcd_client::KeyValue>) {
        // The lease was renewed just before, but may have ended since.
        if !self.is_ours(found.map(Found::from).as_ref()) {
            self.vanish();
        }
    }

    fn asked(&self, from: String) {
        if self.is_held() {
            let Contender { recipe, requests, .. } = &*self.contender;
            requests.tell(recipe, self.create_revision, from);
        }
    }

    fn forced(self: Arc<Self>) -> BoxFuture<()> {
        Box::pin(async move {
            let lost = self.lose_by(LossReason::KeyDeleted, self.session.last_renewal());
            if let Some(tickets) = lost {
                self.leaving(tickets).await;
            }
        })
    }

    fn token(&self) -> i64 {
        self.create_revision
    }

    fn recipe(&self) -> &Arc<RecipeCore> {
        &self.contender.recipe
    }

    fn work(&self) -> Option<CancelToken> {
        self.work.get().cloned()
    }
}
