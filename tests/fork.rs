//! A fork's child has the memory of a client and none of its threads: it must neither hang nor
//! touch what is the parent's.

#![cfg(unix)]
#![allow(unsafe_code, reason = "fork is the subject")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::time::Instant;

use etcd_recipes::testing::EtcdServer;
use etcd_recipes::{Client, Error, ErrorKind, Mutex};
use support::*;

/// Runs `child` in a forked process; returns what it says, or `None` if it had to be killed.
fn forked(child: impl FnOnce() -> i32) -> Option<i32> {
    // SAFETY: the child calls only what this test is about and `_exit`, and never returns from
    // here; no other test of this binary runs meanwhile that could hold a lock it needs.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(99);
        // SAFETY: ends the process at once.
        unsafe { libc::_exit(code) }
    }
    let end = Instant::now() + LIMIT;
    loop {
        let mut status = 0;
        // SAFETY: `pid` is our child and `status` a valid place.
        let ended = unsafe { libc::waitpid(pid, &mut status, libc::WNOHANG) };
        if ended == pid {
            return Some(libc::WEXITSTATUS(status));
        }
        if Instant::now() > end {
            // SAFETY: `pid` is our child and has not been waited for.
            unsafe {
                libc::kill(pid, libc::SIGKILL);
                libc::waitpid(pid, &mut status, 0);
            }
            return None;
        }
        std::thread::sleep(ms(5));
    }
}

fn is_forked<T>(outcome: Result<T, Error>) -> bool {
    outcome.is_err_and(|error| error.kind() == ErrorKind::Forked)
}

/// The number of the first check that does not hold; 0 if all do.
fn first_wrong(checks: &[bool]) -> i32 {
    checks.iter().position(|ok| !ok).map_or(0, |at| i32::try_from(at).unwrap() + 1)
}

#[test]
fn serial_a_forked_child_is_told_and_touches_nothing() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let mutex = short(&client, "/locks/a");
    let free = short(&client, "/locks/b");
    let guard = mutex.lock().unwrap();
    let owned = short(&client, "/locks/c").lock_owned().unwrap();
    let hold = guard.hold();
    let before = keys(&etcd, "/locks/");
    let code = forked(|| {
        first_wrong(&[
            is_forked(client.get("/k")),
            is_forked(client.put("/k", "1")),
            is_forked(client.wait_ready(LIMIT)),
            !client.ping(),
            is_forked(client.close()),
            !guard.is_held() && !hold.is_held() && !owned.is_held(),
            !mutex.is_held_by_current_thread(),
            is_forked(mutex.lock()),
            is_forked(mutex.try_lock()),
            is_forked(free.lock()),
            is_forked(free.try_lock_for(ms(100))),
            is_forked(free.lock_owned()),
            is_forked(mutex.is_locked()),
            is_forked(mutex.contenders()),
            is_forked(mutex.close()),
            is_forked(Mutex::new(&client, "/locks/d")),
            is_forked(guard.put("/k", "1")),
            is_forked(guard.verify()),
            hold.remaining().is_zero(),
        ])
    });
    assert_eq!(code, Some(0), "the number of the check that failed; None: it hung");
    assert!(guard.is_held() && guard.verify().unwrap() && owned.verify().unwrap());
    assert_eq!(keys(&etcd, "/locks/"), before);
    assert!(client.get("/k").unwrap().is_none());

    // Now everything is dropped in the child.
    let parts = parking_lot::Mutex::new(Some((client.clone(), free, owned)));
    let code = forked(|| {
        let (client, free, owned) = parts.lock().take().unwrap();
        let released = owned.unlock();
        drop(free);
        drop(client);
        i32::from(released)
    });
    assert_eq!(code, Some(0));
    let (_, free, owned) = parts.lock().take().unwrap();
    assert_eq!(keys(&etcd, "/locks/"), before);
    assert!(owned.is_held() && owned.unlock());
    assert!(guard.is_held() && guard.unlock());
    assert!(free.lock().unwrap().unlock());
}

#[test]
fn serial_a_forked_child_may_drop_the_last_handles_and_connect_anew() {
    let etcd = EtcdServer::start().unwrap();
    let endpoint = etcd.endpoint();
    let client = Client::connect([endpoint.as_str()]).unwrap();
    let idle = Client::connect([endpoint.as_str()]).unwrap();
    let mutex = short(&client, "/locks/a");
    let guard = mutex.lock_owned().unwrap();
    let all = parking_lot::Mutex::new(Some((client, idle)));
    let code = forked(|| {
        drop(guard);
        drop(mutex);
        drop(all.lock().take());
        let anew = Client::connect([endpoint.as_str()]).unwrap();
        let rival = short(&anew, "/locks/a");
        let busy = rival.try_lock().unwrap().is_none();
        let other = short(&anew, "/locks/b");
        let stood = other.lock().unwrap().unlock();
        drop((rival, other));
        let closed = anew.close().is_ok();
        first_wrong(&[busy, stood, closed])
    });
    assert_eq!(code, Some(0));
}
