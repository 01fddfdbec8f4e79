//! What it costs that threads wait: the floor's protocol for threads instead of tasks.
//!
//! The barest of facades, raw etcd-client on a hidden thread: a call hands it a future and sleeps on
//! a condition variable. Beside the floor it shows what waking two threads per call costs on this
//! machine, whoever does it, and so what is left for this library to save.

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use etcd_client::{Client, Error};
use parking_lot::{Condvar, Mutex};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::floor::{busy_read, connected};
use crate::measure::Outcome;
use crate::raw::{Contender, Keys, leave};
use crate::stage::threads;

#[derive(Clone)]
pub(crate) struct Facade {
    handle: Handle,
    client: Client,
    contender: Contender,
    _stop: Arc<oneshot::Sender<()>>,
}

impl Facade {
    pub(crate) fn connect(endpoint: &str) -> Outcome<Facade> {
        let (stop, stopped) = oneshot::channel::<()>();
        let (tell, told) = mpsc::channel();
        thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let _ = tell.send(runtime.as_ref().map(|runtime| runtime.handle().clone()).ok());
            if let Ok(runtime) = runtime {
                // An error says that the facade is gone, which is what is waited for.
                let _ = runtime.block_on(stopped);
            }
        });
        let handle = told.recv()?.ok_or("no runtime")?;
        let endpoint = endpoint.to_owned();
        let connect = async move { connected(&endpoint).await };
        let (client, lease) = call(&handle, connect)?;
        let contender = Contender::new(lease, Keys::Unique);
        Ok(Facade { handle, client, contender, _stop: Arc::new(stop) })
    }

    /// Uncontended pairs, as the floor's, each thread on a path of its own.
    pub(crate) fn pairs(&self, count: usize, length: Duration) -> Outcome<f64> {
        let workers = (0..count).map(|number| (self.clone(), number)).collect();
        threads(workers, length, |(facade, number)| {
            let prefix = format!("/facade/{number}/");
            let Facade { handle, client, contender, .. } = facade.clone();
            let (mut enqueuing, mut leaving) = (client.clone(), client);
            let (path, task) = (prefix.clone(), *number);
            let (standing, _) =
                call(&handle, async move { contender.enqueue(&mut enqueuing, &path, task).await })?;
            call(&handle, async move { leave(&mut leaving, &prefix, standing).await })?;
            Ok(())
        })
    }

    /// Bare reads, as the floor's.
    pub(crate) fn reads(&self, count: usize, length: Duration) -> Outcome<f64> {
        threads(vec![self.clone(); count], length, |facade| {
            let mut client = facade.client.clone();
            call(&facade.handle, async move { busy_read(&mut client).await })?;
            Ok(())
        })
    }
}

/// Waits on this thread for what happens on the hidden one.
fn call<T: Send + 'static>(
    handle: &Handle,
    work: impl Future<Output = Result<T, Error>> + Send + 'static,
) -> Outcome<T> {
    let slot = Arc::new((Mutex::new(None), Condvar::new()));
    let filled = slot.clone();
    handle.spawn(async move {
        let outcome = work.await;
        *filled.0.lock() = Some(outcome);
        filled.1.notify_one();
    });
    let mut outcome = slot.0.lock();
    loop {
        match outcome.take() {
            Some(outcome) => return Ok(outcome?),
            None => slot.1.wait(&mut outcome),
        }
    }
}
