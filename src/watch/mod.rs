//! Watches that go on: broken streams are reopened, gaps are bridged by a read of the range.
//!
//! A watch is a range, the first revision wanted and a [`Sink`]. The sink gets every revision
//! exactly once and in order, or a snapshot that covers the revisions it cannot get any more.
//! Watches of one client and group share one stream, and one task on the client's runtime drives
//! it. What one watch does with each answer is decided by the pure [`Resume`](resume::Resume).

mod driver;
mod group;
mod hub;
mod multiplex;
mod queue;
mod reading;
mod resume;
mod stream;
#[cfg(test)]
#[cfg(all(unix, feature = "testing"))]
mod tests;

use crate::error::Error;

pub(crate) use hub::{Hub, Watching};
pub(crate) use queue::{Item, QueueSink};

/// A key as etcd stores it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) key: Vec<u8>,
    pub(crate) value: Vec<u8>,
    pub(crate) create_revision: i64,
    pub(crate) mod_revision: i64,
    pub(crate) version: i64,
    pub(crate) lease: i64,
}

impl From<&etcd_client::KeyValue> for Entry {
    fn from(kv: &etcd_client::KeyValue) -> Entry {
        Entry {
            key: kv.key().to_vec(),
            value: kv.value().to_vec(),
            create_revision: kv.create_revision(),
            mod_revision: kv.mod_revision(),
            version: kv.version(),
            lease: kv.lease(),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EventKind {
    Put,
    Delete,
}

/// One change of one key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Event {
    pub(crate) kind: EventKind,
    pub(crate) key: Vec<u8>,
    pub(crate) value: Vec<u8>,
    /// Of the key put or deleted. For a delete it comes from `prev`, and is 0 without one.
    pub(crate) create_revision: i64,
    pub(crate) mod_revision: i64,
    pub(crate) version: i64,
    pub(crate) lease: i64,
    /// What stood there before; absent also when etcd has compacted it.
    pub(crate) prev: Option<Entry>,
}

impl Event {
    fn from_etcd(event: &etcd_client::Event) -> Option<Event> {
        let kv = event.kv()?;
        let prev = event.prev_kv().map(Entry::from);
        // Told apart by the version, which a deleted key has lost: asking etcd-client for the kind
        // panics on one it does not know.
        let kind = if kv.version() == 0 { EventKind::Delete } else { EventKind::Put };
        let create_revision = match kind {
            EventKind::Put => kv.create_revision(),
            EventKind::Delete => prev.as_ref().map_or(0, |prev| prev.create_revision),
        };
        Some(Event {
            kind,
            key: kv.key().to_vec(),
            value: kv.value().to_vec(),
            create_revision,
            mod_revision: kv.mod_revision(),
            version: kv.version(),
            lease: kv.lease(),
            prev,
        })
    }
}

/// A linearizable read of a watch's whole range.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Snapshot {
    /// The revision of the store that was read; events go on after it.
    pub(crate) revision: i64,
    /// In the order of their keys.
    pub(crate) entries: Vec<Entry>,
}

/// Whether a sink could take what it was given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub(crate) enum Flow {
    Continue,
    /// It could not: events were dropped and the range has to be read again.
    Resync,
}

/// Where a watch delivers to.
///
/// All methods are called on the I/O thread, one at a time for one watch, and must not block.
pub(crate) trait Sink: Send + Sync {
    /// All events of one or more whole revisions up to `revision`, in order, each exactly once.
    fn deliver(&self, revision: i64, events: Vec<Event>) -> Flow;

    /// The gap could not be bridged (compaction, lost data, overflow): the whole range as of
    /// `snapshot.revision`, which may be lower than what was delivered if etcd lost data.
    fn resync(&self, snapshot: Snapshot);

    /// Something about this watch was answered, be it events or only that it is still there.
    fn heard(&self) {}

    /// A watch that was wanted at once stands, and no write has come before it: from now on etcd
    /// serves it without delay.
    fn in_step(&self) {}

    /// The stream is broken, silent or cannot be opened; it is being mended.
    fn suspended(&self, _cause: &Error) {}

    /// Watching again. A resync that turns out to be needed may follow.
    fn resumed(&self) {}

    /// Given up for good: not permitted, wrong cluster, the retry policy said stop, client closed.
    fn failed(&self, error: Error);
}

/// The keys watched, as etcd knows them (with the client's namespace).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Range {
    Key(Vec<u8>),
    Prefix(Vec<u8>),
}

impl Range {
    fn key(&self) -> &[u8] {
        match self {
            Range::Key(key) | Range::Prefix(key) => key,
        }
    }

    fn is_prefix(&self) -> bool {
        matches!(self, Range::Prefix(_))
    }
}

/// What to watch.
#[derive(Debug, Clone)]
pub(crate) struct Spec {
    pub(crate) range: Range,
    /// The first revision wanted, at least 1: one more than that of the read it continues.
    pub(crate) from: i64,
    /// Watches of one group share a stream.
    pub(crate) group: &'static str,
}
