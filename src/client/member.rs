//! One member of etcd and the connections to it.
//!
//! etcd-client balances over endpoints without failing over, so each member gets clients of its
//! own with that single endpoint. There are three per member: unary calls, lease streams and
//! watches. Unread watch data fills the window of a whole HTTP/2 connection, and renewals must
//! never stand behind it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use etcd_client::{Client, ConnectOptions, KvClient, LeaseClient, WatchClient};

use super::builder::Credentials;

/// etcd refuses requests over 1.5 MiB, but a range over many keys may answer with much more.
const LARGEST_ANSWER: usize = 256 * 1024 * 1024;

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    Calls,
    Leases,
    Watches,
}

/// One TCP connection (made when first used) and the clients on it.
pub(crate) struct Connection {
    number: u64,
    client: Client,
    credentials: Option<Credentials>,
    /// How often it has logged in; locked while a login is under way.
    logins: tokio::sync::Mutex<u64>,
    /// The same, to be read at any time.
    login: AtomicU64,
    kv: KvClient,
    lease: LeaseClient,
    watch: WatchClient,
}

impl Connection {
    /// Which of the connections to its member it is.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    pub(crate) fn kv(&self) -> KvClient {
        self.kv.clone()
    }

    pub(crate) fn lease(&self) -> LeaseClient {
        self.lease.clone()
    }

    pub(crate) fn watch(&self) -> WatchClient {
        self.watch.clone()
    }

    /// The login whose token goes with requests that are sent now.
    pub(crate) fn login(&self) -> u64 {
        self.login.load(Ordering::Acquire)
    }

    /// Whether there is a user to log in as.
    pub(crate) fn has_user(&self) -> bool {
        self.credentials.is_some()
    }

    /// Waits for a first answer. A server that refuses our certificate says so only after we
    /// believe to be connected, and a write that was sent by then would seem to be under way.
    async fn prove(&self) -> Result<(), etcd_client::Error> {
        match self.client.clone().status().await {
            Err(error) if !error.to_string().contains("etcdserver:") => Err(error),
            _ => Ok(()),
        }
    }

    /// Logs in, unless somebody has done so since `seen` was current: many requests may find one
    /// token out of date, and each login costs etcd a password hash. The new token serves every
    /// client on this connection.
    pub(crate) async fn log_in(&self, seen: u64) -> Result<(), etcd_client::Error> {
        let Some(Credentials { user, password }) = &self.credentials else { return Ok(()) };
        let mut logins = self.logins.lock().await;
        if *logins != seen {
            return Ok(());
        }
        let user = Some((user.clone(), password.clone()));
        match self.client.clone().update_user(user).await {
            // A client may be given its user before authentication is switched on, as with Go's.
            // Once it is off, etcd 3.4 refuses the tokens of before.
            Err(error) if says_auth_is_off(&error) => self.client.clone().update_user(None).await?,
            outcome => outcome?,
        }
        *logins += 1;
        self.login.store(*logins, Ordering::Release);
        Ok(())
    }
}

/// How to connect, the same for every member.
pub(crate) struct Dial {
    pub(crate) credentials: Option<Credentials>,
    pub(crate) connect_timeout: Duration,
    pub(crate) ping_interval: Duration,
    pub(crate) ping_timeout: Duration,
    #[cfg(any(feature = "tls", feature = "tls-aws-lc"))]
    pub(crate) tls: Option<super::tls::TlsOptions>,
}

impl Dial {
    pub(super) fn options(&self, purpose: Purpose) -> ConnectOptions {
        // `default()` and `new()` of these options differ in what an idle connection does, so
        // every option that matters is named. etcd kills a connection that pings while idle.
        let options = ConnectOptions::new()
            .with_connect_timeout(self.connect_timeout)
            .with_keep_alive(self.ping_interval, self.ping_timeout)
            .with_keep_alive_while_idle(false)
            // A lease stream should outlive an election; everything else should fail fast on a
            // member that has lost its quorum, and move on.
            .with_require_leader(purpose != Purpose::Leases);
        // The user is not among them: we log in ourselves. etcd-client's own refresh knows one
        // of etcd's refusals out of three, and when its login fails the error does not say that
        // the request was not applied.
        #[cfg(any(feature = "tls", feature = "tls-aws-lc"))]
        if let Some(tls) = &self.tls {
            return options.with_tls(tls.for_etcd_client());
        }
        options
    }
}

fn says_auth_is_off(error: &etcd_client::Error) -> bool {
    matches!(error, etcd_client::Error::GRpcStatus(status)
        if status.message().contains("authentication is not enabled"))
}

/// The connections to one member.
pub(crate) struct Member {
    url: String,
    numbers: AtomicU64,
    slots: [tokio::sync::Mutex<Option<Arc<Connection>>>; 3],
}

impl Member {
    pub(crate) fn new(url: String) -> Member {
        Member { url, numbers: AtomicU64::new(0), slots: Default::default() }
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    pub(crate) fn uses_tls(&self) -> bool {
        self.url.starts_with("https:")
    }

    /// The connection for `purpose`, if it has been made.
    pub(crate) fn made(&self, purpose: Purpose) -> Option<Arc<Connection>> {
        self.slots[purpose as usize].try_lock().ok().and_then(|slot| slot.clone())
    }

    /// The connection for `purpose`, made now if there is none. With a user this logs in, which
    /// is a round trip, and with TLS it is proved; else it touches no network.
    pub(crate) async fn connection(
        &self,
        purpose: Purpose,
        dial: &Dial,
    ) -> Result<Arc<Connection>, etcd_client::Error> {
        let mut slot = self.slots[purpose as usize].lock().await;
        if let Some(connection) = &*slot {
            return Ok(connection.clone());
        }
        let client = Client::connect([&self.url], Some(dial.options(purpose))).await?;
        let connection = Arc::new(Connection {
            number: self.numbers.fetch_add(1, Ordering::Relaxed),
            credentials: dial.credentials.clone(),
            logins: tokio::sync::Mutex::new(0),
            login: AtomicU64::new(0),
            kv: client.kv_client().max_decoding_message_size(LARGEST_ANSWER),
            lease: client.lease_client(),
            watch: client.watch_client().max_decoding_message_size(LARGEST_ANSWER),
            client,
        });
        connection.log_in(0).await?;
        if self.uses_tls() && !connection.has_user() {
            connection.prove().await?;
        }
        *slot = Some(connection.clone());
        Ok(connection)
    }

    /// Whether new requests would go out on this connection.
    pub(crate) fn is_current(&self, purpose: Purpose, number: u64) -> bool {
        // A locked slot is getting another.
        let slot = self.slots[purpose as usize].try_lock();
        slot.is_ok_and(|slot| slot.as_ref().is_some_and(|current| current.number == number))
    }

    /// Gives up a connection that failed or went silent, so that the next call makes a new one.
    /// Calls under way on it keep it until they end, and one that was made since stays.
    ///
    /// While a slot is locked its connection is being made, which takes as long as the login, so
    /// there is none to give up. Nobody waits for that: the next attempt is due now.
    pub(crate) fn discard(&self, purpose: Purpose, number: u64) {
        if let Ok(mut slot) = self.slots[purpose as usize].try_lock()
            && slot.as_ref().is_some_and(|current| current.number == number)
        {
            *slot = None;
        }
    }
}
