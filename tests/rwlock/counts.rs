//! What a read/write lock costs, counted by etcd itself.
//!
//! A long TTL keeps the keeper's renewals and reads out of the windows that are measured.

use std::collections::BTreeMap;
use std::thread;
use std::time::Duration;

use etcd_recipes::testing::{EtcdServer, eventually};
use etcd_recipes::{OwnedRwLockWriteGuard, RwLock};

use super::support::*;
use super::{Held, Side, Waiter, wait_line, with_ttl};

fn of(calls: &[(&str, u64)]) -> BTreeMap<String, u64> {
    calls.iter().map(|(method, count)| ((*method).to_owned(), *count)).collect()
}

/// A lock whose session lives and has settled: its first renewal is proven.
fn warm(etcd: &EtcdServer, path: &str) -> RwLock {
    let lock = with_ttl(&connect(etcd), path, Duration::from_secs(60));
    let reads = || etcd.unary_calls().unwrap().get("Range").copied().unwrap_or_default();
    let before = reads();
    assert!(lock.write().unwrap().unlock());
    eventually(LIMIT, "the first renewal is proven", || reads() > before);
    lock
}

#[test]
fn an_uncontended_lock_and_unlock_are_two_calls_on_either_side() {
    let etcd = EtcdServer::start().unwrap();
    let lock = warm(&etcd, "/locks/a");
    let calls = calls_during(&etcd, || assert!(lock.read().unwrap().unlock()));
    assert_eq!(calls, of(&[("Txn", 2)]));
    let calls = calls_during(&etcd, || assert!(lock.write().unwrap().unlock()));
    assert_eq!(calls, of(&[("Txn", 2)]));
    let calls = calls_during(&etcd, || {
        for _ in 0..20 {
            assert!(lock.try_read().unwrap().unwrap().unlock());
            assert!(lock.try_write().unwrap().unwrap().unlock());
            assert!(lock.read_owned().unwrap().unlock());
            assert!(lock.write_owned().unwrap().unlock());
        }
    });
    assert_eq!(calls, of(&[("Txn", 160)]));
    // And one more for the rewriting of the key.
    let calls = calls_during(&etcd, || {
        let write = lock.write_owned().unwrap();
        assert!(OwnedRwLockWriteGuard::downgrade(write).unwrap().unlock());
    });
    assert_eq!(calls, of(&[("Txn", 3)]));
}

#[test]
fn a_reader_beside_ten_readers_is_two_calls() {
    let etcd = EtcdServer::start().unwrap();
    let (lock, newcomer) = (warm(&etcd, "/locks/a"), warm(&etcd, "/locks/a"));
    let readers: Vec<_> = (0..10).map(|_| lock.read_owned().unwrap()).collect();
    for reader in [&newcomer, &lock] {
        let calls = calls_during(&etcd, || assert!(reader.read_owned().unwrap().unlock()));
        assert_eq!(calls, of(&[("Txn", 2)]));
        // A try looks before it joins.
        let calls =
            calls_during(&etcd, || assert!(reader.try_read_owned().unwrap().unwrap().unlock()));
        assert_eq!(calls, of(&[("Txn", 3)]));
    }
    let calls = calls_during(&etcd, || assert!(newcomer.try_write().unwrap().is_none()));
    assert_eq!(calls, of(&[("Txn", 1)]));
    assert!(readers.into_iter().all(|guard| guard.unlock()));
}

/// Beyond what the answer shows, the mirror of the queue says the rest, and it is read once.
#[test]
fn a_reader_beside_fifty_costs_no_more_once_its_client_knows_the_queue() {
    let etcd = EtcdServer::start().unwrap();
    let (lock, newcomer) = (warm(&etcd, "/locks/a"), warm(&etcd, "/locks/a"));
    let readers: Vec<_> = (0..50).map(|_| lock.read_owned().unwrap()).collect();
    settle(&etcd);
    let calls = calls_during(&etcd, || assert!(newcomer.read_owned().unwrap().unlock()));
    println!("a newcomer beside fifty: {calls:?}");
    assert!(calls["Range"] <= 5 && calls["Txn"] == 2, "{calls:?}");
    settle(&etcd);
    let calls = calls_during(&etcd, || assert!(newcomer.read_owned().unwrap().unlock()));
    assert_eq!(calls, of(&[("Txn", 2)]));
    assert!(readers.into_iter().all(|guard| guard.unlock()));
}

/// What the release of the first costs, the one that it lets in included, with so many waiting.
fn release_with(waiting: usize, first: Side, next: Side) -> BTreeMap<String, u64> {
    let etcd = EtcdServer::start().unwrap();
    let holder = warm(&etcd, "/locks/a");
    let clients: Vec<_> = (0..5).map(|_| warm(&etcd, "/locks/a")).collect();
    let held = Held::take(&holder, first).unwrap();
    let mut waiters = Vec::new();
    if waiting > 0 {
        waiters.push(Waiter::queue(&clients[0], next));
        // One of the other kind bounds who is let in, and behind it stand both.
        let sides = [if next == Side::R { Side::W } else { Side::R }, Side::R, Side::W, Side::R];
        let second = Waiter::start(&clients[1], sides[0]);
        wait_line(&holder, 3);
        waiters.push(second);
        for at in 2..waiting {
            waiters.push(Waiter::start(&clients[at % 5], sides[at % 4]));
        }
    }
    wait_line(&holder, 1 + waiting);
    settle(&etcd);
    let mut entered = None;
    let calls = calls_during(&etcd, || {
        assert!(held.unlock());
        entered = waiters.first().map(Waiter::enters);
        thread::sleep(ms(300));
    });
    assert!(waiters.iter().skip(1).all(Waiter::is_waiting), "somebody else was let in");
    drop(entered);
    waiters.drain(..waiting.min(1));
    for _ in 1..waiting {
        let at = eventually(LIMIT, "the next", || {
            waiters.iter().position(|waiter| !waiter.is_waiting())
        });
        assert!(waiters.remove(at).enters().unlock());
    }
    calls
}

#[test]
fn a_release_costs_the_same_however_many_wait() {
    for (first, next) in [(Side::W, Side::R), (Side::W, Side::W), (Side::R, Side::W)] {
        for waiting in [0, 5, 50] {
            let calls = release_with(waiting, first, next);
            println!("{first:?} goes, {next:?} is next, {waiting} wait: {calls:?}");
            assert_eq!(calls, of(&[("Txn", 1)]), "{first:?} {next:?} {waiting}");
        }
    }
}
