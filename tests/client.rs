//! The client on its own: endpoints, readiness, closing, and the odd places it is dropped in.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use etcd_recipes::testing::{EtcdCluster, EtcdServer, FaultProxy, Mode, eventually};
use etcd_recipes::{
    CancelToken, Client, Compare, CompareOp, ErrorKind, Mutex, Op, OpResult, OwnedMutexGuard,
    ResilienceConfig, RetryPolicy, RpcResilience, Txn,
};
use support::*;

#[test]
fn connecting_needs_no_etcd_and_works_once_it_is_up() {
    let etcd = EtcdServer::start().unwrap();
    etcd.stop().unwrap();
    let (client, took) = timed(|| connect(&etcd));
    assert!(took < PROMPT, "{took:?}");
    let (alive, took) = timed(|| client.ping());
    assert!(!alive && took < Duration::from_secs(2) + ms(300), "{took:?}");
    let (ready, took) = timed(|| client.wait_ready(ms(600)));
    assert_eq!(ready.unwrap_err().kind(), ErrorKind::Unreachable);
    assert!(took >= ms(600) && took < ms(900), "{took:?}");
    thread::scope(|scope| {
        let waiter = scope.spawn(|| client.wait_ready(LIMIT));
        etcd.start_again().unwrap();
        waiter.join().unwrap().unwrap();
    });
    assert!(client.ping());
    assert!(short(&client, "/locks/a").lock().unwrap().unlock());
}

#[test]
fn a_wait_for_readiness_is_interrupted_and_closed() {
    let client = Client::connect(["http://127.0.0.1:1"]).unwrap();
    let token = CancelToken::new();
    token.cancel();
    let ready = token.scope(|| client.wait_ready(LIMIT));
    assert_eq!(ready.unwrap_err().kind(), ErrorKind::Interrupted);
    assert!(!token.scope(|| client.ping()));
    thread::scope(|scope| {
        let waiter = scope.spawn(|| (client.wait_ready(LIMIT), Instant::now()));
        thread::sleep(ms(100));
        let begun = Instant::now();
        client.close().unwrap();
        let (ready, ended) = waiter.join().unwrap();
        assert_eq!(ready.unwrap_err().kind(), ErrorKind::Closed);
        assert!(ended - begun < PROMPT);
    });
    assert!(!client.ping() && client.is_closed());
}

#[test]
fn the_basics_do_what_etcdctl_sees() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let revision = client.put("/k/1", "one").unwrap();
    client.put("/k/2", "two").unwrap();
    let found = client.get("/k/1").unwrap().unwrap();
    assert_eq!((found.key_text(), found.value_text()), ("/k/1".to_owned(), "one".to_owned()));
    assert_eq!((found.create_revision, found.version, found.lease), (revision, 1, 0));
    assert_eq!(etcd.ctl(["get", "/k/2", "--print-value-only"]).unwrap().trim(), "two");
    assert_eq!(client.count_prefix("/k/").unwrap(), 2);
    let all = client.get_prefix("/k/").unwrap();
    assert_eq!(all.iter().map(|kv| kv.key_text()).collect::<Vec<_>>(), ["/k/1", "/k/2"]);
    assert!(client.get("/none").unwrap().is_none());

    let (lease, ttl) = client.grant_lease(Duration::from_secs(30)).unwrap();
    assert_eq!(ttl, Duration::from_secs(30));
    client.put_with_lease("/k/3", "three", lease).unwrap();
    assert!(client.time_to_live(lease).unwrap().unwrap() > Duration::from_secs(20));
    client.revoke_lease(lease).unwrap();
    assert!(client.get("/k/3").unwrap().is_none());
    assert!(client.time_to_live(lease).unwrap().is_none());
    client.revoke_lease(lease).unwrap();
    let error = client.put_with_lease("/k/3", "three", lease).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::LeaseGone);

    let txn = Txn::new()
        .when([Compare::absent("/k/9"), Compare::version("/k/1", CompareOp::Equal, 1)])
        .and_then([Op::put("/k/9", "nine"), Op::get_prefix("/k/"), Op::delete("/k/1")]);
    let result = client.txn(txn.clone()).unwrap();
    assert!(result.succeeded);
    let [OpResult::Put, OpResult::Get(found), OpResult::Delete(1)] = &result.results[..] else {
        panic!("{result:?}")
    };
    assert_eq!(found.len(), 3);
    assert!(!client.txn(txn).unwrap().succeeded);
    let twice = Txn::new().and_then([Op::put("/k/1", "a"), Op::put("/k/1", "b")]);
    assert_eq!(client.txn(twice).unwrap_err().kind(), ErrorKind::Rejected);

    assert!(client.delete("/k/9").unwrap() && !client.delete("/k/9").unwrap());
    assert_eq!(client.delete_prefix("/k/").unwrap(), 1);
    assert!(keys(&etcd, "").is_empty());
}

#[test]
fn a_write_without_an_answer_is_not_repeated() {
    let (etcd, proxy, client) = proxied(Duration::from_secs(5));
    client.put("/k", "0").unwrap();
    proxy.drop_next_reply();
    assert_eq!(client.put("/k", "1").unwrap_err().kind(), ErrorKind::OutcomeUnknown);
    assert_eq!(client.get("/k").unwrap().unwrap().version, 2);
    proxy.drop_next_reply();
    assert_eq!(client.get("/k").unwrap().unwrap().version, 2, "a read is repeated");
    drop(etcd);
}

#[test]
fn a_dead_endpoint_among_several_is_passed_over() {
    let etcd = EtcdServer::start().unwrap();
    let dead = "http://127.0.0.1:1".to_owned();
    for endpoints in [[dead.clone(), etcd.endpoint()], [etcd.endpoint(), dead]] {
        let client = Client::connect(endpoints).unwrap();
        let (guard, took) = timed(|| {
            let mutex = short(&client, "/locks/a");
            mutex.lock().unwrap().unlock()
        });
        assert!(guard && took < Duration::from_secs(1), "{took:?}");
    }
}

#[test]
fn calls_and_holds_survive_a_member_that_dies_or_freezes() {
    let cluster = EtcdCluster::start(3).unwrap();
    let ttl = Duration::from_secs(6);
    for freeze in [false, true] {
        let leader = cluster.wait_leader(LIMIT).unwrap();
        // The member asked first is a follower, then the leader.
        for victim in [(leader + 1) % 3, leader] {
            let mut endpoints = cluster.endpoints();
            endpoints.rotate_left(victim);
            let client = Client::connect(endpoints).unwrap();
            let mutex = Mutex::builder(&client, "/locks/a").ttl(ttl).build().unwrap();
            let guard = mutex.lock().unwrap();
            let member = cluster.member(victim);
            if freeze {
                member.freeze().unwrap()
            } else {
                member.kill().unwrap()
            }
            let (value, took) = timed(|| client.get("/k"));
            assert!(value.is_ok() && took < Duration::from_secs(8), "{took:?} {value:?}");
            // Longer than the TTL: renewals found another way.
            let until = Instant::now() + ttl + Duration::from_secs(1);
            while Instant::now() < until {
                assert!(guard.is_held(), "victim {victim}, frozen: {freeze}");
                thread::sleep(ms(20));
            }
            assert!(guard.verify().unwrap() && guard.unlock());
            if freeze {
                member.thaw().unwrap()
            } else {
                member.start_again().unwrap()
            }
            cluster.wait_leader(LIMIT).unwrap();
            eventually(LIMIT, "the member serves", || member.ctl(["endpoint", "health"]));
        }
    }
}

#[test]
fn close_is_idempotent_and_leaves_nothing() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let mutex = short(&client, "/locks/a");
    let guard = mutex.lock().unwrap();
    let clone = client.clone();
    let (closed, took) = timed(|| client.close());
    closed.unwrap();
    assert!(took < Duration::from_secs(1), "{took:?}");
    client.close().unwrap();
    clone.close().unwrap();
    assert_eq!(clone.get("/k").unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(Mutex::new(&client, "/a").unwrap_err().kind(), ErrorKind::Closed);
    assert!(!guard.is_held());
    assert!(keys(&etcd, "").is_empty() && leases(&etcd) == 0);
}

#[test]
fn close_wakes_every_blocked_call() {
    let (etcd, proxy, client) = proxied(Duration::from_secs(30));
    let holder = short(&connect(&etcd), "/locks/a");
    let guard = holder.lock().unwrap();
    let mutex = short(&client, "/locks/a");
    assert!(mutex.try_lock().unwrap().is_none());
    thread::scope(|scope| {
        let lock = scope.spawn(|| (mutex.lock().map(drop), Instant::now()));
        wait_contenders(&holder, 2);
        proxy.set(Mode::BlackholeDown);
        let calls = [
            lock,
            scope.spawn(|| (client.get("/k").map(drop), Instant::now())),
            scope.spawn(|| (client.put("/k", "1").map(drop), Instant::now())),
            scope.spawn(|| (mutex.contenders().map(drop), Instant::now())),
            scope.spawn(|| (mutex.try_lock_for(LIMIT).map(drop), Instant::now())),
        ];
        thread::sleep(ms(200));
        let begun = Instant::now();
        let (closed, took) = timed(|| client.close());
        assert_eq!(closed.unwrap_err().kind(), ErrorKind::CleanupUnconfirmed);
        assert!(took < ms(2_500) + ms(300), "{took:?}");
        for call in calls {
            let (outcome, ended) = call.join().unwrap();
            assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Closed);
            assert!(ended - begun < PROMPT, "{:?}", ended - begun);
        }
    });
    assert!(guard.unlock());
}

#[test]
fn a_frozen_etcd_hangs_neither_close_nor_drop() {
    let etcd = EtcdServer::start().unwrap();
    let (client, dropped) = (connect(&etcd), connect(&etcd));
    let guard = short(&client, "/locks/a").lock_owned().unwrap();
    let other = short(&dropped, "/locks/b").lock_owned().unwrap();
    etcd.freeze().unwrap();
    let (closed, took) = timed(|| client.close());
    println!("close: {took:?}");
    assert_eq!(closed.unwrap_err().kind(), ErrorKind::CleanupUnconfirmed);
    assert!(took < ms(2_500) + ms(300), "{took:?}");
    assert!(!guard.unlock());
    let ((), took) = timed(|| {
        drop(other);
        drop(dropped);
    });
    println!("guard and client dropped: {took:?}");
    assert!(took < ms(4_500) + ms(300), "{took:?}");
    etcd.thaw().unwrap();
    eventually(LIMIT, "the TTL finishes it", || keys(&etcd, "/locks/").is_empty());
}

/// Locks, asks and drops everything.
fn whole_life(endpoint: &str, path: &str) {
    let client = Client::connect([endpoint]).unwrap();
    let mutex = short(&client, path);
    let guard = mutex.lock().unwrap();
    assert!(client.ping() && guard.verify().unwrap());
    assert!(guard.unlock());
    let owned = mutex.try_lock_owned().unwrap().unwrap();
    drop(mutex);
    drop(client);
    drop(owned);
}

#[test]
fn everything_works_inside_tokio() {
    let etcd = EtcdServer::start().unwrap();
    let endpoint = etcd.endpoint();
    let current = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    current.block_on(async { whole_life(&endpoint, "/locks/a") });
    let many =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    many.block_on(async { whole_life(&endpoint, "/locks/a") });
    let (first, second) = (endpoint.clone(), endpoint.clone());
    many.block_on(async {
        let worker = tokio::spawn(async move { whole_life(&first, "/locks/a") });
        let blocking = tokio::task::spawn_blocking(move || whole_life(&second, "/locks/b"));
        worker.await.unwrap();
        blocking.await.unwrap();
    });
    // A client that outlives its maker's runtime, dropped by the runtime's own end.
    let client = Client::connect([endpoint.as_str()]).unwrap();
    let guard = short(&client, "/locks/c").lock_owned().unwrap();
    many.spawn(async move {
        let _kept = (client, guard);
        std::future::pending::<()>().await;
    });
    eventually(LIMIT, "the hold stands", || keys(&etcd, "/locks/c/").len() == 1);
    drop(many);
    wait_keys(&etcd, "/locks/", 0);
    assert_eq!(leases(&etcd), 0);
}

struct LastWill {
    endpoint: String,
    kept: Option<(Client, OwnedMutexGuard)>,
    done: Sender<()>,
}

impl Drop for LastWill {
    fn drop(&mut self) {
        let (client, guard) = self.kept.take().unwrap();
        assert!(guard.is_held() && guard.verify().unwrap());
        client.put("/will", "done").unwrap();
        let mutex = short(&client, "/locks/again");
        let again = mutex.lock().unwrap();
        assert!(again.unlock());
        drop(mutex);
        drop(guard);
        drop(client);
        whole_life(&self.endpoint, "/locks/b");
        self.done.send(()).unwrap();
    }
}

thread_local! {
    static WILL: RefCell<Option<LastWill>> = const { RefCell::new(None) };
}

#[test]
fn a_thread_local_destructor_may_do_it_all() {
    let etcd = EtcdServer::start().unwrap();
    for library_first in [false, true] {
        let (done, ended) = channel();
        let endpoint = etcd.endpoint();
        let thread = thread::spawn(move || {
            // Whoever is used first is destroyed last.
            if library_first {
                whole_life(&endpoint, "/locks/b");
            }
            WILL.with(|will| assert!(will.borrow().is_none()));
            let client = Client::connect([endpoint.as_str()]).unwrap();
            let guard = short(&client, "/locks/a").lock_owned().unwrap();
            WILL.set(Some(LastWill { endpoint, kept: Some((client, guard)), done }));
        });
        ended.recv_timeout(LIMIT).unwrap();
        thread.join().unwrap();
        assert!(keys(&etcd, "/locks/").is_empty() && leases(&etcd) == 0);
    }
}

#[test]
fn unwinding_may_do_it_all() {
    struct InDrop(String);
    impl Drop for InDrop {
        fn drop(&mut self) {
            assert!(thread::panicking());
            whole_life(&self.0, "/locks/b");
        }
    }
    let etcd = EtcdServer::start().unwrap();
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let client = connect(&etcd);
        let mutex = short(&client, "/locks/a");
        let _guard = mutex.lock().unwrap();
        let _last = InDrop(etcd.endpoint());
        panic!("unwind");
    }));
    assert!(panicked.is_err());
    assert!(keys(&etcd, "/locks/").is_empty() && leases(&etcd) == 0);
}

#[test]
fn another_cluster_behind_the_same_address_is_refused() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let mutex = short(&client, "/locks/a");
    let guard = mutex.lock().unwrap();
    etcd.restart_as_other_cluster().unwrap();
    let error = client.get("/k").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WrongCluster, "{error}");
    eventually(LIMIT, "the hold is lost", || !guard.is_held());
    assert!(!guard.unlock());
}

#[test]
fn a_wrong_password_is_told_apart_from_silence() {
    let etcd = EtcdServer::builder().auth("root", "secret").start().unwrap();
    let wrong =
        Client::builder().endpoints([etcd.endpoint()]).user("root", "guess").connect().unwrap();
    let (ready, took) = timed(|| wrong.wait_ready(LIMIT));
    assert_eq!(ready.unwrap_err().kind(), ErrorKind::AuthenticationFailed);
    assert!(took < Duration::from_secs(3), "{took:?}");
    let right =
        Client::builder().endpoints([etcd.endpoint()]).user("root", "secret").connect().unwrap();
    assert!(short(&right, "/locks/a").lock().unwrap().unlock());
}

#[test]
fn authentication_turned_off_and_on_again_costs_no_hold() {
    let etcd = EtcdServer::builder().auth("root", "secret").start().unwrap();
    let client =
        Client::builder().endpoints([etcd.endpoint()]).user("root", "secret").connect().unwrap();
    let mutex = Mutex::builder(&client, "/locks/a").ttl(Duration::from_secs(5)).build().unwrap();
    let guard = mutex.lock().unwrap();
    let outlive_the_ttl = || {
        let until = Instant::now() + Duration::from_secs(6);
        while Instant::now() < until {
            assert!(guard.is_held());
            assert!(client.get("/k").unwrap().is_none());
            thread::sleep(ms(50));
        }
    };
    etcd.ctl(["auth", "disable"]).unwrap();
    outlive_the_ttl();
    // A client that comes while it is off has a login that nobody asks for.
    let late =
        Client::builder().endpoints([etcd.endpoint()]).user("root", "secret").connect().unwrap();
    assert!(late.get("/k").unwrap().is_none());
    let late_guard = short(&late, "/locks/b").lock_owned().unwrap();
    let waiting = short(&late, "/locks/a");
    assert!(waiting.try_lock_for(ms(300)).unwrap().is_none());
    let plain = connect(&etcd);
    plain.put("/plain", "1").unwrap();
    etcd.ctl(["auth", "enable"]).unwrap();
    assert!(late.get("/k").unwrap().is_none());
    outlive_the_ttl();
    assert!(late_guard.is_held() && late_guard.verify().unwrap() && late_guard.unlock());
    assert!(guard.verify().unwrap() && guard.unlock());
    assert!(waiting.lock().unwrap().unlock());
    assert_eq!(plain.get("/plain").unwrap_err().kind(), ErrorKind::AuthenticationFailed);
}

#[test]
fn without_any_resilience_a_lock_still_works_and_an_outage_still_ends_it() {
    let etcd = EtcdServer::start().unwrap();
    let rpc = RpcResilience::new()
        .retry_policy(RetryPolicy::never())
        .operation_timeout(Duration::from_secs(3));
    let config = ResilienceConfig::disabled().rpc(rpc);
    let client =
        Client::builder().endpoints([etcd.endpoint()]).resilience(config).connect().unwrap();
    let mutex = short(&client, "/locks/a");
    let holder = short(&connect(&etcd), "/locks/a");
    assert!(mutex.lock().unwrap().unlock());
    let guard = holder.lock().unwrap();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| mutex.lock().unwrap().unlock());
        wait_contenders(&holder, 2);
        assert!(guard.unlock());
        assert!(waiter.join().unwrap());
    });
    etcd.kill().unwrap();
    let (outcome, took) = timed(|| mutex.lock().map(drop));
    assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Unreachable);
    assert!(took < Duration::from_secs(4), "{took:?}");
}

#[test]
fn a_proxy_that_resets_is_survived() {
    let etcd = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    let client = Client::connect([proxy.endpoint()]).unwrap();
    let mutex = Mutex::builder(&client, "/locks/a").ttl(Duration::from_secs(5)).build().unwrap();
    let guard = mutex.lock().unwrap();
    for _ in 0..5 {
        proxy.cut();
        assert!(client.get("/k").unwrap().is_none());
        thread::sleep(ms(200));
    }
    assert!(guard.is_held() && guard.verify().unwrap() && guard.unlock());
}
