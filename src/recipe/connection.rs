//! The state a recipe reports about its connection to etcd, as a pure machine.

/// How a recipe stands with etcd, as its own watch and lease tell it.
///
/// # Example: reacting to a state
///
/// ```
/// use etcd_recipes::ConnectionState;
///
/// fn may_trust_local_data(state: ConnectionState) -> bool {
///     matches!(state, ConnectionState::Connected | ConnectionState::Reconnected)
/// }
/// assert!(!may_trust_local_data(ConnectionState::Lost));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ConnectionState {
    /// Nothing has gone wrong since the recipe was made.
    Connected,
    /// The watch or the lease is interrupted; nothing is lost yet.
    Suspended,
    /// The watch or the lease works again after an interruption or a loss.
    Reconnected,
    /// What the recipe held or watched is lost.
    Lost,
}

/// What a recipe's watch or lease reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Signal {
    Suspended,
    Restored,
    Lost,
}

/// The state that follows, or `None` where the signal changes nothing.
pub(crate) fn step(state: ConnectionState, signal: Signal) -> Option<ConnectionState> {
    use ConnectionState::{Connected, Lost, Reconnected, Suspended};
    match (state, signal) {
        (Connected | Reconnected, Signal::Suspended) => Some(Suspended),
        (Connected | Reconnected | Suspended, Signal::Lost) => Some(Lost),
        (Suspended | Lost, Signal::Restored) => Some(Reconnected),
        (Suspended | Lost, Signal::Suspended)
        | (Lost, Signal::Lost)
        | (Connected | Reconnected, Signal::Restored) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::ConnectionState::{Connected, Lost, Reconnected, Suspended};
    use super::*;

    #[test]
    fn every_pair_of_state_and_signal() {
        let table = [
            (Connected, [Some(Suspended), None, Some(Lost)]),
            (Suspended, [None, Some(Reconnected), Some(Lost)]),
            (Reconnected, [Some(Suspended), None, Some(Lost)]),
            (Lost, [None, Some(Reconnected), None]),
        ];
        for (state, expected) in table {
            let signals = [Signal::Suspended, Signal::Restored, Signal::Lost];
            assert_eq!(signals.map(|signal| step(state, signal)), expected, "from {state:?}");
        }
    }
}
