//! The table: a row per public call that blocks, under the name it gives to the internal wait.
//!
//! Here are the mutex, presence, the barrier and the client, and what all rows have in common.

use std::time::Duration;

use etcd_recipes::{
    Barrier, CancelToken, FencedTxn, FencingToken, Force, Hold, LossReason, Op, Recipe,
    SelfHealingKeepAlive, StoredFenceGate, TransientKeyValue, Txn,
};

use crate::stage::{Stage, Waits, plain, show};
use crate::table::{
    AFTER_OP, AFTER_SILENCE, AT_LIMIT, AT_LIMIT_FROM_DISTURBANCE, AT_ONCE, BUDGET, Cell, Cells, L,
    Left, PROMPT, Situation, TTL, WITHIN_LIMIT, WITHIN_OP, na, says,
};
use crate::{rows_elections, rows_multi, rows_rwlock, rows_semaphore};

/// One call.
pub(crate) struct Row {
    /// The name under which it waits.
    pub(crate) op: &'static str,
    /// The call as users know it.
    pub(crate) call: &'static str,
    /// Prepares the call and makes it.
    pub(crate) script: fn(&Stage<'_>),
    pub(crate) cells: Cells,
}

pub(crate) fn row(
    op: &'static str,
    call: &'static str,
    script: fn(&Stage<'_>),
    cells: Cells,
) -> Row {
    Row { op, call, script, cells }
}

/// All of them, the families in files of their own included.
pub(crate) fn rows() -> Vec<Row> {
    [
        basic_rows(),
        rows_rwlock::rows(),
        rows_semaphore::rows(),
        rows_multi::rows(),
        rows_elections::rows(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn basic_rows() -> Vec<Row> {
    vec![
        row("mutex.lock", "Mutex::lock", lock, ACQUIRE),
        row("mutex.lock_owned", "Mutex::lock_owned", lock_owned, ACQUIRE),
        row("mutex.try_lock", "Mutex::try_lock", try_lock, TRY),
        row("mutex.try_lock_owned", "Mutex::try_lock_owned", try_lock_owned, TRY),
        row("mutex.try_lock_for", "Mutex::try_lock_for", try_lock_for, TRY_FOR),
        row("mutex.try_lock_owned_for", "Mutex::try_lock_owned_for", try_lock_owned_for, TRY_FOR),
        row("mutex.is_locked", "Mutex::is_locked", is_locked, look("Ok(true)", "Ok(false)")),
        row("mutex.contenders", "Mutex::contenders", contenders, look("Ok(1)", "Ok(0)")),
        row("release", "MutexGuard::unlock", unlock, RELEASE),
        row("release", "OwnedMutexGuard::unlock", unlock_owned, RELEASE),
        row("release", "drop of a guard", drop_guard, RELEASE.dropped()),
        row("guard.verify", "MutexGuard::verify", verify, look("Ok(true)", "Ok(false)")),
        row("guard.put", "MutexGuard::put", guard_put, guarded("Ok(false)")),
        row("guard.txn", "MutexGuard::txn", guard_txn, guarded("Ok(Fenced)")),
        row("recipe.close", "Mutex::close", close_mutex, CLOSE_MUTEX),
        row("keep_alive.start", "SelfHealingBuilder::start", keep_alive, KEEP_ALIVE),
        row("keep_alive.close", "SelfHealingKeepAlive::close", close_keep_alive, CLOSE),
        row("transient.start", "TransientKeyValue::start", transient_start, START),
        row("transient.set", "TransientKeyValue::set", transient_set, SET),
        row("transient.close", "TransientKeyValue::close", transient_close, CLOSE),
        row("transient.close", "drop of a TransientKeyValue", drop_transient, drop_of_recipe()),
        row("barrier.set", "Barrier::set", barrier_set, BARRIER_SET),
        row("barrier.set", "Barrier::set while set", barrier_set_again, BARRIER_SET_AGAIN),
        row("barrier.remove", "Barrier::remove", barrier_remove, BARRIER_REMOVE),
        row("barrier.is_set", "Barrier::is_set", barrier_is_set, BARRIER_IS_SET),
        row("barrier.wait", "Barrier::wait", barrier_wait, BARRIER_WAIT),
        row("barrier.wait_for", "Barrier::wait_for", barrier_wait_for, BARRIER_WAIT_FOR),
        row("barrier.close", "Barrier::close", barrier_close, CLOSE),
        row("barrier.close", "drop of a Barrier", drop_barrier, drop_of_recipe()),
        row("client.get", "Client::get", get, read("Ok(before)")),
        row("client.get_prefix", "Client::get_prefix", get_prefix, read("Ok(1)")),
        row("client.count_prefix", "Client::count_prefix", count, read("Ok(1)")),
        row("client.put", "Client::put", put, WRITE),
        row("client.delete", "Client::delete", delete, WRITE),
        row("client.delete_prefix", "Client::delete_prefix", delete_prefix, WRITE),
        row("client.txn", "Client::txn", txn, WRITE),
        row("client.grant_lease", "Client::grant_lease", grant_lease, GRANT),
        row("client.revoke_lease", "Client::revoke_lease", revoke_lease, REVOKE),
        row("client.time_to_live", "Client::time_to_live", time_to_live, TIME_TO_LIVE),
        row("client.ping", "Client::ping", ping, PING),
        row("client.wait_ready", "Client::wait_ready", wait_ready, WAIT_READY),
        row("client.with_raw", "Client::with_raw", with_raw, WITH_RAW),
        row("client.close", "Client::close", close_client, CLOSE),
        row("client.close", "drop of the last Client", drop_client, last_drop()),
        row("cancel.wait", "CancelToken::wait", cancel_wait, CANCEL),
        row("cancel.wait_for", "CancelToken::wait_for", cancel_wait_for, CANCEL),
        row("cancel.sleep", "CancelToken::sleep", cancel_sleep, CANCEL),
        row("lock.force_release", "force_release at once", force_now, FORCE),
        row("lock.force_release", "force_release acknowledged", force_acknowledged, FORCE_HEARD),
        row("lock.request_release", "request_release", request_release, ASK),
        row("fence.pass", "StoredFenceGate::pass", fence_pass, read("Ok(true)")),
        row("fence.highest", "StoredFenceGate::highest", fence_highest, read("Ok(7)")),
    ]
}

// ----- cells that rows have in common -------------------------------------------------------------

pub(crate) const NO_OTHERS: &str = "it waits for nobody but etcd";
pub(crate) const SHORT_LIMIT: &str = "the outage would outlast its limit";
pub(crate) const NO_KEY: &str = "it has no key of its own";
const NO_RECIPE: &str = "it belongs to no recipe";
const NO_ETCD: &str = "etcd has no part in it";

pub(crate) const INTERRUPTED: Cell = says("Err(Interrupted)", PROMPT, Left::NoKey);
pub(crate) const CLOSED: Cell = says("Err(Closed)", PROMPT, Left::NoKey);
/// Frozen, so that the key goes at the TTL if it was on its way.
pub(crate) const CLOSED_FROZEN: Cell = says("Err(Closed)", PROMPT, Left::NothingAtTtl);

/// What is told to stop says so, where nothing of it can stand in etcd.
pub(crate) const STOPS: Cells = Cells {
    frozen_before: na(""),
    frozen_during: na(NO_OTHERS),
    frozen_briefly: na(NO_OTHERS),
    killed_before: na(""),
    reply_lost: na(""),
    key_deleted: na(NO_KEY),
    lease_revoked: na(NO_KEY),
    cancelled_before: says("Err(Interrupted)", AT_ONCE, Left::Any),
    cancelled_during: says("Err(Interrupted)", PROMPT, Left::Any),
    client_closed_before: says("Err(Closed)", AT_ONCE, Left::Any),
    client_closed_during: says("Err(Closed)", PROMPT, Left::Any),
    recipe_closed_before: says("Err(Closed)", AT_ONCE, Left::Any),
    recipe_closed_during: says("Err(Closed)", PROMPT, Left::Any),
};

/// Calls of the client itself.
pub(crate) const OF_CLIENT: Cells =
    Cells { recipe_closed_before: na(NO_RECIPE), recipe_closed_during: na(NO_RECIPE), ..STOPS };

pub(crate) const UNREACHABLE: Cell = says("Err(Unreachable)", AFTER_OP, Left::Any);

pub(crate) const ACQUIRE: Cells = Cells {
    frozen_before: says("Err(Unreachable)", AFTER_OP, Left::Nothing),
    frozen_during: says("Err(Unreachable)", AFTER_SILENCE, Left::NoKey),
    frozen_briefly: says("Ok(held)", AT_ONCE, Left::Key),
    killed_before: says("Err(Unreachable)", AFTER_OP, Left::NoKey),
    reply_lost: says("Ok(held)", AT_ONCE, Left::Key),
    key_deleted: says("Ok(held)", AT_ONCE, Left::Key),
    lease_revoked: says("Ok(held)", AT_ONCE, Left::Key),
    cancelled_before: INTERRUPTED,
    cancelled_during: INTERRUPTED,
    client_closed_before: CLOSED,
    client_closed_during: CLOSED,
    recipe_closed_before: CLOSED,
    recipe_closed_during: CLOSED,
};

pub(crate) const TRY_FOR: Cells = Cells {
    frozen_before: says("Err(Unreachable)", AT_LIMIT, Left::Nothing),
    frozen_during: says("Ok(None)", AT_LIMIT_FROM_DISTURBANCE, Left::NoKey),
    frozen_briefly: na(SHORT_LIMIT),
    killed_before: says("Err(Unreachable)", AT_LIMIT, Left::NoKey),
    reply_lost: says("Ok(None)", AT_LIMIT, Left::NoKey),
    key_deleted: says("Ok(None)", AT_LIMIT, Left::NoKey),
    lease_revoked: says("Ok(None)", AT_LIMIT, Left::NoKey),
    ..ACQUIRE
};

pub(crate) const TRY: Cells = Cells {
    frozen_during: na(NO_OTHERS),
    frozen_briefly: na(NO_OTHERS),
    key_deleted: na("it does not stay in the queue"),
    lease_revoked: na("it does not stay in the queue"),
    // Frozen, so that the request is on its way.
    cancelled_during: says("Err(Interrupted)", PROMPT, Left::Nothing),
    client_closed_during: CLOSED_FROZEN,
    ..ACQUIRE
};

pub(crate) const RELEASE: Cells = Cells {
    frozen_before: says("true", BUDGET, Left::NothingAtTtl),
    killed_before: says("true", BUDGET, Left::NoKeyAtTtl),
    reply_lost: says("true", AT_ONCE, Left::NoKey),
    key_deleted: says("false", AT_ONCE, Left::NoKey),
    lease_revoked: says("false", AT_ONCE, Left::NoKey),
    cancelled_before: says("true", AT_ONCE, Left::NoKey),
    cancelled_during: says("true", BUDGET, Left::NothingAtTtl),
    client_closed_before: says("false, lost by Closed", AT_ONCE, Left::NoKey),
    client_closed_during: says("true", BUDGET, Left::NothingAtTtl),
    recipe_closed_before: says("false, lost by Closed", AT_ONCE, Left::NoKey),
    recipe_closed_during: says("true", BUDGET, Left::NothingAtTtl),
    ..STOPS
};

/// A recipe's or a guard's read; `gone` is the truth once the key is deleted.
pub(crate) const fn look(value: &'static str, gone: &'static str) -> Cells {
    Cells {
        frozen_before: UNREACHABLE,
        killed_before: UNREACHABLE,
        reply_lost: says(value, AT_ONCE, Left::Key),
        key_deleted: says(gone, AT_ONCE, Left::NoKey),
        lease_revoked: says(gone, AT_ONCE, Left::NoKey),
        ..STOPS
    }
}

/// A guarded write; `fenced` says that it was not done.
pub(crate) const fn guarded(fenced: &'static str) -> Cells {
    Cells {
        frozen_before: says("Err(OutcomeUnknown)", WITHIN_OP, Left::Any),
        killed_before: says("Err(Unreachable)", AFTER_OP, Left::NotWritten),
        reply_lost: says("Err(OutcomeUnknown)", AT_ONCE, Left::Any),
        key_deleted: says(fenced, AT_ONCE, Left::NotWritten),
        lease_revoked: says(fenced, AT_ONCE, Left::NotWritten),
        cancelled_before: says("Err(Interrupted)", AT_ONCE, Left::NotWritten),
        client_closed_before: says("Err(Closed)", AT_ONCE, Left::NotWritten),
        recipe_closed_before: says("Err(Closed)", AT_ONCE, Left::NotWritten),
        ..STOPS
    }
}

/// It looks first, and does nothing that it has not seen to be needed.
const FORCE: Cells =
    Cells { reply_lost: says("Ok(true)", AT_ONCE, Left::NoKey), ..look("Ok(true)", "Ok(false)") };

/// The hold is young, and is reached when it is a second old.
const FORCE_HEARD: Cells = Cells { reply_lost: says("Ok(true)", WITHIN_OP, Left::NoKey), ..FORCE };

const ASK: Cells =
    Cells { reply_lost: says("Ok(true)", WITHIN_OP, Left::Key), ..look("Ok(true)", "Ok(false)") };

pub(crate) const UNCONFIRMED: Cell = says("Err(CleanupUnconfirmed)", BUDGET, Left::NothingAtTtl);
pub(crate) const CONFIRMED: Cell = says("Ok(())", AT_ONCE, Left::NoKey);

/// A close while something of ours stands.
pub(crate) const CLOSE: Cells = Cells {
    frozen_before: UNCONFIRMED,
    killed_before: UNCONFIRMED,
    reply_lost: CONFIRMED,
    key_deleted: CONFIRMED,
    lease_revoked: CONFIRMED,
    cancelled_before: CONFIRMED,
    cancelled_during: UNCONFIRMED,
    client_closed_before: CONFIRMED,
    client_closed_during: UNCONFIRMED,
    recipe_closed_before: CONFIRMED,
    recipe_closed_during: UNCONFIRMED,
    ..STOPS
};

/// The lease is not the mutex's but the client's, and stays for a while.
pub(crate) const CLOSE_MUTEX: Cells =
    Cells { killed_before: says("Err(CleanupUnconfirmed)", BUDGET, Left::NoKeyAtTtl), ..CLOSE };

/// Whoever drops a recipe is the only one that has it.
pub(crate) fn drop_of_recipe() -> Cells {
    Cells { recipe_closed_during: na("nobody else could close it"), ..CLOSE.dropped() }
}

const THE_LAST: &str = "there is no other handle that could close it";

fn last_drop() -> Cells {
    Cells {
        client_closed_before: na(THE_LAST),
        client_closed_during: na(THE_LAST),
        recipe_closed_before: na("a recipe would keep the client"),
        recipe_closed_during: na("a recipe would keep the client"),
        key_deleted: na("a hold would keep the client"),
        lease_revoked: na("a hold would keep the client"),
        ..CLOSE.dropped()
    }
}

/// Nothing is kept alive that the caller was told failed.
const START: Cells = Cells {
    frozen_before: says("Err(Unreachable)", AFTER_OP, Left::NothingAtTtl),
    killed_before: says("Err(Unreachable)", AFTER_OP, Left::NothingAtTtl),
    reply_lost: says("Ok(())", AT_ONCE, Left::Key),
    cancelled_during: says("Err(Interrupted)", PROMPT, Left::NothingAtTtl),
    client_closed_during: CLOSED_FROZEN,
    recipe_closed_during: CLOSED_FROZEN,
    ..STOPS
};

const KEEP_ALIVE: Cells = Cells {
    reply_lost: says("Ok(started)", AT_ONCE, Left::Key),
    recipe_closed_before: na("there is nothing to close yet"),
    recipe_closed_during: na("there is nothing to close yet"),
    ..START
};

const SET: Cells = Cells {
    frozen_before: says("Err(OutcomeUnknown)", AFTER_OP, Left::Any),
    killed_before: says("Err(Unreachable)", AFTER_OP, Left::Any),
    reply_lost: says("Ok(())", AT_ONCE, Left::Key),
    // The heal brings the key back, and the new value after it.
    key_deleted: says("Ok(())", WITHIN_OP, Left::Key),
    lease_revoked: says("Ok(())", WITHIN_OP, Left::Key),
    ..STOPS
};

const BARRIER_SET: Cells = Cells {
    reply_lost: says("Ok(true)", AT_ONCE, Left::Key),
    key_deleted: na("it has none yet; see the next row"),
    lease_revoked: na("it has none yet; see the next row"),
    ..START
};

/// Set by this object already: the call looks whether that stands, and waits for a heal.
const BARRIER_SET_AGAIN: Cells = Cells {
    frozen_before: UNREACHABLE,
    killed_before: UNREACHABLE,
    key_deleted: says("Ok(true)", WITHIN_OP, Left::Key),
    lease_revoked: says("Ok(true)", WITHIN_OP, Left::Key),
    cancelled_during: says("Err(Interrupted)", PROMPT, Left::Any),
    ..BARRIER_SET
};

const BARRIER_REMOVE: Cells = Cells {
    frozen_before: says("Err(OutcomeUnknown)", AFTER_OP, Left::NothingAtTtl),
    killed_before: says("Err(Unreachable)", AFTER_OP, Left::NothingAtTtl),
    reply_lost: says("Ok(true)", AT_ONCE, Left::NoKey),
    key_deleted: says("Ok(false)", AT_ONCE, Left::NoKey),
    lease_revoked: says("Ok(false)", AT_ONCE, Left::NoKey),
    cancelled_during: says("Err(Interrupted)", PROMPT, Left::NothingAtTtl),
    client_closed_during: CLOSED_FROZEN,
    recipe_closed_during: CLOSED_FROZEN,
    ..STOPS
};

/// A heal brings the key back, after the truth was told.
const BARRIER_IS_SET: Cells = Cells {
    key_deleted: says("Ok(false)", AT_ONCE, Left::Any),
    lease_revoked: says("Ok(false)", AT_ONCE, Left::Any),
    ..look("Ok(true)", "Ok(false)")
};

const BARRIER_WAIT: Cells = Cells {
    frozen_before: UNREACHABLE,
    frozen_during: says("Err(Unreachable)", AFTER_SILENCE, Left::Any),
    frozen_briefly: says("Ok(())", AT_ONCE, Left::Any),
    killed_before: UNREACHABLE,
    reply_lost: says("Ok(())", AT_ONCE, Left::Any),
    key_deleted: says("Ok(())", AT_ONCE, Left::Any),
    lease_revoked: says("Ok(())", AT_ONCE, Left::Any),
    ..STOPS
};

const BARRIER_WAIT_FOR: Cells = Cells {
    frozen_before: says("Err(Unreachable)", AT_LIMIT, Left::Any),
    frozen_during: says("Ok(false)", AT_LIMIT_FROM_DISTURBANCE, Left::Any),
    frozen_briefly: na(SHORT_LIMIT),
    killed_before: says("Err(Unreachable)", AT_LIMIT, Left::Any),
    reply_lost: says("Ok(false)", AT_LIMIT, Left::Any),
    key_deleted: says("Ok(true)", AT_ONCE, Left::Any),
    lease_revoked: says("Ok(true)", AT_ONCE, Left::Any),
    ..STOPS
};

/// A read of the client; a lost answer is asked for again.
const fn read(value: &'static str) -> Cells {
    Cells {
        frozen_before: UNREACHABLE,
        killed_before: UNREACHABLE,
        reply_lost: says(value, AT_ONCE, Left::Any),
        ..OF_CLIENT
    }
}

pub(crate) const WRITE: Cells = Cells {
    frozen_before: says("Err(OutcomeUnknown)", WITHIN_OP, Left::Any),
    killed_before: UNREACHABLE,
    reply_lost: says("Err(OutcomeUnknown)", AT_ONCE, Left::Any),
    ..OF_CLIENT
};

const GRANT: Cells = Cells {
    frozen_before: says("Err(Unreachable)", AFTER_OP, Left::NothingAtTtl),
    killed_before: says("Err(Unreachable)", AFTER_OP, Left::NothingAtTtl),
    // Granted twice; nobody renews the first.
    reply_lost: says("Ok(granted)", AT_ONCE, Left::NothingAtTtl),
    cancelled_during: says("Err(Interrupted)", PROMPT, Left::NothingAtTtl),
    client_closed_during: CLOSED_FROZEN,
    ..OF_CLIENT
};

const REVOKE: Cells = Cells {
    frozen_before: says("Err(Unreachable)", AFTER_OP, Left::NothingAtTtl),
    killed_before: says("Err(Unreachable)", AFTER_OP, Left::NothingAtTtl),
    reply_lost: says("Ok(())", AT_ONCE, Left::NoKey),
    key_deleted: says("Ok(())", AT_ONCE, Left::NoKey),
    // One that is gone is as good.
    lease_revoked: says("Ok(())", AT_ONCE, Left::NoKey),
    ..OF_CLIENT
};

const TIME_TO_LIVE: Cells = Cells {
    frozen_before: UNREACHABLE,
    killed_before: UNREACHABLE,
    reply_lost: says("Ok(some)", AT_ONCE, Left::Any),
    key_deleted: says("Ok(some)", AT_ONCE, Left::NoKey),
    lease_revoked: says("Ok(none)", AT_ONCE, Left::NoKey),
    ..OF_CLIENT
};

const PING: Cells = Cells {
    frozen_before: says("false", AFTER_OP, Left::Any),
    killed_before: says("false", WITHIN_OP, Left::Any),
    reply_lost: says("true", AT_ONCE, Left::Any),
    cancelled_before: says("false", AT_ONCE, Left::Any),
    cancelled_during: says("false", PROMPT, Left::Any),
    client_closed_before: says("false", AT_ONCE, Left::Any),
    client_closed_during: says("false", PROMPT, Left::Any),
    ..OF_CLIENT
};

const WAIT_READY: Cells = Cells {
    frozen_before: says("Err(Unreachable)", AT_LIMIT, Left::Any),
    killed_before: says("Err(Unreachable)", AT_LIMIT, Left::Any),
    reply_lost: says("Ok(())", AT_ONCE, Left::Any),
    ..OF_CLIENT
};

const WITH_RAW: Cells = Cells {
    frozen_before: says("Err(TimedOut)", AT_LIMIT, Left::Any),
    // Passed on as it is: this connection is the user's.
    killed_before: says("Ok(Err)", WITHIN_LIMIT, Left::Any),
    reply_lost: says("Ok(Err)", AT_ONCE, Left::Any),
    ..OF_CLIENT
};

const CANCEL: Cells = Cells {
    frozen_before: na(NO_ETCD),
    frozen_during: na(NO_ETCD),
    frozen_briefly: na(NO_ETCD),
    killed_before: na(NO_ETCD),
    reply_lost: na(NO_ETCD),
    key_deleted: na(NO_ETCD),
    lease_revoked: na(NO_ETCD),
    client_closed_before: na("it belongs to no client"),
    client_closed_during: na("it belongs to no client"),
    ..OF_CLIENT
};

// ----- how the calls are made ---------------------------------------------------------------------

pub(crate) fn no_recipe() {}

pub(crate) fn held<T>(guard: Option<&T>) -> String {
    if guard.is_some() { "held" } else { "None" }.to_owned()
}

fn lock(stage: &Stage<'_>) {
    let mutex = stage.mutex();
    stage.rival();
    let mut guard = None;
    stage.call(Waits::InQueue, &|| drop(mutex.close()), || {
        show(mutex.lock(), |got| held(Some(&*guard.insert(got))))
    });
}

fn lock_owned(stage: &Stage<'_>) {
    let mutex = stage.mutex();
    stage.rival();
    let mut guard = None;
    stage.call(Waits::InQueue, &|| drop(mutex.close()), || {
        show(mutex.lock_owned(), |got| held(Some(&*guard.insert(got))))
    });
}

fn try_lock(stage: &Stage<'_>) {
    let mutex = stage.mutex();
    let mut guard = None;
    stage.call(Waits::ForEtcd, &|| drop(mutex.close()), || {
        show(mutex.try_lock(), |got| {
            guard = got;
            held(guard.as_ref())
        })
    });
}

fn try_lock_owned(stage: &Stage<'_>) {
    let mutex = stage.mutex();
    let mut guard = None;
    stage.call(Waits::ForEtcd, &|| drop(mutex.close()), || {
        show(mutex.try_lock_owned(), |got| {
            guard = got;
            held(guard.as_ref())
        })
    });
}

fn try_lock_for(stage: &Stage<'_>) {
    let mutex = stage.mutex();
    stage.rival();
    stage.call(Waits::InQueueFor, &|| drop(mutex.close()), || {
        show(mutex.try_lock_for(L), |guard| held(guard.as_ref()))
    });
}

fn try_lock_owned_for(stage: &Stage<'_>) {
    let mutex = stage.mutex();
    stage.rival();
    stage.call(Waits::InQueueFor, &|| drop(mutex.close()), || {
        show(mutex.try_lock_owned_for(L), |guard| held(guard.as_ref()))
    });
}

fn is_locked(stage: &Stage<'_>) {
    let mutex = stage.mutex();
    let _guard = mutex.lock().unwrap();
    stage.call(Waits::ForEtcd, &|| drop(mutex.close()), || plain(mutex.is_locked()));
}

fn contenders(stage: &Stage<'_>) {
    let mutex = stage.mutex();
    let _guard = mutex.lock().unwrap();
    stage.call(Waits::ForEtcd, &|| drop(mutex.close()), || {
        show(mutex.contenders(), |all| all.len().to_string())
    });
}

pub(crate) fn released(stood: bool, hold: &Hold) -> String {
    match hold.loss() {
        Some(loss) if loss.reason == LossReason::Closed => format!("{stood}, lost by Closed"),
        _ => stood.to_string(),
    }
}

fn unlock(stage: &Stage<'_>) {
    let mutex = stage.mutex();
    let guard = mutex.lock().unwrap();
    let hold = guard.hold();
    stage.call(Waits::ForEtcd, &|| drop(mutex.close()), || released(guard.unlock(), &hold));
}

fn unlock_owned(stage: &Stage<'_>) {
    let mutex = stage.mutex();
    let guard = mutex.lock_owned().unwrap();
    let hold = guard.hold();
    stage.call(Waits::ForEtcd, &|| drop(mutex.close()), || released(guard.unlock(), &hold));
}

fn drop_guard(stage: &Stage<'_>) {
    let mutex = stage.mutex();
    let guard = mutex.lock().unwrap();
    stage.call(Waits::ForEtcd, &|| drop(mutex.close()), || dropping(guard));
}

/// For a recipe that its dropping call takes along.
pub(crate) fn close_before(stage: &Stage<'_>, recipe: &dyn Recipe) {
    if stage.situation == Situation::RecipeClosedBefore {
        recipe.close().unwrap();
    }
}

pub(crate) fn dropping<T>(what: T) -> String {
    drop(what);
    "dropped".to_owned()
}

fn verify(stage: &Stage<'_>) {
    let mutex = stage.mutex();
    let guard = mutex.lock().unwrap();
    stage.call(Waits::ForEtcd, &|| drop(mutex.close()), || plain(guard.verify()));
}

fn guard_put(stage: &Stage<'_>) {
    let mutex = stage.mutex();
    let guard = mutex.lock().unwrap();
    stage.call(Waits::ForEtcd, &|| drop(mutex.close()), || {
        plain(guard.put(stage.data_key(), "guarded"))
    });
}

fn guard_txn(stage: &Stage<'_>) {
    let mutex = stage.mutex();
    let guard = mutex.lock().unwrap();
    stage.call(Waits::ForEtcd, &|| drop(mutex.close()), || {
        let write = Txn::new().and_then([Op::put(stage.data_key(), "guarded")]);
        show(guard.txn(write), |done| match done {
            FencedTxn::Applied(_) => "Applied".to_owned(),
            FencedTxn::CompareFailed(_) => "CompareFailed".to_owned(),
            FencedTxn::Fenced => "Fenced".to_owned(),
        })
    });
}

fn close_mutex(stage: &Stage<'_>) {
    let mutex = stage.mutex();
    let _guard = mutex.lock().unwrap();
    stage.call(Waits::ForEtcd, &|| drop(mutex.close()), || plain(mutex.close()));
}

fn kept(stage: &Stage<'_>, ttl: Duration) -> etcd_recipes::Result<SelfHealingKeepAlive> {
    let (client, key) = (stage.client.clone(), stage.path.clone());
    stage.client.self_healing_keep_alive(ttl, move |lease| {
        client.put_with_lease(key.as_str(), "kept", lease.id())?;
        Ok(true)
    })
}

fn keep_alive(stage: &Stage<'_>) {
    let mut keep = None;
    stage.call(Waits::ForEtcd, &no_recipe, || {
        show(kept(stage, TTL), |started| {
            keep = Some(started);
            "started".to_owned()
        })
    });
}

fn close_keep_alive(stage: &Stage<'_>) {
    let keep = kept(stage, stage.ttl()).unwrap();
    stage.call(Waits::ForEtcd, &|| drop(keep.close()), || plain(keep.close()));
}

fn transient(stage: &Stage<'_>, ttl: Duration) -> TransientKeyValue {
    TransientKeyValue::builder(&stage.client, stage.path.as_str(), "before")
        .ttl(ttl)
        .build()
        .unwrap()
}

fn transient_start(stage: &Stage<'_>) {
    let transient = transient(stage, TTL);
    stage.call(Waits::ForEtcd, &|| drop(transient.close()), || plain(transient.start()));
}

fn transient_set(stage: &Stage<'_>) {
    let transient = transient(stage, stage.ttl());
    transient.start().unwrap();
    stage.call(Waits::ForEtcd, &|| drop(transient.close()), || plain(transient.set("after")));
}

fn transient_close(stage: &Stage<'_>) {
    let transient = transient(stage, stage.ttl());
    transient.start().unwrap();
    stage.call(Waits::ForEtcd, &|| drop(transient.close()), || plain(transient.close()));
}

fn drop_transient(stage: &Stage<'_>) {
    let transient = transient(stage, stage.ttl());
    transient.start().unwrap();
    close_before(stage, &transient);
    stage.call(Waits::ForEtcd, &no_recipe, || dropping(transient));
}

fn barrier(stage: &Stage<'_>, ttl: Duration) -> Barrier {
    Barrier::builder(&stage.client, stage.path.as_str()).ttl(ttl).build().unwrap()
}

fn barrier_set(stage: &Stage<'_>) {
    let barrier = barrier(stage, TTL);
    stage.call(Waits::ForEtcd, &|| drop(barrier.close()), || plain(barrier.set()));
}

fn barrier_set_again(stage: &Stage<'_>) {
    let barrier = barrier(stage, stage.ttl());
    assert!(barrier.set().unwrap());
    stage.call(Waits::ForEtcd, &|| drop(barrier.close()), || plain(barrier.set()));
}

fn barrier_remove(stage: &Stage<'_>) {
    let barrier = barrier(stage, stage.ttl());
    assert!(barrier.set().unwrap());
    stage.call(Waits::ForEtcd, &|| drop(barrier.close()), || plain(barrier.remove()));
}

fn barrier_is_set(stage: &Stage<'_>) {
    let barrier = barrier(stage, stage.ttl());
    assert!(barrier.set().unwrap());
    stage.call(Waits::ForEtcd, &|| drop(barrier.close()), || plain(barrier.is_set()));
}

fn barrier_wait(stage: &Stage<'_>) {
    let barrier = barrier(stage, stage.ttl());
    stage.gate();
    stage.call(Waits::AtGate, &|| drop(barrier.close()), || plain(barrier.wait()));
}

fn barrier_wait_for(stage: &Stage<'_>) {
    let barrier = barrier(stage, stage.ttl());
    stage.gate();
    stage.call(Waits::AtGateFor, &|| drop(barrier.close()), || plain(barrier.wait_for(L)));
}

fn barrier_close(stage: &Stage<'_>) {
    let barrier = barrier(stage, stage.ttl());
    assert!(barrier.set().unwrap());
    stage.call(Waits::ForEtcd, &|| drop(barrier.close()), || plain(barrier.close()));
}

fn drop_barrier(stage: &Stage<'_>) {
    let barrier = barrier(stage, stage.ttl());
    assert!(barrier.set().unwrap());
    close_before(stage, &barrier);
    stage.call(Waits::ForEtcd, &no_recipe, || dropping(barrier));
}

fn get(stage: &Stage<'_>) {
    stage.put_data();
    stage.call(Waits::ForEtcd, &no_recipe, || {
        show(stage.client.get(stage.data_key()), |found| {
            found.map_or("none".to_owned(), |kv| kv.value_text())
        })
    });
}

fn get_prefix(stage: &Stage<'_>) {
    stage.put_data();
    stage.call(Waits::ForEtcd, &no_recipe, || {
        show(stage.client.get_prefix(stage.data_key()), |found| found.len().to_string())
    });
}

fn count(stage: &Stage<'_>) {
    stage.put_data();
    stage.call(Waits::ForEtcd, &no_recipe, || plain(stage.client.count_prefix(stage.data_key())));
}

fn put(stage: &Stage<'_>) {
    stage.call(Waits::ForEtcd, &no_recipe, || plain(stage.client.put(stage.data_key(), "new")));
}

fn delete(stage: &Stage<'_>) {
    stage.put_data();
    stage.call(Waits::ForEtcd, &no_recipe, || plain(stage.client.delete(stage.data_key())));
}

fn delete_prefix(stage: &Stage<'_>) {
    stage.put_data();
    stage.call(Waits::ForEtcd, &no_recipe, || plain(stage.client.delete_prefix(stage.data_key())));
}

fn txn(stage: &Stage<'_>) {
    stage.call(Waits::ForEtcd, &no_recipe, || {
        let write = Txn::new().and_then([Op::put(stage.data_key(), "new")]);
        show(stage.client.txn(write), |done| done.succeeded.to_string())
    });
}

fn grant_lease(stage: &Stage<'_>) {
    stage.call(Waits::ForEtcd, &no_recipe, || {
        show(stage.client.grant_lease(TTL), |_| "granted".to_owned())
    });
}

fn revoke_lease(stage: &Stage<'_>) {
    let lease = leased(stage);
    stage.call(Waits::ForEtcd, &no_recipe, || plain(stage.client.revoke_lease(lease)));
}

fn time_to_live(stage: &Stage<'_>) {
    let lease = leased(stage);
    stage.call(Waits::ForEtcd, &no_recipe, || {
        show(stage.client.time_to_live(lease), |left| left.map_or("none", |_| "some").to_owned())
    });
}

/// A lease of our own with a key on it.
fn leased(stage: &Stage<'_>) -> i64 {
    let (lease, _) = stage.client.grant_lease(TTL).unwrap();
    stage.client.put_with_lease(stage.path.as_str(), "leased", lease).unwrap();
    lease
}

fn ping(stage: &Stage<'_>) {
    stage.call(Waits::ForEtcd, &no_recipe, || stage.client.ping().to_string());
}

fn wait_ready(stage: &Stage<'_>) {
    stage.call(Waits::ForEtcd, &no_recipe, || plain(stage.client.wait_ready(L)));
}

fn with_raw(stage: &Stage<'_>) {
    stage.call(Waits::ForEtcd, &no_recipe, || {
        let counted = stage.client.with_raw(L, |mut etcd| async move {
            etcd.get("nothing", None).await.map(|answer| answer.count())
        });
        show(counted, |result| result.map_or("Err".to_owned(), |count| format!("Ok({count})")))
    });
}

fn close_client(stage: &Stage<'_>) {
    let mutex = stage.mutex_with(&stage.client, stage.ttl());
    let _guard = mutex.lock().unwrap();
    stage.call(Waits::ForEtcd, &|| drop(mutex.close()), || plain(stage.client.close()));
}

/// What still stands when the last handle goes is the session of a lock that was released.
fn drop_client(stage: &Stage<'_>) {
    let client = stage.another_client();
    drop(stage.mutex_with(&client, stage.ttl()));
    stage.call(Waits::ForEtcd, &no_recipe, || dropping(client));
}

fn cancel_wait(stage: &Stage<'_>) {
    stage.call(Waits::ForNobody, &no_recipe, || plain(CancelToken::new().wait()));
}

fn cancel_wait_for(stage: &Stage<'_>) {
    stage.call(Waits::ForNobody, &no_recipe, || plain(CancelToken::new().wait_for(10 * L)));
}

fn cancel_sleep(stage: &Stage<'_>) {
    stage.call(Waits::ForNobody, &no_recipe, || plain(CancelToken::new().sleep(10 * L)));
}

fn force_now(stage: &Stage<'_>) {
    force(stage, Force::Now);
}

fn force_acknowledged(stage: &Stage<'_>) {
    force(stage, Force::AfterAcknowledgement(2 * L));
}

fn force(stage: &Stage<'_>, force: Force) {
    let mutex = stage.mutex();
    let guard = mutex.lock().unwrap();
    let token = guard.fencing_token();
    stage
        .call(Waits::ForEtcd, &|| drop(mutex.close()), || plain(mutex.force_release(token, force)));
}

fn request_release(stage: &Stage<'_>) {
    let mutex = stage.mutex();
    let guard = mutex.lock().unwrap();
    let token = guard.fencing_token();
    stage.call(Waits::ForEtcd, &|| drop(mutex.close()), || plain(mutex.request_release(token)));
}

/// A gate through which one token has passed already.
fn fence_gate(stage: &Stage<'_>) -> StoredFenceGate {
    let gate = StoredFenceGate::new(&stage.client, stage.data_key()).unwrap();
    assert!(gate.pass("file", FencingToken::from_wire(7)).unwrap());
    gate
}

fn fence_pass(stage: &Stage<'_>) {
    let gate = fence_gate(stage);
    stage.call(Waits::ForEtcd, &no_recipe, || plain(gate.pass("file", FencingToken::from_wire(8))));
}

fn fence_highest(stage: &Stage<'_>) {
    let gate = fence_gate(stage);
    stage.call(Waits::ForEtcd, &no_recipe, || {
        show(gate.highest("file"), |token| token.map_or("none".to_owned(), |t| t.to_string()))
    });
}
