//! The connection to etcd: one [`Client`], one hidden I/O thread, one funnel for every request.

mod basics;
mod builder;
pub(crate) mod call;
mod classify;
pub(crate) mod core;
mod endpoints;
pub(crate) mod identity;
pub(crate) mod member;
mod raw;
mod returns;
mod rpc;
pub(crate) mod runtime;
#[cfg(any(feature = "tls", feature = "tls-aws-lc"))]
mod tls;
mod txn;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use etcd_client::GetOptions;

use self::core::Core;
use crate::error::{ErrorKind, Result};

pub use builder::ClientBuilder;
#[cfg(any(feature = "tls", feature = "tls-aws-lc"))]
pub use tls::TlsOptions;
pub use txn::{Compare, CompareOp, KeyValue, Op, OpResult, Txn, TxnResult};

/// How long [`Client::ping`] waits for an answer.
const PING_LIMIT: Duration = Duration::from_secs(2);

/// A connection to one etcd cluster, shared by every recipe made with it.
///
/// Cheap to clone; all clones are one client. A hidden thread drives the I/O, so every call works
/// from any thread: a plain one, a pool's, an async worker (which it blocks), a destructor. When
/// the last clone is dropped the client closes as [`close`](Client::close) does, without the
/// report.
///
/// # When etcd is away
///
/// Connecting needs no etcd. A call that waits for etcd ends with `Unreachable` after the
/// operation timeout (default 30 s); it fails over between the members it was given, and a member
/// that goes silent costs one attempt (at most 3 s), not the call.
///
/// # Forks
///
/// A child made by `fork` has the client's memory and none of its threads: there, calls return
/// `Forked`, holds answer that they are not held, and drops touch nothing.
///
/// # Example: connect, then ask whether etcd is there
///
/// ```
/// # use etcd_recipes::testing::EtcdServer;
/// use std::time::Duration;
/// use etcd_recipes::Client;
///
/// # fn main() -> etcd_recipes::Result<()> {
/// # let etcd = EtcdServer::start()?;
/// # let endpoint = etcd.endpoint();
/// let client = Client::connect([endpoint])?;
/// client.wait_ready(Duration::from_secs(10))?;
/// assert!(client.ping());
/// client.close()?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Client {
    handle: Arc<Handle>,
}

/// The last one to go closes the client.
struct Handle {
    core: Arc<Core>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.core.is_forked() {
            return;
        }
        let core = self.core.clone();
        if core.on_io_thread() {
            // A destructor of the user's, reached from a task: the close must not wait for the
            // thread it runs on.
            let spawned = std::thread::Builder::new()
                .name("etcd-rx-close".to_owned())
                .spawn(move || drop(core.close()));
            if let Err(error) = spawned {
                log::warn!("closing a client in the background: {error}");
            }
        } else if let Err(error) = core.close() {
            log::debug!("{error}");
        }
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("client_id", &self.client_id())
            .field("endpoints", &self.core().config.endpoints)
            .finish_non_exhaustive()
    }
}

impl Client {
    /// A client with default options; see [`builder`](Client::builder) for the rest. Starts the
    /// I/O thread and does no I/O.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` naming the endpoint that is malformed, or that there is none.
    pub fn connect<E: AsRef<str>>(endpoints: impl IntoIterator<Item = E>) -> Result<Client> {
        Client::builder().endpoints(endpoints).connect()
    }

    /// Options, then [`connect`](ClientBuilder::connect).
    pub fn builder() -> ClientBuilder {
        ClientBuilder::new()
    }

    pub(crate) fn from_core(core: Arc<Core>) -> Client {
        Client { handle: Arc::new(Handle { core }) }
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.handle.core
    }

    /// The name under which this client's recipes appear in etcd.
    pub fn client_id(&self) -> &str {
        &self.core().config.client_id
    }

    /// Whether etcd answers a linearizable read within 2 s. `false` also when the client is
    /// closed or the thread's scope is cancelled. A refusal counts as an answer: permission to
    /// read is not asked for.
    pub fn ping(&self) -> bool {
        match self.probe("client.ping", PING_LIMIT) {
            Ok(()) => true,
            Err(error) => error.kind() == ErrorKind::PermissionDenied,
        }
    }

    /// Waits until etcd answers.
    ///
    /// # Errors
    ///
    /// `Unreachable` after `limit`, `AuthenticationFailed` if the login is refused,
    /// `Interrupted`, `Closed`, `Forked`.
    pub fn wait_ready(&self, limit: Duration) -> Result<()> {
        match self.probe("client.wait_ready", limit) {
            Err(error) if error.kind() == ErrorKind::PermissionDenied => Ok(()),
            other => other,
        }
    }

    fn probe(&self, op: &'static str, limit: Duration) -> Result<()> {
        let core = self.core().clone();
        let until = core.clock.now() + limit;
        self.core().block_on(op, None, async move {
            loop {
                let options = GetOptions::new().with_count_only();
                let asked = core.range(op, &core.physical(b"ping"), Some(options), until).await;
                match asked {
                    // The retry policy may give up sooner than the caller's limit.
                    Err(error) if error.is_unreachable() && core.clock.now() < until => {
                        let pause = core.clock.now() + Duration::from_millis(100);
                        core.clock.sleep_until(pause.min(until)).await;
                    }
                    other => return other.map(drop),
                }
            }
        })
    }

    /// Ends everything this client does: wakes every blocked call with `Closed`, loses every hold
    /// (reason `Closed`), revokes its leases and ends its threads. Closing twice is fine, and a
    /// listener may do it.
    ///
    /// # Errors
    ///
    /// `CleanupUnconfirmed` if etcd did not confirm within 2 s that everything is removed; then
    /// etcd's TTL does it. `Forked` in a fork's child.
    pub fn close(&self) -> Result<()> {
        self.core().close()
    }

    /// Whether the client was closed.
    pub fn is_closed(&self) -> bool {
        self.core().closed.is_cancelled()
    }

    /// The id a recipe goes by: one of its own, checked, or this client's.
    pub(crate) fn recipe_id(&self, own: Option<String>) -> Result<String> {
        match own {
            Some(id) => identity::checked_client_id(id),
            None => Ok(self.client_id().to_owned()),
        }
    }

    pub(crate) fn check_usable(&self) -> Result<()> {
        self.core().check_usable()
    }
}
