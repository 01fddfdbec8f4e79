//! What the tests of leases under faults share: how long things may take, a registration that
//! heals, the renewals that a proxy saw, and a process that can be frozen.

#![allow(dead_code, unreachable_pub, reason = "each test file uses a part of it")]

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use etcd_recipes::testing::{
    Direction, EtcdCluster, EtcdServer, FaultProxy, Frame, FrameKind, boot_nanos, eventually,
};
use etcd_recipes::{Client, Compare, Hold, LeaseEvent, Mutex, Op, SelfHealingKeepAlive, Txn};
use parking_lot::Mutex as Lock;

/// How long anything may take that is bound to happen.
pub const LIMIT: Duration = Duration::from_secs(20);

/// What the cases allow on top of a figure.
pub const SLACK: Duration = Duration::from_secs(1);

pub const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Whether the figures of the field reports are asked for, instead of shorter ones.
pub fn full() -> bool {
    std::env::var_os("ETCD_RECIPES_FULL").is_some_and(|value| value != "0" && !value.is_empty())
}

/// The TTL: that of the reports in a full run, else the shortest that etcd grants.
pub fn ttl() -> Duration {
    Duration::from_secs(if full() { 5 } else { 2 })
}

/// The default margin of a TTL.
pub fn margin(ttl: Duration) -> Duration {
    (ttl / 10).max(ms(200))
}

/// What is left of a hold at the moment its next renewal is due.
pub fn left_when_due(ttl: Duration) -> Duration {
    ttl - ttl / 3 - margin(ttl)
}

pub fn mutex(client: &Client, path: &str, ttl: Duration) -> Mutex {
    Mutex::builder(client, path).ttl(ttl).build().unwrap()
}

/// Waits until a renewal has just counted: little of the TTL is gone.
pub fn wait_just_renewed(hold: &Hold, ttl: Duration) {
    wait_for_remaining(hold, ttl, |left| left > ttl - margin(ttl) - ms(60));
}

/// Waits until the next renewal is about to be sent.
pub fn wait_renewal_due(hold: &Hold, ttl: Duration) {
    wait_just_renewed(hold, ttl);
    wait_for_remaining(hold, ttl, |left| left < left_when_due(ttl) + ms(60));
}

fn wait_for_remaining(hold: &Hold, ttl: Duration, wanted: impl Fn(Duration) -> bool) {
    let end = boot_nanos() + nanos(ttl * 2);
    loop {
        let left = hold.remaining();
        assert!(!left.is_zero(), "the hold was lost while waiting: {:?}", hold.loss());
        if wanted(left) {
            return;
        }
        assert!(boot_nanos() < end, "renewals do not come: {left:?} left");
        std::thread::sleep(ms(2));
    }
}

pub fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap()
}

/// The deadline of a hold on the boot-time clock; a bit too late, never too early.
pub fn deadline(hold: &Hold) -> u64 {
    let left = nanos(hold.remaining());
    boot_nanos() + left
}

/// The lease that a contender's key names.
pub fn lease_of(key: &str) -> i64 {
    let name = key.rsplit('/').next().unwrap();
    i64::from_str_radix(name.split('-').next().unwrap(), 16).unwrap()
}

pub fn revoke(etcd: &EtcdServer, lease: i64) {
    etcd.ctl(["lease", "revoke", &format!("{lease:x}")]).unwrap();
}

/// The lease on which a key stands, in etcd's own words; `None`: there is no such key.
pub fn lease_on(etcd: &EtcdServer, key: &str) -> Option<i64> {
    let answer = etcd.ctl(["get", key, "--write-out", "json"]).unwrap();
    let number = answer.split("\"lease\":").nth(1)?;
    number.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

/// A key that is kept present by a healing lease, and what was told of the lease.
pub struct Registration {
    pub keep: SelfHealingKeepAlive,
    pub events: Arc<Lock<Vec<(u64, LeaseEvent)>>>,
}

impl Registration {
    pub fn new(client: &Client, key: &str, ttl: Duration) -> Registration {
        let events: Arc<Lock<Vec<(u64, LeaseEvent)>>> = Arc::default();
        let keep = SelfHealingKeepAlive::builder(client, ttl)
            .listener({
                let events = events.clone();
                move |event| events.lock().push((boot_nanos(), event.clone()))
            })
            .start({
                let (writer, key) = (client.clone(), key.to_owned());
                move |lease| {
                    let put = Op::put_with_lease(key.as_str(), "here", lease.id());
                    let free = [Compare::absent(key.as_str())];
                    Ok(writer.txn(Txn::new().when(free).and_then([put]))?.succeeded)
                }
            })
            .unwrap();
        Registration { keep, events }
    }

    /// The names of the events so far.
    pub fn story(&self) -> Vec<&'static str> {
        self.events.lock().iter().map(|(_, event)| name_of(event)).collect()
    }

    /// Nothing worse than a suspension was told.
    #[track_caller]
    pub fn assert_never_expired(&self) {
        let story = self.story();
        assert!(!story.iter().any(|name| ["Expired", "Failed"].contains(name)), "{story:?}");
    }
}

fn name_of(event: &LeaseEvent) -> &'static str {
    match event {
        LeaseEvent::Suspended { .. } => "Suspended",
        LeaseEvent::Expired { .. } => "Expired",
        LeaseEvent::Restored { .. } => "Restored",
        LeaseEvent::Failed { .. } => "Failed",
        _ => "?",
    }
}

/// The renewals of a lease that a recording proxy saw, by when they reached it.
///
/// A renewal is known by its size. A revocation has the same, but it stands alone on its stream
/// and comes on another connection: one that carries no stream of renewals nor begins with one.
pub fn renewals(proxy: &FaultProxy, lease: i64) -> Vec<Frame> {
    let varint = (64 - lease.leading_zeros()).div_ceil(7);
    let size = 5 + 1 + varint;
    let (mut begun, mut renewing) = (BTreeSet::new(), BTreeSet::new());
    let mut streams = BTreeSet::new();
    let mut sent = Vec::new();
    for frame in proxy.frame_log() {
        if frame.direction != Direction::Up || frame.kind != FrameKind::Data {
            continue;
        }
        let first = begun.insert(frame.connection);
        if frame.len == size {
            let again = !streams.insert((frame.connection, frame.stream));
            if first || again {
                renewing.insert(frame.connection);
            }
            sent.push(frame);
        }
    }
    sent.retain(|frame| renewing.contains(&frame.connection));
    sent
}

/// A cluster of three with a proxy before each member.
pub struct Proxied {
    pub cluster: EtcdCluster,
    pub proxies: Vec<FaultProxy>,
}

impl Proxied {
    pub fn start() -> Proxied {
        Proxied::before(EtcdCluster::start(3).unwrap())
    }

    pub fn before(cluster: EtcdCluster) -> Proxied {
        let proxies: Vec<_> =
            cluster.endpoints().iter().map(|url| FaultProxy::start(url).unwrap()).collect();
        Proxied { cluster, proxies }
    }

    pub fn endpoints(&self) -> Vec<String> {
        self.proxies.iter().map(FaultProxy::endpoint).collect()
    }

    /// A client of every member, by way of the proxies, beginning with the one given.
    pub fn client(&self, first: usize) -> Client {
        let mut endpoints = self.endpoints();
        endpoints.rotate_left(first);
        Client::connect(endpoints).unwrap()
    }

    /// A member that answers and is none of these.
    pub fn other(&self, than: &[usize]) -> &EtcdServer {
        let index = (0..self.cluster.size()).find(|index| !than.contains(index)).unwrap();
        self.cluster.member(index)
    }

    /// The member that carries a client's renewals: the one that hears from it for a while.
    pub fn carrier(&self, period: Duration) -> usize {
        let before: Vec<u64> = self.proxies.iter().map(FaultProxy::client_data_frames).collect();
        std::thread::sleep(period);
        let gained = |i: &usize| self.proxies[*i].client_data_frames() - before[*i];
        (0..self.proxies.len()).max_by_key(gained).unwrap()
    }
}

/// This test binary once more, running one test as another process: the one that is frozen.
pub struct Twin {
    child: Child,
    lines: Arc<Lock<Vec<String>>>,
}

const ROLE: &str = "ETCD_RECIPES_TEST_TWIN";

/// What the twin was given; `None` in the test itself.
pub fn role() -> Option<Vec<String>> {
    let role = std::env::var(ROLE).ok()?;
    Some(role.split(' ').map(str::to_owned).collect())
}

impl Twin {
    /// Runs `test` of this binary with a role.
    pub fn start(test: &str, role: &[&str]) -> Twin {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env(ROLE, role.join(" "))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines: Arc<Lock<Vec<String>>> = Arc::default();
        let (told, output) = (lines.clone(), child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines() {
                let Ok(line) = line else { return };
                told.lock().push(line);
            }
        });
        Twin { child, lines }
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Stops the process and waits until it stands still.
    pub fn freeze(&self) {
        self.signal(rustix::process::Signal::STOP);
        let stat = format!("/proc/{}/stat", self.child.id());
        eventually(LIMIT, "the twin stands still", || {
            let stat = std::fs::read_to_string(&stat).unwrap_or_default();
            stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T'))
        });
    }

    pub fn thaw(&self) {
        self.signal(rustix::process::Signal::CONT);
    }

    /// The lines it has printed that begin with `word`, without it.
    pub fn said(&self, word: &str) -> Vec<String> {
        let lines = self.lines.lock();
        // The test harness leaves its own "test … " before the first.
        lines
            .iter()
            .filter_map(|line| line.split_once(&format!("{word}=")))
            .map(|(_, rest)| rest.to_owned())
            .collect()
    }

    /// Waits until it has printed `word=…`.
    #[track_caller]
    pub fn wait_said(&self, word: &str) -> String {
        eventually(LIMIT, word, || self.said(word).first().cloned())
    }
}

impl Drop for Twin {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// In the twin: waits until the test has gone, so that nothing outlives it.
pub fn until_parent_ends() {
    let mut line = String::new();
    let _ = std::io::stdin().read_line(&mut line);
}
