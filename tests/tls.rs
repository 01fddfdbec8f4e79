//! TLS with client certificates on a real etcd, on good days and with the wrong papers.

#![cfg(any(feature = "tls", feature = "tls-aws-lc"))]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fmt::Debug;
use std::time::{Duration, Instant};

use etcd_recipes::client::TlsOptions;
use etcd_recipes::testing::{EtcdServer, FaultProxy, Mode, eventually};
use etcd_recipes::{Client, Error, ErrorKind, LossReason, Mutex, ResilienceConfig, RpcResilience};
use rcgen::{
    BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose as Usage, IsCa, Issuer, KeyPair,
};

const OPERATION_TIMEOUT: Duration = Duration::from_secs(3);
const SLACK: Duration = Duration::from_secs(1);

fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

/// An authority of its own.
struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

/// A certificate and its key, in PEM.
struct Papers {
    certificate: String,
    key: String,
}

impl Authority {
    fn new() -> Authority {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).unwrap().pem();
        Authority { pem, issuer: Issuer::new(params, key) }
    }

    fn papers(&self, usages: &[Usage]) -> Papers {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(["127.0.0.1".to_owned()]).unwrap();
        params.extended_key_usages = usages.to_vec();
        let certificate = params.signed_by(&key, &self.issuer).unwrap().pem();
        Papers { certificate, key: key.serialize_pem() }
    }

    fn server(&self) -> EtcdServer {
        let papers = self.papers(&[Usage::ServerAuth, Usage::ClientAuth]);
        EtcdServer::builder().tls(&self.pem, papers.certificate, papers.key).start().unwrap()
    }

    /// What a client needs that trusts this authority and has a certificate of it.
    fn options(&self) -> TlsOptions {
        let papers = self.papers(&[Usage::ClientAuth]);
        TlsOptions::new()
            .ca_certificate_pem(&*self.pem)
            .identity_pem(papers.certificate, papers.key)
    }
}

fn connect(endpoint: String, options: TlsOptions) -> Client {
    let resilience =
        ResilienceConfig::new().rpc(RpcResilience::new().operation_timeout(OPERATION_TIMEOUT));
    let builder = Client::builder().endpoints([endpoint]).tls(options);
    builder.resilience(resilience).connect().unwrap()
}

fn through(proxy: &FaultProxy) -> String {
    proxy.endpoint().replacen("http:", "https:", 1)
}

#[test]
fn a_client_with_a_certificate_locks_loses_and_comes_back() {
    let authority = Authority::new();
    let etcd = authority.server();
    let proxy = FaultProxy::start(etcd.endpoint()).unwrap();
    let client = connect(through(&proxy), authority.options());
    let ttl = secs(3);
    let mutex = Mutex::builder(&client, "/locks/a").ttl(ttl).build().unwrap();
    let guard = mutex.lock().unwrap();
    assert!(guard.put("/a", "1").unwrap());
    assert!(guard.unlock());

    let guard = mutex.lock().unwrap();
    proxy.set(Mode::Blackhole);
    let cut = Instant::now();
    eventually(ttl + SLACK, "lost", || !guard.is_held());
    assert!(cut.elapsed() <= ttl, "lost after {:?}", cut.elapsed());
    assert_eq!(guard.loss().unwrap().reason, LossReason::DeadlinePassed);
    assert!(!guard.unlock());
    proxy.set(Mode::Pass);
    let guard = mutex.try_lock_for(ttl + secs(3)).unwrap().expect("free again");

    etcd.restart().unwrap();
    eventually(secs(5), "the client is back", || client.get("/a").is_ok());
    assert!(guard.verify().unwrap(), "a restart loses nothing");
    assert!(guard.unlock());
    client.close().unwrap();
}

#[test]
fn waiters_are_told_over_tls() {
    let authority = Authority::new();
    let etcd = authority.server();
    let client = || connect(etcd.endpoint(), authority.options());
    let (first, second) = (client(), client());
    let guard = Mutex::new(&first, "/locks/a").unwrap().lock_owned().unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| Mutex::new(&second, "/locks/a").unwrap().lock_owned().unwrap());
        let queue = ["get", "--prefix", "--keys-only", "/locks/a/"];
        eventually(secs(3), "it waits", || {
            etcd.ctl(queue).unwrap().matches("/locks/a/").count() == 2
        });
        assert!(guard.unlock());
        assert!(waiter.join().unwrap().unlock());
    });
}

#[track_caller]
fn unreachable<T: Debug>(outcome: etcd_recipes::Result<T>, why: &str) {
    let error: Error = outcome.expect_err("the wrong papers");
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    let text = error.to_string();
    assert!(text.contains(why), "it does not say why: {text}");
}

/// Every kind of call says so, with the reason in its text, within the operation timeout.
fn fails_with(etcd: &EtcdServer, options: &TlsOptions, user: bool, why: &str) {
    let call = |call: &dyn Fn(&Client)| {
        let resilience =
            ResilienceConfig::new().rpc(RpcResilience::new().operation_timeout(OPERATION_TIMEOUT));
        let mut builder = Client::builder().endpoints([etcd.endpoint()]).tls(options.clone());
        if user {
            builder = builder.user("root", "secret");
        }
        let client = builder.resilience(resilience).connect().unwrap();
        let start = Instant::now();
        call(&client);
        assert!(start.elapsed() < OPERATION_TIMEOUT + SLACK, "took {:?}", start.elapsed());
    };
    std::thread::scope(|scope| {
        scope.spawn(|| call(&|client| unreachable(client.get("/a"), why)));
        scope.spawn(|| call(&|client| unreachable(client.put("/a", ""), why)));
        scope.spawn(|| {
            call(&|client| {
                let mutex = Mutex::new(client, "/locks/a").unwrap();
                unreachable(mutex.lock_owned(), why);
            });
        });
        scope.spawn(|| call(&|client| unreachable(client.wait_ready(secs(1)), why)));
    });
}

#[test]
fn a_server_of_an_unknown_authority_is_not_talked_to() {
    let (authority, other) = (Authority::new(), Authority::new());
    let etcd = authority.server();
    let papers = authority.papers(&[Usage::ClientAuth]);
    let options = TlsOptions::new()
        .ca_certificate_pem(&*other.pem)
        .identity_pem(papers.certificate, papers.key);
    for user in [false, true] {
        fails_with(&etcd, &options, user, "invalid peer certificate");
    }
}

#[test]
fn a_client_without_a_certificate_is_told_why_it_is_turned_away() {
    let authority = Authority::new();
    let etcd = authority.server();
    let options = TlsOptions::new().ca_certificate_pem(&*authority.pem);
    for user in [false, true] {
        fails_with(&etcd, &options, user, "client certificate");
    }
}

#[test]
fn a_client_of_another_authority_is_told_why_it_is_turned_away() {
    let (authority, other) = (Authority::new(), Authority::new());
    let etcd = authority.server();
    let papers = other.papers(&[Usage::ClientAuth]);
    let options = TlsOptions::new()
        .ca_certificate_pem(&*authority.pem)
        .identity_pem(papers.certificate, papers.key);
    fails_with(&etcd, &options, false, "client certificate");
}

#[test]
fn another_name_in_the_certificate_has_to_be_asked_for() {
    let authority = Authority::new();
    let etcd = authority.server();
    fails_with(
        &etcd,
        &authority.options().domain_name("etcd.example"),
        false,
        "invalid peer certificate",
    );
}
