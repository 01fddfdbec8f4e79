//! How holds of either side, and places in the queue, are lost, and what is told and refused then.

use std::collections::BTreeSet;
use std::thread;
use std::time::Duration;

use etcd_recipes::testing::{EtcdServer, eventually};
use etcd_recipes::{
    ConnectionState, FencedTxn, Loss, LossReason, Op, Recipe, RwLock, RwLockReadGuard,
    RwLockWriteGuard, Subscription, Txn,
};

use super::support::*;
use super::{Held, LONG, Side, Waiter, crowd, line, long, value, wait_line, with_ttl};

// ----- LOCK-08: a waiter whose lease dies -------------------------------------------------------

/// How many are inside if these stand in line, by the rule and not by the library.
fn admitted(line: &[Side]) -> usize {
    match line.first() {
        Some(Side::W) => 1,
        _ => line.iter().take_while(|side| **side == Side::R).count(),
    }
}

/// Somebody in the queue, with its key.
struct Placed {
    side: Side,
    waiter: Waiter,
    key: String,
}

impl Placed {
    fn queue(etcd: &EtcdServer, lock: &RwLock, path: &str, side: Side) -> Placed {
        let before = keys(etcd, path);
        let waiter = Waiter::queue(lock, side);
        let key = keys(etcd, path).into_iter().find(|key| !before.contains(key)).unwrap();
        Placed { side, waiter, key }
    }
}

/// Those who may be inside get in, and nobody else does.
#[track_caller]
fn check_inside(line: &[&Placed]) -> usize {
    let sides: Vec<_> = line.iter().map(|one| one.side).collect();
    let count = admitted(&sides);
    for one in &line[..count] {
        eventually(LIMIT, "its turn", || !one.waiter.is_waiting());
    }
    thread::sleep(ms(50));
    assert!(line[count..].iter().all(|one| one.waiter.is_waiting()), "{sides:?}");
    count
}

/// LOCK-08: a lease is revoked in the queue. Its waiter stands anew at the end, and at no time are
/// two inside who must not be.
#[test]
fn a_waiter_that_dies_in_the_queue_lets_in_only_who_may() {
    const SIDES: [Side; 2] = [Side::R, Side::W];
    let etcd = EtcdServer::start().unwrap();
    // Who got in, by part and side.
    let mut entered = BTreeSet::new();
    for number in 0..8 {
        let [first, dying, next] = [SIDES[number >> 2], SIDES[number >> 1 & 1], SIDES[number & 1]];
        let path = format!("/locks/{number}");
        // Each with a client, and so a lease, of its own.
        let locks = crowd(&etcd, &path, 4);
        let place = |at: usize, side| Placed::queue(&etcd, &locks[at], &path, side);
        let (holder, victim, third) = (place(0, first), place(1, dying), place(2, next));
        let last_token = || locks[3].contenders().unwrap().last().unwrap().token;
        let before = last_token();
        let inside = check_inside(&[&holder, &victim, &third]);
        let victim_is_inside = inside > 1;
        revoke_lease_of(&etcd, &victim.key);
        if victim_is_inside {
            let held = victim.waiter.enters();
            eventually(LIMIT, "the hold of the dead lease is lost", || !held.is_held());
            assert!(!held.unlock());
            entered.insert(("dying", dying));
            wait_line(&locks[3], 2);
            check_inside(&[&holder, &third]);
        } else {
            eventually(LIMIT, "it queues anew", || last_token() > before);
            wait_line(&locks[3], 3);
            check_inside(&[&holder, &third, &victim]);
        }
        let held = holder.waiter.enters();
        assert!(held.verify() && held.unlock());
        entered.insert(("holder", first));
        let left = [&third, &victim];
        let count = check_inside(&left[..if victim_is_inside { 1 } else { 2 }]);
        let held = third.waiter.enters();
        let beside = (count == 2).then(|| victim.waiter.enters());
        assert!(held.verify() && beside.as_ref().is_none_or(Held::verify));
        assert!(held.unlock());
        entered.insert(("next", next));
        if !victim_is_inside {
            let held = beside.unwrap_or_else(|| victim.waiter.enters());
            assert!(held.verify() && held.unlock());
            entered.insert(("dying", dying));
        }
        assert_eq!(line(&locks[3]), "");
    }
    assert_eq!(entered.len(), 6, "not both sides got in everywhere: {entered:?}");
}

/// LOCK-08: who waits asks etcd for nothing, not even if the one ahead of it dies.
#[test]
fn ten_that_wait_ten_seconds_cost_less_than_five_requests_each() {
    let etcd = EtcdServer::start().unwrap();
    let minute = Duration::from_secs(60);
    let lock = || with_ttl(&connect(&etcd), "/locks/a", minute);
    let holder = lock();
    let waiters: Vec<_> = (0..10).map(|_| lock()).collect();
    let total = || etcd.unary_calls().unwrap().values().sum::<u64>();
    let guard = holder.write_owned().unwrap();
    let begun = total();
    let side = |at: usize| if at % 2 == 0 { Side::R } else { Side::W };
    let mut waiting: Vec<_> =
        waiters.iter().enumerate().map(|(at, lock)| Waiter::start(lock, side(at))).collect();
    let key = eventually(LIMIT, "all wait", || {
        let mut all = keys(&etcd, "/locks/a/");
        all.retain(|key| *key != guard.lock_key());
        all.sort_unstable();
        (all.len() == 10).then(|| all.swap_remove(4))
    });
    // The reads that help a new watch out belong to the coming, not to the waiting.
    thread::sleep(ms(1_000));
    let before = total();
    revoke_lease_of(&etcd, &key);
    thread::sleep(Duration::from_secs(10));
    // This test's own looks are among them.
    let calls = total() - before;
    println!("{} calls for ten to queue, {calls} in the ten seconds after", before - begun);
    assert!(calls < 50, "{calls} calls");
    assert_eq!(keys(&etcd, "/locks/a/").len(), 11);
    assert!(guard.unlock());
    while !waiting.is_empty() {
        let entered = |waiter: &Waiter| !waiter.is_waiting();
        let at = eventually(LIMIT, "the next", || waiting.iter().position(entered));
        assert!(waiting.remove(at).enters().unlock());
    }
}

// ----- ELEC-04: the key is taken away, written over, or goes with its lease ---------------------

enum Guard<'a> {
    Read(RwLockReadGuard<'a>),
    Write(RwLockWriteGuard<'a>),
}

impl Guard<'_> {
    fn take<'a>(lock: &'a RwLock, how: &str) -> (Guard<'a>, String) {
        let guard = match how {
            "reads" => Guard::Read(lock.read().unwrap()),
            "writes" => Guard::Write(lock.write().unwrap()),
            _ => Guard::Read(RwLockWriteGuard::downgrade(lock.write().unwrap()).unwrap()),
        };
        let key = match &guard {
            Guard::Read(guard) => guard.lock_key(),
            Guard::Write(guard) => guard.lock_key(),
        };
        (guard, key)
    }

    fn is_held(&self) -> bool {
        match self {
            Guard::Read(guard) => guard.is_held() && guard.hold().is_held(),
            Guard::Write(guard) => guard.is_held() && guard.hold().is_held(),
        }
    }

    fn loss(&self) -> Option<Loss> {
        match self {
            Guard::Read(guard) => guard.hold().loss(),
            Guard::Write(guard) => guard.hold().loss(),
        }
    }

    fn is_told(&self) -> bool {
        match self {
            Guard::Read(guard) => guard.cancel_token().is_cancelled(),
            Guard::Write(guard) => guard.cancel_token().is_cancelled(),
        }
    }

    fn unlock(self) -> bool {
        match self {
            Guard::Read(guard) => guard.unlock(),
            Guard::Write(guard) => guard.unlock(),
        }
    }
}

/// ELEC-04, for all kinds of hold: the loss is told once and with its reason, a queued writer gets
/// in, and the former holder is out for good.
#[test]
fn a_hold_of_either_side_is_lost_with_its_key() {
    let etcd = EtcdServer::start().unwrap();
    let ways = [LossReason::KeyDeleted, LossReason::KeyOverwritten, LossReason::LeaseGone];
    thread::scope(|scope| {
        for how in ["reads", "writes", "reads after writing"] {
            for (number, reason) in ways.into_iter().enumerate() {
                let etcd = &etcd;
                scope.spawn(move || {
                    // The watch on the own key tells, the TTL is no help.
                    let path = format!("/locks/{how}-{number}").replace(' ', "-");
                    lose(etcd, &path, how, reason);
                });
            }
        }
    });
    wait_keys(&etcd, "/locks/", 0);
}

fn lose(etcd: &EtcdServer, path: &str, how: &str, reason: LossReason) {
    let lock = with_ttl(&connect(etcd), path, LONG);
    let rival = long(&connect(etcd), path);
    let (losses, states) = (lock.loss_events(), lock.connection_events());
    let (guard, key) = Guard::take(&lock, how);
    let waiter = Waiter::queue(&rival, Side::W);
    // Old enough to be watched: a downgrade alone must not show as a loss.
    thread::sleep(ms(1_800));
    assert!(guard.is_held() && waiter.is_waiting(), "{how}: {:?}", guard.loss());
    match reason {
        LossReason::KeyDeleted => drop(etcd.ctl(["del", &key]).unwrap()),
        LossReason::KeyOverwritten => drop(etcd.ctl(["put", &key, "mine"]).unwrap()),
        _ => revoke_lease_of(etcd, &key),
    }
    let (held, took) = timed(|| waiter.enters());
    assert!(took < Duration::from_secs(3), "{how}, {reason:?}: the rival waited {took:?}");
    eventually(LIMIT, "the loss is told", || !guard.is_held() && guard.loss().is_some());
    check_told(&losses, &states, &guard, reason);
    assert_eq!(lock.error_count(), 1, "{:?}", lock.errors());
    assert!(lock.read().unwrap_err().is_lost() && lock.try_write().unwrap_err().is_lost());
    assert!(!guard.unlock(), "{how}, {reason:?}");
    assert_eq!((lock.read_count(), lock.write_count()), (0, 0));
    assert!(lock.try_read().unwrap().is_none());
    assert!(held.verify() && held.unlock());
    assert!(lock.write().unwrap().unlock());
    assert!(losses.try_recv().is_err(), "told twice");
}

fn check_told(
    losses: &Subscription<Loss>,
    states: &Subscription<ConnectionState>,
    guard: &Guard<'_>,
    reason: LossReason,
) {
    let loss = losses.recv_timeout(LIMIT).unwrap();
    assert_eq!(loss.reason, reason);
    assert_eq!(guard.loss().as_ref(), Some(&loss));
    assert!(guard.is_told());
    let lost = states.try_iter().filter(|state| *state == ConnectionState::Lost).count();
    assert_eq!(lost, 1);
}

/// A stranger's write that takes over even the lease is one all the same.
#[test]
fn a_strangers_write_on_the_same_lease_is_told_from_a_downgrade() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    for how in ["writes", "reads after writing"] {
        let lock = long(&client, &format!("/locks/{}", how.len()));
        let (guard, key) = Guard::take(&lock, how);
        let losses = lock.loss_events();
        let found = client.get(key.as_str()).unwrap().unwrap();
        let stranger = connect(&etcd);
        let mut disguised = found.value.clone();
        disguised.push(b' ');
        let lease = i64::from_str_radix(&lease_of(&key), 16).unwrap();
        stranger.put_with_lease(key.as_str(), disguised, lease).unwrap();
        let loss = losses.recv_timeout(LIMIT).unwrap();
        assert_eq!(loss.reason, LossReason::KeyOverwritten, "{how}");
        assert!(!guard.is_held() && !guard.unlock());
    }
    wait_keys(&etcd, "/locks/", 0);
}

// ----- API-02: ownership inside the write -------------------------------------------------------

/// API-02: once a rival is in, reading or writing, the former writer's guarded writes are refused.
#[test]
fn a_former_writer_writes_nothing() {
    let etcd = EtcdServer::start().unwrap();
    let (ours, theirs) = (connect(&etcd), connect(&etcd));
    let mut unaware = 0;
    for round in 0..6 {
        let path = format!("/locks/{round}");
        let (lock, rival) = (long(&ours, &path), long(&theirs, &path));
        let guard = lock.write().unwrap();
        assert!(guard.put("/data", "first").unwrap());
        let side = if round % 2 == 0 { Side::W } else { Side::R };
        let waiter = Waiter::queue(&rival, side);
        revoke_lease_of(&etcd, &guard.lock_key());
        let second = waiter.enters();
        // At once, so that it is etcd that refuses and not the holder that knows.
        unaware += u32::from(guard.is_held());
        assert!(!guard.put("/data", "late").unwrap());
        let txn = Txn::new().and_then([Op::get("/data"), Op::put("/late", "late")]);
        assert_eq!(guard.txn(txn).unwrap(), FencedTxn::Fenced);
        assert!(!guard.is_held());
        assert_eq!(value(&theirs, "/data").as_deref(), Some("first"));
        assert_eq!(value(&theirs, "/late"), None);
        if let Held::W(second) = &second {
            assert!(guard.fencing_token() < second.fencing_token());
            assert!(second.put("/data", "second").unwrap());
            assert!(!guard.put("/data", "late").unwrap());
            assert_eq!(value(&theirs, "/data").as_deref(), Some("second"));
        }
        assert!(second.unlock() && !guard.unlock());
    }
    assert!(unaware > 0, "the former writer always knew before");
}
