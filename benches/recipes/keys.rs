//! Reused against unique keys per waiter, at the floor: what is faster, and why.
//!
//! etcd finds a prefix in an index of every key that ever was, up to the last compaction. A key
//! that was deleted costs each read of its prefix a look, so a path whose contenders never use a
//! key twice gets slower with every acquire, until it is compacted.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{DeleteOptions, Error, Txn, TxnOp};
use etcd_recipes::testing::EtcdServer;

use crate::floor::Floor;
use crate::floor_path::FloorPath;
use crate::measure::{Contest, Measured, Outcome, plain};
use crate::raw::Keys;
use crate::visits::{Span, rate};

/// Operations of one transaction; etcd's own limit is 128.
const AT_ONCE: usize = 100;

/// Both kinds on one server. Its history is dropped before each pair, or never.
pub(crate) fn uncontended(tasks: usize, compacted: bool) -> Outcome<Contest> {
    let (etcd, reused, unique) = stage()?;
    let tidier = compacted.then(|| unique.clone());
    let ours = move |length| reused.pairs(tasks, "/reused/", length);
    let floor = move |length| unique.pairs(tasks, "/unique/", length);
    Ok(contest(etcd, ours, floor, tidier))
}

pub(crate) fn hand_off(tasks: usize, compacted: bool) -> Outcome<Contest> {
    let (etcd, reused, unique) = stage()?;
    let tidier = compacted.then(|| unique.clone());
    let reused = FloorPath::open(&reused, "/reused/")?;
    let unique = FloorPath::open(&unique, "/unique/")?;
    let run = move |path: &FloorPath, length| {
        let span = Span::soon(Duration::from_millis(10), length);
        Ok(rate(&path.visit(tasks, span)?, span))
    };
    let (ours, floor) = (move |length| run(&reused, length), move |length| run(&unique, length));
    Ok(contest(etcd, ours, floor, tidier))
}

fn stage() -> Outcome<(EtcdServer, Arc<Floor>, Arc<Floor>)> {
    let etcd = EtcdServer::start()?;
    let reused = Floor::connect(&etcd.endpoint(), Keys::Reused)?;
    let unique = Floor::connect(&etcd.endpoint(), Keys::Unique)?;
    Ok((etcd, Arc::new(reused), Arc::new(unique)))
}

fn contest(
    etcd: EtcdServer,
    reused: impl FnMut(Duration) -> Outcome<f64> + 'static,
    mut unique: impl FnMut(Duration) -> Outcome<f64> + 'static,
    tidier: Option<Arc<Floor>>,
) -> Contest {
    Contest {
        ours: Box::new(reused),
        floor: Box::new(move |length| {
            let _lives = &etcd;
            unique(length)
        }),
        tidy: Box::new(move || tidier.as_ref().map_or(Ok(()), |floor| floor.compact())),
        details: Box::new(Vec::new),
    }
}

/// How long an uncontended pair takes on a path on which so many keys were deleted, and what they
/// cost etcd: keys that were used once, and as many uses of a few.
pub(crate) fn deleted() -> Outcome<Vec<Measured>> {
    const MOST: usize = 100_000;
    let mut all = Vec::new();
    let (etcd, floor) = alone()?;
    let empty = memory(&etcd)?;
    let mut before = 0;
    for count in [0, 1_000, 10_000, MOST] {
        bury(&floor, before..count)?;
        before = count;
        all.push(pair(&floor, &format!("{count} deleted keys on the path"), PATH)?);
    }
    all.push(pair(&floor, "as many on another path", "/others/")?);
    all.push(plain("these keys in etcd's memory", memory(&etcd)? - empty, "MiB"));
    floor.compact()?;
    all.push(pair(&floor, "after a compaction", PATH)?);
    let (etcd, floor) = alone()?;
    let empty = memory(&etcd)?;
    for _ in 0..MOST / AT_ONCE {
        bury(&floor, 0..AT_ONCE)?;
    }
    let what = format!("{AT_ONCE} keys deleted {} times each", MOST / AT_ONCE);
    all.push(pair(&floor, &what, PATH)?);
    all.push(plain("these keys in etcd's memory", memory(&etcd)? - empty, "MiB"));
    Ok(all)
}

const PATH: &str = "/keys/";

fn alone() -> Outcome<(EtcdServer, Floor)> {
    let etcd = EtcdServer::start()?;
    let floor = Floor::connect(&etcd.endpoint(), Keys::Reused)?;
    Ok((etcd, floor))
}

fn pair(floor: &Floor, what: &str, prefix: &str) -> Outcome<Measured> {
    let rate = floor.pairs(1, prefix, Duration::from_secs(1))?;
    Ok(plain(format!("lock + unlock, {what}"), 1e3 / rate, "ms"))
}

fn memory(etcd: &EtcdServer) -> Outcome<f64> {
    Ok(etcd.metric("process_resident_memory_bytes", &[])? / f64::from(1 << 20))
}

/// Makes keys on the path of the first task, and deletes them.
fn bury(floor: &Floor, numbers: Range<usize>) -> Outcome<()> {
    let prefix = format!("{PATH}0/");
    floor.runtime.block_on(async {
        let mut client = floor.client.clone();
        let numbers: Vec<usize> = numbers.collect();
        for some in numbers.chunks(AT_ONCE) {
            let puts: Vec<_> = some
                .iter()
                .map(|number| TxnOp::put(format!("{prefix}5e5510-{number:07}"), "", None))
                .collect();
            client.txn(Txn::new().and_then(puts)).await?;
        }
        client.delete(prefix, Some(DeleteOptions::new().with_prefix())).await?;
        Ok::<_, Error>(())
    })?;
    Ok(())
}
