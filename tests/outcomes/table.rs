//! The words of the table: its columns, and what a cell may say.

use std::time::Duration;

/// The slack that every time limit of the table has.
pub(crate) const S: Duration = Duration::from_secs(1);

/// The operation timeout of the client under test.
pub(crate) const OP: Duration = Duration::from_secs(2);

/// The caller's own limit, in calls that take one.
pub(crate) const L: Duration = Duration::from_secs(1);

/// The TTL of everything on stage.
pub(crate) const TTL: Duration = Duration::from_secs(2);

/// A column: what happens to the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Situation {
    /// etcd stops answering, with every connection up, before the call.
    FrozenBefore,
    /// The same while the call waits for others.
    FrozenDuring,
    /// The same for half the operation timeout; then what the call waits for happens.
    FrozenBriefly,
    /// etcd is gone before the call, and connections are refused.
    KilledBefore,
    /// The call's first request is applied and its answer is lost with the connection.
    ReplyLost,
    /// The key of the call's object, or that which is waited for, is deleted by somebody else.
    KeyDeleted,
    /// The lease of that key is revoked by somebody else.
    LeaseRevoked,
    /// The calling thread's scope was cancelled before the call.
    CancelledBefore,
    /// It is cancelled while the call waits: for others, or else for a frozen etcd.
    CancelledDuring,
    ClientClosedBefore,
    ClientClosedDuring,
    RecipeClosedBefore,
    RecipeClosedDuring,
}

use Situation::*;

pub(crate) const SITUATIONS: [Situation; 13] = [
    FrozenBefore,
    FrozenDuring,
    FrozenBriefly,
    KilledBefore,
    ReplyLost,
    KeyDeleted,
    LeaseRevoked,
    CancelledBefore,
    CancelledDuring,
    ClientClosedBefore,
    ClientClosedDuring,
    RecipeClosedBefore,
    RecipeClosedDuring,
];

/// When a call may return, counted from its start or, where something happens to it later, from
/// then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Window {
    pub(crate) from: Duration,
    pub(crate) to: Duration,
}

const fn window(from_millis: u64, to_millis: u64) -> Window {
    Window {
        from: Duration::from_millis(from_millis),
        to: Duration::from_millis(to_millis + S.as_millis() as u64),
    }
}

/// No waiting at all, or for one answer.
pub(crate) const AT_ONCE: Window = window(0, 0);

/// Told to stop: 100 ms, and what a loaded machine adds to it.
pub(crate) const PROMPT: Window = Window { from: Duration::ZERO, to: Duration::from_millis(600) };

/// After the operation timeout.
pub(crate) const AFTER_OP: Window = window(1_950, 2_000);

/// After the operation timeout, counted from the last answer. That was before the silence began:
/// a renewal's third of the TTL at most.
pub(crate) const AFTER_SILENCE: Window = window(1_200, 2_600);

/// Before the operation timeout, or with it.
pub(crate) const WITHIN_OP: Window = window(0, 2_000);

/// At the caller's own limit: not before, 0.2 s later at most, and half the slack, so that it is
/// not mistaken for the operation timeout.
pub(crate) const AT_LIMIT: Window =
    Window { from: Duration::from_millis(990), to: Duration::from_millis(1_700) };

/// At the caller's limit or before.
pub(crate) const WITHIN_LIMIT: Window = window(0, 1_200);

/// A release or a close: 2 s at most, and half a second for threads to end.
pub(crate) const BUDGET: Window = window(0, 2_500);

/// `AT_LIMIT` is counted from the disturbance, which comes at some time before the limit.
pub(crate) const AT_LIMIT_FROM_DISTURBANCE: Window = window(0, 1_200);

/// What stands in etcd afterwards. Counted from the return of the call or, where etcd was away,
/// from when it answers again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Left {
    /// The table says nothing.
    Any,
    /// One key of ours.
    Key,
    /// Two keys of ours.
    Pair,
    /// No key of ours after S.
    NoKey,
    /// No key of ours after TTL + S.
    NoKeyAtTtl,
    /// No key of ours after S, and no lease after TTL + S, with the client still open.
    Nothing,
    /// No key and no lease of ours after TTL + S.
    NothingAtTtl,
    /// The guarded write was not done.
    NotWritten,
}

/// What a cell says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cell {
    /// The situation cannot come about for this call.
    Na(&'static str),
    Says {
        value: &'static str,
        when: Window,
        left: Left,
    },
}

pub(crate) const fn na(reason: &'static str) -> Cell {
    Cell::Na(reason)
}

pub(crate) const fn says(value: &'static str, when: Window, left: Left) -> Cell {
    Cell::Says { value, when, left }
}

/// One row's cells, by column, so that none can be forgotten.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cells {
    pub(crate) frozen_before: Cell,
    pub(crate) frozen_during: Cell,
    pub(crate) frozen_briefly: Cell,
    pub(crate) killed_before: Cell,
    pub(crate) reply_lost: Cell,
    pub(crate) key_deleted: Cell,
    pub(crate) lease_revoked: Cell,
    pub(crate) cancelled_before: Cell,
    pub(crate) cancelled_during: Cell,
    pub(crate) client_closed_before: Cell,
    pub(crate) client_closed_during: Cell,
    pub(crate) recipe_closed_before: Cell,
    pub(crate) recipe_closed_during: Cell,
}

impl Cells {
    /// The cells as `change` leaves them.
    pub(crate) fn map(self, change: impl Fn(Situation, Cell) -> Cell) -> Cells {
        let cell = |situation| change(situation, self.in_column(situation));
        Cells {
            frozen_before: cell(FrozenBefore),
            frozen_during: cell(FrozenDuring),
            frozen_briefly: cell(FrozenBriefly),
            killed_before: cell(KilledBefore),
            reply_lost: cell(ReplyLost),
            key_deleted: cell(KeyDeleted),
            lease_revoked: cell(LeaseRevoked),
            cancelled_before: cell(CancelledBefore),
            cancelled_during: cell(CancelledDuring),
            client_closed_before: cell(ClientClosedBefore),
            client_closed_during: cell(ClientClosedDuring),
            recipe_closed_before: cell(RecipeClosedBefore),
            recipe_closed_during: cell(RecipeClosedDuring),
        }
    }

    /// These columns alone; what the others would show is shown by another row, as `reason` says.
    pub(crate) fn only(self, columns: &[Situation], reason: &'static str) -> Cells {
        self.map(|situation, cell| match cell {
            Cell::Says { .. } if !columns.contains(&situation) => Cell::Na(reason),
            cell => cell,
        })
    }

    /// For a call that has two keys where another has one.
    pub(crate) fn with_two_keys(self) -> Cells {
        self.map(|_, cell| match cell {
            Cell::Says { value, when, left: Left::Key } => {
                Cell::Says { value, when, left: Left::Pair }
            }
            cell => cell,
        })
    }

    /// A drop does the same as the call and does not say how it went.
    pub(crate) fn dropped(self) -> Cells {
        self.map(|_, cell| match cell {
            Cell::Says { when, left, .. } => Cell::Says { value: "dropped", when, left },
            na => na,
        })
    }

    pub(crate) fn in_column(&self, situation: Situation) -> Cell {
        match situation {
            FrozenBefore => self.frozen_before,
            FrozenDuring => self.frozen_during,
            FrozenBriefly => self.frozen_briefly,
            KilledBefore => self.killed_before,
            ReplyLost => self.reply_lost,
            KeyDeleted => self.key_deleted,
            LeaseRevoked => self.lease_revoked,
            CancelledBefore => self.cancelled_before,
            CancelledDuring => self.cancelled_during,
            ClientClosedBefore => self.client_closed_before,
            ClientClosedDuring => self.client_closed_during,
            RecipeClosedBefore => self.recipe_closed_before,
            RecipeClosedDuring => self.recipe_closed_during,
        }
    }
}
