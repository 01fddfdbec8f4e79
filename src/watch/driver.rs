//! The task that keeps the watches of one group going: it opens their stream, always drains it,
//! and opens another, through another member, when it breaks, goes silent or loses its leader.
//!
//! The stream is distrusted, not the watch: every watch goes on from where it was, and only what
//! etcd no longer has is read again.

use std::future::Future;
use std::pin::pin;
use std::time::Duration;

use super::group::{Command, End, Group};
use super::multiplex::{Multiplex, Request, WatchKey};
use super::stream::{Broken, Happened, Outgoing, Silence, Stream, Wanted};
use crate::client::member::Purpose;
use crate::clock::Instant;
use crate::error::ErrorKind;
use crate::race::{Either, race};
use crate::resilience::{Next, random_unit};

/// A stream that lived this long was a good one: its end is no failed attempt.
const SETTLED: Duration = Duration::from_secs(1);

/// Failed attempts since the last good stream.
struct Misses {
    count: u32,
    since: Instant,
}

impl Misses {
    fn note(&mut self, now: Instant) {
        if self.count == 0 {
            self.since = now;
        }
        self.count = self.count.saturating_add(1);
    }
}

impl Group {
    pub(super) async fn run(mut self) {
        let commands = self.commands.clone();
        let _closing = self.core.closed.on_cancel(move || drop(commands.send(Command::Close)));
        let mut misses = Misses { count: 0, since: self.core.clock.now() };
        let mut logged_in = false;
        while let Some((mut ids, id, wanted)) = self.first_request().await {
            let core = self.core.clone();
            let member = core.pick_member();
            // Ids that were handed out for a stream that never came are not used again either.
            self.last_id = ids.last_id();
            let opening = Stream::open(&core, member, id, wanted);
            let Some(opened) = self.serve(opening).await else { return };
            let broken = match opened {
                Ok(mut stream) => {
                    let end = self.drive(&mut stream, &mut ids).await;
                    self.last_id = ids.last_id();
                    if self.core.clock.now() >= stream.opened + SETTLED {
                        misses.count = 0;
                        logged_in = false;
                    } else {
                        misses.note(self.core.clock.now());
                    }
                    match end {
                        End::Over => return,
                        End::LogIn => {
                            // Nobody drains it any more.
                            drop(stream);
                            self.detach_all();
                            if self.log_in(member).await.is_none() {
                                return;
                            }
                            continue;
                        }
                        End::Broken(broken) => {
                            if broken.kind.is_none_or(|kind| kind == ErrorKind::Rejected) {
                                let connection = &stream.connection;
                                self.core.distrust(member, Purpose::Watches, connection);
                            }
                            broken
                        }
                    }
                }
                Err(broken) => {
                    misses.note(self.core.clock.now());
                    broken
                }
            };
            self.detach_all();
            match broken.kind {
                Some(ErrorKind::AuthenticationFailed) if !logged_in => {
                    logged_in = true;
                    if self.log_in(member).await.is_none() {
                        return;
                    }
                    continue;
                }
                // What else etcd has to say of a stream may pass, say while a member starts.
                Some(kind) if kind != ErrorKind::Rejected => {
                    self.fail_all(|group, watch| group.refusal(watch, kind, &broken.text));
                    continue;
                }
                _ => {}
            }
            if broken.is_indigestible() {
                // Which watch it was for is unknown, and asking again would bring it again.
                self.read_all_again();
            }
            let cause = self.suspend_all(member, &broken.text);
            match self.pause(&misses).await {
                Some(true) => {}
                Some(false) => self.fail_all(|_, _| cause.clone()),
                None => return,
            }
        }
    }

    // ----- opening ----------------------------------------------------------------------------

    /// Waits until there is a watch to ask for; `None` once the group is over.
    async fn first_request(&mut self) -> Option<(Multiplex, i64, Wanted)> {
        loop {
            while let Ok(command) = self.inbox.try_recv() {
                self.obey(command, None);
            }
            if self.leave() {
                return None;
            }
            let mut ids = Multiplex::new(self.last_id);
            for (key, watch) in &self.watches {
                if watch.resume.is_detached() {
                    ids.create(*key);
                }
            }
            if let Some(Request::Create { id, watch }) = ids.next()
                && let Some(wanted) = self.wanted(watch)
            {
                return Some((ids, id, wanted));
            }
            // Everything waits for a read.
            if let Some(command) = self.inbox.recv().await {
                self.obey(command, None);
            }
        }
    }

    fn wanted(&self, watch: WatchKey) -> Option<Wanted> {
        let watch = self.watches.get(&watch)?;
        Some(Wanted { range: watch.range.clone(), from: watch.resume.start() })
    }

    /// Waits for `work`, obeying commands meanwhile; `None` once the group is over.
    async fn serve<T>(&mut self, work: impl Future<Output = T>) -> Option<T> {
        let mut work = pin!(work);
        loop {
            if self.leave() {
                return None;
            }
            match race(work.as_mut(), self.inbox.recv()).await {
                Either::First(value) => return Some(value),
                Either::Second(Some(command)) => drop(self.obey(command, None)),
                Either::Second(None) => return None,
            }
        }
    }

    /// Leaves the hub if no watch is left; then nobody can send a command any more.
    fn leave(&mut self) -> bool {
        if !self.watches.is_empty() {
            return false;
        }
        let mut groups = self.groups.lock();
        if !self.inbox.is_empty() {
            return false;
        }
        // A task that was started in our place after the runtime refused us is not ours to remove.
        if groups.get(self.name).is_some_and(|there| there.same_channel(&self.commands)) {
            groups.remove(self.name);
        }
        true
    }

    async fn log_in(&mut self, member: usize) -> Option<()> {
        let core = self.core.clone();
        let limit = core.clock.now() + core.config.attempt_limit();
        self.serve(async move {
            // A failure shows when the stream is opened anew.
            if let Ok(connection) = core.connection(member, Purpose::Watches, limit).await {
                let seen = connection.login();
                let _ = core.log_in(member, Purpose::Watches, limit, &connection, seen).await;
            }
        })
        .await
    }

    /// Waits before the next attempt. `Some(false)` says that the policy allows none.
    async fn pause(&mut self, misses: &Misses) -> Option<bool> {
        let core = self.core.clone();
        let elapsed = core.clock.now().saturating_since(misses.since);
        let members = core.member_count() as u32;
        let count = misses.count;
        let work = async move {
            let policy = core.config.resilience.get_watch().get_retry_policy();
            let round = count / members;
            if count == 0 || !count.is_multiple_of(members) {
                // The other members are tried at once, unless there is to be no second try at all.
                return !matches!(policy.next(1, Duration::ZERO, 0.0), Next::Stop);
            }
            match core.decide(policy.next(round, elapsed, random_unit()), round, elapsed).await {
                Some(pause) => {
                    core.clock.sleep(pause).await;
                    true
                }
                None => false,
            }
        };
        self.serve(work).await
    }

    // ----- driving ----------------------------------------------------------------------------

    /// Drains the stream until it ends.
    async fn drive(&mut self, stream: &mut Stream, ids: &mut Multiplex) -> End {
        // The request that opened the stream was the first in the outbox.
        self.note_sent(ids);
        for (key, watch) in &self.watches {
            // Added while the stream was opening.
            if watch.resume.is_detached() && !ids.knows(*key) {
                ids.create(*key);
            }
        }
        let core = self.core.clone();
        let limits = core.config.resilience.get_watch();
        loop {
            while let Ok(command) = self.inbox.try_recv() {
                if let Some(end) = self.obey(command, Some(ids)) {
                    return end;
                }
            }
            if self.leave() {
                return End::Over;
            }
            let outgoing = self.outgoing(ids);
            let timer = core.clock.sleep_until(stream.life.deadline(limits));
            let others = race(self.inbox.recv(), timer);
            match race(stream.next(outgoing), others).await {
                Either::First(Happened::Answer(Ok(Some(answer)))) => {
                    stream.life.heard(core.clock.now());
                    if let Some(end) = self.take(&answer, ids) {
                        return end;
                    }
                }
                Either::First(Happened::Answer(Ok(None))) => {
                    return End::Broken(Broken::because("the member ended the stream"));
                }
                Either::First(Happened::Sent(Ok(()))) => {
                    if !matches!(self.note_sent(ids), Some(Request::Cancel { .. })) {
                        stream.life.expect(core.clock.now());
                    }
                }
                Either::First(Happened::Answer(Err(error)) | Happened::Sent(Err(error))) => {
                    return End::Broken(Broken::from(core.miss(&error)));
                }
                Either::Second(Either::First(Some(command))) => {
                    if let Some(end) = self.obey(command, Some(ids)) {
                        return end;
                    }
                }
                Either::Second(Either::First(None)) => return End::Over,
                Either::Second(Either::Second(())) => {
                    let now = core.clock.now();
                    match stream.life.check(now, limits) {
                        Silence::Wait => {}
                        Silence::Probe if ids.probe() => stream.life.expect(now),
                        Silence::Probe => stream.life.heard(now),
                        Silence::Dead(silent) => {
                            let text = format!("nothing was heard for {silent:.1?}");
                            return End::Broken(Broken::because(text));
                        }
                    }
                }
            }
        }
    }

    /// The next request, ready to be sent.
    fn outgoing(&self, ids: &mut Multiplex) -> Option<Outgoing> {
        loop {
            let (id, watch) = match ids.next()? {
                Request::Cancel { id } => return Some(Outgoing::Cancel { id }),
                Request::Create { id, watch } | Request::Probe { id, watch } => (id, watch),
            };
            match self.wanted(watch) {
                Some(wanted) => return Some(Outgoing::Create { id, wanted }),
                None => ids.forget(watch),
            }
        }
    }

    fn note_sent(&mut self, ids: &mut Multiplex) -> Option<Request> {
        let request = ids.sent();
        if let Some(Request::Create { watch, .. }) = request
            && let Some(watch) = self.watches.get_mut(&watch)
        {
            watch.resume.asked();
        }
        request
    }
}
