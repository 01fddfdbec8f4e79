//! Options of a client, checked before any I/O.

use std::time::Duration;

use super::core::Core;
use super::endpoints::checked_url;
use super::member::Dial;
#[cfg(any(feature = "tls", feature = "tls-aws-lc"))]
use super::tls::TlsOptions;
use super::{Client, identity};
use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::resilience::ResilienceConfig;

/// A user name and a password.
#[derive(Clone)]
pub(crate) struct Credentials {
    pub(crate) user: String,
    pub(crate) password: String,
}

/// What a client was built with.
pub(crate) struct Config {
    pub(crate) endpoints: Vec<String>,
    pub(crate) namespace: String,
    pub(crate) client_id: String,
    pub(crate) resilience: ResilienceConfig,
    pub(crate) dial: Dial,
    pub(crate) clock: Clock,
}

impl Config {
    /// How long one attempt may take before another member is asked.
    pub(crate) fn attempt_limit(&self) -> Duration {
        (self.resilience.get_rpc().get_operation_timeout() / 10)
            .clamp(Duration::from_millis(500), Duration::from_secs(3))
    }
}

/// Builds a [`Client`]; every option states its default.
///
/// # Example: a client with credentials and a namespace
///
/// ```no_run
/// # fn main() -> etcd_recipes::Result<()> {
/// let client = etcd_recipes::Client::builder()
///     .endpoints(["http://10.0.0.1:2379", "http://10.0.0.2:2379", "http://10.0.0.3:2379"])
///     .user("orders", "secret")
///     .namespace("/prod")
///     .connect()?;
/// # Ok(()) }
/// ```
#[must_use = "a builder does nothing until `connect`"]
pub struct ClientBuilder {
    endpoints: Vec<String>,
    credentials: Option<Credentials>,
    namespace: String,
    client_id: Option<String>,
    connect_timeout: Duration,
    ping_interval: Duration,
    ping_timeout: Duration,
    resilience: ResilienceConfig,
    clock: Clock,
    #[cfg(any(feature = "tls", feature = "tls-aws-lc"))]
    tls: Option<TlsOptions>,
}

impl std::fmt::Debug for ClientBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClientBuilder")
            .field("endpoints", &self.endpoints)
            .field("user", &self.credentials.as_ref().map(|c| &c.user))
            .field("namespace", &self.namespace)
            .field("client_id", &self.client_id)
            .finish_non_exhaustive()
    }
}

impl ClientBuilder {
    pub(super) fn new() -> ClientBuilder {
        ClientBuilder {
            endpoints: Vec::new(),
            credentials: None,
            namespace: String::new(),
            client_id: None,
            connect_timeout: Duration::from_secs(5),
            ping_interval: Duration::from_secs(10),
            ping_timeout: Duration::from_secs(5),
            resilience: ResilienceConfig::new(),
            clock: Clock::default(),
            #[cfg(any(feature = "tls", feature = "tls-aws-lc"))]
            tls: None,
        }
    }

    /// Adds endpoints, `http://host:port` or `host:port`. At least one is required; name every
    /// member of the cluster, since the client fails over between those it was given.
    pub fn endpoints<E: AsRef<str>>(mut self, endpoints: impl IntoIterator<Item = E>) -> Self {
        self.endpoints.extend(endpoints.into_iter().map(|e| e.as_ref().to_owned()));
        self
    }

    /// Logs in as this user. Default: no login.
    pub fn user(mut self, name: impl Into<String>, password: impl Into<String>) -> Self {
        self.credentials = Some(Credentials { user: name.into(), password: password.into() });
        self
    }

    /// Puts this in front of every key, as it stands: `"/prod"` makes `/locks/a` the key
    /// `/prod/locks/a`. Default: empty.
    pub fn namespace(mut self, prefix: impl Into<String>) -> Self {
        self.namespace = prefix.into();
        self
    }

    /// The name under which recipes of this client appear in etcd. Default: host name, process id
    /// and six random characters.
    pub fn client_id(mut self, id: impl Into<String>) -> Self {
        self.client_id = Some(id.into());
        self
    }

    /// How long one TCP connection may take to come about. Default: 5 s.
    pub fn connect_timeout(mut self, limit: Duration) -> Self {
        self.connect_timeout = limit;
        self
    }

    /// HTTP/2 pings on connections in use: how often, and how long an answer may take. Default:
    /// every 10 s, 5 s. They only clear away dead connections; renewals and calls notice a silent
    /// member long before. etcd drops clients that ping more often than every 5 s.
    pub fn keep_alive(mut self, interval: Duration, timeout: Duration) -> Self {
        self.ping_interval = interval;
        self.ping_timeout = timeout;
        self
    }

    /// Retry policies and limits. Default: [`ResilienceConfig::new`].
    pub fn resilience(mut self, resilience: ResilienceConfig) -> Self {
        self.resilience = resilience;
        self
    }

    /// Certificates for `https` endpoints. Default: none.
    #[cfg(any(feature = "tls", feature = "tls-aws-lc"))]
    pub fn tls(mut self, options: TlsOptions) -> Self {
        self.tls = Some(options);
        self
    }

    /// Measures every deadline on a clock that the test can push forward. Default: the machine's
    /// boot-time clock.
    #[cfg(all(unix, feature = "testing"))]
    pub fn clock(mut self, clock: &crate::testing::TestClock) -> Self {
        self.clock = clock.clock();
        self
    }

    /// Checks the options and starts the client's I/O thread. No I/O is done yet: etcd may come
    /// up later; [`Client::wait_ready`] asks.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` naming the value: no endpoint, a malformed one, `https` without the
    /// feature `tls`, an id with `/` or `:`, a namespace with a NUL, a zero limit. `Internal` if
    /// no thread could be started.
    pub fn connect(self) -> Result<Client> {
        #[cfg(any(feature = "tls", feature = "tls-aws-lc"))]
        let tls = self.tls.is_some();
        #[cfg(not(any(feature = "tls", feature = "tls-aws-lc")))]
        let tls = false;
        if self.endpoints.is_empty() {
            return Err(Error::invalid("a client needs at least one endpoint"));
        }
        let endpoints = self
            .endpoints
            .iter()
            .map(|endpoint| checked_url(endpoint, tls))
            .collect::<Result<Vec<_>>>()?;
        if self.namespace.contains('\0') {
            return Err(Error::invalid(format!(
                "namespace `{}` contains a NUL",
                self.namespace.escape_debug()
            )));
        }
        if self.credentials.as_ref().is_some_and(|c| c.user.is_empty()) {
            return Err(Error::invalid("the user name is empty"));
        }
        for (name, value) in [
            ("connect_timeout", self.connect_timeout),
            ("keep_alive interval", self.ping_interval),
            ("keep_alive timeout", self.ping_timeout),
            ("operation_timeout", self.resilience.get_rpc().get_operation_timeout()),
        ] {
            if value.is_zero() {
                return Err(Error::invalid(format!("{name} is zero")));
            }
        }
        let client_id = match self.client_id {
            Some(id) => identity::checked_client_id(id)?,
            None => identity::default_client_id(),
        };
        let core = Core::start(Config {
            endpoints,
            namespace: self.namespace,
            client_id,
            resilience: self.resilience,
            clock: self.clock,
            dial: Dial {
                credentials: self.credentials,
                connect_timeout: self.connect_timeout,
                ping_interval: self.ping_interval,
                ping_timeout: self.ping_timeout,
                #[cfg(any(feature = "tls", feature = "tls-aws-lc"))]
                tls: self.tls,
            },
        })?;
        Ok(Client::from_core(core))
    }
}
