//! The part of a recipe that all recipes share: who it is, what it tells and to whom.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use super::ErrorEvent;
use super::connection::{self, ConnectionState, Signal};
use super::errors::ErrorList;
use super::healer::{self, Healer, Job};
use super::listeners::{Callback, Listener, ListenerId, Listeners};
use super::subscription::{Events, Subscription};
use crate::cancel::CancelToken;
use crate::error::{Error, ErrorKind, Result};

/// The shared part of a recipe. Public in name only: no path outside of the crate leads to it.
pub struct RecipeCore {
    me: Weak<RecipeCore>,
    path: String,
    client_id: String,
    identity: String,
    /// Held while a change is handed to the healer and the subscriptions, so that all of them see
    /// the states in one order. No user code runs or is dropped under it.
    state: Mutex<ConnectionState>,
    state_listeners: Listeners<ConnectionState>,
    state_events: Events<ConnectionState>,
    errors: Mutex<ErrorList>,
    error_listeners: Listeners<ErrorEvent>,
    healer: Healer,
    closed: CancelToken,
    /// Run by the close, once no more events will come: a recipe's own channels end here.
    ends: Mutex<Vec<Box<dyn FnOnce() + Send>>>,
}

impl RecipeCore {
    pub(crate) fn new(kind: &'static str, path: String, client_id: String) -> Arc<RecipeCore> {
        Arc::new_cyclic(|me: &Weak<RecipeCore>| RecipeCore {
            me: me.clone(),
            identity: format!("{kind}[{path}]"),
            path,
            client_id,
            state: Mutex::new(ConnectionState::Connected),
            state_listeners: Listeners::new(),
            state_events: Events::new(),
            errors: Mutex::default(),
            error_listeners: Listeners::new(),
            healer: Healer::new("etcd-rx-heal", {
                let me = me.clone();
                Arc::new(move |message| RecipeCore::record_panic(&me, &message))
            }),
            closed: CancelToken::new(),
            ends: Mutex::default(),
        })
    }

    /// The kind and path, such as `Mutex[/locks/orders]`.
    pub(crate) fn identity(&self) -> &str {
        &self.identity
    }

    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    pub(crate) fn client_id(&self) -> &str {
        &self.client_id
    }

    pub(crate) fn healer(&self) -> &Healer {
        &self.healer
    }

    pub(crate) fn state(&self) -> ConnectionState {
        *self.state.lock()
    }

    /// Moves the connection state and tells of it, if the signal changes anything.
    pub(crate) fn signal(&self, signal: Signal) {
        let refused;
        let (before, after);
        {
            let mut state = self.state.lock();
            let Some(next) = connection::step(*state, signal) else { return };
            (before, after) = (*state, next);
            *state = next;
            self.state_events.publish(next);
            refused = self.queue(self.state_listeners.snapshot(), next, RecipeCore::record_panic);
        }
        drop(refused);
        match after {
            ConnectionState::Suspended | ConnectionState::Lost => {
                log::warn!("{}: {before:?} -> {after:?}", self.identity);
            }
            ConnectionState::Connected | ConnectionState::Reconnected => {
                log::info!("{}: {before:?} -> {after:?}", self.identity);
            }
        }
    }

    pub(crate) fn add_connection_state_listener(
        &self,
        listener: Callback<ConnectionState>,
    ) -> ListenerId {
        let (id, refused);
        {
            let state = self.state.lock();
            let listener = self.state_listeners.add_listener(listener);
            id = listener.id();
            refused = self.queue(vec![listener], *state, RecipeCore::record_panic);
        }
        drop(refused);
        id
    }

    pub(crate) fn connection_events(&self) -> Subscription<ConnectionState> {
        self.state_events.subscribe()
    }

    /// Removes a connection state listener or an error listener.
    pub(crate) fn remove_listener(&self, id: ListenerId) -> bool {
        self.state_listeners.remove(id) || self.error_listeners.remove(id)
    }

    /// Keeps the error, logs it and tells the error listeners.
    pub(crate) fn record_error(&self, error: Error) {
        self.keep_error(error.clone());
        let event = ErrorEvent { identity: self.identity.clone(), error };
        let listeners = self.error_listeners.snapshot();
        // What an error listener does wrong is not told to error listeners: one that always
        // panics would be called for ever.
        drop(self.queue(listeners, event, |me, message| {
            if let Some(core) = me.upgrade() {
                core.keep_error(core.panicked(message));
            }
        }));
    }

    fn keep_error(&self, error: Error) {
        log::warn!("{}: {error}", self.identity);
        let evicted = self.errors.lock().push(error);
        drop(evicted);
    }

    fn record_panic(me: &Weak<RecipeCore>, message: &str) {
        if let Some(core) = me.upgrade() {
            core.record_error(core.panicked(message));
        }
    }

    fn panicked(&self, message: &str) -> Error {
        let text = format!("a listener of {} panicked: {message}", self.identity);
        Error::new(ErrorKind::ListenerPanicked, text)
    }

    pub(crate) fn errors(&self) -> Vec<Error> {
        self.errors.lock().to_vec()
    }

    pub(crate) fn error_count(&self) -> u64 {
        self.errors.lock().total()
    }

    pub(crate) fn clear_errors(&self) {
        let forgotten = std::mem::take(&mut *self.errors.lock());
        drop(forgotten);
    }

    pub(crate) fn add_error_listener(&self, listener: Callback<ErrorEvent>) -> ListenerId {
        self.error_listeners.add(listener)
    }

    /// Queues one job for the healer that calls each of `listeners` in order with `event`. A panic
    /// in one is recorded, and the others still run.
    ///
    /// The listeners are those added by now. Call it with no lock held.
    pub(crate) fn notify<E: Send + 'static>(&self, listeners: &Listeners<E>, event: E) {
        drop(self.queue(listeners.snapshot(), event, RecipeCore::record_panic));
    }

    /// As [`notify`](RecipeCore::notify), for one listener that came late.
    pub(crate) fn notify_one<E: Send + 'static>(&self, listener: &Listener<E>, event: E) {
        drop(self.queue(vec![listener.clone()], event, RecipeCore::record_panic));
    }

    /// Returns the job of a closed healer, to be dropped where no lock is held.
    fn queue<E: Send + 'static>(
        &self,
        listeners: Vec<Listener<E>>,
        event: E,
        on_panic: fn(&Weak<RecipeCore>, &str),
    ) -> Option<Job> {
        if listeners.is_empty() {
            return None;
        }
        let me = self.me.clone();
        self.healer.submit(Box::new(move || {
            for listener in listeners {
                if let Err(message) = healer::guarded(|| listener.call(&event)) {
                    on_panic(&me, &message);
                }
            }
        }))
    }

    /// Cancelled when the recipe is closed: what its blocked calls wait on.
    pub(crate) fn closed(&self) -> &CancelToken {
        &self.closed
    }

    /// # Errors
    ///
    /// `Closed`, naming the recipe, once it is.
    pub(crate) fn check_open(&self) -> Result<()> {
        if self.closed.is_cancelled() { Err(Error::closed(&self.identity)) } else { Ok(()) }
    }

    /// Has `end`, library code, run by the close, after the last event.
    pub(crate) fn at_end(&self, end: impl FnOnce() + Send + 'static) {
        self.ends.lock().push(Box::new(end));
    }

    /// Wakes blocked calls, ends the connection events and lets the healer finish what is queued.
    /// Final events have to be published before. `false`: a listener was still running after
    /// `limit`.
    pub(crate) fn close(&self, limit: Duration) -> bool {
        self.closed.cancel();
        self.state_events.close();
        let ends = std::mem::take(&mut *self.ends.lock());
        for end in ends {
            end();
        }
        self.healer.close(limit)
    }
}

impl fmt::Debug for RecipeCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecipeCore")
            .field("identity", &self.identity)
            .field("state", &self.state())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;

    use crossbeam_channel::{Sender, bounded, unbounded};

    use super::super::{HasCore, Recipe};
    use super::ConnectionState::{Connected, Lost, Reconnected, Suspended};
    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);

    struct Sample(Arc<RecipeCore>);

    impl HasCore for Sample {
        fn core(&self) -> &RecipeCore {
            &self.0
        }
    }

    impl Recipe for Sample {
        fn ping(&self) -> bool {
            false
        }

        fn close(&self) -> Result<()> {
            if self.0.close(LIMIT) { Ok(()) } else { Err(Error::internal("a listener runs on")) }
        }
    }

    fn sample() -> Sample {
        Sample(RecipeCore::new("Sample", "/a/path".to_owned(), "me".to_owned()))
    }

    fn sending(sender: &Sender<ConnectionState>) -> impl Fn(&ConnectionState) + use<> {
        let sender = sender.clone();
        move |state| sender.send(*state).unwrap()
    }

    #[test]
    fn a_recipe_says_who_it_is() {
        let recipe = sample();
        assert_eq!(recipe.core().identity(), "Sample[/a/path]");
        assert_eq!((recipe.path(), recipe.client_id()), ("/a/path", "me"));
        assert!(recipe.is_healthy() && !recipe.ping());
    }

    #[test]
    fn listeners_and_subscriptions_hear_the_same_states() {
        let recipe = sample();
        let (sender, heard) = unbounded();
        recipe.add_connection_state_listener(sending(&sender));
        let states = recipe.connection_events();
        for signal in [Signal::Restored, Signal::Suspended, Signal::Suspended, Signal::Lost] {
            recipe.core().signal(signal);
        }
        assert!(!recipe.is_healthy());
        recipe.core().signal(Signal::Restored);
        assert_eq!(recipe.connection_state(), Reconnected);
        recipe.close().unwrap();
        assert_eq!(states.iter().collect::<Vec<_>>(), [Suspended, Lost, Reconnected]);
        assert_eq!(
            heard.try_iter().collect::<Vec<_>>(),
            [Connected, Suspended, Lost, Reconnected],
            "a listener hears of the present state first"
        );
    }

    #[test]
    fn a_late_listener_hears_of_the_current_state_first() {
        let recipe = sample();
        let (sender, heard) = unbounded();
        recipe.core().signal(Signal::Suspended);
        recipe.add_connection_state_listener(sending(&sender));
        recipe.core().signal(Signal::Lost);
        recipe.close().unwrap();
        assert_eq!(heard.try_iter().collect::<Vec<_>>(), [Suspended, Lost]);
    }

    #[test]
    fn listeners_added_amid_changes_miss_and_repeat_nothing() {
        for _ in 0..50 {
            let recipe = sample();
            let (sender, heard) = unbounded();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    for signal in [Signal::Suspended, Signal::Restored, Signal::Lost] {
                        recipe.core().signal(signal);
                    }
                });
                recipe.add_connection_state_listener(sending(&sender));
            });
            recipe.close().unwrap();
            let heard: Vec<_> = heard.try_iter().collect();
            assert!([Connected, Suspended, Reconnected, Lost].ends_with(&heard), "{heard:?}");
            assert!(!heard.is_empty());
        }
    }

    #[test]
    fn a_panic_in_one_listener_is_recorded_and_the_others_run() {
        let recipe = sample();
        let (sender, heard) = unbounded();
        let (tell, told) = unbounded();
        recipe.add_connection_state_listener(|state| {
            if *state == Suspended {
                panic!("boom");
            }
        });
        recipe.add_connection_state_listener(sending(&sender));
        recipe.add_error_listener(move |event| tell.send(event.clone()).unwrap());
        recipe.core().signal(Signal::Suspended);
        assert_eq!(heard.recv_timeout(LIMIT), Ok(Connected));
        assert_eq!(heard.recv_timeout(LIMIT), Ok(Suspended));
        let event = told.recv_timeout(LIMIT).unwrap();
        assert_eq!(event.identity, "Sample[/a/path]");
        assert_eq!(event.error.kind(), ErrorKind::ListenerPanicked);
        assert_eq!(event.error.to_string(), "a listener of Sample[/a/path] panicked: boom");
        assert_eq!((recipe.errors().len(), recipe.error_count()), (1, 1));
        recipe.clear_errors();
        assert_eq!((recipe.errors().len(), recipe.error_count()), (0, 0));
        recipe.close().unwrap();
    }

    #[test]
    fn an_error_listener_that_panics_is_not_told_of_it() {
        let recipe = sample();
        recipe.add_error_listener(|_| panic!("again"));
        recipe.core().record_error(Error::internal("first"));
        recipe.close().unwrap();
        let kinds: Vec<_> = recipe.errors().iter().map(Error::kind).collect();
        assert_eq!(kinds, [ErrorKind::Internal, ErrorKind::ListenerPanicked]);
    }

    #[test]
    fn a_job_that_panics_is_recorded() {
        let recipe = sample();
        assert!(recipe.core().healer().submit(Box::new(|| panic!("hook"))).is_none());
        recipe.close().unwrap();
        assert_eq!(recipe.errors()[0].kind(), ErrorKind::ListenerPanicked);
    }

    #[test]
    fn a_listener_may_add_remove_and_close() {
        let recipe = Arc::new(sample());
        let own_id = Arc::new(OnceLock::new());
        let (sender, heard) = unbounded();
        let (done, is_done) = bounded(1);
        let id = recipe.add_connection_state_listener({
            let (recipe, own_id) = (recipe.clone(), own_id.clone());
            move |_| {
                assert!(recipe.remove_connection_state_listener(*own_id.wait()));
                recipe.add_connection_state_listener(sending(&sender));
                recipe.core().signal(Signal::Lost);
                recipe.close().unwrap();
                recipe.core().signal(Signal::Restored);
                done.send(()).unwrap();
            }
        });
        own_id.set(id).unwrap();
        recipe.core().signal(Signal::Suspended);
        is_done.recv_timeout(LIMIT).unwrap();
        recipe.close().unwrap();
        // The current state on being added, and the change before the close.
        assert_eq!(heard.try_iter().collect::<Vec<_>>(), [Suspended, Lost]);
        assert!(!recipe.remove_connection_state_listener(id));
    }

    #[test]
    fn notify_calls_in_order_and_a_removed_listener_not_at_all() {
        let recipe = sample();
        let listeners: Listeners<u32> = Listeners::new();
        let seen: Arc<Mutex<Vec<u32>>> = Arc::default();
        let adding = |factor: u32| -> Callback<u32> {
            let seen = seen.clone();
            Arc::new(move |event| seen.lock().push(event * factor))
        };
        let (started, has_started) = bounded(1);
        let (go, may_go) = bounded::<()>(0);
        listeners.add(Arc::new(move |event| {
            if *event == 1 {
                started.send(()).unwrap();
                let _ = may_go.recv();
            }
        }));
        let removed = listeners.add(adding(100));
        listeners.add(adding(10));
        recipe.core().notify(&listeners, 1);
        recipe.core().notify(&listeners, 2);
        has_started.recv_timeout(LIMIT).unwrap();
        assert!(listeners.remove(removed));
        drop(go);
        recipe.close().unwrap();
        assert_eq!(*seen.lock(), [10, 20]);
    }

    #[test]
    fn closing_wakes_waiting_calls_and_is_idempotent() {
        let recipe = sample();
        assert!(recipe.core().check_open().is_ok());
        let waiter = std::thread::spawn({
            let closed = recipe.core().closed().clone();
            move || closed.wait()
        });
        recipe.close().unwrap();
        recipe.close().unwrap();
        assert!(waiter.join().unwrap().is_ok());
        assert!(!recipe.is_healthy());
        let error = recipe.core().check_open().unwrap_err();
        assert!(error.is_closed() && error.to_string().contains("Sample[/a/path]"));
        assert!(recipe.connection_events().recv().is_err());
    }

    #[test]
    fn a_listener_is_dropped_with_the_recipe() {
        let recipe = sample();
        let held = Arc::new(());
        let captured = held.clone();
        recipe.add_connection_state_listener(move |_| {
            let _ = &captured;
        });
        let core = Arc::downgrade(&recipe.0);
        recipe.close().unwrap();
        drop(recipe);
        assert_eq!((core.strong_count(), Arc::strong_count(&held)), (0, 1));
    }
}
