//! The rows of a set of mutexes. Its recipes are the mutexes; the one that is closed here is not
//! the one that speaks for the set.

use etcd_recipes::{FencedTxn, LossReason, MultiLock, MultiLockGuard, Mutex, Op, Txn};

use crate::rows::{ACQUIRE, RELEASE, Row, TRY, TRY_FOR, dropping, guarded, held, look, row};
use crate::stage::{Stage, Waits, plain, show};
use crate::table::L;
use crate::table::Situation::{FrozenBefore, KeyDeleted, RecipeClosedBefore};

const AS_PUT: &str = "as `multi.put`: same code";
const AS_UNLOCK: &str = "as `MultiLockGuard::unlock`: same code";

pub(crate) fn rows() -> Vec<Row> {
    let fenced = [FrozenBefore, KeyDeleted, RecipeClosedBefore];
    let dropped = RELEASE.dropped().only(&[FrozenBefore, KeyDeleted], AS_UNLOCK);
    vec![
        row("multi.lock", "MultiLock::lock", lock, ACQUIRE.with_two_keys()),
        row("multi.try_lock", "MultiLock::try_lock", try_lock, TRY.with_two_keys()),
        row("multi.try_lock_for", "MultiLock::try_lock_for", try_lock_for, TRY_FOR),
        row("multi.put", "MultiLockGuard::put", put, guarded("Ok(false)")),
        row("multi.txn", "MultiLockGuard::txn", txn, guarded("Ok(Fenced)").only(&fenced, AS_PUT)),
        row(
            "guard.verify",
            "MultiLockGuard::verify",
            verify,
            look("Ok(true)", "Ok(false)").with_two_keys(),
        ),
        row("release", "MultiLockGuard::unlock", unlock, RELEASE),
        row("release", "drop of a MultiLockGuard", drop_guard, dropped),
    ]
}

// ----- how the calls are made ---------------------------------------------------------------------

/// A set whose client has a connection and a session, and the mutex that is closed.
fn set(stage: &Stage<'_>) -> (MultiLock, Mutex) {
    let mutex = |name: &str| {
        Mutex::builder(&stage.client, format!("{}/{name}", stage.path))
            .ttl(stage.lock_ttl())
            .build()
            .unwrap()
    };
    let (first, last) = (mutex("a"), mutex("b"));
    let set = MultiLock::new([first, last.clone()]).unwrap();
    assert!(set.lock().unwrap().unlock());
    (set, last)
}

/// Somebody else holds one of the two.
fn rival(stage: &Stage<'_>) {
    stage.rival_at("b/0-rival", "somebody");
}

fn lock(stage: &Stage<'_>) {
    let (set, last) = set(stage);
    rival(stage);
    let mut guard = None;
    stage.call(Waits::InQueue, &|| drop(last.close()), || {
        show(set.lock(), |got| held(Some(&*guard.insert(got))))
    });
}

fn try_lock(stage: &Stage<'_>) {
    let (set, last) = set(stage);
    let mut guard = None;
    stage.call(Waits::ForEtcd, &|| drop(last.close()), || {
        show(set.try_lock(), |got| {
            guard = got;
            held(guard.as_ref())
        })
    });
}

fn try_lock_for(stage: &Stage<'_>) {
    let (set, last) = set(stage);
    rival(stage);
    stage.call(Waits::InQueueFor, &|| drop(last.close()), || {
        show(set.try_lock_for(L), |guard| held(guard.as_ref()))
    });
}

fn put(stage: &Stage<'_>) {
    let (set, last) = set(stage);
    let guard = set.lock().unwrap();
    stage.call(Waits::ForEtcd, &|| drop(last.close()), || {
        plain(guard.put(stage.data_key(), "guarded"))
    });
}

fn txn(stage: &Stage<'_>) {
    let (set, last) = set(stage);
    let guard = set.lock().unwrap();
    stage.call(Waits::ForEtcd, &|| drop(last.close()), || {
        let write = Txn::new().and_then([Op::put(stage.data_key(), "guarded")]);
        show(guard.txn(write), |done| match done {
            FencedTxn::Applied(_) => "Applied".to_owned(),
            FencedTxn::CompareFailed(_) => "CompareFailed".to_owned(),
            FencedTxn::Fenced => "Fenced".to_owned(),
        })
    });
}

fn verify(stage: &Stage<'_>) {
    let (set, last) = set(stage);
    let guard = set.lock().unwrap();
    stage.call(Waits::ForEtcd, &|| drop(last.close()), || plain(guard.verify()));
}

fn release(guard: MultiLockGuard, path: &str) -> String {
    let hold = guard.hold(path).unwrap();
    let stood = guard.unlock();
    match hold.loss() {
        Some(loss) if loss.reason == LossReason::Closed => format!("{stood}, lost by Closed"),
        _ => stood.to_string(),
    }
}

fn unlock(stage: &Stage<'_>) {
    let (set, last) = set(stage);
    let guard = set.lock().unwrap();
    let path = format!("{}/b", stage.path);
    stage.call(Waits::ForEtcd, &|| drop(last.close()), || release(guard, &path));
}

fn drop_guard(stage: &Stage<'_>) {
    let (set, last) = set(stage);
    let guard = set.lock().unwrap();
    stage.call(Waits::ForEtcd, &|| drop(last.close()), || dropping(guard));
}
