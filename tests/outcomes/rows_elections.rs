//! The rows of elections.
//!
//! Candidates wait for their turn in the background, however long etcd is away, so a call that
//! waits for them does so too; what the candidacy itself does shows in the row of
//! `selector.campaign`, whose call starts a selector and looks on.

use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use etcd_recipes::{
    CandidateState, Error, FencedTxn, LeaderLatch, LeaderObserver, LeaderSelector, LeadershipTerm,
    Op, Recipe, Txn,
};

use crate::rows::{
    ACQUIRE, CLOSE_MUTEX, CLOSED, INTERRUPTED, NO_KEY, Row, SHORT_LIMIT, STOPS, UNREACHABLE,
    close_before, dropping, guarded, look, no_recipe, row,
};
use crate::stage::{Stage, Waits, plain, show};
use crate::table::Situation::{
    CancelledDuring, FrozenBefore, KeyDeleted, KilledBefore, RecipeClosedBefore,
    RecipeClosedDuring, ReplyLost,
};
use crate::table::{
    AFTER_OP, AT_LIMIT, AT_LIMIT_FROM_DISTURBANCE, AT_ONCE, Cell, Cells, L, Left, OP, PROMPT, S,
    WITHIN_OP, Window, na, says,
};

const AS_SELECTOR: &str = "as `selector.participants`: same code";
const AS_PUT: &str = "as `term.put`: same code";
const AS_CLOSE: &str = "as the `close`: same code";
const BACKGROUND: &str = "its candidacy waits out an outage: see `selector.campaign`";

pub(crate) fn rows() -> Vec<Row> {
    let few = [FrozenBefore, KeyDeleted, RecipeClosedBefore];
    let dropped = Cells {
        recipe_closed_during: na("nobody else could close it"),
        ..CLOSE_MUTEX.dropped().only(&[FrozenBefore, ReplyLost, CancelledDuring], AS_CLOSE)
    };
    vec![
        row("selector.campaign", "LeaderSelector::start", campaign, CAMPAIGN),
        row(
            "selector.wait",
            "LeaderSelector::wait_on_leadership_complete",
            selector_wait,
            waits("Ok(())", Left::NoKey),
        ),
        row(
            "selector.wait_for",
            "LeaderSelector::wait_on_leadership_complete_for",
            selector_wait_for,
            WAIT_FOR,
        ),
        row("selector.resign", "LeaderSelector::resign", resign, RESIGN),
        row(
            "selector.participants",
            "LeaderSelector::participants",
            selector_participants,
            look("Ok(1)", "Ok(0)"),
        ),
        row("selector.close", "LeaderSelector::close", selector_close, CLOSE_MUTEX),
        row("selector.close", "drop of a LeaderSelector", drop_selector, dropped),
        row("latch.wait", "LeaderLatch::wait", latch_wait, waits("Ok(())", Left::Key)),
        row("latch.wait_for", "LeaderLatch::wait_for", latch_wait_for, WAIT_FOR),
        row(
            "latch.participants",
            "LeaderLatch::participants",
            latch_participants,
            look("Ok(1)", "Ok(0)")
                .only(&[KilledBefore, ReplyLost, RecipeClosedDuring], AS_SELECTOR),
        ),
        row("latch.close", "LeaderLatch::close", latch_close, CLOSE_MUTEX),
        row("latch.close", "drop of a LeaderLatch", drop_latch, dropped),
        row("observer.start", "LeaderObserver::start", observer_start, OBSERVER),
        row("term.put", "LeadershipTerm::put", term_put, of_term("Ok(false)")),
        row("term.txn", "LeadershipTerm::txn", term_txn, of_term("Ok(Fenced)").only(&few, AS_PUT)),
        row("term.proclaim", "LeadershipTerm::proclaim", proclaim, PROCLAIM),
    ]
}

/// How long the row of the campaign looks on: longer than etcd may be silent in any call.
const LOOKS_ON: Duration = Duration::from_secs(4);

const LOOKED_ON: Window =
    Window { from: Duration::from_secs(2), to: Duration::from_secs(4 + S.as_secs()) };

const WAITS_ON: Cell = says("waits on, unreachable", LOOKED_ON, Left::Any);
const OWN_THREAD: &str = "it runs on the selector's own thread, in nobody's scope";

/// A silent etcd ends nothing; each silence is recorded as an error.
const CAMPAIGN: Cells = Cells {
    frozen_before: WAITS_ON,
    frozen_during: WAITS_ON,
    frozen_briefly: says("leads", AT_ONCE, Left::Key),
    killed_before: WAITS_ON,
    reply_lost: says("leads", AT_ONCE, Left::Key),
    key_deleted: says("leads", AT_ONCE, Left::Key),
    lease_revoked: says("leads", AT_ONCE, Left::Key),
    cancelled_before: na(OWN_THREAD),
    cancelled_during: na(OWN_THREAD),
    client_closed_before: CLOSED,
    client_closed_during: says("closed", PROMPT, Left::NoKey),
    recipe_closed_before: CLOSED,
    recipe_closed_during: says("closed", PROMPT, Left::NoKey),
};

/// A wait for the turn, and what is there once it has come.
const fn waits(value: &'static str, left: Left) -> Cells {
    Cells {
        frozen_before: na(BACKGROUND),
        frozen_during: na(BACKGROUND),
        frozen_briefly: says(value, AT_ONCE, left),
        killed_before: na(BACKGROUND),
        reply_lost: says(value, AT_ONCE, left),
        key_deleted: says(value, AT_ONCE, left),
        lease_revoked: says(value, AT_ONCE, left),
        // The candidacy goes on.
        cancelled_before: says("Err(Interrupted)", AT_ONCE, Left::Any),
        cancelled_during: says("Err(Interrupted)", PROMPT, Left::Key),
        ..ACQUIRE
    }
}

/// The candidacy goes on after the limit.
const WAIT_FOR: Cells = Cells {
    frozen_before: says("Ok(false)", AT_LIMIT, Left::Any),
    frozen_during: says("Ok(false)", AT_LIMIT_FROM_DISTURBANCE, Left::Key),
    frozen_briefly: na(SHORT_LIMIT),
    killed_before: says("Ok(false)", AT_LIMIT, Left::Any),
    reply_lost: says("Ok(false)", AT_LIMIT, Left::Key),
    key_deleted: says("Ok(false)", AT_LIMIT, Left::Key),
    lease_revoked: says("Ok(false)", AT_LIMIT, Left::Key),
    cancelled_before: says("Err(Interrupted)", AT_ONCE, Left::Any),
    cancelled_during: says("Err(Interrupted)", PROMPT, Left::Key),
    ..ACQUIRE
};

/// The term ends whatever comes back; the call says whether that is known in etcd.
const RESIGN: Cells = Cells {
    frozen_before: says("Err(CleanupUnconfirmed)", AFTER_OP, Left::NoKey),
    killed_before: says("Err(CleanupUnconfirmed)", AFTER_OP, Left::NoKeyAtTtl),
    reply_lost: says("Ok(true)", AT_ONCE, Left::NoKey),
    key_deleted: says("Ok(false)", AT_ONCE, Left::NoKey),
    lease_revoked: says("Ok(false)", AT_ONCE, Left::NoKey),
    cancelled_before: INTERRUPTED,
    cancelled_during: INTERRUPTED,
    client_closed_before: says("Ok(false)", AT_ONCE, Left::NoKey),
    client_closed_during: says("Err(CleanupUnconfirmed)", WITHIN_OP, Left::NothingAtTtl),
    recipe_closed_before: says("Ok(false)", AT_ONCE, Left::NoKey),
    recipe_closed_during: says("Err(CleanupUnconfirmed)", WITHIN_OP, Left::NothingAtTtl),
    ..STOPS
};

const OBSERVER: Cells = Cells {
    frozen_before: UNREACHABLE,
    killed_before: UNREACHABLE,
    reply_lost: says("Ok(())", AT_ONCE, Left::Any),
    key_deleted: na(NO_KEY),
    lease_revoked: na(NO_KEY),
    ..STOPS
};

/// A close ends the term as a resignation does, and a term that is over is fenced.
const fn of_term(fenced: &'static str) -> Cells {
    Cells {
        client_closed_before: says(fenced, AT_ONCE, Left::NotWritten),
        recipe_closed_before: says(fenced, AT_ONCE, Left::NotWritten),
        ..guarded(fenced)
    }
}

/// What it writes is the leader's own key, so where that is gone it must not come back.
const PROCLAIM: Cells = Cells {
    key_deleted: says("Ok(false)", AT_ONCE, Left::NoKey),
    lease_revoked: says("Ok(false)", AT_ONCE, Left::NoKey),
    client_closed_before: says("Ok(false)", AT_ONCE, Left::NoKey),
    recipe_closed_before: says("Ok(false)", AT_ONCE, Left::NoKey),
    cancelled_before: says("Err(Interrupted)", AT_ONCE, Left::Key),
    ..of_term("Ok(false)")
};

// ----- how the calls are made ---------------------------------------------------------------------

/// The client has a connection and a session before a candidate is made.
fn warmed_up(stage: &Stage<'_>, ttl: Duration) {
    drop(stage.mutex_with(&stage.client, ttl));
}

fn selector(
    stage: &Stage<'_>,
    ttl: Duration,
    lead: impl Fn(&LeadershipTerm) -> Result<(), Error> + Send + Sync + 'static,
) -> LeaderSelector {
    warmed_up(stage, ttl);
    LeaderSelector::builder(&stage.client, stage.path.as_str())
        .ttl(ttl)
        .on_lead(move |term| Ok(lead(term)?))
        .build()
        .unwrap()
}

/// A selector that leads until it is told not to.
fn leading(stage: &Stage<'_>) -> (LeaderSelector, LeadershipTerm) {
    let (tell, told) = channel();
    let selector = selector(stage, stage.lock_ttl(), move |term| {
        tell.send(term.clone()).unwrap();
        term.wait_until_finished()
    });
    selector.start().unwrap();
    let term = told.recv_timeout(Duration::from_secs(20)).unwrap();
    (selector, term)
}

/// Whether the candidacy is what the situation befalls first, so that it begins with the call.
fn begins_with_the_call(stage: &Stage<'_>) -> bool {
    matches!(stage.situation, FrozenBefore | KilledBefore | ReplyLost)
}

fn campaign(stage: &Stage<'_>) {
    // It asks for a lease anew while etcd is silent: one that comes late goes with its TTL.
    let selector = selector(stage, stage.ttl(), LeadershipTerm::wait_until_finished);
    stage.rival();
    stage.call(Waits::InQueue, &|| drop(selector.close()), || {
        let end = Instant::now() + LOOKS_ON;
        if let Err(error) = selector.start() {
            return show(Err::<(), _>(error), |()| String::new());
        }
        loop {
            match selector.state() {
                CandidateState::Leading { .. } => return "leads".to_owned(),
                CandidateState::Closed => return "closed".to_owned(),
                CandidateState::Failed(error) => return format!("Failed({:?})", error.kind()),
                _ if Instant::now() < end => std::thread::sleep(Duration::from_millis(5)),
                _ => break,
            }
        }
        assert!(LOOKS_ON > OP);
        let silent = selector.errors().iter().any(Error::is_unreachable);
        if silent { "waits on, unreachable" } else { "waits on" }.to_owned()
    });
}

fn selector_waiting(stage: &Stage<'_>, waits: Waits, wait: impl FnOnce(&LeaderSelector) -> String) {
    let selector = selector(stage, stage.lock_ttl(), |_| Ok(()));
    stage.rival();
    let late = begins_with_the_call(stage);
    if !late {
        selector.start().unwrap();
    }
    stage.call(waits, &|| drop(selector.close()), || {
        if late {
            selector.start().unwrap();
        }
        wait(&selector)
    });
}

fn selector_wait(stage: &Stage<'_>) {
    selector_waiting(stage, Waits::InQueue, |selector| {
        plain(selector.wait_on_leadership_complete())
    });
}

fn selector_wait_for(stage: &Stage<'_>) {
    selector_waiting(stage, Waits::InQueueFor, |selector| {
        plain(selector.wait_on_leadership_complete_for(L))
    });
}

fn resign(stage: &Stage<'_>) {
    let (selector, _) = leading(stage);
    stage.call(Waits::ForEtcd, &|| drop(selector.close()), || plain(selector.resign()));
}

fn selector_participants(stage: &Stage<'_>) {
    let (selector, _) = leading(stage);
    stage.call(Waits::ForEtcd, &|| drop(selector.close()), || {
        show(selector.participants(), |all| all.len().to_string())
    });
}

fn selector_close(stage: &Stage<'_>) {
    let (selector, _) = leading(stage);
    stage.call(Waits::ForEtcd, &|| drop(selector.close()), || plain(selector.close()));
}

fn drop_selector(stage: &Stage<'_>) {
    let (selector, _) = leading(stage);
    close_before(stage, &selector);
    stage.call(Waits::ForEtcd, &no_recipe, || dropping(selector));
}

fn latch(stage: &Stage<'_>) -> LeaderLatch {
    warmed_up(stage, stage.lock_ttl());
    LeaderLatch::builder(&stage.client, stage.path.as_str()).ttl(stage.lock_ttl()).build().unwrap()
}

fn leading_latch(stage: &Stage<'_>) -> LeaderLatch {
    let latch = latch(stage);
    latch.start().unwrap();
    latch.wait().unwrap();
    assert!(matches!(latch.state(), CandidateState::Leading { .. }));
    latch
}

fn latch_waiting(stage: &Stage<'_>, waits: Waits, wait: impl FnOnce(&LeaderLatch) -> String) {
    let latch = latch(stage);
    stage.rival();
    let late = begins_with_the_call(stage);
    if !late {
        latch.start().unwrap();
    }
    stage.call(waits, &|| drop(latch.close()), || {
        if late {
            latch.start().unwrap();
        }
        wait(&latch)
    });
}

fn latch_wait(stage: &Stage<'_>) {
    latch_waiting(stage, Waits::InQueue, |latch| plain(latch.wait()));
}

fn latch_wait_for(stage: &Stage<'_>) {
    latch_waiting(stage, Waits::InQueueFor, |latch| plain(latch.wait_for(L)));
}

fn latch_participants(stage: &Stage<'_>) {
    let latch = leading_latch(stage);
    stage.call(Waits::ForEtcd, &|| drop(latch.close()), || {
        show(latch.participants(), |all| all.len().to_string())
    });
}

fn latch_close(stage: &Stage<'_>) {
    let latch = leading_latch(stage);
    stage.call(Waits::ForEtcd, &|| drop(latch.close()), || plain(latch.close()));
}

fn drop_latch(stage: &Stage<'_>) {
    let latch = leading_latch(stage);
    close_before(stage, &latch);
    stage.call(Waits::ForEtcd, &no_recipe, || dropping(latch));
}

fn observer_start(stage: &Stage<'_>) {
    let observer = LeaderObserver::new(&stage.client, stage.path.as_str()).unwrap();
    stage.call(Waits::ForEtcd, &|| drop(observer.close()), || plain(observer.start()));
}

fn term_put(stage: &Stage<'_>) {
    let (selector, term) = leading(stage);
    stage.call(Waits::ForEtcd, &|| drop(selector.close()), || {
        plain(term.put(stage.data_key(), "guarded"))
    });
}

fn term_txn(stage: &Stage<'_>) {
    let (selector, term) = leading(stage);
    stage.call(Waits::ForEtcd, &|| drop(selector.close()), || {
        let write = Txn::new().and_then([Op::put(stage.data_key(), "guarded")]);
        show(term.txn(write), |done| match done {
            FencedTxn::Applied(_) => "Applied".to_owned(),
            FencedTxn::CompareFailed(_) => "CompareFailed".to_owned(),
            FencedTxn::Fenced => "Fenced".to_owned(),
        })
    });
}

fn proclaim(stage: &Stage<'_>) {
    let (selector, term) = leading(stage);
    stage.call(Waits::ForEtcd, &|| drop(selector.close()), || plain(term.proclaim("mine")));
}
