//! A writer that becomes a reader without leaving its place: its key is rewritten where it stands.
//!
//! The exclusion is over before the request is sent, since from the moment in which etcd applies
//! it readers may be inside. So it cannot be taken back either: an answer that never comes leaves
//! a reader's hold, which the key grants in either form, and the request goes on in the background.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use etcd_client::{Compare, CompareOp, PutOptions, Txn, TxnOp, TxnOpResponse};

use super::hold::{Hold, RELEASE_LIMIT};
use super::identity::ContenderMode;
use super::own_key::Found;
use crate::client::call::Kind;
use crate::error::{Error, Result};

const PAUSE: Duration = Duration::from_millis(100);
const ATTEMPT_LIMIT: Duration = Duration::from_secs(5);

impl Hold {
    /// Stops excluding others. An error says that etcd has refused it (the hold excludes as before,
    /// in a new epoch), or that the hold is lost, maybe only known from the answer.
    pub(crate) fn downgrade(self: &Arc<Hold>) -> Result<()> {
        self.check_held()?;
        let value = self.contender().identity(ContenderMode::Read);
        *self.rewritten.lock() = Some(value.clone());
        self.epoch.fetch_add(1, Ordering::AcqRel);
        let core = self.contender().core.clone();
        let rewriting = rewrite(self.clone(), value);
        if core.on_io_thread() {
            core.runtime.spawn(async move {
                let _ = rewriting.await;
            });
            return Ok(());
        }
        let until = core.clock.now() + RELEASE_LIMIT.min(self.remaining());
        match core.block_shielded("downgrade", until, rewriting) {
            Some(Err(refused)) if self.is_held() => Err(refused),
            _ => self.check_held(),
        }
    }

    fn check_held(&self) -> Result<()> {
        if self.is_held() {
            return Ok(());
        }
        self.check_may_ask()?;
        Err(self.lost_error())
    }
}

async fn rewrite(hold: Arc<Hold>, value: Vec<u8>) -> Result<()> {
    let core = &hold.contender().core;
    let key = hold.key();
    let mut maybe_done = false;
    while hold.is_held() {
        let put = PutOptions::new().with_lease(hold.lease());
        let txn = Txn::new()
            .when([
                Compare::create_revision(key, CompareOp::Equal, hold.token()),
                Compare::version(key, CompareOp::Equal, 1),
            ])
            .and_then([TxnOp::put(key, value.clone(), Some(put))])
            .or_else([TxnOp::get(key, None)]);
        let until = core.clock.now() + ATTEMPT_LIMIT;
        match core.txn("downgrade", key, Kind::Write, txn, until).await {
            Ok(response) => {
                if !response.succeeded() {
                    // Rewritten by an earlier try, or no longer ours.
                    let answers = response.op_responses();
                    let found = answers.iter().find_map(|one| match one {
                        TxnOpResponse::Get(get) => get.kvs().first(),
                        _ => None,
                    });
                    hold.judge(found.map(Found::from).as_ref()).await;
                    if !hold.is_held() {
                        break;
                    }
                }
                return Ok(());
            }
            Err(error) if refused(&error) && !maybe_done => {
                *hold.rewritten.lock() = None;
                return Err(error);
            }
            Err(error) => maybe_done |= error.is_ambiguous(),
        }
        core.clock.sleep(PAUSE).await;
    }
    Err(hold.lost_error())
}

fn refused(error: &Error) -> bool {
    !error.is_ambiguous() && !error.is_unreachable()
}
