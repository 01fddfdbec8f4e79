//! The waiter's side of a barrier: one read, then a watch from the revision after it.
//!
//! What happens between the read and the watch is in the watch. The lift is decided by a pure
//! machine from what was read and seen.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::clock::{Clock, Instant};
use crate::error::Error;
use crate::wait::Parker;
use crate::watch::{Event, EventKind, Flow, Item, QueueSink, Sink, Snapshot};

/// The barrier as a waiter knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Gate {
    /// Not set, and it has not been since the waiter came.
    NeverSet,
    /// Set by the key that was created at this revision, whoever wrote it.
    Set(i64),
    /// It was set, and then it was not.
    Lifted,
}

impl Gate {
    /// What the first read says.
    pub(super) fn read(create_revision: Option<i64>) -> Gate {
        create_revision.map_or(Gate::NeverSet, Gate::Set)
    }

    pub(super) fn event(self, event: &Event) -> Gate {
        match (self, event.kind) {
            (Gate::Lifted, _) | (Gate::Set(_), EventKind::Delete) => Gate::Lifted,
            // There was a delete in between, seen or not.
            (Gate::Set(before), EventKind::Put) if before != event.create_revision => Gate::Lifted,
            (Gate::NeverSet | Gate::Set(_), EventKind::Put) => Gate::Set(event.create_revision),
            (Gate::NeverSet, EventKind::Delete) => Gate::NeverSet,
        }
    }

    /// The key as it stands after a gap: another key than before means a lift in between.
    pub(super) fn snapshot(self, snapshot: &Snapshot) -> Gate {
        let now = snapshot.entries.first().map(|entry| entry.create_revision);
        match (self, now) {
            (Gate::Lifted, _) | (Gate::Set(_), None) => Gate::Lifted,
            (Gate::Set(before), Some(now)) if before != now => Gate::Lifted,
            (Gate::NeverSet | Gate::Set(_), _) => Gate::read(now),
        }
    }
}

/// A queue that also notes when etcd was last heard.
pub(super) struct Line {
    queue: Arc<QueueSink>,
    clock: Clock,
    heard: Mutex<Instant>,
}

impl Line {
    pub(super) fn new(clock: &Clock) -> Arc<Line> {
        Arc::new(Line {
            queue: QueueSink::new(Parker::new()),
            clock: clock.clone(),
            heard: Mutex::new(clock.now()),
        })
    }

    pub(super) fn poll(&self) -> Option<Item> {
        self.queue.poll()
    }

    pub(super) fn parker(&self) -> &Arc<Parker> {
        self.queue.parker()
    }

    pub(super) fn heard_at(&self) -> Instant {
        *self.heard.lock()
    }
}

impl Sink for Line {
    fn deliver(&self, revision: i64, events: Vec<Event>) -> Flow {
        self.queue.deliver(revision, events)
    }

    fn resync(&self, snapshot: Snapshot) {
        self.heard();
        self.queue.resync(snapshot);
    }

    fn heard(&self) {
        *self.heard.lock() = self.clock.now();
    }

    fn suspended(&self, cause: &Error) {
        self.queue.suspended(cause);
    }

    fn resumed(&self) {
        self.heard();
        self.queue.resumed();
    }

    fn failed(&self, error: Error) {
        self.queue.failed(error);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watch::Entry;

    fn put(create_revision: i64) -> Event {
        Event {
            kind: EventKind::Put,
            key: b"b".to_vec(),
            value: Vec::new(),
            create_revision,
            mod_revision: create_revision,
            version: 1,
            lease: 0,
            prev: None,
        }
    }

    fn delete() -> Event {
        Event { kind: EventKind::Delete, version: 0, ..put(0) }
    }

    fn snapshot(create_revision: Option<i64>) -> Snapshot {
        let entries = create_revision.map(|create_revision| Entry {
            key: b"b".to_vec(),
            value: Vec::new(),
            create_revision,
            mod_revision: create_revision,
            version: 1,
            lease: 0,
        });
        Snapshot { revision: 100, entries: entries.into_iter().collect() }
    }

    #[test]
    fn a_delete_lifts_for_good() {
        let gate = Gate::read(Some(5)).event(&delete());
        assert_eq!(gate, Gate::Lifted);
        assert_eq!(gate.event(&put(9)), Gate::Lifted, "set again is lifted all the same");
        assert_eq!(gate.snapshot(&snapshot(Some(9))), Gate::Lifted);
    }

    #[test]
    fn another_key_tells_of_a_delete_that_was_not_seen() {
        let gate = Gate::read(Some(5));
        assert_eq!(gate.event(&put(5)), Gate::Set(5), "it may be told what it has read");
        assert_eq!(gate.event(&put(6)), Gate::Lifted);
    }

    #[test]
    fn a_barrier_that_was_never_set_has_to_be_set_first() {
        let gate = Gate::read(None);
        assert_eq!(gate.event(&delete()), Gate::NeverSet);
        assert_eq!(gate.snapshot(&snapshot(None)), Gate::NeverSet);
        assert_eq!(gate.event(&put(7)), Gate::Set(7));
        assert_eq!(gate.event(&put(7)).event(&delete()), Gate::Lifted);
    }

    #[test]
    fn after_a_gap_the_same_key_still_stands_and_another_one_tells_of_a_lift() {
        let gate = Gate::read(Some(5));
        assert_eq!(gate.snapshot(&snapshot(Some(5))), Gate::Set(5));
        assert_eq!(gate.snapshot(&snapshot(Some(8))), Gate::Lifted);
        assert_eq!(gate.snapshot(&snapshot(None)), Gate::Lifted);
    }
}
