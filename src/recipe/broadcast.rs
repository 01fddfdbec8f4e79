//! One kind of event of a recipe, told to listeners and as a channel alike.

use super::listeners::{Callback, Listener, ListenerId, Listeners};
use super::shared::RecipeCore;
use super::subscription::{Events, Subscription};

pub(crate) struct Broadcast<E> {
    listeners: Listeners<E>,
    events: Events<E>,
}

impl<E> Default for Broadcast<E> {
    fn default() -> Self {
        Broadcast { listeners: Listeners::default(), events: Events::default() }
    }
}

impl<E: Clone + Send + 'static> Broadcast<E> {
    /// Whether anybody would hear of an event.
    pub(crate) fn is_heard(&self) -> bool {
        !self.listeners.is_empty() || self.events.has_readers()
    }

    pub(crate) fn tell(&self, recipe: &RecipeCore, event: E) {
        self.events.publish(event.clone());
        recipe.notify(&self.listeners, event);
    }

    /// As [`tell`](Broadcast::tell), for an event after which none comes: no queue drops it.
    pub(crate) fn tell_final(&self, recipe: &RecipeCore, event: E) {
        self.events.publish_final(event.clone());
        recipe.notify(&self.listeners, event);
    }

    pub(crate) fn add(&self, callback: Callback<E>) -> Listener<E> {
        self.listeners.add_listener(callback)
    }

    pub(crate) fn remove(&self, id: ListenerId) -> bool {
        self.listeners.remove(id)
    }

    pub(crate) fn subscribe(&self) -> Subscription<E> {
        self.events.subscribe()
    }

    pub(crate) fn close(&self) {
        self.events.close();
    }
}
