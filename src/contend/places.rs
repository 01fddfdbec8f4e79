//! Where the waits of one recipe stand at present, for those who ask meanwhile or want to be told.
//!
//! Who listens is noted with the path's queue as long as something waits. So a queue to which
//! nobody listens looks at nobody's place.

use std::sync::Arc;

use parking_lot::Mutex;

use super::Contender;
use super::queue::PathQueue;
use crate::recipe::{Broadcast, Callback, Listener, ListenerId, Subscription};

/// The place of one waiting call, as told by a recipe's progress listeners.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct QueueProgress {
    /// Names the wait: its key's create revision, and the token of the hold that it becomes. A
    /// call that has to queue anew goes on under another.
    pub token: i64,
    /// How many stand ahead of it, those who are inside included.
    pub position: usize,
}

/// The keys with which a recipe waits.
#[derive(Default)]
pub(crate) struct Places {
    waits: Mutex<Vec<Wait>>,
    progress: Broadcast<QueueProgress>,
}

struct Wait {
    key: Vec<u8>,
    create_revision: i64,
    told: Option<usize>,
}

impl Places {
    pub(crate) fn subscribe(&self) -> Subscription<QueueProgress> {
        self.progress.subscribe()
    }

    pub(crate) fn remove_listener(&self, id: ListenerId) -> bool {
        self.progress.remove(id)
    }

    pub(super) fn close(&self) {
        self.progress.close();
    }
}

/// One wait; over when dropped.
pub(super) struct Stay {
    contender: Arc<Contender>,
    key: Vec<u8>,
    create_revision: i64,
}

impl Contender {
    /// From now on this key is one that waits.
    pub(super) fn stay(
        self: &Arc<Contender>,
        queue: &PathQueue,
        key: &[u8],
        create_revision: i64,
    ) -> Stay {
        let key = key.to_vec();
        let wait = Wait { key: key.clone(), create_revision, told: None };
        self.places.waits.lock().push(wait);
        if self.places.progress.is_heard() {
            queue.look_on(self, None);
        }
        Stay { contender: self.clone(), key, create_revision }
    }

    /// How many are ahead of the foremost wait of this recipe, as far as the watch has told; `None`
    /// while nothing waits.
    pub(crate) fn position(&self) -> Option<usize> {
        let queue = self.core.queues.find(&self.layout)?;
        // The queue's lock comes before that of the places.
        let place = |wait: &Wait| (wait.key.clone(), wait.create_revision);
        let waits: Vec<_> = self.places.waits.lock().iter().map(place).collect();
        waits.iter().filter_map(|(key, created)| queue.position(key, *created)).min()
    }

    pub(crate) fn add_progress_listener(
        self: &Arc<Contender>,
        callback: Callback<QueueProgress>,
    ) -> ListenerId {
        let listener = self.places.progress.add(callback);
        if let Some(queue) = self.core.queues.find(&self.layout) {
            queue.look_on(self, Some(&listener));
        }
        listener.id()
    }

    pub(crate) fn progress_events(self: &Arc<Contender>) -> Subscription<QueueProgress> {
        let events = self.places.subscribe();
        if let Some(queue) = self.core.queues.find(&self.layout) {
            queue.look_on(self, None);
        }
        events
    }

    /// Tells of the places that are others than before. `false`: nothing waits, or nobody listens.
    pub(super) fn tell_progress(
        &self,
        newcomer: Option<&Listener<QueueProgress>>,
        position: impl Fn(&[u8], i64) -> Option<usize>,
    ) -> bool {
        let mut waits = self.places.waits.lock();
        if waits.is_empty() || !self.places.progress.is_heard() {
            return false;
        }
        for wait in waits.iter_mut() {
            let token = wait.create_revision;
            let Some(position) = position(&wait.key, token) else { continue };
            let progress = QueueProgress { token, position };
            if wait.told.replace(position) != Some(position) {
                self.places.progress.tell(&self.recipe, progress);
            } else if let Some(newcomer) = newcomer {
                self.recipe.notify_one(newcomer, progress);
            }
        }
        true
    }
}

impl Drop for Stay {
    fn drop(&mut self) {
        let mut waits = self.contender.places.waits.lock();
        let is_this =
            |wait: &Wait| wait.create_revision == self.create_revision && wait.key == self.key;
        if let Some(at) = waits.iter().position(is_this) {
            waits.swap_remove(at);
        }
    }
}
