//! The promise in four scenes on a real etcd, as a timeline.
//!
//! ```text
//! cargo run --example demo --features testing -- [--endpoint http://127.0.0.1:2379]
//! ```
//!
//! Without an endpoint it starts an etcd of its own. The last line is `demo: ok`; if a step did
//! not happen in the promised order the exit code is not 0.

#[path = "demo/leadership.rs"]
mod leadership;
#[path = "demo/recorder.rs"]
mod recorder;
#[path = "demo/scenes.rs"]
mod scenes;
#[path = "demo/timeline.rs"]
mod timeline;

use std::process::ExitCode;
use std::time::Duration;

use etcd_recipes::Client;
use etcd_recipes::testing::EtcdServer;

use crate::recorder::Outcome;

/// How long etcd may take to answer before the first scene.
const READY_LIMIT: Duration = Duration::from_secs(5);

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let endpoint = match words[..] {
        [] => None,
        ["--endpoint", url] => Some(url),
        _ => {
            eprintln!("usage: demo [--endpoint URL]");
            return ExitCode::from(2);
        }
    };
    match play(endpoint) {
        Ok(true) => {
            println!("\ndemo: ok");
            ExitCode::SUCCESS
        }
        Ok(false) => {
            println!("\ndemo: failed");
            ExitCode::FAILURE
        }
        Err(error) => {
            println!("\ndemo: failed: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Plays all scenes; whether each kept its order.
fn play(endpoint: Option<&str>) -> Outcome<bool> {
    let own = match endpoint {
        Some(_) => None,
        None => Some(EtcdServer::start()?),
    };
    let endpoint = match (endpoint, &own) {
        (Some(url), _) => url.to_owned(),
        (None, Some(server)) => server.endpoint(),
        (None, None) => return Err("no etcd".into()),
    };
    Client::connect([&endpoint])?.wait_ready(READY_LIMIT)?;
    println!("etcd at {endpoint}{}", if own.is_some() { ", started for this demo" } else { "" });
    let mut kept = true;
    let scenes = [
        scenes::TRANSIENT_KEY,
        scenes::LOST_MUTEX,
        scenes::INTERRUPTION,
        leadership::LOST_LEADERSHIP,
    ];
    for (letter, scene) in ('a'..).zip(scenes) {
        timeline::title(letter, scene.title);
        let events = (scene.play)(&endpoint, timeline::event)?;
        let verdict = (scene.check)(&events);
        timeline::verdict(&verdict);
        kept &= verdict.is_ok();
    }
    Ok(kept)
}
