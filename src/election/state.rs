//! What a candidate is doing, the same for those who lead in a callback and in a role.

use super::term::LeadershipTerm;
use crate::contend::Contender;
use crate::error::Error;

/// What a selector or a latch is doing. Every one of them means what it says: none that has given
/// up looks as if it waited.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum CandidateState {
    /// Not started, or finished and ready to be started again.
    Idle,
    /// Wants to lead.
    Waiting {
        /// How many are ahead, as far as it is known.
        position: Option<usize>,
    },
    /// Leads; of a selector: its callback runs, and the
    /// [term](LeadershipTerm::is_leader) says whether it still leads.
    Leading {
        /// The number of the term.
        term: i64,
    },
    /// Gave up for a reason that waiting does not mend; may be started again.
    Failed(Error),
    /// Closed.
    Closed,
}

/// The same, without what can be looked up.
#[derive(Clone)]
pub(super) enum Phase {
    Idle,
    Waiting,
    Leading,
    Failed(Error),
    Closed,
}

impl Phase {
    pub(super) fn is_running(&self) -> bool {
        matches!(self, Phase::Waiting | Phase::Leading)
    }

    /// `term`: the one that leads, if one does.
    pub(super) fn shown(
        self,
        contender: &Contender,
        term: Option<&LeadershipTerm>,
    ) -> CandidateState {
        match (self, term) {
            (Phase::Idle, _) => CandidateState::Idle,
            (Phase::Leading, Some(term)) => CandidateState::Leading { term: term.fencing_token() },
            (Phase::Waiting | Phase::Leading, _) => {
                CandidateState::Waiting { position: contender.position() }
            }
            (Phase::Failed(error), _) => CandidateState::Failed(error),
            (Phase::Closed, _) => CandidateState::Closed,
        }
    }
}
