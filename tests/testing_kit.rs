//! The test kit does what it says: servers end, data stays or goes, and each fault is the one meant.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{ErrorKind as IoErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use etcd_recipes::ErrorKind;
use etcd_recipes::testing::{
    Direction, EtcdCluster, EtcdServer, FaultProxy, FrameKind, Mode, boot_nanos, eventually,
};

const LIMIT: Duration = Duration::from_secs(20);

fn get(server: &EtcdServer, key: &str) -> String {
    server.ctl(["get", key, "--print-value-only"]).unwrap().trim().to_owned()
}

fn runs(pid: u32) -> bool {
    Command::new("kill")
        .args(["-0", &pid.to_string()])
        .stderr(Stdio::null())
        .status()
        .unwrap()
        .success()
}

/// A server that sends back what it gets, on a thread per connection.
fn echo_server() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for socket in listener.incoming() {
            let socket = socket.unwrap();
            std::thread::spawn(move || std::io::copy(&mut &socket, &mut &socket));
        }
    });
    address
}

fn proxied_echo() -> (FaultProxy, TcpStream) {
    let proxy = FaultProxy::start(echo_server().to_string()).unwrap();
    let client = dial(&proxy);
    (proxy, client)
}

fn dial(proxy: &FaultProxy) -> TcpStream {
    let client = TcpStream::connect(proxy.endpoint().trim_start_matches("http://")).unwrap();
    client.set_read_timeout(Some(LIMIT)).unwrap();
    client.set_nodelay(true).unwrap();
    client
}

fn expect(client: &mut TcpStream, text: &str) {
    let mut buffer = vec![0; text.len()];
    client.read_exact(&mut buffer).unwrap();
    assert_eq!(String::from_utf8(buffer).unwrap(), text);
}

/// Nothing comes for a while. It can only miss a fault, never report one that is not there.
fn expect_silence(client: &mut TcpStream) {
    client.set_read_timeout(Some(Duration::from_millis(150))).unwrap();
    let error = client.read(&mut [0; 64]).unwrap_err();
    assert!(matches!(error.kind(), IoErrorKind::WouldBlock | IoErrorKind::TimedOut), "{error}");
    client.set_read_timeout(Some(LIMIT)).unwrap();
}

#[test]
fn a_server_starts_serves_and_leaves_nothing_behind() {
    let parent =
        std::env::temp_dir().join(format!("kit-test-{}-{}", std::process::id(), boot_nanos()));
    let server = EtcdServer::builder().data_dir_in(&parent).start().unwrap();
    server.ctl(["put", "a", "1"]).unwrap();
    assert_eq!(get(&server, "a"), "1");
    let pid = server.pid().unwrap();
    assert!(runs(pid));
    assert_eq!(std::fs::read_dir(&parent).unwrap().count(), 1);
    drop(server);
    assert!(!runs(pid));
    assert_eq!(std::fs::read_dir(&parent).unwrap().count(), 0);
    std::fs::remove_dir(&parent).unwrap();
}

#[test]
fn a_server_that_cannot_start_shows_its_log() {
    let error = EtcdServer::builder().args(["--no-such-flag"]).start().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Testing);
    assert!(error.to_string().contains("no-such-flag"), "{error}");
    let error = EtcdServer::builder().binary("/nowhere/etcd").start().unwrap_err();
    assert!(error.to_string().contains("/nowhere/etcd"), "{error}");
}

/// Run by the next test in a process of its own, which dies before it can drop anything.
#[test]
#[ignore = "the other half of `a_server_dies_with_a_process_that_is_killed`"]
fn helper_start_a_server_and_wait_to_be_killed() {
    let server =
        EtcdServer::builder().data_dir_in(std::env::var("KIT_DIR").unwrap()).start().unwrap();
    let watcher = server.spawn_ctl(["watch", "a"]).unwrap();
    println!("pids={},{}", server.pid().unwrap(), watcher.id());
    server.freeze().unwrap();
    loop {
        std::thread::park();
    }
}

#[test]
fn a_server_dies_with_a_process_that_is_killed() {
    let dir =
        std::env::temp_dir().join(format!("kit-orphan-{}-{}", std::process::id(), boot_nanos()));
    let mut helper: Child = Command::new(std::env::current_exe().unwrap())
        .args([
            "--ignored",
            "--exact",
            "--nocapture",
            "helper_start_a_server_and_wait_to_be_killed",
        ])
        .env("KIT_DIR", &dir)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = helper.stdout.take().unwrap();
    let mut said = String::new();
    let pids: Vec<u32> = loop {
        let mut byte = [0];
        output.read_exact(&mut byte).unwrap();
        said.push(char::from(byte[0]));
        if let Some(pids) = said.strip_suffix('\n').and_then(|s| s.split("pids=").nth(1)) {
            break pids.split(',').map(|pid| pid.parse().unwrap()).collect();
        }
    };
    assert!(pids.iter().all(|pid| runs(*pid)));
    helper.kill().unwrap();
    helper.wait().unwrap();
    let is_empty = |dir: &Path| std::fs::read_dir(dir).unwrap().count() == 0;
    eventually(LIMIT, "both processes and the directory are gone", || {
        !pids.iter().any(|pid| is_alive(*pid)) && is_empty(&dir)
    });
    std::fs::remove_dir(&dir).unwrap();
}

/// As `runs`, for a process that may stay a zombie where nobody collects orphans.
fn is_alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    runs(pid) && !stat.is_ok_and(|stat| stat.contains(") Z "))
}

#[test]
fn a_restart_keeps_address_and_data_and_an_empty_one_only_the_address() {
    let server = EtcdServer::start().unwrap();
    let endpoint = server.endpoint();
    server.ctl(["put", "a", "1"]).unwrap();
    let revision = server.revision().unwrap();
    let cluster = |server: &EtcdServer| {
        let answer = server.ctl(["get", "a", "-w", "json"]).unwrap();
        answer.split("\"cluster_id\":").nth(1).unwrap().split(',').next().unwrap().to_owned()
    };
    let id = cluster(&server);

    server.restart().unwrap();
    assert_eq!((get(&server, "a").as_str(), server.revision().unwrap()), ("1", revision));

    server.kill().unwrap();
    assert_eq!(server.pid(), None);
    server.kill().unwrap();
    assert!(server.freeze().is_err());
    server.start_again().unwrap();
    assert!(server.start_again().is_err(), "it runs already");
    assert_eq!(get(&server, "a"), "1");

    server.terminate().unwrap();
    server.restart().unwrap();
    server.stop().unwrap();
    server.start_again().unwrap();
    assert_eq!(get(&server, "a"), "1");

    server.restart_empty().unwrap();
    assert_eq!((get(&server, "a").as_str(), server.revision().unwrap()), ("", 1));
    assert_eq!(cluster(&server), id);
    server.restart_as_other_cluster().unwrap();
    assert_ne!(cluster(&server), id);
    assert_eq!(server.endpoint(), endpoint);
}

#[test]
fn a_frozen_server_answers_nothing_until_it_thaws() {
    let server = EtcdServer::start().unwrap();
    for _ in 0..3 {
        server.freeze().unwrap();
        let port = server.endpoint().trim_start_matches("http://").to_owned();
        let mut client = TcpStream::connect(port).unwrap();
        client.write_all(b"GET /health HTTP/1.0\r\n\r\n").unwrap();
        expect_silence(&mut client);
        server.thaw().unwrap();
        client.set_read_timeout(Some(LIMIT)).unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        assert!(answer.contains("true"), "{answer}");
    }
    server.freeze().unwrap();
    server.restart().unwrap();
    assert_eq!(get(&server, "a"), "");
    server.freeze().unwrap();
    server.stop().unwrap();
}

#[test]
fn calls_and_compactions_are_seen() {
    let server = EtcdServer::start().unwrap();
    let before = server.unary_calls().unwrap();
    for value in ["1", "2", "3"] {
        server.ctl(["put", "a", value]).unwrap();
    }
    let after = server.unary_calls().unwrap();
    assert_eq!(after["Put"] - before.get("Put").copied().unwrap_or(0), 3);
    let labels = [("grpc_method", "Put"), ("grpc_code", "OK")];
    assert_eq!(server.metric("grpc_server_handled_total", &labels).unwrap(), 3.0);
    assert_eq!(
        server.metric("grpc_server_handled_total", &[("grpc_method", "Nope")]).unwrap(),
        0.0
    );
    assert!(server.metric("no_such_metric", &[]).is_err());

    let revision = server.compact().unwrap();
    assert_eq!(revision, server.revision().unwrap());
    assert_eq!(server.compact().unwrap(), revision);
    let error = server.ctl(["get", "a", "--rev", "2"]).unwrap_err();
    assert!(error.to_string().contains("compacted"), "{error}");
}

#[test]
fn authentication_is_on_and_outlives_restarts() {
    let named = std::env::var("ETCDCTL_BIN").ok().filter(|path| !path.is_empty());
    let etcdctl = named.as_deref().unwrap_or("etcdctl");
    let server = EtcdServer::builder().auth("alice", "secret").start().unwrap();
    server.ctl(["put", "a", "1"]).unwrap();
    for restart in [EtcdServer::restart, EtcdServer::restart_empty] {
        restart(&server).unwrap();
        server.ctl(["put", "b", "1"]).unwrap();
        let endpoint = server.endpoint();
        let stranger = Command::new(etcdctl)
            .env("ETCDCTL_API", "3")
            .args(["--endpoints", &endpoint, "get", "b"])
            .output()
            .unwrap();
        assert!(!stranger.status.success());
    }
}

#[test]
fn fast_ticks_allow_leases_of_one_second() {
    let server = EtcdServer::builder().fast_ticks().start().unwrap();
    let granted = server.ctl(["lease", "grant", "1"]).unwrap();
    assert!(granted.contains("TTL(1s)"), "{granted}");
}

#[test]
fn a_long_running_etcdctl_can_be_watched_and_ended() {
    let server = EtcdServer::start().unwrap();
    let mut holder = server.spawn_ctl(["lock", "/l"]).unwrap();
    eventually(LIMIT, "the lock is held", || {
        !server.ctl(["get", "/l", "--prefix", "--keys-only"]).unwrap().trim().is_empty()
    });
    holder.kill().unwrap();
    holder.wait().unwrap();
    let pid = server.spawn_ctl(["watch", "a"]).unwrap().id();
    assert!(!runs(pid), "dropped, it is gone");
}

#[test]
fn bytes_pass_and_are_counted() {
    let (proxy, mut client) = proxied_echo();
    client.write_all(b"hello").unwrap();
    expect(&mut client, "hello");
    assert_eq!(proxy.mode(), Mode::Pass);
    assert_eq!((proxy.connections(), proxy.connections_total()), (1, 1));
    eventually(LIMIT, "the bytes are counted", || (proxy.bytes_up(), proxy.bytes_down()) == (5, 5));
    assert!(proxy.last_forwarded(Direction::Up) <= proxy.last_forwarded(Direction::Down));
    assert_eq!((proxy.unary_calls(), proxy.client_data_frames()), (0, 0));
    drop(client);
    eventually(LIMIT, "the connection is gone", || proxy.connections() == 0);
}

#[test]
fn large_amounts_pass_whole_while_the_mode_flips() {
    let (proxy, client) = proxied_echo();
    let sent: Vec<u8> = (0..3_000_000u32).map(|i| ((i * 31) >> 3) as u8).collect();
    let (mut writer, mut reader) = (client.try_clone().unwrap(), client);
    std::thread::scope(|scope| {
        scope.spawn(|| writer.write_all(&sent).unwrap());
        let flipper = scope.spawn(|| {
            let ms = Duration::from_millis;
            let modes = [
                Mode::Blackhole,
                Mode::Delay { up: ms(3), down: ms(1) },
                Mode::BlackholeUp,
                Mode::Delay { up: ms(0), down: ms(9) },
                Mode::BlackholeDown,
                Mode::Pass,
            ];
            for mode in modes.into_iter().cycle().take(48) {
                proxy.set(mode);
                std::thread::sleep(ms(2));
            }
            proxy.set(Mode::Pass);
        });
        let mut got = vec![0; sent.len()];
        reader.read_exact(&mut got).unwrap();
        assert!(got == sent, "bytes were lost or came in another order");
        flipper.join().unwrap();
    });
}

#[test]
fn a_reset_ends_open_connections_and_refuses_new_ones() {
    let (proxy, mut client) = proxied_echo();
    client.write_all(b"a").unwrap();
    expect(&mut client, "a");
    proxy.set(Mode::Reset);
    assert_eq!(proxy.connections(), 0);
    assert_eq!(client.read(&mut [0]).unwrap_err().kind(), IoErrorKind::ConnectionReset);
    let mut refused = dial(&proxy);
    assert!(refused.read(&mut [0]).is_err());
    proxy.set(Mode::Pass);
    let mut fresh = dial(&proxy);
    fresh.write_all(b"b").unwrap();
    expect(&mut fresh, "b");
    proxy.cut();
    assert!(fresh.read(&mut [0]).is_err());
    assert_eq!(proxy.mode(), Mode::Pass);
}

#[test]
fn a_black_hole_holds_bytes_and_hands_them_on_when_it_ends() {
    let (proxy, mut client) = proxied_echo();
    proxy.set(Mode::Blackhole);
    client.write_all(b"one").unwrap();
    let mut late = dial(&proxy);
    late.write_all(b"two").unwrap();
    expect_silence(&mut client);
    expect_silence(&mut late);
    assert_eq!((proxy.bytes_up(), proxy.connections()), (0, 2));
    proxy.set(Mode::Pass);
    expect(&mut client, "one");
    expect(&mut late, "two");
}

#[test]
fn each_direction_can_be_a_black_hole_of_its_own() {
    let (proxy, mut client) = proxied_echo();
    proxy.set(Mode::BlackholeUp);
    client.write_all(b"one").unwrap();
    expect_silence(&mut client);
    assert_eq!(proxy.bytes_up(), 0);
    proxy.set(Mode::BlackholeDown);
    eventually(LIMIT, "the bytes go up", || proxy.bytes_up() == 3);
    expect_silence(&mut client);
    assert_eq!(proxy.bytes_down(), 0);
    proxy.set(Mode::Pass);
    expect(&mut client, "one");
}

#[test]
fn a_delay_adds_up_and_tells_its_deliveries() {
    let (proxy, mut client) = proxied_echo();
    let (up, down) = (Duration::from_millis(60), Duration::from_millis(90));
    proxy.set(Mode::Delay { up, down });
    let deliveries = proxy.deliveries();
    let start = boot_nanos();
    client.write_all(b"one").unwrap();
    let first = deliveries.recv_timeout(LIMIT).unwrap();
    let second = deliveries.recv_timeout(LIMIT).unwrap();
    assert_eq!((first.direction, second.direction), (Direction::Up, Direction::Down));
    assert_eq!((first.bytes, first.connection, first.data), (3, 1, false));
    assert!(first.at_nanos - start >= 60_000_000);
    assert!(second.at_nanos - start >= 150_000_000);
    expect(&mut client, "one");

    // What is under way keeps its delay, and what follows does not overtake it.
    client.write_all(b"two").unwrap();
    eventually(LIMIT, "it is under way", || proxy.bytes_up() == 6);
    proxy.set(Mode::Pass);
    client.write_all(b"three").unwrap();
    expect(&mut client, "twothree");
}

#[test]
fn a_target_that_is_down_resets_the_client_and_may_come_later() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let proxy = FaultProxy::start(format!("http://{address}")).unwrap();
    assert!(dial(&proxy).read(&mut [0]).is_err());
    assert!(FaultProxy::start("http://").unwrap_err().is_invalid_argument());
}

#[test]
fn a_dropped_proxy_ends_its_threads_and_connections() {
    let mine = |entry: &std::fs::DirEntry| {
        let name = std::fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        name.starts_with("fault-proxy")
    };
    let threads = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        tasks.filter_map(Result::ok).filter(mine).count()
    };
    // Other tests of this process may run proxies too, so only an own process can count.
    let alone = std::env::var_os("NEXTEST").is_some() && cfg!(target_os = "linux");
    let (proxy, mut client) = proxied_echo();
    proxy.set(Mode::Delay { up: LIMIT, down: LIMIT });
    client.write_all(b"a").unwrap();
    if alone {
        eventually(LIMIT, "the proxy has threads", || threads() == 5);
    }
    let start = Instant::now();
    drop(proxy);
    assert!(start.elapsed() < Duration::from_secs(4));
    assert!(client.read(&mut [0]).is_err());
    if alone {
        eventually(LIMIT, "its threads are gone", || threads() == 0);
    }
}

#[test]
fn exactly_one_reply_is_dropped_and_its_write_stands() {
    let server = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(server.endpoint()).unwrap();
    let put = |key: &str| server.ctl_through(&proxy.endpoint(), ["put", key, "1"]);

    put("before").unwrap();
    assert_eq!(proxy.unary_calls(), 1);
    assert_eq!(proxy.client_data_frames(), 1);

    proxy.drop_next_reply();
    assert!(proxy.awaits_request());
    put("dropped").unwrap_err();
    assert!(!proxy.awaits_request());
    assert_eq!(get(&server, "dropped"), "1");

    put("after").unwrap();
    assert_eq!(server.unary_calls().unwrap()["Put"], 3);
}

#[test]
fn a_reply_is_dropped_on_a_connection_in_use_and_others_go_on() {
    let server = EtcdServer::start().unwrap();
    let proxy = FaultProxy::start(server.endpoint()).unwrap();
    let mut watcher =
        server.spawn_ctl_through(&proxy.endpoint(), ["watch", "--prefix", "w"]).unwrap();
    eventually(LIMIT, "the watch is open", || proxy.bytes_down() > 0 && proxy.unary_calls() == 1);
    proxy.record(true);
    proxy.drop_next_reply();
    server.ctl_through(&proxy.endpoint(), ["put", "x", "1"]).unwrap_err();
    assert_eq!(get(&server, "x"), "1");
    server.ctl(["put", "w1", "seen"]).unwrap();
    let mut output = watcher.stdout.take().unwrap();
    let mut line = [0; 12];
    output.read_exact(&mut line).unwrap();
    assert_eq!(&line, b"PUT\nw1\nseen\n");
    watcher.kill().unwrap();
    watcher.wait().unwrap();

    let log = proxy.frame_log();
    assert!(log.is_sorted_by_key(|frame| frame.at_boottime_nanos));
    let request = log
        .iter()
        .find(|f| f.kind == FrameKind::Data && f.direction == Direction::Up && f.connection == 2)
        .unwrap();
    assert!(request.len > 0 && request.stream == 1);
    proxy.record(false);
    let count = proxy.frame_log().len();
    server.ctl_through(&proxy.endpoint(), ["get", "x"]).unwrap();
    assert_eq!(proxy.frame_log().len(), count);
}

#[test]
fn an_isolated_leader_is_replaced_and_rejoins() {
    let cluster = EtcdCluster::start(3).unwrap();
    assert_eq!((cluster.size(), cluster.endpoints().len()), (3, 3));
    let old = cluster.leader().unwrap();
    cluster.member(old).ctl(["put", "a", "1"]).unwrap();

    cluster.isolate(old);
    let new = cluster.wait_leader(LIMIT).unwrap();
    assert_ne!(new, old);
    eventually(LIMIT, "the old leader steps down", || !cluster.claims_to_lead(old));
    cluster.member(old).ctl(["put", "a", "2"]).unwrap_err();
    // The client's link to it is intact: it answers what needs no quorum.
    let local = cluster.member(old).ctl(["get", "a", "--consistency=s", "--print-value-only"]);
    assert_eq!(local.unwrap().trim(), "1");
    cluster.member(new).ctl(["put", "a", "3"]).unwrap();

    cluster.rejoin(old);
    eventually(LIMIT, "the old leader hears of the write", || {
        cluster.member(old).ctl(["get", "a", "--print-value-only"]).is_ok_and(|v| v.trim() == "3")
    });

    let third = 3 - old - new;
    cluster.move_leader(third).unwrap();
    assert_eq!(cluster.leader().unwrap(), third);

    cluster.member(third).kill().unwrap();
    assert_ne!(cluster.wait_leader(LIMIT).unwrap(), third);
    cluster.member(third).start_again().unwrap();
    assert!(cluster.member(third).restart_empty().is_err());
    cluster.restart_all().unwrap();
    assert_eq!(get(cluster.member(third), "a"), "3");
}

#[test]
fn an_isolated_follower_neither_follows_nor_disturbs() {
    let cluster = EtcdCluster::builder(3).auth("root", "secret").start().unwrap();
    let leader = cluster.leader().unwrap();
    let follower = (leader + 1) % 3;
    cluster.isolate(follower);
    cluster.member(leader).ctl(["put", "a", "1"]).unwrap();
    cluster.member(follower).ctl(["get", "a"]).unwrap_err();
    assert_eq!(cluster.leader().unwrap(), leader);
    cluster.rejoin(follower);
    eventually(LIMIT, "the follower catches up", || {
        cluster
            .member(follower)
            .ctl(["get", "a", "--print-value-only"])
            .is_ok_and(|v| v.trim() == "1")
    });
}
