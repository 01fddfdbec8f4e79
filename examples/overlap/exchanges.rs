//! Requests and their answers, as the proxy's record of frames shows them.

use std::collections::{HashMap, HashSet, VecDeque};

use etcd_recipes::testing::{Direction, Frame, FrameKind};

/// A small request and its answer, by the times at which they reached the proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Exchange {
    pub(crate) connection: u64,
    pub(crate) len: u32,
    pub(crate) sent: u64,
    pub(crate) answered: u64,
}

/// The answered requests in a log of frames. A message of this size is one DATA frame, and a
/// stream has one request in flight.
pub(crate) fn exchanges(log: &[Frame]) -> Vec<Exchange> {
    let mut waiting: HashMap<(u64, u32), VecDeque<Frame>> = HashMap::new();
    let mut found = Vec::new();
    for frame in log.iter().filter(|frame| frame.kind == FrameKind::Data && frame.len > 0) {
        let requests = waiting.entry((frame.connection, frame.stream)).or_default();
        match frame.direction {
            Direction::Up => requests.push_back(*frame),
            Direction::Down => {
                if let Some(request) = requests.pop_front() {
                    found.push(Exchange {
                        connection: frame.connection,
                        len: request.len,
                        sent: request.at_boottime_nanos,
                        answered: frame.at_boottime_nanos,
                    });
                }
            }
        }
    }
    found
}

/// The renewals of one lease among all exchanges, and the reads that prove them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Renewals {
    /// The size of a renewal's frame: that of its message follows from the lease id.
    len: u32,
}

impl Renewals {
    /// For the lease whose id in hexadecimal begins the last part of a key, behind the `:` in a
    /// permit's.
    pub(crate) fn of(key: &str) -> Option<Renewals> {
        let name = key.rsplit('/').next()?.rsplit(':').next()?;
        let lease = u64::from_str_radix(name.split('-').next()?, 16).ok()?;
        let digits = (64 - lease.leading_zeros()).div_ceil(7).max(1);
        // gRPC's five bytes, the field's tag, and the id as a varint.
        Some(Renewals { len: 5 + 1 + digits })
    }

    pub(crate) fn answered(self, log: &[Frame]) -> impl Iterator<Item = Exchange> {
        exchanges(log).into_iter().filter(move |exchange| exchange.len == self.len)
    }

    /// Answered reads on connections that carry renewals.
    pub(crate) fn proofs(self, log: &[Frame]) -> impl Iterator<Item = Exchange> {
        let lease_connections: HashSet<u64> = log
            .iter()
            .filter(|frame| {
                let up = frame.direction == Direction::Up;
                up && frame.kind == FrameKind::Data && frame.len == self.len
            })
            .map(|frame| frame.connection)
            .collect();
        exchanges(log).into_iter().filter(move |exchange| {
            exchange.len > self.len && lease_connections.contains(&exchange.connection)
        })
    }
}
