//! The overlap instrument in short: it finds nothing on the library, and it can find something.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::PathBuf;
use std::process::Command;
use std::thread;

use serde_json::Value;

/// Cargo builds the examples before it runs a test, next to the directory of the tests.
fn program() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let program = test.parent().unwrap().parent().unwrap().join("examples").join("overlap");
    assert!(
        program.exists(),
        "{} is missing: run `cargo build --example overlap --features testing`",
        program.display()
    );
    program
}

fn measure(args: &[&str]) -> (bool, Value, String) {
    let output = Command::new(program()).args(args).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    let last = text.lines().last().unwrap_or_default();
    let summary =
        serde_json::from_str(last).unwrap_or_else(|error| panic!("{error}: {text}{errors}"));
    (output.status.success(), summary, text)
}

fn keeps_the_promise(fault: &str) -> u64 {
    let (success, summary, text) = measure(&["--rounds", "3", "--ttl", "2", "--fault", fault]);
    assert_eq!(summary["rounds"], 3, "{text}");
    assert_eq!(summary["overlaps"], 0, "{text}");
    assert!(summary["margin_ms"]["min"].as_f64().unwrap() > 0.0, "{text}");
    assert!(success, "{text}");
    summary["told_before_rival"].as_u64().unwrap()
}

#[test]
fn serial_no_overlap_when_no_byte_moves() {
    assert_eq!(keeps_the_promise("blackhole"), 3);
}

#[test]
fn serial_no_overlap_when_connections_are_reset() {
    assert_eq!(keeps_the_promise("reset"), 3);
}

#[test]
fn serial_no_overlap_when_etcd_stands_still() {
    assert_eq!(keeps_the_promise("freeze-etcd"), 3);
}

#[test]
fn serial_no_overlap_when_the_holder_stands_still() {
    // Nobody can be told while the process stands still, so that count is not looked at.
    keeps_the_promise("freeze-client");
}

#[test]
fn serial_no_overlap_when_answers_come_late() {
    assert_eq!(keeps_the_promise("late-answers"), 3);
}

/// Two at a time: each is an etcd and three processes that poll. How often the holder was told
/// before its rival was in, by recipe.
fn every_recipe_keeps_the_promise(fault: &str) -> [(&'static str, u64); 4] {
    let told = |recipe: &'static str| {
        let args = ["--rounds", "2", "--ttl", "2", "--fault", fault, "--recipe", recipe];
        let (success, summary, text) = measure(&args);
        println!("{recipe}\n{text}");
        assert_eq!(summary["rounds"], 2, "{recipe}: {text}");
        assert_eq!(summary["overlaps"], 0, "{recipe}: {text}");
        assert!(summary["margin_ms"]["min"].as_f64().unwrap() > 0.0, "{recipe}: {text}");
        assert!(success, "{recipe}: {text}");
        (recipe, summary["told_before_rival"].as_u64().unwrap())
    };
    thread::scope(|scope| {
        let locks = scope.spawn(move || [told("rwlock-write"), told("semaphore1")]);
        let [selector, latch] = [told("selector"), told("latch")];
        let [rwlock, semaphore] = locks.join().unwrap();
        [rwlock, semaphore, selector, latch]
    })
}

#[test]
fn serial_no_overlap_of_any_recipe_when_no_byte_moves() {
    for (recipe, told) in every_recipe_keeps_the_promise("blackhole") {
        assert_eq!(told, 2, "{recipe}");
    }
}

#[test]
fn serial_no_overlap_of_any_recipe_when_the_holder_stands_still() {
    every_recipe_keeps_the_promise("freeze-client");
}

#[test]
fn serial_a_client_that_counts_from_the_answer_overlaps() {
    let (_, summary, text) =
        measure(&["--control", "--rounds", "3", "--ttl", "2", "--fault", "late-answers"]);
    assert!(summary["overlaps"].as_u64().unwrap() > 0, "{text}");
}

#[test]
fn options_that_make_no_sense_are_refused() {
    for args in [
        &["--fault", "plague"][..],
        &["--rounds", "0"],
        &["--ttl", "two"],
        &["--ttl"],
        &["--recipe", "soup"],
        &["--control", "--recipe", "latch"],
        &["--what"],
    ] {
        let output = Command::new(program()).args(args).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(String::from_utf8(output.stderr).unwrap().contains("usage: overlap"), "{args:?}");
    }
}
