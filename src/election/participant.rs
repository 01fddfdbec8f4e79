//! The candidates of an election, as one revision of etcd shows them.

use crate::client::core::Core;
use crate::contend::{Layout, Standing, read_queue};
use crate::error::Result;
use crate::watch::Entry;

/// A candidate: the leader, or one who would be.
///
/// A candidate of another program (Go's `concurrency`, `etcdctl elect`) has no client id in its
/// key; its proposal stands in for it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Participant {
    /// The client id it gave.
    pub client_id: String,
    /// Whether it leads.
    pub is_leader: bool,
    /// Its place in the queue, 0 for the leader.
    pub position: usize,
    /// Its key's create revision: the number of its term once it leads, and its fencing token.
    pub term: i64,
    /// What it proclaimed as leader; its client id before that.
    pub proposal: Vec<u8>,
}

impl Participant {
    pub(super) fn new(layout: &Layout, position: usize, entry: &Entry) -> Participant {
        Participant {
            client_id: client_id(layout, entry),
            is_leader: position == 0,
            position,
            term: entry.create_revision,
            proposal: entry.value.clone(),
        }
    }

    /// The proposal as text, with replacement characters where it is none.
    pub fn proposal_text(&self) -> String {
        String::from_utf8_lossy(&self.proposal).into_owned()
    }
}

/// A key of ours is named `<lease>-<number>-<client id>`; a key of others ends with the lease.
fn client_id(layout: &Layout, entry: &Entry) -> String {
    let name = entry.key.strip_prefix(layout.watched()).unwrap_or(&entry.key);
    let name = String::from_utf8_lossy(name);
    let mut parts = name.splitn(3, '-');
    match (parts.next(), parts.next(), parts.next()) {
        (Some(lease), Some(number), Some(id)) if is_hex(lease) && number.parse::<u64>().is_ok() => {
            id.to_owned()
        }
        _ => String::from_utf8_lossy(&entry.value).into_owned(),
    }
}

fn is_hex(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// All candidates, the leader first, from one consistent read.
pub(super) async fn list(
    core: &Core,
    op: &'static str,
    layout: &Layout,
) -> Result<Vec<Participant>> {
    let read = read_queue(core, op, layout).await?;
    let one = |(position, standing): (usize, &Standing)| {
        Participant::new(layout, position, &standing.entry)
    };
    Ok(read.line.iter().enumerate().map(one).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(key: &str, value: &str) -> String {
        let entry = Entry {
            key: key.into(),
            value: value.into(),
            create_revision: 1,
            mod_revision: 1,
            version: 1,
            lease: 1,
        };
        client_id(&Layout::candidates(b"/e/".to_vec()), &entry)
    }

    #[test]
    fn the_client_id_is_in_our_keys_and_in_the_values_of_others() {
        assert_eq!(named("/e/1f-0-host-7", "proposal"), "host-7");
        assert_eq!(named("/e/694d7f4a", "from-go"), "from-go");
        assert_eq!(named("/e/not-a-key-of-ours", "them"), "them");
    }
}
