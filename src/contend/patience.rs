//! How a calling thread gets in: the blocking side of an acquire.

use std::time::Duration;

use super::Acquired;
use super::acquire::acquire;
use super::lanes::Wish;
use super::trying::try_acquire;
use crate::client::core::Core;
use crate::clock::Instant;
use crate::error::Result;
use crate::recipe::RecipeCore;

/// How long a caller is ready to stand in a queue.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Patience {
    Endless,
    For(Duration),
    /// It waits for nobody.
    Never,
}

/// Blocks until everything that is wished for is held, or patience ends; `recipe` is the one whose
/// close ends the call.
pub(crate) fn enter(
    core: &Core,
    recipe: &RecipeCore,
    op: &'static str,
    wishes: Vec<Wish>,
    patience: Patience,
) -> Result<Option<Acquired>> {
    let wait = |wishes, limit: Option<Instant>| {
        core.block(op, Some(recipe), |abandon| acquire(wishes, limit, abandon))
    };
    match patience {
        Patience::Endless => wait(wishes, None),
        Patience::For(limit) => wait(wishes, Some(core.clock.now() + limit)),
        // Busy or free, this is one answer; most often it is busy, and comes from memory.
        Patience::Never => {
            core.block_briefly(op, Some(recipe), |abandon| try_acquire(wishes, abandon))
        }
    }
}
