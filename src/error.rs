//! The one error type: opaque, cheap to clone, told apart by its [`ErrorKind`].

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

/// What every fallible call of this library returns.
pub type Result<T> = std::result::Result<T, Error>;

/// What went wrong, as far as a caller can act on it.
///
/// The list grows with the library, so a `match` needs a wildcard arm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An argument is wrong; the message names the value. Found before any I/O.
    InvalidArgument,
    /// No member of etcd answered within the operation timeout. Nothing this call wrote stands.
    Unreachable,
    /// A limit of the caller's own passed (`CancelToken::wait_for` and kin return a `bool` instead).
    TimedOut,
    /// etcd refused the user name or the password.
    AuthenticationFailed,
    /// The user lacks a permission; [`Error::key`] names the key.
    PermissionDenied,
    /// The client or the recipe was closed.
    Closed,
    /// The calling thread is inside the scope of a cancelled [`CancelToken`](crate::CancelToken).
    Interrupted,
    /// A write was sent and its answer never came: it may or may not have been applied.
    OutcomeUnknown,
    /// The hold this call stands on was lost earlier.
    Lost,
    /// The lease this call stands on is gone from etcd.
    LeaseGone,
    /// The revision asked for has been compacted away.
    Compacted,
    /// The endpoints lead to another cluster than the one this client first saw.
    WrongCluster,
    /// The process was forked; this client belongs to the parent.
    Forked,
    /// A key under the path would block for ever: it has no lease, or belongs to another recipe.
    /// [`Error::key`] names it.
    ForeignKey,
    /// Waiting would never end: a thread that reads asked to write, or one that holds a lock asked
    /// for it by another way.
    WouldDeadlock,
    /// A semaphore was made for another number of permits than its path has.
    PermitMismatch {
        /// What this semaphore was made for.
        expected: u32,
        /// What stands in etcd.
        found: u32,
    },
    /// etcd refused the request for a reason of its own; the message is etcd's.
    Rejected,
    /// The holder whose release was asked for has not taken the request up in time.
    NotAcknowledged,
    /// The owner's `establish` hook said no, failed or panicked.
    NotEstablished,
    /// A [`Codec`](crate::Codec) could not encode a value, or decode what it found.
    Codec,
    /// The user's callback of a leadership returned an error; recorded, never thrown.
    CallbackFailed,
    /// A listener of the user's panicked; recorded, never thrown.
    ListenerPanicked,
    /// Closing could not confirm that everything was removed; etcd's TTL finishes it.
    CleanupUnconfirmed,
    /// A process of the test kit could not be started or steered.
    Testing,
    /// A fault of this library's own.
    Internal,
}

/// Why a call failed.
///
/// One pointer wide and cloneable, since one loss may have to be told to several waiters. Ask
/// [`kind`](Error::kind) or one of the predicates; the text is for people.
///
/// # Example: telling failures apart
///
/// ```
/// use etcd_recipes::{Client, ErrorKind};
///
/// let error = Client::connect(["http://"]).expect_err("a URL without a host");
/// assert_eq!(error.kind(), ErrorKind::InvalidArgument);
/// assert!(error.to_string().contains("http://"));
/// ```
#[derive(Clone, thiserror::Error)]
#[error("{0}")]
pub struct Error(Arc<Inner>);

struct Inner {
    kind: ErrorKind,
    message: String,
    key: Option<String>,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

impl fmt::Display for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        if let Some(source) = &self.source {
            write!(f, ": {source}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Error({:?}: {})", self.0.kind, self.0)
    }
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Error {
        Error(Arc::new(Inner { kind, message: message.into(), key: None, source: None }))
    }

    pub(crate) fn with_source(
        kind: ErrorKind,
        message: impl Into<String>,
        source: impl Into<Box<dyn StdError + Send + Sync>>,
    ) -> Error {
        Error(Arc::new(Inner {
            kind,
            message: message.into(),
            key: None,
            source: Some(source.into()),
        }))
    }

    pub(crate) fn on_key(kind: ErrorKind, message: impl Into<String>, key: &str) -> Error {
        Error(Arc::new(Inner {
            kind,
            message: message.into(),
            key: Some(key.to_owned()),
            source: None,
        }))
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::InvalidArgument, message)
    }

    pub(crate) fn closed(who: &str) -> Error {
        Error::new(ErrorKind::Closed, format!("{who} is closed"))
    }

    pub(crate) fn interrupted(op: &str) -> Error {
        Error::new(ErrorKind::Interrupted, format!("{op} was interrupted by a cancelled scope"))
    }

    pub(crate) fn internal(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::Internal, message)
    }

    /// What went wrong, for a `match`.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The key the failure is about, where there is one (permission, foreign key).
    pub fn key(&self) -> Option<&str> {
        self.0.key.as_deref()
    }

    /// A limit of the caller's passed.
    pub fn is_timeout(&self) -> bool {
        self.kind() == ErrorKind::TimedOut
    }

    /// No member of etcd answered in time.
    pub fn is_unreachable(&self) -> bool {
        self.kind() == ErrorKind::Unreachable
    }

    /// The hold was lost.
    pub fn is_lost(&self) -> bool {
        self.kind() == ErrorKind::Lost
    }

    /// The client or recipe was closed.
    pub fn is_closed(&self) -> bool {
        self.kind() == ErrorKind::Closed
    }

    /// The thread's scope was cancelled.
    pub fn is_interrupted(&self) -> bool {
        self.kind() == ErrorKind::Interrupted
    }

    /// The write may or may not have been applied.
    pub fn is_ambiguous(&self) -> bool {
        self.kind() == ErrorKind::OutcomeUnknown
    }

    /// The user may not touch the key.
    pub fn is_permission(&self) -> bool {
        self.kind() == ErrorKind::PermissionDenied
    }

    /// An argument was wrong.
    pub fn is_invalid_argument(&self) -> bool {
        self.kind() == ErrorKind::InvalidArgument
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_one_pointer_and_says_its_source() {
        assert_eq!(size_of::<Error>(), size_of::<usize>());
        let error = Error::with_source(
            ErrorKind::Unreachable,
            "no answer from 127.0.0.1:1",
            std::io::Error::other("refused"),
        );
        assert_eq!(error.to_string(), "no answer from 127.0.0.1:1: refused");
        assert!(error.clone().is_unreachable());
    }
}
