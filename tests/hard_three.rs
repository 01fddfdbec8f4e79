//! Three faults on which the obvious answer is wrong: a request that is applied after its caller
//! gave up, a leader that was deposed in its sleep, and answers that a sleeping client finds when
//! it wakes.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod faults;

use std::io::{BufRead, BufReader};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use etcd_recipes::testing::{
    CtlProcess, Direction, EtcdServer, FaultProxy, FrameKind, Mode, boot_nanos, eventually,
};
use etcd_recipes::{Client, LeaseResilience, Mutex};
use faults::*;
use parking_lot::Mutex as Lock;

// ----- a request that is applied late ---------------------------------------------------------

/// What etcd itself tells of the keys under a prefix: `PUT`, `DELETE`, and when.
struct Eyes {
    seen: Arc<Lock<Vec<(u64, String)>>>,
    _watch: CtlProcess,
}

impl Eyes {
    fn on(etcd: &EtcdServer, prefix: &str) -> Eyes {
        let mut watch = etcd.spawn_ctl(["watch", "--prefix", prefix]).unwrap();
        let seen: Arc<Lock<Vec<(u64, String)>>> = Arc::default();
        let (told, output) = (seen.clone(), watch.stdout.take().unwrap());
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if line == "PUT" || line == "DELETE" {
                    told.lock().push((boot_nanos(), line));
                }
            }
        });
        let eyes = Eyes { seen, _watch: watch };
        // A watch from now on: it is there once it has told of a key.
        let client = Client::connect([etcd.endpoint()]).unwrap();
        eventually(LIMIT, "etcdctl watches", || {
            let probe = format!("{prefix}-eyes");
            client.put(probe.as_str(), "").unwrap();
            client.delete(probe.as_str()).unwrap();
            thread::sleep(ms(20));
            !eyes.seen.lock().is_empty()
        });
        let quiet = || {
            let before = eyes.seen.lock().len();
            thread::sleep(ms(100));
            eyes.seen.lock().len() == before
        };
        eventually(LIMIT, "the probes are over", quiet);
        eyes.seen.lock().clear();
        eyes
    }

    fn when(&self, what: &str) -> Option<u64> {
        self.seen.lock().iter().find(|(_, event)| event == what).map(|(at, _)| *at)
    }
}

/// An enqueue lies in the socket of a frozen follower. The caller gives up, a read shows that the
/// key is not there, and then the follower wakes and applies it.
///
/// Another hold keeps the lease alive, so that its end cannot be what saves the path.
#[test]
fn an_enqueue_applied_after_its_caller_gave_up_blocks_nobody() {
    let ttl = Duration::from_secs(5);
    let proxied = Proxied::start();
    proxied.cluster.move_leader(1).unwrap();
    let (follower, leader) = (proxied.cluster.member(0), proxied.cluster.member(1));
    let proxy = &proxied.proxies[0];
    let client = proxied.client(0);
    let other = mutex(&client, "/locks/other", ttl);
    let stuck = mutex(&client, "/locks/stuck", ttl);
    let held = other.lock_owned().unwrap();
    let eyes = Eyes::on(leader, "/locks/stuck/");
    let direct = Client::connect([leader.endpoint()]).unwrap();
    let rival = mutex(&direct, "/locks/stuck", ttl);

    wait_just_renewed(&held.hold(), ttl);
    follower.freeze().unwrap();
    let before = proxy.bytes_up();
    let caller = thread::spawn({
        let stuck = stuck.clone();
        move || stuck.try_lock_for(ms(700)).map(|guard| guard.is_some())
    });
    eventually(LIMIT, "the request is under way", || proxy.bytes_up() > before + 100);
    // What follows it, the caller's resignation for one, is still on its way.
    proxy.set(Mode::BlackholeUp);
    let given_up = caller.join().unwrap().unwrap_err();
    assert!(given_up.is_unreachable(), "{given_up}");
    assert!(rival.contenders().unwrap().is_empty(), "the key is not there, for now");
    assert!(eyes.when("PUT").is_none());

    follower.thaw().unwrap();
    let thawed = boot_nanos();
    eventually(LIMIT, "the enqueue is applied after all", || eyes.when("PUT"));
    proxy.set(Mode::Pass);
    let guard = rival.try_lock_for(SLACK).unwrap();
    let took = Duration::from_nanos(boot_nanos() - thawed);
    println!("free {took:?} after the thaw");
    let guard = guard.expect("the path is blocked by a key that nobody uses");
    assert!(took < SLACK, "{took:?}");
    assert!(guard.unlock());
    assert!(held.is_held(), "the other hold has nothing to do with it");

    let lease = lease_of(&held.lock_key());
    assert!(held.unlock());
    // Long before it would expire by itself.
    eventually(SLACK * 2, "the lease of an unanswered request goes with its last hold", || {
        let leases = leader.ctl(["lease", "list"]).unwrap();
        !leases.contains(&format!("{lease:x}"))
    });
}

/// The same without another hold: the end of the lease forbids the enqueue.
#[test]
fn an_enqueue_that_is_too_late_finds_its_lease_gone() {
    let ttl = Duration::from_secs(10);
    let proxied = Proxied::start();
    proxied.cluster.move_leader(1).unwrap();
    let (follower, leader) = (proxied.cluster.member(0), proxied.cluster.member(1));
    let proxy = &proxied.proxies[0];
    let client = proxied.client(0);
    let stuck = mutex(&client, "/locks/stuck", ttl);
    let warm = stuck.lock_owned().unwrap();
    let lease = lease_of(&warm.lock_key());
    wait_just_renewed(&warm.hold(), ttl);
    assert!(warm.unlock());

    follower.freeze().unwrap();
    let before = proxy.bytes_up();
    let caller = thread::spawn({
        let stuck = stuck.clone();
        move || stuck.try_lock_for(ms(700)).map(|guard| guard.is_some())
    });
    eventually(LIMIT, "the request is under way", || proxy.bytes_up() > before + 100);
    proxy.set(Mode::BlackholeUp);
    assert!(caller.join().unwrap().unwrap_err().is_unreachable());
    eventually(SLACK * 2, "the lease is revoked through another member", || {
        let leases = leader.ctl(["lease", "list"]).unwrap();
        !leases.contains(&format!("{lease:x}"))
    });
    follower.thaw().unwrap();
    proxy.set(Mode::Pass);
    let direct = Client::connect([leader.endpoint()]).unwrap();
    let rival = mutex(&direct, "/locks/stuck", ttl);
    let guard = rival.try_lock_for(SLACK).unwrap().expect("the path is free");
    assert!(guard.unlock());
}

// ----- a deposed leader -----------------------------------------------------------------------

/// The leader freezes, another is elected, and the old one wakes: it answers the renewal that it
/// finds in its socket with the old term and a full TTL. That renewal counts for nothing.
///
/// The client knows this member alone, so that nothing but the answers can tell it of the term.
#[test]
fn a_deposed_leaders_acknowledgement_does_not_move_the_deadline() {
    // Slow renewals: one is in flight, and it lasts until the old leader has been deposed.
    let ttl = Duration::from_secs(12);
    let timing = LeaseResilience::new()
        .renew_interval(Duration::from_secs(2))
        .hedge_delay(Duration::from_secs(4))
        .attempt_limit(ms(4_500));
    let proxied = Proxied::start();
    proxied.cluster.move_leader(0).unwrap();
    let old = proxied.cluster.member(0);
    let proxy = &proxied.proxies[0];
    let client = Client::connect([proxy.endpoint()]).unwrap();
    let mutex = Mutex::builder(&client, "/locks/a-rather-long-name-for-a-lock")
        .ttl(ttl)
        .resilience(timing)
        .build()
        .unwrap();
    proxy.record(true);
    let guard = mutex.lock().unwrap();
    let hold = guard.hold();
    let lease = lease_of(&guard.lock_key());
    // The second, so that the stream is an old one and its answers are not swallowed.
    eventually(LIMIT, "renewals are seen", || renewals(proxy, lease).len() >= 3);
    wait_just_renewed(&hold, ttl);
    thread::sleep(ms(300));

    let deadline_before = deadline(&hold);
    proxied.cluster.isolate(0);
    old.freeze().unwrap();
    let frozen = boot_nanos();
    let new = proxied.cluster.wait_leader(LIMIT).unwrap();
    assert_ne!(new, 0);
    let asked = || renewals(proxy, lease).iter().any(|sent| sent.at_boottime_nanos > frozen);
    eventually(LIMIT, "a renewal lies in the socket of the old leader", asked);

    // It cannot hear of the election yet, and answers as the leader it was.
    proxy.set(Mode::BlackholeDown);
    let thawed = boot_nanos();
    old.thaw().unwrap();
    let answered = || {
        proxy.frame_log().iter().any(|frame| {
            frame.direction == Direction::Down
                && frame.kind == FrameKind::Data
                && frame.at_boottime_nanos > thawed
        })
    };
    eventually(LIMIT, "the old leader answers", answered);
    proxied.cluster.rejoin(0);
    eventually(LIMIT, "the old leader learns that it is deposed", || {
        let metric = |name| old.metric(name, &[]).unwrap();
        metric("etcd_server_is_leader") == 0.0 && metric("etcd_server_has_leader") == 1.0
    });

    // Only now does the client get the answer, and its proof read goes to a mere follower.
    let handed_over = boot_nanos();
    assert!(hold.is_held(), "this took too long to show anything");
    proxy.set(Mode::Pass);
    let moved = eventually(ttl, "a later renewal counts, or the hold is lost", || {
        if !hold.is_held() {
            return Some(None);
        }
        let now = deadline(&hold);
        (now > deadline_before + nanos(ms(50))).then_some(Some(now))
    });
    let moved = moved.expect("renewals through a follower count again");
    let sent = moved - nanos(ttl - margin(ttl));
    assert!(
        sent >= handed_over,
        "the deadline counts from a renewal sent {:?} before the old leader's answer came",
        Duration::from_nanos(handed_over - sent)
    );
    assert!(guard.unlock());
}

/// A leader that wakes up cut off from its peers goes on acknowledging renewals for a while; the
/// hold on it runs out all the same.
#[test]
fn a_leader_that_is_cut_off_renews_nothing() {
    let ttl = Duration::from_secs(5);
    let proxied = Proxied::start();
    proxied.cluster.move_leader(0).unwrap();
    let old = proxied.cluster.member(0);
    let client = Client::connect([old.endpoint()]).unwrap();
    let mutex = mutex(&client, "/locks/cut-off", ttl);
    let guard = mutex.lock().unwrap();
    let hold = guard.hold();
    wait_just_renewed(&hold, ttl);

    old.freeze().unwrap();
    proxied.cluster.isolate(0);
    proxied.cluster.wait_leader(LIMIT).unwrap();
    let end = deadline(&hold) + nanos(ms(20));
    assert!(hold.is_held());
    old.thaw().unwrap();
    while hold.is_held() {
        assert!(deadline(&hold) <= end, "the deadline moved");
        thread::sleep(ms(1));
    }
    assert!(boot_nanos() < end + nanos(SLACK));
    let direct = Client::connect([proxied.other(&[0]).endpoint()]).unwrap();
    let rival = faults::mutex(&direct, "/locks/cut-off", ttl);
    let rivals = rival.try_lock_for(ttl * 4).unwrap().expect("the lease expires at the new leader");
    assert!(!hold.is_held() && rivals.unlock());
    proxied.cluster.rejoin(0);
    assert!(!guard.unlock());
}

// ----- answers that waited --------------------------------------------------------------------

/// The client freezes with a renewal's answer in its socket and wakes after its deadline: the
/// answer moves nothing, and what was lost stays lost.
#[test]
fn answers_that_waited_out_a_freeze_revive_nothing() {
    let test = "answers_that_waited_out_a_freeze_revive_nothing";
    wake_with_answers(test, Duration::ZERO);
}

/// The same where nobody asks until every answer has been taken up.
#[test]
fn answers_that_waited_out_a_freeze_count_for_nothing_unasked() {
    let test = "answers_that_waited_out_a_freeze_count_for_nothing_unasked";
    wake_with_answers(test, ms(300));
}

fn wake_with_answers(test: &str, patience: Duration) {
    if let Some(role) = role() {
        return ask_without_end(&role, patience);
    }
    let ttl = ttl();
    let etcd = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    proxy.record(true);
    let seconds = ttl.as_secs().to_string();
    let twin = Twin::start(test, &[&proxy.endpoint(), &seconds]);
    let key = twin.wait_said("key");
    let lease = lease_of(&key);
    eventually(LIMIT, "renewals are seen", || renewals(&proxy, lease).len() >= 3);

    // The next renewal goes out, and its answer is kept back until the client stands still.
    proxy.set(Mode::BlackholeDown);
    let seen = renewals(&proxy, lease).len();
    eventually(LIMIT, "another renewal", || renewals(&proxy, lease).len() > seen);
    twin.freeze();
    let down = proxy.bytes_down();
    proxy.set(Mode::Pass);
    eventually(LIMIT, "the answers are in the client's sockets", || proxy.bytes_down() > down);
    // The lease itself is kept alive by somebody else, so that the answers are not even wrong.
    let begun = Instant::now();
    while begun.elapsed() < ttl * 2 {
        etcd.ctl(["lease", "keep-alive", "--once", &format!("{lease:x}")]).unwrap();
        thread::sleep(ms(100));
    }
    assert_eq!(lease_on(&etcd, &key), Some(lease), "etcd counted no expiry");
    twin.thaw();
    assert_eq!(twin.wait_said("woke"), "false", "held on waking up");
    assert_eq!(twin.wait_said("changes"), "1 0", "how often it was lost, and came back");
    // It stays lost although the lease was alive, and its key is taken away.
    eventually(SLACK, "the key is removed", || lease_on(&etcd, &key).is_none());
}

/// The twin: asks whether it holds, as often as it can, and counts how the answer changes. After
/// waking up it waits with its next question.
fn ask_without_end(role: &[String], patience: Duration) {
    let ttl = Duration::from_secs(role[1].parse().unwrap());
    let client = Client::connect([&role[0]]).unwrap();
    let mutex = mutex(&client, "/locks/asked", ttl);
    let guard = mutex.lock().unwrap();
    println!("\nkey={}", guard.lock_key());
    let (mut last, mut before) = (true, boot_nanos());
    let (mut lost, mut back) = (0, 0);
    let mut end = u64::MAX;
    while before < end {
        // A short nap, so that it is here that a freeze most likely falls.
        thread::sleep(ms(1));
        let now = boot_nanos();
        let woke = now - before > nanos(ttl);
        if woke {
            thread::sleep(patience);
        }
        let held = guard.is_held();
        if woke {
            println!("woke={held}");
            end = now + nanos(ttl + SLACK);
        }
        match (last, held) {
            (true, false) => lost += 1,
            (false, true) => back += 1,
            _ => {}
        }
        (last, before) = (held, now);
    }
    assert!(guard.remaining().is_zero());
    println!("changes={lost} {back}");
    until_parent_ends();
}
