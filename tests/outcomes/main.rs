//! The table of outcomes: what every blocking call returns, by when and what it leaves behind,
//! whatever happens to etcd, to its key, to its thread and to its client.
//!
//! The rows are in `rows.rs` and `rows_*.rs`, the columns in `table.rs`. `OUTCOME_CELLS=lock FrozenBefore` runs
//! the cells whose names contain each of these words.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod contexts;
mod losses;
mod rows;
mod rows_elections;
mod rows_multi;
mod rows_rwlock;
mod rows_semaphore;
mod scan;
mod stage;
mod table;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use etcd_recipes::Client;
use etcd_recipes::testing::EtcdServer;
use parking_lot::Mutex;

use rows::{Row, rows};
use stage::Stage;
use table::{Cell, SITUATIONS, Situation};

/// How many cells run at a time.
const CREW: usize = 6;

/// A cell that takes longer hangs.
const CELL_LIMIT: Duration = Duration::from_secs(60);

/// A cell to be run, by the number of its row.
type Job = (usize, Situation);

/// What a cell's run came to: nothing, or how it differs from what the table says.
struct Report {
    job: Job,
    differs: Vec<String>,
    took: Duration,
}

#[test]
fn the_table_of_outcomes() {
    let rows = Arc::new(rows());
    let jobs = wanted(&rows);
    assert!(!jobs.is_empty(), "no cell has such a name");
    let queue = Arc::new(Mutex::new(jobs.iter().copied().collect::<VecDeque<Job>>()));
    let (tell, told) = channel();
    let crew: Vec<_> = (0..CREW)
        .map(|_| {
            let (rows, queue, tell) = (rows.clone(), queue.clone(), tell.clone());
            thread::spawn(move || work(&rows, &queue, &tell))
        })
        .collect();
    drop(tell);
    let mut open: Vec<Job> = jobs.clone();
    let mut failures = BTreeMap::new();
    while !open.is_empty() {
        let Ok(report) = told.recv_timeout(CELL_LIMIT) else {
            let waiting = queue.lock().len();
            for (row, situation) in open.iter().take(open.len() - waiting) {
                failures.insert((*row, position(*situation)), vec!["did not come back".to_owned()]);
            }
            break;
        };
        open.retain(|job| *job != report.job);
        let (row, situation) = report.job;
        if std::env::var_os("OUTCOME_CELLS").is_some() {
            println!("{} | {situation:?} | {:.1?}", rows[row].call, report.took);
        }
        if !report.differs.is_empty() {
            failures.insert((row, position(situation)), report.differs);
        }
    }
    if open.is_empty() {
        // They stop their servers.
        crew.into_iter().for_each(|worker| worker.join().unwrap());
    }
    assert!(failures.is_empty(), "{}", as_table(&rows, &failures, jobs.len()));
}

fn position(situation: Situation) -> usize {
    SITUATIONS.iter().position(|one| *one == situation).unwrap()
}

/// Every cell that applies, or those that `OUTCOME_CELLS` names.
fn wanted(rows: &[Row]) -> Vec<Job> {
    let words = std::env::var("OUTCOME_CELLS").unwrap_or_default();
    let all = (0..rows.len()).flat_map(|row| SITUATIONS.map(|situation| (row, situation)));
    all.filter(|(row, situation)| {
        let name = format!("{} {} {situation:?}", rows[*row].op, rows[*row].call);
        matches!(rows[*row].cells.in_column(*situation), Cell::Says { .. })
            && words.split_whitespace().all(|word| name.contains(word))
    })
    .collect()
}

/// Runs cells, one after the other, on an etcd of this thread's own.
fn work(rows: &[Row], queue: &Mutex<VecDeque<Job>>, tell: &Sender<Report>) {
    let mut server: Option<(EtcdServer, Client)> = None;
    loop {
        let Some((row, situation)) = queue.lock().pop_front() else { return };
        let (etcd, witness) = server.get_or_insert_with(|| {
            let etcd = EtcdServer::builder().fast_ticks().start().unwrap();
            let witness = Client::connect([etcd.endpoint()]).unwrap();
            (etcd, witness)
        });
        let began = Instant::now();
        let run = catch_unwind(AssertUnwindSafe(|| run(etcd, witness, &rows[row], situation)));
        let differs = run.unwrap_or_else(|panic| {
            // What it left behind must not bother the next one.
            server = None;
            let text = panic.downcast_ref::<String>().map(String::as_str);
            vec![format!(
                "the stage broke: {}",
                text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("?")
            )]
        });
        let report = Report { job: (row, situation), differs, took: began.elapsed() };
        if tell.send(report).is_err() {
            return;
        }
    }
}

fn run(etcd: &EtcdServer, witness: &Client, row: &Row, situation: Situation) -> Vec<String> {
    let Cell::Says { value, when, left } = row.cells.in_column(situation) else {
        return Vec::new();
    };
    let stage = Stage::new(etcd, witness, situation, left);
    (row.script)(&stage);
    stage.end().differs(value, when)
}

fn as_table(rows: &[Row], failures: &BTreeMap<(usize, usize), Vec<String>>, ran: usize) -> String {
    let mut text = format!("{} of {ran} cells differ:\n", failures.len());
    for ((row, column), differs) in failures {
        let (row, situation) = (&rows[*row], SITUATIONS[*column]);
        let expected = match row.cells.in_column(situation) {
            Cell::Says { value, when, left } => {
                format!("{value} in {:?}..{:?}, {left:?} left", when.from, when.to)
            }
            Cell::Na(reason) => reason.to_owned(),
        };
        text.push_str(&format!(
            "| {:30} | {:20} | {expected} | {} |\n",
            row.call,
            format!("{situation:?}"),
            differs.join("; ")
        ));
    }
    text
}

#[test]
fn every_blocking_call_has_a_row() {
    let rows = rows();
    let in_table: BTreeSet<&str> = rows.iter().map(|row| row.op).collect();
    let in_sources = scan::op_names();
    let without_row: Vec<_> =
        in_sources.iter().filter(|(op, _)| !in_table.contains(op.as_str())).collect();
    assert!(without_row.is_empty(), "blocking calls without a row: {without_row:#?}");
    let without_call: Vec<_> =
        in_table.iter().filter(|op| !in_sources.contains_key(**op)).collect();
    assert!(without_call.is_empty(), "rows that name no call: {without_call:?}");
    for row in &rows {
        for situation in SITUATIONS {
            let cell = row.cells.in_column(situation);
            assert_ne!(cell, Cell::Na(""), "{}: {situation:?} is empty", row.call);
        }
    }
}
