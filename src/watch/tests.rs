//! Watches against a real etcd whose network and data are taken away: what the sink was given is
//! compared with the revisions that etcd handed out for the writes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::{Event, EventKind, Flow, Item, QueueSink, Range, Sink, Snapshot, Spec, Watching};
use crate::client::Client;
use crate::error::{Error, ErrorKind};
use crate::resilience::{ResilienceConfig, RetryPolicy, WatchResilience};
use crate::testing::{EtcdCluster, EtcdServer, FaultProxy, Mode, eventually};
use crate::wait::{Parker, wait};

/// The longest that anything may take.
const SOON: Duration = Duration::from_secs(20);

#[derive(Debug, Clone)]
enum Seen {
    Events { revision: i64, events: Vec<Event> },
    Resync(Snapshot),
    Suspended,
    Resumed,
    Failed(ErrorKind, Option<String>),
}

#[derive(Default)]
struct Recorder {
    seen: Mutex<Vec<Seen>>,
    heard: AtomicUsize,
    /// Refuses the next delivery.
    refuse: AtomicBool,
    in_step: AtomicBool,
}

impl Sink for Recorder {
    fn deliver(&self, revision: i64, events: Vec<Event>) -> Flow {
        if self.refuse.swap(false, Ordering::AcqRel) {
            return Flow::Resync;
        }
        self.seen.lock().push(Seen::Events { revision, events });
        Flow::Continue
    }

    fn resync(&self, snapshot: Snapshot) {
        self.seen.lock().push(Seen::Resync(snapshot));
    }

    fn heard(&self) {
        self.heard.fetch_add(1, Ordering::AcqRel);
    }

    fn in_step(&self) {
        self.in_step.store(true, Ordering::Release);
    }

    fn suspended(&self, _cause: &Error) {
        self.seen.lock().push(Seen::Suspended);
    }

    fn resumed(&self) {
        self.seen.lock().push(Seen::Resumed);
    }

    fn failed(&self, error: Error) {
        self.seen.lock().push(Seen::Failed(error.kind(), error.key().map(str::to_owned)));
    }
}

impl Recorder {
    fn seen(&self) -> Vec<Seen> {
        self.seen.lock().clone()
    }

    fn count(&self, what: fn(&Seen) -> bool) -> usize {
        self.seen.lock().iter().filter(|seen| what(seen)).count()
    }

    fn resyncs(&self) -> usize {
        self.count(|seen| matches!(seen, Seen::Resync(_)))
    }

    fn suspensions(&self) -> usize {
        self.count(|seen| matches!(seen, Seen::Suspended))
    }

    fn resumptions(&self) -> usize {
        self.count(|seen| matches!(seen, Seen::Resumed))
    }

    fn failure(&self) -> Option<(ErrorKind, Option<String>)> {
        self.seen.lock().iter().find_map(|seen| match seen {
            Seen::Failed(kind, key) => Some((*kind, key.clone())),
            _ => None,
        })
    }

    fn was_heard(&self) -> bool {
        self.heard.load(Ordering::Acquire) > 0
    }

    /// The last revision that is delivered or covered.
    fn reached(&self) -> i64 {
        let last = self.seen.lock().iter().rev().find_map(|seen| match seen {
            Seen::Events { revision, .. } => Some(*revision),
            Seen::Resync(snapshot) => Some(snapshot.revision),
            _ => None,
        });
        last.unwrap_or(0)
    }

    fn await_revision(&self, revision: i64) {
        eventually(SOON, "the last write is delivered", || {
            let reached = self.reached();
            if reached >= revision { Ok(()) } else { Err(format!("{reached} of {revision}")) }
        });
    }
}

/// Writes straight to the server, and remembers what etcd made of it.
struct Writer {
    client: Client,
    log: Mutex<Vec<(i64, EventKind, String, String)>>,
}

impl Writer {
    fn new(server: &EtcdServer) -> Writer {
        Writer { client: Client::connect([server.endpoint()]).unwrap(), log: Mutex::default() }
    }

    fn put(&self, key: &str, value: &str) -> i64 {
        let core = self.client.core().clone();
        let (k, v) = (key.as_bytes().to_vec(), value.as_bytes().to_vec());
        let until = core.operation_limit();
        let core2 = core.clone();
        let revision = core
            .block_on("test", None, async move { core2.put("test", &k, &v, 0, until).await })
            .unwrap();
        self.log.lock().push((revision, EventKind::Put, key.to_owned(), value.to_owned()));
        revision
    }

    /// Deletes a key that is there.
    fn delete(&self, key: &str) -> i64 {
        let core = self.client.core().clone();
        let k = key.as_bytes().to_vec();
        let until = core.operation_limit();
        let core2 = core.clone();
        let deleted = core
            .block_on("test", None, async move { core2.delete("test", &k, false, until).await })
            .unwrap();
        assert_eq!(deleted, 1, "{key} is there");
        // Nobody else writes, so the delete took the next revision.
        let revision = self.last() + 1;
        self.log.lock().push((revision, EventKind::Delete, key.to_owned(), String::new()));
        revision
    }

    fn last(&self) -> i64 {
        self.log.lock().last().map_or(1, |(revision, ..)| *revision)
    }

    /// The keys under `prefix` as of `revision`.
    fn state(&self, prefix: &str, revision: i64) -> BTreeMap<String, (i64, String)> {
        let mut state = BTreeMap::new();
        for (at, kind, key, value) in self.log.lock().iter() {
            if *at > revision || !key.starts_with(prefix) {
                continue;
            }
            match kind {
                EventKind::Put => state.insert(key.clone(), (*at, value.clone())),
                EventKind::Delete => state.remove(key),
            };
        }
        state
    }

    /// Checks that the sink saw every write under `prefix` from `from` on exactly once and in
    /// order, or a snapshot of the right state in its place.
    fn check(&self, recorder: &Recorder, prefix: &str, from: i64) {
        let log = self.log.lock().clone();
        let mut covered = from - 1;
        for seen in recorder.seen() {
            match seen {
                Seen::Events { revision, events } => {
                    let got: Vec<_> = events
                        .iter()
                        .map(|e| (e.mod_revision, e.kind, text(&e.key), text(&e.value)))
                        .collect();
                    let due: Vec<_> = log
                        .iter()
                        .filter(|(at, _, key, _)| {
                            *at > covered && *at <= revision && key.starts_with(prefix)
                        })
                        .cloned()
                        .collect();
                    assert_eq!(got, due, "after {covered}");
                    for event in &events {
                        let before = self.state(prefix, event.mod_revision - 1);
                        let prev = before.get(&text(&event.key)).map(|(at, _)| *at);
                        if let Some(seen) = &event.prev {
                            assert_eq!(Some(seen.mod_revision), prev);
                        }
                    }
                    covered = revision;
                }
                Seen::Resync(snapshot) => {
                    assert!(snapshot.revision >= covered);
                    covered = snapshot.revision;
                    let got: BTreeMap<_, _> = snapshot
                        .entries
                        .iter()
                        .map(|e| (text(&e.key), (e.mod_revision, text(&e.value))))
                        .collect();
                    assert_eq!(got, self.state(prefix, covered), "the snapshot at {covered}");
                }
                Seen::Suspended | Seen::Resumed => {}
                Seen::Failed(kind, _) => panic!("failed: {kind:?}"),
            }
        }
        let last = log.iter().rev().find(|(_, _, key, _)| key.starts_with(prefix));
        assert!(covered >= last.map_or(0, |(at, ..)| *at), "the end was reached");
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn quick() -> WatchResilience {
    WatchResilience::new()
        .retry_policy(RetryPolicy::forever(Duration::from_millis(20)))
        .progress_interval(Duration::from_millis(300))
        .progress_timeout(Duration::from_millis(400))
}

fn connect(endpoints: impl IntoIterator<Item = String>, watch: WatchResilience) -> Client {
    Client::builder()
        .endpoints(endpoints)
        .resilience(ResilienceConfig::new().watch(watch))
        .connect()
        .unwrap()
}

fn watch(client: &Client, prefix: &str, from: i64, sink: Arc<dyn Sink>) -> Watching {
    let range = Range::Prefix(prefix.as_bytes().to_vec());
    client.core().watches.watch(Spec { range, from, group: "test" }, sink)
}

fn watch_recorded(client: &Client, prefix: &str, from: i64) -> (Arc<Recorder>, Watching) {
    let recorder = Arc::new(Recorder::default());
    let watching = watch(client, prefix, from, recorder.clone());
    (recorder, watching)
}

fn streams_started(server: &EtcdServer) -> f64 {
    server.metric("grpc_server_started_total", &[("grpc_method", "Watch")]).unwrap()
}

fn watchers(server: &EtcdServer) -> f64 {
    server.metric("etcd_debugging_mvcc_watcher_total", &[]).unwrap()
}

#[test]
fn every_event_comes_once_across_connection_resets() {
    let server = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(server.endpoint()).unwrap();
    let client = connect([proxy.endpoint()], quick());
    let writer = Writer::new(&server);
    let (recorder, _watching) = watch_recorded(&client, "/r/", 2);
    eventually(SOON, "the watch stands", || recorder.was_heard());
    for round in 0..12 {
        for n in 0..20 {
            let key = format!("/r/{}", n % 7);
            writer.put(&key, &format!("{round}.{n}"));
            if n % 5 == 4 {
                writer.delete(&key);
            }
            writer.put("/else", "");
            if n == 10 {
                proxy.cut();
            }
        }
    }
    recorder.await_revision(writer.put("/r/last", ""));
    writer.check(&recorder, "/r/", 2);
    assert_eq!(recorder.resyncs(), 0, "nothing was compacted");
    assert!(recorder.suspensions() >= 1);
    assert!(recorder.suspensions() - recorder.resumptions() <= 1);
}

fn watch_at_once(client: &Client, prefix: &str, from: i64) -> (Arc<Recorder>, Watching) {
    let recorder = Arc::new(Recorder::default());
    let range = Range::Prefix(prefix.as_bytes().to_vec());
    let spec = Spec { range, from, group: "test" };
    let watching = client.core().watches.watch_at_once(spec, recorder.clone());
    (recorder, watching)
}

#[test]
fn a_watch_at_once_is_in_step_with_a_store_at_rest() {
    let server = EtcdServer::start().unwrap();
    let client = connect([server.endpoint()], quick());
    let writer = Writer::new(&server);
    let from = writer.put("/r/before", "") + 1;
    let (recorder, _watching) = watch_at_once(&client, "/r/", from);
    eventually(SOON, "it is in step", || recorder.in_step.load(Ordering::Acquire));
    recorder.await_revision(writer.put("/r/after", ""));
    writer.check(&recorder, "/r/", from);
    assert_eq!(recorder.resyncs(), 0);
}

#[test]
fn a_watch_at_once_reads_what_was_written_before_it_stood() {
    let server = EtcdServer::start().unwrap();
    let client = connect([server.endpoint()], quick());
    let writer = Writer::new(&server);
    writer.put("/r/1", "");
    let from = writer.put("/r/2", "");
    writer.delete("/r/1");
    writer.put("/r/3", "");
    let (recorder, _watching) = watch_at_once(&client, "/r/", from);
    eventually(SOON, "the gap is closed", || recorder.resyncs() == 1);
    recorder.await_revision(writer.put("/r/4", ""));
    writer.check(&recorder, "/r/", from);
    assert!(!recorder.in_step.load(Ordering::Acquire));
    assert_eq!(recorder.resyncs(), 1);
}

#[test]
fn a_watch_at_once_misses_nothing_of_a_busy_store_even_if_it_breaks_as_it_begins() {
    let server = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(server.endpoint()).unwrap();
    let client = connect([proxy.endpoint()], quick());
    let writer = Writer::new(&server);
    for round in 0..20 {
        let stop = AtomicBool::new(false);
        let from = writer.put("/r/0", "") + 1;
        let (recorder, _watching) = std::thread::scope(|scope| {
            let (writer, stop) = (&writer, &stop);
            scope.spawn(move || {
                let mut n = 0;
                while !stop.load(Ordering::Acquire) {
                    writer.put(&format!("/{}/{}", ["r", "else"][n % 2], n % 7), &n.to_string());
                    n += 1;
                }
            });
            // Some writes lie between the read and the watch, more between watch and snapshot.
            eventually(SOON, "it is busy", || writer.last() > from + round % 5);
            let watched = watch_at_once(&client, "/r/", from);
            if round % 2 == 1 {
                eventually(SOON, "it begins", || proxy.connections() > 0);
                proxy.cut();
            }
            let then = writer.last();
            eventually(SOON, "it delivers", || watched.0.reached() > then);
            stop.store(true, Ordering::Release);
            watched
        });
        recorder.await_revision(writer.put("/r/last", ""));
        writer.check(&recorder, "/r/", from);
    }
}

#[test]
fn a_silent_stream_is_left_and_nothing_is_missed() {
    let server = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(server.endpoint()).unwrap();
    let client = connect([proxy.endpoint()], quick());
    let writer = Writer::new(&server);
    let (recorder, _watching) = watch_recorded(&client, "/b/", 2);
    recorder.await_revision(writer.put("/b/0", ""));
    proxy.set(Mode::Blackhole);
    eventually(SOON, "the silence is noticed", || recorder.suspensions() == 1);
    for n in 0..10 {
        writer.put(&format!("/b/{n}"), "dark");
    }
    assert_eq!(recorder.resumptions(), 0);
    proxy.set(Mode::Pass);
    recorder.await_revision(writer.put("/b/last", ""));
    eventually(SOON, "it says so", || recorder.resumptions() == 1);
    writer.check(&recorder, "/b/", 2);
    assert_eq!(recorder.suspensions(), 1, "told once, however many attempts it took");
}

#[test]
fn a_silent_member_is_left_for_the_next_one() {
    let server = EtcdServer::start().unwrap();
    let first = FaultProxy::start(server.endpoint()).unwrap();
    let second = FaultProxy::start(server.endpoint()).unwrap();
    let client = connect([first.endpoint(), second.endpoint()], quick());
    let writer = Writer::new(&server);
    let (recorder, _watching) = watch_recorded(&client, "/b/", 2);
    recorder.await_revision(writer.put("/b/0", ""));
    assert_eq!(second.connections_total(), 0, "the choice is sticky");
    first.set(Mode::Blackhole);
    recorder.await_revision(writer.put("/b/1", ""));
    eventually(SOON, "it says so", || recorder.resumptions() == 1);
    writer.check(&recorder, "/b/", 2);
}

#[test]
fn a_quiet_stream_is_asked_and_kept() {
    let server = EtcdServer::start().unwrap();
    let limits = quick().progress_interval(Duration::from_millis(30));
    let client = connect([server.endpoint()], limits);
    let writer = Writer::new(&server);
    // One that is up to date, one that starts beyond the head, one that is refused for good.
    let (recorder, _watching) = watch_recorded(&client, "/q/", 2);
    let (future, _future_watching) = watch_recorded(&client, "/q/", 3);
    eventually(SOON, "ten signs of life", || recorder.heard.load(Ordering::Acquire) >= 10);
    eventually(SOON, "for all", || future.heard.load(Ordering::Acquire) >= 10);
    assert_eq!(recorder.suspensions(), 0);
    assert_eq!(streams_started(&server), 1.0);
    assert_eq!(watchers(&server), 2.0, "asking left no watch behind");
    recorder.await_revision(writer.put("/q/1", ""));
    writer.check(&recorder, "/q/", 2);
}

#[test]
fn a_compaction_during_an_outage_is_bridged_by_a_snapshot() {
    let server = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(server.endpoint()).unwrap();
    let client = connect([proxy.endpoint()], quick());
    let writer = Writer::new(&server);
    for key in ["a", "b", "c"] {
        writer.put(&format!("/c/{key}"), "1");
    }
    let (recorder, _watching) = watch_recorded(&client, "/c/", 2);
    recorder.await_revision(writer.last());
    proxy.set(Mode::Reset);
    eventually(SOON, "the break is noticed", || recorder.suspensions() == 1);
    writer.delete("/c/a");
    writer.put("/c/b", "2");
    writer.put("/c/d", "1");
    for _ in 0..50 {
        writer.put("/else", "");
    }
    server.compact().unwrap();
    proxy.set(Mode::Pass);
    eventually(SOON, "a snapshot", || recorder.resyncs() == 1);
    recorder.await_revision(writer.put("/c/e", "1"));
    writer.check(&recorder, "/c/", 2);
    assert_eq!(recorder.resyncs(), 1);
    assert_eq!(recorder.resumptions(), 1);
}

#[test]
fn a_start_that_is_compacted_begins_with_a_snapshot() {
    let server = EtcdServer::start().unwrap();
    let client = connect([server.endpoint()], quick());
    let writer = Writer::new(&server);
    for n in 0..10 {
        writer.put("/c/k", &n.to_string());
    }
    server.compact().unwrap();
    let (recorder, _watching) = watch_recorded(&client, "/c/", 3);
    eventually(SOON, "a snapshot", || recorder.resyncs() == 1);
    recorder.await_revision(writer.put("/c/k", "last"));
    writer.check(&recorder, "/c/", 3);
    assert_eq!(recorder.suspensions(), 0);
}

#[test]
fn a_restart_with_its_data_loses_and_repeats_nothing() {
    let server = EtcdServer::start().unwrap();
    let client = connect([server.endpoint()], quick());
    let writer = Writer::new(&server);
    let (recorder, _watching) = watch_recorded(&client, "/s/", 2);
    for round in 0..3 {
        for n in 0..5 {
            writer.put(&format!("/s/{n}"), &round.to_string());
        }
        server.restart().unwrap();
        recorder.await_revision(writer.put("/s/last", ""));
    }
    eventually(SOON, "it says so", || recorder.resumptions() == recorder.suspensions());
    writer.check(&recorder, "/s/", 2);
    assert_eq!(recorder.resyncs(), 0);
}

#[test]
fn lost_data_is_noticed_and_read_anew() {
    let server = EtcdServer::start().unwrap();
    let client = connect([server.endpoint()], quick());
    let writer = Writer::new(&server);
    let (recorder, _watching) = watch_recorded(&client, "/l/", 2);
    for n in 0..20 {
        writer.put(&format!("/l/{n}"), "");
    }
    recorder.await_revision(writer.last());
    writer.check(&recorder, "/l/", 2);
    server.restart_empty().unwrap();
    let snapshot = eventually(SOON, "a snapshot", || {
        recorder.seen().into_iter().find_map(|seen| match seen {
            Seen::Resync(snapshot) => Some(snapshot),
            _ => None,
        })
    });
    assert_eq!(snapshot, Snapshot { revision: 1, entries: Vec::new() });
    let after = Writer::new(&server);
    after.put("/l/new", "1");
    eventually(SOON, "what is written after is delivered", || {
        matches!(recorder.seen().last(), Some(Seen::Events { revision: 2, .. }))
            || matches!(recorder.seen().iter().rev().nth(1), Some(Seen::Events { revision: 2, .. }))
    });
}

#[test]
fn another_cluster_behind_the_endpoint_is_refused() {
    let server = EtcdServer::start().unwrap();
    let client = connect([server.endpoint()], quick());
    let (recorder, _watching) = watch_recorded(&client, "/w/", 2);
    eventually(SOON, "the watch stands", || recorder.was_heard());
    server.restart_as_other_cluster().unwrap();
    let (kind, _) = eventually(SOON, "the failure", || recorder.failure());
    assert_eq!(kind, ErrorKind::WrongCluster);
    eventually(SOON, "the group ends", || client.core().watches.group_count() == 0);
}

#[test]
fn a_refused_delivery_is_followed_by_the_range_and_then_by_all_events() {
    let server = EtcdServer::start().unwrap();
    let client = connect([server.endpoint()], quick());
    let writer = Writer::new(&server);
    let (recorder, _watching) = watch_recorded(&client, "/o/", 2);
    let (other, _other_watching) = watch_recorded(&client, "/o/", 2);
    for n in 0..60 {
        if n % 20 == 5 {
            recorder.await_revision(writer.last());
            recorder.refuse.store(true, Ordering::Release);
        }
        writer.put(&format!("/o/{}", n % 3), &n.to_string());
    }
    recorder.await_revision(writer.last());
    other.await_revision(writer.last());
    writer.check(&recorder, "/o/", 2);
    writer.check(&other, "/o/", 2);
    assert_eq!(recorder.resyncs(), 3);
    assert_eq!((other.resyncs(), other.suspensions()), (0, 0), "nobody else was disturbed");
    assert_eq!(streams_started(&server), 1.0);
}

#[test]
fn a_consumer_that_falls_behind_gets_the_range() {
    let server = EtcdServer::start().unwrap();
    let client = connect([server.endpoint()], quick());
    let writer = Writer::new(&server);
    let sink = QueueSink::with_capacity(4, Parker::new());
    let _watching = watch(&client, "/o/", 2, sink.clone());
    // One that still catches up would get all of it in one delivery: wait until it is served.
    let mut reached = writer.put("/o/first", "");
    let mut state = BTreeMap::from([("/o/first".to_owned(), (reached, String::new()))]);
    eventually(SOON, "the watch is served", || sink.poll().is_some());
    for n in 0..50 {
        writer.put(&format!("/o/{}", n % 5), &n.to_string());
    }
    let last = writer.put("/o/last", "");
    let mut resyncs = 0;
    while reached < last {
        let limit = client.core().clock.now() + SOON;
        let item =
            wait("test", &client.core().clock, Some(limit), &[], sink.parker(), || sink.poll())
                .unwrap();
        match item {
            Item::Events(events) => {
                for event in events {
                    assert!(event.mod_revision > reached);
                    reached = event.mod_revision;
                    state.insert(text(&event.key), (event.mod_revision, text(&event.value)));
                }
            }
            Item::Resync(snapshot) => {
                resyncs += 1;
                assert!(snapshot.revision >= reached);
                reached = snapshot.revision;
                let entries = snapshot.entries.iter();
                state = entries.map(|e| (text(&e.key), (e.mod_revision, text(&e.value)))).collect();
            }
            other => panic!("{other:?}"),
        }
        // Slower than the writer was.
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(resyncs >= 1, "it did fall behind");
    assert_eq!(state, writer.state("/o/", last));
}

#[test]
fn watches_come_and_go_on_one_stream() {
    let server = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(server.endpoint()).unwrap();
    let client = connect([proxy.endpoint()], quick());
    let writer = Writer::new(&server);
    let (steady, steady_watching) = watch_recorded(&client, "/m/", 2);
    eventually(SOON, "the watch stands", || steady.was_heard());
    let mut live: Vec<(String, i64, Arc<Recorder>, Watching)> = Vec::new();
    for n in 0..120 {
        let prefix = format!("/m/{}/", n % 10);
        let from = writer.last() + 1;
        let (recorder, watching) = watch_recorded(&client, &prefix, from);
        live.push((prefix.clone(), from, recorder, watching));
        writer.put(&format!("{prefix}k"), &n.to_string());
        if live.len() > 30 {
            // Some leave before they were answered, some after.
            let place = if n % 2 == 0 { live.len() - 2 } else { 0 };
            drop(live.remove(place));
        }
    }
    let before = streams_started(&server);
    assert_eq!(before, 1.0, "no watch took a stream of its own");
    for n in 0..10 {
        writer.put(&format!("/m/{n}/k"), "last");
    }
    for (prefix, from, recorder, _) in &live {
        let state = writer.state(prefix, writer.last());
        recorder.await_revision(state.values().map(|(at, _)| *at).max().unwrap());
        writer.check(recorder, prefix, *from);
        assert_eq!((recorder.resyncs(), recorder.suspensions()), (0, 0));
    }
    steady.await_revision(writer.last());
    writer.check(&steady, "/m/", 2);
    let count = live.len() as f64 + 1.0;
    eventually(SOON, "those that left are gone", || watchers(&server) == count);
    proxy.cut();
    for n in 0..10 {
        writer.put(&format!("/m/{n}/k"), "after");
    }
    steady.await_revision(writer.last());
    for (prefix, from, recorder, _) in &live {
        let state = writer.state(prefix, writer.last());
        recorder.await_revision(state.values().map(|(at, _)| *at).max().unwrap());
        writer.check(recorder, prefix, *from);
    }
    drop(live);
    drop(steady_watching);
    eventually(SOON, "the group ends", || client.core().watches.group_count() == 0);
    eventually(SOON, "nothing is left behind", || watchers(&server) == 0.0);
    let (again, _again) = watch_recorded(&client, "/m/", writer.last() + 1);
    again.await_revision(writer.put("/m/again", ""));
}

#[test]
fn many_watches_with_much_to_catch_up_do_not_block_each_other() {
    let server = EtcdServer::start().unwrap();
    let client = connect([server.endpoint()], quick().progress_timeout(SOON));
    let writer = Writer::new(&server);
    let value = "x".repeat(1_000);
    for n in 0..100 {
        writer.put(&format!("/h/{n}"), &value);
    }
    // More requests than etcd takes while its answers are not read, and more answers than fit into
    // the windows of a connection.
    let all: Vec<_> = (0..300).map(|_| watch_recorded(&client, "/h/", 2)).collect();
    for (recorder, _) in &all {
        recorder.await_revision(writer.last());
    }
    let last = writer.put("/h/last", "");
    for (recorder, _) in &all {
        recorder.await_revision(last);
        writer.check(recorder, "/h/", 2);
        assert_eq!((recorder.resyncs(), recorder.suspensions()), (0, 0));
    }
    assert_eq!(streams_started(&server), 1.0);
}

#[test]
fn a_watch_of_one_key_sees_no_other() {
    let server = EtcdServer::start().unwrap();
    let client = connect([server.endpoint()], quick());
    let writer = Writer::new(&server);
    let recorder = Arc::new(Recorder::default());
    let spec = Spec { range: Range::Key(b"/k".to_vec()), from: 2, group: "test" };
    let _watching = client.core().watches.watch(spec, recorder.clone());
    let created = writer.put("/k", "1");
    writer.put("/k2", "1");
    let deleted = writer.delete("/k");
    recorder.await_revision(deleted);
    let events: Vec<Event> = recorder
        .seen()
        .into_iter()
        .flat_map(|seen| match seen {
            Seen::Events { events, .. } => events,
            _ => Vec::new(),
        })
        .collect();
    assert_eq!(events.len(), 2);
    assert_eq!(events[1].kind, EventKind::Delete);
    assert_eq!(events[1].create_revision, created, "of the key that went");
    assert_eq!(events[1].prev.as_ref().unwrap().value, b"1");
}

#[test]
fn without_retries_the_first_break_is_final() {
    let server = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(server.endpoint()).unwrap();
    let client = connect([proxy.endpoint()], quick().retry_policy(RetryPolicy::never()));
    let (recorder, _watching) = watch_recorded(&client, "/n/", 2);
    eventually(SOON, "the watch stands", || recorder.was_heard());
    proxy.cut();
    let (kind, _) = eventually(SOON, "the failure", || recorder.failure());
    assert_eq!(kind, ErrorKind::Unreachable);
}

#[test]
fn closing_the_client_ends_its_watches() {
    let server = EtcdServer::start().unwrap();
    let client = connect([server.endpoint()], quick());
    let (recorder, watching) = watch_recorded(&client, "/x/", 2);
    eventually(SOON, "the watch stands", || recorder.was_heard());
    client.close().unwrap();
    let (kind, _) = eventually(SOON, "the failure", || recorder.failure());
    assert_eq!(kind, ErrorKind::Closed);
    let (_late, late_watching) = watch_recorded(&client, "/x/", 2);
    drop((watching, late_watching));
}

#[test]
fn an_expired_login_is_renewed_for_a_new_watch() {
    let server = EtcdServer::builder()
        .auth("root", "secret")
        .args(["--auth-token", "simple", "--auth-token-ttl", "1"])
        .start()
        .unwrap();
    let client = Client::builder()
        .endpoints([server.endpoint()])
        .user("root", "secret")
        .resilience(ResilienceConfig::new().watch(quick().progress_interval(SOON)))
        .connect()
        .unwrap();
    let put = |key: &str| server.ctl(["put", key, "1"]).unwrap();
    let (first, _first) = watch_recorded(&client, "/t/", 2);
    put("/t/1");
    first.await_revision(2);
    for round in 0..2i64 {
        // Long enough for the token to end; etcd looks once a second.
        std::thread::sleep(Duration::from_millis(2_500));
        let (next, _next) = watch_recorded(&client, "/t/", 2);
        put(&format!("/t/{round}x"));
        next.await_revision(3 + round);
        first.await_revision(3 + round);
        assert!(next.failure().is_none());
    }
    let revisions: Vec<i64> = first
        .seen()
        .into_iter()
        .flat_map(|seen| match seen {
            Seen::Events { events, .. } => events,
            other => panic!("{other:?}"),
        })
        .map(|event| event.mod_revision)
        .collect();
    assert_eq!(revisions, [2, 3, 4]);
}

#[test]
fn a_watch_that_is_not_permitted_fails_by_name_and_alone() {
    let server = EtcdServer::builder().auth("root", "secret").start().unwrap();
    for args in [
        &["role", "add", "own"][..],
        &["role", "grant-permission", "own", "--prefix=true", "readwrite", "/own/"],
        &["user", "add", "ann:pw"],
        &["user", "grant-role", "ann", "own"],
    ] {
        server.ctl(args).unwrap();
    }
    let client = Client::builder()
        .endpoints([server.endpoint()])
        .user("ann", "pw")
        .resilience(ResilienceConfig::new().watch(quick()))
        .connect()
        .unwrap();
    let (own, _own) = watch_recorded(&client, "/own/", 2);
    eventually(SOON, "the watch stands", || own.was_heard());
    let (other, _other) = watch_recorded(&client, "/other/", 2);
    let (kind, key) = eventually(SOON, "the failure", || other.failure());
    assert_eq!(kind, ErrorKind::PermissionDenied);
    assert_eq!(key.as_deref(), Some("/other/"));
    server.ctl(["put", "/own/1", ""]).unwrap();
    own.await_revision(2);
    assert_eq!(own.suspensions(), 0);
    assert_eq!(streams_started(&server), 1.0, "the others keep their stream");
    let (alone, _alone) = {
        let recorder = Arc::new(Recorder::default());
        let range = Range::Key(b"/other".to_vec());
        let spec = Spec { range, from: 2, group: "alone" };
        (recorder.clone(), client.core().watches.watch(spec, recorder))
    };
    let (kind, _) = eventually(SOON, "the failure of the first watch", || alone.failure());
    assert_eq!(kind, ErrorKind::PermissionDenied);
}

#[test]
fn a_member_without_its_quorum_is_left() {
    let cluster = EtcdCluster::start(3).unwrap();
    let client = connect(cluster.endpoints(), quick());
    let recorder = Arc::new(Recorder::default());
    let _watching = watch(&client, "/q/", 2, recorder.clone());
    eventually(SOON, "the watch stands", || recorder.was_heard());
    // The first member is the one chosen first.
    cluster.isolate(0);
    eventually(SOON, "the isolation is noticed", || recorder.suspensions() >= 1);
    eventually(SOON, "another member serves", || {
        cluster.member(1).ctl(["put", "/q/1", ""]).is_ok()
    });
    eventually(SOON, "it is delivered", || recorder.reached() >= 2);
    let last = cluster.member(1).revision().unwrap();
    recorder.await_revision(last);
    let revisions: Vec<i64> = recorder
        .seen()
        .into_iter()
        .flat_map(|seen| match seen {
            Seen::Events { events, .. } => events,
            _ => Vec::new(),
        })
        .map(|event| event.mod_revision)
        .collect();
    assert_eq!(revisions, (2..=last).collect::<Vec<_>>());
    assert_eq!(recorder.resyncs(), 0);
}
