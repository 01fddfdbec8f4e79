//! The figures, for people and for programs.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use crate::measure::{Figure, Outcome, Spread};
use crate::single::Measured;

const WIDTH: usize = 46;

pub(crate) fn heading() {
    println!(
        "{:WIDTH$} {:>9} {:>9} {:>7} {:>15}  bar",
        "", "ours/s", "floor/s", "ratio", "90 % interval"
    );
}

pub(crate) fn line(figure: &Figure) {
    let Figure { name, bar, ours, floor, ratio } = figure;
    let verdict = match bar {
        None => String::new(),
        Some(bar) if ratio.high < *bar => format!("{bar:.2} MISSED"),
        Some(bar) if ratio.median < *bar => format!("{bar:.2} (within the spread)"),
        Some(bar) => format!("{bar:.2}"),
    };
    println!(
        "{name:WIDTH$} {:>9.0} {:>9.0} {:>7.2} {:>15}  {verdict}",
        ours.median,
        floor.median,
        ratio.median,
        format!("{:.2} - {:.2}", ratio.low, ratio.high)
    );
}

pub(crate) fn single(name: &str, measured: &[Measured]) {
    println!("{name}");
    for Measured { what, value, unit, bar } in measured {
        let bar = bar.map_or(String::new(), |bar| {
            format!("  at most {bar}{}", if *value > bar { " MISSED" } else { "" })
        });
        println!("  {what:44} {value:>10.2} {unit}{bar}");
    }
}

/// Writes `target/bench/recipes.json` and `recipes.svg`.
pub(crate) fn write(figures: &[Figure], singles: &[(&str, Vec<Measured>)]) -> Outcome<()> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/bench");
    fs::create_dir_all(&directory)?;
    let spread =
        |s: &Spread| serde_json::json!({ "low": s.low, "median": s.median, "high": s.high });
    let pairs: Vec<_> = figures
        .iter()
        .map(|figure| {
            serde_json::json!({
                "name": figure.name,
                "bar": figure.bar,
                "ours_per_second": spread(&figure.ours),
                "floor_per_second": spread(&figure.floor),
                "ratio": spread(&figure.ratio),
            })
        })
        .collect();
    let singles: Vec<_> = singles
        .iter()
        .map(|(name, measured)| {
            let values: Vec<_> = measured
                .iter()
                .map(|m| {
                    serde_json::json!({ "what": m.what, "value": m.value, "unit": m.unit, "at_most": m.bar })
                })
                .collect();
            serde_json::json!({ "name": name, "measured": values })
        })
        .collect();
    let all = serde_json::json!({ "pairs": pairs, "singles": singles });
    fs::write(directory.join("recipes.json"), serde_json::to_string_pretty(&all)?)?;
    fs::write(directory.join("recipes.svg"), chart(figures))?;
    println!("written to target/bench/recipes.json and recipes.svg");
    Ok(())
}

/// A bar per scene: the ratio, with its interval; the floor is the line at 1.
fn chart(figures: &[Figure]) -> String {
    const ROW: f64 = 24.0;
    const LEFT: f64 = 330.0;
    const UNIT: f64 = 360.0;
    #[allow(clippy::cast_precision_loss, reason = "a few dozen rows")]
    let at = |row: usize| 30.0 + ROW * row as f64;
    let height = at(figures.len()) + 20.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"860\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <text x=\"{LEFT}\" y=\"16\">ratio to the raw etcd-client floor, median and 90 % interval</text>\n"
    );
    let floor = LEFT + UNIT;
    for (row, figure) in figures.iter().enumerate() {
        let (y, ratio) = (at(row), &figure.ratio);
        let (low, median, high) =
            (LEFT + UNIT * ratio.low, UNIT * ratio.median, LEFT + UNIT * ratio.high);
        let middle = y + 8.0;
        // Writing to a string cannot fail.
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>\
             <rect x=\"{LEFT}\" y=\"{y}\" width=\"{median}\" height=\"16\" fill=\"#4a90a4\"/>\
             <line x1=\"{low}\" y1=\"{middle}\" x2=\"{high}\" y2=\"{middle}\" stroke=\"#222\"/>\
             <text x=\"{}\" y=\"{}\">{:.2}</text>",
            LEFT - 8.0,
            y + 12.0,
            figure.name,
            high.max(LEFT + median) + 6.0,
            y + 12.0,
            ratio.median
        );
    }
    let _ = writeln!(
        svg,
        "<line x1=\"{floor}\" y1=\"22\" x2=\"{floor}\" y2=\"{height}\" stroke=\"#a33\"/></svg>"
    );
    svg
}
