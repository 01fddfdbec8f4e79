//! After any number of rounds the counts are back where they were: leases, keys, threads, file
//! descriptors.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use etcd_recipes::testing::{EtcdServer, eventually};
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
    for _ in 0..30 {
        let client = connect(&etcd);
        let mutex = short(&client, "/locks/a");
        mutex.add_loss_listener(|_| ());
        let _events = mutex.loss_events();
        assert!(mutex.lock().unwrap().unlock());
    }
    back_to(&etcd, bare);

    let client = connect(&etcd);
    let mutex = short(&client, "/locks/a");
    // The connections of a client are opened as they are needed, the watch's by the first wait.
    let guard = mutex.lock().unwrap();
    assert!(mutex.try_lock_owned_for(ms(300)).unwrap().is_none());
    assert!(guard.unlock());
    let idle = counts(&etcd);
    for _ in 0..500 {
        assert!(mutex.lock().unwrap().unlock());
    }
    back_to(&etcd, idle);

    let guard = mutex.lock().unwrap();
    let held = counts(&etcd);
    for round in 0..100 {
        let limit = ms(round % 10);
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
}
