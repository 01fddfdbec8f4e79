//! The floor: our protocol written in raw etcd-client, with nothing around it.
//!
//! One client, one connection, a shared lease, a unique key per acquire, a guarded delete that
//! returns the head of the queue, and for contended paths one long-lived watch that is read and
//! not filtered. What it leaves out is what this library is for: deadlines, proofs, losses, open
//! attempts, interruption, other members.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use etcd_client::{
    Client, Compare, CompareOp, GetOptions, PutOptions, SortOrder, SortTarget, Txn, TxnOp,
    TxnOpResponse, WatchOptions,
};
use parking_lot::Mutex;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;

use crate::measure::Outcome;

pub(crate) struct Floor {
    runtime: Runtime,
    client: Client,
    lease: i64,
    numbers: Arc<AtomicU64>,
}

/// A key that stands, and the revision at which it was made.
struct Standing {
    key: Vec<u8>,
    created: i64,
}

impl Floor {
    pub(crate) fn connect(endpoint: &str) -> Outcome<Floor> {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        let (client, lease) = runtime.block_on(async {
            let mut client = Client::connect([endpoint], None).await?;
            let lease = client.lease_grant(3600, None).await?.id();
            Ok::<_, etcd_client::Error>((client, lease))
        })?;
        Ok(Floor { runtime, client, lease, numbers: Arc::default() })
    }

    /// Runs `work` in so many tasks until the time is up; how often it was done, per second.
    fn run<W, F>(&self, tasks: usize, length: Duration, work: W) -> Outcome<f64>
    where
        W: Fn(usize, Client) -> F + Send + Sync + 'static,
        F: Future<Output = Result<Client, etcd_client::Error>> + Send + 'static,
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
                        Ok::<_, etcd_client::Error>(done)
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
    pub(crate) fn pairs(&self, tasks: usize, length: Duration) -> Outcome<f64> {
        let (lease, numbers) = (self.lease, self.numbers.clone());
        self.run(tasks, length, move |task, mut client| {
            let number = numbers.fetch_add(1, Ordering::Relaxed);
            async move {
                let prefix = format!("/floor/{task}/");
                let (standing, _) = enqueue(&mut client, &prefix, lease, number).await?;
                leave(&mut client, &prefix, standing).await?;
                Ok(client)
            }
        })
    }

    /// Bare linearizable read transactions of one busy path.
    pub(crate) fn reads(&self, tasks: usize, length: Duration) -> Outcome<f64> {
        self.run(tasks, length, move |_, mut client| async move {
            let all = GetOptions::new().with_prefix().with_keys_only();
            let empty = Compare::create_revision("/busy/", CompareOp::Equal, 0).with_prefix();
            let txn = Txn::new().when([empty]).or_else([TxnOp::get("/busy/", Some(all))]);
            client.txn(txn).await?;
            Ok(client)
        })
    }

    /// Hand-offs on one path: whoever is not first is woken by the answer to the delete before it.
    pub(crate) fn hand_offs(&self, tasks: usize, length: Duration) -> Outcome<f64> {
        let prefix = "/floor-path/";
        let turns = Arc::new(Turns::default());
        let watching = self.runtime.block_on(async {
            let mut client = self.client.clone();
            let options = WatchOptions::new().with_prefix().with_prev_key();
            let mut stream = client.watch(prefix, Some(options)).await?;
            Ok::<_, etcd_client::Error>(tokio::spawn(async move {
                while let Ok(Some(_)) = stream.message().await {}
            }))
        })?;
        let (lease, numbers) = (self.lease, self.numbers.clone());
        let rate = self.run(tasks, length, move |_, mut client| {
            let (number, turns) = (numbers.fetch_add(1, Ordering::Relaxed), turns.clone());
            async move {
                let (standing, first) = enqueue(&mut client, prefix, lease, number).await?;
                if !first {
                    turns.wait(&standing).await;
                }
                if let Some(head) = leave(&mut client, prefix, standing).await? {
                    turns.give(head);
                }
                Ok(client)
            }
        });
        watching.abort();
        rate
    }
}

pub(crate) fn per_second(done: u64, time: Duration) -> f64 {
    #[allow(clippy::cast_precision_loss, reason = "counts of a bench are small")]
    let done = done as f64;
    done / time.as_secs_f64()
}

/// Whose turn it is, for tasks that wait and for those whose answer is still on its way.
#[derive(Default)]
struct Turns(Mutex<HashMap<(Vec<u8>, i64), Turn>>);

enum Turn {
    Waits(oneshot::Sender<()>),
    Given,
}

impl Turns {
    async fn wait(&self, standing: &Standing) {
        let id = (standing.key.clone(), standing.created);
        let told = {
            let mut turns = self.0.lock();
            if turns.remove(&id).is_some() {
                return;
            }
            let (tell, told) = oneshot::channel();
            turns.insert(id, Turn::Waits(tell));
            told
        };
        let _ = told.await;
    }

    fn give(&self, head: Standing) {
        let mut turns = self.0.lock();
        let id = (head.key, head.created);
        match turns.remove(&id) {
            Some(Turn::Waits(tell)) => {
                let _ = tell.send(());
            }
            Some(Turn::Given) | None => {
                turns.insert(id, Turn::Given);
            }
        }
    }
}

async fn enqueue(
    client: &mut Client,
    prefix: &str,
    lease: i64,
    number: u64,
) -> Result<(Standing, bool), etcd_client::Error> {
    let key = format!("{prefix}{lease:x}-{number}").into_bytes();
    let newest_two = GetOptions::new()
        .with_prefix()
        .with_sort(SortTarget::Create, SortOrder::Descend)
        .with_limit(2)
        .with_keys_only();
    let put = PutOptions::new().with_lease(lease);
    let txn =
        Txn::new().when([Compare::create_revision(key.clone(), CompareOp::Equal, 0)]).and_then([
            TxnOp::put(key.clone(), VALUE, Some(put)),
            TxnOp::get(prefix, Some(newest_two)),
        ]);
    let answer = client.txn(txn).await?;
    let created = answer.header().map_or(0, etcd_client::ResponseHeader::revision);
    let ahead = answer.op_responses().iter().any(|one| match one {
        TxnOpResponse::Get(get) => get.kvs().iter().any(|kv| kv.key() != key),
        _ => false,
    });
    Ok((Standing { key, created }, !ahead))
}

/// As long as what our contenders write about themselves.
const VALUE: &str =
    r#"{"client_id":"host-12345-abcdef","host":"host","pid":12345,"since":1700000000000}"#;

async fn leave(
    client: &mut Client,
    prefix: &str,
    standing: Standing,
) -> Result<Option<Standing>, etcd_client::Error> {
    let first = GetOptions::new()
        .with_prefix()
        .with_sort(SortTarget::Create, SortOrder::Ascend)
        .with_limit(1)
        .with_keys_only();
    let same = Compare::create_revision(standing.key.clone(), CompareOp::Equal, standing.created);
    let txn = Txn::new()
        .when([same])
        .and_then([TxnOp::delete(standing.key, None), TxnOp::get(prefix, Some(first))]);
    let answer = client.txn(txn).await?;
    Ok(answer.op_responses().iter().find_map(|one| match one {
        TxnOpResponse::Get(get) => get
            .kvs()
            .first()
            .map(|kv| Standing { key: kv.key().to_vec(), created: kv.create_revision() }),
        _ => None,
    }))
}
