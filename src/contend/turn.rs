//! The wait in the queue, until every key may be inside, a key is gone, or the caller has to go.

use std::future::poll_fn;
use std::task::Poll;
use std::time::Duration;

use super::acquire::{Acquire, Leaving, any_cancelled};
use super::ages::LASTING;
use super::inbox::{Inbox, Reachable};
use super::lanes::{Lane, Lanes};
use super::queue::{Attached, Verdict, Waiting};
use crate::clock::Instant;
use crate::error::Result;
use crate::lease::Ticket;
use crate::race::{Either, race};

/// How often a waiter looks whether etcd is still there.
const LOOK_AROUND: Duration = Duration::from_millis(500);

/// How a wait in the queue ended.
pub(super) enum Turn {
    Ours(Lanes),
    Again,
    Out(Leaving),
}

impl Acquire {
    /// Waits until every key may be inside.
    pub(super) async fn wait_for_turn(&mut self, lanes: Lanes, created: i64) -> Result<Turn> {
        let core = self.lead().core.clone();
        let attached: Vec<_> = lanes
            .0
            .iter()
            .map(|lane| core.queues.attach(&core, &lane.wish.contender.layout))
            .collect();
        let stay = |(attached, lane): (&Attached, &Lane)| {
            lane.wish.contender.stay(attached.queue(), lane.tickets[0].key(), created)
        };
        let _stays: Vec<_> = attached.iter().zip(&lanes.0).map(stay).collect();
        let sessions = lanes.sessions();
        let _reachable: Vec<_> =
            sessions.iter().map(|session| Reachable::new(session, created)).collect();
        let begun = core.clock.now();
        let mut places: Vec<_> = attached
            .iter()
            .zip(&lanes.0)
            .flat_map(|(attached, lane)| {
                let wait = |ticket: &Ticket| attached.queue().wait_for(ticket.key(), created);
                lane.tickets.iter().map(wait).collect::<Vec<_>>()
            })
            .collect();
        // Once inside, a key stays inside as long as it stands, so each is waited for once.
        let mut waiting: Vec<usize> = (0..places.len()).collect();
        let mut orphan_since = None;
        while !waiting.is_empty() {
            let stopped = any_cancelled(sessions.iter().map(|session| session.stopped()));
            let elsewhere = race(stopped, core.clock.sleep(LOOK_AROUND));
            let told = next_told(&mut places, &waiting);
            match race(told, race(self.leaving(), elsewhere)).await {
                Either::First((at, Verdict::Inside)) => {
                    self.hear();
                    waiting.retain(|other| *other != at);
                    continue;
                }
                Either::First((_, Verdict::Vanished)) => {
                    self.hear();
                    drop(places);
                    return self.start_over(lanes, created).await;
                }
                Either::First((_, Verdict::Blocked(key))) => {
                    let error = self.lead().foreign_key(&key);
                    drop(places);
                    self.withdraw(lanes, created).await;
                    return Err(error);
                }
                Either::First((_, Verdict::Failed(error))) => {
                    drop(places);
                    self.withdraw(lanes, created).await;
                    return Err(error);
                }
                Either::Second(Either::First(leaving)) => {
                    self.placed |= waiting.iter().any(|at| places[*at].queue().is_loaded());
                    drop(places);
                    self.withdraw(lanes, created).await;
                    return Ok(Turn::Out(leaving));
                }
                // A lease was lost with the place in the queue.
                Either::Second(Either::Second(Either::First(()))) => {
                    drop(places);
                    return self.start_over(lanes, created).await;
                }
                Either::Second(Either::Second(Either::Second(()))) => {}
            }
            // Those that are inside are not told any more when they go.
            if waiting.len() < places.len() && !places.iter().all(|place| place.stands()) {
                drop(places);
                return self.start_over(lanes, created).await;
            }
            let now = core.clock.now();
            if now >= begun + LASTING {
                sessions.iter().for_each(|session| Inbox::open(session, created));
            }
            let heard = places.iter().map(|place| place.queue().heard_at());
            let counted = sessions.iter().map(|session| session.last_counted_at());
            self.heard = heard.chain(counted).fold(self.heard, Instant::max);
            let orphan = waiting.iter().find_map(|at| places[*at].orphan_ahead());
            let misfit = waiting.iter().find_map(|at| lanes.misfit(*at, places[*at].count()));
            let failed = if now >= self.silent_at() {
                Some(self.unreachable("etcd went silent while waiting"))
            } else if misfit.is_some() {
                misfit
            } else if let Some(key) = orphan {
                let since = *orphan_since.get_or_insert(now);
                let given_up = now >= since + self.lead().session.0.ttl;
                given_up.then(|| self.lead().foreign_key(&key))
            } else {
                orphan_since = None;
                None
            };
            if let Some(error) = failed {
                drop(places);
                self.withdraw(lanes, created).await;
                return Err(error);
            }
        }
        // While the last was waited for, the first may have gone.
        let all_stand = places.len() == 1 || places.iter().all(|place| place.stands());
        drop(places);
        if all_stand { Ok(Turn::Ours(lanes)) } else { self.start_over(lanes, created).await }
    }

    /// A key of the set is gone: whatever else stands has to go too.
    async fn start_over(&self, lanes: Lanes, created: i64) -> Result<Turn> {
        if lanes.tickets().count() == 1 {
            lanes.settle();
        } else {
            self.withdraw(lanes, created).await;
        }
        Ok(Turn::Again)
    }
}

/// What the first of those that still wait is told, and which of the places it is.
async fn next_told(places: &mut [Waiting<'_>], waiting: &[usize]) -> (usize, Verdict) {
    poll_fn(|context| {
        let told = waiting.iter().find_map(|at| match places[*at].poll_verdict(context) {
            Poll::Ready(verdict) => Some((*at, verdict)),
            Poll::Pending => None,
        });
        told.map_or(Poll::Pending, Poll::Ready)
    })
    .await
}
