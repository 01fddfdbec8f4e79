//! The stage of one cell: an etcd of its own, a client behind a proxy, and what happens to a call.

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use etcd_recipes::testing::{EtcdServer, FaultProxy};
use etcd_recipes::{
    CancelToken, Client, Error, Mutex, ResilienceConfig, RpcResilience, WatchResilience,
};
use parking_lot::Mutex as Cellar;

use crate::table::Situation::{self, *};
use crate::table::{Left, OP, S, TTL, Window};

/// How long anything may take that is bound to happen.
const LIMIT: Duration = Duration::from_secs(20);

/// How long a short outage lasts.
const SHORT_OUTAGE: Duration = Duration::from_secs(1);

/// A TTL under which nothing is renewed while a cell lasts, so that the next request of the
/// client is the one under test.
const UNRENEWED: Duration = Duration::from_secs(60);

/// A TTL that is longer than a cell looks at what is left.
const OUTLASTING: Duration = Duration::from_secs(20);

/// What a call waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Waits {
    /// For etcd's answer alone.
    ForEtcd,
    /// For its turn, without a limit or with one.
    InQueue,
    InQueueFor,
    /// For a barrier's lift, without a limit or with one.
    AtGate,
    AtGateFor,
    /// For something that etcd has no part in.
    ForNobody,
}

impl Waits {
    fn for_others(self) -> bool {
        !matches!(self, Waits::ForEtcd | Waits::ForNobody)
    }

    fn has_limit(self) -> bool {
        matches!(self, Waits::InQueueFor | Waits::AtGateFor)
    }
}

/// What a call came to.
#[derive(Debug)]
pub(crate) struct Seen {
    pub(crate) value: String,
    pub(crate) after: Duration,
    /// What stands in etcd, where it is not what it should be.
    pub(crate) amiss: Vec<String>,
}

pub(crate) struct Stage<'a> {
    pub(crate) client: Client,
    pub(crate) path: String,
    pub(crate) situation: Situation,
    endpoint: String,
    etcd: &'a EtcdServer,
    witness: &'a Client,
    proxy: FaultProxy,
    scope: CancelToken,
    left: Left,
    /// Keys of somebody else's, with their leases.
    others: Cellar<Vec<(String, i64)>>,
    /// Leases that earlier cells have left.
    earlier: HashSet<String>,
    before: AtomicU64,
    seen: Cellar<Option<Seen>>,
}

impl<'a> Stage<'a> {
    pub(crate) fn new(
        etcd: &'a EtcdServer,
        witness: &'a Client,
        situation: Situation,
        left: Left,
    ) -> Stage<'a> {
        static CELLS: AtomicU64 = AtomicU64::new(0);
        let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
        // The proxy takes connections also for an etcd that is gone.
        let endpoint = if situation == KilledBefore { etcd.endpoint() } else { proxy.endpoint() };
        let client = connect(&endpoint);
        Stage {
            path: format!("/cells/{}", CELLS.fetch_add(1, Ordering::Relaxed)),
            client,
            endpoint,
            situation,
            etcd,
            witness,
            proxy,
            scope: CancelToken::new(),
            left,
            others: Cellar::default(),
            earlier: leases(etcd).into_iter().collect(),
            before: AtomicU64::new(0),
            seen: Cellar::default(),
        }
    }

    // ----- what rows are made of --------------------------------------------------------------

    /// Another client with the same options, on the same way.
    pub(crate) fn another_client(&self) -> Client {
        connect(&self.endpoint)
    }

    /// The TTL of what stands before the call.
    pub(crate) fn ttl(&self) -> Duration {
        if self.situation == ReplyLost { UNRENEWED } else { TTL }
    }

    /// A mutex whose client has a connection and a session. As long as the client is open, what
    /// is left behind is taken away by it, and not by a TTL that passes.
    pub(crate) fn mutex(&self) -> Mutex {
        self.mutex_with(&self.client, self.lock_ttl())
    }

    /// The TTL of a lock or a candidate under test.
    pub(crate) fn lock_ttl(&self) -> Duration {
        match self.situation {
            FrozenBefore | FrozenDuring | KilledBefore | CancelledDuring | RecipeClosedDuring => {
                OUTLASTING
            }
            _ => self.ttl(),
        }
    }

    pub(crate) fn mutex_with(&self, client: &Client, ttl: Duration) -> Mutex {
        let mutex = Mutex::builder(client, &self.path).ttl(ttl).build().unwrap();
        assert!(mutex.lock().unwrap().unlock());
        mutex
    }

    /// Somebody else holds the lock.
    pub(crate) fn rival(&self) {
        self.rival_at("0-rival", "somebody");
    }

    /// Somebody else's key stands, here below the path.
    pub(crate) fn rival_at(&self, name: &str, value: impl Into<Vec<u8>>) {
        self.other_key(format!("{}/{name}", self.path), value.into());
    }

    /// Somebody else's barrier stands.
    pub(crate) fn gate(&self) {
        self.other_key(self.path.clone(), "somebody".into());
    }

    fn other_key(&self, key: String, value: Vec<u8>) {
        let (lease, _) = self.witness.grant_lease(UNRENEWED).unwrap();
        self.witness.put_with_lease(key.as_str(), value, lease).unwrap();
        self.others.lock().push((key, lease));
    }

    /// A key of the user's, apart from those of recipes.
    pub(crate) fn data_key(&self) -> String {
        format!("/data{}", self.path)
    }

    pub(crate) fn put_data(&self) {
        self.client.put(self.data_key(), "before").unwrap();
    }

    // ----- the call ---------------------------------------------------------------------------

    /// Makes the call under test, on this thread, in this cell's situation, and notes what came
    /// of it.
    pub(crate) fn call(
        &self,
        waits: Waits,
        close_recipe: &(dyn Fn() + Sync),
        call: impl FnOnce() -> String,
    ) {
        self.set_the_scene(waits, close_recipe);
        let over = AtomicBool::new(false);
        self.note_traffic(waits);
        let begun = Instant::now();
        let (value, ended, since) = thread::scope(|scope| {
            let disturber = scope.spawn(|| self.disturb(waits, close_recipe, &over));
            let value = catch_unwind(AssertUnwindSafe(|| self.scope.scope(call)));
            let ended = Instant::now();
            over.store(true, Ordering::Release);
            let since = disturber.join().expect("the disturber does not panic");
            (value.unwrap_or_else(|_| "panicked".to_owned()), ended, since)
        });
        let answers_since = self.let_etcd_answer().max(ended);
        let mut amiss = self.look_what_is_left(answers_since);
        if self.proxy.awaits_request() {
            amiss.push("no request was made whose answer could be lost".to_owned());
        }
        let after = ended.saturating_duration_since(since.unwrap_or(begun));
        *self.seen.lock() = Some(Seen { value, after, amiss });
    }

    fn set_the_scene(&self, waits: Waits, close_recipe: &(dyn Fn() + Sync)) {
        match self.situation {
            FrozenBefore => self.etcd.freeze().unwrap(),
            KilledBefore => {
                self.etcd.kill().unwrap();
                // So that the client knows that its connections are broken: what is sent on one
                // that it believes in may have arrived.
                self.client.wait_ready(Duration::from_millis(50)).unwrap_err();
            }
            ReplyLost => {
                self.wait_quiet();
                self.proxy.drop_next_reply();
            }
            KeyDeleted | LeaseRevoked if waits == Waits::ForEtcd => self.take_away(self.own_keys()),
            CancelledBefore => self.scope.cancel(),
            ClientClosedBefore => drop(self.client.close()),
            RecipeClosedBefore => close_recipe(),
            CancelledDuring | ClientClosedDuring | RecipeClosedDuring
                if waits == Waits::ForEtcd =>
            {
                self.etcd.freeze().unwrap();
            }
            _ => {}
        }
    }

    /// Does what happens to a call that is under way, and returns from when on it counts.
    fn disturb(
        &self,
        waits: Waits,
        close_recipe: &(dyn Fn() + Sync),
        over: &AtomicBool,
    ) -> Option<Instant> {
        let parked = || self.wait_parked(waits, over);
        match self.situation {
            FrozenDuring if parked() => {
                let since = Instant::now();
                self.etcd.freeze().unwrap();
                Some(since)
            }
            FrozenBriefly if parked() => {
                self.etcd.freeze().unwrap();
                thread::sleep(SHORT_OUTAGE);
                self.etcd.thaw().unwrap();
                Some(self.others_leave())
            }
            ReplyLost if waits.for_others() && !waits.has_limit() && parked() => {
                Some(self.others_leave())
            }
            KeyDeleted | LeaseRevoked if waits.for_others() && parked() => {
                if matches!(waits, Waits::AtGate | Waits::AtGateFor) {
                    let since = Instant::now();
                    self.take_away(self.others.lock().clone());
                    return Some(since);
                }
                let first = self.own_keys();
                self.take_away(first.clone());
                let again = || self.own_keys().iter().any(|key| !first.contains(key));
                wait_until(over, again).then(|| match waits {
                    Waits::InQueue => Some(self.others_leave()),
                    _ => None,
                })?
            }
            CancelledDuring if parked() => {
                let since = Instant::now();
                self.scope.cancel();
                Some(since)
            }
            ClientClosedDuring if parked() => {
                let since = Instant::now();
                let _ = self.client.close();
                Some(since)
            }
            RecipeClosedDuring if parked() => {
                let since = Instant::now();
                close_recipe();
                Some(since)
            }
            _ => None,
        }
    }

    fn note_traffic(&self, waits: Waits) {
        let before = match waits {
            Waits::ForEtcd => self.proxy.unary_calls(),
            Waits::AtGate | Waits::AtGateFor if self.situation != FrozenBefore => self.watchers(),
            Waits::InQueue | Waits::InQueueFor if self.freezes_on_the_way() => self.watchers(),
            _ => 0,
        };
        self.before.store(before, Ordering::Release);
    }

    fn freezes_on_the_way(&self) -> bool {
        matches!(self.situation, FrozenDuring | FrozenBriefly)
    }

    /// How many watches etcd serves; zero when it does not say so.
    fn watchers(&self) -> u64 {
        if self.etcd.pid().is_none() {
            return 0;
        }
        self.etcd.metric("etcd_debugging_mvcc_watcher_total", &[]).map_or(0, |count| count as u64)
    }

    /// Waits until the call is waiting; `false` if it is over.
    fn wait_parked(&self, waits: Waits, over: &AtomicBool) -> bool {
        let before = self.before.load(Ordering::Acquire);
        match waits {
            Waits::ForEtcd => wait_until(over, || self.proxy.unary_calls() > before),
            // The queue is watched once the call has had the answer that placed it.
            Waits::InQueue | Waits::InQueueFor if self.freezes_on_the_way() => {
                wait_until(over, || !self.own_keys().is_empty() && self.watchers() > before)
            }
            Waits::InQueue | Waits::InQueueFor => wait_until(over, || !self.own_keys().is_empty()),
            Waits::AtGate | Waits::AtGateFor => wait_until(over, || self.watchers() > before),
            // Too early is as good: it is refused at its start, with the same outcome.
            Waits::ForNobody => {
                thread::sleep(Duration::from_millis(50));
                true
            }
        }
    }

    /// Waits until the client has nothing more to ask.
    fn wait_quiet(&self) {
        let end = Instant::now() + LIMIT;
        let mut calls = self.proxy.unary_calls();
        let mut since = Instant::now();
        while since.elapsed() < Duration::from_millis(200) {
            assert!(Instant::now() < end, "the client does not come to rest");
            thread::sleep(Duration::from_millis(10));
            let now = self.proxy.unary_calls();
            if now != calls {
                (calls, since) = (now, Instant::now());
            }
        }
    }

    // ----- etcd -------------------------------------------------------------------------------

    /// Our keys, with their leases. A semaphore's count is configuration, and stays.
    fn own_keys(&self) -> Vec<(String, i64)> {
        let others = self.others.lock();
        let found = self.witness.get_prefix(self.path.as_str()).unwrap();
        let below = format!("{}/", self.path);
        let count = format!("{below}permits");
        found
            .iter()
            .map(|kv| (kv.key_text(), kv.lease))
            .filter(|(key, _)| *key == self.path || key.starts_with(&below))
            .filter(|(key, _)| *key != count)
            .filter(|(key, _)| others.iter().all(|(other, _)| other != key))
            .collect()
    }

    /// Our leases, in etcd's own spelling.
    fn own_leases(&self) -> Vec<String> {
        let others: HashSet<String> =
            self.others.lock().iter().map(|(_, lease)| format!("{lease:x}")).collect();
        let mut leases = leases(self.etcd);
        leases.retain(|lease| !others.contains(lease) && !self.earlier.contains(lease));
        leases
    }

    fn take_away(&self, keys: Vec<(String, i64)>) {
        for (key, lease) in keys {
            if self.situation == LeaseRevoked {
                self.witness.revoke_lease(lease).unwrap();
            } else {
                self.witness.delete(key).unwrap();
            }
        }
    }

    fn others_leave(&self) -> Instant {
        let since = Instant::now();
        for (_, lease) in self.others.lock().drain(..) {
            self.witness.revoke_lease(lease).unwrap();
        }
        since
    }

    /// Ends the outage, if there is one, and returns from when on etcd answers.
    fn let_etcd_answer(&self) -> Instant {
        match self.situation {
            KilledBefore => self.etcd.start_again().unwrap(),
            _ => self.etcd.thaw().unwrap(),
        }
        Instant::now()
    }

    fn look_what_is_left(&self, since: Instant) -> Vec<String> {
        let mut amiss = Vec::new();
        match self.left {
            Left::Any => {}
            Left::Key | Left::Pair => {
                let keys = self.own_keys();
                let expected = if self.left == Left::Key { 1 } else { 2 };
                if keys.len() != expected {
                    amiss.push(format!("keys {keys:?}"));
                }
            }
            Left::NoKey => amiss.extend(self.expect_no_keys(since + S)),
            Left::NoKeyAtTtl => amiss.extend(self.expect_no_keys(since + TTL + S)),
            Left::Nothing => {
                amiss.extend(self.expect_no_keys(since + S));
                amiss.extend(self.expect_no_leases(since + TTL + S));
            }
            Left::NothingAtTtl => {
                amiss.extend(self.expect_no_keys(since + TTL + S));
                amiss.extend(self.expect_no_leases(since + TTL + S));
            }
            Left::NotWritten => {
                if self.witness.get(self.data_key()).unwrap().is_some() {
                    amiss.push("the write was done".to_owned());
                }
            }
        }
        amiss
    }

    /// Absent once is not enough: a request that is on its way may bring a key back.
    fn expect_no_keys(&self, until: Instant) -> Option<String> {
        let mut absent_since = None;
        loop {
            let keys = self.own_keys();
            let now = Instant::now();
            if keys.is_empty() {
                let since = *absent_since.get_or_insert(now);
                if now >= since + Duration::from_millis(200) {
                    return None;
                }
            } else {
                absent_since = None;
                if now >= until {
                    return Some(format!("keys {keys:?}"));
                }
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn expect_no_leases(&self, until: Instant) -> Option<String> {
        loop {
            let leases = self.own_leases();
            if leases.is_empty() {
                return None;
            }
            if Instant::now() >= until {
                return Some(format!("leases {leases:?}"));
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    // ----- the end ----------------------------------------------------------------------------

    /// Closes the client; whatever has happened, nothing of it outlives its TTL.
    pub(crate) fn end(self) -> Seen {
        let mut seen = self.seen.lock().take().expect("the row has made its call");
        let _ = self.client.close();
        let closed = Instant::now();
        let left = [self.expect_no_keys(closed + TTL + S), self.expect_no_leases(closed + TTL + S)];
        seen.amiss.extend(left.into_iter().flatten().map(|left| format!("in the end: {left}")));
        self.others_leave();
        seen
    }
}

impl Seen {
    /// Why this is not what was expected; nothing if it is.
    pub(crate) fn differs(&self, value: &str, when: Window) -> Vec<String> {
        let mut differs = self.amiss.clone();
        if self.value != value {
            differs.push(format!("returned {}", self.value));
        }
        if self.after < when.from || self.after > when.to {
            differs.push(format!("returned after {:.2?}", self.after));
        }
        differs
    }
}

pub(crate) fn connect(endpoint: &str) -> Client {
    let resilience = ResilienceConfig::new().rpc(RpcResilience::new().operation_timeout(OP)).watch(
        WatchResilience::new()
            .progress_interval(Duration::from_millis(500))
            .progress_timeout(Duration::from_millis(500)),
    );
    let client = Client::builder().endpoints([endpoint]).resilience(resilience).connect().unwrap();
    client.wait_ready(LIMIT).unwrap();
    client
}

/// All leases, in etcd's own spelling.
fn leases(etcd: &EtcdServer) -> Vec<String> {
    let list = etcd.ctl(["lease", "list"]).unwrap();
    list.lines()
        .skip_while(|line| !line.starts_with("found"))
        .skip(1)
        .map(|line| line.trim().trim_start_matches('0').to_owned())
        .filter(|lease| !lease.is_empty())
        .collect()
}

/// Waits for a condition; `false` if the call is over first.
fn wait_until(over: &AtomicBool, condition: impl Fn() -> bool) -> bool {
    while !over.load(Ordering::Acquire) {
        if condition() {
            return true;
        }
        thread::sleep(Duration::from_millis(5));
    }
    false
}

/// A result as the table writes it.
pub(crate) fn show<T>(result: Result<T, Error>, value: impl FnOnce(T) -> String) -> String {
    match result {
        Ok(ok) => format!("Ok({})", value(ok)),
        Err(error) => format!("Err({:?})", error.kind()),
    }
}

/// The same for values that show themselves.
pub(crate) fn plain<T: std::fmt::Debug>(result: Result<T, Error>) -> String {
    show(result, |value| format!("{value:?}"))
}
