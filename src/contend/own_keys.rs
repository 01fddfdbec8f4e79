//! Decides which holds get a watch on their own key: those that last longer than a moment.
//!
//! A short hold pays nothing for it. Holds stand in line by age, and one task per client moves
//! those that have lasted out of the line.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use super::hold::Hold;
use crate::client::core::Core;

/// A hold older than this is watched.
const LASTING: Duration = Duration::from_secs(1);

pub(crate) struct OwnKeys {
    line: Mutex<Line>,
    core: Weak<Core>,
}

#[derive(Default)]
struct Line {
    young: VecDeque<Weak<Hold>>,
    running: bool,
}

impl OwnKeys {
    pub(crate) fn new(core: Weak<Core>) -> OwnKeys {
        OwnKeys { line: Mutex::default(), core }
    }

    pub(super) fn add(&self, hold: &Arc<Hold>) {
        let start = {
            let mut line = self.line.lock();
            line.young.push_back(Arc::downgrade(hold));
            !std::mem::replace(&mut line.running, true)
        };
        if start && let Some(core) = self.core.upgrade() {
            core.clone().runtime.spawn(async move { core.own_keys.run(&core).await });
        }
    }

    async fn run(&self, core: &Core) {
        loop {
            let (lasting, next) = {
                let mut line = self.line.lock();
                // The oldest is in front, so the look ends at the first that is still young.
                let mut lasting = Vec::new();
                let now = core.clock.now();
                let next = loop {
                    let Some(front) = line.young.front() else { break None };
                    match front.upgrade() {
                        Some(hold) if hold.is_held() => {
                            if now < hold.acquired + LASTING {
                                break Some(hold.acquired + LASTING);
                            }
                            lasting.push(hold);
                        }
                        _ => {}
                    }
                    line.young.pop_front();
                };
                if next.is_none() {
                    line.running = false;
                }
                (lasting, next)
            };
            for hold in lasting {
                hold.watch_own_key();
            }
            match next {
                Some(next) => core.clock.sleep_until(next).await,
                None => return,
            }
        }
    }
}
