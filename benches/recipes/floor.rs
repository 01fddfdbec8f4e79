//! The floor: our protocol written in raw etcd-client, with nothing around it.
//!
//! One client, one connection, a shared lease, a unique key per acquire, a guarded delete that
//! returns the head of the queue. What it leaves out is what this library is for: deadlines,
//! proofs, losses, open attempts, interruption, other members.

use std::sync::Arc;
use std::time::{Duration, Instant};

use etcd_client::{
    Client, CompactionOptions, Compare, CompareOp, Error, GetOptions, ResponseHeader, Txn, TxnOp,
};
use tokio::runtime::Runtime;

use crate::measure::{Outcome, per_second};
use crate::raw::{Contender, Keys, leave};

pub(crate) struct Floor {
    pub(crate) runtime: Runtime,
    pub(crate) client: Client,
    pub(crate) contender: Contender,
}

impl Floor {
    pub(crate) fn connect(endpoint: &str, keys: Keys) -> Outcome<Floor> {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        let (client, lease) = runtime.block_on(connected(endpoint))?;
        Ok(Floor { runtime, client, contender: Contender::new(lease, keys) })
    }

    /// Drops the store's history, and returns once that is done.
    ///
    /// Keys that were deleted slow the reads of their prefix until then. Left alone they would
    /// soon be most of what is measured, the same on both sides.
    pub(crate) fn compact(&self) -> Outcome<()> {
        let mut client = self.client.clone();
        self.runtime.block_on(async {
            let now = client.get("now", None).await?;
            let revision = now.header().map_or(0, ResponseHeader::revision);
            let physical = CompactionOptions::new().with_physical();
            match client.compact(revision, Some(physical)).await {
                // Nothing was written since the last time.
                Err(Error::GRpcStatus(status)) if status.message().contains("compacted") => Ok(()),
                done => Ok(done.map(drop)?),
            }
        })
    }

    /// Runs `work` in so many tasks until the time is up; how often it was done, per second.
    fn run<W, F>(&self, tasks: usize, length: Duration, work: W) -> Outcome<f64>
    where
        W: Fn(usize, Client) -> F + Send + Sync + 'static,
        F: Future<Output = Result<Client, Error>> + Send + 'static,
    {
        let work = Arc::new(work);
        let begun = Instant::now();
        let end = begun + length;
        let done = self.runtime.block_on(async {
            let tasks: Vec<_> = (0..tasks)
                .map(|task| {
                    let (work, mut client) = (work.clone(), self.client.clone());
                    tokio::spawn(async move {
                        let mut done = 0_u64;
                        while Instant::now() < end {
                            client = work(task, client).await?;
                            done += 1;
                        }
                        Ok::<_, Error>(done)
                    })
                })
                .collect();
            let mut sum = 0;
            for task in tasks {
                sum += task.await??;
            }
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(sum)
        })?;
        Ok(per_second(done, begun.elapsed()))
    }

    /// Uncontended pairs: a put that reads who is ahead, and a guarded delete that reads the head.
    /// Each task has a path of its own below `prefix`.
    pub(crate) fn pairs(&self, tasks: usize, prefix: &str, length: Duration) -> Outcome<f64> {
        let prefix = prefix.to_owned();
        let contender = self.contender.clone();
        self.run(tasks, length, move |task, mut client| {
            let (contender, prefix) = (contender.clone(), format!("{prefix}{task}/"));
            async move {
                let (standing, _) = contender.enqueue(&mut client, &prefix, task).await?;
                leave(&mut client, &prefix, standing).await?;
                Ok(client)
            }
        })
    }

    /// Bare linearizable read transactions of one busy path.
    pub(crate) fn reads(&self, tasks: usize, length: Duration) -> Outcome<f64> {
        self.run(tasks, length, move |_, mut client| async move {
            busy_read(&mut client).await?;
            Ok(client)
        })
    }
}

/// A client with a lease of its own.
pub(crate) async fn connected(endpoint: &str) -> Result<(Client, i64), Error> {
    let mut client = Client::connect([endpoint], None).await?;
    let lease = client.lease_grant(3600, None).await?.id();
    Ok((client, lease))
}

pub(crate) async fn busy_read(client: &mut Client) -> Result<(), Error> {
    let all = GetOptions::new().with_prefix().with_keys_only();
    let empty = Compare::create_revision("/busy/", CompareOp::Equal, 0).with_prefix();
    let txn = Txn::new().when([empty]).or_else([TxnOp::get("/busy/", Some(all))]);
    client.txn(txn).await.map(drop)
}
