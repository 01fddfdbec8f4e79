//! The deadline of a lease and whether it was missed, in one atomic word.
//!
//! Whoever asks first after the deadline writes `LOST`, and a renewal may move the deadline only
//! while it lies ahead. So the answer to "held?" goes from yes to no once and never back,
//! whichever threads ask and whatever answers arrive late.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::clock::Instant;

const LOST: u64 = 0;

#[derive(Debug)]
pub(crate) struct DeadlineWord(AtomicU64);

/// What a look at the word found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Life {
    Alive,
    /// This very look found the deadline passed; whoever made it has to tell the others.
    JustLost,
    Lost,
}

impl DeadlineWord {
    pub(crate) fn new(deadline: Instant) -> DeadlineWord {
        DeadlineWord(AtomicU64::new(deadline.as_nanos()))
    }

    /// Compares the clock now; no lock, no allocation.
    pub(crate) fn check(&self, now: Instant) -> Life {
        let mut word = self.0.load(Ordering::Acquire);
        loop {
            if word == LOST {
                return Life::Lost;
            }
            if now.as_nanos() < word {
                return Life::Alive;
            }
            match self.0.compare_exchange(word, LOST, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Life::JustLost,
                Err(moved) => word = moved,
            }
        }
    }

    /// Moves the deadline to `to`, but only while `now` is before the current one and `to` is
    /// after it. Returns whether it moved.
    pub(crate) fn extend(&self, now: Instant, to: Instant) -> bool {
        let mut word = self.0.load(Ordering::Acquire);
        loop {
            if word == LOST || now.as_nanos() >= word || to.as_nanos() <= word {
                return false;
            }
            match self.0.compare_exchange(word, to.as_nanos(), Ordering::AcqRel, Ordering::Acquire)
            {
                Ok(_) => return true,
                Err(moved) => word = moved,
            }
        }
    }

    /// Loses at once, for a reason other than time. Returns whether this call did it.
    pub(crate) fn lose(&self) -> bool {
        self.0.swap(LOST, Ordering::AcqRel) != LOST
    }

    /// The deadline, or `None` once lost.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        match self.0.load(Ordering::Acquire) {
            LOST => None,
            nanos => Some(Instant::from_nanos(nanos)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(n: u64) -> Instant {
        Instant::from_nanos(n)
    }

    #[test]
    fn the_first_look_after_the_deadline_loses_for_good() {
        let word = DeadlineWord::new(at(100));
        assert_eq!(word.check(at(99)), Life::Alive);
        assert_eq!(word.check(at(100)), Life::JustLost);
        assert_eq!(word.check(at(1)), Life::Lost);
        assert!(!word.extend(at(1), at(1_000)));
        assert_eq!(word.deadline(), None);
    }

    #[test]
    fn only_a_living_word_moves_and_only_forward() {
        let word = DeadlineWord::new(at(100));
        assert!(!word.extend(at(50), at(90)));
        assert!(!word.extend(at(100), at(200)), "an answer at the deadline is too late");
        assert!(word.extend(at(99), at(200)));
        assert_eq!(word.check(at(150)), Life::Alive);
        assert!(word.lose());
        assert!(!word.lose());
        assert_eq!(word.check(at(150)), Life::Lost);
    }
}
