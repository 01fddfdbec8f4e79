//! One real etcd process that tests can start, freeze, kill, wipe and question.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::error::Result;
use crate::testing::boot_nanos;
use crate::testing::ports::Port;
use crate::testing::process::{CtlProcess, Process};
use crate::testing::{failed, failed_by, find, http, metrics};

const READY_LIMIT: Duration = Duration::from_secs(30);
const TERM_LIMIT: Duration = Duration::from_secs(10);
const HTTP_LIMIT: Duration = Duration::from_secs(5);
const TRIES: usize = 5;

/// What a server and a cluster can be told before they start.
#[derive(Debug, Clone, Default)]
pub(super) struct Options {
    pub(super) binary: Option<PathBuf>,
    pub(super) args: Vec<String>,
    pub(super) credentials: Option<(String, String)>,
    pub(super) fast_ticks: bool,
    pub(super) dir: Option<PathBuf>,
    pub(super) tls: Option<Pems>,
}

/// What TLS needs, each in PEM.
#[derive(Clone)]
pub(super) struct Pems {
    ca: String,
    certificate: String,
    key: String,
}

impl fmt::Debug for Pems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pems(..)")
    }
}

impl Pems {
    /// The files that etcd and etcdctl read, in `dir`: authority, certificate, key.
    fn paths(dir: &Path) -> [PathBuf; 3] {
        ["ca.pem", "certificate.pem", "key.pem"].map(|name| dir.join(name))
    }

    fn write(&self, dir: &Path) -> Result<()> {
        for (path, text) in Pems::paths(dir).iter().zip([&self.ca, &self.certificate, &self.key]) {
            std::fs::write(path, text)
                .map_err(|error| failed_by(format!("cannot write {}", path.display()), error))?;
        }
        Ok(())
    }
}

/// Sets up an [`EtcdServer`].
///
/// # Example: a server with a password whose leases may be short
///
/// ```no_run
/// use etcd_recipes::testing::EtcdServer;
///
/// # fn main() -> etcd_recipes::Result<()> {
/// let server = EtcdServer::builder().auth("root", "secret").fast_ticks().start()?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Default)]
#[must_use = "nothing runs before `start`"]
pub struct ServerBuilder {
    options: Options,
}

impl ServerBuilder {
    /// The `etcd` to run. Default = `ETCD_BIN`, else the one on `PATH`.
    pub fn binary(mut self, path: impl Into<PathBuf>) -> ServerBuilder {
        self.options.binary = Some(path.into());
        self
    }

    /// Adds arguments to etcd's command line.
    pub fn args<S: Into<String>>(mut self, args: impl IntoIterator<Item = S>) -> ServerBuilder {
        self.options.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Turns authentication on once the server runs. Default = off.
    ///
    /// `user` becomes an administrator; the user `root`, whom etcd insists on, gets the same
    /// password.
    pub fn auth(mut self, user: impl Into<String>, password: impl Into<String>) -> ServerBuilder {
        self.options.credentials = Some((user.into(), password.into()));
        self
    }

    /// Heartbeats of 10 ms and elections of 100 ms, which allow leases of one second.
    ///
    /// Default = etcd's 100 ms and 1 s, under which no lease is shorter than two seconds.
    pub fn fast_ticks(mut self) -> ServerBuilder {
        self.options.fast_ticks = true;
        self
    }

    /// Where the directory with data and log is made, say on a memory disk. Default = the
    /// system's directory for temporary files.
    pub fn data_dir_in(mut self, dir: impl Into<PathBuf>) -> ServerBuilder {
        self.options.dir = Some(dir.into());
        self
    }

    /// Serves clients over TLS and asks each of them for a certificate of the same authority; all
    /// three are in PEM. Default = plain text.
    ///
    /// The certificate is the server's, and etcdctl shows it too: it has to be good for
    /// `127.0.0.1` and for both ends of a connection.
    ///
    /// # Example: a client that shows a certificate of its own
    ///
    /// ```no_run
    /// use etcd_recipes::testing::EtcdServer;
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let pem = |name: &str| std::fs::read_to_string(format!("tests/{name}.pem"));
    /// let server = EtcdServer::builder().tls(pem("ca")?, pem("server")?, pem("server-key")?).start()?;
    /// assert!(server.endpoint().starts_with("https://"));
    /// # Ok(())
    /// # }
    /// ```
    pub fn tls(
        mut self,
        ca: impl Into<String>,
        certificate: impl Into<String>,
        key: impl Into<String>,
    ) -> ServerBuilder {
        let (ca, certificate, key) = (ca.into(), certificate.into(), key.into());
        self.options.tls = Some(Pems { ca, certificate, key });
        self
    }

    /// Starts the server and waits until it serves.
    ///
    /// # Errors
    ///
    /// `Testing`: no `etcd` or no `etcdctl` was found, or it does not come up; the message
    /// carries the end of its log.
    pub fn start(self) -> Result<EtcdServer> {
        again_on_taken_port(|| {
            let (client, peer) = (Port::claim()?, Port::claim()?);
            let place = Place {
                name: "m0".to_owned(),
                advertised_peer: peer.url(),
                initial_cluster: format!("m0={}", peer.url()),
                token: fresh_name("cluster"),
                alone: true,
                client,
                peer,
            };
            let server = EtcdServer::prepare(&self.options, place)?;
            server.launch()?;
            server.wait_ready()?;
            server.enable_auth()?;
            Ok(server)
        })
    }
}

/// Starts anew, with other ports, when another process was quicker to take one.
pub(super) fn again_on_taken_port<T>(start: impl Fn() -> Result<T>) -> Result<T> {
    let mut tries = 1;
    loop {
        match start() {
            Err(error) if tries < TRIES && error.to_string().contains("address already in use") => {
                tries += 1;
            }
            result => return result,
        }
    }
}

pub(super) fn fresh_name(prefix: &str) -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    format!("{prefix}-{}-{count}-{:x}", std::process::id(), boot_nanos())
}

/// Where a server stands in its cluster.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) name: String,
    pub(super) client: Port,
    pub(super) peer: Port,
    pub(super) advertised_peer: String,
    pub(super) initial_cluster: String,
    pub(super) token: String,
    pub(super) alone: bool,
}

/// A real etcd on loopback, as one process of its own.
///
/// It listens on two free ports of 127.0.0.1 that it keeps over restarts, and stores its data in
/// a temporary directory. Dropping it kills the process and removes the directory; so does the
/// end of the test's own process, whatever ends it. All methods may be called from any thread.
///
/// # Example: does the application notice?
///
/// ```no_run
/// use etcd_recipes::testing::EtcdServer;
///
/// # fn main() -> etcd_recipes::Result<()> {
/// let server = EtcdServer::start()?;
/// server.ctl(["put", "/config", "1"])?;
/// server.freeze()?;
/// // … the code under test must not hang here …
/// server.thaw()?;
/// assert_eq!(server.ctl(["get", "/config", "--print-value-only"])?.trim(), "1");
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct EtcdServer {
    options: Options,
    place: Place,
    binary: PathBuf,
    ctl: PathBuf,
    dir: PathBuf,
    /// Where health and metrics are served in plain text when clients are served over TLS.
    plain: Option<Port>,
    token: Mutex<String>,
    process: Mutex<Process>,
}

impl EtcdServer {
    /// Starts a server with the defaults of [`builder`](EtcdServer::builder).
    ///
    /// # Errors
    ///
    /// As [`ServerBuilder::start`].
    pub fn start() -> Result<EtcdServer> {
        EtcdServer::builder().start()
    }

    /// Says how to start a server.
    pub fn builder() -> ServerBuilder {
        ServerBuilder::default()
    }

    pub(super) fn prepare(options: &Options, place: Place) -> Result<EtcdServer> {
        let binary = find::etcd(options.binary.as_deref())?;
        let ctl = find::etcdctl(&binary)?;
        let parent = options.dir.clone().unwrap_or_else(std::env::temp_dir);
        let dir = parent.join(fresh_name("etcd-recipes"));
        let process = Process::new(&dir)?;
        let plain = match &options.tls {
            Some(pems) => {
                pems.write(&dir)?;
                Some(Port::claim()?)
            }
            None => None,
        };
        Ok(EtcdServer {
            options: options.clone(),
            token: Mutex::new(place.token.clone()),
            place,
            binary,
            ctl,
            dir,
            plain,
            process: Mutex::new(process),
        })
    }

    fn command(&self) -> Command {
        let client = self.endpoint();
        let mut command = clean_command(&self.binary, "ETCD_");
        command
            .args(["--name", &self.place.name])
            .arg("--data-dir")
            .arg(self.data())
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &self.place.peer.url()])
            .args(["--initial-advertise-peer-urls", &self.place.advertised_peer])
            .args(["--initial-cluster", &self.place.initial_cluster])
            .args(["--initial-cluster-token", &self.token.lock()]);
        if self.options.fast_ticks {
            command.args(["--heartbeat-interval", "10", "--election-timeout", "100"]);
        }
        if self.options.credentials.is_some() {
            // The cheapest password hash that etcd knows: tests need no better one.
            command.args(["--bcrypt-cost", "4"]);
        }
        if let Some(plain) = &self.plain {
            let [ca, certificate, key] = Pems::paths(&self.dir);
            command.args(["--listen-metrics-urls", &plain.url(), "--client-cert-auth"]);
            command.arg("--trusted-ca-file").arg(ca);
            command.arg("--cert-file").arg(certificate).arg("--key-file").arg(key);
        }
        command.args(&self.options.args);
        command
    }

    fn data(&self) -> PathBuf {
        self.dir.join("data")
    }

    /// Starts the process without waiting for it.
    pub(super) fn launch(&self) -> Result<()> {
        self.process.lock().spawn(&mut self.command())
    }

    pub(super) fn wait_ready(&self) -> Result<()> {
        let end = Instant::now() + READY_LIMIT;
        loop {
            {
                let mut process = self.process.lock();
                if let Some(status) = process.exited() {
                    let tail = process.log_tail();
                    return Err(failed(format!("etcd ended at its start ({status}):\n{tail}")));
                }
            }
            let health = http::get(self.port(), "/health", Duration::from_secs(1));
            if health.is_ok_and(|text| text.contains("true")) {
                return Ok(());
            }
            if Instant::now() >= end {
                let tail = self.process.lock().log_tail();
                return Err(failed(format!("etcd does not serve after {READY_LIMIT:?}:\n{tail}")));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub(super) fn enable_auth(&self) -> Result<()> {
        let Some((user, password)) = &self.options.credentials else { return Ok(()) };
        self.plain_ctl(&["role", "add", "root"])?;
        let others = (user != "root").then_some(user.as_str());
        for name in std::iter::once("root").chain(others) {
            self.plain_ctl(&["user", "add", &format!("{name}:{password}")])?;
            self.plain_ctl(&["user", "grant-role", name, "root"])?;
        }
        self.plain_ctl(&["auth", "enable"]).map(drop)
    }

    /// The port that serves health and metrics in plain text.
    fn port(&self) -> u16 {
        self.plain.as_ref().unwrap_or(&self.place.client).number()
    }

    /// The URL for clients, `http://127.0.0.1:<port>`, or `https` with
    /// [`tls`](ServerBuilder::tls); the same for the server's whole life.
    pub fn endpoint(&self) -> String {
        let url = self.place.client.url();
        if self.options.tls.is_some() { url.replacen("http:", "https:", 1) } else { url }
    }

    /// The id of the running (or frozen) process, if there is one.
    pub fn pid(&self) -> Option<u32> {
        self.process.lock().pid()
    }

    /// The end of what the server wrote to its log.
    pub fn log_tail(&self) -> String {
        self.process.lock().log_tail()
    }

    /// Runs `etcdctl` straight against this server and returns what it printed.
    ///
    /// The v3 API is chosen, and the user's credentials are added when authentication is on.
    ///
    /// # Errors
    ///
    /// `Testing`: `etcdctl` failed; the message carries what it said. It gives up on a server that
    /// does not answer after about five seconds.
    pub fn ctl<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Result<String> {
        self.ctl_through(&self.endpoint(), args)
    }

    /// Runs `etcdctl` without credentials, as long as there are none.
    pub(super) fn plain_ctl(&self, args: &[&str]) -> Result<String> {
        run(self.ctl_to(&self.endpoint()).args(args))
    }

    /// As [`ctl`](EtcdServer::ctl), aimed at another address, say that of a
    /// [`FaultProxy`](super::FaultProxy).
    ///
    /// # Errors
    ///
    /// As [`ctl`](EtcdServer::ctl).
    pub fn ctl_through<S: AsRef<OsStr>>(
        &self,
        endpoint: &str,
        args: impl IntoIterator<Item = S>,
    ) -> Result<String> {
        let mut command = self.ctl_to(endpoint);
        self.add_user(&mut command);
        run(command.args(args))
    }

    fn ctl_to(&self, endpoint: &str) -> Command {
        let mut command = clean_command(&self.ctl, "ETCDCTL_");
        command.env("ETCDCTL_API", "3").args(["--endpoints", endpoint]).stdin(Stdio::null());
        if self.options.tls.is_some() {
            let [ca, certificate, key] = Pems::paths(&self.dir);
            command.arg("--cacert").arg(ca).arg("--cert").arg(certificate).arg("--key").arg(key);
        }
        command
    }

    fn add_user(&self, command: &mut Command) {
        if let Some((user, password)) = &self.options.credentials {
            command.args(["--user", &format!("{user}:{password}")]);
        }
    }

    /// Starts an `etcdctl` that goes on, such as `lock` or `watch`, with its output piped.
    ///
    /// Its errors go to the server's log. Dropping it kills it.
    ///
    /// # Errors
    ///
    /// `Testing`: it cannot be started.
    pub fn spawn_ctl<S: AsRef<OsStr>>(
        &self,
        args: impl IntoIterator<Item = S>,
    ) -> Result<CtlProcess> {
        self.spawn_ctl_through(&self.endpoint(), args)
    }

    /// As [`spawn_ctl`](EtcdServer::spawn_ctl), aimed at another address.
    ///
    /// # Errors
    ///
    /// `Testing`: it cannot be started.
    pub fn spawn_ctl_through<S: AsRef<OsStr>>(
        &self,
        endpoint: &str,
        args: impl IntoIterator<Item = S>,
    ) -> Result<CtlProcess> {
        let log = self.process.lock().log()?;
        let mut command = self.ctl_to(endpoint);
        self.add_user(&mut command);
        CtlProcess::spawn(command.args(args).stdout(Stdio::piped()).stderr(log))
    }

    /// Ends the server at once (SIGKILL). A server that is down stays down.
    ///
    /// # Errors
    ///
    /// `Testing`: the system refuses.
    pub fn kill(&self) -> Result<()> {
        self.process.lock().kill()
    }

    /// Asks the server to end (SIGTERM) and waits until it has.
    ///
    /// # Errors
    ///
    /// `Testing`: it still runs after ten seconds.
    pub fn terminate(&self) -> Result<()> {
        if self.process.lock().terminate(TERM_LIMIT)? {
            return Ok(());
        }
        Err(failed(format!("etcd still runs {TERM_LIMIT:?} after SIGTERM")))
    }

    /// Ends the server, by SIGTERM if that works and else by SIGKILL; see
    /// [`start_again`](EtcdServer::start_again).
    ///
    /// # Errors
    ///
    /// `Testing`: the system refuses.
    pub fn stop(&self) -> Result<()> {
        let mut process = self.process.lock();
        if process.terminate(TERM_LIMIT)? { Ok(()) } else { process.kill() }
    }

    /// Starts a server that is down, with its address and its data, and waits until it serves.
    ///
    /// # Errors
    ///
    /// `Testing`: it runs already or does not come up. A member of a cluster serves only while
    /// most members run.
    pub fn start_again(&self) -> Result<()> {
        self.launch()?;
        self.wait_ready()
    }

    /// Kills the server if it runs and starts it with its address and its data.
    ///
    /// # Errors
    ///
    /// As [`start_again`](EtcdServer::start_again).
    pub fn restart(&self) -> Result<()> {
        self.kill()?;
        self.start_again()
    }

    /// Kills the server, wipes its data and starts it under the same address.
    ///
    /// Its flags are the same, and so are its cluster and member ids, but its revisions start
    /// over: the case that only a look at the revision reveals.
    ///
    /// # Errors
    ///
    /// As [`start_again`](EtcdServer::start_again). A member of a cluster may not forget and is
    /// left as it is.
    pub fn restart_empty(&self) -> Result<()> {
        if !self.place.alone {
            return Err(failed("a member of a cluster must not be wiped: it would forget votes"));
        }
        self.kill()?;
        match std::fs::remove_dir_all(self.data()) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(failed_by("cannot wipe the data", error));
            }
            _ => {}
        }
        self.start_again()?;
        self.enable_auth()
    }

    /// As [`restart_empty`](EtcdServer::restart_empty), with a new cluster id: what a client sees
    /// when its endpoint has been given to somebody else's cluster.
    ///
    /// # Errors
    ///
    /// As [`restart_empty`](EtcdServer::restart_empty).
    pub fn restart_as_other_cluster(&self) -> Result<()> {
        *self.token.lock() = fresh_name("cluster");
        self.restart_empty()
    }

    /// Stops the server without ending it (SIGSTOP): connections stay, nothing is answered.
    ///
    /// Returns once all its threads stand still.
    ///
    /// # Errors
    ///
    /// `Testing`: it does not run.
    pub fn freeze(&self) -> Result<()> {
        self.process.lock().freeze()
    }

    /// Lets a frozen server go on (SIGCONT). One that is not frozen takes no notice.
    ///
    /// # Errors
    ///
    /// `Testing`: it does not run.
    pub fn thaw(&self) -> Result<()> {
        self.process.lock().thaw()
    }

    /// The latest revision of the store, read from a quorum.
    ///
    /// # Errors
    ///
    /// As [`ctl`](EtcdServer::ctl).
    pub fn revision(&self) -> Result<i64> {
        let answer = self.ctl(["get", "revision", "--keys-only", "--write-out", "json"])?;
        number_after(&answer, "\"revision\":")
            .ok_or_else(|| failed(format!("no revision in etcdctl's answer {answer}")))
    }

    /// Compacts the history up to the latest revision and returns it.
    ///
    /// # Errors
    ///
    /// As [`ctl`](EtcdServer::ctl).
    pub fn compact(&self) -> Result<i64> {
        let revision = self.revision()?;
        match self.ctl(["compaction", &revision.to_string()]) {
            Err(error) if !error.to_string().contains("has been compacted") => Err(error),
            _ => Ok(revision),
        }
    }

    /// The text of `/metrics`.
    ///
    /// # Errors
    ///
    /// `Testing`: no answer within five seconds.
    pub fn metrics(&self) -> Result<String> {
        self.metrics_within(HTTP_LIMIT)
    }

    pub(super) fn metrics_within(&self, limit: Duration) -> Result<String> {
        http::get(self.port(), "/metrics", limit)
            .map_err(|error| failed_by(format!("no metrics from {}", self.endpoint()), error))
    }

    /// The sum over all samples of a metric that carry the given labels; 0 when none does.
    ///
    /// # Errors
    ///
    /// `Testing`: there is no metric of that name (so a misspelt one is no zero), or no answer
    /// within five seconds.
    ///
    /// # Example: bytes taken in from clients
    ///
    /// ```no_run
    /// # fn main() -> etcd_recipes::Result<()> {
    /// let server = etcd_recipes::testing::EtcdServer::start()?;
    /// let bytes = server.metric("etcd_network_client_grpc_received_bytes_total", &[])?;
    /// assert!(bytes >= 0.0);
    /// # Ok(())
    /// # }
    /// ```
    pub fn metric(&self, name: &str, labels: &[(&str, &str)]) -> Result<f64> {
        let text = self.metrics()?;
        let mut samples = metrics::samples(&text, name).peekable();
        if samples.peek().is_none() {
            return Err(failed(format!("{} has no metric {name}", self.endpoint())));
        }
        Ok(samples
            .filter(|sample| labels.iter().all(|(key, value)| sample.label(key) == Some(*value)))
            .map(|sample| sample.value)
            .sum())
    }

    /// How many unary calls this server has begun to handle since its start, by method; methods
    /// never called are left out.
    ///
    /// # Errors
    ///
    /// `Testing`: no answer within five seconds.
    pub fn unary_calls(&self) -> Result<BTreeMap<String, u64>> {
        let text = self.metrics()?;
        let mut calls = BTreeMap::new();
        for sample in metrics::samples(&text, "grpc_server_started_total") {
            if sample.label("grpc_type") == Some("unary") && sample.value > 0.0 {
                let method = sample.label("grpc_method").unwrap_or_default();
                // Prometheus writes counts as floating point numbers.
                *calls.entry(method.to_owned()).or_insert(0) += sample.value as u64;
            }
        }
        Ok(calls)
    }
}

/// A command without the variables that would change what its arguments say.
fn clean_command(program: &Path, prefix: &str) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|name| name.starts_with(prefix)) {
            command.env_remove(name);
        }
    }
    command
}

fn run(command: &mut Command) -> Result<String> {
    let output = command.output().map_err(|error| failed_by("cannot start etcdctl", error))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let args: Vec<_> = command.get_args().map(OsStr::to_string_lossy).collect();
    Err(failed(format!("etcdctl {} failed: {}", args.join(" "), said.trim())))
}

fn number_after(text: &str, mark: &str) -> Option<i64> {
    let rest = &text[text.find(mark)? + mark.len()..];
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    rest[..end].parse().ok()
}
