//! How soon presence keys are back when etcd is: not when some pause or time limit of before is
//! over.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod dead_links;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use dead_links::DeadLinks;
use etcd_recipes::testing::{EtcdServer, FaultProxy, Mode, eventually};
use etcd_recipes::{Client, LeaseEvent, LeaseResilience, RetryPolicy, TransientKeyValue};

const TTL: Duration = Duration::from_secs(2);
const LIMIT: Duration = Duration::from_secs(15);
/// Longer than any test: who sits it out is not back in time.
const LONG: Duration = Duration::from_secs(120);
/// Far more than is needed, and far less than the time limits of before would take.
const SOON: Duration = Duration::from_secs(5);

fn keys(client: &Client, count: usize, resilience: &LeaseResilience) -> Vec<TransientKeyValue> {
    let start = |n| {
        let key = TransientKeyValue::builder(client, format!("/nodes/{n}"), "here")
            .ttl(TTL)
            .resilience(resilience.clone())
            .build()
            .unwrap();
        key.start().unwrap();
        key
    };
    (0..count).map(start).collect()
}

fn wait_standing(observer: &Client, count: u64) -> Duration {
    let begun = Instant::now();
    let what = format!("{count} keys stand");
    eventually(LIMIT, &what, || matches!(observer.count_prefix("/nodes/"), Ok(n) if n == count));
    begun.elapsed()
}

/// A heal's first try has failed, so that it pauses.
fn wait_pausing(keys: &[TransientKeyValue]) {
    use etcd_recipes::Recipe;
    let pauses = |key: &TransientKeyValue| key.errors().iter().any(|e| e.is_unreachable());
    eventually(LIMIT, "the first tries have failed", || {
        keys.iter().all(|key| key.errors().len() > 1 && pauses(key))
    });
}

/// A try has time enough for a busy machine: after one that etcd did not let finish, the policy
/// means what it says.
fn pausing_long() -> LeaseResilience {
    LeaseResilience::new()
        .heal_operation_timeout(Duration::from_secs(3))
        .retry_policy(RetryPolicy::forever(LONG))
}

fn many_come_back(outage: Mode) {
    let etcd = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    let client = Client::connect([proxy.endpoint()]).unwrap();
    let observer = Client::connect([etcd.endpoint()]).unwrap();
    let keys = keys(&client, 200, &pausing_long());
    let before = proxy.connections_total();
    proxy.set(outage);
    wait_standing(&observer, 0);
    wait_pausing(&keys);
    let made = proxy.connections_total() - before;
    proxy.set(Mode::Pass);
    let took = wait_standing(&observer, 200);
    assert!(took < SOON, "{took:?}");
    if outage == Mode::Blackhole {
        // Leases that are overdue together try the same new connections.
        assert!(made < 100, "{made} connections for 200 leases");
    }
    eventually(LIMIT, "all know it", || keys.iter().all(TransientKeyValue::is_healthy));
}

#[test]
fn two_hundred_keys_that_pause_are_back_soon_after_a_silence() {
    many_come_back(Mode::Blackhole);
}

#[test]
fn two_hundred_keys_that_pause_are_back_soon_after_refusals() {
    many_come_back(Mode::Reset);
}

/// Connections that the outage killed without a word: no answer and no reset ever comes on them.
#[test]
fn a_try_under_way_on_a_dead_connection_is_begun_anew() {
    let etcd = EtcdServer::start().unwrap();
    let links = DeadLinks::start(&etcd.endpoint());
    let client = Client::connect([links.endpoint()]).unwrap();
    let observer = Client::connect([etcd.endpoint()]).unwrap();
    let patient = LeaseResilience::new().heal_operation_timeout(LONG);
    let keys = keys(&client, 20, &patient);
    let mut took = Vec::new();
    for round in 0..3 {
        links.cut();
        wait_standing(&observer, 0);
        // The attempts, which take up to 3 s, are as far as they happen to be.
        std::thread::sleep(Duration::from_millis(3_000 + 900 * round));
        links.mend();
        took.push(wait_standing(&observer, 20));
        eventually(LIMIT, "all know it", || keys.iter().all(TransientKeyValue::is_healthy));
    }
    took.sort();
    assert!(took[1] < Duration::from_millis(1_200), "{took:?}");
}

/// The return of etcd shortens a pause; it is no reason to ask less of the policy.
#[test]
fn the_policy_is_asked_after_every_failed_try_and_its_no_is_final() {
    let etcd = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    let client = Client::connect([proxy.endpoint()]).unwrap();
    let observer = Client::connect([etcd.endpoint()]).unwrap();
    let asked = Arc::new(AtomicU32::new(0));
    let policy = RetryPolicy::custom({
        let asked = asked.clone();
        move |attempt, _| {
            assert_eq!(asked.fetch_add(1, Ordering::SeqCst) + 1, attempt);
            (attempt < 3).then_some(Duration::from_millis(500))
        }
    });
    let resilience = LeaseResilience::new()
        .heal_operation_timeout(Duration::from_millis(300))
        .retry_policy(policy);
    let key = keys(&client, 1, &resilience).remove(0);
    let events = key.lease_events();
    proxy.set(Mode::Blackhole);
    let failed = std::iter::from_fn(|| events.recv_timeout(LIMIT).ok())
        .any(|event| matches!(event, LeaseEvent::Failed { .. }));
    assert!(failed);
    assert_eq!(asked.load(Ordering::SeqCst), 3);
    proxy.set(Mode::Pass);
    std::thread::sleep(Duration::from_millis(700));
    assert!(observer.get("/nodes/0").unwrap().is_none());
    assert_eq!(asked.load(Ordering::SeqCst), 3);
}

/// A close does not wait for a pause, nor for the one who asks whether etcd is back.
#[test]
fn closing_a_key_whose_heal_pauses_is_prompt_and_the_others_are_still_woken() {
    let etcd = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    let client = Client::connect([proxy.endpoint()]).unwrap();
    let observer = Client::connect([etcd.endpoint()]).unwrap();
    let mut keys = keys(&client, 3, &pausing_long());
    proxy.set(Mode::Reset);
    wait_standing(&observer, 0);
    wait_pausing(&keys);
    // Whichever of them asks for all.
    for _ in 0..2 {
        let key = keys.remove(0);
        let begun = Instant::now();
        key.close().unwrap_err();
        assert!(begun.elapsed() < Duration::from_millis(2_700), "{:?}", begun.elapsed());
    }
    proxy.set(Mode::Pass);
    assert!(wait_standing(&observer, 1) < SOON);
}
