//! A path's queue as one revision of etcd shows it: pure.
//!
//! The mirror is a snapshot plus the events after it, always at one known revision. Whose turn it
//! is follows from it alone: a contender's own key being the lowest at *some* revision is just
//! what a further read would say. Contenders are told apart by key *and* create revision, so that
//! a key that was deleted and made again is somebody else.

use std::collections::{BTreeMap, HashMap};

use crate::watch::{Entry, Event, EventKind};

/// Where a contender stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Turn {
    /// The mirror is older than the contender's key.
    TooEarly,
    /// Lowest: the hold is its.
    First,
    /// Somebody is ahead.
    Behind,
    /// Whoever is next ahead has no lease, so its key would stay for ever.
    Blocked { key: Vec<u8>, fresh: bool },
    /// The contender's key is gone.
    Vanished,
}

/// Whether `key` is a direct child of `prefix`: what follows has no `/`. Deeper keys belong to
/// other recipes and do not count.
pub(crate) fn is_child(prefix: &[u8], key: &[u8]) -> bool {
    key.strip_prefix(prefix).is_some_and(|rest| !rest.contains(&b'/'))
}

#[derive(Debug)]
pub(crate) struct Mirror {
    prefix: Vec<u8>,
    revision: i64,
    queue: BTreeMap<(i64, Vec<u8>), Entry>,
    created: HashMap<Vec<u8>, i64>,
}

impl Mirror {
    pub(crate) fn new(prefix: Vec<u8>) -> Mirror {
        Mirror { prefix, revision: 0, queue: BTreeMap::new(), created: HashMap::new() }
    }

    #[cfg(test)]
    pub(crate) fn revision(&self) -> i64 {
        self.revision
    }

    /// The queue, first to last.
    pub(crate) fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.queue.values()
    }

    /// Replaces everything by a full read at `revision`; an older read than the mirror changes
    /// nothing, unless the store itself went back.
    pub(crate) fn reset(&mut self, revision: i64, entries: Vec<Entry>, store_went_back: bool) {
        if revision < self.revision && !store_went_back {
            return;
        }
        self.queue.clear();
        self.created.clear();
        self.revision = revision;
        for entry in entries {
            self.put(entry);
        }
    }

    /// Takes in the changes of whole revisions up to `revision`. What is already known is passed
    /// over, since reads and the watch overlap.
    pub(crate) fn apply(&mut self, revision: i64, events: Vec<Event>) {
        let known = self.revision;
        for event in events.into_iter().filter(|event| event.mod_revision > known) {
            match event.kind {
                EventKind::Put => self.put(Entry {
                    key: event.key,
                    value: event.value,
                    create_revision: event.create_revision,
                    mod_revision: event.mod_revision,
                    version: event.version,
                    lease: event.lease,
                }),
                EventKind::Delete => self.remove(&event.key),
            }
        }
        self.revision = self.revision.max(revision);
    }

    fn put(&mut self, entry: Entry) {
        if !is_child(&self.prefix, &entry.key) {
            return;
        }
        self.remove(&entry.key);
        self.created.insert(entry.key.clone(), entry.create_revision);
        self.queue.insert((entry.create_revision, entry.key.clone()), entry);
    }

    fn remove(&mut self, key: &[u8]) {
        if let Some(create_revision) = self.created.remove(key) {
            self.queue.remove(&(create_revision, key.to_vec()));
        }
    }

    /// Where the contender with this key, created at this revision, stands.
    pub(crate) fn turn(&self, key: &[u8], create_revision: i64) -> Turn {
        if self.revision < create_revision {
            return Turn::TooEarly;
        }
        if self.created.get(key) != Some(&create_revision) {
            return Turn::Vanished;
        }
        let me = (create_revision, key.to_vec());
        match self.queue.range(..&me).next_back() {
            None => Turn::First,
            Some((_, ahead)) if ahead.lease == 0 => Turn::Blocked {
                key: ahead.key.clone(),
                // A contender's key that a stranger wrote over lost its lease too; its owner
                // will notice and take it away, so that one is given time.
                fresh: ahead.mod_revision == ahead.create_revision,
            },
            Some(_) => Turn::Behind,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entry(key: &str, created: i64, lease: i64) -> Entry {
        Entry {
            key: key.into(),
            create_revision: created,
            mod_revision: created,
            version: 1,
            lease,
            value: Vec::new(),
        }
    }

    fn put(entry: Entry) -> Event {
        Event {
            kind: EventKind::Put,
            key: entry.key,
            value: entry.value,
            create_revision: entry.create_revision,
            mod_revision: entry.mod_revision,
            version: entry.version,
            lease: entry.lease,
            prev: None,
        }
    }

    fn deleted(key: impl Into<Vec<u8>>, mod_revision: i64) -> Event {
        Event {
            kind: EventKind::Delete,
            key: key.into(),
            value: Vec::new(),
            create_revision: 0,
            mod_revision,
            version: 0,
            lease: 0,
            prev: None,
        }
    }

    fn mirror() -> Mirror {
        let mut mirror = Mirror::new(b"/p/".to_vec());
        mirror.reset(10, vec![entry("/p/a", 5, 1), entry("/p/b", 8, 1)], false);
        mirror
    }

    #[test]
    fn the_lowest_create_revision_has_its_turn() {
        let mut mirror = mirror();
        assert_eq!(mirror.turn(b"/p/a", 5), Turn::First);
        assert_eq!(mirror.turn(b"/p/b", 8), Turn::Behind);
        assert_eq!(mirror.turn(b"/p/c", 11), Turn::TooEarly);
        mirror.apply(11, vec![deleted("/p/a", 11)]);
        assert_eq!(mirror.turn(b"/p/b", 8), Turn::First);
        assert_eq!(mirror.turn(b"/p/a", 5), Turn::Vanished);
    }

    #[test]
    fn a_key_made_again_is_somebody_else() {
        let mut mirror = mirror();
        mirror.apply(12, vec![deleted("/p/a", 11), put(entry("/p/a", 12, 1))]);
        assert_eq!(mirror.turn(b"/p/a", 5), Turn::Vanished);
        assert_eq!(mirror.turn(b"/p/a", 12), Turn::Behind);
    }

    #[test]
    fn deeper_keys_do_not_count_and_leaseless_ones_are_named() {
        let mut mirror = mirror();
        mirror.reset(
            20,
            vec![entry("/p/x/y", 1, 1), entry("/p/a", 5, 0), entry("/p/b", 8, 1)],
            false,
        );
        assert_eq!(mirror.turn(b"/p/b", 8), Turn::Blocked { key: b"/p/a".to_vec(), fresh: true });
        let mut written_over = entry("/p/a", 5, 0);
        written_over.mod_revision = 21;
        mirror.apply(21, vec![put(written_over)]);
        assert_eq!(mirror.turn(b"/p/b", 8), Turn::Blocked { key: b"/p/a".to_vec(), fresh: false });
        assert!(
            is_child(b"/a/", b"/a/b") && !is_child(b"/a/", b"/ab") && !is_child(b"/a/", b"/a/b/c")
        );
    }

    #[test]
    fn an_older_read_changes_nothing_unless_the_store_went_back() {
        let mut mirror = mirror();
        mirror.reset(9, Vec::new(), false);
        assert_eq!(mirror.turn(b"/p/a", 5), Turn::First);
        mirror.reset(2, Vec::new(), true);
        assert_eq!(mirror.revision(), 2);
        assert_eq!(mirror.entries().count(), 0);
    }

    proptest! {
        /// Reads and events overlap in any way; the mirror equals the store at its revision.
        #[test]
        fn a_mirror_fed_by_reads_and_events_equals_the_store(
            script in prop::collection::vec((0_u8..6, any::<bool>(), 0_usize..4), 1..80),
        ) {
            let mut store: Vec<Entry> = Vec::new();
            let mut history: Vec<(i64, Event)> = Vec::new();
            let mut revision = 1;
            let mut mirror = Mirror::new(b"/p/".to_vec());
            mirror.reset(1, Vec::new(), false);
            let mut watched = 1_usize;
            for (key, delete, feed) in script {
                revision += 1;
                let key = format!("/p/{key}").into_bytes();
                let at = store.iter().position(|entry| entry.key == key);
                match (delete, at) {
                    (true, Some(at)) => {
                        store.remove(at);
                        history.push((revision, deleted(key, revision)));
                    }
                    (true, None) => {
                        // Nothing to delete: another part of the store moves on.
                    }
                    (false, at) => {
                        let created = at.map_or(revision, |at| store.remove(at).create_revision);
                        let written = Entry {
                            key, create_revision: created, mod_revision: revision, version: 1,
                            lease: 7, value: Vec::new(),
                        };
                        store.push(written.clone());
                        history.push((revision, put(written)));
                    }
                }
                match feed {
                    // A full read, possibly ahead of the watch.
                    0 => mirror.reset(revision, store.clone(), false),
                    // The watch delivers what is outstanding, some of it read before.
                    1 | 2 => {
                        let news = history.iter().filter(|(at, _)| *at as usize > watched);
                        mirror.apply(revision, news.map(|(_, event)| event.clone()).collect());
                        watched = revision as usize;
                    }
                    _ => {}
                }
                if mirror.revision() == revision {
                    let mut expected: Vec<_> = store.clone();
                    expected.sort_by_key(|entry| entry.create_revision);
                    let got: Vec<_> = mirror.entries().cloned().collect();
                    prop_assert_eq!(got, expected.clone());
                    for (position, entry) in expected.iter().enumerate() {
                        let turn = mirror.turn(&entry.key, entry.create_revision);
                        prop_assert_eq!(turn == Turn::First, position == 0);
                    }
                }
            }
        }
    }
}
