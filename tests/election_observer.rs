//! The observer: who leads, as told to somebody who only looks on.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod candidates;
mod support;

use std::time::Duration;

use candidates::*;
use etcd_recipes::testing::{EtcdServer, FaultProxy, Mode, eventually};
use etcd_recipes::{
    Client, ConnectionState, ErrorKind, LeaderChange, LeaderObserver, Participant, Recipe,
    Subscription,
};
use support::{PROMPT, connect, ms, patient, revoke_lease_of, timed};

const PATH: &str = "/elections/a";

/// An observer behind a proxy.
fn behind_a_proxy(etcd: &EtcdServer) -> (FaultProxy, Client, LeaderObserver) {
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    let client = patient(Duration::from_secs(2)).endpoints([proxy.endpoint()]).connect().unwrap();
    let observer = LeaderObserver::new(&client, PATH).unwrap();
    (proxy, client, observer)
}

#[track_caller]
fn next(events: &Subscription<LeaderChange>) -> LeaderChange {
    match events.recv_timeout(LIMIT) {
        Ok(change) => change,
        Err(error) => panic!("no change: {error}"),
    }
}

#[track_caller]
fn elected(events: &Subscription<LeaderChange>, id: &str) -> Participant {
    match next(events) {
        LeaderChange::Elected(leader) => {
            assert_eq!(leader.client_id, id);
            assert!(leader.is_leader && leader.position == 0);
            leader
        }
        other => panic!("{id} was to be elected: {other:?}"),
    }
}

#[track_caller]
fn vacated(events: &Subscription<LeaderChange>) {
    let change = next(events);
    assert!(matches!(change, LeaderChange::Vacated), "{change:?}");
}

/// What the observer shows is the first key of the path.
#[track_caller]
fn check_agrees(etcd: &EtcdServer, client: &Client, observer: &LeaderObserver) {
    eventually(LIMIT, "the observer agrees with etcd", || {
        let first = line(etcd, PATH).first().map(|key| {
            let found = client.get(key.as_str()).unwrap();
            found.map_or(0, |found| found.create_revision)
        });
        let shown = observer.current_leader().map(|leader| leader.term);
        if first == shown { Ok(()) } else { Err((first, shown)) }
    });
}

#[test]
fn an_observer_tells_of_every_leader_in_order() {
    let etcd = EtcdServer::start().unwrap();
    let (client, watching) = (connect(&etcd), connect(&etcd));
    let observer = LeaderObserver::new(&watching, PATH).unwrap();
    assert!(observer.current_leader().is_none());
    let events = observer.events();
    let story = Story::new();
    observer.add_listener({
        let story = story.clone();
        move |change| {
            story.tell(match change {
                LeaderChange::Elected(leader) => leader.client_id.clone(),
                LeaderChange::Proclaimed(leader) => leader.proposal_text(),
                other => format!("{other:?}"),
            });
        }
    });
    let removed = observer.add_listener(|change| panic!("removed, and hears {change:?}"));
    assert!(observer.remove_listener(removed));
    observer.start().unwrap();
    observer.start().unwrap();
    let mut last = 0;
    let mut expected = Vec::new();
    for form in FORMS {
        let a = Candidate::start(form, &client, PATH, "a", LONG);
        let term = a.wait_leads();
        let seen = elected(&events, "a");
        assert_eq!(seen.term, term.fencing_token());
        assert!(seen.term > last);
        assert_eq!(observer.current_leader().as_ref(), Some(&seen));
        assert_eq!(seen.proposal_text(), "a");
        // A proclamation, with its term.
        assert!(term.proclaim("plan").unwrap());
        match next(&events) {
            LeaderChange::Proclaimed(leader) => {
                assert_eq!((leader.term, leader.proposal_text()), (seen.term, "plan".to_owned()));
                assert_eq!(leader.client_id, "a");
            }
            other => panic!("{other:?}"),
        }
        // The same again is nothing new.
        assert!(term.proclaim("plan").unwrap());
        // To one of etcdctl's, to ours, to nobody.
        let (mut theirs, told) = etcdctl_elect(&etcd, &[PATH, "theirs"]);
        eventually(LIMIT, "they wait", || a.participants().unwrap().len() == 2);
        let b = Candidate::start(form, &client, PATH, "b", LONG);
        eventually(LIMIT, "b waits", || a.participants().unwrap().len() == 3);
        a.close().unwrap();
        let foreign = elected(&events, "theirs");
        assert_eq!(foreign.proposal_text(), "theirs");
        // It resigns only once it knows that it leads.
        assert!(told.recv_timeout(LIMIT).unwrap().starts_with(PATH));
        assert_eq!(told.recv_timeout(LIMIT).unwrap(), "theirs");
        interrupt(&mut theirs);
        let b_seen = elected(&events, "b");
        assert!(seen.term < foreign.term && foreign.term < b_seen.term);
        assert_eq!(b_seen.term, b.wait_leads().fencing_token());
        // The key goes, and its owner comes again in another term.
        etcd.ctl(["del", &key_of(&etcd, PATH, "b").unwrap()]).unwrap();
        vacated(&events);
        let again = elected(&events, "b");
        assert!(again.term > b_seen.term);
        b.close().unwrap();
        vacated(&events);
        assert!(observer.current_leader().is_none());
        last = again.term;
        expected.extend(["a", "plan", "theirs", "b", "Vacated", "b", "Vacated"]);
    }
    story.wait_count(expected.len());
    assert_eq!(story.told(), expected);
    observer.close().unwrap();
    assert!(events.recv().is_err(), "the channel ends");
    let late = Candidate::start(Form::Latch, &client, PATH, "late", LONG);
    late.wait_leads();
    assert_eq!(story.told().len(), expected.len());
    assert!(observer.start().unwrap_err().is_closed());
}

#[test]
fn a_start_event_tells_what_is() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let observe = |start_event| {
        let observer =
            LeaderObserver::builder(&client, PATH).start_event(start_event).build().unwrap();
        let events = observer.events();
        observer.start().unwrap();
        (observer, events)
    };
    let (_nobody, events) = observe(true);
    vacated(&events);
    let leader = Candidate::start(Form::Latch, &client, PATH, "leader", LONG);
    let term = leader.wait_leads().fencing_token();
    elected(&events, "leader");
    let (told, events) = observe(true);
    assert_eq!(elected(&events, "leader").term, term);
    let (silent, silence) = observe(false);
    assert_eq!(told.current_leader(), silent.current_leader());
    assert_eq!(silent.current_leader().unwrap().term, term);
    leader.close().unwrap();
    // The first it hears is the first change.
    vacated(&silence);
    vacated(&events);
}

#[test]
fn a_waiting_candidate_that_comes_or_goes_is_no_change() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let observer = LeaderObserver::new(&client, PATH).unwrap();
    let events = observer.events();
    observer.start().unwrap();
    let leader = Candidate::start(Form::Selector, &client, PATH, "leader", LONG);
    leader.wait_leads();
    elected(&events, "leader");
    for number in 0..5 {
        let other = connect(&etcd);
        let waiting = Candidate::start(Form::Latch, &other, PATH, &format!("w{number}"), LONG);
        eventually(LIMIT, "it waits", || leader.participants().unwrap().len() == 2);
        waiting.close().unwrap();
        eventually(LIMIT, "it is gone", || leader.participants().unwrap().len() == 1);
        // A deeper key belongs to somebody else.
        client.put(format!("{PATH}/deeper/{number}"), "x").unwrap();
    }
    leader.close().unwrap();
    vacated(&events);
    assert!(events.try_recv().is_err());
}

/// Leaders that came and went during an outage may be passed over, the present one never is;
/// whether the history is still there or was compacted.
#[test]
fn an_outage_of_the_observer_passes_over_no_present_leader() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let (proxy, _own, observer) = behind_a_proxy(&etcd);
    let (events, states) = (observer.events(), observer.connection_events());
    observer.start().unwrap();
    let mut number = 0;
    for mode in [Mode::Reset, Mode::Blackhole] {
        for compact in [false, true] {
            number += 1;
            let before = Candidate::start(Form::Latch, &client, PATH, "before", LONG);
            let first = before.wait_leads();
            assert_eq!(elected(&events, "before").term, first.fencing_token());
            proxy.set(mode);
            let meanwhile = Candidate::start(Form::Latch, &client, PATH, "meanwhile", LONG);
            eventually(LIMIT, "it waits", || before.participants().unwrap().len() == 2);
            before.close().unwrap();
            meanwhile.wait_leads();
            let after = Candidate::start(Form::Latch, &client, PATH, "after", LONG);
            eventually(LIMIT, "it waits", || after.participants().unwrap().len() == 2);
            meanwhile.close().unwrap();
            let term = after.wait_leads();
            assert!(term.proclaim(format!("plan {number}")).unwrap());
            for filler in 0..50 {
                client.put(format!("/filler/{filler}"), "x").unwrap();
            }
            if compact {
                etcd.compact().unwrap();
            }
            assert_eq!(observer.current_leader().unwrap().client_id, "before");
            proxy.set(Mode::Pass);
            let mut told = Vec::new();
            loop {
                match next(&events) {
                    LeaderChange::Elected(leader) | LeaderChange::Proclaimed(leader) => {
                        told.push(leader.client_id.clone());
                        if leader.term == term.fencing_token()
                            && leader.proposal_text() == format!("plan {number}")
                        {
                            break;
                        }
                    }
                    other => panic!("{other:?}"),
                }
            }
            println!("{mode:?}, compacted {compact}: {told:?}");
            check_agrees(&etcd, &client, &observer);
            after.close().unwrap();
            vacated(&events);
            assert!(events.try_recv().is_err());
        }
    }
    let states: Vec<_> = states.try_iter().collect();
    assert!(states.contains(&ConnectionState::Suspended), "{states:?}");
    assert!(!states.contains(&ConnectionState::Lost), "{states:?}");
    assert_eq!(observer.connection_state(), ConnectionState::Reconnected);
    // Whoever went during the outage is seen to be gone.
    let last = Candidate::start(Form::Latch, &client, PATH, "last", LONG);
    last.wait_leads();
    elected(&events, "last");
    proxy.set(Mode::Reset);
    last.close().unwrap();
    etcd.compact().unwrap();
    proxy.set(Mode::Pass);
    vacated(&events);
}

#[test]
fn an_observer_survives_restarts_of_etcd() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let watching = connect(&etcd);
    let observer = LeaderObserver::new(&watching, PATH).unwrap();
    let events = observer.events();
    observer.start().unwrap();
    let leader = Candidate::start(Form::Selector, &client, PATH, "leader", LONG);
    let term = leader.wait_leads();
    elected(&events, "leader");
    for round in 0..2 {
        etcd.restart().unwrap();
        // It is the same term on the same key: no change.
        eventually(LIMIT, "the leader is back", || {
            term.proclaim(format!("plan {round}")).unwrap_or(false)
        });
        match next(&events) {
            LeaderChange::Proclaimed(seen) => {
                assert_eq!((seen.term, seen.client_id.as_str()), (term.fencing_token(), "leader"));
            }
            other => panic!("{other:?}"),
        }
    }
    leader.close().unwrap();
    vacated(&events);
    // Without its data: whoever leads then is another leader, whatever the numbers say.
    let leader = Candidate::start(Form::Selector, &client, PATH, "leader", Duration::from_secs(2));
    let before = leader.wait_leads();
    elected(&events, "leader");
    etcd.restart_empty().unwrap();
    let after = eventually(LIMIT, "it leads in the new store", || {
        leader.term().filter(|after| after.lock_key() != before.lock_key())
    });
    loop {
        match next(&events) {
            LeaderChange::Elected(seen) if seen.term == after.fencing_token() => break,
            LeaderChange::Vacated => {}
            other => panic!("{other:?}"),
        }
    }
    check_agrees(&etcd, &client, &observer);
}

#[test]
fn an_observer_ends_with_what_it_may_not_see() {
    let etcd = EtcdServer::builder().auth("root", "secret").start().unwrap();
    let root = ["--user", "root:secret"];
    let ctl = |words: &[&str]| drop(etcd.ctl([&root, words].concat()).unwrap());
    ctl(&["role", "add", "sees"]);
    ctl(&["role", "grant-permission", "sees", "--prefix=true", "readwrite", "/elections/"]);
    ctl(&["user", "add", "me:pw"]);
    ctl(&["user", "grant-role", "me", "sees"]);
    let client = Client::builder().endpoints([etcd.endpoint()]).user("me", "pw").connect().unwrap();
    let hidden = LeaderObserver::new(&client, "/hidden").unwrap();
    let error = hidden.start().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PermissionDenied);
    let observer = LeaderObserver::new(&client, PATH).unwrap();
    let events = observer.events();
    observer.start().unwrap();
    ctl(&["role", "revoke-permission", "sees", "--prefix=true", "/elections/"]);
    // Its watch is opened anew with the next connection.
    etcd.restart().unwrap();
    match next(&events) {
        LeaderChange::WatchFailed(error) => {
            assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
        }
        other => panic!("{other:?}"),
    }
    assert!(!observer.is_healthy());
    assert_eq!(observer.connection_state(), ConnectionState::Lost);
    assert_eq!(observer.errors().len(), 1);
    // It does not look alive, and may be brought to life again.
    assert_eq!(observer.start().unwrap_err().kind(), ErrorKind::PermissionDenied);
    ctl(&["role", "grant-permission", "sees", "--prefix=true", "readwrite", "/elections/"]);
    let leader = Candidate::start(Form::Latch, &client, PATH, "leader", LONG);
    let term = leader.wait_leads().fencing_token();
    observer.start().unwrap();
    assert_eq!(elected(&events, "leader").term, term);
    assert!(observer.is_healthy());
    leader.close().unwrap();
    vacated(&events);
}

#[test]
fn an_observer_may_be_closed_from_its_listener_and_with_its_client() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let observer = std::sync::Arc::new(LeaderObserver::new(&client, PATH).unwrap());
    let (sent, closed) = crossbeam_channel::bounded(4);
    observer.add_listener({
        let observer = std::sync::Arc::downgrade(&observer);
        move |_| sent.send(observer.upgrade().map(|observer| observer.close())).unwrap()
    });
    observer.start().unwrap();
    let leader = Candidate::start(Form::Latch, &client, PATH, "leader", LONG);
    leader.wait_leads();
    closed.recv_timeout(LIMIT).unwrap().unwrap().unwrap();
    // A close is no failure of the watch, whichever ends first.
    for _ in 0..20 {
        let other = connect(&etcd);
        let second = LeaderObserver::new(&other, PATH).unwrap();
        second.start().unwrap();
        let events = second.events();
        let (closed, took) = timed(|| other.close());
        assert!(closed.is_ok() && took < PROMPT, "{took:?}");
        assert!(events.recv_timeout(LIMIT).is_err_and(|error| !error.is_timeout()));
        assert!(second.start().unwrap_err().is_closed() && !second.is_healthy());
        assert!(second.errors().is_empty());
    }
    // An etcd that is away does not hold a close up, nor a start for ever.
    let (proxy, _own, third) = behind_a_proxy(&etcd);
    proxy.set(Mode::Blackhole);
    std::thread::scope(|scope| {
        let starting = scope.spawn(|| third.start());
        std::thread::sleep(ms(100));
        let (closed, took) = timed(|| third.close());
        assert!(closed.is_ok() && took < PROMPT, "{took:?}");
        assert!(starting.join().unwrap().unwrap_err().is_closed());
    });
    let (_proxy, _own, fourth) = {
        let (proxy, own, observer) = behind_a_proxy(&etcd);
        proxy.set(Mode::Blackhole);
        assert_eq!(observer.start().unwrap_err().kind(), ErrorKind::Unreachable);
        proxy.set(Mode::Pass);
        (proxy, own, observer)
    };
    fourth.start().unwrap();
    assert_eq!(fourth.current_leader().unwrap().client_id, "leader");
    let key = key_of(&etcd, PATH, "leader").unwrap();
    revoke_lease_of(&etcd, &key);
    eventually(LIMIT, "another term", || {
        fourth
            .current_leader()
            .is_some_and(|seen| Some(seen.term) == leader.term().map(|t| t.fencing_token()))
    });
}
