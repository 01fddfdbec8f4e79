//! The rows of the semaphore. Where one permit is taken its key is one, as a mutex's; several have
//! as many keys, which come and go together.

use etcd_recipes::{Permit, Semaphore};

use crate::rows::{
    ACQUIRE, CLOSE_MUTEX, CLOSED, INTERRUPTED, NO_KEY, RELEASE, Row, STOPS, TRY, TRY_FOR,
    UNREACHABLE, WRITE, dropping, held, look, no_recipe, row,
};
use crate::rows_rwlock::released_shared;
use crate::stage::{Stage, Waits, plain, show};
use crate::table::Situation::{CancelledDuring, FrozenBefore, FrozenDuring, KeyDeleted, ReplyLost};
use crate::table::{AFTER_OP, AT_ONCE, Cells, L, Left, WITHIN_OP, na, says};

const AS_TRY: &str = "as `semaphore.try_acquire`: same code";
const AS_TRY_FOR: &str = "as `semaphore.try_acquire_for`: same code";
const AS_CONTENDERS: &str = "as `mutex.contenders`: same code";
const AS_RELEASE: &str = "as `Permit::release`: same code";
const AS_CLOSE: &str = "as `Mutex::close`: same code";

pub(crate) fn rows() -> Vec<Row> {
    let many = ACQUIRE.with_two_keys();
    let try_many = TRY_COUNTED.with_two_keys().only(&[FrozenBefore, ReplyLost], AS_TRY);
    let try_many_for = TRY_FOR.only(&[FrozenBefore, FrozenDuring, KeyDeleted], AS_TRY_FOR);
    let contend = look("Ok(1)", "Ok(0)").only(&[ReplyLost, KeyDeleted], AS_CONTENDERS);
    let close_cells = CLOSE_MUTEX.only(&[FrozenBefore, ReplyLost, CancelledDuring], AS_CLOSE);
    let dropped = RELEASE.dropped().only(&[FrozenBefore, ReplyLost], AS_RELEASE);
    vec![
        row("semaphore.acquire", "Semaphore::acquire", acquire, ACQUIRE),
        row("semaphore.acquire_many", "Semaphore::acquire_many", acquire_many, many),
        row("semaphore.try_acquire", "Semaphore::try_acquire", try_acquire, TRY_COUNTED),
        row(
            "semaphore.try_acquire_many",
            "Semaphore::try_acquire_many",
            try_acquire_many,
            try_many,
        ),
        row("semaphore.try_acquire_for", "Semaphore::try_acquire_for", try_acquire_for, TRY_FOR),
        row(
            "semaphore.try_acquire_many_for",
            "Semaphore::try_acquire_many_for",
            try_acquire_many_for,
            try_many_for,
        ),
        row(
            "semaphore.available_permits",
            "Semaphore::available_permits",
            available_permits,
            look("Ok(1)", "Ok(2)"),
        ),
        row("semaphore.contenders", "Semaphore::contenders", contenders, contend),
        row("semaphore.resize", "Semaphore::resize", resize, RESIZE),
        row("semaphore.delete", "Semaphore::delete", delete, WRITE),
        row("release", "Permit::release", release, RELEASE),
        row("release", "Permit::release of two", release_two, RELEASE),
        row("release", "drop of a Permit", drop_permit, dropped),
        row("recipe.close", "Semaphore::close", close, close_cells),
    ]
}

/// It looks before it writes, so that nothing is on its way when etcd is silent, and the session
/// stays.
const TRY_COUNTED: Cells = Cells {
    frozen_before: says("Err(Unreachable)", AFTER_OP, Left::NoKey),
    cancelled_during: INTERRUPTED,
    client_closed_during: CLOSED,
    ..TRY
};

/// It changes what everybody goes by, so it is never sent twice.
const RESIZE: Cells = Cells {
    frozen_before: says("Err(OutcomeUnknown)", WITHIN_OP, Left::Any),
    killed_before: UNREACHABLE,
    reply_lost: says("Err(OutcomeUnknown)", AT_ONCE, Left::Any),
    key_deleted: na(NO_KEY),
    lease_revoked: na(NO_KEY),
    ..STOPS
};

// ----- how the calls are made ---------------------------------------------------------------------

/// A semaphore whose client has a connection and a session, and whose path has its count.
fn semaphore(stage: &Stage<'_>, permits: u32) -> Semaphore {
    let semaphore = Semaphore::builder(&stage.client, stage.path.as_str(), permits)
        .ttl(stage.lock_ttl())
        .build()
        .unwrap();
    assert!(semaphore.acquire().unwrap().release());
    semaphore
}

/// Somebody else has a permit.
fn rival(stage: &Stage<'_>) {
    stage.rival_at("holders/somebody:0-0", "somebody");
}

fn acquire(stage: &Stage<'_>) {
    let semaphore = semaphore(stage, 1);
    rival(stage);
    let mut permit = None;
    stage.call(Waits::InQueue, &|| drop(semaphore.close()), || {
        show(semaphore.acquire(), |got| held(Some(&*permit.insert(got))))
    });
}

fn acquire_many(stage: &Stage<'_>) {
    let semaphore = semaphore(stage, 2);
    rival(stage);
    let mut permits = None;
    stage.call(Waits::InQueue, &|| drop(semaphore.close()), || {
        show(semaphore.acquire_many(2), |got| held(Some(&*permits.insert(got))))
    });
}

fn try_acquire(stage: &Stage<'_>) {
    let semaphore = semaphore(stage, 1);
    let mut permit = None;
    stage.call(Waits::ForEtcd, &|| drop(semaphore.close()), || {
        show(semaphore.try_acquire(), |got| {
            permit = got;
            held(permit.as_ref())
        })
    });
}

fn try_acquire_many(stage: &Stage<'_>) {
    let semaphore = semaphore(stage, 2);
    let mut permits = None;
    stage.call(Waits::ForEtcd, &|| drop(semaphore.close()), || {
        show(semaphore.try_acquire_many(2), |got| {
            permits = got;
            held(permits.as_ref())
        })
    });
}

fn try_acquire_for(stage: &Stage<'_>) {
    let semaphore = semaphore(stage, 1);
    rival(stage);
    stage.call(Waits::InQueueFor, &|| drop(semaphore.close()), || {
        show(semaphore.try_acquire_for(L), |permit| held(permit.as_ref()))
    });
}

fn try_acquire_many_for(stage: &Stage<'_>) {
    let semaphore = semaphore(stage, 2);
    rival(stage);
    stage.call(Waits::InQueueFor, &|| drop(semaphore.close()), || {
        show(semaphore.try_acquire_many_for(2, L), |permits| held(permits.as_ref()))
    });
}

fn available_permits(stage: &Stage<'_>) {
    let semaphore = semaphore(stage, 2);
    let _permit = semaphore.acquire().unwrap();
    stage
        .call(Waits::ForEtcd, &|| drop(semaphore.close()), || plain(semaphore.available_permits()));
}

fn contenders(stage: &Stage<'_>) {
    let semaphore = semaphore(stage, 2);
    let _permit = semaphore.acquire().unwrap();
    stage.call(Waits::ForEtcd, &|| drop(semaphore.close()), || {
        show(semaphore.contenders(), |all| all.len().to_string())
    });
}

fn resize(stage: &Stage<'_>) {
    let semaphore = semaphore(stage, 2);
    stage.call(Waits::ForEtcd, &|| drop(semaphore.close()), || plain(semaphore.resize(3)));
}

fn delete(stage: &Stage<'_>) {
    drop(semaphore(stage, 2));
    stage.call(Waits::ForEtcd, &no_recipe, || {
        plain(Semaphore::delete(&stage.client, stage.path.as_str()))
    });
}

fn release_of(stage: &Stage<'_>, semaphore: &Semaphore, permit: Permit) {
    let hold = permit.hold();
    stage.call(Waits::ForEtcd, &|| drop(semaphore.close()), || {
        released_shared(permit.release(), &hold)
    });
}

fn release(stage: &Stage<'_>) {
    let semaphore = semaphore(stage, 2);
    let permit = semaphore.acquire().unwrap();
    release_of(stage, &semaphore, permit);
}

fn release_two(stage: &Stage<'_>) {
    let semaphore = semaphore(stage, 2);
    let permits = semaphore.acquire_many(2).unwrap();
    release_of(stage, &semaphore, permits);
}

fn drop_permit(stage: &Stage<'_>) {
    let semaphore = semaphore(stage, 2);
    let permit = semaphore.acquire().unwrap();
    stage.call(Waits::ForEtcd, &|| drop(semaphore.close()), || dropping(permit));
}

fn close(stage: &Stage<'_>) {
    let semaphore = semaphore(stage, 2);
    let _permits = semaphore.acquire_many(2).unwrap();
    stage.call(Waits::ForEtcd, &|| drop(semaphore.close()), || plain(semaphore.close()));
}
