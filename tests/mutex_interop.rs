//! One path, two programs: `etcdctl lock` and our mutex exclude each other, whoever comes first.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::io::{BufRead, BufReader};
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use etcd_recipes::testing::{CtlProcess, EtcdServer, eventually};
use support::*;

/// Starts `etcdctl lock`; the receiver gets the name of its key once it holds the lock.
fn etcdctl_lock(etcd: &EtcdServer, path: &str) -> (CtlProcess, Receiver<String>) {
    let mut process = etcd.spawn_ctl(["lock", path]).unwrap();
    let output = BufReader::new(process.stdout.take().unwrap());
    let (tell, told) = channel();
    thread::spawn(move || {
        for line in output.lines().map_while(Result::ok) {
            if tell.send(line).is_err() {
                return;
            }
        }
    });
    (process, told)
}

/// etcdctl gives the lock back when it is told to end.
fn interrupt(process: &mut CtlProcess) {
    let pid = i32::try_from(process.id()).ok().and_then(rustix::process::Pid::from_raw).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    process.wait().unwrap();
}

#[test]
fn our_mutex_waits_for_etcdctl() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let mutex = short(&client, "/locks/a");
    let (mut theirs, told) = etcdctl_lock(&etcd, "/locks/a");
    let key = told.recv_timeout(LIMIT).unwrap();
    assert!(mutex.try_lock().unwrap().is_none());
    assert!(mutex.try_lock_for(ms(300)).unwrap().is_none());
    assert_eq!(mutex.contenders().unwrap()[0].client_id, key);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| mutex.lock().unwrap().unlock());
        wait_contenders(&mutex, 2);
        assert!(!waiter.is_finished());
        interrupt(&mut theirs);
        assert!(waiter.join().unwrap());
    });
}

#[test]
fn etcdctl_waits_for_our_mutex() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let mutex = short(&client, "/locks/a");
    let guard = mutex.lock().unwrap();
    let (mut theirs, told) = etcdctl_lock(&etcd, "/locks/a");
    wait_contenders(&mutex, 2);
    assert!(told.recv_timeout(ms(500)).is_err(), "etcdctl got in");
    assert!(guard.is_held() && guard.verify().unwrap());
    assert!(guard.unlock());
    assert!(told.recv_timeout(LIMIT).unwrap().starts_with("/locks/a/"));
    assert!(mutex.try_lock().unwrap().is_none());
    interrupt(&mut theirs);
    eventually(LIMIT, "the lock is free", || mutex.is_locked().map(|locked| !locked).unwrap());
}

#[test]
fn etcdctl_with_a_command_runs_it_between_our_holds() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let mutex = short(&client, "/locks/a");
    let guard = mutex.lock().unwrap();
    let mut theirs = etcd.spawn_ctl(["lock", "/locks/a", "--", "echo", "inside"]).unwrap();
    wait_contenders(&mutex, 2);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let guard = mutex.lock().unwrap();
            (guard.fencing_token(), guard.unlock())
        });
        wait_contenders(&mutex, 3);
        let token = guard.fencing_token();
        assert!(guard.unlock());
        let mut said = String::new();
        BufReader::new(theirs.stdout.take().unwrap()).read_line(&mut said).unwrap();
        assert_eq!(said.trim(), "inside");
        assert!(theirs.wait().unwrap().success());
        let (later, stood) = waiter.join().unwrap();
        assert!(later > token + 1 && stood);
    });
}
