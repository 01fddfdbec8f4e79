//! Fencing: a resource outside of etcd refuses writes of holders that are no longer.
//!
//! # Why a holder's own question is not enough
//!
//! [`is_held`](crate::MutexGuard::is_held) is the truth at the moment of the call. The write
//! comes later: the thread may be stopped in between, the request may lie in a socket for a
//! minute, a virtual machine may be paused behind its clock's back. By then the hold may be lost
//! and a rival inside, and no question that the holder asked beforehand knows of it. Inside etcd
//! the guarded writes ([`put`](crate::MutexGuard::put), [`txn`](crate::MutexGuard::txn)) decide
//! together with the write. Outside of it, the resource has to decide, and what it decides by is
//! the [`FencingToken`]: a number that grows from exclusive hold to exclusive hold. A resource
//! that remembers the highest token it has seen, and refuses lower ones, refuses every holder
//! that was followed by another.
//!
//! The token travels with each write. Where the resource can compare by itself (an SQL row), that
//! is all there is to it. Where it cannot (a file), the process in front of it keeps a gate:
//! [`FenceGate`] in memory, [`StoredFenceGate`] in etcd.
//!
//! Only exclusive holds have a token: a mutex, a write lock, the locks of a set (one token per
//! path), a leadership. Permits and readers overlap, so their revisions order nothing, and the
//! types here do not take them.
//!
//! # What a gate does not cover
//!
//! - **A new holder that has not passed yet.** A gate learns of a holder by its first write. Until
//!   then the one before still passes. Let a new holder pass first thing, before it reads what it
//!   is going to change.
//! - **Ways around it.** Every write has to come through the gate, and one resource belongs to one
//!   lock: tokens of two paths say nothing of each other.
//! - **Check, then write.** A `pass` that says `true` is the truth of that moment, just as
//!   `is_held` is. [`FenceGate::guard`] and the SQL statement below make the two one.
//! - **What was written already.** A gate undoes nothing: a holder that was lost halfway leaves
//!   half of its work behind.
//! - **An etcd that lost its data,** or was restored from a backup: its revisions begin anew, and
//!   lower. A gate that kept its memory then refuses every new holder. It errs on the safe side,
//!   and somebody has to make it forget.
//!
//! # Example: a file
//!
//! The process that has the file takes lines from others, each with the token of its sender.
//!
//! ```
//! # use etcd_recipes::testing::EtcdServer;
//! use std::fs::OpenOptions;
//! use std::io::{self, Write};
//! use std::path::PathBuf;
//!
//! use etcd_recipes::{Client, FenceGate, FencingToken, Mutex};
//!
//! struct Ledger {
//!     file: PathBuf,
//!     gate: FenceGate,
//! }
//!
//! impl Ledger {
//!     /// `Ok(false)`: the sender is no longer the holder, nothing was written.
//!     fn append(&self, token: FencingToken, line: &str) -> io::Result<bool> {
//!         let written = self.gate.guard("ledger", token, || {
//!             let mut file = OpenOptions::new().create(true).append(true).open(&self.file)?;
//!             writeln!(file, "{line}")
//!         });
//!         Ok(written.transpose()?.is_some())
//!     }
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let etcd = EtcdServer::start()?;
//! # let endpoint = etcd.endpoint();
//! # let file = std::env::temp_dir().join(format!("ledger-{}", std::process::id()));
//! let ledger = Ledger { file, gate: FenceGate::new() };
//! let client = Client::connect([endpoint])?;
//! let mutex = Mutex::new(&client, "/locks/ledger")?;
//!
//! let guard = mutex.lock()?;
//! let before = FencingToken::from(&guard);
//! assert!(ledger.append(before, "one")?);
//! assert!(ledger.append(before, "two")?, "a hold may write more than once");
//! assert!(guard.unlock());
//!
//! let guard = mutex.lock()?;
//! assert!(ledger.append(FencingToken::from(&guard), "three")?);
//! assert!(!ledger.append(before, "late")?, "refused, whatever its sender believes");
//! assert_eq!(std::fs::read_to_string(&ledger.file)?, "one\ntwo\nthree\n");
//! # std::fs::remove_file(&ledger.file)?;
//! # Ok(()) }
//! ```
//!
//! # Example: an SQL row
//!
//! The row itself remembers, in a column `fence BIGINT NOT NULL DEFAULT 0`, and the database
//! decides in the same statement that writes:
//!
//! ```sql
//! UPDATE orders SET state = ?, fence = ? WHERE id = ? AND fence <= ?
//! ```
//!
//! Both `fence` parameters are the token. One row changed: written. None: fenced off, or there is
//! no such row. With `<=` a hold may write the row as often as it likes. With `<` it may write it
//! once: so a statement whose answer was lost can be sent again, and is not applied twice. The
//! column must not be `NULL`, which is never lower than anything.
//!
//! ```
//! use etcd_recipes::FencingToken;
//!
//! struct Row {
//!     state: &'static str,
//!     fence: i64,
//! }
//!
//! impl Row {
//!     /// What the database does; returns how many rows it changed.
//!     fn update(&mut self, state: &'static str, token: FencingToken) -> usize {
//!         if self.fence > token.to_wire() {
//!             return 0;
//!         }
//!         (self.state, self.fence) = (state, token.to_wire());
//!         1
//!     }
//! }
//!
//! let mut row = Row { state: "new", fence: 0 };
//! let (first, second) = (FencingToken::from_wire(17), FencingToken::from_wire(23));
//! assert_eq!(row.update("paid", first), 1);
//! assert_eq!(row.update("packed", second), 1);
//! assert_eq!(row.update("cancelled", first), 0, "a late write");
//! assert_eq!(row.state, "packed");
//! ```

mod memory;
mod stored;
mod token;

pub use memory::FenceGate;
pub use stored::StoredFenceGate;
pub use token::FencingToken;
