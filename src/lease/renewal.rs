//! What decides about one lease's renewals: pure, so that every order of answers can be tried.
//!
//! Events go in with the time they happened, actions come out. The deadline is counted from the
//! *send* of the last renewal whose answer counts. For an exclusive lease an answer counts only
//! with proof: a thawed leader that was deposed meanwhile goes on acknowledging renewals with its
//! old term, so the term must not be below any term seen, and a linearizable read sent after the
//! answer through the same member has to come back with that same term.

use std::time::Duration;

use crate::clock::Instant;
use crate::resilience::LeaseTiming;

/// Whether an answer needs proof before it moves the deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Proof {
    /// Exclusive leases: nothing moves without it.
    Required,
    /// Presence leases: the answer alone counts; the read only looks after the key.
    Advisory,
}

/// One try to renew, through one member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct AttemptId(u64);

/// Why a lease is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Over {
    /// No renewal counted in time.
    DeadlinePassed,
    /// etcd said that there is no such lease.
    LeaseGone,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Event {
    /// Time has passed.
    Tick,
    /// The attempt's stream is open; the renewal itself goes out now.
    Opened { attempt: AttemptId },
    /// A renewal put on the wire at `sent` was answered. `highest` is the highest term seen from
    /// any member by now.
    Acked { attempt: AttemptId, sent: Instant, ttl: Duration, term: u64, highest: u64 },
    /// The read after an answer came back.
    Proved { attempt: AttemptId, term: u64, highest: u64 },
    /// A second question confirmed that the lease is gone.
    Gone { attempt: AttemptId },
    /// The attempt came to nothing: stream broken, read failed, question unanswered.
    Failed { attempt: AttemptId },
    /// etcd refused the login, or what was asked for: soon again is no better.
    Refused { attempt: AttemptId },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    /// Start an attempt: the first of a round on the stream that worked last, later ones on a
    /// fresh stream through the next member.
    Begin { attempt: AttemptId, fresh: bool },
    /// Send the read that proves (or, advisory, looks after) the answer.
    Prove { attempt: AttemptId },
    /// Ask again whether the lease exists: a member that lags has been seen to deny a new lease.
    ConfirmGone { attempt: AttemptId },
    /// Give the attempt up, with its stream.
    Abort { attempt: AttemptId },
    /// The attempt counted: its stream is the one to keep, and the deadline moves.
    Counted { attempt: AttemptId, sent: Instant, deadline: Instant },
    /// Renewals are overdue.
    Suspended,
    /// They work again.
    Reconnected,
    /// Nothing more will be done.
    Over(Over),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Renewing,
    Proving { sent: Instant, ttl: Duration, term: u64 },
    Confirming,
}

#[derive(Debug)]
struct Flying {
    id: AttemptId,
    step_began: Instant,
    stage: Stage,
}

/// After an attempt failed at once, the pause before the next.
const AFTER_FAILURE: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(crate) struct Renewal {
    proof: Proof,
    timing: LeaseTiming,
    deadline: Instant,
    counted_send: Instant,
    next_start: Instant,
    /// Attempts begun since the last that counted.
    begun: u32,
    flying: Vec<Flying>,
    suspended: bool,
    over: bool,
    next_id: u64,
}

impl Renewal {
    /// For a lease granted (or last renewed) by a request sent at `sent`. The first renewal
    /// starts at once, since opening a stream takes a round trip better not left to the last.
    pub(crate) fn new(proof: Proof, timing: LeaseTiming, sent: Instant) -> Renewal {
        Renewal {
            proof,
            timing,
            deadline: sent + timing.ttl - timing.margin,
            counted_send: sent,
            next_start: sent,
            begun: 0,
            flying: Vec::new(),
            suspended: false,
            over: false,
            next_id: 0,
        }
    }

    pub(crate) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// The next instant at which a tick changes something.
    pub(crate) fn next_wake(&self) -> Instant {
        let overdue = self.flying.iter().map(|one| one.step_began + self.timing.attempt_limit);
        let suspend = (!self.suspended).then(|| self.suspend_at());
        overdue
            .chain(suspend)
            .chain([self.next_start, self.deadline])
            .min()
            .unwrap_or(self.deadline)
    }

    /// When half of the time between the due renewal and the deadline is gone.
    fn suspend_at(&self) -> Instant {
        let due = self.counted_send + self.timing.renew_interval;
        due + self.deadline.saturating_since(due) / 2
    }

    pub(crate) fn step(&mut self, now: Instant, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        if self.over {
            return actions;
        }
        if now >= self.deadline {
            self.end(Over::DeadlinePassed, &mut actions);
            return actions;
        }
        match event {
            Event::Tick => {}
            Event::Opened { attempt } => {
                if self.stage(attempt) == Some(Stage::Renewing) {
                    self.next_step(now, attempt, Stage::Renewing);
                }
            }
            Event::Acked { attempt, sent, ttl, term, highest } => {
                self.acked(now, attempt, sent, ttl, term, highest, &mut actions);
            }
            Event::Proved { attempt, term, highest } => {
                self.proved(now, attempt, term, highest, &mut actions);
            }
            Event::Gone { attempt } => {
                if self.stage(attempt) == Some(Stage::Confirming) {
                    self.end(Over::LeaseGone, &mut actions);
                    return actions;
                }
            }
            Event::Failed { attempt } => self.drop_attempt(now, attempt, &mut actions),
            Event::Refused { attempt } => {
                // The next start stands: a login costs etcd a password hash.
                if self.stage(attempt).is_some() {
                    self.flying.retain(|one| one.id != attempt);
                    actions.push(Action::Abort { attempt });
                }
            }
        }
        self.pass_time(now, &mut actions);
        actions
    }

    #[allow(clippy::too_many_arguments)]
    fn acked(
        &mut self,
        now: Instant,
        attempt: AttemptId,
        sent: Instant,
        ttl: Duration,
        term: u64,
        highest: u64,
        actions: &mut Vec<Action>,
    ) {
        if self.stage(attempt) != Some(Stage::Renewing) {
            return;
        }
        if ttl.is_zero() {
            self.next_step(now, attempt, Stage::Confirming);
            actions.push(Action::ConfirmGone { attempt });
        } else if term < highest {
            self.drop_attempt(now, attempt, actions);
        } else {
            match self.proof {
                Proof::Required => {
                    self.next_step(now, attempt, Stage::Proving { sent, ttl, term });
                    actions.push(Action::Prove { attempt });
                }
                Proof::Advisory => {
                    self.count(now, attempt, sent, ttl, actions);
                    actions.push(Action::Prove { attempt });
                }
            }
        }
    }

    fn proved(
        &mut self,
        now: Instant,
        attempt: AttemptId,
        term: u64,
        highest: u64,
        actions: &mut Vec<Action>,
    ) {
        let Some(Stage::Proving { sent, ttl, term: acked }) = self.stage(attempt) else { return };
        if term == acked && term >= highest {
            self.count(now, attempt, sent, ttl, actions);
        } else {
            self.drop_attempt(now, attempt, actions);
        }
    }

    /// An answer counts: the deadline moves and the other attempts of the round are let go.
    fn count(
        &mut self,
        now: Instant,
        attempt: AttemptId,
        sent: Instant,
        ttl: Duration,
        actions: &mut Vec<Action>,
    ) {
        if sent <= self.counted_send {
            // An older send than one that counted already says nothing new.
            self.drop_attempt(now, attempt, actions);
            return;
        }
        self.counted_send = sent;
        let deadline = sent + ttl.min(self.timing.ttl) - self.timing.margin;
        self.deadline = self.deadline.max(deadline);
        actions.push(Action::Counted { attempt, sent, deadline });
        for other in self.flying.drain(..).filter(|one| one.id != attempt) {
            actions.push(Action::Abort { attempt: other.id });
        }
        self.begun = 0;
        self.next_start = self.counted_send + self.timing.renew_interval;
        if std::mem::take(&mut self.suspended) {
            actions.push(Action::Reconnected);
        }
    }

    fn pass_time(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let limit = self.timing.attempt_limit;
        self.flying.retain(|one| {
            let overdue = now >= one.step_began + limit;
            if overdue {
                actions.push(Action::Abort { attempt: one.id });
            }
            !overdue
        });
        if now >= self.next_start {
            let attempt = AttemptId(self.next_id);
            self.next_id += 1;
            actions.push(Action::Begin { attempt, fresh: self.begun > 0 });
            self.begun += 1;
            self.flying.push(Flying { id: attempt, step_began: now, stage: Stage::Renewing });
            self.next_start = now + self.timing.hedge_delay;
        }
        if !self.suspended && now >= self.suspend_at() {
            self.suspended = true;
            actions.push(Action::Suspended);
        }
    }

    fn drop_attempt(&mut self, now: Instant, attempt: AttemptId, actions: &mut Vec<Action>) {
        let before = self.flying.len();
        self.flying.retain(|one| one.id != attempt);
        if self.flying.len() < before {
            actions.push(Action::Abort { attempt });
            self.next_start = self.next_start.min(now + AFTER_FAILURE);
        }
    }

    fn end(&mut self, why: Over, actions: &mut Vec<Action>) {
        self.over = true;
        for one in self.flying.drain(..) {
            actions.push(Action::Abort { attempt: one.id });
        }
        actions.push(Action::Over(why));
    }

    fn stage(&self, attempt: AttemptId) -> Option<Stage> {
        self.flying.iter().find(|one| one.id == attempt).map(|one| one.stage)
    }

    /// Each step is a round trip and has a limit of its own: were they to share one, a link with
    /// a long round trip could never renew a short lease.
    fn next_step(&mut self, now: Instant, attempt: AttemptId, stage: Stage) {
        if let Some(one) = self.flying.iter_mut().find(|one| one.id == attempt) {
            one.step_began = now;
            one.stage = stage;
        }
    }
}

#[cfg(test)]
#[path = "renewal_tests.rs"]
mod tests;
