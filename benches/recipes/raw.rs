//! Our protocol in raw etcd-client: one transaction that joins a queue, one that leaves it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use etcd_client::{
    Client, Compare, CompareOp, Error, GetOptions, PutOptions, ResponseHeader, SortOrder,
    SortTarget, Txn, TxnOp, TxnOpResponse,
};

/// As long as what our contenders write about themselves.
const VALUE: &str =
    r#"{"client_id":"host-12345-abcdef","host":"host","pid":12345,"since":1700000000000}"#;

/// A key that stands, and the revision at which it was made.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Standing {
    pub(crate) key: Vec<u8>,
    pub(crate) created: i64,
}

/// How a contender's key is named.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keys {
    /// Another one for every acquire.
    Unique,
    /// One for each of those who contend, made again and again.
    Reused,
}

/// Whoever contends for one client: its lease, and the names of its keys.
#[derive(Clone)]
pub(crate) struct Contender {
    pub(crate) lease: i64,
    keys: Keys,
    numbers: Arc<AtomicU64>,
}

impl Contender {
    pub(crate) fn new(lease: i64, keys: Keys) -> Contender {
        // Far from zero, so that all names are equally long.
        Contender { lease, keys, numbers: Arc::new(AtomicU64::new(1_000_000)) }
    }

    /// What the names of all its keys on a path begin with.
    pub(crate) fn start(&self, prefix: &str) -> String {
        format!("{prefix}{:x}-", self.lease)
    }

    fn key(&self, prefix: &str, task: usize) -> Vec<u8> {
        let number = match self.keys {
            Keys::Unique => self.numbers.fetch_add(1, Ordering::Relaxed),
            Keys::Reused => 1_000_000 + task as u64,
        };
        format!("{}{number}", self.start(prefix)).into_bytes()
    }

    /// Puts a key at the end of the queue; what it is, and who stands right ahead.
    pub(crate) async fn enqueue(
        &self,
        client: &mut Client,
        prefix: &str,
        task: usize,
    ) -> Result<(Standing, Option<Standing>), Error> {
        let key = self.key(prefix, task);
        let newest_two = GetOptions::new()
            .with_prefix()
            .with_sort(SortTarget::Create, SortOrder::Descend)
            .with_limit(2)
            .with_keys_only();
        let put = PutOptions::new().with_lease(self.lease);
        let free = Compare::create_revision(key.clone(), CompareOp::Equal, 0);
        let txn = Txn::new().when([free]).and_then([
            TxnOp::put(key.clone(), VALUE, Some(put)),
            TxnOp::get(prefix, Some(newest_two)),
        ]);
        let answer = client.txn(txn).await?;
        let created = answer.header().map_or(0, ResponseHeader::revision);
        let ahead = answer.op_responses().iter().find_map(|one| match one {
            TxnOpResponse::Get(get) => get
                .kvs()
                .iter()
                .find(|kv| kv.key() != key)
                .map(|kv| Standing { key: kv.key().to_vec(), created: kv.create_revision() }),
            _ => None,
        });
        Ok((Standing { key, created }, ahead))
    }
}

/// Takes a key out of the queue; who is the first now.
pub(crate) async fn leave(
    client: &mut Client,
    prefix: &str,
    standing: Standing,
) -> Result<Option<Standing>, Error> {
    let first = GetOptions::new()
        .with_prefix()
        .with_sort(SortTarget::Create, SortOrder::Ascend)
        .with_limit(1)
        .with_keys_only();
    let same = Compare::create_revision(standing.key.clone(), CompareOp::Equal, standing.created);
    let txn = Txn::new()
        .when([same])
        .and_then([TxnOp::delete(standing.key, None), TxnOp::get(prefix, Some(first))]);
    let answer = client.txn(txn).await?;
    Ok(answer.op_responses().iter().find_map(|one| match one {
        TxnOpResponse::Get(get) => get
            .kvs()
            .first()
            .map(|kv| Standing { key: kv.key().to_vec(), created: kv.create_revision() }),
        _ => None,
    }))
}
