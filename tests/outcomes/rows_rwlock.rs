//! The rows of the read/write lock.

use etcd_recipes::{
    LossReason, OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock, RwLockReadGuard,
    RwLockWriteGuard, SharedHold,
};

use crate::rows::{
    ACQUIRE, CLOSE_MUTEX, RELEASE, Row, STOPS, TRY, TRY_FOR, dropping, held, look, released, row,
};
use crate::stage::{Stage, Waits, plain, show};
use crate::table::Situation::{
    self, CancelledDuring, FrozenBefore, FrozenDuring, KeyDeleted, KilledBefore, ReplyLost,
};
use crate::table::{AT_ONCE, BUDGET, Cells, L, Left, says};

const AS_READ: &str = "as `rwlock.read`: same code";
const AS_TRY_READ: &str = "as `rwlock.try_read`: same code";
const AS_TRY_READ_FOR: &str = "as `rwlock.try_read_for`: same code";
const AS_CONTENDERS: &str = "as `mutex.contenders`: same code";
const AS_RELEASE: &str = "as `RwLockReadGuard::unlock`: same code";
const AS_DOWNGRADE: &str = "as `RwLockWriteGuard::downgrade`: same code";
const AS_CLOSE: &str = "as `Mutex::close`: same code";

/// What a sibling shows of its own: its name, its guard and how long it waits.
const FEW: [Situation; 2] = [FrozenBefore, ReplyLost];

pub(crate) fn rows() -> Vec<Row> {
    let acquire = ACQUIRE.only(&FEW, AS_READ);
    let attempt = TRY.only(&FEW, AS_TRY_READ);
    let limited = TRY_FOR.only(&[FrozenBefore, FrozenDuring], AS_TRY_READ_FOR);
    let release = RELEASE.only(&[FrozenBefore, KeyDeleted], AS_RELEASE);
    vec![
        row("rwlock.read", "RwLock::read", read, ACQUIRE),
        row("rwlock.read_owned", "RwLock::read_owned", read_owned, acquire),
        row("rwlock.write", "RwLock::write", write, acquire),
        row("rwlock.write_owned", "RwLock::write_owned", write_owned, acquire),
        row("rwlock.try_read", "RwLock::try_read", try_read, TRY),
        row("rwlock.try_read", "RwLock::try_read beside a reader", try_read_beside, TRY),
        row("rwlock.try_read_owned", "RwLock::try_read_owned", try_read_owned, attempt),
        row("rwlock.try_write", "RwLock::try_write", try_write, attempt),
        row("rwlock.try_write_owned", "RwLock::try_write_owned", try_write_owned, attempt),
        row("rwlock.try_read_for", "RwLock::try_read_for", try_read_for, TRY_FOR),
        row("rwlock.try_read_owned_for", "RwLock::try_read_owned_for", read_owned_for, limited),
        row("rwlock.try_write_for", "RwLock::try_write_for", try_write_for, limited),
        row("rwlock.try_write_owned_for", "RwLock::try_write_owned_for", write_owned_for, limited),
        row(
            "rwlock.contenders",
            "RwLock::contenders",
            contenders,
            look("Ok(1)", "Ok(0)").only(&[KilledBefore, ReplyLost, KeyDeleted], AS_CONTENDERS),
        ),
        row("release", "RwLockReadGuard::unlock", unlock_read, RELEASE),
        row("release", "RwLockWriteGuard::unlock", unlock_write, release),
        row("release", "OwnedRwLockReadGuard::unlock", unlock_owned_read, release),
        row("release", "OwnedRwLockWriteGuard::unlock", unlock_owned_write, release),
        row(
            "release",
            "drop of a RwLockReadGuard",
            drop_read,
            RELEASE.dropped().only(&[FrozenBefore, CancelledDuring], AS_RELEASE),
        ),
        row("downgrade", "RwLockWriteGuard::downgrade", downgrade, DOWNGRADE),
        row(
            "downgrade",
            "OwnedRwLockWriteGuard::downgrade",
            downgrade_owned,
            DOWNGRADE.only(&[FrozenBefore, KeyDeleted], AS_DOWNGRADE),
        ),
        row(
            "downgrade",
            "RwLockWriteGuard::unlock before a read guard",
            unlock_before_read,
            Cells {
                frozen_before: says("true", BUDGET, Left::Key),
                key_deleted: says("false", AT_ONCE, Left::NoKey),
                ..DOWNGRADE.only(&[FrozenBefore, KeyDeleted], AS_DOWNGRADE)
            },
        ),
        row(
            "recipe.close",
            "RwLock::close",
            close,
            CLOSE_MUTEX.only(&[FrozenBefore, ReplyLost, CancelledDuring], AS_CLOSE),
        ),
    ]
}

/// Never interrupted, and with etcd away back in its budget, with the read guard. A hold that etcd
/// says is gone, or that is closed meanwhile, is no reader's either.
const DOWNGRADE: Cells = Cells {
    frozen_before: says("Ok(read)", BUDGET, Left::Key),
    killed_before: says("Ok(read)", BUDGET, Left::Key),
    reply_lost: says("Ok(read)", AT_ONCE, Left::Key),
    key_deleted: says("Err(Lost)", AT_ONCE, Left::NoKey),
    lease_revoked: says("Err(Lost)", AT_ONCE, Left::NoKey),
    cancelled_before: says("Ok(read)", AT_ONCE, Left::Key),
    cancelled_during: says("Ok(read)", BUDGET, Left::Key),
    client_closed_before: says("Err(Closed)", AT_ONCE, Left::NoKey),
    client_closed_during: says("Err(Closed)", BUDGET, Left::NothingAtTtl),
    recipe_closed_before: says("Err(Closed)", AT_ONCE, Left::NoKey),
    recipe_closed_during: says("Err(Closed)", BUDGET, Left::NothingAtTtl),
    ..STOPS
};

// ----- how the calls are made ---------------------------------------------------------------------

/// A lock whose client has a connection and a session.
fn lock(stage: &Stage<'_>) -> RwLock {
    let lock =
        RwLock::builder(&stage.client, stage.path.as_str()).ttl(stage.lock_ttl()).build().unwrap();
    assert!(lock.read().unwrap().unlock());
    lock
}

fn read(stage: &Stage<'_>) {
    let lock = lock(stage);
    stage.rival();
    let mut guard = None;
    stage.call(Waits::InQueue, &|| drop(lock.close()), || {
        show(lock.read(), |got| held(Some(&*guard.insert(got))))
    });
}

fn read_owned(stage: &Stage<'_>) {
    let lock = lock(stage);
    stage.rival();
    let mut guard = None;
    stage.call(Waits::InQueue, &|| drop(lock.close()), || {
        show(lock.read_owned(), |got| held(Some(&*guard.insert(got))))
    });
}

fn write(stage: &Stage<'_>) {
    let lock = lock(stage);
    reading_rival(stage, &lock);
    let mut guard = None;
    stage.call(Waits::InQueue, &|| drop(lock.close()), || {
        show(lock.write(), |got| held(Some(&*guard.insert(got))))
    });
}

fn write_owned(stage: &Stage<'_>) {
    let lock = lock(stage);
    reading_rival(stage, &lock);
    let mut guard = None;
    stage.call(Waits::InQueue, &|| drop(lock.close()), || {
        show(lock.write_owned(), |got| held(Some(&*guard.insert(got))))
    });
}

/// Somebody else reads.
fn reading_rival(stage: &Stage<'_>, lock: &RwLock) {
    let guard = lock.read_owned().unwrap();
    let reader = stage.client.get(guard.lock_key()).unwrap().unwrap();
    assert!(guard.unlock());
    stage.rival_at("0-rival", reader.value);
}

fn try_read(stage: &Stage<'_>) {
    let lock = lock(stage);
    let mut guard = None;
    stage.call(Waits::ForEtcd, &|| drop(lock.close()), || {
        show(lock.try_read(), |got| {
            guard = got;
            held(guard.as_ref())
        })
    });
}

fn try_read_beside(stage: &Stage<'_>) {
    let lock = lock(stage);
    reading_rival(stage, &lock);
    let mut guard = None;
    stage.call(Waits::ForEtcd, &|| drop(lock.close()), || {
        show(lock.try_read(), |got| {
            guard = got;
            held(guard.as_ref())
        })
    });
}

fn try_read_owned(stage: &Stage<'_>) {
    let lock = lock(stage);
    let mut guard = None;
    stage.call(Waits::ForEtcd, &|| drop(lock.close()), || {
        show(lock.try_read_owned(), |got| {
            guard = got;
            held(guard.as_ref())
        })
    });
}

fn try_write(stage: &Stage<'_>) {
    let lock = lock(stage);
    let mut guard = None;
    stage.call(Waits::ForEtcd, &|| drop(lock.close()), || {
        show(lock.try_write(), |got| {
            guard = got;
            held(guard.as_ref())
        })
    });
}

fn try_write_owned(stage: &Stage<'_>) {
    let lock = lock(stage);
    let mut guard = None;
    stage.call(Waits::ForEtcd, &|| drop(lock.close()), || {
        show(lock.try_write_owned(), |got| {
            guard = got;
            held(guard.as_ref())
        })
    });
}

fn try_read_for(stage: &Stage<'_>) {
    let lock = lock(stage);
    stage.rival();
    stage.call(Waits::InQueueFor, &|| drop(lock.close()), || {
        show(lock.try_read_for(L), |guard| held(guard.as_ref()))
    });
}

fn read_owned_for(stage: &Stage<'_>) {
    let lock = lock(stage);
    stage.rival();
    stage.call(Waits::InQueueFor, &|| drop(lock.close()), || {
        show(lock.try_read_owned_for(L), |guard| held(guard.as_ref()))
    });
}

fn try_write_for(stage: &Stage<'_>) {
    let lock = lock(stage);
    reading_rival(stage, &lock);
    stage.call(Waits::InQueueFor, &|| drop(lock.close()), || {
        show(lock.try_write_for(L), |guard| held(guard.as_ref()))
    });
}

fn write_owned_for(stage: &Stage<'_>) {
    let lock = lock(stage);
    reading_rival(stage, &lock);
    stage.call(Waits::InQueueFor, &|| drop(lock.close()), || {
        show(lock.try_write_owned_for(L), |guard| held(guard.as_ref()))
    });
}

fn contenders(stage: &Stage<'_>) {
    let lock = lock(stage);
    let _guard = lock.read().unwrap();
    stage.call(Waits::ForEtcd, &|| drop(lock.close()), || {
        show(lock.contenders(), |all| all.len().to_string())
    });
}

pub(crate) fn released_shared(stood: bool, hold: &SharedHold) -> String {
    match hold.loss() {
        Some(loss) if loss.reason == LossReason::Closed => format!("{stood}, lost by Closed"),
        _ => stood.to_string(),
    }
}

fn unlock_read(stage: &Stage<'_>) {
    let lock = lock(stage);
    let guard = lock.read().unwrap();
    let hold = guard.hold();
    stage.call(Waits::ForEtcd, &|| drop(lock.close()), || released_shared(guard.unlock(), &hold));
}

fn unlock_owned_read(stage: &Stage<'_>) {
    let lock = lock(stage);
    let guard = lock.read_owned().unwrap();
    let hold = guard.hold();
    stage.call(Waits::ForEtcd, &|| drop(lock.close()), || released_shared(guard.unlock(), &hold));
}

fn unlock_write(stage: &Stage<'_>) {
    let lock = lock(stage);
    let guard = lock.write().unwrap();
    let hold = guard.hold();
    stage.call(Waits::ForEtcd, &|| drop(lock.close()), || released(guard.unlock(), &hold));
}

fn unlock_owned_write(stage: &Stage<'_>) {
    let lock = lock(stage);
    let guard = lock.write_owned().unwrap();
    let hold = guard.hold();
    stage.call(Waits::ForEtcd, &|| drop(lock.close()), || released(guard.unlock(), &hold));
}

fn drop_read(stage: &Stage<'_>) {
    let lock = lock(stage);
    let guard = lock.read().unwrap();
    stage.call(Waits::ForEtcd, &|| drop(lock.close()), || dropping(guard));
}

fn downgrade(stage: &Stage<'_>) {
    let lock = lock(stage);
    let guard = lock.write().unwrap();
    let mut after: Option<Result<RwLockReadGuard<'_>, RwLockWriteGuard<'_>>> = None;
    stage.call(Waits::ForEtcd, &|| drop(lock.close()), || {
        let (value, guard) = match RwLockWriteGuard::downgrade(guard) {
            Ok(read) => (read_by(read.is_held()), Ok(read)),
            Err((write, error)) => (format!("Err({:?})", error.kind()), Err(write)),
        };
        after = Some(guard);
        value
    });
}

fn downgrade_owned(stage: &Stage<'_>) {
    let lock = lock(stage);
    let guard = lock.write_owned().unwrap();
    let mut after: Option<Result<OwnedRwLockReadGuard, OwnedRwLockWriteGuard>> = None;
    stage.call(Waits::ForEtcd, &|| drop(lock.close()), || {
        let (value, guard) = match OwnedRwLockWriteGuard::downgrade(guard) {
            Ok(read) => (read_by(read.is_held()), Ok(read)),
            Err((write, error)) => (format!("Err({:?})", error.kind()), Err(write)),
        };
        after = Some(guard);
        value
    });
}

fn read_by(held: bool) -> String {
    if held { "Ok(read)" } else { "Ok(lost)" }.to_owned()
}

fn unlock_before_read(stage: &Stage<'_>) {
    let lock = lock(stage);
    let guard = lock.write().unwrap();
    let _read = lock.read().unwrap();
    stage.call(Waits::ForEtcd, &|| drop(lock.close()), || guard.unlock().to_string());
}

fn close(stage: &Stage<'_>) {
    let lock = lock(stage);
    let _guard = lock.read().unwrap();
    stage.call(Waits::ForEtcd, &|| drop(lock.close()), || plain(lock.close()));
}
