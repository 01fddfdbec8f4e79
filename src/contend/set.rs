//! Holds on several paths that stand and fall together.

use std::sync::Arc;
use std::time::Duration;

use super::hold::{Hold, RELEASE_LIMIT};
use super::leave::{Left, leave_all};
use super::proof::verify;
use crate::CancelToken;
use crate::error::Result;

pub(crate) struct HoldSet {
    /// Never empty; in the order of their paths.
    holds: Vec<Arc<Hold>>,
    cancel: CancelToken,
}

impl HoldSet {
    /// Ties the holds together: what befalls one from now on befalls all.
    pub(crate) fn new(holds: Vec<Arc<Hold>>) -> Arc<HoldSet> {
        let set = Arc::new(HoldSet { holds, cancel: CancelToken::new() });
        for hold in &set.holds {
            hold.join(&set);
        }
        // One may have been lost before it was tied.
        if set.holds.iter().any(|hold| hold.is_lost()) {
            set.cancel();
            set.lose();
        }
        set
    }

    pub(crate) fn holds(&self) -> &[Arc<Hold>] {
        &self.holds
    }

    pub(crate) fn is_held(&self) -> bool {
        self.holds.iter().all(|hold| hold.is_held())
    }

    /// The holds as etcd sees them now.
    pub(crate) fn verify(&self) -> Result<bool> {
        verify(self.holds.clone())
    }

    pub(crate) fn remaining(&self) -> Duration {
        self.holds.iter().map(|hold| hold.remaining()).min().unwrap_or_default()
    }

    pub(crate) fn cancel_token(&self) -> &CancelToken {
        &self.cancel
    }

    pub(super) fn cancel(&self) {
        self.cancel.cancel();
    }

    /// One was lost: the others are given up.
    pub(super) fn lose(&self) {
        for hold in &self.holds {
            hold.lose_with_set();
        }
    }

    /// Ends all by their holder's will, in one request, and says whether all stood until now.
    pub(crate) fn release(&self) -> bool {
        let Some(first) = self.holds.first() else { return true };
        let budget = RELEASE_LIMIT.min(self.remaining());
        let leavers: Vec<_> = self.holds.iter().filter_map(|hold| hold.give_up()).collect();
        let all = leavers.len() == self.holds.len();
        let core = &first.contender().core;
        let leaving = leave_all(leavers, first.token());
        if core.on_io_thread() {
            core.runtime.spawn(async move {
                let _ = leaving.await;
            });
            return all;
        }
        let until = core.clock.now() + budget;
        let left = core.block_shielded("release", until, async move { Ok(leaving.await) });
        all && !matches!(left, Some(Ok(Left::Gone)))
    }
}
