//! The instrument for the central promise: no rival is let in while `is_held()` says `true`.
//!
//! Holder and rival are separate processes of this program on one machine's boot-time clock. Each
//! round parts the holder from etcd in the way asked for and compares when the holder's
//! `is_held()` last said `true` (stamped before the call) with when the rival's `lock()` returned
//! (stamped after it). Times in the lines are milliseconds since the fault began. The last line
//! sums up the series in JSON.
//!
//! ```text
//! cargo run --example overlap --features testing -- --rounds 25 --ttl 2 --fault blackhole
//! ```
//!
//! `--recipe` says by which recipe both hold: a mutex, a write lock, a permit, or the leadership
//! of a selector or a latch, each asked and heard in its own way.
//!
//! With `--control` the holder is written on etcd-client by the usual rule, and is seen to
//! overlap. The exit code is 0 unless the library overlapped, held for longer than its last
//! renewal allows by the proxy's record, or a round could not be played.

#[path = "overlap/actors.rs"]
mod actors;
#[path = "overlap/control.rs"]
mod control;
#[path = "overlap/exchanges.rs"]
mod exchanges;
#[path = "overlap/options.rs"]
mod options;
#[path = "overlap/polling.rs"]
mod polling;
#[path = "overlap/record.rs"]
mod record;
#[path = "overlap/round.rs"]
mod round;
#[path = "overlap/wire.rs"]
mod wire;

use std::process::ExitCode;
use std::time::Duration;

use crate::options::{Options, USAGE};
use crate::record::Summary;
use crate::round::Stage;
use crate::wire::{Outcome, Said, say};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    if let [role @ ("holder" | "rival" | "control"), recipe, endpoint, path, seconds] = words[..] {
        return match act(role, recipe, endpoint, path, seconds) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                say(&Said::Failed(error.to_string()));
                ExitCode::FAILURE
            }
        };
    }
    let options = match Options::parse(args) {
        Ok(options) => options,
        Err(why) => {
            eprintln!("{why}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    match measure(&options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("overlap: {error}");
            ExitCode::FAILURE
        }
    }
}

/// A holder's or a rival's part.
fn act(role: &str, recipe: &str, endpoint: &str, path: &str, seconds: &str) -> Outcome<()> {
    let recipe = options::recipe(recipe)?;
    let ttl = Duration::from_secs(seconds.parse()?);
    match role {
        "holder" => actors::hold(recipe, endpoint, path, ttl),
        "rival" => actors::rival(recipe, endpoint, path, ttl),
        _ => control::hold(endpoint, path, ttl),
    }
}

/// Plays the series; whether the promise held. From the control nothing is asked.
fn measure(options: &Options) -> Outcome<bool> {
    let stage = Stage::set_up()?;
    let mut records = Vec::new();
    let mut kept = true;
    for number in 1..=options.rounds {
        let record = stage.play(options, number)?;
        println!("{number:>4}  {}  {record}", options.fault);
        let within = record.within_deadline(options.ttl);
        if !within {
            println!("      held for longer than the last renewal that can have counted allows");
        }
        kept &= options.control || (within && !record.overlaps());
        records.push(record);
    }
    let summary = Summary::of(&records).ok_or("no round was played")?;
    println!("{}", serde_json::to_string(&summary)?);
    Ok(kept)
}
