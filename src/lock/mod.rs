//! Locks: holds that are told when they are lost, and never healed.

mod administer;
pub(crate) mod base;
pub(crate) mod guard;
mod multi;
mod mutex;
pub(crate) mod options;
mod permit;
mod rwlock;
mod rwlock_guards;
mod semaphore;
mod thread_holds;
mod view;

pub use crate::contend::{
    ContenderInfo as Contender, ContenderMode, QueueProgress, ReleaseRequest,
};
pub use crate::lease::{Loss, LossReason};
pub use administer::Force;
pub use guard::{FencedTxn, MutexGuard, OwnedMutexGuard};
pub use multi::{MultiLock, MultiLockGuard};
pub use mutex::{LossListener, Mutex, MutexBuilder};
pub use permit::Permit;
pub use rwlock::{RwLock, RwLockBuilder};
pub use rwlock_guards::{
    OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLockReadGuard, RwLockWriteGuard,
};
pub use semaphore::{Semaphore, SemaphoreBuilder};
pub use view::{Hold, SharedHold};
