//! Putting a presence key back where it is free, and taking over our own that still stands.

use etcd_client::{
    Compare, CompareOp, KeyValue, PutOptions, Txn, TxnOp, TxnOpResponse, TxnResponse,
};

use crate::client::call::Kind;
use crate::client::core::Core;
use crate::clock::Instant;
use crate::error::Result;

/// Puts `value` at `key` under `lease` if the key is absent or `ours`; returns the revision that
/// did it, or `None` if somebody else's key stands there.
///
/// Every request may be sent twice, since what it writes makes its own repetition fail: an answer
/// that was lost is found out by asking again.
pub(crate) async fn restore(
    core: &Core,
    op: &'static str,
    key: &[u8],
    value: &[u8],
    lease: i64,
    until: Instant,
    ours: impl Fn(&KeyValue) -> bool,
) -> Result<Option<i64>> {
    let mut standing = None;
    loop {
        let guard = match standing {
            None => Compare::create_revision(key, CompareOp::Equal, 0),
            Some(revision) => Compare::mod_revision(key, CompareOp::Equal, revision),
        };
        let txn = guarded_put(guard, key, value, lease);
        let response = core.txn(op, key, Kind::Repeatable, txn, until).await?;
        if response.succeeded() {
            return Ok(Some(revision(&response)));
        }
        standing = match found(&response) {
            None => None,
            Some(kv) if !ours(&kv) => return Ok(None),
            Some(kv) if kv.lease() == lease && kv.value() == value => {
                return Ok(Some(kv.mod_revision()));
            }
            Some(kv) => Some(kv.mod_revision()),
        };
    }
}

/// Puts under the guard, and shows what stands there if it does not hold.
pub(super) fn guarded_put(guard: Compare, key: &[u8], value: &[u8], lease: i64) -> Txn {
    let put = TxnOp::put(key, value, Some(PutOptions::new().with_lease(lease)));
    Txn::new().when([guard]).and_then([put]).or_else([TxnOp::get(key, None)])
}

/// What the else branch of [`guarded_put`] showed.
pub(super) fn found(response: &TxnResponse) -> Option<KeyValue> {
    response.op_responses().into_iter().find_map(|response| match response {
        TxnOpResponse::Get(mut get) => get.take_kvs().into_iter().next(),
        _ => None,
    })
}

pub(super) fn revision(response: &TxnResponse) -> i64 {
    response.header().map_or(0, |header| header.revision())
}
