//! The transactions of a queue: joining it, leaving it, and what their answers say.

use std::sync::Arc;

use etcd_client::{
    Compare, CompareOp, GetOptions, PutOptions, SortOrder, SortTarget, Txn, TxnOp, TxnOpResponse,
    TxnResponse,
};

use super::identity::ContenderMode;
use super::layout::{Layout, Rule, Standing, admitted, decode_count, encode_count};
use crate::client::call::Kind;
use crate::client::core::Core;
use crate::error::Result;
use crate::lease::Session;
use crate::watch::Entry;

/// Most transactions of etcd may hold this many operations, and as many compares.
pub(crate) const MAX_OPERATIONS: usize = 128;

/// A reader that finds fewer than this many keys ahead knows from its first answer whether one of
/// them is a writer's.
const READERS_SEEN: usize = 32;

/// The keys of one contender on one path, as they are to be put.
pub(super) struct Part<'a> {
    pub(super) layout: &'a Layout,
    pub(super) mode: ContenderMode,
    pub(super) keys: Vec<&'a [u8]>,
    pub(super) value: Vec<u8>,
    pub(super) lease: i64,
    /// What a counted path's count is taken for.
    pub(super) count: u32,
}

/// Where an enqueue put its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// May be inside.
    Inside,
    /// Somebody is ahead.
    Behind,
    /// The answer does not tell.
    Unclear,
}

/// What an enqueue answered.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Enqueued {
    /// It stands, in one place per part.
    In { create_revision: i64, places: Vec<Place> },
    /// A counted path has another count, or none yet.
    OtherCount(Option<Vec<u8>>),
    /// A key existed.
    Existed,
}

/// Puts the keys of all parts, and reads back with them what stands ahead: two answers in one
/// round trip.
pub(super) fn enqueue(parts: &[Part<'_>]) -> Txn {
    let mut compares = Vec::new();
    let mut puts = Vec::new();
    let mut otherwise = Vec::new();
    for part in parts {
        compares.extend(part.keys.iter().map(|key| absent(key)));
        if let Some(count) = part.layout.count_key() {
            compares.push(Compare::value(
                count.clone(),
                CompareOp::Equal,
                encode_count(part.count),
            ));
            otherwise.push(TxnOp::get(count, None));
        }
        puts.extend(part.puts());
    }
    let looks = parts.iter().map(|part| TxnOp::get(part.layout.entries(), Some(part.look())));
    puts.extend(looks);
    if otherwise.is_empty() {
        otherwise.extend(parts.iter().take(1).map(|part| TxnOp::get(part.keys[0], None)));
    }
    Txn::new().when(compares).and_then(puts).or_else(otherwise)
}

impl Part<'_> {
    fn puts(&self) -> impl Iterator<Item = TxnOp> + '_ {
        self.keys.iter().map(|key| {
            let options = PutOptions::new().with_lease(self.lease);
            TxnOp::put(*key, self.value.clone(), Some(options))
        })
    }

    /// Which keys of the path are to be read back.
    fn look(&self) -> GetOptions {
        let options = GetOptions::new().with_prefix();
        if self.layout.rule() == Rule::Counted {
            return options.with_count_only();
        }
        let newest = options.with_sort(SortTarget::Create, SortOrder::Descend);
        match self.mode {
            ContenderMode::Read => newest.with_limit(READERS_SEEN as i64),
            _ => newest.with_limit(2).with_keys_only(),
        }
    }

    fn place(&self, seen: &etcd_client::GetResponse) -> Place {
        let is_mine = |key: &[u8]| self.keys.contains(&key);
        if self.layout.rule() == Rule::Counted {
            let inside = seen.count() <= i64::from(self.count);
            return if inside { Place::Inside } else { Place::Behind };
        }
        if self.mode == ContenderMode::Read {
            if seen.more() {
                return Place::Unclear;
            }
            let line = standings(self.layout, seen);
            let inside = admitted(Rule::Line, 0, line.iter());
            let inside = inside.iter().any(|standing| is_mine(&standing.entry.key));
            return if inside { Place::Inside } else { Place::Behind };
        }
        match seen.kvs().iter().find(|kv| !is_mine(kv.key())) {
            None => Place::Inside,
            Some(ahead) if self.layout.is_entry(ahead.key()) => Place::Behind,
            Some(_) => Place::Unclear,
        }
    }
}

/// What the answer to [`enqueue`] says.
pub(super) fn enqueued(response: &TxnResponse, parts: &[Part<'_>]) -> Enqueued {
    let answers = response.op_responses();
    let mut gets = answers.iter().filter_map(|one| match one {
        TxnOpResponse::Get(get) => Some(get),
        _ => None,
    });
    if !response.succeeded() {
        return match parts.iter().find_map(|part| part.layout.count_key()) {
            Some(key) => {
                let found = gets.flat_map(|get| get.kvs()).find(|kv| kv.key() == key);
                Enqueued::OtherCount(found.map(|kv| kv.value().to_vec()))
            }
            None => Enqueued::Existed,
        };
    }
    let create_revision = response.header().map_or(0, |header| header.revision());
    let place = |part: &Part<'_>| gets.next().map_or(Place::Unclear, |seen| part.place(seen));
    Enqueued::In { create_revision, places: parts.iter().map(place).collect() }
}

/// Puts the keys only if all the queues are empty, so that a busy one costs no revision.
pub(super) fn enqueue_if_empty(parts: &[Part<'_>]) -> Txn {
    let empty = |part: &Part<'_>| {
        Compare::create_revision(part.layout.entries(), CompareOp::Equal, 0).with_prefix()
    };
    let looks = parts.iter().map(|part| look_at_all(part.layout, part.mode));
    Txn::new()
        .when(parts.iter().map(empty).collect::<Vec<_>>())
        .and_then(parts.iter().flat_map(Part::puts).collect::<Vec<_>>())
        .or_else(looks.collect::<Vec<_>>())
}

/// What a try found.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Tried {
    Held {
        create_revision: i64,
    },
    Busy,
    /// What stands there would let this contender in, or does not count; but it spoils the
    /// compare.
    NothingInTheWay,
}

pub(super) fn tried(response: &TxnResponse, parts: &[Part<'_>]) -> Tried {
    if response.succeeded() {
        return Tried::Held { create_revision: response.header().map_or(0, |h| h.revision()) };
    }
    let paths = parts.iter().map(|part| (part.layout, part.mode));
    if is_busy(response, paths) { Tried::Busy } else { Tried::NothingInTheWay }
}

/// Reads what stands on all paths, and nothing else: etcd answers it without its log, which a
/// transaction that might write goes through even where it does not.
pub(super) fn look<'a>(paths: impl Iterator<Item = (&'a Layout, ContenderMode)>) -> Txn {
    Txn::new().and_then(paths.map(|(layout, mode)| look_at_all(layout, mode)).collect::<Vec<_>>())
}

/// Whether one who wants in there would have to wait, by an answer that lists what stands.
pub(super) fn is_busy<'a>(
    response: &TxnResponse,
    paths: impl Iterator<Item = (&'a Layout, ContenderMode)>,
) -> bool {
    paths.zip(response.op_responses()).any(|((layout, mode), answer)| match answer {
        TxnOpResponse::Get(get) => {
            let reads = mode == ContenderMode::Read;
            standings(layout, &get).iter().any(|standing| !reads || !standing.reads)
        }
        _ => false,
    })
}

fn look_at_all(layout: &Layout, mode: ContenderMode) -> TxnOp {
    let all = GetOptions::new().with_prefix();
    // Only a reader has to know who writes.
    let all = if mode == ContenderMode::Read { all } else { all.with_keys_only() };
    TxnOp::get(layout.entries(), Some(all))
}

/// Writes the count of a path that has none; with `alone`, only if nothing else stands there.
/// The else branch reads the keys of everything there.
pub(super) fn fix_count(layout: &Layout, key: &[u8], count: u32, alone: bool) -> Txn {
    let condition = if alone {
        Compare::create_revision(layout.watched(), CompareOp::Equal, 0).with_prefix()
    } else {
        absent(key)
    };
    let everything = GetOptions::new().with_prefix().with_keys_only();
    Txn::new()
        .when([condition])
        .and_then([TxnOp::put(key, encode_count(count), None)])
        .or_else([TxnOp::get(layout.watched(), Some(everything))])
}

/// The keys that an answer lists.
pub(super) fn keys_of(response: &TxnResponse) -> Vec<Vec<u8>> {
    let gets = response.op_responses().into_iter().filter_map(|one| match one {
        TxnOpResponse::Get(get) => Some(get),
        _ => None,
    });
    gets.flat_map(|get| get.kvs().iter().map(|kv| kv.key().to_vec()).collect::<Vec<_>>()).collect()
}

/// Deletes the keys if all of them are still those created at this revision, and reads who is
/// first now on each path. `keys` names each path once, with all its keys.
pub(super) fn leave(keys: &[(&Layout, Vec<&[u8]>)], create_revision: i64) -> Txn {
    let each = || keys.iter().flat_map(|(_, keys)| keys.iter());
    let compare = |key: &&[u8]| Compare::create_revision(*key, CompareOp::Equal, create_revision);
    let first = GetOptions::new()
        .with_prefix()
        .with_sort(SortTarget::Create, SortOrder::Ascend)
        .with_limit(1)
        .with_keys_only();
    // In a counted queue the first has long been inside.
    let heads: Vec<_> = keys
        .iter()
        .filter(|(layout, _)| layout.rule() != Rule::Counted)
        .map(|(layout, _)| TxnOp::get(layout.entries(), Some(first.clone())))
        .collect();
    let deletes = each().map(|key| TxnOp::delete(*key, None));
    Txn::new()
        .when(each().map(compare).collect::<Vec<_>>())
        .and_then(deletes.chain(heads.iter().cloned()).collect::<Vec<_>>())
        .or_else(heads)
}

/// Who is first after a [`leave`]: key and create revision, one per path that has anybody.
pub(super) fn heads_of(response: &TxnResponse) -> Vec<(Vec<u8>, i64)> {
    let head = |one: &TxnOpResponse| match one {
        TxnOpResponse::Get(get) => {
            get.kvs().first().map(|kv| (kv.key().to_vec(), kv.create_revision()))
        }
        _ => None,
    };
    response.op_responses().iter().filter_map(head).collect()
}

/// Deletes the key if it is still the one created at this revision.
pub(super) fn delete_if(key: &[u8], create_revision: i64) -> Txn {
    Txn::new()
        .when([Compare::create_revision(key, CompareOp::Equal, create_revision)])
        .and_then([TxnOp::delete(key, None)])
}

fn absent(key: &[u8]) -> Compare {
    Compare::create_revision(key, CompareOp::Equal, 0)
}

/// The contenders among what was read, first to last.
fn standings(layout: &Layout, seen: &etcd_client::GetResponse) -> Vec<Standing> {
    let entries = seen.kvs().iter().filter(|kv| layout.is_entry(kv.key())).map(Entry::from);
    let mut line: Vec<Standing> = entries.map(Standing::from).collect();
    // Sorted here: asking etcd to sort makes it read the whole range before it answers.
    line.sort_by(|a, b| {
        (a.entry.create_revision, &a.entry.key).cmp(&(b.entry.create_revision, &b.entry.key))
    });
    line
}

/// A whole queue, as one revision shows it.
pub(crate) struct Read {
    pub(crate) line: Vec<Standing>,
    /// How many may be inside; `None` where the path counts and no count stands.
    pub(crate) count: Option<u32>,
}

impl Read {
    /// Those who may be inside.
    pub(crate) fn inside(&self, layout: &Layout) -> Vec<&Standing> {
        admitted(layout.rule(), self.count.unwrap_or(0) as usize, self.line.iter())
    }
}

/// Everything in the queue, first to last, from one linearizable read.
pub(crate) async fn read_queue(core: &Core, op: &'static str, layout: &Layout) -> Result<Read> {
    let options = GetOptions::new().with_prefix();
    let until = core.operation_limit();
    let response = core.range(op, layout.watched(), Some(options), until).await?;
    let count = match layout.count_key() {
        None => Some(0),
        Some(key) => {
            let found = response.kvs().iter().find(|kv| kv.key() == key);
            found.and_then(|kv| decode_count(kv.value()))
        }
    };
    Ok(Read { line: standings(layout, &response), count })
}

/// Deletes a key that belongs to an attempt given up for lost, which closes that attempt.
pub(crate) async fn remove_stray(
    core: Arc<Core>,
    session: Arc<Session>,
    key: Vec<u8>,
    create_revision: i64,
) {
    let txn = delete_if(&key, create_revision);
    let until = core.operation_limit();
    match core.txn("stray removal", &key, Kind::Repeatable, txn, until).await {
        Ok(response) if response.succeeded() => {
            log::info!("removed `{}`, left by an unanswered request", core.shown(&key));
            session.close_open_attempt(&key);
        }
        // Somebody else was quicker, or it was another that had the name before.
        Ok(_) => {}
        // The revocation of its lease will take it.
        Err(error) => log::debug!("removing `{}`: {error}", core.shown(&key)),
    }
}
