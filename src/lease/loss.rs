//! How an exclusive hold ended against its holder's will, as told to the holder.

use std::time::SystemTime;

/// Why a hold was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LossReason {
    /// No renewal counted before the local deadline: etcd was out of reach, or the process stood
    /// still. A rival may be inside from now on.
    DeadlinePassed,
    /// etcd ended the lease: somebody revoked it, or the store's data was lost.
    LeaseGone,
    /// Somebody deleted the key while the lease lived.
    KeyDeleted,
    /// Somebody wrote over the key.
    KeyOverwritten,
    /// Another lock of the same multi-lock was lost.
    SetLost,
    /// It lasted longer than its recipe's `max_hold`.
    MaxHoldExceeded,
    /// The client or the recipe was closed.
    Closed,
    /// etcd refused to prove the renewals: the login or the role was taken away.
    AuthRevoked,
    /// The endpoints lead to another cluster now.
    WrongCluster,
}

/// The loss of one hold.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Loss {
    /// Why.
    pub reason: LossReason,
    /// The path of the recipe.
    pub path: String,
    /// The key that was held.
    pub key: String,
    /// The key's create revision: the fencing token where the hold was an exclusive one.
    pub token: i64,
    /// When the last renewal that counted was sent, by the machine's wall clock.
    pub last_renewal: SystemTime,
}
