//! Keys that stand as long as their owner lives, and come back when etcd lost sight of it.

mod restore;
mod transient;
mod upkeep;

pub(crate) use restore::restore;
pub use transient::{TransientBuilder, TransientKeyValue};
