//! Synchronous, blocking coordination recipes on etcd v3.

mod cancel;
mod clock;
mod error;
#[cfg(feature = "testing")]
pub mod testing;
mod wait;

pub use cancel::CancelToken;
pub use error::{Error, ErrorKind, Result};
