//! One HTTP GET over a socket: etcd's `/health` and `/metrics` need no more.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

pub(super) fn get(port: u16, path: &str, limit: Duration) -> io::Result<String> {
    let end = Instant::now() + limit;
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let mut stream = TcpStream::connect_timeout(&address, limit)?;
    stream.set_write_timeout(Some(limit))?;
    // Version 1.0: the server then closes the connection after an answer without chunks.
    write!(stream, "GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n")?;
    let mut answer = Vec::new();
    let mut chunk = [0; 16 * 1024];
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut chunk)? {
            0 => break,
            count => answer.extend_from_slice(&chunk[..count]),
        }
    }
    body(&String::from_utf8_lossy(&answer))
}

fn body(answer: &str) -> io::Result<String> {
    let Some((head, body)) = answer.split_once("\r\n\r\n") else {
        return Err(io::ErrorKind::UnexpectedEof.into());
    };
    let status = head.lines().next().unwrap_or_default();
    if status.split(' ').nth(1) == Some("200") {
        Ok(body.to_owned())
    } else {
        Err(io::Error::other(format!("{status}: {}", body.trim())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_200_has_a_body() {
        assert_eq!(body("HTTP/1.0 200 OK\r\nA: b\r\n\r\nyes").unwrap(), "yes");
        assert!(body("HTTP/1.0 503 Service Unavailable\r\n\r\nno").is_err());
        assert!(body("HTTP/1.0 200 OK\r\n").is_err());
    }
}
