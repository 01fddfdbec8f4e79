//! Locks: exclusive holds that are told when they are lost, and never healed.

mod guard;
mod mutex;
mod thread_holds;

pub use crate::contend::ContenderInfo as Contender;
pub use crate::lease::{Loss, LossReason};
pub use guard::{FencedTxn, Hold, MutexGuard, OwnedMutexGuard};
pub use mutex::{LossListener, Mutex, MutexBuilder};
