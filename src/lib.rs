//! Synchronous, blocking coordination recipes on etcd v3.

pub mod barrier;
mod cancel;
pub mod client;
mod clock;
pub mod codec;
mod contend;
mod error;
mod fork;
pub mod lease;
pub mod lock;
pub mod presence;
mod race;
pub mod recipe;
pub mod resilience;
#[cfg(feature = "testing")]
pub mod testing;
mod wait;
mod watch;
mod whitebox;

pub use barrier::{Barrier, BarrierBuilder};
pub use cancel::CancelToken;
pub use client::{
    Client, ClientBuilder, Compare, CompareOp, KeyValue, Op, OpResult, Txn, TxnResult,
};
#[cfg(feature = "json")]
pub use codec::Json;
pub use codec::{Bytes, Codec, Text};
pub use error::{Error, ErrorKind, Result};
pub use lease::{Lease, LeaseEvent, LeaseListener, Loss, LossReason, SelfHealingKeepAlive};
pub use lock::{
    Contender, FencedTxn, Hold, LossListener, Mutex, MutexBuilder, MutexGuard, OwnedMutexGuard,
};
pub use presence::{TransientBuilder, TransientKeyValue};
pub use recipe::{ConnectionState, ErrorEvent, ListenerId, Recipe, Subscription};
pub use resilience::{
    LeaseResilience, ResilienceConfig, RetryPolicy, RpcResilience, WatchResilience,
};
