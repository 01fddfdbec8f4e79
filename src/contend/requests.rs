//! The transactions of a queue: joining it, leaving it, and what their answers say.

use std::sync::Arc;

use etcd_client::{
    Compare, CompareOp, GetOptions, PutOptions, SortOrder, SortTarget, Txn, TxnOp, TxnOpResponse,
    TxnResponse,
};

use super::mirror::is_child;
use crate::client::call::Kind;
use crate::client::core::Core;
use crate::error::Result;
use crate::lease::Session;
use crate::watch::Entry;

/// Where an enqueue put its key.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Nobody is ahead.
    First,
    /// Somebody is.
    Behind,
    /// The nearest key ahead is none of the queue's, so the answer does not tell.
    Unclear,
}

/// What an enqueue answered.
#[derive(Debug)]
pub(crate) struct Enqueued {
    pub(crate) create_revision: i64,
    pub(crate) place: Place,
}

/// Puts the contender's key, and reads it back together with the one ahead: two answers in one
/// round trip.
pub(crate) fn enqueue(prefix: &[u8], key: &[u8], value: &[u8], lease: i64) -> Txn {
    let newest_two = GetOptions::new()
        .with_prefix()
        .with_sort(SortTarget::Create, SortOrder::Descend)
        .with_limit(2);
    let put = TxnOp::put(key, value, Some(PutOptions::new().with_lease(lease)));
    Txn::new()
        .when([absent(key)])
        .and_then([put, TxnOp::get(prefix, Some(newest_two.clone()))])
        .or_else([TxnOp::get(key, None)])
}

/// What the answer to [`enqueue`] says; `None` if the key existed, which its name rules out.
pub(crate) fn enqueued(response: &TxnResponse, prefix: &[u8], key: &[u8]) -> Option<Enqueued> {
    if !response.succeeded() {
        return None;
    }
    let create_revision = response.header()?.revision();
    let responses = response.op_responses();
    let Some(TxnOpResponse::Get(newest)) = responses.get(1) else { return None };
    let place = match newest.kvs().iter().find(|kv| kv.key() != key) {
        None => Place::First,
        Some(ahead) if is_child(prefix, ahead.key()) => Place::Behind,
        Some(_) => Place::Unclear,
    };
    Some(Enqueued { create_revision, place })
}

/// Puts the key only if the whole queue is empty, so that a busy one costs a read and no
/// revision.
pub(crate) fn enqueue_if_empty(prefix: &[u8], key: &[u8], value: &[u8], lease: i64) -> Txn {
    let put = TxnOp::put(key, value, Some(PutOptions::new().with_lease(lease)));
    let oldest = GetOptions::new().with_prefix().with_keys_only();
    Txn::new()
        .when([Compare::create_revision(prefix, CompareOp::Equal, 0).with_prefix()])
        .and_then([put])
        .or_else([TxnOp::get(prefix, Some(oldest))])
}

/// What a try found.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Tried {
    Held {
        create_revision: i64,
    },
    Busy,
    /// Only keys of other recipes stand there; they do not count, but they spoil the compare.
    OnlyDeeperKeys,
}

pub(crate) fn tried(response: &TxnResponse, prefix: &[u8]) -> Tried {
    if response.succeeded() {
        return Tried::Held { create_revision: response.header().map_or(0, |h| h.revision()) };
    }
    let busy = response.op_responses().iter().any(|one| match one {
        TxnOpResponse::Get(get) => get.kvs().iter().any(|kv| is_child(prefix, kv.key())),
        _ => false,
    });
    if busy { Tried::Busy } else { Tried::OnlyDeeperKeys }
}

/// Deletes the key if it is still the one created at this revision, and reads who is first now.
pub(crate) fn leave(prefix: &[u8], key: &[u8], create_revision: i64) -> Txn {
    let head = GetOptions::new()
        .with_prefix()
        .with_sort(SortTarget::Create, SortOrder::Ascend)
        .with_limit(1);
    Txn::new()
        .when([Compare::create_revision(key, CompareOp::Equal, create_revision)])
        .and_then([TxnOp::delete(key, None), TxnOp::get(prefix, Some(head.clone()))])
        .or_else([TxnOp::get(prefix, Some(head))])
}

/// Who is first after a [`leave`].
pub(crate) fn head_of(response: &TxnResponse, prefix: &[u8]) -> Option<Entry> {
    response
        .op_responses()
        .iter()
        .find_map(|one| match one {
            TxnOpResponse::Get(get) => get.kvs().first().map(Entry::from),
            _ => None,
        })
        .filter(|head| is_child(prefix, &head.key))
}

fn absent(key: &[u8]) -> Compare {
    Compare::create_revision(key, CompareOp::Equal, 0)
}

/// Everything in the queue, first to last, from one linearizable read.
pub(crate) async fn read_queue(core: &Core, op: &'static str, prefix: &[u8]) -> Result<Vec<Entry>> {
    let options = GetOptions::new().with_prefix();
    let response = core.range(op, prefix, Some(options), core.operation_limit()).await?;
    let mut entries: Vec<Entry> =
        response.kvs().iter().filter(|kv| is_child(prefix, kv.key())).map(Entry::from).collect();
    // Sorted here: asking etcd to sort makes it read the whole range before it answers.
    entries.sort_by(|a, b| (a.create_revision, &a.key).cmp(&(b.create_revision, &b.key)));
    Ok(entries)
}

/// Deletes a key that belongs to an attempt given up for lost, which closes that attempt.
pub(crate) async fn remove_stray(
    core: Arc<Core>,
    session: Arc<Session>,
    key: Vec<u8>,
    create_revision: i64,
) {
    let txn = Txn::new()
        .when([Compare::create_revision(key.clone(), CompareOp::Equal, create_revision)])
        .and_then([TxnOp::delete(key.clone(), None)]);
    let until = core.operation_limit();
    match core.txn("stray removal", &key, Kind::Repeatable, txn, until).await {
        Ok(_) => {
            log::info!("removed `{}`, left by an unanswered request", core.shown(&key));
            session.close_open_attempt(&key);
        }
        // The revocation of its lease will take it.
        Err(error) => log::debug!("removing `{}`: {error}", core.shown(&key)),
    }
}
