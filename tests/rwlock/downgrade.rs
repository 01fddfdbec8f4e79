//! A writer that becomes a reader without leaving its place.

use std::sync::atomic::{AtomicI32, Ordering};
use std::thread;
use std::time::Duration;

use etcd_recipes::testing::EtcdServer;
use etcd_recipes::{
    Compare, CompareOp, ErrorKind, Op, OwnedRwLockWriteGuard, RwLock, RwLockWriteGuard, Txn,
};

use super::faults::full;
use super::support::*;
use super::{Held, Side, Waiter, crowd, line, long, value, wait_for_line, with_ttl};

#[test]
fn a_downgrade_keeps_its_place_among_queued_readers_and_writers() {
    const PATHS: usize = 4;
    let etcd = EtcdServer::start().unwrap();
    let rounds = if full() { 500 } else { 40 };
    thread::scope(|scope| {
        for path in 0..PATHS {
            let etcd = &etcd;
            scope.spawn(move || {
                let locks = crowd(etcd, &format!("/locks/{path}"), 3);
                for round in 0..rounds / PATHS {
                    among_readers_and_writers(&locks, round);
                }
            });
        }
    });
    assert!(keys(&etcd, "/locks/").is_empty());
}

/// `W R R W R`, and the first becomes a reader.
fn among_readers_and_writers(locks: &[RwLock], round: usize) {
    let at = |number: usize| &locks[(round + number) % locks.len()];
    let write = at(0).write().unwrap();
    let token = write.fencing_token();
    let (exclusive, key) = (write.hold(), write.lock_key());
    let queued: Vec<_> = [Side::R, Side::R, Side::W, Side::R]
        .iter()
        .enumerate()
        .map(|(number, side)| Waiter::queue(at(round / 3 + number), *side))
        .collect();
    assert!(write.put("/data", "").unwrap());
    assert!(exclusive.is_held() && queued.iter().all(Waiter::is_waiting));

    let read = RwLockWriteGuard::downgrade(write).unwrap();
    assert!(!exclusive.is_held() && exclusive.remaining().is_zero());
    assert!(read.is_held() && read.hold().is_held() && read.lock_key() == key);
    assert_eq!((at(0).read_count(), at(0).write_count()), (1, 0));
    let beside = [queued[0].enters(), queued[1].enters()];
    assert_eq!(line(at(0)), "R+ R+ R+ W R");
    assert_eq!(at(0).contenders().unwrap()[0].token, token);
    assert!(read.verify().unwrap() && beside.iter().all(Held::verify));
    assert!(!exclusive.is_held() && exclusive.loss().is_none());

    // The writer waits for all three, whoever goes last.
    let [second, third] = beside;
    let mut readers: Vec<Box<dyn FnOnce() -> bool + '_>> =
        vec![Box::new(|| read.unlock()), Box::new(|| second.unlock()), Box::new(|| third.unlock())];
    while !readers.is_empty() {
        assert!(queued[2].is_waiting() && queued[3].is_waiting());
        assert!(readers.remove(round % readers.len())());
    }
    let writer = queued[2].enters();
    assert!(queued[3].is_waiting() && writer.unlock());
    assert!(queued[3].enters().unlock());
    assert_eq!(line(at(0)), "");
    assert_eq!((at(0).read_count(), at(0).write_count()), (0, 0));
}

#[test]
fn a_nested_write_is_not_downgraded() {
    let etcd = EtcdServer::start().unwrap();
    let lock = long(&connect(&etcd), "/locks/a");
    let (outer, inner) = (lock.write().unwrap(), lock.write().unwrap());
    let hold = outer.hold();
    let revision = etcd.revision().unwrap();
    let (inner, error) = RwLockWriteGuard::downgrade(inner).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    assert_eq!(etcd.revision().unwrap(), revision);
    assert!(inner.is_held() && outer.is_held() && hold.is_held());
    assert_eq!(lock.write_count(), 2);
    assert!(inner.put("/data", "").unwrap() && inner.unlock());
    // With a read of its own beside it there is nothing to be refused.
    let own = lock.read().unwrap();
    let read = RwLockWriteGuard::downgrade(outer).unwrap();
    assert!(read.is_held() && own.is_held() && !hold.is_held());
    assert_eq!((lock.read_count(), lock.write_count()), (2, 0));
    assert_eq!(line(&lock), "R+");
    assert_eq!(lock.try_write().unwrap_err().kind(), ErrorKind::WouldDeadlock);
    assert!(own.unlock() && read.verify().unwrap() && read.unlock());
    assert_eq!(line(&lock), "");
}

#[test]
fn an_owned_writer_becomes_an_owned_reader_on_any_thread() {
    let etcd = EtcdServer::start().unwrap();
    let locks = crowd(&etcd, "/locks/a", 2);
    let write = locks[0].write_owned().unwrap();
    let (exclusive, key) = (write.hold(), write.lock_key());
    let queued = [Side::R, Side::W].map(|side| Waiter::queue(&locks[1], side));
    let downgrade = || OwnedRwLockWriteGuard::downgrade(write).unwrap();
    let read = thread::spawn(downgrade).join().unwrap();
    assert!(!exclusive.is_held() && read.is_held() && read.lock_key() == key);
    let beside = queued[0].enters();
    assert_eq!(line(&locks[0]), "R+ R+ W");
    assert!(beside.unlock());
    queued[1].stays_out();
    assert!(read.verify().unwrap() && read.unlock());
    assert!(queued[1].enters().unlock());
}

/// The clearest form of a guarded write that comes too late: what it depends on, and no library
/// before it that could know better.
#[test]
fn what_a_guarded_write_depends_on_ends_with_the_downgrade() {
    let etcd = EtcdServer::start().unwrap();
    let (client, others) = (connect(&etcd), connect(&etcd));
    let lock = long(&client, "/locks/a");
    for implicit in [false, true] {
        let write = lock.write().unwrap();
        let late = Txn::new()
            .when([
                Compare::create_revision(write.lock_key(), CompareOp::Equal, write.fencing_token()),
                Compare::version(write.lock_key(), CompareOp::Equal, 1),
            ])
            .and_then([Op::put("/data", "late")]);
        assert!(write.put("/data", "in time").unwrap());
        let read = if implicit {
            let read = lock.read().unwrap();
            assert!(write.unlock());
            read
        } else {
            RwLockWriteGuard::downgrade(write).unwrap()
        };
        assert!(!others.txn(late).unwrap().succeeded);
        assert_eq!(value(&others, "/data").as_deref(), Some("in time"));
        assert!(read.unlock());
    }
}

/// Every renewal's proof read and the watch on the own key see the rewritten key.
#[test]
fn the_rewritten_key_is_not_taken_for_a_strangers() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let explicit = with_ttl(&client, "/locks/explicit", TTL);
    let implicit = with_ttl(&client, "/locks/implicit", TTL);
    let watched = with_ttl(&client, "/locks/watched", TTL);
    let owned = with_ttl(&connect(&etcd), "/locks/owned", TTL);
    let late = watched.write().unwrap();
    thread::sleep(ms(1_600));

    let read = [
        RwLockWriteGuard::downgrade(explicit.write().unwrap()).unwrap(),
        {
            let write = implicit.write().unwrap();
            let read = implicit.read().unwrap();
            assert!(write.unlock());
            read
        },
        RwLockWriteGuard::downgrade(late).unwrap(),
    ];
    let owned_read = OwnedRwLockWriteGuard::downgrade(owned.write_owned().unwrap()).unwrap();
    thread::sleep(Duration::from_secs(4));
    for guard in &read {
        assert!(guard.is_held() && guard.loss().is_none(), "{guard:?}: {:?}", guard.loss());
        assert!(guard.verify().unwrap());
    }
    assert!(owned_read.is_held() && owned_read.verify().unwrap());
    assert!(read.into_iter().all(|guard| guard.unlock()) && owned_read.unlock());
    for lock in [explicit, implicit, watched, owned] {
        assert_eq!(etcd_recipes::Recipe::error_count(&lock), 0);
        assert_eq!(line(&lock), "");
    }
}

#[test]
fn those_who_write_and_then_read_on_never_write_beside_each_other() {
    let etcd = EtcdServer::start().unwrap();
    let locks = crowd(&etcd, "/locks/a", 2);
    let inside = AtomicI32::new(0);
    let rounds = if full() { 200 } else { 30 };
    // A chain of downgrades with nobody but writers queued: none of them gets in by one.
    thread::scope(|scope| {
        for number in 0..4 {
            let (lock, inside) = (&locks[number % 2], &inside);
            scope.spawn(move || {
                for _ in 0..rounds {
                    let write = lock.write().unwrap();
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "a writer beside others");
                    let read = RwLockWriteGuard::downgrade(write).unwrap();
                    assert!(read.is_held());
                    inside.fetch_sub(1, Ordering::SeqCst);
                    assert!(read.unlock());
                }
            });
        }
    });
    wait_for_line(&locks[0], "");
}
