//! Every way to lose a hold against one's will, and everything that is told when it happens.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{bounded, unbounded};
use etcd_recipes::testing::{EtcdServer, FaultProxy, Mode, TestClock, eventually};
use etcd_recipes::{
    CancelToken, Client, ConnectionState, ErrorKind, FencedTxn, Hold, Loss, LossListener,
    LossReason, Mutex, MutexGuard, Op, Recipe, Txn,
};
use support::*;

/// Longer than a hold goes without a watch on its own key.
const LASTING: Duration = Duration::from_millis(1_300);

fn wait_lost(hold: &Hold) {
    eventually(LIMIT, "the hold is lost", || !hold.is_held());
}

/// What a guard of a lost hold answers, whatever the reason.
fn check_guard(guard: MutexGuard<'_>, mutex: &Mutex) {
    assert!(!guard.is_held());
    assert!(!guard.verify().unwrap());
    assert!(!guard.put("/data", "late").unwrap());
    let txn = Txn::new().and_then([Op::put("/data", "late")]);
    assert_eq!(guard.txn(txn).unwrap(), FencedTxn::Fenced);
    assert!(!mutex.is_held_by_current_thread());
    assert_eq!(mutex.hold_count(), 1);
    assert_eq!(mutex.lock().unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(mutex.try_lock().unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(mutex.try_lock_for(ms(10)).unwrap_err().kind(), ErrorKind::Lost);
    assert!(!guard.unlock());
    assert_eq!(mutex.hold_count(), 0);
}

#[test]
fn a_revoked_lease_is_a_loss() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let (mutex, other) = (short(&client, "/locks/a"), short(&client, "/locks/b"));
    let guard = mutex.lock().unwrap();
    let neighbour = other.lock().unwrap();
    let witness = Witness::new(&mutex, guard.hold());
    revoke_lease_of(&etcd, &guard.lock_key());
    let ((), took) = timed(|| wait_lost(&guard.hold()));
    assert!(took < Duration::from_secs(1) + ms(300), "{took:?} for a renewal every T/3");
    witness.check(&mutex, LossReason::LeaseGone, "/locks/a");
    check_guard(guard, &mutex);
    eventually(LIMIT, "all holds of the lease are lost", || !neighbour.is_held());
    assert!(!neighbour.unlock());
    assert!(client.get("/data").unwrap().is_none(), "a fenced write was written");
}

#[test]
fn a_revoked_lease_is_a_loss_for_a_lasting_hold_at_once() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    // A long TTL, so that only the watch on the own key can tell so soon.
    let mutex = Mutex::new(&client, "/locks/a").unwrap();
    let guard = mutex.lock().unwrap();
    let witness = Witness::new(&mutex, guard.hold());
    thread::sleep(LASTING);
    revoke_lease_of(&etcd, &guard.lock_key());
    let ((), took) = timed(|| wait_lost(&guard.hold()));
    assert!(took < PROMPT, "{took:?}");
    witness.check(&mutex, LossReason::LeaseGone, "/locks/a");
    check_guard(guard, &mutex);
    assert!(mutex.lock().unwrap().unlock(), "the dead lease serves no new hold");
}

#[test]
fn a_deleted_key_is_a_loss_told_at_once_to_a_lasting_hold() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let mutex = Mutex::new(&client, "/locks/a").unwrap();
    let other = Mutex::new(&client, "/locks/b").unwrap();
    let guard = mutex.lock().unwrap();
    let neighbour = other.lock().unwrap();
    let witness = Witness::new(&mutex, guard.hold());
    thread::sleep(LASTING);
    etcd.ctl(["del", &guard.lock_key()]).unwrap();
    let ((), took) = timed(|| wait_lost(&guard.hold()));
    assert!(took < PROMPT, "{took:?}");
    witness.check(&mutex, LossReason::KeyDeleted, "/locks/a");
    check_guard(guard, &mutex);
    assert!(neighbour.verify().unwrap() && neighbour.unlock(), "the lease and the rest live on");
}

#[test]
fn a_deleted_key_of_a_young_hold_shows_in_every_question() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let mutex = Mutex::new(&client, "/locks/a").unwrap();
    let delete = |guard: &MutexGuard<'_>| {
        assert!(client.delete(guard.lock_key()).unwrap());
    };

    let guard = mutex.lock().unwrap();
    delete(&guard);
    assert!(!guard.unlock(), "etcd answered that the key was gone");

    let guard = mutex.lock().unwrap();
    let witness = Witness::new(&mutex, guard.hold());
    delete(&guard);
    assert!(!guard.verify().unwrap());
    assert!(!guard.is_held(), "what was verified to be gone is lost here too");
    witness.check(&mutex, LossReason::KeyDeleted, "/locks/a");
    check_guard(guard, &mutex);

    let guard = mutex.lock().unwrap();
    delete(&guard);
    assert!(!guard.put("/data", "late").unwrap());
    assert!(!guard.is_held());
    drop(guard);

    let guard = mutex.lock().unwrap();
    delete(&guard);
    let txn = Txn::new().and_then([Op::put("/data", "late")]);
    assert_eq!(guard.txn(txn).unwrap(), FencedTxn::Fenced);
    drop(guard);
    assert!(client.get("/data").unwrap().is_none());

    let error = mutex.with_lock(delete).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
}

#[test]
fn a_key_deleted_while_the_hold_is_young_is_found_by_the_watch_that_begins_later() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let mutex = Mutex::new(&client, "/locks/a").unwrap();
    let guard = mutex.lock().unwrap();
    let witness = Witness::new(&mutex, guard.hold());
    client.delete(guard.lock_key()).unwrap();
    let ((), took) = timed(|| wait_lost(&guard.hold()));
    assert!(took < LASTING + PROMPT, "{took:?}");
    witness.check(&mutex, LossReason::KeyDeleted, "/locks/a");
    check_guard(guard, &mutex);
}

#[test]
fn a_key_written_over_is_a_loss_and_does_not_block_the_queue() {
    let etcd = EtcdServer::start().unwrap();
    let (client, theirs) = (connect(&etcd), connect(&etcd));
    let mutex = Mutex::new(&client, "/locks/a").unwrap();
    let rival = short(&theirs, "/locks/a");
    let guard = mutex.lock().unwrap();
    let witness = Witness::new(&mutex, guard.hold());
    thread::scope(|scope| {
        let waiter = scope.spawn(|| rival.lock().unwrap().unlock());
        wait_contenders(&mutex, 2);
        thread::sleep(LASTING);
        etcd.ctl(["put", &guard.lock_key(), "mine"]).unwrap();
        let ((), took) = timed(|| wait_lost(&guard.hold()));
        assert!(took < PROMPT, "{took:?}");
        witness.check(&mutex, LossReason::KeyOverwritten, "/locks/a");
        let (stood, took) = timed(|| waiter.join().unwrap());
        assert!(stood && took < Duration::from_secs(2), "{took:?}");
    });
    check_guard(guard, &mutex);
    assert!(keys(&etcd, "/locks/").is_empty());
}

#[test]
fn a_key_deleted_and_made_again_is_not_ours() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let mutex = Mutex::new(&client, "/locks/a").unwrap();
    let guard = mutex.lock().unwrap();
    client.delete(guard.lock_key()).unwrap();
    client.put(guard.lock_key(), "another's").unwrap();
    let key = guard.lock_key();
    assert!(!guard.put("/data", "late").unwrap());
    assert!(!guard.unlock());
    assert_eq!(keys(&etcd, "/locks/"), std::slice::from_ref(&key), "a release left another's key");
    client.delete(key).unwrap();
}

#[test]
fn a_blackhole_ends_in_the_local_deadline_before_a_rival_is_in() {
    let (etcd, proxy, client) = proxied(Duration::from_secs(5));
    let theirs = connect(&etcd);
    let mutex = short(&client, "/locks/a");
    let rival = short(&theirs, "/locks/a");
    let guard = mutex.lock().unwrap();
    let witness = Witness::new(&mutex, guard.hold());
    let hold = guard.hold();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let guard = rival.lock().unwrap();
            assert!(!hold.is_held(), "two holders");
            guard.unlock()
        });
        wait_contenders(&rival, 2);
        proxy.set(Mode::Blackhole);
        let ((), took) = timed(|| wait_lost(&hold));
        assert!(took < TTL, "{took:?}");
        let (stood, took) = timed(|| guard.unlock());
        assert!(!stood && took < ms(100), "{took:?}");
        witness.check(&mutex, LossReason::DeadlinePassed, "/locks/a");
        assert!(waiter.join().unwrap());
    });
    proxy.set(Mode::Pass);
    let guard = mutex.lock().unwrap();
    assert_eq!(mutex.connection_state(), ConnectionState::Reconnected);
    assert!(guard.unlock());
}

#[test]
fn a_role_taken_away_is_a_loss_of_its_own_kind() {
    let etcd = EtcdServer::builder().auth("root", "secret").start().unwrap();
    etcd.ctl(["role", "add", "locker"]).unwrap();
    etcd.ctl(["role", "grant-permission", "locker", "--prefix=true", "readwrite", "/locks/"])
        .unwrap();
    etcd.ctl(["user", "add", "app:pass"]).unwrap();
    etcd.ctl(["user", "grant-role", "app", "locker"]).unwrap();
    let client =
        Client::builder().endpoints([etcd.endpoint()]).user("app", "pass").connect().unwrap();
    let error = short(&client, "/elsewhere/a").lock().unwrap_err();
    assert!(error.is_permission(), "{error}");
    assert!(error.key().unwrap().starts_with("/elsewhere/a/"), "{:?}", error.key());
    let mutex = short(&client, "/locks/a");
    let guard = mutex.lock().unwrap();
    let witness = Witness::new(&mutex, guard.hold());
    let error = guard.put("/data", "1").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
    assert_eq!(error.key(), Some("/data"));
    assert!(guard.is_held());
    etcd.ctl(["user", "revoke-role", "app", "locker"]).unwrap();
    let ((), took) = timed(|| wait_lost(&guard.hold()));
    assert!(took < TTL, "{took:?}");
    witness.check(&mutex, LossReason::AuthRevoked, "/locks/a");
    assert!(!guard.unlock());
}

#[test]
fn another_cluster_is_a_loss_of_its_own_kind() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let mutex = Mutex::builder(&client, "/locks/a").ttl(LIMIT).build().unwrap();
    let guard = mutex.lock().unwrap();
    let witness = Witness::new(&mutex, guard.hold());
    etcd.restart_as_other_cluster().unwrap();
    wait_lost(&guard.hold());
    witness.check(&mutex, LossReason::WrongCluster, "/locks/a");
    assert!(!guard.unlock());
}

#[test]
fn a_restart_of_etcd_with_its_data_loses_nothing() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let mutex = Mutex::builder(&client, "/locks/a").ttl(LIMIT).build().unwrap();
    let rival = Mutex::new(&connect(&etcd), "/locks/a").unwrap();
    let guard = mutex.lock().unwrap();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| rival.lock().unwrap().unlock());
        wait_contenders(&mutex, 2);
        etcd.restart().unwrap();
        assert!(guard.is_held() && guard.verify().unwrap());
        assert!(guard.put("/data", "1").unwrap());
        assert!(!waiter.is_finished());
        assert!(guard.unlock());
        assert!(waiter.join().unwrap());
    });
}

#[test]
fn a_restart_of_etcd_without_its_data_is_a_loss() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let mutex = Mutex::builder(&client, "/locks/a").ttl(LIMIT).build().unwrap();
    let guard = mutex.lock().unwrap();
    thread::sleep(LASTING);
    etcd.restart_empty().unwrap();
    wait_lost(&guard.hold());
    assert!(!guard.unlock());
    let guard = mutex.lock().unwrap();
    assert!(guard.verify().unwrap() && guard.unlock());
}

#[test]
fn closing_the_client_loses_every_hold_once() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let mutex = short(&client, "/locks/a");
    let guard = mutex.lock().unwrap();
    let witness = Witness::new(&mutex, guard.hold());
    let channel = mutex.loss_events();
    client.close().unwrap();
    assert!(!guard.is_held(), "flags flip before a close returns");
    assert_eq!(channel.iter().count(), 1, "the channel ends after the last loss");
    witness.check(&mutex, LossReason::Closed, "/locks/a");
    assert_eq!(guard.put("/data", "late").unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(guard.verify().unwrap_err().kind(), ErrorKind::Closed);
    assert!(!guard.unlock());
    assert_eq!(mutex.lock().unwrap_err().kind(), ErrorKind::Closed);
    assert!(!mutex.is_healthy());
    assert!(keys(&etcd, "").is_empty() && leases(&etcd) == 0);
}

#[test]
fn closing_a_mutex_loses_its_holds_and_no_others() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let (mutex, other) = (short(&client, "/locks/a"), short(&client, "/locks/b"));
    let guard = mutex.lock().unwrap();
    let neighbour = other.lock().unwrap();
    let witness = Witness::new(&mutex, guard.hold());
    let channel = mutex.loss_events();
    mutex.close().unwrap();
    assert_eq!(keys(&etcd, "/locks/"), [neighbour.lock_key()]);
    assert_eq!(channel.iter().count(), 1);
    witness.check(&mutex, LossReason::Closed, "/locks/a");
    assert_eq!(guard.put("/data", "late").unwrap_err().kind(), ErrorKind::Closed);
    assert!(!guard.unlock());
    mutex.close().unwrap();
    assert_eq!(mutex.lock().unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(mutex.try_lock().unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(mutex.contenders().unwrap_err().kind(), ErrorKind::Closed);
    assert!(neighbour.verify().unwrap() && neighbour.unlock());
    let anew = short(&client, "/locks/a");
    assert!(anew.lock().unwrap().unlock());
}

#[test]
fn closing_while_locks_come_and_go_leaves_no_hold() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    for round in 0..50 {
        let mutex = Mutex::new(&client, format!("/locks/{round}")).unwrap();
        let taken = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    loop {
                        match mutex.lock_owned() {
                            // Kept for a while, so that the close meets holds as well as waits.
                            Ok(guard) => {
                                taken.fetch_add(1, Ordering::SeqCst);
                                let closed = !mutex.is_healthy();
                                thread::yield_now();
                                drop(guard);
                                assert!(!closed || mutex.lock_owned().is_err());
                            }
                            Err(error) => break assert_eq!(error.kind(), ErrorKind::Closed),
                        }
                    }
                });
            }
            eventually(LIMIT, "it is busy", || taken.load(Ordering::SeqCst) > round % 7);
            mutex.close().unwrap();
        });
        wait_keys(&etcd, &format!("/locks/{round}/"), 0);
    }
    assert_eq!(leases(&etcd), 1);
}

#[test]
fn closing_wakes_those_who_wait() {
    let etcd = EtcdServer::start().unwrap();
    let (ours, theirs) = (connect(&etcd), connect(&etcd));
    let guard_of = short(&ours, "/locks/a");
    let guard = guard_of.lock().unwrap();
    for whole_client in [false, true] {
        let waiting = short(&theirs, "/locks/a");
        thread::scope(|scope| {
            let waiter = scope.spawn(|| (waiting.lock().unwrap_err(), Instant::now()));
            wait_contenders(&guard_of, 2);
            let begun = Instant::now();
            if whole_client {
                theirs.close().unwrap()
            } else {
                waiting.close().unwrap()
            }
            let (error, ended) = waiter.join().unwrap();
            println!("woken after {:?}", ended - begun);
            assert_eq!(error.kind(), ErrorKind::Closed);
            assert!(ended - begun < PROMPT, "{:?}", ended - begun);
        });
        wait_keys(&etcd, "/locks/", 1);
    }
    assert!(guard.unlock());
}

#[test]
fn a_late_listener_hears_of_a_loss_as_long_as_its_guard_lives() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let mutex = short(&client, "/locks/a");
    let guard = mutex.lock().unwrap();
    client.delete(guard.lock_key()).unwrap();
    assert!(!guard.verify().unwrap());
    let (tell, told) = unbounded();
    let listen = || {
        let tell = tell.clone();
        mutex.add_loss_listener(move |loss: &Loss| tell.send(loss.token).unwrap())
    };
    let first = listen();
    assert_eq!(told.recv_timeout(LIMIT).unwrap(), guard.fencing_token());
    let token = guard.fencing_token();
    assert!(!guard.unlock());
    let second = listen();
    // One more loss as a marker: had the late listener been told of the first, it would be before.
    let guard = mutex.lock().unwrap();
    client.delete(guard.lock_key()).unwrap();
    assert!(!guard.verify().unwrap());
    for _ in 0..2 {
        assert_eq!(told.recv_timeout(LIMIT).unwrap(), guard.fencing_token());
    }
    assert!(guard.fencing_token() > token);
    assert!(mutex.remove_loss_listener(first) && mutex.remove_loss_listener(second));
    assert!(!mutex.remove_loss_listener(first));
}

#[test]
fn a_removed_listener_is_not_called() {
    struct Counting(Arc<AtomicUsize>);
    impl LossListener for Counting {
        fn on_loss(&self, _loss: &Loss) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let mutex = short(&client, "/locks/a");
    let (kept, removed) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let id = mutex.add_loss_listener_with(Box::new(Counting(removed.clone())));
    mutex.add_loss_listener_with(Box::new(Counting(kept.clone())));
    assert!(mutex.remove_loss_listener(id));
    let guard = mutex.lock().unwrap();
    client.delete(guard.lock_key()).unwrap();
    assert!(!guard.verify().unwrap());
    eventually(LIMIT, "the other listener ran", || kept.load(Ordering::SeqCst) == 1);
    assert_eq!(removed.load(Ordering::SeqCst), 0);
}

#[test]
fn a_listener_that_panics_is_recorded_and_the_others_run() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let mutex = short(&client, "/locks/a");
    mutex.add_loss_listener(|_| panic!("in a listener"));
    let (tell, told) = bounded(1);
    mutex.add_loss_listener(move |_| tell.send(()).unwrap());
    let guard = mutex.lock().unwrap();
    client.delete(guard.lock_key()).unwrap();
    assert!(!guard.verify().unwrap());
    told.recv_timeout(LIMIT).unwrap();
    eventually(LIMIT, "the panic is recorded", || {
        mutex.errors().iter().any(|error| error.kind() == ErrorKind::ListenerPanicked)
    });
    drop(guard);
    assert!(mutex.lock().unwrap().unlock(), "the mutex goes on");
}

#[test]
fn a_listener_that_blocks_delays_no_other_mutex() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let (stuck, free) = (short(&client, "/locks/a"), short(&client, "/locks/b"));
    let (entered, inside) = bounded(1);
    let (release, released) = bounded::<()>(0);
    stuck.add_loss_listener(move |_| {
        entered.send(()).unwrap();
        let _ = released.recv();
    });
    let (tell, told) = bounded(1);
    free.add_loss_listener(move |_| tell.send(()).unwrap());
    let first = stuck.lock().unwrap();
    let second = free.lock().unwrap();
    client.delete(first.lock_key()).unwrap();
    assert!(!first.verify().unwrap());
    inside.recv_timeout(LIMIT).unwrap();
    client.delete(second.lock_key()).unwrap();
    let (stands, took) = timed(|| second.verify().unwrap());
    assert!(!stands && took < PROMPT);
    told.recv_timeout(PROMPT).unwrap();
    drop(second);
    // Renewals go on too: a new hold outlives its TTL.
    let third = free.lock().unwrap();
    thread::sleep(TTL + ms(500));
    assert!(third.is_held() && third.unlock());
    drop(release);
}

#[test]
fn a_listener_may_call_the_mutex_and_close_it() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let mutex = short(&client, "/locks/a");
    let (tell, told) = bounded(1);
    let again = mutex.clone();
    mutex.add_loss_listener(move |_| {
        let relocked = again.lock().unwrap().unlock();
        let listed = again.contenders().unwrap().len();
        again.close().unwrap();
        tell.send((relocked, listed)).unwrap();
    });
    let guard = mutex.lock().unwrap();
    client.delete(guard.lock_key()).unwrap();
    assert!(!guard.verify().unwrap());
    assert_eq!(told.recv_timeout(LIMIT).unwrap(), (true, 0));
    drop(guard);
    assert_eq!(mutex.lock().unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
fn a_lost_hold_is_not_reentered_until_its_outermost_guard_is_gone() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let mutex = short(&client, "/locks/a");
    let outer = mutex.lock().unwrap();
    let inner = mutex.lock().unwrap();
    client.delete(outer.lock_key()).unwrap();
    assert!(!inner.verify().unwrap());
    assert_eq!(mutex.lock().unwrap_err().kind(), ErrorKind::Lost);
    assert!(!inner.unlock());
    assert_eq!(mutex.hold_count(), 1);
    assert_eq!(mutex.try_lock().unwrap_err().kind(), ErrorKind::Lost);
    // An owned guard has nothing to do with the thread's hold.
    assert!(mutex.lock_owned().unwrap().unlock());
    thread::scope(|scope| {
        scope.spawn(|| assert!(mutex.lock().unwrap().unlock()));
    });
    assert_eq!(mutex.lock().unwrap_err().kind(), ErrorKind::Lost);
    assert!(!outer.unlock());
    let guard = mutex.lock().unwrap();
    assert_eq!(mutex.connection_state(), ConnectionState::Reconnected);
    assert!(guard.is_held() && guard.unlock());
}

#[test]
fn a_section_reports_a_loss_inside() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let mutex = short(&client, "/locks/a");
    let ran = AtomicBool::new(false);
    let outcome = mutex.with_lock(|guard| {
        revoke_lease_of(&etcd, &guard.lock_key());
        wait_lost(&guard.hold());
        ran.store(true, Ordering::SeqCst);
    });
    assert!(ran.load(Ordering::SeqCst));
    assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(mutex.with_lock(|_| 7).unwrap(), 7);
}

/// A holder parked in a long sleep of this library while its key is deleted; how it woke.
fn sleep_through_a_loss(interrupt: bool) -> (bool, Duration) {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let mutex = builder(&client, "/locks/a").interrupt_on_lock_loss(interrupt).build().unwrap();
    let guard = mutex.lock().unwrap();
    let hold = guard.hold();
    let lost_at = thread::spawn({
        let (client, key) = (client.clone(), guard.lock_key());
        move || {
            thread::sleep(LASTING);
            client.delete(key).unwrap();
            hold.cancel_token().wait().unwrap();
            Instant::now()
        }
    });
    let slept = CancelToken::new().sleep(LASTING + Duration::from_secs(2));
    let woken = Instant::now();
    let late = woken.saturating_duration_since(lost_at.join().unwrap());
    assert!(!guard.is_held());
    // "Lost" is the better answer even where the scope would interrupt.
    assert!(!guard.put("/data", "late").unwrap());
    assert_eq!(mutex.lock().unwrap_err().kind(), ErrorKind::Lost);
    if interrupt {
        assert_eq!(client.get("/data").unwrap_err().kind(), ErrorKind::Interrupted);
        assert!(CancelToken::shield(|| client.get("/data")).unwrap().is_none());
    } else {
        assert!(client.get("/data").unwrap().is_none());
    }
    assert!(!guard.unlock());
    assert!(client.get("/data").unwrap().is_none(), "the scope ends with the outermost guard");
    if let Err(error) = &slept {
        assert_eq!(error.kind(), ErrorKind::Interrupted);
    }
    (slept.is_err(), late)
}

#[test]
fn the_holding_thread_is_interrupted_where_it_asked_for_it() {
    let (interrupted, late) = sleep_through_a_loss(true);
    println!("interrupted {late:?} after the loss");
    assert!(interrupted);
    assert!(late < PROMPT, "{late:?}");
}

#[test]
fn the_holding_thread_is_left_alone_by_default() {
    let (interrupted, late) = sleep_through_a_loss(false);
    assert!(!interrupted);
    assert!(late > Duration::from_secs(1), "{late:?}");
}

#[test]
fn an_owned_guard_interrupts_no_thread() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let mutex = builder(&client, "/locks/a").interrupt_on_lock_loss(true).build().unwrap();
    let guard = mutex.lock_owned().unwrap();
    client.delete(guard.lock_key()).unwrap();
    assert!(!guard.verify().unwrap());
    // A proof read may have found it first; then the reason is still being asked for.
    eventually(LIMIT, "the token fires", || guard.cancel_token().is_cancelled());
    assert!(client.get("/data").unwrap().is_none());
    assert!(!guard.unlock());
}

#[test]
fn short_and_long_outages_show_in_the_connection_state() {
    use ConnectionState::{Connected, Lost, Reconnected, Suspended};
    let (_etcd, proxy, client) = proxied(Duration::from_secs(10));
    // Long enough for a short outage to be noticed and survived at leisure.
    let ttl = Duration::from_secs(4);
    let mutex = Mutex::builder(&client, "/locks/a").ttl(ttl).build().unwrap();
    assert_eq!(mutex.connection_state(), Connected);
    let guard = mutex.lock().unwrap();
    let states = mutex.connection_events();
    // Cut off just before a renewal would have counted: as silent as it gets without a loss.
    eventually(LIMIT, "a renewal is due", || guard.remaining() < ttl.mul_f64(0.65));
    proxy.set(Mode::Blackhole);
    eventually(LIMIT, "suspended", || mutex.connection_state() == Suspended);
    assert!(guard.is_held());
    proxy.set(Mode::Pass);
    eventually(LIMIT, "reconnected", || mutex.connection_state() == Reconnected);
    assert!(guard.is_held() && guard.verify().unwrap(), "nothing was lost");
    proxy.set(Mode::Blackhole);
    thread::sleep(ttl * 2);
    assert!(!guard.is_held());
    assert_eq!(mutex.connection_state(), Lost);
    assert!(!mutex.is_healthy());
    proxy.set(Mode::Pass);
    assert!(!guard.unlock());
    let guard = mutex.lock().unwrap();
    assert_eq!(mutex.connection_state(), Reconnected);
    assert!(mutex.is_healthy() && guard.unlock());
    let seen: Vec<_> = states.try_iter().collect();
    assert_eq!(seen, [Suspended, Reconnected, Suspended, Lost, Reconnected]);
}

#[test]
fn an_outage_of_less_than_half_the_ttl_loses_nothing() {
    let (_etcd, proxy, client) = proxied(Duration::from_secs(10));
    let ttl = Duration::from_secs(5);
    let mutex = Mutex::builder(&client, "/locks/a").ttl(ttl).build().unwrap();
    let guard = mutex.lock().unwrap();
    for _ in 0..2 {
        proxy.set(Mode::Blackhole);
        let until = Instant::now() + ttl.mul_f64(0.4);
        while Instant::now() < until {
            assert!(guard.is_held());
            thread::sleep(ms(5));
        }
        proxy.set(Mode::Pass);
        eventually(LIMIT, "renewed", || guard.remaining() > ttl.mul_f64(0.7));
    }
    assert!(guard.is_held() && guard.verify().unwrap() && guard.unlock());
    assert!(mutex.errors().is_empty());
}

#[test]
fn a_jump_of_the_clock_is_seen_at_the_next_question_without_a_round_trip() {
    let etcd = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    let clock = TestClock::new();
    let client = Client::builder().endpoints([proxy.endpoint()]).clock(&clock).connect().unwrap();
    let mutex = Mutex::new(&client, "/locks/a").unwrap();
    let guard = mutex.lock().unwrap();
    let witness = Witness::new(&mutex, guard.hold());
    clock.jump(Duration::from_secs(4));
    assert!(guard.is_held(), "4 s of 9 have passed");
    // Nothing can be asked or answered: the answer below is the clock's alone.
    proxy.set(Mode::Blackhole);
    clock.jump(Duration::from_secs(5));
    let (held, took) = timed(|| guard.is_held());
    assert!(!held && took < ms(50), "{took:?}");
    proxy.set(Mode::Pass);
    witness.check(&mutex, LossReason::DeadlinePassed, "/locks/a");
    assert!(!guard.unlock());
    assert!(mutex.lock().unwrap().unlock(), "a new lease serves the next hold");
}
