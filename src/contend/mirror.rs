//! A path's queue as one revision of etcd shows it: pure.
//!
//! The mirror is a snapshot plus the events after it, always at one known revision. Whose turn it
//! is follows from it alone: a contender's own key being let in at *some* revision is just what a
//! further read would say. Contenders are told apart by key *and* create revision, so that a key
//! that was deleted and made again is somebody else.

use std::collections::{BTreeMap, HashMap};

use super::layout::{Layout, Rule, Standing, admitted, decode_count};
use crate::watch::{Entry, Event, EventKind};

/// Where a contender stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Turn {
    /// The mirror is older than the contender's key.
    TooEarly,
    /// The hold is its.
    Inside,
    /// Somebody is ahead.
    Behind,
    /// Whoever is in the way has no lease, so its key would stay for ever.
    Blocked { key: Vec<u8>, fresh: bool },
    /// The contender's key is gone.
    Vanished,
}

/// What a change took away.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Gone {
    /// These keys, each with its create revision.
    Keys(Vec<(i64, Vec<u8>)>),
    /// Any: the whole queue was read anew.
    Unknown,
}

#[derive(Debug)]
pub(crate) struct Mirror {
    layout: Layout,
    revision: i64,
    line: BTreeMap<(i64, Vec<u8>), Standing>,
    created: HashMap<Vec<u8>, i64>,
    /// How many may be inside, in a counted queue.
    count: usize,
    /// How many stand here without a lease.
    leaseless: usize,
}

impl Mirror {
    pub(crate) fn new(layout: Layout) -> Mirror {
        Mirror {
            layout,
            revision: 0,
            line: BTreeMap::new(),
            created: HashMap::new(),
            count: 0,
            leaseless: 0,
        }
    }

    #[cfg(test)]
    pub(crate) fn revision(&self) -> i64 {
        self.revision
    }

    /// The queue, first to last.
    pub(crate) fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.line.values().map(|standing| &standing.entry)
    }

    /// Replaces everything by a full read at `revision`; an older read than the mirror changes
    /// nothing, unless the store itself went back.
    pub(crate) fn reset(
        &mut self,
        revision: i64,
        entries: Vec<Entry>,
        store_went_back: bool,
    ) -> Gone {
        if revision < self.revision && !store_went_back {
            return Gone::Keys(Vec::new());
        }
        self.line.clear();
        self.created.clear();
        self.leaseless = 0;
        self.revision = revision;
        for entry in entries {
            self.put(entry);
        }
        Gone::Unknown
    }

    /// Takes in the changes of whole revisions up to `revision`. What is already known is passed
    /// over, since reads and the watch overlap.
    pub(crate) fn apply(&mut self, revision: i64, events: Vec<Event>) -> Gone {
        let known = self.revision;
        let mut gone = Vec::new();
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
                EventKind::Delete => {
                    if let Some(create_revision) = self.remove(&event.key) {
                        gone.push((create_revision, event.key));
                    }
                }
            }
        }
        self.revision = self.revision.max(revision);
        Gone::Keys(gone)
    }

    fn put(&mut self, entry: Entry) {
        if self.layout.count_key().is_some_and(|key| key == entry.key) {
            // A value that is no count is left to the next acquire, which names it.
            self.count = decode_count(&entry.value).map_or(self.count, |count| count as usize);
        }
        if !self.layout.is_entry(&entry.key) {
            return;
        }
        self.remove(&entry.key);
        self.leaseless += usize::from(entry.lease == 0);
        self.created.insert(entry.key.clone(), entry.create_revision);
        self.line.insert((entry.create_revision, entry.key.clone()), Standing::from(entry));
    }

    fn remove(&mut self, key: &[u8]) -> Option<i64> {
        let create_revision = self.created.remove(key)?;
        if let Some(removed) = self.line.remove(&(create_revision, key.to_vec())) {
            self.leaseless -= usize::from(removed.entry.lease == 0);
        }
        Some(create_revision)
    }

    /// Those who may be inside.
    pub(crate) fn inside(&self) -> Vec<&Standing> {
        admitted(self.layout.rule(), self.count, self.line.values())
    }

    /// How many may be inside, where that is counted.
    pub(crate) fn count(&self) -> Option<usize> {
        (self.layout.rule() == Rule::Counted && self.count > 0).then_some(self.count)
    }

    /// Whether anybody stands here whose key would stay for ever.
    pub(crate) fn has_leaseless(&self) -> bool {
        self.leaseless > 0
    }

    /// How many stand ahead of this contender, if its key is here.
    pub(crate) fn position(&self, key: &[u8], create_revision: i64) -> Option<usize> {
        let me = (create_revision, key.to_vec());
        self.line.contains_key(&me).then(|| self.line.range(..me).count())
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
        if self.inside().iter().any(|standing| standing.entry.key == key) {
            return Turn::Inside;
        }
        match self.in_the_way(&me) {
            Some(standing) if standing.entry.lease == 0 => Turn::Blocked {
                key: standing.entry.key.clone(),
                // A contender's key that a stranger wrote over lost its lease too; its owner
                // will notice and take it away, so that one is given time.
                fresh: standing.entry.mod_revision == standing.entry.create_revision,
            },
            _ => Turn::Behind,
        }
    }

    /// Whose going would help this contender on next. In a counted queue that may be any of those
    /// inside, unless none of them will ever go.
    fn in_the_way(&self, me: &(i64, Vec<u8>)) -> Option<&Standing> {
        let mut ahead = self.line.range(..me).rev().map(|(_, standing)| standing);
        match self.layout.rule() {
            Rule::First => ahead.next(),
            Rule::Line => {
                let reads = self.line.get(me).is_some_and(|standing| standing.reads);
                ahead.find(|standing| !reads || !standing.reads)
            }
            Rule::Counted => {
                let together =
                    self.line.range((me.0, Vec::new())..).take_while(|(id, _)| id.0 == me.0);
                let together = together.count();
                let for_ever = ahead.filter(|standing| standing.entry.lease == 0);
                let room = self.count.saturating_sub(together);
                for_ever.take(room + 1).enumerate().find(|(at, _)| *at == room).map(|(_, s)| s)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::identity::{self, ContenderMode};
    use super::super::layout::encode_count;
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
        let mut mirror = Mirror::new(Layout::line(b"/p/".to_vec()));
        mirror.reset(10, vec![entry("/p/a", 5, 1), entry("/p/b", 8, 1)], false);
        mirror
    }

    #[test]
    fn the_lowest_create_revision_has_its_turn() {
        let mut mirror = mirror();
        assert_eq!(mirror.turn(b"/p/a", 5), Turn::Inside);
        assert_eq!(mirror.turn(b"/p/b", 8), Turn::Behind);
        assert_eq!(mirror.turn(b"/p/c", 11), Turn::TooEarly);
        mirror.apply(11, vec![deleted("/p/a", 11)]);
        assert_eq!(mirror.turn(b"/p/b", 8), Turn::Inside);
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
    }

    fn reader(key: &str, created: i64) -> Entry {
        let value = identity::Author::new("me").sign(ContenderMode::Read);
        Entry { value, ..entry(key, created, 1) }
    }

    #[test]
    fn readers_share_until_a_writer_stands_between() {
        let mut mirror = Mirror::new(Layout::line(b"/p/".to_vec()));
        let queue =
            vec![reader("/p/a", 3), reader("/p/b", 4), entry("/p/w", 5, 1), reader("/p/c", 6)];
        mirror.reset(9, queue, false);
        assert_eq!(mirror.turn(b"/p/b", 4), Turn::Inside);
        assert_eq!(mirror.turn(b"/p/w", 5), Turn::Behind);
        assert_eq!(mirror.turn(b"/p/c", 6), Turn::Behind);
        let gone = mirror.apply(11, vec![deleted("/p/a", 10), deleted("/p/b", 11)]);
        assert_eq!(gone, Gone::Keys(vec![(3, b"/p/a".to_vec()), (4, b"/p/b".to_vec())]));
        assert_eq!(mirror.turn(b"/p/w", 5), Turn::Inside);
        // The writer becomes a reader without leaving its place.
        let mut downgraded = reader("/p/w", 5);
        downgraded.mod_revision = 12;
        mirror.apply(12, vec![put(downgraded)]);
        assert_eq!(mirror.turn(b"/p/w", 5), Turn::Inside);
        assert_eq!(mirror.turn(b"/p/c", 6), Turn::Inside);
        assert_eq!(mirror.position(b"/p/c", 6), Some(1));
    }

    #[test]
    fn a_reader_is_blocked_by_the_writer_in_the_way_not_by_the_reader_before_it() {
        let mut mirror = Mirror::new(Layout::line(b"/p/".to_vec()));
        let queue = vec![entry("/p/w", 3, 0), reader("/p/a", 4), reader("/p/b", 5)];
        mirror.reset(9, queue, false);
        assert_eq!(mirror.turn(b"/p/b", 5), Turn::Blocked { key: b"/p/w".to_vec(), fresh: true });
    }

    #[test]
    fn a_count_lets_in_as_many_and_growing_lets_in_more() {
        let count =
            |count: u32| Entry { value: encode_count(count).into(), ..entry("/p/permits", 2, 0) };
        let holder =
            |name: &str, created, lease| entry(&format!("/p/holders/{name}"), created, lease);
        let mut mirror = Mirror::new(Layout::counted(b"/p/".to_vec()));
        let queue = vec![
            count(2),
            holder("a", 3, 1),
            holder("b", 4, 1),
            holder("c", 5, 1),
            holder("d", 5, 1),
        ];
        mirror.reset(9, queue, false);
        assert_eq!(mirror.turn(b"/p/holders/b", 4), Turn::Inside);
        assert_eq!(mirror.turn(b"/p/holders/c", 5), Turn::Behind);
        let grown = Event { value: encode_count(3).into(), mod_revision: 10, ..put(count(2)) };
        mirror.apply(10, vec![grown]);
        assert_eq!(mirror.turn(b"/p/holders/c", 5), Turn::Behind, "two came together");
        mirror.apply(11, vec![deleted("/p/holders/a", 11)]);
        assert_eq!(mirror.turn(b"/p/holders/c", 5), Turn::Inside);
        assert_eq!(mirror.turn(b"/p/holders/d", 5), Turn::Inside);
    }

    #[test]
    fn a_count_is_blocked_only_by_as_many_as_leave_no_room() {
        let count = Entry { value: encode_count(2).into(), ..entry("/p/permits", 2, 0) };
        let holder =
            |name: &str, created, lease| entry(&format!("/p/holders/{name}"), created, lease);
        let mut mirror = Mirror::new(Layout::counted(b"/p/".to_vec()));
        let one = vec![count.clone(), holder("a", 3, 0), holder("b", 4, 1), holder("c", 5, 1)];
        mirror.reset(9, one, false);
        assert_eq!(mirror.turn(b"/p/holders/c", 5), Turn::Behind);
        let two = vec![count, holder("a", 3, 0), holder("b", 4, 0), holder("c", 5, 1)];
        mirror.reset(10, two, false);
        let blocked = Turn::Blocked { key: b"/p/holders/a".to_vec(), fresh: true };
        assert_eq!(mirror.turn(b"/p/holders/c", 5), blocked);
    }

    #[test]
    fn an_older_read_changes_nothing_unless_the_store_went_back() {
        let mut mirror = mirror();
        mirror.reset(9, Vec::new(), false);
        assert_eq!(mirror.turn(b"/p/a", 5), Turn::Inside);
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
            let mut mirror = Mirror::new(Layout::line(b"/p/".to_vec()));
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
                    0 => {
                        mirror.reset(revision, store.clone(), false);
                    }
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
                        prop_assert_eq!(turn == Turn::Inside, position == 0);
                    }
                }
            }
        }
    }
}
