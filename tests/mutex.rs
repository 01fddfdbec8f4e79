//! The mutex on good days: who gets in, in which order, and what it says about itself.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, SystemTime};

use etcd_recipes::testing::{EtcdServer, eventually};
use etcd_recipes::{
    Client, Compare, CompareOp, ConnectionState, ErrorKind, FencedTxn, Mutex, Op, OpResult, Recipe,
    Txn,
};
use support::*;

#[test]
fn a_lock_is_held_verified_and_released() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let mutex = Mutex::new(&client, "/locks/a").unwrap();
    let guard = mutex.lock().unwrap();
    assert!(guard.is_held() && guard.verify().unwrap());
    assert!(guard.remaining() > Duration::from_secs(8));
    assert!(guard.remaining() <= Duration::from_secs(9), "T - margin is the most there can be");
    assert!(!guard.cancel_token().is_cancelled());
    assert!(guard.loss().is_none());
    assert_eq!(keys(&etcd, "/locks/a/"), [guard.lock_key()]);
    assert!(mutex.is_locked().unwrap() && mutex.is_held_by_current_thread());
    let view = guard.hold();
    assert!(view.is_held() && view.token() == guard.fencing_token());
    assert!(guard.unlock());
    assert!(!view.is_held() && view.remaining() == Duration::ZERO);
    assert!(!view.cancel_token().is_cancelled(), "a release is no loss");
    assert!(!mutex.is_locked().unwrap() && !mutex.is_held_by_current_thread());
    assert_eq!(mutex.connection_state(), ConnectionState::Connected);
    assert!(mutex.is_healthy() && mutex.ping() && mutex.errors().is_empty());
    assert!(Mutex::unlock(mutex.lock().unwrap()));
}

#[test]
fn a_try_says_none_when_busy_and_keeps_to_its_limit() {
    let etcd = EtcdServer::start().unwrap();
    let (ours, theirs) = (connect(&etcd), connect(&etcd));
    let holder = short(&ours, "/locks/a");
    let rival = short(&theirs, "/locks/a");
    let guard = holder.lock().unwrap();
    assert!(rival.try_lock().unwrap().is_none());
    assert!(rival.try_lock_owned().unwrap().is_none());
    for limit in [ms(300), ms(700)] {
        let (tried, took) = timed(|| rival.try_lock_for(limit).unwrap().is_none());
        assert!(tried);
        assert!(took >= limit && took < limit + ms(200), "{took:?} for {limit:?}");
    }
    assert!(rival.try_lock_owned_for(ms(300)).unwrap().is_none());
    assert_eq!(keys(&etcd, "/locks/a/"), [guard.lock_key()], "tries leave nothing behind");
    assert!(guard.unlock());
    assert!(rival.try_lock().unwrap().unwrap().unlock());
    assert!(rival.try_lock_for(ms(500)).unwrap().unwrap().unlock());
    assert!(rival.try_lock_owned_for(ms(500)).unwrap().unwrap().unlock());
}

#[test]
fn a_waiting_try_gets_in_when_the_holder_leaves() {
    let etcd = EtcdServer::start().unwrap();
    let (ours, theirs) = (connect(&etcd), connect(&etcd));
    let (holder, rival) = (short(&ours, "/locks/a"), short(&theirs, "/locks/a"));
    let guard = holder.lock().unwrap();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| rival.try_lock_for(LIMIT).unwrap().unwrap().unlock());
        wait_contenders(&holder, 2);
        assert!(guard.unlock());
        assert!(waiter.join().unwrap());
    });
}

#[test]
fn an_owned_guard_goes_to_another_thread_and_is_not_reentrant() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let mutex = short(&client, "/locks/a");
    let guard = mutex.lock_owned().unwrap();
    assert!(mutex.try_lock_owned().unwrap().is_none());
    assert!(mutex.try_lock().unwrap().is_none());
    assert!(!mutex.is_held_by_current_thread());
    assert_eq!(mutex.hold_count(), 0);
    drop(mutex);
    drop(client);
    let released = thread::spawn(move || guard.verify().unwrap() && guard.unlock());
    assert!(released.join().unwrap());
    assert!(keys(&etcd, "/locks/").is_empty());
}

#[test]
fn reentries_share_one_hold_and_the_last_unlock_releases() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let mutex = short(&client, "/locks/a");
    let clone = mutex.clone();
    let outer = mutex.lock().unwrap();
    let middle = clone.try_lock().unwrap().unwrap();
    let inner = mutex.try_lock_for(ms(100)).unwrap().unwrap();
    assert_eq!((mutex.hold_count(), clone.hold_count()), (3, 3));
    assert_eq!(outer.fencing_token(), inner.fencing_token());
    assert_eq!(keys(&etcd, "/locks/a/").len(), 1);
    let other = Mutex::new(&client, "/locks/a").unwrap();
    assert!(other.try_lock().unwrap().is_none(), "another mutex of the path is a stranger");
    // Out of order: what counts is which guard is the last.
    drop(outer);
    assert_eq!(mutex.hold_count(), 2);
    assert!(inner.unlock(), "the hold still stands");
    assert!(middle.is_held() && middle.verify().unwrap());
    assert_eq!(mutex.hold_count(), 1);
    assert!(middle.unlock());
    assert_eq!(mutex.hold_count(), 0);
    assert!(keys(&etcd, "/locks/a/").is_empty());
}

#[test]
fn another_thread_does_not_reenter() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let mutex = short(&client, "/locks/a");
    let guard = mutex.lock().unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            assert!(mutex.try_lock().unwrap().is_none());
            assert_eq!(mutex.hold_count(), 0);
            assert!(!mutex.is_held_by_current_thread());
            assert!(mutex.is_locked().unwrap());
            assert!(guard.is_held(), "a guard may be looked at from elsewhere");
        });
    });
    assert!(guard.unlock());
}

#[test]
fn a_section_returns_its_value_and_a_panic_in_it_releases() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let mutex = short(&client, "/locks/a");
    let token = mutex.with_lock(|guard| guard.fencing_token()).unwrap();
    assert!(token > 0 && !mutex.is_locked().unwrap());
    let nested = mutex.with_lock(|_| mutex.with_lock(|guard| guard.is_held())).unwrap();
    assert!(nested.unwrap());
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        mutex.with_lock(|_| panic!("in the section")).unwrap();
    }));
    assert!(panicked.is_err());
    assert!(!mutex.is_locked().unwrap());
    assert_eq!(mutex.hold_count(), 0);
}

#[test]
fn contenders_are_listed_first_to_last_with_who_and_where() {
    let etcd = EtcdServer::start().unwrap();
    let holder = Client::builder().endpoints([etcd.endpoint()]).client_id("one").connect().unwrap();
    let waiter = connect(&etcd);
    let first = short(&holder, "/locks/a");
    let second = builder(&waiter, "/locks/a").client_id("two").build().unwrap();
    assert!(first.contenders().unwrap().is_empty());
    let guard = first.lock().unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| second.lock().unwrap().unlock());
        wait_contenders(&first, 2);
        // A program that is none of ours: it is shown by its key.
        let mut foreign = etcd.spawn_ctl(["lock", "/locks/a"]).unwrap();
        wait_contenders(&first, 3);
        let all = second.contenders().unwrap();
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        for (position, contender) in all.iter().enumerate() {
            assert_eq!(contender.position, position);
            assert_eq!(contender.is_holder, position == 0);
        }
        for (contender, id) in all.iter().zip(["one", "two"]) {
            assert_eq!(contender.client_id, id);
            assert_eq!(contender.host.as_deref(), Some(host.trim()));
            assert_eq!(contender.pid, Some(std::process::id()));
            assert!(contender.since.unwrap() <= SystemTime::now());
        }
        assert_eq!(all[0].token, guard.fencing_token());
        assert!(all[0].token < all[1].token && all[1].token < all[2].token);
        assert_eq!((&all[2].host, all[2].pid, all[2].since), (&None, None, None));
        assert!(all[2].client_id.starts_with("/locks/a/"), "{}", all[2].client_id);
        foreign.kill().unwrap();
        assert!(guard.unlock());
        assert!(waiting.join().unwrap());
    });
}

#[test]
fn threads_and_clients_exclude_each_other() {
    let etcd = EtcdServer::start().unwrap();
    let inside = AtomicUsize::new(0);
    let last_token = parking_lot::Mutex::new(0);
    thread::scope(|scope| {
        for _ in 0..2 {
            let client = connect(&etcd);
            for _ in 0..4 {
                let (client, inside, last_token) = (client.clone(), &inside, &last_token);
                scope.spawn(move || {
                    let mutex = short(&client, "/locks/a");
                    for round in 0..40 {
                        let guard = match round % 4 {
                            0 => mutex.try_lock_for(LIMIT).unwrap().unwrap(),
                            _ => mutex.lock().unwrap(),
                        };
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                        let before =
                            std::mem::replace(&mut *last_token.lock(), guard.fencing_token());
                        assert!(before < guard.fencing_token(), "the token grows");
                        inside.fetch_sub(1, Ordering::SeqCst);
                        assert!(guard.unlock());
                    }
                });
            }
        }
    });
    assert!(keys(&etcd, "/locks/").is_empty());
}

#[test]
fn waiters_are_served_in_the_order_they_came() {
    let etcd = EtcdServer::start().unwrap();
    let clients = [connect(&etcd), connect(&etcd)];
    let mutexes: Vec<Mutex> =
        (0..6).map(|number| short(&clients[number % 2], "/locks/a")).collect();
    let door = short(&clients[0], "/locks/a");
    let guard = door.lock().unwrap();
    let order = parking_lot::Mutex::new(Vec::new());
    thread::scope(|scope| {
        for (number, mutex) in mutexes.iter().enumerate() {
            let order = &order;
            scope.spawn(move || {
                let guard = mutex.lock().unwrap();
                order.lock().push(number);
                assert!(guard.unlock());
            });
            wait_contenders(&door, number + 2);
        }
        assert!(guard.unlock());
    });
    assert_eq!(*order.lock(), [0, 1, 2, 3, 4, 5]);
}

#[test]
fn paths_that_begin_alike_do_not_contend() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    for planted in ["job", "job2", "job-config", "job2/x", "job/x/y", "job/x/"] {
        etcd.ctl(["put", planted, "somebody's"]).unwrap();
    }
    let job = short(&client, "job");
    let (guard, took) = timed(|| job.lock().unwrap());
    assert!(took < Duration::from_secs(2), "{took:?}");
    assert_eq!(job.contenders().unwrap().len(), 1, "deeper keys are no contenders");
    let longer = short(&client, "job/x");
    // `job/x/y` is a direct child of `job/x`, without a lease: this one is blocked, and says so.
    let error = longer.lock().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ForeignKey);
    assert!(guard.unlock());
    let sibling = short(&client, "job3");
    assert!(sibling.try_lock().unwrap().unwrap().unlock());
    assert!(job.try_lock().unwrap().unwrap().unlock(), "a try passes deeper keys, too");
    assert!(job.try_lock_for(ms(500)).unwrap().unwrap().unlock());
}

#[test]
fn deeper_keys_are_skipped_by_waiters_too() {
    let etcd = EtcdServer::start().unwrap();
    let (ours, theirs) = (connect(&etcd), connect(&etcd));
    let (holder, rival) = (short(&ours, "job"), short(&theirs, "job"));
    etcd.ctl(["put", "job/a/b", "ahead"]).unwrap();
    let guard = holder.lock().unwrap();
    etcd.ctl(["put", "job/a/c", "between"]).unwrap();
    assert!(rival.try_lock().unwrap().is_none());
    thread::scope(|scope| {
        let waiter = scope.spawn(|| rival.lock().unwrap().unlock());
        wait_contenders(&holder, 2);
        assert!(guard.unlock());
        let (released, took) = timed(|| waiter.join().unwrap());
        assert!(released && took < Duration::from_secs(2), "{took:?}");
    });
    assert_eq!(keys(&etcd, "job/"), ["job/a/b", "job/a/c"]);
}

#[test]
fn a_key_without_a_lease_that_would_block_for_ever_is_named() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    etcd.ctl(["put", "job/x", "forgotten"]).unwrap();
    let mutex = short(&client, "job");
    for error in [mutex.lock().unwrap_err(), mutex.try_lock_for(LIMIT).unwrap_err()] {
        assert_eq!(error.kind(), ErrorKind::ForeignKey, "{error}");
        assert_eq!(error.key(), Some("job/x"));
        assert!(error.to_string().contains("`job/x`"), "{error}");
    }
    assert!(mutex.try_lock().unwrap().is_none(), "a try does not wait, so it need not know why");
    assert_eq!(keys(&etcd, "job/"), ["job/x"], "the refused left nothing behind");
    etcd.ctl(["del", "job/x"]).unwrap();
    assert!(mutex.lock().unwrap().unlock());
}

#[test]
fn a_namespace_is_put_before_keys_and_kept_out_of_sight() {
    let etcd = EtcdServer::start().unwrap();
    let inside =
        Client::builder().endpoints([etcd.endpoint()]).namespace("/prod").connect().unwrap();
    let outside = connect(&etcd);
    let logical = short(&inside, "/locks/a");
    let physical = short(&outside, "/prod/locks/a");
    let guard = logical.lock().unwrap();
    assert!(guard.lock_key().starts_with("/locks/a/"), "{}", guard.lock_key());
    assert_eq!(keys(&etcd, ""), [format!("/prod{}", guard.lock_key())]);
    assert_eq!(logical.path(), "/locks/a");
    assert!(physical.try_lock().unwrap().is_none(), "both meet on one key");
    assert_eq!(physical.contenders().unwrap(), logical.contenders().unwrap());
    assert!(guard.put("/data", "1").unwrap());
    assert_eq!(outside.get("/prod/data").unwrap().unwrap().value, b"1");
    thread::scope(|scope| {
        let waiter = scope.spawn(|| physical.lock().unwrap().unlock());
        wait_contenders(&logical, 2);
        let _foreign = etcd.spawn_ctl(["lock", "/prod/locks/a"]).unwrap();
        wait_contenders(&logical, 3);
        let foreign = &logical.contenders().unwrap()[2].client_id;
        assert!(foreign.starts_with("/locks/a/"), "{foreign}");
        assert!(guard.unlock());
        assert!(waiter.join().unwrap());
    });
    etcd.ctl(["put", "/prod/locks/b/x", "forgotten"]).unwrap();
    let error = short(&inside, "/locks/b").lock().unwrap_err();
    assert_eq!(error.key(), Some("/locks/b/x"));
}

#[test]
fn guarded_writes_are_applied_while_the_hold_stands() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let mutex = short(&client, "/locks/a");
    let guard = mutex.lock().unwrap();
    assert!(guard.put("/data", "1").unwrap());
    let txn = |expected: &str| {
        Txn::new()
            .when([Compare::value("/data", CompareOp::Equal, expected)])
            .and_then([Op::put("/data", "2"), Op::get("/data")])
            .or_else([Op::get("/data")])
    };
    let FencedTxn::Applied(result) = guard.txn(txn("1")).unwrap() else { panic!("not applied") };
    assert!(result.succeeded && result.revision > guard.fencing_token());
    assert_eq!(result.results.len(), 2);
    let FencedTxn::CompareFailed(result) = guard.txn(txn("1")).unwrap() else {
        panic!("the compare held")
    };
    let [OpResult::Get(found)] = &result.results[..] else { panic!("{result:?}") };
    assert_eq!(found[0].value, b"2");
    assert!(guard.is_held());
    assert!(guard.unlock());
}

#[test]
fn many_mutexes_of_one_client_share_one_lease() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let mutexes: Vec<Mutex> =
        (0..10).map(|number| short(&client, &format!("/locks/{number}"))).collect();
    let guards: Vec<_> = mutexes.iter().map(|mutex| mutex.lock().unwrap()).collect();
    assert_eq!(leases(&etcd), 1);
    let lease = lease_of(&guards[0].lock_key());
    assert!(guards.iter().all(|guard| lease_of(&guard.lock_key()) == lease));
    assert!(guards.into_iter().all(|guard| guard.unlock()));
    // It is given back one TTL after the last hold.
    eventually(LIMIT, "the idle lease is revoked", || leases(&etcd) == 0);
    assert!(mutexes[0].lock().unwrap().unlock());
}
