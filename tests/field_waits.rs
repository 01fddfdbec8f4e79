//! Field reports on waiting for a lock: who else is let in, and what a waiter may miss. Each test
//! names its case.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod faults;
mod support;

use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use etcd_recipes::testing::{EtcdServer, FaultProxy, Mode, eventually};
use etcd_recipes::{Client, Mutex, Recipe};
use faults::{full, lease_on};
use support::*;

/// By when a waiter has to be in whose turn has come: a second, and slack for a machine that runs
/// several servers at once. One that missed its turn would not be in at all.
const SOON: Duration = Duration::from_secs(4);

fn rounds(ordinary: usize, full_figure: usize) -> usize {
    if full() { full_figure } else { ordinary }
}

/// Writes that are nobody's business.
fn unrelated_writes(client: &Client, count: usize) {
    for number in 0..count {
        client.put(format!("/unrelated/{}", number % 7), "x").unwrap();
    }
}

// ----- LOCK-07: two handles in one process ----------------------------------------------------

/// Eight threads, four on each of two handles, pass the lock around.
fn pass_around(handles: [Mutex; 2]) {
    let inside = AtomicUsize::new(0);
    let begun = AtomicUsize::new(0);
    let limit = rounds(100, 1_000);
    thread::scope(|scope| {
        for number in 0..8 {
            let (mutex, inside, begun) = (&handles[number % 2], &inside, &begun);
            scope.spawn(move || {
                while begun.fetch_add(1, Ordering::SeqCst) < limit {
                    let guard = mutex.lock().unwrap();
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two are inside");
                    thread::yield_now();
                    assert!(guard.is_held());
                    assert_eq!(inside.fetch_sub(1, Ordering::SeqCst), 1, "two are inside");
                    assert!(guard.unlock());
                }
            });
        }
    });
}

/// LOCK-07: handles of one client share its lease and are still two owners.
#[test]
fn two_handles_of_one_client_exclude_each_other() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    pass_around([short(&client, "/locks/a"), short(&client, "/locks/a")]);
    assert!(keys(&etcd, "/locks/").is_empty());
    assert_eq!(leases(&etcd), 1, "one lease served them all");
}

/// LOCK-07, with a client for each handle.
#[test]
fn two_handles_of_two_clients_exclude_each_other() {
    let etcd = EtcdServer::start().unwrap();
    pass_around([short(&connect(&etcd), "/locks/a"), short(&connect(&etcd), "/locks/a")]);
    assert!(keys(&etcd, "/locks/").is_empty());
}

/// LOCK-07: a handle is no owner either; its second thread queues like anybody.
#[test]
fn one_handle_makes_its_second_thread_wait() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let mutex = short(&client, "/locks/a");
    let guard = mutex.lock().unwrap();
    thread::scope(|scope| {
        let second = scope.spawn(|| {
            let guard = mutex.lock().unwrap();
            let token = guard.fencing_token();
            assert!(guard.unlock());
            token
        });
        wait_contenders(&mutex, 2);
        assert!(guard.verify().unwrap() && !second.is_finished());
        let token = guard.fencing_token();
        assert!(guard.unlock());
        assert!(token < second.join().unwrap());
    });
}

// ----- BAR-01: the turn comes between the read and the watch ----------------------------------

/// How long each way takes between the waiter and etcd.
const WAY: Duration = Duration::from_millis(150);

/// The holder leaves while a slow waiter is on its way from its place in the queue to its watch,
/// a step later in each round; `meanwhile` fills the gap.
fn leave_in_the_gap(meanwhile: impl Fn(&EtcdServer, &Client)) {
    let etcd = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    let ours = connect(&etcd);
    for step in 0..7 {
        let path = format!("/locks/{step}");
        let theirs = Client::connect([proxy.endpoint()]).unwrap();
        let holder = Mutex::new(&ours, &*path).unwrap();
        let waiting = Mutex::new(&theirs, &*path).unwrap();
        // The lease is there before the delay begins.
        assert!(Mutex::new(&theirs, "/other").unwrap().lock().unwrap().unlock());
        let guard = holder.lock().unwrap();
        proxy.set(Mode::Delay { up: WAY, down: WAY });
        thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let guard = waiting.try_lock_for(LIMIT).unwrap().expect("its turn was missed");
                (Instant::now(), guard.unlock())
            });
            wait_contenders(&holder, 2);
            // No synchronisation: each step puts the gap elsewhere.
            thread::sleep(WAY / 2 * step);
            let left = Instant::now();
            assert!(guard.unlock());
            meanwhile(&etcd, &ours);
            let (entered, stood) = waiter.join().unwrap();
            proxy.set(Mode::Pass);
            assert!(stood);
            let took = entered.saturating_duration_since(left);
            assert!(took < SOON, "step {step}: {took:?}");
        });
        theirs.close().unwrap();
    }
    assert!(keys(&etcd, "/locks/").is_empty());
}

/// BAR-01 for the lock.
#[test]
fn a_turn_that_comes_before_the_watch_is_not_missed() {
    leave_in_the_gap(|_, _| ());
}

/// BAR-01 for the lock, with the head of the history far from the key.
#[test]
fn a_turn_that_comes_before_the_watch_is_not_missed_under_other_writes() {
    leave_in_the_gap(|_, client| unrelated_writes(client, 100));
}

/// BAR-01 for the lock: the revision that the watch would begin at is gone.
#[test]
fn a_turn_that_comes_before_the_watch_is_not_missed_under_a_compaction() {
    leave_in_the_gap(|etcd, client| {
        unrelated_writes(client, 10);
        etcd.compact().unwrap();
    });
}

/// Rounds of a release beside an acquire between two clients; the longest wait.
fn release_beside_acquire(etcd: &EtcdServer, lane: usize, rounds: usize) -> Duration {
    let clients = [connect(etcd), connect(etcd)];
    let mut longest = Duration::ZERO;
    for round in 0..rounds {
        // Often a path whose watch is yet to open, often one whose watch is live.
        let path = format!("/locks/{lane}/{}", round / 4);
        // A stall of the disk must not cost the hold: that is not what this is about.
        let lasting = |client| {
            Mutex::builder(client, path.as_str()).ttl(Duration::from_secs(20)).build().unwrap()
        };
        let holder = lasting(&clients[round % 2]);
        let waiting = lasting(&clients[(round + 1) % 2]);
        let guard = holder.lock().unwrap();
        let start = Barrier::new(2);
        thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                start.wait();
                let (guard, took) = timed(|| waiting.try_lock_for(LIMIT).unwrap());
                assert!(guard.expect("left blocked").unlock());
                took
            });
            start.wait();
            // Up to 3 ms later: about as long as an enqueue takes.
            thread::sleep(Duration::from_micros(u64::try_from(round * 137 % 3_000).unwrap()));
            assert!(guard.unlock());
            longest = longest.max(waiter.join().unwrap());
        });
    }
    longest
}

/// BAR-01 for the lock, free-running: whatever the two meet at, the waiter gets in.
#[test]
fn a_release_beside_an_acquire_leaves_nobody_blocked() {
    const LANES: usize = 5;
    let etcd = EtcdServer::start().unwrap();
    let each = rounds(500, 5_000) / LANES;
    let longest = thread::scope(|scope| {
        let lane = |lane| {
            scope.spawn({
                let etcd = &etcd;
                move || release_beside_acquire(etcd, lane, each)
            })
        };
        let lanes: Vec<_> = (0..LANES).map(lane).collect();
        lanes.into_iter().map(|lane| lane.join().unwrap()).max().unwrap()
    });
    println!("the longest wait was {longest:?}");
    assert!(longest < SOON, "{longest:?}");
}

// ----- WATCH-01: what happens during an outage and is compacted away --------------------------

/// A waiter whose client is cut off; meanwhile the holder leaves and history is compacted.
/// `outage` runs while no byte moves, with the waiter's key.
fn release_unheard(ttl: Duration, outage: impl FnOnce(&EtcdServer, &str)) {
    let (etcd, proxy, theirs) = proxied(Duration::from_secs(60));
    let ours = connect(&etcd);
    let holder = short(&ours, "/locks/a");
    let waiting = Mutex::builder(&theirs, "/locks/a").ttl(ttl).build().unwrap();
    let guard = holder.lock().unwrap();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let guard = waiting.lock().unwrap();
            (Instant::now(), guard.unlock())
        });
        wait_contenders(&holder, 2);
        let all = keys(&etcd, "/locks/a/");
        let key = all.into_iter().find(|key| *key != guard.lock_key()).unwrap();
        proxy.set(Mode::Blackhole);
        assert!(guard.unlock());
        unrelated_writes(&ours, 50);
        etcd.compact().unwrap();
        outage(&etcd, &key);
        assert!(!waiter.is_finished(), "in although no byte came");
        let restored = Instant::now();
        proxy.set(Mode::Pass);
        let (entered, stood) = waiter.join().unwrap();
        assert!(stood);
        let took = entered - restored;
        assert!(took < SOON, "{took:?}");
    });
    assert!(waiting.errors().is_empty(), "{:?}", waiting.errors());
    assert!(waiting.lock().unwrap().unlock());
    assert!(keys(&etcd, "/locks/").is_empty());
}

/// WATCH-01 for the lock: the release was compacted away while the waiter heard nothing.
#[test]
fn a_waiter_hears_of_a_release_that_was_compacted_away() {
    release_unheard(Duration::from_secs(10), |etcd, key| {
        assert!(lease_on(etcd, key).is_some(), "its place is still there");
    });
}

/// WATCH-01 for the lock: the outage outlives the waiter's own lease, so it queues again.
#[test]
fn a_waiter_whose_lease_dies_in_the_outage_queues_again() {
    release_unheard(TTL, |etcd, key| {
        eventually(LIMIT, "its lease dies", || lease_on(etcd, key).is_none());
        etcd.compact().unwrap();
    });
}

/// WATCH-01 for the lock: the path is quiet, history goes on and is compacted, etcd starts again.
#[test]
fn a_quiet_wait_outlives_compactions_and_restarts() {
    let etcd = EtcdServer::start().unwrap();
    let clients = [patient(Duration::from_secs(60)), patient(Duration::from_secs(60))];
    let [ours, theirs] = clients.map(|one| one.endpoints([etcd.endpoint()]).connect().unwrap());
    let long = |client| Mutex::builder(client, "/locks/a").ttl(LIMIT).build().unwrap();
    let (holder, waiting) = (long(&ours), long(&theirs));
    let guard = holder.lock().unwrap();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let guard = waiting.lock().unwrap();
            (Instant::now(), guard.unlock())
        });
        wait_contenders(&holder, 2);
        for _ in 0..2 {
            unrelated_writes(&ours, 50);
            etcd.compact().unwrap();
            etcd.restart().unwrap();
        }
        assert!(guard.verify().unwrap() && !waiter.is_finished());
        let left = Instant::now();
        assert!(guard.unlock());
        let (entered, stood) = waiter.join().unwrap();
        assert!(stood);
        let took = entered.saturating_duration_since(left);
        assert!(took < SOON, "{took:?}");
    });
    assert!(waiting.errors().is_empty(), "{:?}", waiting.errors());
}
