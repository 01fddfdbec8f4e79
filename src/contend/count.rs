//! How many may be inside a counted path: declared by each, fixed by the first, followed by all.
//!
//! A recipe that has never been let in checks what it was given against what stands in etcd. From
//! then on it follows what stands there, since that can only be a resize.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::Contender;
use super::layout::decode_count;
use super::requests::{self, read_queue};
use crate::client::call::Kind;
use crate::clock::Instant;
use crate::error::{Error, ErrorKind, Result};

/// No count has been agreed on yet; no semaphore has none.
const NONE: u32 = 0;

/// What one recipe takes for its path's count.
pub(crate) struct Count {
    declared: u32,
    agreed: AtomicU32,
}

impl Count {
    pub(crate) fn new(declared: u32) -> Count {
        Count { declared, agreed: AtomicU32::new(NONE) }
    }

    /// What to ask etcd to confirm.
    pub(crate) fn current(&self) -> u32 {
        match self.agreed.load(Ordering::Acquire) {
            NONE => self.declared,
            agreed => agreed,
        }
    }

    /// Whether another count than the current one would be taken over.
    fn is_agreed(&self) -> bool {
        self.agreed.load(Ordering::Acquire) != NONE
    }

    /// etcd has confirmed this count, or a resize is known to have set it.
    pub(crate) fn agree(&self, count: u32) {
        self.agreed.store(count, Ordering::Release);
    }

    /// Takes in another count than the one asked for.
    fn found(&self, found: u32) -> bool {
        if found != self.declared && !self.is_agreed() {
            return false;
        }
        self.agree(found);
        true
    }
}

impl Contender {
    /// What etcd showed in place of the count that was asked for: takes it over, or writes one
    /// where there is none; an error if this recipe is at odds with the path.
    pub(super) async fn settle_count(
        self: &Arc<Contender>,
        found: Option<Vec<u8>>,
        until: Instant,
    ) -> Result<()> {
        match found {
            Some(value) => self.follow(decode_count(&value)),
            None => self.fix_count(until).await,
        }
    }

    /// Whether so many keys at once could ever be let in. A resize that this recipe has not
    /// noticed yet is asked for first.
    pub(crate) async fn check_keys(&self, op: &'static str, keys: usize) -> Result<()> {
        let Some(count) = &self.count else { return Ok(()) };
        if keys > count.current() as usize && count.is_agreed() {
            let read = read_queue(&self.core, op, &self.layout).await?;
            if let Some(found) = read.count {
                self.follow(Some(found))?;
            }
        }
        self.check_fit(keys, count.current() as usize)
    }

    /// Keys that can never be let in would stand in everybody's way.
    pub(super) fn check_fit(&self, keys: usize, count: usize) -> Result<()> {
        if keys <= count {
            return Ok(());
        }
        let identity = self.recipe.identity();
        Err(Error::invalid(format!("{identity}: {keys} permits at once, of {count} at most")))
    }

    /// Takes over the count that stands there; `None` is something that is none.
    pub(super) fn follow(&self, found: Option<u32>) -> Result<()> {
        let Some(count) = &self.count else { return Ok(()) };
        let Some(found) = found.filter(|found| *found != NONE) else {
            let key = self.layout.count_key().unwrap_or_default();
            return Err(self.another_recipe(&key));
        };
        if count.found(found) {
            return Ok(());
        }
        let expected = count.declared;
        Err(Error::new(
            ErrorKind::PermitMismatch { expected, found },
            format!(
                "{}: made for {expected} permits, but the path has {found}",
                self.recipe.identity()
            ),
        ))
    }

    async fn fix_count(&self, until: Instant) -> Result<()> {
        let (Some(count), Some(key)) = (&self.count, self.layout.count_key()) else {
            return Ok(());
        };
        // Whoever stands there without a count is of another kind, or has lost its count.
        for alone in [true, false] {
            let txn = requests::fix_count(&self.layout, &key, count.current(), alone);
            let response = self.core.txn("permits", &key, Kind::Repeatable, txn, until).await?;
            if response.succeeded() {
                return Ok(());
            }
            let keys = requests::keys_of(&response);
            if keys.contains(&key) {
                // Somebody was quicker; the next answer shows what.
                return Ok(());
            }
            let path = self.layout.watched();
            let is_child =
                |key: &[u8]| key.strip_prefix(path).is_some_and(|name| !name.contains(&b'/'));
            if let Some(foreign) = keys.iter().find(|key| is_child(key)) {
                return Err(self.another_recipe(foreign));
            }
        }
        Ok(())
    }

    fn another_recipe(&self, key: &[u8]) -> Error {
        let key = self.core.shown(key);
        Error::on_key(
            ErrorKind::ForeignKey,
            format!("{}: `{key}` belongs to another kind of recipe", self.recipe.identity()),
            &key,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_is_checked_until_it_was_agreed_on_and_followed_from_then_on() {
        let count = Count::new(3);
        assert_eq!(count.current(), 3);
        assert!(!count.found(5), "declared differently");
        assert_eq!(count.current(), 3);
        assert!(count.found(3));
        assert!(count.found(5), "resized");
        assert_eq!(count.current(), 5);
    }
}
