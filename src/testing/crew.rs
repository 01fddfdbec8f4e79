//! Threads that are counted, so that a drop can wait for all of them with a bound.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::error::Result;
use crate::testing::failed_by;

#[derive(Debug, Clone, Default)]
pub(super) struct Crew {
    shared: Arc<(Mutex<usize>, Condvar)>,
}

struct Leaves(Crew);

impl Drop for Leaves {
    fn drop(&mut self) {
        *self.0.shared.0.lock() -= 1;
        self.0.shared.1.notify_all();
    }
}

impl Crew {
    pub(super) fn spawn(&self, name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
        *self.shared.0.lock() += 1;
        let leaves = Leaves(self.clone());
        std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                let _leaves = leaves;
                work();
            })
            .map(drop)
            .map_err(|error| failed_by(format!("cannot start the thread {name}"), error))
    }

    /// Waits until every thread has ended; false when `limit` passed first.
    pub(super) fn wait(&self, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        let mut left = self.shared.0.lock();
        while *left > 0 {
            if self.shared.1.wait_until(&mut left, end).timed_out() {
                return *left == 0;
            }
        }
        true
    }
}
