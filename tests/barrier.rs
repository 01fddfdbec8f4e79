//! The simple barrier on a real etcd: no waiter is left behind, no barrier of another is touched.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use etcd_recipes::testing::{Direction, EtcdServer, FaultProxy, Mode, boot_nanos, eventually};
use etcd_recipes::{
    Barrier, CancelToken, Client, ConnectionState, ErrorKind, KeyValue, Recipe, ResilienceConfig,
    Result, RpcResilience, WatchResilience,
};

const LIMIT: Duration = Duration::from_secs(20);
const SECOND: Duration = Duration::from_secs(1);
const TTL: Duration = Duration::from_secs(2);
const PATH: &str = "/barriers/migration";

fn connect(endpoint: &str) -> Client {
    Client::connect([endpoint]).unwrap()
}

/// A client that gives up on a silent etcd after `timeout`, and notices silence within a second.
fn impatient(endpoint: &str, timeout: Duration) -> Client {
    let resilience =
        ResilienceConfig::new().rpc(RpcResilience::new().operation_timeout(timeout)).watch(
            WatchResilience::new()
                .progress_interval(Duration::from_millis(500))
                .progress_timeout(Duration::from_millis(500)),
        );
    Client::builder().endpoints([endpoint]).resilience(resilience).connect().unwrap()
}

fn barrier(client: &Client) -> Barrier {
    Barrier::builder(client, PATH).ttl(TTL).build().unwrap()
}

fn seen(client: &Client) -> Option<KeyValue> {
    client.get(PATH).unwrap()
}

fn leases(etcd: &EtcdServer) -> String {
    etcd.ctl(["lease", "list"]).unwrap()
}

/// How many watches etcd serves: a waiter that is counted there cannot miss anything.
fn watchers(etcd: &EtcdServer) -> usize {
    etcd.metric("etcd_debugging_mvcc_watcher_total", &[]).unwrap() as usize
}

/// Starts the only waiter and returns once it is watching.
fn parked<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    etcd: &EtcdServer,
    wait: impl FnOnce() -> T + Send + 'scope,
) -> ScopedJoinHandle<'scope, T> {
    parked_beside(0, scope, etcd, wait)
}

/// As [`parked`], with so many that wait already. Watches of earlier waiters may be on their way
/// out.
fn parked_beside<'scope, T: Send + 'scope>(
    others: usize,
    scope: &'scope Scope<'scope, '_>,
    etcd: &EtcdServer,
    wait: impl FnOnce() -> T + Send + 'scope,
) -> ScopedJoinHandle<'scope, T> {
    eventually(LIMIT, "only the others watch", || watchers(etcd) == others);
    let waiter = scope.spawn(wait);
    eventually(LIMIT, "the waiter watches", || watchers(etcd) > others);
    waiter
}

#[test]
fn it_is_set_removed_and_set_again() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd.endpoint());
    let gate = Barrier::builder(&client, PATH).ttl(TTL).client_id("me").build().unwrap();
    assert!(!gate.is_set().unwrap());
    assert!(!gate.remove().unwrap(), "nothing to remove");
    let mut values = Vec::new();
    for _ in 0..3 {
        assert!(gate.set().unwrap());
        assert!(gate.set().unwrap(), "still ours");
        assert!(gate.is_set().unwrap());
        let kv = seen(&client).unwrap();
        assert_eq!(kv.version, 1);
        assert!(kv.value_text().starts_with("me:"), "{}", kv.value_text());
        values.push(kv.value);
        assert!(gate.remove().unwrap());
        assert!(!gate.is_set().unwrap());
        assert!(!gate.remove().unwrap());
        assert_eq!(client.time_to_live(kv.lease).unwrap(), None);
    }
    values.dedup();
    assert_eq!(values.len(), 3);
    assert!(leases(&etcd).contains("found 0"));
    assert!(gate.set().unwrap());
    gate.close().unwrap();
    assert!(seen(&client).is_none());
    gate.close().unwrap();
    for error in [gate.set().unwrap_err(), gate.remove().unwrap_err(), gate.wait().unwrap_err()] {
        assert_eq!(error.kind(), ErrorKind::Closed);
    }
}

#[test]
fn only_its_owner_removes_it() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd.endpoint());
    let (ours, theirs) = (barrier(&client), barrier(&client));
    assert!(theirs.set().unwrap());
    assert!(!ours.set().unwrap());
    assert!(!ours.remove().unwrap());
    assert!(ours.is_set().unwrap());
    eventually(LIMIT, "only the owner's lease is left", || leases(&etcd).contains("found 1"));
    drop(ours);
    assert!(theirs.is_set().unwrap());
    assert!(theirs.remove().unwrap());
    // A key without a lease, as Go's recipes write it.
    let ours = barrier(&client);
    etcd.ctl(["put", PATH, ""]).unwrap();
    assert!(ours.is_set().unwrap());
    assert!(!ours.set().unwrap());
    assert!(!ours.wait_for(Duration::from_millis(50)).unwrap());
}

#[test]
fn a_barrier_that_was_written_over_is_not_ours_any_more() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd.endpoint());
    let gate = barrier(&client);
    assert!(gate.set().unwrap());
    etcd.ctl(["put", PATH, "theirs"]).unwrap();
    assert!(!gate.remove().unwrap());
    assert_eq!(seen(&client).unwrap().value_text(), "theirs");

    client.delete(PATH).unwrap();
    assert!(gate.set().unwrap());
    etcd.ctl(["put", PATH, "theirs"]).unwrap();
    eventually(LIMIT, "told", || gate.connection_state() == ConnectionState::Lost);
    assert!(!gate.set().unwrap());
    client.delete(PATH).unwrap();
    eventually(LIMIT, "set anew", || gate.set().unwrap());
    eventually(LIMIT, "healthy again", || gate.is_healthy());
    assert!(gate.remove().unwrap());
}

#[test]
fn a_wait_ends_by_removal_deletion_and_expiry() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd.endpoint());
    let (gate, waiter) = (barrier(&client), barrier(&client));
    waiter.wait().unwrap();
    assert!(waiter.wait_for(Duration::ZERO).unwrap(), "it is not set");
    assert!(gate.set().unwrap());
    assert!(!waiter.wait_for(Duration::ZERO).unwrap());
    let begun = Instant::now();
    assert!(!waiter.wait_for(Duration::from_millis(300)).unwrap());
    assert!(begun.elapsed() < Duration::from_millis(500), "{:?}", begun.elapsed());

    std::thread::scope(|scope| {
        let waiting = parked(scope, &etcd, || waiter.wait());
        assert!(gate.remove().unwrap());
        waiting.join().unwrap().unwrap();
    });
    for round in 0..2 {
        assert!(gate.set().unwrap());
        std::thread::scope(|scope| {
            let waiting = parked(scope, &etcd, || waiter.wait_for(LIMIT));
            if round == 0 {
                etcd.ctl(["del", PATH]).unwrap();
            } else {
                client.revoke_lease(seen(&client).unwrap().lease).unwrap();
            }
            assert!(waiting.join().unwrap().unwrap());
        });
        eventually(LIMIT, "healed", || gate.is_healthy() && gate.is_set().unwrap());
        assert!(gate.error_count() > 0);
        assert!(gate.remove().unwrap());
    }
}

#[test]
fn an_owner_that_is_cut_off_lifts_its_barrier_and_sets_it_again() {
    let etcd = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    let (client, other) = (connect(&proxy.endpoint()), connect(&etcd.endpoint()));
    let (gate, waiter) = (barrier(&client), barrier(&other));
    assert!(gate.set().unwrap());
    let before = seen(&other).unwrap();
    std::thread::scope(|scope| {
        let waiting = parked(scope, &etcd, || waiter.wait());
        proxy.set(Mode::Blackhole);
        waiting.join().unwrap().unwrap();
    });
    eventually(LIMIT, "told", || gate.connection_state() == ConnectionState::Lost);
    proxy.set(Mode::Pass);
    eventually(LIMIT, "set again", || gate.connection_state() == ConnectionState::Reconnected);
    let after = seen(&other).unwrap();
    assert_eq!(after.value, before.value);
    assert_ne!(after.lease, before.lease);
    assert!(!waiter.wait_for(Duration::from_millis(100)).unwrap());
    assert!(gate.remove().unwrap());
}

#[test]
fn a_barrier_set_by_another_in_the_outage_is_left_alone() {
    let etcd = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    let (client, other) = (connect(&proxy.endpoint()), connect(&etcd.endpoint()));
    let (gate, rival) = (barrier(&client), barrier(&other));
    assert!(gate.set().unwrap());
    proxy.set(Mode::Blackhole);
    eventually(LIMIT, "etcd ends the lease", || rival.set().unwrap());
    let theirs = seen(&other).unwrap();
    eventually(LIMIT, "told", || gate.connection_state() == ConnectionState::Lost);
    proxy.set(Mode::Pass);
    eventually(LIMIT, "healing ends", || {
        gate.errors().iter().any(|error| error.kind() == ErrorKind::NotEstablished)
    });
    assert!(!gate.remove().unwrap());
    assert_eq!(seen(&other).unwrap(), theirs);
}

#[test]
fn a_restart_of_etcd_with_its_data_lifts_nothing() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd.endpoint());
    let (gate, waiter) = (barrier(&client), barrier(&client));
    assert!(gate.set().unwrap());
    let before = seen(&client).unwrap();
    std::thread::scope(|scope| {
        let waiting = parked(scope, &etcd, || waiter.wait());
        etcd.kill().unwrap();
        eventually(LIMIT, "told", || gate.connection_state() == ConnectionState::Lost);
        etcd.start_again().unwrap();
        eventually(LIMIT, "adopted", || gate.connection_state() == ConnectionState::Reconnected);
        assert_eq!(seen(&client).unwrap(), before);
        assert!(!waiting.is_finished());
        assert!(gate.remove().unwrap());
        waiting.join().unwrap().unwrap();
    });
    // Data that is lost is a lift, and the barrier comes back.
    assert!(gate.set().unwrap());
    std::thread::scope(|scope| {
        let waiting = parked(scope, &etcd, || waiter.wait());
        etcd.restart_empty().unwrap();
        waiting.join().unwrap().unwrap();
    });
    eventually(LIMIT, "set again", || seen(&client).is_some());
}

#[test]
fn a_hundred_waiters_pass() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd.endpoint());
    let (gate, waiter) = (barrier(&client), barrier(&client));
    assert!(gate.set().unwrap());
    std::thread::scope(|scope| {
        let waiters: Vec<_> = (0..100).map(|_| scope.spawn(|| waiter.wait())).collect();
        eventually(LIMIT, "all wait", || watchers(&etcd) == 100);
        assert!(waiters.iter().all(|waiter| !waiter.is_finished()));
        let begun = Instant::now();
        assert!(gate.remove().unwrap());
        for waiter in waiters {
            waiter.join().unwrap().unwrap();
        }
        assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    });
    eventually(LIMIT, "no watch is left", || watchers(&etcd) == 0);
}

#[test]
fn a_removal_that_races_the_wait_is_not_missed() {
    let etcd = EtcdServer::start().unwrap();
    let rounds = if full() { 5_000 } else { 300 };
    // Most of a round is waiting, so several go on side by side.
    std::thread::scope(|scope| {
        for lane in 0..LANES {
            let endpoint = etcd.endpoint();
            scope.spawn(move || race_removals(&endpoint, lane, rounds / LANES));
        }
    });
}

const LANES: usize = 5;

fn race_removals(endpoint: &str, lane: usize, rounds: usize) {
    let (client, other) = (connect(endpoint), connect(endpoint));
    let path = format!("{PATH}-{lane}");
    let build = |client| Barrier::builder(client, path.as_str()).ttl(TTL).build().unwrap();
    let (gate, waiter) = (build(&client), build(&other));
    let done = AtomicUsize::new(0);
    for round in 0..rounds {
        assert!(gate.set().unwrap());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                let lifted = waiter.wait_for(LIMIT);
                done.fetch_add(1, Ordering::Relaxed);
                lifted
            });
            if round % 3 == 0 {
                etcd_noise(&client, round);
            }
            assert!(gate.remove().unwrap());
            // Set again at once: that it was lifted in between must have been seen, or the waiter
            // came after it.
            let again = round % 2 == 0 && gate.set().unwrap();
            if again && !lifts_within(&done, round, Duration::from_millis(20)) {
                assert!(gate.remove().unwrap());
            }
            assert!(waiting.join().unwrap().unwrap(), "left blocked in round {round}");
        });
        gate.remove().unwrap();
    }
}

fn etcd_noise(client: &Client, round: usize) {
    for number in 0..5 {
        client.put(format!("/noise/{number}"), round.to_string()).unwrap();
    }
}

fn lifts_within(done: &AtomicUsize, round: usize, limit: Duration) -> bool {
    let end = Instant::now() + limit;
    while Instant::now() < end {
        if done.load(Ordering::Relaxed) > round {
            return true;
        }
        std::thread::yield_now();
    }
    false
}

#[test]
fn what_happens_between_the_read_and_the_watch_is_seen() {
    let etcd = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    let client = connect(&etcd.endpoint());
    let gate = barrier(&client);
    let delay = Duration::from_millis(150);
    let cases = [(0, false), (100, false), (0, true), (100, true)];
    let cases = cases.into_iter().flat_map(|(n, c)| [(n, c, true), (n, c, false)]);
    for (noise, compact, again) in cases {
        assert!(gate.set().unwrap());
        let slow = connect(&proxy.endpoint());
        slow.wait_ready(LIMIT).unwrap();
        let waiter = barrier(&slow);
        let (deliveries, ready) = (proxy.deliveries(), boot_nanos());
        proxy.set(Mode::Delay { up: delay, down: Duration::ZERO });
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| waiter.wait_for(LIMIT));
            // Any earlier answer is that of a request made before the delay. This one is the
            // read's, and the request for the watch is on its way.
            loop {
                let delivery = deliveries.recv_timeout(LIMIT).unwrap();
                let answer = delivery.data && delivery.direction == Direction::Down;
                if answer && delivery.at_nanos > ready + delay.as_nanos() as u64 {
                    break;
                }
            }
            assert!(gate.remove().unwrap());
            for number in 0..noise {
                client.put(format!("/noise/{number}"), "x").unwrap();
            }
            if compact {
                etcd.compact().unwrap();
            }
            if again {
                assert!(gate.set().unwrap(), "it was lifted all the same");
            }
            proxy.set(Mode::Pass);
            let begun = Instant::now();
            assert!(waiting.join().unwrap().unwrap(), "{noise} {compact} {again}");
            assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
        });
        assert_eq!(gate.remove().unwrap(), again);
    }
}

#[test]
fn a_compaction_in_an_outage_of_the_waiter_hides_no_lift() {
    let etcd = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    let (far, client) = (connect(&proxy.endpoint()), connect(&etcd.endpoint()));
    let (gate, waiter) = (barrier(&client), barrier(&far));
    for again in [false, true] {
        assert!(gate.set().unwrap());
        std::thread::scope(|scope| {
            let waiting = parked(scope, &etcd, || waiter.wait());
            proxy.set(Mode::Reset);
            eventually(LIMIT, "noticed", || {
                waiter.connection_state() == ConnectionState::Suspended
            });
            assert!(gate.remove().unwrap());
            client.put("/noise", "x").unwrap();
            if again {
                assert!(gate.set().unwrap());
            }
            etcd.compact().unwrap();
            assert!(!waiting.is_finished());
            proxy.set(Mode::Pass);
            waiting.join().unwrap().unwrap();
        });
        gate.remove().unwrap();
        far.wait_ready(LIMIT).unwrap();
    }
    // And one that still stands after the compaction goes on to be waited for.
    assert!(gate.set().unwrap());
    std::thread::scope(|scope| {
        let waiting = parked(scope, &etcd, || waiter.wait());
        proxy.set(Mode::Reset);
        client.put("/noise", "y").unwrap();
        etcd.compact().unwrap();
        let connections = proxy.connections_total();
        proxy.set(Mode::Pass);
        eventually(LIMIT, "it is back", || proxy.connections_total() > connections);
        assert!(!waiting.is_finished());
        assert!(gate.remove().unwrap());
        waiting.join().unwrap().unwrap();
    });
}

#[test]
fn a_wait_for_a_missing_barrier_waits_until_it_was_set_and_lifted() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd.endpoint());
    let gate = barrier(&client);
    let waiter = Barrier::builder(&client, PATH).wait_on_missing(true).build().unwrap();
    assert!(!waiter.wait_for(SECOND / 2).unwrap());
    std::thread::scope(|scope| {
        let waiting = parked(scope, &etcd, || waiter.wait());
        assert!(gate.set().unwrap());
        assert!(!waiting.is_finished());
        assert!(gate.remove().unwrap());
        waiting.join().unwrap().unwrap();
    });
}

#[test]
fn waiters_are_interrupted_and_closed_promptly() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd.endpoint());
    let (gate, waiter) = (barrier(&client), barrier(&client));
    assert!(gate.set().unwrap());
    let promptly = |waiting: ScopedJoinHandle<'_, Result<()>>, kind, begun: Instant| {
        assert_eq!(waiting.join().unwrap().unwrap_err().kind(), kind);
        assert!(begun.elapsed() < Duration::from_millis(400), "{:?}", begun.elapsed());
    };
    let token = CancelToken::new();
    std::thread::scope(|scope| {
        let waiting = parked(scope, &etcd, || token.scope(|| waiter.wait()));
        let begun = Instant::now();
        token.cancel();
        promptly(waiting, ErrorKind::Interrupted, begun);
        assert_eq!(token.scope(|| gate.set()).unwrap_err().kind(), ErrorKind::Interrupted);
        assert_eq!(token.scope(|| gate.remove()).unwrap_err().kind(), ErrorKind::Interrupted);
        assert!(gate.is_set().unwrap());
    });
    eventually(LIMIT, "its watch is gone", || watchers(&etcd) == 0);
    std::thread::scope(|scope| {
        let waiting = parked(scope, &etcd, || waiter.wait());
        let begun = Instant::now();
        waiter.close().unwrap();
        promptly(waiting, ErrorKind::Closed, begun);
    });
    let other = connect(&etcd.endpoint());
    let waiter = barrier(&other);
    std::thread::scope(|scope| {
        let waiting = parked(scope, &etcd, || waiter.wait());
        let begun = Instant::now();
        other.close().unwrap();
        promptly(waiting, ErrorKind::Closed, begun);
    });
    assert!(gate.is_set().unwrap(), "waiters own nothing");
}

#[test]
fn a_silent_etcd_ends_every_call_in_time() {
    let etcd = EtcdServer::start().unwrap();
    let timeout = Duration::from_secs(2);
    let client = impatient(&etcd.endpoint(), timeout);
    let (gate, fresh) = (barrier(&client), Barrier::new(&client, "/barriers/other").unwrap());
    assert!(gate.set().unwrap());
    let unreachable = |what: &str, call: &dyn Fn() -> Result<()>| {
        let begun = Instant::now();
        let error = call().unwrap_err();
        assert!(error.is_unreachable() || error.is_ambiguous(), "{what}: {error}");
        let took = begun.elapsed();
        assert!(took < timeout + Duration::from_secs(1), "{what}: {took:?}");
    };
    std::thread::scope(|scope| {
        let waiting = parked(scope, &etcd, || gate.wait());
        let limited = parked_beside(1, scope, &etcd, || gate.wait_for(SECOND));
        etcd.freeze().unwrap();
        let begun = Instant::now();
        assert!(!limited.join().unwrap().unwrap(), "an answer had shown it set");
        let error = waiting.join().unwrap().unwrap_err();
        assert!(error.is_unreachable(), "{error}");
        assert!(begun.elapsed() < timeout + Duration::from_secs(1), "{:?}", begun.elapsed());
    });
    unreachable("is_set", &|| fresh.is_set().map(drop));
    unreachable("set", &|| fresh.set().map(drop));
    unreachable("wait", &|| fresh.wait());
    unreachable("wait_for", &|| fresh.wait_for(Duration::from_millis(300)).map(drop));
    unreachable("remove", &|| gate.remove().map(drop));
    let begun = Instant::now();
    assert_eq!(gate.close().unwrap_err().kind(), ErrorKind::CleanupUnconfirmed);
    assert!(begun.elapsed() < Duration::from_millis(2_500), "{:?}", begun.elapsed());
    etcd.thaw().unwrap();
    client.wait_ready(LIMIT).unwrap();
    eventually(LIMIT, "nothing is left", || {
        seen(&client).is_none() && !fresh.is_set().unwrap() && leases(&etcd).contains("found 0")
    });
    assert!(fresh.set().unwrap(), "it goes on working");
}

#[test]
fn a_short_outage_is_waited_out() {
    let etcd = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    let far = impatient(&proxy.endpoint(), Duration::from_secs(10));
    let client = connect(&etcd.endpoint());
    let (gate, waiter) = (barrier(&client), barrier(&far));
    assert!(gate.set().unwrap());
    std::thread::scope(|scope| {
        let waiting = parked(scope, &etcd, || waiter.wait());
        proxy.set(Mode::Blackhole);
        eventually(LIMIT, "noticed", || waiter.connection_state() == ConnectionState::Suspended);
        assert!(gate.remove().unwrap());
        assert!(!waiting.is_finished());
        proxy.set(Mode::Pass);
        waiting.join().unwrap().unwrap();
    });
}

#[test]
fn a_remove_without_an_answer_keeps_nothing_alive() {
    let etcd = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    let client = impatient(&proxy.endpoint(), Duration::from_secs(1));
    let watcher = connect(&etcd.endpoint());
    let gate = barrier(&client);
    assert!(gate.set().unwrap());
    proxy.set(Mode::Blackhole);
    gate.remove().unwrap_err();
    eventually(LIMIT, "the TTL lifts it", || seen(&watcher).is_none());
    proxy.set(Mode::Pass);
    eventually(LIMIT, "reachable", || client.ping());
    assert!(gate.set().unwrap());
    assert!(seen(&watcher).is_some());
    let lease = seen(&watcher).unwrap().lease;
    let end = Instant::now() + TTL * 2;
    while Instant::now() < end {
        assert_eq!(seen(&watcher).map(|kv| kv.lease), Some(lease), "the new one is kept");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(gate.remove().unwrap());
}

fn full() -> bool {
    std::env::var_os("ETCD_RECIPES_FULL").is_some_and(|value| value == "1")
}

#[test]
fn a_delete_at_the_compacted_revision_is_seen_by_a_watch_that_resumes() {
    let etcd = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    let far = impatient(&proxy.endpoint(), LIMIT);
    let client = connect(&etcd.endpoint());
    let gate = barrier(&client);
    let waiter = Barrier::builder(&far, PATH).wait_on_missing(true).build().unwrap();
    std::thread::scope(|scope| {
        let waiting = parked(scope, &etcd, || waiter.wait_for(LIMIT));
        let answers = proxy.deliveries();
        assert!(gate.set().unwrap());
        // The put is delivered: the watch goes on with the revision of the delete.
        loop {
            let delivery = answers.recv_timeout(LIMIT).unwrap();
            if delivery.data && delivery.direction == Direction::Down {
                break;
            }
        }
        // Silence, since a reset could discard what was delivered and not yet read.
        proxy.set(Mode::Blackhole);
        eventually(LIMIT, "noticed", || waiter.connection_state() == ConnectionState::Suspended);
        assert!(gate.remove().unwrap());
        etcd.compact().unwrap();
        proxy.set(Mode::Pass);
        assert!(waiting.join().unwrap().unwrap());
    });
}
