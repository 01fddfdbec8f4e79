//! What the scenario files share: one etcd with a client, eyes on what stands in it, and a record
//! of what a mutex told.

#![allow(dead_code, unreachable_pub, reason = "each test file uses a part of it")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use etcd_recipes::testing::{EtcdServer, FaultProxy, eventually};
use etcd_recipes::{
    Client, ClientBuilder, ConnectionState, Hold, Loss, LossReason, Mutex, MutexBuilder, Recipe,
    ResilienceConfig, RpcResilience, Subscription,
};

/// The shortest TTL of a server with etcd's default timing.
pub const TTL: Duration = Duration::from_secs(2);

/// How long anything may take that is bound to happen.
pub const LIMIT: Duration = Duration::from_secs(20);

/// How promptly a call that is interrupted or closed has to return: 100 ms, and slack for a
/// machine that runs several servers at once.
pub const PROMPT: Duration = Duration::from_millis(500);

pub const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

pub fn connect(etcd: &EtcdServer) -> Client {
    Client::connect([etcd.endpoint()]).unwrap()
}

/// A server and a client that reaches it through a proxy, with the given operation timeout.
pub fn proxied(operation_timeout: Duration) -> (EtcdServer, FaultProxy, Client) {
    let etcd = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    let client = patient(operation_timeout).endpoints([proxy.endpoint()]).connect().unwrap();
    (etcd, proxy, client)
}

/// A client builder with an operation timeout.
pub fn patient(operation_timeout: Duration) -> ClientBuilder {
    let rpc = RpcResilience::new().operation_timeout(operation_timeout);
    Client::builder().resilience(ResilienceConfig::new().rpc(rpc))
}

/// A mutex whose lease is as short as it gets.
pub fn short(client: &Client, path: &str) -> Mutex {
    builder(client, path).build().unwrap()
}

pub fn builder(client: &Client, path: &str) -> MutexBuilder {
    Mutex::builder(client, path).ttl(TTL)
}

/// The unary calls that etcd began to handle while `f` ran, by method.
pub fn calls_during(etcd: &EtcdServer, f: impl FnOnce()) -> BTreeMap<String, u64> {
    let before = etcd.unary_calls().unwrap();
    f();
    let mut calls = etcd.unary_calls().unwrap();
    for (method, count) in before {
        *calls.entry(method).or_default() -= count;
    }
    calls.retain(|_, count| *count > 0);
    calls
}

/// Waits until nobody asks etcd for anything: the reads that help a new watch out, and those that
/// prove a new lease, are over.
pub fn settle(etcd: &EtcdServer) {
    let mut before = etcd.unary_calls().unwrap();
    eventually(Duration::from_secs(60), "quiet", || {
        std::thread::sleep(ms(400));
        let now = etcd.unary_calls().unwrap();
        let quiet = now == before;
        before = now;
        quiet
    });
}

/// The keys under a prefix, in etcd's own words.
pub fn keys(etcd: &EtcdServer, prefix: &str) -> Vec<String> {
    let text = etcd.ctl(["get", prefix, "--prefix", "--keys-only"]).unwrap();
    text.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

/// How many leases etcd has.
pub fn leases(etcd: &EtcdServer) -> usize {
    let text = etcd.ctl(["lease", "list"]).unwrap();
    text.lines().filter(|line| !line.is_empty() && !line.starts_with("found")).count()
}

/// The lease that a contender's key names, in hexadecimal.
pub fn lease_of(key: &str) -> String {
    let name = key.rsplit('/').next().unwrap();
    name.split('-').next().unwrap().to_owned()
}

pub fn revoke_lease_of(etcd: &EtcdServer, key: &str) {
    etcd.ctl(["lease", "revoke", &lease_of(key)]).unwrap();
}

/// Waits until `count` contenders stand on the path.
pub fn wait_contenders(mutex: &Mutex, count: usize) {
    eventually(LIMIT, "contenders", || match mutex.contenders() {
        Ok(all) if all.len() == count => Ok(()),
        other => Err(other),
    });
}

pub fn wait_keys(etcd: &EtcdServer, prefix: &str, count: usize) {
    eventually(LIMIT, "keys", || {
        let keys = keys(etcd, prefix);
        if keys.len() == count { Ok(()) } else { Err(keys) }
    });
}

pub fn timed<R>(f: impl FnOnce() -> R) -> (R, Duration) {
    let begun = Instant::now();
    let result = f();
    (result, begun.elapsed())
}

/// What a mutex tells of one loss, and in which order.
pub struct Witness {
    order: Arc<parking_lot::Mutex<Vec<&'static str>>>,
    losses: Arc<parking_lot::Mutex<Vec<Loss>>>,
    channel: Subscription<Loss>,
    states: Subscription<ConnectionState>,
    watcher: std::thread::JoinHandle<()>,
    hold: Hold,
    errors_before: u64,
}

impl Witness {
    /// Listens in every way there is, from before the loss.
    pub fn new(mutex: &Mutex, hold: Hold) -> Witness {
        let order: Arc<parking_lot::Mutex<Vec<&'static str>>> = Arc::default();
        let losses: Arc<parking_lot::Mutex<Vec<Loss>>> = Arc::default();
        mutex.add_connection_state_listener({
            let (order, hold) = (order.clone(), hold.clone());
            move |state| {
                if *state == ConnectionState::Lost {
                    assert!(!hold.is_held() && hold.cancel_token().is_cancelled());
                    order.lock().push("state");
                }
            }
        });
        mutex.add_error_listener({
            let order = order.clone();
            move |_| order.lock().push("error")
        });
        mutex.add_loss_listener({
            let (order, losses, hold) = (order.clone(), losses.clone(), hold.clone());
            let state = mutex.connection_events();
            move |loss| {
                assert!(!hold.is_held() && hold.cancel_token().is_cancelled());
                assert!(state.try_iter().any(|state| state == ConnectionState::Lost));
                order.lock().push("loss");
                losses.lock().push(loss.clone());
            }
        });
        let watcher = std::thread::spawn({
            let hold = hold.clone();
            move || {
                hold.cancel_token().wait().unwrap();
                assert!(!hold.is_held(), "the token was cancelled before the flag flipped");
            }
        });
        Witness {
            channel: mutex.loss_events(),
            states: mutex.connection_events(),
            order,
            losses,
            watcher,
            errors_before: mutex.error_count(),
            hold,
        }
    }

    /// The loss was told once in every form, in the right order, with this reason.
    #[track_caller]
    pub fn check(self, mutex: &Mutex, reason: LossReason, path: &str) {
        let loss = match self.channel.recv_timeout(LIMIT) {
            Ok(loss) => loss,
            Err(error) => panic!("no loss on the channel: {error}"),
        };
        assert_eq!(loss.reason, reason);
        assert_eq!(loss.path, path);
        assert_eq!(loss.token, self.hold.token());
        assert!(loss.key.starts_with(&format!("{path}/")), "{}", loss.key);
        assert!(loss.last_renewal.elapsed().unwrap() < LIMIT);
        assert!(!self.hold.is_held());
        assert!(self.hold.cancel_token().is_cancelled());
        assert_eq!(self.hold.remaining(), Duration::ZERO);
        assert_eq!(self.hold.loss().as_ref(), Some(&loss));
        let order = self.order.clone();
        eventually(LIMIT, "the listeners ran", || order.lock().contains(&"loss"));
        assert_eq!(*self.losses.lock(), [loss]);
        let told: Vec<_> = self.order.lock().clone();
        assert_eq!(told, ["state", "error", "loss"]);
        assert!(self.channel.try_recv().is_err(), "one loss was told twice");
        assert!(self.states.try_iter().any(|state| state == ConnectionState::Lost));
        assert_eq!(mutex.error_count(), self.errors_before + 1);
        assert!(mutex.errors().last().unwrap().is_lost());
        self.watcher.join().unwrap();
    }
}

/// The threads of this process.
pub fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

/// The open file descriptors of this process.
pub fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}
