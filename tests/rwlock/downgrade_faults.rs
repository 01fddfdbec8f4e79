//! A downgrade that is not answered, refused, or asked of a hold that is gone; and a guarded write
//! that comes after it.

use std::thread;
use std::time::Duration;

use etcd_recipes::testing::{EtcdServer, FaultProxy, Mode, eventually};
use etcd_recipes::{
    Client, ErrorKind, LossReason, OwnedRwLockWriteGuard, Recipe, RpcResilience, RwLockWriteGuard,
};

use super::faults::Proxied;
use super::support::*;
use super::{Held, Side, Waiter, crowd, line, long, value, wait_for_line, with_ttl};

/// How long a downgrade may take with etcd away.
const BUDGET: Duration = ms(2_500);

#[test]
fn a_lost_writer_is_not_downgraded() {
    let etcd = EtcdServer::start().unwrap();
    let lock = with_ttl(&connect(&etcd), "/locks/a", TTL);
    let write = lock.write().unwrap();
    revoke_lease_of(&etcd, &write.lock_key());
    eventually(LIMIT, "the hold is lost", || !write.is_held());
    let (write, error) = RwLockWriteGuard::downgrade(write).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
    assert_eq!((lock.read_count(), lock.write_count()), (0, 1));
    assert_eq!(write.loss().unwrap().reason, LossReason::LeaseGone);
    assert!(!write.hold().is_held() && !write.unlock());
    assert!(lock.write().unwrap().unlock());

    let write = lock.write_owned().unwrap();
    revoke_lease_of(&etcd, &write.lock_key());
    eventually(LIMIT, "the hold is lost", || !write.is_held());
    let (write, error) = OwnedRwLockWriteGuard::downgrade(write).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
    assert!(!write.unlock());
}

/// A loss that only the answer to the downgrade tells of.
#[test]
fn a_writer_that_is_lost_unawares_is_not_downgraded() {
    let etcd = EtcdServer::start().unwrap();
    let lock = long(&connect(&etcd), "/locks/a");
    let losses = lock.loss_events();
    let takes: [(&[&str], LossReason); 2] =
        [(&["del"], LossReason::KeyDeleted), (&["put"], LossReason::KeyOverwritten)];
    for implicit in [false, true] {
        for (take, reason) in takes {
            let write = lock.write().unwrap();
            let mut command = take.to_vec();
            let key = write.lock_key();
            command.push(&key);
            command.extend(take.iter().filter(|word| **word == "put").map(|_| "mine"));
            etcd.ctl(command).unwrap();
            assert!(write.is_held(), "it does not know yet");
            if implicit {
                let read = lock.read().unwrap();
                assert!(!write.unlock(), "{reason:?}");
                assert!(!read.is_held() && !read.unlock());
            } else {
                let (write, error) = RwLockWriteGuard::downgrade(write).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
                assert!(!write.is_held() && !write.unlock());
            }
            assert_eq!(losses.recv_timeout(LIMIT).unwrap().reason, reason);
            wait_keys(&etcd, "/locks/", 0);
        }
    }
    assert_eq!(losses.try_iter().count(), 0);
    assert_eq!(lock.error_count(), 4);
}

#[test]
fn a_downgrade_without_an_answer_is_one() {
    let (etcd, proxy, client) = proxied(Duration::from_secs(10));
    // Its renewals come every 20 s, so that the next request is the test's.
    let lock = with_ttl(&client, "/locks/a", Duration::from_secs(60));
    let other = long(&connect(&etcd), "/locks/a");
    for round in 0..4 {
        let write = lock.write().unwrap();
        let reads = || etcd.unary_calls().unwrap().get("Range").copied().unwrap_or_default();
        if round == 0 {
            eventually(LIMIT, "the first renewal is proven", || reads() > 0);
        }
        let queued = [Side::R, Side::W].map(|side| Waiter::queue(&other, side));
        let exclusive = write.hold();
        proxy.drop_next_reply();
        let (read, took) = timed(|| {
            if round % 2 == 0 {
                return RwLockWriteGuard::downgrade(write).unwrap();
            }
            let read = lock.read().unwrap();
            assert!(write.unlock());
            read
        });
        assert!(!proxy.awaits_request(), "no request was sent");
        assert!(took < BUDGET, "{took:?}");
        assert!(read.is_held() && !exclusive.is_held());
        let beside = queued[0].enters();
        assert_eq!(line(&other), "R+ R+ W");
        assert!(read.verify().unwrap() && beside.unlock());
        queued[1].stays_out();
        assert!(read.unlock());
        assert!(queued[1].enters().unlock());
    }
    assert_eq!(lock.error_count(), 0);
}

#[test]
fn a_downgrade_while_etcd_stands_still_is_done_after_it() {
    let etcd = EtcdServer::start().unwrap();
    let locks = crowd(&etcd, "/locks/a", 2);
    for implicit in [false, true] {
        let write = locks[0].write().unwrap();
        let own = implicit.then(|| locks[0].read().unwrap());
        let exclusive = write.hold();
        let queued = [Side::R, Side::W].map(|side| Waiter::queue(&locks[1], side));
        etcd.freeze().unwrap();
        let (read, took) = timed(|| match own {
            None => RwLockWriteGuard::downgrade(write).unwrap(),
            Some(read) => {
                assert!(write.unlock());
                read
            }
        });
        assert!(took < BUDGET, "{took:?}");
        assert!(read.is_held() && !exclusive.is_held());
        assert!(queued[0].is_waiting(), "let in by an etcd that stands still");
        etcd.thaw().unwrap();
        let beside = queued[0].enters();
        wait_for_line(&locks[1], "R+ R+ W");
        assert!(read.is_held() && read.verify().unwrap());
        assert!(beside.unlock());
        queued[1].stays_out();
        assert!(read.unlock());
        assert!(queued[1].enters().unlock());
    }
}

/// The reader has gone before its key is rewritten, and it is never put back.
#[test]
fn a_reader_that_leaves_before_the_downgrade_is_done_leaves_nothing() {
    let (etcd, proxy, client) = proxied(Duration::from_secs(20));
    let lock = long(&client, "/locks/a");
    let write = lock.write().unwrap();
    proxy.set(Mode::BlackholeUp);
    let read = RwLockWriteGuard::downgrade(write).unwrap();
    let (stood, took) = timed(|| read.unlock());
    assert!(stood && took < BUDGET, "{took:?}");
    proxy.set(Mode::Pass);
    wait_keys(&etcd, "/locks/", 0);
    assert!(lock.write().unwrap().unlock());
    thread::sleep(ms(500));
    assert!(keys(&etcd, "/locks/").is_empty(), "it came back");
}

const PASSWORD: &str = "secret";

#[test]
fn a_downgrade_that_is_not_permitted_leaves_the_writer() {
    let etcd = EtcdServer::builder().auth("root", PASSWORD).start().unwrap();
    let role = |verb: &str, permission: &[&str]| {
        etcd.ctl([&["role", verb, "--prefix=true", "app"], permission].concat()).unwrap();
    };
    etcd.ctl(["role", "add", "app"]).unwrap();
    role("grant-permission", &["readwrite", "/"]);
    etcd.ctl(["user", "add", "app:app"]).unwrap();
    etcd.ctl(["user", "grant-role", "app", "app"]).unwrap();
    let client = Client::builder().endpoints([etcd.endpoint()]).user("app", "app");
    let client = client.connect().unwrap();
    let lock = long(&client, "/locks/a");
    let write = lock.write().unwrap();
    let owned = long(&client, "/locks/b").write_owned().unwrap();
    let before = write.hold();

    role("revoke-permission", &["/"]);
    role("grant-permission", &["read", "/"]);
    let (write, error) = RwLockWriteGuard::downgrade(write).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
    let (owned, error) = OwnedRwLockWriteGuard::downgrade(owned).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
    assert!(write.is_held() && write.hold().is_held() && !write.remaining().is_zero());
    assert!(owned.is_held() && owned.hold().is_held());
    assert!(!before.is_held(), "what was over came back");
    assert_eq!((lock.read_count(), lock.write_count()), (0, 1));
    assert_eq!(line(&lock), "W+");
    // The same by ending the last write: the reads that are left keep others out meanwhile.
    let errors = lock.error_count();
    let read = lock.read().unwrap();
    let again = lock.write().unwrap();
    assert!(again.unlock() && lock.error_count() == errors);

    role("grant-permission", &["readwrite", "/"]);
    assert!(write.put("/data", "").unwrap() && owned.put("/data", "").unwrap());
    let downgraded = RwLockWriteGuard::downgrade(write).unwrap();
    let owned = OwnedRwLockWriteGuard::downgrade(owned).unwrap();
    assert_eq!(line(&lock), "R+");
    assert!(downgraded.unlock() && read.unlock() && owned.unlock());

    let write = lock.write().unwrap();
    let read = lock.read().unwrap();
    role("revoke-permission", &["/"]);
    role("grant-permission", &["read", "/"]);
    assert!(write.unlock() && read.is_held());
    assert_eq!(lock.errors().last().unwrap().kind(), ErrorKind::PermissionDenied);
    assert_eq!(line(&lock), "W+");
    role("grant-permission", &["readwrite", "/"]);
    assert!(read.unlock());
    wait_for_line(&lock, "");
}

/// A guarded write lies in the socket of a frozen follower, its caller has given up, and the
/// writer becomes a reader through another member. Then the follower wakes and passes it on.
fn a_late_write(downgraded: bool) -> Option<String> {
    let proxied = Proxied::start();
    proxied.cluster.move_leader(1).unwrap();
    let (follower, leader) = (proxied.cluster.member(0), proxied.cluster.member(1));
    let proxy: &FaultProxy = &proxied.proxies[0];
    let rpc = RpcResilience::new().operation_timeout(ms(700));
    let client = Client::builder()
        .endpoints(proxied.endpoints())
        .resilience(etcd_recipes::ResilienceConfig::new().rpc(rpc))
        .connect()
        .unwrap();
    let direct = Client::connect([leader.endpoint()]).unwrap();
    let lock = long(&client, "/locks/a");
    let write = lock.write_owned().unwrap();
    assert!(write.put("/data", "in time").unwrap());

    // Answered, not only begun.
    let method = [("grpc_method", "Txn")];
    let handled = || follower.metric("grpc_server_handled_total", &method).unwrap();
    let before = handled();
    assert!(before > 0.0, "the client talks to another member");
    let late = format!("late{}", " ".repeat(3_000));
    follower.freeze().unwrap();
    let sent = proxy.bytes_up();
    let given_up = thread::scope(|scope| {
        let writer = scope.spawn(|| write.put("/data", late.as_str()).unwrap_err());
        eventually(LIMIT, "all of it is under way", || proxy.bytes_up() > sent + 3_000);
        // What follows it, such as its being called off, is still on its way.
        proxy.set(Mode::BlackholeUp);
        writer.join().unwrap()
    });
    assert_eq!(given_up.kind(), ErrorKind::OutcomeUnknown, "{given_up}");
    let held = if downgraded {
        let read = OwnedRwLockWriteGuard::downgrade(write).unwrap();
        wait_for_line(&long(&direct, "/locks/a"), "R+");
        Held::R(read)
    } else {
        Held::W(write)
    };
    assert_eq!(value(&direct, "/data").as_deref(), Some("in time"));
    follower.thaw().unwrap();
    eventually(LIMIT, "the write is decided after all", || handled() > before);
    let last = value(&direct, "/data").map(|value| value.trim_end().to_owned());
    proxy.set(Mode::Pass);
    assert!(held.is_held());
    last
}

#[test]
fn a_guarded_write_that_arrives_after_the_downgrade_is_refused() {
    assert_eq!(a_late_write(true).as_deref(), Some("in time"));
}

/// Without the downgrade it would have been applied.
#[test]
fn a_guarded_write_that_arrives_late_is_applied_while_the_writer_holds() {
    assert_eq!(a_late_write(false).as_deref(), Some("late"));
}
