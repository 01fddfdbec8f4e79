//! Guards of a read/write lock, and how a writer becomes a reader.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use super::guard::{exclusive_guard_methods, guard_methods};
use super::rwlock::RwLock;
use super::thread_holds::{Leave, Side, ThreadHold};
use super::view::{SharedHold, View};
use crate::contend::Hold as HoldCore;
use crate::error::{Error, ErrorKind, Result};

/// A read hold of the current thread, released when the last guard of its re-entries is dropped.
///
/// It stays on its thread; [`hold`](RwLockReadGuard::hold) gives a view for others, and
/// [`RwLock::read_owned`] a guard that can move. Dropping releases without saying whether the hold
/// had been lost meanwhile; `unlock` says it. Neither waits longer than 2 s for an etcd that is
/// away: the rest is done in the background.
#[must_use = "the lock is released as soon as the guard is dropped"]
pub struct RwLockReadGuard<'a> {
    lock: &'a RwLock,
    held: Arc<ThreadHold>,
    view: View,
    done: bool,
    /// As std's guard: bound to its thread, but fit to be looked at from others.
    bound: PhantomData<std::sync::MutexGuard<'static, ()>>,
}

/// A write hold of the current thread, released when the last guard of its re-entries is dropped.
///
/// As [`RwLockReadGuard`], and what it guards is this thread's alone. When the last write guard
/// goes while read guards of the thread are left, the hold becomes a reader's.
#[must_use = "the lock is released as soon as the guard is dropped"]
pub struct RwLockWriteGuard<'a> {
    lock: &'a RwLock,
    held: Arc<ThreadHold>,
    view: View,
    done: bool,
    bound: PhantomData<std::sync::MutexGuard<'static, ()>>,
}

/// A read hold that belongs to no thread: it may be stored and sent, and is released when dropped.
///
/// Not reentrant, and otherwise as an [`OwnedMutexGuard`](crate::OwnedMutexGuard).
#[must_use = "the lock is released as soon as the guard is dropped"]
pub struct OwnedRwLockReadGuard {
    lock: RwLock,
    view: View,
    done: bool,
}

/// A write hold that belongs to no thread: it may be stored and sent, and is released when
/// dropped.
///
/// Not reentrant, and otherwise as an [`OwnedMutexGuard`](crate::OwnedMutexGuard).
#[must_use = "the lock is released as soon as the guard is dropped"]
pub struct OwnedRwLockWriteGuard {
    lock: RwLock,
    view: View,
    done: bool,
}

/// What a guard of a thread is made with, and how it ends.
macro_rules! thread_guard {
    ($guard:ident, $side:expr, $view:expr) => {
        impl<'a> $guard<'a> {
            pub(super) fn new(lock: &'a RwLock, held: Arc<ThreadHold>) -> $guard<'a> {
                let view = $view(held.hold.clone());
                $guard { lock, held, view, done: false, bound: PhantomData }
            }

            pub(super) fn view(&self) -> &View {
                &self.view
            }

            /// Releases, and says whether the hold stood until now: `false` if it had been lost,
            /// or if etcd answers that its key was gone. With re-entries, each inner call only
            /// says whether the hold stands, and the last one releases. Never an error, never
            /// interrupted, and with etcd away back within 2 s (the rest is done in the
            /// background).
            pub fn unlock(mut self) -> bool {
                self.done = true;
                self.end()
            }

            fn end(&self) -> bool {
                let hold = &self.view.hold;
                if hold.is_forked() {
                    return false;
                }
                let stood = self.view.is_held();
                match self.held.leave($side) {
                    Leave::Inner => stood,
                    Leave::LastWriter => {
                        if let Err(refused) = hold.downgrade()
                            && hold.is_held()
                        {
                            // Then the readers who are left keep others out, as a writer would.
                            self.lock.base().recipe().record_error(refused);
                        }
                        stood && hold.is_held()
                    }
                    Leave::Last => self.lock.base().release(hold),
                }
            }
        }

        impl Drop for $guard<'_> {
            fn drop(&mut self) {
                if !self.done {
                    self.end();
                }
            }
        }

        impl fmt::Debug for $guard<'_> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.view.debug(f, stringify!($guard))
            }
        }
    };
}

macro_rules! owned_guard {
    ($guard:ident, $view:expr) => {
        impl $guard {
            pub(super) fn new(lock: RwLock, hold: Arc<HoldCore>) -> $guard {
                $guard { lock, view: $view(hold), done: false }
            }

            fn view(&self) -> &View {
                &self.view
            }

            /// Releases, and says whether the hold stood until now: `false` if it had been lost,
            /// or if etcd answers that its key was gone. Never an error, never interrupted, and
            /// with etcd away back within 2 s (the rest is done in the background).
            pub fn unlock(mut self) -> bool {
                self.done = true;
                self.lock.base().release(&self.view.hold)
            }
        }

        impl Drop for $guard {
            fn drop(&mut self) {
                if !self.done {
                    self.lock.base().release(&self.view.hold);
                }
            }
        }

        impl fmt::Debug for $guard {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.view.debug(f, stringify!($guard))
            }
        }
    };
}

thread_guard!(RwLockReadGuard, Side::Shared, View::shared);
thread_guard!(RwLockWriteGuard, Side::Exclusive, View::exclusive);
owned_guard!(OwnedRwLockReadGuard, View::shared);
owned_guard!(OwnedRwLockWriteGuard, View::exclusive);

macro_rules! read_guard_methods {
    () => {
        guard_methods!();

        /// A view of the hold for other threads.
        pub fn hold(&self) -> SharedHold {
            SharedHold { view: self.view.clone() }
        }
    };
}

impl RwLockReadGuard<'_> {
    read_guard_methods!();
}

impl OwnedRwLockReadGuard {
    read_guard_methods!();
}

impl<'a> RwLockWriteGuard<'a> {
    guard_methods!();
    exclusive_guard_methods!();

    /// Becomes a reader without leaving its place, so nobody writes in between, and readers
    /// directly behind are let in. Works with others queued, writers too.
    ///
    /// The exclusion is over before etcd is asked: views of the write hold say `false` from then
    /// on, and its guarded writes are refused, even one that is still on its way. With etcd away
    /// the call is back within 2 s, with the read guard; readers are let in once etcd has
    /// answered. Never interrupted.
    ///
    /// # Errors
    ///
    /// The write guard comes back with the error: `InvalidArgument` while this thread has other
    /// write guards of the lock; `Lost`, also when etcd answers that the key is gone; `Closed`,
    /// `Forked`; `PermissionDenied` and others that etcd answers.
    pub fn downgrade(
        mut guard: RwLockWriteGuard<'a>,
    ) -> std::result::Result<RwLockReadGuard<'a>, (RwLockWriteGuard<'a>, Error)> {
        if guard.held.count(Side::Exclusive) > 1 {
            let identity = guard.lock.base().recipe().identity();
            let error = Error::new(
                ErrorKind::InvalidArgument,
                format!("{identity}: this thread has more than one write guard"),
            );
            return Err((guard, error));
        }
        if let Err(error) = downgrade(&mut guard.view) {
            return Err((guard, error));
        }
        guard.held.enter_again(Side::Shared);
        guard.held.leave(Side::Exclusive);
        guard.done = true;
        Ok(RwLockReadGuard::new(guard.lock, guard.held.clone()))
    }
}

impl OwnedRwLockWriteGuard {
    guard_methods!();
    exclusive_guard_methods!();

    /// Becomes a reader without leaving its place; see [`RwLockWriteGuard::downgrade`].
    ///
    /// # Errors
    ///
    /// The write guard comes back with the error: `Lost`, `Closed`, `Forked`; `PermissionDenied`
    /// and others that etcd answers.
    pub fn downgrade(
        mut guard: OwnedRwLockWriteGuard,
    ) -> std::result::Result<OwnedRwLockReadGuard, (OwnedRwLockWriteGuard, Error)> {
        if let Err(error) = downgrade(&mut guard.view) {
            return Err((guard, error));
        }
        guard.done = true;
        Ok(OwnedRwLockReadGuard::new(guard.lock.clone(), guard.view.hold.clone()))
    }
}

/// An error leaves the view excluding: the old exclusion if etcd was not asked, or else a new one.
fn downgrade(view: &mut View) -> Result<()> {
    let done = view.hold.downgrade();
    if done.is_err() && view.hold.is_held() {
        *view = View::exclusive(view.hold.clone());
    }
    done
}
