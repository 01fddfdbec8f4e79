//! The setter's side of a barrier: one key, known as ours by the random part of its value.

use std::sync::{Arc, Weak};
use std::time::Duration;

use etcd_client::{Compare, CompareOp, Txn, TxnOp};

use crate::client::call::Kind;
use crate::client::core::{BoxFuture, Core};
use crate::client::identity::random_text;
use crate::client::runtime::Abandon;
use crate::clock::Instant;
use crate::error::{Error, ErrorKind, Result};
use crate::lease::{Lease, Owner, Presence, Sighting};
use crate::presence::restore;
use crate::race::{Either, race};
use crate::recipe::{RecipeCore, Signal};
use crate::resilience::{LeaseResilience, LeaseTiming};

/// How often a `set` looks whether a heal has brought the key back.
const PACE: Duration = Duration::from_millis(50);

/// What all calls of one barrier object share.
pub(super) struct Keeping {
    pub(super) core: Arc<Core>,
    pub(super) recipe: Arc<RecipeCore>,
    /// As etcd knows it.
    pub(super) key: Vec<u8>,
    pub(super) timing: LeaseTiming,
    pub(super) resilience: LeaseResilience,
    /// What this object has set and not removed.
    pub(super) standing: parking_lot::Mutex<Option<Standing>>,
    /// One `set` or `remove` at a time.
    pub(super) turn: tokio::sync::Mutex<()>,
}

#[derive(Clone)]
pub(super) struct Standing {
    pub(super) presence: Arc<Presence>,
    /// `<client_id>:<nonce>`, drawn anew for each setting.
    value: Vec<u8>,
}

/// The key of one setting.
struct BarrierKey {
    me: Weak<BarrierKey>,
    core: Arc<Core>,
    key: Vec<u8>,
    value: Vec<u8>,
}

impl Owner for BarrierKey {
    fn establish(&self, lease: Lease) -> BoxFuture<Result<bool>> {
        let Some(me) = self.me.upgrade() else { return Box::pin(async { Ok(false) }) };
        Box::pin(async move {
            let until = me.core.operation_limit();
            let ours = |kv: &etcd_client::KeyValue| kv.value() == me.value;
            let put = restore(&me.core, "barrier.set", &me.key, &me.value, lease.id, until, ours);
            Ok(put.await?.is_some())
        })
    }

    fn key(&self) -> Option<Vec<u8>> {
        Some(self.key.clone())
    }

    fn judge(&self, lease: i64, found: Option<&etcd_client::KeyValue>) -> Sighting {
        match found {
            Some(kv) if kv.value() == self.value && kv.lease() == lease => Sighting::Ours,
            _ => Sighting::Amiss,
        }
    }
}

impl Keeping {
    /// `false`: somebody else's barrier stands. Dropped half way, it undoes what it did.
    pub(super) async fn set(self: Arc<Keeping>, until: Instant, abandon: Abandon) -> Result<bool> {
        match race(self.try_set(until, &abandon), abandon.fired()).await {
            Either::First(outcome) => outcome,
            Either::Second(()) => Err(Error::interrupted("barrier.set")),
        }
    }

    async fn try_set(&self, until: Instant, abandon: &Abandon) -> Result<bool> {
        let _turn = self.turn.lock().await;
        let standing = self.standing.lock().clone();
        if let Some(standing) = standing {
            if standing.presence.is_stopped() {
                // A removal that etcd has not confirmed.
                self.take_away(&standing, until).await?;
            } else if let Some(answer) = self.look_after(&standing, until).await? {
                return Ok(answer);
            }
        }
        let value = format!("{}:{}", self.recipe.client_id(), random_text(12)).into_bytes();
        let owner = Arc::new_cyclic(|me| BarrierKey {
            me: me.clone(),
            core: self.core.clone(),
            key: self.key.clone(),
            value: value.clone(),
        });
        let presence = Presence::new(
            self.core.clone(),
            self.recipe.clone(),
            owner,
            self.timing,
            self.resilience.clone(),
        );
        match presence.start(until, abandon).await {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::NotEstablished => return Ok(false),
            Err(error) => return Err(error),
        }
        *self.standing.lock() = Some(Standing { presence: presence.clone(), value });
        if let Err(closed) = self.recipe.check_open() {
            // The close may have looked just before this was there to be seen.
            presence.stop();
            presence.give_back(until).await?;
            return Err(closed);
        }
        self.recipe.signal(Signal::Restored);
        Ok(true)
    }

    /// What an earlier `set` of this object says to another one; `None`: nothing, it is over.
    async fn look_after(&self, standing: &Standing, until: Instant) -> Result<Option<bool>> {
        while !standing.presence.is_failed() {
            let found = self.core.range("barrier.set", &self.key, None, until).await?;
            match found.kvs().first() {
                Some(kv) => return Ok(Some(kv.value() == standing.value)),
                // A heal is due.
                None if self.core.clock.now() < until => self.core.clock.sleep(PACE).await,
                None => {
                    let text = format!("{}: our key did not come back", self.recipe.identity());
                    return Err(Error::new(ErrorKind::Lost, text));
                }
            }
        }
        Ok(None)
    }

    /// Whether our own key stood and is deleted now.
    pub(super) async fn remove(self: Arc<Keeping>, until: Instant) -> Result<bool> {
        let _turn = self.turn.lock().await;
        let Some(standing) = self.standing.lock().clone() else { return Ok(false) };
        // From here on nothing puts the key back.
        standing.presence.stop();
        self.take_away(&standing, until).await
    }

    async fn take_away(&self, standing: &Standing, until: Instant) -> Result<bool> {
        let removed = self.delete(&standing.value, until).await?;
        // A request that is still on its way finds its lease gone.
        if let Err(error) = standing.presence.clone().give_back(until).await {
            log::debug!("{}: the lease is left to its TTL: {error}", self.recipe.identity());
        }
        *self.standing.lock() = None;
        Ok(removed)
    }

    async fn delete(&self, value: &[u8], until: Instant) -> Result<bool> {
        let op = "barrier.remove";
        let mut unanswered = false;
        loop {
            let txn = Txn::new()
                .when([Compare::value(&*self.key, CompareOp::Equal, value)])
                .and_then([TxnOp::delete(&*self.key, None)]);
            match self.core.txn(op, &self.key, Kind::Write, txn, until).await {
                // Where an attempt had no answer, it is that one which has removed the key.
                Ok(response) => return Ok(response.succeeded() || unanswered),
                Err(error) if error.is_ambiguous() && self.core.clock.now() < until => {
                    unanswered = true;
                    self.core.clock.sleep(PACE).await;
                }
                Err(error) => return Err(error),
            }
        }
    }
}
