//! Elections: one leader among the candidates of a path, for a term that has a number.
//!
//! All candidates stand in one queue, in the order in which their keys were created, and the first
//! leads. [`LeaderSelector`] leads as long as a callback runs, [`LeaderLatch`] until it is closed,
//! [`LeaderObserver`] only looks on.

mod latch;
mod observer;
mod participant;
mod selector;
mod selector_run;
mod state;
mod term;

pub use latch::{CloseMode, LatchEvent, LatchListener, LeaderLatch, LeaderLatchBuilder};
pub use observer::{LeaderChange, LeaderObserver, LeaderObserverBuilder};
pub use participant::Participant;
pub use selector::{BoxError, LeaderSelector, LeaderSelectorBuilder, LeaderSelectorListener};
pub use state::CandidateState;
pub use term::{LeadershipTerm, LeadershipTerm as Leadership};
