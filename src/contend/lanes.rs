//! What one acquire asks for, path by path, and its keys while they are on their way.

use std::sync::Arc;

use super::Contender;
use super::identity::ContenderMode;
use super::leave::Leaver;
use super::requests::Part;
use crate::error::Error;
use crate::lease::{Session, Ticket};

/// What is asked for on one path.
#[derive(Clone)]
pub(crate) struct Wish {
    pub(crate) contender: Arc<Contender>,
    pub(crate) mode: ContenderMode,
    /// How many keys: one, save for several permits at once.
    pub(crate) keys: usize,
}

/// One wish with its place in a session: a ticket per key.
pub(super) struct Lane {
    pub(super) wish: Wish,
    /// Never empty.
    pub(super) tickets: Vec<Ticket>,
}

impl Lane {
    fn part(&self) -> Part<'_> {
        let contender = &self.wish.contender;
        Part {
            layout: &contender.layout,
            mode: self.wish.mode,
            keys: self.tickets.iter().map(Ticket::key).collect(),
            value: contender.identity(self.wish.mode),
            lease: self.tickets[0].session().lease(),
            count: contender.count.as_ref().map_or(0, |count| count.current()),
        }
    }
}

/// A try's keys. They are put, looked at and taken away together.
pub(super) struct Lanes(pub(super) Vec<Lane>);

impl Lanes {
    pub(super) fn parts(&self) -> Vec<Part<'_>> {
        self.0.iter().map(Lane::part).collect()
    }

    /// A key that stands for all of them.
    pub(super) fn first_key(&self) -> &[u8] {
        self.first().key()
    }

    pub(super) fn first(&self) -> &Ticket {
        &self.0[0].tickets[0]
    }

    pub(super) fn tickets(&self) -> impl Iterator<Item = &Ticket> {
        self.0.iter().flat_map(|lane| &lane.tickets)
    }

    /// Why the key with this number could never be let in by such a count.
    pub(super) fn misfit(&self, at: usize, count: Option<usize>) -> Option<Error> {
        let mut lanes = self.0.iter().flat_map(|lane| lane.tickets.iter().map(move |_| lane));
        let Wish { contender, keys, .. } = &lanes.nth(at)?.wish;
        contender.check_fit(*keys, count?).err()
    }

    /// Each session once.
    pub(super) fn sessions(&self) -> Vec<Arc<Session>> {
        let mut sessions: Vec<Arc<Session>> = Vec::new();
        for session in self.tickets().map(Ticket::session) {
            if !sessions.iter().any(|known| Arc::ptr_eq(known, session)) {
                sessions.push(session.clone());
            }
        }
        sessions
    }

    /// Nothing of this try stands in etcd, nor can it come to.
    pub(super) fn settle(self) {
        self.0.into_iter().flat_map(|lane| lane.tickets).for_each(Ticket::settle);
    }

    /// As [`settle`](Lanes::settle), and no request of this try is under way any more.
    pub(super) fn free(self) {
        self.0.into_iter().flat_map(|lane| lane.tickets).for_each(Ticket::free);
    }

    /// The try may still be applied.
    pub(super) fn leave_open(self) {
        for lane in self.0 {
            for ticket in lane.tickets {
                lane.wish.contender.leave_open(ticket);
            }
        }
    }

    pub(super) fn into_leavers(self) -> Vec<Leaver> {
        let leaver = |lane: Lane| Leaver { contender: lane.wish.contender, tickets: lane.tickets };
        self.0.into_iter().map(leaver).collect()
    }
}
