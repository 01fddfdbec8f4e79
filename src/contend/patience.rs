//! How a calling thread gets in: the blocking side of an acquire.

use std::time::Duration;

use super::Acquired;
use super::acquire::acquire;
use super::lanes::Wish;
use super::trying::try_acquire;
use crate::client::core::Core;
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
    let limit = match patience {
        Patience::Never => {
            return core.block(op, Some(recipe), |abandon| try_acquire(wishes, abandon));
        }
        Patience::For(limit) => Some(core.clock.now() + limit),
        Patience::Endless => None,
    };
    core.block(op, Some(recipe), |abandon| acquire(wishes, limit, abandon))
}
