//! The selector: leads as long as a callback runs.

use std::sync::Arc;
use std::time::Duration;

use super::participant::{self, Participant};
use super::selector_run::{Run, Shared};
use super::state::CandidateState;
use super::term::LeadershipTerm;
use crate::client::Client;
use crate::contend::Layout;
use crate::error::{Error, ErrorKind, Result};
use crate::lock::base::{LockBase, loss_surface, recipe_surface};
use crate::lock::options::{LockOptions, lock_options};

/// What a callback of the user's may fail with.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// What a selector does with its leadership, for those who prefer a type to closures.
pub trait LeaderSelectorListener: Send + Sync + 'static {
    /// Leads until it returns. Runs on the selector's own thread, in the term's scope.
    ///
    /// # Errors
    ///
    /// Whatever it returns is recorded in the selector's errors, and the term ends.
    fn take_leadership(&self, term: &LeadershipTerm) -> std::result::Result<(), BoxError>;

    /// Runs after each `take_leadership`, however that ended, and before the key is given back;
    /// deaf to cancelled scopes. Does nothing unless it is written.
    fn relinquish_leadership(&self, _term: &LeadershipTerm) {}
}

/// Leads as long as a callback runs.
///
/// [`start`](LeaderSelector::start) joins the queue; when its turn comes, the callback runs on a
/// thread of the selector's own, and the leadership is given up only after it has returned. Then
/// the selector is done, or with [`auto_requeue`](LeaderSelectorBuilder::auto_requeue) it joins the
/// queue again, at the end. A candidate whose lease dies joins anew, at the end; an etcd that is
/// away is waited for. A selector that is done may be started again.
///
/// # Losing it
///
/// Leadership is lost as the hold of a [`Mutex`](crate::Mutex) is, and is never regained in the
/// same term: [`is_leader`](LeadershipTerm::is_leader) turns `false` first, then the term's
/// [`cancel_token`](LeadershipTerm::cancel_token) is cancelled, and since the callback runs in its
/// scope, whatever blocking call of this library it is in returns `Interrupted`. The loss
/// listeners run, the connection state is `Lost`. With
/// [`interrupt_on_lease_loss(false)`](LeaderSelectorBuilder::interrupt_on_lease_loss) the callback
/// is left alone and has to ask. A callback that goes on regardless overlaps with the next leader;
/// the [term's number](LeadershipTerm::fencing_token) and its guarded
/// [`put`](LeadershipTerm::put) and [`txn`](LeadershipTerm::txn) cover that.
///
/// # Differences from Curator's `LeaderSelector`
///
/// Interruption is a flag that blocking calls of this library heed, not a signal to the thread;
/// a term has a number; `relinquish` always runs; and [`state`](LeaderSelector::state) tells a
/// selector that waits from one that has given up.
///
/// # Differences from Go's `concurrency.Election`
///
/// The keys are the same, so they stand in one queue. Here the candidacy outlives its lease, and
/// the leader is told of a loss before a rival can lead.
///
/// # Example: one process at a time runs the job
///
/// ```
/// # use etcd_recipes::testing::EtcdServer;
/// use etcd_recipes::{Client, LeaderSelector};
///
/// # fn main() -> etcd_recipes::Result<()> {
/// # let etcd = EtcdServer::start()?;
/// # let endpoint = etcd.endpoint();
/// let client = Client::connect([endpoint])?;
/// let selector = LeaderSelector::builder(&client, "/elections/report")
///     .on_lead(|term| {
///         // … work, asking `term.is_leader()` where it matters …
///         term.put("/reports/last", term.fencing_token().to_string())?;
///         Ok(())
///     })
///     .build()?;
/// selector.start()?;
/// selector.wait_on_leadership_complete()?;
/// assert!(client.get("/reports/last")?.is_some());
/// # Ok(()) }
/// ```
pub struct LeaderSelector {
    shared: Arc<Shared>,
}

loss_surface!(LeaderSelector);
recipe_surface!(LeaderSelector);

/// Options of a [`LeaderSelector`]; each states its default.
///
/// # Example: lead again and again
///
/// ```
/// # use etcd_recipes::{Client, LeaderSelector};
/// # use std::time::Duration;
/// # fn main() -> etcd_recipes::Result<()> {
/// # let client = Client::connect(["http://127.0.0.1:2379"])?;
/// let selector = LeaderSelector::builder(&client, "/elections/report")
///     .ttl(Duration::from_secs(5))
///     .auto_requeue(true)
///     .on_lead(|term| Ok(term.sleep(Duration::from_secs(60))?))
///     .on_relinquish(|term| println!("term {} is over", term.fencing_token()))
///     .build()?;
/// # drop(selector);
/// # Ok(()) }
/// ```
#[must_use = "a builder does nothing until `build`"]
pub struct LeaderSelectorBuilder {
    options: LockOptions,
    auto_requeue: bool,
    lead: Option<LeadCallback>,
    relinquish: Option<RelinquishCallback>,
    listener: Option<Box<dyn LeaderSelectorListener>>,
}

type LeadCallback = Box<dyn Fn(&LeadershipTerm) -> std::result::Result<(), BoxError> + Send + Sync>;
type RelinquishCallback = Box<dyn Fn(&LeadershipTerm) + Send + Sync>;

lock_options!(LeaderSelectorBuilder);

impl LeaderSelectorBuilder {
    /// Whether a lost lease cancels the term's scope, in which the callback runs. Default: `true`,
    /// since a leader is usually parked.
    pub fn interrupt_on_lease_loss(mut self, interrupt: bool) -> Self {
        self.options.interrupt_on_loss = interrupt;
        self
    }

    /// Whether the selector joins the queue again after each term, until it is closed. Default:
    /// `false`.
    pub fn auto_requeue(mut self, requeue: bool) -> Self {
        self.auto_requeue = requeue;
        self
    }

    /// What to do as the leader; see [`LeaderSelectorListener::take_leadership`].
    pub fn on_lead(
        mut self,
        lead: impl Fn(&LeadershipTerm) -> std::result::Result<(), BoxError> + Send + Sync + 'static,
    ) -> Self {
        self.lead = Some(Box::new(lead));
        self
    }

    /// What to do at the end of each term; see [`LeaderSelectorListener::relinquish_leadership`].
    /// Default: nothing.
    pub fn on_relinquish(
        mut self,
        relinquish: impl Fn(&LeadershipTerm) + Send + Sync + 'static,
    ) -> Self {
        self.relinquish = Some(Box::new(relinquish));
        self
    }

    /// Both, as a type of its own, in place of the closures.
    pub fn listener(mut self, listener: Box<dyn LeaderSelectorListener>) -> Self {
        self.listener = Some(listener);
        self
    }

    /// Checks the options. No I/O.
    ///
    /// # Errors
    ///
    /// As [`MutexBuilder::build`](crate::MutexBuilder::build); `InvalidArgument` without
    /// something to do as the leader, and for a listener beside closures.
    pub fn build(self) -> Result<LeaderSelector> {
        let listener = match (self.lead, self.relinquish, self.listener) {
            (None, None, Some(listener)) => listener,
            (Some(lead), relinquish, None) => Box::new(Closures { lead, relinquish }),
            (None, _, None) => {
                return Err(Error::invalid("a selector needs `on_lead` or a `listener`"));
            }
            (_, _, Some(_)) => {
                return Err(Error::invalid("a selector takes a `listener` or closures, not both"));
            }
        };
        let base = self.options.build("LeaderSelector", Layout::candidates, None)?;
        let shared = Shared::new(Arc::new(base), listener, self.auto_requeue);
        Ok(LeaderSelector { shared })
    }
}

struct Closures {
    lead: LeadCallback,
    relinquish: Option<RelinquishCallback>,
}

impl LeaderSelectorListener for Closures {
    fn take_leadership(&self, term: &LeadershipTerm) -> std::result::Result<(), BoxError> {
        (self.lead)(term)
    }

    fn relinquish_leadership(&self, term: &LeadershipTerm) {
        if let Some(relinquish) = &self.relinquish {
            relinquish(term);
        }
    }
}

impl LeaderSelector {
    /// Options, then [`build`](LeaderSelectorBuilder::build).
    pub fn builder(client: &Client, path: impl Into<String>) -> LeaderSelectorBuilder {
        let mut options = LockOptions::new(client, path.into());
        options.interrupt_on_loss = true;
        LeaderSelectorBuilder {
            options,
            auto_requeue: false,
            lead: None,
            relinquish: None,
            listener: None,
        }
    }

    fn base(&self) -> &LockBase {
        &self.shared.base
    }

    /// Joins the queue, in the background.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if it was started and has not finished; `Closed`, `Forked`; `Internal` if
    /// no thread can be started.
    pub fn start(&self) -> Result<()> {
        Run::start(&self.shared)
    }

    /// Whether it leads at present. Asks nobody.
    pub fn is_leader(&self) -> bool {
        self.shared.term().is_some_and(|term| term.is_leader())
    }

    /// Whether it was started and is done: not waiting, not leading, nor about to.
    pub fn is_finished(&self) -> bool {
        self.shared.is_finished()
    }

    /// What it is doing. Asks nobody.
    pub fn state(&self) -> CandidateState {
        self.shared.state()
    }

    /// Blocks until it is done. With `auto_requeue` that is when it is closed. Returns at once
    /// when it was not started.
    ///
    /// # Errors
    ///
    /// What it failed with; `Interrupted`; `Closed` when it was closed before its turn came.
    pub fn wait_on_leadership_complete(&self) -> Result<()> {
        self.shared.wait("selector.wait", None).map(|_| ())
    }

    /// Blocks until it is done (`true`) or `limit` has passed (`false`).
    ///
    /// # Errors
    ///
    /// As [`wait_on_leadership_complete`](LeaderSelector::wait_on_leadership_complete).
    pub fn wait_on_leadership_complete_for(&self, limit: Duration) -> Result<bool> {
        self.shared.wait("selector.wait_for", Some(limit))
    }

    /// Ends the term: [`is_leader`](LeaderSelector::is_leader) is `false` at once, the callback is
    /// interrupted, and when it has returned the leadership is given up. Waits until etcd has
    /// confirmed that; called by the callback itself it returns at once. `Ok(false)`: it does not
    /// lead, or etcd answers that it led no more.
    ///
    /// # Errors
    ///
    /// `CleanupUnconfirmed` when the callback goes on, or etcd does not answer, for the whole
    /// operation timeout: what is left is done in the background, and asking again waits for it.
    /// `Interrupted`, `Forked`.
    pub fn resign(&self) -> Result<bool> {
        self.resign_for(self.shared.base.core().operation_timeout())
    }

    /// As [`resign`](LeaderSelector::resign), waiting at most this long.
    ///
    /// # Errors
    ///
    /// As [`resign`](LeaderSelector::resign).
    pub fn resign_for(&self, limit: Duration) -> Result<bool> {
        self.shared.resign("selector.resign", limit)
    }

    /// All candidates, the leader first, from one consistent read.
    ///
    /// # Errors
    ///
    /// `Unreachable`, `PermissionDenied`, `Interrupted`, `Closed`, `Forked`.
    pub fn participants(&self) -> Result<Vec<Participant>> {
        let contender = self.base().contender.clone();
        let op = "selector.participants";
        self.base().core().block_on(op, Some(self.base().recipe()), async move {
            participant::list(&contender.core, op, &contender.layout).await
        })
    }

    /// Closes it: a wait ends, a term ends as by [`resign`](LeaderSelector::resign). Once this has
    /// returned `Ok` to another thread, no callback runs and none will. Called by the callback
    /// itself it returns at once, and `relinquish` is the last call. The close of the client does
    /// the same, save that a callback that outlasts it leaves the key to the end of its lease.
    ///
    /// # Errors
    ///
    /// `CleanupUnconfirmed` when the callback goes on, or etcd does not answer, for 2 s; then the
    /// rest is done in the background. `Forked`.
    pub fn close(&self) -> Result<()> {
        self.shared.close("selector.close")
    }
}

impl Drop for LeaderSelector {
    fn drop(&mut self) {
        if self.base().core().is_forked() {
            return;
        }
        if let Err(error) = self.shared.close("selector.close")
            && error.kind() != ErrorKind::CleanupUnconfirmed
        {
            log::warn!("{}: {error}", self.base().recipe().identity());
        }
    }
}
