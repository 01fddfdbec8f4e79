//! The options that all locks share.

use std::fmt;
use std::time::Duration;

use crate::client::{Client, identity};
use crate::contend::{Contender, Count, Layout};
use crate::error::{Error, Result};
use crate::lease::SessionKey;
use crate::recipe::RecipeCore;
use crate::resilience::{LeaseResilience, LeaseTiming};

use super::base::LockBase;

pub(crate) struct LockOptions {
    pub(crate) client: Client,
    path: String,
    pub(crate) ttl: Duration,
    pub(crate) client_id: Option<String>,
    pub(crate) interrupt_on_loss: bool,
    pub(crate) resilience: LeaseResilience,
    pub(crate) max_hold: Option<Duration>,
}

impl LockOptions {
    pub(crate) fn new(client: &Client, path: String) -> LockOptions {
        LockOptions {
            client: client.clone(),
            path,
            ttl: Duration::from_secs(10),
            client_id: None,
            interrupt_on_loss: false,
            resilience: client.core().config.resilience.get_lease().clone(),
            max_hold: None,
        }
    }

    /// Checks them and makes what all locks have. `kind` is the recipe's name for people.
    pub(crate) fn build(
        self,
        kind: &'static str,
        layout: fn(Vec<u8>) -> Layout,
        count: Option<Count>,
    ) -> Result<LockBase> {
        let path = identity::checked_path(self.path)?;
        let client_id = self.client.recipe_id(self.client_id)?;
        let timing = LeaseTiming::for_ttl(self.ttl, &self.resilience)?;
        if self.max_hold.is_some_and(|limit| limit.is_zero()) {
            return Err(Error::invalid("a max_hold of 0 would let nobody in"));
        }
        self.client.check_usable()?;
        let core = self.client.core();
        let layout = layout(core.physical(format!("{path}/").as_bytes()));
        let recipe = RecipeCore::new(kind, path, client_id);
        core.register_recipe(&recipe);
        let session = SessionKey(timing);
        let contender = Contender::new(core.clone(), recipe, layout, count, session, self.max_hold);
        Ok(LockBase::new(self.client, contender, self.interrupt_on_loss))
    }

    pub(crate) fn debug(&self, f: &mut fmt::Formatter<'_>, name: &str) -> fmt::Result {
        f.debug_struct(name)
            .field("path", &self.path)
            .field("ttl", &self.ttl)
            .finish_non_exhaustive()
    }
}

/// The documented options of a builder that has a field `options`.
macro_rules! lock_options {
    ($builder:ident) => {
        impl $builder {
            /// How long a hold outlives a process that died, and a partition must not last.
            /// Rounded up to whole seconds. Default: 10 s.
            ///
            /// With etcd's default election timeout a TTL below 5 s does not survive the failure
            /// of etcd's leader: holds are then lost (and told so), never shared.
            pub fn ttl(mut self, ttl: std::time::Duration) -> Self {
                self.options.ttl = ttl;
                self
            }

            /// The name shown to other contenders. Default: the client's.
            pub fn client_id(mut self, id: impl Into<String>) -> Self {
                self.options.client_id = Some(id.into());
                self
            }

            /// Margin and timing of the renewals. Default: the client's.
            pub fn resilience(mut self, resilience: crate::LeaseResilience) -> Self {
                self.options.resilience = resilience;
                self
            }
        }

        impl std::fmt::Debug for $builder {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.options.debug(f, stringify!($builder))
            }
        }
    };
}

/// The option of a builder whose recipe's holds may be limited in time.
macro_rules! max_hold_option {
    ($builder:ident) => {
        impl $builder {
            /// How long a hold may last, however well its process is. Default: no limit.
            ///
            /// A hold that outlives it, by the boot-time clock and within 100 ms, is lost with the
            /// reason [`MaxHoldExceeded`](crate::LossReason::MaxHoldExceeded): the flag first, the
            /// key last. Nothing interrupts its holder, save where it asked to be.
            pub fn max_hold(mut self, limit: std::time::Duration) -> Self {
                self.options.max_hold = Some(limit);
                self
            }
        }
    };
}

pub(crate) use {lock_options, max_hold_option};
