//! Plain etcd, for what no recipe covers: keys, transactions, leases.

use std::time::Duration;

use etcd_client::GetOptions;

use super::Client;
use super::call::Kind;
use super::txn::{KeyValue, Txn, TxnResult};
use crate::error::{Error, Result};

/// The basics: each is one request, retried only as far as that is safe, and ends with
/// `Unreachable` after the operation timeout. A write whose answer was lost is `OutcomeUnknown`.
impl Client {
    /// Reads one key.
    ///
    /// # Errors
    ///
    /// `Unreachable`, `PermissionDenied`, `AuthenticationFailed`, `Interrupted`, `Closed`,
    /// `Forked`.
    pub fn get(&self, key: impl Into<Vec<u8>>) -> Result<Option<KeyValue>> {
        Ok(self.read("client.get", key.into(), None)?.into_iter().next())
    }

    /// Reads every key that begins with `prefix`, in key order.
    ///
    /// # Errors
    ///
    /// As [`get`](Client::get).
    pub fn get_prefix(&self, prefix: impl Into<Vec<u8>>) -> Result<Vec<KeyValue>> {
        self.read("client.get_prefix", prefix.into(), Some(GetOptions::new().with_prefix()))
    }

    /// Counts the keys that begin with `prefix`.
    ///
    /// # Errors
    ///
    /// As [`get`](Client::get).
    pub fn count_prefix(&self, prefix: impl Into<Vec<u8>>) -> Result<u64> {
        let core = self.core().clone();
        let key = core.physical(&prefix.into());
        self.core().block_on("client.count_prefix", None, async move {
            let options = GetOptions::new().with_prefix().with_count_only();
            let until = core.operation_limit();
            let response = core.range("count_prefix", &key, Some(options), until).await?;
            Ok(u64::try_from(response.count()).unwrap_or(0))
        })
    }

    fn read(
        &self,
        op: &'static str,
        key: Vec<u8>,
        options: Option<GetOptions>,
    ) -> Result<Vec<KeyValue>> {
        let core = self.core().clone();
        let key = core.physical(&key);
        self.core().block_on(op, None, async move {
            let response = core.range(op, &key, options, core.operation_limit()).await?;
            Ok(response.kvs().iter().map(|kv| KeyValue::from_etcd(&core, kv)).collect())
        })
    }

    /// Writes a key; returns the revision of the write.
    ///
    /// # Errors
    ///
    /// As [`get`](Client::get), and `OutcomeUnknown` if the answer was lost.
    pub fn put(&self, key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>) -> Result<i64> {
        self.put_with_lease(key, value, 0)
    }

    /// Writes a key that goes when `lease` ends (0: for no lease); returns the revision.
    ///
    /// # Errors
    ///
    /// As [`put`](Client::put), and `LeaseGone`.
    pub fn put_with_lease(
        &self,
        key: impl Into<Vec<u8>>,
        value: impl Into<Vec<u8>>,
        lease: i64,
    ) -> Result<i64> {
        let core = self.core().clone();
        let (key, value) = (core.physical(&key.into()), value.into());
        self.core().block_on("client.put", None, async move {
            core.put("put", &key, &value, lease, core.operation_limit()).await
        })
    }

    /// Deletes a key; returns whether there was one.
    ///
    /// # Errors
    ///
    /// As [`put`](Client::put).
    pub fn delete(&self, key: impl Into<Vec<u8>>) -> Result<bool> {
        Ok(self.remove("client.delete", key.into(), false)? > 0)
    }

    /// Deletes every key that begins with `prefix`; returns how many there were.
    ///
    /// # Errors
    ///
    /// As [`put`](Client::put).
    pub fn delete_prefix(&self, prefix: impl Into<Vec<u8>>) -> Result<u64> {
        Ok(u64::try_from(self.remove("client.delete_prefix", prefix.into(), true)?).unwrap_or(0))
    }

    fn remove(&self, op: &'static str, key: Vec<u8>, prefix: bool) -> Result<i64> {
        let core = self.core().clone();
        let key = core.physical(&key);
        self.core().block_on(op, None, async move {
            core.delete(op, &key, prefix, core.operation_limit()).await
        })
    }

    /// Runs a transaction.
    ///
    /// # Errors
    ///
    /// As [`put`](Client::put); `Rejected` with etcd's reason if it is too large or writes a key
    /// twice.
    pub fn txn(&self, txn: Txn) -> Result<TxnResult> {
        let core = self.core().clone();
        self.core().block_on("client.txn", None, async move {
            let until = core.operation_limit();
            let response = core.txn("txn", b"", Kind::Write, txn.for_etcd(&core), until).await?;
            Ok(TxnResult::from_etcd(&core, &response))
        })
    }

    /// Grants a lease that nobody renews; returns its id and the TTL granted. The TTL is rounded
    /// up to whole seconds, and etcd may grant more than was asked for.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a TTL of zero; else as [`get`](Client::get).
    pub fn grant_lease(&self, ttl: Duration) -> Result<(i64, Duration)> {
        if ttl.is_zero() {
            return Err(Error::invalid("ttl is zero"));
        }
        let seconds = ttl.as_secs() + u64::from(ttl.subsec_nanos() > 0);
        let seconds = i64::try_from(seconds)
            .map_err(|_| Error::invalid(format!("ttl {ttl:?} is too long")))?;
        let core = self.core().clone();
        self.core().block_on("client.grant_lease", None, async move {
            let granted = core.grant("grant_lease", seconds, core.operation_limit()).await?;
            Ok((granted.id, Duration::from_secs(granted.ttl.unsigned_abs())))
        })
    }

    /// Ends a lease and deletes its keys; one that is already gone is no error.
    ///
    /// # Errors
    ///
    /// As [`get`](Client::get).
    pub fn revoke_lease(&self, lease: i64) -> Result<()> {
        let core = self.core().clone();
        self.core().block_on("client.revoke_lease", None, async move {
            core.revoke("revoke_lease", lease, core.operation_limit()).await
        })
    }

    /// The time a lease has left, or `None` if there is no such lease.
    ///
    /// # Errors
    ///
    /// As [`get`](Client::get).
    pub fn time_to_live(&self, lease: i64) -> Result<Option<Duration>> {
        let core = self.core().clone();
        self.core().block_on("client.time_to_live", None, async move {
            let left = core.time_to_live("time_to_live", lease, core.operation_limit()).await?;
            Ok(left.map(|seconds| Duration::from_secs(seconds.unsigned_abs())))
        })
    }
}
