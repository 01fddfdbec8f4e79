//! The only way to interrupt a blocking call: a token, and the scopes a thread has entered.
//!
//! Rust threads cannot be interrupted from outside. So a blocking call of this library looks at
//! the tokens whose [`scope`](CancelToken::scope) its thread is in, and returns
//! [`Interrupted`](crate::ErrorKind::Interrupted) once one of them is cancelled.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender};
use parking_lot::Mutex;

use crate::clock::{Clock, Instant};
use crate::error::{Error, Result};
use crate::wait::{self, Parker, Stop};
use crate::whitebox::{self, GaugeGuard};

/// A flag that is raised once and wakes whoever waits for it.
///
/// Clones are the same token. Every blocking call of this library made on a thread inside
/// [`scope`](CancelToken::scope) returns [`Interrupted`](crate::ErrorKind::Interrupted) promptly
/// once the token is cancelled. Releasing, closing and dropping are never interrupted.
///
/// # Example: giving up from another thread
///
/// ```
/// use std::time::Duration;
/// use etcd_recipes::CancelToken;
///
/// let token = CancelToken::new();
/// let worker = std::thread::spawn({
///     let token = token.clone();
///     move || token.scope(|| CancelToken::new().sleep(Duration::from_secs(3600)))
/// });
/// token.cancel();
/// let error = worker.join().unwrap().expect_err("the sleep was interrupted");
/// assert!(error.is_interrupted());
/// ```
#[derive(Clone, Default)]
pub struct CancelToken {
    inner: Arc<Inner>,
}

struct Inner {
    cancelled: AtomicBool,
    waiting: Mutex<Waiting>,
    /// The tokens whose cancellation is passed on to this one. They are kept alive: a grandchild
    /// hears of its grandparent even where nobody else holds the token between them.
    parents: Vec<Link>,
    _counted: GaugeGuard<'static>,
}

impl Default for Inner {
    fn default() -> Inner {
        Inner::below(Vec::new())
    }
}

impl Inner {
    fn below(parents: Vec<Link>) -> Inner {
        Inner {
            cancelled: AtomicBool::new(false),
            waiting: Mutex::default(),
            parents,
            _counted: whitebox::TOKENS.enter(),
        }
    }
}

/// Who is to be told. Emptied by the cancellation.
#[derive(Default)]
struct Waiting {
    next_id: u64,
    channel: Option<(Sender<Infallible>, Receiver<Infallible>)>,
    hooks: BTreeMap<u64, Box<dyn FnOnce() + Send>>,
    children: BTreeMap<u64, Weak<Inner>>,
}

impl Waiting {
    fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }
}

struct Link {
    parent: Arc<Inner>,
    id: u64,
}

impl CancelToken {
    /// Makes a token that nobody has cancelled.
    pub fn new() -> CancelToken {
        CancelToken::default()
    }

    /// Raises the flag for good and wakes everyone who waits for it; a second call does nothing.
    ///
    /// Children are cancelled too. Never blocks, and works from any thread.
    pub fn cancel(&self) {
        let mut to_cancel = vec![self.inner.clone()];
        while let Some(inner) = to_cancel.pop() {
            if inner.cancelled.swap(true, Ordering::AcqRel) {
                continue;
            }
            let Waiting { channel, hooks, children, .. } =
                std::mem::take(&mut *inner.waiting.lock());
            drop(channel);
            for hook in hooks.into_values() {
                hook();
            }
            to_cancel.extend(children.into_values().rev().filter_map(|child| child.upgrade()));
        }
    }

    /// Whether the token was cancelled: one atomic load.
    pub fn is_cancelled(&self) -> bool {
        self.inner.cancelled.load(Ordering::Acquire)
    }

    /// Blocks until this token is cancelled.
    ///
    /// A thread may wait for a token whose scope it is in: that cancellation is the awaited one.
    ///
    /// # Errors
    ///
    /// [`Interrupted`](crate::ErrorKind::Interrupted) when another scope of the thread was
    /// cancelled while this token was not.
    ///
    /// # Example: parking a thread until told to go
    ///
    /// ```
    /// # fn main() -> etcd_recipes::Result<()> {
    /// use etcd_recipes::CancelToken;
    ///
    /// let stop = CancelToken::new();
    /// let signal = stop.clone();
    /// std::thread::spawn(move || signal.cancel());
    /// stop.wait()?;
    /// assert!(stop.is_cancelled());
    /// # Ok(())
    /// # }
    /// ```
    pub fn wait(&self) -> Result<()> {
        match self.wait_until("cancel.wait", None) {
            Ok(()) | Err(Stop::Closed(_) | Stop::Limit) => Ok(()),
            Err(Stop::Interrupted) => Err(Error::interrupted("cancel.wait")),
        }
    }

    /// Blocks until this token is cancelled (`true`) or `limit` has passed (`false`).
    ///
    /// The limit goes on while the machine sleeps.
    ///
    /// # Errors
    ///
    /// [`Interrupted`](crate::ErrorKind::Interrupted) when another scope of the thread was
    /// cancelled while this token was not.
    ///
    /// # Example: work once a second until told to stop
    ///
    /// ```
    /// # fn main() -> etcd_recipes::Result<()> {
    /// use std::time::Duration;
    /// use etcd_recipes::CancelToken;
    ///
    /// let stop = CancelToken::new();
    /// while !stop.wait_for(Duration::from_millis(10))? {
    ///     stop.cancel();
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn wait_for(&self, limit: Duration) -> Result<bool> {
        match self.wait_until("cancel.wait_for", Some(Clock::default().now() + limit)) {
            Ok(()) | Err(Stop::Closed(_)) => Ok(true),
            Err(Stop::Limit) => Ok(false),
            Err(Stop::Interrupted) => Err(Error::interrupted("cancel.wait_for")),
        }
    }

    fn wait_until(
        &self,
        op: &'static str,
        limit: Option<Instant>,
    ) -> std::result::Result<(), Stop> {
        // Being in `closed` is what wakes the wait; the poll then sees the flag first.
        wait::wait(op, &Clock::default(), limit, &[self], &Parker::new(), || {
            self.is_cancelled().then_some(())
        })
    }

    /// Sleeps for `duration`, unless this token or a scope of the thread is cancelled.
    ///
    /// # Errors
    ///
    /// [`Interrupted`](crate::ErrorKind::Interrupted) when the sleep was cut short, and at once
    /// when the token or a scope was cancelled before.
    ///
    /// # Example: a pause that can be cut short
    ///
    /// ```
    /// use std::time::Duration;
    /// use etcd_recipes::CancelToken;
    ///
    /// let token = CancelToken::new();
    /// assert!(token.sleep(Duration::from_millis(1)).is_ok());
    /// token.cancel();
    /// assert!(token.sleep(Duration::from_secs(3600)).is_err());
    /// ```
    pub fn sleep(&self, duration: Duration) -> Result<()> {
        let clock = Clock::default();
        let limit = Some(clock.now() + duration);
        let slept =
            wait::wait(
                "cancel.sleep",
                &clock,
                limit,
                &[self],
                &Parker::new(),
                || None::<Infallible>,
            );
        match slept {
            Err(Stop::Limit) => Ok(()),
            Err(Stop::Interrupted | Stop::Closed(_)) => Err(Error::interrupted("cancel.sleep")),
            Ok(never) => match never {},
        }
    }

    /// A channel that carries nothing and disconnects when the token is cancelled, for `select!`.
    ///
    /// Cheap, and may be asked for many times. It also disconnects when the last clone of the
    /// token is dropped, since nobody could cancel it then: keep the token while selecting.
    ///
    /// # Example: a token in a `select!`
    ///
    /// ```
    /// use std::time::Duration;
    /// use crossbeam_channel::{after, select};
    /// use etcd_recipes::CancelToken;
    ///
    /// let token = CancelToken::new();
    /// token.cancel();
    /// select! {
    ///     recv(token.receiver()) -> _ => assert!(token.is_cancelled()),
    ///     recv(after(Duration::from_secs(60))) -> _ => panic!("the token was cancelled"),
    /// }
    /// ```
    pub fn receiver(&self) -> Receiver<Infallible> {
        let mut waiting = self.inner.waiting.lock();
        if self.is_cancelled() {
            return crossbeam_channel::bounded(0).1;
        }
        waiting.channel.get_or_insert_with(|| crossbeam_channel::bounded(0)).1.clone()
    }

    /// A token that is cancelled with this one, but can be cancelled on its own as well.
    ///
    /// # Example: stopping one part or all
    ///
    /// ```
    /// use etcd_recipes::CancelToken;
    ///
    /// let all = CancelToken::new();
    /// let (one, other) = (all.child(), all.child());
    /// one.cancel();
    /// assert!(!all.is_cancelled() && !other.is_cancelled());
    /// all.cancel();
    /// assert!(other.is_cancelled());
    /// ```
    pub fn child(&self) -> CancelToken {
        CancelToken::below(std::slice::from_ref(self))
    }

    /// A token that is cancelled as soon as one of `parents` is.
    fn below(parents: &[CancelToken]) -> CancelToken {
        let links = parents
            .iter()
            .map(|parent| Link {
                parent: parent.inner.clone(),
                id: parent.inner.waiting.lock().new_id(),
            })
            .collect();
        let token = CancelToken { inner: Arc::new(Inner::below(links)) };
        for Link { parent, id } in &token.inner.parents {
            let mut waiting = parent.waiting.lock();
            if parent.cancelled.load(Ordering::Acquire) {
                drop(waiting);
                token.cancel();
                break;
            }
            waiting.children.insert(*id, Arc::downgrade(&token.inner));
        }
        token
    }

    /// Runs `f` with this thread inside the token's scope: once the token is cancelled, blocking
    /// calls of this library made by `f` return [`Interrupted`](crate::ErrorKind::Interrupted).
    ///
    /// Scopes nest, and any cancelled one interrupts. The scope ends with `f`, panics included.
    ///
    /// # Example: a time limit over several calls
    ///
    /// ```
    /// use std::time::Duration;
    /// use etcd_recipes::CancelToken;
    ///
    /// let token = CancelToken::new();
    /// token.cancel();
    /// let slept = token.scope(|| CancelToken::new().sleep(Duration::from_secs(3600)));
    /// assert!(slept.unwrap_err().is_interrupted());
    /// ```
    pub fn scope<R>(&self, f: impl FnOnce() -> R) -> R {
        let _entry = self.enter();
        f()
    }

    /// Runs `f` deaf to every scope this thread is in, for clean-up that must not be cut short.
    ///
    /// A scope entered inside `f` is heard.
    ///
    /// # Example: a pause inside a cancelled scope
    ///
    /// ```
    /// use std::time::Duration;
    /// use etcd_recipes::CancelToken;
    ///
    /// let token = CancelToken::new();
    /// token.cancel();
    /// token.scope(|| {
    ///     let pause = || CancelToken::new().sleep(Duration::from_millis(1));
    ///     assert!(pause().is_err());
    ///     assert!(CancelToken::shield(pause).is_ok());
    /// });
    /// ```
    pub fn shield<R>(f: impl FnOnce() -> R) -> R {
        let _shield = Shield::raise();
        f()
    }

    /// A token that is cancelled as soon as one of this thread's scopes is: it carries them to
    /// another thread. Outside of any scope, nobody but its holder ever cancels it.
    ///
    /// Cancelling it does not cancel the scopes it came from.
    ///
    /// # Example: taking the scope along
    ///
    /// ```
    /// use std::time::Duration;
    /// use etcd_recipes::CancelToken;
    ///
    /// let token = CancelToken::new();
    /// let worker = token.scope(|| {
    ///     let carried = CancelToken::current();
    ///     std::thread::spawn(move || carried.scope(|| carried.sleep(Duration::from_secs(3600))))
    /// });
    /// token.cancel();
    /// assert!(worker.join().unwrap().is_err());
    /// ```
    pub fn current() -> CancelToken {
        CancelToken::below(&active())
    }

    /// Registers `hook` to run once, on the cancelling thread, after the flag is up; at once, here,
    /// if it is up already. Dropping the returned handle takes it back, though one that is running
    /// may be finishing.
    ///
    /// No lock is held while it runs. Hooks are this library's own code and must not block.
    pub(crate) fn on_cancel(&self, hook: impl FnOnce() + Send + 'static) -> Hook {
        let mut waiting = self.inner.waiting.lock();
        // Looked at under the lock: the canceller raises the flag first and then takes the lock to
        // collect the hooks, so this one is either collected or run here, never both.
        if self.is_cancelled() {
            drop(waiting);
            hook();
            return Hook { registered: None };
        }
        let id = waiting.new_id();
        waiting.hooks.insert(id, Box::new(hook));
        Hook { registered: Some((self.inner.clone(), id)) }
    }

    /// Puts this thread into the token's scope until the entry is dropped; entries may end in any
    /// order.
    pub(crate) fn enter(&self) -> ScopeEntry {
        ScopeEntry { id: self.enter_until_left(), not_send: PhantomData }
    }

    /// As [`enter`](CancelToken::enter), for a guard that several owners share: the scope ends
    /// with [`leave`] on this thread. `None` on a thread so far gone that it has no scope.
    pub(crate) fn enter_until_left(&self) -> Option<u64> {
        self.push(None)
    }

    /// As [`enter`](CancelToken::enter), for an owner that may go to another thread: the scope
    /// ends with the stay, wherever that is.
    pub(crate) fn enter_until_over(&self) -> ScopeStay {
        let over = Arc::new(AtomicBool::new(false));
        self.push(Some(over.clone()));
        ScopeStay { over }
    }

    fn push(&self, over: Option<Arc<AtomicBool>>) -> Option<u64> {
        with_scope(|scope| {
            scope.next_id += 1;
            let id = scope.next_id;
            scope.entries.push(Entry { id, level: scope.shields, token: self.clone(), over });
            id
        })
    }

    /// Ready once the token is cancelled, for the library's own tasks.
    pub(crate) async fn cancelled(&self) {
        let notify = Arc::new(tokio::sync::Notify::new());
        let _hook = self.on_cancel({
            let notify = notify.clone();
            move || notify.notify_one()
        });
        notify.notified().await;
    }
}

impl fmt::Debug for CancelToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CancelToken").field("cancelled", &self.is_cancelled()).finish()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // A loop instead of drops inside drops, so that a long line of children cannot overflow
        // the stack.
        let mut links = std::mem::take(&mut self.parents);
        while let Some(Link { parent, id }) = links.pop() {
            parent.waiting.lock().children.remove(&id);
            if let Some(mut last) = Arc::into_inner(parent) {
                links.append(&mut last.parents);
            }
        }
    }
}

/// A registered hook; dropping it takes the hook back.
#[must_use = "dropping the handle takes the hook back"]
pub(crate) struct Hook {
    registered: Option<(Arc<Inner>, u64)>,
}

impl Drop for Hook {
    fn drop(&mut self) {
        if let Some((inner, id)) = self.registered.take() {
            let hook = inner.waiting.lock().hooks.remove(&id);
            // What the hook captured is dropped with the lock released.
            drop(hook);
        }
    }
}

/// The tokens this thread is in the scope of.
struct Scope {
    next_id: u64,
    /// How many shields are up.
    shields: u32,
    entries: Vec<Entry>,
}

struct Entry {
    id: u64,
    /// How many shields were up when it was entered: those do not mask it, later ones do.
    level: u32,
    token: CancelToken,
    /// Raised, perhaps by another thread, once the entry counts no longer.
    over: Option<Arc<AtomicBool>>,
}

impl Entry {
    fn is_over(&self) -> bool {
        self.over.as_ref().is_some_and(|over| over.load(Ordering::Acquire))
    }
}

impl Scope {
    /// Takes out what has been over since the last look.
    fn sweep(&mut self) -> Vec<Entry> {
        self.entries.extract_if(.., |entry| entry.is_over()).collect()
    }

    fn active(&self) -> impl Iterator<Item = &CancelToken> {
        self.entries.iter().filter(|entry| entry.level >= self.shields).map(|entry| &entry.token)
    }
}

thread_local! {
    static SCOPE: RefCell<Scope> =
        const { RefCell::new(Scope { next_id: 0, shields: 0, entries: Vec::new() }) };
}

/// `None` when the thread is so far gone that its scope was destroyed: it is in no scope then.
/// `f` must not run foreign code, drops of tokens included.
fn with_scope<R>(f: impl FnOnce(&mut Scope) -> R) -> Option<R> {
    let used = SCOPE.try_with(|scope| {
        let mut scope = scope.borrow_mut();
        let swept = scope.sweep();
        (f(&mut scope), swept)
    });
    // The swept tokens are dropped here, outside of the borrow.
    used.ok().map(|(result, _swept)| result)
}

/// Whether a blocking call on this thread has to return `Interrupted`.
pub(crate) fn interrupted() -> bool {
    with_scope(|scope| scope.active().any(CancelToken::is_cancelled)).unwrap_or(false)
}

/// The tokens that interrupt this thread. Allocates nothing when there are none.
pub(crate) fn active() -> Vec<CancelToken> {
    with_scope(|scope| scope.active().cloned().collect()).unwrap_or_default()
}

/// This thread's stay in the scope of a token.
#[must_use = "the scope ends when the entry is dropped"]
pub(crate) struct ScopeEntry {
    id: Option<u64>,
    /// It is an entry of this thread, so it has to end on it.
    not_send: PhantomData<*const ()>,
}

impl Drop for ScopeEntry {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            leave(id);
        }
    }
}

/// A stay of the thread that began it in the scope of a token; any thread may end it.
#[must_use = "the scope ends when the stay is dropped"]
pub(crate) struct ScopeStay {
    over: Arc<AtomicBool>,
}

impl Drop for ScopeStay {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        // On the thread that began it, that is all; another one forgets it when it looks next.
        with_scope(|_| ());
    }
}

/// Ends this thread's stay in a scope.
pub(crate) fn leave(id: u64) {
    let left = with_scope(|scope| {
        let index = scope.entries.iter().position(|entry| entry.id == id)?;
        Some(scope.entries.remove(index))
    });
    // The token is dropped here, outside of the borrow.
    drop(left);
}

struct Shield {
    raised: bool,
}

impl Shield {
    fn raise() -> Shield {
        Shield { raised: with_scope(|scope| scope.shields += 1).is_some() }
    }
}

impl Drop for Shield {
    fn drop(&mut self) {
        if self.raised {
            with_scope(|scope| {
                scope.shields -= 1;
                // An entry that outlives the shield it was entered under is masked by the next.
                for entry in &mut scope.entries {
                    entry.level = entry.level.min(scope.shields);
                }
            });
        }
    }
}

#[cfg(test)]
#[path = "cancel_tests.rs"]
mod tests;
