//! Transient keys on a real etcd: kept, healed with the latest value, and left alone once they are
//! somebody else's.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use etcd_recipes::testing::{EtcdServer, FaultProxy, Mode, eventually};
use etcd_recipes::{
    Bytes, CancelToken, Client, ConnectionState, ErrorKind, KeyValue, LeaseEvent, LeaseListener,
    Recipe, ResilienceConfig, RpcResilience, Subscription, TransientKeyValue,
};

const LIMIT: Duration = Duration::from_secs(20);
const TTL: Duration = Duration::from_secs(2);
const KEY: &str = "/nodes/7";

fn connect(endpoint: &str) -> Client {
    Client::connect([endpoint]).unwrap()
}

/// A client that gives up on a silent etcd after `timeout`.
fn impatient(endpoint: &str, timeout: Duration) -> Client {
    let rpc = RpcResilience::new().operation_timeout(timeout);
    Client::builder()
        .endpoints([endpoint])
        .resilience(ResilienceConfig::new().rpc(rpc))
        .connect()
        .unwrap()
}

fn transient(client: &Client, value: &str) -> TransientKeyValue {
    TransientKeyValue::builder(client, KEY, value).ttl(TTL).build().unwrap()
}

/// The key as somebody else sees it.
fn seen(watcher: &Client) -> Option<KeyValue> {
    watcher.get(KEY).unwrap()
}

fn value(watcher: &Client) -> Option<String> {
    seen(watcher).map(|kv| kv.value_text())
}

fn only_key(etcd: &EtcdServer) -> String {
    etcd.ctl(["get", "", "--prefix", "--keys-only"]).unwrap().trim().to_owned()
}

fn expect_expired(events: &Subscription<LeaseEvent>, lease: i64) {
    loop {
        match events.recv_timeout(LIMIT).unwrap() {
            LeaseEvent::Suspended { .. } => {}
            LeaseEvent::Expired { lease: expired, .. } => return assert_eq!(expired, lease),
            other => panic!("{other:?} in place of Expired"),
        }
    }
}

fn expect_restored(events: &Subscription<LeaseEvent>, lease: i64) -> i64 {
    match events.recv_timeout(LIMIT).unwrap() {
        LeaseEvent::Restored { old, new } => {
            assert_eq!(old, lease);
            new
        }
        other => panic!("{other:?} in place of Restored"),
    }
}

fn expect_failed(events: &Subscription<LeaseEvent>) {
    match events.recv_timeout(LIMIT).unwrap() {
        LeaseEvent::Failed { cause, .. } => assert_eq!(cause.kind(), ErrorKind::NotEstablished),
        other => panic!("{other:?} in place of Failed"),
    }
}

#[test]
fn it_stands_from_start_to_close() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd.endpoint());
    let node = transient(&client, "one");
    assert_eq!(node.current_lease_id(), -1);
    assert!(seen(&client).is_none());

    node.start().unwrap();
    let kv = seen(&client).unwrap();
    assert_eq!((kv.value_text().as_str(), kv.lease), ("one", node.current_lease_id()));
    node.start().unwrap();
    assert_eq!(seen(&client).unwrap().mod_revision, kv.mod_revision, "a second start does nothing");

    node.set("two").unwrap();
    assert_eq!(value(&client).unwrap(), "two");
    assert_eq!(node.value().unwrap(), "two");
    let lease = seen(&client).unwrap().lease;
    assert_eq!(lease, node.current_lease_id());

    node.close().unwrap();
    assert!(seen(&client).is_none());
    assert_eq!(client.time_to_live(lease).unwrap(), None);
    node.close().unwrap();
    assert_eq!(node.start().unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(node.set("three").unwrap_err().kind(), ErrorKind::Closed);
    assert!(!node.is_healthy());
}

#[test]
fn a_value_set_before_the_start_is_the_one_that_starts() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd.endpoint());
    let node = TransientKeyValue::builder(&client, KEY, vec![0]).codec(Bytes).build().unwrap();
    node.set([1, 255]).unwrap();
    assert!(seen(&client).is_none());
    node.start().unwrap();
    assert_eq!(seen(&client).unwrap().value, [1, 255]);
    assert_eq!(node.value().unwrap(), [1, 255]);
    drop(node);
    assert!(seen(&client).is_none());
}

#[test]
fn a_key_of_somebody_else_is_left_alone_at_the_start() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd.endpoint());
    client.put(KEY, "theirs").unwrap();
    let node = transient(&client, "ours");
    assert_eq!(node.start().unwrap_err().kind(), ErrorKind::NotEstablished);
    assert_eq!(value(&client).unwrap(), "theirs");
    eventually(LIMIT, "no lease is left", || {
        !etcd.ctl(["lease", "list"]).unwrap().contains("found 1")
    });
    client.delete(KEY).unwrap();
    node.start().unwrap();
    assert_eq!(value(&client).unwrap(), "ours");
    let rival = transient(&client, "rival");
    assert_eq!(rival.start().unwrap_err().kind(), ErrorKind::NotEstablished);
}

#[test]
fn starts_at_once_from_many_threads_are_one_start() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd.endpoint());
    let node = transient(&client, "one");
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| node.start().unwrap());
        }
    });
    assert_eq!(seen(&client).unwrap().version, 1);
    assert!(etcd.ctl(["lease", "list"]).unwrap().contains("found 1"));
}

#[test]
fn an_outage_longer_than_the_ttl_is_healed_with_the_latest_value() {
    let etcd = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    let (client, watcher) = (connect(&proxy.endpoint()), connect(&etcd.endpoint()));
    let node = transient(&client, "one");
    let events = node.lease_events();
    let states = node.connection_events();
    node.start().unwrap();
    node.set("two").unwrap();
    let lease = node.current_lease_id();

    proxy.set(Mode::Blackhole);
    expect_expired(&events, lease);
    assert!(!node.is_healthy());
    eventually(LIMIT, "etcd ends the lease", || seen(&watcher).is_none());
    proxy.set(Mode::Pass);
    let back = Instant::now();
    let new = expect_restored(&events, lease);
    assert!(back.elapsed() < TTL + Duration::from_secs(1), "{:?}", back.elapsed());
    assert_ne!(new, lease);
    assert_eq!(node.current_lease_id(), new);
    let kv = seen(&watcher).unwrap();
    assert_eq!((kv.value_text().as_str(), kv.lease), ("two", new));
    assert_eq!(only_key(&etcd), KEY);
    assert_eq!(watcher.time_to_live(lease).unwrap(), None);
    eventually(LIMIT, "healthy again", || node.is_healthy());
    let states: Vec<_> = states.try_iter().filter(|s| *s != ConnectionState::Suspended).collect();
    assert_eq!(states, [ConnectionState::Lost, ConnectionState::Reconnected]);
    assert!(node.error_count() > 0);
    node.set("three").unwrap();
    assert_eq!(value(&watcher).unwrap(), "three");
}

#[test]
fn an_etcd_that_was_down_with_its_data_is_no_flap_for_watchers() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd.endpoint());
    let node = transient(&client, "one");
    let events = node.lease_events();
    node.start().unwrap();
    let before = seen(&client).unwrap();

    etcd.kill().unwrap();
    expect_expired(&events, before.lease);
    etcd.start_again().unwrap();
    assert_eq!(expect_restored(&events, before.lease), before.lease, "the lease was revived");
    assert_eq!(seen(&client).unwrap(), before);
    // It is renewed, not merely not yet over.
    let end = Instant::now() + TTL * 2;
    while Instant::now() < end {
        assert_eq!(seen(&client).unwrap(), before);
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(events.is_empty(), "{:?}", events.try_recv());
}

#[test]
fn an_etcd_that_was_frozen_for_three_ttls_has_the_key_again() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd.endpoint());
    let node = transient(&client, "one");
    let events = node.lease_events();
    node.start().unwrap();
    node.set("two").unwrap();
    let lease = node.current_lease_id();
    etcd.freeze().unwrap();
    let frozen = Instant::now();
    expect_expired(&events, lease);
    std::thread::sleep((TTL * 3).saturating_sub(frozen.elapsed()));
    etcd.thaw().unwrap();
    // The old lease may have survived on the server, or be revoked while it is revived.
    let thawed = Instant::now();
    eventually(LIMIT, "the key on a lease that is kept", || {
        node.is_healthy() && seen(&client).is_some_and(|kv| kv.lease == node.current_lease_id())
    });
    assert!(thawed.elapsed() < TTL + Duration::from_secs(1), "{:?}", thawed.elapsed());
    assert_eq!(value(&client).unwrap(), "two");
    assert_eq!(only_key(&etcd), KEY);
}

#[test]
fn an_outage_shorter_than_the_ttl_expires_nothing() {
    let etcd = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    let client = connect(&proxy.endpoint());
    let node = TransientKeyValue::builder(&client, KEY, "one")
        .ttl(Duration::from_secs(4))
        .build()
        .unwrap();
    let events = node.lease_events();
    node.start().unwrap();
    let before = seen(&client).unwrap();
    proxy.set(Mode::Blackhole);
    assert!(matches!(events.recv_timeout(LIMIT), Ok(LeaseEvent::Suspended { .. })));
    proxy.set(Mode::Pass);
    assert_eq!(expect_restored(&events, before.lease), before.lease);
    assert_eq!(seen(&client).unwrap(), before);
    assert!(node.is_healthy());
}

#[test]
fn an_etcd_that_lost_its_data_gets_the_key_again() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd.endpoint());
    let node = transient(&client, "one");
    let events = node.lease_events();
    node.start().unwrap();
    node.set("two").unwrap();
    let lease = node.current_lease_id();
    etcd.restart_empty().unwrap();
    expect_expired(&events, lease);
    let new = expect_restored(&events, lease);
    assert_ne!(new, lease);
    let kv = seen(&client).unwrap();
    assert_eq!((kv.value_text().as_str(), kv.lease), ("two", new));
    node.set("three").unwrap();
    assert_eq!(value(&client).unwrap(), "three");
}

#[test]
fn a_deleted_key_and_a_revoked_lease_come_back_again_and_again() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd.endpoint());
    let node = transient(&client, "one");
    let events = node.lease_events();
    node.start().unwrap();
    node.set("two").unwrap();
    for round in 0..2 {
        let lease = node.current_lease_id();
        etcd.ctl(["del", KEY]).unwrap();
        expect_expired(&events, lease);
        assert_eq!(expect_restored(&events, lease), lease, "its lease was alive");
        assert_eq!(value(&client).unwrap(), "two");

        etcd.ctl(["lease", "revoke", &format!("{lease:x}")]).unwrap();
        expect_expired(&events, lease);
        assert_ne!(expect_restored(&events, lease), lease);
        assert_eq!(value(&client).unwrap(), "two", "round {round}");
        assert_eq!(seen(&client).unwrap().lease, node.current_lease_id());
    }
    assert!(etcd.ctl(["lease", "list"]).unwrap().contains("found 1"));
}

#[test]
fn a_stranger_who_writes_over_it_keeps_what_he_wrote() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd.endpoint());
    let node = transient(&client, "one");
    let events = node.lease_events();
    node.start().unwrap();
    let lease = node.current_lease_id();
    etcd.ctl(["put", KEY, "theirs"]).unwrap();
    expect_expired(&events, lease);
    expect_failed(&events);
    assert_eq!(node.connection_state(), ConnectionState::Lost);
    assert_eq!(node.set("two").unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(node.start().unwrap_err().kind(), ErrorKind::NotEstablished);
    eventually(LIMIT, "its lease is given back", || client.time_to_live(lease).unwrap().is_none());
    node.close().unwrap();
    assert_eq!(value(&client).unwrap(), "theirs");
}

#[test]
fn a_key_taken_during_the_outage_is_not_reclaimed() {
    let etcd = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    let (client, other) = (connect(&proxy.endpoint()), connect(&etcd.endpoint()));
    let node = transient(&client, "ours");
    let events = node.lease_events();
    node.start().unwrap();
    let lease = node.current_lease_id();
    proxy.set(Mode::Blackhole);
    expect_expired(&events, lease);
    eventually(LIMIT, "the key is free", || seen(&other).is_none());
    let rival = transient(&other, "theirs");
    rival.start().unwrap();
    proxy.set(Mode::Pass);
    expect_failed(&events);
    let kv = seen(&other).unwrap();
    assert_eq!((kv.value_text().as_str(), kv.lease), ("theirs", rival.current_lease_id()));
    assert_eq!(kv.version, 1);
}

#[test]
fn sets_that_race_heals_lose_no_later_value() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd.endpoint());
    let node = transient(&client, "0");
    node.start().unwrap();
    let rounds = if full() { 200 } else { 12 };
    for round in 1..=rounds {
        let lease = node.current_lease_id();
        std::thread::scope(|scope| {
            let breaker = scope.spawn(|| {
                let done = if round % 2 == 0 {
                    client.revoke_lease(lease)
                } else {
                    client.delete(KEY).map(drop)
                };
                done.unwrap();
            });
            for part in 0..3 {
                node.set(format!("{round}.{part}")).unwrap();
            }
            breaker.join().unwrap();
        });
        let last = format!("{round}.2");
        assert_eq!(node.value().unwrap(), last);
        // It may still be about to be healed; whatever stands then is the last value.
        eventually(LIMIT, "the last value stands", || value(&client) == Some(last.clone()));
    }
    eventually(LIMIT, "healed", || {
        node.is_healthy() && seen(&client).is_some_and(|kv| kv.lease == node.current_lease_id())
    });
    assert_eq!(value(&client).unwrap(), format!("{rounds}.2"));
}

#[test]
fn concurrent_sets_leave_what_etcd_accepted_last() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd.endpoint());
    let node = transient(&client, "start");
    let events = node.lease_events();
    node.start().unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let node = &node;
            scope.spawn(move || {
                for number in 0..25 {
                    node.set(format!("{thread}.{number}")).unwrap();
                }
            });
        }
    });
    let last = value(&client).unwrap();
    assert_eq!(node.value().unwrap(), last);
    assert_eq!(seen(&client).unwrap().version, 101);
    let lease = node.current_lease_id();
    client.revoke_lease(lease).unwrap();
    expect_expired(&events, lease);
    expect_restored(&events, lease);
    assert_eq!(value(&client).unwrap(), last);
}

#[test]
fn a_set_during_the_outage_is_decided_and_never_gives_way_to_the_older() {
    let etcd = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    let client = impatient(&proxy.endpoint(), Duration::from_secs(3));
    let watcher = connect(&etcd.endpoint());
    let node = transient(&client, "one");
    let events = node.lease_events();
    node.start().unwrap();
    let lease = node.current_lease_id();

    // Requests go in, answers do not come out: etcd accepts what nobody hears of.
    proxy.set(Mode::BlackholeDown);
    let begun = Instant::now();
    let error = node.set("two").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutcomeUnknown, "{error}");
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    assert_eq!(node.value().unwrap(), "two");
    expect_expired(&events, lease);
    proxy.set(Mode::Pass);
    expect_restored(&events, lease);
    eventually(LIMIT, "the later value", || value(&watcher).as_deref() == Some("two"));

    // Nothing gets out: what was never sent is not remembered either.
    let lease = node.current_lease_id();
    proxy.set(Mode::Reset);
    let error = node.set("three").unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Unreachable | ErrorKind::OutcomeUnknown), "{error}");
    let kept = if error.is_unreachable() { "two" } else { "three" };
    assert_eq!(node.value().unwrap(), kept);
    expect_expired(&events, lease);
    proxy.set(Mode::Pass);
    expect_restored(&events, lease);
    eventually(LIMIT, "the accepted value", || value(&watcher).as_deref() == Some(kept));
}

#[test]
fn a_lost_answer_to_the_start_is_found_out() {
    let etcd = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    let watcher = connect(&etcd.endpoint());
    // Which of the requests of a start loses its answer is left to chance.
    for round in 0..6 {
        let client = connect(&proxy.endpoint());
        client.wait_ready(LIMIT).unwrap();
        let node = transient(&client, "one");
        let starts = std::thread::scope(|scope| {
            let starter = scope.spawn(|| node.start());
            if round % 2 == 0 {
                std::thread::sleep(Duration::from_micros(300 * round));
            }
            proxy.drop_next_reply();
            starter.join().unwrap()
        });
        starts.unwrap();
        assert_eq!(seen(&watcher).unwrap().lease, node.current_lease_id());
        client.close().unwrap();
        assert!(seen(&watcher).is_none());
    }
}

#[test]
fn an_interrupted_start_and_set_are_undone() {
    let etcd = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    let (client, watcher) = (connect(&proxy.endpoint()), connect(&etcd.endpoint()));
    client.wait_ready(LIMIT).unwrap();
    let node = transient(&client, "one");
    let interrupted = |call: &(dyn Fn() -> etcd_recipes::Result<()> + Sync)| {
        let token = CancelToken::new();
        std::thread::scope(|scope| {
            let calling = scope.spawn(|| token.scope(call));
            std::thread::sleep(Duration::from_millis(200));
            let begun = Instant::now();
            token.cancel();
            let error = calling.join().unwrap().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Interrupted, "{error}");
            assert!(begun.elapsed() < Duration::from_millis(300), "{:?}", begun.elapsed());
            let at_once = token.scope(call).unwrap_err();
            assert_eq!(at_once.kind(), ErrorKind::Interrupted);
        });
    };
    proxy.set(Mode::BlackholeDown);
    interrupted(&|| node.start());
    proxy.set(Mode::Pass);
    eventually(LIMIT, "no lease and no key", || {
        seen(&watcher).is_none() && etcd.ctl(["lease", "list"]).unwrap().contains("found 0")
    });

    node.start().unwrap();
    proxy.set(Mode::BlackholeDown);
    interrupted(&|| node.set("two"));
    assert_eq!(node.value().unwrap(), "one");
    proxy.set(Mode::Pass);
    // Two writes: the interrupted one may have arrived, and it is written over.
    eventually(LIMIT, "the value before", || {
        seen(&watcher).is_some_and(|kv| kv.value_text() == "one" && kv.version >= 2)
    });
    node.set("three").unwrap();
    assert_eq!(value(&watcher).unwrap(), "three");
}

#[test]
fn listeners_hear_in_order_and_may_close() {
    struct Sender(crossbeam_channel::Sender<&'static str>);
    impl LeaseListener for Sender {
        fn on_lease_event(&self, event: &LeaseEvent) {
            let name = match event {
                LeaseEvent::Expired { .. } => "expired",
                LeaseEvent::Restored { .. } => "restored",
                _ => return,
            };
            self.0.send(name).unwrap();
        }
    }
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd.endpoint());
    let node = Arc::new(transient(&client, "one"));
    let (sender, heard) = crossbeam_channel::unbounded();
    node.add_lease_listener_with(Box::new(Sender(sender)));
    let panicking = node.add_lease_listener(|_| panic!("a listener of the test's"));
    let restored = Arc::new(Mutex::new(0));
    let closer = Arc::downgrade(&node);
    node.add_lease_listener({
        let restored = restored.clone();
        move |event| {
            if let LeaseEvent::Restored { .. } = event {
                *restored.lock().unwrap() += 1;
                if *restored.lock().unwrap() == 2 {
                    closer.upgrade().unwrap().close().unwrap();
                }
            }
        }
    });
    node.start().unwrap();
    for round in 0..2 {
        client.delete(KEY).unwrap();
        assert_eq!(heard.recv_timeout(LIMIT).unwrap(), "expired");
        assert_eq!(heard.recv_timeout(LIMIT).unwrap(), "restored");
        if round == 0 {
            eventually(LIMIT, "the panic is recorded", || {
                node.errors().iter().any(|error| error.kind() == ErrorKind::ListenerPanicked)
            });
            assert!(node.remove_lease_listener(panicking));
        }
    }
    eventually(LIMIT, "closed by the listener", || seen(&client).is_none());
    assert_eq!(node.start().unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
fn a_frozen_etcd_delays_no_end() {
    let etcd = EtcdServer::start().unwrap();
    let client = impatient(&etcd.endpoint(), Duration::from_secs(2));
    let node = transient(&client, "one");
    node.start().unwrap();
    etcd.freeze().unwrap();

    let begun = Instant::now();
    let late = TransientKeyValue::new(&client, "/late", "x").unwrap();
    assert_eq!(late.start().unwrap_err().kind(), ErrorKind::Unreachable);
    let took = begun.elapsed();
    assert!(took > Duration::from_millis(1_900) && took < Duration::from_secs(3), "{took:?}");

    let begun = Instant::now();
    assert_eq!(node.close().unwrap_err().kind(), ErrorKind::CleanupUnconfirmed);
    assert!(begun.elapsed() < Duration::from_millis(2_500), "{:?}", begun.elapsed());
    drop(node);
    etcd.thaw().unwrap();
    let watcher = connect(&etcd.endpoint());
    eventually(LIMIT, "the TTL ends it", || seen(&watcher).is_none());
    assert!(watcher.get("/late").unwrap().is_none());
}

fn full() -> bool {
    std::env::var_os("ETCD_RECIPES_FULL").is_some_and(|value| value == "1")
}
