//! A bounded queue between a watch and a consumer on another thread.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;

use super::{Event, Flow, Sink, Snapshot};
use crate::error::Error;
use crate::wait::Parker;

/// Deliveries (the events of one answer of etcd, or one snapshot) that wait at most.
const CAPACITY: usize = 1_024;

/// What a consumer takes from a [`QueueSink`], in the order in which it happened.
#[derive(Debug)]
pub(crate) enum Item {
    Events(Vec<Event>),
    /// What came before may be incomplete; this is the whole range.
    Resync(Snapshot),
    Suspended(Error),
    Resumed,
    /// Nothing follows.
    Failed(Error),
}

/// A sink for a consumer that takes items at its own pace.
///
/// A consumer that falls 1,024 deliveries behind loses what waits, and gets the range as it then
/// is in its place.
pub(crate) struct QueueSink {
    capacity: usize,
    queue: Mutex<Queue>,
    parker: Arc<Parker>,
}

#[derive(Default)]
struct Queue {
    items: VecDeque<Item>,
    /// Items among them that count against the capacity.
    deliveries: usize,
    /// Events were dropped; until the snapshot comes there is no use for more.
    overflowed: bool,
}

impl QueueSink {
    /// `parker` is notified of every item.
    pub(crate) fn new(parker: Arc<Parker>) -> Arc<QueueSink> {
        QueueSink::with_capacity(CAPACITY, parker)
    }

    /// `capacity` counts deliveries, at least 1.
    pub(crate) fn with_capacity(capacity: usize, parker: Arc<Parker>) -> Arc<QueueSink> {
        Arc::new(QueueSink { capacity: capacity.max(1), queue: Mutex::default(), parker })
    }

    /// The next item, for the closure of a [`wait`](crate::wait::wait) on [`parker`](Self::parker).
    pub(crate) fn poll(&self) -> Option<Item> {
        let mut queue = self.queue.lock();
        let item = queue.items.pop_front()?;
        if matches!(item, Item::Events(_) | Item::Resync(_)) {
            queue.deliveries -= 1;
        }
        Some(item)
    }

    pub(crate) fn parker(&self) -> &Arc<Parker> {
        &self.parker
    }
}

impl Queue {
    fn drop_deliveries(&mut self) {
        self.items.retain(|item| !matches!(item, Item::Events(_) | Item::Resync(_)));
        self.deliveries = 0;
        // Of the states that remain the consumer needs the last one only.
        let last = self.items.pop_back();
        self.items.clear();
        self.items.extend(last);
    }
}

impl Sink for QueueSink {
    fn deliver(&self, _revision: i64, events: Vec<Event>) -> Flow {
        let mut queue = self.queue.lock();
        if queue.overflowed || queue.deliveries >= self.capacity {
            queue.drop_deliveries();
            queue.overflowed = true;
            return Flow::Resync;
        }
        queue.items.push_back(Item::Events(events));
        queue.deliveries += 1;
        drop(queue);
        self.parker.notify();
        Flow::Continue
    }

    fn resync(&self, snapshot: Snapshot) {
        let mut queue = self.queue.lock();
        if queue.deliveries >= self.capacity {
            queue.drop_deliveries();
        }
        queue.overflowed = false;
        queue.items.push_back(Item::Resync(snapshot));
        queue.deliveries += 1;
        drop(queue);
        self.parker.notify();
    }

    fn suspended(&self, cause: &Error) {
        self.queue.lock().items.push_back(Item::Suspended(cause.clone()));
        self.parker.notify();
    }

    fn resumed(&self) {
        let mut queue = self.queue.lock();
        // A suspension that is over before anyone saw it is taken back; thus states cannot pile up.
        if matches!(queue.items.back(), Some(Item::Suspended(_))) {
            queue.items.pop_back();
            return;
        }
        queue.items.push_back(Item::Resumed);
        drop(queue);
        self.parker.notify();
    }

    fn failed(&self, error: Error) {
        self.queue.lock().items.push_back(Item::Failed(error));
        self.parker.notify();
    }
}

#[cfg(test)]
mod tests {
    use super::super::EventKind;
    use super::*;
    use crate::error::ErrorKind;

    fn sink(capacity: usize) -> Arc<QueueSink> {
        QueueSink::with_capacity(capacity, Parker::new())
    }

    fn cause() -> Error {
        Error::new(ErrorKind::Unreachable, "away")
    }

    fn snapshot(revision: i64) -> Snapshot {
        Snapshot { revision, entries: Vec::new() }
    }

    fn deliver(sink: &QueueSink, revision: i64) -> Flow {
        let event = Event {
            kind: EventKind::Put,
            key: Vec::new(),
            value: Vec::new(),
            create_revision: revision,
            mod_revision: revision,
            version: 1,
            lease: 0,
            prev: None,
        };
        sink.deliver(revision, vec![event])
    }

    fn shown(sink: &QueueSink) -> Vec<String> {
        std::iter::from_fn(|| sink.poll())
            .map(|item| match item {
                Item::Events(events) => format!("events {}", events[0].mod_revision),
                Item::Resync(snapshot) => format!("resync {}", snapshot.revision),
                Item::Suspended(_) => "suspended".to_owned(),
                Item::Resumed => "resumed".to_owned(),
                Item::Failed(_) => "failed".to_owned(),
            })
            .collect()
    }

    #[test]
    fn items_come_in_order() {
        let sink = sink(10);
        assert_eq!(deliver(&sink, 5), Flow::Continue);
        sink.suspended(&cause());
        sink.resync(snapshot(9));
        sink.resumed();
        assert_eq!(deliver(&sink, 10), Flow::Continue);
        sink.failed(cause());
        assert_eq!(
            shown(&sink),
            ["events 5", "suspended", "resync 9", "resumed", "events 10", "failed"]
        );
    }

    #[test]
    fn an_overflow_drops_what_waits_and_asks_once_for_the_range() {
        let sink = sink(2);
        for revision in [1, 2] {
            assert_eq!(deliver(&sink, revision), Flow::Continue);
        }
        assert_eq!(deliver(&sink, 3), Flow::Resync);
        assert_eq!(deliver(&sink, 4), Flow::Resync, "until the range comes");
        sink.resync(snapshot(9));
        assert_eq!(deliver(&sink, 10), Flow::Continue);
        assert_eq!(shown(&sink), ["resync 9", "events 10"]);
        assert_eq!(deliver(&sink, 11), Flow::Continue);
    }

    #[test]
    fn a_flap_that_nobody_saw_leaves_no_trace() {
        let sink = sink(2);
        for _ in 0..1_000 {
            sink.suspended(&cause());
            sink.resumed();
        }
        assert_eq!(shown(&sink), Vec::<String>::new());
        sink.suspended(&cause());
        assert_eq!(shown(&sink), ["suspended"]);
        sink.resumed();
        assert_eq!(shown(&sink), ["resumed"]);
    }

    #[test]
    fn an_overflow_keeps_the_last_state() {
        let sink = sink(1);
        sink.suspended(&cause());
        assert_eq!(shown(&sink), ["suspended"]);
        assert_eq!(deliver(&sink, 1), Flow::Continue);
        sink.resumed();
        assert_eq!(deliver(&sink, 2), Flow::Resync);
        sink.resync(snapshot(3));
        assert_eq!(shown(&sink), ["resumed", "resync 3"]);
    }
}
