//! What of this library is alive in the process: for tests that nothing leaks.

use crate::whitebox;

/// Counts of the library's own objects in this process, over all clients.
///
/// A test that takes one before and one after, with everything dropped in between, sees whether
/// something stayed behind. Background work may hold on to things for a moment, so compare with
/// [`eventually`](super::eventually).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Alive {
    /// Clients whose shared part is still in memory.
    pub clients: usize,
    /// Threads that drive I/O.
    pub io_threads: usize,
    /// Threads that run listeners.
    pub healer_threads: usize,
    /// Exclusive leases.
    pub sessions: usize,
    /// Presence leases.
    pub presences: usize,
    /// Watches.
    pub watches: usize,
    /// Mirrored queues of contended paths.
    pub queues: usize,
    /// Exclusive holds.
    pub holds: usize,
    /// Cancel tokens.
    pub tokens: usize,
}

impl Alive {
    /// The counts now.
    pub fn now() -> Alive {
        Alive {
            clients: whitebox::CLIENTS.get(),
            io_threads: whitebox::IO_THREADS.get(),
            healer_threads: whitebox::HEALER_THREADS.get(),
            sessions: whitebox::SESSIONS.get(),
            presences: whitebox::PRESENCES.get(),
            watches: whitebox::WATCHES.get(),
            queues: whitebox::QUEUES.get(),
            holds: whitebox::HOLDS.get(),
            tokens: whitebox::TOKENS.get(),
        }
    }
}
