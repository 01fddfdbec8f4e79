//! Where the contenders of one path stand, and which of them may be inside: pure.
//!
//! Locks and elections stand in line directly below their path. A semaphore keeps its holders one
//! room further down, beside the key that says how many may be inside.

use super::identity;
use crate::watch::Entry;

/// Who of a queue may be inside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Rule {
    /// The first alone.
    First,
    /// The first, and if that one only reads, everyone behind it up to the next who does not.
    Line,
    /// As many as the path's count says.
    Counted,
}

/// A path's place in etcd.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Layout {
    /// The range that is read and watched as one; it ends with `/`.
    watched: Vec<u8>,
    rule: Rule,
}

const HOLDERS: &[u8] = b"holders/";
const COUNT: &[u8] = b"permits";

impl Layout {
    /// `prefix` ends with `/`.
    pub(crate) fn line(prefix: Vec<u8>) -> Layout {
        Layout { watched: prefix, rule: Rule::Line }
    }

    /// `prefix` ends with `/`.
    pub(crate) fn candidates(prefix: Vec<u8>) -> Layout {
        Layout { watched: prefix, rule: Rule::First }
    }

    /// `prefix` ends with `/`.
    pub(crate) fn counted(prefix: Vec<u8>) -> Layout {
        Layout { watched: prefix, rule: Rule::Counted }
    }

    pub(crate) fn rule(&self) -> Rule {
        self.rule
    }

    /// What is read and watched.
    pub(crate) fn watched(&self) -> &[u8] {
        &self.watched
    }

    /// What the contenders' keys begin with.
    pub(crate) fn entries(&self) -> Vec<u8> {
        match self.rule {
            Rule::First | Rule::Line => self.watched.clone(),
            Rule::Counted => [&self.watched, HOLDERS].concat(),
        }
    }

    /// Whether this is a contender's key: directly below, with no further `/`. Deeper keys belong
    /// to other recipes and do not count.
    pub(crate) fn is_entry(&self, key: &[u8]) -> bool {
        let below = key.strip_prefix(self.watched.as_slice());
        let name = match self.rule {
            Rule::First | Rule::Line => below,
            Rule::Counted => below.and_then(|rest| rest.strip_prefix(HOLDERS)),
        };
        name.is_some_and(|name| !name.contains(&b'/'))
    }

    /// The key that says how many may be inside, where there is one.
    pub(crate) fn count_key(&self) -> Option<Vec<u8>> {
        match self.rule {
            Rule::First | Rule::Line => None,
            Rule::Counted => Some([&self.watched, COUNT].concat()),
        }
    }

    /// Whether the key is of no use here but belongs to this recipe.
    pub(crate) fn is_known(&self, key: &[u8]) -> bool {
        self.is_entry(key) || self.count_key().is_some_and(|count| count == key)
    }
}

/// How a count stands in etcd: four bytes, the most significant first.
pub(crate) fn encode_count(count: u32) -> [u8; 4] {
    count.to_be_bytes()
}

pub(crate) fn decode_count(value: &[u8]) -> Option<u32> {
    value.try_into().ok().map(u32::from_be_bytes)
}

/// A contender in its queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Standing {
    pub(crate) entry: Entry,
    /// Its key says that it only reads. Whatever says nothing of the kind counts as exclusive.
    pub(crate) reads: bool,
}

impl From<Entry> for Standing {
    fn from(entry: Entry) -> Standing {
        let reads = identity::reads(&entry.value);
        Standing { entry, reads }
    }
}

/// Those who may be inside. `line` is the whole queue in order, `count` what a counted one allows.
///
/// The keys of one transaction share a create revision and are let in together or not at all.
pub(crate) fn admitted<'a>(
    rule: Rule,
    count: usize,
    line: impl Iterator<Item = &'a Standing>,
) -> Vec<&'a Standing> {
    match rule {
        Rule::First => line.take(1).collect(),
        Rule::Line => {
            let mut only_readers = true;
            line.enumerate()
                .take_while(|(at, standing)| {
                    let inside = *at == 0 || (only_readers && standing.reads);
                    only_readers &= standing.reads;
                    inside
                })
                .map(|(_, standing)| standing)
                .collect()
        }
        Rule::Counted => {
            // One more than may be in tells whether the last who came together all fit.
            let mut first: Vec<_> = line.take(count.saturating_add(1)).collect();
            if first.len() > count {
                let too_late = first[count].entry.create_revision;
                first.retain(|standing| standing.entry.create_revision < too_late);
            }
            first
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn standing(created: i64, reads: bool) -> Standing {
        Standing {
            entry: Entry {
                key: format!("/p/{created}").into_bytes(),
                value: Vec::new(),
                create_revision: created,
                mod_revision: created,
                version: 1,
                lease: 1,
            },
            reads,
        }
    }

    fn inside(rule: Rule, count: usize, line: &[Standing]) -> Vec<i64> {
        admitted(rule, count, line.iter()).iter().map(|s| s.entry.create_revision).collect()
    }

    #[test]
    fn a_line_lets_in_one_or_the_readers_in_front() {
        let line = |reads: &[bool]| -> Vec<Standing> {
            reads.iter().enumerate().map(|(at, reads)| standing(at as i64 + 1, *reads)).collect()
        };
        assert_eq!(inside(Rule::Line, 0, &line(&[])), Vec::<i64>::new());
        assert_eq!(inside(Rule::Line, 0, &line(&[false, true, true])), [1]);
        assert_eq!(inside(Rule::Line, 0, &line(&[true, true, false, true])), [1, 2]);
        assert_eq!(inside(Rule::Line, 0, &line(&[true, false])), [1]);
        assert_eq!(inside(Rule::First, 0, &line(&[true, true])), [1]);
    }

    #[test]
    fn keys_of_one_transaction_are_let_in_together_or_not_at_all() {
        let line: Vec<_> = [3, 4, 4, 7].map(|created| standing(created, false)).into();
        assert_eq!(inside(Rule::Counted, 0, &line), Vec::<i64>::new());
        assert_eq!(inside(Rule::Counted, 1, &line), [3]);
        assert_eq!(inside(Rule::Counted, 2, &line), [3]);
        assert_eq!(inside(Rule::Counted, 3, &line), [3, 4, 4]);
        assert_eq!(inside(Rule::Counted, 9, &line), [3, 4, 4, 7]);
    }

    #[test]
    fn each_layout_knows_its_own_keys() {
        let line = Layout::line(b"/p/".to_vec());
        let counted = Layout::counted(b"/p/".to_vec());
        assert!(line.is_entry(b"/p/a") && !line.is_entry(b"/pa") && !line.is_entry(b"/p/a/b"));
        assert!(counted.is_entry(b"/p/holders/a") && !counted.is_entry(b"/p/a"));
        assert!(!counted.is_entry(b"/p/holders/a/b") && counted.is_known(b"/p/permits"));
        assert_eq!(line.entries(), b"/p/");
        assert_eq!(counted.entries(), b"/p/holders/");
        assert_eq!(decode_count(&encode_count(7)), Some(7));
        assert_eq!(decode_count(b"seven"), None);
    }

    proptest! {
        /// The two promises, from any queue: never a writer beside anyone, never more than count;
        /// and nobody is let in past somebody who waits.
        #[test]
        fn nobody_is_let_in_beside_whom_it_must_not_be(
            line in prop::collection::vec((any::<bool>(), 0_i64..2), 0..12),
            count in 0_usize..6,
        ) {
            let mut created = 1;
            let line: Vec<_> = line
                .into_iter()
                .map(|(reads, step)| { created += step; standing(created, reads) })
                .collect();
            let counted = admitted(Rule::Counted, count, line.iter());
            prop_assert!(counted.len() <= count);
            prop_assert!(counted.iter().zip(&line).all(|(a, b)| *a == b));
            let in_line = admitted(Rule::Line, 0, line.iter());
            prop_assert!(in_line.len() <= 1 || in_line.iter().all(|standing| standing.reads));
            prop_assert!(in_line.iter().zip(&line).all(|(a, b)| *a == b));
            prop_assert_eq!(in_line.is_empty(), line.is_empty());
        }
    }
}
