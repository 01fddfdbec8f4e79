//! A presence lease whose keys the user's own hook creates.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::healing::{Lease, LeaseEvent, Owner, Presence, Sighting};
use crate::client::Client;
use crate::client::core::BoxFuture;
use crate::error::{Error, ErrorKind, Result};
use crate::recipe::{Callback, ListenerId, RecipeCore, Subscription};
use crate::resilience::{LeaseResilience, LeaseTiming};

/// Hears what happens to a presence lease, for those who prefer a type to a closure.
pub trait LeaseListener: Send + Sync + 'static {
    /// Runs on the recipe's healer thread.
    fn on_lease_event(&self, event: &LeaseEvent);
}

/// A listener object as the callback that the listeners of a recipe are.
pub(crate) fn callback(listener: Box<dyn LeaseListener>) -> Callback<LeaseEvent> {
    Arc::new(move |event| listener.on_lease_event(event))
}

/// The user's hook. It is taken out while it runs, so that no lock is held meanwhile.
type Hook = Box<dyn FnMut(&Lease) -> Result<bool> + Send>;

struct HookOwner {
    hook: Arc<Mutex<Option<Hook>>>,
    recipe: Arc<RecipeCore>,
}

impl HookOwner {
    fn call(hook: &Mutex<Option<Hook>>, lease: &Lease) -> Result<bool> {
        let taken = hook.lock().take();
        match taken {
            None => Ok(false),
            Some(mut taken) => {
                let answer = taken(lease);
                *hook.lock() = Some(taken);
                answer
            }
        }
    }
}

impl Owner for HookOwner {
    fn establish(&self, lease: Lease) -> BoxFuture<Result<bool>> {
        let (answer, asked) = tokio::sync::oneshot::channel();
        let hook = self.hook.clone();
        drop(self.recipe.healer().submit(Box::new(move || {
            let _ = answer.send(HookOwner::call(&hook, &lease));
        })));
        let identity = self.recipe.identity().to_owned();
        Box::pin(async move {
            // A hook that panics is gone with its state, so there is nothing to try again.
            asked.await.unwrap_or_else(|_| {
                log::warn!("{identity}: the establish hook panicked or was dropped");
                Ok(false)
            })
        })
    }

    fn key(&self) -> Option<Vec<u8>> {
        None
    }

    fn judge(&self, _lease: i64, _found: Option<&etcd_client::KeyValue>) -> Sighting {
        Sighting::Ours
    }
}

/// A lease that is kept alive and, when it dies, granted anew, with a hook that re-creates the
/// keys on it.
///
/// `establish` is the contract. It is called with a fresh lease, first on the caller's thread and
/// then, after every loss, on the recipe's healer thread. It must create its keys under that
/// lease by compare-and-set and return `Ok(true)`, or return `Ok(false)` to say that they belong
/// to somebody else now, which ends the healing with [`LeaseEvent::Failed`]. `Err` is tried again
/// at the pace of the retry policy. When the old lease turns out to be alive after its deadline,
/// it is adopted and the hook is not called.
///
/// # Losing it
///
/// `Suspended` when renewals are overdue, `Expired` at the local deadline or when etcd ended the
/// lease, then `Restored` or `Failed`. In between others may see the keys gone.
///
/// # Differences from Go's `clientv3.Lease.KeepAlive`
///
/// That call keeps one lease and closes a channel when it is over; new leases, keys and the
/// decision whether they may be re-created are left to its user.
///
/// # Example: an address that outlives partitions
///
/// ```
/// # use etcd_recipes::testing::EtcdServer;
/// use std::time::Duration;
/// use etcd_recipes::{Client, Compare, Op, Txn};
///
/// # fn main() -> etcd_recipes::Result<()> {
/// # let etcd = EtcdServer::start()?;
/// # let endpoint = etcd.endpoint();
/// let client = Client::connect([endpoint])?;
/// let writer = client.clone();
/// let keep = client.self_healing_keep_alive(Duration::from_secs(10), move |lease| {
///     let put = Op::put_with_lease("/nodes/7", "10.0.0.7", lease.id());
///     let txn = Txn::new().when([Compare::absent("/nodes/7")]).and_then([put]);
///     Ok(writer.txn(txn)?.succeeded)
/// })?;
/// assert!(keep.is_healthy());
/// keep.close()?;
/// assert!(client.get("/nodes/7")?.is_none());
/// # Ok(()) }
/// ```
pub struct SelfHealingKeepAlive {
    presence: Arc<Presence>,
    recipe: Arc<RecipeCore>,
    _client: Client,
}

impl fmt::Debug for SelfHealingKeepAlive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SelfHealingKeepAlive")
            .field("lease", &self.current_lease_id())
            .field("healthy", &self.is_healthy())
            .finish()
    }
}

impl Client {
    /// Keeps a lease of this TTL and its keys; see [`SelfHealingKeepAlive`].
    ///
    /// # Errors
    ///
    /// As [`SelfHealingBuilder::start`].
    pub fn self_healing_keep_alive(
        &self,
        ttl: Duration,
        establish: impl FnMut(&Lease) -> Result<bool> + Send + 'static,
    ) -> Result<SelfHealingKeepAlive> {
        SelfHealingKeepAlive::builder(self, ttl).start(establish)
    }
}

/// Options of a [`SelfHealingKeepAlive`].
#[must_use = "a builder does nothing until `start`"]
pub struct SelfHealingBuilder {
    client: Client,
    ttl: Duration,
    resilience: LeaseResilience,
    listeners: Vec<Callback<LeaseEvent>>,
}

impl fmt::Debug for SelfHealingBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SelfHealingBuilder").field("ttl", &self.ttl).finish_non_exhaustive()
    }
}

impl SelfHealingBuilder {
    /// Policy and timing. Default: the client's.
    pub fn resilience(mut self, resilience: LeaseResilience) -> Self {
        self.resilience = resilience;
        self
    }

    /// Adds a listener that hears everything from the start. Default: none.
    pub fn listener(mut self, listener: impl Fn(&LeaseEvent) + Send + Sync + 'static) -> Self {
        self.listeners.push(Arc::new(listener));
        self
    }

    /// As [`listener`](Self::listener), for a type of its own.
    pub fn listener_with(mut self, listener: Box<dyn LeaseListener>) -> Self {
        self.listeners.push(callback(listener));
        self
    }

    /// Grants the lease, runs `establish` on this thread, and starts to keep it.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a TTL or timing that cannot work; `NotEstablished` if the hook said
    /// no; the hook's own error; `Unreachable`, `Interrupted`, `Closed`, `Forked`. In every case
    /// the lease is revoked.
    ///
    /// # Panics
    ///
    /// If the hook panics at this first call, after revoking the lease.
    pub fn start(
        self,
        establish: impl FnMut(&Lease) -> Result<bool> + Send + 'static,
    ) -> Result<SelfHealingKeepAlive> {
        let timing = LeaseTiming::for_ttl(self.ttl, &self.resilience)?;
        let core = self.client.core().clone();
        let recipe = RecipeCore::new(
            "SelfHealingKeepAlive",
            format!("{:?}", timing.ttl),
            self.client.client_id().to_owned(),
        );
        core.register_recipe(&recipe);
        let hook: Arc<Mutex<Option<Hook>>> = Arc::new(Mutex::new(Some(Box::new(establish))));
        let owner = Arc::new(HookOwner { hook: hook.clone(), recipe: recipe.clone() });
        let presence = Presence::new(core.clone(), recipe.clone(), owner, timing, self.resilience);
        for listener in self.listeners {
            presence.listeners.add(listener);
        }
        let fresh = core.block_on("keep_alive.start", None, {
            let (presence, core) = (presence.clone(), core.clone());
            async move { presence.grant(core.operation_limit()).await }
        })?;
        let keep = SelfHealingKeepAlive { presence, recipe, _client: self.client };
        // Whatever happens in the hook, `keep`'s destructor gives this lease back.
        keep.presence.adopt_unkept(fresh);
        match HookOwner::call(&hook, &fresh.lease) {
            Ok(true) => {
                keep.presence.run(fresh);
                Ok(keep)
            }
            Ok(false) => Err(Error::new(
                ErrorKind::NotEstablished,
                "the establish hook said that the keys belong to somebody else",
            )),
            Err(error) => Err(error),
        }
    }
}

impl SelfHealingKeepAlive {
    /// Options, then [`start`](SelfHealingBuilder::start).
    pub fn builder(client: &Client, ttl: Duration) -> SelfHealingBuilder {
        SelfHealingBuilder {
            client: client.clone(),
            ttl,
            resilience: client.core().config.resilience.get_lease().clone(),
            listeners: Vec::new(),
        }
    }

    /// The lease kept now.
    pub fn current_lease_id(&self) -> i64 {
        self.presence.current_lease()
    }

    /// Whether the keys are believed to stand: `false` while a heal is under way, after it failed
    /// and after the close. Asks nobody.
    pub fn is_healthy(&self) -> bool {
        self.presence.is_healthy()
    }

    /// Adds a listener; it runs on this object's healer thread.
    pub fn add_listener(
        &self,
        listener: impl Fn(&LeaseEvent) + Send + Sync + 'static,
    ) -> ListenerId {
        self.presence.listeners.add(Arc::new(listener))
    }

    /// As [`add_listener`](Self::add_listener), for a type of its own.
    pub fn add_listener_with(&self, listener: Box<dyn LeaseListener>) -> ListenerId {
        self.presence.listeners.add(callback(listener))
    }

    /// Removes a listener; once this has returned, no new call of it starts.
    pub fn remove_listener(&self, id: ListenerId) -> bool {
        self.presence.listeners.remove(id)
    }

    /// The events as a channel.
    pub fn events(&self) -> Subscription<LeaseEvent> {
        self.presence.events.subscribe()
    }

    /// Errors seen in the background, newest last.
    pub fn errors(&self) -> Vec<Error> {
        self.recipe.errors()
    }

    /// Stops and revokes the lease, so that the keys go at once.
    ///
    /// # Errors
    ///
    /// `CleanupUnconfirmed` if etcd did not answer in time; its TTL finishes it.
    pub fn close(&self) -> Result<()> {
        let closed = self.presence.close("keep_alive.close");
        self.recipe.close(Duration::from_millis(500));
        closed
    }
}

impl Drop for SelfHealingKeepAlive {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            log::debug!("{}: {error}", self.recipe.identity());
        }
    }
}
