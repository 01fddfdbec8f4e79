//! What a thread holds, mutex by mutex, so that it may lock again what it has locked.
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

/// One hold of one thread, shared by the guards of its re-entries.
pub(super) struct ThreadHold {
    mutex: u64,
    pub(super) hold: Arc<Hold>,
    count: AtomicUsize,
    /// The hold's scope on this thread, with `interrupt_on_lock_loss`.
    scope: Option<u64>,
}

thread_local! {
    static HOLDS: RefCell<HashMap<u64, Arc<ThreadHold>>> = RefCell::new(HashMap::new());
}

impl ThreadHold {
    /// Registers a fresh hold of this thread on the mutex with this number.
    pub(super) fn begin(mutex: u64, hold: Arc<Hold>, interrupt: bool) -> Arc<ThreadHold> {
        let scope = if interrupt { hold.cancel_token().enter_until_left() } else { None };
        let held = Arc::new(ThreadHold { mutex, hold, count: AtomicUsize::new(1), scope });
        let replaced = HOLDS.try_with(|holds| holds.borrow_mut().insert(mutex, held.clone()));
        drop(replaced);
        held
    }

    /// This thread's hold on the mutex, if it has one.
    pub(super) fn find(mutex: u64) -> Option<Arc<ThreadHold>> {
        HOLDS.try_with(|holds| holds.borrow().get(&mutex).cloned()).ok().flatten()
    }

    pub(super) fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    pub(super) fn enter_again(&self) {
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    /// One guard less; true if it was the last, whose duty is to release. The hold's scope is
    /// left with it.
    pub(super) fn leave(&self) -> bool {
        if self.count.fetch_sub(1, Ordering::Relaxed) > 1 {
            return false;
        }
        let removed = HOLDS.try_with(|holds| holds.borrow_mut().remove(&self.mutex));
        drop(removed);
        if let Some(scope) = self.scope {
            cancel::leave(scope);
        }
        true
    }
}
