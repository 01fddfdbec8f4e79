//! Real etcd processes and a fault proxy, for this project's tests and for its users'.
//!
//! An application that relies on a lock should test what it does when the lock is lost. That
//! takes a server which can be frozen, killed and wiped, and a network which can be cut. Both are
//! here, on loopback and without containers: [`EtcdServer`] and [`EtcdCluster`] start `etcd` from
//! `ETCD_BIN` or the `PATH`, [`FaultProxy`] stands between a client and a server, and
//! [`eventually`] waits for what they cause.
//!
//! Failures are errors of the kind [`ErrorKind::Testing`]. The kit steers processes by signals and
//! thus exists on Unix only.
//!
//! # Example: a server that stops answering
//!
//! ```no_run
//! use etcd_recipes::testing::{EtcdServer, FaultProxy, Mode};
//!
//! # fn main() -> etcd_recipes::Result<()> {
//! let server = EtcdServer::start()?;
//! let proxy = FaultProxy::start(server.endpoint())?;
//! // connect the code under test to `proxy.endpoint()`, then pull the cable
//! proxy.set(Mode::Blackhole);
//! // … it must notice …
//! proxy.set(Mode::Pass);
//! # Ok(())
//! # }
//! ```

#![cfg(unix)]

mod alive;
mod clock;
mod cluster;
mod crew;
mod find;
mod frames;
mod http;
mod link;
mod metrics;
mod peers;
mod ports;
mod process;
mod proxy;
mod server;
mod wait;

pub use alive::Alive;
pub use clock::{TestClock, boot_nanos};
pub use cluster::{ClusterBuilder, EtcdCluster};
pub use frames::{Frame, FrameKind};
pub use link::{Delivery, Direction, Mode};
pub use process::CtlProcess;
pub use proxy::FaultProxy;
pub use server::{EtcdServer, ServerBuilder};
pub use wait::{Condition, eventually};

use crate::error::{Error, ErrorKind};

fn failed(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Testing, message)
}

fn failed_by(message: impl Into<String>, source: std::io::Error) -> Error {
    Error::with_source(ErrorKind::Testing, message, source)
}
