//! The shell around the renewal machine: streams, reads and timers for one lease.
//!
//! Each attempt runs as a task of its own, so that one that hangs in a dead connection delays
//! nothing. Renewals use connections that carry no watches, since unread watch data would stand
//! in their way.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use etcd_client::{LeaseKeepAliveStream, LeaseKeeper};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use super::renewal::{Action, AttemptId, Event, Over, Renewal};
use super::word::DeadlineWord;
use crate::CancelToken;
use crate::client::call::Reply;
use crate::client::core::Core;
use crate::client::member::{Connection, Purpose};
use crate::clock::Instant;
use crate::error::ErrorKind;
use crate::race::{Either, race};

/// What hangs on the lease, seen from the keeper.
pub(crate) trait Lessee: Send + Sync + 'static {
    fn lease(&self) -> i64;

    fn word(&self) -> &DeadlineWord;

    /// A key to read in proof of a renewal; `None` where there is nothing to look at.
    fn probe(&self) -> Option<Vec<u8>>;

    /// What the read of `probe`'s key found, at this revision.
    fn probed(&self, key: &[u8], revision: i64, found: Option<&etcd_client::KeyValue>);

    /// A renewal sent at `sent` counted.
    fn counted(&self, sent: Instant);

    /// etcd refused to renew or to prove a renewal; if that lasts until the deadline, it is the
    /// reason of the end.
    fn refused(&self);

    fn suspended(&self);

    fn reconnected(&self);

    /// Asked at every wake: true ends the keeping.
    fn is_done(&self, now: Instant) -> bool;
}

/// How the keeping of a lease ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    DeadlinePassed,
    /// The deadline passed while etcd refused our login.
    Refused,
    LeaseGone,
    WrongCluster,
    /// The lessee was done, or `stop` was cancelled.
    Stopped,
}

/// An open keep-alive stream; one renewal at a time is in flight on it.
struct Stream {
    member: usize,
    keeper: LeaseKeeper,
    answers: LeaseKeepAliveStream,
    /// The proof of an answer is read on the connection that the answer came on.
    connection: Arc<Connection>,
}

enum Report {
    Opened { attempt: AttemptId },
    Acked { attempt: AttemptId, stream: Option<Box<Stream>>, sent: Instant, ttl: i64, term: u64 },
    Proved { attempt: AttemptId, term: u64 },
    Gone { attempt: AttemptId },
    Failed { attempt: AttemptId, kind: Option<ErrorKind> },
}

struct Keeper<L> {
    core: Arc<Core>,
    lessee: Arc<L>,
    reports: mpsc::UnboundedSender<Report>,
    tasks: HashMap<AttemptId, AbortHandle>,
    /// The streams of answered attempts that wait for their proof.
    answered: HashMap<AttemptId, Box<Stream>>,
    /// The stream of the last attempt that counted.
    kept: Option<Box<Stream>>,
    last_member: usize,
    /// The number of the connection that the last attempt got, once it got one.
    last_connection: Arc<OnceLock<u64>>,
    /// The last attempt was refused, so its connection works.
    last_answered: bool,
    refused: bool,
    ended: Option<Ended>,
    /// Each step of an attempt may take this long.
    limit: Duration,
}

/// Renews until the lease is over, `stop` is cancelled or the lessee is done.
pub(crate) async fn keep<L: Lessee>(
    core: Arc<Core>,
    lessee: Arc<L>,
    mut renewal: Renewal,
    limit: Duration,
    stop: CancelToken,
) -> Ended {
    let (reports, mut inbox) = mpsc::unbounded_channel();
    let mut keeper = Keeper {
        last_member: core.pick_member(),
        core: core.clone(),
        lessee,
        reports,
        tasks: HashMap::new(),
        answered: HashMap::new(),
        kept: None,
        last_connection: Arc::default(),
        last_answered: false,
        refused: false,
        ended: None,
        limit,
    };
    let mut event = Event::Tick;
    loop {
        let now = core.clock.now();
        if stop.is_cancelled() || keeper.lessee.is_done(now) {
            keeper.ended = Some(Ended::Stopped);
        } else {
            for action in renewal.step(now, event) {
                keeper.perform(action);
            }
        }
        if let Some(ended) = keeper.ended {
            keeper.abort_all();
            return ended;
        }
        let timer = core.clock.sleep_until(renewal.next_wake());
        event = match race(inbox.recv(), race(stop.cancelled(), timer)).await {
            Either::First(Some(report)) => keeper.take(report).unwrap_or(Event::Tick),
            Either::First(None) | Either::Second(_) => Event::Tick,
        };
    }
}

impl<L: Lessee> Keeper<L> {
    fn perform(&mut self, action: Action) {
        match action {
            Action::Begin { attempt, fresh } => self.begin(attempt, fresh),
            Action::Prove { attempt } => self.prove(attempt),
            Action::ConfirmGone { attempt } => self.confirm_gone(attempt),
            Action::Abort { attempt } => {
                if let Some(task) = self.tasks.remove(&attempt) {
                    task.abort();
                }
                self.answered.remove(&attempt);
            }
            Action::Counted { attempt, sent, deadline } => {
                if let Some(stream) = self.answered.remove(&attempt) {
                    self.last_member = stream.member;
                    self.kept = Some(stream);
                }
                self.refused = false;
                if self.lessee.word().extend(self.core.clock.now(), deadline) {
                    self.lessee.counted(sent);
                } else {
                    // Somebody asked after the old deadline, before this answer was taken up.
                    self.ended = Some(Ended::DeadlinePassed);
                }
            }
            Action::Suspended => self.lessee.suspended(),
            Action::Reconnected => self.lessee.reconnected(),
            Action::Over(Over::LeaseGone) => self.ended = Some(Ended::LeaseGone),
            Action::Over(Over::DeadlinePassed) if self.refused => {
                self.ended = Some(Ended::Refused);
            }
            Action::Over(Over::DeadlinePassed) => self.ended = Some(Ended::DeadlinePassed),
        }
    }

    /// Takes a task's report to heart and turns it into the machine's event.
    fn take(&mut self, report: Report) -> Option<Event> {
        match report {
            Report::Opened { attempt } => Some(Event::Opened { attempt }),
            Report::Acked { attempt, stream, sent, ttl, term } => {
                // An aborted attempt's last words; its stream goes with it.
                self.tasks.remove(&attempt)?;
                if let Some(stream) = stream {
                    self.answered.insert(attempt, stream);
                }
                let ttl = Duration::from_secs(u64::try_from(ttl).unwrap_or(0));
                let highest = self.core.highest_term();
                Some(Event::Acked { attempt, sent, ttl, term, highest })
            }
            Report::Proved { attempt, term } => {
                self.tasks.remove(&attempt);
                Some(Event::Proved { attempt, term, highest: self.core.highest_term() })
            }
            Report::Gone { attempt } => {
                self.tasks.remove(&attempt);
                Some(Event::Gone { attempt })
            }
            Report::Failed { attempt, kind } => {
                self.tasks.remove(&attempt);
                match kind {
                    Some(ErrorKind::WrongCluster) => self.ended = Some(Ended::WrongCluster),
                    Some(ErrorKind::PermissionDenied | ErrorKind::AuthenticationFailed) => {
                        self.refused = true;
                        self.last_answered = true;
                        self.lessee.refused();
                        return Some(Event::Refused { attempt });
                    }
                    _ => {}
                }
                Some(Event::Failed { attempt })
            }
        }
    }

    fn begin(&mut self, attempt: AttemptId, fresh: bool) {
        let kept = self.kept.take();
        let (member, kept, suspect) = match kept {
            Some(stream) if !fresh => (stream.member, Some(stream), None),
            _ if !fresh => (self.core.pick_member(), None, None),
            // The previous attempt is unanswered: its connection may hang, so the next one gets
            // another, through the next member if there is one. A refusal is an answer, and a
            // new connection would be another login. Only the connection it was on is given up:
            // a thousand leases that are overdue together share what the first of them has made.
            _ => {
                let suspect = self.last_connection.get().filter(|_| !self.last_answered);
                let suspect = suspect.map(|number| (self.last_member, *number));
                (self.core.member_after(self.last_member), None, suspect)
            }
        };
        self.last_answered = false;
        self.last_member = member;
        self.last_connection = Arc::default();
        let got = self.last_connection.clone();
        let (core, lease, reports) = (self.core.clone(), self.lessee.lease(), self.reports.clone());
        let limit = core.clock.now() + self.limit;
        let task = tokio::spawn(async move {
            if let Some((member, number)) = suspect {
                core.discard(member, Purpose::Leases, number);
            }
            let opened = || drop(reports.send(Report::Opened { attempt }));
            let report = match renew(&core, lease, member, kept, limit, &got, opened).await {
                Ok((stream, sent, ttl, term)) => Report::Acked { attempt, stream, sent, ttl, term },
                Err(kind) => Report::Failed { attempt, kind },
            };
            let _ = reports.send(report);
        });
        self.tasks.insert(attempt, task.abort_handle());
    }

    /// A linearizable read through the member that answered, on the connection it answered on.
    fn prove(&mut self, attempt: AttemptId) {
        let Some(stream) = self.answered.get(&attempt).or(self.kept.as_ref()) else { return };
        let (member, connection) = (stream.member, stream.connection.clone());
        let Some(key) = self.lessee.probe() else { return };
        let (core, lessee, reports) =
            (self.core.clone(), self.lessee.clone(), self.reports.clone());
        let limit = core.clock.now() + self.limit;
        let task = tokio::spawn(async move {
            let read = |connection: Arc<Connection>| {
                let key = key.clone();
                async move { connection.kv().get(key, None).await }
            };
            let report =
                match core.attempt_on(&connection, member, Purpose::Leases, limit, &read).await {
                    Ok(answer) => {
                        let revision = answer.reply.header().map_or(0, |header| header.revision());
                        lessee.probed(&key, revision, answer.reply.kvs().first());
                        Report::Proved { attempt, term: answer.term }
                    }
                    Err(miss) => Report::Failed { attempt, kind: miss.kind() },
                };
            let _ = reports.send(report);
        });
        self.tasks.insert(attempt, task.abort_handle());
    }

    fn confirm_gone(&mut self, attempt: AttemptId) {
        let (core, lease, reports) = (self.core.clone(), self.lessee.lease(), self.reports.clone());
        let limit = core.clock.now() + self.limit;
        let task = tokio::spawn(async move {
            let report = match core.time_to_live("renewal", lease, limit).await {
                Ok(None) => Report::Gone { attempt },
                Ok(Some(_)) => Report::Failed { attempt, kind: None },
                Err(error) => Report::Failed { attempt, kind: Some(error.kind()) },
            };
            let _ = reports.send(report);
        });
        self.tasks.insert(attempt, task.abort_handle());
    }

    fn abort_all(&mut self) {
        for (_, task) in self.tasks.drain() {
            task.abort();
        }
    }
}

/// One renewal: on the stream given, or on a new one, whose first answer etcd-client swallows.
async fn renew(
    core: &Core,
    lease: i64,
    member: usize,
    kept: Option<Box<Stream>>,
    limit: Instant,
    got: &OnceLock<u64>,
    opened: impl FnOnce(),
) -> Result<(Option<Box<Stream>>, Instant, i64, u64), Option<ErrorKind>> {
    let mut stream = match kept {
        Some(stream) => {
            got.get_or_init(|| stream.connection.number());
            stream
        }
        None => match open(core, lease, member, limit, got).await? {
            Some(stream) => {
                opened();
                stream
            }
            None => return Ok((None, core.clock.now(), 0, core.highest_term())),
        },
    };
    let sent = core.clock.now();
    let exchange = async {
        stream.keeper.keep_alive().await?;
        stream.answers.message().await
    };
    match exchange.await {
        Ok(Some(answer)) => {
            let term = core.observe(Reply::header(&answer)).map_err(|miss| miss.kind())?;
            Ok((Some(stream), sent, answer.ttl(), term))
        }
        Ok(None) => Err(None),
        Err(error) => Err(core.miss(&error).kind()),
    }
}

/// A connection is made within half of an attempt, but is given this much. It begins with a login
/// where there is one, and a login that was forwarded to a leader that has failed is lost: one
/// begun after the election must not stand in line behind it.
const LEAST_DIAL: Duration = Duration::from_millis(500);

/// Opens a stream; `None` says that the member knows no such lease.
async fn open(
    core: &Core,
    lease: i64,
    member: usize,
    limit: Instant,
    got: &OnceLock<u64>,
) -> Result<Option<Box<Stream>>, Option<ErrorKind>> {
    let now = core.clock.now();
    let dialled_by = limit.min(now + (limit.saturating_since(now) / 2).max(LEAST_DIAL));
    let connection =
        core.connection(member, Purpose::Leases, dialled_by).await.map_err(|miss| miss.kind())?;
    got.get_or_init(|| connection.number());
    let opened =
        race(async { connection.lease().keep_alive(lease).await }, core.clock.sleep_until(limit));
    match opened.await {
        Either::First(Ok((keeper, answers))) => {
            Ok(Some(Box::new(Stream { member, keeper, answers, connection })))
        }
        Either::First(Err(error)) => {
            let miss = core.miss(&error);
            if miss.kind() == Some(ErrorKind::LeaseGone) {
                return Ok(None);
            }
            if !miss.answered {
                core.distrust(member, Purpose::Leases, &connection);
            }
            Err(miss.kind())
        }
        Either::Second(()) => {
            core.distrust(member, Purpose::Leases, &connection);
            Err(None)
        }
    }
}

/// One renewal outside of any keeping: when it was sent and the TTL it gave, or `None` if there
/// is no such lease. The connection may be one that died in an outage, so silence on it is not
/// taken for etcd's: then it is tried once more, on another.
pub(crate) async fn renew_once(
    core: &Core,
    lease: i64,
    until: Instant,
) -> crate::Result<Option<(Instant, Duration)>> {
    let limit = until.min(core.clock.now() + core.config.attempt_limit());
    match renew_through(core, core.pick_member(), lease, limit).await {
        Err(error) if error.is_unreachable() => {
            renew_through(core, core.pick_member(), lease, until).await
        }
        outcome => outcome,
    }
}

async fn renew_through(
    core: &Core,
    member: usize,
    lease: i64,
    until: Instant,
) -> crate::Result<Option<(Instant, Duration)>> {
    let got = OnceLock::new();
    let renewal = renew(core, lease, member, None, until, &got, || ());
    let kind = match race(renewal, core.clock.sleep_until(until)).await {
        Either::First(Ok((_, sent, ttl, term))) if ttl > 0 && term >= core.highest_term() => {
            return Ok(Some((sent, Duration::from_secs(ttl.unsigned_abs()))));
        }
        Either::First(Ok((_, _, ttl, _))) if ttl <= 0 => return Ok(None),
        Either::First(Err(kind)) => kind,
        Either::First(Ok(_)) | Either::Second(()) => None,
    };
    if let (None, Some(number)) = (kind, got.get()) {
        core.discard(member, Purpose::Leases, *number);
    }
    Err(crate::Error::new(
        kind.unwrap_or(ErrorKind::Unreachable),
        format!("renewing lease {lease:x} through {}", core.member_url(member)),
    ))
}
