//! Two ways of doing the same, measured in turns; and what can be said of their ratio.

use std::time::Duration;

pub(crate) type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Something that does as much as it can for a while and says how much that was, per second.
pub(crate) type Work = Box<dyn FnMut(Duration) -> Outcome<f64>>;

/// Our way and the floor's, on one server.
pub(crate) struct Contest {
    pub(crate) ours: Work,
    pub(crate) floor: Work,
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
}

/// The median of several values, with the interval that holds it in 90 % of all cases.
#[derive(Clone, Copy)]
pub(crate) struct Spread {
    pub(crate) low: f64,
    pub(crate) median: f64,
    pub(crate) high: f64,
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
        Spread { low: sorted[cut], median, high: sorted[n - 1 - cut] }
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

/// Runs a scene: one of each to warm up, then pairs, in which each goes first in turn.
pub(crate) fn pairs(scene: &Scene, count: usize, length: Duration) -> Outcome<Figure> {
    let Contest { mut ours, mut floor } = (scene.prepare)()?;
    ours(length)?;
    floor(length)?;
    let (mut our_values, mut floor_values, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for pair in 0..count {
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
    })
}
