//! The read/write lock: who gets in, what a thread may do twice, how a writer becomes a reader,
//! how a hold is lost, and what it costs.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../faults/mod.rs"]
mod faults;
#[path = "../support/mod.rs"]
mod support;

mod admission;
mod counts;
mod downgrade;
mod downgrade_faults;
mod foreign;
mod history;
mod loss;
mod processes;
mod reentrancy;

use std::thread;
use std::time::Duration;

use crossbeam_channel::{Receiver, bounded};
use etcd_recipes::testing::{EtcdServer, eventually};
use etcd_recipes::{
    Client, Contender, ContenderMode, OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock,
};
use support::{LIMIT, ms};

/// A TTL that nobody waits out.
const LONG: Duration = Duration::from_secs(20);

/// How long somebody is watched not to get in.
const A_WHILE: Duration = ms(150);

fn with_ttl(client: &Client, path: &str, ttl: Duration) -> RwLock {
    RwLock::builder(client, path).ttl(ttl).build().unwrap()
}

fn long(client: &Client, path: &str) -> RwLock {
    with_ttl(client, path, LONG)
}

/// As many clients, each with its lock of the path.
fn crowd(etcd: &EtcdServer, path: &str, count: usize) -> Vec<RwLock> {
    (0..count).map(|_| long(&support::connect(etcd), path)).collect()
}

fn value(client: &Client, key: &str) -> Option<String> {
    client.get(key).unwrap().map(|found| found.value_text())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Side {
    R,
    W,
}

/// A hold of either side, free to move.
#[derive(Debug)]
enum Held {
    R(OwnedRwLockReadGuard),
    W(OwnedRwLockWriteGuard),
}

impl Held {
    fn take(lock: &RwLock, side: Side) -> etcd_recipes::Result<Held> {
        match side {
            Side::R => lock.read_owned().map(Held::R),
            Side::W => lock.write_owned().map(Held::W),
        }
    }

    fn key(&self) -> String {
        match self {
            Held::R(guard) => guard.lock_key(),
            Held::W(guard) => guard.lock_key(),
        }
    }

    fn is_held(&self) -> bool {
        match self {
            Held::R(guard) => guard.is_held(),
            Held::W(guard) => guard.is_held(),
        }
    }

    fn verify(&self) -> bool {
        match self {
            Held::R(guard) => guard.verify().unwrap(),
            Held::W(guard) => guard.verify().unwrap(),
        }
    }

    fn unlock(self) -> bool {
        match self {
            Held::R(guard) => guard.unlock(),
            Held::W(guard) => guard.unlock(),
        }
    }
}

/// Somebody in the queue, on a thread of its own.
struct Waiter {
    inside: Receiver<Held>,
}

impl Waiter {
    fn start(lock: &RwLock, side: Side) -> Waiter {
        let (tell, inside) = bounded(1);
        let lock = lock.clone();
        thread::spawn(move || {
            let held = Held::take(&lock, side).unwrap();
            let _ = tell.send(held);
        });
        Waiter { inside }
    }

    /// Starts it and waits until it stands in the queue, so that the next stands behind it.
    fn queue(lock: &RwLock, side: Side) -> Waiter {
        let before = lock.contenders().unwrap().len();
        let waiter = Waiter::start(lock, side);
        wait_line(lock, before + 1);
        waiter
    }

    #[track_caller]
    fn enters(&self) -> Held {
        match self.inside.recv_timeout(LIMIT) {
            Ok(held) => held,
            Err(error) => panic!("never got in: {error}"),
        }
    }

    fn is_waiting(&self) -> bool {
        self.inside.is_empty()
    }

    #[track_caller]
    fn stays_out(&self) {
        if let Ok(held) = self.inside.recv_timeout(A_WHILE) {
            panic!("got in with {}", held.key());
        }
    }
}

/// Waits until `count` contenders stand on the path.
#[track_caller]
fn wait_line(lock: &RwLock, count: usize) {
    eventually(LIMIT, "contenders", || match lock.contenders() {
        Ok(all) if all.len() == count => Ok(()),
        other => Err(other),
    });
}

/// The queue in short: `R` reads, `W` writes, `M` says nothing; `+` is inside.
fn line(lock: &RwLock) -> String {
    let all = lock.contenders().unwrap();
    let one = |contender: &Contender| {
        let mode = match contender.mode {
            ContenderMode::Read => "R",
            ContenderMode::Write => "W",
            _ => "M",
        };
        format!("{mode}{}", if contender.is_holder { "+" } else { "" })
    };
    all.iter().map(one).collect::<Vec<_>>().join(" ")
}

#[track_caller]
fn wait_for_line(lock: &RwLock, wanted: &str) {
    eventually(LIMIT, wanted, || {
        let line = line(lock);
        if line == wanted { Ok(()) } else { Err(line) }
    });
}
