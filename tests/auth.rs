//! Logging in to a real etcd: tokens that go out of date under holds, and what is refused.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fmt::Debug;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use etcd_recipes::testing::{EtcdServer, eventually};
use etcd_recipes::{
    Client, Compare, Error, ErrorKind, LeaseResilience, LossReason, Mutex, Op, OwnedMutexGuard,
    RetryPolicy, SelfHealingKeepAlive, Txn,
};

const PASSWORD: &str = "secret";

/// The most that a call may take whose token has gone out of date.
const SOON: Duration = Duration::from_secs(2);

fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn server() -> EtcdServer {
    EtcdServer::builder().auth("root", PASSWORD).start().unwrap()
}

fn client_as(etcd: &EtcdServer, user: &str, password: &str) -> Client {
    Client::builder().endpoints([etcd.endpoint()]).user(user, password).connect().unwrap()
}

fn root(etcd: &EtcdServer) -> Client {
    client_as(etcd, "root", PASSWORD)
}

fn owned(client: &Client, path: &str, ttl: Duration) -> OwnedMutexGuard {
    Mutex::builder(client, path).ttl(ttl).build().unwrap().lock_owned().unwrap()
}

#[track_caller]
fn soon<T>(what: &str, call: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let value = call();
    assert!(start.elapsed() < SOON, "{what} took {:?}", start.elapsed());
    value
}

#[track_caller]
fn refused<T: Debug>(outcome: etcd_recipes::Result<T>, kind: ErrorKind) -> Error {
    let error = outcome.expect_err("refused");
    assert_eq!(error.kind(), kind, "{error}");
    error
}

fn logins(etcd: &EtcdServer) -> u64 {
    etcd.unary_calls().unwrap().get("Authenticate").copied().unwrap_or(0)
}

fn lease_count(etcd: &EtcdServer) -> usize {
    let list = etcd.ctl(["lease", "list"]).unwrap();
    list.lines().filter(|line| !line.starts_with("found")).count()
}

fn keys_below(etcd: &EtcdServer, prefix: &str) -> usize {
    let keys = etcd.ctl(["get", "--prefix", "--keys-only", prefix]).unwrap();
    keys.lines().filter(|line| !line.is_empty()).count()
}

// ----- tokens that go out of date ---------------------------------------------------------------

/// A client that has logged in on every connection it needs, and holds a lock meanwhile.
struct Worker {
    client: Client,
    guard: OwnedMutexGuard,
}

impl Worker {
    fn start(etcd: &EtcdServer, path: String, ttl: Duration) -> Worker {
        let client = root(etcd);
        let guard = owned(&client, &path, ttl);
        Worker { client, guard }
    }
}

struct Workers {
    lock: Worker,
    wait: Worker,
    put: Worker,
    guarded: Worker,
    read: Worker,
    heal: Worker,
    keep: SelfHealingKeepAlive,
    /// Their TTL is so long that only the watch on the own key can tell of its end, one a round.
    watched: Vec<Worker>,
}

impl Workers {
    fn start(etcd: &EtcdServer) -> Workers {
        let worker = |name: &str| Worker::start(etcd, format!("/held/{name}"), secs(10));
        let heal = worker("heal");
        let writer = heal.client.clone();
        let keep = heal.client.self_healing_keep_alive(secs(10), move |lease| {
            let put = Op::put_with_lease("/nodes/7", "here", lease.id());
            Ok(writer
                .txn(Txn::new().when([Compare::absent("/nodes/7")]).and_then([put]))?
                .succeeded)
        });
        Workers {
            lock: worker("lock"),
            wait: worker("wait"),
            put: worker("put"),
            guarded: worker("guarded"),
            read: worker("read"),
            keep: keep.unwrap(),
            heal,
            watched: (0..3)
                .map(|n| Worker::start(etcd, format!("/held/watched-{n}"), secs(60)))
                .collect(),
        }
    }

    fn all_work(&mut self, etcd: &EtcdServer, when: &str) {
        let contended = Mutex::new(&self.lock.client, "/locks/contended").unwrap();
        let held = soon("a new lock", || contended.lock().unwrap());
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let mutex = Mutex::new(&self.wait.client, "/locks/contended").unwrap();
                let taken = mutex.lock().map(|guard| guard.unlock());
                (taken, Instant::now())
            });
            eventually(secs(3), "it waits", || keys_below(etcd, "/locks/contended/") == 2);
            // Also with a watch that has not come about yet, as it may be in real life.
            let released = Instant::now();
            assert!(held.unlock());
            let (taken, at) = waiter.join().unwrap();
            assert!(taken.unwrap());
            assert!(at < released + SOON, "{when}: the turn came after {:?}", at - released);
        });
        soon("put", || self.put.client.put("/plain", when).unwrap());
        assert!(soon("guarded put", || self.guarded.guard.put("/guarded", when).unwrap()));
        let read = soon("get_prefix", || self.read.client.get_prefix("/guarded").unwrap());
        assert_eq!(read[0].value, when.as_bytes());

        let old = self.keep.current_lease_id();
        let revoked = Instant::now();
        etcd.ctl(["lease", "revoke", &format!("{old:x}")]).unwrap();
        // Noticed at a third of the TTL.
        eventually(secs(4) + SOON, "healed", || {
            self.keep.is_healthy() && self.keep.current_lease_id() != old
        });
        println!("{when}: healed after {:?}", revoked.elapsed());
        let key = self.read.client.get("/nodes/7").unwrap().expect("the key stands again");
        assert_eq!(key.lease, self.keep.current_lease_id());

        let watched = self.watched.pop().unwrap();
        let hold = watched.guard.hold();
        etcd.ctl(["del", &watched.guard.lock_key()]).unwrap();
        assert!(
            hold.cancel_token().wait_for(SOON).unwrap(),
            "{when}: not told of the own key's end"
        );
        assert_eq!(hold.loss().unwrap().reason, LossReason::KeyDeleted);
        assert!(!watched.guard.unlock());

        for (name, worker) in self.holders() {
            assert!(worker.guard.is_held(), "{when}: {name} lost its lock");
            assert!(worker.guard.verify().unwrap(), "{when}: {name} lost its key");
        }
    }

    fn holders(&self) -> impl Iterator<Item = (&'static str, &Worker)> {
        [
            ("lock", &self.lock),
            ("wait", &self.wait),
            ("put", &self.put),
            ("guarded", &self.guarded),
            ("read", &self.read),
            ("heal", &self.heal),
        ]
        .into_iter()
        .chain(self.watched.iter().map(|worker| ("watched", worker)))
    }
}

fn nothing_is_lost_with_the_token(args: &[String]) {
    let etcd = EtcdServer::builder().auth("root", PASSWORD).args(args).start().unwrap();
    let mut workers = Workers::start(&etcd);
    // Tokens live for three seconds, and etcd looks for old ones once a second.
    std::thread::sleep(Duration::from_millis(4_500));
    workers.all_work(&etcd, "expired");
    etcd.restart().unwrap();
    workers.all_work(&etcd, "restarted");
    etcd.ctl(["user", "add", "another:one"]).unwrap();
    workers.all_work(&etcd, "users changed");
    let before = logins(&etcd);
    for (_, worker) in workers.holders() {
        worker.client.put("/again", "").unwrap();
    }
    assert_eq!(logins(&etcd), before, "a token that is good is used again");
}

#[test]
fn nothing_is_lost_with_a_simple_token() {
    nothing_is_lost_with_the_token(&["--auth-token-ttl".to_owned(), "3".to_owned()]);
}

#[test]
fn nothing_is_lost_with_a_jwt() {
    // Its claims hold the revision of the auth store. How it is signed makes no difference here,
    // so the key is the simplest there is.
    let secret = Secret::new();
    let jwt = format!("jwt,priv-key={},sign-method=HS256,ttl=3s", secret.0.display());
    nothing_is_lost_with_the_token(&["--auth-token".to_owned(), jwt]);
}

/// A file that goes with the test.
struct Secret(PathBuf);

impl Secret {
    fn new() -> Secret {
        let path = std::env::temp_dir().join(format!("etcd-recipes-jwt-{}", std::process::id()));
        std::fs::write(&path, "a secret that signs tokens, long enough for it").unwrap();
        Secret(path)
    }
}

impl Drop for Secret {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn authentication_may_be_switched_on_and_off_under_a_hold() {
    let etcd = EtcdServer::builder().args(["--bcrypt-cost", "4"]).start().unwrap();
    let client = root(&etcd);
    let guard = owned(&client, "/locks/a", secs(10));
    etcd.ctl(["role", "add", "root"]).unwrap();
    etcd.ctl(["user", "add", &format!("root:{PASSWORD}")]).unwrap();
    etcd.ctl(["user", "grant-role", "root", "root"]).unwrap();
    etcd.ctl(["auth", "enable"]).unwrap();
    soon("put", || client.put("/a", "1").unwrap());
    assert!(soon("lock", || owned(&client, "/locks/b", secs(10)).unlock()));
    etcd.ctl(["--user", &format!("root:{PASSWORD}"), "auth", "disable"]).unwrap();
    soon("put", || client.put("/a", "2").unwrap());
    assert!(soon("lock", || owned(&client, "/locks/b", secs(10)).unlock()));
    assert!(guard.verify().unwrap());
    assert!(guard.unlock());
}

#[test]
fn many_callers_with_one_stale_token_log_in_once() {
    let etcd = server();
    let client = root(&etcd);
    client.put("/a", "1").unwrap();
    etcd.restart().unwrap();
    // The first call finds the connection broken; the ones after it find the token unknown.
    eventually(secs(10), "etcd is back", || client.get("/a").is_ok());
    let before = logins(&etcd);
    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| client.get("/a").unwrap());
        }
    });
    assert!(logins(&etcd) <= before + 1, "{} logins", logins(&etcd) - before);
}

// ----- refused credentials ----------------------------------------------------------------------

type Call = Box<dyn Fn(&Client) -> etcd_recipes::Result<()>>;

fn calls() -> Vec<(&'static str, Call)> {
    let mutex = |client: &Client| Mutex::new(client, "/locks/a").unwrap();
    vec![
        ("get", Box::new(|c| c.get("/a").map(drop))),
        ("put", Box::new(|c| c.put("/a", "").map(drop))),
        ("wait_ready", Box::new(|c| c.wait_ready(secs(10)))),
        ("lock", Box::new(move |c| mutex(c).lock_owned().map(drop))),
        ("try_lock", Box::new(move |c| mutex(c).try_lock_owned().map(drop))),
        ("try_lock_for", Box::new(move |c| mutex(c).try_lock_owned_for(secs(10)).map(drop))),
        ("is_locked", Box::new(move |c| mutex(c).is_locked().map(drop))),
        (
            "keep_alive",
            Box::new(|c| {
                let writer = c.clone();
                c.self_healing_keep_alive(secs(10), move |lease| {
                    writer.put_with_lease("/nodes/7", "", lease.id()).map(|_| true)
                })
                .map(drop)
            }),
        ),
    ]
}

#[test]
fn a_wrong_password_is_said_at_once_and_not_tried_again() {
    let etcd = server();
    for (name, call) in calls() {
        let client = client_as(&etcd, "root", "wrong");
        let before = logins(&etcd);
        let error = soon(name, || refused(call(&client), ErrorKind::AuthenticationFailed));
        assert!(error.to_string().contains("invalid user ID or password"), "{name}: {error}");
        assert!(!soon("ping", || client.ping()));
        let tried = logins(&etcd) - before;
        assert!(tried <= 3, "{name}: {tried} logins");
        soon("close", || drop(client));
    }
}

#[test]
fn no_credentials_where_they_are_asked_for_is_a_failed_authentication() {
    let etcd = server();
    let before = lease_count(&etcd);
    for (name, call) in calls() {
        let client = Client::connect([etcd.endpoint()]).unwrap();
        soon(name, || refused(call(&client), ErrorKind::AuthenticationFailed));
    }
    // Leases may be granted to anybody; closing the clients has given them back.
    eventually(secs(2), "no lease is left", || lease_count(&etcd) <= before);
}

#[test]
fn etcd_may_come_up_after_the_first_call() {
    let etcd = server();
    etcd.stop().unwrap();
    let limit = secs(10);
    std::thread::scope(|scope| {
        let in_time = |name: &'static str, call: Box<dyn Fn(&Client) + Send>| {
            let client = root(&etcd);
            scope.spawn(move || {
                let start = Instant::now();
                call(&client);
                assert!(start.elapsed() < limit, "{name} took {:?}", start.elapsed());
            });
        };
        in_time("wait_ready", Box::new(move |client| client.wait_ready(limit).unwrap()));
        in_time("get", Box::new(|client| drop(client.get("/a").unwrap())));
        in_time("put", Box::new(|client| assert!(client.put("/a", "").unwrap() > 0)));
        in_time("lock", Box::new(|client| drop(owned(client, "/locks/a", secs(10)))));
        in_time(
            "try_lock_for",
            Box::new(move |client| {
                let mutex = Mutex::new(client, "/locks/b").unwrap();
                assert!(mutex.try_lock_for(limit).unwrap().is_some());
            }),
        );
        std::thread::sleep(secs(3));
        etcd.start_again().unwrap();
    });
}

// ----- missing permissions ----------------------------------------------------------------------

/// A user `app` who may do everything below `/app/` and nothing else.
fn add_app(etcd: &EtcdServer) -> Client {
    etcd.ctl(["role", "add", "app"]).unwrap();
    grant(etcd, "readwrite");
    etcd.ctl(["user", "add", "app:app"]).unwrap();
    etcd.ctl(["user", "grant-role", "app", "app"]).unwrap();
    client_as(etcd, "app", "app")
}

fn grant(etcd: &EtcdServer, permission: &str) {
    etcd.ctl(["role", "grant-permission", "--prefix=true", "app", permission, "/app/"]).unwrap();
}

fn take_away(etcd: &EtcdServer) {
    etcd.ctl(["role", "revoke-permission", "--prefix=true", "app", "/app/"]).unwrap();
}

#[test]
fn what_is_not_permitted_is_named_and_leaves_nothing() {
    let tries = if std::env::var_os("ETCD_RECIPES_FULL").is_some() { 1_000 } else { 100 };
    let etcd = server();
    let client = add_app(&etcd);
    let ttl = secs(2);
    let mutex = Mutex::builder(&client, "/other/locks").ttl(ttl).build().unwrap();
    let (leases, before) = (lease_count(&etcd), etcd.unary_calls().unwrap());
    for _ in 0..tries {
        let error = soon("try_lock", || refused(mutex.try_lock(), ErrorKind::PermissionDenied));
        assert!(error.key().unwrap().starts_with("/other/locks/"), "{error}");
        assert!(error.is_permission());
    }
    let after = etcd.unary_calls().unwrap();
    assert_eq!(after["Txn"] - before.get("Txn").unwrap_or(&0), tries, "none is tried again");
    let error = soon("lock", || refused(mutex.lock(), ErrorKind::PermissionDenied));
    assert!(error.key().unwrap().starts_with("/other/locks/"), "{error}");
    let error = soon("get", || refused(client.get("/other/a"), ErrorKind::PermissionDenied));
    assert_eq!(error.key(), Some("/other/a"));
    let error = soon("put", || refused(client.put("/other/a", ""), ErrorKind::PermissionDenied));
    assert_eq!(error.key(), Some("/other/a"));
    assert!(client.ping(), "a refusal is an answer");
    client.wait_ready(secs(1)).unwrap();
    eventually(ttl + secs(1), "no lease is left", || lease_count(&etcd) <= leases);
    assert!(owned(&client, "/app/locks", ttl).unlock(), "what is permitted works");
}

#[test]
fn a_holder_whose_role_is_taken_away_is_told_by_its_deadline() {
    // Asked for all the time, or by nobody: the reason is the same.
    for polled in [true, false] {
        let etcd = server();
        let client = add_app(&etcd);
        let ttl = secs(3);
        let mutex = Mutex::builder(&client, "/app/locks").ttl(ttl).build().unwrap();
        let losses = mutex.loss_events();
        let guard = mutex.lock().unwrap();
        let before = logins(&etcd);
        let taken = Instant::now();
        take_away(&etcd);
        if polled {
            eventually(ttl, "lost", || !guard.is_held());
        }
        let loss = losses.recv_timeout(ttl).expect("told by the deadline");
        assert!(taken.elapsed() < ttl + Duration::from_millis(200), "{:?}", taken.elapsed());
        assert_eq!(loss.reason, LossReason::AuthRevoked);
        assert!(!guard.unlock());
        // One for each connection whose token is out of date, and not one for each attempt.
        assert!(logins(&etcd) - before <= 3, "{} logins", logins(&etcd) - before);

        let error = refused(mutex.lock(), ErrorKind::PermissionDenied);
        assert!(error.key().unwrap().starts_with("/app/locks/"), "{error}");
        grant(&etcd, "readwrite");
        // The old key stands until etcd ends its lease: it could not be removed.
        let guard = mutex.try_lock_for(ttl + secs(2)).unwrap().expect("free after the TTL");
        assert!(guard.unlock());
    }
}

#[test]
fn a_waiter_that_may_no_longer_look_is_told_and_its_key_goes() {
    for (name, restart, left) in [
        ("nothing happens", false, None),
        ("restart", true, None),
        ("no reads", true, Some("write")),
    ] {
        let etcd = server();
        let app = add_app(&etcd);
        let holder = owned(&root(&etcd), "/app/locks", secs(10));
        let ttl = secs(3);
        let waiting = Mutex::builder(&app, "/app/locks").ttl(ttl).build().unwrap();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| refused(waiting.lock(), ErrorKind::PermissionDenied));
            eventually(secs(3), "it waits", || keys_below(&etcd, "/app/locks/") == 2);
            take_away(&etcd);
            if let Some(permission) = left {
                grant(&etcd, permission);
            }
            if restart {
                etcd.restart().unwrap();
            }
            let changed = Instant::now();
            let error = waiter.join().unwrap();
            println!("{name}: told after {:?}: {error}", changed.elapsed());
            assert!(error.key().unwrap().starts_with("/app/locks/"), "{error}");
            assert!(changed.elapsed() < ttl + secs(1), "{name}: {:?}", changed.elapsed());
        });
        // A restart of etcd starts the TTL over.
        eventually(ttl + secs(2), "its key is gone", || keys_below(&etcd, "/app/locks/") == 1);
        assert!(holder.unlock());
    }
}

#[test]
fn a_self_healing_key_without_its_role_says_so_and_heals_with_it() {
    let etcd = server();
    let client = add_app(&etcd);
    let tries = Arc::new(AtomicU32::new(0));
    let policy = RetryPolicy::exponential(Duration::from_millis(250), secs(1));
    let writer = client.clone();
    let counted = tries.clone();
    let keep = SelfHealingKeepAlive::builder(&client, secs(3))
        .resilience(LeaseResilience::new().retry_policy(policy))
        .start(move |lease| {
            counted.fetch_add(1, Ordering::Relaxed);
            let put = Op::put_with_lease("/app/nodes/7", "here", lease.id());
            let txn = Txn::new().when([Compare::absent("/app/nodes/7")]).and_then([put]);
            Ok(writer.txn(txn)?.succeeded)
        })
        .unwrap();
    let leases = lease_count(&etcd);
    take_away(&etcd);
    etcd.ctl(["lease", "revoke", &format!("{:x}", keep.current_lease_id())]).unwrap();
    let seen = eventually(secs(5), "the refusal is reported", || {
        keep.errors().into_iter().find(Error::is_permission)
    });
    assert!(!keep.is_healthy(), "{seen}");
    let (before, since) = (tries.load(Ordering::Relaxed), Instant::now());
    eventually(secs(6), "four more tries", || tries.load(Ordering::Relaxed) >= before + 4);
    assert!(since.elapsed() > Duration::from_millis(1_500), "{:?} for four", since.elapsed());
    let told = keep.errors().iter().filter(|error| error.is_permission()).count();
    assert_eq!(told, 1, "once, not once per try");
    grant(&etcd, "readwrite");
    eventually(SOON, "healed", || keep.is_healthy());
    assert!(client.get("/app/nodes/7").unwrap().is_some());
    eventually(secs(2), "the leases of failed tries are gone", || lease_count(&etcd) <= leases);
}
