//! What is found of a hold's own key, and what it says about the hold.
//!
//! A hold that lasts watches its key; the proof reads of its lease look at it too, and so does
//! whoever asks. The key is ours as long as it is the one that was created at our revision and
//! nobody has written over it.

use std::sync::{Arc, Weak};

use super::hold::Hold;
use super::identity::ContenderMode;
use super::inbox::Inbox;
use crate::error::Error;
use crate::lease::LossReason;
use crate::watch::{Entry, Event, EventKind, Flow, Range, Sink, Snapshot, Spec};

/// What was found of a key.
pub(super) struct Found<'a> {
    create_revision: i64,
    version: i64,
    lease: i64,
    value: &'a [u8],
}

impl<'a> From<&'a etcd_client::KeyValue> for Found<'a> {
    fn from(kv: &'a etcd_client::KeyValue) -> Found<'a> {
        Found {
            create_revision: kv.create_revision(),
            version: kv.version(),
            lease: kv.lease(),
            value: kv.value(),
        }
    }
}

impl<'a> From<&'a Entry> for Found<'a> {
    fn from(entry: &'a Entry) -> Found<'a> {
        Found {
            create_revision: entry.create_revision,
            version: entry.version,
            lease: entry.lease,
            value: &entry.value,
        }
    }
}

impl<'a> From<&'a Event> for Found<'a> {
    fn from(event: &'a Event) -> Found<'a> {
        Found {
            create_revision: event.create_revision,
            version: event.version,
            lease: event.lease,
            value: &event.value,
        }
    }
}

impl Hold {
    /// Whether the key, as it was just found, is still ours; one that was written over is a loss.
    pub(super) fn is_ours(&self, found: Option<&Found<'_>>) -> bool {
        let ours = found.filter(|found| found.create_revision == self.create_revision);
        if ours.is_some_and(|found| found.version != 1 && !self.is_own_rewrite(found)) {
            self.lose_key(LossReason::KeyOverwritten);
        }
        ours.is_some()
    }

    /// A stranger's write drops the lease, save one that wants to deceive.
    fn is_own_rewrite(&self, found: &Found<'_>) -> bool {
        if found.lease != self.session.lease() {
            return false;
        }
        // A leader proclaims as often as it likes; any other key is rewritten once, to share.
        self.mode == ContenderMode::Lead
            || (found.version == 2 && self.rewritten.lock().as_deref() == Some(found.value))
    }

    /// What the key, as it was just found, says about the hold.
    pub(super) async fn judge(self: &Arc<Hold>, found: Option<&Found<'_>>) {
        if !self.is_ours(found) && self.fall() {
            // A task of its own: told it must be, even if the caller does not wait.
            let _ = tokio::spawn(self.clone().tell_why()).await;
        }
    }

    /// From now on the own keys are watched, and others can ask for it.
    pub(super) fn has_lasted(self: &Arc<Hold>) {
        Inbox::open(&self.session, self.create_revision);
        let core = &self.contender.core;
        let watch = |key: &Vec<u8>| {
            let spec = Spec {
                range: Range::Key(key.clone()),
                from: self.create_revision + 1,
                group: "own-keys",
            };
            core.watches.watch(spec, Arc::new(OwnKey(Arc::downgrade(self))))
        };
        self.keep(self.keys.iter().map(watch).collect());
    }
}

struct OwnKey(Weak<Hold>);

impl Sink for OwnKey {
    fn deliver(&self, _revision: i64, events: Vec<Event>) -> Flow {
        let Some(hold) = self.0.upgrade() else { return Flow::Continue };
        for event in &events {
            match event.kind {
                // A put keeps the create revision, so what is not ours was deleted before.
                EventKind::Put if hold.is_ours(Some(&Found::from(event))) => {}
                EventKind::Put | EventKind::Delete => hold.clone().vanish(),
            }
        }
        Flow::Continue
    }

    fn resync(&self, snapshot: Snapshot) {
        if let Some(hold) = self.0.upgrade()
            && !hold.is_ours(snapshot.entries.first().map(Found::from).as_ref())
        {
            hold.vanish();
        }
    }

    fn failed(&self, error: Error) {
        // The proof reads go on looking after the key.
        if let Some(hold) = self.0.upgrade() {
            log::debug!("watching `{}`: {error}", hold.shown_key());
        }
    }
}
