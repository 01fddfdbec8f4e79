//! Transactions in our own types: compares, operations, and what came of them.

use super::core::Core;

/// A key with its value, as one revision of etcd shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyValue {
    /// The key, without the client's namespace.
    pub key: Vec<u8>,
    /// The value.
    pub value: Vec<u8>,
    /// The revision at which the key was created.
    pub create_revision: i64,
    /// The revision of its last change.
    pub mod_revision: i64,
    /// How often it was written since it was created.
    pub version: i64,
    /// The lease it hangs on, 0 for none.
    pub lease: i64,
}

impl KeyValue {
    pub(crate) fn from_etcd(core: &Core, kv: &etcd_client::KeyValue) -> KeyValue {
        KeyValue {
            key: core.logical(kv.key()).to_vec(),
            value: kv.value().to_vec(),
            create_revision: kv.create_revision(),
            mod_revision: kv.mod_revision(),
            version: kv.version(),
            lease: kv.lease(),
        }
    }

    /// The key as text, with replacement characters where it is none.
    pub fn key_text(&self) -> String {
        String::from_utf8_lossy(&self.key).into_owned()
    }

    /// The value as text, with replacement characters where it is none.
    pub fn value_text(&self) -> String {
        String::from_utf8_lossy(&self.value).into_owned()
    }
}

/// How a [`Compare`] relates the key's attribute to the given one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompareOp {
    /// Equal.
    Equal,
    /// Not equal.
    NotEqual,
    /// The key's is greater.
    Greater,
    /// The key's is less.
    Less,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Attribute {
    Version(i64),
    CreateRevision(i64),
    ModRevision(i64),
    Lease(i64),
    Value(Vec<u8>),
}

/// One condition of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compare {
    key: Vec<u8>,
    op: CompareOp,
    attribute: Attribute,
}

impl Compare {
    fn new(key: impl Into<Vec<u8>>, op: CompareOp, attribute: Attribute) -> Compare {
        Compare { key: key.into(), op, attribute }
    }

    /// Compares how often the key was written since its creation; 0 means that it is absent.
    pub fn version(key: impl Into<Vec<u8>>, op: CompareOp, version: i64) -> Compare {
        Compare::new(key, op, Attribute::Version(version))
    }

    /// Compares the revision of the key's creation; 0 means that it is absent.
    pub fn create_revision(key: impl Into<Vec<u8>>, op: CompareOp, revision: i64) -> Compare {
        Compare::new(key, op, Attribute::CreateRevision(revision))
    }

    /// Compares the revision of the key's last change.
    pub fn mod_revision(key: impl Into<Vec<u8>>, op: CompareOp, revision: i64) -> Compare {
        Compare::new(key, op, Attribute::ModRevision(revision))
    }

    /// Compares the lease that the key hangs on.
    pub fn lease(key: impl Into<Vec<u8>>, op: CompareOp, lease: i64) -> Compare {
        Compare::new(key, op, Attribute::Lease(lease))
    }

    /// Compares the value; false for an absent key.
    pub fn value(key: impl Into<Vec<u8>>, op: CompareOp, value: impl Into<Vec<u8>>) -> Compare {
        Compare::new(key, op, Attribute::Value(value.into()))
    }

    /// The key is absent.
    pub fn absent(key: impl Into<Vec<u8>>) -> Compare {
        Compare::create_revision(key, CompareOp::Equal, 0)
    }

    fn for_etcd(self, core: &Core) -> etcd_client::Compare {
        let key = core.physical(&self.key);
        let op = match self.op {
            CompareOp::Equal => etcd_client::CompareOp::Equal,
            CompareOp::NotEqual => etcd_client::CompareOp::NotEqual,
            CompareOp::Greater => etcd_client::CompareOp::Greater,
            CompareOp::Less => etcd_client::CompareOp::Less,
        };
        match self.attribute {
            Attribute::Version(v) => etcd_client::Compare::version(key, op, v),
            Attribute::CreateRevision(r) => etcd_client::Compare::create_revision(key, op, r),
            Attribute::ModRevision(r) => etcd_client::Compare::mod_revision(key, op, r),
            Attribute::Lease(l) => etcd_client::Compare::lease(key, op, l),
            Attribute::Value(v) => etcd_client::Compare::value(key, op, v),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum OpKind {
    Put { value: Vec<u8>, lease: i64 },
    Get { prefix: bool },
    Delete { prefix: bool },
    Nested(Box<Txn>),
}

/// One operation of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Op {
    key: Vec<u8>,
    kind: OpKind,
}

impl Op {
    /// Writes a key.
    pub fn put(key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>) -> Op {
        Op::put_with_lease(key, value, 0)
    }

    /// Writes a key that goes when `lease` ends.
    pub fn put_with_lease(key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>, lease: i64) -> Op {
        Op { key: key.into(), kind: OpKind::Put { value: value.into(), lease } }
    }

    /// Reads a key.
    pub fn get(key: impl Into<Vec<u8>>) -> Op {
        Op { key: key.into(), kind: OpKind::Get { prefix: false } }
    }

    /// Reads every key that begins with `prefix`.
    pub fn get_prefix(prefix: impl Into<Vec<u8>>) -> Op {
        Op { key: prefix.into(), kind: OpKind::Get { prefix: true } }
    }

    /// Deletes a key.
    pub fn delete(key: impl Into<Vec<u8>>) -> Op {
        Op { key: key.into(), kind: OpKind::Delete { prefix: false } }
    }

    /// Deletes every key that begins with `prefix`.
    pub fn delete_prefix(prefix: impl Into<Vec<u8>>) -> Op {
        Op { key: prefix.into(), kind: OpKind::Delete { prefix: true } }
    }

    /// A transaction within the transaction.
    pub fn txn(txn: Txn) -> Op {
        Op { key: Vec::new(), kind: OpKind::Nested(Box::new(txn)) }
    }

    fn for_etcd(self, core: &Core) -> etcd_client::TxnOp {
        use etcd_client::{DeleteOptions, GetOptions, PutOptions, TxnOp};
        let key = core.physical(&self.key);
        match self.kind {
            OpKind::Put { value, lease } => {
                let options = (lease != 0).then(|| PutOptions::new().with_lease(lease));
                TxnOp::put(key, value, options)
            }
            OpKind::Get { prefix } => {
                TxnOp::get(key, prefix.then(|| GetOptions::new().with_prefix()))
            }
            OpKind::Delete { prefix } => {
                TxnOp::delete(key, prefix.then(|| DeleteOptions::new().with_prefix()))
            }
            OpKind::Nested(txn) => TxnOp::txn(txn.for_etcd(core)),
        }
    }
}

/// A transaction: if every compare holds, the `then` operations, else the `or_else` ones; all at
/// one revision. etcd allows 128 operations, and one write per key.
///
/// # Example: write only while a key is absent
///
/// ```
/// use etcd_recipes::{Compare, Op, Txn};
///
/// let txn = Txn::new()
///     .when([Compare::absent("/jobs/7")])
///     .and_then([Op::put("/jobs/7", "claimed")])
///     .or_else([Op::get("/jobs/7")]);
/// # drop(txn);
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Txn {
    compares: Vec<Compare>,
    then: Vec<Op>,
    or_else: Vec<Op>,
}

impl Txn {
    /// An empty transaction.
    pub fn new() -> Txn {
        Txn::default()
    }

    /// Adds conditions.
    #[must_use]
    pub fn when(mut self, compares: impl IntoIterator<Item = Compare>) -> Txn {
        self.compares.extend(compares);
        self
    }

    /// Adds operations for when every condition holds.
    #[must_use]
    pub fn and_then(mut self, ops: impl IntoIterator<Item = Op>) -> Txn {
        self.then.extend(ops);
        self
    }

    /// Adds operations for when one does not.
    #[must_use]
    pub fn or_else(mut self, ops: impl IntoIterator<Item = Op>) -> Txn {
        self.or_else.extend(ops);
        self
    }

    pub(crate) fn for_etcd(self, core: &Core) -> etcd_client::Txn {
        let each = |ops: Vec<Op>| ops.into_iter().map(|op| op.for_etcd(core)).collect::<Vec<_>>();
        etcd_client::Txn::new()
            .when(self.compares.into_iter().map(|c| c.for_etcd(core)).collect::<Vec<_>>())
            .and_then(each(self.then))
            .or_else(each(self.or_else))
    }
}

/// What one operation answered.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum OpResult {
    /// A put was done.
    Put,
    /// The keys a get found.
    Get(Vec<KeyValue>),
    /// How many keys a delete removed.
    Delete(i64),
    /// What came of a nested transaction.
    Txn(TxnResult),
}

/// What came of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TxnResult {
    /// Whether every compare held.
    pub succeeded: bool,
    /// The revision of the store after it.
    pub revision: i64,
    /// The answers of the operations that ran, in order.
    pub results: Vec<OpResult>,
}

impl TxnResult {
    pub(crate) fn from_etcd(core: &Core, response: &etcd_client::TxnResponse) -> TxnResult {
        TxnResult::at(core, response, response.header().map_or(0, |h| h.revision()))
    }

    /// The answer of the one transaction inside this one.
    pub(crate) fn nested(self) -> Option<TxnResult> {
        self.results.into_iter().find_map(|result| match result {
            OpResult::Txn(inner) => Some(inner),
            _ => None,
        })
    }

    /// A nested transaction's answer has no header of its own.
    fn at(core: &Core, response: &etcd_client::TxnResponse, revision: i64) -> TxnResult {
        use etcd_client::TxnOpResponse;
        let results = response
            .op_responses()
            .iter()
            .map(|response| match response {
                TxnOpResponse::Put(_) => OpResult::Put,
                TxnOpResponse::Get(get) => OpResult::Get(
                    get.kvs().iter().map(|kv| KeyValue::from_etcd(core, kv)).collect(),
                ),
                TxnOpResponse::Delete(delete) => OpResult::Delete(delete.deleted()),
                TxnOpResponse::Txn(txn) => OpResult::Txn(TxnResult::at(core, txn, revision)),
            })
            .collect();
        TxnResult { succeeded: response.succeeded(), revision, results }
    }
}
