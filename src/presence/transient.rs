//! One key and its value, present in etcd as long as this object is.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::upkeep::Upkeep;
use crate::client::{Client, identity};
use crate::codec::{self, Codec, Text};
use crate::error::{Error, ErrorKind, Result};
use crate::lease::{LeaseEvent, LeaseListener, Presence, callback};
use crate::race::{Either, race};
use crate::recipe::{HasCore, ListenerId, Recipe, RecipeCore, Subscription};
use crate::resilience::{LeaseResilience, LeaseTiming};

/// A key that exists as long as this object is started and its process lives.
///
/// The key hangs on a lease that is renewed in the background; its value is the encoded bytes and
/// nothing else. When the lease is lost, or the key is deleted, a heal puts the key back with the
/// value that etcd accepted last, provided that the key is free. There is one key and one lease,
/// and no thread as long as nobody listens. Closing or dropping removes the key at once.
///
/// # Losing it
///
/// When no renewal was answered by the local deadline (the send of the last one + TTL − margin),
/// when etcd ended the lease, or when a look at the key (each third of the TTL) finds it gone or
/// written over, listeners hear [`LeaseEvent::Expired`] and the connection state is `Lost`. From
/// then until [`LeaseEvent::Restored`] others may find no key. If etcd kept the key all along, as
/// it does when it was only restarted, the old lease is taken up again (`old == new`) and whoever
/// watches the key notices nothing.
///
/// A key that somebody else has put there meanwhile is left alone: healing ends with
/// [`LeaseEvent::Failed`] and this object is of no more use. "Somebody else" is whoever wrote the
/// key under a lease that was not granted to this object, or under none.
///
/// # Differences from the JVM library's `TransientKeyValue`
///
/// The bytes in etcd are the same. Here the value can be changed, `start` fails where the key is
/// somebody's instead of writing over it, and a key found alive after a restart of etcd is known
/// as one's own.
///
/// # Differences from Curator's `PersistentNode`
///
/// A node that another session owns is not adopted or protected, it is left alone.
///
/// # Example: an address under which this process can be reached
///
/// ```
/// # use etcd_recipes::testing::EtcdServer;
/// use etcd_recipes::{Client, TransientKeyValue};
///
/// # fn main() -> etcd_recipes::Result<()> {
/// # let etcd = EtcdServer::start()?;
/// # let endpoint = etcd.endpoint();
/// let client = Client::connect([endpoint])?;
/// let address = TransientKeyValue::new(&client, "/nodes/7", "10.0.0.7:80")?;
/// address.add_lease_listener(|event| eprintln!("/nodes/7: {event:?}"));
///
/// address.start()?;
/// address.set("10.0.0.8:80")?;
/// assert_eq!(client.get("/nodes/7")?.unwrap().value_text(), "10.0.0.8:80");
///
/// address.close()?;
/// assert!(client.get("/nodes/7")?.is_none());
/// # Ok(()) }
/// ```
pub struct TransientKeyValue<C: Codec = Text> {
    client: Client,
    recipe: Arc<RecipeCore>,
    upkeep: Arc<Upkeep>,
    presence: Arc<Presence>,
    codec: C,
    /// One start at a time.
    starting: Arc<tokio::sync::Mutex<()>>,
}

impl<C: Codec> fmt::Debug for TransientKeyValue<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TransientKeyValue")
            .field("key", &self.recipe.path())
            .field("lease", &self.current_lease_id())
            .field("state", &self.recipe.state())
            .finish_non_exhaustive()
    }
}

/// Options of a [`TransientKeyValue`]; each states its default.
///
/// # Example: bytes under a short lease
///
/// ```
/// # use etcd_recipes::{Bytes, Client, TransientKeyValue};
/// # use std::time::Duration;
/// # fn main() -> etcd_recipes::Result<()> {
/// # let client = Client::connect(["http://127.0.0.1:2379"])?;
/// let beacon = TransientKeyValue::builder(&client, "/beacons/7", vec![1, 2, 3])
///     .codec(Bytes)
///     .ttl(Duration::from_secs(5))
///     .build()?;
/// # drop(beacon);
/// # Ok(()) }
/// ```
#[must_use = "a builder does nothing until `build`"]
pub struct TransientBuilder<V, C> {
    client: Client,
    key: String,
    value: V,
    codec: C,
    ttl: Duration,
    client_id: Option<String>,
    resilience: LeaseResilience,
}

impl<V, C> fmt::Debug for TransientBuilder<V, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TransientBuilder")
            .field("key", &self.key)
            .field("ttl", &self.ttl)
            .finish_non_exhaustive()
    }
}

impl<V, C> TransientBuilder<V, C> {
    /// How long the key outlives a process that died, and an outage has to last until others see
    /// the key vanish. Rounded up to whole seconds. Default: 10 s.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// How values become bytes. Default: [`Text`].
    pub fn codec<D: Codec>(self, codec: D) -> TransientBuilder<V, D> {
        let TransientBuilder { client, key, value, ttl, client_id, resilience, .. } = self;
        TransientBuilder { client, key, value, codec, ttl, client_id, resilience }
    }

    /// The name this object goes by in messages; it is not stored. Default: the client's.
    pub fn client_id(mut self, id: impl Into<String>) -> Self {
        self.client_id = Some(id.into());
        self
    }

    /// Pace and limits of healing, margin and timing of the renewals. Default: the client's.
    pub fn resilience(mut self, resilience: LeaseResilience) -> Self {
        self.resilience = resilience;
        self
    }

    /// Checks the options and encodes the value. No I/O.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` naming the value: an empty key, one with `//`, a trailing `/` or a NUL, a
    /// TTL of zero or beyond etcd's limit, one below 2 s without explicit timing, a margin of half
    /// the TTL or more, renewals that do not fit the TTL. `Codec`, `Closed`, `Forked`.
    pub fn build(self) -> Result<TransientKeyValue<C>>
    where
        C: Codec,
        V: Into<C::Item>,
    {
        let key = identity::checked_path(self.key)?;
        let client_id = self.client.recipe_id(self.client_id)?;
        let timing = LeaseTiming::for_ttl(self.ttl, &self.resilience)?;
        let value = codec::encode(&self.codec, &key, &self.value.into())?;
        self.client.check_usable()?;
        let core = self.client.core().clone();
        let physical = core.physical(key.as_bytes());
        let recipe = RecipeCore::new("TransientKeyValue", key, client_id);
        core.register_recipe(&recipe);
        let upkeep = Upkeep::new(core.clone(), recipe.clone(), physical, value);
        let presence = Presence::new(core, recipe.clone(), upkeep.clone(), timing, self.resilience);
        Ok(TransientKeyValue {
            client: self.client,
            recipe,
            upkeep,
            presence,
            codec: self.codec,
            starting: Arc::default(),
        })
    }
}

impl TransientKeyValue {
    /// A text with default options; see [`builder`](TransientKeyValue::builder) for the rest. No
    /// I/O.
    ///
    /// # Errors
    ///
    /// As [`TransientBuilder::build`].
    pub fn new(
        client: &Client,
        key: impl Into<String>,
        value: impl Into<String>,
    ) -> Result<TransientKeyValue> {
        TransientKeyValue::builder(client, key, value).build()
    }

    /// Options, then [`build`](TransientBuilder::build). The value is whatever the codec chosen
    /// there encodes.
    pub fn builder<V>(
        client: &Client,
        key: impl Into<String>,
        value: V,
    ) -> TransientBuilder<V, Text> {
        TransientBuilder {
            client: client.clone(),
            key: key.into(),
            value,
            codec: Text,
            ttl: Duration::from_secs(10),
            client_id: None,
            resilience: client.core().config.resilience.get_lease().clone(),
        }
    }
}

impl<C: Codec> TransientKeyValue<C> {
    /// Creates the key and keeps it from now on. Does nothing when it was started before.
    ///
    /// A failed or interrupted start leaves nothing behind, as far as etcd answers; what cannot be
    /// removed at once ends with its lease. It may be tried again.
    ///
    /// # Errors
    ///
    /// `NotEstablished` if somebody else's key is there, or healing ended with `Failed`.
    /// `Unreachable`, `PermissionDenied` naming the key, `AuthenticationFailed`, `Interrupted`,
    /// `Closed`, `Forked`.
    pub fn start(&self) -> Result<()> {
        let core = self.client.core();
        let until = core.operation_limit();
        let (presence, starting) = (self.presence.clone(), self.starting.clone());
        let identity = self.recipe.identity().to_owned();
        core.block("transient.start", Some(&self.recipe), |abandon| async move {
            let turn = match race(starting.lock(), abandon.fired()).await {
                Either::First(turn) => turn,
                Either::Second(()) => return Err(Error::interrupted("transient.start")),
            };
            let outcome = if presence.is_failed() {
                let text = format!("{identity}: its healing has ended; make a new one");
                Err(Error::new(ErrorKind::NotEstablished, text))
            } else if presence.is_started() {
                Ok(())
            } else {
                presence.start(until, &abandon).await
            };
            drop(turn);
            outcome
        })
    }

    /// Changes the value, in one guarded transaction. Before the start it only changes the value
    /// to start with.
    ///
    /// While the key does not stand it waits for the heal, at most the operation timeout. A heal
    /// restores the value that was accepted last, never an older one:
    ///
    /// - after `Ok`, the new value;
    /// - after `Unreachable`, `Lost`, `PermissionDenied` and kin, the value before: nothing of this
    ///   call stands or will;
    /// - after `OutcomeUnknown` (it was sent and etcd never answered), the new value, to which the
    ///   key is also brought as soon as etcd answers;
    /// - after `Interrupted`, the value before, to which the key is brought back likewise.
    ///
    /// # Errors
    ///
    /// `Codec`; `Lost` if the key did not come back in time, or never will; `OutcomeUnknown`,
    /// `Unreachable`, `PermissionDenied`, `AuthenticationFailed`, `Interrupted`, `Closed`,
    /// `Forked`.
    pub fn set(&self, value: impl Into<C::Item>) -> Result<()> {
        let bytes = codec::encode(&self.codec, self.recipe.path(), &value.into())?;
        let core = self.client.core();
        let until = core.operation_limit();
        let (upkeep, presence) = (self.upkeep.clone(), self.presence.clone());
        core.block("transient.set", Some(&self.recipe), |abandon| {
            upkeep.set(presence, bytes, until, abandon)
        })
    }

    /// The value a heal would restore; see [`set`](TransientKeyValue::set). Asks nobody.
    ///
    /// # Errors
    ///
    /// `Codec` if the codec cannot read what it wrote.
    pub fn value(&self) -> Result<C::Item> {
        codec::decode(&self.codec, self.recipe.path(), &self.upkeep.value())
    }

    /// The lease that the key hangs on, or -1 before the start.
    pub fn current_lease_id(&self) -> i64 {
        self.presence.current_lease()
    }

    /// Whether it is open and not known to be lost. `false` from `Expired` to `Restored`, and
    /// after `Failed`. Asks nobody.
    pub fn is_healthy(&self) -> bool {
        Recipe::is_healthy(self)
    }

    /// Adds a listener for what happens to the lease. It runs on this object's healer thread,
    /// which it may block without hindering the heal.
    pub fn add_lease_listener(
        &self,
        listener: impl Fn(&LeaseEvent) + Send + Sync + 'static,
    ) -> ListenerId {
        self.presence.listeners.add(Arc::new(listener))
    }

    /// As [`add_lease_listener`](TransientKeyValue::add_lease_listener), for a type of its own.
    pub fn add_lease_listener_with(&self, listener: Box<dyn LeaseListener>) -> ListenerId {
        self.presence.listeners.add(callback(listener))
    }

    /// Removes a lease listener; once this has returned, no new call of it starts.
    pub fn remove_lease_listener(&self, id: ListenerId) -> bool {
        self.presence.listeners.remove(id)
    }

    /// What happens to the lease, as a channel; disconnected by the close.
    pub fn lease_events(&self) -> Subscription<LeaseEvent> {
        self.presence.events.subscribe()
    }

    /// Removes the key and ends the lease; blocked calls return `Closed`. Closing again does
    /// nothing.
    ///
    /// # Errors
    ///
    /// `CleanupUnconfirmed` if etcd did not confirm within 2 s (or the TTL, if that is shorter);
    /// then the key goes at the TTL. `Forked`.
    pub fn close(&self) -> Result<()> {
        let core = self.client.core();
        if core.is_forked() {
            return core.check_usable();
        }
        self.recipe.closed().cancel();
        let closed = self.presence.close("transient.close");
        self.recipe.close(LISTENER_LIMIT);
        closed
    }
}

/// How long a close waits for a listener that is running.
const LISTENER_LIMIT: Duration = Duration::from_millis(300);

impl<C: Codec> Drop for TransientKeyValue<C> {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            log::debug!("{}: {error}", self.recipe.identity());
        }
    }
}

impl<C: Codec> HasCore for TransientKeyValue<C> {
    fn core(&self) -> &RecipeCore {
        &self.recipe
    }
}

impl<C: Codec> Recipe for TransientKeyValue<C> {
    fn ping(&self) -> bool {
        self.client.ping()
    }

    fn close(&self) -> Result<()> {
        TransientKeyValue::close(self)
    }
}
