//! The gate that remembers in etcd.

use std::fmt;

use etcd_client::{Compare, CompareOp, Txn, TxnOp, TxnOpResponse, TxnResponse};

use super::token::FencingToken;
use crate::client::call::Kind;
use crate::client::core::Core;
use crate::client::{Client, identity};
use crate::error::{Error, ErrorKind, Result};

/// Remembers the highest token of each resource in etcd, at `path/resource`, and refuses lower
/// ones: for a resource whose gate has to outlive the process in front of it, or that has several
/// of them.
///
/// Cheap to clone, usable from any thread; any number of them may stand on one path. The keys hang
/// on no lease and stay until somebody deletes them.
///
/// **`pass` and the write that follows are two steps**, and a higher token may pass in between. So
/// a write is covered only where one process at a time writes to the resource: it asks inside of
/// [`FenceGate::guard`](crate::FenceGate::guard), which holds the others back until the write is
/// done. Without that, a stored gate makes a late write unlikely, not impossible.
///
/// # Example: a gate in front of a file that outlives its process
///
/// ```
/// # use etcd_recipes::testing::EtcdServer;
/// use etcd_recipes::{Client, FenceGate, FencingToken, Result, StoredFenceGate};
///
/// /// `None`: refused.
/// fn write<R>(
///     near: &FenceGate,
///     stored: &StoredFenceGate,
///     token: FencingToken,
///     write: impl FnOnce() -> R,
/// ) -> Result<Option<R>> {
///     let asked = near.guard("ledger", token, || {
///         Ok(if stored.pass("ledger", token)? { Some(write()) } else { None })
///     });
///     asked.unwrap_or(Ok(None))
/// }
///
/// # fn main() -> Result<()> {
/// # let etcd = EtcdServer::start()?;
/// # let endpoint = etcd.endpoint();
/// let client = Client::connect([endpoint])?;
/// let stored = StoredFenceGate::new(&client, "/fences")?;
/// // As they came over the wire.
/// let (old, new) = (FencingToken::from_wire(17), FencingToken::from_wire(23));
/// assert!(write(&FenceGate::new(), &stored, new, || ())?.is_some());
///
/// // The process was started anew, and the first to come is a holder of yore.
/// assert!(write(&FenceGate::new(), &stored, old, || ())?.is_none());
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct StoredFenceGate {
    client: Client,
    path: String,
}

impl fmt::Debug for StoredFenceGate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoredFenceGate").field("path", &self.path).finish_non_exhaustive()
    }
}

impl StoredFenceGate {
    /// A gate whose memory stands below `path`. No I/O.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` naming the path: empty, with `//`, a trailing `/` or a NUL. `Closed`,
    /// `Forked`.
    pub fn new(client: &Client, path: impl Into<String>) -> Result<StoredFenceGate> {
        let path = identity::checked_path(path.into())?;
        client.check_usable()?;
        Ok(StoredFenceGate { client: client.clone(), path })
    }

    /// Whether the token is at least as high as every one that passed here before, on this
    /// resource and from any process. Equal passes, since one hold writes more than once. One
    /// request, decided inside etcd; it is repeated if its answer was lost, which does no harm.
    ///
    /// An error leaves it open whether etcd knows the token by now. If it does, only lower ones
    /// are refused for it.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a resource with an empty name or a NUL; `ForeignKey` if what stands
    /// at `path/resource` is no token, naming the key; `Unreachable` after the operation timeout,
    /// `PermissionDenied`, `AuthenticationFailed`, `Interrupted`, `Closed`, `Forked`.
    pub fn pass(&self, resource: &str, token: impl Into<FencingToken>) -> Result<bool> {
        let (core, key) = (self.client.core().clone(), self.key(resource)?);
        let token = token.into();
        if !token.is_possible() {
            core.check_usable()?;
            return Ok(false);
        }
        self.client.core().block_on("fence.pass", None, async move {
            let (txn, until) = (raise(&key, token), core.operation_limit());
            let answer = core.txn("pass", &key, Kind::Repeatable, txn, until).await?;
            match standing(&core, &key, &answer)? {
                Some(highest) => Ok(highest <= token),
                None => Ok(true),
            }
        })
    }

    /// The highest token that has passed; `None` if none has.
    ///
    /// # Errors
    ///
    /// As [`pass`](StoredFenceGate::pass).
    pub fn highest(&self, resource: &str) -> Result<Option<FencingToken>> {
        let (core, key) = (self.client.core().clone(), self.key(resource)?);
        self.client.core().block_on("fence.highest", None, async move {
            let answer = core.range("highest", &key, None, core.operation_limit()).await?;
            answer.kvs().first().map(|kv| decode(&core, &key, kv.value())).transpose()
        })
    }

    /// Two names never have one key: what follows the path is the name as it is.
    fn key(&self, resource: &str) -> Result<Vec<u8>> {
        if resource.is_empty() || resource.contains('\0') {
            return Err(Error::invalid(format!(
                "resource `{}`: it must not be empty or contain NUL",
                resource.escape_debug()
            )));
        }
        Ok(self.client.core().physical(format!("{}/{resource}", self.path).as_bytes()))
    }
}

/// Writes the token if it is higher than what stands at the key; else, if nothing stands there,
/// which is neither lower nor higher to etcd; else reads.
fn raise(key: &[u8], token: FencingToken) -> Txn {
    let put = || TxnOp::put(key, token.to_bytes(), None);
    // Nothing that is no token is written over: an empty value is lower than any.
    let is_token = Compare::value(key, CompareOp::Greater, [0; 8]);
    let is_lower = Compare::value(key, CompareOp::Less, token.to_bytes());
    let absent = Compare::create_revision(key, CompareOp::Equal, 0);
    let otherwise = Txn::new().when([absent]).and_then([put()]).or_else([TxnOp::get(key, None)]);
    Txn::new().when([is_token, is_lower]).and_then([put()]).or_else([TxnOp::txn(otherwise)])
}

/// The token that stood in the way of writing, if one did.
fn standing(core: &Core, key: &[u8], answer: &TxnResponse) -> Result<Option<FencingToken>> {
    for response in answer.op_responses() {
        match response {
            TxnOpResponse::Txn(inner) => return standing(core, key, &inner),
            TxnOpResponse::Get(found) => {
                return found.kvs().first().map(|kv| decode(core, key, kv.value())).transpose();
            }
            TxnOpResponse::Put(_) | TxnOpResponse::Delete(_) => {}
        }
    }
    Ok(None)
}

fn decode(core: &Core, key: &[u8], value: &[u8]) -> Result<FencingToken> {
    FencingToken::from_bytes(value).ok_or_else(|| {
        let key = core.shown(key);
        Error::on_key(
            ErrorKind::ForeignKey,
            format!("what stands at `{key}` is no fencing token"),
            &key,
        )
    })
}
