//! What others see of a lock's queue and may do about its holds: places, polite requests, forced
//! releases, and holds that end by the clock.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod faults;
mod support;

use std::io::{BufRead, BufReader};
use std::thread;
use std::time::{Duration, Instant};

use etcd_recipes::testing::{EtcdServer, FaultProxy, Mode, TestClock, eventually};
use etcd_recipes::{
    Client, ContenderMode, ErrorKind, Force, Hold, Loss, LossReason, MultiLock, Mutex,
    QueueProgress, Recipe, ReleaseRequest, RwLock, Semaphore, Subscription,
};
use faults::{Twin, role, until_parent_ends};
use support::*;

/// Longer than it takes until a hold can be asked for.
const LASTING: Duration = Duration::from_millis(1_300);

/// A limit within which a holder that lives takes a request up.
const PATIENCE: Force = Force::AfterAcknowledgement(Duration::from_secs(10));

/// Too short for the dead, long enough to see that nothing happens.
const BRIEFLY: Force = Force::AfterAcknowledgement(Duration::from_millis(700));

const INBOXES: &str = "/__etcd-recipes/";

/// No request stands, and no lease of one.
#[track_caller]
fn nothing_left(etcd: &EtcdServer, expected_leases: usize) {
    assert_eq!(keys(etcd, INBOXES), Vec::<String>::new());
    assert_eq!(leases(etcd), expected_leases);
}

#[track_caller]
fn unheard(outcome: etcd_recipes::Result<bool>, key: &str) {
    let error = outcome.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotAcknowledged, "{error}");
    assert_eq!(error.key(), Some(key));
}

fn mutex(client: &Client, path: &str) -> Mutex {
    Mutex::builder(client, path).ttl(Duration::from_secs(20)).build().unwrap()
}

fn wait_lost(hold: &Hold) {
    eventually(LIMIT, "the hold is lost", || !hold.is_held());
}

// ----- seen ---------------------------------------------------------------------------------------

#[test]
fn contenders_say_who_holds_and_who_waits() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let named = |id: &str| RwLock::builder(&client, "/locks/a").client_id(id).build().unwrap();
    let (reader, writer) = (named("reader"), named("writer"));
    let first = reader.read_owned().unwrap();
    let second = reader.read_owned().unwrap();
    thread::scope(|scope| {
        scope.spawn(|| assert!(writer.write_owned().unwrap().unlock()));
        let all = eventually(LIMIT, "the writer waits", || {
            let all = writer.contenders().unwrap();
            (all.len() == 3).then_some(all)
        });
        let seen: Vec<_> = all
            .iter()
            .map(|one| (one.client_id.as_str(), one.position, one.mode, one.is_holder))
            .collect();
        let (read, write) = (ContenderMode::Read, ContenderMode::Write);
        let expected =
            [("reader", 0, read, true), ("reader", 1, read, true), ("writer", 2, write, false)];
        assert_eq!(seen, expected);
        for one in &all {
            assert_eq!(one.pid, Some(std::process::id()));
            assert!(one.host.as_ref().is_some_and(|host| !host.is_empty()));
            assert!(one.since.unwrap().elapsed().unwrap() < LIMIT);
        }
        assert!(all.windows(2).all(|pair| pair[0].token < pair[1].token));
        assert!(first.unlock() && second.unlock());
    });
    let mutex = mutex(&client, "/locks/b");
    let guard = mutex.lock().unwrap();
    let holder = mutex.contenders().unwrap().remove(0);
    assert_eq!((holder.token, holder.is_holder), (guard.fencing_token(), true));
    assert!(guard.unlock());
}

/// What was told up to the place given.
fn up_to(events: &Subscription<QueueProgress>, last: usize) -> Vec<QueueProgress> {
    let mut told = Vec::new();
    while told.last().is_none_or(|one: &QueueProgress| one.position != last) {
        told.push(events.recv_timeout(LIMIT).unwrap());
    }
    told
}

#[test]
fn places_count_down_as_others_leave() {
    let etcd = EtcdServer::start().unwrap();
    let (client, others) = (connect(&etcd), connect(&etcd));
    let (ours, theirs) = (mutex(&client, "/locks/a"), mutex(&others, "/locks/a"));
    let (tell, heard) = crossbeam_channel::unbounded();
    let id = ours.add_progress_listener(move |progress| {
        let name = thread::current().name().unwrap_or_default().to_owned();
        tell.send((progress.clone(), name)).unwrap();
    });
    let events = ours.progress_events();
    assert_eq!(ours.queue_position(), None);
    let holder = theirs.lock_owned().unwrap();
    thread::scope(|scope| {
        let (pass, passed) = crossbeam_channel::bounded::<()>(0);
        for ahead in [2, 3] {
            let (theirs, passed) = (&theirs, passed.clone());
            scope.spawn(move || {
                let guard = theirs.lock_owned().unwrap();
                passed.recv().unwrap();
                assert!(guard.unlock());
            });
            wait_contenders(&ours, ahead);
        }
        let waiter = scope.spawn(|| ours.lock_owned().unwrap());
        eventually(LIMIT, "our place", || ours.queue_position() == Some(3));
        assert!(holder.unlock());
        eventually(LIMIT, "our place", || ours.queue_position() == Some(2));
        pass.send(()).unwrap();
        eventually(LIMIT, "our place", || ours.queue_position() == Some(1));
        pass.send(()).unwrap();
        let guard = waiter.join().unwrap();
        let token = guard.fencing_token();
        let expected: Vec<_> = [3, 2, 1, 0].map(|position| (token, position)).into();
        let pairs = |told: Vec<QueueProgress>| -> Vec<_> {
            told.into_iter().map(|one| (one.token, one.position)).collect()
        };
        assert_eq!(pairs(up_to(&events, 0)), expected);
        let told: Vec<_> = (0..4).map(|_| heard.recv_timeout(LIMIT).unwrap()).collect();
        assert!(told.iter().all(|(_, thread)| thread == "etcd-rx-heal"));
        assert_eq!(pairs(told.into_iter().map(|(one, _)| one).collect()), expected);
        assert_eq!(ours.queue_position(), None);
        assert!(guard.unlock());
    });
    assert!(ours.remove_progress_listener(id) && !ours.remove_progress_listener(id));
    ours.close().unwrap();
    assert!(events.recv_timeout(LIMIT).is_err() && heard.is_empty());
}

#[test]
fn a_neighbour_in_the_same_process_leaves_and_the_last_place_is_told_too() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let mutex = mutex(&client, "/locks/a");
    let events = mutex.progress_events();
    for _ in 0..20 {
        let guard = mutex.lock_owned().unwrap();
        thread::scope(|scope| {
            let waiter = scope.spawn(|| mutex.lock_owned().unwrap());
            eventually(LIMIT, "it waits", || mutex.queue_position() == Some(1));
            assert!(guard.unlock());
            let token = waiter.join().unwrap().fencing_token();
            let told: Vec<_> =
                up_to(&events, 0).iter().map(|one| (one.token, one.position)).collect();
            assert_eq!(told, [(token, 1), (token, 0)]);
        });
    }
    assert!(events.is_empty());
}

#[test]
fn who_listens_late_hears_of_the_present_place() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let permits = Semaphore::new(&client, "/limits/a", 2).unwrap();
    let out = permits.acquire_many(2).unwrap();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| permits.acquire_many(2).unwrap());
        eventually(LIMIT, "it waits", || permits.queue_position() == Some(2));
        let (first, second) = (crossbeam_channel::unbounded(), crossbeam_channel::unbounded());
        for (tell, _) in [&first, &second] {
            let tell = tell.clone();
            permits.add_progress_listener(move |one| tell.send(one.position).unwrap());
        }
        assert_eq!(first.1.recv_timeout(LIMIT), Ok(2));
        assert_eq!(second.1.recv_timeout(LIMIT), Ok(2));
        assert!(out.release());
        assert!(waiter.join().unwrap().release());
        for (_, heard) in [first, second] {
            assert_eq!(heard.recv_timeout(LIMIT), Ok(0));
            assert!(heard.is_empty(), "nothing is told twice");
        }
    });
}

// ----- asked for ----------------------------------------------------------------------------------

#[test]
fn a_polite_request_is_heard_once_and_ends_nothing() {
    let etcd = EtcdServer::start().unwrap();
    let (client, other) = (connect(&etcd), connect(&etcd));
    let holder = mutex(&client, "/locks/a");
    let asking = Mutex::builder(&other, "/locks/a").client_id("operator").build().unwrap();
    let requests = holder.release_requests();
    let (tell, heard) = crossbeam_channel::unbounded();
    let id = holder.add_release_request_listener(move |request: &ReleaseRequest| {
        let name = thread::current().name().unwrap_or_default().to_owned();
        tell.send((request.clone(), name)).unwrap();
    });
    let guard = holder.lock().unwrap();
    let token = guard.fencing_token();
    assert!(!asking.request_release(token + 1).unwrap());
    // It is young, and then it is not.
    for _ in 0..2 {
        assert!(asking.request_release(token).unwrap());
        let (request, name) = heard.recv_timeout(LIMIT).unwrap();
        assert_eq!(name, "etcd-rx-heal");
        assert_eq!((request.token, request.path.as_str()), (token, "/locks/a"));
        assert_eq!(request.from, "operator");
        assert_eq!(requests.recv_timeout(LIMIT), Ok(request));
        assert!(guard.is_held() && guard.verify().unwrap());
        nothing_left(&etcd, 1);
    }
    assert!(holder.remove_release_request_listener(id));
    let (asked, took) = timed(|| asking.request_release(token).unwrap());
    assert!(
        asked && took < Duration::from_secs(2),
        "a hold that has lasted hears at once, not after {took:?}"
    );
    assert!(requests.recv_timeout(LIMIT).is_ok() && heard.is_empty());
    assert!(guard.unlock());
    assert!(!asking.request_release(token).unwrap());
    assert_eq!(holder.error_count(), 0);
    assert!(requests.is_empty());
}

#[test]
fn whoever_waits_has_nothing_to_release() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let mutex = mutex(&client, "/locks/a");
    let guard = mutex.lock_owned().unwrap();
    thread::scope(|scope| {
        scope.spawn(|| assert!(mutex.lock_owned().unwrap().unlock()));
        wait_contenders(&mutex, 2);
        let waiter = mutex.contenders().unwrap()[1].token;
        assert!(!mutex.request_release(waiter).unwrap());
        assert!(guard.unlock());
    });
}

// ----- taken away ---------------------------------------------------------------------------------

#[test]
fn an_acknowledged_release_lets_nobody_in_while_the_holder_believes_in_its_hold() {
    let etcd = EtcdServer::start().unwrap();
    // What etcd does is told to the holder late: whoever deletes first is caught at it.
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    let slow = Client::connect([proxy.endpoint()]).unwrap();
    let (fast, operator) = (connect(&etcd), connect(&etcd));
    let (ours, rivals) = (mutex(&slow, "/locks/a"), mutex(&fast, "/locks/a"));
    let operator = mutex(&operator, "/locks/a");
    let guard = ours.lock_owned().unwrap();
    let (hold, token) = (guard.hold(), guard.fencing_token());
    let witness = Witness::new(&ours, guard.hold());
    thread::sleep(LASTING);
    proxy.set(Mode::Delay { up: Duration::ZERO, down: ms(300) });
    thread::scope(|scope| {
        let believing = scope.spawn(|| {
            let mut last = Instant::now();
            loop {
                let asked = Instant::now();
                if !hold.is_held() {
                    return last;
                }
                last = asked;
                thread::sleep(ms(1));
            }
        });
        let rival = scope.spawn(|| {
            let guard = rivals.lock_owned().unwrap();
            let inside = Instant::now();
            assert!(guard.unlock());
            inside
        });
        wait_contenders(&rivals, 2);
        assert!(operator.force_release(token, PATIENCE).unwrap());
        let (believed, inside) = (believing.join().unwrap(), rival.join().unwrap());
        assert!(believed < inside, "both inside for {:?}", believed - inside);
    });
    witness.check(&ours, LossReason::KeyDeleted, "/locks/a");
    assert!(!guard.unlock());
    assert!(!operator.force_release(token, PATIENCE).unwrap());
    assert_eq!(keys(&etcd, INBOXES), Vec::<String>::new());
}

#[test]
fn a_young_hold_is_reached_once_it_has_lasted() {
    let etcd = EtcdServer::start().unwrap();
    let (client, other) = (connect(&etcd), connect(&etcd));
    let holder = mutex(&client, "/locks/a");
    let guard = holder.lock().unwrap();
    let witness = Witness::new(&holder, guard.hold());
    assert!(mutex(&other, "/locks/a").force_release(guard.fencing_token(), PATIENCE).unwrap());
    assert_eq!(keys(&etcd, "/"), Vec::<String>::new());
    nothing_left(&etcd, 1);
    witness.check(&holder, LossReason::KeyDeleted, "/locks/a");
    assert!(!guard.unlock());
}

#[test]
fn a_hold_that_ends_by_itself_meanwhile_is_no_such_hold() {
    let etcd = EtcdServer::start().unwrap();
    let (client, other) = (connect(&etcd), connect(&etcd));
    let guard = mutex(&client, "/locks/a").lock_owned().unwrap();
    let operator = mutex(&other, "/locks/a");
    let token = guard.fencing_token();
    thread::scope(|scope| {
        let forcing = scope.spawn(|| timed(|| operator.force_release(token, PATIENCE)));
        wait_keys(&etcd, INBOXES, 1);
        assert!(guard.unlock());
        let (forced, took) = forcing.join().unwrap();
        assert!(!forced.unwrap());
        assert!(took < Duration::from_secs(2), "{took:?}");
    });
    nothing_left(&etcd, 1);
}

#[test]
fn force_takes_exactly_the_hold_it_names() {
    let etcd = EtcdServer::start().unwrap();
    let (client, other) = (connect(&etcd), connect(&etcd));
    let (ours, operator) = (mutex(&client, "/locks/a"), mutex(&other, "/locks/a"));
    let neighbour = mutex(&client, "/locks/b").lock_owned().unwrap();
    let guard = ours.lock_owned().unwrap();
    let token = guard.fencing_token();
    let witness = Witness::new(&ours, guard.hold());
    thread::sleep(LASTING);
    assert!(operator.force_release(token, Force::Now).unwrap());
    assert!(!operator.force_release(token, Force::Now).unwrap());
    wait_lost(&guard.hold());
    witness.check(&ours, LossReason::KeyDeleted, "/locks/a");
    assert!(!guard.unlock());

    let newer = ours.lock_owned().unwrap();
    assert!(newer.fencing_token() > token);
    for force in [Force::Now, PATIENCE] {
        assert!(!operator.force_release(token, force).unwrap());
        assert!(
            !operator.force_release(neighbour.fencing_token(), force).unwrap(),
            "another path's"
        );
    }
    assert!(newer.verify().unwrap() && newer.unlock());
    assert!(neighbour.verify().unwrap() && neighbour.unlock());
    let too_long = Force::AfterAcknowledgement(Duration::from_secs(4_000));
    let error = operator.force_release(1, too_long).unwrap_err();
    assert!(error.is_invalid_argument());
}

#[test]
fn several_permits_and_sets_go_as_a_whole() {
    let etcd = EtcdServer::start().unwrap();
    let (client, other) = (connect(&etcd), connect(&etcd));
    let permits = Semaphore::new(&client, "/limits/a", 3).unwrap();
    let operator = Semaphore::new(&other, "/limits/a", 3).unwrap();
    for force in [Force::Now, PATIENCE] {
        let kept = permits.acquire().unwrap();
        let two = permits.acquire_many(2).unwrap();
        let token = operator.contenders().unwrap()[1].token;
        thread::sleep(LASTING);
        assert!(operator.force_release(token, force).unwrap());
        eventually(LIMIT, "the two are lost", || !two.is_held());
        assert_eq!(operator.available_permits().unwrap(), 2);
        assert!(!two.release() && kept.release());
    }

    let set = [mutex(&client, "/locks/a"), mutex(&client, "/locks/b")];
    let guard = MultiLock::new(set).unwrap().lock().unwrap();
    let token = guard.fencing_token("/locks/b").unwrap();
    assert!(mutex(&other, "/locks/b").force_release(token, PATIENCE).unwrap());
    assert!(!guard.is_held());
    assert_eq!(guard.loss().unwrap().reason, LossReason::KeyDeleted);
    wait_keys(&etcd, "/locks/", 0);
    assert!(!guard.unlock());
}

#[test]
fn one_that_waits_queues_anew() {
    let etcd = EtcdServer::start().unwrap();
    let (client, other) = (connect(&etcd), connect(&etcd));
    let (ours, operator) = (mutex(&client, "/locks/a"), mutex(&other, "/locks/a"));
    let holder = operator.lock_owned().unwrap();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| ours.lock_owned().unwrap());
        for force in [PATIENCE, Force::Now] {
            wait_contenders(&operator, 2);
            let token = operator.contenders().unwrap()[1].token;
            assert!(operator.force_release(token, force).unwrap());
            eventually(LIMIT, "it queues anew", || {
                let all = operator.contenders().unwrap();
                all.len() == 2 && all[1].token > token
            });
        }
        assert!(holder.verify().unwrap() && holder.unlock());
        assert!(waiter.join().unwrap().unlock());
    });
    assert_eq!(ours.error_count(), 0);
    nothing_left(&etcd, 2);
}

#[test]
fn a_wait_that_was_taken_away_does_not_become_a_hold_in_the_meantime() {
    let etcd = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    let slow = Client::connect([proxy.endpoint()]).unwrap();
    let other = connect(&etcd);
    let (ours, operator) = (mutex(&slow, "/locks/a"), mutex(&other, "/locks/a"));
    let holder = operator.lock_owned().unwrap();
    let waiting = |count| {
        wait_contenders(&operator, count);
        operator.contenders().unwrap()[count - 1].token
    };
    thread::scope(|scope| {
        let waiter = scope.spawn(|| ours.lock_owned().unwrap());
        assert!(operator.force_release(waiting(2), PATIENCE).unwrap(), "the inbox is open");
        let token = waiting(2);
        // The waiter hears at once, and what it does about it takes a while.
        proxy.set(Mode::Delay { up: Duration::from_secs(1), down: Duration::ZERO });
        let forcing = scope.spawn({
            let operator = &operator;
            move || operator.force_release(token, PATIENCE)
        });
        wait_keys(&etcd, INBOXES, 1);
        wait_keys(&etcd, INBOXES, 0);
        assert!(holder.unlock());
        assert!(forcing.join().unwrap().unwrap());
        let guard = waiter.join().unwrap();
        // Its turn may have come just before it knew; then it has lost it in the proper way.
        let is_new = guard.fencing_token() > token;
        assert_eq!(guard.is_held(), is_new, "it holds with a key that is being deleted");
        assert_eq!(guard.unlock(), is_new);
    });
}

#[test]
fn what_came_for_a_hold_before_a_younger_one_opened_the_inbox_is_found() {
    let etcd = EtcdServer::start().unwrap();
    let (client, other) = (connect(&etcd), connect(&etcd));
    let (ours, operator) = (mutex(&client, "/locks/a"), mutex(&other, "/locks/a"));
    let neighbour = mutex(&client, "/locks/b");
    assert!(neighbour.lock().unwrap().unlock());
    let holder = operator.lock_owned().unwrap();
    thread::scope(|scope| {
        // It waits for less than a second, so that it is the younger hold that opens the inbox.
        let waiter = scope.spawn(|| ours.lock_owned().unwrap());
        wait_contenders(&operator, 2);
        let token = operator.contenders().unwrap()[1].token;
        let forcing = scope.spawn({
            let operator = &operator;
            move || operator.force_release(token, PATIENCE)
        });
        eventually(LIMIT, "the request", || other.count_prefix(INBOXES).unwrap() == 1);
        let younger = neighbour.lock_owned().unwrap();
        assert!(holder.unlock());
        assert!(forcing.join().unwrap().unwrap());
        assert!(younger.verify().unwrap() && younger.unlock());
        let guard = waiter.join().unwrap();
        // A slow machine may have let it wait for so long that it queued anew.
        assert_eq!(guard.is_held(), guard.fencing_token() > token);
        drop(guard);
    });
}

/// The twin: holds the lock and says what it hears.
fn hold_and_tell(endpoint: &str) {
    let client = Client::connect([endpoint]).unwrap();
    let mutex = mutex(&client, "/locks/a");
    let guard = mutex.lock_owned().unwrap();
    mutex.add_release_request_listener(|request| println!("\nasked={}", request.from));
    mutex.add_loss_listener(|loss| println!("\nlost={:?}", loss.reason));
    println!("\ntoken={}", guard.fencing_token());
    thread::spawn(move || {
        let hold = guard.hold();
        hold.cancel_token().wait().unwrap();
        println!("\nunlocked={}", guard.unlock());
    });
    until_parent_ends();
}

#[test]
fn another_process_hears_when_it_can_and_keeps_its_hold_when_it_cannot() {
    if let Some(role) = role() {
        return hold_and_tell(&role[0]);
    }
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let operator = Mutex::builder(&client, "/locks/a").client_id("operator").build().unwrap();
    let test = "another_process_hears_when_it_can_and_keeps_its_hold_when_it_cannot";
    let twin = Twin::start(test, &[&etcd.endpoint()]);
    let token: i64 = twin.wait_said("token").parse().unwrap();
    let key = keys(&etcd, "/locks/a/").remove(0);
    assert!(operator.request_release(token).unwrap());
    assert_eq!(twin.wait_said("asked"), "operator");

    twin.freeze();
    let (forced, took) = timed(|| operator.force_release(token, BRIEFLY));
    unheard(forced, &key);
    assert!(took >= ms(700) && took < ms(700) + Duration::from_secs(2), "{took:?}");
    assert_eq!(keys(&etcd, "/locks/a/"), [key.as_str()]);
    nothing_left(&etcd, 1);
    twin.thaw();
    // What was withdrawn is not done later: this one is heard behind it.
    assert!(operator.request_release(token).unwrap());
    assert_eq!(keys(&etcd, "/locks/a/"), [key.as_str()]);
    assert!(twin.said("lost").is_empty());

    assert!(operator.force_release(token, PATIENCE).unwrap());
    assert_eq!(twin.wait_said("lost"), "KeyDeleted");
    assert_eq!(twin.wait_said("unlocked"), "false");
    assert_eq!(twin.said("asked").len(), 2);
    assert_eq!(twin.said("lost").len(), 1);
    assert!(operator.lock().unwrap().unlock());
    nothing_left(&etcd, 2);
}

#[test]
fn another_program_does_not_hear_and_can_only_be_forced_at_once() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let operator = mutex(&client, "/locks/a");
    let mut theirs = etcd.spawn_ctl(["lock", "/locks/a"]).unwrap();
    let mut key = String::new();
    BufReader::new(theirs.stdout.take().unwrap()).read_line(&mut key).unwrap();
    let key = key.trim();
    let token = operator.contenders().unwrap()[0].token;
    unheard(operator.force_release(token, BRIEFLY), key);
    assert_eq!(keys(&etcd, "/locks/a/"), [key]);
    nothing_left(&etcd, 1);
    assert!(operator.force_release(token, Force::Now).unwrap());
    assert!(operator.lock().unwrap().unlock());

    etcd.ctl(["put", "/locks/a/for-ever", ""]).unwrap();
    let token = operator.contenders().unwrap()[0].token;
    let (asked, took) = timed(|| operator.request_release(token));
    unheard(asked, "/locks/a/for-ever");
    assert!(took < Duration::from_secs(1), "a key without a lease has no inbox: {took:?}");
}

#[test]
fn a_holder_that_may_not_watch_its_inbox_is_deaf_and_nothing_else() {
    const PASSWORD: &str = "secret";
    let etcd = EtcdServer::builder().auth("root", PASSWORD).start().unwrap();
    etcd.ctl(["user", "add", "app:secret"]).unwrap();
    etcd.ctl(["role", "add", "app"]).unwrap();
    etcd.ctl(["role", "grant-permission", "--prefix=true", "app", "readwrite", "/locks/"]).unwrap();
    etcd.ctl(["user", "grant-role", "app", "app"]).unwrap();
    let as_user = |user: &str| {
        Client::builder().endpoints([etcd.endpoint()]).user(user, PASSWORD).connect().unwrap()
    };
    let (app, root) = (as_user("app"), as_user("root"));
    let (holder, operator) = (mutex(&app, "/locks/a"), mutex(&root, "/locks/a"));
    let guard = holder.lock().unwrap();
    let (errors, states) = (holder.error_count(), holder.connection_events());
    thread::sleep(LASTING);
    unheard(operator.force_release(guard.fencing_token(), BRIEFLY), &guard.lock_key());
    let refused = holder.request_release(guard.fencing_token()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::PermissionDenied);
    assert!(guard.verify().unwrap());
    assert_eq!((holder.error_count(), states.len()), (errors, 0));
    let hold = guard.hold();
    assert!(operator.force_release(guard.fencing_token(), Force::Now).unwrap());
    assert!(hold.cancel_token().wait_for(LIMIT).unwrap(), "the watch on the own key goes on");
    assert!(!guard.unlock());
}

#[test]
fn namespaces_have_inboxes_of_their_own() {
    let etcd = EtcdServer::start().unwrap();
    let spaced =
        || Client::builder().endpoints([etcd.endpoint()]).namespace("/tenant").connect().unwrap();
    let (client, other) = (spaced(), spaced());
    let (holder, operator) = (mutex(&client, "/locks/a"), mutex(&other, "/locks/a"));
    let guard = holder.lock_owned().unwrap();
    thread::scope(|scope| {
        let asking = scope.spawn(|| operator.request_release(guard.fencing_token()).unwrap());
        wait_keys(&etcd, "/tenant/__etcd-recipes/requests/", 1);
        assert!(asking.join().unwrap());
    });
    assert!(operator.force_release(guard.fencing_token(), PATIENCE).unwrap());
    assert!(!guard.unlock());
    wait_keys(&etcd, "/", 0);
}

// ----- ended by the clock -------------------------------------------------------------------------

const MAX: Duration = Duration::from_millis(1_500);

/// A time that lies between two instants.
struct Span {
    from: Instant,
    to: Instant,
}

impl Span {
    fn of<R>(acquire: impl FnOnce() -> R) -> (Span, R) {
        let from = Instant::now();
        let acquired = acquire();
        (Span { from, to: Instant::now() }, acquired)
    }

    /// A hold that began then ended now: at its time, and no later.
    #[track_caller]
    fn check_end(&self, ended: Instant) {
        let (longest, shortest) = (ended - self.from, ended - self.to);
        assert!(longest >= MAX, "it held for {longest:?} only");
        assert!(shortest < MAX + PROMPT, "it held for {shortest:?}");
    }

    #[track_caller]
    fn wait_end(&self, is_held: impl Fn() -> bool) {
        while is_held() && self.to.elapsed() < MAX + PROMPT {
            thread::sleep(ms(1));
        }
        self.check_end(Instant::now());
    }
}

/// Whoever sees the flag may be quicker than the record of the loss.
#[track_caller]
fn exceeded(loss: impl Fn() -> Option<Loss>) {
    let loss = eventually(LIMIT, "the loss is recorded", loss);
    assert_eq!(loss.reason, LossReason::MaxHoldExceeded);
}

#[test]
fn a_hung_worker_loses_its_lock_although_its_process_lives() {
    let etcd = EtcdServer::start().unwrap();
    let (client, other) = (connect(&etcd), connect(&etcd));
    let ours = builder(&client, "/locks/a").ttl(Duration::from_secs(20)).max_hold(MAX);
    let ours = ours.build().unwrap();
    let rivals = mutex(&other, "/locks/a");
    let (began, guard) = Span::of(|| ours.lock().unwrap());
    let again = ours.lock().unwrap();
    let (hold, key) = (guard.hold(), guard.lock_key());
    let witness = Witness::new(&ours, guard.hold());
    assert!(guard.remaining() <= MAX);
    thread::scope(|scope| {
        let watching = scope.spawn(|| {
            // Nobody asks whether it is held: the worker hangs.
            assert!(hold.cancel_token().wait_for(LIMIT).unwrap());
            Instant::now()
        });
        let rival = rivals.lock_owned().unwrap();
        began.check_end(Instant::now());
        began.check_end(watching.join().unwrap());
        assert!(rival.unlock());
    });
    witness.check(&ours, LossReason::MaxHoldExceeded, "/locks/a");
    wait_keys(&etcd, &key, 0);
    assert!(!again.is_held() && !again.unlock() && !guard.unlock());
    let fresh = ours.lock().unwrap();
    assert!(fresh.unlock(), "a short hold is not bothered");
}

#[test]
fn every_kind_of_hold_can_be_limited() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let lock = RwLock::builder(&client, "/locks/a").max_hold(MAX).build().unwrap();
    let permits = Semaphore::builder(&client, "/limits/a", 2).max_hold(MAX).build().unwrap();

    let (reads, read) = Span::of(|| lock.read_owned().unwrap());
    let (holds, permit) = Span::of(|| permits.acquire_many(2).unwrap());
    let (reader, holder) = (read.hold(), permit.hold());
    reads.wait_end(|| reader.is_held());
    holds.wait_end(|| holder.is_held());
    exceeded(|| reader.loss());
    exceeded(|| holder.loss());
    assert!(reader.cancel_token().wait_for(LIMIT).unwrap());
    assert!(holder.cancel_token().wait_for(LIMIT).unwrap());
    assert!(!read.unlock() && !permit.release());
    eventually(LIMIT, "the permits are back", || permits.available_permits().unwrap() == 2);

    let (writes, write) = Span::of(|| lock.write_owned().unwrap());
    let hold = write.hold();
    writes.wait_end(|| hold.is_held());
    exceeded(|| hold.loss());
    assert!(!write.unlock());
    wait_keys(&etcd, "/locks/", 0);

    for kind in ["mutex", "rwlock", "semaphore"] {
        let none = Duration::ZERO;
        let error = match kind {
            "mutex" => Mutex::builder(&client, "/a").max_hold(none).build().map(drop),
            "rwlock" => RwLock::builder(&client, "/a").max_hold(none).build().map(drop),
            _ => Semaphore::builder(&client, "/a", 1).max_hold(none).build().map(drop),
        };
        assert!(error.unwrap_err().is_invalid_argument(), "{kind}");
    }
}

#[test]
fn the_shortest_of_a_set_ends_the_set() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let limited = builder(&client, "/locks/b").max_hold(MAX).build().unwrap();
    let set = MultiLock::new([mutex(&client, "/locks/a"), limited]).unwrap();
    let (began, guard) = Span::of(|| set.lock().unwrap());
    assert!(guard.remaining() <= MAX);
    assert!(guard.cancel_token().wait_for(LIMIT).unwrap());
    began.check_end(Instant::now());
    let loss = guard.loss().unwrap();
    assert_eq!((loss.reason, loss.path.as_str()), (LossReason::MaxHoldExceeded, "/locks/b"));
    wait_keys(&etcd, "/locks/", 0);
    assert!(!guard.is_held() && !guard.unlock());
}

#[test]
fn the_limit_is_kept_on_a_clock_that_goes_on_while_the_machine_sleeps() {
    let etcd = EtcdServer::start().unwrap();
    let clock = TestClock::new();
    let client = Client::builder().endpoints([etcd.endpoint()]).clock(&clock).connect().unwrap();
    let mutex = Mutex::builder(&client, "/locks/a")
        .ttl(Duration::from_secs(60))
        .max_hold(Duration::from_secs(10))
        .build()
        .unwrap();
    let guard = mutex.lock().unwrap();
    clock.jump(Duration::from_secs(9));
    assert!(guard.is_held());
    clock.jump(Duration::from_secs(1));
    assert!(!guard.is_held(), "whoever asks first finds it");
    exceeded(|| guard.loss());
    assert!(!guard.unlock());
    let guard = mutex.lock().unwrap();
    let token = guard.hold().cancel_token().clone();
    clock.jump(Duration::from_secs(10));
    assert!(token.wait_for(PROMPT).unwrap(), "nobody has to ask");
    assert!(!guard.unlock());
}
