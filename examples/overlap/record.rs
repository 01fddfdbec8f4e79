//! What a round showed, and what a series of them amounts to.

use std::fmt;
use std::time::Duration;

use serde::Serialize;

use crate::wire::Polls;

/// The polls are to be no further apart; a busy machine may see to it that they are.
const POLL_LIMIT_MS: f64 = 1.0;

/// The stamps of a round, nanoseconds of the boot-time clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) polls: Polls,
    /// The rival's `lock()` had returned.
    pub(crate) rival: u64,
    /// The fault began.
    pub(crate) begun: u64,
    /// No renewal that counted was sent later, by the proxy's record.
    pub(crate) renewed: Option<u64>,
}

impl Record {
    /// Holder and rival both held.
    pub(crate) fn overlaps(&self) -> bool {
        self.polls.last_true >= self.rival
    }

    /// From the holder's last `true` to the rival's acquire; negative when they overlap.
    pub(crate) fn margin_ms(&self) -> f64 {
        ms_between(self.polls.last_true, self.rival)
    }

    /// The holder's listener ran before the rival was in.
    pub(crate) fn told_before_rival(&self) -> bool {
        self.polls.listener.is_some_and(|at| at < self.rival)
    }

    /// The hold ended before the fault had begun: safe, but no test of the fault.
    pub(crate) fn lost_early(&self) -> bool {
        self.polls.first_false < self.begun
    }

    /// Whether the last `true` lies within what the last renewal that can have counted allows.
    pub(crate) fn within_deadline(&self, ttl: Duration) -> bool {
        let margin = (ttl / 10).max(Duration::from_millis(200));
        let allowed = (ttl - margin).as_nanos() as u64;
        self.renewed.is_some_and(|sent| self.polls.last_true <= sent + allowed)
    }
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Polls { last_true, first_false, listener, token } = self.polls;
        let at = |nanos: u64| ms_between(self.begun, nanos);
        write!(f, "last true {:9.3}  first false {:9.3}", at(last_true), at(first_false))?;
        for (name, stamp) in [("token", token), ("listener", listener)] {
            match stamp {
                Some(stamp) => write!(f, "  {name} {:9.3}", at(stamp))?,
                None => write!(f, "  {name}     never")?,
            }
        }
        write!(f, "  rival {:9.3}  margin {:9.3} ms", at(self.rival), self.margin_ms())?;
        let step = ms_between(last_true, first_false);
        if step > POLL_LIMIT_MS {
            write!(f, "  polled only {step:.3} ms apart")?;
        }
        if self.lost_early() {
            f.write_str("  lost before the fault")?;
        }
        if self.overlaps() {
            f.write_str("  OVERLAP")?;
        }
        Ok(())
    }
}

fn ms_between(from: u64, to: u64) -> f64 {
    (to as f64 - from as f64) / 1e6
}

/// The last line of the output.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Summary {
    pub(crate) rounds: usize,
    pub(crate) overlaps: usize,
    pub(crate) margin_ms: Spread,
    pub(crate) told_before_rival: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Spread {
    pub(crate) min: f64,
    pub(crate) p50: f64,
    pub(crate) max: f64,
}

impl Summary {
    /// `None` without a round.
    pub(crate) fn of(records: &[Record]) -> Option<Summary> {
        let mut margins: Vec<f64> = records.iter().map(Record::margin_ms).collect();
        margins.sort_by(f64::total_cmp);
        let rounded = |margin: &f64| (margin * 10.0).round() / 10.0;
        Some(Summary {
            rounds: records.len(),
            overlaps: records.iter().filter(|record| record.overlaps()).count(),
            margin_ms: Spread {
                min: margins.first().map(rounded)?,
                p50: margins.get(margins.len() / 2).map(rounded)?,
                max: margins.last().map(rounded)?,
            },
            told_before_rival: records.iter().filter(|record| record.told_before_rival()).count(),
        })
    }
}
