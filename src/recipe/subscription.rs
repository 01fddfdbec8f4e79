//! Events as a channel: each subscriber has a bounded queue of its own.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use crossbeam_channel::{Receiver, Sender};
use parking_lot::Mutex;

/// How many unread events a subscription keeps.
const BOUND: usize = 1024;

/// A queue of events, to be read as the `crossbeam_channel::Receiver` it derefs to.
///
/// It keeps 1,024 unread events; then the oldest goes for each new one, and
/// [`missed`](Subscription::missed) counts it. An event that ends the stream is never dropped. The
/// channel disconnects once the source is closed and everything was read. Keep the subscription
/// while reading: a clone of its receiver alone does not keep it alive.
///
/// # Example: reading until the source is closed
///
/// ```
/// use etcd_recipes::{ConnectionState, Recipe};
///
/// fn log_states(recipe: &impl Recipe) {
///     let states = recipe.connection_events();
///     for state in states.iter() {
///         println!("{}: {state:?}", recipe.path());
///     }
/// }
/// ```
pub struct Subscription<E> {
    receiver: Receiver<E>,
    missed: Arc<AtomicU64>,
}

impl<E> Subscription<E> {
    /// How many events were dropped because they were not read in time.
    pub fn missed(&self) -> u64 {
        self.missed.load(Ordering::Relaxed)
    }
}

impl<E> Deref for Subscription<E> {
    type Target = Receiver<E>;

    fn deref(&self) -> &Receiver<E> {
        &self.receiver
    }
}

impl<E> fmt::Debug for Subscription<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subscription")
            .field("unread", &self.receiver.len())
            .field("missed", &self.missed())
            .finish_non_exhaustive()
    }
}

/// The source that subscriptions read from.
pub(crate) struct Events<E> {
    hub: Mutex<Hub<E>>,
}

struct Hub<E> {
    closed: bool,
    queues: Vec<Arc<Queue<E>>>,
}

/// One subscriber's queue, as its source sees it.
struct Queue<E> {
    sender: Sender<E>,
    /// A second end of the same channel, to drop the oldest event with.
    receiver: Receiver<E>,
    /// Gone with the subscription.
    missed: Weak<AtomicU64>,
    book: Mutex<Book>,
}

/// What was sent, in order to know which unread events are final.
#[derive(Default)]
struct Book {
    sent: u64,
    finals: VecDeque<u64>,
}

impl<E> Queue<E> {
    /// Returns what was dropped for it. The channel itself is unbounded, so that a final event
    /// always finds room.
    fn send(&self, event: E, is_final: bool) -> Option<E> {
        let missed = self.missed.upgrade()?;
        let mut book = self.book.lock();
        let mut dropped = None;
        let unread = self.receiver.len();
        if unread >= BOUND && !is_final {
            let oldest = book.sent - unread as u64;
            while book.finals.front().is_some_and(|number| *number < oldest) {
                book.finals.pop_front();
            }
            // The reader may take events at the same moment, so which one comes off the front is
            // not certain: with a final event in the queue it is the new event that goes.
            if !book.finals.is_empty() {
                missed.fetch_add(1, Ordering::Relaxed);
                return Some(event);
            }
            dropped = self.receiver.try_recv().ok();
            missed.fetch_add(u64::from(dropped.is_some()), Ordering::Relaxed);
        }
        if is_final {
            let number = book.sent;
            book.finals.push_back(number);
        }
        book.sent += 1;
        // It cannot fail: this queue holds a receiver of its own.
        let _ = self.sender.send(event);
        dropped
    }
}

impl<E> Default for Events<E> {
    fn default() -> Self {
        Events { hub: Mutex::new(Hub { closed: false, queues: Vec::new() }) }
    }
}

impl<E: Clone> Events<E> {
    pub(crate) fn new() -> Events<E> {
        Events::default()
    }

    /// A queue for the events from now on; disconnected where the source is closed.
    pub(crate) fn subscribe(&self) -> Subscription<E> {
        let (sender, receiver) = crossbeam_channel::unbounded();
        let missed = Arc::new(AtomicU64::new(0));
        let queue = Arc::new(Queue {
            sender,
            receiver: receiver.clone(),
            missed: Arc::downgrade(&missed),
            book: Mutex::default(),
        });
        let abandoned;
        {
            let mut hub = self.hub.lock();
            abandoned = hub.take_abandoned();
            if !hub.closed {
                hub.queues.push(queue);
            }
        }
        drop(abandoned);
        Subscription { receiver, missed }
    }

    /// Whether there is a subscription.
    pub(crate) fn has_readers(&self) -> bool {
        self.hub.lock().queues.iter().any(|queue| queue.missed.strong_count() > 0)
    }

    pub(crate) fn publish(&self, event: E) {
        self.send(event, false);
    }

    /// Publishes an event that ends the stream: it is kept whatever the queue's length.
    pub(crate) fn publish_final(&self, event: E) {
        self.send(event, true);
    }

    fn send(&self, event: E, is_final: bool) {
        let (abandoned, queues) = {
            let mut hub = self.hub.lock();
            (hub.take_abandoned(), hub.queues.clone())
        };
        drop(abandoned);
        // Cloned and dropped with no lock held, since an event may carry a user's type.
        for queue in queues {
            drop(queue.send(event.clone(), is_final));
        }
    }

    /// Ends every subscription; what is unread can still be read.
    pub(crate) fn close(&self) {
        let queues = {
            let mut hub = self.hub.lock();
            hub.closed = true;
            std::mem::take(&mut hub.queues)
        };
        drop(queues);
    }
}

impl<E> Hub<E> {
    /// Takes out the queues whose subscription is gone; they are dropped outside of the lock.
    fn take_abandoned(&mut self) -> Vec<Arc<Queue<E>>> {
        self.queues.extract_if(.., |queue| queue.missed.strong_count() == 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use crossbeam_channel::TryRecvError;

    use super::*;

    #[test]
    fn every_subscription_gets_every_event_from_its_start() {
        let events = Events::new();
        let first = events.subscribe();
        events.publish(1);
        let second = events.subscribe();
        events.publish(2);
        events.close();
        events.publish(3);
        assert_eq!(first.iter().collect::<Vec<_>>(), [1, 2]);
        assert_eq!(second.iter().collect::<Vec<_>>(), [2]);
        assert_eq!(second.try_recv(), Err(TryRecvError::Disconnected));
        assert_eq!(events.subscribe().try_recv(), Err(TryRecvError::Disconnected));
    }

    #[test]
    fn the_oldest_are_dropped_and_counted() {
        let events = Events::new();
        let (slow, quick) = (events.subscribe(), events.subscribe());
        for number in 0..BOUND + 10 {
            events.publish(number);
            assert_eq!(quick.try_recv(), Ok(number));
        }
        assert_eq!((slow.missed(), quick.missed()), (10, 0));
        assert_eq!(slow.len(), BOUND);
        assert_eq!(slow.recv(), Ok(10));
        assert_eq!(format!("{slow:?}"), "Subscription { unread: 1023, missed: 10, .. }");
    }

    #[test]
    fn a_final_event_is_never_dropped() {
        let events = Events::new();
        let subscription = events.subscribe();
        for number in 0..BOUND {
            events.publish(number);
        }
        events.publish_final(usize::MAX);
        assert_eq!((subscription.len(), subscription.missed()), (BOUND + 1, 0));
        for number in 0..2 * BOUND {
            events.publish(number);
        }
        assert_eq!(subscription.missed(), 2 * BOUND as u64);
        events.close();
        let all: Vec<_> = subscription.iter().collect();
        assert_eq!(all.last(), Some(&usize::MAX));
        assert_eq!(all.len(), BOUND + 1);
    }

    #[test]
    fn a_final_event_that_was_read_blocks_nothing() {
        let events = Events::new();
        let subscription = events.subscribe();
        events.publish_final(0);
        assert_eq!(subscription.recv(), Ok(0));
        for number in 1..=BOUND + 1 {
            events.publish(number);
        }
        assert_eq!(subscription.missed(), 1);
        assert_eq!(subscription.recv(), Ok(2));
    }

    #[test]
    fn dropped_subscriptions_are_pruned() {
        let events: Events<Arc<()>> = Events::new();
        let event = Arc::new(());
        let kept = events.subscribe();
        for _ in 0..10 {
            drop(events.subscribe());
        }
        events.publish(event.clone());
        assert_eq!(events.hub.lock().queues.len(), 1);
        assert_eq!(kept.len(), 1);
        drop(kept);
        let _new = events.subscribe();
        assert_eq!(events.hub.lock().queues.len(), 1);
        assert_eq!(Arc::strong_count(&event), 1);
    }

    #[test]
    fn a_reader_at_work_loses_nothing_uncounted_and_keeps_the_order() {
        let events = Arc::new(Events::new());
        let subscription = events.subscribe();
        const SENT: u64 = 20_000;
        let writer = std::thread::spawn({
            let events = events.clone();
            move || {
                (0..SENT).for_each(|number| events.publish(number));
                events.publish_final(SENT);
                events.close();
            }
        });
        let read: Vec<u64> = subscription.iter().collect();
        writer.join().unwrap();
        assert!(read.is_sorted());
        assert_eq!(read.last(), Some(&SENT));
        assert_eq!(read.len() as u64 + subscription.missed(), SENT + 1);
    }
}
