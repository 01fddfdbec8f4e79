//! Which answer on a shared stream belongs to which watch: pure.
//!
//! etcd answers requests to create in the order they were sent, but refuses them under the id -1,
//! so the order is needed beside the id. An id is never used again within a group, so an answer
//! that was under way when its watch went away cannot be taken for another's.

use std::collections::{BTreeMap, VecDeque};

/// The number of a watch within its client.
pub(super) type WatchKey = u64;

/// What goes out next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Request {
    Create {
        id: i64,
        watch: WatchKey,
    },
    Cancel {
        id: i64,
    },
    /// Asks for this id once more. etcd refuses it at once, which shows that it is there; a
    /// request for progress shows less, since newer servers leave it unanswered while any watch of
    /// the stream is catching up.
    Probe {
        id: i64,
        watch: WatchKey,
    },
}

/// The bookkeeping of one stream.
#[derive(Debug)]
pub(super) struct Multiplex {
    last_id: i64,
    outbox: VecDeque<Request>,
    /// Creations sent and not answered; without a watch where nobody wants it any more.
    asked: VecDeque<(i64, Option<WatchKey>)>,
    bound: BTreeMap<i64, WatchKey>,
}

impl Multiplex {
    /// `last_id` is the last one that an earlier stream has used.
    pub(super) fn new(last_id: i64) -> Multiplex {
        Multiplex {
            last_id,
            outbox: VecDeque::new(),
            asked: VecDeque::new(),
            bound: BTreeMap::new(),
        }
    }

    pub(super) fn last_id(&self) -> i64 {
        self.last_id
    }

    /// Asks for a watch.
    pub(super) fn create(&mut self, watch: WatchKey) {
        self.last_id += 1;
        self.outbox.push_back(Request::Create { id: self.last_id, watch });
    }

    /// Whether a watch was asked for on this stream, and neither refused nor given up since.
    pub(super) fn knows(&self, watch: WatchKey) -> bool {
        let waiting =
            |request: &Request| matches!(request, Request::Create { watch: w, .. } if *w == watch);
        self.outbox.iter().any(waiting)
            || self.asked.iter().any(|(_, asker)| *asker == Some(watch))
            || self.bound().any(|bound| bound == watch)
    }

    /// Takes a watch off the stream, wherever it stands.
    pub(super) fn forget(&mut self, watch: WatchKey) {
        self.outbox.retain(|request| {
            !matches!(request, Request::Create { watch: w, .. } | Request::Probe { watch: w, .. }
                if *w == watch)
        });
        for (_, asker) in &mut self.asked {
            if *asker == Some(watch) {
                *asker = None;
            }
        }
        let gone: Vec<i64> =
            self.bound.iter().filter(|(_, w)| **w == watch).map(|(id, _)| *id).collect();
        for id in gone {
            self.bound.remove(&id);
            self.outbox.push_back(Request::Cancel { id });
        }
    }

    /// Asks for a sign of life. Returns whether any answer is due now.
    pub(super) fn probe(&mut self) -> bool {
        if let Some((&id, &watch)) = self.bound.first_key_value() {
            self.outbox.push_back(Request::Probe { id, watch });
            return true;
        }
        !self.asked.is_empty() || !self.outbox.is_empty()
    }

    /// The request to send next; it stays until [`sent`](Multiplex::sent).
    pub(super) fn next(&self) -> Option<Request> {
        self.outbox.front().copied()
    }

    /// The request that was next is on its way.
    pub(super) fn sent(&mut self) -> Option<Request> {
        let request = self.outbox.pop_front();
        match request {
            Some(Request::Create { id, watch }) => self.asked.push_back((id, Some(watch))),
            Some(Request::Probe { id, .. }) => self.asked.push_back((id, None)),
            Some(Request::Cancel { .. }) | None => {}
        }
        request
    }

    /// The watches that stand on this stream.
    pub(super) fn bound(&self) -> impl Iterator<Item = WatchKey> {
        self.bound.values().copied()
    }

    /// Finds the watch that an answer is for; `None` if it is for none, or none any more.
    pub(super) fn answered(&mut self, id: i64, created: bool, canceled: bool) -> Option<WatchKey> {
        if !created {
            return if canceled { self.bound.remove(&id) } else { self.bound.get(&id).copied() };
        }
        let place = self.asked.iter().position(|(asked, _)| *asked == id).unwrap_or(0);
        let (_, asker) = self.asked.remove(place)?;
        if canceled {
            // A probe refused under its own id is one whose login is out of date. etcd 3.5.1 then
            // keeps the watch of that id and never delivers to it again (3.4.23 answers with -1).
            return asker.or_else(|| self.bound.remove(&id));
        }
        match asker {
            Some(watch) => {
                self.bound.insert(id, watch);
            }
            None => {
                // Nobody wants it, or a probe was taken for a new watch.
                self.bound.remove(&id);
                self.outbox.push_back(Request::Cancel { id });
            }
        }
        asker
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent_all(ids: &mut Multiplex) -> Vec<Request> {
        std::iter::from_fn(|| ids.sent()).collect()
    }

    #[test]
    fn answers_find_their_watch_by_id_and_refusals_by_order() {
        let mut ids = Multiplex::new(7);
        for watch in [1, 2, 3] {
            ids.create(watch);
        }
        assert_eq!(ids.next(), Some(Request::Create { id: 8, watch: 1 }));
        assert_eq!(sent_all(&mut ids).len(), 3);
        assert_eq!(ids.answered(8, true, false), Some(1));
        assert_eq!(ids.answered(-1, true, true), Some(2), "refused: the oldest unanswered");
        assert_eq!(ids.answered(10, true, false), Some(3));
        assert_eq!(ids.answered(8, false, false), Some(1));
        assert_eq!(ids.answered(-1, false, false), None, "progress");
        assert_eq!(ids.answered(10, false, true), Some(3));
        assert_eq!(ids.answered(10, false, false), None, "nothing after the cancel");
        assert_eq!(ids.last_id(), 10);
    }

    #[test]
    fn a_watch_is_forgotten_wherever_it_stands() {
        let mut ids = Multiplex::new(0);
        ids.create(1);
        ids.forget(1);
        assert_eq!(ids.next(), None, "never sent");

        ids.create(2);
        sent_all(&mut ids);
        ids.forget(2);
        assert_eq!(ids.answered(2, true, false), None);
        assert_eq!(sent_all(&mut ids), [Request::Cancel { id: 2 }], "cancelled once created");

        ids.create(3);
        sent_all(&mut ids);
        assert_eq!(ids.answered(3, true, false), Some(3));
        ids.forget(3);
        assert_eq!(ids.answered(3, false, false), None, "events under way are nobody's");
        assert_eq!(sent_all(&mut ids), [Request::Cancel { id: 3 }]);
        assert_eq!(ids.answered(3, false, true), None);
    }

    #[test]
    fn a_probe_refused_under_its_own_id_ends_the_watch() {
        let mut ids = Multiplex::new(0);
        ids.create(1);
        sent_all(&mut ids);
        ids.answered(1, true, false);
        assert!(ids.probe());
        sent_all(&mut ids);
        assert_eq!(ids.answered(1, true, true), Some(1), "etcd is deaf for it from now on");
        assert_eq!(ids.answered(1, false, false), None);
    }

    #[test]
    fn a_probe_is_answered_by_its_refusal_and_disturbs_nobody() {
        let mut ids = Multiplex::new(0);
        assert!(!ids.probe(), "nothing to ask about");
        ids.create(1);
        assert!(ids.probe(), "the creation will be answered");
        sent_all(&mut ids);
        ids.answered(1, true, false);
        assert!(ids.probe());
        ids.create(2);
        assert_eq!(
            sent_all(&mut ids),
            [Request::Probe { id: 1, watch: 1 }, Request::Create { id: 2, watch: 2 }]
        );
        assert_eq!(ids.answered(-1, true, true), None);
        assert_eq!(ids.answered(-1, true, true), Some(2), "the refusal after it is the watch's");
        assert_eq!(ids.answered(1, false, false), Some(1));
    }
}
