//! The figures, for people and for programs.

use std::fs;
use std::path::Path;

use crate::chart::chart;
use crate::measure::{Figure, Measured, Outcome, Spread};

const WIDTH: usize = 58;

/// What a ratio or a value is, beside what was asked for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    NotAsked,
    Met,
    /// The median is beyond the bar, its interval is not.
    Within,
    Missed,
}

impl Figure {
    pub(crate) fn verdict(&self) -> Verdict {
        match self.bar {
            None => Verdict::NotAsked,
            Some(bar) if self.ratio.high < bar => Verdict::Missed,
            Some(bar) if self.ratio.median < bar => Verdict::Within,
            Some(_) => Verdict::Met,
        }
    }
}

impl Measured {
    pub(crate) fn verdict(&self) -> Verdict {
        match self.bar {
            None => Verdict::NotAsked,
            Some(bar) if self.value > bar => Verdict::Missed,
            Some(_) => Verdict::Met,
        }
    }

    /// The value with its unit, counts without a fraction.
    pub(crate) fn shown(&self) -> String {
        let digits = if self.value.fract() == 0.0 { 0 } else { 2 };
        format!("{:.digits$} {}", self.value, self.unit).trim_end().to_owned()
    }
}

pub(crate) fn heading(place: &str) {
    println!(
        "On {place}. Medians per second, the ratio's 90 % interval, and how far the single values of ours and \
         of the floor lie apart (largest - smallest, of the median).\n"
    );
    println!(
        "{:WIDTH$} {:>7} {:>7} {:>6} {:>12} {:>12}  bar",
        "", "ours/s", "floor/s", "ratio", "90 %", "apart"
    );
}

pub(crate) fn line(figure: &Figure) {
    let Figure { name, bar, ours, floor, ratio, details } = figure;
    let bar = bar.map_or(String::new(), |bar| format!("{bar:.2}"));
    let verdict = match figure.verdict() {
        Verdict::NotAsked | Verdict::Met => "",
        Verdict::Within => " (within the spread)",
        Verdict::Missed => " MISSED",
    };
    println!(
        "{name:WIDTH$} {:>7.0} {:>7.0} {:>6.2} {:>12} {:>12}  {bar}{verdict}",
        ours.median,
        floor.median,
        ratio.median,
        format!("{:.2} - {:.2}", ratio.low, ratio.high),
        format!("{:.0} / {:.0} %", ours.percent(), floor.percent()),
    );
    lines(details);
}

pub(crate) fn single(name: &str, measured: &[Measured]) {
    println!("{name}");
    lines(measured);
}

fn lines(measured: &[Measured]) {
    for one in measured {
        let bar = one.bar.map_or(String::new(), |bar| format!("  at most {bar} {}", one.unit));
        let missed = if one.verdict() == Verdict::Missed { " MISSED" } else { "" };
        println!("    {:54} {:>14}{}{missed}", one.what, one.shown(), bar.trim_end());
    }
}

/// Writes `target/bench/recipes.json` and `recipes.svg`.
pub(crate) fn write(
    place: &str,
    figures: &[Figure],
    singles: &[(&str, Vec<Measured>)],
) -> Outcome<()> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/bench");
    fs::create_dir_all(&directory)?;
    let pairs: Vec<_> = figures
        .iter()
        .map(|figure| {
            serde_json::json!({
                "name": figure.name,
                "bar": figure.bar,
                "ours_per_second": spread(&figure.ours),
                "floor_per_second": spread(&figure.floor),
                "ratio": spread(&figure.ratio),
                "measured": values(&figure.details),
            })
        })
        .collect();
    let others: Vec<_> = singles
        .iter()
        .map(|(name, all)| serde_json::json!({ "name": name, "measured": values(all) }))
        .collect();
    let all = serde_json::json!({ "on": place, "pairs": pairs, "singles": others });
    fs::write(directory.join("recipes.json"), serde_json::to_string_pretty(&all)?)?;
    fs::write(directory.join("recipes.svg"), chart(place, figures, singles))?;
    println!("written to target/bench/recipes.json and recipes.svg");
    Ok(())
}

fn spread(spread: &Spread) -> serde_json::Value {
    serde_json::json!({
        "low": spread.low,
        "median": spread.median,
        "high": spread.high,
        "smallest": spread.smallest,
        "largest": spread.largest,
        "apart_percent": spread.percent(),
    })
}

fn values(measured: &[Measured]) -> Vec<serde_json::Value> {
    let value = |m: &Measured| serde_json::json!({ "what": m.what, "value": m.value, "unit": m.unit, "at_most": m.bar });
    measured.iter().map(value).collect()
}
