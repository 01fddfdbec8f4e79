//! Renewals of one etcd's leases under everything that disturbs them: resets, revocations, answers
//! that are wrong, a busy machine and a process that stands still.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod faults;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::bounded;
use etcd_recipes::testing::{
    Direction, EtcdCluster, EtcdServer, FaultProxy, FrameKind, Mode, boot_nanos, eventually,
};
use etcd_recipes::{Client, LossReason, Recipe};
use faults::*;
use parking_lot::{Mutex as Lock, RwLock};

/// Whoever wants the machine for itself takes this alone.
static MACHINE: RwLock<()> = RwLock::new(());

/// LEASE-01: a stream that ends says nothing of its lease.
#[test]
fn connections_that_are_reset_again_and_again_lose_nothing() {
    let _machine = MACHINE.read();
    let ttl = ttl();
    let etcd = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    let client = Client::connect([proxy.endpoint()]).unwrap();
    let held = mutex(&client, "/locks/held", ttl);
    let guard = held.lock().unwrap();
    let losses = held.loss_events();
    let registered = Registration::new(&client, "/nodes/7", ttl);
    let lease = registered.keep.current_lease_id();

    let direct = Client::connect([etcd.endpoint()]).unwrap();
    let rival = mutex(&direct, "/locks/held", ttl);
    let rounds = if full() { 30 } else { 5 };
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Acquire) {
                let here = direct.get("/nodes/7").unwrap();
                assert!(here.is_some_and(|kv| kv.lease == lease), "the key or its lease changed");
                thread::sleep(ms(20));
            }
        });
        scope.spawn(|| {
            while !over.load(Ordering::Acquire) {
                assert!(rival.try_lock_for(SLACK).unwrap().is_none(), "a rival got in");
            }
        });
        for _ in 0..rounds {
            proxy.set(Mode::Reset);
            thread::sleep(ms(300));
            proxy.set(Mode::Pass);
            thread::sleep(ms(1_700));
        }
        over.store(true, Ordering::Release);
    });
    assert!(guard.verify().unwrap());
    assert_eq!(registered.keep.current_lease_id(), lease);
    registered.assert_never_expired();
    assert!(losses.try_recv().is_err());
    assert_eq!(lease_on(&etcd, &guard.lock_key()), Some(lease_of(&guard.lock_key())));
    assert!(guard.unlock());
}

/// On a slow network the deadline still counts from the send, of the grant and of every renewal.
#[test]
fn serial_the_deadline_counts_from_the_send() {
    let _machine = MACHINE.read();
    let ttl = ttl();
    let etcd = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    let client = Client::connect([proxy.endpoint()]).unwrap();
    assert!(client.ping(), "the connection stands before its frames are counted");
    proxy.record(true);
    proxy.set(Mode::Delay { up: ms(20), down: ms(150) });
    let mutex = mutex(&client, "/locks/a-rather-long-name-for-a-lock", ttl);
    let guard = mutex.lock().unwrap();
    let counted_to = deadline(&guard.hold());
    let granted = proxy
        .frame_log()
        .into_iter()
        .find(|frame| frame.direction == Direction::Up && frame.kind == FrameKind::Data)
        .unwrap();
    let lease = lease_of(&guard.lock_key());
    // The proxy saw a request at once, so its send was no later.
    let latest = |seen: u64| seen + nanos(ttl - margin(ttl)) + nanos(ms(10));
    assert!(counted_to <= latest(granted.at_boottime_nanos), "the grant's answer counted");
    let (begun, mut moves, mut last) = (boot_nanos(), 0, counted_to);
    while boot_nanos() < begun + nanos(ttl * 2) {
        let counted_to = deadline(&guard.hold());
        assert!(guard.is_held(), "every question was answered in 170 ms");
        if counted_to > last + nanos(ms(20)) {
            (moves, last) = (moves + 1, counted_to);
            // The answer took its 150 ms, and the read in proof of it as long again.
            let answered_before = boot_nanos() - nanos(ms(300));
            let sent = renewals(&proxy, lease)
                .iter()
                .map(|frame| frame.at_boottime_nanos)
                .filter(|at| *at <= answered_before)
                .max()
                .expect("a renewal was sent");
            assert!(counted_to <= latest(sent), "a renewal's answer counted");
        }
        thread::sleep(ms(1));
    }
    assert!(moves >= 3, "{moves} renewals counted");
    assert!(guard.unlock());
}

/// LEASE-02 (a), an exclusive lease: "no such lease" is told once, and ends the renewals.
#[test]
fn a_revoked_lease_is_told_once_and_renewed_no_more() {
    let _machine = MACHINE.read();
    let ttl = ttl();
    let etcd = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    proxy.record(true);
    let client = Client::connect([proxy.endpoint()]).unwrap();
    let mutex = mutex(&client, "/locks/revoked", ttl);
    let guard = mutex.lock().unwrap();
    let losses = mutex.loss_events();
    let lease = lease_of(&guard.lock_key());
    eventually(LIMIT, "renewals are seen", || !renewals(&proxy, lease).is_empty());

    revoke(&etcd, lease);
    let loss = losses.recv_timeout(ttl / 3 + SLACK).expect("the loss is told in time");
    assert_eq!(loss.reason, LossReason::LeaseGone);
    assert!(!guard.is_held() && !guard.unlock());
    let told_at = boot_nanos();
    thread::sleep(ttl * 2);
    let late: Vec<_> = renewals(&proxy, lease)
        .into_iter()
        .filter(|frame| frame.at_boottime_nanos > told_at)
        .collect();
    assert!(late.is_empty(), "renewed after its end: {late:?}");
    assert!(losses.try_recv().is_err(), "told twice");
    assert!(mutex.lock().unwrap().unlock(), "a new lease serves the next hold");
}

/// LEASE-02 (a), a healing lease: a new lease and the key again, and the old one left alone.
#[test]
fn a_revoked_healing_lease_is_replaced() {
    let _machine = MACHINE.read();
    let ttl = ttl();
    let etcd = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    proxy.record(true);
    let client = Client::connect([proxy.endpoint()]).unwrap();
    let registered = Registration::new(&client, "/nodes/7", ttl);
    let old = registered.keep.current_lease_id();
    eventually(LIMIT, "renewals are seen", || !renewals(&proxy, old).is_empty());

    revoke(&etcd, old);
    eventually(ttl / 3 + SLACK, "the key is back", || {
        lease_on(&etcd, "/nodes/7").filter(|lease| *lease != old)
    });
    eventually(LIMIT, "the heal is told", || registered.story().len() == 2);
    assert_eq!(registered.story(), ["Expired", "Restored"]);
    let new = registered.keep.current_lease_id();
    assert_eq!(lease_on(&etcd, "/nodes/7"), Some(new));
    let healed_at = boot_nanos();
    thread::sleep(ttl * 2);
    // Both ids are of one size on the wire, so the old one shows in the number of renewals.
    let late = renewals(&proxy, new)
        .into_iter()
        .filter(|frame| frame.at_boottime_nanos > healed_at)
        .count();
    assert!((3..=9).contains(&late), "{late} renewals in two TTLs");
    assert_eq!(registered.story(), ["Expired", "Restored"]);
    assert!(lease_on(&etcd, "/nodes/7") == Some(new));
}

/// LEASE-02 (c): a member that lags may not know a new lease yet; that is no loss.
#[test]
fn grants_and_renewals_over_all_members_lose_nothing() {
    let _machine = MACHINE.read();
    let cluster = EtcdCluster::start(3).unwrap();
    let clients: Vec<Client> = (0..3)
        .map(|first| {
            let mut endpoints = cluster.endpoints();
            endpoints.rotate_left(first);
            Client::connect(endpoints).unwrap()
        })
        .collect();
    let (rounds, crowd) = if full() { (20, 50) } else { (4, 30) };
    let renewed = || -> f64 {
        let member = |i| {
            let name = "etcd_debugging_lease_renewed_total";
            cluster.member(i).metric(name, &[]).unwrap()
        };
        (0..3).map(member).sum()
    };
    for round in 0..rounds {
        let before = renewed();
        let registered: Vec<Registration> = (0..crowd)
            .map(|i| {
                let key = format!("/nodes/{round}/{i}");
                Registration::new(&clients[i % 3], &key, Duration::from_secs(10))
            })
            .collect();
        // One round of renewals goes out at once.
        eventually(LIMIT, "each lease was renewed", || renewed() >= before + crowd as f64);
        for one in &registered {
            assert!(one.story().is_empty(), "{:?}", one.story());
            one.keep.close().unwrap();
            assert!(one.story().is_empty(), "{:?}", one.story());
        }
    }
    let left = clients[0].count_prefix("/nodes/").unwrap();
    assert_eq!(left, 0, "keys of closed registrations");
}

// ----- LEASE-02 (b): answers that a real etcd gives only rarely -------------------------------

/// A proxy that makes the first answers of lease streams say "TTL 0", as a member that lags does.
struct Denier {
    address: String,
    denied: Arc<AtomicU32>,
    left: Arc<AtomicU32>,
}

impl Denier {
    fn start(target: &EtcdServer, answers: u32) -> Denier {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let target = target.endpoint().trim_start_matches("http://").to_owned();
        let (denied, left) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(answers)));
        let counts = (denied.clone(), left.clone());
        thread::spawn(move || {
            for client in listener.incoming() {
                let Ok(client) = client else { return };
                let server = TcpStream::connect(&target).unwrap();
                for socket in [&client, &server] {
                    socket.set_nodelay(true).unwrap();
                }
                // The first message that a connection carries tells renewals from grants.
                let renews = Arc::new(AtomicBool::new(false));
                let (mut from, mut to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                let up = renews.clone();
                thread::spawn(move || {
                    pump(&mut from, &mut to, true, |kind, body| {
                        let renewal = (14..=16).contains(&body.len()) && body[5] == 0x08;
                        if kind == 0 && renewal {
                            up.store(true, Ordering::Release);
                        }
                    })
                });
                let counts = counts.clone();
                thread::spawn(move || {
                    let (mut from, mut to) = (server, client);
                    pump(&mut from, &mut to, false, move |kind, body| {
                        // Field 3, the TTL, is the last of the message: one byte for a short one.
                        let answer = kind == 0 && body.len() > 20 && body[body.len() - 2] == 0x18;
                        let take = |left: u32| left.checked_sub(1);
                        if answer
                            && renews.load(Ordering::Acquire)
                            && counts
                                .1
                                .fetch_update(Ordering::AcqRel, Ordering::Acquire, take)
                                .is_ok()
                        {
                            counts.0.fetch_add(1, Ordering::AcqRel);
                            let last = body.len() - 1;
                            body[last] = 0;
                        }
                    });
                });
            }
        });
        Denier { address, denied, left }
    }

    fn deny(&self, answers: u32) {
        self.left.store(answers, Ordering::Release);
    }
}

/// Copies HTTP/2 frame by frame, each shown to `look` with its type on the way.
fn pump(
    from: &mut TcpStream,
    to: &mut TcpStream,
    preface: bool,
    mut look: impl FnMut(u8, &mut Vec<u8>),
) {
    let mut copy = || -> std::io::Result<()> {
        if preface {
            let mut magic = [0; 24];
            from.read_exact(&mut magic)?;
            to.write_all(&magic)?;
        }
        loop {
            let mut head = [0; 9];
            from.read_exact(&mut head)?;
            let size = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
            let mut body = vec![0; size];
            from.read_exact(&mut body)?;
            look(head[3], &mut body);
            to.write_all(&[&head[..], &body].concat())?;
        }
    };
    let _ = copy();
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}

/// A new lease that its first answers deny, though etcd has it, is neither given up nor replaced.
#[test]
fn a_lease_that_is_denied_too_early_is_asked_for_again() {
    let _machine = MACHINE.read();
    // A longer TTL, so that what fails here is the denial and not the clock.
    let ttl = Duration::from_secs(5);
    let etcd = EtcdServer::start().unwrap();
    for answers in [1, 2, 3] {
        let denier = Denier::start(&etcd, answers);
        let client = Client::connect([&denier.address]).unwrap();
        let registered = Registration::new(&client, &format!("/nodes/{answers}"), ttl);
        let lease = registered.keep.current_lease_id();
        eventually(LIMIT, "denials", || denier.denied.load(Ordering::Acquire) == answers);

        denier.deny(answers);
        let mutex = mutex(&client, &format!("/locks/{answers}"), ttl);
        let guard = mutex.lock().unwrap();
        let losses = mutex.loss_events();
        eventually(LIMIT, "more denials", || denier.denied.load(Ordering::Acquire) == 2 * answers);
        wait_just_renewed(&guard.hold(), ttl);
        thread::sleep(ttl / 2);
        assert!(guard.verify().unwrap());
        assert!(losses.try_recv().is_err());
        registered.assert_never_expired();
        assert_eq!(registered.keep.current_lease_id(), lease);
        assert_eq!(lease_on(&etcd, &format!("/nodes/{answers}")), Some(lease));
        assert!(guard.unlock());
    }
}

// ----- LEASE-05 -------------------------------------------------------------------------------

/// A saturated CPU, sleeping listeners and a flood of watched writes do not delay renewals.
#[test]
fn serial_renewals_go_out_in_time_on_a_busy_machine() {
    let _machine = MACHINE.write();
    let ttl = ttl();
    let etcd = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    proxy.record(true);
    let client = Client::connect([proxy.endpoint()]).unwrap();
    let direct = Client::connect([etcd.endpoint()]).unwrap();

    let held = mutex(&client, "/locks/held", ttl);
    let guard = held.lock().unwrap();
    let losses = held.loss_events();
    // Each hears of the present state at once, and keeps the healer thread for long.
    let (release, released) = bounded::<()>(0);
    for _ in 0..100 {
        let released = released.clone();
        held.add_connection_state_listener(move |_| {
            let _ = released.recv_timeout(ttl * 3);
        });
    }
    // A waiter watches its queue's prefix, and so all that is written below it.
    let busy = mutex(&direct, "/locks/busy", Duration::from_secs(10));
    let in_the_way = busy.lock_owned().unwrap();
    let over = Arc::new(AtomicBool::new(false));
    let written = Arc::new(AtomicU64::new(0));
    let mut workers = Vec::new();
    for worker in 0..4 {
        let (direct, over, written) = (direct.clone(), over.clone(), written.clone());
        workers.push(thread::spawn(move || {
            let value = vec![b'x'; 512];
            while !over.load(Ordering::Acquire) {
                direct.put(format!("/locks/busy/below/{worker}"), value.clone()).unwrap();
                written.fetch_add(1, Ordering::Relaxed);
            }
        }));
    }
    let cores = thread::available_parallelism().unwrap().get();
    for _ in 0..4 * cores {
        let over = over.clone();
        workers.push(thread::spawn(move || {
            while !over.load(Ordering::Acquire) {
                std::hint::spin_loop();
            }
        }));
    }
    let waiting = mutex(&client, "/locks/busy", ttl);
    let waiter = thread::spawn(move || waiting.lock_owned().unwrap().unlock());

    let begun = boot_nanos();
    thread::sleep(ttl * if full() { 10 } else { 4 });
    let lease = lease_of(&guard.lock_key());
    let sends: Vec<u64> = renewals(&proxy, lease)
        .iter()
        .map(|frame| frame.at_boottime_nanos)
        .chain([boot_nanos()])
        .collect();
    over.store(true, Ordering::Release);
    let still_held = guard.is_held();
    drop(release);
    drop(in_the_way);
    for worker in workers {
        worker.join().unwrap();
    }
    assert!(waiter.join().unwrap());
    assert!(still_held && losses.try_recv().is_err());
    assert!(written.load(Ordering::Relaxed) > 200, "the flood was a trickle");
    let longest = sends.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap();
    assert!(sends.len() > 10 && sends[0] < begun);
    assert!(
        longest <= nanos(ttl / 3 + SLACK),
        "{:?} without a renewal",
        Duration::from_nanos(longest)
    );
    assert!(guard.unlock());
}

/// A listener that blocks keeps its own mutex's events back, and nobody else's.
#[test]
fn a_blocked_listener_delays_no_other_loss() {
    let _machine = MACHINE.read();
    let ttl = ttl();
    let etcd = EtcdServer::start().unwrap();
    let client = Client::connect([etcd.endpoint()]).unwrap();
    let (blocked, free) = (mutex(&client, "/locks/1", ttl), mutex(&client, "/locks/2", ttl));
    let (release, released) = bounded::<()>(0);
    let (entered, has_entered) = bounded(1);
    blocked.add_loss_listener(move |_| {
        let _ = entered.send(());
        let _ = released.recv_timeout(ttl * 3);
    });
    let (tell, told) = bounded(1);
    free.add_loss_listener(move |loss| tell.send(loss.clone()).unwrap());
    // Two mutexes of one timing share their lease, so one revocation takes both.
    let first = blocked.lock().unwrap();
    revoke(&etcd, lease_of(&first.lock_key()));
    has_entered.recv_timeout(ttl / 3 + SLACK).expect("the first loss is told");
    let second = free.lock().unwrap();
    revoke(&etcd, lease_of(&second.lock_key()));
    told.recv_timeout(ttl / 3 + SLACK).expect("the second loss waits for nobody");
    assert!(!second.unlock() && !first.unlock());
    drop(release);
}

// ----- LEASE-09 -------------------------------------------------------------------------------

/// (a) A holder that stood still is not a holder when it wakes, and knows it without asking.
#[test]
fn a_frozen_holder_wakes_up_without_its_lock() {
    let _machine = MACHINE.read();
    if let Some(role) = role() {
        return hold_and_append(&role);
    }
    let ttl = ttl();
    let etcd = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    let file = std::env::temp_dir().join(format!("frozen-holder-{}", boot_nanos()));
    std::fs::write(&file, "").unwrap();
    let lines = || std::fs::read_to_string(&file).unwrap();
    let seconds = ttl.as_secs().to_string();
    let twin = Twin::start(
        "a_frozen_holder_wakes_up_without_its_lock",
        &[&proxy.endpoint(), &seconds, file.to_str().unwrap()],
    );
    eventually(LIMIT, "the holder writes", || lines().lines().count() > 10);

    let client = Client::connect([etcd.endpoint()]).unwrap();
    let rival = mutex(&client, "/locks/frozen", ttl);
    twin.freeze();
    let frozen_at = Instant::now();
    let guard = rival.lock().unwrap();
    append(file.to_str().unwrap(), &format!("rival,{}", guard.fencing_token()));
    thread::sleep((ttl * 2).saturating_sub(frozen_at.elapsed()));
    // What the holder learns now it learns from its own clock.
    proxy.set(Mode::Blackhole);
    twin.thaw();
    let woke = Instant::now();
    assert_eq!(twin.wait_said("first"), "false", "held on waking up");
    assert!(woke.elapsed() < SLACK);
    assert_eq!(twin.wait_said("losses"), "1 DeadlinePassed");
    assert!(guard.is_held() && guard.unlock());

    let text = lines();
    let rival_at = text.lines().position(|line| line.starts_with("rival,")).unwrap();
    let late = text.lines().skip(rival_at + 1).count();
    // The line that was being written while the process was stopped.
    assert!(late <= 1, "the old holder wrote on:\n{text}");
    let tokens: Vec<i64> =
        text.lines().map(|line| line.split(',').nth(1).unwrap().parse().unwrap()).collect();
    assert!(tokens[rival_at] > tokens[0]);
    std::fs::remove_file(&file).unwrap();
}

fn append(file: &str, line: &str) {
    let mut file = std::fs::OpenOptions::new().append(true).open(file).unwrap();
    file.write_all(format!("{line}\n").as_bytes()).unwrap();
}

/// The twin: holds the mutex, writes for as long as it does, and says how it went on.
fn hold_and_append(role: &[String]) {
    let ttl = Duration::from_secs(role[1].parse().unwrap());
    let client = Client::connect([&role[0]]).unwrap();
    let mutex = mutex(&client, "/locks/frozen", ttl);
    let told = Arc::new(Lock::new(Vec::new()));
    mutex.add_loss_listener({
        let told = told.clone();
        move |loss| told.lock().push(loss.reason)
    });
    let guard = mutex.lock().unwrap();
    let mut before = boot_nanos();
    loop {
        let held = guard.is_held();
        let now = boot_nanos();
        // The first question after a gap: that is the waking up.
        if now - before > nanos(ttl) {
            println!("\nfirst={held}");
        }
        before = now;
        if !held {
            break;
        }
        append(&role[2], &format!("holder,{}", guard.fencing_token()));
        thread::sleep(ms(1));
    }
    eventually(LIMIT, "the loss is told", || !told.lock().is_empty());
    thread::sleep(ms(500));
    assert!(!guard.is_held());
    let told = told.lock();
    println!("losses={} {:?}", told.len(), told[0]);
    until_parent_ends();
}

/// (c) A registration that stood still is back soon after it wakes.
#[test]
fn a_frozen_registration_is_back_after_it_wakes() {
    let _machine = MACHINE.read();
    if let Some(role) = role() {
        let ttl = Duration::from_secs(role[1].parse().unwrap());
        let client = Client::connect([&role[0]]).unwrap();
        let _registered = Registration::new(&client, "/nodes/frozen", ttl);
        return until_parent_ends();
    }
    let ttl = ttl();
    let etcd = EtcdServer::start().unwrap();
    let seconds = ttl.as_secs().to_string();
    let twin =
        Twin::start("a_frozen_registration_is_back_after_it_wakes", &[&etcd.endpoint(), &seconds]);
    let client = Client::connect([etcd.endpoint()]).unwrap();
    let here = || client.get("/nodes/frozen").unwrap();
    let old = eventually(LIMIT, "the registration", here);
    twin.freeze();
    thread::sleep(ttl * 2);
    eventually(LIMIT, "its key is gone", || here().is_none());
    twin.thaw();
    let new = eventually(SLACK, "the registration is back", here);
    assert_ne!(old.lease, new.lease);
    drop(twin);
}
