//! What is asked of etcd about a hold, and what is written only if it stands.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::acquire::any_cancelled;
use super::hold::Hold;
use super::identity::ContenderMode;
use super::own_key::Found;
use crate::client::call::Kind;
use crate::error::{Error, Result};
use crate::lease::LossReason;
use crate::race::{Either, race};
use crate::recipe::RecipeCore;

impl Hold {
    /// In a fork's child, and for a closed client or recipe, nothing can be asked any more.
    pub(super) fn check_may_ask(&self) -> Result<()> {
        if self.is_forked() {
            return self.contender.core.check_usable();
        }
        match self.loss() {
            Some(loss) if loss.reason == LossReason::Closed => {
                Err(Error::closed(self.contender.recipe.identity()))
            }
            _ => Ok(()),
        }
    }

    /// The hold as etcd sees it now.
    pub(crate) fn verify(self: &Arc<Hold>) -> Result<bool> {
        verify(vec![self.clone()])
    }

    /// Reads the keys and judges by what is found.
    async fn read_keys(self: &Arc<Hold>, op: &'static str) -> Result<()> {
        let core = &self.contender.core;
        for key in &self.keys {
            let read = core.range(op, key, None, core.operation_limit()).await?;
            self.judge(read.kvs().first().map(Found::from).as_ref()).await;
        }
        Ok(())
    }

    /// The compares that make a write depend on the hold, decided inside etcd. A downgrade
    /// rewrites the key, and nothing else ever does, save a leader's proclamation.
    pub(crate) fn fence(&self) -> Vec<etcd_client::Compare> {
        use etcd_client::{Compare, CompareOp};
        let created = self.create_revision;
        let mut fence: Vec<_> = self
            .keys
            .iter()
            .map(|key| Compare::create_revision(key.clone(), CompareOp::Equal, created))
            .collect();
        if self.mode != ContenderMode::Lead {
            let unchanged = |key: &Vec<u8>| Compare::version(key.clone(), CompareOp::Equal, 1);
            fence.extend(self.keys.iter().map(unchanged));
        }
        fence
    }

    /// Runs `then` in etcd if the hold still stands there; `None`: fenced, nothing was done.
    pub(crate) fn guarded(
        self: &Arc<Hold>,
        op: &'static str,
        key: Vec<u8>,
        then: Vec<etcd_client::TxnOp>,
    ) -> Result<Option<etcd_client::TxnResponse>> {
        guarded(op, &self.contender.recipe, vec![self.clone()], key, then)
    }
}

/// Runs `then` in etcd if all the holds still stand there; `None`: fenced, nothing was done.
pub(crate) fn guarded(
    op: &'static str,
    recipe: &Arc<RecipeCore>,
    holds: Vec<Arc<Hold>>,
    key: Vec<u8>,
    then: Vec<etcd_client::TxnOp>,
) -> Result<Option<etcd_client::TxnResponse>> {
    let Some(first) = holds.first() else { return Ok(None) };
    // "Lost" is answered before the scope is looked at: it is the better reason.
    if !all_stand(&holds)? {
        return Ok(None);
    }
    let core = first.contender.core.clone();
    let fenced_off = Arc::new(AtomicBool::new(false));
    let fenced = fenced_off.clone();
    let done = core.clone().block_on(op, Some(recipe), async move {
        let fence: Vec<_> = holds.iter().flat_map(|hold| hold.fence()).collect();
        let txn = etcd_client::Txn::new().when(fence).and_then(then);
        let asking = core.txn(op, &key, Kind::Write, txn, core.operation_limit());
        let response = unless_closed(&holds, asking).await?;
        if response.succeeded() {
            return Ok(Some(response));
        }
        fenced.store(true, Ordering::Release);
        // Who was fenced off wants to know why soon: look at the keys.
        for hold in &holds {
            let _ = hold.read_keys("fenced").await;
        }
        Ok(None)
    });
    match done {
        // It may be this very loss that interrupts, and that is the answer.
        Err(error) if error.is_interrupted() && fenced_off.load(Ordering::Acquire) => Ok(None),
        done => done,
    }
}

/// Whether all the holds stand, as far as is known here; an error if the client or the recipe of
/// one is closed, of which the others may have been lost.
fn all_stand(holds: &[Arc<Hold>]) -> Result<bool> {
    if holds.iter().all(|hold| hold.is_held()) {
        return Ok(true);
    }
    holds.iter().try_for_each(|hold| hold.check_may_ask())?;
    Ok(false)
}

/// All the holds as etcd sees them now.
pub(super) fn verify(holds: Vec<Arc<Hold>>) -> Result<bool> {
    let Some(first) = holds.first().cloned() else { return Ok(true) };
    if !all_stand(&holds)? {
        return Ok(false);
    }
    let (core, recipe) = (&first.contender.core, Some(&*first.contender.recipe));
    let asked = holds.clone();
    let verified = core.block_on("guard.verify", recipe, async move {
        let asking = async {
            for hold in &asked {
                hold.read_keys("verify").await?;
            }
            Ok(())
        };
        unless_closed(&asked, asking).await?;
        Ok(asked.iter().all(|hold| hold.is_held()))
    });
    match verified {
        // It may be this very loss that interrupts, and that is the answer.
        Err(error) if error.is_interrupted() && holds.iter().any(|hold| hold.is_lost()) => {
            Ok(false)
        }
        verified => verified,
    }
}

/// Asks for several holds, until the recipe of one is closed. Of a single one the caller hears by
/// itself.
async fn unless_closed<T>(
    holds: &[Arc<Hold>],
    asking: impl Future<Output = Result<T>>,
) -> Result<T> {
    if holds.len() == 1 {
        return asking.await;
    }
    let closings = holds.iter().map(|hold| hold.contender.recipe.closed());
    match race(asking, any_cancelled(closings)).await {
        Either::First(answer) => answer,
        Either::Second(()) => {
            holds.iter().try_for_each(|hold| hold.contender.recipe.check_open())?;
            Err(Error::internal("a recipe that was closed is open"))
        }
    }
}
