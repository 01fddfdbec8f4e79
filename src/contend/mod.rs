//! Contending for a path: an ordered key under a prefix, from enqueue to release. Locks and
//! elections are rules over this one mechanism, so that a fix here is a fix everywhere.

mod acquire;
mod hold;
mod identity;
mod losses;
mod mirror;
mod own_keys;
mod queue;
mod requests;

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::client::core::{Core, unconfirmed};
use crate::error::{Error, ErrorKind, Result};
use crate::lease::{SessionKey, Ticket};
use crate::recipe::RecipeCore;
use crate::watch::Entry;

pub(crate) use acquire::{Acquired, acquire, try_acquire};
pub(crate) use hold::Hold;
pub use identity::Contender as ContenderInfo;
pub(crate) use losses::Losses;
pub(crate) use own_keys::OwnKeys;
pub(crate) use queue::Queues;

/// Who contends, for what, and on which terms: what every acquire of one recipe shares.
pub(crate) struct Contender {
    pub(crate) core: Arc<Core>,
    pub(crate) recipe: Arc<RecipeCore>,
    /// The recipe's path as etcd knows it, with the `/` that ends it.
    pub(crate) prefix: Vec<u8>,
    pub(crate) session: SessionKey,
    pub(crate) losses: Losses,
    /// The holds that stand, for the recipe's close.
    holds: Mutex<HashMap<usize, Weak<Hold>>>,
}

impl Contender {
    pub(crate) fn new(
        core: Arc<Core>,
        recipe: Arc<RecipeCore>,
        prefix: Vec<u8>,
        session: SessionKey,
    ) -> Arc<Contender> {
        let losses = Losses::new(&recipe);
        let contender =
            Contender { core, recipe, prefix, session, losses, holds: Mutex::default() };
        let contender = Arc::new(contender);
        let weak = Arc::downgrade(&contender);
        contender.recipe.at_end(move || {
            if let Some(contender) = weak.upgrade() {
                contender.losses.close();
            }
        });
        contender
    }

    fn remember_hold(&self, hold: &Arc<Hold>) {
        self.holds.lock().insert(Arc::as_ptr(hold) as usize, Arc::downgrade(hold));
        // Lost or released in between: then nobody else forgets it.
        if !hold.stands() {
            self.forget_hold(hold);
        }
    }

    fn forget_hold(&self, hold: &Hold) {
        let forgotten = self.holds.lock().remove(&(std::ptr::from_ref(hold) as usize));
        drop(forgotten);
    }

    /// Ends every acquire and hold of the recipe, and removes their keys.
    pub(crate) fn close(self: &Arc<Contender>) -> Result<()> {
        self.recipe.closed().cancel();
        let holds = std::mem::take(&mut *self.holds.lock());
        let tickets: Vec<_> = holds
            .into_values()
            .filter_map(|hold| hold.upgrade())
            .filter_map(|hold| hold.close())
            .collect();
        if tickets.is_empty() || self.core.closed.is_cancelled() {
            return Ok(());
        }
        let me = self.clone();
        let leaving = async move {
            let leaves: Vec<_> = tickets
                .into_iter()
                .map(|(ticket, created)| tokio::spawn(hold::leave(me.clone(), ticket, created)))
                .collect();
            for leave in leaves {
                leave.await.map_err(|e| Error::internal(e.to_string()))?;
            }
            Ok(())
        };
        let limit = hold::RELEASE_LIMIT.min(self.session.0.ttl);
        let until = self.core.clock.now() + limit;
        match self.core.block_shielded("recipe.close", until, leaving) {
            Some(done) => done,
            None => Err(unconfirmed("etcd did not answer in time")),
        }
    }

    /// What a contender's key says to people and to `contenders()`.
    fn identity(&self) -> Vec<u8> {
        identity::encode(self.recipe.client_id())
    }

    /// Everyone in the queue, from one consistent read.
    pub(crate) async fn list(&self, op: &'static str) -> Result<Vec<ContenderInfo>> {
        let entries = requests::read_queue(&self.core, op, &self.prefix).await?;
        let shown = |entry: &Entry| self.core.shown(&entry.key);
        Ok(entries
            .iter()
            .enumerate()
            .map(|(at, entry)| identity::decode(at, entry, shown(entry)))
            .collect())
    }

    /// Leaves an attempt whose outcome is unknown to its session and to the path's watch, which
    /// takes a late key away on sight.
    fn leave_open(&self, ticket: Ticket) {
        let attached = self.core.queues.attach(&self.core, &self.prefix);
        ticket.leave_open(Box::new(attached));
        if let Some(queue) = self.core.queues.find(&self.prefix) {
            queue.sweep(&self.core);
        }
    }

    fn foreign_key(&self, key: &[u8]) -> Error {
        let key = self.core.shown(key);
        Error::on_key(
            ErrorKind::ForeignKey,
            format!(
                "{}: the key `{key}` is ahead and has no lease, so it would block for ever",
                self.recipe.identity()
            ),
            &key,
        )
    }
}
