//! Barriers: points that many processes wait at until somebody lets them pass.

#[expect(clippy::module_inception, reason = "the simplest of the barriers has no other name")]
mod barrier;
mod keeping;
mod waiting;

pub use barrier::{Barrier, BarrierBuilder};
