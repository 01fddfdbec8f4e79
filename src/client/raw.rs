//! The escape hatch: etcd-client itself, on a thread and a connection of its own.
//!
//! It is the one place where types of etcd-client appear in the public interface, so a breaking
//! release of it can break callers of [`Client::with_raw`] and nobody else.

use std::future::Future;
use std::time::Duration;

use tokio::sync::oneshot;

use super::Client;
use super::core::Core;
use super::member::Purpose;
use super::runtime::Runtime;
use crate::error::{Error, ErrorKind, Result};
use crate::race::{Either, race};

impl Client {
    /// Runs any etcd-client code and waits for it, at most for `limit`.
    ///
    /// The closure gets an `etcd_client::Client` (0.21) with this client's endpoints, login and
    /// TLS options, and without its namespace, failover and retries. It runs on a thread that is
    /// started at the first call and has a connection of its own, so that nothing it does delays
    /// a renewal.
    ///
    /// # Errors
    ///
    /// `TimedOut` after `limit`, with the future dropped where it stood; `Unreachable` or
    /// `AuthenticationFailed` if the connection cannot be made; `Internal` if the future panics;
    /// `Interrupted`, `Closed`, `Forked`. What the future itself returns is passed on as it is.
    ///
    /// # Example: the members of the cluster
    ///
    /// ```
    /// # use etcd_recipes::testing::EtcdServer;
    /// # use std::time::Duration;
    /// # fn main() -> etcd_recipes::Result<()> {
    /// # let etcd = EtcdServer::start()?;
    /// # let client = etcd_recipes::Client::connect([etcd.endpoint()])?;
    /// let members = client.with_raw(Duration::from_secs(5), |mut etcd| async move {
    ///     etcd.member_list().await.map(|answer| answer.members().len())
    /// })?;
    /// assert_eq!(members.ok(), Some(1));
    /// # Ok(()) }
    /// ```
    pub fn with_raw<R, F, Fut>(&self, limit: Duration, code: F) -> Result<R>
    where
        R: Send + 'static,
        F: FnOnce(etcd_client::Client) -> Fut + Send + 'static,
        Fut: Future<Output = R> + Send + 'static,
    {
        let core = self.core().clone();
        let until = core.clock.now() + limit;
        self.core().block_on("client.with_raw", None, async move {
            let (tell, told) = oneshot::channel();
            let (gone, caller) = oneshot::channel::<()>();
            let connecting = core.clone();
            core.spawn_raw(async move {
                let work = async move {
                    let etcd = connecting.raw_client().await?;
                    // In a task of its own, so that its panic is an error and not our end.
                    let mut task = AbortOnDrop(tokio::spawn(code(etcd)));
                    (&mut task.0)
                        .await
                        .map_err(|error| Error::internal(format!("with_raw: {error}")))
                };
                // The caller's leaving drops the work.
                if let Either::First(result) = race(work, caller).await {
                    let _ = tell.send(result);
                }
            })?;
            let outcome = race(told, core.clock.sleep_until(until)).await;
            drop(gone);
            match outcome {
                Either::First(Ok(result)) => result,
                Either::First(Err(_)) => Err(Error::closed("the client")),
                Either::Second(()) => {
                    Err(Error::new(ErrorKind::TimedOut, format!("with_raw took over {limit:?}")))
                }
            }
        })
    }
}

/// A task that ends when nobody waits for it any more.
struct AbortOnDrop<T>(tokio::task::JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Core {
    /// Starts a task on the raw thread, and the thread first if need be.
    fn spawn_raw(&self, task: impl Future<Output = ()> + Send + 'static) -> Result<()> {
        let mut raw = self.raw.lock();
        let runtime = match &*raw {
            Some(runtime) => runtime,
            None => raw.insert(Runtime::start("etcd-rx-raw")?),
        };
        runtime.spawn(task);
        Ok(())
    }

    async fn raw_client(&self) -> Result<etcd_client::Client> {
        let urls: Vec<&str> = self.members.iter().map(super::member::Member::url).collect();
        let connected = self.config.dial.connect(&urls, Purpose::Leases).await;
        connected.map(|(client, _)| client).map_err(|error| {
            let miss = self.miss(&error);
            let kind = miss.kind().unwrap_or(ErrorKind::Unreachable);
            Error::new(kind, format!("with_raw: {}", miss.text))
        })
    }
}
