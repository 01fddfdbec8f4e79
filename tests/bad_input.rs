//! What cannot be meant is refused by the constructor, by name, with no etcd anywhere.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::{Duration, Instant};

use etcd_recipes::{
    BoxError, Client, Error, ErrorKind, LeaderLatch, LeaderObserver, LeaderSelector,
    LeaderSelectorListener, LeadershipTerm, LeaseResilience, MultiLock, Mutex, MutexBuilder,
    ResilienceConfig, RpcResilience, RwLock, SelfHealingKeepAlive, Semaphore,
};

/// A port on which nothing listens.
const NOWHERE: &str = "http://127.0.0.1:1";

fn client() -> Client {
    Client::connect([NOWHERE]).unwrap()
}

/// It is the caller's fault, and the message names the value.
#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T, Error>, value: &str) {
    let error = result.expect_err(value);
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    assert!(error.is_invalid_argument());
    assert!(error.to_string().contains(value), "`{value}` is not named in: {error}");
}

/// Whatever runs here did no I/O: with nobody to talk to it would wait for seconds.
#[track_caller]
fn at_once<R>(f: impl FnOnce() -> R) -> R {
    let begun = Instant::now();
    let result = f();
    assert!(begun.elapsed() < Duration::from_millis(500), "{:?}", begun.elapsed());
    result
}

/// Each with the name that the refusal has to show.
const BAD_PATHS: [(&str, &str); 6] = [
    ("", "``"),
    ("/", "`/`"),
    ("/locks/", "`/locks/`"),
    ("locks//a", "`locks//a`"),
    ("//locks", "`//locks`"),
    ("/locks/\0a", "`/locks/\\0a`"),
];

fn selector(client: &Client, path: &str) -> Result<LeaderSelector, Error> {
    LeaderSelector::builder(client, path).on_lead(|_| Ok(())).build()
}

#[test]
fn paths() {
    let client = client();
    for (path, named) in BAD_PATHS {
        refused(at_once(|| Mutex::new(&client, path)), named);
        refused(at_once(|| Mutex::builder(&client, path).build()), named);
        refused(at_once(|| RwLock::new(&client, path)), named);
        refused(at_once(|| RwLock::builder(&client, path).build()), named);
        refused(at_once(|| Semaphore::new(&client, path, 1)), named);
        refused(at_once(|| Semaphore::builder(&client, path, 1).build()), named);
        refused(at_once(|| Semaphore::delete(&client, path)), named);
        refused(at_once(|| selector(&client, path)), named);
        refused(at_once(|| LeaderLatch::new(&client, path)), named);
        refused(at_once(|| LeaderLatch::builder(&client, path).build()), named);
        refused(at_once(|| LeaderObserver::new(&client, path)), named);
        refused(at_once(|| LeaderObserver::builder(&client, path).build()), named);
    }
    for path in ["a", "/a", "a/b", "/locks/orders", "/ö/ü"] {
        assert!(Mutex::new(&client, path).is_ok());
        assert!(RwLock::new(&client, path).is_ok());
        assert!(Semaphore::new(&client, path, 1).is_ok());
        assert!(selector(&client, path).is_ok());
        assert!(LeaderLatch::new(&client, path).is_ok());
        assert!(LeaderObserver::new(&client, path).is_ok());
    }
}

#[test]
fn times_to_live_and_names_of_every_exclusive_recipe() {
    let client = client();
    let short = Duration::from_millis(999);
    let zero = Duration::ZERO;
    refused(at_once(|| RwLock::builder(&client, "/a").ttl(short).build()), "1s");
    refused(at_once(|| Semaphore::builder(&client, "/a", 1).ttl(short).build()), "1s");
    refused(at_once(|| LeaderLatch::builder(&client, "/a").ttl(short).build()), "1s");
    refused(at_once(|| RwLock::builder(&client, "/a").ttl(zero).build()), "0ns");
    refused(at_once(|| Semaphore::builder(&client, "/a", 1).ttl(zero).build()), "0ns");
    refused(at_once(|| LeaderLatch::builder(&client, "/a").ttl(zero).build()), "0ns");
    let lead = || LeaderSelector::builder(&client, "/a").on_lead(|_| Ok(()));
    refused(at_once(|| lead().ttl(short).build()), "1s");
    refused(at_once(|| lead().ttl(zero).build()), "0ns");
    refused(at_once(|| lead().client_id("a/b").build()), "`a/b`");
    refused(at_once(|| RwLock::builder(&client, "/a").client_id("a/b").build()), "`a/b`");
    refused(at_once(|| Semaphore::builder(&client, "/a", 1).client_id("a:b").build()), "`a:b`");
    refused(at_once(|| LeaderLatch::builder(&client, "/a").client_id("").build()), "``");
}

#[test]
fn numbers_of_permits() {
    let client = client();
    refused(at_once(|| Semaphore::new(&client, "/a", 0)), "0 permits");
    refused(at_once(|| Semaphore::builder(&client, "/a", 0).build()), "0 permits");
    assert!(Semaphore::new(&client, "/a", u32::MAX).is_ok());
    let three = Semaphore::new(&client, "/a", 3).unwrap();
    let second = Duration::from_secs(1);
    for (asked, named) in [(0, "0 permits"), (4, "4 permits"), (u32::MAX, "4294967295 permits")] {
        refused(at_once(|| three.acquire_many(asked)), named);
        refused(at_once(|| three.try_acquire_many(asked)), named);
        refused(at_once(|| three.try_acquire_many_for(asked, second)), named);
    }
    refused(at_once(|| three.acquire_many(4)), "of 3 at most");
    refused(at_once(|| three.acquire_many(4)), "Semaphore[/a]");
    refused(at_once(|| three.resize(0)), "0 permits");
    // More than one transaction can hold.
    let many = Semaphore::new(&client, "/a", 1_000).unwrap();
    refused(at_once(|| many.acquire_many(101)), "101 permits");
    refused(at_once(|| many.acquire_many(101)), "of 1 to 100");
    refused(at_once(|| many.try_acquire_many(101)), "101 permits");
    refused(at_once(|| many.try_acquire_many_for(101, second)), "101 permits");
}

#[test]
fn sets_of_mutexes() {
    let client = client();
    let mutexes = |count: usize| {
        let mutex = |n| Mutex::new(&client, format!("/locks/{n}")).unwrap();
        (0..count).map(mutex).collect::<Vec<_>>()
    };
    refused(at_once(|| MultiLock::new([])), "a set of 0 mutexes");
    refused(at_once(|| MultiLock::new(mutexes(61))), "a set of 61 mutexes");
    assert!(at_once(|| MultiLock::new(mutexes(60))).is_ok());
    assert!(at_once(|| MultiLock::new(mutexes(1))).is_ok());
    let a = Mutex::new(&client, "/locks/a").unwrap();
    let b = Mutex::new(&client, "/locks/b").unwrap();
    refused(at_once(|| MultiLock::new([a.clone(), b.clone(), a.clone()])), "`/locks/a`");
    let same = Mutex::new(&client, "/locks/a").unwrap();
    refused(at_once(|| MultiLock::new([a.clone(), b, same])), "`/locks/a`");
    let elsewhere = Mutex::new(&self::client(), "/locks/c").unwrap();
    refused(at_once(|| MultiLock::new([a, elsewhere])), "of one client");
}

#[test]
fn selectors_without_something_to_do_or_with_too_much() {
    struct Listener;
    impl LeaderSelectorListener for Listener {
        fn take_leadership(&self, _term: &LeadershipTerm) -> Result<(), BoxError> {
            Ok(())
        }
    }
    let client = client();
    let builder = || LeaderSelector::builder(&client, "/a");
    refused(at_once(|| builder().build()), "`on_lead`");
    refused(at_once(|| builder().on_relinquish(|_| ()).build()), "`on_lead`");
    let listening = || builder().listener(Box::new(Listener));
    refused(at_once(|| listening().on_lead(|_| Ok(())).build()), "not both");
    refused(at_once(|| listening().on_relinquish(|_| ()).build()), "not both");
    assert!(at_once(|| listening().build()).is_ok());
}

fn with_ttl(client: &Client, ttl: Duration) -> MutexBuilder {
    Mutex::builder(client, "/a").ttl(ttl)
}

#[test]
fn times_to_live() {
    let client = client();
    let seconds = Duration::from_secs;
    refused(at_once(|| with_ttl(&client, Duration::ZERO).build()), "0ns");
    refused(at_once(|| with_ttl(&client, seconds(9_000_000_001)).build()), "9000000001s");
    refused(at_once(|| with_ttl(&client, Duration::MAX).build()), "18446744073709551615");
    // Below 2 s the timing is a matter of taste, and has to be stated.
    for ttl in [Duration::from_nanos(1), Duration::from_millis(999), seconds(1)] {
        refused(at_once(|| with_ttl(&client, ttl).build()), "1s");
        refused(at_once(|| with_ttl(&client, ttl).build()), "renew_interval");
    }
    let explicit = LeaseResilience::new()
        .margin(Duration::from_millis(200))
        .renew_interval(Duration::from_millis(300))
        .hedge_delay(Duration::from_millis(100))
        .attempt_limit(Duration::from_millis(300));
    assert!(with_ttl(&client, seconds(1)).resilience(explicit).build().is_ok());
    for ttl in [Duration::from_millis(1_001), seconds(2), seconds(3_600)] {
        assert!(with_ttl(&client, ttl).build().is_ok(), "{ttl:?}");
    }
}

#[test]
fn times_to_live_of_presence_leases() {
    let client = client();
    let keep =
        |ttl| at_once(|| SelfHealingKeepAlive::builder(&client, ttl).start(|_| Ok(true))).map(drop);
    refused(keep(Duration::ZERO), "0");
    refused(keep(Duration::from_secs(9_000_000_001)), "9000000001s");
    refused(keep(Duration::from_millis(500)), "1s");
    refused(
        at_once(|| client.self_healing_keep_alive(Duration::ZERO, |_| Ok(true))).map(drop),
        "0",
    );
    refused(at_once(|| client.grant_lease(Duration::ZERO)), "zero");
}

#[test]
fn margins_and_renewals_that_do_not_fit() {
    let client = client();
    let ttl = Duration::from_secs(10);
    let build = |resilience| at_once(|| with_ttl(&client, ttl).resilience(resilience).build());
    for margin in [5, 6, 100] {
        let margin = Duration::from_secs(margin);
        refused(build(LeaseResilience::new().margin(margin)), &format!("{margin:?}"));
    }
    assert!(build(LeaseResilience::new().margin(Duration::from_millis(3_500))).is_ok());
    let seconds = Duration::from_secs;
    refused(build(LeaseResilience::new().renew_interval(seconds(9))), "9s");
    refused(build(LeaseResilience::new().hedge_delay(seconds(7))), "7s");
    refused(build(LeaseResilience::new().attempt_limit(seconds(8))), "8s");
    refused(build(LeaseResilience::new().renew_interval(Duration::ZERO)), "renew_interval");
    refused(build(LeaseResilience::new().hedge_delay(Duration::ZERO)), "hedge_delay");
    refused(build(LeaseResilience::new().attempt_limit(Duration::ZERO)), "attempt_limit");
    refused(build(LeaseResilience::new().renew_interval(Duration::MAX)), "renew_interval");
    // The client's settings are the mutex's defaults, so they are checked against its TTL, too.
    let config = ResilienceConfig::new().lease(LeaseResilience::new().margin(seconds(3)));
    let strict = Client::builder().endpoints([NOWHERE]).resilience(config).connect().unwrap();
    refused(at_once(|| with_ttl(&strict, seconds(5)).build()), "3s");
    assert!(with_ttl(&strict, seconds(10)).build().is_ok());
}

#[test]
fn endpoints() {
    let none: [&str; 0] = [];
    refused(at_once(|| Client::connect(none)), "endpoint");
    refused(at_once(|| Client::builder().connect()), "endpoint");
    for bad in [
        "",
        "http://",
        "http://host",
        "host",
        "ftp://host:2379",
        "http://host:0",
        "http://host:65536",
        "http://host:port",
        "http://:2379",
        "http://host:2379/path",
        "http://user@host:2379",
        "http://ho st:2379",
    ] {
        refused(at_once(|| Client::connect([bad])), &format!("`{bad}`"));
        refused(at_once(|| Client::connect([NOWHERE, bad])), &format!("`{bad}`"));
    }
    for good in ["127.0.0.1:2379", "http://[::1]:2379", "http://etcd.example:2379/"] {
        assert!(at_once(|| Client::connect([good])).is_ok(), "{good}");
    }
}

#[cfg(not(any(feature = "tls", feature = "tls-aws-lc")))]
#[test]
fn https_without_the_feature() {
    let url = "https://127.0.0.1:2379";
    refused(at_once(|| Client::connect([url])), url);
    refused(at_once(|| Client::connect([url])), "`tls`");
}

#[test]
fn names_and_limits_of_a_client() {
    let builder = || Client::builder().endpoints([NOWHERE]);
    for (id, named) in [("", "``"), ("a/b", "`a/b`"), ("a:b", "`a:b`"), ("a\0", "`a\\0`")] {
        refused(at_once(|| builder().client_id(id).connect()), named);
        let client = client();
        refused(at_once(|| Mutex::builder(&client, "/a").client_id(id).build()), named);
    }
    refused(at_once(|| builder().namespace("a\0b").connect()), "`a\\0b`");
    refused(at_once(|| builder().user("", "secret").connect()), "user name");
    refused(at_once(|| builder().connect_timeout(Duration::ZERO).connect()), "connect_timeout");
    let second = Duration::from_secs(1);
    refused(at_once(|| builder().keep_alive(Duration::ZERO, second).connect()), "interval");
    refused(at_once(|| builder().keep_alive(second, Duration::ZERO).connect()), "timeout");
    let rpc = RpcResilience::new().operation_timeout(Duration::ZERO);
    let config = ResilienceConfig::new().rpc(rpc);
    refused(at_once(|| builder().resilience(config).connect()), "operation_timeout");
}

#[test]
fn a_refusal_does_not_show_the_password() {
    let builder = Client::builder().endpoints(["nonsense"]).user("root", "hunter2");
    assert!(!format!("{builder:?}").contains("hunter2"));
    let error = builder.connect().unwrap_err();
    assert!(!format!("{error} {error:?}").contains("hunter2"));
}
