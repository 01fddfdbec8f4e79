//! Semaphores: never more inside than the path has permits, in the order of arrival; and how the
//! number of permits is agreed on, changed and deleted.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use etcd_recipes::testing::{EtcdServer, eventually};
use etcd_recipes::{
    CancelToken, Client, ContenderMode, ErrorKind, LossReason, Mutex, Permit, RwLock, Semaphore,
};
use support::*;

/// A TTL that nobody waits out here.
const LONG: Duration = Duration::from_secs(20);

const SECOND: Duration = Duration::from_secs(1);

const PATH: &str = "/limits/a";
const HOLDERS: &str = "/limits/a/holders/";

fn semaphore(client: &Client, permits: u32) -> Semaphore {
    Semaphore::builder(client, PATH, permits).ttl(LONG).build().unwrap()
}

/// Waits until so many keys stand in line.
fn wait_line(semaphore: &Semaphore, count: usize) {
    eventually(LIMIT, "keys in line", || match semaphore.contenders() {
        Ok(all) if all.len() == count => Ok(()),
        other => Err(other),
    });
}

/// How many keys there are up to and with this one, by create revision, from one read.
fn rank(client: &Client, key: &str) -> usize {
    let all = client.get_prefix(HOLDERS).unwrap();
    let own = all.iter().find(|kv| kv.key == key.as_bytes()).expect("the key stands");
    all.iter().filter(|kv| kv.create_revision <= own.create_revision).count()
}

/// A gauge of how many are inside, and how many ever were.
#[derive(Default)]
struct Inside {
    now: AtomicUsize,
    most: AtomicUsize,
}

impl Inside {
    fn enter(&self, permits: usize) {
        let now = self.now.fetch_add(permits, Ordering::AcqRel) + permits;
        self.most.fetch_max(now, Ordering::AcqRel);
    }

    fn leave(&self, permits: usize) {
        self.now.fetch_sub(permits, Ordering::AcqRel);
    }

    fn most(&self) -> usize {
        self.most.load(Ordering::Acquire)
    }
}

// ----- who gets in ----------------------------------------------------------------------------

#[test]
fn never_more_are_inside_than_there_are_permits() {
    let etcd = EtcdServer::start().unwrap();
    let clients = [connect(&etcd), connect(&etcd), connect(&etcd)];
    let inside = Inside::default();
    thread::scope(|scope| {
        for worker in 0..12 {
            let (client, inside) = (&clients[worker % 3], &inside);
            scope.spawn(move || {
                // Half of the workers share nothing but the path.
                let semaphore = semaphore(client, 3);
                for round in 0..15 {
                    let many = 1 + (worker + round) % 3;
                    let permit = semaphore.acquire_many(u32::try_from(many).unwrap()).unwrap();
                    inside.enter(many);
                    assert_eq!(permit.count(), many);
                    thread::sleep(ms(2));
                    assert!(permit.is_held());
                    inside.leave(many);
                    assert!(permit.release());
                }
            });
        }
    });
    println!("at most {} inside", inside.most());
    assert_eq!(inside.most(), 3);
    assert!(keys(&etcd, HOLDERS).is_empty());
}

#[test]
fn the_keys_are_those_of_the_jvm_library() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let semaphore =
        Semaphore::builder(&client, PATH, 258).ttl(LONG).client_id("worker 7").build().unwrap();
    let permit = semaphore.acquire_many(2).unwrap();
    let all = client.get_prefix("/limits/").unwrap();
    let (count, holders) = all.split_last().unwrap();
    assert_eq!(count.key, b"/limits/a/permits");
    assert_eq!(count.value, [0, 0, 1, 2]);
    assert_eq!(count.lease, 0);
    assert_eq!(holders.len(), 2);
    for holder in holders {
        assert!(holder.key.starts_with(b"/limits/a/holders/worker 7:"), "{holder:?}");
        assert_eq!(holder.value, b"worker 7");
        assert_ne!(holder.lease, 0);
    }
    assert_eq!(holders[0].create_revision, holders[1].create_revision);
    assert_eq!(permit.lock_key().as_bytes(), holders[0].key);
    let listed = semaphore.contenders().unwrap();
    assert_eq!(listed.len(), 2);
    assert!(listed.iter().all(|one| one.is_holder && one.client_id == "worker 7"));
    assert!(listed.iter().all(|one| one.mode == ContenderMode::Permit));
    assert!(permit.release());
    // What the JVM library would have left of a holder of its own counts as one.
    etcd.ctl(["put", "/limits/b/holders/jvm:1", "jvm", "--lease", &lease(&etcd)]).unwrap();
    let beside = Semaphore::builder(&client, "/limits/b", 1).ttl(LONG).build().unwrap();
    assert!(beside.try_acquire().unwrap().is_none());
    etcd.ctl(["del", "/limits/b/holders/jvm:1"]).unwrap();
    assert!(beside.try_acquire().unwrap().unwrap().release());
}

/// A lease that somebody else was granted, in hexadecimal.
fn lease(etcd: &EtcdServer) -> String {
    etcd.ctl(["lease", "grant", "60"]).unwrap().split(' ').nth(1).unwrap().to_owned()
}

#[test]
fn permits_are_given_in_the_order_of_arrival() {
    let etcd = EtcdServer::start().unwrap();
    let clients = [connect(&etcd), connect(&etcd)];
    let observer = semaphore(&connect(&etcd), 1);
    let held = observer.acquire().unwrap();
    let order = parking_lot::Mutex::new(Vec::new());
    thread::scope(|scope| {
        for number in 0..10 {
            let semaphore = semaphore(&clients[number % 2], 1);
            let order = &order;
            scope.spawn(move || {
                let permit = semaphore.acquire().unwrap();
                order.lock().push(number);
                assert!(permit.release());
            });
            wait_line(&observer, number + 2);
        }
        assert!(held.release());
    });
    assert_eq!(order.into_inner(), (0..10).collect::<Vec<_>>());
}

#[test]
fn a_call_for_many_is_not_passed_by_one_for_fewer() {
    let etcd = EtcdServer::start().unwrap();
    let (ours, theirs) = (connect(&etcd), connect(&etcd));
    let (semaphore, other) = (semaphore(&ours, 3), semaphore(&theirs, 3));
    let (first, second) = (semaphore.acquire().unwrap(), semaphore.acquire().unwrap());
    thread::scope(|scope| {
        let many = scope.spawn(|| other.acquire_many(2).unwrap());
        wait_line(&semaphore, 4);
        let one = scope.spawn(|| semaphore.acquire().unwrap());
        wait_line(&semaphore, 5);
        assert_eq!(semaphore.available_permits().unwrap(), 0, "the free one is promised");
        assert!(semaphore.try_acquire().unwrap().is_none());
        assert!(other.try_acquire_for(ms(300)).unwrap().is_none());
        assert!(!many.is_finished() && !one.is_finished());
        assert!(first.release());
        let many = many.join().unwrap();
        assert_eq!(many.count(), 2);
        assert!(many.verify().unwrap() && !one.is_finished());
        assert_eq!(rank(&ours, &many.lock_key()), 3);
        assert!(second.release());
        let one = one.join().unwrap();
        assert!(many.release() && one.release());
    });
    assert!(keys(&etcd, HOLDERS).is_empty());
}

#[test]
fn asking_for_two_with_one_free_takes_none() {
    let etcd = EtcdServer::start().unwrap();
    let (ours, theirs) = (connect(&etcd), connect(&etcd));
    let (semaphore, other) = (semaphore(&ours, 3), semaphore(&theirs, 3));
    let held = semaphore.acquire_many(2).unwrap();
    let before = keys(&etcd, "/limits/");
    let (tried, took) = timed(|| other.try_acquire_many_for(2, ms(300)).unwrap());
    assert!(tried.is_none());
    assert!(ms(300) <= took && took < ms(300) + PROMPT, "{took:?}");
    assert_eq!(keys(&etcd, "/limits/"), before, "a key was left behind");
    let revision = etcd.revision().unwrap();
    assert!(other.try_acquire_many(2).unwrap().is_none());
    assert_eq!(etcd.revision().unwrap(), revision, "a busy try has written");
    assert_eq!(other.available_permits().unwrap(), 1);
    let last = other.try_acquire().unwrap().unwrap();
    assert!(held.is_held() && held.release() && last.release());
    assert!(other.try_acquire_many(3).unwrap().unwrap().release());
}

#[test]
fn a_hundred_permits_are_taken_and_given_back_at_once() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let semaphore = semaphore(&client, 150);
    let many = semaphore.acquire_many(100).unwrap();
    assert_eq!(many.count(), 100);
    assert_eq!(semaphore.available_permits().unwrap(), 50);
    assert!(semaphore.try_acquire_many(51).unwrap().is_none());
    thread::scope(|scope| {
        let waiter = scope.spawn(|| semaphore.acquire_many(100).unwrap());
        wait_line(&semaphore, 200);
        assert!(many.verify().unwrap() && many.release());
        let many = waiter.join().unwrap();
        assert!(many.verify().unwrap() && many.release());
    });
    assert!(keys(&etcd, HOLDERS).is_empty());
}

#[test]
fn a_thousand_racing_tries_never_admit_more_than_three() {
    let etcd = EtcdServer::start().unwrap();
    let clients = [connect(&etcd), connect(&etcd), connect(&etcd)];
    let inside = Inside::default();
    let admitted = AtomicUsize::new(0);
    assert!(semaphore(&clients[0], 3).acquire().unwrap().release());
    thread::scope(|scope| {
        for worker in 0..8 {
            let (client, inside, admitted) = (&clients[worker % 3], &inside, &admitted);
            scope.spawn(move || {
                let semaphore = semaphore(client, 3);
                for _ in 0..125 {
                    let Some(permit) = semaphore.try_acquire().unwrap() else { continue };
                    inside.enter(1);
                    let rank = rank(client, &permit.lock_key());
                    assert!(rank <= 3, "the store has it as number {rank}");
                    assert!(permit.is_held());
                    inside.leave(1);
                    admitted.fetch_add(1, Ordering::AcqRel);
                    assert!(permit.release());
                }
            });
        }
    });
    println!("{} of 1000 admitted, at most {} at a time", admitted.into_inner(), inside.most());
    assert_eq!(inside.most(), 3);
    assert!(keys(&etcd, HOLDERS).is_empty(), "a try left a key");
}

#[test]
fn a_permit_belongs_to_no_thread() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let semaphore = semaphore(&client, 2);
    let permit = semaphore.acquire().unwrap();
    let view = permit.hold();
    assert!(permit.is_held() && permit.verify().unwrap() && view.is_held());
    assert!(permit.remaining() > Duration::ZERO && permit.loss().is_none());
    assert!(thread::spawn(move || permit.release()).join().unwrap());
    assert!(!view.is_held() && view.remaining().is_zero() && view.loss().is_none());
    assert!(!view.cancel_token().is_cancelled(), "a release is no loss");
    // One thread may hold several, and dropping gives back as well.
    let (one, two) = (semaphore.acquire().unwrap(), semaphore.acquire().unwrap());
    assert!(semaphore.try_acquire().unwrap().is_none());
    drop((one, two));
    assert!(keys(&etcd, HOLDERS).is_empty());
    assert_eq!(semaphore.with_permit(Permit::count).unwrap(), 1);
    let lost = semaphore.with_permit(|permit| {
        client.delete(permit.lock_key()).unwrap();
    });
    assert_eq!(lost.unwrap_err().kind(), ErrorKind::Lost);
    let panicked = thread::spawn({
        let semaphore = semaphore.clone();
        move || semaphore.with_permit(|_| panic!("with a permit")).unwrap()
    });
    assert!(panicked.join().is_err());
    assert!(keys(&etcd, HOLDERS).is_empty());
}

#[test]
fn a_cancelled_or_closed_wait_takes_its_keys_along() {
    let etcd = EtcdServer::start().unwrap();
    let (ours, theirs) = (connect(&etcd), connect(&etcd));
    let (holder, waiting) = (semaphore(&ours, 2), semaphore(&theirs, 2));
    let held = holder.acquire().unwrap();
    let before = keys(&etcd, HOLDERS);
    let token = CancelToken::new();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| token.scope(|| waiting.acquire_many(2)).unwrap_err());
        wait_line(&holder, 3);
        token.cancel();
        assert!(waiter.join().unwrap().is_interrupted());
        assert_eq!(keys(&etcd, HOLDERS), before);
        let waiter = scope.spawn(|| waiting.acquire_many(2).unwrap_err());
        wait_line(&holder, 3);
        waiting.close().unwrap();
        assert_eq!(waiter.join().unwrap().kind(), ErrorKind::Closed);
        eventually(LIMIT, "the keys are gone", || keys(&etcd, HOLDERS) == before);
    });
    holder.close().unwrap();
    assert_eq!(held.loss().unwrap().reason, LossReason::Closed);
    assert!(!held.release());
    assert!(keys(&etcd, HOLDERS).is_empty());
}

// ----- the number of permits ------------------------------------------------------------------

#[test]
fn the_first_writer_fixes_the_number_and_the_other_is_told_both() {
    let etcd = EtcdServer::start().unwrap();
    let clients = [connect(&etcd), connect(&etcd)];
    for round in 0..20 {
        let path = format!("/limits/{round}");
        let start = std::sync::Barrier::new(2);
        let race = |client: &Client, permits| {
            let semaphore = Semaphore::builder(client, &*path, permits).ttl(LONG).build().unwrap();
            start.wait();
            semaphore.acquire().map(Permit::release).map_err(|error| error.kind())
        };
        let outcomes = thread::scope(|scope| {
            let two = scope.spawn(|| race(&clients[0], 2));
            let five = scope.spawn(|| race(&clients[1], 5));
            [two.join().unwrap(), five.join().unwrap()]
        });
        let stands = clients[0].get(format!("{path}/permits")).unwrap().unwrap().value;
        let refused = |expected, found| Err(ErrorKind::PermitMismatch { expected, found });
        match outcomes {
            [Ok(true), other] => {
                assert_eq!((other, stands), (refused(5, 2), vec![0, 0, 0, 2]));
            }
            [other, Ok(true)] => {
                assert_eq!((other, stands), (refused(2, 5), vec![0, 0, 0, 5]));
            }
            both => panic!("{both:?}"),
        }
        assert!(keys(&etcd, &format!("{path}/holders/")).is_empty());
    }
}

#[test]
fn another_number_is_refused_by_every_call_that_takes() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let permit = semaphore(&client, 3).acquire().unwrap();
    let wrong = semaphore(&client, 4);
    let kind = ErrorKind::PermitMismatch { expected: 4, found: 3 };
    let revision = etcd.revision().unwrap();
    assert_eq!(wrong.acquire().unwrap_err().kind(), kind);
    assert_eq!(wrong.try_acquire().unwrap_err().kind(), kind);
    assert_eq!(wrong.try_acquire_for(SECOND).unwrap_err().kind(), kind);
    assert_eq!(wrong.acquire_many(2).unwrap_err().kind(), kind);
    let error = wrong.try_acquire_many_for(2, SECOND).unwrap_err();
    assert_eq!(error.kind(), kind);
    let text = error.to_string();
    assert!(text.contains("4 permits") && text.contains("has 3"), "{text}");
    assert_eq!(etcd.revision().unwrap(), revision, "a refused call has written");
    assert_eq!(wrong.available_permits().unwrap(), 2, "what stands there counts");
    assert!(permit.release());
}

#[test]
fn growing_lets_in_waiters_here_and_elsewhere_within_a_second() {
    let etcd = EtcdServer::start().unwrap();
    let (ours, theirs) = (connect(&etcd), connect(&etcd));
    let (semaphore, other) = (semaphore(&ours, 1), semaphore(&theirs, 1));
    let held = semaphore.acquire().unwrap();
    let enter = |semaphore: &Semaphore| (semaphore.acquire().unwrap(), Instant::now());
    let mut inside = Vec::new();
    thread::scope(|scope| {
        let here = scope.spawn(|| enter(&semaphore));
        wait_line(&semaphore, 2);
        let there = scope.spawn(|| enter(&other));
        wait_line(&semaphore, 3);
        let last = scope.spawn(|| enter(&other));
        wait_line(&semaphore, 4);
        let resized = Instant::now();
        assert_eq!(semaphore.resize(3).unwrap(), Some(1));
        for waiter in [here, there] {
            let (permit, entered) = waiter.join().unwrap();
            println!("in {:?} after the resize", entered - resized);
            assert!(entered - resized < SECOND);
            assert!(permit.verify().unwrap() && !last.is_finished());
            inside.push(permit);
        }
        assert!(held.release());
        assert!(last.join().unwrap().0.release());
    });
    assert!(inside.into_iter().all(Permit::release));
}

#[test]
fn shrinking_takes_nothing_away_and_admits_nobody_until_few_enough_are_out() {
    let etcd = EtcdServer::start().unwrap();
    let (ours, theirs) = (connect(&etcd), connect(&etcd));
    let (semaphore, other) = (semaphore(&ours, 3), semaphore(&theirs, 3));
    let held: Vec<_> = (0..3).map(|_| semaphore.acquire().unwrap()).collect();
    let losses = semaphore.loss_events();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| other.acquire().unwrap());
        wait_line(&semaphore, 4);
        assert_eq!(other.resize(1).unwrap(), Some(3));
        assert!(held.iter().all(|permit| permit.is_held() && permit.verify().unwrap()));
        assert_eq!(semaphore.available_permits().unwrap(), 0);
        let mut held = held.into_iter();
        for _ in 0..2 {
            assert!(held.next().unwrap().release(), "shrinking revoked a permit");
            assert!(semaphore.try_acquire().unwrap().is_none());
            assert!(semaphore.try_acquire_for(ms(200)).unwrap().is_none());
            assert!(!waiter.is_finished());
        }
        assert!(held.next().unwrap().release());
        let permit = waiter.join().unwrap();
        assert!(semaphore.try_acquire().unwrap().is_none());
        assert!(permit.release());
    });
    assert!(losses.try_recv().is_err());
}

#[test]
fn who_has_agreed_follows_a_resize_and_who_has_not_is_refused() {
    let etcd = EtcdServer::start().unwrap();
    let (ours, theirs) = (connect(&etcd), connect(&etcd));
    let (agreed, admin) = (semaphore(&ours, 2), semaphore(&theirs, 2));
    assert!(agreed.acquire().unwrap().release());
    assert_eq!(admin.resize(4).unwrap(), Some(2));
    let held: Vec<_> = (0..4).map(|_| agreed.try_acquire().unwrap().unwrap()).collect();
    assert!(agreed.try_acquire().unwrap().is_none());
    drop(held);
    let kind = ErrorKind::PermitMismatch { expected: 2, found: 4 };
    assert_eq!(semaphore(&ours, 2).acquire().unwrap_err().kind(), kind);
    assert!(semaphore(&ours, 4).acquire().unwrap().release());
    assert!(admin.acquire_many(4).unwrap().release(), "who has resized knows the number");
    // A resize may also be the first to write it.
    let fresh = Semaphore::builder(&ours, "/limits/fresh", 1).ttl(LONG).build().unwrap();
    assert_eq!(fresh.resize(2).unwrap(), None);
    assert!(fresh.acquire_many(2).unwrap().release());
    assert_eq!(fresh.resize(0).unwrap_err().kind(), ErrorKind::InvalidArgument);
}

#[test]
fn as_many_as_a_resize_allows_may_be_taken_at_once() {
    let etcd = EtcdServer::start().unwrap();
    let (ours, theirs) = (connect(&etcd), connect(&etcd));
    let (agreed, admin) = (semaphore(&ours, 2), semaphore(&theirs, 2));
    assert!(agreed.acquire().unwrap().release());
    admin.resize(5).unwrap();
    assert!(agreed.acquire_many(5).unwrap().release(), "it follows");
    admin.resize(3).unwrap();
    let calls: [fn(&Semaphore) -> etcd_recipes::Result<bool>; 3] = [
        |semaphore| semaphore.acquire_many(4).map(Permit::release),
        |semaphore| Ok(semaphore.try_acquire_many(4)?.is_some()),
        |semaphore| Ok(semaphore.try_acquire_many_for(4, LIMIT)?.is_some()),
    ];
    for call in calls {
        let error = call(&agreed).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        assert!(error.to_string().contains("4 permits at once, of 3"), "{error}");
        assert!(keys(&etcd, HOLDERS).is_empty());
        // As if it had not noticed the last one.
        admin.resize(5).unwrap();
        assert!(agreed.acquire_many(5).unwrap().release());
        admin.resize(3).unwrap();
    }
}

#[test]
fn a_waiter_that_shrinking_leaves_no_chance_stands_in_nobodys_way() {
    let etcd = EtcdServer::start().unwrap();
    let (ours, theirs) = (connect(&etcd), connect(&etcd));
    let (semaphore, other) = (semaphore(&ours, 3), semaphore(&theirs, 3));
    let held = semaphore.acquire().unwrap();
    thread::scope(|scope| {
        let all = scope.spawn(|| other.acquire_many(3));
        wait_line(&semaphore, 4);
        let one = scope.spawn(|| semaphore.acquire().unwrap().release());
        wait_line(&semaphore, 5);
        semaphore.resize(2).unwrap();
        let error = all.join().unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        assert!(one.join().unwrap());
    });
    assert!(held.release());
    assert!(keys(&etcd, HOLDERS).is_empty());
}

#[test]
fn what_is_in_use_is_not_deleted() {
    let etcd = EtcdServer::start().unwrap();
    let (ours, theirs) = (connect(&etcd), connect(&etcd));
    let holder = semaphore(&ours, 1);
    assert!(!Semaphore::delete(&theirs, PATH).unwrap(), "there is nothing yet");
    let permit = holder.acquire().unwrap();
    assert!(!Semaphore::delete(&theirs, PATH).unwrap());
    thread::scope(|scope| {
        let waiter = scope.spawn(|| holder.acquire().unwrap().release());
        wait_line(&holder, 2);
        assert!(!Semaphore::delete(&theirs, PATH).unwrap());
        assert!(permit.release() && waiter.join().unwrap());
    });
    assert_eq!(keys(&etcd, "/limits/"), ["/limits/a/permits"]);
    assert!(Semaphore::delete(&theirs, PATH).unwrap());
    assert!(keys(&etcd, "/limits/").is_empty());
    assert!(!Semaphore::delete(&theirs, PATH).unwrap());
    // Whoever comes now is the first: any number will do, and who was here before goes on.
    assert!(semaphore(&theirs, 7).acquire().unwrap().release());
    assert!(holder.acquire_many(7).unwrap().release());
    assert!(Semaphore::delete(&ours, PATH).unwrap());
    assert!(holder.acquire().unwrap().release());
    assert_eq!(theirs.get("/limits/a/permits").unwrap().unwrap().value, [0, 0, 0, 7]);
    let error = Semaphore::delete(&ours, "/limits/").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
}

#[test]
fn what_cannot_be_meant_is_refused_at_once() {
    let client = Client::connect(["http://127.0.0.1:1"]).unwrap();
    let refused = |result: etcd_recipes::Result<()>| {
        assert_eq!(result.unwrap_err().kind(), ErrorKind::InvalidArgument);
    };
    let begun = Instant::now();
    refused(Semaphore::new(&client, PATH, 0).map(drop));
    refused(Semaphore::new(&client, "/limits/", 1).map(drop));
    let semaphore = Semaphore::new(&client, PATH, 150).unwrap();
    refused(semaphore.acquire_many(0).map(drop));
    refused(semaphore.try_acquire_many(101).map(drop));
    refused(semaphore.resize(0).map(drop));
    let two = Semaphore::new(&client, PATH, 2).unwrap();
    refused(two.try_acquire_many_for(3, LIMIT).map(drop));
    assert!(begun.elapsed() < PROMPT, "{:?}", begun.elapsed());
}

// ----- others at the path ---------------------------------------------------------------------

#[test]
fn another_kind_of_recipe_at_the_path_is_named() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let mutex = Mutex::builder(&client, PATH).ttl(LONG).build().unwrap();
    let guard = mutex.lock().unwrap();
    let foreign = |result: etcd_recipes::Result<()>, key: &str| {
        let error = result.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ForeignKey, "{error}");
        assert!(error.to_string().contains(key), "`{key}` is not named in: {error}");
    };
    foreign(semaphore(&client, 2).acquire().map(drop), &guard.lock_key());
    foreign(semaphore(&client, 2).try_acquire().map(drop), &guard.lock_key());
    assert_eq!(keys(&etcd, "/limits/"), [guard.lock_key()]);
    assert!(guard.unlock());
    assert!(semaphore(&client, 2).acquire().unwrap().release());
    foreign(mutex.lock().map(drop), "/limits/a/permits");
    let lock = RwLock::builder(&client, PATH).ttl(LONG).build().unwrap();
    foreign(lock.read().map(drop), "/limits/a/permits");
    for value in ["seven", ""] {
        etcd.ctl(["put", "/limits/a/permits", value]).unwrap();
        foreign(semaphore(&client, 2).acquire().map(drop), "/limits/a/permits");
        foreign(semaphore(&client, 2).try_acquire().map(drop), "/limits/a/permits");
    }
    assert_eq!(keys(&etcd, "/limits/"), ["/limits/a/permits"]);
}

#[test]
fn holders_without_a_lease_block_only_when_they_leave_no_room() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let semaphore = semaphore(&client, 2);
    let foreign = |result: etcd_recipes::Result<()>| {
        let error = result.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ForeignKey, "{error}");
        assert!(error.to_string().contains("/limits/a/holders/old"), "{error}");
    };
    etcd.ctl(["put", "/limits/a/holders/old:1", "old"]).unwrap();
    let permit = semaphore.acquire().unwrap();
    assert!(semaphore.try_acquire().unwrap().is_none());
    assert!(semaphore.try_acquire_for(ms(300)).unwrap().is_none(), "one may still go");
    foreign(semaphore.acquire_many(2).map(drop));
    thread::scope(|scope| {
        let waiter = scope.spawn(|| semaphore.acquire().unwrap().release());
        wait_line(&semaphore, 3);
        assert!(permit.release() && waiter.join().unwrap());
    });
    etcd.ctl(["put", "/limits/a/holders/old:2", "old"]).unwrap();
    assert!(semaphore.try_acquire().unwrap().is_none());
    foreign(semaphore.acquire().map(drop));
    assert_eq!(keys(&etcd, HOLDERS).len(), 2, "a key was left behind");
    etcd.ctl(["del", "/limits/a/holders/old:1"]).unwrap();
    assert!(semaphore.acquire().unwrap().release());
}

// ----- interrupting ---------------------------------------------------------------------------

fn interrupting(client: &Client) -> Semaphore {
    Semaphore::builder(client, PATH, 3).ttl(LONG).interrupt_on_permit_loss(true).build().unwrap()
}

/// Takes the permit's key away and lets it notice.
fn lose(client: &Client, permit: &Permit) {
    let key = permit.lock_key();
    CancelToken::shield(|| assert!(client.delete(key).unwrap()));
    assert!(!permit.verify().unwrap());
}

#[test]
fn a_lost_permit_interrupts_its_thread_only_if_asked_to() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let patient = semaphore(&client, 3);
    let permit = patient.acquire().unwrap();
    lose(&client, &permit);
    assert!(patient.available_permits().is_ok(), "by default nothing is interrupted");
    assert!(!permit.release());

    let semaphore = interrupting(&client);
    let (permit, other) = (semaphore.acquire().unwrap(), semaphore.try_acquire().unwrap().unwrap());
    assert!(client.get("/data").is_ok());
    lose(&client, &permit);
    assert!(client.get("/data").unwrap_err().is_interrupted());
    assert!(semaphore.acquire().unwrap_err().is_interrupted());
    assert!(!permit.verify().unwrap(), "lost is the better answer");
    assert!(thread::scope(|scope| scope.spawn(|| client.get("/data").is_ok()).join().unwrap()));
    assert!(!permit.release());
    assert!(client.get("/data").is_ok(), "with the permit the scope is over");
    assert!(other.verify().unwrap() && other.release());
    let permit = semaphore.acquire_many(2).unwrap();
    lose(&client, &permit);
    assert!(client.get("/data").unwrap_err().is_interrupted());
    drop(permit);
    assert!(client.get("/data").is_ok());
}

#[test]
fn the_thread_that_acquired_is_interrupted_until_another_has_released() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let semaphore = interrupting(&client);
    let permit = semaphore.acquire().unwrap();
    let (send, received) = crossbeam_channel::bounded::<Permit>(1);
    let (go, gone) = crossbeam_channel::bounded::<()>(0);
    thread::scope(|scope| {
        let other = scope.spawn(|| {
            let permit = received.recv().unwrap();
            lose(&client, &permit);
            assert!(client.get("/data").is_ok(), "the permit's new thread is not interrupted");
            let _ = gone.recv();
            permit.release()
        });
        send.send(permit).unwrap();
        // The wait is woken by the loss.
        let (waited, took) = timed(|| CancelToken::new().wait_for(LIMIT));
        assert!(waited.unwrap_err().is_interrupted() && took < LIMIT);
        assert!(client.get("/data").unwrap_err().is_interrupted());
        drop(go);
        assert!(!other.join().unwrap());
    });
    assert!(client.get("/data").is_ok());
    let permit = semaphore.acquire().unwrap();
    assert!(thread::spawn(move || permit.release()).join().unwrap());
    assert!(client.get("/data").is_ok());
}
