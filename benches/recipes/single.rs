//! The figures that have no floor: times and sizes.

use std::time::{Duration, Instant};

use etcd_recipes::testing::{EtcdServer, FaultProxy, Mode, boot_nanos, eventually};
use etcd_recipes::{Client, Mutex, TransientKeyValue};

use crate::measure::{Measured, Outcome, Spread, at_most, millis, plain};
use crate::quiet::first_waits;
use crate::{keys, loss};

pub(crate) struct Single {
    pub(crate) name: &'static str,
    pub(crate) run: Box<dyn Fn() -> Outcome<Vec<Measured>>>,
}

/// `quiet` is how long a path is left in peace before its first contended wait.
pub(crate) fn all(quiet: Duration) -> Vec<Single> {
    let single = |name, run: fn() -> Outcome<Vec<Measured>>| Single { name, run: Box::new(run) };
    vec![
        Single {
            name: "first contended wait after a quiet time, two processes",
            run: Box::new(move || first_waits(quiet)),
        },
        single("is_held()", is_held),
        single("loss: from the deadline", loss::at_rest),
        single("loss: from the deadline, all cores busy", loss::under_load),
        single("deleted keys, not compacted: the floor's lock + unlock", keys::deleted),
        single("heal: from the return of etcd", heal),
        single("held locks", held),
    ]
}

const LIMIT: Duration = Duration::from_secs(30);
const TTL: Duration = Duration::from_secs(2);

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
    Ok(vec![at_most("one call, median", Spread::of(&times).median, "ns", Some(100.0))])
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
        at_most("one key, median", one, "ms", Some(300.0)),
        at_most("1,000 keys, all of them", many, "ms", Some(2_000.0)),
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
        all.push(plain(format!("{shown}: requests per second"), frames / 4.0, "/s"));
        if count > 1 {
            let per = |from: f64, to: f64| (to - from).max(0.0) / each;
            all.push(plain(format!("{shown}: a mutex"), per(before, made), "B each"));
            let hold = per(made, locked);
            all.push(at_most(format!("{shown}: a hold"), hold, "B each", Some(2_048.0)));
            let with = per(made, watched);
            all.push(plain(format!("{shown}: with own-key watch"), with, "B each"));
        }
        let threads = std::fs::read_dir("/proc/self/task")?.count();
        #[allow(clippy::cast_precision_loss, reason = "a small count")]
        all.push(plain(format!("{shown}: threads"), threads as f64, ""));
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
