//! The links between the members of a cluster, which can be cut member by member.
//!
//! Every member advertises a gate for its peers in place of its own port. etcd's peers speak
//! HTTP/1.1 and name themselves in a header, and one connection only ever serves one peer; so a
//! gate knows who calls and closes what belongs to a member that is cut off, in both directions.
//! Connections that have not named their peer are closed as well while a member is cut off: they
//! are probes, or would be used by whom they do not say.

use std::collections::{HashMap, HashSet};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::error::Result;
use crate::testing::crew::Crew;
use crate::testing::failed_by;

const HEAD_LIMIT: usize = 16 * 1024;
const IO_LIMIT: Duration = Duration::from_secs(1);
const END_LIMIT: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
pub(super) struct PeerNet {
    shared: Arc<Mutex<State>>,
    crew: Crew,
    gates: Vec<SocketAddr>,
}

#[derive(Debug, Default)]
struct State {
    stopped: bool,
    cut_off: HashSet<usize>,
    /// etcd's member ids, as its header spells them.
    members: HashMap<String, usize>,
    links: Vec<PeerLink>,
    next_link: u64,
}

#[derive(Debug)]
struct PeerLink {
    number: u64,
    to: usize,
    from: Option<String>,
    sockets: [TcpStream; 2],
}

impl State {
    fn allows(&self, to: usize, from: Option<&str>) -> bool {
        if self.stopped || self.cut_off.contains(&to) {
            return false;
        }
        match from.and_then(|id| self.members.get(id)) {
            Some(from) => !self.cut_off.contains(from),
            None => self.cut_off.is_empty(),
        }
    }

    fn close_what_is_not_allowed(&self) {
        for link in self.links.iter().filter(|l| !self.allows(l.to, l.from.as_deref())) {
            for socket in &link.sockets {
                // It may have been closed by its peer.
                let _ = socket.shutdown(Shutdown::Both);
            }
        }
    }
}

impl PeerNet {
    /// Opens a gate for the next member and returns its URL.
    pub(super) fn add_gate(&mut self, target: u16) -> Result<String> {
        let no_gate = |error| failed_by("no port for a gate between peers", error);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(no_gate)?;
        let address = listener.local_addr().map_err(no_gate)?;
        let to = self.gates.len();
        let (shared, crew) = (self.shared.clone(), self.crew.clone());
        self.crew.spawn("peer-gate", move || {
            for socket in listener.incoming() {
                if shared.lock().stopped {
                    return;
                }
                let Ok(socket) = socket else { continue };
                let shared = shared.clone();
                let own_crew = crew.clone();
                // Without a thread the socket is dropped, and the peer dials again.
                let _ =
                    crew.spawn("peer-link", move || serve(&shared, &own_crew, to, target, socket));
            }
        })?;
        self.gates.push(address);
        Ok(format!("http://{address}"))
    }

    /// Says which of etcd's member ids stands for which member.
    pub(super) fn name_members(&self, members: HashMap<String, usize>) {
        self.shared.lock().members = members;
    }

    pub(super) fn cut_off(&self, member: usize) {
        let mut state = self.shared.lock();
        state.cut_off.insert(member);
        state.close_what_is_not_allowed();
    }

    pub(super) fn join(&self, member: usize) {
        self.shared.lock().cut_off.remove(&member);
    }

    pub(super) fn is_cut_off(&self, member: usize) -> bool {
        self.shared.lock().cut_off.contains(&member)
    }
}

impl Drop for PeerNet {
    fn drop(&mut self) {
        {
            let mut state = self.shared.lock();
            state.stopped = true;
            state.close_what_is_not_allowed();
        }
        for gate in &self.gates {
            // Wakes the thread that accepts; if it fails, the bound below still holds.
            let _ = TcpStream::connect_timeout(gate, IO_LIMIT);
        }
        self.crew.wait(END_LIMIT);
    }
}

fn serve(shared: &Mutex<State>, crew: &Crew, to: usize, target: u16, peer: TcpStream) {
    let Ok(head) = read_head(&peer) else { return };
    let from = sender(&head);
    let member = SocketAddr::from((Ipv4Addr::LOCALHOST, target));
    let Ok(member) = TcpStream::connect_timeout(&member, IO_LIMIT) else { return };
    let Some(number) = register(shared, to, from, &peer, &member) else { return };
    if forward(crew, &head, &peer, &member).is_err() {
        close(&peer, &member);
    }
    shared.lock().links.retain(|link| link.number != number);
}

fn register(
    shared: &Mutex<State>,
    to: usize,
    from: Option<String>,
    peer: &TcpStream,
    member: &TcpStream,
) -> Option<u64> {
    let sockets = [peer.try_clone().ok()?, member.try_clone().ok()?];
    let mut state = shared.lock();
    if !state.allows(to, from.as_deref()) {
        return None;
    }
    state.next_link += 1;
    let number = state.next_link;
    state.links.push(PeerLink { number, to, from, sockets });
    Some(number)
}

fn forward(crew: &Crew, head: &[u8], peer: &TcpStream, member: &TcpStream) -> Result<()> {
    let failed = |error| failed_by("a link between peers broke", error);
    peer.set_read_timeout(None).map_err(failed)?;
    for socket in [peer, member] {
        socket.set_nodelay(true).map_err(failed)?;
    }
    let mut to_member = member;
    to_member.write_all(head).map_err(failed)?;
    let back = (member.try_clone().map_err(failed)?, peer.try_clone().map_err(failed)?);
    crew.spawn("peer-link", move || copy(&back.0, &back.1))?;
    copy(peer, member);
    Ok(())
}

fn copy(mut from: &TcpStream, mut to: &TcpStream) {
    // Either end may break off at any time; then both are closed.
    let _ = std::io::copy(&mut from, &mut to);
    close(from, to);
}

fn close(a: &TcpStream, b: &TcpStream) {
    for socket in [a, b] {
        let _ = socket.shutdown(Shutdown::Both);
    }
}

/// Reads up to the end of the first request's head, and maybe some of its body.
fn read_head(mut peer: &TcpStream) -> std::io::Result<Vec<u8>> {
    peer.set_read_timeout(Some(IO_LIMIT))?;
    let mut head = Vec::new();
    let mut chunk = [0; 4096];
    while !head.windows(4).any(|four| four == b"\r\n\r\n") && head.len() < HEAD_LIMIT {
        match peer.read(&mut chunk)? {
            0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            count => head.extend_from_slice(&chunk[..count]),
        }
    }
    Ok(head)
}

fn sender(head: &[u8]) -> Option<String> {
    let head = String::from_utf8_lossy(head);
    head.lines().take_while(|line| !line.is_empty()).find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("x-server-from").then(|| value.trim().to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sender_is_read_from_the_head_only() {
        let head = b"POST /raft HTTP/1.1\r\nHost: a\r\nX-Server-From: 8e9e05c52164694d\r\n\r\nbody";
        assert_eq!(sender(head).as_deref(), Some("8e9e05c52164694d"));
        assert_eq!(sender(b"GET /version HTTP/1.1\r\n\r\nX-Server-From: 1"), None);
    }

    #[test]
    fn a_member_cut_off_neither_calls_nor_is_called() {
        let members = HashMap::from([("a".to_owned(), 0), ("b".to_owned(), 1)]);
        let mut state = State { members, ..State::default() };
        assert!(state.allows(0, Some("b")) && state.allows(0, None));
        state.cut_off.insert(1);
        assert!(!state.allows(0, Some("b")) && !state.allows(1, Some("a")));
        assert!(state.allows(0, Some("a")) && !state.allows(0, None));
    }
}
