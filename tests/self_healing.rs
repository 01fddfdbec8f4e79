//! A lease whose keys the user's own hook creates, by the plainest compare-and-set.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use etcd_recipes::testing::{EtcdServer, FaultProxy, Mode, eventually};
use etcd_recipes::{Client, Compare, LeaseEvent, Op, SelfHealingKeepAlive, Txn};

const TTL: Duration = Duration::from_secs(2);
const LIMIT: Duration = Duration::from_secs(15);
const KEY: &str = "/nodes/7";

fn story(events: &Mutex<Vec<LeaseEvent>>) -> Vec<&'static str> {
    let name = |event: &LeaseEvent| match event {
        LeaseEvent::Suspended { .. } => "Suspended",
        LeaseEvent::Expired { .. } => "Expired",
        LeaseEvent::Restored { .. } => "Restored",
        LeaseEvent::Failed { .. } => "Failed",
        _ => "?",
    };
    events.lock().unwrap().iter().map(name).collect()
}

/// The hook's write of a heal is applied and its answer is lost. The next try must not find the
/// key of the one before and take it for a rival's.
#[test]
fn a_heal_whose_answer_was_lost_does_not_stand_in_its_own_way() {
    let etcd = EtcdServer::start().unwrap();
    let proxy = Arc::new(FaultProxy::start(etcd.endpoint()).unwrap());
    let client = Client::connect([proxy.endpoint()]).unwrap();
    let direct = Client::connect([etcd.endpoint()]).unwrap();
    let events = Arc::new(Mutex::new(Vec::new()));
    let heard = events.clone();
    let calls = Arc::new(AtomicUsize::new(0));
    let keep = SelfHealingKeepAlive::builder(&client, TTL)
        .listener(move |event| heard.lock().unwrap().push(event.clone()))
        .start({
            let (client, proxy, calls) = (client.clone(), proxy.clone(), calls.clone());
            move |lease| {
                if calls.fetch_add(1, Ordering::SeqCst) == 1 {
                    proxy.drop_next_reply();
                }
                let put = Op::put_with_lease(KEY, "here", lease.id());
                Ok(client.txn(Txn::new().when([Compare::absent(KEY)]).and_then([put]))?.succeeded)
            }
        })
        .unwrap();
    direct.revoke_lease(keep.current_lease_id()).unwrap();
    eventually(LIMIT, "healed", || story(&events).ends_with(&["Restored"]));
    assert_eq!(story(&events), ["Expired", "Restored"]);
    assert_eq!(calls.load(Ordering::SeqCst), 3, "at first, in vain, and once more");
    assert!(keep.is_healthy());
    let key = direct.get(KEY).unwrap().unwrap();
    assert_eq!((key.value_text().as_str(), key.lease), ("here", keep.current_lease_id()));
    eventually(LIMIT, "the lease of the vain try is gone", || {
        etcd.ctl(["lease", "list"]).unwrap().contains("found 1")
    });
    keep.close().unwrap();
    assert!(direct.get(KEY).unwrap().is_none());
}

/// The outage ends just after the local deadline, while etcd still has the lease for a moment:
/// alive, or expired and not yet revoked. Either way our own key is no rival's.
#[test]
fn an_outage_that_ends_at_the_deadline_is_healed() {
    let etcd = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    let client = Client::connect([proxy.endpoint()]).unwrap();
    let direct = Client::connect([etcd.endpoint()]).unwrap();
    let events = Arc::new(Mutex::new(Vec::new()));
    let heard = events.clone();
    let keep = SelfHealingKeepAlive::builder(&client, TTL)
        .listener(move |event| heard.lock().unwrap().push(event.clone()))
        .start({
            let client = client.clone();
            move |lease| {
                let put = Op::put_with_lease(KEY, "here", lease.id());
                Ok(client.txn(Txn::new().when([Compare::absent(KEY)]).and_then([put]))?.succeeded)
            }
        })
        .unwrap();
    for late in [0, 100, 200, 300, 400, 500] {
        let told = events.lock().unwrap().len();
        proxy.set(Mode::Blackhole);
        eventually(LIMIT, "expired", || story(&events)[told..].contains(&"Expired"));
        std::thread::sleep(Duration::from_millis(late));
        proxy.set(Mode::Pass);
        eventually(LIMIT, "healed", || {
            story(&events).ends_with(&["Restored"]) || story(&events).ends_with(&["Failed"])
        });
        assert_eq!(story(&events)[told..].last(), Some(&"Restored"), "{late} ms late");
        assert!(keep.is_healthy());
        let key = direct.get(KEY).unwrap().unwrap();
        assert_eq!(key.lease, keep.current_lease_id());
    }
}

/// Somebody else's key is left alone, and the hook's owner is told once.
#[test]
fn a_key_of_somebody_else_ends_the_healing() {
    let etcd = EtcdServer::start().unwrap();
    let client = Client::connect([etcd.endpoint()]).unwrap();
    let rival = Client::connect([etcd.endpoint()]).unwrap();
    let events = Arc::new(Mutex::new(Vec::new()));
    let heard = events.clone();
    let first = AtomicUsize::new(0);
    let keep = SelfHealingKeepAlive::builder(&client, TTL)
        .listener(move |event| heard.lock().unwrap().push(event.clone()))
        .start({
            let client = client.clone();
            move |lease| {
                if first.fetch_add(1, Ordering::SeqCst) == 1 {
                    rival.put(KEY, "theirs")?;
                }
                let put = Op::put_with_lease(KEY, "ours", lease.id());
                Ok(client.txn(Txn::new().when([Compare::absent(KEY)]).and_then([put]))?.succeeded)
            }
        })
        .unwrap();
    client.revoke_lease(keep.current_lease_id()).unwrap();
    eventually(LIMIT, "healing ends", || story(&events).ends_with(&["Failed"]));
    assert_eq!(story(&events), ["Expired", "Failed"]);
    assert!(!keep.is_healthy());
    assert_eq!(client.get(KEY).unwrap().unwrap().value_text(), "theirs");
    eventually(LIMIT, "no lease of ours is left", || {
        etcd.ctl(["lease", "list"]).unwrap().contains("found 0")
    });
}
