//! What every recipe has: an identity, a connection state, listeners, an error list, and a thread
//! for user code that exists only while it is needed.

mod broadcast;
mod connection;
mod errors;
mod healer;
mod listeners;
mod shared;
mod subscription;

use std::sync::Arc;

pub(crate) use broadcast::Broadcast;
pub use connection::ConnectionState;
pub(crate) use connection::Signal;
pub(crate) use healer::{Healer, guarded};
pub use listeners::ListenerId;
pub(crate) use listeners::{Callback, Listener, Listeners};
pub(crate) use sealed::HasCore;
pub(crate) use shared::RecipeCore;
pub(crate) use subscription::Events;
pub use subscription::Subscription;

use crate::error::{Error, Result};

/// An error that a recipe has seen on a background thread.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ErrorEvent {
    /// The kind and path of the recipe, such as `Mutex[/locks/orders]`.
    pub identity: String,
    /// What went wrong.
    pub error: Error,
}

/// What all recipes have in common.
///
/// Implemented by this library's recipes only. Listeners run on the recipe's own healer thread,
/// one at a time and in order; one that panics is recorded in [`errors`](Recipe::errors), and the
/// others still run. A listener may call any method of the same recipe.
///
/// # Example: watching the health of any recipe
///
/// ```
/// use etcd_recipes::{ListenerId, Recipe};
///
/// fn report(recipe: &impl Recipe) -> ListenerId {
///     let path = recipe.path().to_owned();
///     recipe.add_connection_state_listener(move |state| eprintln!("{path}: {state:?}"))
/// }
/// ```
pub trait Recipe: HasCore {
    /// The path in etcd this recipe stands on.
    fn path(&self) -> &str {
        self.core().path()
    }

    /// How this recipe signs what it writes.
    fn client_id(&self) -> &str {
        self.core().client_id()
    }

    /// How it stands with etcd, as far as its own watch and lease have told. Asks nobody.
    fn connection_state(&self) -> ConnectionState {
        self.core().state()
    }

    /// Calls `listener` with the state at present, then with each new one.
    fn add_connection_state_listener(
        &self,
        listener: impl Fn(&ConnectionState) + Send + Sync + 'static,
    ) -> ListenerId
    where
        Self: Sized,
    {
        self.core().add_connection_state_listener(Arc::new(listener))
    }

    /// Whether there was such a listener. No new call of it starts after this has returned; one
    /// already running may be finishing.
    fn remove_connection_state_listener(&self, id: ListenerId) -> bool {
        self.core().remove_listener(id)
    }

    /// The states from now on, as a channel; disconnected by [`close`](Recipe::close).
    fn connection_events(&self) -> Subscription<ConnectionState> {
        self.core().connection_events()
    }

    /// Whether the recipe is open and its state is not [`Lost`](ConnectionState::Lost). Asks
    /// nobody; see [`ping`](Recipe::ping).
    fn is_healthy(&self) -> bool {
        self.core().state() != ConnectionState::Lost && !self.core().closed().is_cancelled()
    }

    /// The newest errors seen on background threads, oldest first; at most 64.
    fn errors(&self) -> Vec<Error> {
        self.core().errors()
    }

    /// How many errors were seen since the last [`clear_errors`](Recipe::clear_errors), those no
    /// longer kept included.
    fn error_count(&self) -> u64 {
        self.core().error_count()
    }

    /// Forgets the errors and sets their count to zero.
    fn clear_errors(&self) {
        self.core().clear_errors();
    }

    /// Calls `listener` with each error from now on that a background thread has seen.
    ///
    /// A panic of an error listener is recorded, but not told to error listeners.
    fn add_error_listener(
        &self,
        listener: impl Fn(&ErrorEvent) + Send + Sync + 'static,
    ) -> ListenerId
    where
        Self: Sized,
    {
        self.core().add_error_listener(Arc::new(listener))
    }

    /// Whether there was such a listener. No new call of it starts after this has returned; one
    /// already running may be finishing.
    fn remove_error_listener(&self, id: ListenerId) -> bool {
        self.core().remove_listener(id)
    }

    /// Asks etcd whether it answers, with a small limit of its own; `false` where it does not.
    fn ping(&self) -> bool;

    /// Wakes every blocked call with [`Closed`](crate::ErrorKind::Closed), gives up what the recipe holds
    /// and waits, within a bound, until it is gone. Closing again does nothing.
    ///
    /// # Errors
    ///
    /// [`CleanupUnconfirmed`](crate::ErrorKind::CleanupUnconfirmed) when etcd did not confirm in time that
    /// everything was removed; its TTL finishes the rest.
    fn close(&self) -> Result<()>;
}

/// Keeps [`Recipe`] this library's own.
pub(crate) mod sealed {
    use super::RecipeCore;

    /// A recipe, seen through what it shares with the others.
    pub trait HasCore {
        #[doc(hidden)]
        fn core(&self) -> &RecipeCore;
    }
}
