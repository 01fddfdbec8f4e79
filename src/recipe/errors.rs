//! The errors a recipe has seen on background threads: the newest few, and how many in all.

use std::collections::VecDeque;

use crate::error::Error;

/// How many errors are kept.
const KEPT: usize = 64;

#[derive(Default)]
pub(crate) struct ErrorList {
    newest: VecDeque<Error>,
    total: u64,
}

impl ErrorList {
    /// Adds an error; returns the one that had to go for it. An error may carry a user's own, so
    /// the caller drops it outside of its lock.
    pub(crate) fn push(&mut self, error: Error) -> Option<Error> {
        let evicted = if self.newest.len() == KEPT { self.newest.pop_front() } else { None };
        self.newest.push_back(error);
        self.total += 1;
        evicted
    }

    /// The errors kept, oldest first.
    pub(crate) fn to_vec(&self) -> Vec<Error> {
        self.newest.iter().cloned().collect()
    }

    /// How many there were since the last clearing, those no longer kept included.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_are_kept_and_all_are_counted() {
        let mut list = ErrorList::default();
        for number in 0..100 {
            let evicted = list.push(Error::internal(number.to_string()));
            assert_eq!(evicted.is_some(), number >= KEPT);
        }
        let kept: Vec<String> = list.to_vec().iter().map(Error::to_string).collect();
        let expected: Vec<String> = (100 - KEPT..100).map(|number| number.to_string()).collect();
        assert_eq!(kept, expected);
        assert_eq!(list.total(), 100);
    }
}
