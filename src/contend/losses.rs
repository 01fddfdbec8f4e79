//! Who hears of a recipe's lost holds, also those who ask late.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::lease::Loss;
use crate::recipe::{Broadcast, ListenerId, RecipeCore, Subscription};

pub(crate) struct Losses {
    recipe: Weak<RecipeCore>,
    told: Broadcast<Loss>,
    /// Losses whose guards are still around. The lock also orders "a listener is added" against
    /// "a loss is told", so that each listener hears of each loss exactly once.
    open: Mutex<Vec<Loss>>,
}

impl Losses {
    pub(crate) fn new(recipe: &Arc<RecipeCore>) -> Losses {
        Losses {
            recipe: Arc::downgrade(recipe),
            told: Broadcast::default(),
            open: Mutex::new(Vec::new()),
        }
    }

    /// Queues the loss to every listener and subscription. `guard_gone` is the hold's; its guard
    /// may have been quicker.
    pub(super) fn tell(&self, loss: Loss, guard_gone: &AtomicBool) {
        let mut open = self.open.lock();
        if !guard_gone.load(Ordering::Acquire) {
            open.push(loss.clone());
        }
        if let Some(recipe) = self.recipe.upgrade() {
            self.told.tell(&recipe, loss);
        }
    }

    /// The guard of a hold has gone: whoever listens from now on need not hear of its loss.
    pub(super) fn forget(&self, token: i64, guard_gone: &AtomicBool) {
        let mut open = self.open.lock();
        guard_gone.store(true, Ordering::Release);
        open.retain(|loss| loss.token != token);
    }

    /// Adds a listener; losses whose guards are still around are told to it at once.
    pub(crate) fn add(&self, callback: Arc<dyn Fn(&Loss) + Send + Sync>) -> ListenerId {
        let open = self.open.lock();
        let listener = self.told.add(callback);
        let id = listener.id();
        if let Some(recipe) = self.recipe.upgrade() {
            for loss in open.iter() {
                recipe.notify_one(&listener, loss.clone());
            }
        }
        id
    }

    pub(crate) fn remove(&self, id: ListenerId) -> bool {
        self.told.remove(id)
    }

    pub(crate) fn subscribe(&self) -> Subscription<Loss> {
        self.told.subscribe()
    }

    pub(super) fn close(&self) {
        self.told.close();
    }
}
