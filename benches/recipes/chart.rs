//! The chart: the ratios against the floor, and below them every value that has a limit, as a part
//! of it.

use std::fmt::Write as _;

use crate::measure::{Figure, Measured};
use crate::report::Verdict;

const ROW: f64 = 22.0;
const LEFT: f64 = 430.0;
/// How wide a ratio of 1, and a value at its limit, is.
const UNIT: f64 = 320.0;
/// What is wider than this is cut off.
const MOST: f64 = 1.4;
const WIDTH: f64 = LEFT + UNIT * MOST + 310.0;

struct Chart {
    svg: String,
    y: f64,
}

pub(crate) fn chart(place: &str, figures: &[Figure], singles: &[(&str, Vec<Measured>)]) -> String {
    let mut chart = Chart { svg: String::new(), y: 10.0 };
    chart.title(&format!(
        "Ratio to the raw etcd-client floor: median, 90 % interval; the mark is the bar ({place})"
    ));
    let top = chart.y;
    for figure in figures {
        chart.ratio(figure);
    }
    chart.line_at_one(top);
    chart.title("Values as a part of what is allowed at most");
    let top = chart.y;
    let details = figures.iter().map(|figure| (figure.name.as_str(), &figure.details));
    let others = singles.iter().map(|(name, measured)| (*name, measured));
    for (name, measured) in details.chain(others) {
        if measured.is_empty() {
            continue;
        }
        chart.heading(name);
        for one in measured {
            chart.value(one);
        }
    }
    chart.line_at_one(top);
    let (height, svg) = (chart.y + 20.0, chart.svg);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n{svg}</svg>\n"
    )
}

fn colour(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Missed => "#c0574b",
        Verdict::Within => "#d9a441",
        Verdict::Met => "#4a90a4",
        Verdict::NotAsked => "#a9b7bd",
    }
}

fn at(part: f64) -> f64 {
    LEFT + UNIT * part.clamp(0.0, MOST)
}

impl Chart {
    /// Writing to a string cannot fail.
    fn put(&mut self, element: std::fmt::Arguments<'_>) {
        let _ = writeln!(self.svg, "{element}");
    }

    fn title(&mut self, text: &str) {
        let y = self.y + 18.0;
        self.put(format_args!("<text x=\"10\" y=\"{y}\" font-weight=\"bold\">{text}</text>"));
        self.y += 30.0;
    }

    fn heading(&mut self, text: &str) {
        let y = self.y + 14.0;
        self.put(format_args!("<text x=\"10\" y=\"{y}\" fill=\"#444\">{text}</text>"));
        self.y += ROW;
    }

    fn row(&mut self, label: &str, part: f64, verdict: Verdict) {
        let (y, text, width) = (self.y, self.y + 12.0, at(part) - LEFT);
        let (label_x, colour) = (LEFT - 8.0, colour(verdict));
        self.put(format_args!(
            "<text x=\"{label_x}\" y=\"{text}\" text-anchor=\"end\">{label}</text>\
             <rect x=\"{LEFT}\" y=\"{y}\" width=\"{width:.1}\" height=\"16\" fill=\"{colour}\"/>"
        ));
    }

    fn note(&mut self, x: f64, text: &str) {
        let (x, y) = (x + 8.0, self.y + 12.0);
        self.put(format_args!("<text x=\"{x:.1}\" y=\"{y}\">{text}</text>"));
        self.y += ROW;
    }

    fn ratio(&mut self, figure: &Figure) {
        let ratio = &figure.ratio;
        self.row(&figure.name, ratio.median, figure.verdict());
        let (y, middle) = (self.y, self.y + 8.0);
        let (low, high) = (at(ratio.low), at(ratio.high));
        self.put(format_args!(
            "<line x1=\"{low:.1}\" y1=\"{middle}\" x2=\"{high:.1}\" y2=\"{middle}\" stroke=\"#222\"/>"
        ));
        if let Some(bar) = figure.bar {
            let (x, bottom) = (at(bar), y + 16.0);
            self.put(format_args!(
                "<line x1=\"{x:.1}\" y1=\"{y}\" x2=\"{x:.1}\" y2=\"{bottom}\" stroke=\"#000\" \
                 stroke-width=\"3\"/>"
            ));
        }
        let apart = figure.ours.percent();
        let note = format!(
            "{:.2} ({:.2} to {:.2}), ours {:.0}/s, {apart:.0} % apart",
            ratio.median, ratio.low, ratio.high, figure.ours.median
        );
        self.note(high.max(at(1.0)), &note);
    }

    /// A value without a limit is a number only.
    fn value(&mut self, one: &Measured) {
        let part = one.bar.map_or(0.0, |bar| if bar > 0.0 { one.value / bar } else { one.value });
        self.row(&one.what, part, one.verdict());
        match one.bar {
            None => self.note(LEFT, &one.shown()),
            Some(bar) => {
                let note = format!("{}, at most {bar} {}", one.shown(), one.unit);
                self.note(at(part).max(at(1.0)), note.trim_end());
            }
        }
    }

    fn line_at_one(&mut self, top: f64) {
        let (x, bottom) = (at(1.0), self.y);
        self.put(format_args!(
            "<line x1=\"{x}\" y1=\"{top}\" x2=\"{x}\" y2=\"{bottom}\" stroke=\"#a33\"/>"
        ));
        self.y += 10.0;
    }
}
