//! Names of contenders' keys are used again, lest they pile up in etcd's memory; and nobody takes
//! one life of a key for another.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::collections::HashSet;
use std::sync::Mutex as Plain;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use etcd_recipes::testing::{EtcdServer, FaultProxy, Mode, eventually};
use etcd_recipes::{Mutex, RwLock, Semaphore};
use support::*;

#[test]
fn one_name_serves_one_contender_at_a_time_for_ever() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let mutex = Mutex::new(&client, "/locks/a").unwrap();
    let (mut names, mut last) = (HashSet::new(), 0);
    for _ in 0..50 {
        let guard = mutex.lock().unwrap();
        names.insert(guard.lock_key());
        assert!(guard.fencing_token() > last, "tokens grow");
        last = guard.fencing_token();
        assert!(guard.unlock());
    }
    assert_eq!(names.len(), 1);

    let lock = RwLock::new(&client, "/locks/b").unwrap();
    for _ in 0..20 {
        let readers = [lock.read_owned().unwrap(), lock.read_owned().unwrap()];
        names.extend(readers.iter().map(|reader| reader.lock_key()));
        assert!(readers.into_iter().all(|reader| reader.unlock()));
    }
    assert_eq!(names.len(), 1 + 2);

    let semaphore = Semaphore::new(&client, "/locks/c", 3).unwrap();
    let holders = || keys(&etcd, "/locks/c/holders/");
    for _ in 0..10 {
        let permits = semaphore.acquire_many(3).unwrap();
        names.extend(holders());
        drop(permits);
    }
    assert_eq!(names.len(), 1 + 2 + 3);
}

#[test]
fn a_busy_path_sees_no_more_names_than_it_has_contenders() {
    const THREADS: usize = 6;
    let etcd = EtcdServer::start().unwrap();
    let clients = [connect(&etcd), connect(&etcd)];
    let names = Plain::new(HashSet::new());
    let inside = AtomicUsize::new(0);
    let turns = AtomicUsize::new(0);
    thread::scope(|scope| {
        for number in 0..THREADS {
            let (client, names) = (&clients[number % 2], &names);
            let (inside, turns) = (&inside, &turns);
            scope.spawn(move || {
                let mutex = Mutex::new(client, "/locks/a").unwrap();
                for _ in 0..100 {
                    let guard = mutex.lock().unwrap();
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                    names.lock().unwrap().insert(guard.lock_key());
                    inside.fetch_sub(1, Ordering::SeqCst);
                    turns.fetch_add(1, Ordering::Relaxed);
                    assert!(guard.unlock());
                }
            });
        }
    });
    assert_eq!(turns.load(Ordering::Relaxed), THREADS * 100);
    let names = names.lock().unwrap().len();
    assert!((2..=THREADS).contains(&names), "{names} names");
}

/// Answers come in bursts, and in any order from connection to connection: a proof read of a name
/// may come in behind the answers that gave that name to another.
#[test]
fn a_late_proof_of_a_former_hold_takes_nothing_from_the_next() {
    let etcd = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    let client = support::patient(Duration::from_secs(30)).endpoints([proxy.endpoint()]);
    let client = client.connect().unwrap();
    let end = Instant::now() + Duration::from_secs(6);
    thread::scope(|scope| {
        for number in 0..4 {
            let client = &client;
            scope.spawn(move || {
                let mutex = short(client, &format!("/locks/{number}"));
                while Instant::now() < end {
                    let guard = mutex.lock().unwrap();
                    assert!(guard.is_held());
                    assert!(guard.unlock());
                }
            });
        }
        while Instant::now() < end {
            for mode in [Mode::BlackholeDown, Mode::Pass] {
                proxy.set(mode);
                thread::sleep(ms(60));
            }
        }
        proxy.set(Mode::Pass);
    });
}

/// A request that was written for the last holder of a name arrives when there is another.
#[test]
fn a_request_for_a_former_hold_is_not_for_the_one_that_has_its_name() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let mutex = Mutex::new(&client, "/locks/a").unwrap();
    let former = mutex.lock().unwrap();
    let (key, token) = (former.lock_key(), former.fencing_token());
    assert!(former.unlock());
    let asked = mutex.release_requests();
    let guard = mutex.lock().unwrap();
    assert_eq!(guard.lock_key(), key);

    let request = |kind: &str, token: i64, number: u32| {
        let inbox = format!("/__etcd-recipes/requests/{}/{token}-{number}", lease_of(&key));
        let value = format!(r#"{{"kind":"{kind}","from":"me","token":{token},"key":"{key}"}}"#);
        client.put(inbox.as_str(), value).unwrap();
    };
    request("ask", token, 1);
    request("force", token, 2);
    // What is meant for the one who is here, after those, is heard.
    request("ask", guard.fencing_token(), 3);
    let heard = asked.recv_timeout(LIMIT).unwrap();
    assert_eq!(heard.token, guard.fencing_token());
    assert_eq!(asked.try_recv().ok().map(|request| request.token), None);
    eventually(LIMIT, "the force was looked at", || {
        keys(&etcd, "/__etcd-recipes/requests/").iter().all(|key| key.ends_with("-1"))
    });
    assert!(guard.verify().unwrap());
    assert!(guard.unlock());
}
