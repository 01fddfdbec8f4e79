//! The floor of a contended path: one long-lived watch per process, and whose turn it is.
//!
//! A waiter of the same process is woken by the answer to the delete before it, one behind another
//! process by the watch's delete event. The watch is not filtered.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{Error, EventType, WatchOptions, WatchStream};
use etcd_recipes::testing::boot_nanos;
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::floor::Floor;
use crate::measure::Outcome;
use crate::raw::{Standing, leave};
use crate::visits::{Span, Visit};

pub(crate) struct FloorPath {
    floor: Arc<Floor>,
    prefix: Arc<str>,
    turns: Arc<Turns>,
    watching: JoinHandle<()>,
}

impl FloorPath {
    pub(crate) fn open(floor: &Arc<Floor>, prefix: &str) -> Outcome<FloorPath> {
        let turns = Arc::new(Turns::default());
        let ours = floor.contender.start(prefix).into_bytes();
        let watching = floor.runtime.block_on(async {
            let options = WatchOptions::new().with_prefix().with_prev_key();
            let stream = floor.client.clone().watch(prefix, Some(options)).await?;
            Ok::<_, Error>(tokio::spawn(follow(stream, turns.clone(), ours)))
        })?;
        Ok(FloorPath { floor: floor.clone(), prefix: prefix.into(), turns, watching })
    }

    /// So many tasks take the lock in turns for a while; what each of them went through.
    pub(crate) fn visit(&self, tasks: usize, span: Span) -> Outcome<Vec<Vec<Visit>>> {
        self.floor.runtime.block_on(async {
            let tasks: Vec<_> =
                (0..tasks).map(|task| tokio::spawn(self.visitor(task, span))).collect();
            let mut all = Vec::new();
            for task in tasks {
                all.push(task.await??);
            }
            Ok(all)
        })
    }

    fn visitor(
        &self,
        task: usize,
        span: Span,
    ) -> impl Future<Output = Result<Vec<Visit>, Error>> + Send + use<> {
        let (prefix, turns) = (self.prefix.clone(), self.turns.clone());
        let (contender, mut client) = (self.floor.contender.clone(), self.floor.client.clone());
        let ours = contender.start(&prefix).into_bytes();
        async move {
            let mut visits = Vec::new();
            let early = span.begin.saturating_sub(boot_nanos());
            tokio::time::sleep(Duration::from_nanos(early)).await;
            let mut begun = boot_nanos();
            while begun < span.end {
                let (standing, ahead) = contender.enqueue(&mut client, &prefix, task).await?;
                if let Some(ahead) = ahead {
                    turns.wait(&standing, ahead).await;
                }
                let entered = boot_nanos();
                let (token, leaving) = (standing.created, entered);
                let head = leave(&mut client, &prefix, standing).await?;
                if let Some(head) = head.filter(|head| head.key.starts_with(&ours)) {
                    turns.give(head);
                }
                let left = boot_nanos();
                visits.push(Visit { begun, entered, leaving, left, token });
                begun = left;
            }
            Ok(visits)
        }
    }
}

impl Drop for FloorPath {
    fn drop(&mut self) {
        self.watching.abort();
    }
}

/// Tells `turns` what others have deleted; of our own deletes the answers tell.
async fn follow(mut stream: WatchStream, turns: Arc<Turns>, ours: Vec<u8>) {
    while let Ok(Some(message)) = stream.message().await {
        for event in message.events() {
            if event.event_type() != EventType::Delete {
                continue;
            }
            if let Some(gone) = event.prev_kv().filter(|kv| !kv.key().starts_with(&ours)) {
                turns.left(Standing { key: gone.key().to_vec(), created: gone.create_revision() });
            }
        }
    }
}

/// Whose turn it is, for tasks that wait and for those whose answer is still on its way.
#[derive(Default)]
struct Turns(Mutex<State>);

#[derive(Default)]
struct State {
    /// By themselves: who is right ahead, and how they are told.
    waiting: HashMap<Standing, (Standing, oneshot::Sender<()>)>,
    /// Whose turn came before they waited.
    given: Option<Standing>,
    /// The last of another process that left. While its successor has not waited yet, nobody else
    /// leaves, so one is enough.
    left: Option<Standing>,
}

impl Turns {
    async fn wait(&self, standing: &Standing, ahead: Standing) {
        let told = {
            let mut state = self.0.lock();
            if state.given.as_ref() == Some(standing) || state.left.as_ref() == Some(&ahead) {
                return;
            }
            let (tell, told) = oneshot::channel();
            state.waiting.insert(standing.clone(), (ahead, tell));
            told
        };
        let _ = told.await;
    }

    fn give(&self, head: Standing) {
        let mut state = self.0.lock();
        match state.waiting.remove(&head) {
            Some((_, tell)) => {
                let _ = tell.send(());
            }
            None => state.given = Some(head),
        }
    }

    fn left(&self, gone: Standing) {
        let mut state = self.0.lock();
        let next = state.waiting.iter().find(|(_, (ahead, _))| *ahead == gone);
        match next.map(|(standing, _)| standing.clone()) {
            Some(next) => {
                if let Some((_, tell)) = state.waiting.remove(&next) {
                    let _ = tell.send(());
                }
            }
            None => state.left = Some(gone),
        }
    }
}
