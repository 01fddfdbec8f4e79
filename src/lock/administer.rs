//! What an operator, or another user of a lock, may do about its holds; and how waits and holders
//! hear of it.

use std::time::Duration;

use super::base::LockBase;
use crate::contend::{Wanted, administer};
use crate::error::{Error, Result};

/// How a forced release goes about it.
///
/// # Example: take a lock away from a holder that hangs
///
/// ```
/// # use etcd_recipes::testing::EtcdServer;
/// # use etcd_recipes::{Client, Force, LossReason, Mutex};
/// # use std::time::Duration;
/// # fn main() -> etcd_recipes::Result<()> {
/// # let etcd = EtcdServer::start()?;
/// # let client = Client::connect([etcd.endpoint()])?;
/// # let guard = Mutex::new(&client, "/locks/report")?.lock_owned()?;
/// let mutex = Mutex::new(&client, "/locks/report")?;
/// for contender in mutex.contenders()?.iter().filter(|contender| contender.is_holder) {
///     let patience = Duration::from_secs(10);
///     mutex.force_release(contender.token, Force::AfterAcknowledgement(patience))?;
/// }
/// assert!(!mutex.is_locked()?);
/// # assert_eq!(guard.hold().loss().map(|loss| loss.reason), Some(LossReason::KeyDeleted));
/// # assert!(!guard.unlock());
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Force {
    /// Through the holder's library, waiting at most this long (an hour at most) until it has
    /// taken it up. The holder is told first, so no rival is let in while its `is_held` says
    /// `true`. A hold or a wait younger than a second is reached once it is a second old.
    AfterAcknowledgement(Duration),
    /// At once, by deleting the key. **A rival may be inside before the holder knows**: meanwhile
    /// only the fencing token and guarded writes tell them apart.
    Now,
}

/// How long a polite request is waited for, if the operation timeout is not less.
const ASK_LIMIT: Duration = Duration::from_secs(5);

const LONGEST: Duration = Duration::from_secs(3600);

impl LockBase {
    pub(crate) fn queue_position(&self) -> Option<usize> {
        if self.core().is_forked() { None } else { self.contender.position() }
    }

    pub(crate) fn force_release(&self, token: i64, force: Force) -> Result<bool> {
        let contender = self.contender.clone();
        let op = "lock.force_release";
        self.core().block_on("lock.force_release", Some(self.recipe()), async move {
            match force {
                Force::Now => administer::force_now(contender, op, token).await,
                Force::AfterAcknowledgement(limit) if limit > LONGEST => {
                    Err(Error::invalid(format!("the limit {limit:?} is longer than {LONGEST:?}")))
                }
                Force::AfterAcknowledgement(limit) => {
                    administer::request(contender, op, token, Wanted::Force, limit).await
                }
            }
        })
    }

    pub(crate) fn request_release(&self, token: i64) -> Result<bool> {
        let contender = self.contender.clone();
        let op = "lock.request_release";
        let limit = ASK_LIMIT.min(self.core().operation_timeout());
        self.core().block_on("lock.request_release", Some(self.recipe()), async move {
            administer::request(contender, op, token, Wanted::Ask, limit).await
        })
    }
}

/// What can be seen of a queue and done about its holds. The type has a method `base`.
macro_rules! administer_surface {
    ($lock:ident) => {
        impl $lock {
            /// How many stand ahead of this recipe's foremost waiting call, those who are inside
            /// included, as far as its watch has told; `None` while nothing waits. Asks nobody.
            pub fn queue_position(&self) -> Option<usize> {
                self.base().queue_position()
            }

            /// Calls `listener` with the place of each wait of this recipe whenever it changes,
            /// the first one included. It runs on this recipe's healer thread.
            ///
            /// A call that is let in at once has no place, and of a wait that is let in before
            /// etcd has told more, the places in between are not told.
            pub fn add_progress_listener(
                &self,
                listener: impl Fn(&crate::QueueProgress) + Send + Sync + 'static,
            ) -> crate::ListenerId {
                self.base().contender.add_progress_listener(std::sync::Arc::new(listener))
            }

            /// Removes a listener; once this has returned, no new call of it starts (one that is
            /// running may be finishing).
            pub fn remove_progress_listener(&self, id: crate::ListenerId) -> bool {
                self.base().contender.places.remove_listener(id)
            }

            /// The same as a channel, for `select!`.
            pub fn progress_events(&self) -> crate::Subscription<crate::QueueProgress> {
                self.base().contender.progress_events()
            }

            /// Ends one hold on this path, whoever has it: the one with this token (its key's
            /// create revision, as [`contenders`](Self::contenders) lists it) and no newer one.
            /// Its holder loses it with the reason
            /// [`KeyDeleted`](crate::LossReason::KeyDeleted). One that still waits queues anew.
            /// `Ok(false)`: there is no such hold, or no longer.
            ///
            /// # Errors
            ///
            /// `NotAcknowledged` if the holder has not taken it up within the limit of
            /// [`Force::AfterAcknowledgement`](crate::Force::AfterAcknowledgement): it is frozen,
            /// out of reach, without permission for `/__etcd-recipes/requests/`, or another
            /// program; then nothing was removed and the request is withdrawn.
            /// `OutcomeUnknown` if a write was not answered, or the holder took it up and its key
            /// was not seen to go within the operation timeout. `InvalidArgument` for a limit of
            /// more than an hour; `Unreachable`, `PermissionDenied`, `Interrupted`, `Closed`,
            /// `Forked`.
            pub fn force_release(&self, token: i64, force: crate::Force) -> crate::Result<bool> {
                self.base().force_release(token, force)
            }

            /// Asks the holder with this token to release; it hears of it through
            /// [`add_release_request_listener`](Self::add_release_request_listener), and nothing
            /// else happens. `Ok(true)`: its library has taken the request up, whether anybody
            /// listens there or not. `Ok(false)`: there is no such hold, or no longer.
            ///
            /// # Errors
            ///
            /// `NotAcknowledged` if nobody took it up within 5 s, or the operation timeout if that
            /// is less; the request is then withdrawn. Otherwise as
            /// [`force_release`](Self::force_release).
            pub fn request_release(&self, token: i64) -> crate::Result<bool> {
                self.base().request_release(token)
            }

            /// Calls `listener` when somebody asks for the release of one of this recipe's holds.
            /// It runs on this recipe's healer thread. A hold hears nothing in its first second;
            /// what was asked meanwhile is told then.
            pub fn add_release_request_listener(
                &self,
                listener: impl Fn(&crate::ReleaseRequest) + Send + Sync + 'static,
            ) -> crate::ListenerId {
                self.base().contender.requests.add(std::sync::Arc::new(listener))
            }

            /// Removes a listener; once this has returned, no new call of it starts (one that is
            /// running may be finishing).
            pub fn remove_release_request_listener(&self, id: crate::ListenerId) -> bool {
                self.base().contender.requests.remove(id)
            }

            /// The same as a channel, for `select!`.
            pub fn release_requests(&self) -> crate::Subscription<crate::ReleaseRequest> {
                self.base().contender.requests.subscribe()
            }
        }
    };
}

pub(crate) use administer_surface;
