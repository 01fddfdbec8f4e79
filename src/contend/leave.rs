//! Taking keys out of their queues, however long etcd is away, and passing the turn on.

use std::sync::Arc;
use std::time::Duration;

use super::Contender;
use super::requests::{self, MAX_OPERATIONS};
use crate::client::call::Kind;
use crate::client::core::Core;
use crate::error::Result;
use crate::lease::Ticket;

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LEAVE_LIMIT: Duration = Duration::from_secs(5);

/// How leaving the queue went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Left {
    /// The key was deleted by us.
    Deleted,
    /// The key had gone already.
    Gone,
}

/// The keys of one contender that are to go.
pub(crate) struct Leaver {
    pub(crate) contender: Arc<Contender>,
    pub(crate) tickets: Vec<Ticket>,
}

/// Takes out keys that one transaction has put, in one transaction where that can be; `Gone` if
/// any of them had gone already.
pub(crate) async fn leave_all(leavers: Vec<Leaver>, create_revision: i64) -> Left {
    let keys: usize = leavers.iter().map(|leaver| leaver.tickets.len()).sum();
    // An earlier try may have deleted the keys although its answer was lost.
    let mut maybe_deleted = false;
    if keys > 1 && keys + leavers.len() <= MAX_OPERATIONS {
        match Box::pin(together(&leavers, create_revision)).await {
            Ok(true) => {
                leavers.into_iter().flat_map(|leaver| leaver.tickets).for_each(Ticket::free);
                return Left::Deleted;
            }
            Ok(false) => {}
            Err(error) => maybe_deleted = error.is_ambiguous(),
        }
    }
    let one_by_one: Vec<_> = leavers
        .into_iter()
        .flat_map(|Leaver { contender, tickets }| {
            let one =
                move |ticket| leave(contender.clone(), ticket, create_revision, maybe_deleted);
            tickets.into_iter().map(one)
        })
        .collect();
    if let [_] = one_by_one.as_slice() {
        let mut left = Left::Deleted;
        for leaving in one_by_one {
            left = leaving.await;
        }
        return left;
    }
    let tasks: Vec<_> = one_by_one.into_iter().map(tokio::spawn).collect();
    let mut left = Left::Deleted;
    for task in tasks {
        if !matches!(task.await, Ok(Left::Deleted)) {
            left = Left::Gone;
        }
    }
    left
}

/// One try at all of them at once; what it could not do is left to the tries at each.
async fn together(leavers: &[Leaver], create_revision: i64) -> Result<bool> {
    let Some(first) = leavers.first() else { return Ok(true) };
    let core = &first.contender.core;
    let keys: Vec<_> = leavers
        .iter()
        .map(|leaver| {
            let keys = leaver.tickets.iter().map(Ticket::key).collect::<Vec<_>>();
            (&leaver.contender.layout, keys)
        })
        .collect();
    let txn = requests::leave(&keys, create_revision);
    let until = core.clock.now() + LEAVE_LIMIT;
    let key = first.tickets[0].key();
    let response = core.txn("release", key, Kind::Write, txn, until).await?;
    tell_heads(core, leavers.iter().map(|leaver| &leaver.contender), &response);
    Ok(response.succeeded())
}

/// Takes one key out.
///
/// The key was seen, so "absent" is decisive here: an answer, any answer, closes the attempt.
/// `maybe_deleted` says that an earlier try may have deleted it although its answer was lost.
async fn leave(
    contender: Arc<Contender>,
    ticket: Ticket,
    create_revision: i64,
    mut maybe_deleted: bool,
) -> Left {
    let core = &contender.core;
    let session = ticket.session().clone();
    let mut pause = FIRST_PAUSE;
    loop {
        let txn = requests::leave(&[(&contender.layout, vec![ticket.key()])], create_revision);
        let until = core.clock.now() + LEAVE_LIMIT;
        match core.txn("release", ticket.key(), Kind::Write, txn, until).await {
            Ok(response) => {
                tell_heads(core, [&contender], &response);
                if response.succeeded() {
                    ticket.free();
                } else {
                    ticket.settle();
                }
                let deleted = response.succeeded() || maybe_deleted;
                return if deleted { Left::Deleted } else { Left::Gone };
            }
            Err(error) => {
                maybe_deleted |= error.is_ambiguous();
                // Until this is answered the lease takes no new holds, and it goes with the last
                // of them: that, too, removes the key.
                session.retire();
                let refused = !error.is_ambiguous() && !error.is_unreachable();
                if refused || session.has_ended() {
                    ticket.settle();
                    return Left::Deleted;
                }
            }
        }
        core.clock.sleep(pause).await;
        pause = (pause * 2).min(LEAVE_LIMIT);
    }
}

/// Whoever of this process an answer shows in front need not wait for the watch to say so.
pub(super) fn tell_heads<'a>(
    core: &Core,
    contenders: impl IntoIterator<Item = &'a Arc<Contender>>,
    response: &etcd_client::TxnResponse,
) {
    let heads = requests::heads_of(response);
    if heads.is_empty() {
        return;
    }
    for contender in contenders {
        let Some(queue) = core.queues.find(&contender.layout) else { continue };
        for (key, created) in &heads {
            if contender.layout.is_entry(key) {
                queue.head_seen(key, *created);
            }
        }
    }
}
