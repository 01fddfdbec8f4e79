//! Synchronous, blocking coordination recipes on etcd v3, for programs that are not async.
//!
//! # Overview
//!
//! - [`Client`] is the connection: cheap to clone, usable from any thread, made without I/O.
//! - [`Mutex`] is a lock on a path, shared by every process that names it; [`RwLock`] lets readers
//!   share it, [`Semaphore`] lets in as many as it has permits, [`MultiLock`] locks several as one.
//! - [`LeaderSelector`] leads as long as a callback runs, [`LeaderLatch`] until it is closed;
//!   [`LeaderObserver`] sees who leads.
//! - [`FenceGate`] and [`StoredFenceGate`] guard what is not in etcd by the fencing token.
//! - [`TransientKeyValue`] and [`Barrier`] are presence: they come back after an outage.
//! - [`SelfHealingKeepAlive`] keeps a lease of your own and re-creates its keys when it dies.
//! - [`CancelToken`] interrupts what blocks.
//! - [`ResilienceConfig`] holds the limits and retry policies; every option states its default.
//!
//! # Guarantees
//!
//! Whatever a process owns in etcd hangs on a lease, and etcd gives it away when the lease is not
//! renewed in time. What happens then depends on what the lease means.
//!
//! **Exclusive holds never heal.** While a guard's [`is_held`](MutexGuard::is_held) says `true`,
//! no rival has been let in because of an expiry, a partition, a restart of etcd with its data, or
//! a pause of the process that this machine's boot-time clock can see. Once lost, a hold stays
//! lost. In this order: the flag turns `false`, the hold's [`CancelToken`] is cancelled, the
//! connection state becomes `Lost` and the error is recorded, the listeners run, the key is
//! removed. `unlock` then returns `false`.
//!
//! **Presence heals.** The lease is granted anew and the keys are re-created by compare-and-set:
//! restored where they are free, never reclaimed. See [`LeaseEvent`].
//!
//! **What no clock can see** is told afterwards: an operator who deletes the key or revokes the
//! lease, an etcd that lost its data, a virtual machine paused behind its clock's back. The
//! [fencing token](MutexGuard::fencing_token) and the guarded writes
//! ([`put`](MutexGuard::put), [`txn`](MutexGuard::txn)) cover those.
//!
//! # Waiting and interruption
//!
//! Waiting for others is unbounded unless a limit is given. Waiting for etcd ends with
//! [`ErrorKind::Unreachable`] after the operation timeout (30 s). A blocking call on a thread
//! inside [`CancelToken::scope`] returns [`ErrorKind::Interrupted`] promptly once the token is
//! cancelled, having cleaned up after itself. Releasing, closing and dropping are never
//! interrupted and never wait for an absent etcd longer than about 2 s.
//!
//! # Implementation
//!
//! One hidden thread per client drives a tokio runtime that no user code ever sees or runs on;
//! callers park. So every call works from any thread: a plain one, a pool's, an async worker
//! (which it blocks: prefer `spawn_blocking`), a destructor. Listeners run on healer threads that
//! exist only while there is something to run. A logger that blocks delays renewals, though never
//! a deadline: the library logs changes of state only.
//!
//! # Features
//!
//! | feature | for |
//! | --- | --- |
//! | `tls`, `tls-aws-lc` | `https` endpoints, with rustls over ring or aws-lc |
//! | `tls-native-roots`, `tls-webpki-roots` | where the trust roots come from |
//! | `json` | the codec `Json<T>` for values that serde knows |
//! | `testing` | real etcd processes and a fault proxy, see the module `testing` |
//!
//! # Example: know whether you held the lock to the end
//!
//! ```
//! # use etcd_recipes::testing::EtcdServer;
//! use etcd_recipes::{Client, Mutex};
//!
//! # fn main() -> etcd_recipes::Result<()> {
//! # let etcd = EtcdServer::start()?;
//! # let endpoint = etcd.endpoint();
//! let client = Client::connect([endpoint])?;
//! let mutex = Mutex::new(&client, "/locks/orders")?;
//! let guard = mutex.lock()?;
//! // ... work, asking `guard.is_held()` where it matters ...
//! if !guard.unlock() {
//!     eprintln!("somebody else may have been inside");
//! }
//! # Ok(()) }
//! ```

pub mod barrier;
mod cancel;
pub mod client;
mod clock;
pub mod codec;
mod contend;
pub mod election;
mod error;
pub mod fence;
mod fork;
pub mod lease;
pub mod lock;
pub mod presence;
mod race;
pub mod recipe;
pub mod resilience;
#[cfg(all(feature = "testing", unix))]
pub mod testing;
mod wait;
mod watch;
mod whitebox;

pub use barrier::{Barrier, BarrierBuilder};
pub use cancel::CancelToken;
#[cfg(any(feature = "tls", feature = "tls-aws-lc"))]
pub use client::TlsOptions;
pub use client::{
    Client, ClientBuilder, Compare, CompareOp, KeyValue, Op, OpResult, Txn, TxnResult,
};
#[cfg(feature = "json")]
pub use codec::Json;
pub use codec::{Bytes, Codec, Text};
pub use election::{
    BoxError, CandidateState, CloseMode, LatchEvent, LatchListener, LeaderChange, LeaderLatch,
    LeaderLatchBuilder, LeaderObserver, LeaderObserverBuilder, LeaderSelector,
    LeaderSelectorBuilder, LeaderSelectorListener, Leadership, LeadershipTerm, Participant,
};
pub use error::{Error, ErrorKind, Result};
pub use fence::{FenceGate, FencingToken, StoredFenceGate};
pub use lease::{Lease, LeaseEvent, LeaseListener, Loss, LossReason, SelfHealingKeepAlive};
pub use lock::{
    Contender, ContenderMode, FencedTxn, Force, Hold, LossListener, MultiLock, MultiLockGuard,
    Mutex, MutexBuilder, MutexGuard, OwnedMutexGuard, OwnedRwLockReadGuard, OwnedRwLockWriteGuard,
    Permit, QueueProgress, ReleaseRequest, RwLock, RwLockBuilder, RwLockReadGuard,
    RwLockWriteGuard, Semaphore, SemaphoreBuilder, SharedHold,
};
pub use presence::{TransientBuilder, TransientKeyValue};
pub use recipe::{ConnectionState, ErrorEvent, ListenerId, Recipe, Subscription};
pub use resilience::{
    LeaseResilience, ResilienceConfig, RetryPolicy, RpcResilience, WatchResilience,
};
