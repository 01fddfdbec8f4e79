//! Leaders that are cut off for about as long as their lease lasts, over and over: at no time two.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod faults;
mod support;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use etcd_recipes::testing::{EtcdCluster, EtcdServer, FaultProxy, Mode, boot_nanos, eventually};
use etcd_recipes::{Client, LeaderLatch};
use support::*;

/// How often a candidate is asked whether it leads.
const SAMPLE: Duration = Duration::from_millis(2);

/// What a leader has to have left when the network is back for its leadership to go on: enough
/// for a renewal that starts then.
const ENOUGH: Duration = Duration::from_millis(650);

/// When a candidate said that it leads in one term, by the machine's boot-time clock. It begins
/// with the last look before it said so, so it is never too short.
#[derive(Clone, Copy, Debug)]
struct Reign {
    from: u64,
    to: u64,
}

struct Candidate {
    latch: Arc<LeaderLatch>,
    reigns: Arc<parking_lot::Mutex<BTreeMap<i64, Reign>>>,
    stop: Arc<AtomicBool>,
    sampler: Option<thread::JoinHandle<()>>,
}

impl Candidate {
    fn new(client: &Client, path: &str, name: &str, ttl: Duration) -> Candidate {
        let latch = LeaderLatch::builder(client, path).ttl(ttl).client_id(name).build().unwrap();
        latch.start().unwrap();
        let latch = Arc::new(latch);
        let reigns: Arc<parking_lot::Mutex<BTreeMap<i64, Reign>>> = Arc::default();
        let stop = Arc::new(AtomicBool::new(false));
        let sampler = thread::spawn({
            let (latch, reigns, stop) = (latch.clone(), reigns.clone(), stop.clone());
            move || {
                let mut before = boot_nanos();
                while !stop.load(Ordering::Relaxed) {
                    let leadership = latch.leadership();
                    let now = boot_nanos();
                    // Asked again after the look at the clock: it led for all that time.
                    if let Some(leadership) = leadership.filter(|term| term.is_leader()) {
                        let term = leadership.fencing_token();
                        let new = Reign { from: before, to: now };
                        reigns.lock().entry(term).or_insert(new).to = now;
                    }
                    before = now;
                    thread::sleep(SAMPLE);
                }
            }
        });
        Candidate { latch, reigns, stop, sampler: Some(sampler) }
    }

    fn term(&self) -> Option<i64> {
        self.latch.leadership().map(|leadership| leadership.fencing_token())
    }
}

impl Drop for Candidate {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(sampler) = self.sampler.take() {
            let _ = sampler.join();
        }
    }
}

/// The one who leads, once there is exactly one.
fn leader(candidates: &[Candidate]) -> (usize, i64) {
    eventually(LIMIT, "one leader", || {
        let terms: Vec<_> = candidates
            .iter()
            .enumerate()
            .filter_map(|(at, candidate)| Some((at, candidate.term()?)))
            .collect();
        match terms[..] {
            [one] => Ok(one),
            _ => Err(terms),
        }
    })
}

/// A number of this process that is different at each call, evenly spread.
fn random_below(limit: u64) -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(boot_nanos()) % limit
}

/// By one clock: terms grow, and none begins before the one before it has ended.
fn check_reigns(candidates: &[Candidate]) -> usize {
    let mut all: Vec<(i64, Reign, usize)> = Vec::new();
    for (at, candidate) in candidates.iter().enumerate() {
        all.extend(candidate.reigns.lock().iter().map(|(term, reign)| (*term, *reign, at)));
    }
    all.sort_by_key(|(term, ..)| *term);
    for pair in all.windows(2) {
        let ((term, earlier, who), (next, later, whom)) = (pair[0], pair[1]);
        assert!(term < next, "two led in term {term}: {who} and {whom}");
        assert!(
            earlier.to < later.from,
            "{who} said that it leads in term {term} when {whom} led in term {next}: {pair:?}"
        );
    }
    all.len()
}

/// The rounds of one election. How often the leadership went on, and how often it changed.
fn rounds(etcd: &EtcdServer, path: &str, ttl: Duration, rounds: usize) -> (usize, usize) {
    let proxies: Vec<_> = (0..3).map(|_| FaultProxy::start(etcd.endpoint()).unwrap()).collect();
    let clients: Vec<_> =
        proxies.iter().map(|proxy| Client::connect([proxy.endpoint()]).unwrap()).collect();
    let candidates: Vec<_> = clients
        .iter()
        .enumerate()
        .map(|(at, client)| Candidate::new(client, path, &format!("candidate-{at}"), ttl))
        .collect();
    let (mut kept, mut changed) = (0, 0);
    for _ in 0..rounds {
        let (at, term) = leader(&candidates);
        let half = u64::try_from(ttl.as_millis()).unwrap() / 2;
        let outage = ms(half + random_below(2 * half));
        proxies[at].set(Mode::Blackhole);
        // The fault itself: this is how long it lasts.
        thread::sleep(outage);
        let left = candidates[at].latch.leadership().map(|leadership| leadership.remaining());
        proxies[at].set(Mode::Pass);
        let (now, next) = if left.is_some_and(|left| left >= ENOUGH) {
            // Back before its deadline: it goes on in the same term, past that deadline.
            thread::sleep(ttl);
            leader(&candidates)
        } else {
            leader(&candidates)
        };
        if (now, next) == (at, term) {
            kept += 1;
        } else {
            changed += 1;
            assert!(next > term);
            assert!(
                left.is_none_or(|left| left < ENOUGH),
                "{left:?} were left after {outage:?}, and the leadership did not go on"
            );
        }
    }
    let terms = check_reigns(&candidates);
    // The last term may not have been looked at yet.
    assert!(terms >= changed, "{terms} terms were seen, in {changed} changes");
    for candidate in &candidates {
        candidate.latch.close().unwrap();
    }
    wait_keys(etcd, path, 0);
    (kept, changed)
}

#[test]
fn leaders_cut_off_for_about_a_ttl_never_overlap() {
    let etcd = EtcdServer::start().unwrap();
    let (elections, each) = if faults::full() { (4, 50) } else { (2, 4) };
    let totals = thread::scope(|scope| {
        let playing: Vec<_> = (0..elections)
            .map(|n| {
                let etcd = &etcd;
                scope.spawn(move || rounds(etcd, &format!("/elections/{n}"), TTL, each))
            })
            .collect();
        playing.into_iter().map(|one| one.join().unwrap()).collect::<Vec<_>>()
    });
    let kept: usize = totals.iter().map(|(kept, _)| kept).sum();
    let changed: usize = totals.iter().map(|(_, changed)| changed).sum();
    println!("{kept} rounds in which the leadership went on, {changed} in which it changed");
    assert_eq!(kept + changed, elections * each);
    assert!(changed > 0, "no outage was long enough to prove anything");
}

#[test]
fn a_stopped_leader_of_etcd_costs_no_leadership_and_makes_no_second() {
    let cluster = EtcdCluster::start(3).unwrap();
    // With room for an election of etcd's own whose first votes are split.
    let ttl = Duration::from_secs(8);
    let endpoints = cluster.endpoints();
    let clients: Vec<_> = (0..3).map(|_| Client::connect(&endpoints).unwrap()).collect();
    let candidates: Vec<_> = clients
        .iter()
        .enumerate()
        .map(|(at, client)| Candidate::new(client, "/elections/a", &format!("c-{at}"), ttl))
        .collect();
    let rounds = if faults::full() { 5 } else { 1 };
    for _ in 0..rounds {
        let before = leader(&candidates);
        let stopped = cluster.wait_leader(LIMIT).unwrap();
        cluster.member(stopped).freeze().unwrap();
        // The fault itself. These versions of etcd have a fault of their own: a leader that stood
        // still for longer than what a lease had left revokes that lease when it goes on, live or
        // not. So it is less than the two thirds that are left at the least.
        thread::sleep(ttl * 5 / 8);
        cluster.member(stopped).thaw().unwrap();
        assert_eq!(leader(&candidates), before, "one member's failure has cost a leadership");
        check_reigns(&candidates);
    }
}
