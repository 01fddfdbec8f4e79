//! Where watches are asked for and given up, from any thread.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

use super::group::{Command, Group, NewWatch};
use super::multiplex::WatchKey;
use super::resume::Resume;
use super::{Sink, Spec};
use crate::client::core::Core;

/// The groups with a task, and the way to each task. A task leaves under this lock, so whoever
/// finds it here is heard.
pub(super) type Groups = Mutex<HashMap<&'static str, UnboundedSender<Command>>>;

/// All watches of a client.
pub(crate) struct Hub {
    core: Weak<Core>,
    groups: Arc<Groups>,
    keys: AtomicU64,
}

impl Hub {
    pub(crate) fn new(core: Weak<Core>) -> Hub {
        Hub { core, groups: Arc::default(), keys: AtomicU64::new(0) }
    }

    /// Starts a watch that goes on until it is dropped or has failed. Never blocks and calls
    /// nothing of the sink on this thread.
    ///
    /// On a client that is closed the sink is told so as long as there is an I/O thread; in a
    /// fork's child it is told nothing. Blocked callers hear of both from the client.
    pub(crate) fn watch(&self, spec: Spec, sink: Arc<dyn Sink>) -> Watching {
        let resume = Resume::new(spec.from);
        self.add(spec, resume, sink)
    }

    /// As [`watch`](Hub::watch), served as soon as it stands, at the price of a read (delivered as
    /// a resync) where the store was written to meanwhile.
    pub(crate) fn watch_at_once(&self, spec: Spec, sink: Arc<dyn Sink>) -> Watching {
        let resume = Resume::at_once(spec.from);
        self.add(spec, resume, sink)
    }

    fn add(&self, spec: Spec, resume: Resume, sink: Arc<dyn Sink>) -> Watching {
        let key = self.keys.fetch_add(1, Ordering::Relaxed);
        let wanted = Arc::new(AtomicBool::new(true));
        let mut watching = Watching { key, wanted: wanted.clone(), route: None };
        let Some(core) = self.core.upgrade() else { return watching };
        if core.is_forked() {
            return watching;
        }
        let watch = NewWatch { key, range: spec.range, resume, sink, wanted };
        let mut add = Command::Add(watch);
        let mut groups = self.groups.lock();
        if let Some(commands) = groups.get(spec.group) {
            watching.route = Some((self.core.clone(), commands.clone()));
            match commands.send(add) {
                Ok(()) => return watching,
                // The runtime has stopped, and the task with it.
                Err(refused) => add = refused.0,
            }
        }
        let (commands, inbox) = unbounded_channel();
        watching.route = Some((self.core.clone(), commands.clone()));
        // The receiver is at hand, so this cannot fail.
        let _ = commands.send(add);
        groups.insert(spec.group, commands.clone());
        drop(groups);
        let group = Group::new(core.clone(), spec.group, self.groups.clone(), commands, inbox);
        core.runtime.spawn(group.run());
        watching
    }

    /// How many groups have a task.
    #[cfg(test)]
    pub(super) fn group_count(&self) -> usize {
        self.groups.lock().len()
    }
}

/// A watch that goes on; dropping it ends it. A call to its sink that has begun may still be
/// finishing then, but no other starts.
#[must_use = "a watch ends when this is dropped"]
pub(crate) struct Watching {
    key: WatchKey,
    wanted: Arc<AtomicBool>,
    route: Option<(Weak<Core>, UnboundedSender<Command>)>,
}

impl fmt::Debug for Watching {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watching").field("key", &self.key).finish_non_exhaustive()
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        self.wanted.store(false, Ordering::Release);
        if let Some((core, commands)) = &self.route
            && core.upgrade().is_some_and(|core| !core.is_forked())
        {
            // An error means that the task has ended.
            let _ = commands.send(Command::Remove(self.key));
        }
    }
}
