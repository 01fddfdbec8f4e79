//! What those who take one lock in turns go through: when each came, was let in and left; and how
//! long a hand-off takes, and whether all are served alike.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use etcd_recipes::Mutex;
use etcd_recipes::testing::boot_nanos;
use serde::{Deserialize, Serialize};

use crate::measure::{Measured, Outcome, at_most, millis, per_second, plain, quantile};

/// From when to when, on the boot-time clock, which all processes of a machine share.
#[derive(Clone, Copy)]
pub(crate) struct Span {
    pub(crate) begin: u64,
    pub(crate) end: u64,
}

impl Span {
    /// Begins in a moment, so that all can be there.
    pub(crate) fn soon(moment: Duration, length: Duration) -> Span {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let begin = boot_nanos() + nanos(moment);
        Span { begin, end: begin + nanos(length) }
    }
}

/// One hold, in nanoseconds of the boot-time clock.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Visit {
    /// `lock()` was called.
    pub(crate) begun: u64,
    /// It returned.
    pub(crate) entered: u64,
    /// `unlock()` was called.
    pub(crate) leaving: u64,
    /// It returned.
    pub(crate) left: u64,
    pub(crate) token: i64,
}

/// So many threads take the mutex in turns for a while. Each keeps what it sees to itself, so
/// measuring shares nothing.
pub(crate) fn visit(mutex: &Mutex, threads: usize, span: Span) -> Outcome<Vec<Vec<Visit>>> {
    let running: Vec<_> = (0..threads)
        .map(|_| {
            let mutex = mutex.clone();
            thread::spawn(move || visitor(&mutex, span))
        })
        .collect();
    let visits = running.into_iter().map(|one| one.join().map_err(|_| "a visitor panicked")?);
    visits.collect()
}

fn visitor(mutex: &Mutex, span: Span) -> Outcome<Vec<Visit>> {
    let mut visits = Vec::new();
    thread::sleep(Duration::from_nanos(span.begin.saturating_sub(boot_nanos())));
    let mut begun = boot_nanos();
    while begun < span.end {
        let guard = mutex.lock()?;
        let entered = boot_nanos();
        let (token, leaving) = (guard.fencing_token(), entered);
        if !guard.unlock() {
            return Err("a lock was lost".into());
        }
        let left = boot_nanos();
        visits.push(Visit { begun, entered, leaving, left, token });
        begun = left;
    }
    Ok(visits)
}

/// Holds per second, from the common beginning until the last has left.
pub(crate) fn rate(visits: &[Vec<Visit>], span: Span) -> f64 {
    let last = visits.iter().flatten().map(|visit| visit.left).max().unwrap_or(span.end);
    let count: usize = visits.iter().map(Vec::len).sum();
    per_second(count as u64, Duration::from_nanos(last.saturating_sub(span.begin)))
}

/// The times of all hand-offs, in ms: from the holder's call of `unlock()` until the `lock()` of
/// whoever waited behind it returns, so the delete itself is part of it.
fn hand_offs(visits: &[Vec<Visit>]) -> Outcome<Vec<f64>> {
    let mut line: Vec<Visit> = visits.iter().flatten().copied().collect();
    line.sort_by_key(|visit| visit.token);
    let mut times = Vec::with_capacity(line.len());
    for two in line.windows(2) {
        let (before, after) = (two[0], two[1]);
        if after.entered < before.leaving {
            return Err("two were inside at once".into());
        }
        // Whoever came later was not waiting.
        if after.begun < before.leaving {
            times.push(millis(before.leaving, after.entered));
        }
    }
    Ok(times)
}

/// A hand-off as long as this, in ms, has waited for etcd's unsynced watchers.
const SLOW: f64 = 50.0;

/// What is asked of hand-offs.
#[derive(Clone, Copy, Default)]
pub(crate) struct Limits {
    /// Of one hand-off, in ms.
    pub(crate) p99: Option<f64>,
    /// How many may be slow.
    pub(crate) slow: Option<f64>,
    /// How much less than the most served thread the least served may have, in percent. Each
    /// thread's holds are summed over all runs; in each, all begin and end together.
    pub(crate) unfair: Option<f64>,
}

/// Collects, over several runs, the hand-offs and how often each thread was served.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<parking_lot::Mutex<State>>);

#[derive(Default)]
struct State {
    times: Vec<f64>,
    served: Vec<usize>,
}

impl Log {
    pub(crate) fn add(&self, visits: &[Vec<Visit>]) -> Outcome<()> {
        let times = hand_offs(visits)?;
        let mut state = self.0.lock();
        state.times.extend(times);
        state.served.resize(visits.len(), 0);
        for (sum, one) in state.served.iter_mut().zip(visits) {
            *sum += one.len();
        }
        Ok(())
    }

    fn take(&self) -> (Vec<f64>, Vec<usize>) {
        let mut state = std::mem::take(&mut *self.0.lock());
        state.times.sort_by(f64::total_cmp);
        (state.times, state.served)
    }

    /// What was seen since the last call.
    pub(crate) fn details(&self, whose: &str, limits: Limits) -> Vec<Measured> {
        let (times, served) = self.take();
        if times.is_empty() {
            return Vec::new();
        }
        let of = |part| quantile(&times, part);
        let slow = times.iter().filter(|time| **time > SLOW).count();
        let (most, least) = (served.iter().max(), served.iter().min());
        #[allow(clippy::cast_precision_loss, reason = "counts of a bench are small")]
        let (slow, count, most, least) = (
            slow as f64,
            times.len() as f64,
            most.copied().unwrap_or(0) as f64,
            least.copied().unwrap_or(0) as f64,
        );
        let what = |what: &str| format!("{whose}: {what}");
        vec![
            plain(what("hand-offs timed"), count, ""),
            plain(what("median hand-off"), of(0.5), "ms"),
            at_most(what("p99 hand-off"), of(0.99), "ms", limits.p99),
            plain(what("longest hand-off"), of(1.0), "ms"),
            at_most(what("hand-offs above 50 ms"), slow, "", limits.slow),
            at_most(
                what("least below most served"),
                100.0 * (most - least) / most,
                "%",
                limits.unfair,
            ),
        ]
    }
}
