//! The hidden thread that drives all etcd I/O, and the way a calling thread waits for it.
//!
//! The thread owns a current-thread tokio runtime. Callers never enter that runtime: they hand it
//! a future and park on a condition variable, which works from any thread, an async worker
//! included, where tokio's own blocking calls would panic.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::runtime::{Builder, Handle};
use tokio::sync::{Notify, oneshot};

use crate::error::{Error, ErrorKind, Result};
use crate::wait::Parker;
use crate::whitebox;

/// How long the runtime's own blocking helpers (name look-ups) may delay its end.
const SHUTDOWN_LIMIT: Duration = Duration::from_millis(100);

pub(crate) struct Runtime {
    handle: Handle,
    stop: Mutex<Option<oneshot::Sender<()>>>,
    thread: Mutex<Option<thread::JoinHandle<()>>>,
    ended: crossbeam_channel::Receiver<()>,
    id: thread::ThreadId,
}

impl Runtime {
    pub(crate) fn start(name: &str) -> Result<Runtime> {
        let (stop, stopped) = oneshot::channel::<()>();
        let (handle_tx, handle_rx) = crossbeam_channel::bounded(1);
        let (ended_tx, ended) = crossbeam_channel::bounded::<()>(0);
        let failed = |e| Error::with_source(ErrorKind::Internal, "starting the I/O thread", e);
        let thread = thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                // Dropped last, also on a panic: whoever waits for the end sees it.
                let _ended = ended_tx;
                let _counted = whitebox::IO_THREADS.enter();
                let runtime = match Builder::new_current_thread().enable_all().build() {
                    Ok(runtime) => runtime,
                    Err(e) => {
                        let _ = handle_tx.send(Err(e));
                        return;
                    }
                };
                let _ = handle_tx.send(Ok(runtime.handle().clone()));
                // An error means that the sender is gone, which asks for the same.
                let _ = runtime.block_on(stopped);
                runtime.shutdown_timeout(SHUTDOWN_LIMIT);
            })
            .map_err(failed)?;
        let handle = handle_rx
            .recv()
            .map_err(|_| Error::internal("the I/O thread ended as it started"))?
            .map_err(failed)?;
        Ok(Runtime {
            handle,
            stop: Mutex::new(Some(stop)),
            id: thread.thread().id(),
            thread: Mutex::new(Some(thread)),
            ended,
        })
    }

    /// Whether the calling thread is the one that drives the I/O.
    pub(crate) fn is_current(&self) -> bool {
        thread::current().id() == self.id
    }

    /// Runs a task of the library's own. Once the runtime has stopped the task is dropped.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.handle.spawn(task);
    }

    /// Starts `task` and returns where its result will arrive.
    pub(crate) fn run<T: Send + 'static>(
        &self,
        task: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Arc<Slot<T>> {
        let slot = Arc::new(Slot { value: Mutex::new(None), parker: Parker::new() });
        let filler = Filler { slot: Some(slot.clone()) };
        // On the heap by itself: inside of another future it would take its room twice.
        let task = Box::pin(task);
        self.handle.spawn(async move { filler.fill(task.await) });
        slot
    }

    /// Ends the thread: tasks are dropped where they stand. Returns whether it ended within
    /// `limit`; from the I/O thread itself it only asks.
    pub(crate) fn stop(&self, limit: Duration) -> bool {
        drop(self.stop.lock().take());
        let Some(thread) = self.thread.lock().take() else { return true };
        if self.is_current() {
            return true;
        }
        match self.ended.recv_timeout(limit) {
            Err(crossbeam_channel::RecvTimeoutError::Timeout) => {
                // It goes on ending by itself; waiting longer would let a stuck name look-up hang
                // the caller.
                log::warn!("the etcd I/O thread did not end within {limit:?}");
                false
            }
            _ => {
                let _ = thread.join();
                true
            }
        }
    }
}

/// Where a task on the runtime leaves its result for the thread that waits.
pub(crate) struct Slot<T> {
    value: Mutex<Option<Result<T>>>,
    parker: Arc<Parker>,
}

impl<T> Slot<T> {
    pub(crate) fn take(&self) -> Option<Result<T>> {
        self.value.lock().take()
    }

    pub(crate) fn parker(&self) -> &Arc<Parker> {
        &self.parker
    }
}

/// Fills the slot exactly once, with `Closed` when the task is dropped unfinished.
struct Filler<T> {
    slot: Option<Arc<Slot<T>>>,
}

impl<T> Filler<T> {
    fn fill(mut self, value: Result<T>) {
        self.put(value);
    }

    fn put(&mut self, value: Result<T>) {
        if let Some(slot) = self.slot.take() {
            *slot.value.lock() = Some(value);
            slot.parker.notify();
        }
    }
}

impl<T> Drop for Filler<T> {
    fn drop(&mut self) {
        self.put(Err(Error::closed("the client")));
    }
}

/// Tells a task on the runtime that nobody waits for it any more.
///
/// The task decides what that means: a read is dropped, an acquire takes its key back.
#[derive(Clone, Default)]
pub(crate) struct Abandon(Arc<AbandonInner>);

#[derive(Default)]
struct AbandonInner {
    fired: AtomicBool,
    notify: Notify,
}

impl Abandon {
    pub(crate) fn fire(&self) {
        self.0.fired.store(true, Ordering::Release);
        self.0.notify.notify_waiters();
    }

    pub(crate) fn is_fired(&self) -> bool {
        self.0.fired.load(Ordering::Acquire)
    }

    /// Ready once the caller has left.
    pub(crate) async fn fired(&self) {
        loop {
            let mut notified = std::pin::pin!(self.0.notify.notified());
            // Registered before the flag is read, so a fire in between is not missed.
            notified.as_mut().enable();
            if self.is_fired() {
                return;
            }
            notified.await;
        }
    }
}
