//! The number that orders exclusive holds, as a type that nothing else turns into.

use std::fmt;

use crate::election::LeadershipTerm;
use crate::lock::{Hold, MutexGuard, OwnedMutexGuard, OwnedRwLockWriteGuard, RwLockWriteGuard};

/// The number of an exclusive hold: higher than that of every hold before it on the same path,
/// across processes, restarts and languages, as long as etcd keeps its data.
///
/// It comes from a guard, a [`Hold`] or a [`LeadershipTerm`], also after that hold was lost: it is
/// a number, and says nothing of whether the hold still stands. A
/// [`MultiLockGuard`](crate::MultiLockGuard) has one per path, by its
/// [`hold`](crate::MultiLockGuard::hold). On the far side of a wire it is made of the number that
/// a holder has sent, with [`from_wire`](FencingToken::from_wire).
///
/// # Example: the tokens of two holds
///
/// ```
/// # use etcd_recipes::testing::EtcdServer;
/// use etcd_recipes::{Client, FencingToken, Mutex};
///
/// # fn main() -> etcd_recipes::Result<()> {
/// # let etcd = EtcdServer::start()?;
/// # let client = Client::connect([etcd.endpoint()])?;
/// let mutex = Mutex::new(&client, "/locks/orders")?;
/// let guard = mutex.lock()?;
/// let first = FencingToken::from(&guard);
/// assert!(guard.unlock());
/// let guard = mutex.lock()?;
/// assert!(FencingToken::from(&guard) > first);
/// # Ok(()) }
/// ```
///
/// # Example: holds that others share have none
///
/// A permit:
///
/// ```compile_fail,E0277
/// fn token(permit: &etcd_recipes::Permit) -> etcd_recipes::FencingToken {
///     permit.into()
/// }
/// ```
///
/// A read guard of a thread, one that can move, and a view of either:
///
/// ```compile_fail,E0277
/// fn token(guard: &etcd_recipes::RwLockReadGuard<'_>) -> etcd_recipes::FencingToken {
///     guard.into()
/// }
/// ```
///
/// ```compile_fail,E0277
/// fn token(guard: &etcd_recipes::OwnedRwLockReadGuard) -> etcd_recipes::FencingToken {
///     guard.into()
/// }
/// ```
///
/// ```compile_fail,E0277
/// fn token(hold: &etcd_recipes::SharedHold) -> etcd_recipes::FencingToken {
///     hold.into()
/// }
/// ```
///
/// A bare number, which has to be named as what it is:
///
/// ```compile_fail,E0277
/// fn token(number: i64) -> etcd_recipes::FencingToken {
///     number.into()
/// }
/// ```
///
/// The same with an exclusive hold compiles:
///
/// ```
/// fn token(hold: &etcd_recipes::Hold) -> etcd_recipes::FencingToken {
///     hold.into()
/// }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FencingToken(i64);

impl FencingToken {
    /// The token that an exclusive holder has sent as a number: for the process in front of a
    /// resource, which has no guard of its own. Nothing can check where the number comes from.
    /// One below 1 is no holder's; it is taken, and passes no gate.
    pub const fn from_wire(number: i64) -> FencingToken {
        FencingToken(number)
    }

    /// The number, to be sent with a write or compared by a database. Always positive for a token
    /// of a hold.
    pub const fn to_wire(self) -> i64 {
        self.0
    }

    /// Whether a hold may have this number: revisions of etcd begin at 1.
    pub(super) fn is_possible(self) -> bool {
        self.0 > 0
    }

    /// Bytes whose order is that of the numbers, for all that are possible.
    pub(super) fn to_bytes(self) -> [u8; 8] {
        self.0.to_be_bytes()
    }

    /// `None` for bytes that no possible token has.
    pub(super) fn from_bytes(bytes: &[u8]) -> Option<FencingToken> {
        let token = FencingToken(i64::from_be_bytes(bytes.try_into().ok()?));
        token.is_possible().then_some(token)
    }
}

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

macro_rules! token_of {
    ($($exclusive:ty),* $(,)?) => {
        $(impl From<&$exclusive> for FencingToken {
            fn from(hold: &$exclusive) -> FencingToken {
                FencingToken(hold.fencing_token())
            }
        })*
    };
}

token_of!(
    MutexGuard<'_>,
    OwnedMutexGuard,
    RwLockWriteGuard<'_>,
    OwnedRwLockWriteGuard,
    Hold,
    LeadershipTerm,
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_ordered_as_the_numbers_are() {
        let numbers = [1, 2, 255, 256, 65_536, 1 << 40, i64::MAX];
        for pair in numbers.windows(2) {
            let (low, high) = (FencingToken(pair[0]), FencingToken(pair[1]));
            assert!(low < high && low.to_bytes() < high.to_bytes());
            assert_eq!(FencingToken::from_bytes(&low.to_bytes()), Some(low));
        }
    }

    #[test]
    fn bytes_of_no_token_are_none() {
        for bytes in [&b""[..], b"text", &[0; 8], &[0xff; 8], &[0, 0, 0, 0, 0, 0, 0, 1, 0]] {
            assert_eq!(FencingToken::from_bytes(bytes), None, "{bytes:?}");
        }
    }
}
