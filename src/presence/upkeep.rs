//! What stands at a transient key: its value, who may change it, and what a heal restores.
//!
//! The value in etcd is the user's bytes and nothing else, so our key is known by its lease: it is
//! ours if it hangs on one that was granted to this object. Writes of one object go one after the
//! other, and each is guarded by the revision of the one before. Hence a write whose answer was
//! lost is decided by the next one: either it stands, or it never will.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use etcd_client::{Compare, CompareOp};
use parking_lot::Mutex;

use super::restore::{found, guarded_put, restore, revision};
use crate::client::call::Kind;
use crate::client::core::{BoxFuture, Core};
use crate::client::runtime::Abandon;
use crate::clock::Instant;
use crate::error::{Error, ErrorKind, Result};
use crate::lease::{Lease, Owner, Presence, Sighting};
use crate::race::{Either, race};
use crate::recipe::RecipeCore;

/// How many of the leases granted to us we know. Keys on older ones are long gone.
const LEASES: usize = 64;

/// How often a write looks whether a heal has brought the key back.
const PACE: Duration = Duration::from_millis(50);

pub(super) struct Upkeep {
    me: Weak<Upkeep>,
    core: Arc<Core>,
    recipe: Arc<RecipeCore>,
    /// As etcd knows it.
    key: Vec<u8>,
    leases: Mutex<VecDeque<i64>>,
    /// The value as the user sees it: a copy of the book's, for those who cannot wait for it.
    shown: Mutex<Vec<u8>>,
    /// Held while a write is under way, be it the user's or a heal's.
    book: tokio::sync::Mutex<Book>,
}

struct Book {
    /// What a heal restores.
    value: Vec<u8>,
    /// Our last known write; `None` before the first.
    last: Option<Written>,
}

#[derive(Clone, Copy)]
struct Written {
    revision: i64,
    lease: i64,
}

/// What came of a write.
enum Wrote {
    Done,
    /// Our key does not stand now: a heal is due, or has failed.
    Absent,
}

impl Upkeep {
    pub(super) fn new(
        core: Arc<Core>,
        recipe: Arc<RecipeCore>,
        key: Vec<u8>,
        value: Vec<u8>,
    ) -> Arc<Upkeep> {
        Arc::new_cyclic(|me| Upkeep {
            me: me.clone(),
            core,
            recipe,
            key,
            leases: Mutex::default(),
            shown: Mutex::new(value.clone()),
            book: tokio::sync::Mutex::new(Book { value, last: None }),
        })
    }

    /// What a heal restores.
    pub(super) fn value(&self) -> Vec<u8> {
        self.shown.lock().clone()
    }

    fn is_ours(&self, lease: i64) -> bool {
        lease != 0 && self.leases.lock().contains(&lease)
    }

    fn note_lease(&self, lease: i64) {
        let mut leases = self.leases.lock();
        if !leases.contains(&lease) {
            if leases.len() == LEASES {
                leases.pop_front();
            }
            leases.push_back(lease);
        }
    }

    fn keep(&self, book: &mut Book, value: Vec<u8>) {
        self.shown.lock().clone_from(&value);
        book.value = value;
    }

    /// Changes the value where it stands, waiting for a heal if it does not; or, before the start,
    /// the value to start with.
    pub(super) async fn set(
        self: Arc<Upkeep>,
        presence: Arc<Presence>,
        value: Vec<u8>,
        until: Instant,
        abandon: Abandon,
    ) -> Result<()> {
        let sent = AtomicBool::new(false);
        let outcome = race(self.try_set(&presence, &value, until, &sent), abandon.fired()).await;
        let result = match outcome {
            Either::First(Ok(())) => return Ok(()),
            Either::First(Err(error)) => Err(error),
            Either::Second(()) => Err(Error::interrupted("setting")),
        };
        if sent.load(Ordering::Relaxed) {
            // What was sent may yet arrive, in front of or behind whatever comes next.
            self.core.runtime.spawn(self.clone().settle());
        }
        result
    }

    async fn try_set(
        &self,
        presence: &Presence,
        value: &[u8],
        until: Instant,
        sent: &AtomicBool,
    ) -> Result<()> {
        let mut unknown = None;
        loop {
            let mut book = self.book.lock().await;
            if book.last.is_none() {
                self.keep(&mut book, value.to_vec());
                return Ok(());
            }
            sent.store(true, Ordering::Relaxed);
            match self.write(&mut book, "transient.set", value, until).await {
                Ok(Wrote::Done) => {
                    self.keep(&mut book, value.to_vec());
                    return Ok(());
                }
                Ok(Wrote::Absent) => {}
                Err(error) if error.is_ambiguous() => unknown = Some(error),
                Err(error) => {
                    let Some(unknown) = unknown else {
                        sent.store(false, Ordering::Relaxed);
                        return Err(error);
                    };
                    // etcd may have accepted it, and what it accepted is not to be followed by
                    // something older.
                    self.keep(&mut book, value.to_vec());
                    return Err(unknown);
                }
            }
            let late = self.core.clock.now() >= until;
            if let Some(unknown) = unknown.take_if(|_| late) {
                self.keep(&mut book, value.to_vec());
                return Err(unknown);
            }
            drop(book);
            if late || presence.is_failed() {
                let text = format!("{}: the key does not stand", self.recipe.identity());
                return Err(Error::new(ErrorKind::Lost, text));
            }
            self.core.clock.sleep(PACE).await;
        }
    }

    /// Writes over our own key.
    async fn write(
        &self,
        book: &mut Book,
        op: &'static str,
        value: &[u8],
        until: Instant,
    ) -> Result<Wrote> {
        while let Some(last) = book.last {
            let guard = Compare::mod_revision(&*self.key, CompareOp::Equal, last.revision);
            let txn = guarded_put(guard, &self.key, value, last.lease);
            let response = self.core.txn(op, &self.key, Kind::Write, txn, until).await?;
            if response.succeeded() {
                book.last = Some(Written { revision: revision(&response), ..last });
                return Ok(Wrote::Done);
            }
            match found(&response) {
                Some(kv) if self.is_ours(kv.lease()) => {
                    book.last = Some(Written { revision: kv.mod_revision(), lease: kv.lease() });
                    if kv.value() == value {
                        return Ok(Wrote::Done);
                    }
                }
                _ => return Ok(Wrote::Absent),
            }
        }
        Ok(Wrote::Absent)
    }

    /// After a write without an answer: brings the key to the value that a heal would restore, so
    /// that from then on only one of the two can be seen.
    async fn settle(self: Arc<Upkeep>) {
        while self.recipe.check_open().is_ok() {
            {
                let mut book = self.book.lock().await;
                let value = book.value.clone();
                let until = self.core.operation_limit();
                match self.write(&mut book, "transient.set", &value, until).await {
                    Ok(_) => return,
                    Err(error) if error.is_ambiguous() || error.is_unreachable() => {}
                    Err(error) => return self.recipe.record_error(error),
                }
            }
            self.core.clock.sleep(PACE).await;
        }
    }

    async fn put_back(self: Arc<Upkeep>, lease: i64) -> Result<bool> {
        let mut book = self.book.lock().await;
        let ours = |kv: &etcd_client::KeyValue| self.is_ours(kv.lease());
        let until = self.core.operation_limit();
        let op = "transient.start";
        let restored = restore(&self.core, op, &self.key, &book.value, lease, until, ours).await?;
        match restored {
            Some(revision) => book.last = Some(Written { revision, lease }),
            None => return Ok(false),
        }
        Ok(true)
    }
}

impl Owner for Upkeep {
    fn establish(&self, lease: Lease) -> BoxFuture<Result<bool>> {
        // Noted before anything is sent: it may arrive without our hearing of it.
        self.note_lease(lease.id);
        match self.me.upgrade() {
            Some(me) => Box::pin(me.put_back(lease.id)),
            None => Box::pin(async { Ok(false) }),
        }
    }

    fn key(&self) -> Option<Vec<u8>> {
        Some(self.key.clone())
    }

    fn judge(&self, lease: i64, found: Option<&etcd_client::KeyValue>) -> Sighting {
        match found {
            Some(kv) if kv.lease() == lease => Sighting::Ours,
            _ => Sighting::Amiss,
        }
    }
}
