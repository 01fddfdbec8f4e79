//! The selector: a term from the first line of its callback to the key's end, in every way in
//! which it can come.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod candidates;
mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use candidates::*;
use crossbeam_channel::{bounded, never, select, unbounded};
use etcd_recipes::testing::EtcdServer;
use etcd_recipes::testing::{Mode, eventually};
use etcd_recipes::{
    Barrier, BoxError, CancelToken, CandidateState, Client, ErrorKind, FencedTxn, LeaderSelector,
    LeaderSelectorListener, LeadershipTerm, LossReason, Mutex, Op, Recipe, Semaphore, Txn,
};
use parking_lot::Mutex as Lock;
use support::{
    PROMPT, TTL, connect, keys, ms, patient, proxied, revoke_lease_of, timed, wait_keys,
};

const PATH: &str = "/elections/a";

// ----- a term ---------------------------------------------------------------------------------

#[test]
fn a_selector_waits_leads_and_is_idle_again() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let (go, gone) = bounded::<()>(0);
    let seen: Arc<Lock<Option<LeadershipTerm>>> = Arc::default();
    let first = selector(&client, PATH)
        .client_id("first")
        .on_lead({
            let seen = seen.clone();
            move |term| {
                assert!(term.is_leader());
                *seen.lock() = Some(term.clone());
                let _ = gone.recv();
                Ok(())
            }
        })
        .build()
        .unwrap();
    assert!(matches!(first.state(), CandidateState::Idle));
    assert!(!first.is_finished() && !first.is_leader());
    first.wait_on_leadership_complete().unwrap();
    first.start().unwrap();
    let term = eventually(LIMIT, "the first leads", || seen.lock().clone());
    let number = term.fencing_token();
    assert!(matches!(first.state(), CandidateState::Leading { term } if term == number));
    assert!(first.is_leader() && !first.is_finished());
    assert!(first.start().unwrap_err().is_invalid_argument(), "started twice");

    let other = connect(&etcd);
    let story = Story::new();
    let second = rival(&other, PATH, &story);
    let waits = |position| {
        eventually(LIMIT, "a place in the queue", || match second.state() {
            CandidateState::Waiting { position: Some(at) } if at == position => Ok(()),
            state => Err(state),
        });
    };
    waits(1);
    assert!(second.start().unwrap_err().is_invalid_argument(), "started twice");
    assert!(!second.resign().unwrap(), "it does not lead");
    assert!(!second.wait_on_leadership_complete_for(ms(50)).unwrap());
    let all = second.participants().unwrap();
    assert_eq!(all.len(), 2);
    let shown: Vec<_> = all
        .iter()
        .map(|one| (one.client_id.as_str(), one.is_leader, one.position, one.proposal_text()))
        .collect();
    assert_eq!(
        shown,
        [("first", true, 0, "first".to_owned()), ("rival", false, 1, "rival".to_owned())]
    );
    assert_eq!(all[0].term, number);
    assert_eq!(line(&etcd, PATH)[0], term.lock_key());
    assert!(term.lock_key().ends_with("-first"));

    go.send(()).unwrap();
    first.wait_on_leadership_complete().unwrap();
    assert!(matches!(first.state(), CandidateState::Idle));
    assert!(first.is_finished() && !first.is_leader() && !term.is_leader());
    assert!(term.loss().is_none() && term.remaining().is_zero());
    story.wait("rival");
    assert!(!term.put("/data", "late").unwrap() && !term.proclaim("late").unwrap());
    second.close().unwrap();
    assert!(matches!(second.state(), CandidateState::Closed));
    assert!(second.start().unwrap_err().is_closed());
    assert!(keys(&etcd, PATH).is_empty());
    assert!(second.wait_on_leadership_complete().is_ok(), "it has led");

    // Once more.
    first.start().unwrap();
    eventually(LIMIT, "it leads again", || first.is_leader());
    go.send(()).unwrap();
    first.wait_on_leadership_complete().unwrap();
    assert!(seen.lock().as_ref().unwrap().fencing_token() > number);
    first.close().unwrap();
    assert!(first.errors().is_empty());
}

#[test]
fn a_builder_needs_one_thing_to_do() {
    struct Nothing;
    impl LeaderSelectorListener for Nothing {
        fn take_leadership(&self, _: &LeadershipTerm) -> Result<(), BoxError> {
            Ok(())
        }
    }
    let client = Client::connect(["http://127.0.0.1:1"]).unwrap();
    assert!(selector(&client, PATH).build().unwrap_err().is_invalid_argument());
    assert!(selector(&client, PATH).on_relinquish(|_| ()).build().is_err());
    let both = selector(&client, PATH).on_lead(park).listener(Box::new(Nothing)).build();
    assert!(both.unwrap_err().is_invalid_argument());
    let idle = selector(&client, PATH).listener(Box::new(Nothing)).build().unwrap();
    client.close().unwrap();
    assert!(matches!(idle.state(), CandidateState::Closed), "{:?}", idle.state());
    assert!(idle.start().unwrap_err().is_closed());
    idle.close().unwrap();
}

#[test]
fn a_term_fences_its_writes_and_proclaims() {
    let etcd = EtcdServer::start().unwrap();
    let (client, other) = (connect(&etcd), connect(&etcd));
    let one = Candidate::start(Form::Selector, &client, PATH, "one", LONG);
    let term = one.wait_leads();
    assert!(term.put("/data", "one").unwrap());
    let txn = Txn::new().and_then([Op::put("/more", "one")]);
    assert!(matches!(term.txn(txn.clone()).unwrap(), FencedTxn::Applied(_)));
    assert!(term.verify().unwrap());
    assert!(term.proclaim("a plan").unwrap());
    assert_eq!(one.participants().unwrap()[0].proposal_text(), "a plan");
    assert!(term.is_leader());
    // The key goes behind its back; etcd refuses before anything here has noticed, or after.
    assert!(other.delete(term.lock_key()).unwrap());
    assert!(!term.put("/data", "late").unwrap());
    assert!(matches!(term.txn(txn).unwrap(), FencedTxn::Fenced));
    assert!(!term.proclaim("late").unwrap() && !term.verify().unwrap());
    assert_eq!(other.get("/data").unwrap().unwrap().value_text(), "one");
    let again = eventually(LIMIT, "another term", || {
        one.term().filter(|again| again.fencing_token() > term.fencing_token())
    });
    assert!(again.put("/data", "two").unwrap() && !term.put("/data", "late").unwrap());
    assert_eq!(one.participants().unwrap()[0].proposal_text(), "one");
}

#[test]
fn two_candidates_with_one_client_id_are_two() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let one = Candidate::start(Form::Selector, &client, PATH, "twin", LONG);
    let first = one.wait_leads();
    let two = Candidate::start(Form::Selector, &client, PATH, "twin", LONG);
    eventually(LIMIT, "both stand", || two.participants().map(|all| all.len() == 2).unwrap());
    assert!(one.is_leader() && !two.is_leader());
    let all = one.participants().unwrap();
    assert!(all.iter().all(|one| one.client_id == "twin"));
    assert!(all[0].is_leader && !all[1].is_leader && all[0].term < all[1].term);
    one.close().unwrap();
    assert!(two.wait_leads().fencing_token() > first.fencing_token());
    assert_eq!(all[1].term, two.term().unwrap().fencing_token());
}

// ----- a loss interrupts ----------------------------------------------------------------------

/// What a callback can be blocked in; each ends when `free` is called.
struct Blocked {
    name: &'static str,
    wait: Box<dyn Fn(&LeadershipTerm) + Send + Sync>,
}

fn ways_to_block(etcd: &EtcdServer, holder: &Client) -> Vec<Blocked> {
    let client = connect(etcd);
    let interrupted = |result: etcd_recipes::Result<()>| {
        if let Err(error) = result {
            assert!(error.is_interrupted(), "{error}");
        }
    };
    let mutex = Mutex::builder(&client, "/held/mutex").ttl(LONG).build().unwrap();
    let held = Mutex::builder(holder, "/held/mutex").ttl(LONG).build().unwrap();
    std::mem::forget(held.lock_owned().unwrap());
    let semaphore = Semaphore::builder(&client, "/held/semaphore", 1).ttl(LONG).build().unwrap();
    let taken = Semaphore::builder(holder, "/held/semaphore", 1).ttl(LONG).build().unwrap();
    std::mem::forget(taken.acquire().unwrap());
    let barrier = Barrier::builder(&client, "/held/barrier").ttl(LONG).build().unwrap();
    let set = Barrier::builder(holder, "/held/barrier").ttl(LONG).build().unwrap();
    assert!(set.set().unwrap());
    std::mem::forget((held, taken, set));
    let blocked = |name, wait: Box<dyn Fn(&LeadershipTerm) + Send + Sync>| Blocked { name, wait };
    vec![
        blocked("sleep", Box::new(move |term| interrupted(term.sleep(LONG)))),
        blocked("mutex", Box::new(move |_| interrupted(mutex.lock().map(drop)))),
        blocked("semaphore", Box::new(move |_| interrupted(semaphore.acquire().map(drop)))),
        blocked("barrier", Box::new(move |_| interrupted(barrier.wait()))),
        blocked(
            "select",
            Box::new(|term| {
                let nothing = never::<()>();
                select! {
                    recv(term.cancel_token().receiver()) -> _ => assert!(!term.is_leader()),
                    recv(nothing) -> _ => panic!("there is nothing"),
                }
            }),
        ),
    ]
}

/// Leads with a callback that is blocked, loses the lease, and says when the loss was seen and
/// when the callback had ended.
fn lose_while_blocked(
    etcd: &EtcdServer,
    client: &Client,
    blocked: Blocked,
    interrupt: bool,
) -> (LeaderSelector, LeadershipTerm, Instant, Arc<Lock<Option<Instant>>>) {
    let ended: Arc<Lock<Option<Instant>>> = Arc::default();
    let seen: Arc<Lock<Option<LeadershipTerm>>> = Arc::default();
    let path = format!("/elections/{}-{interrupt}", blocked.name);
    let leader = selector(client, &path)
        .interrupt_on_lease_loss(interrupt)
        .on_lead({
            let (seen, ended) = (seen.clone(), ended.clone());
            move |term| {
                *seen.lock() = Some(term.clone());
                (blocked.wait)(term);
                *ended.lock() = Some(Instant::now());
                Ok(())
            }
        })
        .build()
        .unwrap();
    leader.start().unwrap();
    let term = eventually(LIMIT, "it leads", || seen.lock().clone());
    // Let the callback reach its call.
    thread::sleep(ms(150));
    assert!(ended.lock().is_none() && term.is_leader());
    revoke_lease_of(etcd, &term.lock_key());
    while term.is_leader() {
        thread::sleep(ms(1));
    }
    (leader, term, Instant::now(), ended)
}

#[test]
fn a_loss_ends_whatever_blocking_call_the_callback_is_in() {
    let etcd = EtcdServer::start().unwrap();
    let (client, holder) = (connect(&etcd), connect(&etcd));
    for blocked in ways_to_block(&etcd, &holder) {
        let name = blocked.name;
        let (leader, term, lost, ended) = lose_while_blocked(&etcd, &client, blocked, true);
        leader.wait_on_leadership_complete().unwrap();
        let took = ended.lock().unwrap().saturating_duration_since(lost);
        println!("{name}: {took:?}");
        assert!(took < PROMPT, "{name}: {took:?}");
        assert!(term.cancel_token().is_cancelled());
        assert_eq!(term.loss().unwrap().reason, LossReason::LeaseGone);
    }
}

#[test]
fn without_the_interrupt_a_loss_leaves_the_callback_alone() {
    let etcd = EtcdServer::start().unwrap();
    let (client, holder) = (connect(&etcd), connect(&etcd));
    let all: Vec<_> = ways_to_block(&etcd, &holder)
        .into_iter()
        .map(|blocked| lose_while_blocked(&etcd, &client, blocked, false))
        .collect();
    thread::sleep(PROMPT);
    for (leader, term, _, ended) in &all {
        assert!(ended.lock().is_none(), "{}: the callback was interrupted", leader.path());
        assert!(!term.is_leader() && !term.cancel_token().is_cancelled());
        // It can ask and it can wait for the end.
        term.wait_until_finished().unwrap();
        assert!(term.wait_until_finished_for(ms(1)).unwrap());
    }
    // The will of its owner does interrupt.
    for (leader, _, _, ended) in &all {
        leader.close().unwrap();
        assert!(ended.lock().is_some());
    }
}

// ----- relinquish -----------------------------------------------------------------------------

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Clean,
    Lost,
    Failed,
    Panicked,
}

#[test]
fn relinquish_runs_shielded_between_the_callback_and_the_next_leader() {
    let etcd = EtcdServer::start().unwrap();
    let (client, other, direct) = (connect(&etcd), connect(&etcd), connect(&etcd));
    for end in [End::Clean, End::Lost, End::Failed, End::Panicked] {
        let path = format!("/elections/{end:?}");
        let story = Story::new();
        let (go, gone) = bounded::<()>(0);
        let leader = selector(&client, &path)
            .client_id("leader")
            .on_lead({
                let story = story.clone();
                move |term| {
                    story.tell("lead");
                    if end == End::Lost {
                        assert!(term.sleep(LONG).unwrap_err().is_interrupted());
                    } else {
                        let _ = gone.recv();
                    }
                    story.tell("led");
                    match end {
                        End::Clean | End::Lost => Ok(()),
                        End::Failed => Err("no luck".into()),
                        End::Panicked => panic!("out of luck"),
                    }
                }
            })
            .on_relinquish({
                let (story, direct, path) = (story.clone(), direct.clone(), path.clone());
                move |term| {
                    // Not a scope, nor its own term's.
                    assert!(term.cancel_token().is_cancelled() == (end == End::Lost));
                    assert!(CancelToken::new().sleep(ms(150)).is_ok());
                    let stands = direct.get(term.lock_key()).unwrap().is_some();
                    assert_eq!(stands, end != End::Lost);
                    let ahead = direct.get_prefix(format!("{path}/")).unwrap().len();
                    assert_eq!(ahead, 1 + usize::from(stands));
                    story.tell("relinquished");
                }
            })
            .build()
            .unwrap();
        leader.start().unwrap();
        story.wait("lead");
        let next = rival(&other, &path, &story);
        let all = wait_participants(&next, 2);
        let key = line(&etcd, &path)[0].clone();
        match end {
            End::Lost => revoke_lease_of(&etcd, &key),
            _ => go.send(()).unwrap(),
        }
        leader.wait_on_leadership_complete().unwrap();
        story.wait("rival");
        let told = story.told();
        if end == End::Lost {
            // The rival leads as soon as the key is gone.
            assert_eq!(told.iter().filter(|told| *told != "rival").count(), 3);
        } else {
            assert_eq!(told, ["lead", "led", "relinquished", "rival"], "{end:?}");
        }
        let left = wait_participants(&next, 1);
        assert_eq!(left[0].term, all[1].term, "the rival's place");
        let errors: Vec<_> = leader.errors().iter().map(|error| error.kind()).collect();
        match end {
            End::Clean => assert!(errors.is_empty(), "{errors:?}"),
            End::Lost => assert_eq!(errors, [ErrorKind::Lost]),
            End::Failed => assert_eq!(errors, [ErrorKind::CallbackFailed]),
            End::Panicked => assert_eq!(errors, [ErrorKind::ListenerPanicked]),
        }
        assert!(leader.is_finished() && matches!(leader.state(), CandidateState::Idle));
        next.close().unwrap();
    }
}

#[test]
fn a_relinquish_that_panics_keeps_no_leadership() {
    let etcd = EtcdServer::start().unwrap();
    let (client, other) = (connect(&etcd), connect(&etcd));
    let leader = selector(&client, PATH)
        .on_lead(|_| Ok(()))
        .on_relinquish(|_| panic!("no"))
        .build()
        .unwrap();
    leader.start().unwrap();
    leader.wait_on_leadership_complete().unwrap();
    assert!(keys(&etcd, PATH).is_empty());
    assert_eq!(leader.errors()[0].kind(), ErrorKind::ListenerPanicked);
    let story = Story::new();
    let _next = rival(&other, PATH, &story);
    story.wait("rival");
}

/// ELEC-07: the work ends first, then the leadership.
#[test]
fn a_rival_leads_only_after_a_callback_that_will_not_stop() {
    type GiveUp = fn(LeaderSelector, &Client);
    let ways: [(&str, Duration, GiveUp); 5] = [
        ("resign", Duration::from_secs(2), |leader, _| {
            let error = leader.resign_for(ms(300)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::CleanupUnconfirmed);
            assert!(!leader.is_leader());
            assert!(leader.resign().unwrap(), "asking again waits for it");
        }),
        ("close", Duration::from_secs(3), |leader, _| {
            let (closed, took) = timed(|| leader.close());
            assert_eq!(closed.unwrap_err().kind(), ErrorKind::CleanupUnconfirmed);
            assert!(took < Duration::from_secs(2) + PROMPT, "{took:?}");
        }),
        ("drop", Duration::from_secs(3), |leader, _| drop(leader)),
        ("client-close", Duration::from_secs(1), |leader, client| {
            client.close().unwrap();
            assert!(matches!(leader.state(), CandidateState::Closed));
        }),
        ("client-close-late", Duration::from_secs(4), |_leader, client| {
            let error = client.close().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::CleanupUnconfirmed);
        }),
    ];
    let etcd = EtcdServer::start().unwrap();
    thread::scope(|scope| {
        for (name, busy, give_up) in ways {
            let etcd = &etcd;
            scope.spawn(move || {
                let (client, other) = (connect(etcd), connect(etcd));
                let path = format!("/elections/{name}");
                let story = Story::new();
                let ttl = Duration::from_secs(8);
                let leader = LeaderSelector::builder(&client, &path)
                    .ttl(ttl)
                    .on_lead({
                        let story = story.clone();
                        move |term| {
                            story.tell("lead");
                            term.wait_until_finished()?;
                            assert!(!term.is_leader());
                            // Deaf to the signal.
                            thread::sleep(busy);
                            story.tell("led");
                            Ok(())
                        }
                    })
                    .on_relinquish({
                        let story = story.clone();
                        move |_| {
                            assert!(!story.has("rival"), "{:?}", story.told());
                            story.tell("relinquished");
                        }
                    })
                    .build()
                    .unwrap();
                leader.start().unwrap();
                story.wait("lead");
                let next = rival(&other, &path, &story);
                wait_participants(&next, 2);
                let begun = Instant::now();
                give_up(leader, &client);
                story.wait("rival");
                let took = begun.elapsed();
                assert_eq!(story.told(), ["lead", "led", "relinquished", "rival"], "{name}");
                assert!(took >= busy, "{name}: {took:?}");
                // Not by its lease's end, save where the client has gone.
                let soon = if name == "client-close-late" { ttl + SOON } else { busy + SOON };
                assert!(took < soon, "{name}: {took:?}");
            });
        }
    });
}

// ----- resign ---------------------------------------------------------------------------------

#[test]
fn resigning_ends_this_term_and_no_other_however_often() {
    let etcd = EtcdServer::start().unwrap();
    let (client, other) = (connect(&etcd), connect(&etcd));
    for times in [1, 2, 100] {
        let path = format!("/elections/{times}");
        let story = Story::new();
        let leader = selector(&client, &path)
            .auto_requeue(true)
            .on_lead({
                let story = story.clone();
                move |term| {
                    story.tell(format!("lead {}", term.fencing_token()));
                    park(term)
                }
            })
            .build()
            .unwrap();
        // Before it was started and before it leads.
        for _ in 0..times {
            assert!(!leader.resign().unwrap());
        }
        leader.start().unwrap();
        for _ in 0..times {
            story.wait_count(1);
            leader.resign().unwrap();
        }
        // The last of them ended a term or came between two.
        eventually(LIMIT, "it leads", || leader.is_leader());
        let next = rival(&other, &path, &story);
        wait_participants(&next, 2);
        thread::scope(|scope| {
            for _ in 0..times {
                scope.spawn(|| leader.resign().unwrap());
            }
        });
        story.wait("rival");
        assert!(!leader.is_leader());
        eventually(LIMIT, "it stands behind", || match leader.state() {
            CandidateState::Waiting { position: Some(1) } => Ok(()),
            state => Err(state),
        });
        // After the term, while it waits.
        for _ in 0..times {
            assert!(!leader.resign().unwrap());
        }
        let before = story.told().len();
        assert!(next.resign().unwrap());
        story.wait_count(before + 1);
        eventually(LIMIT, "it leads again", || leader.is_leader());
        next.wait_on_leadership_complete().unwrap();
        assert!(next.is_finished());
        assert!(leader.errors().is_empty(), "{:?}", leader.errors());
    }
}

#[test]
fn a_callback_may_resign_itself() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let slot: Arc<Lock<Option<Arc<LeaderSelector>>>> = Arc::default();
    let story = Story::new();
    let leader = selector(&client, PATH)
        .on_lead({
            let (slot, story) = (slot.clone(), story.clone());
            move |term| {
                let me = eventually(LIMIT, "myself", || slot.lock().clone());
                let (resigned, took) = timed(|| me.resign());
                assert!(resigned.unwrap() && took < PROMPT, "{took:?}");
                assert!(!me.is_leader() && !term.is_leader());
                assert!(me.resign().unwrap(), "the key is still there");
                assert!(term.sleep(LONG).unwrap_err().is_interrupted());
                assert!(!term.put("/data", "late").unwrap());
                story.tell("resigned");
                Ok(())
            }
        })
        .build()
        .unwrap();
    let leader = Arc::new(leader);
    *slot.lock() = Some(leader.clone());
    leader.start().unwrap();
    leader.wait_on_leadership_complete().unwrap();
    assert!(story.has("resigned") && leader.errors().is_empty(), "{:?}", leader.errors());
    assert!(keys(&etcd, PATH).is_empty());
    slot.lock().take();
}

/// ELEC-05: whoever resigns before the callback's first line has resigned.
#[test]
fn a_resignation_before_the_first_line_ends_the_term() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let early = Arc::new(AtomicUsize::new(0));
    let leader = selector(&client, PATH)
        .auto_requeue(true)
        .on_lead({
            let early = early.clone();
            move |term| {
                early.fetch_add(usize::from(!term.is_leader()), Ordering::Relaxed);
                // For ever, if the signal was lost.
                park(term)
            }
        })
        .build()
        .unwrap();
    leader.start().unwrap();
    for round in 0..200 {
        let end = Instant::now() + LIMIT;
        while !leader.is_leader() {
            assert!(Instant::now() < end, "round {round}");
            std::hint::spin_loop();
        }
        assert!(leader.resign().unwrap(), "round {round}");
    }
    println!("{} of 200 came before the first line", early.load(Ordering::Relaxed));
}

/// ELEC-02: an etcd that is away makes a resignation fail, not forgotten.
#[test]
fn a_resignation_that_could_not_be_confirmed_is_not_forgotten() {
    let (etcd, proxy, client) = proxied(Duration::from_secs(1));
    let other = connect(&etcd);
    let story = Story::new();
    let leader = selector(&client, PATH)
        .on_lead({
            let story = story.clone();
            move |term| {
                story.tell("lead");
                park(term)
            }
        })
        .build()
        .unwrap();
    leader.start().unwrap();
    story.wait("lead");
    let next = rival(&other, PATH, &story);
    wait_participants(&next, 2);
    proxy.set(Mode::Blackhole);
    for _ in 0..2 {
        let (resigned, took) = timed(|| leader.resign_for(Duration::from_secs(1)));
        assert_eq!(resigned.unwrap_err().kind(), ErrorKind::CleanupUnconfirmed);
        assert!(!leader.is_leader() && took < Duration::from_secs(1) + PROMPT, "{took:?}");
    }
    // Its callback has ended, and still it does not say that it is done with the key.
    eventually(LIMIT, "the run is over", || leader.is_finished());
    assert!(leader.resign_for(ms(100)).is_err());
    // Not even a new start forgets.
    leader.start().unwrap();
    assert!(leader.resign_for(ms(100)).is_err());
    assert!(!story.has("rival"));
    proxy.set(Mode::Pass);
    leader.resign_for(LIMIT).unwrap();
    story.wait("rival");
    let left = next.participants().unwrap();
    assert!(left[0].client_id == "rival" && left.len() <= 2, "{left:?}");
    leader.close().unwrap();
    next.close().unwrap();
    wait_keys(&etcd, PATH, 0);
}

// ----- close ----------------------------------------------------------------------------------

/// A selector that leads, with a slot through which its own callbacks reach it.
struct Staged {
    slot: Arc<Lock<Option<LeaderSelector>>>,
    story: Story,
}

impl Staged {
    fn lead(
        client: &Client,
        path: &str,
        lead: impl Fn(&LeadershipTerm, &Lock<Option<LeaderSelector>>) + Send + Sync + 'static,
    ) -> Staged {
        let slot: Arc<Lock<Option<LeaderSelector>>> = Arc::default();
        let story = Story::new();
        let leader = LeaderSelector::builder(client, path)
            .ttl(LONG)
            .auto_requeue(true)
            .on_lead({
                let (slot, story) = (slot.clone(), story.clone());
                move |term| {
                    eventually(LIMIT, "myself", || slot.lock().is_some());
                    story.tell("lead");
                    lead(term, &slot);
                    story.tell("led");
                    Ok(())
                }
            })
            .on_relinquish({
                let story = story.clone();
                move |_| story.tell("relinquished")
            })
            .build()
            .unwrap();
        leader.start().unwrap();
        *slot.lock() = Some(leader);
        story.wait("lead");
        Staged { slot, story }
    }

    fn with<R>(&self, f: impl FnOnce(&LeaderSelector) -> R) -> R {
        f(self.slot.lock().as_ref().unwrap())
    }

    #[track_caller]
    fn check_closed(&self, etcd: &EtcdServer, path: &str) {
        self.story.wait("relinquished");
        wait_keys(etcd, &format!("{path}/"), 0);
        assert_eq!(self.story.told(), ["lead", "led", "relinquished"]);
        if let Some(leader) = &*self.slot.lock() {
            eventually(LIMIT, "it is closed", || match leader.state() {
                CandidateState::Closed => Ok(()),
                state => Err(state),
            });
            assert!(leader.errors().is_empty(), "{:?}", leader.errors());
            leader.close().unwrap();
        }
    }
}

#[test]
fn a_callback_may_close_its_selector() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let staged = Staged::lead(&client, PATH, |term, slot| {
        let (closed, took) = timed(|| slot.lock().as_ref().unwrap().close());
        assert!(closed.is_ok() && took < PROMPT, "{took:?}");
        assert!(!term.is_leader() && term.sleep(LONG).is_err());
    });
    let losses = staged.with(LeaderSelector::loss_events);
    staged.check_closed(&etcd, PATH);
    assert!(losses.recv_timeout(LIMIT).is_err_and(|error| !error.is_timeout()), "still open");
}

#[test]
fn a_callback_may_drop_its_selector() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let staged = Staged::lead(&client, PATH, |term, slot| {
        let me = slot.lock().take();
        let ((), took) = timed(|| drop(me));
        assert!(took < PROMPT, "{took:?}");
        assert!(!term.is_leader() && term.sleep(LONG).is_err());
    });
    staged.check_closed(&etcd, PATH);
}

#[test]
fn listeners_may_close_the_selector() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    for kind in ["loss", "state", "error"] {
        let path = format!("/elections/{kind}");
        let staged = Staged::lead(&client, &path, |term, _| park(term).unwrap());
        let (sent, closed) = bounded(3);
        let close = {
            let slot = Arc::downgrade(&staged.slot);
            move || {
                let slot = slot.upgrade().unwrap();
                let closed = slot.lock().as_ref().unwrap().close();
                let _ = sent.send(closed);
            }
        };
        staged.with(|leader| match kind {
            "loss" => leader.add_loss_listener(move |_| close()),
            "state" => leader.add_connection_state_listener(move |state| {
                if *state == etcd_recipes::ConnectionState::Lost {
                    close();
                }
            }),
            _ => leader.add_error_listener(move |_| close()),
        });
        let key = line(&etcd, &path)[0].clone();
        revoke_lease_of(&etcd, &key);
        closed.recv_timeout(LIMIT).unwrap().unwrap();
        wait_keys(&etcd, &format!("{path}/"), 0);
        assert!(matches!(staged.with(LeaderSelector::state), CandidateState::Closed));
        let told = staged.story.told();
        assert!(told.starts_with(&["lead".to_owned(), "led".to_owned()]), "{told:?}");
        assert_eq!(told.last().unwrap(), "relinquished");
    }
}

#[test]
fn after_a_close_no_callback_runs() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    for round in 0..30 {
        let running = Arc::new(AtomicBool::new(false));
        let leader = selector(&client, PATH)
            .auto_requeue(true)
            .on_lead({
                let running = running.clone();
                move |term| {
                    running.store(true, Ordering::SeqCst);
                    let _ = term.sleep(ms(1));
                    running.store(false, Ordering::SeqCst);
                    Ok(())
                }
            })
            .build()
            .unwrap();
        leader.start().unwrap();
        thread::sleep(Duration::from_micros(700 * round));
        thread::scope(|scope| {
            let closes: Vec<_> = (0..2)
                .map(|_| {
                    scope.spawn(|| {
                        leader.close().unwrap();
                        assert!(!running.load(Ordering::SeqCst), "a callback runs on");
                    })
                })
                .collect();
            closes.into_iter().for_each(|close| close.join().unwrap());
        });
        assert!(matches!(leader.state(), CandidateState::Closed));
        thread::sleep(ms(3));
        assert!(!running.load(Ordering::SeqCst), "a callback began after the close");
        assert!(keys(&etcd, PATH).is_empty(), "round {round}");
    }
}

#[test]
fn a_client_that_closes_takes_its_selectors_along() {
    let etcd = EtcdServer::start().unwrap();
    let (client, other) = (connect(&etcd), connect(&etcd));
    let staged = Staged::lead(&client, PATH, |term, _| {
        assert!(term.sleep(LONG).unwrap_err().is_interrupted());
    });
    let waiting = selector(&client, PATH).on_lead(park).build().unwrap();
    waiting.start().unwrap();
    let idle = selector(&client, PATH).on_lead(park).build().unwrap();
    wait_participants(&waiting, 2);
    let story = Story::new();
    let next = rival(&other, PATH, &story);
    wait_participants(&next, 3);
    let ((), took) = timed(|| client.close().unwrap());
    assert!(took < PROMPT, "{took:?}");
    for leader in [&waiting, &idle] {
        assert!(matches!(leader.state(), CandidateState::Closed), "{:?}", leader.state());
        assert!(leader.start().unwrap_err().is_closed() && !leader.is_leader());
    }
    assert!(waiting.wait_on_leadership_complete().unwrap_err().is_closed());
    assert!(matches!(staged.with(LeaderSelector::state), CandidateState::Closed));
    assert_eq!(staged.story.told(), ["lead", "led", "relinquished"]);
    story.wait("rival");
    assert_eq!(wait_participants(&next, 1)[0].client_id, "rival");
}

#[test]
fn a_callback_may_close_its_client() {
    let etcd = EtcdServer::start().unwrap();
    let (client, other) = (connect(&etcd), connect(&etcd));
    let staged = Staged::lead(&client, PATH, {
        let client = client.clone();
        move |term, _| {
            let (closed, took) = timed(|| client.close());
            assert!(closed.is_ok() && took < PROMPT, "{took:?}");
            assert!(!term.is_leader() && term.sleep(LONG).is_err());
        }
    });
    staged.story.wait("relinquished");
    let story = Story::new();
    let next = rival(&other, PATH, &story);
    story.wait("rival");
    assert_eq!(wait_participants(&next, 1)[0].client_id, "rival");
    eventually(LIMIT, "closed", || {
        staged.with(|leader| matches!(leader.state(), CandidateState::Closed))
    });
}

/// The selector is dropped by a value that belongs to another thread, or to the callback's.
#[test]
fn a_selector_in_a_thread_local_closes_with_its_thread() {
    thread_local! {
        static KEPT: std::cell::RefCell<Option<LeaderSelector>> =
            const { std::cell::RefCell::new(None) };
    }
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    // On a thread of its own.
    let staged = Staged::lead(&client, PATH, |term, _| park(term).unwrap());
    let slot = staged.slot.clone();
    thread::spawn(move || KEPT.set(slot.lock().take())).join().unwrap();
    staged.check_closed(&etcd, PATH);
    // On the callback's thread, which ends after the selector has.
    let staged = Staged::lead(&client, PATH, |_, slot| {
        let me = slot.lock().take().unwrap();
        me.resign().unwrap();
        me.close().unwrap();
        KEPT.set(Some(me));
    });
    staged.check_closed(&etcd, PATH);
}

// ----- the queue ------------------------------------------------------------------------------

#[test]
fn candidates_that_queue_again_take_turns() {
    let etcd = EtcdServer::start().unwrap();
    let story = Story::new();
    let shared = connect(&etcd);
    let clients = [shared.clone(), connect(&etcd), shared];
    let all: Vec<_> = clients
        .iter()
        .zip(["a", "b", "c"])
        .map(|(client, id)| {
            let story = story.clone();
            let one = selector(client, PATH)
                .client_id(id)
                .auto_requeue(true)
                .on_lead(move |term| {
                    // The others are in the queue by then.
                    let _ = term.sleep(ms(40));
                    story.tell(id);
                    Ok(())
                })
                .build()
                .unwrap();
            one.start().unwrap();
            one
        })
        .collect();
    story.wait_count(24);
    let told = story.told();
    // The first rounds are a race for places; then they go round.
    let settled = &told[6..24];
    for turn in 3..settled.len() {
        assert_eq!(settled[turn], settled[turn - 3], "{told:?}");
    }
    assert!(settled[0] != settled[1] && settled[1] != settled[2] && settled[0] != settled[2]);
    all.iter().for_each(|one| one.close().unwrap());
    wait_keys(&etcd, PATH, 0);
}

#[test]
fn a_candidacy_heals_at_the_end_of_the_queue() {
    let etcd = EtcdServer::start().unwrap();
    for form in FORMS {
        let path = format!("/elections/{form:?}");
        let clients = [connect(&etcd), connect(&etcd), connect(&etcd)];
        let leader = Candidate::start(form, &clients[0], &path, "a", LONG);
        let term = leader.wait_leads();
        let b = Candidate::start(form, &clients[1], &path, "b", LONG);
        eventually(LIMIT, "b waits", || key_of(&etcd, &path, "b").is_some());
        let c = Candidate::start(form, &clients[2], &path, "c", LONG);
        let losses = [b.loss_events(), c.loss_events()];
        eventually(LIMIT, "c waits", || key_of(&etcd, &path, "c").is_some());
        let owners = || {
            let line = line(&etcd, &path);
            line.iter().map(|key| owner(key).to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(owners(), ["a", "b", "c"]);
        let key = key_of(&etcd, &path, "b").unwrap();
        revoke_lease_of(&etcd, &key);
        eventually(LIMIT, "b stands behind c", || {
            let owners = owners();
            if owners == ["a", "c", "b"] { Ok(()) } else { Err(owners) }
        });
        assert!(b.state().contains("Waiting"), "{}", b.state());
        // The key alone.
        let key = key_of(&etcd, &path, "c").unwrap();
        etcd.ctl(["del", &key]).unwrap();
        eventually(LIMIT, "c stands behind b", || {
            let owners = owners();
            if owners == ["a", "b", "c"] { Ok(()) } else { Err(owners) }
        });
        assert!(leader.term().unwrap().fencing_token() == term.fencing_token());
        let lost = losses.iter().any(|losses| losses.try_recv().is_ok());
        assert!(!lost, "a candidate has nothing to lose");
        leader.step_down();
        b.wait_leads();
    }
}

#[test]
fn a_key_without_a_lease_in_front_is_named_and_no_end() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    etcd.ctl(["put", "/elections/a/stone", "there"]).unwrap();
    let (sent, led) = unbounded();
    let leader = selector(&client, PATH)
        .auto_requeue(true)
        .on_lead(move |term| {
            sent.send(term.fencing_token()).unwrap();
            park(term)
        })
        .build()
        .unwrap();
    leader.start().unwrap();
    let error = leader.wait_on_leadership_complete().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ForeignKey);
    assert!(error.to_string().contains("/elections/a/stone"), "{error}");
    assert!(matches!(leader.state(), CandidateState::Failed(_)), "{:?}", leader.state());
    assert!(leader.is_finished() && leader.errors().len() == 1);
    assert_eq!(keys(&etcd, PATH), ["/elections/a/stone"]);
    etcd.ctl(["del", "/elections/a/stone"]).unwrap();
    leader.start().unwrap();
    led.recv_timeout(LIMIT).unwrap();
    leader.close().unwrap();
}

#[test]
fn a_candidate_waits_for_an_etcd_that_comes_late() {
    let etcd = EtcdServer::start().unwrap();
    let proxy = etcd_recipes::testing::FaultProxy::start(etcd.endpoint()).unwrap();
    proxy.set(Mode::Reset);
    let client = patient(ms(300)).endpoints([proxy.endpoint()]).connect().unwrap();
    let leader = LeaderSelector::builder(&client, PATH).ttl(TTL).on_lead(park).build().unwrap();
    leader.start().unwrap();
    eventually(LIMIT, "it has tried", || leader.error_count() > 1);
    assert!(matches!(leader.state(), CandidateState::Waiting { position: None }));
    proxy.set(Mode::Pass);
    eventually(LIMIT, "it leads", || leader.is_leader());
    leader.close().unwrap();
    assert!(keys(&etcd, PATH).is_empty());
}

// ----- others on the path ---------------------------------------------------------------------

#[test]
fn etcdctl_and_ours_lead_in_turn() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    for form in FORMS {
        let path = format!("/elections/{form:?}");
        let (_watcher, seen) = etcdctl_elect(&etcd, &["-l", &path]);
        let first = Candidate::start(form, &client, &path, "ours", LONG);
        let term = first.wait_leads();
        let hear = |what: &str| {
            let end = Instant::now() + LIMIT;
            loop {
                let left = end.saturating_duration_since(Instant::now());
                match seen.recv_timeout(left) {
                    Ok(line) if line == what => return,
                    Ok(_) => {}
                    Err(error) => panic!("`etcdctl elect -l` did not print {what}: {error}"),
                }
            }
        };
        hear("ours");
        assert!(term.proclaim("a plan").unwrap());
        hear("a plan");
        // Theirs waits for ours, and leads after it.
        let (mut theirs, told) = etcdctl_elect(&etcd, &[&path, "theirs"]);
        eventually(LIMIT, "they wait", || first.participants().unwrap().len() == 2);
        assert_eq!(first.participants().unwrap()[1].client_id, "theirs");
        assert!(told.recv_timeout(ms(300)).is_err(), "two leaders");
        let second = Candidate::start(form, &client, &path, "again", LONG);
        eventually(LIMIT, "three", || first.participants().unwrap().len() == 3);
        first.close().unwrap();
        assert!(told.recv_timeout(LIMIT).unwrap().starts_with(&path));
        assert_eq!(told.recv_timeout(LIMIT).unwrap(), "theirs");
        hear("theirs");
        assert!(!second.is_leader());
        // Ours waits for theirs, and leads after it.
        interrupt(&mut theirs);
        assert!(second.wait_leads().fencing_token() > term.fencing_token());
        hear("again");
    }
}

/// What a leader writes over its own key is a proclamation, what a stranger writes is a loss.
#[test]
fn a_proclamation_is_no_overwriting_and_a_strangers_write_is() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    for form in FORMS {
        let path = format!("/elections/{form:?}");
        let leader = Candidate::start(form, &client, &path, "leader", Duration::from_secs(3));
        let term = leader.wait_leads();
        let losses = leader.loss_events();
        let begun = Instant::now();
        let mut number = 0;
        // Long enough for the watch on the own key and for several proofs by the keeper.
        while begun.elapsed() < Duration::from_secs(4) {
            assert!(term.proclaim(format!("plan {number}")).unwrap());
            number += 1;
            thread::sleep(ms(100));
            assert!(term.is_leader() && term.verify().unwrap());
        }
        assert!(losses.try_recv().is_err());
        etcd.ctl(["put", &term.lock_key(), "stranger"]).unwrap();
        let loss = losses.recv_timeout(LIMIT).unwrap();
        assert_eq!(loss.reason, LossReason::KeyOverwritten);
        assert!(!term.is_leader());
        let again = leader.wait_leads();
        assert!(again.fencing_token() > term.fencing_token());
        wait_keys(&etcd, &format!("{path}/"), 1);
        leader.close().unwrap();
    }
}
