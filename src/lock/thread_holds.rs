//! What a thread holds, lock by lock, so that it may lock again what it has locked.
//!
//! A guard stays on its thread, so the register is thread-local and needs no lock. In a
//! thread-local destructor the register may be gone already: then nothing is re-entered, and all
//! else works.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::cancel;
use crate::contend::Hold;

/// How a guard holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Shared,
    Exclusive,
}

/// What the end of a guard leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Leave {
    /// Other guards of the same kind, or of a kind that keeps the hold as it is.
    Inner,
    /// Guards that share, where this one excluded.
    LastWriter,
    /// No guard: the hold is to be released.
    Last,
}

/// One hold of one thread, shared by the guards of its re-entries.
pub(super) struct ThreadHold {
    lock: u64,
    pub(super) hold: Arc<Hold>,
    shared: AtomicUsize,
    exclusive: AtomicUsize,
    /// The hold's scope on this thread, where its loss interrupts.
    scope: Option<u64>,
}

thread_local! {
    static HOLDS: RefCell<HashMap<u64, Arc<ThreadHold>>> = RefCell::new(HashMap::new());
}

impl ThreadHold {
    /// Registers a fresh hold of this thread on the lock with this number.
    pub(super) fn begin(
        lock: u64,
        hold: Arc<Hold>,
        side: Side,
        interrupt: bool,
    ) -> Arc<ThreadHold> {
        let scope = if interrupt { hold.cancel_token().enter_until_left() } else { None };
        let (shared, exclusive) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let held = Arc::new(ThreadHold { lock, hold, shared, exclusive, scope });
        held.enter_again(side);
        let replaced = HOLDS.try_with(|holds| holds.borrow_mut().insert(lock, held.clone()));
        drop(replaced);
        held
    }

    /// This thread's hold on the lock, if it has one.
    pub(super) fn find(lock: u64) -> Option<Arc<ThreadHold>> {
        HOLDS.try_with(|holds| holds.borrow().get(&lock).cloned()).ok().flatten()
    }

    fn counter(&self, side: Side) -> &AtomicUsize {
        match side {
            Side::Shared => &self.shared,
            Side::Exclusive => &self.exclusive,
        }
    }

    pub(super) fn count(&self, side: Side) -> usize {
        self.counter(side).load(Ordering::Relaxed)
    }

    pub(super) fn enter_again(&self, side: Side) {
        self.counter(side).fetch_add(1, Ordering::Relaxed);
    }

    /// One guard less. The hold's scope is left with the last.
    pub(super) fn leave(&self, side: Side) -> Leave {
        self.counter(side).fetch_sub(1, Ordering::Relaxed);
        match (self.count(Side::Exclusive), self.count(Side::Shared)) {
            (0, 0) => {}
            (0, _) if side == Side::Exclusive => return Leave::LastWriter,
            _ => return Leave::Inner,
        }
        let removed = HOLDS.try_with(|holds| holds.borrow_mut().remove(&self.lock));
        drop(removed);
        if let Some(scope) = self.scope {
            cancel::leave(scope);
        }
        Leave::Last
    }
}
