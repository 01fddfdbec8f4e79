//! How soon after the deadline the flag, the token and the listener tell of a loss, on a machine
//! that is at rest and on one whose cores are all taken.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use etcd_recipes::testing::{EtcdServer, FaultProxy, Mode, boot_nanos, eventually};
use etcd_recipes::{Client, Mutex};

use crate::measure::{Measured, Outcome, Spread, at_most, millis, plain};

const LIMIT: Duration = Duration::from_secs(30);
const TTL: Duration = Duration::from_secs(2);
const ROUNDS: usize = 11;

pub(crate) fn at_rest() -> Outcome<Vec<Measured>> {
    let mut all = Vec::new();
    for (what, times, limit) in rounds()? {
        let spread = Spread::of(&times);
        all.push(at_most(format!("{what}, median"), spread.median, "ms", Some(limit)));
        all.push(plain(format!("{what}, worst of {ROUNDS}"), spread.largest, "ms"));
    }
    Ok(all)
}

pub(crate) fn under_load() -> Outcome<Vec<Measured>> {
    let _load = Load::start();
    let mut all = Vec::new();
    for (what, times, _) in rounds()? {
        let spread = Spread::of(&times);
        all.push(at_most(format!("{what}, median"), spread.median, "ms", Some(100.0)));
        let worst = format!("{what}, worst of {ROUNDS}");
        all.push(at_most(worst, spread.largest, "ms", Some(100.0)));
    }
    Ok(all)
}

/// Threads of this process that never rest, two for each core.
struct Load {
    over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Load {
    fn start() -> Load {
        let over = Arc::new(AtomicBool::new(false));
        let cores = thread::available_parallelism().map_or(2, usize::from);
        let threads = (0..2 * cores)
            .map(|_| {
                let over = over.clone();
                thread::spawn(move || while !over.load(Ordering::Relaxed) {})
            })
            .collect();
        Load { over, threads }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // It does nothing that could panic.
            let _ = thread.join();
        }
    }
}

/// What told, when (in ms, counted from the deadline as it stood before), and within what it
/// should at rest.
fn rounds() -> Outcome<[(&'static str, Vec<f64>, f64); 3]> {
    let etcd = EtcdServer::start()?;
    let (mut flags, mut tokens, mut listeners) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        let proxy = FaultProxy::start(etcd.endpoint())?;
        let client = Client::connect([proxy.endpoint()])?;
        let path = format!("/bench/loss-{round}");
        let mutex = Mutex::builder(&client, path).ttl(TTL).build()?;
        let heard = Arc::new(AtomicU64::new(0));
        mutex.add_loss_listener({
            let heard = heard.clone();
            move |_| heard.store(boot_nanos(), Ordering::Release)
        });
        let guard = mutex.lock_owned()?;
        let hold = guard.hold();
        let token = thread::spawn({
            let hold = hold.clone();
            move || {
                // The wait fails only in a scope, and this thread is in none.
                let _ = hold.cancel_token().wait();
                boot_nanos()
            }
        });
        proxy.set(Mode::Blackhole);
        let mut deadline = 0;
        while hold.is_held() {
            let left = u64::try_from(hold.remaining().as_nanos())?;
            if left > 0 {
                deadline = boot_nanos() + left;
            }
            thread::sleep(Duration::from_millis(1));
        }
        flags.push(millis(deadline, boot_nanos()));
        tokens.push(millis(deadline, token.join().map_err(|_| "the watcher panicked")?));
        eventually(LIMIT, "the listener ran", || heard.load(Ordering::Acquire) > 0);
        listeners.push(millis(deadline, heard.load(Ordering::Acquire)));
        drop(guard);
    }
    Ok([
        ("flag, asked every ms", flags, 5.0),
        ("token", tokens, 5.0),
        ("listener", listeners, 20.0),
    ])
}
