//! The latch: leads until it is closed, tells so in pairs, and joins again when it has lost.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod candidates;
mod support;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use candidates::*;
use crossbeam_channel::unbounded;
use etcd_recipes::testing::{EtcdServer, FaultProxy, Mode, eventually};
use etcd_recipes::{
    CancelToken, CandidateState, Client, CloseMode, ConnectionState, ErrorKind, LatchEvent,
    LatchListener, LeaderLatch, LossReason, Recipe,
};
use parking_lot::Mutex as Lock;
use support::{
    PROMPT, TTL, connect, keys, ms, patient, proxied, revoke_lease_of, timed, wait_keys,
};

const PATH: &str = "/elections/a";

fn latch(client: &Client, path: &str) -> LeaderLatch {
    LeaderLatch::builder(client, path).ttl(LONG).build().unwrap()
}

fn started(client: &Client, path: &str) -> LeaderLatch {
    let latch = latch(client, path);
    latch.start().unwrap();
    latch
}

/// The events so far, a term's begin as its number and its end as the same below zero.
fn record(latch: &LeaderLatch) -> Arc<Lock<Vec<i64>>> {
    let seen: Arc<Lock<Vec<i64>>> = Arc::default();
    latch.add_listener({
        let seen = seen.clone();
        move |event| {
            seen.lock().push(match *event {
                LatchEvent::IsLeader { term } => term,
                LatchEvent::NotLeader { term } => -term,
                _ => panic!("{event:?}"),
            });
        }
    });
    seen
}

/// Each begin is followed by its own end, and terms grow.
#[track_caller]
fn check_pairs(events: &[i64]) {
    assert!(events.chunks(2).all(|pair| pair[0] > 0), "{events:?}");
    assert!(events.chunks_exact(2).all(|pair| pair[1] == -pair[0]), "{events:?}");
    assert!(events.iter().step_by(2).is_sorted(), "{events:?}");
}

#[test]
fn a_latch_leads_from_its_turn_to_its_close() {
    let etcd = EtcdServer::start().unwrap();
    let (client, other) = (connect(&etcd), connect(&etcd));
    let first = latch(&client, PATH);
    assert!(matches!(first.state(), CandidateState::Idle));
    assert!(first.wait().unwrap_err().is_invalid_argument(), "not started");
    assert!(first.leadership().is_none());
    let events = record(&first);
    first.start().unwrap();
    assert!(first.start().unwrap_err().is_invalid_argument(), "started twice");
    first.wait().unwrap();
    assert!(first.has_leadership() && first.wait_for(Duration::ZERO).unwrap());
    let term = first.leadership().unwrap();
    let number = term.fencing_token();
    assert!(matches!(first.state(), CandidateState::Leading { term } if term == number));
    assert!(term.put("/data", "first").unwrap());
    let second = started(&other, PATH);
    eventually(LIMIT, "the second waits", || match second.state() {
        CandidateState::Waiting { position: Some(1) } => Ok(()),
        state => Err(state),
    });
    assert!(!second.wait_for(ms(100)).unwrap() && !second.has_leadership());
    let all = second.participants().unwrap();
    assert_eq!(all.iter().map(|one| one.is_leader).collect::<Vec<_>>(), [true, false]);
    assert_eq!(all[0].term, number);
    let channel = first.events();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| second.wait());
        first.close().unwrap();
        assert!(!first.has_leadership() && !term.is_leader());
        waiter.join().unwrap().unwrap();
    });
    assert!(second.leadership().unwrap().fencing_token() > number);
    assert!(!term.put("/data", "late").unwrap());
    assert!(matches!(first.state(), CandidateState::Closed));
    assert!(first.wait().unwrap_err().is_closed() && first.start().unwrap_err().is_closed());
    assert_eq!(*events.lock(), [number, -number]);
    assert_eq!(channel.iter().collect::<Vec<_>>(), [LatchEvent::NotLeader { term: number }]);
    first.close().unwrap();
    second.close_with(CloseMode::Silent).unwrap();
    assert!(keys(&etcd, PATH).is_empty());
    assert!(first.errors().is_empty() && second.errors().is_empty());
}

#[test]
fn a_close_wakes_a_wait() {
    let etcd = EtcdServer::start().unwrap();
    let (client, other) = (connect(&etcd), connect(&etcd));
    let leader = started(&client, PATH);
    leader.wait().unwrap();
    type Close = fn(&LeaderLatch, &Client);
    let closing: [(&str, Close); 2] = [
        ("latch", |latch, _| latch.close().unwrap()),
        ("client", |_, client| client.close().unwrap()),
    ];
    for (name, close) in closing {
        let own = connect(&etcd);
        let waiting = started(&own, PATH);
        eventually(LIMIT, "it stands", || leader.participants().unwrap().len() == 2);
        thread::scope(|scope| {
            let forever = scope.spawn(|| waiting.wait());
            let limited = scope.spawn(|| waiting.wait_for(LONG));
            thread::sleep(ms(100));
            let begun = Instant::now();
            close(&waiting, &own);
            assert!(forever.join().unwrap().unwrap_err().is_closed());
            assert!(limited.join().unwrap().unwrap_err().is_closed());
            assert!(begun.elapsed() < PROMPT, "{name}: {:?}", begun.elapsed());
        });
        assert!(matches!(waiting.state(), CandidateState::Closed), "{name}");
        wait_keys(&etcd, PATH, 1);
    }
    // A scope interrupts it, and no more than the wait.
    let waiting = started(&other, PATH);
    let token = CancelToken::new();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| token.scope(|| waiting.wait()));
        thread::sleep(ms(50));
        token.cancel();
        assert!(waiter.join().unwrap().unwrap_err().is_interrupted());
    });
    leader.close().unwrap();
    waiting.wait().unwrap();
    // An idle one.
    let idle = latch(&client, PATH);
    client.close().unwrap();
    assert!(
        matches!(idle.state(), CandidateState::Closed) && idle.start().unwrap_err().is_closed()
    );
}

#[test]
fn events_come_in_pairs_through_every_loss() {
    let (etcd, proxy, client) = proxied(Duration::from_secs(1));
    let latch = LeaderLatch::builder(&client, PATH).ttl(TTL).build().unwrap();
    let latch = Arc::new(latch);
    let events = record(&latch);
    // The flag is down before anybody is told, and the state and the loss come first.
    let order = Story::new();
    latch.add_connection_state_listener({
        let order = order.clone();
        move |state| {
            if *state == ConnectionState::Lost {
                order.tell("state");
            }
        }
    });
    latch.add_loss_listener({
        let order = order.clone();
        move |_| order.tell("loss")
    });
    latch.add_listener({
        let (latch, order) = (Arc::downgrade(&latch), order.clone());
        move |event| {
            if let (LatchEvent::NotLeader { term }, Some(latch)) = (*event, latch.upgrade()) {
                let now = latch.leadership().map(|now| now.fencing_token());
                assert!(now.is_none_or(|now| now > term), "it leads while it hears the contrary");
                order.tell("not leader");
            }
        }
    });
    let losses = latch.loss_events();
    latch.start().unwrap();
    type Take<'a> = &'a dyn Fn(&str);
    let lose: [(LossReason, Take<'_>); 4] = [
        (LossReason::KeyDeleted, &|key| drop(etcd.ctl(["del", key]).unwrap())),
        (LossReason::LeaseGone, &|key| revoke_lease_of(&etcd, key)),
        (LossReason::KeyOverwritten, &|key| drop(etcd.ctl(["put", key, "x"]).unwrap())),
        (LossReason::DeadlinePassed, &|_| proxy.set(Mode::Blackhole)),
    ];
    let mut last = 0;
    for round in 0..2 {
        for (reason, take) in &lose {
            latch.wait().unwrap();
            let term = latch.leadership().unwrap();
            assert!(term.fencing_token() > last, "{reason:?} in round {round}");
            last = term.fencing_token();
            take(&term.lock_key());
            let loss = losses.recv_timeout(LIMIT).unwrap();
            assert_eq!((loss.reason, loss.token), (*reason, last));
            assert!(!term.is_leader() && term.cancel_token().is_cancelled());
            term.wait_until_finished().unwrap();
            assert!(!term.put("/data", "late").unwrap());
            proxy.set(Mode::Pass);
        }
    }
    latch.wait().unwrap();
    let last = latch.leadership().unwrap().fencing_token();
    latch.close().unwrap();
    let told = events.lock().clone();
    check_pairs(&told);
    assert_eq!(told.len(), 18, "{told:?}");
    assert_eq!(told.last(), Some(&-last));
    let order = order.told();
    assert!(
        order.chunks_exact(3).take(8).all(|told| told == ["state", "loss", "not leader"]),
        "{order:?}"
    );
    wait_keys(&etcd, PATH, 0);
}

#[test]
fn listeners_are_called_one_at_a_time_and_late_ones_hear_what_is() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let latch = started(&client, PATH);
    latch.wait().unwrap();
    let inside = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let (sent, heard) = unbounded();
    for number in 0..3 {
        let (inside, sent) = (inside.clone(), sent.clone());
        latch.add_listener(move |event| {
            assert_eq!(inside.fetch_add(1, std::sync::atomic::Ordering::SeqCst), 0, "two at once");
            thread::sleep(ms(5));
            inside.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
            sent.send((number, *event)).unwrap();
        });
    }
    let first = latch.leadership().unwrap().fencing_token();
    for number in 0..3 {
        let told = heard.recv_timeout(LIMIT).unwrap();
        assert_eq!(told, (number, LatchEvent::IsLeader { term: first }), "it came late");
    }
    // One that panics keeps nothing from the others, and one that was removed hears nothing.
    latch.add_listener(|_| panic!("a listener of the test"));
    let removed = latch.add_listener(|event| panic!("removed, and hears {event:?}"));
    eventually(LIMIT, "both were told", || latch.error_count() == 2);
    assert!(latch.remove_listener(removed) && !latch.remove_listener(removed));
    struct Typed(crossbeam_channel::Sender<(bool, i64)>);
    impl LatchListener for Typed {
        fn is_leader(&self, term: i64) {
            self.0.send((true, term)).unwrap();
        }
        fn not_leader(&self, term: i64) {
            self.0.send((false, term)).unwrap();
        }
    }
    let (typed, told) = unbounded();
    latch.add_listener_with(Box::new(Typed(typed)));
    assert_eq!(told.recv_timeout(LIMIT).unwrap(), (true, first));
    let key = latch.leadership().unwrap().lock_key();
    etcd.ctl(["del", &key]).unwrap();
    assert_eq!(told.recv_timeout(LIMIT).unwrap(), (false, first));
    let (leads, second) = told.recv_timeout(LIMIT).unwrap();
    assert!(leads && second > first);
    latch.close().unwrap();
    assert_eq!(told.recv_timeout(LIMIT).unwrap(), (false, second));
    let all: Vec<_> = heard.try_iter().map(|(number, _)| number).collect();
    assert_eq!(all, [0, 1, 2, 0, 1, 2, 0, 1, 2]);
}

#[test]
fn a_listener_that_comes_during_a_change_hears_whole_pairs() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let latch = Arc::new(started(&client, PATH));
    let mut all = Vec::new();
    for _ in 0..30 {
        latch.wait().unwrap();
        let Some(term) = latch.leadership() else { continue };
        client.delete(term.lock_key()).unwrap();
        while all.len() % 7 != 6 {
            all.push(record(&latch));
        }
        all.push(record(&latch));
    }
    latch.wait().unwrap();
    latch.close().unwrap();
    for events in all {
        let told = events.lock().clone();
        check_pairs(&told);
        assert!(told.len() % 2 == 0, "{told:?}");
    }
}

#[test]
fn a_close_tells_or_is_silent() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    for (mode, pairs) in
        [(Some(CloseMode::Notify), true), (Some(CloseMode::Silent), false), (None, true)]
    {
        let latch = latch(&client, PATH);
        let (events, channel) = (record(&latch), latch.events());
        latch.start().unwrap();
        latch.wait().unwrap();
        let term = latch.leadership().unwrap();
        match mode {
            Some(mode) => latch.close_with(mode).unwrap(),
            // What a destructor does.
            None => drop(latch),
        }
        let number = term.fencing_token();
        let mut expected = vec![number];
        expected.extend(pairs.then_some(-number));
        eventually(LIMIT, "what is told", || {
            let told = events.lock().clone();
            if told == expected { Ok(()) } else { Err(told) }
        });
        assert_eq!(channel.iter().count(), expected.len(), "the channel ends");
        assert!(!term.is_leader() && keys(&etcd, PATH).is_empty());
    }
}

#[test]
fn a_latch_may_be_closed_from_anywhere() {
    let etcd = EtcdServer::start().unwrap();
    for from in ["latch listener", "loss listener", "state listener", "drop in a listener"] {
        let client = connect(&etcd);
        let slot = Arc::new(Lock::new(Some(latch(&client, PATH))));
        let (sent, closed) = unbounded();
        let close = {
            let slot = Arc::downgrade(&slot);
            move || {
                let slot = slot.upgrade().unwrap();
                if from == "drop in a listener" {
                    let taken = slot.lock().take();
                    drop(taken);
                    let _ = sent.send(Ok(()));
                    return;
                }
                let latch = slot.lock();
                let _ = sent.send(latch.as_ref().unwrap().close());
            }
        };
        {
            let latch = slot.lock();
            let latch = latch.as_ref().unwrap();
            match from {
                "latch listener" => latch.add_listener(move |event| {
                    if matches!(event, LatchEvent::IsLeader { .. }) {
                        close();
                    }
                }),
                "loss listener" => latch.add_loss_listener(move |_| close()),
                "state listener" => latch.add_connection_state_listener(move |state| {
                    if *state == ConnectionState::Lost {
                        close();
                    }
                }),
                _ => latch.add_listener(move |event| {
                    if matches!(event, LatchEvent::NotLeader { .. }) {
                        close();
                    }
                }),
            };
            latch.start().unwrap();
        }
        if from != "latch listener" {
            let key = eventually(LIMIT, "it leads", || line(&etcd, PATH).first().cloned());
            eventually(LIMIT, "it knows", || {
                slot.lock().as_ref().is_none_or(LeaderLatch::has_leadership)
            });
            revoke_lease_of(&etcd, &key);
        }
        closed.recv_timeout(LIMIT).unwrap_or_else(|error| panic!("{from}: {error}")).unwrap();
        wait_keys(&etcd, PATH, 0);
        let (closed, took) = timed(|| client.close());
        assert!(closed.is_ok() && took < PROMPT, "{from}: {took:?}");
    }
}

#[test]
fn a_client_that_closes_takes_its_latches_along() {
    let etcd = EtcdServer::start().unwrap();
    let (client, other) = (connect(&etcd), connect(&etcd));
    let leader = latch(&client, PATH);
    let events = record(&leader);
    leader.start().unwrap();
    leader.wait().unwrap();
    let waiting = started(&client, PATH);
    let rival = started(&other, PATH);
    eventually(LIMIT, "all stand", || rival.participants().unwrap().len() == 3);
    let term = leader.leadership().unwrap();
    let ((), took) = timed(|| client.close().unwrap());
    assert!(took < PROMPT, "{took:?}");
    for latch in [&leader, &waiting] {
        assert!(matches!(latch.state(), CandidateState::Closed) && !latch.has_leadership());
        latch.close().unwrap();
    }
    assert_eq!(*events.lock(), [term.fencing_token(), -term.fencing_token()]);
    rival.wait().unwrap();
    assert_eq!(rival.participants().unwrap().len(), 1);
}

/// What belongs to the user is not dropped on the library's I/O thread, where it could block all.
#[test]
fn a_latch_that_outlives_its_etcd_drops_its_listeners_elsewhere() {
    struct Dropped(crossbeam_channel::Sender<String>);
    impl Drop for Dropped {
        fn drop(&mut self) {
            let name = thread::current().name().unwrap_or_default().to_owned();
            let _ = self.0.send(name);
        }
    }
    let (etcd, proxy, client) = proxied(Duration::from_secs(1));
    let latch = LeaderLatch::builder(&client, PATH).ttl(LONG).build().unwrap();
    let (sent, dropped) = unbounded();
    let value = Dropped(sent);
    latch.add_listener(move |_| {
        let _ = &value;
    });
    latch.start().unwrap();
    latch.wait().unwrap();
    proxy.set(Mode::Blackhole);
    let (closed, took) = timed(|| latch.close());
    assert_eq!(closed.unwrap_err().kind(), ErrorKind::CleanupUnconfirmed);
    assert!(took < Duration::from_secs(2) + PROMPT, "{took:?}");
    drop(latch);
    assert!(dropped.try_recv().is_err(), "the task has ended");
    proxy.set(Mode::Pass);
    let thread = dropped.recv_timeout(LIMIT).unwrap();
    assert_ne!(thread, "etcd-rx-io");
    wait_keys(&etcd, PATH, 0);
}

#[test]
fn a_latch_fails_visibly_and_may_be_started_again() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    etcd.ctl(["put", "/elections/a/stone", "there"]).unwrap();
    let latch = started(&client, PATH);
    assert_eq!(latch.wait().unwrap_err().kind(), ErrorKind::ForeignKey);
    assert!(matches!(latch.state(), CandidateState::Failed(_)));
    assert_eq!(latch.error_count(), 1);
    etcd.ctl(["del", "/elections/a/stone"]).unwrap();
    latch.start().unwrap();
    latch.wait().unwrap();
}

#[test]
fn a_latch_waits_for_an_etcd_that_comes_late() {
    let etcd = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    proxy.set(Mode::Reset);
    let client = patient(ms(300)).endpoints([proxy.endpoint()]).connect().unwrap();
    let latch = LeaderLatch::builder(&client, PATH).ttl(TTL).build().unwrap();
    latch.start().unwrap();
    eventually(LIMIT, "it has tried", || latch.error_count() > 1);
    assert!(matches!(latch.state(), CandidateState::Waiting { position: None }));
    proxy.set(Mode::Pass);
    assert!(latch.wait_for(LIMIT).unwrap());
}
