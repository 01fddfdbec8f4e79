//! The mutex on a real etcd, on good days.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use etcd_recipes::testing::EtcdServer;
use etcd_recipes::{Client, Mutex};

#[test]
fn lock_and_unlock() {
    let etcd = EtcdServer::start().unwrap();
    let client = Client::connect([etcd.endpoint()]).unwrap();
    let mutex = Mutex::new(&client, "/locks/a").unwrap();
    let guard = mutex.lock().unwrap();
    assert!(guard.is_held());
    assert!(guard.remaining() > Duration::from_secs(5));
    assert!(guard.verify().unwrap());
    assert!(guard.unlock());
    assert!(!mutex.is_locked().unwrap());
    let start = Instant::now();
    for _ in 0..100 {
        assert!(mutex.lock().unwrap().unlock());
    }
    println!("100 cycles: {:?}", start.elapsed());
    let start = Instant::now();
    client.close().unwrap();
    println!("close: {:?}", start.elapsed());
}

#[test]
fn threads_exclude_each_other() {
    let etcd = EtcdServer::start().unwrap();
    let inside = AtomicUsize::new(0);
    let start = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            let client = Client::connect([etcd.endpoint()]).unwrap();
            let inside = &inside;
            for _ in 0..4 {
                let client = client.clone();
                scope.spawn(move || {
                    let mutex = Mutex::new(&client, "/locks/a").unwrap();
                    for _ in 0..50 {
                        let guard = mutex.lock().unwrap();
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                        inside.fetch_sub(1, Ordering::SeqCst);
                        assert!(guard.unlock());
                    }
                });
            }
        }
    });
    println!("400 hand-offs: {:?}", start.elapsed());
}
