//! Acquires that wait for nobody, and write nothing where somebody is in the way.
//!
//! A transaction that may write goes through the log of etcd even where it comes to nothing, so a
//! path that was busy at the last try is looked at before.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::acquire::{Acquire, Acquired, Joined, Leaving};
use super::lanes::{Lane, Wish};
use super::requests::{self, Place, Tried};
use crate::client::call::Kind;
use crate::client::runtime::Abandon;
use crate::error::{Error, Result};
use crate::lease::Ticket;
use crate::race::{Either, race};

/// A try does not wait for others; this is how long it waits for etcd.
const TRY_LIMIT: Duration = Duration::from_secs(5);

/// Takes the hold if nobody is in the way; writes nothing otherwise.
pub(crate) async fn try_acquire(wishes: Vec<Wish>, abandon: Abandon) -> Result<Option<Acquired>> {
    let core = match wishes.first() {
        Some(wish) => wish.contender.core.clone(),
        None => return Err(Error::internal("an acquire of nothing")),
    };
    let limit = core.clock.now() + TRY_LIMIT.min(core.operation_timeout());
    let counted = wishes.iter().any(|wish| wish.contender.count.is_some());
    let mut call = Acquire::new(wishes, Some(limit), abandon)?;
    if counted {
        // How many stand there cannot be compared inside etcd: look first.
        return match Box::pin(call.look_for_room()).await? {
            Either::First(true) => Box::pin(call.try_by_joining()).await,
            Either::First(false) => Ok(None),
            Either::Second(leaving) => call.leave_empty_handed(leaving),
        };
    }
    if call.was_busy() {
        match call.look().await? {
            Either::First(true) => return Ok(None),
            Either::First(false) => {}
            Either::Second(leaving) => return call.leave_empty_handed(leaving),
        }
    }
    loop {
        let lanes = match call.lanes().await? {
            Either::First(lanes) => lanes,
            Either::Second(leaving) => return call.leave_empty_handed(leaving),
        };
        let parts = lanes.parts();
        let txn = requests::enqueue_if_empty(&parts);
        let request = core.txn("try_lock", lanes.first_key(), Kind::Write, txn, call.until());
        let answer = match call.in_time(request).await {
            Either::First(answer) => answer,
            Either::Second((leaving, None)) => {
                drop(parts);
                lanes.leave_open();
                return call.leave_empty_handed(leaving);
            }
            // Answered in the last moment: as good as in time.
            Either::Second((_, Some(answer))) => answer,
        };
        let tried = answer.map(|response| requests::tried(&response, &parts));
        drop(parts);
        let joined = match tried {
            Ok(Tried::Held { create_revision }) => {
                Joined::In { lanes, create_revision, places: Vec::new() }
            }
            Ok(Tried::Busy) => {
                lanes.free();
                call.found_busy(true);
                return Ok(None);
            }
            Ok(Tried::NothingInTheWay) => {
                lanes.free();
                return Box::pin(call.try_by_joining()).await;
            }
            // Applied only if the queue was empty, so a key that is seen holds.
            Err(error) => Box::pin(call.recognise(lanes, error)).await?,
        };
        match joined {
            Joined::In { lanes, create_revision, .. } => {
                if let Some(acquired) = call.hold(lanes, create_revision) {
                    return Ok(Some(acquired));
                }
            }
            Joined::Again => {}
            Joined::Out(leaving) => return call.leave_empty_handed(leaving),
        }
    }
}

impl Acquire {
    /// Whether the last try found somebody in the way.
    fn was_busy(&self) -> bool {
        self.wishes.iter().any(|wish| wish.contender.busy.load(Ordering::Relaxed))
    }

    fn found_busy(&self, busy: bool) {
        for wish in &self.wishes {
            wish.contender.busy.store(busy, Ordering::Relaxed);
        }
    }

    /// Whether somebody is in the way, from one read.
    async fn look(&mut self) -> Result<Either<bool, Leaving>> {
        let core = self.lead().core.clone();
        let paths = || self.wishes.iter().map(|wish| (&wish.contender.layout, wish.mode));
        let key = self.lead().layout.entries();
        let txn = requests::look(paths());
        let request = core.txn("try_lock", &key, Kind::Repeatable, txn, self.until());
        let busy = match self.unless_leaving(request).await? {
            Either::First(response) => requests::is_busy(&response, paths()),
            Either::Second(leaving) => return Ok(Either::Second(leaving)),
        };
        self.hear();
        self.found_busy(busy);
        Ok(Either::First(busy))
    }

    /// Whether a counted path has room for what is wanted, from one read.
    async fn look_for_room(&mut self) -> Result<Either<bool, Leaving>> {
        let Wish { contender, keys, .. } = self.wishes[0].clone();
        let read = requests::read_queue(&contender.core, "try_lock", &contender.layout);
        let read = match self.unless_leaving(read).await? {
            Either::First(read) => read,
            Either::Second(leaving) => return Ok(Either::Second(leaving)),
        };
        self.hear();
        let count = match read.count {
            Some(count) => {
                contender.follow(Some(count))?;
                contender.check_fit(keys, count as usize)?;
                count
            }
            // The enqueue writes it.
            None => contender.count.as_ref().map_or(0, |count| count.current()),
        };
        Ok(Either::First(read.line.len() + keys <= count as usize))
    }

    /// Nobody seems to be in the way: joins the queue, and leaves it at once unless that is so.
    async fn try_by_joining(&mut self) -> Result<Option<Acquired>> {
        loop {
            let lanes = match self.lanes().await? {
                Either::First(lanes) => lanes,
                Either::Second(leaving) => return self.leave_empty_handed(leaving),
            };
            let (lanes, created, places) = match self.join(lanes).await? {
                Joined::In { lanes, create_revision, places } => (lanes, create_revision, places),
                Joined::Again => continue,
                Joined::Out(leaving) => return self.leave_empty_handed(leaving),
            };
            let mut inside = true;
            for (lane, place) in lanes.0.iter().zip(places) {
                inside &= match place {
                    Place::Inside => true,
                    Place::Behind => false,
                    Place::Unclear => match race(is_inside(lane), self.leaving()).await {
                        Either::First(Ok(inside)) => inside,
                        Either::First(Err(error)) => {
                            self.withdraw(lanes, created).await;
                            return Err(error);
                        }
                        Either::Second(leaving) => {
                            self.withdraw(lanes, created).await;
                            return self.leave_empty_handed(leaving);
                        }
                    },
                };
                if !inside {
                    break;
                }
            }
            if !inside {
                self.withdraw(lanes, created).await;
                return Ok(None);
            }
            if let Some(acquired) = self.hold(lanes, created) {
                return Ok(Some(acquired));
            }
        }
    }
}

/// Whether all keys of the lane may be inside, from one full read.
async fn is_inside(lane: &Lane) -> Result<bool> {
    let contender = &lane.wish.contender;
    let read = requests::read_queue(&contender.core, "try_lock", &contender.layout).await?;
    let inside = read.inside(&contender.layout);
    let is_inside = |ticket: &Ticket| inside.iter().any(|s| s.entry.key == ticket.key());
    Ok(lane.tickets.iter().all(is_inside))
}
