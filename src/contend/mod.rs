//! Contending for a path: an ordered key under a prefix, from enqueue to release. Locks and
//! elections are rules over this one mechanism, so that a fix here is a fix everywhere.

mod acquire;
pub(crate) mod administer;
mod ages;
mod count;
mod downgrade;
mod hold;
mod identity;
mod inbox;
mod lanes;
mod layout;
mod leave;
mod losses;
mod mirror;
mod own_key;
mod patience;
mod places;
mod proof;
mod queue;
mod requests;
mod set;
mod trying;
mod turn;

use std::collections::HashMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use crate::CancelToken;
use crate::client::core::{Core, unconfirmed};
use crate::error::{Error, ErrorKind, Result};
use crate::lease::{SessionKey, Ticket};
use crate::recipe::RecipeCore;

pub(crate) use acquire::{Acquired, acquire};
pub(crate) use ages::Ages;
pub(crate) use count::Count;
pub(crate) use hold::Hold;
use identity::Author;
pub use identity::{Contender as ContenderInfo, ContenderMode};
pub use inbox::ReleaseRequest;
pub(crate) use inbox::{Inbox, Requests, Wanted};
pub(crate) use lanes::Wish;
use layout::Rule;
pub(crate) use layout::{Layout, Standing, decode_count, encode_count};
pub(crate) use losses::Losses;
pub(crate) use mirror::{Gone, Mirror};
pub(crate) use patience::{Patience, enter};
pub(crate) use places::Places;
pub use places::QueueProgress;
pub(crate) use proof::guarded;
pub(crate) use queue::Queues;
pub(crate) use requests::read_queue;
pub(crate) use set::HoldSet;

/// Who contends, for what, and on which terms: what every acquire of one recipe shares.
pub(crate) struct Contender {
    pub(crate) core: Arc<Core>,
    pub(crate) recipe: Arc<RecipeCore>,
    pub(crate) layout: Layout,
    author: Author,
    pub(crate) session: SessionKey,
    /// How many may be inside, where that is counted.
    pub(crate) count: Option<Count>,
    /// How long a hold may last, if that is limited, and the holds that have not lasted so long.
    max_hold: Option<(Duration, Arc<Ages>)>,
    pub(crate) losses: Losses,
    pub(crate) places: Places,
    pub(crate) requests: Requests,
    /// The holds that stand, for the recipe's close.
    holds: Mutex<HashMap<usize, Weak<Hold>>>,
    /// The last try found somebody in the way.
    busy: AtomicBool,
    /// What waits have left in the queue; each is cancelled once its keys are gone.
    leaving: Mutex<Vec<CancelToken>>,
}

impl Contender {
    pub(crate) fn new(
        core: Arc<Core>,
        recipe: Arc<RecipeCore>,
        layout: Layout,
        count: Option<Count>,
        session: SessionKey,
        max_hold: Option<Duration>,
    ) -> Arc<Contender> {
        let losses = Losses::new(&recipe);
        let overdue = |hold: &Arc<Hold>| {
            hold.is_held();
        };
        let max_hold = max_hold.map(|limit| (limit, Ages::new(limit, overdue, &core.clock)));
        let contender = Arc::new(Contender {
            author: Author::new(recipe.client_id()),
            core,
            recipe,
            layout,
            session,
            count,
            max_hold,
            losses,
            places: Places::default(),
            requests: Requests::default(),
            holds: Mutex::default(),
            busy: AtomicBool::new(false),
            leaving: Mutex::default(),
        });
        let weak = Arc::downgrade(&contender);
        contender.recipe.at_end(move || {
            if let Some(contender) = weak.upgrade() {
                contender.losses.close();
                contender.places.close();
                contender.requests.close();
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
        let leavers: Vec<_> = holds
            .into_values()
            .filter_map(|hold| hold.upgrade())
            .filter_map(|hold| hold.close())
            .collect();
        if leavers.is_empty() || self.core.closed.is_cancelled() {
            return Ok(());
        }
        let leaving = async move {
            let leaves: Vec<_> = leavers
                .into_iter()
                .map(|(leavers, created)| tokio::spawn(leave::leave_all(leavers, created)))
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

    /// Keys are about to be taken out of the queue: to be cancelled once they are gone.
    fn leaves(&self) -> CancelToken {
        let gone = CancelToken::new();
        let mut leaving = self.leaving.lock();
        leaving.retain(|one| !one.is_cancelled());
        leaving.push(gone.clone());
        gone
    }

    /// Ready once what the waits until now have left in the queue is gone.
    pub(crate) async fn all_left(&self) {
        let leaving = self.leaving.lock().clone();
        for one in leaving {
            one.cancelled().await;
        }
    }

    /// What a key of this contender is called, on this lease; `number` tells the lease's keys
    /// apart.
    pub(crate) fn key_name(&self, lease: i64, number: u64) -> Vec<u8> {
        let mut key = self.layout.entries();
        let id = self.recipe.client_id();
        let name = match self.layout.rule() {
            Rule::Line => format!("{lease:x}-{number}"),
            Rule::First => format!("{lease:x}-{number}-{id}"),
            Rule::Counted => format!("{id}:{lease:x}-{number}"),
        };
        key.extend_from_slice(name.as_bytes());
        key
    }

    /// What a contender's key says to people and to `contenders()`.
    pub(crate) fn identity(&self, mode: ContenderMode) -> Vec<u8> {
        self.author.sign(mode)
    }

    /// Everyone in the queue, from one consistent read.
    pub(crate) async fn list(&self, op: &'static str) -> Result<Vec<ContenderInfo>> {
        let read = read_queue(&self.core, op, &self.layout).await?;
        let count = read.count.unwrap_or(0) as usize;
        Ok(identity::decode_all(&self.layout, count, &read.line, |key| self.core.shown(key)))
    }

    /// Leaves an attempt whose outcome is unknown to its session and to the path's watch, which
    /// takes a late key away on sight.
    fn leave_open(&self, ticket: Ticket) {
        let attached = self.core.queues.attach(&self.core, &self.layout);
        ticket.leave_open(Box::new(attached));
        if let Some(queue) = self.core.queues.find(&self.layout) {
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
