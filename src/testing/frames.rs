//! HTTP/2 frame headers, read out of a byte stream that comes in chunks of any size.

use crate::testing::Direction;

/// What an HTTP/2 frame is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FrameKind {
    /// Part of a request or an answer.
    Data,
    /// The head of a request or an answer, or the end of an answer.
    Headers,
    /// One side gave a stream up.
    RstStream,
    /// Parameters of the connection.
    Settings,
    /// A ping or its answer.
    Ping,
    /// The sender will take no more streams.
    GoAway,
    /// Permission to send more.
    WindowUpdate,
    /// A type that carries no meaning here.
    Other(u8),
}

impl FrameKind {
    fn of(kind: u8) -> FrameKind {
        match kind {
            0 => FrameKind::Data,
            1 => FrameKind::Headers,
            3 => FrameKind::RstStream,
            4 => FrameKind::Settings,
            6 => FrameKind::Ping,
            7 => FrameKind::GoAway,
            8 => FrameKind::WindowUpdate,
            other => FrameKind::Other(other),
        }
    }

    /// Whether a server sends it as, or in place of, an answer.
    pub(super) fn answers(self) -> bool {
        matches!(self, FrameKind::Data | FrameKind::Headers | FrameKind::RstStream)
    }
}

/// One HTTP/2 frame that a proxy has seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Frame {
    /// When its sender's bytes reached the proxy, see [`boot_nanos`](crate::testing::boot_nanos).
    pub at_boottime_nanos: u64,
    /// The stream it belongs to; 0 for the connection itself.
    pub stream: u32,
    /// Its type.
    pub kind: FrameKind,
    /// The length of its payload in bytes.
    pub len: u32,
    /// Which way it travels.
    pub direction: Direction,
    /// The connection, numbered from 1 in the order the proxy accepted them.
    pub connection: u64,
}

/// A frame header, and where in the chunk its frame began (0 when it began in an earlier one).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) start: usize,
    pub(super) kind: FrameKind,
    pub(super) stream: u32,
    pub(super) len: u32,
}

/// Follows one direction of an HTTP/2 connection.
#[derive(Debug, Default)]
pub(super) struct FrameReader {
    head: [u8; 9],
    have: usize,
    payload_left: usize,
}

impl FrameReader {
    pub(super) fn feed(&mut self, chunk: &[u8], mut seen: impl FnMut(Head)) {
        let mut at = 0;
        let mut start = 0;
        while at < chunk.len() {
            if self.payload_left > 0 {
                let step = self.payload_left.min(chunk.len() - at);
                self.payload_left -= step;
                at += step;
                continue;
            }
            if self.have == 0 {
                start = at;
            }
            self.head[self.have] = chunk[at];
            self.have += 1;
            at += 1;
            if self.have == self.head.len() {
                self.have = 0;
                let [a, b, c, kind, _flags, stream @ ..] = self.head;
                let len = u32::from_be_bytes([0, a, b, c]);
                self.payload_left = len as usize;
                // The top bit of the stream id is reserved.
                let stream = u32::from_be_bytes(stream) & 0x7fff_ffff;
                seen(Head { start, kind: FrameKind::of(kind), stream, len });
            }
        }
    }
}

/// What a client opens an HTTP/2 connection with.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Follows the client's direction: HTTP/2 after its preface, else bytes without a meaning.
#[derive(Debug)]
pub(super) enum ClientReader {
    Preface(usize),
    Http2(FrameReader),
    Opaque,
}

impl ClientReader {
    pub(super) fn is_http2(&self) -> bool {
        matches!(self, ClientReader::Http2(_))
    }

    pub(super) fn feed(&mut self, chunk: &[u8], seen: impl FnMut(Head)) {
        let mut rest = chunk;
        if let ClientReader::Preface(have) = self {
            let expected = &PREFACE[*have..];
            let step = expected.len().min(chunk.len());
            if chunk[..step] != expected[..step] {
                *self = ClientReader::Opaque;
            } else if step == expected.len() {
                rest = &chunk[step..];
                *self = ClientReader::Http2(FrameReader::default());
            } else {
                *have += step;
            }
        }
        if let ClientReader::Http2(frames) = self {
            frames.feed(rest, seen);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, stream: u32, payload: usize) -> Vec<u8> {
        let mut bytes = vec![0, (payload >> 8) as u8, payload as u8, kind, 0];
        bytes.extend(stream.to_be_bytes());
        bytes.extend(vec![0xff; payload]);
        bytes
    }

    #[test]
    fn frames_are_found_however_the_bytes_are_cut() {
        let mut bytes = PREFACE.to_vec();
        bytes.extend(frame(4, 0, 18));
        bytes.extend(frame(1, 1, 300));
        bytes.extend(frame(0, 1, 0));
        bytes.extend(frame(0, 0x8000_0003, 7));
        for size in 1..=bytes.len() {
            let mut reader = ClientReader::Preface(0);
            let mut seen = Vec::new();
            for chunk in bytes.chunks(size) {
                reader.feed(chunk, |head| seen.push((head.kind, head.stream, head.len)));
            }
            assert_eq!(
                seen,
                [
                    (FrameKind::Settings, 0, 18),
                    (FrameKind::Headers, 1, 300),
                    (FrameKind::Data, 1, 0),
                    (FrameKind::Data, 3, 7),
                ],
                "in chunks of {size}"
            );
        }
    }

    #[test]
    fn a_frame_knows_where_in_its_chunk_it_began() {
        let mut bytes = frame(1, 1, 4);
        bytes.extend(frame(0, 1, 4));
        let mut reader = FrameReader::default();
        let mut starts = Vec::new();
        reader.feed(&bytes, |head| starts.push(head.start));
        assert_eq!(starts, [0, 13]);
        reader.feed(&frame(1, 3, 0)[..5], |head| starts.push(head.start));
        reader.feed(&frame(1, 3, 0)[5..], |head| starts.push(head.start));
        assert_eq!(starts, [0, 13, 0]);
    }

    #[test]
    fn other_protocols_are_left_alone() {
        let mut reader = ClientReader::Preface(0);
        reader.feed(b"PRI", |_| panic!("no frame"));
        reader.feed(b"NT me\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", |_| panic!("no frame"));
        assert!(matches!(reader, ClientReader::Opaque));
    }
}
