//! Synchronous, blocking coordination recipes on etcd v3.

mod clock;
mod error;
#[cfg(feature = "testing")]
pub mod testing;

pub use error::{Error, ErrorKind, Result};
