//! The requests the library sends, each one line over the funnel.

use etcd_client::{
    DeleteOptions, GetOptions, GetResponse, LeaseGrantOptions, PutOptions, TxnResponse,
};

use super::call::{Call, Kind};
use super::core::Core;
use crate::clock::Instant;
use crate::error::{Error, ErrorKind, Result};

/// A lease as etcd granted it.
pub(crate) struct Granted {
    pub(crate) id: i64,
    /// Seconds, as granted; a server may grant more than was asked for.
    pub(crate) ttl: i64,
    /// Before the request was sent: the instant from which the TTL may be counted.
    pub(crate) sent: Instant,
}

impl Core {
    /// A linearizable read.
    pub(crate) async fn range(
        &self,
        op: &'static str,
        key: &[u8],
        options: Option<GetOptions>,
        until: Instant,
    ) -> Result<GetResponse> {
        let call = Call { op, key, kind: Kind::Repeatable, until };
        self.call(call, |connection| {
            let (key, options) = (key.to_vec(), options.clone());
            async move { connection.kv().get(key, options).await }
        })
        .await
    }

    /// A transaction; `kind` says whether it may be sent twice.
    pub(crate) async fn txn(
        &self,
        op: &'static str,
        key: &[u8],
        kind: Kind,
        txn: etcd_client::Txn,
        until: Instant,
    ) -> Result<TxnResponse> {
        self.call(Call { op, key, kind, until }, |connection| {
            let txn = txn.clone();
            async move { connection.kv().txn(txn).await }
        })
        .await
    }

    /// An unguarded write.
    pub(crate) async fn put(
        &self,
        op: &'static str,
        key: &[u8],
        value: &[u8],
        lease: i64,
        until: Instant,
    ) -> Result<i64> {
        let call = Call { op, key, kind: Kind::Write, until };
        let response = self
            .call(call, |connection| {
                let (key, value) = (key.to_vec(), value.to_vec());
                let options = (lease != 0).then(|| PutOptions::new().with_lease(lease));
                async move { connection.kv().put(key, value, options).await }
            })
            .await?;
        Ok(response.header().map_or(0, |h| h.revision()))
    }

    /// An unguarded delete of a key, or of a prefix.
    pub(crate) async fn delete(
        &self,
        op: &'static str,
        key: &[u8],
        prefix: bool,
        until: Instant,
    ) -> Result<i64> {
        let call = Call { op, key, kind: Kind::Write, until };
        let response = self
            .call(call, |connection| {
                let key = key.to_vec();
                let options = prefix.then(|| DeleteOptions::new().with_prefix());
                async move { connection.kv().delete(key, options).await }
            })
            .await?;
        Ok(response.deleted())
    }

    /// A new lease. An answer that never comes leaves a lease behind that nobody renews, so the
    /// request may be repeated: the first one ends by itself.
    pub(crate) async fn grant(
        &self,
        op: &'static str,
        ttl_secs: i64,
        until: Instant,
    ) -> Result<Granted> {
        let call = Call { op, key: b"", kind: Kind::Repeatable, until };
        // The id is ours, drawn anew for each attempt, and the time is read in the same breath:
        // the attempt whose id comes back is the one whose send counts.
        let sends = parking_lot::Mutex::new(Vec::new());
        let response = self
            .call(call, |connection| {
                let id = random_lease_id();
                sends.lock().push((id, self.clock.now()));
                async move {
                    let options = LeaseGrantOptions::new().with_id(id);
                    connection.lease().grant(ttl_secs, Some(options)).await
                }
            })
            .await?;
        let sent = sends.lock().iter().find(|(id, _)| *id == response.id()).map(|(_, sent)| *sent);
        match sent {
            Some(sent) => Ok(Granted { id: response.id(), ttl: response.ttl(), sent }),
            None => Err(Error::internal("etcd granted a lease with another id than asked for")),
        }
    }

    /// Ends a lease and deletes its keys; a lease that is already gone is as good.
    pub(crate) async fn revoke(&self, op: &'static str, lease: i64, until: Instant) -> Result<()> {
        let call = Call { op, key: b"", kind: Kind::Repeatable, until };
        let revoked = self
            .call(call, |connection| async move { connection.lease().revoke(lease).await })
            .await;
        match revoked {
            Err(error) if error.kind() == ErrorKind::LeaseGone => Ok(()),
            other => other.map(drop),
        }
    }

    /// The seconds a lease has left, or `None` if there is no such lease.
    pub(crate) async fn time_to_live(
        &self,
        op: &'static str,
        lease: i64,
        until: Instant,
    ) -> Result<Option<i64>> {
        let call = Call { op, key: b"", kind: Kind::Repeatable, until };
        let asked =
            self.call(call, |connection| async move {
                connection.lease().time_to_live(lease, None).await
            })
            .await;
        match asked {
            Ok(response) => Ok((response.ttl() >= 0).then(|| response.ttl())),
            Err(error) if error.kind() == ErrorKind::LeaseGone => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// A positive id that no one else has: 63 random bits.
fn random_lease_id() -> i64 {
    use std::hash::{BuildHasher, RandomState};
    let bits = RandomState::new().hash_one(std::thread::current().id()) >> 1;
    (bits as i64).max(1)
}
