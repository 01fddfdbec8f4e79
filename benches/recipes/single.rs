//! The figures that have no floor: times and sizes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use etcd_recipes::testing::{EtcdServer, FaultProxy, Mode, boot_nanos, eventually};
use etcd_recipes::{Client, Mutex, TransientKeyValue};

use crate::measure::{Outcome, Spread};

pub(crate) struct Measured {
    pub(crate) what: String,
    pub(crate) value: f64,
    pub(crate) unit: &'static str,
    /// What it must not exceed.
    pub(crate) bar: Option<f64>,
}

pub(crate) struct Single {
    pub(crate) name: &'static str,
    pub(crate) run: fn() -> Outcome<Vec<Measured>>,
}

pub(crate) fn all() -> [Single; 4] {
    [
        Single { name: "is_held()", run: is_held },
        Single { name: "loss: from the deadline", run: loss },
        Single { name: "heal: from the return of etcd", run: heal },
        Single { name: "held locks", run: held },
    ]
}

const LIMIT: Duration = Duration::from_secs(30);
const TTL: Duration = Duration::from_secs(2);

fn measured(what: impl Into<String>, value: f64, unit: &'static str, bar: Option<f64>) -> Measured {
    Measured { what: what.into(), value, unit, bar }
}

fn millis(from: u64, to: u64) -> f64 {
    Duration::from_nanos(to.saturating_sub(from)).as_secs_f64() * 1_000.0
}

fn is_held() -> Outcome<Vec<Measured>> {
    const CALLS: u32 = 1_000_000;
    let etcd = EtcdServer::start()?;
    let client = Client::connect([etcd.endpoint()])?;
    let mutex = Mutex::new(&client, "/bench/held")?;
    let guard = mutex.lock()?;
    let mut times = Vec::new();
    for _ in 0..15 {
        let begun = Instant::now();
        for _ in 0..CALLS {
            std::hint::black_box(guard.is_held());
        }
        times.push(begun.elapsed().as_secs_f64() * 1e9 / f64::from(CALLS));
    }
    Ok(vec![measured("one call, median", Spread::of(&times).median, "ns", Some(100.0))])
}

/// When flag, token and listener said so, counted from the deadline as it stood before.
fn loss() -> Outcome<Vec<Measured>> {
    let etcd = EtcdServer::start()?;
    let (mut flags, mut tokens, mut listeners) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..10 {
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
        let token = std::thread::spawn({
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
            std::thread::sleep(Duration::from_millis(1));
        }
        flags.push(millis(deadline, boot_nanos()));
        tokens.push(millis(deadline, token.join().map_err(|_| "the watcher panicked")?));
        eventually(LIMIT, "the listener ran", || heard.load(Ordering::Acquire) > 0);
        listeners.push(millis(deadline, heard.load(Ordering::Acquire)));
        drop(guard);
    }
    Ok(vec![
        measured("flag, asked every ms, median", Spread::of(&flags).median, "ms", Some(5.0)),
        measured("token, median", Spread::of(&tokens).median, "ms", Some(5.0)),
        measured("listener, median", Spread::of(&listeners).median, "ms", Some(20.0)),
    ])
}

/// A key that is gone comes back once etcd answers again.
fn heal() -> Outcome<Vec<Measured>> {
    let mut times = Vec::new();
    let etcd = EtcdServer::start()?;
    let proxy = FaultProxy::start(etcd.endpoint())?;
    let client = Client::connect([proxy.endpoint()])?;
    let observer = Client::connect([etcd.endpoint()])?;
    for round in 0..9 {
        let key = format!("/bench/heal-{round}");
        let transient = TransientKeyValue::builder(&client, key.as_str(), "me").ttl(TTL).build()?;
        transient.start()?;
        proxy.set(Mode::Blackhole);
        eventually(LIMIT, "the key is gone", || matches!(observer.get(key.as_str()), Ok(None)));
        // A moment, so that the first tries to heal have failed.
        std::thread::sleep(Duration::from_millis(100 * (round % 5)));
        let back = boot_nanos();
        proxy.set(Mode::Pass);
        while observer.get(key.as_str())?.is_none() {}
        times.push(millis(back, boot_nanos()));
        transient.close()?;
    }
    let one = Spread::of(&times).median;
    let many = many_heals(&etcd, &proxy, &client)?;
    Ok(vec![
        measured("one key, median", one, "ms", Some(300.0)),
        measured("1,000 keys, all of them", many, "ms", Some(2_000.0)),
    ])
}

fn many_heals(etcd: &EtcdServer, proxy: &FaultProxy, client: &Client) -> Outcome<f64> {
    const KEYS: u64 = 1_000;
    let observer = Client::connect([etcd.endpoint()])?;
    let keys = (0..KEYS)
        .map(|n| {
            let key = format!("/bench/many/{n}");
            let transient = TransientKeyValue::builder(client, key, "me").ttl(TTL).build()?;
            transient.start()?;
            Ok(transient)
        })
        .collect::<etcd_recipes::Result<Vec<_>>>()?;
    proxy.set(Mode::Blackhole);
    let stands = || observer.count_prefix("/bench/many/");
    eventually(LIMIT, "the keys are gone", || matches!(stands(), Ok(0)));
    let back = boot_nanos();
    proxy.set(Mode::Pass);
    eventually(LIMIT, "the keys are back", || matches!(stands(), Ok(KEYS)));
    let took = millis(back, boot_nanos());
    for key in keys {
        key.close()?;
    }
    Ok(took)
}

/// What many held locks of one client cost: renewals, memory, threads.
fn held() -> Outcome<Vec<Measured>> {
    let etcd = EtcdServer::start()?;
    let mut all = Vec::new();
    for count in [1_usize, 1_000, 10_000] {
        let proxy = FaultProxy::start(etcd.endpoint())?;
        let client = Client::connect([proxy.endpoint()])?;
        let warm = Mutex::builder(&client, format!("/bench/{count}-warm")).ttl(TTL).build()?;
        let warm = warm.lock_owned()?;
        let before = resident()?;
        let mutexes = (0..count)
            .map(|n| Mutex::builder(&client, format!("/bench/{count}/{n}")).ttl(TTL).build())
            .collect::<etcd_recipes::Result<Vec<_>>>()?;
        let made = resident()?;
        let guards =
            mutexes.iter().map(Mutex::lock_owned).collect::<etcd_recipes::Result<Vec<_>>>()?;
        let locked = resident()?;
        // Until the own keys are watched.
        std::thread::sleep(Duration::from_secs(3));
        let watched = resident()?;
        let frames = proxy.client_data_frames();
        std::thread::sleep(Duration::from_secs(4));
        #[allow(clippy::cast_precision_loss, reason = "small counts")]
        let (frames, each) = ((proxy.client_data_frames() - frames) as f64, count as f64);
        let shown = format!("{count} held");
        all.push(measured(format!("{shown}: requests per second"), frames / 4.0, "/s", None));
        if count > 1 {
            let per = |from: f64, to: f64| (to - from).max(0.0) / each;
            all.push(measured(format!("{shown}: a mutex"), per(before, made), "B each", None));
            let hold = per(made, locked);
            all.push(measured(format!("{shown}: a hold"), hold, "B each", Some(2_048.0)));
            let with = per(made, watched);
            all.push(measured(format!("{shown}: with own-key watch"), with, "B each", None));
        }
        let threads = std::fs::read_dir("/proc/self/task")?.count();
        #[allow(clippy::cast_precision_loss, reason = "a small count")]
        all.push(measured(format!("{shown}: threads"), threads as f64, "", None));
        drop((guards, warm));
        client.close()?;
    }
    Ok(all)
}

/// The memory of this process, in bytes.
fn resident() -> Outcome<f64> {
    let text = std::fs::read_to_string("/proc/self/statm")?;
    let pages: f64 = text.split_whitespace().nth(1).ok_or("statm")?.parse()?;
    Ok(pages * 4_096.0)
}
