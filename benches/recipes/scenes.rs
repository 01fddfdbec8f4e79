//! The scenes that have a floor.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use etcd_recipes::testing::EtcdServer;
use etcd_recipes::{Client, LeaderSelector, Mutex, RwLock, Semaphore};

use crate::floor::{Floor, per_second};
use crate::measure::{Contest, Outcome, Scene, Work};

/// One server with a client of each kind.
struct Stage {
    etcd: EtcdServer,
    client: Client,
    floor: Arc<Floor>,
}

fn stage(memory: bool) -> Outcome<Stage> {
    let builder = EtcdServer::builder();
    let builder = if memory { builder.data_dir_in("/dev/shm") } else { builder };
    let etcd = builder.start()?;
    let client = Client::connect([etcd.endpoint()])?;
    client.wait_ready(Duration::from_secs(10))?;
    let floor = Arc::new(Floor::connect(&etcd.endpoint())?);
    Ok(Stage { etcd, client, floor })
}

/// So many threads do one thing over and over; how often all of them together did it, per second.
fn threads<T: Send + 'static>(
    workers: Vec<T>,
    length: Duration,
    work: impl Fn(&T) -> Outcome<()> + Clone + Send + 'static,
) -> Outcome<f64> {
    let begun = Instant::now();
    let end = begun + length;
    let running: Vec<_> = workers
        .into_iter()
        .map(|worker| {
            let work = work.clone();
            thread::spawn(move || -> Outcome<u64> {
                let mut done = 0;
                while Instant::now() < end {
                    work(&worker)?;
                    done += 1;
                }
                Ok(done)
            })
        })
        .collect();
    let mut sum = 0;
    for one in running {
        sum += one.join().map_err(|_| "a worker panicked")??;
    }
    Ok(per_second(sum, begun.elapsed()))
}

/// `floor` is given the stage's; the server lives as long as the work.
fn contest(
    stage: Stage,
    ours: impl FnMut(Duration) -> Outcome<f64> + 'static,
    floor: impl Fn(&Floor, Duration) -> Outcome<f64> + 'static,
) -> Contest {
    let Stage { etcd, client, floor: raw } = stage;
    let floor: Work = Box::new(move |length| {
        let _server = &etcd;
        let _client = &client;
        floor(&raw, length)
    });
    Contest { ours: Box::new(ours), floor }
}

fn scene(
    name: impl Into<String>,
    bar: f64,
    prepare: impl Fn() -> Outcome<Contest> + 'static,
) -> Scene {
    Scene { name: name.into(), bar: Some(bar), prepare: Box::new(prepare) }
}

pub(crate) fn all() -> Vec<Scene> {
    let mut all = Vec::new();
    for (count, bar) in [(1, 0.85), (8, 0.90), (32, 0.90)] {
        let name = format!("lock + unlock, uncontended, {count} threads");
        all.push(scene(name, bar, move || uncontended(false, count)));
    }
    for count in [1, 8, 32] {
        let name = format!("lock + unlock, uncontended, memory disk, {count} threads");
        all.push(scene(name, 0.75, move || uncontended(true, count)));
    }
    for count in [2, 8, 32] {
        let name = format!("hand-off on one path, {count} threads");
        all.push(scene(name, 0.85, move || hand_off(count)));
    }
    all.push(scene("try_lock, busy", 0.90, busy_try));
    all.push(scene("read + unlock, uncontended, 8 threads", 0.85, || shared(8, true)));
    all.push(scene("write + unlock, uncontended, 8 threads", 0.85, || shared(8, false)));
    all.push(scene("acquire + release of a permit, 8 threads", 0.85, || permits(8)));
    // Within 1.5 times of a lock's hand-off.
    all.push(scene("election hand-over, 10 candidates", 0.66, || election(10)));
    all
}

fn uncontended(memory: bool, count: usize) -> Outcome<Contest> {
    let stage = stage(memory)?;
    let client = stage.client.clone();
    let mutexes = (0..count)
        .map(|n| Mutex::new(&client, format!("/ours/{n}")))
        .collect::<etcd_recipes::Result<Vec<_>>>()?;
    let ours = move |length| {
        threads(mutexes.clone(), length, |mutex| {
            drop(mutex.lock()?);
            Ok(())
        })
    };
    Ok(contest(stage, ours, move |floor, length| floor.pairs(count, length)))
}

fn hand_off(count: usize) -> Outcome<Contest> {
    let stage = stage(false)?;
    let mutex = Mutex::new(&stage.client, "/ours/path")?;
    let ours = move |length| {
        threads(vec![mutex.clone(); count], length, |mutex| {
            drop(mutex.lock()?);
            Ok(())
        })
    };
    Ok(contest(stage, ours, move |floor, length| floor.hand_offs(count, length)))
}

fn busy_try() -> Outcome<Contest> {
    let stage = stage(false)?;
    let holder = Mutex::new(&stage.client, "/busy")?.lock_owned()?;
    let mutex = Mutex::new(&stage.client, "/busy")?;
    let ours = move |length| {
        let _holder = &holder;
        threads(vec![mutex.clone()], length, |mutex| match mutex.try_lock()? {
            None => Ok(()),
            Some(_) => Err("a busy lock was free".into()),
        })
    };
    Ok(contest(stage, ours, |floor, length| floor.reads(1, length)))
}

fn shared(count: usize, read: bool) -> Outcome<Contest> {
    let stage = stage(false)?;
    let locks = (0..count)
        .map(|n| RwLock::new(&stage.client, format!("/ours/{n}")))
        .collect::<etcd_recipes::Result<Vec<_>>>()?;
    let ours = move |length| {
        threads(locks.clone(), length, move |lock| {
            if read {
                drop(lock.read()?);
            } else {
                drop(lock.write()?);
            }
            Ok(())
        })
    };
    Ok(contest(stage, ours, move |floor, length| floor.pairs(count, length)))
}

fn permits(count: usize) -> Outcome<Contest> {
    let stage = stage(false)?;
    let semaphores = (0..count)
        .map(|n| Semaphore::new(&stage.client, format!("/ours/{n}"), 2))
        .collect::<etcd_recipes::Result<Vec<_>>>()?;
    let ours = move |length| {
        threads(semaphores.clone(), length, |semaphore| {
            drop(semaphore.acquire()?);
            Ok(())
        })
    };
    Ok(contest(stage, ours, move |floor, length| floor.pairs(count, length)))
}

/// Terms of no length, from candidate to candidate.
fn election(candidates: usize) -> Outcome<Contest> {
    let stage = stage(false)?;
    let client = stage.client.clone();
    let ours = move |length| {
        let terms = Arc::new(std::sync::atomic::AtomicU64::new(0));
        let selectors = (0..candidates)
            .map(|_| {
                let terms = terms.clone();
                LeaderSelector::builder(&client, "/ours/election")
                    .auto_requeue(true)
                    .on_lead(move |_| {
                        terms.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                        Ok(())
                    })
                    .build()
            })
            .collect::<etcd_recipes::Result<Vec<_>>>()?;
        for selector in &selectors {
            selector.start()?;
        }
        let begun = Instant::now();
        // The measure itself.
        thread::sleep(length);
        let done = terms.load(std::sync::atomic::Ordering::Relaxed);
        let rate = per_second(done, begun.elapsed());
        for selector in &selectors {
            selector.close()?;
        }
        Ok(rate)
    };
    Ok(contest(stage, ours, move |floor, length| floor.hand_offs(candidates, length)))
}
