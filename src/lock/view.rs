//! A hold as its guards and their views see it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::CancelToken;
use crate::contend::Hold as HoldCore;
use crate::lease::Loss;

/// A hold, and for a view that stands for an exclusion, which one. Asks nobody.
#[derive(Clone)]
pub(super) struct View {
    pub(super) hold: Arc<HoldCore>,
    epoch: Option<u32>,
}

impl View {
    /// Stands as long as the hold.
    pub(super) fn shared(hold: Arc<HoldCore>) -> View {
        View { hold, epoch: None }
    }

    /// Stands as long as the hold excludes others.
    pub(super) fn exclusive(hold: Arc<HoldCore>) -> View {
        let epoch = Some(hold.epoch());
        View { hold, epoch }
    }

    pub(super) fn is_held(&self) -> bool {
        self.is_of_now() && self.hold.is_held()
    }

    fn is_of_now(&self) -> bool {
        self.epoch.is_none_or(|epoch| epoch == self.hold.epoch())
    }

    pub(super) fn remaining(&self) -> Duration {
        if self.is_of_now() { self.hold.remaining() } else { Duration::ZERO }
    }

    pub(super) fn loss(&self) -> Option<Loss> {
        self.hold.is_lost().then(|| self.hold.loss().cloned()).flatten()
    }

    pub(super) fn debug(&self, f: &mut fmt::Formatter<'_>, name: &str) -> fmt::Result {
        f.debug_struct(name)
            .field("key", &self.hold.shown_key())
            .field("token", &self.hold.token())
            .field("held", &self.is_held())
            .finish()
    }
}

/// A view of an exclusive hold that can go anywhere: it asks, and does not keep the lock.
///
/// # Example: a worker thread that stops when the lock is lost
///
/// ```
/// # use etcd_recipes::testing::EtcdServer;
/// # use etcd_recipes::{Client, Mutex};
/// # fn main() -> etcd_recipes::Result<()> {
/// # let etcd = EtcdServer::start()?;
/// # let client = Client::connect([etcd.endpoint()])?;
/// let mutex = Mutex::new(&client, "/locks/report")?;
/// let guard = mutex.lock()?;
/// let hold = guard.hold();
/// let worker = std::thread::spawn(move || {
///     let mut pages = 0;
///     while hold.is_held() && pages < 100 {
///         pages += 1;
///     }
///     pages
/// });
/// assert_eq!(worker.join().expect("the worker ends"), 100);
/// assert!(guard.unlock());
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Hold {
    pub(super) view: View,
}

/// A view of a hold that others share (a reader's, a permit) that can go anywhere: it asks, and
/// does not keep the hold. Shared holds overlap, so their revisions order nothing and they have
/// no fencing token.
#[derive(Clone)]
pub struct SharedHold {
    pub(super) view: View,
}

macro_rules! hold_methods {
    ($hold:ident) => {
        impl $hold {
            /// Whether the hold stands, by this machine's clock at the call; asks nobody. Once
            /// `false` it stays `false`.
            pub fn is_held(&self) -> bool {
                self.view.is_held()
            }

            /// The time left before the hold is lost, if no renewal counts meanwhile. Zero once
            /// it is not held.
            pub fn remaining(&self) -> Duration {
                self.view.remaining()
            }

            /// Cancelled when the hold is lost; not when it is released.
            pub fn cancel_token(&self) -> &CancelToken {
                self.view.hold.cancel_token()
            }

            /// How it was lost, if it was.
            pub fn loss(&self) -> Option<Loss> {
                self.view.loss()
            }
        }

        impl fmt::Debug for $hold {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.view.debug(f, stringify!($hold))
            }
        }
    };
}

hold_methods!(Hold);
hold_methods!(SharedHold);

impl Hold {
    /// The fencing token.
    pub fn token(&self) -> i64 {
        self.view.hold.token()
    }

    /// The fencing token.
    pub fn fencing_token(&self) -> i64 {
        self.view.hold.token()
    }
}
