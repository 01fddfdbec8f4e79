//! The linearizable reads that a watch needs, done beside the stream so that it stays drained.

use std::future::Future;

use etcd_client::{GetOptions, GetResponse};

use super::{Entry, Range, Snapshot};
use crate::client::core::Core;
use crate::error::Result;
use crate::resilience::random_unit;

/// A read under way; dropping it gives it up.
pub(super) struct Reading {
    /// Tells its result from that of an earlier read.
    pub(super) number: u64,
    task: tokio::task::AbortHandle,
}

impl Reading {
    /// Starts `work`, which sends its result itself.
    pub(super) fn start(number: u64, work: impl Future<Output = ()> + Send + 'static) -> Reading {
        Reading { number, task: tokio::spawn(work).abort_handle() }
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The whole range.
pub(super) async fn snapshot(core: &Core, range: &Range) -> Result<Snapshot> {
    let response = read(core, range, GetOptions::new()).await?;
    Ok(Snapshot {
        revision: revision(&response),
        entries: response.kvs().iter().map(Entry::from).collect(),
    })
}

/// The revision of the store, asked for through the watch's own range, which its user may read.
pub(super) async fn head(core: &Core, range: &Range) -> Result<i64> {
    Ok(revision(&read(core, range, GetOptions::new().with_count_only()).await?))
}

fn revision(response: &GetResponse) -> i64 {
    response.header().map_or(0, |header| header.revision())
}

/// Reads with the patience of a watch: as long as its retry policy allows.
async fn read(core: &Core, range: &Range, options: GetOptions) -> Result<GetResponse> {
    let options = if range.is_prefix() { options.with_prefix() } else { options };
    let policy = core.config.resilience.get_watch().get_retry_policy();
    let started = core.clock.now();
    let mut attempt = 0;
    loop {
        let until = core.operation_limit();
        let error = match core.range("watch", range.key(), Some(options.clone()), until).await {
            Err(error) if error.is_unreachable() => error,
            answer => return answer,
        };
        attempt += 1;
        let elapsed = core.clock.now().saturating_since(started);
        match core.decide(policy.next(attempt, elapsed, random_unit()), attempt, elapsed).await {
            Some(pause) => core.clock.sleep(pause).await,
            None => return Err(error),
        }
    }
}
