//! Where a scene takes place: one server with a client of each kind.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use etcd_recipes::Client;
use etcd_recipes::testing::EtcdServer;

use crate::floor::Floor;
use crate::measure::{Contest, Measured, Outcome, Work, per_second};
use crate::raw::Keys;

pub(crate) struct Stage {
    etcd: EtcdServer,
    pub(crate) client: Client,
    pub(crate) floor: Arc<Floor>,
}

impl Stage {
    pub(crate) fn new() -> Outcome<Stage> {
        Stage::on(EtcdServer::start()?)
    }

    pub(crate) fn on_memory_disk() -> Outcome<Stage> {
        Stage::on(EtcdServer::builder().data_dir_in("/dev/shm").start()?)
    }

    fn on(etcd: EtcdServer) -> Outcome<Stage> {
        let client = Client::connect([etcd.endpoint()])?;
        client.wait_ready(Duration::from_secs(10))?;
        let floor = Arc::new(Floor::connect(&etcd.endpoint(), Keys::Unique)?);
        Ok(Stage { etcd, client, floor })
    }

    pub(crate) fn endpoint(&self) -> String {
        self.etcd.endpoint()
    }

    /// The server lives as long as the work.
    pub(crate) fn contest(
        self,
        ours: impl FnMut(Duration) -> Outcome<f64> + 'static,
        floor: impl Fn(&Floor, Duration) -> Outcome<f64> + 'static,
    ) -> Contest {
        let raw = self.floor.clone();
        self.contest_with(ours, move |length| floor(&raw, length), Vec::new)
    }

    /// As [`contest`](Stage::contest), with something more to tell.
    pub(crate) fn contest_with(
        self,
        ours: impl FnMut(Duration) -> Outcome<f64> + 'static,
        mut floor: impl FnMut(Duration) -> Outcome<f64> + 'static,
        details: impl FnMut() -> Vec<Measured> + 'static,
    ) -> Contest {
        let raw = self.floor.clone();
        let floor: Work = Box::new(move |length| {
            let _stage = &self;
            floor(length)
        });
        let tidy = Box::new(move || raw.compact());
        Contest { ours: Box::new(ours), floor, tidy, details: Box::new(details) }
    }
}

/// So many threads do one thing over and over; how often all of them together did it, per second.
pub(crate) fn threads<T: Send + 'static>(
    workers: Vec<T>,
    length: Duration,
    work: impl Fn(&T) -> Outcome<()> + Clone + Send + 'static,
) -> Outcome<f64> {
    let begun = Instant::now();
    let end = begun + length;
    let running: Vec<_> = workers
        .into_iter()
        .map(|worker| {
            let work = work.clone();
            thread::spawn(move || -> Outcome<u64> {
                let mut done = 0;
                while Instant::now() < end {
                    work(&worker)?;
                    done += 1;
                }
                Ok(done)
            })
        })
        .collect();
    let mut sum = 0;
    for one in running {
        sum += one.join().map_err(|_| "a worker panicked")??;
    }
    Ok(per_second(sum, begun.elapsed()))
}
