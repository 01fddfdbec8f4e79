//! What locks and semaphores cost, counted by etcd itself.
//!
//! A long TTL keeps the keeper's renewals and reads out of the windows that are measured.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::collections::BTreeMap;
use std::thread;
use std::time::Duration;

use etcd_recipes::testing::{EtcdServer, eventually};
use etcd_recipes::{Client, Mutex, Permit, RwLock, Semaphore};
use support::*;

/// Its renewals come every 20 s.
const LONG: Duration = Duration::from_secs(60);

fn long(client: &Client, path: &str) -> Mutex {
    Mutex::builder(client, path).ttl(LONG).build().unwrap()
}

/// How many reads there were: the keeper proves its first renewal with one.
fn reads(etcd: &EtcdServer) -> u64 {
    etcd.unary_calls().unwrap().get("Range").copied().unwrap_or_default()
}

/// A client whose session lives and has settled: its first renewal is proven.
fn warm(etcd: &EtcdServer, path: &str) -> Mutex {
    let mutex = long(&connect(etcd), path);
    let before = reads(etcd);
    assert!(mutex.lock().unwrap().unlock());
    eventually(LIMIT, "the first renewal is proven", || reads(etcd) > before);
    mutex
}

fn of(calls: &[(&str, u64)]) -> BTreeMap<String, u64> {
    calls.iter().map(|(method, count)| ((*method).to_owned(), *count)).collect()
}

#[test]
fn an_uncontended_lock_and_unlock_are_two_calls() {
    let etcd = EtcdServer::start().unwrap();
    let mutex = warm(&etcd, "/locks/a");
    let calls = calls_during(&etcd, || assert!(mutex.lock().unwrap().unlock()));
    assert_eq!(calls, of(&[("Txn", 2)]));
    let calls = calls_during(&etcd, || {
        for _ in 0..50 {
            assert!(mutex.try_lock().unwrap().unwrap().unlock());
            assert!(mutex.lock_owned().unwrap().unlock());
        }
    });
    assert_eq!(calls, of(&[("Txn", 200)]));
}

#[test]
fn the_first_lock_costs_one_grant_more() {
    let etcd = EtcdServer::start().unwrap();
    let mutex = long(&connect(&etcd), "/locks/a");
    let mut calls = calls_during(&etcd, || assert!(mutex.lock().unwrap().unlock()));
    // The keeper may already have proven its first renewal.
    calls.remove("Range");
    assert_eq!(calls, of(&[("LeaseGrant", 1), ("Txn", 2)]));
}

#[test]
fn a_busy_try_is_one_call_and_writes_nothing() {
    let etcd = EtcdServer::start().unwrap();
    let (holder, rival) = (warm(&etcd, "/locks/a"), warm(&etcd, "/locks/a"));
    let guard = holder.lock().unwrap();
    let revision = etcd.revision().unwrap();
    let calls = calls_during(&etcd, || assert!(rival.try_lock().unwrap().is_none()));
    assert_eq!(calls, of(&[("Txn", 1)]));
    assert_eq!(etcd.revision().unwrap(), revision);
    assert!(guard.unlock());
}

/// How many entries the log of etcd has had.
fn proposals(etcd: &EtcdServer) -> u64 {
    etcd.metric("etcd_server_proposals_committed_total", &[]).unwrap() as u64
}

#[test]
fn tries_of_a_path_that_stays_busy_do_not_go_through_the_log_of_etcd() {
    const TRIES: u64 = 50;
    let etcd = EtcdServer::start().unwrap();
    let (holder, rival) = (warm(&etcd, "/locks/a"), warm(&etcd, "/locks/a"));
    let guard = holder.lock().unwrap();
    assert!(rival.try_lock().unwrap().is_none());
    let proposed = proposals(&etcd);
    let calls = calls_during(&etcd, || {
        for _ in 0..TRIES {
            assert!(rival.try_lock().unwrap().is_none());
        }
    });
    assert_eq!(calls, of(&[("Txn", TRIES)]));
    // A member proposes to itself now and then (its version, say).
    assert!(proposals(&etcd) - proposed < TRIES / 2);

    // Free again: one look more, once.
    assert!(guard.unlock());
    let calls = calls_during(&etcd, || assert!(rival.try_lock().unwrap().unwrap().unlock()));
    assert_eq!(calls, of(&[("Txn", 3)]));
    let calls = calls_during(&etcd, || assert!(rival.try_lock().unwrap().unwrap().unlock()));
    assert_eq!(calls, of(&[("Txn", 2)]));
}

#[test]
fn a_try_after_a_busy_one_still_lets_readers_join_readers_and_nobody_else() {
    let etcd = EtcdServer::start().unwrap();
    let theirs = RwLock::new(&connect(&etcd), "/locks/rw").unwrap();
    let ours = RwLock::new(&connect(&etcd), "/locks/rw").unwrap();
    let reader = theirs.read().unwrap();
    for _ in 0..3 {
        assert!(ours.try_write().unwrap().is_none());
        assert!(ours.try_read().unwrap().unwrap().unlock());
    }
    assert!(reader.unlock());
    let writer = theirs.write().unwrap();
    for _ in 0..3 {
        assert!(ours.try_read().unwrap().is_none());
        assert!(ours.try_write().unwrap().is_none());
    }
    assert!(writer.unlock());
    assert!(ours.try_write().unwrap().unwrap().unlock());
}

/// The calls of one contended lock and unlock: from the enqueue behind a holder to the end.
fn contended(etcd: &EtcdServer, holder: &Mutex, rival: &Mutex, meanwhile: Duration) -> u64 {
    let guard = holder.lock().unwrap();
    let waiting = etcd.unary_calls().unwrap()["Txn"] + 1;
    let calls = calls_during(etcd, || {
        thread::scope(|scope| {
            let waiter = scope.spawn(|| rival.lock().unwrap().unlock());
            eventually(LIMIT, "the enqueue", || etcd.unary_calls().unwrap()["Txn"] >= waiting);
            thread::sleep(meanwhile);
            assert!(guard.unlock());
            assert!(waiter.join().unwrap());
        });
    });
    assert!(calls.keys().all(|method| method == "Txn" || method == "Range"), "{calls:?}");
    // One of them is the holder's release.
    calls.values().sum::<u64>() - 1
}

#[test]
fn a_contended_lock_and_unlock_are_two_calls_on_a_path_that_is_watched() {
    let etcd = EtcdServer::start().unwrap();
    let (holder, rival) = (warm(&etcd, "/locks/a"), warm(&etcd, "/locks/a"));
    let fresh = contended(&etcd, &holder, &rival, ms(300));
    println!("on a fresh path: {fresh}");
    assert!(fresh <= 2 + 5, "{fresh} calls");
    for round in 0..10 {
        let calls = contended(&etcd, &holder, &rival, ms(20));
        assert_eq!(calls, 2, "round {round}");
    }
}

#[test]
fn a_hand_off_at_once_on_a_fresh_path_costs_five_more_at_most() {
    let etcd = EtcdServer::start().unwrap();
    for round in 0..10 {
        let path = format!("/locks/{round}");
        let (holder, rival) = (warm(&etcd, &path), warm(&etcd, &path));
        let calls = contended(&etcd, &holder, &rival, Duration::ZERO);
        assert!(calls <= 2 + 5, "{calls} calls in round {round}");
    }
}

#[test]
fn neighbours_in_one_process_hand_over_with_two_calls_each() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let mutex = long(&client, "/locks/a");
    assert!(mutex.lock().unwrap().unlock());
    let guard = mutex.lock().unwrap();
    let calls = calls_during(&etcd, || {
        thread::scope(|scope| {
            let waiters: Vec<_> =
                (0..10).map(|_| scope.spawn(|| mutex.lock().unwrap().unlock())).collect();
            // The looks at the queue are reads of this test; they are taken off below.
            eventually(LIMIT, "all wait", || keys(&etcd, "/locks/a/").len() == 11);
            thread::sleep(ms(300));
            assert!(guard.unlock());
            assert!(waiters.into_iter().all(|waiter| waiter.join().unwrap()));
        });
    });
    assert_eq!(calls["Txn"], 1 + 10 * 2, "{calls:?}");
}

#[test]
fn a_release_costs_the_same_however_many_wait() {
    let etcd = EtcdServer::start().unwrap();
    let holder = warm(&etcd, "/locks/a");
    let clients: Vec<Client> = (0..5).map(|_| connect(&etcd)).collect();
    let guard = holder.lock().unwrap();
    thread::scope(|scope| {
        let (done, ended) = crossbeam_channel::unbounded();
        for number in 0..50 {
            let (mutex, done) = (long(&clients[number % 5], "/locks/a"), done.clone());
            scope.spawn(move || {
                let guard = mutex.lock().unwrap();
                let (go, gone) = crossbeam_channel::bounded::<()>(0);
                done.send(go).unwrap();
                let _ = gone.recv();
                assert!(guard.unlock());
            });
        }
        wait_contenders(&holder, 51);
        settle(&etcd);
        let mut next = None;
        let calls = calls_during(&etcd, || {
            assert!(guard.unlock());
            next = Some(ended.recv_timeout(LIMIT).unwrap());
            thread::sleep(ms(300));
        });
        assert_eq!(calls, of(&[("Txn", 1)]), "49 others were woken");
        let calls = calls_during(&etcd, || {
            for _ in 0..49 {
                drop(next.take());
                next = Some(ended.recv_timeout(LIMIT).unwrap());
            }
        });
        assert_eq!(calls, of(&[("Txn", 49)]));
        drop(next);
    });
    assert!(keys(&etcd, "/locks/").is_empty());
}

// ----- semaphores -----------------------------------------------------------------------------

fn permits(client: &Client, path: &str, permits: u32) -> Semaphore {
    Semaphore::builder(client, path, permits).ttl(LONG).build().unwrap()
}

/// A semaphore whose session lives and has settled, and whose number stands.
fn warm_permits(etcd: &EtcdServer, path: &str, count: u32) -> Semaphore {
    let semaphore = permits(&connect(etcd), path, count);
    let before = reads(etcd);
    assert!(semaphore.acquire().unwrap().release());
    eventually(LIMIT, "the first renewal is proven", || reads(etcd) > before);
    semaphore
}

#[test]
fn an_uncontended_acquire_and_release_of_permits_are_two_calls() {
    let etcd = EtcdServer::start().unwrap();
    let semaphore = warm_permits(&etcd, "/limits/a", 100);
    let calls = calls_during(&etcd, || assert!(semaphore.acquire().unwrap().release()));
    assert_eq!(calls, of(&[("Txn", 2)]));
    let calls = calls_during(&etcd, || {
        for many in 1..=50 {
            assert!(semaphore.acquire_many(2 * many).unwrap().release());
        }
    });
    assert_eq!(calls, of(&[("Txn", 100)]));
    // A try looks first, since etcd cannot compare how many stand there.
    let calls = calls_during(&etcd, || {
        assert!(semaphore.try_acquire().unwrap().unwrap().release());
    });
    assert_eq!(calls, of(&[("Range", 1), ("Txn", 2)]));
}

#[test]
fn a_first_acquire_on_a_new_path_is_two_calls_more() {
    let etcd = EtcdServer::start().unwrap();
    let semaphore = warm_permits(&etcd, "/limits/a", 3);
    let client = connect(&etcd);
    // The session is the client's, so that the path is all that is new.
    let before = reads(&etcd);
    let other = permits(&client, "/limits/a", 3);
    assert!(other.acquire().unwrap().release());
    eventually(LIMIT, "the first renewal is proven", || reads(&etcd) > before);
    let fresh = permits(&client, "/limits/b", 3);
    let calls = calls_during(&etcd, || assert!(fresh.acquire().unwrap().release()));
    assert_eq!(calls, of(&[("Txn", 4)]));
    assert!(semaphore.acquire().unwrap().release());
}

#[test]
fn a_busy_try_for_permits_is_one_call_and_writes_nothing() {
    let etcd = EtcdServer::start().unwrap();
    let (holder, rival) =
        (warm_permits(&etcd, "/limits/a", 2), warm_permits(&etcd, "/limits/a", 2));
    let permit = holder.acquire_many(2).unwrap();
    let revision = etcd.revision().unwrap();
    let calls = calls_during(&etcd, || assert!(rival.try_acquire().unwrap().is_none()));
    assert_eq!(calls, of(&[("Range", 1)]));
    assert_eq!(etcd.revision().unwrap(), revision);
    assert!(permit.release());
}

#[test]
fn a_release_of_a_permit_costs_the_same_however_many_wait() {
    let etcd = EtcdServer::start().unwrap();
    let holder = warm_permits(&etcd, "/limits/a", 2);
    let clients: Vec<Client> = (0..5).map(|_| connect(&etcd)).collect();
    let (first, second) = (holder.acquire().unwrap(), holder.acquire().unwrap());
    thread::scope(|scope| {
        let (entered, entries) = crossbeam_channel::unbounded();
        for number in 0..50 {
            let semaphore = permits(&clients[number % 5], "/limits/a", 2);
            let entered = entered.clone();
            scope.spawn(move || entered.send(semaphore.acquire().unwrap()).unwrap());
        }
        eventually(LIMIT, "all wait", || holder.contenders().unwrap().len() == 52);
        settle(&etcd);
        let mut inside = std::collections::VecDeque::from([first, second]);
        let mut release = || {
            let permit: Permit = inside.pop_front().unwrap();
            assert!(permit.release());
            inside.push_back(entries.recv_timeout(LIMIT).unwrap());
        };
        let calls = calls_during(&etcd, || {
            release();
            thread::sleep(ms(300));
        });
        assert_eq!(calls, of(&[("Txn", 1)]), "49 others were woken");
        assert!(entries.is_empty(), "one release let in more than one");
        let calls = calls_during(&etcd, || (0..49).for_each(|_| release()));
        assert_eq!(calls, of(&[("Txn", 49)]));
    });
    assert!(keys(&etcd, "/limits/a/holders/").is_empty());
}
