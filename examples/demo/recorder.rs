//! What happened, by whom and when, in the order in which it was noticed.

use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

pub(crate) type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// A kind of event; the text for people is [`Event::detail`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum What {
    KeySet,
    Cut,
    Expired,
    KeyGone,
    Mended,
    KeyBack,
    Restored,
    Acquired,
    Waits,
    IsHeldFalse,
    TokenCancelled,
    ListenerRan,
    Unlocked(bool),
    Cancels,
    Interrupted,
    LeftTheQueue,
    Leads,
    Sleeps,
    Relinquishes,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Event {
    /// Since the scene began.
    pub(crate) at: Duration,
    pub(crate) who: &'static str,
    pub(crate) what: What,
    pub(crate) detail: String,
}

/// One step of a promised order.
pub(crate) type Step = (&'static str, What);

/// Is told each event as it happens.
pub(crate) type Live = fn(&Event);

/// The events of a scene so far. Clones share them.
#[derive(Clone)]
pub(crate) struct Recorder {
    begun: Instant,
    notes: Arc<Notes>,
    live: Live,
}

#[derive(Default)]
struct Notes {
    events: Mutex<Vec<Event>>,
    added: Condvar,
}

impl Recorder {
    pub(crate) fn new(live: Live) -> Recorder {
        Recorder { begun: Instant::now(), notes: Arc::default(), live }
    }

    pub(crate) fn note(&self, who: &'static str, what: What, detail: impl fmt::Display) {
        self.add(&mut self.notes.events.lock(), who, what, &detail);
    }

    /// As [`note`](Recorder::note), for what several threads may be the first to notice.
    pub(crate) fn note_once(&self, who: &'static str, what: What, detail: impl fmt::Display) {
        let mut events = self.notes.events.lock();
        if !events.iter().any(|event| (event.who, event.what) == (who, what)) {
            self.add(&mut events, who, what, &detail);
        }
    }

    fn add(
        &self,
        events: &mut Vec<Event>,
        who: &'static str,
        what: What,
        detail: &dyn fmt::Display,
    ) {
        let event = Event { at: self.begun.elapsed(), who, what, detail: detail.to_string() };
        (self.live)(&event);
        events.push(event);
        self.notes.added.notify_all();
    }

    /// Returns once this has happened.
    pub(crate) fn wait_for(&self, step: Step, limit: Duration) -> Outcome<()> {
        let end = Instant::now() + limit;
        let mut events = self.notes.events.lock();
        while !events.iter().any(|event| (event.who, event.what) == step) {
            if self.notes.added.wait_until(&mut events, end).timed_out() {
                return Err(format!("not within {limit:?}: {step:?}").into());
            }
        }
        Ok(())
    }

    pub(crate) fn events(&self) -> Vec<Event> {
        self.notes.events.lock().clone()
    }
}

/// Whether all steps happened, each after the one before it.
pub(crate) fn in_order(events: &[Event], steps: &[Step]) -> Result<(), String> {
    let mut rest = events.iter();
    for step in steps {
        if !rest.any(|event| (event.who, event.what) == *step) {
            return Err(format!("{step:?} did not happen, or not in the promised order"));
        }
    }
    Ok(())
}

/// When a step happened.
pub(crate) fn time_of(events: &[Event], step: Step) -> Option<Duration> {
    events.iter().find(|event| (event.who, event.what) == step).map(|event| event.at)
}
