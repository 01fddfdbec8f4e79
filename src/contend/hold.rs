//! One exclusive hold: a key with a known create revision, and the truth about it.
//!
//! A hold ends once, either by its holder's will or against it, and every path to an end goes
//! through one compare-and-set here.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;

use super::Contender;
use super::requests;
use crate::CancelToken;
use crate::client::call::Kind;
use crate::clock::Instant;
use crate::error::{Error, ErrorKind, Result};
use crate::lease::{Loss, LossReason, Session, Tenant, Ticket};
use crate::recipe::{RecipeCore, Signal};
use crate::watch::{Event, EventKind, Flow, Range, Sink, Snapshot, Spec, Watching};
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
    contender: Arc<Contender>,
    session: Arc<Session>,
    key: Vec<u8>,
    create_revision: i64,
    state: AtomicU8,
    cancel: CancelToken,
    loss: OnceLock<Loss>,
    guard_gone: AtomicBool,
    ticket: Mutex<Option<Ticket>>,
    own_key_watch: Mutex<Option<Watching>>,
    pub(super) acquired: Instant,
    _counted: whitebox::GaugeGuard<'static>,
}

impl Hold {
    /// Turns a key that etcd showed to be the first into a hold; `None` if its lease is no longer
    /// good for one.
    pub(super) fn begin(
        contender: &Arc<Contender>,
        ticket: Ticket,
        create_revision: i64,
    ) -> Option<Arc<Hold>> {
        let session = ticket.session().clone();
        let hold = Arc::new(Hold {
            contender: contender.clone(),
            key: ticket.key().to_vec(),
            create_revision,
            state: AtomicU8::new(PENDING),
            cancel: CancelToken::new(),
            loss: OnceLock::new(),
            guard_gone: AtomicBool::new(false),
            ticket: Mutex::new(None),
            own_key_watch: Mutex::new(None),
            acquired: contender.core.clock.now(),
            _counted: whitebox::HOLDS.enter(),
            session,
        });
        let weak: Weak<dyn Tenant> = Arc::<Hold>::downgrade(&hold);
        ticket.install(weak);
        *hold.ticket.lock() = Some(ticket);
        // The deadline may have passed while the answer was on its way. Asked after the session
        // knows of the hold, so that every later loss reaches it.
        let stands = hold.session.is_alive() && hold.moved(PENDING, HELD);
        if !stands {
            let ticket = hold.ticket.lock().take();
            if let Some(ticket) = ticket {
                ticket.settle();
            }
            return None;
        }
        contender.core.own_keys.add(&hold);
        contender.remember_hold(&hold);
        if contender.recipe.closed().is_cancelled() {
            // The close may have looked for holds before this one was there to be found.
            hold.release_in_background();
            return None;
        }
        Some(hold)
    }

    /// Whether the hold stands: a clock read and two atomic loads, asked of nobody.
    pub(crate) fn is_held(&self) -> bool {
        !self.contender.core.is_forked()
            && self.state.load(Ordering::Acquire) == HELD
            && self.session.is_alive()
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
        if self.is_held() { self.session.remaining() } else { Duration::ZERO }
    }

    pub(crate) fn token(&self) -> i64 {
        self.create_revision
    }

    pub(crate) fn cancel_token(&self) -> &CancelToken {
        &self.cancel
    }

    /// The key as its owner knows it.
    pub(crate) fn shown_key(&self) -> String {
        self.contender.core.shown(&self.key)
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
        let Some(ticket) = self.ticket.lock().take() else { return true };
        if core.on_io_thread() {
            self.leave_in_background(ticket);
            return true;
        }
        let leaving = leave(self.contender.clone(), ticket, self.create_revision);
        let until = core.clock.now() + budget;
        let left = core.block_shielded("release", until, async move { Ok(leaving.await) });
        !matches!(left, Some(Ok(Left::Gone)))
    }

    /// Releases a hold that nobody will ever use, without waiting.
    pub(super) fn release_in_background(self: &Arc<Hold>) {
        if self.end()
            && let Some(ticket) = self.ticket.lock().take()
        {
            self.leave_in_background(ticket);
        }
    }

    fn leave_in_background(&self, ticket: Ticket) {
        let leaving = leave(self.contender.clone(), ticket, self.create_revision);
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
            drop(self.own_key_watch.lock().take());
            self.contender.forget_hold(self);
        }
        ended
    }

    /// Ends the hold against its holder's will: flag, token, state and record, listeners; in this
    /// order. What is left to do is to dispose of the ticket, and of the key with it.
    fn lose_by(&self, reason: LossReason, last_renewal: SystemTime) -> Option<Ticket> {
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
        contender.recipe.signal(Signal::Lost);
        contender.recipe.record_error(self.lost_error());
        contender.losses.tell(loss, &self.guard_gone);
        drop(self.own_key_watch.lock().take());
        contender.forget_hold(self);
        self.ticket.lock().take()
    }

    /// The recipe is being closed: the hold is lost, and its key is to be removed.
    pub(super) fn close(&self) -> Option<(Ticket, i64)> {
        let ticket = self.lose_by(LossReason::Closed, self.session.last_renewal())?;
        Some((ticket, self.create_revision))
    }

    /// Something happened to the key alone; the lease lives on.
    fn lose_key(&self, reason: LossReason) {
        let Some(ticket) = self.lose_by(reason, self.session.last_renewal()) else { return };
        if reason == LossReason::KeyOverwritten {
            // A stranger's write keeps the create revision and drops the lease, so the key would
            // stay and block the queue.
            self.leave_in_background(ticket);
        } else {
            ticket.settle();
        }
    }

    /// Whether the key, as it was just found, is still ours; one that was written over is a loss.
    fn is_ours(&self, found: Option<(i64, i64)>) -> bool {
        let ours = found.filter(|(created, _)| *created == self.create_revision);
        if ours.is_some_and(|(created, modified)| modified != created) {
            self.lose_key(LossReason::KeyOverwritten);
        }
        ours.is_some()
    }

    /// What the key, as it was just found, says about the hold.
    async fn judge(self: &Arc<Hold>, found: Option<(i64, i64)>) {
        if !self.is_ours(found) && self.fall() {
            // A task of its own: told it must be, even if the caller does not wait.
            let _ = tokio::spawn(self.clone().tell_why()).await;
        }
    }

    /// The key is gone. The flag flips here and now; the caller sees to it that it is told.
    fn fall(&self) -> bool {
        self.moved(HELD, FALLEN)
    }

    /// Tells of a key that is gone, once it is known whether the key alone was deleted or the
    /// lease has ended, and with it every other hold on it.
    async fn tell_why(self: Arc<Hold>) {
        let core = &self.contender.core;
        let until = core.clock.now() + WHY_LIMIT;
        if let Ok(None) = core.time_to_live("loss", self.session.lease(), until).await {
            self.session.end_by(LossReason::LeaseGone);
        }
        self.lose_key(LossReason::KeyDeleted);
    }

    fn vanish(self: Arc<Hold>) {
        if self.fall() {
            self.contender.core.clone().runtime.spawn(self.tell_why());
        }
    }

    // ----- asking etcd ------------------------------------------------------------------------

    /// In a fork's child, and for a closed client or recipe, nothing can be asked any more.
    fn check_may_ask(&self) -> Result<()> {
        if self.is_forked() {
            return self.contender.core.check_usable();
        }
        match self.loss() {
            Some(loss) if loss.reason == LossReason::Closed => {
                Err(Error::closed(self.contender.recipe.identity()))
            }
            _ => Ok(()),
        }
    }

    /// The hold as etcd sees it now.
    pub(crate) fn verify(self: &Arc<Hold>) -> Result<bool> {
        if !self.is_held() {
            return self.check_may_ask().map(|()| false);
        }
        let hold = self.clone();
        self.contender.core.block_on("guard.verify", Some(&self.contender.recipe), async move {
            let core = &hold.contender.core;
            let read = core.range("verify", &hold.key, None, core.operation_limit()).await?;
            let found = read.kvs().first();
            hold.judge(found.map(|kv| (kv.create_revision(), kv.mod_revision()))).await;
            Ok(hold.is_held())
        })
    }

    /// The compares that make a write depend on the hold, decided inside etcd.
    pub(crate) fn fence(&self) -> Vec<etcd_client::Compare> {
        use etcd_client::{Compare, CompareOp};
        vec![
            Compare::create_revision(self.key.clone(), CompareOp::Equal, self.create_revision),
            Compare::version(self.key.clone(), CompareOp::Equal, 1),
        ]
    }

    /// Runs `then` in etcd if the hold still stands there; `None`: fenced, nothing was done.
    pub(crate) fn guarded(
        self: &Arc<Hold>,
        op: &'static str,
        key: Vec<u8>,
        then: Vec<etcd_client::TxnOp>,
    ) -> Result<Option<etcd_client::TxnResponse>> {
        // "Lost" is answered before the scope is looked at: it is the better reason.
        if !self.is_held() {
            return self.check_may_ask().map(|()| None);
        }
        let hold = self.clone();
        self.contender.core.block_on(op, Some(&self.contender.recipe), async move {
            let core = &hold.contender.core;
            let txn = etcd_client::Txn::new().when(hold.fence()).and_then(then);
            let response = core.txn(op, &key, Kind::Write, txn, core.operation_limit()).await?;
            if !response.succeeded() {
                // Who was fenced off wants to know why soon: look at the key.
                let read = core.range("fenced", &hold.key, None, core.operation_limit()).await;
                if let Ok(read) = read {
                    let found = read.kvs().first();
                    hold.judge(found.map(|kv| (kv.create_revision(), kv.mod_revision()))).await;
                }
                return Ok(None);
            }
            Ok(Some(response))
        })
    }

    // ----- the watch on the own key -----------------------------------------------------------

    /// Watches the own key from now on, for a hold that lasts.
    pub(super) fn watch_own_key(self: &Arc<Hold>) {
        let core = &self.contender.core;
        let spec = Spec {
            range: Range::Key(self.key.clone()),
            from: self.create_revision + 1,
            group: "own-keys",
        };
        let watching = core.watches.watch(spec, Arc::new(OwnKey(Arc::downgrade(self))));
        let mut slot = self.own_key_watch.lock();
        if self.state.load(Ordering::Acquire) == HELD {
            *slot = Some(watching);
        }
    }
}

impl Tenant for Hold {
    fn lose(&self, reason: LossReason, last_renewal: SystemTime) {
        // The key goes with the lease.
        if let Some(ticket) = self.lose_by(reason, last_renewal) {
            ticket.settle();
        }
    }

    fn probed(&self, found: Option<&etcd_client::KeyValue>) {
        // The lease was renewed just before.
        if !self.is_ours(found.map(|kv| (kv.create_revision(), kv.mod_revision()))) {
            self.lose_key(LossReason::KeyDeleted);
        }
    }

    fn recipe(&self) -> &Arc<RecipeCore> {
        &self.contender.recipe
    }
}

struct OwnKey(Weak<Hold>);

impl Sink for OwnKey {
    fn deliver(&self, _revision: i64, events: Vec<Event>) -> Flow {
        if let (Some(hold), Some(event)) = (self.0.upgrade(), events.first()) {
            match event.kind {
                EventKind::Put => hold.lose_key(LossReason::KeyOverwritten),
                EventKind::Delete => hold.vanish(),
            }
        }
        Flow::Continue
    }

    fn resync(&self, snapshot: Snapshot) {
        if let Some(hold) = self.0.upgrade() {
            let found = snapshot.entries.first();
            if !hold.is_ours(found.map(|entry| (entry.create_revision, entry.mod_revision))) {
                hold.vanish();
            }
        }
    }

    fn failed(&self, error: Error) {
        // The proof reads go on looking after the key.
        if let Some(hold) = self.0.upgrade() {
            log::debug!("watching `{}`: {error}", hold.shown_key());
        }
    }
}

/// How leaving the queue went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Left {
    /// The key was deleted by us.
    Deleted,
    /// The key had gone already.
    Gone,
}

/// Takes a key out of the queue, however long etcd is away, and passes the turn on.
///
/// The key was seen, so "absent" is decisive here: an answer, any answer, closes the attempt.
pub(crate) async fn leave(contender: Arc<Contender>, ticket: Ticket, create_revision: i64) -> Left {
    let core = &contender.core;
    let session = ticket.session().clone();
    // An earlier try may have deleted the key although its answer was lost.
    let mut maybe_deleted = false;
    let mut pause = FIRST_PAUSE;
    loop {
        let txn = requests::leave(&contender.prefix, ticket.key(), create_revision);
        let until = core.clock.now() + LEAVE_LIMIT;
        match core.txn("release", ticket.key(), Kind::Write, txn, until).await {
            Ok(response) => {
                if let Some(head) = requests::head_of(&response, &contender.prefix)
                    && let Some(queue) = core.queues.find(&contender.prefix)
                {
                    queue.head_seen(&head.key, head.create_revision);
                }
                ticket.settle();
                let deleted = response.succeeded() || maybe_deleted;
                return if deleted { Left::Deleted } else { Left::Gone };
            }
            Err(error) => {
                maybe_deleted |= error.is_ambiguous();
                // Until this is answered the lease takes no new holds, and it goes with the last
                // of them: that, too, removes the key.
                session.retire();
                let refused = !error.is_ambiguous() && !error.is_unreachable();
                if refused || session.has_ended() {
                    ticket.settle();
                    return Left::Deleted;
                }
            }
        }
        core.clock.sleep(pause).await;
        pause = (pause * 2).min(LEAVE_LIMIT);
    }
}

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LEAVE_LIMIT: Duration = Duration::from_secs(5);
