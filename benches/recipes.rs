//! Speed, as a ratio: each figure stands beside the same protocol written in raw etcd-client,
//! measured in the same run, in turns.
//!
//! ```text
//! make bench
//! cargo bench --features testing --bench recipes -- [--quick] [--pairs 15] [--millis 400] [--quiet-secs 60] [NAME ..]
//! ```
//!
//! `NAME` selects the scenes whose names contain it. All of them take about ten minutes, one ten
//! to twenty seconds. `--quick` is five pairs of 150 ms and a quiet time of 15 s, half the time in
//! all: enough to see that it runs, not for a verdict on a bar. Results are printed, and written to
//! `target/bench/` as JSON and as a chart.

#![allow(missing_docs, reason = "a bench has no callers")]

#[path = "recipes/chart.rs"]
mod chart;
#[path = "recipes/facade.rs"]
mod facade;
#[path = "recipes/floor.rs"]
mod floor;
#[path = "recipes/floor_path.rs"]
mod floor_path;
#[path = "recipes/keys.rs"]
mod keys;
#[path = "recipes/loss.rs"]
mod loss;
#[path = "recipes/measure.rs"]
mod measure;
#[path = "recipes/noise.rs"]
mod noise;
#[path = "recipes/processes.rs"]
mod processes;
#[path = "recipes/quiet.rs"]
mod quiet;
#[path = "recipes/raw.rs"]
mod raw;
#[path = "recipes/report.rs"]
mod report;
#[path = "recipes/scenes.rs"]
mod scenes;
#[path = "recipes/single.rs"]
mod single;
#[path = "recipes/stage.rs"]
mod stage;
#[path = "recipes/visits.rs"]
mod visits;
#[path = "recipes/workers.rs"]
mod workers;

use std::process::ExitCode;
use std::time::Duration;

use etcd_recipes::testing::EtcdServer;

use crate::measure::Outcome;

struct Options {
    pairs: usize,
    length: Duration,
    quiet: Duration,
    names: Vec<String>,
}

impl Options {
    /// Cargo adds `--bench`.
    fn parse(args: impl Iterator<Item = String>) -> Result<Options, String> {
        let mut options = Options {
            pairs: 15,
            length: Duration::from_millis(400),
            quiet: Duration::from_secs(60),
            names: Vec::new(),
        };
        let mut args = args.filter(|arg| arg != "--bench");
        while let Some(arg) = args.next() {
            let mut number = || {
                let given = args.next().ok_or(format!("{arg} needs a number"))?;
                given.parse::<u64>().map_err(|error| format!("{arg} {given}: {error}"))
            };
            match arg.as_str() {
                "--quick" => {
                    options.pairs = 5;
                    options.length = Duration::from_millis(150);
                    options.quiet = Duration::from_secs(15);
                }
                "--quiet-secs" => options.quiet = Duration::from_secs(number()?),
                "--pairs" => options.pairs = usize::try_from(number()?).unwrap_or(1).max(1),
                "--millis" => options.length = Duration::from_millis(number()?),
                name if name.starts_with("--") => return Err(format!("unknown option {name}")),
                name => options.names.push(name.to_owned()),
            }
        }
        Ok(options)
    }

    fn selects(&self, name: &str) -> bool {
        self.names.is_empty() || self.names.iter().any(|part| name.contains(part.as_str()))
    }
}

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1).peekable();
    if args.next_if(|first| first == workers::FLAG).is_some() {
        return match workers::work(args) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("bench, a worker: {error}");
                ExitCode::FAILURE
            }
        };
    }
    let options = match Options::parse(args) {
        Ok(options) => options,
        Err(why) => {
            eprintln!("{why}");
            return ExitCode::from(2);
        }
    };
    match run(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Outcome<()> {
    let place = place()?;
    report::heading(&place);
    let mut pairs = Vec::new();
    for scene in scenes::all() {
        if options.selects(&scene.name) {
            let figure = measure::pairs(&scene, options.pairs, options.length)?;
            report::line(&figure);
            pairs.push(figure);
        }
    }
    let mut singles = Vec::new();
    for scene in single::all(options.quiet) {
        if options.selects(scene.name) {
            let figure = (scene.run)()?;
            report::single(scene.name, &figure);
            singles.push((scene.name, figure));
        }
    }
    report::write(&place, &pairs, &singles)
}

/// Which etcd, and how many cores it shares with us.
fn place() -> Outcome<String> {
    let metrics = EtcdServer::start()?.metrics()?;
    let version = metrics.split("server_version=\"").nth(1).and_then(|rest| rest.split('"').next());
    let cores = std::thread::available_parallelism()?;
    Ok(format!("etcd {}, {cores} cores", version.unwrap_or("of an unknown version")))
}
