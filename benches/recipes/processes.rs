//! Hand-offs between four processes of eight threads, on a store that others write to.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use etcd_recipes::testing::EtcdServer;
use etcd_recipes::{Client, Mutex};

use crate::floor::Floor;
use crate::floor_path::FloorPath;
use crate::measure::{Contest, Outcome};
use crate::noise::Noise;
use crate::raw::Keys;
use crate::visits::{Limits, Log, Span, Visit, rate, visit};
use crate::workers::{Orders, Worker};

pub(crate) const KIND: &str = "visits";

const PROCESSES: usize = 4;
const THREADS: usize = 8;

/// Time for the order to reach every process.
const MOMENT: Duration = Duration::from_millis(50);

/// The same four processes run both sides in turns; what is not measured is idle.
pub(crate) fn contest() -> Outcome<Contest> {
    let etcd = EtcdServer::start()?;
    let tidier = Floor::connect(&etcd.endpoint(), Keys::Unique)?;
    let noise = Noise::start(&etcd.endpoint())?;
    let workers = (0..PROCESSES)
        .map(|_| Worker::start(KIND, &etcd.endpoint()))
        .collect::<Outcome<Vec<_>>>()?;
    let workers = Rc::new(RefCell::new(workers));
    let (ours_log, floor_log) = (Log::default(), Log::default());
    let side = |name: &'static str, log: Log| {
        let workers = workers.clone();
        move |length| {
            let span = Span::soon(MOMENT, length);
            let visits = run(&mut workers.borrow_mut(), name, span)?;
            log.add(&visits)?;
            Ok(rate(&visits, span))
        }
    };
    let (ours, floor) = (side("ours", ours_log.clone()), side("floor", floor_log.clone()));
    Ok(Contest {
        ours: Box::new(ours),
        floor: Box::new(move |length| {
            let _lives = (&noise, &etcd);
            floor(length)
        }),
        tidy: Box::new(move || tidier.compact()),
        details: Box::new(move || {
            let limits = Limits { slow: Some(0.0), ..Limits::default() };
            let mut details = ours_log.details("ours", limits);
            details.extend(floor_log.details("floor", Limits::default()));
            details
        }),
    })
}

/// Lets all processes begin at the same time.
fn run(workers: &mut [Worker], side: &str, span: Span) -> Outcome<Vec<Vec<Visit>>> {
    for worker in &mut *workers {
        worker.tell(&format!("{side} {} {}", span.begin, span.end))?;
    }
    let mut all = Vec::new();
    for worker in workers {
        let visits: Vec<Vec<Visit>> = serde_json::from_str(&worker.answer()?)?;
        all.extend(visits);
    }
    Ok(all)
}

/// One of the processes, with a client of each kind.
pub(crate) fn worker(endpoint: &str) -> Outcome<Orders> {
    let client = Client::connect([endpoint])?;
    let mutex = Mutex::new(&client, "/ours/path")?;
    let floor = Arc::new(Floor::connect(endpoint, Keys::Unique)?);
    let path = FloorPath::open(&floor, "/floor-path/")?;
    Ok(Box::new(move |order| {
        let words: Vec<&str> = order.split(' ').collect();
        let [side, begin, end] = words[..] else { return Err("no such order".into()) };
        let span = Span { begin: begin.parse()?, end: end.parse()? };
        let visits = match side {
            "ours" => visit(&mutex, THREADS, span)?,
            _ => path.visit(THREADS, span)?,
        };
        Ok(serde_json::to_string(&visits)?)
    }))
}
