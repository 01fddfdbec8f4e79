//! What a contender writes into its key, for people and for `contenders()`.

use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use crate::client::identity::host_name;
use crate::watch::Entry;

#[derive(Serialize, Deserialize)]
struct Written {
    client_id: String,
    host: String,
    pid: u32,
    /// Milliseconds since the epoch, by the contender's wall clock.
    since: u64,
}

/// Somebody who holds a lock or waits for it, as one revision of etcd shows it.
///
/// A contender of another program (Go's `concurrency`, `etcdctl lock`) says nothing about itself:
/// its `client_id` is then its key, and `host`, `pid` and `since` are absent.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Contender {
    /// The client id it gave.
    pub client_id: String,
    /// The host it runs on.
    pub host: Option<String>,
    /// Its process id.
    pub pid: Option<u32>,
    /// Its key's create revision: the fencing token, once it holds.
    pub token: i64,
    /// When it joined the queue, by its own wall clock.
    pub since: Option<SystemTime>,
    /// Its place in the queue, 0 for the first.
    pub position: usize,
    /// Whether it is the one who holds.
    pub is_holder: bool,
}

pub(super) fn encode(client_id: &str) -> Vec<u8> {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let written = Written {
        client_id: client_id.to_owned(),
        host: host_name(),
        pid: std::process::id(),
        since: u64::try_from(since.as_millis()).unwrap_or(u64::MAX),
    };
    // A struct of plain fields always encodes; the id alone would do in its place.
    serde_json::to_vec(&written).unwrap_or_else(|_| client_id.as_bytes().to_vec())
}

/// `key` is the entry's key as this client's users know it.
pub(super) fn decode(position: usize, entry: &Entry, key: String) -> Contender {
    let written: Option<Written> = serde_json::from_slice(&entry.value).ok();
    let token = entry.create_revision;
    let is_holder = position == 0;
    match written {
        Some(Written { client_id, host, pid, since }) => Contender {
            client_id,
            host: Some(host),
            pid: Some(pid),
            token,
            since: SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(since)),
            position,
            is_holder,
        },
        None => Contender {
            client_id: key,
            host: None,
            pid: None,
            token,
            since: None,
            position,
            is_holder,
        },
    }
}
