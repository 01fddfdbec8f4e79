//! The watches of one group, and what is done with each command and each answer. Nothing here
//! waits: what takes time is started, and comes back as a command.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use etcd_client::WatchResponse;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};

use super::hub::Groups;
use super::multiplex::{Multiplex, WatchKey};
use super::reading::{self, Reading};
use super::resume::{Action, Resume};
use super::stream::Broken;
use super::{Event, Flow, Range, Sink, Snapshot};
use crate::client::call::{Call, Kind};
use crate::client::core::Core;
use crate::error::{Error, ErrorKind, Result};
use crate::whitebox;

/// What the task is told.
pub(super) enum Command {
    Add(NewWatch),
    Remove(WatchKey),
    /// A read that the task has started is done.
    Read {
        watch: WatchKey,
        number: u64,
        outcome: Outcome,
    },
    Close,
}

pub(super) enum Outcome {
    Head(Result<i64>),
    Range(Result<Snapshot>),
}

pub(super) struct NewWatch {
    pub(super) key: WatchKey,
    pub(super) range: Range,
    pub(super) resume: Resume,
    pub(super) sink: Arc<dyn Sink>,
    pub(super) wanted: Arc<AtomicBool>,
}

pub(super) struct Watch {
    pub(super) range: Range,
    sink: Arc<dyn Sink>,
    /// Cleared when the owner drops the watch: nothing is told from then on.
    wanted: Arc<AtomicBool>,
    pub(super) resume: Resume,
    suspended: bool,
    reading: Option<Reading>,
    _counted: whitebox::GaugeGuard<'static>,
}

impl Watch {
    fn sink(&self) -> Option<&dyn Sink> {
        self.wanted.load(Ordering::Acquire).then_some(&*self.sink)
    }
}

/// Why the stream is not used any more.
pub(super) enum End {
    Broken(Broken),
    /// Only its login is out of date.
    LogIn,
    /// The group is empty and has left the hub.
    Over,
}

/// The task's state.
pub(super) struct Group {
    pub(super) core: Arc<Core>,
    pub(super) name: &'static str,
    pub(super) groups: Arc<Groups>,
    pub(super) commands: UnboundedSender<Command>,
    pub(super) inbox: UnboundedReceiver<Command>,
    pub(super) watches: BTreeMap<WatchKey, Watch>,
    /// The last id used on any of its streams.
    pub(super) last_id: i64,
    reads: u64,
    /// Whether the watches were told, and the log, that they are interrupted.
    down: bool,
}

impl Group {
    pub(super) fn new(
        core: Arc<Core>,
        name: &'static str,
        groups: Arc<Groups>,
        commands: UnboundedSender<Command>,
        inbox: UnboundedReceiver<Command>,
    ) -> Group {
        Group {
            core,
            name,
            groups,
            commands,
            inbox,
            watches: BTreeMap::new(),
            last_id: 0,
            reads: 0,
            down: false,
        }
    }

    /// Acts on one answer.
    pub(super) fn take(&mut self, answer: &WatchResponse, ids: &mut Multiplex) -> Option<End> {
        if let Err(miss) = self.core.observe(answer.header()) {
            return Some(End::Broken(Broken::from(miss)));
        }
        let (created, canceled) = (answer.created(), answer.canceled());
        let Some(key) = ids.answered(answer.watch_id(), created, canceled) else {
            // Progress, or the refusal of a probe: a sign of life for all.
            for key in ids.bound() {
                if let Some(sink) = self.watches.get(&key).and_then(Watch::sink) {
                    sink.heard();
                }
            }
            return None;
        };
        let Some(watch) = self.watches.get_mut(&key) else {
            // Removed while the stream was opening for it.
            ids.forget(key);
            return None;
        };
        if let Some(sink) = watch.sink() {
            sink.heard();
        }
        let action = if canceled {
            watch.resume.canceled(answer.compact_revision(), answer.cancel_reason())
        } else if created {
            watch.resume.created(answer.header().map_or(0, |header| header.revision()))
        } else {
            let events = answer.events().iter().filter_map(Event::from_etcd).collect();
            watch.resume.events(events)
        };
        self.perform(key, action, Some(ids))
    }

    pub(super) fn obey(&mut self, command: Command, ids: Option<&mut Multiplex>) -> Option<End> {
        match command {
            Command::Add(new) => {
                let watch = Watch {
                    resume: new.resume,
                    range: new.range,
                    sink: new.sink,
                    wanted: new.wanted,
                    suspended: false,
                    reading: None,
                    _counted: whitebox::WATCHES.enter(),
                };
                self.watches.insert(new.key, watch);
                if let Some(ids) = ids {
                    ids.create(new.key);
                }
                if self.core.closed.is_cancelled() {
                    self.close_all();
                }
                None
            }
            Command::Remove(key) => {
                self.watches.remove(&key);
                if let Some(ids) = ids {
                    ids.forget(key);
                }
                None
            }
            Command::Read { watch, number, outcome } => self.read(watch, number, outcome, ids),
            Command::Close => {
                self.close_all();
                None
            }
        }
    }

    /// Acts on the result of a read.
    fn read(
        &mut self,
        key: WatchKey,
        number: u64,
        outcome: Outcome,
        ids: Option<&mut Multiplex>,
    ) -> Option<End> {
        let watch = self.watches.get_mut(&key)?;
        // One that was given up may have finished all the same.
        watch.reading.take_if(|reading| reading.number == number)?;
        match outcome {
            Outcome::Head(Ok(head)) => {
                let action = watch.resume.head(head);
                self.perform(key, action, ids)
            }
            Outcome::Range(Ok(snapshot)) => {
                let revision = snapshot.revision;
                let action = watch.resume.snapshot(revision);
                let again = watch.resume.is_detached();
                if let Some(sink) = watch.sink() {
                    sink.resync(snapshot);
                }
                if !again {
                    return self.perform(key, action, ids);
                }
                let range = self.core.shown(watch.range.key());
                log::info!("watch of `{range}`: read anew at revision {revision}");
                if let Some(ids) = ids {
                    // One that stands runs from elsewhere.
                    ids.forget(key);
                    ids.create(key);
                }
                None
            }
            Outcome::Head(Err(error)) | Outcome::Range(Err(error)) => {
                self.fail(key, error, ids);
                None
            }
        }
    }

    fn perform(
        &mut self,
        key: WatchKey,
        action: Action,
        ids: Option<&mut Multiplex>,
    ) -> Option<End> {
        match action {
            Action::Nothing => {}
            Action::Established => self.established(key),
            Action::InStep => {
                self.established(key);
                if let Some(sink) = self.watches.get(&key).and_then(Watch::sink) {
                    sink.in_step();
                }
            }
            Action::EstablishedWith { revision, events } => {
                self.established(key);
                self.deliver(key, revision, events, ids);
            }
            Action::Deliver { revision, events } => self.deliver(key, revision, events, ids),
            Action::ReadHead => self.start_reading(key, false),
            Action::ReadBeside => self.start_reading(key, true),
            Action::ReadRange => {
                if let Some(ids) = ids {
                    ids.forget(key);
                }
                self.start_reading(key, true);
            }
            Action::LogIn => return Some(End::LogIn),
            Action::Reopen { reason } => {
                let text = format!("etcd ended a watch: {reason}");
                return Some(End::Broken(Broken::because(text)));
            }
            Action::Refuse { reason } => {
                let kind = if reason.contains("permission denied") {
                    ErrorKind::PermissionDenied
                } else {
                    ErrorKind::AuthenticationFailed
                };
                if let Some(watch) = self.watches.get(&key) {
                    let error = self.refusal(watch, kind, &reason);
                    self.fail(key, error, ids);
                }
            }
        }
        None
    }

    fn deliver(
        &mut self,
        key: WatchKey,
        revision: i64,
        events: Vec<Event>,
        ids: Option<&mut Multiplex>,
    ) {
        let Some(watch) = self.watches.get_mut(&key) else { return };
        let Some(sink) = watch.sink() else { return };
        if sink.deliver(revision, events) == Flow::Resync && watch.resume.gap() {
            if let Some(ids) = ids {
                ids.forget(key);
            }
            self.start_reading(key, true);
        }
    }

    fn start_reading(&mut self, key: WatchKey, whole: bool) {
        let Some(watch) = self.watches.get_mut(&key) else { return };
        self.reads += 1;
        let number = self.reads;
        let (core, range) = (self.core.clone(), watch.range.clone());
        let commands = self.commands.clone();
        watch.reading = Some(Reading::start(number, async move {
            let outcome = if whole {
                Outcome::Range(reading::snapshot(&core, &range).await)
            } else {
                Outcome::Head(reading::head(&core, &range).await)
            };
            // An error means that the group is over.
            let _ = commands.send(Command::Read { watch: key, number, outcome });
        }));
    }

    // ----- what all watches are told ----------------------------------------------------------

    fn established(&mut self, key: WatchKey) {
        if std::mem::take(&mut self.down) {
            log::info!("watches `{}`: watching again", self.name);
        }
        if let Some(watch) = self.watches.get_mut(&key)
            && std::mem::take(&mut watch.suspended)
            && let Some(sink) = watch.sink()
        {
            sink.resumed();
        }
    }

    /// The stream is gone: every watch is to be asked for again. Reads of a range go on.
    pub(super) fn detach_all(&mut self) {
        for watch in self.watches.values_mut() {
            watch.resume.broken();
            if watch.resume.is_detached() {
                watch.reading = None;
            }
        }
    }

    pub(super) fn suspend_all(&mut self, member: usize, text: &str) -> Error {
        let url = self.core.member_url(member);
        let cause = Error::new(
            ErrorKind::Unreachable,
            format!("watches `{}` through {url} are interrupted: {text}", self.name),
        );
        if !std::mem::replace(&mut self.down, true) {
            log::warn!("{cause}");
        }
        for watch in self.watches.values_mut() {
            if !std::mem::replace(&mut watch.suspended, true)
                && let Some(sink) = watch.sink()
            {
                sink.suspended(&cause);
            }
        }
        cause
    }

    pub(super) fn read_all_again(&mut self) {
        let keys: Vec<WatchKey> = self.watches.keys().copied().collect();
        for key in keys {
            if self.watches.get_mut(&key).is_some_and(|watch| watch.resume.gap()) {
                self.start_reading(key, true);
            }
        }
    }

    pub(super) fn refusal(&self, watch: &Watch, kind: ErrorKind, text: &str) -> Error {
        let until = self.core.clock.now();
        let call = Call { op: "watch", key: watch.range.key(), kind: Kind::Repeatable, until };
        self.core.refused(call, kind, text)
    }

    fn fail(&mut self, key: WatchKey, error: Error, ids: Option<&mut Multiplex>) {
        if let Some(ids) = ids {
            ids.forget(key);
        }
        let Some(watch) = self.watches.remove(&key) else { return };
        log::warn!("watch of `{}` failed: {error}", self.core.shown(watch.range.key()));
        if let Some(sink) = watch.sink() {
            sink.failed(error);
        }
    }

    pub(super) fn fail_all(&mut self, error: impl Fn(&Group, &Watch) -> Error) {
        let failed: Vec<(WatchKey, Error)> =
            self.watches.iter().map(|(key, watch)| (*key, error(self, watch))).collect();
        for (key, error) in failed {
            self.fail(key, error, None);
        }
    }

    fn close_all(&mut self) {
        for watch in std::mem::take(&mut self.watches).into_values() {
            if let Some(sink) = watch.sink() {
                sink.failed(Error::closed("the client"));
            }
        }
    }
}

impl Drop for Group {
    /// The runtime stops, or a sink has panicked. Whoever waits for a watch is told; not so when
    /// the runtime had stopped before this task could start, since that is the caller's thread.
    fn drop(&mut self) {
        if !self.core.on_io_thread() {
            return;
        }
        self.inbox.close();
        while let Ok(command) = self.inbox.try_recv() {
            if matches!(command, Command::Add(_)) {
                self.obey(command, None);
            }
        }
        let closed = self.core.closed.is_cancelled();
        for watch in std::mem::take(&mut self.watches).into_values() {
            let error = if closed {
                Error::closed("the client")
            } else {
                Error::internal("the task of a watch has ended")
            };
            if let Some(sink) = watch.sink() {
                sink.failed(error);
            }
        }
    }
}
