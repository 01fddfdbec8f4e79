//! The control: a holder as it is usually written, on etcd-client alone.
//!
//! Its deadline counts from the arrival of the answer, and a background task compares it twice a
//! second. That it overlaps proves that the instrument can see an overlap.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use etcd_client::{Client, Compare, CompareOp, PutOptions, Txn, TxnOp};
use etcd_recipes::testing::boot_nanos;

use crate::polling::{Stamp, poll};
use crate::wire::{Outcome, Said, say, words};

const CHECK_INTERVAL: Duration = Duration::from_millis(500);

#[derive(Default)]
struct Hold {
    deadline: AtomicU64,
    lost: AtomicBool,
}

impl Hold {
    fn renewed(&self, ttl: Duration) {
        self.deadline.store(boot_nanos() + ttl.as_nanos() as u64, Ordering::Release);
    }

    fn check(&self) -> bool {
        if boot_nanos() >= self.deadline.load(Ordering::Acquire) {
            self.lost.store(true, Ordering::Release);
        }
        self.is_held()
    }

    fn is_held(&self) -> bool {
        !self.lost.load(Ordering::Acquire)
    }
}

/// Acquires by the same keys as the mutex, tells so, and watches its hold until it is lost.
pub(crate) fn hold(endpoint: &str, path: &str, ttl: Duration) -> Outcome<()> {
    let words = words();
    let hold = Arc::new(Hold::default());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (client, lease, key) = runtime.block_on(acquire(endpoint, path, ttl, &hold))?;
    let renewed = hold.clone();
    runtime.spawn(async move {
        // After a failure no renewal comes any more, and the deadline passes.
        let _ = keep(client, lease, ttl, &renewed).await;
    });
    let (listener, token) = (Stamp::default(), Stamp::default());
    let (checked, heard, woken) = (hold.clone(), listener.clone(), token.clone());
    std::thread::spawn(move || {
        runtime.block_on(async {
            while checked.check() {
                tokio::time::sleep(CHECK_INTERVAL).await;
            }
        });
        woken.set();
        heard.set();
    });
    say(&Said::Held { key });
    say(&Said::Lost(poll(|| hold.is_held(), &words, &listener, &token)?));
    for _word in &words {}
    Ok(())
}

async fn acquire(
    endpoint: &str,
    path: &str,
    ttl: Duration,
    hold: &Hold,
) -> Outcome<(Client, i64, String)> {
    let mut client = Client::connect([endpoint], None).await?;
    let lease = client.lease_grant(i64::try_from(ttl.as_secs())?, None).await?.id();
    hold.renewed(ttl);
    let key = format!("{path}/{lease:x}");
    let absent = Compare::create_revision(key.as_str(), CompareOp::Equal, 0);
    let put = TxnOp::put(key.as_str(), "control", Some(PutOptions::new().with_lease(lease)));
    // Nobody else is on this path yet, so the key is the first in the queue.
    client.txn(Txn::new().when([absent]).and_then([put])).await?;
    Ok((client, lease, key))
}

async fn keep(
    mut client: Client,
    lease: i64,
    ttl: Duration,
    hold: &Hold,
) -> Result<(), etcd_client::Error> {
    let (mut keeper, mut answers) = client.lease_keep_alive(lease).await?;
    hold.renewed(ttl);
    while hold.is_held() {
        tokio::time::sleep(ttl / 3).await;
        keeper.keep_alive().await?;
        match answers.message().await? {
            Some(answer) if answer.ttl() > 0 => hold.renewed(ttl),
            _ => {
                hold.deadline.store(0, Ordering::Release);
                break;
            }
        }
    }
    Ok(())
}
