//! What the store itself says of a queue: every change from its beginning, and who may have been
//! inside at each revision. It knows the rule and nothing of the library.

use std::collections::{BTreeMap, BTreeSet};

use etcd_client::{EventType, WatchOptions};
use etcd_recipes::Client;

use super::support::LIMIT;

/// One change.
#[derive(Debug, Clone)]
pub(super) struct Change {
    pub(super) revision: i64,
    pub(super) key: String,
    /// `None`: it was deleted.
    pub(super) value: Option<String>,
    create_revision: i64,
}

/// All changes of the store until now, in order.
pub(super) fn changes(client: &Client) -> Vec<Change> {
    const END: &str = "/the-end";
    client.put(END, "").unwrap();
    let all = client.with_raw(LIMIT, |mut etcd| async move {
        let options = WatchOptions::new().with_prefix().with_start_revision(1);
        let mut stream = etcd.watch("/", Some(options)).await.unwrap();
        let mut all = Vec::new();
        while let Some(message) = stream.message().await.unwrap() {
            for event in message.events() {
                let kv = event.kv().unwrap();
                let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
                let put = event.event_type() == EventType::Put;
                all.push(Change {
                    revision: kv.mod_revision(),
                    key: text(kv.key()),
                    value: put.then(|| text(kv.value())),
                    create_revision: kv.create_revision(),
                });
                if kv.key() == END.as_bytes() {
                    return all;
                }
            }
        }
        panic!("the history has no end");
    });
    all.unwrap()
}

/// Who was inside, from one change of the queue to the next.
pub(super) struct Past {
    /// By revision: the keys inside from it on, and whether they write.
    inside: BTreeMap<i64, BTreeSet<(String, bool)>>,
}

impl Past {
    pub(super) fn of(changes: &[Change], prefix: &str) -> Past {
        let mut line: BTreeMap<(i64, String), bool> = BTreeMap::new();
        let mut inside = BTreeMap::new();
        for change in changes.iter().filter(|change| change.key.starts_with(prefix)) {
            match &change.value {
                Some(value) => {
                    let read = serde_json::from_str::<serde_json::Value>(value)
                        .is_ok_and(|value| value["mode"] == "read");
                    line.insert((change.create_revision, change.key.clone()), !read);
                }
                None => line.retain(|(_, key), _| *key != change.key),
            }
            let mut now = BTreeSet::new();
            for ((_, key), writes) in &line {
                if *writes && !now.is_empty() {
                    break;
                }
                now.insert((key.clone(), *writes));
                if *writes {
                    break;
                }
            }
            inside.insert(change.revision, now);
        }
        Past { inside }
    }

    /// Whether the key was inside at any time, as a writer or as a reader.
    pub(super) fn was_inside(&self, key: &str, writes: bool) -> bool {
        self.inside.values().any(|now| now.contains(&(key.to_owned(), writes)))
    }

    /// Whether the key's writer was inside when this revision came, and thereby alone.
    pub(super) fn writes_at(&self, key: &str, revision: i64) -> bool {
        let now = self.inside.range(..revision).next_back();
        now.is_some_and(|(_, now)| now.len() == 1 && now.contains(&(key.to_owned(), true)))
    }
}
