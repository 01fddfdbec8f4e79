//! Does something with each hold that reaches a certain age: the watch on its own key for those
//! that last longer than a moment, the end for those that outlive their limit.
//!
//! A short hold pays nothing for it. Holds stand in line by age, and one task moves those that
//! have lasted out of the line.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use super::hold::Hold;
use crate::client::core::Core;
use crate::clock::{Clock, Instant};

/// A hold older than this is watched, and can be asked for. So is a wait.
pub(crate) const LASTING: Duration = Duration::from_secs(1);

/// A line of holds that wait for one age.
pub(crate) struct Ages {
    age: Duration,
    then: fn(&Arc<Hold>),
    clock: Clock,
    line: Mutex<Line>,
}

#[derive(Default)]
struct Line {
    young: VecDeque<Weak<Hold>>,
    running: bool,
}

impl Ages {
    pub(super) fn new(age: Duration, then: fn(&Arc<Hold>), clock: &Clock) -> Arc<Ages> {
        Arc::new(Ages { age, then, clock: clock.clone(), line: Mutex::default() })
    }

    /// The line of those that are to be watched once they have lasted.
    pub(crate) fn lasting(clock: &Clock) -> Arc<Ages> {
        Ages::new(LASTING, Hold::has_lasted, clock)
    }

    pub(super) fn add(self: &Arc<Ages>, hold: &Arc<Hold>, core: &Core) {
        let start = {
            let mut line = self.line.lock();
            // Amortised: those that nobody has any more leave when the line is about to grow.
            if line.young.len() == line.young.capacity() {
                line.young.retain(|hold| hold.strong_count() > 0);
            }
            line.young.push_back(Arc::downgrade(hold));
            !std::mem::replace(&mut line.running, true)
        };
        if start {
            core.runtime.spawn(self.clone().run());
        }
    }

    async fn run(self: Arc<Ages>) {
        loop {
            let now = self.clock.now();
            let (due, next) = self.due(now);
            // Those that ended meanwhile are dropped here too, outside of the lock.
            for hold in due.into_iter().filter(|hold| hold.stands()) {
                (self.then)(&hold);
            }
            match next {
                Some(next) => self.clock.sleep_until(next).await,
                None => return,
            }
        }
    }

    /// Takes those out of the line that have the age, and says when the next one will have it;
    /// `None` if nobody is left, which ends the task.
    fn due(&self, now: Instant) -> (Vec<Arc<Hold>>, Option<Instant>) {
        let mut due = Vec::new();
        let mut line = self.line.lock();
        // The oldest is in front, so the look ends at the first that is still young.
        while let Some(front) = line.young.front() {
            if let Some(hold) = front.upgrade() {
                let when = hold.acquired + self.age;
                if now < when && hold.stands() {
                    return (due, Some(when));
                }
                due.push(hold);
            }
            line.young.pop_front();
        }
        line.running = false;
        (due, None)
    }
}
