//! The listeners of one kind of event.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

/// Names a listener that was added, so that it can be removed; unique in the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ListenerId(u64);

impl ListenerId {
    fn next() -> ListenerId {
        static LAST: AtomicU64 = AtomicU64::new(0);
        ListenerId(LAST.fetch_add(1, Ordering::Relaxed) + 1)
    }
}

/// What a user gave to be called with each event.
pub(crate) type Callback<E> = Arc<dyn Fn(&E) + Send + Sync>;

pub(crate) struct Listeners<E> {
    list: Mutex<Vec<Listener<E>>>,
}

/// A listener as it stood when an event happened.
pub(crate) struct Listener<E> {
    id: ListenerId,
    removed: Arc<AtomicBool>,
    callback: Callback<E>,
}

impl<E> Clone for Listener<E> {
    fn clone(&self) -> Self {
        Listener { id: self.id, removed: self.removed.clone(), callback: self.callback.clone() }
    }
}

impl<E> Listener<E> {
    pub(crate) fn id(&self) -> ListenerId {
        self.id
    }

    /// Runs the user's code, unless it was removed meanwhile. Call it with no lock held.
    pub(crate) fn call(&self, event: &E) {
        if !self.removed.load(Ordering::Acquire) {
            (self.callback)(event);
        }
    }
}

impl<E> Default for Listeners<E> {
    fn default() -> Self {
        Listeners { list: Mutex::new(Vec::new()) }
    }
}

impl<E> Listeners<E> {
    pub(crate) fn new() -> Listeners<E> {
        Listeners::default()
    }

    pub(crate) fn add(&self, callback: Callback<E>) -> ListenerId {
        self.add_listener(callback).id()
    }

    /// As [`add`](Self::add), for a listener that is to hear of something at once.
    pub(crate) fn add_listener(&self, callback: Callback<E>) -> Listener<E> {
        let listener = Listener { id: ListenerId::next(), removed: Arc::default(), callback };
        self.list.lock().push(listener.clone());
        listener
    }

    /// Whether there was such a listener. No new call of it starts after this has returned, queued
    /// events included; one already running may be finishing.
    pub(crate) fn remove(&self, id: ListenerId) -> bool {
        let removed = {
            let mut list = self.list.lock();
            let index = list.iter().position(|listener| listener.id == id);
            index.map(|index| list.remove(index))
        };
        match removed {
            Some(listener) => {
                listener.removed.store(true, Ordering::Release);
                true
            }
            None => false,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.list.lock().is_empty()
    }

    /// The listeners that hear of an event that happens now, in the order they were added.
    pub(crate) fn snapshot(&self) -> Vec<Listener<E>> {
        self.list.lock().clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn collecting(seen: &Arc<Mutex<Vec<u32>>>) -> Callback<u32> {
        let seen = seen.clone();
        Arc::new(move |event| seen.lock().push(*event))
    }

    #[test]
    fn listeners_are_called_in_order_until_removed() {
        let (seen, listeners) = (Arc::default(), Listeners::new());
        let first = listeners.add(collecting(&seen));
        let double = seen.clone();
        let second = listeners.add(Arc::new(move |event| double.lock().push(event * 10)));
        assert_ne!(first, second);
        let tell = |event| listeners.snapshot().iter().for_each(|l| l.call(&event));
        tell(1);
        assert!(listeners.remove(first));
        assert!(!listeners.remove(first));
        tell(2);
        assert_eq!(*seen.lock(), [1, 10, 20]);
    }

    #[test]
    fn a_removed_listener_is_not_called_from_an_older_snapshot() {
        let (seen, listeners) = (Arc::default(), Listeners::new());
        let id = listeners.add(collecting(&seen));
        let snapshot = listeners.snapshot();
        assert!(listeners.remove(id));
        snapshot[0].call(&1);
        assert!(seen.lock().is_empty());
    }

    #[test]
    fn a_listener_may_add_and_remove() {
        let listeners = Arc::new(Listeners::new());
        let inner = listeners.clone();
        listeners.add(Arc::new(move |_: &u32| {
            let id = inner.add(Arc::new(|_| ()));
            assert!(inner.remove(id));
            inner.add(Arc::new(|_| ()));
        }));
        listeners.snapshot()[0].call(&1);
        assert_eq!(listeners.snapshot().len(), 2);
    }
}
