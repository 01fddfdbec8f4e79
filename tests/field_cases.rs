//! Field reports on holding a lock: how long it lasts, what is told of its end, and what its
//! holder may still do. Each test names its case.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod faults;
mod support;

use std::cell::RefCell;
use std::collections::HashSet;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use etcd_recipes::testing::{EtcdServer, Mode, eventually};
use etcd_recipes::{
    CancelToken, Client, ConnectionState, ErrorKind, FencedTxn, LossReason, Mutex, MutexGuard, Op,
    OwnedMutexGuard, Recipe, Txn,
};
use faults::{Twin, full, role, ttl, until_parent_ends};
use support::*;

/// By when a rival has to be in once the lock is free: a second, and slack for a machine that
/// runs several servers at once. It is far less than the TTL of the holds that are used with it.
const SOON: Duration = Duration::from_secs(3);

/// A TTL that nobody waits out here.
const LONG: Duration = Duration::from_secs(20);

fn rounds(ordinary: usize, full_figure: usize) -> usize {
    if full() { full_figure } else { ordinary }
}

fn with_ttl(client: &Client, path: &str, ttl: Duration) -> Mutex {
    Mutex::builder(client, path).ttl(ttl).build().unwrap()
}

fn value(client: &Client, key: &str) -> Option<String> {
    client.get(key).unwrap().map(|found| found.value_text())
}

// ----- LOCK-03: the limit of an acquire -------------------------------------------------------

/// LOCK-03: a limit is for the wait. It ends no hold, and running out of it is no hold.
#[test]
fn a_limit_is_for_the_wait_and_not_for_the_hold() {
    let etcd = EtcdServer::start().unwrap();
    let (ours, theirs) = (connect(&etcd), connect(&etcd));
    let (mutex, rival) = (with_ttl(&ours, "/locks/a", ttl()), with_ttl(&theirs, "/locks/a", ttl()));
    let limit = Duration::from_secs(1);
    let guard = mutex.try_lock_for(limit).unwrap().unwrap();
    let owned = with_ttl(&ours, "/locks/b", ttl()).try_lock_owned_for(limit).unwrap().unwrap();
    thread::sleep(ttl() * 3);
    assert!(guard.is_held() && guard.verify().unwrap());
    assert!(owned.is_held() && owned.verify().unwrap());
    assert!(owned.unlock());

    // The client has its lease, so that the limit is all that is measured.
    assert!(with_ttl(&theirs, "/other", ttl()).lock().unwrap().unlock());
    for _ in 0..2 {
        let (tried, took) = timed(|| rival.try_lock_for(limit).unwrap());
        assert!(tried.is_none());
        assert!(limit <= took && took < limit + PROMPT, "{took:?}");
        assert_eq!(keys(&etcd, "/locks/"), [guard.lock_key()], "the rival's key is still there");
    }
    assert!(guard.unlock());
    assert!(rival.try_lock_for(limit).unwrap().unwrap().unlock());
}

// ----- LOCK-02: the lease outlives the hold ---------------------------------------------------

/// The time that a lease has left, in etcd's own words.
fn time_to_live(etcd: &EtcdServer, key: &str) -> Option<Duration> {
    let answer = etcd.ctl(["lease", "timetolive", &lease_of(key)]).unwrap();
    let left = answer.split("remaining(").nth(1)?.split('s').next()?;
    left.parse().ok().map(Duration::from_secs)
}

/// LOCK-02: etcd starts again while the holder is cut off and gives the lease its whole TTL anew.
/// The hold ends by its own deadline all the same and for good, and nobody waits for the lease.
#[test]
fn a_lease_that_outlives_the_deadline_revives_no_hold() {
    let ttl = Duration::from_secs(8);
    let (etcd, proxy, client) = proxied(Duration::from_secs(5));
    let theirs = patient(Duration::from_secs(60)).endpoints([etcd.endpoint()]).connect().unwrap();
    let mutex = with_ttl(&client, "/locks/a", ttl);
    let rival = with_ttl(&theirs, "/locks/a", LONG);
    let guard = mutex.lock().unwrap();
    let (key, hold) = (guard.lock_key(), guard.hold());
    let losses = mutex.loss_events();
    let witness = Witness::new(&mutex, guard.hold());
    thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let guard = rival.lock().unwrap();
            let entered = Instant::now();
            assert!(!hold.is_held(), "two holders");
            (entered, guard.fencing_token(), guard.unlock())
        });
        wait_contenders(&rival, 2);
        proxy.set(Mode::Blackhole);
        eventually(LIMIT, "the deadline is near", || hold.remaining() < Duration::from_secs(2));
        assert!(hold.is_held());
        etcd.restart().unwrap();
        eventually(LIMIT, "the deadline passes", || !hold.is_held());
        let left = time_to_live(&etcd, &key).expect("etcd let the lease expire");
        assert!(left > SOON, "etcd did not begin the TTL anew: {left:?}");
        assert!(!waiter.is_finished());
        let restored = Instant::now();
        proxy.set(Mode::Pass);
        let (entered, token, stood) = waiter.join().unwrap();
        assert!(stood && token > hold.token());
        let took = entered - restored;
        assert!(took < left.min(SOON), "{took:?} after etcd answered again");
    });
    witness.check(&mutex, LossReason::DeadlinePassed, "/locks/a");
    wait_keys(&etcd, "/locks/", 0);
    assert!(!guard.verify().unwrap() && !guard.put("/data", "late").unwrap());
    assert!(!guard.unlock());
    let again = mutex.lock().unwrap();
    assert!(again.fencing_token() > hold.token());
    assert!(again.unlock() && !hold.is_held());
    assert_eq!(losses.try_iter().count(), 1, "told more than once");
    assert_eq!(value(&theirs, "/data"), None);
}

// ----- API-01: why it was lost ----------------------------------------------------------------

/// API-01: each way to lose a hold has a reason of its own and the time of a renewal that can
/// have been the last; a release is no loss.
#[test]
fn each_loss_names_its_reason_and_the_last_renewal() {
    let (etcd, proxy, client) = proxied(Duration::from_secs(10));
    let mut reasons = HashSet::new();
    let mut lose = |path: &str, take: &dyn Fn(&MutexGuard<'_>, &Mutex)| {
        let mutex = short(&client, path);
        let losses = mutex.loss_events();
        let begun = SystemTime::now();
        let guard = mutex.lock().unwrap();
        assert_eq!(guard.loss(), None);
        take(&guard, &mutex);
        let loss = losses.recv_timeout(LIMIT).unwrap();
        assert_eq!(guard.loss().as_ref(), Some(&loss));
        assert_eq!(guard.hold().loss().as_ref(), Some(&loss));
        // The lease may be older than the hold, and has been renewed within its TTL.
        assert!(loss.last_renewal >= begun - TTL, "{loss:?}");
        assert!(loss.last_renewal <= SystemTime::now());
        assert!(!guard.unlock());
        assert!(reasons.insert(loss.reason), "{loss:?} has the reason of another");
        loss
    };
    let loss = lose("/locks/revoked", &|guard, _| revoke_lease_of(&etcd, &guard.lock_key()));
    assert_eq!(loss.reason, LossReason::LeaseGone);
    let loss = lose("/locks/deleted", &|guard, _| {
        etcd.ctl(["del", &guard.lock_key()]).unwrap();
    });
    assert_eq!(loss.reason, LossReason::KeyDeleted);
    let loss = lose("/locks/overwritten", &|guard, _| {
        etcd.ctl(["put", &guard.lock_key(), "mine"]).unwrap();
    });
    assert_eq!(loss.reason, LossReason::KeyOverwritten);
    let cut = parking_lot::Mutex::new(SystemTime::now());
    let loss = lose("/locks/late", &|guard, _| {
        *cut.lock() = SystemTime::now();
        proxy.set(Mode::Blackhole);
        eventually(LIMIT, "the deadline passes", || !guard.is_held());
        proxy.set(Mode::Pass);
    });
    assert_eq!(loss.reason, LossReason::DeadlinePassed);
    let cut = *cut.lock();
    assert!(loss.last_renewal <= cut, "a renewal counted while no byte moved");
    assert!(loss.last_renewal >= cut - TTL, "{loss:?}, cut off at {cut:?}");
    let loss = lose("/locks/closed", &|_, mutex| mutex.close().unwrap());
    assert_eq!(loss.reason, LossReason::Closed);

    let mutex = short(&client, "/locks/released");
    let losses = mutex.loss_events();
    let guard = mutex.lock().unwrap();
    let hold = guard.hold();
    assert!(guard.unlock());
    assert!(!hold.is_held() && hold.remaining().is_zero());
    assert_eq!(hold.loss(), None, "a release is no loss");
    drop(mutex.lock().unwrap());
    assert!(mutex.errors().is_empty());
    client.close().unwrap();
    assert_eq!(losses.iter().count(), 0);
}

/// API-01: trouble shows before it is fatal, as a suspended connection and as time that runs out.
#[test]
fn time_runs_out_in_sight_while_suspended() {
    let (_etcd, proxy, client) = proxied(Duration::from_secs(10));
    let ttl = Duration::from_secs(6);
    let mutex = with_ttl(&client, "/locks/a", ttl);
    let guard = mutex.lock().unwrap();
    let states = mutex.connection_events();
    proxy.set(Mode::Blackhole);
    // What was sent before may still be answered.
    thread::sleep(ms(100));
    let mut last = guard.remaining();
    assert!(!last.is_zero() && last < ttl);
    let mut steps_while_suspended = 0;
    while !last.is_zero() {
        thread::sleep(ms(5));
        let suspended = mutex.connection_state() == ConnectionState::Suspended;
        let left = guard.remaining();
        assert!(left < last, "from {last:?} to {left:?} while no byte moved");
        steps_while_suspended += u32::from(suspended && !left.is_zero() && guard.is_held());
        last = left;
    }
    assert!(!guard.is_held());
    assert!(steps_while_suspended > 3, "{steps_while_suspended}");
    eventually(LIMIT, "lost", || mutex.connection_state() == ConnectionState::Lost);
    let seen: Vec<_> = states.try_iter().collect();
    assert_eq!(seen, [ConnectionState::Suspended, ConnectionState::Lost]);
    proxy.set(Mode::Pass);
    assert!(!guard.unlock());
}

// ----- API-02: ownership inside the write -----------------------------------------------------

/// API-02: each holder's token is greater than the one before, whoever it is and whatever etcd
/// went through in between.
#[test]
fn tokens_grow_from_hand_over_to_hand_over() {
    let etcd = EtcdServer::start().unwrap();
    let limit = rounds(100, 1_000);
    let tokens = parking_lot::Mutex::new(Vec::new());
    thread::scope(|scope| {
        for name in ["one", "two"] {
            let (etcd, tokens) = (&etcd, &tokens);
            scope.spawn(move || {
                let client =
                    patient(Duration::from_secs(60)).endpoints([etcd.endpoint()]).connect();
                let client = client.unwrap();
                let mutex = with_ttl(&client, "/locks/a", LONG);
                loop {
                    let guard = mutex.lock().unwrap();
                    let count = {
                        let mut tokens = tokens.lock();
                        tokens.push((name, guard.fencing_token()));
                        tokens.len()
                    };
                    if count % (limit / 3) == 0 {
                        etcd.restart().unwrap();
                        assert!(guard.verify().unwrap());
                    }
                    assert!(guard.unlock());
                    if count >= limit {
                        return;
                    }
                }
            });
        }
    });
    let tokens = tokens.into_inner();
    assert!(tokens.windows(2).all(|pair| pair[0].1 < pair[1].1), "{tokens:?}");
    let changes = tokens.windows(2).filter(|pair| pair[0].0 != pair[1].0).count();
    println!("{changes} of {} went to the other client", tokens.len());
    assert!(changes > limit / 4, "{changes}");
}

/// API-02: once a rival is in, the former holder's guarded writes are refused, its reads too.
#[test]
fn a_former_holder_writes_nothing() {
    let etcd = EtcdServer::start().unwrap();
    let (ours, theirs) = (connect(&etcd), connect(&etcd));
    let mut unaware = 0;
    for round in 0..5 {
        let path = format!("/locks/{round}");
        let (mutex, rival) = (with_ttl(&ours, &path, LONG), with_ttl(&theirs, &path, LONG));
        let guard = mutex.lock().unwrap();
        assert!(guard.put("/data", "first").unwrap());
        thread::scope(|scope| {
            let waiter = scope.spawn(|| rival.lock_owned().unwrap());
            wait_contenders(&rival, 2);
            revoke_lease_of(&etcd, &guard.lock_key());
            let second = waiter.join().unwrap();
            // At once, so that it is etcd that refuses and not the holder that knows.
            unaware += u32::from(guard.is_held());
            let put = guard.put("/data", "late").unwrap();
            let txn = Txn::new().and_then([Op::get("/data"), Op::put("/late", "late")]);
            let txn = guard.txn(txn).unwrap();
            assert!(!put);
            assert_eq!(txn, FencedTxn::Fenced);
            assert_eq!(value(&theirs, "/data").as_deref(), Some("first"));
            assert_eq!(value(&theirs, "/late"), None);
            assert!(guard.fencing_token() < second.fencing_token());
            assert!(!guard.is_held() && second.put("/data", "second").unwrap());
            assert!(!guard.put("/data", "late").unwrap());
            assert_eq!(value(&theirs, "/data").as_deref(), Some("second"));
            assert!(second.unlock());
        });
        assert!(!guard.unlock());
    }
    assert!(unaware > 0, "the former holder always knew before");
}

/// A store that knows nothing of etcd and refuses a token smaller than one it has seen.
#[derive(Default)]
struct Store {
    accepted: Vec<i64>,
    refused: usize,
}

impl Store {
    fn write(&mut self, token: i64) {
        if self.accepted.last().is_some_and(|last| token < *last) {
            self.refused += 1;
        } else {
            self.accepted.push(token);
        }
    }

    /// Takes writes from one other process.
    fn serve(store: &Arc<parking_lot::Mutex<Store>>) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let store = store.clone();
        thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            for line in BufReader::new(stream).lines() {
                let Ok(line) = line else { return };
                store.lock().write(line.parse().unwrap());
            }
        });
        address
    }
}

/// API-02: the holder's process stands still beyond its deadline and goes on with what it was
/// about to write; a store that looks at tokens takes writes in order only.
#[test]
fn a_store_that_looks_at_tokens_is_written_in_order() {
    if let Some(role) = role() {
        return write_while_held(&role);
    }
    let etcd = EtcdServer::start().unwrap();
    let store: Arc<parking_lot::Mutex<Store>> = Arc::default();
    let address = Store::serve(&store);
    let test = "a_store_that_looks_at_tokens_is_written_in_order";
    let twin = Twin::start(test, &[&etcd.endpoint(), &address]);
    let first: i64 = twin.wait_said("token").parse().unwrap();
    eventually(LIMIT, "the twin writes", || store.lock().accepted.len() > 10);

    let client = connect(&etcd);
    let rival = with_ttl(&client, "/locks/a", LONG);
    twin.freeze();
    let guard = rival.lock().unwrap();
    let second = guard.fencing_token();
    assert!(first < second);
    for _ in 0..10 {
        store.lock().write(second);
    }
    twin.thaw();
    twin.wait_said("lost");
    eventually(LIMIT, "what was under way arrives", || {
        store.lock().write(second);
        store.lock().refused >= IN_FLIGHT
    });
    assert!(guard.is_held() && guard.unlock());
    let store = store.lock();
    assert!(store.accepted.is_sorted());
    assert_eq!(store.accepted.last(), Some(&second));
    // One more where the freeze fell between the question and the write.
    assert!(store.refused <= IN_FLIGHT + 1, "{} writes by a lost holder", store.refused);
}

/// How many writes the twin had decided on before it knew of the loss.
const IN_FLIGHT: usize = 3;

fn write_while_held(role: &[String]) {
    let client = Client::connect([&role[0]]).unwrap();
    let mutex = short(&client, "/locks/a");
    let mut store = TcpStream::connect(&role[1]).unwrap();
    let guard = mutex.lock().unwrap();
    let token = guard.fencing_token();
    println!("\ntoken={token}");
    while guard.is_held() {
        writeln!(store, "{token}").unwrap();
        thread::sleep(ms(1));
    }
    for _ in 0..IN_FLIGHT {
        writeln!(store, "{token}").unwrap();
    }
    println!("lost=yes");
    until_parent_ends();
}

// ----- LIFE-04: the end of the owner ----------------------------------------------------------

/// A holder of `/locks/a` ends in `end`; how long a rival that waited goes on waiting.
fn rival_enters_soon(way: &str, etcd: &EtcdServer, mutex: &Mutex, end: impl FnOnce()) {
    let theirs = connect(etcd);
    let rival = with_ttl(&theirs, "/locks/a", LONG);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let guard = rival.lock().unwrap();
            (Instant::now(), guard.unlock())
        });
        wait_contenders(mutex, 2);
        let ended = Instant::now();
        end();
        let (entered, stood) = waiter.join().unwrap();
        let took = entered.saturating_duration_since(ended);
        println!("{way}: {took:?}");
        assert!(stood && took < SOON, "{way}: {took:?}");
    });
}

thread_local! {
    static KEPT: RefCell<Option<OwnedMutexGuard>> = const { RefCell::new(None) };
}

/// LIFE-04: however the scope of a guard ends, the lock is free.
#[test]
fn a_guard_that_ends_lets_the_next_in_at_once() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let mutex = with_ttl(&client, "/locks/a", LONG);

    let guard = mutex.lock().unwrap();
    rival_enters_soon("scope end", &etcd, &mutex, || {
        let _guard = guard;
    });
    let guard = mutex.lock().unwrap();
    rival_enters_soon("panic", &etcd, &mutex, || {
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let _guard = guard;
            panic!("with the lock");
        }));
        assert!(panicked.is_err());
    });
    let guard = mutex.lock().unwrap();
    rival_enters_soon("early return", &etcd, &mutex, || {
        let early = || -> Result<(), std::num::ParseIntError> {
            let _guard = guard;
            let _number: i32 = "none".parse()?;
            unreachable!("the line above returns");
        };
        assert!(early().is_err());
    });
    let guard = mutex.lock_owned().unwrap();
    rival_enters_soon("thread end", &etcd, &mutex, || {
        let owner = thread::spawn(move || KEPT.set(Some(guard)));
        owner.join().unwrap();
    });
    let guard = mutex.lock_owned().unwrap();
    rival_enters_soon("panic of a thread", &etcd, &mutex, || {
        let owner = thread::spawn(move || {
            KEPT.set(Some(guard));
            panic!("with the lock");
        });
        assert!(owner.join().is_err());
    });
    assert!(keys(&etcd, "/locks/").is_empty());
}

/// LIFE-04: the holder's `main` returns, with its client alive to the last.
#[test]
fn a_main_that_returns_lets_the_next_in_at_once() {
    if let Some(role) = role() {
        let client = Client::connect([&role[0]]).unwrap();
        let mutex = with_ttl(&client, "/locks/a", LONG);
        let guard = mutex.lock().unwrap();
        println!("\nkey={}", guard.lock_key());
        let leave = std::path::Path::new(&role[1]);
        eventually(LIMIT, "told to leave", || leave.exists());
        return;
    }
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let mutex = with_ttl(&client, "/locks/a", LONG);
    let name = format!("etcd-recipes-leave-{}", etcd.pid().unwrap());
    let leave = std::env::temp_dir().join(name);
    let _ = std::fs::remove_file(&leave);
    let test = "a_main_that_returns_lets_the_next_in_at_once";
    let twin = Twin::start(test, &[&etcd.endpoint(), leave.to_str().unwrap()]);
    let key = twin.wait_said("key");
    assert_eq!(keys(&etcd, "/locks/"), [key]);
    rival_enters_soon("return from main", &etcd, &mutex, || {
        std::fs::write(&leave, "now").unwrap();
    });
    std::fs::remove_file(&leave).unwrap();
    eventually(SOON, "its lease is given back", || leases(&etcd) <= 1);
}

/// LIFE-04: a holder that is killed says nothing; its lease ends it.
#[test]
fn a_holder_that_is_killed_blocks_for_its_ttl() {
    if let Some(role) = role() {
        let client = Client::connect([&role[0]]).unwrap();
        let mutex = with_ttl(&client, "/locks/a", ttl());
        let guard = mutex.lock().unwrap();
        println!("\nkey={}", guard.lock_key());
        until_parent_ends();
        return drop(guard);
    }
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let rival = with_ttl(&client, "/locks/a", LONG);
    let test = "a_holder_that_is_killed_blocks_for_its_ttl";
    let twin = Twin::start(test, &[&etcd.endpoint()]);
    let key = twin.wait_said("key");
    thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let guard = rival.lock().unwrap();
            (Instant::now(), guard.unlock())
        });
        wait_contenders(&rival, 2);
        assert!(keys(&etcd, "/locks/").contains(&key));
        let killed = Instant::now();
        drop(twin);
        let (entered, stood) = waiter.join().unwrap();
        let took = entered - killed;
        println!("killed: {took:?}");
        // A renewal counted at most a third of the TTL ago; etcd looks for expired leases
        // twice a second.
        assert!(took > ttl() / 3, "{took:?}: it was released, or not held");
        assert!(stood && took < ttl() + SOON, "{took:?}");
    });
}

/// How a client ends whose guard was forgotten.
enum End {
    Closed,
    Dropped,
}

/// A guard is forgotten; its lease is renewed until the client ends.
fn forget_a_guard(owned: bool, end: &End) {
    let etcd = EtcdServer::start().unwrap();
    let theirs = connect(&etcd);
    let rival = with_ttl(&theirs, "/locks/a", LONG);
    let client = connect(&etcd);
    let mutex = with_ttl(&client, "/locks/a", ttl());
    let hold = if owned {
        let guard = mutex.lock_owned().unwrap();
        let hold = guard.hold();
        std::mem::forget(guard);
        hold
    } else {
        let guard = mutex.lock().unwrap();
        let hold = guard.hold();
        std::mem::forget(guard);
        hold
    };
    thread::sleep(ttl() * 2);
    assert!(hold.is_held(), "its lease is no longer renewed");
    assert!(rival.try_lock().unwrap().is_none());
    rival_enters_soon("its client ended", &etcd, &rival, || {
        match end {
            End::Closed => client.close().unwrap(),
            End::Dropped => drop((mutex, client)),
        }
        assert!(!hold.is_held());
    });
    assert_eq!(hold.loss().unwrap().reason, LossReason::Closed);
    wait_keys(&etcd, "/locks/", 0);
}

/// LIFE-04: a guard that is forgotten is a lock that is kept, as long as its client lives.
#[test]
fn a_forgotten_guard_keeps_the_lock_until_the_client_is_closed() {
    forget_a_guard(false, &End::Closed);
    forget_a_guard(true, &End::Closed);
}

/// LIFE-04: the same where the client's last handle is dropped. (An owned guard is itself such a
/// handle, so that a forgotten one keeps its client alive.)
#[test]
fn a_forgotten_guard_keeps_the_lock_until_the_client_is_dropped() {
    forget_a_guard(false, &End::Dropped);
}

/// LIFE-04: a cancel right when an acquire succeeds. Either there is a guard or there is none; no
/// key stays behind that is nobody's.
#[test]
fn a_cancel_beside_a_success_leaves_no_key() {
    let etcd = EtcdServer::start().unwrap();
    let (ours, theirs) = (connect(&etcd), connect(&etcd));
    // A stall of the disk must not cost a hold: that is not what this is about.
    let holder = with_ttl(&theirs, "/locks/a", LONG);
    let mutex = with_ttl(&ours, "/locks/a", LONG);
    let ((), mut usual) = timed(|| assert!(mutex.lock().unwrap().unlock()));
    // A key that was left behind would stand in the way for ever, since its lease is renewed.
    let enter = |mutex: &Mutex| {
        mutex.try_lock_owned_for(LIMIT).map(|guard| guard.expect("a key was left behind"))
    };
    let (mut taken, mut interrupted) = (0, 0);
    let limit = rounds(300, 5_000);
    for round in 0..limit {
        // Every other time the success is a turn that comes, and not a free lock.
        let guard = (round % 2 == 1).then(|| enter(&holder).unwrap());
        let token = CancelToken::new();
        let (outcome, took) = thread::scope(|scope| {
            let acquirer = scope
                .spawn(|| timed(|| token.scope(|| enter(&mutex).map(OwnedMutexGuard::unlock))));
            if let Some(guard) = guard {
                wait_contenders(&holder, 2);
                let releaser = scope.spawn(move || assert!(guard.unlock()));
                thread::sleep(usual / 16 * u32::try_from(round % 16).unwrap());
                token.cancel();
                releaser.join().unwrap();
            } else {
                thread::sleep(usual / 16 * u32::try_from(round % 16).unwrap());
                token.cancel();
            }
            acquirer.join().unwrap()
        });
        match outcome {
            Ok(stood) => {
                assert!(stood);
                taken += 1;
                usual = (usual * 7 + took.min(ms(20))) / 8;
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Interrupted, "{error}");
                interrupted += 1;
            }
        }
    }
    println!("{taken} taken, {interrupted} interrupted");
    assert!(taken > limit / 100 && interrupted > limit / 100, "{taken} and {interrupted}");
    wait_keys(&etcd, "/locks/", 0);
    assert!(holder.try_lock().unwrap().expect("a key was left behind").unlock());
}

// ----- ELEC-04: the own key goes, the lease stays ---------------------------------------------

/// A holder's key is taken from it while a rival waits: the holder is told, the rival is in, and
/// the holder's next attempt is behind it.
fn take_the_key(take: impl Fn(&EtcdServer, &str), reason: LossReason) {
    let etcd = EtcdServer::start().unwrap();
    let (ours, theirs) = (connect(&etcd), connect(&etcd));
    let mutex = with_ttl(&ours, "/locks/a", LONG);
    let rival = with_ttl(&theirs, "/locks/a", LONG);
    let neighbour = with_ttl(&ours, "/locks/b", LONG).lock_owned().unwrap();
    let guard = mutex.lock().unwrap();
    let first = guard.fencing_token();
    let witness = Witness::new(&mutex, guard.hold());
    thread::scope(|scope| {
        let waiter = scope.spawn(|| rival.lock_owned().unwrap());
        wait_contenders(&rival, 2);
        let taken = Instant::now();
        take(&etcd, &guard.lock_key());
        eventually(LIMIT, "the holder is told", || !guard.is_held());
        let second = waiter.join().unwrap();
        assert!(taken.elapsed() < SOON + Duration::from_secs(1), "{:?}", taken.elapsed());
        witness.check(&mutex, reason, "/locks/a");
        assert!(!guard.unlock());
        assert!(first < second.fencing_token() && second.verify().unwrap());
        assert!(mutex.try_lock().unwrap().is_none(), "the rival is inside");
        let again = scope.spawn(|| {
            let guard = mutex.lock().unwrap();
            (guard.fencing_token(), guard.unlock())
        });
        wait_contenders(&rival, 2);
        let all = rival.contenders().unwrap();
        assert_eq!(all[0].token, second.fencing_token());
        assert!(second.is_held() && !again.is_finished());
        assert!(second.unlock());
        let (third, stood) = again.join().unwrap();
        assert!(stood);
        assert_eq!(third, all[1].token);
    });
    assert!(neighbour.verify().unwrap() && neighbour.unlock(), "the lease lives on");
    wait_keys(&etcd, "/locks/", 0);
}

/// ELEC-04 for the mutex.
#[test]
fn a_holder_whose_key_is_deleted_queues_behind_the_rival() {
    take_the_key(|etcd, key| drop(etcd.ctl(["del", key]).unwrap()), LossReason::KeyDeleted);
}

/// ELEC-04 for the mutex.
#[test]
fn a_holder_whose_key_is_overwritten_queues_behind_the_rival() {
    let overwrite = |etcd: &EtcdServer, key: &str| drop(etcd.ctl(["put", key, "mine"]).unwrap());
    take_the_key(overwrite, LossReason::KeyOverwritten);
}
