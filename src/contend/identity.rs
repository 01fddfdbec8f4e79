//! What a contender writes into its key, for people and for `contenders()`.

use std::borrow::Cow;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::layout::{Layout, Rule, Standing, admitted};
use crate::client::identity::host_name;

/// What a contender wants to be inside for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ContenderMode {
    /// Alone, as a mutex or a program that says nothing about it.
    Exclusive,
    /// Beside other readers.
    Read,
    /// Alone, as the writer of a read/write lock.
    Write,
    /// With one of a semaphore's permits.
    Permit,
    /// As the leader of an election.
    Lead,
}

#[derive(Serialize, Deserialize)]
struct Written<'a> {
    #[serde(borrow)]
    client_id: Cow<'a, str>,
    #[serde(borrow)]
    host: Cow<'a, str>,
    pid: u32,
    /// Milliseconds since the epoch, by the contender's wall clock.
    since: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    mode: Option<WrittenMode>,
}

#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum WrittenMode {
    Read,
    Write,
}

/// Somebody who holds a lock or waits for it, as one revision of etcd shows it.
///
/// A contender of another program (Go's `concurrency`, `etcdctl lock`) says nothing about itself:
/// its `client_id` is then its key, and `host`, `pid` and `since` are absent. The holders of a
/// semaphore give their client id only.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Contender {
    /// The client id it gave.
    pub client_id: String,
    /// The host it runs on.
    pub host: Option<String>,
    /// Its process id.
    pub pid: Option<u32>,
    /// Its key's create revision: the fencing token, once it holds exclusively. The keys of one
    /// `acquire_many` share it.
    pub token: i64,
    /// When it joined the queue, by its own wall clock.
    pub since: Option<SystemTime>,
    /// Its place in the queue, 0 for the first.
    pub position: usize,
    /// What it wants to be inside for.
    pub mode: ContenderMode,
    /// Whether it is inside: the one who holds, or one of several readers or permits.
    pub is_holder: bool,
}

/// Who writes: what stays the same from key to key.
pub(super) struct Author {
    client_id: String,
    host: String,
    pid: u32,
}

impl Author {
    pub(super) fn new(client_id: &str) -> Author {
        Author { client_id: client_id.to_owned(), host: host_name(), pid: std::process::id() }
    }

    /// The value of a key that contends in this mode.
    pub(super) fn sign(&self, mode: ContenderMode) -> Vec<u8> {
        let mode = match mode {
            ContenderMode::Permit | ContenderMode::Lead => {
                return self.client_id.as_bytes().to_vec();
            }
            ContenderMode::Exclusive => None,
            ContenderMode::Read => Some(WrittenMode::Read),
            ContenderMode::Write => Some(WrittenMode::Write),
        };
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let written = Written {
            client_id: Cow::Borrowed(&self.client_id),
            host: Cow::Borrowed(&self.host),
            pid: self.pid,
            since: u64::try_from(since.as_millis()).unwrap_or(u64::MAX),
            mode,
        };
        // A struct of plain fields always encodes; the id alone would do in its place.
        serde_json::to_vec(&written).unwrap_or_else(|_| self.client_id.as_bytes().to_vec())
    }
}

/// Whether this value says that its key only reads.
pub(super) fn reads(value: &[u8]) -> bool {
    // Most values say nothing of the kind, and are not worth parsing.
    let may = value.windows(6).any(|part| part == br#""read""#);
    may && serde_json::from_slice(value)
        .is_ok_and(|written: Written<'_>| written.mode == Some(WrittenMode::Read))
}

/// Everyone in a queue, first to last. `shown` names a key as this client's users know it.
pub(super) fn decode_all(
    layout: &Layout,
    count: usize,
    line: &[Standing],
    shown: impl Fn(&[u8]) -> String,
) -> Vec<Contender> {
    let inside = admitted(layout.rule(), count, line.iter()).len();
    let one = |(position, standing): (usize, &Standing)| {
        decode(layout.rule(), position, position < inside, standing, &shown)
    };
    line.iter().enumerate().map(one).collect()
}

fn decode(
    rule: Rule,
    position: usize,
    is_holder: bool,
    standing: &Standing,
    shown: impl Fn(&[u8]) -> String,
) -> Contender {
    let entry = &standing.entry;
    let mut contender = Contender {
        client_id: String::new(),
        host: None,
        pid: None,
        token: entry.create_revision,
        since: None,
        position,
        mode: ContenderMode::Exclusive,
        is_holder,
    };
    if rule == Rule::Counted {
        contender.client_id = String::from_utf8_lossy(&entry.value).into_owned();
        contender.mode = ContenderMode::Permit;
        return contender;
    }
    match serde_json::from_slice::<Written<'_>>(&entry.value) {
        Ok(written) => {
            contender.client_id = written.client_id.into_owned();
            contender.host = Some(written.host.into_owned());
            contender.pid = Some(written.pid);
            contender.since =
                SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(written.since));
            contender.mode = match written.mode {
                None => ContenderMode::Exclusive,
                Some(WrittenMode::Read) => ContenderMode::Read,
                Some(WrittenMode::Write) => ContenderMode::Write,
            };
        }
        Err(_) => contender.client_id = shown(&entry.key),
    }
    contender
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_value_that_says_read_reads() {
        assert!(reads(&Author::new("me").sign(ContenderMode::Read)));
        for mode in [
            ContenderMode::Exclusive,
            ContenderMode::Write,
            ContenderMode::Permit,
            ContenderMode::Lead,
        ] {
            assert!(!reads(&Author::new("me").sign(mode)), "{mode:?}");
        }
        assert!(!reads(br#"{"client_id":"\"read\"","host":"h","pid":1,"since":2}"#));
        assert!(!reads(br#"{"mode":"read"}"#), "a stranger's value counts as exclusive");
        assert!(!reads(b""));
    }
}
