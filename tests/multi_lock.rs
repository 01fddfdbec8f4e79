//! Several mutexes locked as one: all or none, in one order for everybody, and lost together.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use etcd_recipes::testing::{CtlProcess, EtcdServer, FaultProxy, Mode, eventually};
use etcd_recipes::{
    CancelToken, Client, ErrorKind, FencedTxn, LossReason, MultiLock, MultiLockGuard, Mutex, Op,
    Txn,
};
use support::*;

const fn send_sync<T: Send + Sync + 'static>() {}
const fn clones<T: Clone>() {}

// They go anywhere, and are tied to no borrow.
const _: () = {
    send_sync::<MultiLock>();
    send_sync::<MultiLockGuard>();
    clones::<MultiLock>();
};

/// Longer than a hold goes without a watch on its own key.
const LASTING: Duration = Duration::from_millis(1_300);

/// Longer than any test: what is lost is not lost by time.
const LONG: Duration = Duration::from_secs(20);

fn long(client: &Client, path: &str) -> Mutex {
    Mutex::builder(client, path).ttl(LONG).build().unwrap()
}

/// The mutexes `/locks/<name>` for these names.
fn mutexes<const N: usize>(client: &Client, names: [&str; N]) -> [Mutex; N] {
    names.map(|name| long(client, &format!("/locks/{name}")))
}

fn set<const N: usize>(client: &Client, names: [&str; N]) -> MultiLock {
    MultiLock::new(mutexes(client, names)).unwrap()
}

/// The only key that stands for the path.
#[track_caller]
fn key(etcd: &EtcdServer, path: &str) -> String {
    let prefix = format!("{path}/");
    let mut keys = keys(etcd, &prefix);
    keys.retain(|key| !key[prefix.len()..].contains('/'));
    assert_eq!(keys.len(), 1, "{keys:?}");
    keys.remove(0)
}

fn kind<T: std::fmt::Debug>(result: etcd_recipes::Result<T>) -> ErrorKind {
    result.unwrap_err().kind()
}

// ----- what a set may be ----------------------------------------------------------------------

#[test]
fn what_is_no_set_is_refused_without_asking_etcd() {
    let nowhere = || Client::connect(["http://127.0.0.1:1"]).unwrap();
    let client = nowhere();
    let [a, b] = mutexes(&client, ["a", "b"]);
    let many = |count: usize| -> Vec<Mutex> {
        (0..count).map(|number| long(&client, &format!("/locks/{number}"))).collect()
    };
    assert_eq!(kind(MultiLock::new([])), ErrorKind::InvalidArgument);
    assert_eq!(kind(MultiLock::new(many(61))), ErrorKind::InvalidArgument);
    assert_eq!(MultiLock::new(many(60)).unwrap().mutexes().len(), 60);
    for twin in [a.clone(), long(&client, "/locks/a")] {
        let error = MultiLock::new([a.clone(), b.clone(), twin]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.to_string().contains("`/locks/a`"), "{error}");
    }
    let other = nowhere();
    let stranger = long(&other, "/locks/c");
    assert_eq!(kind(MultiLock::new([a.clone(), stranger])), ErrorKind::InvalidArgument);
    let set = MultiLock::new([a.clone(), b.clone()]).unwrap();
    client.close().unwrap();
    assert_eq!(kind(MultiLock::new([a, b])), ErrorKind::Closed);
    assert_eq!(kind(set.lock()), ErrorKind::Closed);
    assert_eq!(kind(set.try_lock()), ErrorKind::Closed);
    assert_eq!(kind(set.try_lock_for(ms(10))), ErrorKind::Closed);
}

#[test]
fn one_mutex_is_a_set() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let set = set(&client, ["a"]);
    let guard = set.lock().unwrap();
    assert!(set.try_lock().unwrap().is_none(), "it is not reentrant");
    assert!(guard.is_held() && guard.verify().unwrap() && guard.unlock());
    assert!(set.try_lock().unwrap().unwrap().unlock());
}

#[test]
fn sixty_paths_are_locked_written_under_and_unlocked() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let paths: Vec<String> = (0..60).map(|number| format!("/locks/{number:02}")).collect();
    let set = MultiLock::new(paths.iter().map(|path| long(&client, path))).unwrap();
    drop(set.lock().unwrap());
    let guard = set.try_lock().unwrap().unwrap();
    assert_eq!(keys(&etcd, "/locks/").len(), 60);
    let token = guard.fencing_token("/locks/00").unwrap();
    assert!(paths.iter().all(|path| guard.fencing_token(path) == Some(token)));
    assert_eq!(guard.fencing_token("/locks/60"), None);
    assert!(guard.put("/data", "1").unwrap());
    let txn = Txn::new().and_then([Op::put("/data", "2")]);
    assert!(matches!(guard.txn(txn).unwrap(), FencedTxn::Applied(_)));
    assert_eq!(client.get("/data").unwrap().unwrap().value, b"2");
    assert!(guard.verify().unwrap() && guard.is_held());
    assert!(guard.unlock());
    assert!(keys(&etcd, "/locks/").is_empty());
    // Of sixty, one is gone.
    let guard = set.lock().unwrap();
    client.delete(key(&etcd, "/locks/59")).unwrap();
    assert!(!guard.put("/data", "late").unwrap());
    assert!(!guard.is_held() && !guard.unlock());
    assert_eq!(client.get("/data").unwrap().unwrap().value, b"2");
    wait_keys(&etcd, "/locks/", 0);
}

#[test]
fn the_order_of_naming_is_of_no_importance() {
    let etcd = EtcdServer::start().unwrap();
    let (ours, theirs) = (connect(&etcd), connect(&etcd));
    let (one, other) = (set(&ours, ["a", "b", "c"]), set(&theirs, ["c", "a", "b"]));
    let paths = |set: &MultiLock| -> Vec<String> {
        set.mutexes().iter().map(|mutex| format!("{mutex:?}")).collect()
    };
    assert_eq!(paths(&one), paths(&other));
    thread::scope(|scope| {
        for set in [&one, &other] {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..25 {
                        assert!(set.lock().unwrap().unlock());
                    }
                });
            }
        }
    });
    assert!(keys(&etcd, "/locks/").is_empty());
}

#[test]
fn a_guard_outlives_the_mutexes_and_the_client_and_goes_to_another_thread() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let guard = {
        let set = set(&client, ["a", "b"]);
        let clone = set.clone();
        drop(set);
        clone.lock().unwrap()
    };
    drop(client);
    let view = guard.hold("/locks/a").unwrap();
    assert!(guard.hold("/locks/c").is_none() && guard.loss().is_none());
    assert!(guard.remaining() > LONG / 2 && !guard.cancel_token().is_cancelled());
    let released = thread::spawn(move || guard.verify().unwrap() && guard.unlock());
    assert!(released.join().unwrap());
    assert!(!view.is_held() && view.loss().is_none());
    assert!(keys(&etcd, "/locks/").is_empty());
}

#[test]
fn a_section_returns_its_value_and_says_if_a_hold_was_lost() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let set = set(&client, ["a", "b"]);
    let token = set.with_lock(|guard| guard.fencing_token("/locks/b")).unwrap();
    assert!(token.unwrap() > 0);
    let lost = set.with_lock(|_| client.delete(key(&etcd, "/locks/b")).unwrap());
    assert_eq!(kind(lost), ErrorKind::Lost);
    assert!(keys(&etcd, "/locks/").is_empty());
}

// ----- whom it keeps out ----------------------------------------------------------------------

#[test]
fn sets_and_single_mutexes_exclude_each_other() {
    let etcd = EtcdServer::start().unwrap();
    let (ours, theirs) = (connect(&etcd), connect(&etcd));
    let set_of_three = set(&ours, ["a", "b", "c"]);
    for client in [&ours, &theirs] {
        let singles = mutexes(client, ["a", "b", "c"]);
        let guard = set_of_three.lock().unwrap();
        for single in &singles {
            assert!(single.try_lock().unwrap().is_none());
        }
        assert!(singles[1].try_lock_for(ms(500)).unwrap().is_none());
        assert!(set(client, ["c", "d"]).try_lock().unwrap().is_none());
        assert!(set(client, ["d", "e"]).try_lock().unwrap().unwrap().unlock());
        assert!(guard.unlock());
        for single in &singles {
            let single = single.lock_owned().unwrap();
            assert!(set_of_three.try_lock().unwrap().is_none());
            assert!(single.unlock());
        }
        let other = set(client, ["c", "d"]);
        let guard = other.lock().unwrap();
        assert!(set_of_three.try_lock().unwrap().is_none());
        thread::scope(|scope| {
            let waiter = scope.spawn(|| set_of_three.lock().unwrap());
            wait_contenders(&singles[2], 2);
            assert!(singles[0].try_lock().unwrap().is_none(), "it stands first on `a`");
            assert!(guard.is_held() && !waiter.is_finished());
            assert!(guard.unlock());
            assert!(waiter.join().unwrap().unlock());
        });
    }
    assert!(keys(&etcd, "/locks/").is_empty());
}

/// etcdctl gives the lock back when it is told to end.
fn interrupt(process: &mut CtlProcess) {
    let pid = i32::try_from(process.id()).ok().and_then(rustix::process::Pid::from_raw).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    process.wait().unwrap();
}

#[test]
fn a_set_and_etcdctl_exclude_each_other() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let [a, b] = mutexes(&client, ["a", "b"]);
    let both = MultiLock::new([a, b.clone()]).unwrap();
    let guard = both.lock().unwrap();
    let mut theirs = etcd.spawn_ctl(["lock", "/locks/b"]).unwrap();
    wait_contenders(&b, 2);
    assert!(guard.verify().unwrap() && guard.unlock());
    eventually(LIMIT, "etcdctl is in", || b.contenders().unwrap().len() == 1);
    assert!(both.try_lock().unwrap().is_none());
    thread::scope(|scope| {
        let waiter = scope.spawn(|| both.lock().unwrap());
        wait_contenders(&b, 2);
        assert!(!waiter.is_finished());
        interrupt(&mut theirs);
        assert!(waiter.join().unwrap().unlock());
    });
}

#[test]
fn a_try_with_one_path_busy_writes_nothing() {
    let etcd = EtcdServer::start().unwrap();
    let (ours, theirs) = (connect(&etcd), connect(&etcd));
    let mine = set(&ours, ["a", "b", "c"]);
    // Its session stands, and stays.
    assert!(mine.lock().unwrap().unlock());
    for busy in ["a", "b", "c"] {
        let [rival] = mutexes(&theirs, [busy]);
        let guard = rival.lock().unwrap();
        let revision = etcd.revision().unwrap();
        for _ in 0..3 {
            assert!(mine.try_lock().unwrap().is_none());
        }
        assert_eq!(etcd.revision().unwrap(), revision);
        assert_eq!(keys(&etcd, "/locks/"), [guard.lock_key()]);
        assert!(guard.unlock());
    }
    assert!(mine.try_lock().unwrap().unwrap().unlock());
}

#[test]
fn a_wait_that_runs_into_its_limit_leaves_no_key_on_any_path() {
    let etcd = EtcdServer::start().unwrap();
    let (ours, theirs) = (connect(&etcd), connect(&etcd));
    let mine = set(&ours, ["a", "b", "c"]);
    assert!(mine.lock().unwrap().unlock());
    for busy in ["a", "c"] {
        let [rival] = mutexes(&theirs, [busy]);
        let guard = rival.lock().unwrap();
        for limit in [Duration::ZERO, ms(10), ms(500)] {
            let (tried, took) = timed(|| mine.try_lock_for(limit));
            match tried {
                Ok(None) => {}
                // etcd may have had no time to answer.
                Err(error) if limit < ms(500) => assert!(error.is_unreachable(), "{error}"),
                other => panic!("{other:?}"),
            }
            assert!(took >= limit && took < limit + ms(400), "{took:?}");
            eventually(PROMPT, "no key is left", || keys(&etcd, "/locks/") == [guard.lock_key()]);
        }
        assert!(guard.unlock());
    }
    assert!(mine.try_lock_for(LIMIT).unwrap().unwrap().unlock());
}

#[test]
fn a_thread_that_holds_one_of_the_mutexes_is_told_that_it_would_wait_for_itself() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let [a, b] = mutexes(&client, ["a", "b"]);
    let both = MultiLock::new([a.clone(), b.clone()]).unwrap();
    let guard = b.lock().unwrap();
    let revision = etcd.revision().unwrap();
    assert_eq!(kind(both.lock()), ErrorKind::WouldDeadlock);
    assert_eq!(kind(both.try_lock()), ErrorKind::WouldDeadlock);
    assert_eq!(kind(both.try_lock_for(LIMIT)), ErrorKind::WouldDeadlock);
    assert_eq!(etcd.revision().unwrap(), revision);
    // Another thread is nobody's self.
    thread::scope(|scope| {
        scope.spawn(|| assert!(both.try_lock().unwrap().is_none()));
    });
    assert!(guard.unlock());
    assert!(both.lock().unwrap().unlock());
}

#[test]
fn paths_below_each_other_are_different_locks() {
    let etcd = EtcdServer::start().unwrap();
    let (ours, theirs) = (connect(&etcd), connect(&etcd));
    let both = set(&ours, ["a", "a/b"]);
    for _ in 0..3 {
        let guard = both.lock().unwrap();
        assert_eq!(keys(&etcd, "/locks/").len(), 2);
        let [upper, lower, beside] = mutexes(&theirs, ["a", "a/b", "a/c"]);
        assert!(upper.try_lock().unwrap().is_none() && lower.try_lock().unwrap().is_none());
        assert!(beside.try_lock().unwrap().unwrap().unlock());
        assert!(guard.put("/data", "1").unwrap() && guard.unlock());
    }
    // In two sets.
    let (above, below) = (set(&ours, ["a", "x"]), set(&theirs, ["a/b", "y"]));
    let upper = above.lock().unwrap();
    let lower = below.try_lock().unwrap().expect("a deeper path is another lock");
    assert!(upper.unlock());
    let upper = above.try_lock().unwrap().expect("a key of a deeper path is in nobody's way");
    assert!(both.try_lock().unwrap().is_none());
    assert!(upper.unlock());
    thread::scope(|scope| {
        let waiter = scope.spawn(|| both.lock().unwrap());
        eventually(LIMIT, "it waits", || keys(&etcd, "/locks/").len() == 4);
        assert!(!waiter.is_finished() && lower.unlock());
        let guard = waiter.join().unwrap();
        assert!(above.try_lock().unwrap().is_none() && below.try_lock().unwrap().is_none());
        assert!(guard.unlock());
    });
    assert!(keys(&etcd, "/locks/").is_empty());
}

// ----- losing it ------------------------------------------------------------------------------

/// The key of `/locks/b` goes in some way while `a`, `b` and `c` are held as one, with rivals that
/// wait for `a` and `c`.
fn lose_one(take: impl Fn(&EtcdServer, &str), reason: LossReason) {
    let etcd = EtcdServer::start().unwrap();
    let (ours, theirs) = (connect(&etcd), connect(&etcd));
    let [a, c] = mutexes(&ours, ["a", "c"]);
    // A lease of its own, so that it alone can be revoked.
    let b = Mutex::builder(&ours, "/locks/b").ttl(LONG / 2).build().unwrap();
    let set = MultiLock::new([a.clone(), b.clone(), c.clone()]).unwrap();
    let guard = set.lock().unwrap();
    let [key_a, key_b, key_c] = ["a", "b", "c"].map(|name| key(&etcd, &format!("/locks/{name}")));
    assert_eq!(lease_of(&key_a), lease_of(&key_c));
    assert_ne!(lease_of(&key_a), lease_of(&key_b));
    let witness = |mutex: &Mutex, path: &str| Witness::new(mutex, guard.hold(path).unwrap());
    let witnesses = [witness(&a, "/locks/a"), witness(&b, "/locks/b"), witness(&c, "/locks/c")];
    let neighbour = long(&ours, "/neighbour").lock_owned().unwrap();
    thread::sleep(LASTING);
    thread::scope(|scope| {
        let rivals = ["a", "c"].map(|name| {
            let (theirs, guard) = (&theirs, &guard);
            scope.spawn(move || {
                let rival = long(theirs, &format!("/locks/{name}"));
                let inside = rival.try_lock_for(LIMIT).unwrap().expect("it is let in");
                assert!(!guard.is_held(), "two inside");
                assert!(inside.unlock());
            })
        });
        wait_contenders(&a, 2);
        wait_contenders(&c, 2);
        take(&etcd, &key_b);
        let ((), took) = timed(|| eventually(LIMIT, "the set is lost", || !guard.is_held()));
        assert!(took < PROMPT, "{took:?}");
        for rival in rivals {
            rival.join().unwrap();
        }
    });
    eventually(LIMIT, "the token is cancelled", || guard.cancel_token().is_cancelled());
    assert_eq!(guard.remaining(), Duration::ZERO);
    let [witness_a, witness_b, witness_c] = witnesses;
    witness_b.check(&b, reason, "/locks/b");
    witness_a.check(&a, LossReason::SetLost, "/locks/a");
    witness_c.check(&c, LossReason::SetLost, "/locks/c");
    let loss = guard.loss().unwrap();
    assert_eq!((loss.reason, loss.path.as_str()), (reason, "/locks/b"));
    wait_keys(&etcd, "/locks/", 0);
    assert!(!guard.verify().unwrap());
    assert!(!guard.put("/data", "late").unwrap());
    let txn = Txn::new().and_then([Op::put("/data", "late")]);
    assert_eq!(guard.txn(txn).unwrap(), FencedTxn::Fenced);
    assert!(ours.get("/data").unwrap().is_none(), "a fenced write was written");
    assert!(neighbour.verify().unwrap() && neighbour.unlock(), "the lease lives on");
    // A listener that comes late still hears of it, until the guard is gone.
    let (told, hears) = crossbeam_channel::unbounded();
    a.add_loss_listener(move |loss| told.send(loss.reason).unwrap());
    assert_eq!(hears.recv_timeout(LIMIT).unwrap(), LossReason::SetLost);
    assert!(!guard.unlock());
    assert!(set.lock().unwrap().unlock(), "and is good again");
}

#[test]
fn a_deleted_key_is_the_loss_of_the_set() {
    lose_one(|etcd, key| drop(etcd.ctl(["del", key]).unwrap()), LossReason::KeyDeleted);
}

#[test]
fn a_key_that_is_written_over_is_the_loss_of_the_set() {
    lose_one(|etcd, key| drop(etcd.ctl(["put", key, "?"]).unwrap()), LossReason::KeyOverwritten);
}

#[test]
fn a_revoked_lease_of_one_is_the_loss_of_the_set() {
    lose_one(revoke_lease_of, LossReason::LeaseGone);
}

#[test]
fn a_set_on_one_lease_is_lost_with_it_for_the_leases_reason() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let [a, b, c] = mutexes(&client, ["a", "b", "c"]);
    let set = MultiLock::new([a.clone(), b.clone(), c.clone()]).unwrap();
    let guard = set.lock().unwrap();
    let of = |mutex: &Mutex, path: &str| Witness::new(mutex, guard.hold(path).unwrap());
    let witnesses = [of(&a, "/locks/a"), of(&b, "/locks/b"), of(&c, "/locks/c")];
    revoke_lease_of(&etcd, &key(&etcd, "/locks/b"));
    assert!(!guard.verify().unwrap() && !guard.is_held());
    for (witness, (mutex, path)) in
        witnesses.into_iter().zip([(&a, "/locks/a"), (&b, "/locks/b"), (&c, "/locks/c")])
    {
        witness.check(mutex, LossReason::LeaseGone, path);
    }
    assert!(!guard.unlock());
    assert!(set.lock().unwrap().unlock());
}

#[test]
fn a_young_set_shows_a_deleted_key_in_every_question() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let set = set(&client, ["a", "b", "c"]);
    for name in ["a", "b", "c"] {
        let gone = || {
            let guard = set.lock().unwrap();
            client.delete(key(&etcd, &format!("/locks/{name}"))).unwrap();
            guard
        };
        assert!(!gone().unlock(), "etcd answered that a key was gone");
        wait_keys(&etcd, "/locks/", 0);
        let guard = gone();
        assert!(!guard.verify().unwrap() && !guard.is_held());
        eventually(LIMIT, "the token", || guard.cancel_token().is_cancelled());
        wait_keys(&etcd, "/locks/", 0);
        let guard = gone();
        assert!(!guard.put("/data", "late").unwrap() && !guard.is_held());
        wait_keys(&etcd, "/locks/", 0);
    }
    assert!(client.get("/data").unwrap().is_none());
}

#[test]
fn a_set_is_over_before_the_first_of_its_leases_lets_a_rival_in() {
    let (etcd, proxy, ours) = proxied(Duration::from_secs(5));
    let theirs = connect(&etcd);
    let (a, b) = (long(&ours, "/locks/a"), short(&ours, "/locks/b"));
    let set = MultiLock::new([a.clone(), b.clone()]).unwrap();
    let guard = set.lock().unwrap();
    let witnesses = [
        (Witness::new(&b, guard.hold("/locks/b").unwrap()), &b, LossReason::DeadlinePassed),
        (Witness::new(&a, guard.hold("/locks/a").unwrap()), &a, LossReason::SetLost),
    ];
    assert!(guard.remaining() < TTL);
    proxy.set(Mode::Blackhole);
    let rival = short(&theirs, "/locks/b").lock_owned().unwrap();
    assert!(!guard.is_held(), "two inside");
    let other = long(&theirs, "/locks/a");
    assert!(other.try_lock().unwrap().is_none(), "the key on the long lease still stands");
    for ((witness, mutex, reason), path) in witnesses.into_iter().zip(["/locks/b", "/locks/a"]) {
        witness.check(mutex, reason, path);
    }
    proxy.set(Mode::Pass);
    let took = timed(|| assert!(other.lock().unwrap().unlock())).1;
    assert!(took < LONG / 2, "the key was left to its TTL: {took:?}");
    assert!(rival.unlock() && !guard.unlock());
    wait_keys(&etcd, "/locks/", 0);
}

#[test]
fn closing_one_of_the_mutexes_is_the_loss_of_the_set() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let [a, b] = mutexes(&client, ["a", "b"]);
    let set = MultiLock::new([a.clone(), b.clone()]).unwrap();
    let guard = set.lock().unwrap();
    let witness = Witness::new(&a, guard.hold("/locks/a").unwrap());
    b.close().unwrap();
    assert!(!guard.is_held() && guard.cancel_token().is_cancelled());
    assert_eq!(guard.hold("/locks/b").unwrap().loss().unwrap().reason, LossReason::Closed);
    witness.check(&a, LossReason::SetLost, "/locks/a");
    wait_keys(&etcd, "/locks/", 0);
    assert!(!guard.unlock());
    // What was not sent leaves nothing open on the lease that `a` uses.
    let guard = a.lock().unwrap();
    let lease = lease_of(&guard.lock_key());
    assert!(guard.unlock());
    for _ in 0..3 {
        assert_eq!(kind(set.lock()), ErrorKind::Closed);
        assert_eq!(kind(set.try_lock()), ErrorKind::Closed);
    }
    let guard = a.lock().unwrap();
    assert_eq!(lease_of(&guard.lock_key()), lease);
    assert!(guard.unlock());
    assert_eq!(leases(&etcd), 1);
}

#[test]
fn a_lease_that_is_gone_at_the_enqueue_costs_no_hold_on_the_other() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let (a, b) = (long(&client, "/locks/a"), short(&client, "/locks/b"));
    let set = MultiLock::new([a, b.clone()]).unwrap();
    let neighbour = long(&client, "/neighbour").lock_owned().unwrap();
    for attempt in 0..4 {
        let guard = b.lock().unwrap();
        let key = guard.lock_key();
        assert!(guard.unlock());
        revoke_lease_of(&etcd, &key);
        let guard = match attempt % 2 {
            0 => set.lock().unwrap(),
            _ => set.try_lock().unwrap().unwrap(),
        };
        assert!(guard.verify().unwrap());
        assert!(neighbour.is_held() && neighbour.verify().unwrap());
        assert!(guard.unlock());
    }
    assert!(neighbour.unlock());
}

// ----- waiting --------------------------------------------------------------------------------

#[test]
fn a_waiter_that_loses_one_of_its_places_starts_over_on_all_paths() {
    let etcd = EtcdServer::start().unwrap();
    let (ours, theirs) = (connect(&etcd), connect(&etcd));
    let names = ["a", "b", "c"];
    let mine = set(&ours, names);
    let looks = mutexes(&theirs, names);
    // Its create revision on each path; it is the last in every queue.
    let places = || -> Vec<(i64, usize)> {
        let lines = looks.iter().map(|look| look.contenders().unwrap());
        lines.map(|line| (line.last().map_or(0, |last| last.token), line.len())).collect()
    };
    for (busy, holder) in looks.iter().enumerate() {
        let lengths: Vec<usize> = (0..3).map(|path| 1 + usize::from(path == busy)).collect();
        for gone in names {
            let guard = holder.lock().unwrap();
            thread::scope(|scope| {
                let waiter = scope.spawn(|| mine.lock().unwrap());
                let settled = |after: i64| {
                    eventually(LIMIT, "it stands in every queue", || {
                        let places = places();
                        let token = places[0].0;
                        let everywhere = places.iter().all(|place| place.0 == token);
                        let alone = places.iter().map(|place| place.1).eq(lengths.clone());
                        if everywhere && alone && token > after { Ok(token) } else { Err(places) }
                    })
                };
                let first = settled(guard.fencing_token());
                let prefix = format!("/locks/{gone}/");
                let mut keys = keys(&etcd, &prefix);
                keys.retain(|key| *key != guard.lock_key());
                assert_eq!(keys.len(), 1);
                etcd.ctl(["del", &keys[0]]).unwrap();
                let (second, took) = timed(|| settled(first));
                assert!(took < ms(1_500), "`{gone}` with `{busy}` busy: {took:?}");
                assert!(!waiter.is_finished() && guard.unlock());
                let guard = waiter.join().unwrap();
                assert!(names.iter().all(|name| {
                    guard.fencing_token(&format!("/locks/{name}")) == Some(second)
                }));
                assert!(guard.verify().unwrap() && guard.unlock());
            });
            assert!(keys(&etcd, "/locks/").is_empty());
        }
    }
}

#[test]
fn a_turn_that_comes_just_after_another_place_went_is_not_taken() {
    let etcd = EtcdServer::start().unwrap();
    let (ours, theirs) = (connect(&etcd), connect(&etcd));
    let both = set(&ours, ["a", "b"]);
    let (holder, next) = (long(&theirs, "/locks/a"), long(&ours, "/locks/b"));
    let guard = holder.lock().unwrap();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| both.lock().unwrap());
        wait_contenders(&next, 1);
        let gone = key(&etcd, "/locks/b");
        let neighbour = scope.spawn(|| next.lock_owned().unwrap());
        wait_contenders(&next, 2);
        etcd.ctl(["del", &gone]).unwrap();
        // This client has seen the delete once its next waiter is in.
        let inside = neighbour.join().unwrap();
        assert!(guard.unlock());
        eventually(LIMIT, "it queued anew", || next.contenders().unwrap().len() == 2);
        assert!(!waiter.is_finished() && inside.verify().unwrap());
        assert!(inside.unlock());
        let guard = waiter.join().unwrap();
        assert!(guard.verify().unwrap() && guard.unlock());
    });
    assert!(keys(&etcd, "/locks/").is_empty());
}

#[test]
fn a_key_without_a_lease_on_any_of_the_paths_is_named() {
    let etcd = EtcdServer::start().unwrap();
    let (ours, theirs) = (connect(&etcd), connect(&etcd));
    let mine = set(&ours, ["a", "b"]);
    let guard = long(&theirs, "/locks/a").lock_owned().unwrap();
    etcd.ctl(["put", "/locks/b/stranger", "x"]).unwrap();
    let (error, took) = timed(|| mine.try_lock_for(LIMIT).unwrap_err());
    assert_eq!(error.kind(), ErrorKind::ForeignKey, "{error}");
    assert!(error.to_string().contains("/locks/b/stranger"), "{error}");
    assert!(took < Duration::from_secs(2), "{took:?}");
    eventually(PROMPT, "no key of its own is left", || keys(&etcd, "/locks/").len() == 2);
    assert!(guard.unlock());
}

/// Two paths busy, a set of four waits; `end` ends the wait from outside.
fn end_a_wait(end: impl Fn(&Client, &[Mutex], &CancelToken), kind: ErrorKind) {
    let etcd = EtcdServer::start().unwrap();
    let theirs = connect(&etcd);
    let rivals = set(&theirs, ["b", "c"]);
    let guard = rivals.lock().unwrap();
    for round in 0..6 {
        let ours = connect(&etcd);
        let members = mutexes(&ours, ["a", "b", "c", "d"]);
        let mine = MultiLock::new(members.clone()).unwrap();
        let token = CancelToken::new();
        thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let outcome = token.scope(|| match round % 2 {
                    0 => mine.lock().map(drop),
                    _ => mine.try_lock_for(LIMIT).map(drop),
                });
                (outcome.unwrap_err(), Instant::now())
            });
            eventually(LIMIT, "it waits", || keys(&etcd, "/locks/").len() == 6);
            let ended = Instant::now();
            end(&ours, &members, &token);
            let (error, returned) = waiter.join().unwrap();
            assert_eq!(error.kind(), kind, "{error}");
            let took = returned.saturating_duration_since(ended);
            assert!(took < PROMPT, "{took:?}");
        });
        eventually(PROMPT, "its keys are gone", || keys(&etcd, "/locks/").len() == 2);
        assert!(guard.verify().unwrap());
    }
    assert!(guard.unlock());
}

#[test]
fn closing_the_first_mutex_ends_the_wait_of_its_set() {
    end_a_wait(|_, members, _| members[0].close().unwrap(), ErrorKind::Closed);
}

#[test]
fn closing_any_mutex_ends_the_wait_of_its_set() {
    end_a_wait(|_, members, _| members[3].close().unwrap(), ErrorKind::Closed);
}

#[test]
fn closing_the_client_ends_the_wait_of_a_set() {
    end_a_wait(|client, _, _| client.close().unwrap(), ErrorKind::Closed);
}

#[test]
fn a_cancel_token_ends_the_wait_of_a_set() {
    end_a_wait(|_, _, token| token.cancel(), ErrorKind::Interrupted);
}

// ----- answers that do not come ---------------------------------------------------------------

const PATHS: [&str; 3] = ["/locks/a", "/locks/b", "/locks/c"];

/// A set whose renewals come every 20 s, so that the next request is the test's.
fn calm() -> (EtcdServer, FaultProxy, Client, MultiLock) {
    let (etcd, proxy, client) = proxied(Duration::from_secs(10));
    let set = warm(&etcd, &client, &PATHS);
    (etcd, proxy, client, set)
}

/// A set whose session lives and has settled: its first renewal is proven.
fn warm(etcd: &EtcdServer, client: &Client, paths: &[&str]) -> MultiLock {
    let reads = || etcd.unary_calls().unwrap().get("Range").copied().unwrap_or_default();
    let build =
        |path: &&str| Mutex::builder(client, *path).ttl(Duration::from_secs(60)).build().unwrap();
    let set = MultiLock::new(paths.iter().map(build)).unwrap();
    let before = reads();
    assert!(set.lock().unwrap().unlock());
    eventually(LIMIT, "the first renewal is proven", || reads() > before);
    set
}

#[test]
fn an_enqueue_without_an_answer_is_recognised_by_a_key() {
    let (etcd, proxy, _client, set) = calm();
    for round in 0..6 {
        proxy.drop_next_reply();
        let guard = match round % 2 {
            0 => set.lock().unwrap(),
            _ => set.try_lock().unwrap().unwrap(),
        };
        assert!(!proxy.awaits_request());
        assert_eq!(keys(&etcd, "/locks/").len(), 3);
        assert!(guard.verify().unwrap() && guard.unlock());
        assert!(keys(&etcd, "/locks/").is_empty());
    }
}

#[test]
fn an_enqueue_behind_somebody_without_an_answer_keeps_its_places() {
    let (etcd, proxy, _client, set) = calm();
    let theirs = connect(&etcd);
    for busy in PATHS {
        let holder = long(&theirs, busy);
        let guard = holder.lock().unwrap();
        assert!(set.try_lock().unwrap().is_none());
        thread::scope(|scope| {
            proxy.drop_next_reply();
            let waiter = scope.spawn(|| set.lock().unwrap());
            wait_contenders(&holder, 2);
            let third = scope.spawn(|| long(&theirs, PATHS[1]).lock().unwrap().unlock());
            eventually(LIMIT, "all wait", || keys(&etcd, "/locks/").len() == 5);
            assert!(guard.unlock());
            let guard = waiter.join().unwrap();
            assert!(guard.is_held() && !third.is_finished());
            assert!(guard.unlock() && third.join().unwrap());
        });
        assert!(keys(&etcd, "/locks/").is_empty());
    }
}

#[test]
fn an_enqueue_whose_keys_are_not_found_is_made_anew_and_leaves_no_key() {
    let (etcd, proxy, client) = proxied(Duration::from_secs(5));
    let set = set(&client, ["a", "b", "c"]);
    assert!(set.lock().unwrap().unlock());
    // The enqueue is in the cable, and arrives when nobody waits for it any more.
    proxy.set(Mode::Blackhole);
    let (outcome, took) = timed(|| set.try_lock_for(ms(500)).map(|_| ()));
    assert_eq!(kind(outcome), ErrorKind::Unreachable);
    assert!(took >= ms(500) && took < ms(900), "{took:?}");
    proxy.set(Mode::Pass);
    let guard = set.lock().unwrap();
    assert!(guard.verify().unwrap() && guard.unlock());
    wait_keys(&etcd, "/locks/", 0);
}

#[test]
fn a_release_without_an_answer_is_a_release() {
    let (etcd, proxy, client, set) = calm();
    let neighbour = Mutex::builder(&client, "/neighbour").ttl(Duration::from_secs(60));
    let neighbour = neighbour.build().unwrap().lock_owned().unwrap();
    for _ in 0..3 {
        let guard = set.lock().unwrap();
        proxy.drop_next_reply();
        let (stood, took) = timed(|| guard.unlock());
        assert!(!proxy.awaits_request());
        assert!(stood && took < Duration::from_secs(2) + ms(200), "{stood} {took:?}");
        wait_keys(&etcd, "/locks/", 0);
    }
    assert!(neighbour.verify().unwrap());
    assert!(set.lock().unwrap().unlock() && neighbour.unlock());
}

#[test]
fn a_release_with_etcd_standing_still_is_back_in_time_and_finished_later() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let set = set(&client, ["a", "b", "c"]);
    let guard = set.lock().unwrap();
    etcd.freeze().unwrap();
    let (stood, took) = timed(|| guard.unlock());
    assert!(stood && took < Duration::from_secs(2) + ms(300), "{stood} {took:?}");
    etcd.thaw().unwrap();
    wait_keys(&etcd, "/locks/", 0);
    assert!(set.lock().unwrap().unlock());
    let guard = set.lock().unwrap();
    etcd.freeze().unwrap();
    let ((), took) = timed(|| drop(guard));
    assert!(took < Duration::from_secs(2) + ms(300), "{took:?}");
    etcd.thaw().unwrap();
    wait_keys(&etcd, "/locks/", 0);
}

#[test]
fn a_guarded_write_without_an_answer_says_that_its_outcome_is_unknown() {
    let (_etcd, proxy, client, set) = calm();
    let guard = set.lock().unwrap();
    proxy.drop_next_reply();
    assert_eq!(kind(guard.put("/data", "1")), ErrorKind::OutcomeUnknown);
    assert_eq!(client.get("/data").unwrap().unwrap().value, b"1");
    assert!(guard.is_held() && guard.verify().unwrap() && guard.unlock());
}

// ----- what it costs --------------------------------------------------------------------------

fn txns(count: u64) -> BTreeMap<String, u64> {
    BTreeMap::from([("Txn".to_owned(), count)])
}

#[test]
fn a_lock_and_an_unlock_are_two_calls_however_many_paths() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let set = warm(&etcd, &client, &["/p/1", "/p/2", "/p/3", "/p/4", "/p/5"]);
    let calls = calls_during(&etcd, || assert!(set.lock().unwrap().unlock()));
    assert_eq!(calls, txns(2));
    let calls = calls_during(&etcd, || {
        for _ in 0..25 {
            assert!(set.try_lock().unwrap().unwrap().unlock());
            assert!(set.lock().unwrap().put("/data", "1").unwrap());
        }
    });
    assert_eq!(calls, txns(25 * 5));
    let holder = warm(&etcd, &connect(&etcd), &["/p/5"]);
    let guard = holder.lock().unwrap();
    let calls = calls_during(&etcd, || assert!(set.try_lock().unwrap().is_none()));
    assert_eq!(calls, txns(1));
    assert!(guard.unlock());
}

#[test]
fn sets_of_one_process_hand_over_with_two_calls_each() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let set = warm(&etcd, &client, &["/p/1", "/p/2", "/p/3"]);
    let guard = set.lock().unwrap();
    let calls = calls_during(&etcd, || {
        thread::scope(|scope| {
            let waiters: Vec<_> =
                (0..5).map(|_| scope.spawn(|| set.lock().unwrap().unlock())).collect();
            eventually(LIMIT, "all wait", || keys(&etcd, "/p/").len() == 18);
            thread::sleep(ms(300));
            assert!(guard.unlock());
            assert!(waiters.into_iter().all(|waiter| waiter.join().unwrap()));
        });
    });
    // The reads are the queues' own and those of this test.
    assert_eq!(calls["Txn"], 1 + 5 * 2, "{calls:?}");
}

// ----- many at once ---------------------------------------------------------------------------

/// A small generator of its own, so that a run can be played again.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % limit as u64).unwrap()
    }
}

fn full() -> bool {
    std::env::var_os("ETCD_RECIPES_FULL").is_some_and(|value| value != "0" && !value.is_empty())
}

const STORM_PATHS: usize = 8;

/// Who is inside, path by path.
type Inside = [AtomicUsize; STORM_PATHS];

/// Takes and gives back random sets until the end; how often it held one.
fn storm(client: &Client, seed: u64, end: Instant, inside: &Inside) -> usize {
    let mut dice = Dice(seed);
    let mutexes: Vec<Mutex> =
        (0..STORM_PATHS).map(|path| long(client, &format!("/storm/{path}"))).collect();
    let mut held = 0;
    while Instant::now() < end {
        let mut paths: Vec<usize> = (0..STORM_PATHS).collect();
        for at in 0..STORM_PATHS {
            paths.swap(at, at + dice.below(STORM_PATHS - at));
        }
        paths.truncate(1 + dice.below(4));
        let set = MultiLock::new(paths.iter().map(|path| mutexes[*path].clone())).unwrap();
        let begun = Instant::now();
        let guard = match dice.below(4) {
            0 => set.try_lock().unwrap(),
            1 => match set.try_lock_for(ms(5 * dice.below(20) as u64)) {
                Err(error) if error.is_unreachable() => None,
                tried => tried.unwrap(),
            },
            _ => Some(set.lock().unwrap()),
        };
        let took = begun.elapsed();
        assert!(took < LIMIT, "{took:?} for {paths:?}: nobody gets on");
        let Some(guard) = guard else { continue };
        for path in &paths {
            assert_eq!(inside[*path].fetch_add(1, Ordering::SeqCst), 0, "two inside {path}");
        }
        assert!(guard.is_held());
        if dice.below(8) == 0 {
            thread::sleep(ms(1));
            assert!(guard.put("/written", "1").unwrap());
        }
        assert!(guard.is_held());
        for path in &paths {
            assert_eq!(inside[*path].fetch_sub(1, Ordering::SeqCst), 1, "two inside {path}");
        }
        assert!(guard.unlock());
        held += 1;
    }
    held
}

#[test]
fn random_sets_that_overlap_neither_meet_nor_lock_each_other_up() {
    let etcd = EtcdServer::start().unwrap();
    let clients: Vec<Client> = (0..4).map(|_| connect(&etcd)).collect();
    let inside = Inside::default();
    let begun = Instant::now();
    let end = begun + Duration::from_secs(if full() { 60 } else { 8 });
    let held: Vec<usize> = thread::scope(|scope| {
        let start = |number: usize| {
            let (client, inside) = (&clients[number % 4], &inside);
            let seed = 0x9e37_79b9_7f4a_7c15 ^ (number as u64 + 1) << 20;
            scope.spawn(move || storm(client, seed, end, inside))
        };
        let threads: Vec<_> = (0..16).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    println!("held {held:?} times, all done {:?} after the end", end.elapsed());
    assert!(held.iter().all(|held| *held >= 3), "{held:?}");
    wait_keys(&etcd, "/storm/", 0);
}
