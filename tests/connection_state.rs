//! CONN-06: what a recipe tells of its connection is legal, complete and in time.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod faults;

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use etcd_recipes::ConnectionState::{self, Connected, Lost, Reconnected, Suspended};
use etcd_recipes::testing::{EtcdServer, FaultProxy, Mode, boot_nanos, eventually};
use etcd_recipes::{Client, Mutex, Recipe};
use faults::*;
use parking_lot::Mutex as Lock;

/// What one listener heard, and when.
#[derive(Clone, Default)]
struct Heard(Arc<Lock<Vec<(u64, ConnectionState)>>>);

impl Heard {
    fn by(mutex: &Mutex) -> Heard {
        let heard = Heard::default();
        let told = heard.clone();
        mutex
            .add_connection_state_listener(move |state| told.0.lock().push((boot_nanos(), *state)));
        heard
    }

    fn states(&self) -> Vec<ConnectionState> {
        self.0.lock().iter().map(|(_, state)| *state).collect()
    }

    fn last(&self) -> Option<(u64, ConnectionState)> {
        self.0.lock().last().copied()
    }

    #[track_caller]
    fn wait(&self, state: ConnectionState) -> u64 {
        eventually(LIMIT, "the state", || match self.last() {
            Some((at, last)) if last == state => Ok(at),
            other => Err(other),
        })
    }
}

/// Whether one state may follow another: each says something new, and a loss is not taken back
/// by a suspension.
fn may_follow(before: ConnectionState, after: ConnectionState) -> bool {
    matches!(
        (before, after),
        (Connected | Reconnected, Suspended | Lost)
            | (Suspended, Lost | Reconnected)
            | (Lost, Reconnected)
    )
}

#[track_caller]
fn assert_legal(states: &[ConnectionState]) {
    for pair in states.windows(2) {
        assert!(may_follow(pair[0], pair[1]), "{:?} after {:?} in {states:?}", pair[1], pair[0]);
    }
}

/// The loss came between the deadline and a moment later.
#[track_caller]
fn assert_in_time(at: u64, deadline: u64, ttl: Duration) {
    // The deadline was read by subtraction: allow for the time between two looks at the clock.
    let (early, late) = (deadline - nanos(ms(20)), deadline + nanos(margin(ttl) + SLACK));
    let off = Duration::from_nanos(at.abs_diff(deadline));
    assert!((early..=late).contains(&at), "{off:?} away from the deadline");
}

#[test]
fn a_short_and_a_long_outage_and_a_restart_are_told_in_order_and_in_time() {
    let ttl = ttl();
    let longer = ttl + Duration::from_secs(2);
    let etcd = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    let client = Client::connect([proxy.endpoint()]).unwrap();
    let first = mutex(&client, "/locks/first", ttl);
    let second = mutex(&client, "/locks/second", longer);
    let heard = Heard::by(&first);
    let heard_second = Heard::by(&second);
    let losses: Arc<Lock<Vec<(u64, &str)>>> = Arc::default();
    for (mutex, name) in [(&first, "first"), (&second, "second")] {
        let losses = losses.clone();
        mutex.add_loss_listener(move |_| losses.lock().push((boot_nanos(), name)));
    }
    let registered = Registration::new(&client, "/nodes/7", ttl);
    let guard = first.lock_owned().unwrap();
    let second_guard = second.lock_owned().unwrap();
    heard.wait(Connected);

    // Short enough to be survived, long enough to be noticed.
    wait_renewal_due(&guard.hold(), ttl);
    proxy.set(Mode::Blackhole);
    thread::sleep(ttl * 4 / 10);
    proxy.set(Mode::Pass);
    heard.wait(Reconnected);
    assert_eq!(heard.states(), [Connected, Suspended, Reconnected]);
    assert!(guard.is_held() && second_guard.is_held() && losses.lock().is_empty());
    eventually(LIMIT, "the registration tells it too", || {
        registered.story() == ["Suspended", "Restored"]
    });

    // Long enough to lose everything, each at its own deadline.
    wait_just_renewed(&guard.hold(), ttl);
    proxy.set(Mode::Blackhole);
    let cut = boot_nanos();
    let gone = (deadline(&guard.hold()), deadline(&second_guard.hold()));
    heard.wait(Suspended);
    let late = Heard::by(&first);
    let lost_at = heard.wait(Lost);
    assert!(!guard.is_held() && second_guard.is_held());
    assert_in_time(lost_at, gone.0, ttl);
    let second_lost_at = heard_second.wait(Lost);
    assert_in_time(second_lost_at, gone.1, longer);
    eventually(LIMIT, "both losses are told", || losses.lock().len() == 2);
    for ((at, name), (deadline, ttl)) in losses.lock().iter().zip([(gone.0, ttl), (gone.1, longer)])
    {
        assert_in_time(*at, deadline, ttl);
        println!("{name} told {:?} after its deadline", Duration::from_nanos(at - deadline));
    }
    let expired = eventually(LIMIT, "the registration expires", || {
        let events = registered.events.lock();
        (events.len() == 4).then(|| events[3].0)
    });
    // Its last renewal was sent within a third of the TTL before the cut.
    let ends = nanos(ttl - margin(ttl));
    assert!(expired + nanos(ttl / 3 + ms(300)) >= cut + ends, "expired too early");
    assert!(expired <= cut + ends + nanos(SLACK), "expired too late");
    proxy.set(Mode::Pass);

    // The next successful acquire makes it good; before it, nothing does.
    eventually(ttl + SLACK, "the registration is back", || registered.story().len() == 5);
    assert!(registered.keep.is_healthy());
    assert_eq!(registered.story(), ["Suspended", "Restored", "Suspended", "Expired", "Restored"]);
    assert_eq!((first.connection_state(), second.connection_state()), (Lost, Lost));
    drop((guard, second_guard));
    let guard = first.lock_owned().unwrap();
    heard.wait(Reconnected);
    let second_guard = second.lock_owned().unwrap();
    heard_second.wait(Reconnected);

    // Away for as long as it takes to start and elect, which a short TTL need not outlast.
    etcd.restart().unwrap();
    let mut lost = 2;
    for (mutex, guard) in [(&first, guard), (&second, second_guard)] {
        if !guard.verify().unwrap() {
            lost += 1;
            drop(guard);
            assert!(mutex.lock_owned().unwrap().unlock());
            continue;
        }
        eventually(LIMIT, "all is well", || mutex.connection_state() == Reconnected);
        assert!(guard.unlock());
    }
    eventually(LIMIT, "each loss is told", || losses.lock().len() >= lost);
    assert_eq!(losses.lock().len(), lost, "a loss was told twice");
    assert_eq!((first.connection_state(), second.connection_state()), (Reconnected, Reconnected));

    eventually(LIMIT, "both listeners have heard the last state", || {
        heard.last().map(|(_, state)| state) == late.last().map(|(_, state)| state)
    });
    let (all, tail) = (heard.states(), late.states());
    assert_legal(&all);
    assert_legal(&heard_second.states());
    assert_eq!(tail[0], Suspended, "a late listener hears of the present first: {tail:?}");
    assert!(all.ends_with(&tail), "{all:?} and {tail:?}");
    assert_eq!(
        all[..6],
        [Connected, Suspended, Reconnected, Suspended, Lost, Reconnected],
        "{all:?}"
    );
}

/// Whoever is told of a lost connection has been told of the lost hold, or is about to be: the
/// flag and the token never come after.
#[test]
fn the_hold_is_lost_before_the_connection_is() {
    let ttl = ttl();
    let etcd = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    let client = Client::connect([proxy.endpoint()]).unwrap();
    let mutex = mutex(&client, "/locks/order", ttl);
    let guard = mutex.lock_owned().unwrap();
    let seen = Arc::new(Lock::new(Vec::new()));
    mutex.add_connection_state_listener({
        let (seen, hold) = (seen.clone(), guard.hold());
        move |state| {
            if *state == Lost {
                let told = ("connection", hold.is_held(), hold.cancel_token().is_cancelled());
                seen.lock().push(told);
            }
        }
    });
    mutex.add_loss_listener({
        let (seen, hold) = (seen.clone(), guard.hold());
        move |_| {
            seen.lock().push(("hold", hold.is_held(), hold.cancel_token().is_cancelled()));
        }
    });
    proxy.set(Mode::Blackhole);
    eventually(ttl + SLACK, "both are told", || seen.lock().len() == 2);
    assert_eq!(*seen.lock(), [("connection", false, true), ("hold", false, true)]);
    proxy.set(Mode::Pass);
    assert!(!guard.unlock());
}
