//! Fencing tokens outside of etcd: both gates against holders that were lost, frozen or overtaken.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod faults;
mod support;

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use etcd_recipes::testing::{EtcdServer, FaultProxy, eventually};
use etcd_recipes::{
    Client, ErrorKind, FenceGate, FencingToken, LeaderLatch, MultiLock, Mutex, RwLock,
    StoredFenceGate,
};
use faults::{Twin, full, mutex, role, until_parent_ends};
use parking_lot::Mutex as Lock;
use support::{LIMIT, TTL, connect, revoke_lease_of};

/// A TTL that no test outlives.
const LONG: Duration = Duration::from_secs(20);

const fn send_sync<T: Send + Sync + std::fmt::Debug>() {}
const _: () = {
    send_sync::<FencingToken>();
    send_sync::<FenceGate>();
    send_sync::<StoredFenceGate>();
};

fn stored(client: &Client) -> StoredFenceGate {
    StoredFenceGate::new(client, "/fences").unwrap()
}

fn token(number: i64) -> FencingToken {
    FencingToken::from_wire(number)
}

// ----- holders ---------------------------------------------------------------------------------

/// Both gates learn of the new holder by its first write, and refuse the old one from then on.
#[test]
fn a_holder_that_was_lost_passes_neither_gate_once_another_has() {
    let etcd = EtcdServer::start().unwrap();
    let (client_a, client_b) = (connect(&etcd), connect(&etcd));
    let (lock_a, lock_b) = (mutex(&client_a, "/locks/a", TTL), mutex(&client_b, "/locks/a", TTL));
    let (near, far_a, far_b) = (FenceGate::new(), stored(&client_a), stored(&client_b));

    let a = lock_a.lock_owned().unwrap();
    let of_a = FencingToken::from(&a);
    assert!(near.pass("file", &a) && far_a.pass("file", &a).unwrap());
    revoke_lease_of(&etcd, &a.lock_key());
    let b = lock_b.lock().unwrap();
    let of_b = FencingToken::from(&b);
    assert!(of_b > of_a);
    // Nobody can know better yet, and that is why a new holder passes first thing.
    assert!(near.pass("file", of_a) && far_a.pass("file", of_a).unwrap());

    assert!(near.pass("file", &b) && far_b.pass("file", &b).unwrap());
    let hold = a.hold();
    for _ in 0..3 {
        assert!(!near.pass("file", &a) && !far_a.pass("file", &a).unwrap());
        assert!(!near.pass("file", &hold) && !far_b.pass("file", &hold).unwrap());
        assert!(near.pass("file", &b) && far_b.pass("file", &b).unwrap());
    }
    assert_eq!(near.guard("file", &a, || "written"), None);
    assert_eq!(near.guard("file", &b, || "written"), Some("written"));
    assert_eq!(near.highest("file"), Some(of_b));
    assert_eq!(far_a.highest("file").unwrap(), Some(of_b));
    assert_eq!(far_a.highest("another").unwrap(), None);
    assert!(!a.unlock() && b.unlock());
}

/// From one lock after the other, each kind of hold, on one resource.
#[test]
fn every_exclusive_hold_has_a_token() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let gate = FenceGate::new();
    let passed = Lock::new(Vec::new());
    let note = |token: FencingToken| {
        assert!(gate.pass("file", token));
        passed.lock().push(token.to_wire());
    };

    let one = Mutex::new(&client, "/locks/mutex").unwrap();
    let guard = one.lock().unwrap();
    note(FencingToken::from(&guard));
    assert_eq!(FencingToken::from(&guard.hold()).to_wire(), guard.fencing_token());
    assert!(guard.unlock());
    note(FencingToken::from(&one.lock_owned().unwrap()));

    let lock = RwLock::new(&client, "/locks/rw").unwrap();
    note(FencingToken::from(&lock.write().unwrap()));
    note(FencingToken::from(&lock.write_owned().unwrap()));

    let both = MultiLock::new([one, Mutex::new(&client, "/locks/other").unwrap()]).unwrap();
    let guard = both.lock().unwrap();
    note(FencingToken::from(&guard.hold("/locks/mutex").unwrap()));
    assert!(guard.hold("/locks/none").is_none());
    assert!(guard.unlock());

    let latch = LeaderLatch::new(&client, "/elections/a").unwrap();
    latch.start().unwrap();
    latch.wait().unwrap();
    note(FencingToken::from(&latch.leadership().unwrap()));
    latch.close().unwrap();

    let passed = passed.into_inner();
    assert_eq!(passed.len(), 6);
    assert!(passed.is_sorted_by(|a, b| a < b), "{passed:?}");
}

/// A mutex goes to and fro between two clients, with a restart of etcd on the way.
#[test]
fn tokens_grow_from_hold_to_hold_and_across_a_restart_of_etcd() {
    let rounds = if full() { 1_000 } else { 100 };
    let etcd = EtcdServer::start().unwrap();
    let clients = [connect(&etcd), connect(&etcd)];
    let locks = clients.each_ref().map(|client| mutex(client, "/locks/a", LONG));
    let gates = clients.each_ref().map(stored);
    let near = FenceGate::new();
    let mut before: Option<FencingToken> = None;
    for round in 0..rounds {
        let side = round % 2;
        if round == rounds / 2 {
            etcd.restart().unwrap();
            let last = before.unwrap();
            assert_eq!(gates[side].highest("file").unwrap(), Some(last));
            let lower = token(last.to_wire() - 1);
            assert!(!gates[side].pass("file", lower).unwrap(), "etcd forgot the token");
        }
        let guard = locks[side].lock().unwrap();
        let now = FencingToken::from(&guard);
        assert!(before < Some(now), "round {round}: {now} after {before:?}");
        assert!(near.pass("file", now) && gates[side].pass("file", now).unwrap());
        if let Some(before) = before {
            assert!(!near.pass("file", before) && !gates[side].pass("file", before).unwrap());
        }
        assert!(guard.unlock());
        before = Some(now);
    }
}

// ----- races -----------------------------------------------------------------------------------

/// When a pass was asked for and when it was answered, on one clock of steps.
struct Passed {
    token: i64,
    asked: u64,
    answered: u64,
    passed: bool,
}

/// Nobody was let through who asked after a higher one had been let through, and whoever was
/// refused was so because of a higher one that was at least asked for by then.
fn check_order(all: &[Passed]) {
    for one in all.iter().filter(|one| one.passed) {
        let overtaken = all
            .iter()
            .find(|other| other.passed && other.token > one.token && other.answered < one.asked);
        if let Some(higher) = overtaken {
            panic!("{} passed after {} had", one.token, higher.token);
        }
    }
    for one in all.iter().filter(|one| !one.passed) {
        let reason = all.iter().any(|other| other.token > one.token && other.asked < one.answered);
        assert!(reason, "{} was refused for nothing", one.token);
    }
}

/// Eight threads with tokens in a shuffled order, through two clients whose connections break.
#[test]
fn racing_passes_end_with_the_highest_and_never_let_a_lower_one_follow() {
    let each = if full() { 400 } else { 60 };
    let etcd = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    let clients = [connect(&etcd), Client::connect([proxy.endpoint()]).unwrap()];
    let steps = AtomicU64::new(0);
    let all = Lock::new(Vec::new());
    let start = Barrier::new(8);
    thread::scope(|scope| {
        for thread in 0..8_i64 {
            let gate = stored(&clients[usize::from(thread % 2 == 1)]);
            let (steps, all, start, proxy) = (&steps, &all, &start, &proxy);
            scope.spawn(move || {
                start.wait();
                for n in 0..each {
                    // Rises on the whole, and falls back again and again.
                    let number = 1 + n * 8 + (thread * 37 + n * 101) % 64;
                    if thread == 0 && n % 20 == 7 {
                        // An answer is lost, and the pass is repeated.
                        proxy.drop_next_reply();
                    }
                    let asked = steps.fetch_add(1, Ordering::SeqCst);
                    let passed = gate.pass("file", token(number)).unwrap();
                    let answered = steps.fetch_add(1, Ordering::SeqCst);
                    all.lock().push(Passed { token: number, asked, answered, passed });
                }
            });
        }
    });
    let all = all.into_inner();
    check_order(&all);
    let highest = all.iter().map(|one| one.token).max().unwrap();
    assert_eq!(stored(&clients[0]).highest("file").unwrap(), Some(token(highest)));
    let refused = all.iter().filter(|one| !one.passed).count();
    assert!(refused > 0 && refused < all.len(), "{refused} of {} refused", all.len());
}

/// What is written under the gate in memory is written in the order of the tokens.
#[test]
fn racing_writes_under_the_gate_are_in_the_order_of_their_tokens() {
    let gate = FenceGate::new();
    let written = Lock::new(Vec::new());
    let start = Barrier::new(8);
    thread::scope(|scope| {
        for thread in 0..8 {
            let (gate, written, start) = (&gate, &written, &start);
            scope.spawn(move || {
                start.wait();
                for n in 0..2_000 {
                    let number = 1 + n * 8 + (thread * 37 + n * 101) % 64;
                    let write = || {
                        // Check and write as two steps would come apart here.
                        thread::yield_now();
                        written.lock().push(number);
                    };
                    let _ = gate.guard("file", token(number), write);
                }
            });
        }
    });
    let written = written.into_inner();
    assert!(written.len() > 100 && written.is_sorted(), "out of order");
    assert_eq!(gate.highest("file"), written.last().map(|number| token(*number)));
}

// ----- a holder that stands still --------------------------------------------------------------

/// A store on the far side of a wire: a line `token,text` at a time, answered by `ok` or `no`.
struct Store {
    address: String,
    gate: FenceGate,
    lines: Lock<Vec<(FencingToken, String)>>,
    refused: AtomicU64,
}

impl Store {
    fn start() -> Arc<Store> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let store = Arc::new(Store {
            address: listener.local_addr().unwrap().to_string(),
            gate: FenceGate::new(),
            lines: Lock::default(),
            refused: AtomicU64::new(0),
        });
        let served = store.clone();
        thread::spawn(move || {
            for socket in listener.incoming() {
                let (store, socket) = (served.clone(), socket.unwrap());
                thread::spawn(move || store.serve(socket));
            }
        });
        store
    }

    fn serve(&self, mut socket: TcpStream) {
        let lines = BufReader::new(socket.try_clone().unwrap()).lines();
        for line in lines.map_while(Result::ok) {
            let (number, text) = line.split_once(',').unwrap();
            let token = FencingToken::from_wire(number.parse().unwrap());
            let written = self.write(token, text);
            if socket.write_all(if written { b"ok\n" } else { b"no\n" }).is_err() {
                return;
            }
        }
    }

    fn write(&self, token: FencingToken, text: &str) -> bool {
        let write = || self.lines.lock().push((token, text.to_owned()));
        let written = self.gate.guard("store", token, write).is_some();
        if !written {
            self.refused.fetch_add(1, Ordering::AcqRel);
        }
        written
    }
}

/// The holder asks `is_held`, is stopped, and writes when it wakes: just what asking cannot
/// prevent.
#[test]
fn a_holder_that_is_stopped_and_continued_writes_nothing_late() {
    if let Some(role) = role() {
        return hold_and_send(&role[0], &role[1]);
    }
    let etcd = EtcdServer::start().unwrap();
    let store = Store::start();
    let twin = Twin::start(
        "a_holder_that_is_stopped_and_continued_writes_nothing_late",
        &[&etcd.endpoint(), &store.address],
    );
    eventually(LIMIT, "the holder writes", || store.lines.lock().len() > 10);

    twin.freeze();
    let client = connect(&etcd);
    let guard = mutex(&client, "/locks/frozen", TTL).lock_owned().unwrap();
    let rival = FencingToken::from(&guard);
    assert!(store.write(rival, "rival"));
    let refused_before = store.refused.load(Ordering::Acquire);
    twin.thaw();
    assert_eq!(twin.wait_said("answer"), "no");
    eventually(LIMIT, "late writes", || store.refused.load(Ordering::Acquire) >= 3);
    assert_eq!(refused_before, 0, "the holder was refused while it held");
    assert!(store.write(rival, "rival again") && guard.unlock());

    let lines = store.lines.lock();
    let first_of_rival = lines.iter().position(|(_, text)| text == "rival").unwrap();
    assert!(lines[..first_of_rival].iter().all(|(token, text)| *token < rival && text == "holder"));
    let after: Vec<_> = lines[first_of_rival..].iter().map(|(_, text)| text.as_str()).collect();
    assert_eq!(after, ["rival", "rival again"], "a late write");
}

/// The twin: holds, and writes for as long as it believes to, and a little longer.
fn hold_and_send(endpoint: &str, store: &str) {
    let client = Client::connect([endpoint]).unwrap();
    let lock = mutex(&client, "/locks/frozen", TTL);
    let guard = lock.lock().unwrap();
    let token = FencingToken::from(&guard).to_wire();
    let mut socket = TcpStream::connect(store).unwrap();
    let mut answers = BufReader::new(socket.try_clone().unwrap()).lines();
    let mut refused = 0;
    while refused < 3 {
        // As if it were stopped between this question and the write.
        let _ = guard.is_held();
        writeln!(socket, "{token},holder").unwrap();
        let answer = answers.next().unwrap().unwrap();
        if answer == "no" {
            refused += 1;
            println!("\nanswer={answer}");
        }
        thread::sleep(Duration::from_millis(1));
    }
    assert!(!guard.is_held());
    until_parent_ends();
}

// ----- what stands in etcd ---------------------------------------------------------------------

/// In every case: nothing there yet, higher, equal, lower.
#[test]
fn a_pass_is_one_request() {
    let etcd = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    let client =
        Client::builder().endpoints([proxy.endpoint()]).namespace("/tenant").connect().unwrap();
    let gate = stored(&client);
    assert!(client.ping());
    for (number, passes) in [(5, true), (256, true), (256, true), (6, false), (65_536, true)] {
        let before = proxy.unary_calls();
        assert_eq!(gate.pass("file", token(number)).unwrap(), passes, "{number}");
        assert_eq!(proxy.unary_calls() - before, 1, "{number}");
    }
    let key = connect(&etcd).get("/tenant/fences/file").unwrap().unwrap();
    assert_eq!((key.value.as_slice(), key.lease), (&65_536_i64.to_be_bytes()[..], 0));
    assert_eq!(key.version, 3, "an equal token is written again for nothing");

    let before = proxy.unary_calls();
    for number in [0, -1, i64::MIN] {
        assert!(!gate.pass("file", token(number)).unwrap());
    }
    assert_eq!(proxy.unary_calls(), before, "no hold has such a number");
}

/// The answer is lost with the connection, the pass is asked for again, and says the same.
#[test]
fn a_pass_whose_answer_was_lost_is_repeated() {
    let etcd = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    let gate = stored(&Client::connect([proxy.endpoint()]).unwrap());
    for number in [3, 3, 4] {
        proxy.drop_next_reply();
        assert!(gate.pass("file", token(number)).unwrap());
        assert!(!proxy.awaits_request(), "no answer was lost");
    }
    proxy.drop_next_reply();
    assert!(!gate.pass("file", token(3)).unwrap());
    assert_eq!(gate.highest("file").unwrap(), Some(token(4)));
}

#[test]
fn what_is_no_token_is_named_and_not_written_over() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let gate = stored(&client);
    for value in ["", "text", "a longer text than a token"] {
        client.put("/fences/file", value).unwrap();
        let asked =
            [gate.pass("file", token(7)).unwrap_err(), gate.highest("file").map(drop).unwrap_err()];
        for error in asked {
            assert_eq!(error.kind(), ErrorKind::ForeignKey);
            assert_eq!(error.key(), Some("/fences/file"));
        }
        assert_eq!(client.get("/fences/file").unwrap().unwrap().value_text(), value);
    }
}

/// Any name but none, file names too, and each a memory of its own.
#[test]
fn resources_are_told_apart_and_bad_names_refused() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let gate = stored(&client);
    let names = ["a", "a/", "a/b", "/a", "//a", "/srv/report.txt", "ä b"];
    for (number, name) in (10..).zip(names) {
        assert_eq!(gate.highest(name).unwrap(), None, "{name}");
        assert!(gate.pass(name, token(number)).unwrap());
    }
    for (number, name) in (10..).zip(names) {
        assert_eq!(gate.highest(name).unwrap(), Some(token(number)), "{name}");
    }
    for name in ["", "a\0b"] {
        assert!(gate.pass(name, token(1)).unwrap_err().is_invalid_argument());
        assert!(gate.highest(name).unwrap_err().is_invalid_argument());
    }
    for path in ["", "/fences/", "/a//b"] {
        let error = StoredFenceGate::new(&client, path).unwrap_err();
        assert!(error.is_invalid_argument() && error.to_string().contains(path), "{error}");
    }
    client.close().unwrap();
    assert!(gate.pass("a", token(11)).unwrap_err().is_closed());
    assert!(gate.pass("a", token(0)).unwrap_err().is_closed());
    assert!(StoredFenceGate::new(&client, "/fences").unwrap_err().is_closed());
}
