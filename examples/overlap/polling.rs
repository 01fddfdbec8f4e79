//! The holder's eye: `is_held()`, asked again and again until it says `false`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crossbeam_channel::Receiver;
use etcd_recipes::testing::boot_nanos;
use rustix::process::{Signal, getpid, kill_process};

use crate::wire::{Outcome, Polls};

/// The word at which the holder's process stops itself.
pub(crate) const FREEZE: &str = "freeze";

/// Between two questions. With the question itself it stays well below a millisecond.
const PAUSE: Duration = Duration::from_micros(200);

/// A question that took longer was interrupted by something.
const PROMPT_NANOS: u64 = 100_000_000;

/// How long the listener and the token may take after `is_held()` said `false`.
const TOLD_LIMIT: Duration = Duration::from_secs(3);

/// The time of an event of another thread, once it has come.
#[derive(Debug, Clone, Default)]
pub(crate) struct Stamp(Arc<AtomicU64>);

impl Stamp {
    pub(crate) fn set(&self) {
        // The first event counts.
        let _ = self.0.compare_exchange(0, boot_nanos(), Ordering::AcqRel, Ordering::Acquire);
    }

    fn get(&self) -> Option<u64> {
        let nanos = self.0.load(Ordering::Acquire);
        (nanos != 0).then_some(nanos)
    }
}

/// Polls until the hold is lost, then waits for the news of it.
///
/// The stamp is taken before the question. A process that is to freeze does so between the two,
/// which is the worst place: the question was begun before the pause and is answered after it, so
/// a `true` would be as wrong as one to a question asked after it. Hence a `true` that took long
/// counts from its answer.
pub(crate) fn poll(
    is_held: impl Fn() -> bool,
    words: &Receiver<String>,
    listener: &Stamp,
    token: &Stamp,
) -> Outcome<Polls> {
    let mut last_true = 0;
    let first_false = loop {
        let freeze = words.try_recv().is_ok_and(|word| word == FREEZE);
        let asked = boot_nanos();
        if freeze {
            kill_process(getpid(), Signal::STOP)?;
        }
        if !is_held() {
            break asked;
        }
        let answered = boot_nanos();
        last_true = if answered - asked > PROMPT_NANOS { answered } else { asked };
        std::thread::sleep(PAUSE);
    };
    let end = boot_nanos() + TOLD_LIMIT.as_nanos() as u64;
    while (listener.get().is_none() || token.get().is_none()) && boot_nanos() < end {
        std::thread::sleep(PAUSE);
    }
    Ok(Polls { last_true, first_false, listener: listener.get(), token: token.get() })
}
