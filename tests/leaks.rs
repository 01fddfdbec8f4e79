//! After any number of rounds the counts are back where they were: leases, keys, threads, file
//! descriptors.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use etcd_recipes::Semaphore;
use etcd_recipes::testing::{Alive, EtcdServer, eventually};
use support::*;

/// Leases, keys, threads, descriptors.
fn counts(etcd: &EtcdServer) -> [usize; 4] {
    [leases(etcd), keys(etcd, "").len(), threads(), descriptors()]
}

/// Where the descriptors lead, for the message of a failure.
fn whereto() -> Vec<String> {
    let all = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    all.filter_map(|entry| std::fs::read_link(entry.path()).ok())
        .map(|target| target.display().to_string())
        .collect()
}

/// The figure of the ordinary run, or the written one in the full run.
fn rounds(ordinary: u32, full: u32) -> u32 {
    if std::env::var_os("ETCD_RECIPES_FULL").is_some() { full } else { ordinary }
}

/// The library's own objects; the healer thread of the client under test may come and go.
#[track_caller]
fn alive_again(before: Alive) {
    eventually(LIMIT, "the library's own objects are back", || {
        let now = Alive::now();
        let figures = |alive: Alive| {
            [
                alive.clients,
                alive.io_threads,
                alive.healer_threads,
                alive.sessions,
                alive.presences,
                alive.watches,
                alive.queues,
                alive.holds,
                alive.tokens,
            ]
        };
        let back = figures(now).iter().zip(figures(before)).all(|(now, before)| *now <= before);
        if back { Ok(()) } else { Err(format!("{now:?}, before {before:?}")) }
    });
}

#[track_caller]
fn back_to(etcd: &EtcdServer, before: [usize; 4]) {
    eventually(LIMIT, "leases, keys, threads and descriptors are back", || {
        let now = counts(etcd);
        let back = now.iter().zip(before).all(|(now, before)| *now <= before);
        if back { Ok(()) } else { Err(format!("{now:?}, before {before:?}; {:?}", whereto())) }
    });
}

/// One test, so that nothing else runs in the process while it counts.
#[test]
fn serial_nothing_leaks() {
    let etcd = EtcdServer::start().unwrap();
    let bare = counts(&etcd);
    let nothing = Alive::now();
    for _ in 0..rounds(30, 200) {
        let client = connect(&etcd);
        let mutex = short(&client, "/locks/a");
        mutex.add_loss_listener(|_| ());
        let _events = mutex.loss_events();
        assert!(mutex.lock().unwrap().unlock());
    }
    back_to(&etcd, bare);
    alive_again(nothing);

    let client = connect(&etcd);
    let mutex = short(&client, "/locks/a");
    // The connections of a client are opened as they are needed, the watch's by the first wait.
    let guard = mutex.lock().unwrap();
    assert!(mutex.try_lock_owned_for(ms(300)).unwrap().is_none());
    assert!(guard.unlock());
    let idle = counts(&etcd);
    let quiet = Alive::now();
    for _ in 0..rounds(500, 10_000) {
        assert!(mutex.lock().unwrap().unlock());
    }
    back_to(&etcd, idle);
    // A released hold is remembered for the second after which it would have been watched.
    alive_again(quiet);

    let guard = mutex.lock().unwrap();
    let held = counts(&etcd);
    for round in 0..rounds(100, 1_000) {
        let limit = ms(u64::from(round % 10));
        // A limit so short may pass before etcd has answered.
        let tried = mutex.try_lock_owned_for(limit).ok().flatten();
        assert!(tried.is_none());
        assert!(mutex.try_lock_owned().unwrap().is_none());
    }
    back_to(&etcd, [held[0] + 1, held[1], held[2], held[3]]);
    assert!(guard.is_held() && guard.unlock());

    // Losses, each on a session of its own.
    for _ in 0..20 {
        let guard = mutex.lock().unwrap();
        revoke_lease_of(&etcd, &guard.lock_key());
        assert!(!guard.verify().unwrap());
        assert!(!guard.unlock());
    }
    assert!(mutex.lock().unwrap().unlock());
    back_to(&etcd, idle);
    drop(mutex);
    drop(client);
    back_to(&etcd, bare);
    alive_again(nothing);
}

/// The same for permits; beside it nothing may run in the process either.
#[test]
fn serial_permits_leak_nothing() {
    let etcd = EtcdServer::start().unwrap();
    let bare = counts(&etcd);
    let nothing = Alive::now();
    let client = connect(&etcd);
    let semaphore =
        Semaphore::builder(&client, "/limits/a", 3).ttl(TTL).interrupt_on_permit_loss(true);
    let semaphore = semaphore.build().unwrap();
    // The connections of a client are opened as they are needed, the watch's by the first wait.
    let all = semaphore.acquire_many(3).unwrap();
    assert!(semaphore.try_acquire_for(ms(300)).unwrap().is_none());
    assert!(all.release());
    let idle = counts(&etcd);
    let quiet = Alive::now();
    for round in 0..1_000_u32 {
        let permit = semaphore.acquire_many(1 + round % 3).unwrap();
        if round % 100 == 0 {
            assert!(std::thread::spawn(move || permit.release()).join().unwrap());
        } else {
            assert!(permit.release());
        }
    }
    back_to(&etcd, idle);
    alive_again(quiet);

    let two = semaphore.acquire_many(2).unwrap();
    let held = counts(&etcd);
    for round in 0..200_u32 {
        let limit = ms(u64::from(round % 10));
        // A limit so short may pass before etcd has answered.
        let tried = semaphore.try_acquire_many_for(2, limit).ok().flatten();
        assert!(tried.is_none());
        assert!(semaphore.try_acquire_many(2).unwrap().is_none());
    }
    back_to(&etcd, [held[0] + 1, held[1], held[2], held[3]]);
    assert!(two.is_held() && two.release());

    for _ in 0..20 {
        let permit = semaphore.acquire_many(3).unwrap();
        assert!(client.delete(permit.lock_key()).unwrap());
        assert!(!permit.verify().unwrap() && !permit.release());
    }
    assert!(semaphore.acquire().unwrap().release());
    back_to(&etcd, idle);
    alive_again(quiet);
    // The number is configuration, and stays until it is deleted.
    assert!(Semaphore::delete(&client, "/limits/a").unwrap());
    drop(semaphore);
    drop(client);
    back_to(&etcd, bare);
    alive_again(nothing);
}
