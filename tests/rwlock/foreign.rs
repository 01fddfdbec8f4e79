//! Who says nothing about itself counts as a writer.

use std::io::{BufRead, BufReader};

use crossbeam_channel::{Receiver, unbounded};
use etcd_recipes::testing::{CtlProcess, EtcdServer};
use etcd_recipes::{ErrorKind, Mutex};

use super::support::*;
use super::{Side, Waiter, line, long, wait_for_line, wait_line};

#[test]
fn a_mutex_counts_as_a_writer() {
    let etcd = EtcdServer::start().unwrap();
    let (ours, theirs) = (connect(&etcd), connect(&etcd));
    let mutex = Mutex::builder(&theirs, "/locks/a").ttl(super::LONG).build().unwrap();
    let locks = [long(&ours, "/locks/a"), long(&theirs, "/locks/a")];
    for lock in &locks {
        let guard = mutex.lock_owned().unwrap();
        assert!(lock.try_read().unwrap().is_none() && lock.try_write().unwrap().is_none());
        let waiting = [Side::R, Side::R, Side::W].map(|side| Waiter::queue(lock, side));
        assert_eq!(line(lock), "M+ R R W");
        waiting[0].stays_out();
        assert!(guard.unlock());
        let readers = [waiting[0].enters(), waiting[1].enters()];
        assert!(mutex.try_lock().unwrap().is_none());
        let behind = std::thread::scope(|scope| {
            let behind = scope.spawn(|| mutex.lock_owned().unwrap());
            wait_line(lock, 4);
            let late = Waiter::queue(lock, Side::R);
            assert_eq!(line(lock), "R+ R+ W M R");
            assert!(readers.into_iter().all(super::Held::unlock));
            let writer = waiting[2].enters();
            late.stays_out();
            assert!(!behind.is_finished() && writer.unlock());
            let behind = behind.join().unwrap();
            late.stays_out();
            (behind, late)
        });
        let (guard, late) = behind;
        assert!(guard.unlock());
        assert!(late.enters().unlock());
    }
}

/// Starts `etcdctl lock`; the receiver gets the name of its key once it holds the lock.
fn etcdctl_lock(etcd: &EtcdServer, path: &str) -> (CtlProcess, Receiver<String>) {
    let mut process = etcd.spawn_ctl(["lock", path]).unwrap();
    let output = BufReader::new(process.stdout.take().unwrap());
    let (tell, told) = unbounded();
    std::thread::spawn(move || {
        for line in output.lines().map_while(Result::ok) {
            if tell.send(line).is_err() {
                return;
            }
        }
    });
    (process, told)
}

/// etcdctl gives the lock back when it is told to end.
fn interrupt(mut process: CtlProcess) {
    let pid = i32::try_from(process.id()).ok().and_then(rustix::process::Pid::from_raw).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    process.wait().unwrap();
}

#[test]
fn etcdctl_lock_counts_as_a_writer() {
    let etcd = EtcdServer::start().unwrap();
    let lock = long(&connect(&etcd), "/locks/a");
    let (theirs, told) = etcdctl_lock(&etcd, "/locks/a");
    let key = told.recv_timeout(LIMIT).unwrap();
    assert_eq!(lock.contenders().unwrap()[0].client_id, key);
    assert!(lock.try_read().unwrap().is_none() && lock.try_write().unwrap().is_none());
    let waiting = [Side::R, Side::R].map(|side| Waiter::queue(&lock, side));
    waiting[0].stays_out();
    interrupt(theirs);
    let readers = [waiting[0].enters(), waiting[1].enters()];

    let (theirs, told) = etcdctl_lock(&etcd, "/locks/a");
    wait_for_line(&lock, "R+ R+ M");
    let behind = Waiter::queue(&lock, Side::R);
    assert!(told.recv_timeout(super::A_WHILE).is_err(), "etcdctl got in beside readers");
    assert!(readers.into_iter().all(super::Held::unlock));
    told.recv_timeout(LIMIT).unwrap();
    behind.stays_out();
    interrupt(theirs);
    let behind = behind.enters();
    assert!(behind.unlock());

    let writer = lock.write().unwrap();
    let (theirs, told) = etcdctl_lock(&etcd, "/locks/a");
    wait_for_line(&lock, "W+ M");
    assert!(told.recv_timeout(super::A_WHILE).is_err(), "etcdctl got in beside a writer");
    assert!(writer.is_held() && writer.unlock());
    told.recv_timeout(LIMIT).unwrap();
    interrupt(theirs);
    wait_line(&lock, 0);
}

/// A stranger's value that looks nearly like a reader's.
#[test]
fn a_value_that_is_not_quite_a_readers_counts_as_a_writers() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let lock = long(&client, "/locks/a");
    let (lease, _) = client.grant_lease(super::LONG).unwrap();
    for value in [r#"{"mode":"read"}"#, "\"read\"", "read", ""] {
        client.put_with_lease("/locks/a/stranger", value, lease).unwrap();
        assert!(lock.try_read().unwrap().is_none(), "{value}");
        let waiter = Waiter::queue(&lock, Side::R);
        waiter.stays_out();
        client.delete("/locks/a/stranger").unwrap();
        assert!(waiter.enters().unlock());
    }
}

/// A key that would stay for ever is named, to both sides; keys further down do not count.
#[test]
fn a_key_without_a_lease_is_named_and_deeper_keys_are_passed_over() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let lock = long(&client, "/locks/a");
    client.put("/locks/a/deep/er", "").unwrap();
    let reader = lock.try_read_owned().unwrap().expect("nobody is in the way");
    let other = lock.read_owned().unwrap();
    assert!(lock.try_write().unwrap().is_none());
    assert!(reader.unlock() && other.unlock());
    assert!(lock.try_write().unwrap().expect("nobody is in the way").unlock());
    assert!(lock.write().unwrap().unlock());

    client.put("/locks/a/for-ever", "").unwrap();
    for outcome in [
        lock.read().map(drop),
        lock.write().map(drop),
        lock.try_read_for(LIMIT).map(drop),
        lock.try_write_for(LIMIT).map(drop),
    ] {
        assert_eq!(outcome.unwrap_err().kind(), ErrorKind::ForeignKey);
    }
    assert!(lock.try_read().unwrap().is_none() && lock.try_write().unwrap().is_none());
    wait_line(&lock, 1);
}
