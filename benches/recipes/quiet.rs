//! The first contended wait on a path that was quiet: one process holds, another begins to wait,
//! so that its watch is new, and the holder lets go, on a store that others write to.
//!
//! A path is watched for 10 s after its last waiter, and then the waiter's client forgets it. So
//! every round has a path, and in the waiting process a client, of its own: each waited there
//! once, and then all of them are left in peace together for the quiet time. A
//! quiet time below 10 s measures paths that are still watched.

use std::time::Duration;

use etcd_recipes::testing::{EtcdServer, boot_nanos, eventually};
use etcd_recipes::{Client, Mutex, OwnedMutexGuard};

use crate::measure::{Measured, Outcome, at_most, millis, plain, quantile};
use crate::noise::Noise;
use crate::workers::{Orders, Worker};

pub(crate) const KIND: &str = "waits";

const LIMIT: Duration = Duration::from_secs(30);

const ROUNDS: u64 = 220;

pub(crate) fn first_waits(quiet: Duration) -> Outcome<Vec<Measured>> {
    let etcd = EtcdServer::start()?;
    let _noise = Noise::start(&etcd.endpoint())?;
    let observer = Client::connect([etcd.endpoint()])?;
    let mut holder = Worker::start(KIND, &etcd.endpoint())?;
    let mut waiter = Worker::start(KIND, &etcd.endpoint())?;
    let mut hand_off = |round: u64, delay: u64| -> Outcome<f64> {
        let path = format!("/quiet/{round}");
        holder.ask(&format!("lock 0 {path}"))?;
        waiter.tell(&format!("lock {round} {path}"))?;
        // Reads of the queue do not touch the waiter.
        eventually(LIMIT, "two stand on the path", || {
            matches!(observer.count_prefix(format!("{path}/")), Ok(2))
        });
        let leaving: u64 = holder.ask(&format!("unlock {delay}"))?.parse()?;
        let entered: u64 = waiter.answer()?.parse()?;
        waiter.ask("unlock 0")?;
        Ok(millis(leaving, entered))
    };
    for round in 0..ROUNDS {
        hand_off(round, 0)?;
    }
    // The subject itself.
    std::thread::sleep(quiet);
    let mut times = Vec::new();
    for round in 0..ROUNDS {
        // From the first moment of the watch to long after etcd serves it, at its 100 ms.
        times.push(hand_off(round, round * 37 % 130)?);
    }
    times.sort_by(f64::total_cmp);
    let of = |part| quantile(&times, part);
    Ok(vec![
        plain("median hand-off", of(0.5), "ms"),
        at_most(format!("p99 hand-off of {ROUNDS}"), of(0.99), "ms", Some(20.0)),
        plain("longest hand-off", of(1.0), "ms"),
    ])
}

/// Holds or waits, by any of its clients; each is connected when it is first used.
pub(crate) fn worker(endpoint: &str) -> Outcome<Orders> {
    let endpoint = endpoint.to_owned();
    let mut clients: Vec<Client> = Vec::new();
    let mut held: Option<OwnedMutexGuard> = None;
    Ok(Box::new(move |order| {
        let words: Vec<&str> = order.split(' ').collect();
        match words[..] {
            ["lock", client, path] => {
                let client: usize = client.parse()?;
                while clients.len() <= client {
                    clients.push(Client::connect([endpoint.as_str()])?);
                }
                held = Some(Mutex::new(&clients[client], path)?.lock_owned()?);
                Ok(boot_nanos().to_string())
            }
            ["unlock", delay] => {
                // So far into the life of the waiter's watch.
                std::thread::sleep(Duration::from_millis(delay.parse()?));
                let leaving = boot_nanos();
                if !held.take().is_some_and(OwnedMutexGuard::unlock) {
                    return Err("a lock was lost".into());
                }
                Ok(leaving.to_string())
            }
            _ => Err("no such order".into()),
        }
    }))
}
