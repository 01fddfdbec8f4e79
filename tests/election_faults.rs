//! Field reports on elections, in both forms. Each test names its case.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod candidates;
mod faults;
mod support;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use candidates::*;
use etcd_recipes::testing::{EtcdServer, FaultProxy, Mode, eventually};
use etcd_recipes::{CandidateState, Client, ErrorKind, LeaderSelector, LossReason, Recipe};
use faults::{SLACK, full, margin, ttl};
use parking_lot::Mutex as Lock;
use support::{calls_during, connect, keys, ms, patient, revoke_lease_of, settle, wait_keys};

/// What a machine that runs several servers at once may add to any figure.
const NOISE: Duration = Duration::from_millis(1500);

// ----- ELEC-01: phantom leaders and zombie candidates -------------------------------------------

/// A source of numbers that can be begun again from its seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }
}

/// A candidate with a link of its own.
struct Linked {
    proxy: FaultProxy,
    candidate: Candidate,
}

impl Linked {
    fn start(etcd: &EtcdServer, form: Form, path: &str, id: &str) -> Linked {
        let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
        let client =
            patient(Duration::from_secs(1)).endpoints([proxy.endpoint()]).connect().unwrap();
        let candidate = Candidate::start(form, &client, path, id, ttl());
        Linked { proxy, candidate }
    }
}

/// Nobody says that it leads while an older key stands; one whose key has gone has said so for the
/// last time within a second.
#[track_caller]
fn check_no_phantom(direct: &Client, path: &str, all: &[&Linked]) {
    for one in all {
        let Some(term) = one.candidate.term() else { continue };
        let prefix = format!("{path}/");
        let first = direct
            .get_prefix(prefix)
            .unwrap()
            .into_iter()
            .min_by_key(|found| found.create_revision);
        let first = first.map(|first| first.create_revision);
        let behind = first.is_some_and(|first| first < term.fencing_token());
        assert!(!behind, "{} leads behind another", one.candidate.id);
        if first != Some(term.fencing_token()) {
            eventually(SLACK + NOISE, "a leader without the first key", || !term.is_leader());
        }
    }
}

/// Soon everyone stands in the queue again, and the first leads.
#[track_caller]
fn settled<'a>(
    etcd: &EtcdServer,
    path: &str,
    all: [&'a Linked; 2],
    story: &[String],
) -> &'a Linked {
    let limit = ttl() + SLACK + NOISE;
    eventually(limit, &format!("{path}: both stand, the first leads, after {story:?}"), || {
        let line = line(etcd, path);
        let mut owners: Vec<_> = line.iter().map(|key| owner(key)).collect();
        let leads = |one: &&Linked| one.candidate.term().is_some_and(|t| t.lock_key() == line[0]);
        let leader = line.first().and_then(|_| all.into_iter().find(leads));
        owners.sort_unstable();
        match leader {
            Some(leader) if owners == ["a", "b"] => Ok(leader),
            _ => {
                Err(format!("{line:?}, {}, {}", all[0].candidate.state(), all[1].candidate.state()))
            }
        }
    })
}

fn schedule(etcd: &EtcdServer, direct: &Client, form: Form, number: usize) {
    let mut dice = Dice((number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let path = format!("/elections/{form:?}-{number}");
    let a = Linked::start(etcd, form, &path, "a");
    a.candidate.wait_leads();
    let b = Linked::start(etcd, form, &path, "b");
    eventually(LIMIT, "b stands", || key_of(etcd, &path, "b").is_some());
    let all = [&a, &b];
    let mut story = Vec::new();
    for _ in 0..=dice.roll(3) {
        let id = ["a", "b", "b"][dice.roll(3) as usize];
        let lease = dice.roll(3) > 0;
        if let Some(key) = key_of(etcd, &path, id) {
            story.push(format!("{} of {id}", if lease { "lease" } else { "key" }));
            if lease {
                // It may have gone with an earlier step.
                let _ = etcd.ctl(["lease", "revoke", &support::lease_of(&key)]);
            } else {
                direct.delete(key).unwrap();
            }
        }
        thread::sleep(ms(dice.roll(60)));
        check_no_phantom(direct, &path, &all);
    }
    let leader = settled(etcd, &path, all, &story);
    let other = if leader.candidate.id == "a" { &b } else { &a };
    check_no_phantom(direct, &path, &all);
    if dice.roll(2) == 0 {
        // The leader dies; what it thinks of itself goes with its deadline.
        let term = leader.candidate.wait_leads();
        leader.proxy.set(Mode::Blackhole);
        let died = Instant::now();
        let next = other.candidate.wait_leads();
        let took = died.elapsed();
        assert!(!term.is_leader(), "two leaders");
        assert!(took < ttl() + SLACK + NOISE, "{path}: {took:?} after {story:?}");
        assert!(next.fencing_token() > term.fencing_token());
        assert!(line(etcd, &path).iter().all(|key| *key != term.lock_key()));
        leader.proxy.set(Mode::Pass);
        settled(etcd, &path, all, &story);
        eventually(LIMIT, "the dead one comes again behind", || {
            let line = line(etcd, &path);
            let owners: Vec<_> = line.iter().map(|key| owner(key)).collect();
            let behind = owners == [&other.candidate.id, &leader.candidate.id];
            // On a machine that stood still it may have lost the next one, too.
            if (behind && line[0] == next.lock_key()) || !next.is_leader() {
                Ok(())
            } else {
                Err(line)
            }
        });
        check_no_phantom(direct, &path, &all);
    }
    for one in all {
        one.candidate.close().unwrap();
    }
    wait_keys(etcd, &format!("{path}/"), 0);
}

/// ELEC-01: over randomised schedules of revoked leases, deleted keys and dead leaders, nobody
/// leads without the first key and nobody drops out of the queue.
#[test]
fn no_phantom_leads_and_no_candidate_drops_out() {
    let etcd = EtcdServer::start().unwrap();
    let direct = connect(&etcd);
    let schedules = if full() { 200 } else { 20 };
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= schedules {
                        return;
                    }
                    schedule(&etcd, &direct, FORMS[number % 2], number);
                }
            });
        }
    });
}

// ----- ELEC-02: error paths ---------------------------------------------------------------------

/// ELEC-02: a candidate whose watch fails, because the history it needs was compacted while it
/// was cut off, goes on waiting and leads in its turn; with one key in etcd, not two or none.
#[test]
fn a_compaction_past_a_waiting_candidate_costs_it_nothing() {
    let etcd = EtcdServer::start().unwrap();
    let direct = connect(&etcd);
    for form in FORMS {
        for leader_goes in [false, true] {
            let path = format!("/elections/{form:?}-{leader_goes}");
            let leader = Candidate::start(form, &direct, &path, "a", LONG);
            leader.wait_leads();
            let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
            let client = patient(LONG).endpoints([proxy.endpoint()]).connect().unwrap();
            let b = Candidate::start(form, &client, &path, "b", LONG);
            eventually(LIMIT, "b waits and watches", || b.state().contains("Some(1)"));
            let key = key_of(&etcd, &path, "b").unwrap();
            proxy.set(Mode::Reset);
            for number in 0..20 {
                direct.put("/filler", number.to_string()).unwrap();
            }
            if leader_goes {
                leader.close().unwrap();
            }
            etcd.compact().unwrap();
            proxy.set(Mode::Pass);
            if !leader_goes {
                thread::sleep(ms(300));
                assert!(!b.is_leader());
                leader.close().unwrap();
            }
            let freed = Instant::now();
            assert_eq!(b.wait_leads().lock_key(), key, "its place");
            assert!(freed.elapsed() < SOON, "{:?}", freed.elapsed());
            assert_eq!(line(&etcd, &path), [key]);
            b.close().unwrap();
            assert!(line(&etcd, &path).is_empty());
        }
    }
}

/// ELEC-02: a close that etcd does not confirm says so, and the key goes all the same.
#[test]
fn a_close_that_could_not_be_confirmed_says_so_and_is_finished_later() {
    let etcd = EtcdServer::start().unwrap();
    for form in FORMS {
        let path = format!("/elections/{form:?}");
        let a = Linked::start_with(&etcd, form, &path, "a", LONG);
        let term = a.candidate.wait_leads();
        let other = connect(&etcd);
        let b = Candidate::start(form, &other, &path, "b", LONG);
        eventually(LIMIT, "b waits", || key_of(&etcd, &path, "b").is_some());
        a.proxy.set(Mode::Blackhole);
        let begun = Instant::now();
        let error = a.candidate.close().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::CleanupUnconfirmed);
        assert!(begun.elapsed() < Duration::from_secs(2) + NOISE, "{:?}", begun.elapsed());
        assert!(!a.candidate.is_leader() && !term.is_leader());
        assert!(!b.is_leader());
        // Nor is a candidacy that could not be taken back said to be.
        let c = Linked::start_with(&etcd, form, &path, "c", LONG);
        eventually(LIMIT, "c waits", || c.candidate.state().contains("Some(2)"));
        c.proxy.set(Mode::Blackhole);
        let error = c.candidate.close().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::CleanupUnconfirmed);
        assert!(key_of(&etcd, &path, "c").is_some());
        for one in [&a, &c] {
            one.proxy.set(Mode::Pass);
        }
        let freed = Instant::now();
        b.wait_leads();
        assert!(freed.elapsed() < Duration::from_secs(8), "it waited for the lease to end");
        eventually(LIMIT, "a's key is gone", || line(&etcd, &path).len() == 1);
        b.close().unwrap();
    }
}

impl Linked {
    fn start_with(etcd: &EtcdServer, form: Form, path: &str, id: &str, ttl: Duration) -> Linked {
        let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
        let client =
            patient(Duration::from_secs(1)).endpoints([proxy.endpoint()]).connect().unwrap();
        let candidate = Candidate::start(form, &client, path, id, ttl);
        Linked { proxy, candidate }
    }
}

/// An answer that is lost while a candidate joins leaves no second key behind that would be in
/// the way.
#[test]
fn a_lost_answer_to_a_candidacy_is_recognised() {
    let etcd = EtcdServer::start().unwrap();
    let direct = connect(&etcd);
    for form in FORMS {
        let path = format!("/elections/{form:?}");
        let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
        let client =
            patient(Duration::from_secs(2)).endpoints([proxy.endpoint()]).connect().unwrap();
        // The session is there, so that the next request is the one that joins.
        let warm = Candidate::start(form, &client, "/elections/warm", "warm", LONG);
        warm.wait_leads();
        proxy.drop_next_reply();
        let a = Candidate::start(form, &client, &path, "a", LONG);
        let term = a.wait_leads();
        eventually(LIMIT, "one key", || {
            let line = line(&etcd, &path);
            if line == [term.lock_key()] { Ok(()) } else { Err(line) }
        });
        a.close().unwrap();
        let b = Candidate::start(form, &direct, &path, "b", LONG);
        b.wait_leads();
        b.close().unwrap();
        warm.close().unwrap();
    }
}

// ----- ELEC-04: the key goes and the lease lives ------------------------------------------------

/// ELEC-04: whoever deletes or writes over the leader's key ends its term, and it comes again
/// behind the others.
#[test]
fn a_leader_whose_key_is_taken_stands_behind_the_others() {
    let etcd = EtcdServer::start().unwrap();
    let (client, other) = (connect(&etcd), connect(&etcd));
    for form in FORMS {
        for overwrite in [false, true] {
            let path = format!("/elections/{form:?}-{overwrite}");
            let a = Candidate::start(form, &client, &path, "a", LONG);
            let term = a.wait_leads();
            let losses = a.loss_events();
            let b = Candidate::start(form, &other, &path, "b", LONG);
            eventually(LIMIT, "b waits", || key_of(&etcd, &path, "b").is_some());
            let taken = Instant::now();
            let expected = if overwrite {
                etcd.ctl(["put", &term.lock_key(), "stranger"]).unwrap();
                LossReason::KeyOverwritten
            } else {
                etcd.ctl(["del", &term.lock_key()]).unwrap();
                LossReason::KeyDeleted
            };
            assert_eq!(losses.recv_timeout(SLACK + NOISE).unwrap().reason, expected);
            let next = b.wait_leads();
            assert!(!term.is_leader() && taken.elapsed() < SOON, "{:?}", taken.elapsed());
            assert!(next.fencing_token() > term.fencing_token());
            let behind = eventually(LIMIT, "a stands behind b", || {
                let all = a.participants().unwrap();
                let ids: Vec<_> = all.iter().map(|one| one.client_id.as_str()).collect();
                if ids == ["b", "a"] { Ok(all[1].term) } else { Err(format!("{all:?}")) }
            });
            assert!(behind > next.fencing_token() && b.is_leader() && !a.is_leader());
            assert!(losses.try_recv().is_err(), "one loss");
            b.close().unwrap();
            assert_eq!(a.wait_leads().fencing_token(), behind);
            a.close().unwrap();
        }
    }
}

// ----- ELEC-05: the loop lives ------------------------------------------------------------------

/// ELEC-05: cut links, a restart, callbacks that fail and panic, resignations at any time: in the
/// calm after it a candidate that queues again leads or waits, and its state says which.
#[test]
fn a_candidate_that_queues_again_survives_everything() {
    let etcd = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    let client = patient(Duration::from_secs(1)).endpoints([proxy.endpoint()]).connect().unwrap();
    let path = "/elections/a";
    // What the next callback does: 0 parks, 1 fails, 2 panics.
    let mood = Arc::new(AtomicUsize::new(0));
    let terms: Arc<Lock<Vec<i64>>> = Arc::default();
    let leader = LeaderSelector::builder(&client, path)
        .ttl(ttl())
        .auto_requeue(true)
        .on_lead({
            let (mood, terms) = (mood.clone(), terms.clone());
            move |term| {
                terms.lock().push(term.fencing_token());
                match mood.swap(0, Ordering::SeqCst) {
                    1 => Err("no luck".into()),
                    2 => panic!("out of luck"),
                    _ => park(term),
                }
            }
        })
        .build()
        .unwrap();
    leader.start().unwrap();
    let calm = |what: &str| {
        eventually(ttl() + SLACK + NOISE, what, || {
            let first = keys(&etcd, &format!("{path}/"));
            match leader.state() {
                CandidateState::Leading { term } if leader.is_leader() => {
                    assert_eq!(terms.lock().last(), Some(&term));
                    if first.len() == 1 { Ok(()) } else { Err(format!("{first:?}")) }
                }
                state => Err(format!("{state:?}")),
            }
        });
    };
    calm("it leads");
    for _ in 0..10 {
        proxy.set(Mode::Reset);
        thread::sleep(ms(100));
        proxy.set(Mode::Pass);
        thread::sleep(ms(100));
    }
    calm("after ten cut links");
    etcd.restart().unwrap();
    calm("after a restart");
    for (number, what) in [(1, "after an error"), (2, "after a panic")] {
        mood.store(number, Ordering::SeqCst);
        leader.resign().unwrap();
        eventually(LIMIT, what, || mood.load(Ordering::SeqCst) == 0);
        calm(what);
    }
    proxy.set(Mode::Blackhole);
    eventually(LIMIT, "the deadline passes", || !leader.is_leader());
    for times in [1, 2, 100] {
        for _ in 0..times {
            let _ = leader.resign_for(Duration::ZERO);
        }
    }
    thread::sleep(ttl());
    match leader.state() {
        CandidateState::Waiting { .. } => {}
        state => panic!("it says {state:?} while etcd is away"),
    }
    proxy.set(Mode::Pass);
    calm("after an outage");
    let before = terms.lock().clone();
    assert!(before.is_sorted(), "{before:?}");
    // Storms of resignations, from many threads.
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !stop.load(Ordering::SeqCst) {
                    leader.resign().unwrap();
                }
            });
        }
        thread::sleep(ms(500));
        stop.store(true, Ordering::SeqCst);
    });
    calm("after the storm");
    let all = terms.lock().clone();
    println!("{} terms in the storm", all.len() - before.len());
    assert!(all.is_sorted());
    let kinds: Vec<_> = leader.errors().iter().map(|error| error.kind()).collect();
    assert!(kinds.contains(&ErrorKind::CallbackFailed), "{kinds:?}");
    assert!(kinds.contains(&ErrorKind::ListenerPanicked), "{kinds:?}");
    leader.close().unwrap();
    assert!(matches!(leader.state(), CandidateState::Closed));
    wait_keys(&etcd, path, 0);
}

// ----- ELEC-07 and the deadline -----------------------------------------------------------------

/// A leader that is cut off knows that it leads no more before the next one can.
#[test]
fn a_leader_that_is_cut_off_ends_before_the_next_begins() {
    let etcd = EtcdServer::start().unwrap();
    // A renewal that is due may be missed for 0.4 of it, with something to spare.
    let ttl = Duration::from_secs(if full() { 5 } else { 4 });
    for form in FORMS {
        let path = format!("/elections/{form:?}");
        let a = Linked::start_with(&etcd, form, &path, "a", ttl);
        let term = a.candidate.wait_leads();
        let other = connect(&etcd);
        let b = Candidate::start(form, &other, &path, "b", ttl);
        eventually(LIMIT, "b waits", || key_of(&etcd, &path, "b").is_some());
        // A short one costs nothing.
        a.proxy.set(Mode::Blackhole);
        thread::sleep(ttl * 4 / 10);
        a.proxy.set(Mode::Pass);
        thread::sleep(ttl);
        assert!(term.is_leader() && !b.is_leader());
        let losses = a.candidate.loss_events();
        a.proxy.set(Mode::Blackhole);
        let cut = Instant::now();
        let overlap = loop {
            if b.is_leader() {
                break term.is_leader();
            }
            assert!(cut.elapsed() < LIMIT);
            thread::sleep(ms(1));
        };
        assert!(!overlap, "two leaders");
        let loss = losses.recv_timeout(LIMIT).unwrap();
        assert_eq!(loss.reason, LossReason::DeadlinePassed);
        let took = cut.elapsed();
        println!("{form:?}: the next leads {took:?} after the cut (margin {:?})", margin(ttl));
        a.proxy.set(Mode::Pass);
        eventually(LIMIT, "a stands behind", || {
            let all = b.participants().unwrap();
            if all.len() == 2 && all[1].client_id == "a" { Ok(()) } else { Err(all) }
        });
        assert!(b.is_leader() && !a.candidate.is_leader() && !term.is_leader());
        assert!(losses.try_recv().is_err(), "one loss");
        a.candidate.close().unwrap();
        b.close().unwrap();
    }
}

// ----- what a hand-over costs -------------------------------------------------------------------

/// A clean release costs the same number of calls however many wait: one by the leader, and none
/// by the others.
#[test]
fn serial_a_hand_over_costs_the_same_however_many_wait() {
    let figures: &[usize] = if full() { &[1, 10, 100] } else { &[1, 10] };
    // Its renewals come rarely enough to stay out of what is measured.
    let ttl = Duration::from_secs(600);
    for form in FORMS {
        for waiting in figures {
            let etcd = EtcdServer::start().unwrap();
            let path = "/elections/a";
            // Each in a process of its own, as far as etcd can tell.
            let clients: Vec<Client> = (0..=*waiting).map(|_| connect(&etcd)).collect();
            let mut all = Vec::new();
            for (number, client) in clients.iter().enumerate() {
                all.push(Candidate::start(form, client, path, &format!("c{number}"), ttl));
                if number == 0 {
                    all[0].wait_leads();
                }
            }
            let (leader, rest) = all.split_first().unwrap();
            eventually(LIMIT * 3, "all stand", || {
                leader.participants().map(|all| all.len() == waiting + 1).unwrap()
            });
            settle(&etcd);
            let mut took = Duration::ZERO;
            let calls = calls_during(&etcd, || {
                let begun = Instant::now();
                // A selector would queue again and blur the figure.
                leader.close().unwrap();
                eventually(LIMIT, "the next leads", || rest.iter().any(Candidate::is_leader));
                took = begun.elapsed();
                thread::sleep(ms(300));
            });
            println!("{form:?}, {waiting} waiting: {calls:?}, {took:?}");
            assert_eq!(calls, BTreeMap::from([("Txn".to_owned(), 1)]), "{waiting} waiting");
            assert_eq!(rest.iter().filter(|one| one.is_leader()).count(), 1);
        }
    }
}

/// Nothing is left of elections that are over: no thread, descriptor, lease or key.
#[test]
fn elections_leave_nothing_behind() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let round = |number: usize| {
        let path = format!("/elections/{number}");
        let observer = etcd_recipes::LeaderObserver::new(&client, &path).unwrap();
        observer.add_listener(|_| ());
        observer.start().unwrap();
        let (a, b) = (
            Candidate::start(FORMS[number % 2], &client, &path, "a", LONG),
            Candidate::start(FORMS[(number + 1) % 2], &client, &path, "b", LONG),
        );
        eventually(LIMIT, "one leads", || a.is_leader() || b.is_leader());
        if number.is_multiple_of(3) {
            a.close().unwrap();
            b.wait_leads();
        }
    };
    round(0);
    let baseline = (support::threads(), support::descriptors());
    (1..60).for_each(round);
    eventually(LIMIT, "back to the baseline", || {
        let now = (support::threads(), support::descriptors());
        if now.0 <= baseline.0 + 2 && now.1 <= baseline.1 + 2 {
            Ok(())
        } else {
            Err((now, baseline))
        }
    });
    assert!(keys(&etcd, "/elections/").is_empty());
    assert!(support::leases(&etcd) <= 1, "one lease is shared by all");
}

/// A lost lease in a queue of many wakes nobody but its owner.
#[test]
fn revoked_leases_of_a_whole_queue_heal() {
    let etcd = EtcdServer::start().unwrap();
    let path = "/elections/a";
    let clients: Vec<Client> = (0..6).map(|_| connect(&etcd)).collect();
    let all: Vec<_> = clients
        .iter()
        .zip(FORMS.iter().cycle())
        .enumerate()
        .map(|(number, (client, form))| {
            Candidate::start(*form, client, path, &format!("c{number}"), LONG)
        })
        .collect();
    for round in 0..5 {
        let standing = eventually(LIMIT, "all stand", || {
            let line = line(&etcd, path);
            if line.len() == 6 { Ok(line) } else { Err(line) }
        });
        let leader = eventually(LIMIT, "one leads", || {
            let leaders: Vec<_> = all.iter().filter_map(Candidate::term).collect();
            assert!(leaders.len() < 2, "two leaders in round {round}");
            leaders.into_iter().next()
        });
        assert_eq!(leader.lock_key(), standing[0]);
        for key in &standing {
            revoke_lease_of(&etcd, key);
        }
        eventually(LIMIT, "other keys", || {
            let now = line(&etcd, path);
            now.len() == 6 && now.iter().all(|key| !standing.contains(key))
        });
        assert!(!leader.is_leader());
    }
}
