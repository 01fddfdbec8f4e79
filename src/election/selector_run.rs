//! A selector's thread: it campaigns, leads, relinquishes and gives back, in this order.

use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;

use super::selector::{BoxError, LeaderSelectorListener};
use super::state::{CandidateState, Phase};
use super::term::LeadershipTerm;
use crate::cancel::CancelToken;
use crate::client::core::{BoxFuture, Owned, unconfirmed};
use crate::clock::Instant;
use crate::contend::ContenderMode;
use crate::error::{Error, ErrorKind, Result};
use crate::lock::base::{CLOSE_LIMIT, LockBase};
use crate::recipe::guarded;
use crate::wait::{Parker, Stop, wait, wait_shielded};

/// The pause before an unreachable etcd is asked again, beyond what the calls themselves wait.
const PAUSE: Duration = Duration::from_millis(250);

/// How long a close waits for the callback and for etcd.
const END_LIMIT: Duration = Duration::from_secs(2);

pub(super) struct Shared {
    pub(super) base: Arc<LockBase>,
    listener: Box<dyn LeaderSelectorListener>,
    auto_requeue: bool,
    /// Cancelled by the close.
    stop: CancelToken,
    now: Mutex<Now>,
}

struct Now {
    phase: Phase,
    /// It was started at some time.
    started: bool,
    /// It has led since it was started last.
    led: bool,
    /// The thread that runs.
    thread: Option<thread::ThreadId>,
    /// Cancelled when the run that was started last has ended.
    done: CancelToken,
    /// The last term, until it is known to be out of etcd.
    term: Option<LeadershipTerm>,
    /// Whether that term stood until it was given up.
    stood: bool,
    /// Cancelled when that term's callback and release are done with.
    handed_over: CancelToken,
}

impl Shared {
    pub(super) fn new(
        base: Arc<LockBase>,
        listener: Box<dyn LeaderSelectorListener>,
        auto_requeue: bool,
    ) -> Arc<Shared> {
        let done = CancelToken::new();
        done.cancel();
        let shared = Arc::new(Shared {
            base,
            listener,
            auto_requeue,
            stop: CancelToken::new(),
            now: Mutex::new(Now {
                phase: Phase::Idle,
                started: false,
                led: false,
                thread: None,
                done,
                term: None,
                stood: false,
                handed_over: CancelToken::new(),
            }),
        });
        let weak: Weak<dyn Owned> = Arc::<Shared>::downgrade(&shared);
        shared.base.core().register(weak);
        shared
    }

    pub(super) fn term(&self) -> Option<LeadershipTerm> {
        self.now.lock().term.clone()
    }

    pub(super) fn is_finished(&self) -> bool {
        let now = self.now.lock();
        now.started && !now.phase.is_running()
    }

    pub(super) fn state(&self) -> CandidateState {
        let (phase, term) = {
            let now = self.now.lock();
            (now.phase.clone(), now.term.clone())
        };
        phase.shown(&self.base.contender, term.as_ref())
    }

    fn is_own_thread(&self) -> bool {
        self.now.lock().thread == Some(thread::current().id())
    }

    // ----- waiting for it ---------------------------------------------------------------------

    /// `Ok(false)` when the limit passed first.
    pub(super) fn wait(&self, op: &'static str, limit: Option<Duration>) -> Result<bool> {
        let core = self.base.core();
        core.check_usable().or_else(|error| if error.is_closed() { Ok(()) } else { Err(error) })?;
        let done = self.now.lock().done.clone();
        let limit = limit.map(|limit| core.clock.now() + limit);
        let poll = || done.is_cancelled().then_some(());
        match wait(op, &core.clock, limit, &[&done], &Parker::new(), poll) {
            Ok(()) | Err(Stop::Closed(_)) => {}
            Err(Stop::Limit) => return Ok(false),
            Err(Stop::Interrupted) => return Err(Error::interrupted(op)),
        }
        let now = self.now.lock();
        match &now.phase {
            Phase::Failed(error) => Err(error.clone()),
            Phase::Closed if !now.led => Err(Error::closed(self.base.recipe().identity())),
            _ => Ok(true),
        }
    }

    /// Ends the term and waits until that is known in etcd.
    pub(super) fn resign(&self, op: &'static str, limit: Duration) -> Result<bool> {
        let core = self.base.core();
        if core.is_forked() {
            return core.check_usable().map(|()| false);
        }
        let (term, handed_over) = {
            let now = self.now.lock();
            (now.term.clone(), now.handed_over.clone())
        };
        let Some(term) = term else { return Ok(false) };
        let left = term.hold().left();
        if handed_over.is_cancelled() && left.is_cancelled() {
            return Ok(false);
        }
        term.end();
        if self.is_own_thread() {
            return Ok(true);
        }
        let until = Some(core.clock.now() + limit);
        for step in [&handed_over, left] {
            let poll = || step.is_cancelled().then_some(());
            match wait(op, &core.clock, until, &[step], &Parker::new(), poll) {
                Ok(()) | Err(Stop::Closed(_)) => {}
                Err(Stop::Limit) => {
                    return Err(unconfirmed("the leadership has not ended in time"));
                }
                Err(Stop::Interrupted) => return Err(Error::interrupted(op)),
            }
        }
        Ok(self.now.lock().stood)
    }

    /// Ends everything, and waits for it within a bound.
    pub(super) fn close(&self, op: &'static str) -> Result<()> {
        let core = self.base.core();
        if core.is_forked() {
            return core.check_usable();
        }
        self.stop_all();
        self.base.recipe().closed().cancel();
        if self.is_own_thread() || core.on_io_thread() {
            return Ok(());
        }
        let (term, done, running) = {
            let now = self.now.lock();
            (now.term.clone(), now.done.clone(), now.phase.is_running())
        };
        let until = core.clock.now() + END_LIMIT.min(self.base.contender.session.0.ttl);
        let ended = |step: &CancelToken| {
            let poll = || step.is_cancelled().then_some(());
            let waited = wait_shielded(op, &core.clock, Some(until), &[step], &Parker::new(), poll);
            !matches!(waited, Err(Stop::Limit | Stop::Interrupted))
        };
        let idle = !running || ended(&done);
        let gone = term.is_none_or(|term| ended(term.hold().left()));
        let gone = gone && self.has_left(op, until);
        self.base.recipe().close(CLOSE_LIMIT);
        match (idle, gone) {
            (true, true) => Ok(()),
            (false, _) => Err(unconfirmed("a leadership callback goes on")),
            (true, false) => Err(unconfirmed("etcd did not answer in time")),
        }
    }

    /// Whether the keys with which it waited are gone, or go until then.
    fn has_left(&self, op: &'static str, until: Instant) -> bool {
        let (core, contender) = (self.base.core(), self.base.contender.clone());
        let leaving = async move {
            contender.all_left().await;
            Ok(())
        };
        core.closed.is_cancelled() || core.block_shielded(op, until, leaving).is_some()
    }

    fn finish_run(&self, ending: Phase, finished: &CancelToken) {
        let closed = {
            let mut now = self.now.lock();
            let closed = self.stop.is_cancelled();
            now.phase = if closed { Phase::Closed } else { ending };
            now.thread = None;
            closed
        };
        if closed {
            // Where the callback itself closed it, nobody else ends its channels.
            self.base.recipe().close(Duration::ZERO);
        }
        finished.cancel();
    }

    fn stop_all(&self) {
        self.stop.cancel();
        let term = {
            let mut now = self.now.lock();
            if !now.phase.is_running() {
                now.phase = Phase::Closed;
            }
            now.term.clone()
        };
        if let Some(term) = term {
            term.end();
        }
    }
}

impl Owned for Shared {
    fn lose(&self) {
        self.stop_all();
        // A callback that closes its client gives the leadership up then and there.
        if self.is_own_thread()
            && let Some(term) = self.term()
        {
            term.work_ended();
        }
    }

    fn cleanup(self: Arc<Self>, _until: Instant) -> BoxFuture<Result<()>> {
        // The key goes with its session.
        Box::pin(async { Ok(()) })
    }

    fn finish(&self, limit: Duration) {
        if self.is_own_thread() {
            return;
        }
        let core = self.base.core();
        let done = self.now.lock().done.clone();
        let until = Some(core.clock.now() + limit);
        let poll = || done.is_cancelled().then_some(());
        let op = "selector.close";
        let _ = wait_shielded(op, &core.clock, until, &[&done], &Parker::new(), poll);
    }
}

/// One run, from start to done.
pub(super) struct Run {
    shared: Arc<Shared>,
}

impl Run {
    pub(super) fn start(shared: &Arc<Shared>) -> Result<()> {
        shared.base.core().check_usable()?;
        shared.base.recipe().check_open()?;
        let mut now = shared.now.lock();
        match now.phase {
            Phase::Closed => return Err(Error::closed(shared.base.recipe().identity())),
            _ if now.phase.is_running() => {
                let identity = shared.base.recipe().identity();
                return Err(Error::invalid(format!("{identity}: started already")));
            }
            _ => {}
        }
        let run = Run { shared: shared.clone() };
        let done = CancelToken::new();
        let finished = done.clone();
        let started = thread::Builder::new()
            .name("etcd-rx-lead".to_owned())
            .spawn(move || {
                let shared = run.shared.clone();
                let mut ending = Phase::Idle;
                if let Err(message) = guarded(|| ending = run.run()) {
                    ending = Phase::Failed(Error::internal(message));
                }
                shared.finish_run(ending, &finished);
            })
            .map_err(|e| Error::with_source(ErrorKind::Internal, "starting a selector", e))?;
        now.phase = Phase::Waiting;
        now.started = true;
        now.thread = Some(started.thread().id());
        now.done = done;
        now.led = false;
        Ok(())
    }

    /// How it ended.
    fn run(self) -> Phase {
        let shared = &self.shared;
        loop {
            let term = match self.campaign() {
                Ok(Some(term)) => term,
                Ok(None) => return Phase::Closed,
                Err(error) => {
                    shared.base.recipe().record_error(error.clone());
                    return Phase::Failed(error);
                }
            };
            self.lead(&term);
            if shared.stop.is_cancelled() {
                return Phase::Closed;
            }
            if !shared.auto_requeue {
                return Phase::Idle;
            }
            shared.now.lock().phase = Phase::Waiting;
        }
    }

    /// Waits for the turn, however long etcd is away; `None` when the selector was closed.
    fn campaign(&self) -> Result<Option<LeadershipTerm>> {
        let Shared { base, stop, .. } = &*self.shared;
        loop {
            let campaign = || base.acquire("selector.campaign", ContenderMode::Lead, 1);
            match stop.scope(campaign) {
                Ok(hold) => {
                    let interrupt = base.interrupt_on_loss;
                    let term = LeadershipTerm::begin(base, hold, interrupt);
                    term.work_begins();
                    // A close of the client either knows of the work by now or is seen here.
                    if stop.is_cancelled() || base.core().closed.is_cancelled() {
                        term.work_ended();
                        base.release(term.hold());
                        return Ok(None);
                    }
                    let mut now = self.shared.now.lock();
                    now.phase = Phase::Leading;
                    now.led = true;
                    now.term = Some(term.clone());
                    now.handed_over = CancelToken::new();
                    return Ok(Some(term));
                }
                Err(error) if error.is_interrupted() || error.is_closed() => return Ok(None),
                Err(error) if error.is_unreachable() => {
                    base.recipe().record_error(error);
                    if stop.sleep(PAUSE).is_err() {
                        return Ok(None);
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn lead(&self, term: &LeadershipTerm) {
        let Shared { base, listener, stop, .. } = &*self.shared;
        if stop.is_cancelled() {
            // Closed just before the term began.
            term.end();
        }
        let mut led = Ok(());
        let panicked = guarded(|| {
            led = term.cancel_token().scope(|| listener.take_leadership(term));
        });
        self.record("the leader", led, panicked);
        let panicked = guarded(|| CancelToken::shield(|| listener.relinquish_leadership(term)));
        self.record("`relinquish_leadership`", Ok(()), panicked);
        term.end();
        term.work_ended();
        let stood = base.release(term.hold());
        let handed_over = {
            let mut now = self.shared.now.lock();
            now.stood = stood;
            now.handed_over.clone()
        };
        handed_over.cancel();
    }

    fn record(
        &self,
        who: &str,
        returned: std::result::Result<(), BoxError>,
        ran: std::result::Result<(), String>,
    ) {
        let recipe = self.shared.base.recipe();
        let identity = recipe.identity();
        if let Err(message) = ran {
            let text = format!("{identity}: {who} panicked: {message}");
            recipe.record_error(Error::new(ErrorKind::ListenerPanicked, text));
        }
        let Err(error) = returned else { return };
        // Passing on that it was told to stop is no failure.
        if error.downcast_ref::<Error>().is_some_and(Error::is_interrupted) {
            return;
        }
        let text = format!("{identity}: {who} failed");
        recipe.record_error(Error::with_source(ErrorKind::CallbackFailed, text, error));
    }
}
