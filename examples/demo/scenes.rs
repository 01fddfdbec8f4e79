//! Scenes on a real etcd; each returns what was recorded while it played.
//!
//! The outages are made by a proxy between one client and etcd, so any etcd will do.

use std::thread;
use std::time::{Duration, Instant};

use etcd_recipes::testing::{FaultProxy, Mode, boot_nanos};
use etcd_recipes::{CancelToken, Client, Hold, LeaseEvent, Mutex, TransientKeyValue};

use crate::recorder::{Event, Live, Outcome, Recorder, Step, What, in_order, time_of};

pub(crate) const TTL: Duration = Duration::from_secs(2);

/// How long any step may take.
pub(crate) const LIMIT: Duration = Duration::from_secs(15);

/// How soon an interrupted call has to return.
pub(crate) const PROMPT: Duration = Duration::from_millis(100);

/// A moment for the reader, and for the renewals to settle.
pub(crate) const BEAT: Duration = Duration::from_millis(600);

pub(crate) struct Scene {
    pub(crate) title: &'static str,
    /// Plays it on the etcd at this endpoint.
    pub(crate) play: fn(&str, Live) -> Outcome<Vec<Event>>,
    /// What it has to show.
    pub(crate) check: fn(&[Event]) -> Result<(), String>,
}

pub(crate) const TRANSIENT_KEY: Scene = Scene {
    title: "A transient key across an outage longer than its TTL",
    play: transient_key,
    check: came_back,
};

pub(crate) const LOST_MUTEX: Scene = Scene {
    title: "Two contenders on one mutex, and the holder is cut off",
    play: lost_mutex,
    check: told_before_rival,
};

pub(crate) const INTERRUPTION: Scene = Scene {
    title: "A thread that waits for a lock is interrupted",
    play: interruption,
    check: interrupted_promptly,
};

/// A path that no earlier run has used.
pub(crate) fn fresh(name: &str) -> String {
    format!("/etcd-recipes-demo/{}-{:x}/{name}", std::process::id(), boot_nanos())
}

pub(crate) fn until(what: &str, mut holds: impl FnMut() -> Outcome<bool>) -> Outcome<()> {
    let end = Instant::now() + LIMIT;
    while !holds()? {
        if Instant::now() >= end {
            return Err(format!("not within {LIMIT:?}: {what}").into());
        }
        thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

// ----- a transient key ------------------------------------------------------------------------

fn transient_key(endpoint: &str, live: Live) -> Outcome<Vec<Event>> {
    let record = Recorder::new(live);
    let key = fresh("worker-7");
    let proxy = FaultProxy::start(endpoint)?;
    let client = Client::connect([proxy.endpoint()])?;
    let observer = Client::connect([endpoint])?;

    let transient =
        TransientKeyValue::builder(&client, key.as_str(), "10.0.0.7").ttl(TTL).build()?;
    let heard = record.clone();
    transient.add_lease_listener(move |event| match event {
        LeaseEvent::Expired { .. } => {
            heard.note("worker", What::Expired, "hears Expired: the key may be gone");
        }
        LeaseEvent::Restored { .. } => {
            heard.note("worker", What::Restored, "hears Restored: the key stands again");
        }
        _ => {}
    });
    transient.start()?;
    record.note("worker", What::KeySet, format_args!("sets its key, TTL {} s", TTL.as_secs()));
    let stands = || Ok(observer.get(key.as_str())?.is_some());
    until("the key stands", stands)?;
    thread::sleep(BEAT);

    proxy.set(Mode::Blackhole);
    let cut = Instant::now();
    record.note("network", What::Cut, "cuts the worker off from etcd");
    until("the key is gone", || Ok(!stands()?))?;
    record.note("observer", What::KeyGone, "sees the key gone: etcd ended the lease");
    record.wait_for(("worker", What::Expired), LIMIT)?;
    thread::sleep((TTL + BEAT).saturating_sub(cut.elapsed()));

    let outage = cut.elapsed().as_secs_f64();
    record.note("network", What::Mended, format_args!("is back after {outage:.1} s"));
    proxy.set(Mode::Pass);
    until("the key is back", stands)?;
    record.note("observer", What::KeyBack, "sees the key again");
    record.wait_for(("worker", What::Restored), LIMIT)?;
    transient.close()?;
    Ok(record.events())
}

fn came_back(events: &[Event]) -> Result<(), String> {
    let outage = [
        ("worker", What::KeySet),
        ("network", What::Cut),
        ("worker", What::Expired),
        ("observer", What::KeyGone),
        ("network", What::Mended),
    ];
    let heals = [("network", What::Mended), ("worker", What::Restored)];
    let seen = [("network", What::Mended), ("observer", What::KeyBack)];
    in_order(events, &outage)?;
    in_order(events, &heals)?;
    in_order(events, &seen)?;
    if between(events, outage[1], outage[4])? <= TTL {
        return Err("the outage was shorter than the TTL".to_owned());
    }
    Ok(())
}

// ----- a mutex lost ---------------------------------------------------------------------------

fn lost_mutex(endpoint: &str, live: Live) -> Outcome<Vec<Event>> {
    let record = Recorder::new(live);
    let path = fresh("orders");
    let proxy = FaultProxy::start(endpoint)?;
    let near = Client::connect([proxy.endpoint()])?;
    let far = Client::connect([endpoint])?;
    let alices = Mutex::builder(&near, path.as_str()).ttl(TTL).build()?;
    let bobs = Mutex::builder(&far, path.as_str()).ttl(TTL).build()?;

    let guard = alices.lock()?;
    record.note("alice", What::Acquired, shown("has the lock", guard.fencing_token()));
    let hold = guard.hold();
    alices.add_loss_listener({
        let (record, hold) = (record.clone(), hold.clone());
        move |loss| {
            notice(&record, &hold);
            let detail = format_args!("her loss listener runs: {:?}", loss.reason);
            record.note("alice", What::ListenerRan, detail);
        }
    });
    let watcher = thread::spawn({
        let (record, hold) = (record.clone(), hold.clone());
        move || {
            // The wait can fail only in a scope, and this thread is in none.
            if hold.cancel_token().wait().is_ok() {
                notice(&record, &hold);
            }
        }
    });
    record.note("bob", What::Waits, "waits for it");
    let rival = thread::spawn({
        let (record, bobs) = (record.clone(), bobs.clone());
        move || -> Outcome<bool> {
            let guard = bobs.lock()?;
            record.note("bob", What::Acquired, shown("has the lock", guard.fencing_token()));
            record.wait_for(("alice", What::Unlocked(false)), LIMIT)?;
            let held = guard.unlock();
            record.note("bob", What::Unlocked(held), format_args!("unlock() = {held}"));
            Ok(held)
        }
    });
    until("bob is in the queue", || Ok(bobs.contenders()?.len() == 2))?;
    thread::sleep(BEAT);

    proxy.set(Mode::Blackhole);
    record.note("network", What::Cut, "cuts alice off from etcd");
    record.wait_for(("bob", What::Acquired), LIMIT)?;
    let held = guard.unlock();
    record.note("alice", What::Unlocked(held), format_args!("unlock() = {held}"));
    rival.join().map_err(|_| "bob's thread panicked")??;
    watcher.join().map_err(|_| "alice's watcher panicked")?;
    proxy.set(Mode::Pass);
    Ok(record.events())
}

fn shown(what: &str, token: i64) -> String {
    format!("{what}, fencing token {token}")
}

/// Notes what can be seen of a loss. Whoever comes first notes it, the flag before the token: a
/// token that fired before the flag fell would be noted in that order.
fn notice(record: &Recorder, hold: &Hold) {
    if !hold.is_held() {
        record.note_once("alice", What::IsHeldFalse, "is_held() = false");
    }
    if hold.cancel_token().is_cancelled() {
        record.note_once("alice", What::TokenCancelled, "her cancel token fires");
    }
}

fn told_before_rival(events: &[Event]) -> Result<(), String> {
    in_order(
        events,
        &[
            ("alice", What::Acquired),
            ("bob", What::Waits),
            ("network", What::Cut),
            ("alice", What::IsHeldFalse),
            ("alice", What::TokenCancelled),
            ("alice", What::ListenerRan),
            ("bob", What::Acquired),
            ("alice", What::Unlocked(false)),
            ("bob", What::Unlocked(true)),
        ],
    )
}

// ----- a wait interrupted ---------------------------------------------------------------------

fn interruption(endpoint: &str, live: Live) -> Outcome<Vec<Event>> {
    let record = Recorder::new(live);
    let client = Client::connect([endpoint])?;
    let mutex = Mutex::builder(&client, fresh("report")).ttl(TTL).build()?;

    let guard = mutex.lock()?;
    record.note("bob", What::Acquired, shown("has the lock", guard.fencing_token()));
    let token = CancelToken::new();
    record.note("carol", What::Waits, "waits for it, inside token.scope(..)");
    let waiter = thread::spawn({
        let (record, mutex, token) = (record.clone(), mutex.clone(), token.clone());
        move || -> Outcome<()> {
            match token.scope(|| mutex.lock().map(drop)) {
                Err(error) if error.is_interrupted() => {
                    record.note("carol", What::Interrupted, "her lock() = Err(Interrupted)");
                    Ok(())
                }
                Err(error) => Err(error.into()),
                Ok(()) => Err("carol got a lock that bob holds".into()),
            }
        }
    });
    until("carol is in the queue", || Ok(mutex.contenders()?.len() == 2))?;
    thread::sleep(BEAT);

    record.note("main", What::Cancels, "cancels the token");
    token.cancel();
    waiter.join().map_err(|_| "carol's thread panicked")??;
    until("carol's key is gone", || Ok(mutex.contenders()?.len() == 1))?;
    record.note("carol", What::LeftTheQueue, "has left no key in the queue");
    let held = guard.unlock();
    record.note("bob", What::Unlocked(held), format_args!("unlock() = {held}"));
    Ok(record.events())
}

fn interrupted_promptly(events: &[Event]) -> Result<(), String> {
    let steps = [
        ("bob", What::Acquired),
        ("carol", What::Waits),
        ("main", What::Cancels),
        ("carol", What::Interrupted),
        ("carol", What::LeftTheQueue),
        ("bob", What::Unlocked(true)),
    ];
    in_order(events, &steps)?;
    let took = between(events, steps[2], steps[3])?;
    if took > PROMPT { Err(format!("interrupted only after {took:?}")) } else { Ok(()) }
}

pub(crate) fn between(events: &[Event], first: Step, second: Step) -> Result<Duration, String> {
    let at = |step| time_of(events, step).ok_or_else(|| format!("{step:?} did not happen"));
    Ok(at(second)?.saturating_sub(at(first)?))
}
