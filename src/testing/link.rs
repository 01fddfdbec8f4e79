//! One connection through the fault proxy: two pipes of bytes, each with a reader and a writer.
//!
//! A reader takes what one side sends and queues it with the time it is due; a writer hands it to
//! the other side once it is due and the proxy's mode lets that direction move. The queue is the
//! cable: what is in it stays in order and is never lost while both ends stay open.

use std::collections::VecDeque;
use std::io::{ErrorKind as IoErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::testing::boot_nanos;
use crate::testing::frames::{ClientReader, Frame, FrameKind, FrameReader, Head};
use crate::testing::proxy::{Presence, Shared};

/// Which way bytes travel through a [`FaultProxy`](crate::testing::FaultProxy).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the client to the server.
    Up,
    /// From the server to the client.
    Down,
}

/// What a [`FaultProxy`](crate::testing::FaultProxy) does to the bytes between client and server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Mode {
    /// Bytes go through at once.
    #[default]
    Pass,
    /// Open connections are reset, new ones are reset as soon as they are made.
    Reset,
    /// The cable is unplugged: connections stay open and can be made, and no byte moves. What is
    /// sent meanwhile is held, and delivered when bytes may move again.
    Blackhole,
    /// As `Blackhole`, for bytes from the client to the server only.
    BlackholeUp,
    /// As `Blackhole`, for bytes from the server to the client only.
    BlackholeDown,
    /// Every chunk takes this long on its way, in order. Chunks under way keep their delay when
    /// the mode changes to another that lets them move.
    Delay {
        /// From the client to the server.
        up: Duration,
        /// From the server to the client.
        down: Duration,
    },
}

impl Mode {
    fn moves(self, direction: Direction) -> bool {
        match self {
            Mode::Pass | Mode::Delay { .. } => true,
            Mode::Reset | Mode::Blackhole => false,
            Mode::BlackholeUp => direction == Direction::Down,
            Mode::BlackholeDown => direction == Direction::Up,
        }
    }

    fn delay(self, direction: Direction) -> Duration {
        match (self, direction) {
            (Mode::Delay { up, .. }, Direction::Up) => up,
            (Mode::Delay { down, .. }, Direction::Down) => down,
            _ => Duration::ZERO,
        }
    }
}

/// A chunk of bytes that a proxy has just handed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Delivery {
    /// The connection, numbered from 1 in the order the proxy accepted them.
    pub connection: u64,
    /// Which way the chunk went.
    pub direction: Direction,
    /// When, see [`boot_nanos`](crate::testing::boot_nanos).
    pub at_nanos: u64,
    /// Its size.
    pub bytes: usize,
    /// Whether an HTTP/2 DATA frame began in it, and thus a part of a request or an answer.
    pub data: bool,
}

/// The most that a queue holds before the proxy stops reading.
const HELD_LIMIT: usize = 4 << 20;

/// How long a write may take before the mode is looked at again.
const WRITE_SLICE: Duration = Duration::from_millis(50);

const DIAL_LIMIT: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
struct Pipe {
    state: Mutex<PipeState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct PipeState {
    queue: VecDeque<Item>,
    held: usize,
    writing: bool,
    /// How many writes have been begun or given up; a new one goes by the mode as it is then.
    round: u64,
}

#[derive(Debug)]
struct Item {
    due: u64,
    load: Load,
}

#[derive(Debug)]
enum Load {
    Bytes {
        bytes: Vec<u8>,
        data: bool,
    },
    /// The sender will send no more.
    End,
    /// The connection is to be reset once all before it is delivered.
    Cut,
}

/// What a reader found in a chunk.
#[derive(Debug, Default)]
struct Findings {
    data: bool,
    /// The chunk is to be cut off here, and the connection with it.
    cut: Option<usize>,
}

#[derive(Debug)]
pub(super) struct Link {
    id: u64,
    client: TcpStream,
    server: OnceLock<TcpStream>,
    dead: AtomicBool,
    up: Pipe,
    down: Pipe,
    http2: AtomicBool,
    /// The stream whose answer is to be dropped; 0 for none.
    victim: AtomicU32,
    proxy: Arc<Shared>,
    /// Last, so that it leaves after the sockets are closed.
    _presence: Presence,
}

impl Link {
    pub(super) fn new(id: u64, client: TcpStream, proxy: Arc<Shared>) -> Link {
        // A socket without the option still works, only later.
        let _ = client.set_nodelay(true);
        let _ = client.set_write_timeout(Some(WRITE_SLICE));
        Link {
            id,
            client,
            server: OnceLock::new(),
            dead: AtomicBool::new(false),
            up: Pipe::default(),
            down: Pipe::default(),
            http2: AtomicBool::new(false),
            victim: AtomicU32::new(0),
            _presence: Presence::enter(&proxy),
            proxy,
        }
    }

    fn pipe(&self, direction: Direction) -> &Pipe {
        match direction {
            Direction::Up => &self.up,
            Direction::Down => &self.down,
        }
    }

    fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    /// Resets both sides: with no lingering, the sockets send an RST when the last thread leaves.
    pub(super) fn abort(&self) {
        self.dead.store(true, Ordering::Release);
        for socket in std::iter::once(&self.client).chain(self.server.get()) {
            no_linger(socket);
            // Wakes the reader without telling the other side.
            let _ = socket.shutdown(Shutdown::Read);
        }
        for pipe in [&self.up, &self.down] {
            let _state = pipe.state.lock();
            pipe.changed.notify_all();
        }
    }

    /// Makes the writers look at the mode, and returns when none of them acts on an older one.
    pub(super) fn settle(&self) {
        for pipe in [&self.up, &self.down] {
            let mut state = pipe.state.lock();
            pipe.changed.notify_all();
            let round = state.round;
            while state.writing && state.round == round && !self.is_dead() {
                pipe.changed.wait(&mut state);
            }
        }
    }

    /// Runs the connection from the client's first byte to its end.
    pub(super) fn run(self: Arc<Link>) {
        let crew = self.proxy.crew.clone();
        let reader = self.clone();
        if crew.spawn("fault-proxy", move || reader.read_up()).is_err() {
            return self.abort();
        }
        if !self.dial() {
            return self.abort();
        }
        let (reader, writer) = (self.clone(), self.clone());
        let down = crew
            .spawn("fault-proxy", move || reader.read_down())
            .and_then(|()| crew.spawn("fault-proxy", move || writer.write(Direction::Down)));
        if down.is_err() {
            return self.abort();
        }
        self.write(Direction::Up);
    }

    /// Connects to the server, once the mode would let a connect through.
    fn dial(&self) -> bool {
        {
            let mut state = self.up.state.lock();
            while !self.proxy.mode().moves(Direction::Up) && !self.is_dead() {
                self.up.changed.wait(&mut state);
            }
        }
        if self.is_dead() {
            return false;
        }
        let Ok(server) = TcpStream::connect_timeout(&self.proxy.target, DIAL_LIMIT) else {
            return false;
        };
        let _ = server.set_nodelay(true);
        let _ = server.set_write_timeout(Some(WRITE_SLICE));
        // An abort meanwhile did not see this socket.
        self.server.set(server).is_ok() && !self.is_dead()
    }

    fn read_up(&self) {
        let mut frames = ClientReader::Preface(0);
        let mut newest = 0;
        self.read(Direction::Up, &self.client, |bytes| {
            let mut findings = Findings::default();
            frames.feed(bytes, |head| {
                findings.data |= head.kind == FrameKind::Data;
                self.proxy.stats.saw(self.frame(Direction::Up, head));
                // Stream ids only grow; a HEADERS frame for an older one ends a request.
                if head.kind == FrameKind::Headers && head.stream > newest {
                    newest = head.stream;
                    self.note_stream(head.stream);
                }
            });
            self.http2.store(frames.is_http2(), Ordering::Release);
            findings
        });
    }

    fn note_stream(&self, stream: u32) {
        self.proxy.stats.opened_stream();
        if self.proxy.disarm() {
            self.victim.store(stream, Ordering::Release);
        }
    }

    fn read_down(&self) {
        let Some(server) = self.server.get() else { return };
        let mut frames = None;
        self.read(Direction::Down, server, |bytes| {
            let mut findings = Findings::default();
            // An HTTP/2 server waits for the client's preface, so it is known by now.
            let frames = frames.get_or_insert_with(|| {
                self.http2.load(Ordering::Acquire).then(FrameReader::default)
            });
            if let Some(frames) = frames {
                let victim = self.victim.load(Ordering::Acquire);
                frames.feed(bytes, |head| {
                    findings.data |= head.kind == FrameKind::Data;
                    self.proxy.stats.saw(self.frame(Direction::Down, head));
                    if victim != 0 && head.stream == victim && head.kind.answers() {
                        findings.cut.get_or_insert(head.start);
                    }
                });
            }
            findings
        });
    }

    fn frame(&self, direction: Direction, head: Head) -> Frame {
        Frame {
            at_boottime_nanos: boot_nanos(),
            stream: head.stream,
            kind: head.kind,
            len: head.len,
            direction,
            connection: self.id,
        }
    }

    fn read(
        &self,
        direction: Direction,
        mut source: &TcpStream,
        mut look: impl FnMut(&[u8]) -> Findings,
    ) {
        let mut buffer = [0; 16 * 1024];
        loop {
            let count = match source.read(&mut buffer) {
                Err(error) if error.kind() == IoErrorKind::Interrupted => continue,
                Err(_) => return self.push(direction, Load::Cut),
                Ok(0) => return self.push(direction, Load::End),
                Ok(count) => count,
            };
            let bytes = &buffer[..count];
            let findings = look(bytes);
            let end = findings.cut.unwrap_or(count);
            let load = Load::Bytes { bytes: bytes[..end].to_vec(), data: findings.data };
            self.push(direction, load);
            if findings.cut.is_some() {
                return self.push(direction, Load::Cut);
            }
            if self.is_dead() {
                return;
            }
        }
    }

    fn push(&self, direction: Direction, load: Load) {
        let delay = self.proxy.mode().delay(direction);
        let due = boot_nanos().saturating_add(nanos(delay));
        let pipe = self.pipe(direction);
        let mut state = pipe.state.lock();
        if let Load::Bytes { bytes, .. } = &load {
            state.held += bytes.len();
        }
        state.queue.push_back(Item { due, load });
        pipe.changed.notify_all();
        while state.held > HELD_LIMIT && !self.is_dead() {
            pipe.changed.wait(&mut state);
        }
    }

    /// The next item that may be delivered now; `None` when the connection is over.
    fn next(&self, direction: Direction) -> Option<Load> {
        let pipe = self.pipe(direction);
        let mut state = pipe.state.lock();
        state.writing = false;
        state.round += 1;
        pipe.changed.notify_all();
        loop {
            if self.is_dead() {
                return None;
            }
            let due = state.queue.front().map(|item| item.due);
            match due {
                Some(due) if self.proxy.mode().moves(direction) => {
                    let now = boot_nanos();
                    if due <= now {
                        state.writing = true;
                        return state.queue.pop_front().map(|item| item.load);
                    }
                    pipe.changed.wait_for(&mut state, Duration::from_nanos(due - now));
                }
                _ => pipe.changed.wait(&mut state),
            }
        }
    }

    /// Puts back what could not be written yet.
    fn put_back(&self, direction: Direction, bytes: Vec<u8>, data: bool) {
        let item = Item { due: 0, load: Load::Bytes { bytes, data } };
        self.pipe(direction).state.lock().queue.push_front(item);
    }

    fn write(&self, direction: Direction) {
        let target = match direction {
            Direction::Up => self.server.get(),
            Direction::Down => Some(&self.client),
        };
        let Some(mut target) = target else { return };
        while let Some(load) = self.next(direction) {
            match load {
                Load::Bytes { mut bytes, data } => match target.write(&bytes) {
                    Ok(count) => {
                        let rest = bytes.split_off(count);
                        self.pipe(direction).state.lock().held -= count;
                        if !bytes.is_empty() {
                            self.proxy.stats.delivered(self.id, direction, count, data);
                        }
                        if !rest.is_empty() {
                            self.put_back(direction, rest, data);
                        }
                    }
                    Err(error) if is_patience(&error) => self.put_back(direction, bytes, data),
                    Err(_) => self.abort(),
                },
                Load::End => {
                    let _ = target.shutdown(Shutdown::Write);
                    break;
                }
                Load::Cut => self.abort(),
            }
        }
        let pipe = self.pipe(direction);
        pipe.state.lock().writing = false;
        pipe.changed.notify_all();
    }
}

/// Makes a socket's close send an RST.
pub(super) fn no_linger(socket: &TcpStream) {
    // It fails for a socket that is closed already, which is fine.
    let _ = rustix::net::sockopt::set_socket_linger(socket, Some(Duration::ZERO));
}

fn is_patience(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(error.kind(), Interrupted | TimedOut | WouldBlock)
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
