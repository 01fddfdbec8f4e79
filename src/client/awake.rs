//! Whether a caller that expects its answer soon stays awake for it.
//!
//! On an idle machine a processor falls asleep with the thread that waits, and waking both takes
//! longer than half a read of etcd. On a busy one, staying awake takes time from those who bring
//! the answer. Which of the two it is shows in whether answers come while somebody is awake.

use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How long a caller stays awake: a read of a near etcd, and as much again.
const AWAKE: Duration = Duration::from_micros(200);

/// After so many answers in a row that came too late, every 2⁶th caller tries.
const MOST_MISSES: u32 = 6;

#[derive(Default)]
pub(super) struct Awake {
    /// How many callers are to fall asleep at once before one tries again.
    skip: AtomicU32,
    /// How many answers in a row came too late.
    misses: AtomicU32,
}

impl Awake {
    /// Waits for `take` to give something, without falling asleep but giving the processor to
    /// whoever wants it; not for long, and not at all where that has proved to be useless.
    pub(super) fn wait<T>(&self, mut take: impl FnMut() -> Option<T>) -> Option<T> {
        if !self.is_worth_it() {
            return None;
        }
        let begun = Instant::now();
        let taken = loop {
            if let Some(value) = take() {
                break Some(value);
            }
            if begun.elapsed() >= AWAKE {
                break None;
            }
            thread::yield_now();
        };
        self.learn(taken.is_some());
        taken
    }

    fn is_worth_it(&self) -> bool {
        let skipped = |skip: u32| skip.checked_sub(1);
        self.skip.fetch_update(Ordering::Relaxed, Ordering::Relaxed, skipped).is_err()
    }

    fn learn(&self, in_time: bool) {
        if in_time {
            self.misses.store(0, Ordering::Relaxed);
        } else {
            let misses = self.misses.load(Ordering::Relaxed).saturating_add(1).min(MOST_MISSES);
            self.misses.store(misses, Ordering::Relaxed);
            self.skip.store(1 << misses, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_in_time_is_taken_and_a_late_one_left() {
        let awake = Awake::default();
        let mut looks = 0;
        let taken = awake.wait(|| {
            looks += 1;
            (looks == 2).then_some("answer")
        });
        // Unless this thread was put aside for as long as it would have stayed awake.
        assert!(taken == Some("answer") || looks == 1);
        assert_eq!(Awake::default().wait(|| None::<()>), None);
    }

    #[test]
    fn the_more_often_it_was_in_vain_the_fewer_stay_awake() {
        let awake = Awake::default();
        let mut tried = Vec::new();
        for caller in 0..300 {
            if awake.is_worth_it() {
                tried.push(caller);
                awake.learn(false);
            }
        }
        let gaps: Vec<_> = tried.windows(2).map(|pair| pair[1] - pair[0] - 1).collect();
        assert_eq!(gaps, [2, 4, 8, 16, 32, 64, 64, 64]);

        while !awake.is_worth_it() {}
        awake.learn(true);
        assert!((0..300).all(|_| awake.is_worth_it()), "in time: everyone tries again");
        awake.learn(false);
        assert!(!awake.is_worth_it() && !awake.is_worth_it() && awake.is_worth_it());
    }
}
