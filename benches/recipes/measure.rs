//! Two ways of doing the same, measured in turns; and what can be said of their ratio.

use std::time::Duration;

pub(crate) type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Something that does as much as it can for a while and says how much that was, per second.
pub(crate) type Work = Box<dyn FnMut(Duration) -> Outcome<f64>>;

/// Our way and the floor's, on one server.
pub(crate) struct Contest {
    pub(crate) ours: Work,
    pub(crate) floor: Work,
    /// Puts the store in order before each pair.
    pub(crate) tidy: Box<dyn FnMut() -> Outcome<()>>,
    /// What else was seen since it was last asked.
    pub(crate) details: Box<dyn FnMut() -> Vec<Measured>>,
}

pub(crate) struct Scene {
    pub(crate) name: String,
    /// The least ratio that is asked for.
    pub(crate) bar: Option<f64>,
    pub(crate) prepare: Box<dyn Fn() -> Outcome<Contest>>,
}

/// What came out of a scene, per second.
pub(crate) struct Figure {
    pub(crate) name: String,
    pub(crate) bar: Option<f64>,
    pub(crate) ours: Spread,
    pub(crate) floor: Spread,
    pub(crate) ratio: Spread,
    pub(crate) details: Vec<Measured>,
}

/// A value that has no floor.
pub(crate) struct Measured {
    pub(crate) what: String,
    pub(crate) value: f64,
    pub(crate) unit: &'static str,
    /// What it must not exceed.
    pub(crate) bar: Option<f64>,
}

pub(crate) fn plain(what: impl Into<String>, value: f64, unit: &'static str) -> Measured {
    at_most(what, value, unit, None)
}

pub(crate) fn at_most(
    what: impl Into<String>,
    value: f64,
    unit: &'static str,
    bar: Option<f64>,
) -> Measured {
    Measured { what: what.into(), value, unit, bar }
}

/// The median of several values, with the interval that holds it in 90 % of all cases.
#[derive(Clone, Copy)]
pub(crate) struct Spread {
    pub(crate) low: f64,
    pub(crate) median: f64,
    pub(crate) high: f64,
    pub(crate) smallest: f64,
    pub(crate) largest: f64,
}

impl Spread {
    /// The interval is that of the order statistics, which assumes nothing of the values.
    pub(crate) fn of(values: &[f64]) -> Spread {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let n = sorted.len();
        let median = if n % 2 == 1 {
            sorted[n / 2]
        } else {
            f64::midpoint(sorted[n / 2 - 1], sorted[n / 2])
        };
        let cut = outside(n);
        Spread {
            low: sorted[cut],
            median,
            high: sorted[n - 1 - cut],
            smallest: sorted[0],
            largest: sorted[n - 1],
        }
    }

    /// How far the smallest and the largest value are apart, in percent of the median.
    pub(crate) fn percent(&self) -> f64 {
        100.0 * (self.largest - self.smallest) / self.median
    }
}

/// How many of `n` ordered values may be cut off at each end so that the rest still holds the
/// median with at least 90 %.
fn outside(n: usize) -> usize {
    // The chance that at most `k` of `n` fair coins show heads.
    let mut chance = 0.5_f64.powi(i32::try_from(n).unwrap_or(i32::MAX));
    let mut below = chance;
    let mut cut = 0;
    while below <= 0.05 && cut + 1 < n / 2 {
        cut += 1;
        #[allow(clippy::cast_precision_loss, reason = "a few dozen at most")]
        let next = (n - cut + 1) as f64 / cut as f64;
        chance *= next;
        below += chance;
    }
    if below > 0.05 { cut.saturating_sub(1) } else { cut }
}

/// The least of the ordered values that so large a part of them does not exceed.
pub(crate) fn quantile(sorted: &[f64], part: f64) -> f64 {
    #[allow(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a rank among a bench's samples"
    )]
    let rank = (part * sorted.len() as f64).ceil() as usize;
    sorted[rank.clamp(1, sorted.len()) - 1]
}

/// From one point of the boot-time clock to another, in ms.
pub(crate) fn millis(from: u64, to: u64) -> f64 {
    Duration::from_nanos(to.saturating_sub(from)).as_secs_f64() * 1_000.0
}

pub(crate) fn per_second(done: u64, time: Duration) -> f64 {
    #[allow(clippy::cast_precision_loss, reason = "counts of a bench are small")]
    let done = done as f64;
    done / time.as_secs_f64()
}

/// Runs a scene: one of each to warm up, then pairs, in which each goes first in turn.
pub(crate) fn pairs(scene: &Scene, count: usize, length: Duration) -> Outcome<Figure> {
    let Contest { mut ours, mut floor, mut tidy, mut details } = (scene.prepare)()?;
    ours(length)?;
    floor(length)?;
    drop(details());
    let (mut our_values, mut floor_values, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for pair in 0..count {
        tidy()?;
        let (mine, bottom) = if pair % 2 == 0 {
            let mine = ours(length)?;
            (mine, floor(length)?)
        } else {
            let bottom = floor(length)?;
            (ours(length)?, bottom)
        };
        our_values.push(mine);
        floor_values.push(bottom);
        ratios.push(mine / bottom);
    }
    Ok(Figure {
        name: scene.name.clone(),
        bar: scene.bar,
        ours: Spread::of(&our_values),
        floor: Spread::of(&floor_values),
        ratio: Spread::of(&ratios),
        details: details(),
    })
}
