//! Answers that never came: whatever was asked, no key stays behind and nobody holds by mistake.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::{Duration, Instant};

use etcd_recipes::testing::{EtcdCluster, EtcdServer, FaultProxy, Mode, eventually};
use etcd_recipes::{CancelToken, Client, ErrorKind, FencedTxn, Mutex, Op, Txn};
use support::*;

/// A mutex whose renewals come every 20 s, so that the next request is the test's.
fn calm(operation_timeout: Duration) -> (EtcdServer, FaultProxy, Client, Mutex) {
    let (etcd, proxy, client) = proxied(operation_timeout);
    let reads = || etcd.unary_calls().unwrap().get("Range").copied().unwrap_or_default();
    let mutex = Mutex::builder(&client, "/locks/a").ttl(Duration::from_secs(60)).build().unwrap();
    let before = reads();
    assert!(mutex.lock().unwrap().unlock());
    eventually(LIMIT, "the first renewal is proven", || reads() > before);
    (etcd, proxy, client, mutex)
}

#[test]
fn an_enqueue_without_an_answer_is_recognised_by_its_key() {
    let (etcd, proxy, _client, mutex) = calm(Duration::from_secs(10));
    for _ in 0..5 {
        proxy.drop_next_reply();
        let guard = mutex.lock().unwrap();
        assert!(!proxy.awaits_request());
        assert_eq!(keys(&etcd, "/locks/"), [guard.lock_key()]);
        assert!(guard.verify().unwrap() && guard.unlock());
        assert!(keys(&etcd, "/locks/").is_empty());
    }
}

#[test]
fn an_enqueue_behind_somebody_without_an_answer_keeps_its_place() {
    let (etcd, proxy, _client, mutex) = calm(Duration::from_secs(10));
    let others = connect(&etcd);
    let (first, last) = (short(&others, "/locks/a"), short(&others, "/locks/a"));
    let guard = first.lock().unwrap();
    thread::scope(|scope| {
        proxy.drop_next_reply();
        let waiter = scope.spawn(|| mutex.lock_owned().unwrap());
        wait_contenders(&first, 2);
        let third = scope.spawn(|| last.lock().unwrap().unlock());
        wait_contenders(&first, 3);
        assert!(guard.unlock());
        let guard = waiter.join().unwrap();
        assert!(guard.is_held() && !third.is_finished());
        assert!(guard.unlock());
        assert!(third.join().unwrap());
    });
}

#[test]
fn a_try_without_an_answer_is_recognised_by_its_key() {
    let (etcd, proxy, _client, mutex) = calm(Duration::from_secs(10));
    proxy.drop_next_reply();
    let guard = mutex.try_lock().unwrap().unwrap();
    assert!(!proxy.awaits_request());
    assert_eq!(keys(&etcd, "/locks/"), [guard.lock_key()]);
    assert!(guard.unlock());
    let holder = short(&connect(&etcd), "/locks/a");
    let guard = holder.lock().unwrap();
    proxy.drop_next_reply();
    assert!(mutex.try_lock().unwrap().is_none());
    assert!(guard.unlock());
    assert!(keys(&etcd, "/locks/").is_empty());
}

#[test]
fn a_release_without_an_answer_is_a_release() {
    let (etcd, proxy, client, mutex) = calm(Duration::from_secs(10));
    let other = Mutex::builder(&client, "/locks/b").ttl(Duration::from_secs(60)).build().unwrap();
    let neighbour = other.lock().unwrap();
    let guard = mutex.lock().unwrap();
    let lease = lease_of(&guard.lock_key());
    proxy.drop_next_reply();
    let (stood, took) = timed(|| guard.unlock());
    assert!(stood && took < Duration::from_secs(2) + ms(200), "{took:?}");
    assert!(!proxy.awaits_request());
    wait_keys(&etcd, "/locks/a/", 0);
    // The lease carries no new hold, and the old one on it lives on.
    let guard = mutex.lock().unwrap();
    assert_ne!(lease_of(&guard.lock_key()), lease);
    assert!(neighbour.verify().unwrap());
    assert!(guard.unlock() && neighbour.unlock());
    eventually(LIMIT, "the tainted lease is revoked", || leases(&etcd) == 1);
}

#[test]
fn a_guarded_write_without_an_answer_says_that_its_outcome_is_unknown() {
    let (_etcd, proxy, client, mutex) = calm(Duration::from_secs(10));
    let guard = mutex.lock().unwrap();
    proxy.drop_next_reply();
    let error = guard.put("/data", "1").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutcomeUnknown);
    assert!(error.is_ambiguous() && error.to_string().contains("/data"), "{error}");
    assert_eq!(client.get("/data").unwrap().unwrap().value, b"1");
    proxy.drop_next_reply();
    let error = guard.txn(Txn::new().and_then([Op::put("/data", "2")])).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutcomeUnknown);
    assert!(guard.is_held(), "an unknown write is no loss");
    let txn = Txn::new().and_then([Op::put("/data", "3")]);
    assert!(matches!(guard.txn(txn).unwrap(), FencedTxn::Applied(_)));
    proxy.drop_next_reply();
    assert!(guard.verify().unwrap(), "a read is simply asked again");
    assert!(guard.unlock());
}

#[test]
fn a_limit_that_passes_in_a_blackhole_leaves_nothing_behind() {
    let (etcd, proxy, client) = proxied(Duration::from_secs(5));
    let mutex = short(&client, "/locks/a");
    let rival = short(&connect(&etcd), "/locks/a");
    assert!(mutex.lock().unwrap().unlock());
    proxy.set(Mode::Blackhole);
    let (outcome, took) = timed(|| mutex.try_lock_for(ms(500)).map(|_| ()));
    assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Unreachable);
    assert!(took >= ms(500) && took < ms(700), "{took:?}");
    // The enqueue is in the cable, and arrives now.
    proxy.set(Mode::Pass);
    let restored = Instant::now();
    let guard = rival.try_lock_for(TTL + Duration::from_secs(1)).unwrap();
    println!("the rival is in after {:?}", restored.elapsed());
    let guard = guard.expect("a key was left behind");
    wait_keys(&etcd, "/locks/", 1);
    assert!(guard.unlock());
    assert!(mutex.lock().unwrap().unlock());
}

#[test]
fn a_limit_that_passes_in_a_blackhole_while_waiting_says_none() {
    let (etcd, proxy, client) = proxied(Duration::from_secs(5));
    let mutex = short(&client, "/locks/a");
    let holder = short(&connect(&etcd), "/locks/a");
    let guard = holder.lock().unwrap();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| timed(|| mutex.try_lock_for(ms(1_000)).map(|g| g.is_some())));
        wait_contenders(&holder, 2);
        thread::sleep(ms(100));
        proxy.set(Mode::Blackhole);
        let (outcome, took) = waiter.join().unwrap();
        assert!(!outcome.unwrap(), "an answer had placed it behind the holder");
        assert!(took >= ms(1_000) && took < ms(1_200), "{took:?}");
    });
    proxy.set(Mode::Pass);
    eventually(TTL + Duration::from_secs(1), "its key is gone", || {
        keys(&etcd, "/locks/") == [guard.lock_key()]
    });
    assert!(guard.unlock());
}

#[test]
fn an_unanswered_lock_ends_after_the_operation_timeout() {
    let (etcd, proxy, client) = proxied(Duration::from_secs(3));
    let mutex = short(&client, "/locks/a");
    let fresh = Mutex::new(&client, "/locks/b").unwrap();
    assert!(mutex.lock().unwrap().unlock());
    proxy.set(Mode::Blackhole);
    thread::scope(|scope| {
        // With a session, without one, and a try: none waits longer for etcd.
        let calls = [
            scope.spawn(|| timed(|| mutex.lock().map(drop))),
            scope.spawn(|| timed(|| fresh.lock().map(drop))),
            scope.spawn(|| timed(|| mutex.try_lock().map(drop))),
        ];
        for call in calls {
            let (outcome, took) = call.join().unwrap();
            assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Unreachable);
            assert!(took > ms(2_500) && took < ms(4_000), "{took:?}");
        }
    });
    proxy.set(Mode::Pass);
    eventually(TTL + Duration::from_secs(1), "nothing is left", || keys(&etcd, "/").is_empty());
    assert!(mutex.lock().unwrap().unlock() && fresh.lock().unwrap().unlock());
}

#[test]
fn an_unlock_into_a_blackhole_is_true_within_its_budget_and_finished_later() {
    let (etcd, proxy, client) = proxied(Duration::from_secs(5));
    let mutex = Mutex::new(&client, "/locks/a").unwrap();
    let guard = mutex.lock().unwrap();
    proxy.set(Mode::Blackhole);
    let (stood, took) = timed(|| guard.unlock());
    assert!(stood && took < Duration::from_secs(2) + ms(300), "{took:?}");
    proxy.set(Mode::Pass);
    wait_keys(&etcd, "/locks/", 0);
}

#[test]
fn a_cancelled_waiter_returns_promptly_and_takes_its_key_along() {
    let etcd = EtcdServer::start().unwrap();
    let (ours, theirs) = (connect(&etcd), connect(&etcd));
    let holder = short(&ours, "/locks/a");
    let waiting = short(&theirs, "/locks/a");
    let guard = holder.lock().unwrap();
    let mut longest = Duration::ZERO;
    for round in 0..10 {
        let token = CancelToken::new();
        thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let outcome = token.scope(|| match round % 2 {
                    0 => waiting.lock().map(drop),
                    _ => waiting.try_lock_for(LIMIT).map(drop),
                });
                (outcome.unwrap_err(), Instant::now())
            });
            wait_contenders(&holder, 2);
            let cancelled = Instant::now();
            token.cancel();
            let (error, returned) = waiter.join().unwrap();
            assert_eq!(error.kind(), ErrorKind::Interrupted);
            longest = longest.max(returned - cancelled);
        });
        assert_eq!(keys(&etcd, "/locks/"), [guard.lock_key()], "the key is gone at the return");
    }
    println!("interrupted within {longest:?}");
    assert!(longest < PROMPT, "{longest:?}");
    let token = CancelToken::new();
    token.cancel();
    let revision = etcd.revision().unwrap();
    let error = token.scope(|| waiting.lock().map(drop)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Interrupted, "no I/O in a cancelled scope");
    assert_eq!(etcd.revision().unwrap(), revision);
    assert!(token.scope(|| guard.unlock()), "a release is not interrupted");
}

#[test]
fn a_waiter_cancelled_in_a_blackhole_returns_promptly_and_blocks_nobody() {
    let (etcd, proxy, client) = proxied(Duration::from_secs(5));
    let mutex = short(&client, "/locks/a");
    let rival = short(&connect(&etcd), "/locks/a");
    assert!(mutex.lock().unwrap().unlock());
    proxy.set(Mode::Blackhole);
    let token = CancelToken::new();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let error = token.scope(|| mutex.lock().map(drop)).unwrap_err();
            (error, Instant::now())
        });
        thread::sleep(ms(200));
        let cancelled = Instant::now();
        token.cancel();
        let (error, returned) = waiter.join().unwrap();
        assert_eq!(error.kind(), ErrorKind::Interrupted);
        assert!(returned - cancelled < PROMPT, "{:?}", returned - cancelled);
    });
    proxy.set(Mode::Pass);
    let guard = rival.try_lock_for(TTL + Duration::from_secs(1)).unwrap();
    assert!(guard.expect("a key was left behind").unlock());
}

/// A waiter between a holder and one who came later loses its key by `take`; it must go to the
/// tail, and hold only when it is first.
fn lose_the_place(take: impl Fn(&EtcdServer, &str)) {
    let etcd = EtcdServer::start().unwrap();
    let clients = [connect(&etcd), connect(&etcd), connect(&etcd)];
    let [first, second, third] = [0, 1, 2].map(|n| short(&clients[n], "/locks/a"));
    let guard = first.lock().unwrap();
    let order = parking_lot::Mutex::new(Vec::new());
    let run = |name: &'static str, mutex: &Mutex| {
        let guard = mutex.lock().unwrap();
        assert_eq!(keys(&etcd, "/locks/a/").len(), mutex.contenders().unwrap().len());
        assert_eq!(mutex.contenders().unwrap()[0].token, guard.fencing_token());
        order.lock().push(name);
        assert!(guard.unlock());
    };
    thread::scope(|scope| {
        scope.spawn(|| run("second", &second));
        wait_contenders(&first, 2);
        let place = first.contenders().unwrap()[1].token;
        let key = keys(&etcd, "/locks/a/").into_iter().find(|key| *key != guard.lock_key());
        scope.spawn(|| run("third", &third));
        wait_contenders(&first, 3);
        take(&etcd, &key.unwrap());
        eventually(LIMIT, "it queued anew", || {
            let all = first.contenders().unwrap();
            all.len() == 3 && all.iter().all(|contender| contender.token != place)
        });
        assert!(guard.unlock());
    });
    assert_eq!(*order.lock(), ["third", "second"]);
    assert!(keys(&etcd, "/locks/").is_empty());
}

#[test]
fn a_waiter_whose_lease_is_revoked_goes_to_the_tail() {
    lose_the_place(revoke_lease_of);
}

#[test]
fn a_waiter_whose_key_is_deleted_goes_to_the_tail() {
    lose_the_place(|etcd, key| drop(etcd.ctl(["del", key]).unwrap()));
}

#[test]
fn a_panic_with_a_guard_lets_the_next_in() {
    let etcd = EtcdServer::start().unwrap();
    let (ours, theirs) = (connect(&etcd), connect(&etcd));
    let (holder, rival) = (short(&ours, "/locks/a"), short(&theirs, "/locks/a"));
    thread::scope(|scope| {
        let guard = holder.lock().unwrap();
        let waiter = scope.spawn(|| rival.lock().unwrap().unlock());
        wait_contenders(&holder, 2);
        let panicked = catch_unwind(AssertUnwindSafe(move || {
            let _guard = guard;
            panic!("with the lock");
        }));
        assert!(panicked.is_err());
        assert!(waiter.join().unwrap());
    });
}

/// A follower freezes with an enqueue in its socket. The call moves on; the key that comes late
/// must not block the path.
fn thaw_a_follower(keep_the_lease: bool) {
    let cluster = EtcdCluster::start(3).unwrap();
    let leader = cluster.leader().unwrap();
    let follower = (leader + 1) % 3;
    let endpoints: Vec<String> =
        (0..3).map(|step| cluster.member((follower + step) % 3).endpoint()).collect();
    let mut seen = 0;
    for round in 0..5 {
        let path = format!("/locks/{round}");
        let client = patient(Duration::from_secs(10)).endpoints(&endpoints).connect().unwrap();
        let mutex = Mutex::new(&client, &*path).unwrap();
        let other = Mutex::new(&client, "/other").unwrap();
        assert!(mutex.lock().unwrap().unlock());
        // With a hold on it the lease is not revoked, so that the late key can come to stand.
        let neighbour = keep_the_lease.then(|| other.lock().unwrap());
        cluster.member(follower).freeze().unwrap();
        let (guard, took) = timed(|| mutex.lock().unwrap());
        assert!(took > ms(900) && took < Duration::from_secs(5), "{took:?}");
        assert!(guard.verify().unwrap() && guard.unlock());
        let rival = Mutex::new(&connect(cluster.member(leader)), &*path).unwrap();
        cluster.member(follower).thaw().unwrap();
        let thawed = Instant::now();
        let mut blocked = Duration::ZERO;
        while thawed.elapsed() < ms(1_500) {
            let all = rival.contenders().unwrap();
            if !all.is_empty() {
                blocked = thawed.elapsed();
            }
            thread::sleep(ms(2));
        }
        seen += usize::from(!blocked.is_zero());
        println!("round {round}: the path was last blocked {blocked:?} after the thaw");
        assert!(blocked < Duration::from_secs(1), "{blocked:?}");
        assert!(rival.try_lock().unwrap().unwrap().unlock());
        if let Some(neighbour) = neighbour {
            assert!(neighbour.verify().unwrap() && neighbour.unlock());
        }
        client.close().unwrap();
    }
    println!("a late key was seen in {seen} of 5 rounds");
}

#[test]
fn a_late_key_from_a_thawed_follower_is_deleted_on_sight() {
    thaw_a_follower(true);
}

#[test]
fn a_late_enqueue_from_a_thawed_follower_finds_its_lease_revoked() {
    thaw_a_follower(false);
}
