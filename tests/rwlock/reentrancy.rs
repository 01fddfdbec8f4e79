//! What a thread may do twice, and what it may not.

use std::thread;

use etcd_recipes::testing::EtcdServer;
use etcd_recipes::{ErrorKind, Recipe, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::support::*;
use super::{Side, Waiter, crowd, line, long};

fn counts(lock: &RwLock) -> (usize, usize) {
    (lock.read_count(), lock.write_count())
}

#[test]
fn each_side_is_reentrant_on_one_key() {
    let etcd = EtcdServer::start().unwrap();
    let lock = long(&connect(&etcd), "/locks/a");
    let clone = lock.clone();
    assert_eq!(counts(&lock), (0, 0));
    let first = lock.read().unwrap();
    let revision = etcd.revision().unwrap();
    let (second, third) = (clone.read().unwrap(), lock.try_read().unwrap().unwrap());
    let fourth = lock.try_read_for(ms(1)).unwrap().unwrap();
    assert_eq!(counts(&lock), (4, 0));
    assert_eq!(etcd.revision().unwrap(), revision);
    assert_eq!(keys(&etcd, "/locks/"), [first.lock_key()]);
    assert!(first.unlock() && third.unlock() && fourth.unlock());
    assert!(second.is_held() && line(&lock) == "R+");
    assert!(second.unlock() && line(&lock).is_empty());

    let first = lock.write().unwrap();
    let revision = etcd.revision().unwrap();
    let (second, third) = (clone.write().unwrap(), lock.try_write().unwrap().unwrap());
    let fourth = lock.try_write_for(ms(1)).unwrap().unwrap();
    assert_eq!(counts(&clone), (0, 4));
    assert_eq!(etcd.revision().unwrap(), revision);
    assert_eq!(second.fencing_token(), first.fencing_token());
    assert!(first.unlock() && third.unlock() && fourth.unlock());
    assert!(second.put("/data", "").unwrap() && line(&lock) == "W+");
    assert!(second.unlock() && line(&lock).is_empty());
    assert_eq!(counts(&lock), (0, 0));
}

#[test]
fn another_lock_of_the_path_and_another_thread_are_others() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let (lock, other) = (long(&client, "/locks/a"), long(&client, "/locks/a"));
    let guard = lock.read().unwrap();
    assert_eq!(counts(&other), (0, 0));
    let beside = other.read().unwrap();
    assert_eq!(line(&lock), "R+ R+");
    assert!(other.try_write().is_err() && beside.unlock());
    assert!(other.try_write().unwrap().is_none());
    thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(counts(&lock), (0, 0));
            let guard = lock.read().unwrap();
            assert_eq!(line(&lock), "R+ R+");
            assert_eq!(lock.write().unwrap_err().kind(), ErrorKind::WouldDeadlock);
            drop(guard);
            assert!(lock.try_write().unwrap().is_none(), "no deadlock, but busy");
        });
    });
    assert!(guard.unlock());
}

#[test]
fn a_reader_under_its_own_write_stands_on_the_writers_key() {
    let etcd = EtcdServer::start().unwrap();
    let locks = crowd(&etcd, "/locks/a", 2);
    let lock = &locks[0];
    let write = lock.write().unwrap();
    let queued = [Side::W, Side::R].map(|side| Waiter::queue(&locks[1], side));
    let revision = etcd.revision().unwrap();
    let read = lock.read().unwrap();
    let again = lock.try_read().unwrap().unwrap();
    assert_eq!(read.lock_key(), write.lock_key());
    assert_eq!(etcd.revision().unwrap(), revision);
    assert_eq!(counts(lock), (2, 1));
    assert_eq!(line(lock), "W+ W R");
    // The reads leave the write as it is.
    assert!(read.unlock() && again.unlock());
    assert_eq!(etcd.revision().unwrap(), revision);
    assert!(write.hold().is_held() && write.put("/data", "").unwrap());
    assert!(write.unlock());
    for waiter in queued {
        assert!(waiter.enters().unlock());
    }
}

#[test]
fn a_reader_that_asks_to_write_would_deadlock() {
    let etcd = EtcdServer::start().unwrap();
    let locks = crowd(&etcd, "/locks/a", 2);
    let lock = &locks[0];
    let read = lock.read().unwrap();
    for queued in [false, true] {
        let waiter = queued.then(|| Waiter::queue(&locks[1], Side::W));
        let revision = etcd.revision().unwrap();
        for outcome in [
            lock.write().map(drop),
            lock.try_write().map(drop),
            lock.try_write_for(LIMIT).map(drop),
            lock.with_write(|_| ()),
        ] {
            let error = outcome.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::WouldDeadlock, "{error}");
            assert!(error.to_string().contains("/locks/a"), "{error}");
        }
        let (_, took) = timed(|| lock.write().unwrap_err());
        assert!(took < ms(50), "{took:?}");
        assert_eq!(etcd.revision().unwrap(), revision);
        assert_eq!(counts(lock), (1, 0));
        if let Some(waiter) = waiter {
            assert!(read.is_held() && waiter.is_waiting());
            let again = lock.read().unwrap();
            assert!(again.unlock(), "reading again passes whoever is queued");
            assert!(read.unlock());
            assert!(waiter.enters().unlock());
            assert!(lock.write().unwrap().unlock());
            return;
        }
    }
}

enum Guard<'a> {
    R(RwLockReadGuard<'a>),
    W(RwLockWriteGuard<'a>),
}

impl Guard<'_> {
    fn unlock(self) -> bool {
        match self {
            Guard::R(guard) => guard.unlock(),
            Guard::W(guard) => guard.unlock(),
        }
    }

    fn is_held(&self) -> bool {
        match self {
            Guard::R(guard) => guard.is_held(),
            Guard::W(guard) => guard.is_held(),
        }
    }
}

/// All orders of four.
fn orders() -> Vec<[usize; 4]> {
    let mut all = Vec::new();
    for code in 0..256 {
        let order = [code & 3, code >> 2 & 3, code >> 4 & 3, code >> 6];
        if (0..4).all(|one| order.contains(&one)) {
            all.push(order);
        }
    }
    all
}

#[test]
fn guards_end_in_any_order() {
    let etcd = EtcdServer::start().unwrap();
    let locks = crowd(&etcd, "/locks/a", 2);
    let (lock, rival) = (&locks[0], &locks[1]);
    assert_eq!(orders().len(), 24);
    for order in orders() {
        let mut guards = [
            Some(Guard::W(lock.write().unwrap())),
            Some(Guard::R(lock.read().unwrap())),
            Some(Guard::W(lock.write().unwrap())),
            Some(Guard::R(lock.read().unwrap())),
        ];
        for at in order {
            let guard = guards[at].take().unwrap();
            assert!(guard.unlock(), "{order:?}");
            let left = guards.iter().flatten();
            let writes = left.clone().filter(|guard| matches!(guard, Guard::W(_))).count();
            let reads = left.clone().count() - writes;
            assert!(left.clone().all(Guard::is_held), "{order:?}");
            assert_eq!(counts(lock), (reads, writes), "{order:?}");
            let wanted = match (writes, reads) {
                (0, 0) => "",
                (0, _) => "R+",
                _ => "W+",
            };
            assert_eq!(line(lock), wanted, "{order:?}");
            let beside = rival.try_read().unwrap();
            assert_eq!(beside.is_some(), writes == 0, "{order:?}");
            drop(beside);
            let alone = rival.try_write().unwrap();
            assert_eq!(alone.is_some(), writes + reads == 0, "{order:?}");
        }
    }
    assert!(keys(&etcd, "/locks/").is_empty());
}

#[test]
fn the_last_write_that_ends_with_reads_left_is_a_downgrade() {
    let etcd = EtcdServer::start().unwrap();
    let locks = crowd(&etcd, "/locks/a", 3);
    let lock = &locks[0];
    for round in 0..5 {
        let write = lock.write().unwrap();
        let read = lock.read().unwrap();
        let (exclusive, shared) = (write.hold(), read.hold());
        let token = write.fencing_token();
        let queued = [Side::R, Side::R, Side::W, Side::R]
            .iter()
            .enumerate()
            .map(|(at, side)| Waiter::queue(&locks[(at + round) % 3], *side))
            .collect::<Vec<_>>();
        assert!(exclusive.is_held() && shared.is_held());
        assert!(write.unlock());
        assert!(!exclusive.is_held() && exclusive.remaining().is_zero());
        assert!(shared.is_held() && read.is_held() && read.verify().unwrap());
        assert_eq!(lock.contenders().unwrap()[0].token, token, "it has kept its place");
        let beside = [queued[0].enters(), queued[1].enters()];
        assert_eq!(line(lock), "R+ R+ R+ W R");
        queued[2].stays_out();
        assert!(queued[3].is_waiting());
        assert_eq!(lock.write().unwrap_err().kind(), ErrorKind::WouldDeadlock);
        assert!(beside.into_iter().all(super::Held::unlock));
        queued[2].stays_out();
        assert!(read.unlock() && !shared.is_held());
        let writer = queued[2].enters();
        assert!(queued[3].is_waiting() && writer.unlock());
        assert!(queued[3].enters().unlock());
        assert_eq!(lock.error_count(), 0);
    }
}
