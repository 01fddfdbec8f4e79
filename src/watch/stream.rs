//! One gRPC stream to one member, shared by the watches of a group.

use std::sync::Arc;
use std::time::Duration;

use etcd_client::{WatchOptions, WatchRequestSender, WatchResponse, WatchResponseStream};

use super::Range;
use crate::client::call::Miss;
use crate::client::core::Core;
use crate::client::member::{Connection, Purpose};
use crate::clock::Instant;
use crate::error::ErrorKind;
use crate::race::{Either, race};
use crate::resilience::WatchResilience;

/// What a request to create needs beside its id.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    pub(super) range: Range,
    /// 0 for the present.
    pub(super) from: i64,
}

impl Wanted {
    fn options(&self, id: i64) -> WatchOptions {
        let options =
            WatchOptions::new().with_watch_id(id).with_start_revision(self.from).with_prev_key();
        if self.range.is_prefix() { options.with_prefix() } else { options }
    }
}

/// When something was last heard, and whether an answer is due.
#[derive(Debug)]
pub(super) struct Life {
    heard: Instant,
    due_since: Option<Instant>,
}

/// What the silence of a stream asks for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Silence {
    Wait,
    Probe,
    /// It has lasted too long.
    Dead(Duration),
}

impl Life {
    fn new(now: Instant) -> Life {
        Life { heard: now, due_since: None }
    }

    pub(super) fn heard(&mut self, now: Instant) {
        self.heard = now;
        self.due_since = None;
    }

    /// Something was sent that etcd answers at once.
    pub(super) fn expect(&mut self, now: Instant) {
        self.due_since.get_or_insert(now);
    }

    /// When to look again.
    pub(super) fn deadline(&self, limits: &WatchResilience) -> Instant {
        match self.due_since {
            None => self.heard + limits.get_progress_interval(),
            Some(since) => since + limits.get_progress_timeout(),
        }
    }

    pub(super) fn check(&self, now: Instant, limits: &WatchResilience) -> Silence {
        if now < self.deadline(limits) {
            return Silence::Wait;
        }
        match self.due_since {
            None => Silence::Probe,
            Some(_) => Silence::Dead(now.saturating_since(self.heard)),
        }
    }
}

pub(super) struct Stream {
    pub(super) connection: Arc<Connection>,
    pub(super) life: Life,
    pub(super) opened: Instant,
    sender: WatchRequestSender,
    answers: WatchResponseStream,
}

/// What is sent on a stream.
#[derive(Debug)]
pub(super) enum Outgoing {
    Create { id: i64, wanted: Wanted },
    Cancel { id: i64 },
}

/// Why a stream could not be opened or has ended.
#[derive(Debug)]
pub(super) struct Broken {
    /// The reason, where etcd gave one that another member does not change.
    pub(super) kind: Option<ErrorKind>,
    pub(super) text: String,
}

impl From<Miss> for Broken {
    fn from(miss: Miss) -> Broken {
        Broken { kind: miss.kind(), text: miss.text }
    }
}

impl Broken {
    pub(super) fn because(text: impl Into<String>) -> Broken {
        Broken { kind: None, text: text.into() }
    }

    /// Whether it was an answer that we cannot take, so that asking for it again is no use.
    pub(super) fn is_indigestible(&self) -> bool {
        ["decoded message length too large", "compression flag", "failed to decode"]
            .iter()
            .any(|part| self.text.contains(part))
    }
}

/// What happened on a stream.
pub(super) enum Happened {
    /// `None`: the member has ended the stream.
    Answer(Result<Option<WatchResponse>, etcd_client::Error>),
    Sent(Result<(), etcd_client::Error>),
}

impl Stream {
    /// Opens a stream with its first watch.
    ///
    /// The member is only known to be there once it answers, so all of it is under one limit.
    pub(super) async fn open(
        core: &Core,
        member: usize,
        id: i64,
        first: Wanted,
    ) -> Result<Stream, Broken> {
        let limit = core.clock.now() + core.config.attempt_limit();
        let connection = core.connection(member, Purpose::Watches, limit).await?;
        let mut client = connection.watch();
        let opening = client.watch(first.range.key(), Some(first.options(id)));
        let broken = match race(opening, core.clock.sleep_until(limit)).await {
            Either::First(Ok(stream)) => {
                let (sender, answers) = stream.split();
                let now = core.clock.now();
                let mut life = Life::new(now);
                life.expect(now);
                return Ok(Stream { connection, life, opened: now, sender, answers });
            }
            Either::First(Err(error)) => Broken::from(core.miss(&error)),
            Either::Second(()) => Broken::because("no answer in time"),
        };
        if broken.kind.is_none() {
            core.distrust(member, Purpose::Watches, &connection);
        }
        Err(broken)
    }

    /// Waits for an answer, and sends `outgoing` meanwhile. Both may be dropped half-way: nothing
    /// of an answer is lost, and a request that was not taken stays in the outbox.
    ///
    /// Sending must not keep us from reading: etcd stops reading requests while its answers are
    /// not taken.
    pub(super) async fn next(&mut self, outgoing: Option<Outgoing>) -> Happened {
        let Stream { sender, answers, .. } = self;
        let send = async {
            match outgoing {
                Some(Outgoing::Create { id, wanted }) => {
                    sender.watch(wanted.range.key(), Some(wanted.options(id))).await
                }
                Some(Outgoing::Cancel { id }) => sender.cancel(id).await,
                None => std::future::pending().await,
            }
        };
        match race(answers.message(), send).await {
            Either::First(answer) => Happened::Answer(answer),
            Either::Second(sent) => Happened::Sent(sent),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Instant {
        Instant::from_nanos(ms * 1_000_000)
    }

    #[test]
    fn answers_that_cannot_be_taken_are_told_from_a_broken_line() {
        for text in [
            "Error, decoded message length too large: found 6000000 bytes, the limit is: 4194304 bytes",
            "protocol error: received message with invalid compression flag: 97",
        ] {
            assert!(Broken::because(text).is_indigestible(), "{text}");
        }
        let broken = Broken::because("h2 protocol error: error reading a body from connection");
        assert!(!broken.is_indigestible());
    }

    #[test]
    fn silence_is_asked_about_and_then_taken_for_death() {
        let limits = WatchResilience::new()
            .progress_interval(Duration::from_millis(500))
            .progress_timeout(Duration::from_millis(300));
        let mut life = Life::new(at(0));
        assert_eq!(life.check(at(499), &limits), Silence::Wait);
        assert_eq!(life.check(at(500), &limits), Silence::Probe);
        life.expect(at(500));
        life.expect(at(700));
        assert_eq!(life.deadline(&limits), at(800), "a second question moves nothing");
        assert_eq!(life.check(at(800), &limits), Silence::Dead(Duration::from_millis(800)));
        life.heard(at(801));
        assert_eq!(life.check(at(801), &limits), Silence::Wait);
    }
}
