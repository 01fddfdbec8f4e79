//! A proxy between a client and a server that can break the network between them.

use std::collections::VecDeque;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};
use parking_lot::{Condvar, Mutex};

use crate::error::{Error, Result};
use crate::testing::crew::Crew;
use crate::testing::frames::{Frame, FrameKind};
use crate::testing::link::{Delivery, Direction, Link, Mode, no_linger};
use crate::testing::{boot_nanos, failed_by};

const LOG_LIMIT: usize = 100_000;
const DELIVERY_LIMIT: usize = 1_024;
const END_LIMIT: Duration = Duration::from_secs(5);

/// A TCP proxy on loopback that delays, holds, resets and drops.
///
/// It forwards every connection to one target. Plain HTTP/2, and so gRPC without TLS, is also
/// understood as far as frames go, for [`drop_next_reply`](FaultProxy::drop_next_reply) and the
/// counts; anything else is bytes. Dropping the proxy resets its connections and ends its
/// threads. All methods may be called from any thread.
///
/// # Example: a slow network, then none
///
/// ```no_run
/// use std::time::Duration;
/// use etcd_recipes::testing::{EtcdServer, FaultProxy, Mode};
///
/// # fn main() -> etcd_recipes::Result<()> {
/// let server = EtcdServer::start()?;
/// let proxy = FaultProxy::start(server.endpoint())?;
/// proxy.set(Mode::Delay { up: Duration::from_millis(50), down: Duration::from_millis(50) });
/// proxy.set(Mode::Blackhole);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct FaultProxy {
    address: SocketAddr,
    shared: Arc<Shared>,
}

/// What the proxy's threads share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) target: SocketAddr,
    pub(super) crew: Crew,
    pub(super) stats: Stats,
    mode: Mutex<Mode>,
    armed: AtomicBool,
    stopped: AtomicBool,
    links: Mutex<Links>,
    live: Mutex<usize>,
    left: Condvar,
}

#[derive(Debug, Default)]
struct Links {
    accepted: u64,
    open: Vec<Weak<Link>>,
}

impl Shared {
    pub(super) fn mode(&self) -> Mode {
        *self.mode.lock()
    }

    /// True for the one stream whose answer is to be dropped.
    pub(super) fn disarm(&self) -> bool {
        self.armed.swap(false, Ordering::AcqRel)
    }

    fn open_links(&self) -> Vec<Arc<Link>> {
        self.links.lock().open.iter().filter_map(Weak::upgrade).collect()
    }

    fn abort_all(&self) {
        for link in self.open_links() {
            link.abort();
        }
        let end = Instant::now() + END_LIMIT;
        let mut live = self.live.lock();
        while *live > 0 && !self.left.wait_until(&mut live, end).timed_out() {}
    }

    fn accept(self: &Arc<Shared>, listener: &TcpListener) {
        for client in listener.incoming() {
            if self.stopped.load(Ordering::Acquire) {
                return;
            }
            let Ok(client) = client else { continue };
            let link = {
                // Under one lock, so that whoever sets `Reset` sees this link or is seen here.
                let mut links = self.links.lock();
                links.accepted += 1;
                if self.mode() == Mode::Reset {
                    no_linger(&client);
                    continue;
                }
                let link = Arc::new(Link::new(links.accepted, client, self.clone()));
                links.open.retain(|link| link.strong_count() > 0);
                links.open.push(Arc::downgrade(&link));
                link
            };
            let running = link.clone();
            if self.crew.spawn("fault-proxy", move || running.run()).is_err() {
                link.abort();
            }
        }
    }
}

/// Counts a connection for as long as its sockets are open.
#[derive(Debug)]
pub(super) struct Presence(Arc<Shared>);

impl Presence {
    pub(super) fn enter(shared: &Arc<Shared>) -> Presence {
        *shared.live.lock() += 1;
        Presence(shared.clone())
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        *self.0.live.lock() -= 1;
        self.0.left.notify_all();
    }
}

/// What has passed through.
#[derive(Debug, Default)]
pub(super) struct Stats {
    up: Traffic,
    down: Traffic,
    client_data_frames: AtomicU64,
    streams: AtomicU64,
    recording: AtomicBool,
    log: Mutex<VecDeque<Frame>>,
    deliveries: Mutex<Option<(Sender<Delivery>, Receiver<Delivery>)>>,
}

#[derive(Debug, Default)]
struct Traffic {
    bytes: AtomicU64,
    last: AtomicU64,
}

impl Stats {
    fn traffic(&self, direction: Direction) -> &Traffic {
        match direction {
            Direction::Up => &self.up,
            Direction::Down => &self.down,
        }
    }

    pub(super) fn opened_stream(&self) {
        self.streams.fetch_add(1, Ordering::AcqRel);
    }

    pub(super) fn saw(&self, frame: Frame) {
        if frame.kind == FrameKind::Data && frame.direction == Direction::Up {
            self.client_data_frames.fetch_add(1, Ordering::AcqRel);
        }
        if self.recording.load(Ordering::Acquire) {
            let mut log = self.log.lock();
            if log.len() == LOG_LIMIT {
                log.pop_front();
            }
            log.push_back(frame);
        }
    }

    pub(super) fn delivered(
        &self,
        connection: u64,
        direction: Direction,
        bytes: usize,
        data: bool,
    ) {
        let at_nanos = boot_nanos();
        let traffic = self.traffic(direction);
        traffic.bytes.fetch_add(bytes as u64, Ordering::AcqRel);
        traffic.last.store(at_nanos, Ordering::Release);
        if let Some((sender, receiver)) = &*self.deliveries.lock() {
            let mut delivery = Delivery { connection, direction, at_nanos, bytes, data };
            while let Err(TrySendError::Full(refused)) = sender.try_send(delivery) {
                let _ = receiver.try_recv();
                delivery = refused;
            }
        }
    }
}

impl FaultProxy {
    /// Starts a proxy in front of `target`, `http://127.0.0.1:2379` or `127.0.0.1:2379`.
    ///
    /// The target need not run yet: a connection is made for each client that comes.
    ///
    /// # Errors
    ///
    /// `InvalidArgument`: `target` is no address. `Testing`: no port or no thread to be had.
    pub fn start(target: impl AsRef<str>) -> Result<FaultProxy> {
        let target = parse(target.as_ref())?;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
            .map_err(|error| failed_by("no port for the proxy", error))?;
        let address =
            listener.local_addr().map_err(|error| failed_by("no port for the proxy", error))?;
        let shared = Arc::new(Shared {
            target,
            crew: Crew::default(),
            stats: Stats::default(),
            mode: Mutex::new(Mode::Pass),
            armed: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            links: Mutex::new(Links::default()),
            live: Mutex::new(0),
            left: Condvar::new(),
        });
        let acceptor = shared.clone();
        shared.crew.spawn("fault-proxy", move || acceptor.accept(&listener))?;
        Ok(FaultProxy { address, shared })
    }

    /// The URL that clients are to connect to, `http://127.0.0.1:<port>`.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Changes what happens to bytes, for open connections and new ones.
    ///
    /// When it returns the new mode holds: no byte moves by the old one, and after
    /// [`Mode::Reset`] all connections are closed.
    pub fn set(&self, mode: Mode) {
        *self.shared.mode.lock() = mode;
        if mode == Mode::Reset {
            return self.shared.abort_all();
        }
        for link in self.shared.open_links() {
            link.settle();
        }
    }

    /// The mode set last; [`Mode::Pass`] at first.
    pub fn mode(&self) -> Mode {
        self.shared.mode()
    }

    /// Resets the open connections; new ones are treated by the mode as before.
    pub fn cut(&self) {
        self.shared.abort_all();
    }

    /// Drops the answer to the next HTTP/2 request that a client begins.
    ///
    /// The request goes through. When the first frame of its answer comes from the server, that
    /// frame and what follows it are discarded and the connection is reset: the server has acted
    /// and the client cannot know. Other connections go on.
    pub fn drop_next_reply(&self) {
        self.shared.armed.store(true, Ordering::Release);
    }

    /// Whether a [`drop_next_reply`](FaultProxy::drop_next_reply) still waits for its request.
    pub fn awaits_request(&self) -> bool {
        self.shared.armed.load(Ordering::Acquire)
    }

    /// How many connections are open.
    pub fn connections(&self) -> usize {
        *self.shared.live.lock()
    }

    /// How many connections clients have made so far, those reset at once included.
    pub fn connections_total(&self) -> u64 {
        self.shared.links.lock().accepted
    }

    /// Bytes handed to the server so far.
    pub fn bytes_up(&self) -> u64 {
        self.shared.stats.up.bytes.load(Ordering::Acquire)
    }

    /// Bytes handed to clients so far.
    pub fn bytes_down(&self) -> u64 {
        self.shared.stats.down.bytes.load(Ordering::Acquire)
    }

    /// How many HTTP/2 DATA frames clients have sent so far: one for each small message, a
    /// renewal of a lease for example.
    pub fn client_data_frames(&self) -> u64 {
        self.shared.stats.client_data_frames.load(Ordering::Acquire)
    }

    /// How many HTTP/2 requests clients have begun so far: every unary call is one, and so is
    /// every stream that was opened.
    pub fn unary_calls(&self) -> u64 {
        self.shared.stats.streams.load(Ordering::Acquire)
    }

    /// Begins to record the headers of HTTP/2 frames with an empty log, or stops. Default = off.
    pub fn record(&self, on: bool) {
        if on {
            self.shared.stats.log.lock().clear();
        }
        self.shared.stats.recording.store(on, Ordering::Release);
    }

    /// The frames recorded, oldest first, at most the last 100 000.
    pub fn frame_log(&self) -> Vec<Frame> {
        self.shared.stats.log.lock().iter().copied().collect()
    }

    /// When bytes were last handed on in a direction, see [`boot_nanos`]; `None` for never.
    pub fn last_forwarded(&self, direction: Direction) -> Option<u64> {
        let last = self.shared.stats.traffic(direction).last.load(Ordering::Acquire);
        (last != 0).then_some(last)
    }

    /// Tells every chunk handed on from now, so that a test can act when a delayed answer
    /// arrives.
    ///
    /// The channel keeps the latest 1024. A second call ends the channel of the first.
    pub fn deliveries(&self) -> Receiver<Delivery> {
        let (sender, receiver) = bounded(DELIVERY_LIMIT);
        *self.shared.stats.deliveries.lock() = Some((sender, receiver.clone()));
        receiver
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::Release);
        // Wakes the thread that accepts. It was listening a moment ago; if this fails, the bound
        // below still holds.
        let _ = TcpStream::connect_timeout(&self.address, END_LIMIT);
        self.shared.abort_all();
        self.shared.crew.wait(END_LIMIT);
    }
}

fn parse(target: &str) -> Result<SocketAddr> {
    let bare = target.split_once("://").map_or(target, |(_, rest)| rest).trim_end_matches('/');
    bare.to_socket_addrs()
        .ok()
        .and_then(|mut addresses| addresses.next())
        .ok_or_else(|| Error::invalid(format!("`{target}` is no address of a server")))
}
