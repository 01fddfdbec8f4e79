//! Where the waits of one recipe stand at present, for those who ask meanwhile.

use std::sync::Arc;

use parking_lot::Mutex;

use super::Contender;

/// The keys with which a recipe waits, each with its create revision.
#[derive(Default)]
pub(crate) struct Places {
    waits: Mutex<Vec<(Vec<u8>, i64)>>,
}

/// One wait; over when dropped.
pub(super) struct Stay {
    contender: Arc<Contender>,
    wait: (Vec<u8>, i64),
}

impl Contender {
    /// From now on this key is one that waits.
    pub(super) fn stay(self: &Arc<Contender>, key: &[u8], create_revision: i64) -> Stay {
        let wait = (key.to_vec(), create_revision);
        self.places.waits.lock().push(wait.clone());
        Stay { contender: self.clone(), wait }
    }

    /// How many are ahead of the foremost wait of this recipe, as far as the watch has told; `None`
    /// while nothing waits.
    pub(crate) fn position(&self) -> Option<usize> {
        let waits = self.places.waits.lock().clone();
        let queue = self.core.queues.find(&self.layout)?;
        waits.iter().filter_map(|(key, created)| queue.position(key, *created)).min()
    }
}

impl Drop for Stay {
    fn drop(&mut self) {
        let mut waits = self.contender.places.waits.lock();
        if let Some(at) = waits.iter().position(|wait| *wait == self.wait) {
            waits.swap_remove(at);
        }
    }
}
