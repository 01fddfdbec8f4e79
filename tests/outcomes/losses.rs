//! A loss, in its order: flag, token, state and error, listeners, and the key last.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use etcd_recipes::testing::{EtcdServer, FaultProxy, Mode, TestClock, eventually};
use etcd_recipes::{
    CancelToken, Client, ConnectionState, FencedTxn, LossReason, Mutex, Op, Recipe, Txn,
};

use crate::stage::plain;

const LIMIT: Duration = Duration::from_secs(20);

/// How long a request takes to etcd, so that the deletion of the key is late enough to be seen.
const WAY: Duration = Duration::from_secs(1);

#[test]
fn a_passed_deadline_is_told_in_order() {
    told_in_order(LossReason::DeadlinePassed, |clock, _| clock.jump(Duration::from_secs(60)));
}

#[test]
fn a_close_is_told_in_order() {
    told_in_order(LossReason::Closed, |_, mutex| mutex.close().unwrap());
}

fn told_in_order(reason: LossReason, lose: impl FnOnce(&TestClock, &Mutex)) {
    let etcd = EtcdServer::start().unwrap();
    let witness = Client::connect([etcd.endpoint()]).unwrap();
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    let clock = TestClock::new();
    let client = Client::builder().endpoints([proxy.endpoint()]).clock(&clock).connect().unwrap();
    let mutex = Mutex::new(&client, "/locks/a").unwrap();
    let guard = mutex.lock().unwrap();
    let hold = guard.hold();
    let token = hold.cancel_token().clone();
    let key = guard.lock_key();
    let order: Arc<parking_lot::Mutex<Vec<&'static str>>> = Arc::default();

    // Each step looks whether the ones before it are done. A listener that panics is recorded as
    // an error, which the end would see.
    mutex.add_connection_state_listener({
        let (order, hold, token) = (order.clone(), hold.clone(), token.clone());
        move |state| {
            if *state == ConnectionState::Lost {
                let done = token.is_cancelled() && !hold.is_held();
                order.lock().push(if done { "state" } else { "state before the token" });
            }
        }
    });
    mutex.add_error_listener({
        let (order, token) = (order.clone(), token.clone());
        move |_| order.lock().push(if token.is_cancelled() { "error" } else { "error too early" })
    });
    mutex.add_loss_listener({
        let (order, hold, token) = (order.clone(), hold.clone(), token.clone());
        let (witness, key, recipe) = (witness.clone(), key.clone(), mutex.clone());
        move |loss| {
            assert_eq!(loss.reason, reason);
            let mut done = token.is_cancelled() && !hold.is_held();
            done &= recipe.connection_state() == ConnectionState::Lost;
            done &= recipe.errors().iter().any(etcd_recipes::Error::is_lost);
            order.lock().push(if done { "loss" } else { "loss too early" });
            if witness.get(key.as_str()).unwrap().is_some() {
                order.lock().push("the key still stands");
            }
        }
    });
    let over = AtomicBool::new(false);
    proxy.set(Mode::Delay { up: WAY, down: Duration::ZERO });
    thread::scope(|scope| {
        // Whoever sees a later step sees the earlier ones, at any instant.
        let watching = scope.spawn(|| {
            while !over.load(Ordering::Acquire) {
                let error = mutex.error_count() > 0;
                let lost = mutex.connection_state() == ConnectionState::Lost;
                let cancelled = token.is_cancelled();
                let held = hold.is_held();
                assert!(!error || cancelled, "an error before the token");
                assert!(!lost || cancelled, "the state before the token");
                assert!(!cancelled || !held, "the token before the flag");
                thread::yield_now();
            }
        });
        lose(&clock, &mutex);
        eventually(LIMIT, "the token", || token.is_cancelled());
        eventually(LIMIT, "the key is deleted", || witness.get(key.as_str()).unwrap().is_none());
        over.store(true, Ordering::Release);
        watching.join().unwrap();
    });
    let told = order.lock().clone();
    assert_eq!(told, ["state", "error", "loss", "the key still stands"]);
    assert!(mutex.errors().iter().all(etcd_recipes::Error::is_lost), "{:?}", mutex.errors());
    assert_eq!(hold.loss().map(|loss| loss.reason), Some(reason));
    assert!(!guard.unlock());
}

#[test]
fn a_lost_hold_says_so_before_the_scope_is_looked_at() {
    let etcd = EtcdServer::start().unwrap();
    let client = Client::connect([etcd.endpoint()]).unwrap();
    let mutex = Mutex::new(&client, "/locks/a").unwrap();
    let guard = mutex.lock().unwrap();
    etcd.ctl(["del", guard.lock_key().as_str()]).unwrap();
    assert!(!guard.verify().unwrap());
    let scope = CancelToken::new();
    scope.cancel();
    scope.scope(|| {
        assert_eq!(plain(mutex.is_locked()), "Err(Interrupted)", "the scope is cancelled");
        assert_eq!(plain(guard.put("/data", "late")), "Ok(false)");
        let write = Txn::new().and_then([Op::put("/data", "late")]);
        assert_eq!(guard.txn(write).unwrap(), FencedTxn::Fenced);
        assert_eq!(plain(guard.verify()), "Ok(false)");
        assert_eq!(plain(mutex.lock().map(drop)), "Err(Lost)");
        assert!(!guard.unlock());
    });
    assert!(client.get("/data").unwrap().is_none());
}
