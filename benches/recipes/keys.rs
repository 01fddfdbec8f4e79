//! Reused against unique keys per waiter, at the floor: what is faster, and why.
//!
//! etcd finds a prefix in an index of every key that ever was, up to the last compaction. A key
//! that was deleted costs each read of its prefix a look, so a path whose contenders never use a
//! key twice gets slower with every acquire, until it is compacted.

use std::sync::Arc;
use std::time::Duration;

use etcd_client::{CompactionOptions, DeleteOptions, Error, Txn, TxnOp};
use etcd_recipes::testing::EtcdServer;

use crate::floor::Floor;
use crate::floor_path::FloorPath;
use crate::measure::{Contest, Measured, Outcome, plain};
use crate::raw::Keys;
use crate::visits::{Span, rate};

/// Operations of one transaction; etcd's own limit is 128.
const AT_ONCE: usize = 100;

pub(crate) fn uncontended(tasks: usize) -> Outcome<Contest> {
    let (etcd, reused, unique) = stage()?;
    Ok(Contest {
        ours: Box::new(move |length| reused.pairs(tasks, "/reused/", length)),
        floor: Box::new(move |length| {
            let _lives = &etcd;
            unique.pairs(tasks, "/unique/", length)
        }),
        details: Box::new(Vec::new),
    })
}

pub(crate) fn hand_off(tasks: usize) -> Outcome<Contest> {
    let (etcd, reused, unique) = stage()?;
    let reused = FloorPath::open(&reused, "/reused/")?;
    let unique = FloorPath::open(&unique, "/unique/")?;
    let run = move |path: &FloorPath, length| {
        let span = Span::soon(Duration::from_millis(10), length);
        Ok(rate(&path.visit(tasks, span)?, span))
    };
    Ok(Contest {
        ours: Box::new(move |length| run(&reused, length)),
        floor: Box::new(move |length| {
            let _lives = &etcd;
            run(&unique, length)
        }),
        details: Box::new(Vec::new),
    })
}

fn stage() -> Outcome<(EtcdServer, Arc<Floor>, Arc<Floor>)> {
    let etcd = EtcdServer::start()?;
    let reused = Floor::connect(&etcd.endpoint(), Keys::Reused)?;
    let unique = Floor::connect(&etcd.endpoint(), Keys::Unique)?;
    Ok((etcd, Arc::new(reused), Arc::new(unique)))
}

/// How long an uncontended pair takes on a path on which so many keys were deleted.
pub(crate) fn deleted() -> Outcome<Vec<Measured>> {
    let etcd = EtcdServer::start()?;
    let floor = Floor::connect(&etcd.endpoint(), Keys::Reused)?;
    let mut all = Vec::new();
    let mut standing = 0;
    let mut pair = |floor: &Floor, what: &str, prefix: &str| -> Outcome<()> {
        let rate = floor.pairs(1, prefix, Duration::from_secs(1))?;
        all.push(plain(format!("lock + unlock, {what}"), 1e3 / rate, "ms"));
        Ok(())
    };
    for count in [0, 1_000, 10_000, 100_000] {
        // `pairs` works below the number of its task.
        bury(&floor, "/keys/0/", standing..count)?;
        standing = count;
        pair(&floor, &format!("{count} deleted keys on the path"), "/keys/")?;
    }
    pair(&floor, "as many, on another path", "/others/")?;
    compact(&floor)?;
    pair(&floor, "after a compaction", "/keys/")?;
    Ok(all)
}

/// Makes keys and deletes them.
fn bury(floor: &Floor, prefix: &str, numbers: std::ops::Range<usize>) -> Outcome<()> {
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

/// Drops the history, and waits until that is done.
fn compact(floor: &Floor) -> Outcome<()> {
    floor.runtime.block_on(async {
        let mut client = floor.client.clone();
        let now = client.get("now", None).await?;
        let revision = now.header().map_or(0, etcd_client::ResponseHeader::revision);
        let physical = CompactionOptions::new().with_physical();
        client.compact(revision, Some(physical)).await?;
        Ok::<_, Error>(())
    })?;
    Ok(())
}
