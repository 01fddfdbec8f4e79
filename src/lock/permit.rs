//! A semaphore's permit, or several that were taken at once.

use std::fmt;
use std::sync::Arc;

use super::guard::guard_methods;
use super::semaphore::Semaphore;
use super::view::{SharedHold, View};
use crate::cancel::ScopeStay;
use crate::contend::Hold as HoldCore;

/// One permit of a semaphore, or several that were taken at once; given back when dropped.
///
/// It belongs to no thread: it may be stored, sent, and released anywhere. It is a handle of its
/// semaphore and thereby of the client, so one that is leaked keeps both alive, and its place with
/// them, until the client is closed or the process ends. Dropping releases without saying whether
/// the permit had been lost meanwhile; `release` says it. Neither waits longer than 2 s for an etcd
/// that is away: the rest is done in the background.
#[must_use = "the permit is given back as soon as it is dropped"]
pub struct Permit {
    semaphore: Semaphore,
    view: View,
    done: bool,
    /// The hold's scope on the thread that acquired it, where its loss interrupts.
    scope: Option<ScopeStay>,
}

impl Permit {
    pub(super) fn new(semaphore: Semaphore, hold: Arc<HoldCore>) -> Permit {
        let interrupt = semaphore.base().interrupt_on_loss;
        let scope = interrupt.then(|| hold.cancel_token().enter_until_over());
        Permit { semaphore, view: View::shared(hold), done: false, scope }
    }

    pub(super) fn view(&self) -> &View {
        &self.view
    }

    guard_methods!();

    /// How many permits this is.
    pub fn count(&self) -> usize {
        self.view.hold.key_count()
    }

    /// A view of the hold for other threads.
    pub fn hold(&self) -> SharedHold {
        SharedHold { view: self.view.clone() }
    }

    /// Gives the permit back, and says whether it stood until now: `false` if it had been lost, or
    /// if etcd answers that its key was gone. Never an error, never interrupted, and with etcd
    /// away back within 2 s (the rest is done in the background).
    pub fn release(mut self) -> bool {
        self.done = true;
        self.end()
    }

    fn end(&mut self) -> bool {
        drop(self.scope.take());
        self.semaphore.base().release(&self.view.hold)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if !self.done {
            self.end();
        }
    }
}

impl fmt::Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.view.debug(f, "Permit")
    }
}
