//! The thread that runs a recipe's user code, one job after the other.
//!
//! It exists only while there is something to run: it is started by the first job and ends when it
//! has been idle for a while. An idle recipe costs no thread.

use std::any::Any;
use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::cancel::CancelToken;
use crate::clock::Clock;
use crate::wait::{self, Parker};
use crate::whitebox::HEALER_THREADS;

/// How long a healer thread waits for more before it ends.
pub(crate) const IDLE: Duration = Duration::from_secs(5);

/// A piece of user code, ready to run.
pub(crate) type Job = Box<dyn FnOnce() + Send>;

/// Told of a job that panicked; library code.
pub(crate) type OnPanic = Arc<dyn Fn(String) + Send + Sync>;

pub(crate) struct Healer {
    shared: Arc<Shared>,
}

struct Shared {
    id: u64,
    name: String,
    idle: Duration,
    on_panic: OnPanic,
    state: Mutex<State>,
    changed: Condvar,
    #[cfg(test)]
    refuse_threads: std::sync::atomic::AtomicBool,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    closed: bool,
    /// Cancelled when the thread that runs the jobs ends; `None` while there is no such thread.
    running: Option<CancelToken>,
    /// The last thread started, kept to be joined.
    thread: Option<JoinHandle<()>>,
}

thread_local! {
    /// The healer this thread works for. Nothing to destroy, so it can be read in destructors.
    static CURRENT: Cell<u64> = const { Cell::new(0) };
}

impl Healer {
    /// A healer whose thread, when there is one, has this `name` of at most 15 bytes.
    pub(crate) fn new(name: &str, on_panic: OnPanic) -> Healer {
        Healer::with_idle(name, on_panic, IDLE)
    }

    pub(crate) fn with_idle(name: &str, on_panic: OnPanic, idle: Duration) -> Healer {
        static LAST: AtomicU64 = AtomicU64::new(0);
        debug_assert!(name.len() <= 15, "the kernel cuts the thread name {name}");
        Healer {
            shared: Arc::new(Shared {
                id: LAST.fetch_add(1, Ordering::Relaxed) + 1,
                name: name.to_owned(),
                idle,
                on_panic,
                state: Mutex::default(),
                changed: Condvar::new(),
                #[cfg(test)]
                refuse_threads: std::sync::atomic::AtomicBool::new(false),
            }),
        }
    }

    /// Queues a job and sees to it that a thread runs it. Where none can be started the jobs wait
    /// for the next call.
    ///
    /// Returns the job if the healer is closed, so that it is dropped where no lock is held.
    pub(crate) fn submit(&self, job: Job) -> Option<Job> {
        let mut state = self.shared.state.lock();
        if state.closed {
            return Some(job);
        }
        state.jobs.push_back(job);
        self.shared.changed.notify_one();
        Shared::ensure_thread(&self.shared, &mut state);
        None
    }

    /// Whether the calling thread is this healer's.
    pub(crate) fn is_current(&self) -> bool {
        CURRENT.get() == self.shared.id
    }

    /// Takes no more jobs, runs those that are queued and waits until the thread has ended.
    ///
    /// `false`: something was still running after `limit`. On the healer's own thread it returns
    /// `true` at once, and the thread ends after its last job.
    pub(crate) fn close(&self, limit: Duration) -> bool {
        let clock = Clock::default();
        let deadline = clock.now() + limit;
        let own = self.is_current();
        loop {
            let running = {
                let mut state = self.shared.state.lock();
                state.closed = true;
                self.shared.changed.notify_one();
                if own {
                    return true;
                }
                if !state.jobs.is_empty() {
                    Shared::ensure_thread(&self.shared, &mut state);
                }
                match (&state.running, state.jobs.is_empty()) {
                    (Some(running), _) => running.clone(),
                    (None, false) => return false,
                    (None, true) => {
                        let thread = state.thread.take();
                        drop(state);
                        // It has run its last line, so this takes no time.
                        return thread.is_none_or(|thread| thread.join().is_ok());
                    }
                }
            };
            let ended = wait::wait_shielded(
                "recipe.close",
                &clock,
                Some(deadline),
                &[&running],
                &Parker::new(),
                || running.is_cancelled().then_some(()),
            );
            if ended == Err(wait::Stop::Limit) {
                return false;
            }
        }
    }
}

impl Drop for Healer {
    fn drop(&mut self) {
        self.shared.state.lock().closed = true;
        self.shared.changed.notify_one();
    }
}

impl Shared {
    fn ensure_thread(shared: &Arc<Shared>, state: &mut State) {
        if state.running.is_some() {
            return;
        }
        let running = CancelToken::new();
        let spawned = shared.spawn({
            let (shared, running) = (shared.clone(), running.clone());
            move || {
                CURRENT.set(shared.id);
                let alive = HEALER_THREADS.enter();
                shared.run();
                drop(alive);
                running.cancel();
            }
        });
        if let Ok(thread) = spawned {
            state.running = Some(running);
            state.thread = Some(thread);
        }
    }

    fn spawn(&self, body: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
        #[cfg(test)]
        if self.refuse_threads.load(Ordering::Relaxed) {
            return Err(std::io::Error::other("no more threads"));
        }
        Builder::new().name(self.name.clone()).spawn(body)
    }

    fn run(&self) {
        while let Some(job) = self.next() {
            if let Err(message) = guarded(job) {
                (self.on_panic)(message);
            }
        }
    }

    /// The next job; `None` ends the thread.
    fn next(&self) -> Option<Job> {
        let mut state = self.state.lock();
        let mut timed_out = false;
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            if state.closed || timed_out {
                state.running = None;
                return None;
            }
            timed_out = self.changed.wait_for(&mut state, self.idle).timed_out();
        }
    }
}

/// Runs user code; a panic in it becomes its message.
pub(crate) fn guarded(code: impl FnOnce()) -> Result<(), String> {
    catch_unwind(AssertUnwindSafe(code)).map_err(panic_message)
}

fn panic_message(payload: Box<dyn Any + Send>) -> String {
    let message = match (payload.downcast_ref::<&str>(), payload.downcast_ref::<String>()) {
        (Some(text), _) => (*text).to_owned(),
        (_, Some(text)) => text.clone(),
        _ => "a panic without a message".to_owned(),
    };
    // Dropping a payload is user code again. One that panics even there is leaked.
    if let Err(again) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        std::mem::forget(again);
    }
    message
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::time::Instant as Wall;

    use crossbeam_channel::{bounded, unbounded};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);

    fn healer() -> (Healer, Arc<Mutex<Vec<String>>>) {
        healer_with(IDLE)
    }

    fn healer_with(idle: Duration) -> (Healer, Arc<Mutex<Vec<String>>>) {
        let panics: Arc<Mutex<Vec<String>>> = Arc::default();
        let on_panic: OnPanic = Arc::new({
            let panics = panics.clone();
            move |message| panics.lock().push(message)
        });
        (Healer::with_idle("etcd-rx-heal", on_panic, idle), panics)
    }

    fn has_thread(healer: &Healer) -> bool {
        healer.shared.state.lock().running.is_some()
    }

    fn until(condition: impl Fn() -> bool) {
        let begun = Wall::now();
        while !condition() {
            assert!(begun.elapsed() < LIMIT, "it did not come true");
            std::thread::yield_now();
        }
    }

    #[test]
    fn jobs_run_in_order_on_a_named_thread() {
        let (healer, _) = healer();
        assert!(!has_thread(&healer));
        let (sender, receiver) = unbounded();
        for number in 0..100 {
            let sender = sender.clone();
            let job = move || {
                let name = std::thread::current().name().map(str::to_owned);
                sender.send((number, name)).unwrap();
            };
            assert!(healer.submit(Box::new(job)).is_none());
        }
        drop(sender);
        assert!(healer.close(LIMIT));
        let expected: Vec<_> = (0..100).map(|n| (n, Some("etcd-rx-heal".to_owned()))).collect();
        assert_eq!(receiver.iter().collect::<Vec<_>>(), expected);
        assert!(healer.submit(Box::new(|| ())).is_some());
        assert!(healer.close(LIMIT));
    }

    #[test]
    fn the_thread_ends_when_idle_and_comes_back() {
        let (healer, _) = healer_with(Duration::from_millis(1));
        let (sender, receiver) = unbounded();
        for _ in 0..3 {
            let sender = sender.clone();
            healer.submit(Box::new(move || {
                sender.send(HEALER_THREADS.get()).unwrap();
            }));
            assert!(receiver.recv_timeout(LIMIT).unwrap() >= 1);
            until(|| !has_thread(&healer));
        }
        assert!(healer.close(LIMIT));
    }

    #[test]
    fn a_panic_is_reported_and_the_rest_still_runs() {
        struct Nasty;
        impl Drop for Nasty {
            fn drop(&mut self) {
                panic!("in the payload");
            }
        }
        let (healer, panics) = healer();
        let (sender, receiver) = bounded(1);
        healer.submit(Box::new(|| panic!("first")));
        healer.submit(Box::new(|| panic!("{}", "second")));
        healer.submit(Box::new(|| std::panic::panic_any(Nasty)));
        healer.submit(Box::new(move || sender.send(()).unwrap()));
        assert!(receiver.recv_timeout(LIMIT).is_ok());
        assert!(healer.close(LIMIT));
        assert_eq!(*panics.lock(), ["first", "second", "a panic without a message"]);
    }

    #[test]
    fn close_gives_up_after_its_limit_and_works_again_later() {
        let (healer, _) = healer();
        let (release, released) = bounded::<()>(0);
        let ran = Arc::new(AtomicUsize::new(0));
        let count = ran.clone();
        healer.submit(Box::new(move || {
            let _ = released.recv();
        }));
        healer.submit(Box::new(move || {
            count.fetch_add(1, Ordering::Relaxed);
        }));
        let begun = Wall::now();
        assert!(!healer.close(Duration::from_millis(20)));
        assert!(begun.elapsed() < LIMIT);
        drop(release);
        assert!(healer.close(LIMIT));
        assert_eq!(ran.load(Ordering::Relaxed), 1);
        assert!(!has_thread(&healer));
    }

    #[test]
    fn close_on_the_healer_itself_returns_at_once() {
        let (healer, panics) = healer();
        let healer = Arc::new(healer);
        assert!(!healer.is_current());
        let (sender, receiver) = bounded(2);
        let inner = healer.clone();
        healer.submit(Box::new(move || {
            sender.send(inner.is_current()).unwrap();
            sender.send(inner.close(LIMIT)).unwrap();
        }));
        assert!(receiver.recv_timeout(LIMIT).unwrap());
        assert!(receiver.recv_timeout(LIMIT).unwrap());
        assert!(healer.close(LIMIT));
        assert!(panics.lock().is_empty());
    }

    #[test]
    fn many_threads_may_close() {
        let (healer, _) = healer();
        healer.submit(Box::new(std::thread::yield_now));
        std::thread::scope(|scope| {
            let closers: Vec<_> = (0..4).map(|_| scope.spawn(|| healer.close(LIMIT))).collect();
            assert!(closers.into_iter().all(|closer| closer.join().unwrap()));
        });
    }

    #[test]
    fn close_is_deaf_to_a_cancelled_scope() {
        let (healer, _) = healer();
        healer.submit(Box::new(std::thread::yield_now));
        let token = CancelToken::new();
        token.cancel();
        assert!(token.scope(|| healer.close(LIMIT)));
    }

    #[test]
    fn a_drop_ends_the_thread_after_the_queued_jobs() {
        let (healer, _) = healer();
        let (sender, receiver) = bounded(1);
        let weak = Arc::downgrade(&healer.shared);
        healer.submit(Box::new(std::thread::yield_now));
        healer.submit(Box::new(move || sender.send(()).unwrap()));
        drop(healer);
        assert!(receiver.recv_timeout(LIMIT).is_ok());
        until(|| weak.strong_count() == 0);
    }

    #[test]
    fn jobs_wait_while_no_thread_can_be_started() {
        let (healer, _) = healer();
        let (sender, receiver) = unbounded();
        let job = |number| {
            let sender = sender.clone();
            Box::new(move || sender.send(number).unwrap())
        };
        healer.shared.refuse_threads.store(true, Ordering::Relaxed);
        assert!(healer.submit(job(1)).is_none());
        assert!(receiver.is_empty() && !has_thread(&healer));
        healer.shared.refuse_threads.store(false, Ordering::Relaxed);
        assert!(healer.submit(job(2)).is_none());
        assert_eq!(receiver.recv_timeout(LIMIT), Ok(1));
        assert_eq!(receiver.recv_timeout(LIMIT), Ok(2));

        assert!(healer.close(LIMIT));
    }

    #[test]
    fn close_says_when_jobs_could_not_run() {
        let (healer, _) = healer();
        healer.shared.refuse_threads.store(true, Ordering::Relaxed);
        healer.submit(Box::new(|| ()));
        assert!(!healer.close(LIMIT));
        healer.shared.refuse_threads.store(false, Ordering::Relaxed);
        assert!(healer.close(LIMIT));
    }

    #[test]
    fn submitting_while_the_thread_ends_loses_no_job() {
        let (healer, _) = healer_with(Duration::from_micros(50));
        let ran = Arc::new(AtomicUsize::new(0));
        for number in 0..500 {
            let count = ran.clone();
            healer.submit(Box::new(move || {
                count.fetch_add(1, Ordering::Relaxed);
            }));
            if number % 7 == 0 {
                until(|| ran.load(Ordering::Relaxed) > number);
            }
        }
        assert!(healer.close(LIMIT));
        assert_eq!(ran.load(Ordering::Relaxed), 500);
    }
}
