//! What every lock has: a contender, its holds, who hears of their loss, and its end.

use std::sync::Arc;
use std::time::Duration;

use crate::client::core::Core;
use crate::client::{Client, identity};
use crate::contend::{self, Contender, ContenderInfo, ContenderMode, Hold, Patience, Wish};
use crate::error::{Error, Result};
use crate::recipe::RecipeCore;

/// How long a close waits for a listener that is running.
pub(crate) const CLOSE_LIMIT: Duration = Duration::from_millis(300);

pub(crate) struct LockBase {
    pub(crate) contender: Arc<Contender>,
    /// Tells the locks of this process apart, clones being one.
    pub(crate) number: u64,
    pub(crate) interrupt_on_loss: bool,
    pub(crate) client: Client,
}

impl Drop for LockBase {
    fn drop(&mut self) {
        if !self.core().is_forked() {
            self.recipe().close(Duration::ZERO);
        }
    }
}

impl LockBase {
    pub(crate) fn new(
        client: Client,
        contender: Arc<Contender>,
        interrupt_on_loss: bool,
    ) -> LockBase {
        LockBase { contender, number: identity::next_number(), interrupt_on_loss, client }
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.contender.core
    }

    pub(crate) fn recipe(&self) -> &RecipeCore {
        &self.contender.recipe
    }

    // ----- acquiring and releasing ------------------------------------------------------------

    /// Waits for a hold without a limit.
    pub(crate) fn acquire(
        &self,
        op: &'static str,
        mode: ContenderMode,
        keys: usize,
    ) -> Result<Arc<Hold>> {
        let hold = self.enter(op, mode, keys, Patience::Endless)?;
        hold.ok_or_else(|| Error::internal("a wait without a limit ended without a hold"))
    }

    /// Waits at most this long.
    pub(crate) fn acquire_for(
        &self,
        op: &'static str,
        mode: ContenderMode,
        keys: usize,
        limit: Duration,
    ) -> Result<Option<Arc<Hold>>> {
        self.enter(op, mode, keys, Patience::For(limit))
    }

    /// Waits for nobody.
    pub(crate) fn try_acquire(
        &self,
        op: &'static str,
        mode: ContenderMode,
        keys: usize,
    ) -> Result<Option<Arc<Hold>>> {
        self.enter(op, mode, keys, Patience::Never)
    }

    fn enter(
        &self,
        op: &'static str,
        mode: ContenderMode,
        keys: usize,
        patience: Patience,
    ) -> Result<Option<Arc<Hold>>> {
        let wishes = vec![Wish { contender: self.contender.clone(), mode, keys }];
        let acquired = contend::enter(self.core(), self.recipe(), op, wishes, patience)?;
        Ok(acquired.and_then(|acquired| acquired.into_holds().pop()))
    }

    /// The end of a guard.
    pub(crate) fn release(&self, hold: &Arc<Hold>) -> bool {
        if hold.is_forked() {
            return false;
        }
        let stood = hold.release();
        hold.let_go();
        stood
    }

    // ----- looking ----------------------------------------------------------------------------

    pub(crate) fn list(&self, op: &'static str) -> Result<Vec<ContenderInfo>> {
        let contender = self.contender.clone();
        self.core().block_on(op, Some(self.recipe()), async move { contender.list(op).await })
    }

    // ----- the end ----------------------------------------------------------------------------

    pub(crate) fn close(&self) -> Result<()> {
        let core = self.core();
        if core.is_forked() {
            return core.check_usable();
        }
        let closed = self.contender.close();
        self.recipe().close(CLOSE_LIMIT);
        closed
    }
}

/// How everyone who holds something hears of its loss. The type has a method `base`.
macro_rules! loss_surface {
    ($recipe:ident) => {
        impl $recipe {
            /// Adds a listener for lost holds. It runs on this recipe's healer thread; a loss
            /// whose guard is still around is told to it at once.
            pub fn add_loss_listener(
                &self,
                listener: impl Fn(&crate::Loss) + Send + Sync + 'static,
            ) -> crate::ListenerId {
                self.base().contender.losses.add(std::sync::Arc::new(listener))
            }

            /// As [`add_loss_listener`](Self::add_loss_listener), for a type of its own.
            pub fn add_loss_listener_with(
                &self,
                listener: Box<dyn crate::LossListener>,
            ) -> crate::ListenerId {
                self.add_loss_listener(move |loss| listener.on_loss(loss))
            }

            /// Removes a listener; once this has returned, no new call of it starts (one that is
            /// running may be finishing).
            pub fn remove_loss_listener(&self, id: crate::ListenerId) -> bool {
                self.base().contender.losses.remove(id)
            }

            /// Lost holds as a channel, for `select!`.
            pub fn loss_events(&self) -> crate::Subscription<crate::Loss> {
                self.base().contender.losses.subscribe()
            }
        }
    };
}

/// What makes a type with a method `base` and a method `close` a [`Recipe`](crate::Recipe).
macro_rules! recipe_surface {
    ($recipe:ident) => {
        impl std::fmt::Debug for $recipe {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct(stringify!($recipe))
                    .field("path", &self.base().recipe().path())
                    .field("state", &self.base().recipe().state())
                    .finish_non_exhaustive()
            }
        }

        impl crate::recipe::HasCore for $recipe {
            fn core(&self) -> &crate::recipe::RecipeCore {
                self.base().recipe()
            }
        }

        impl crate::Recipe for $recipe {
            fn ping(&self) -> bool {
                self.base().client.ping()
            }

            fn close(&self) -> crate::Result<()> {
                $recipe::close(self)
            }
        }
    };
}

/// What all locks have in common. The type has a method `base`.
macro_rules! lock_surface {
    ($lock:ident) => {
        crate::lock::administer::administer_surface!($lock);
        crate::lock::base::loss_surface!($lock);
        crate::lock::base::recipe_surface!($lock);

        impl $lock {
            /// Closes this recipe: its blocked calls return `Closed`, its holds are lost (reason
            /// `Closed`) and released. Other recipes of the client go on.
            ///
            /// # Errors
            ///
            /// `CleanupUnconfirmed` if etcd did not confirm in time that the keys are gone; then
            /// its TTL does it. `Forked`.
            pub fn close(&self) -> crate::Result<()> {
                self.base().close()
            }
        }
    };
}

pub(crate) use {lock_surface, loss_surface, recipe_surface};
