//! The scenes that have a floor.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use etcd_recipes::{LeaderSelector, Mutex, RwLock, Semaphore};

use crate::facade::Facade;
use crate::floor::Floor;
use crate::floor_path::FloorPath;
use crate::measure::{Contest, Outcome, Scene, per_second};
use crate::stage::{Stage, threads};
use crate::visits::{Limits, Log, Span, rate, visit};
use crate::{keys, processes};

/// Time for all threads to be there.
const MOMENT: Duration = Duration::from_millis(10);

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
    all.push(scene("hand-off on one path, 4 processes of 8 threads", 0.60, processes::contest));
    all.push(scene("try_lock, busy", 0.90, || busy_try(1)));
    for count in [8, 32] {
        let name = format!("try_lock, busy, {count} threads");
        all.push(scene(name, 0.90, move || busy_try(count)));
    }
    all.push(scene("read + unlock, uncontended, 8 threads", 0.85, || shared(8, true)));
    all.push(scene("write + unlock, uncontended, 8 threads", 0.85, || shared(8, false)));
    all.push(scene("acquire + release of a permit, 8 threads", 0.85, || permits(8)));
    // Within 1.5 times of a lock's hand-off.
    all.push(scene("election hand-over, 10 candidates", 0.66, || election(10)));
    // No bars: what waking threads costs any facade here.
    for count in [1, 32] {
        let name = format!("floor: for threads / for tasks, busy read, {count} threads");
        let prepare = move || {
            facade(
                move |facade, length| facade.reads(count, length),
                move |floor, length| floor.reads(count, length),
            )
        };
        all.push(Scene { name, bar: None, prepare: Box::new(prepare) });
        let name = format!("floor: for threads / for tasks, lock + unlock, {count} threads");
        let prepare = move || {
            facade(
                move |facade, length| facade.pairs(count, length),
                move |floor, length| floor.pairs(count, "/floor/", length),
            )
        };
        all.push(Scene { name, bar: None, prepare: Box::new(prepare) });
    }
    // No bars: which of the two our keys should be was decided by these.
    for (compacted, how) in [(false, "never"), (true, "always")] {
        let mut keys = |name: &str, prepare: fn(bool) -> Outcome<Contest>| {
            let name = format!("floor: reused / unique keys, {name}, {how} compacted");
            all.push(Scene { name, bar: None, prepare: Box::new(move || prepare(compacted)) });
        };
        keys("1 thread", |compacted| keys::uncontended(1, compacted));
        keys("hand-off, 8 threads", |compacted| keys::hand_off(8, compacted));
    }
    all
}

fn uncontended(memory: bool, count: usize) -> Outcome<Contest> {
    let stage = if memory { Stage::on_memory_disk()? } else { Stage::new()? };
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
    Ok(stage.contest(ours, move |floor, length| floor.pairs(count, "/floor/", length)))
}

fn facade(
    threads: impl Fn(&Facade, Duration) -> Outcome<f64> + 'static,
    tasks: impl Fn(&Floor, Duration) -> Outcome<f64> + 'static,
) -> Outcome<Contest> {
    let stage = Stage::new()?;
    let facade = Facade::connect(&stage.endpoint())?;
    Ok(stage.contest(move |length| threads(&facade, length), tasks))
}

fn hand_off(count: usize) -> Outcome<Contest> {
    let stage = Stage::new()?;
    let mutex = Mutex::new(&stage.client, "/ours/path")?;
    let path = FloorPath::open(&stage.floor, "/floor-path/")?;
    let (ours_log, floor_log) = (Log::default(), Log::default());
    let (ours_seen, floor_seen) = (ours_log.clone(), floor_log.clone());
    let ours = move |length| {
        let span = Span::soon(MOMENT, length);
        let visits = visit(&mutex, count, span)?;
        ours_log.add(&visits)?;
        Ok(rate(&visits, span))
    };
    let floor = move |length| {
        let span = Span::soon(MOMENT, length);
        let visits = path.visit(count, span)?;
        floor_log.add(&visits)?;
        Ok(rate(&visits, span))
    };
    Ok(stage.contest_with(ours, floor, move || {
        let limits = Limits { p99: Some(10.0), unfair: Some(10.0), slow: None };
        let mut details = ours_seen.details("ours", limits);
        details.extend(floor_seen.details("floor", Limits::default()));
        details
    }))
}

fn busy_try(count: usize) -> Outcome<Contest> {
    let stage = Stage::new()?;
    let holder = Mutex::new(&stage.client, "/busy")?.lock_owned()?;
    let mutex = Mutex::new(&stage.client, "/busy")?;
    let ours = move |length| {
        let _holder = &holder;
        threads(vec![mutex.clone(); count], length, |mutex| match mutex.try_lock()? {
            None => Ok(()),
            Some(_) => Err("a busy lock was free".into()),
        })
    };
    Ok(stage.contest(ours, move |floor, length| floor.reads(count, length)))
}

fn shared(count: usize, read: bool) -> Outcome<Contest> {
    let stage = Stage::new()?;
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
    Ok(stage.contest(ours, move |floor, length| floor.pairs(count, "/floor/", length)))
}

fn permits(count: usize) -> Outcome<Contest> {
    let stage = Stage::new()?;
    let semaphores = (0..count)
        .map(|n| Semaphore::new(&stage.client, format!("/ours/{n}"), 2))
        .collect::<etcd_recipes::Result<Vec<_>>>()?;
    let ours = move |length| {
        threads(semaphores.clone(), length, |semaphore| {
            drop(semaphore.acquire()?);
            Ok(())
        })
    };
    Ok(stage.contest(ours, move |floor, length| floor.pairs(count, "/floor/", length)))
}

/// Terms of no length, from candidate to candidate.
fn election(candidates: usize) -> Outcome<Contest> {
    let stage = Stage::new()?;
    let client = stage.client.clone();
    let ours = move |length| {
        let terms = Arc::new(AtomicU64::new(0));
        let selectors = (0..candidates)
            .map(|_| {
                let terms = terms.clone();
                LeaderSelector::builder(&client, "/ours/election")
                    .auto_requeue(true)
                    .on_lead(move |_| {
                        terms.fetch_add(1, Ordering::Relaxed);
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
        let done = terms.load(Ordering::Relaxed);
        let rate = per_second(done, begun.elapsed());
        for selector in &selectors {
            selector.close()?;
        }
        Ok(rate)
    };
    let path = FloorPath::open(&stage.floor, "/floor-path/")?;
    let floor = move |length| {
        let span = Span::soon(MOMENT, length);
        Ok(rate(&path.visit(candidates, span)?, span))
    };
    Ok(stage.contest_with(ours, floor, Vec::new))
}
