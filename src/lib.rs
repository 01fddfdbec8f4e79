//! Synchronous, blocking coordination recipes on etcd v3.

mod cancel;
mod clock;
mod error;
pub mod recipe;
pub mod resilience;
#[cfg(feature = "testing")]
pub mod testing;
mod wait;
mod whitebox;

pub use cancel::CancelToken;
pub use error::{Error, ErrorKind, Result};
pub use recipe::{ConnectionState, ErrorEvent, ListenerId, Recipe, Subscription};
pub use resilience::{
    LeaseResilience, ResilienceConfig, RetryPolicy, RpcResilience, WatchResilience,
};
