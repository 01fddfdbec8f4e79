//! The one funnel to etcd: every request goes through here, with one limit, one sorting of
//! failures and one rule for another try.
//!
//! A read may be repeated through any member. A write is repeated only while it certainly never
//! left this machine; once it may have been applied the caller is told `OutcomeUnknown` and has
//! to find out what stands in etcd.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use etcd_client::ResponseHeader;

use super::classify::{Class, classify_error};
use super::core::Core;
use super::member::{Connection, Purpose};
use crate::clock::Instant;
use crate::error::{Error, ErrorKind, Result};
use crate::race::{Either, race};
use crate::resilience::{Next, random_unit};

/// Whether a request may be sent twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Repeating it does no harm: reads, revocations, deletes guarded by a revision.
    Repeatable,
    /// Applied twice it would be wrong, or its first outcome would be lost.
    Write,
}

/// What the funnel needs to know of a request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call<'a> {
    /// The name of the call, for messages.
    pub(crate) op: &'static str,
    /// The key it is about, as etcd knows it, for messages.
    pub(crate) key: &'a [u8],
    pub(crate) kind: Kind,
    /// When to stop trying.
    pub(crate) until: Instant,
}

/// An answer, with the raft term of the member that gave it.
pub(crate) struct Answer<R> {
    pub(crate) reply: R,
    pub(crate) term: u64,
}

/// One attempt that brought no usable answer.
pub(crate) struct Miss {
    pub(crate) class: Class,
    pub(crate) text: String,
    /// The server did answer, though not with what was asked for.
    pub(crate) answered: bool,
}

impl Miss {
    /// The reason, where etcd gave one that another try does not change.
    pub(crate) fn kind(&self) -> Option<ErrorKind> {
        match self.class {
            Class::Refused(kind) => Some(kind),
            Class::StaleLogin => Some(ErrorKind::AuthenticationFailed),
            Class::NotSent | Class::Unknown => None,
        }
    }

    /// The same for a login: whatever became of it, the request it was for was not sent.
    fn before_sending(self) -> Miss {
        let class = match self.class {
            Class::Unknown => Class::NotSent,
            other => other,
        };
        Miss { class, ..self }
    }
}

/// What every answer of etcd carries.
pub(crate) trait Reply {
    fn header(&self) -> Option<&ResponseHeader>;
}

macro_rules! replies {
    ($($name:ident),* $(,)?) => {
        $(impl Reply for etcd_client::$name {
            fn header(&self) -> Option<&ResponseHeader> {
                etcd_client::$name::header(self)
            }
        })*
    };
}

replies!(
    GetResponse,
    PutResponse,
    DeleteResponse,
    TxnResponse,
    LeaseGrantResponse,
    LeaseRevokeResponse,
    LeaseTimeToLiveResponse,
    LeaseKeepAliveResponse,
    WatchResponse,
);

impl Core {
    /// Sends a request until it is answered, refused or out of time.
    pub(crate) async fn call<R, F, Fut>(&self, call: Call<'_>, request: F) -> Result<R>
    where
        R: Reply,
        F: Fn(Arc<Connection>) -> Fut,
        Fut: Future<Output = std::result::Result<R, etcd_client::Error>>,
    {
        let started = self.clock.now();
        let mut misses: u32 = 0;
        let mut stale_logins = 0;
        let mut last = "no attempt was made".to_owned();
        loop {
            let now = self.clock.now();
            if now >= call.until {
                return Err(self.unreachable(call, started, &last));
            }
            let member = self.endpoints.lock().pick(now);
            let limit = call.until.min(now + self.config.attempt_limit());
            // On the heap: an attempt is a large future, and whatever waits for a request has it
            // inside, several times over on the stack of an unoptimised build.
            let attempt = Box::pin(self.attempt_for(call, member, limit, &request));
            let (miss, superseded) = match attempt.await {
                Either::First(Ok(answer)) => return Ok(answer.reply),
                Either::First(Err(miss)) => (miss, false),
                Either::Second(miss) => (miss, true),
            };
            match miss.class {
                Class::Refused(kind) => return Err(self.refused(call, kind, &miss.text)),
                // Each attempt has logged in anew, so another change came in between.
                Class::StaleLogin if stale_logins < STALE_LOGINS && self.has_user() => {
                    stale_logins += 1;
                    continue;
                }
                Class::StaleLogin => {
                    return Err(self.refused(call, ErrorKind::AuthenticationFailed, &miss.text));
                }
                Class::Unknown if call.kind == Kind::Write => {
                    return Err(Error::new(
                        ErrorKind::OutcomeUnknown,
                        format!(
                            "{} of `{}` was sent and not answered: {}",
                            call.op,
                            self.shown(call.key),
                            miss.text
                        ),
                    ));
                }
                Class::NotSent | Class::Unknown => {}
            }
            misses += 1;
            // An attempt that was cut short by the end of the call says less than one before it.
            if misses == 1 || self.clock.now() < call.until {
                last = miss.text;
            }
            match self.pause_after(misses, started, miss.answered).await {
                Some(_) if superseded => {}
                Some(pause) => {
                    let resume = (self.clock.now() + pause).min(call.until);
                    self.clock.sleep_until(resume).await;
                }
                None => return Err(self.unreachable(call, started, &last)),
            }
        }
    }

    /// One attempt of a call; the second is that of a request which may be repeated and has better
    /// prospects on another connection.
    async fn attempt_for<R, F, Fut>(
        &self,
        call: Call<'_>,
        member: usize,
        limit: Instant,
        request: &F,
    ) -> Either<std::result::Result<Answer<R>, Miss>, Miss>
    where
        R: Reply,
        F: Fn(Arc<Connection>) -> Fut,
        Fut: Future<Output = std::result::Result<R, etcd_client::Error>>,
    {
        let connection = match self.connection(member, Purpose::Calls, limit).await {
            Ok(connection) => connection,
            Err(miss) => return Either::First(Err(miss)),
        };
        let superseded = async {
            match call.kind {
                Kind::Write => std::future::pending().await,
                Kind::Repeatable => self.superseded(member, &connection).await,
            }
        };
        let attempt = self.attempt_on(&connection, member, Purpose::Calls, limit, request);
        match race(attempt, superseded).await {
            Either::First(outcome) => Either::First(outcome),
            Either::Second(()) => Either::Second(Miss {
                class: Class::Unknown,
                text: format!("no answer from {} before the outage", self.members[member].url()),
                answered: false,
            }),
        }
    }

    /// The pause before the next try, or `None` to give up. Silence and refused connections end
    /// with the operation timeout alone; the policy limits how often an answered failure (an
    /// election under way, say) is tried again. `RetryPolicy::never` is taken at its word.
    async fn pause_after(&self, misses: u32, started: Instant, answered: bool) -> Option<Duration> {
        let members = self.members.len() as u32;
        let policy = self.config.resilience.get_rpc().get_retry_policy();
        // `never` is the policy that stops even after the first failure.
        if matches!(policy.next(1, Duration::ZERO, 0.0), Next::Stop) {
            return None;
        }
        // The other members are tried at once; only then is there something to wait for.
        if !misses.is_multiple_of(members) {
            return Some(Duration::ZERO);
        }
        let elapsed = self.clock.now().saturating_since(started);
        let next =
            self.decide(policy.next(misses / members, elapsed, random_unit()), misses, elapsed);
        match next.await {
            Some(pause) => Some(pause),
            None if answered => None,
            None => Some(UNREACHABLE_PAUSE),
        }
    }

    /// Turns a policy's answer into a pause, asking the user's closure on the user-code thread.
    pub(crate) async fn decide(
        &self,
        next: Next,
        attempt: u32,
        elapsed: Duration,
    ) -> Option<Duration> {
        match next {
            Next::After(pause) => Some(pause),
            Next::Stop => None,
            Next::Ask(closure) => {
                let (answer, asked) = tokio::sync::oneshot::channel();
                self.user_code.submit(Box::new(move || {
                    let _ = answer.send(closure(attempt, elapsed));
                }));
                // A closure that panics is taken as "stop".
                asked.await.ok().flatten()
            }
        }
    }

    /// One attempt through one member, with its own limit. If etcd says that the login is out of
    /// date (the token expired, the member was restarted, users or roles were changed), it logs
    /// in and asks once more.
    pub(crate) async fn attempt<R, F, Fut>(
        &self,
        member: usize,
        purpose: Purpose,
        limit: Instant,
        request: &F,
    ) -> std::result::Result<Answer<R>, Miss>
    where
        R: Reply,
        F: Fn(Arc<Connection>) -> Fut,
        Fut: Future<Output = std::result::Result<R, etcd_client::Error>>,
    {
        let connection = self.connection(member, purpose, limit).await?;
        self.attempt_on(&connection, member, purpose, limit, request).await
    }

    /// One attempt on a connection that is there already; a stale login is renewed once.
    pub(crate) async fn attempt_on<R, F, Fut>(
        &self,
        connection: &Arc<Connection>,
        member: usize,
        purpose: Purpose,
        limit: Instant,
        request: &F,
    ) -> std::result::Result<Answer<R>, Miss>
    where
        R: Reply,
        F: Fn(Arc<Connection>) -> Fut,
        Fut: Future<Output = std::result::Result<R, etcd_client::Error>>,
    {
        let login = connection.login();
        match self.exchange(member, purpose, limit, connection, request).await {
            Err(miss) if miss.class == Class::StaleLogin && connection.has_user() => {}
            outcome => return outcome,
        }
        // On the heap, since it is rare and as large as all the rest of an attempt.
        Box::pin(async {
            self.log_in(member, purpose, limit, connection, login).await?;
            self.exchange(member, purpose, limit, connection, request).await
        })
        .await
    }

    /// Sends one request on one connection and takes its answer.
    async fn exchange<R, F, Fut>(
        &self,
        member: usize,
        purpose: Purpose,
        limit: Instant,
        connection: &Arc<Connection>,
        request: &F,
    ) -> std::result::Result<Answer<R>, Miss>
    where
        R: Reply,
        F: Fn(Arc<Connection>) -> Fut,
        Fut: Future<Output = std::result::Result<R, etcd_client::Error>>,
    {
        let outcome = race(request(connection.clone()), self.clock.sleep_until(limit)).await;
        match outcome {
            Either::First(Ok(reply)) => {
                let is_back = self.endpoints.lock().report_good(member);
                if is_back {
                    self.returns.announce();
                }
                let term = self.observe(reply.header())?;
                Ok(Answer { reply, term })
            }
            Either::First(Err(error)) => {
                let miss = self.miss(&error);
                if !miss.answered {
                    self.distrust(member, purpose, connection);
                } else if matches!(miss.class, Class::NotSent | Class::Unknown) {
                    // It answers, but cannot serve: no leader, or none that it reaches.
                    self.endpoints.lock().report_bad(member, self.clock.now());
                }
                Err(miss)
            }
            Either::Second(()) => {
                self.distrust(member, purpose, connection);
                Err(Miss {
                    class: Class::Unknown,
                    text: format!("no answer in time from {}", self.members[member].url()),
                    answered: false,
                })
            }
        }
    }

    /// The connection to a member, made within `limit`.
    pub(crate) async fn connection(
        &self,
        member: usize,
        purpose: Purpose,
        limit: Instant,
    ) -> std::result::Result<Arc<Connection>, Miss> {
        if let Some(connection) = self.members[member].made(purpose) {
            return Ok(connection);
        }
        let connect = Box::pin(self.members[member].connection(purpose, &self.config.dial));
        match race(connect, self.clock.sleep_until(limit)).await {
            Either::First(Ok(connection)) => Ok(connection),
            Either::First(Err(error)) => {
                let mut miss = self.miss(&error);
                if !miss.answered {
                    self.endpoints.lock().report_bad(member, self.clock.now());
                }
                if miss.class == Class::Unknown && self.members[member].uses_tls() {
                    // Its reason is often lost with the connection.
                    miss.text.push_str(TURNED_AWAY);
                }
                Err(miss.before_sending())
            }
            Either::Second(()) => {
                self.endpoints.lock().report_bad(member, self.clock.now());
                Err(Miss {
                    class: Class::NotSent,
                    text: format!("no connection in time to {}", self.members[member].url()),
                    answered: false,
                })
            }
        }
    }

    /// Notes that a member failed us: its connection is not used again, and others come first.
    pub(crate) fn distrust(&self, member: usize, purpose: Purpose, connection: &Connection) {
        self.endpoints.lock().report_bad(member, self.clock.now());
        self.discard(member, purpose, connection.number());
    }

    /// Gives up a connection to a member, without judging the member.
    pub(crate) fn discard(&self, member: usize, purpose: Purpose, number: u64) {
        self.members[member].discard(purpose, number);
    }

    /// Fetches a new token for one connection, unless it has one since the login `seen`.
    pub(crate) async fn log_in(
        &self,
        member: usize,
        purpose: Purpose,
        limit: Instant,
        connection: &Connection,
        seen: u64,
    ) -> std::result::Result<(), Miss> {
        let miss = match race(connection.log_in(seen), self.clock.sleep_until(limit)).await {
            Either::First(Ok(())) => return Ok(()),
            Either::First(Err(error)) => self.miss(&error),
            Either::Second(()) => Miss {
                class: Class::Unknown,
                text: format!("no login in time at {}", self.members[member].url()),
                answered: false,
            },
        };
        if !miss.answered {
            self.distrust(member, purpose, connection);
        }
        Err(miss.before_sending())
    }

    fn has_user(&self) -> bool {
        self.config.dial.credentials.is_some()
    }

    /// Takes note of what a header says of the cluster, and returns its raft term.
    pub(crate) fn observe(
        &self,
        header: Option<&ResponseHeader>,
    ) -> std::result::Result<u64, Miss> {
        let Some(header) = header else { return Ok(0) };
        let (cluster, term) = (header.cluster_id(), header.raft_term());
        // A cancelled watch answers with an empty header.
        if cluster != 0 {
            let first =
                self.cluster.compare_exchange(0, cluster, Ordering::AcqRel, Ordering::Acquire);
            if first.is_err_and(|pinned| pinned != cluster) {
                return Err(Miss {
                    class: Class::Refused(ErrorKind::WrongCluster),
                    text: format!("the answer came from cluster {cluster:x}"),
                    answered: true,
                });
            }
        }
        self.highest_term.fetch_max(term, Ordering::AcqRel);
        Ok(term)
    }

    pub(crate) fn miss(&self, error: &etcd_client::Error) -> Miss {
        let (class, text) = classify_error(error);
        let answered =
            text.contains("etcdserver:") || matches!(class, Class::Refused(_) | Class::StaleLogin);
        Miss { class, text, answered }
    }

    pub(crate) fn refused(&self, call: Call<'_>, kind: ErrorKind, text: &str) -> Error {
        let key = self.shown(call.key);
        Error::on_key(kind, format!("{} of `{key}`: {text}", call.op), &key)
    }

    fn unreachable(&self, call: Call<'_>, started: Instant, last: &str) -> Error {
        let waited = self.clock.now().saturating_since(started);
        Error::new(
            ErrorKind::Unreachable,
            format!("{}: etcd did not answer for {waited:.1?} (last: {last})", call.op),
        )
    }
}

/// What to think of a server that takes a TLS connection and closes it before its first answer.
const TURNED_AWAY: &str = " (closed at once: the server may want another client certificate)";

/// How often one call may find that its login went out of date between logging in and asking:
/// every change of a user or a role does that.
const STALE_LOGINS: u32 = 3;

/// The pace at which an unreachable etcd is asked again once the policy has no more to say.
pub(super) const UNREACHABLE_PAUSE: Duration = Duration::from_millis(250);
