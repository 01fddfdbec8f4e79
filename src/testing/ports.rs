//! Ports for servers that come and go under one address.
//!
//! A port found by binding to 0 can be lost again while the server on it is down. So ports are
//! taken from below the range that systems give out by themselves, and each is claimed for as long
//! as its server lives by holding the UDP port of the same number, which no other process can then
//! claim and which the kernel frees when this process ends, however it ends.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::net::{Ipv4Addr, TcpListener, UdpSocket};

use crate::error::Result;
use crate::testing::failed;

const FIRST: u16 = 15_000;
const COUNT: u16 = 17_000;
const TRIES: u16 = 2_000;

#[derive(Debug)]
pub(super) struct Port {
    number: u16,
    _claim: UdpSocket,
}

impl Port {
    pub(super) fn claim() -> Result<Port> {
        let start = RandomState::new().build_hasher().finish() % u64::from(COUNT);
        let start = u16::try_from(start).unwrap_or(0);
        for step in 0..TRIES {
            let number = FIRST + (start + step) % COUNT;
            let Ok(claim) = UdpSocket::bind((Ipv4Addr::LOCALHOST, number)) else { continue };
            if TcpListener::bind((Ipv4Addr::LOCALHOST, number)).is_ok() {
                return Ok(Port { number, _claim: claim });
            }
        }
        Err(failed(format!("no free port on 127.0.0.1 among {TRIES} from {FIRST} up")))
    }

    pub(super) fn number(&self) -> u16 {
        self.number
    }

    pub(super) fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claimed_port_is_not_given_twice() {
        let ports: Vec<Port> = (0..50).map(|_| Port::claim().unwrap()).collect();
        let mut numbers: Vec<u16> = ports.iter().map(Port::number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), 50);
    }
}
