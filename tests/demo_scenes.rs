//! The scenes of the demo, by the events they record.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../examples/demo/leadership.rs"]
mod leadership;
#[path = "../examples/demo/recorder.rs"]
mod recorder;
#[path = "../examples/demo/scenes.rs"]
mod scenes;

use std::time::Duration;

use etcd_recipes::testing::EtcdServer;

use crate::leadership::LOST_LEADERSHIP;
use crate::recorder::{Event, Step, What, in_order, time_of};
use crate::scenes::{INTERRUPTION, LOST_MUTEX, Scene, TRANSIENT_KEY};

fn played(scene: &Scene) -> Vec<Event> {
    let etcd = EtcdServer::start().unwrap();
    let events = (scene.play)(&etcd.endpoint(), |_| ())
        .unwrap_or_else(|error| panic!("{}: {error}", scene.title));
    (scene.check)(&events).unwrap_or_else(|why| panic!("{}: {why}: {events:#?}", scene.title));
    events
}

fn at(events: &[Event], step: Step) -> Duration {
    time_of(events, step).unwrap()
}

#[test]
fn serial_a_transient_key_expires_before_it_is_restored() {
    let events = played(&TRANSIENT_KEY);
    let (expired, restored) = (("worker", What::Expired), ("worker", What::Restored));
    in_order(&events, &[expired, ("observer", What::KeyGone), ("observer", What::KeyBack)])
        .unwrap();
    assert!(at(&events, expired) < at(&events, restored));
    let flaps = events.iter().filter(|event| event.what == What::Expired).count();
    assert_eq!(flaps, 1);
}

#[test]
fn serial_a_holder_cut_off_is_told_before_its_rival_is_in() {
    let events = played(&LOST_MUTEX);
    let told = [
        at(&events, ("alice", What::IsHeldFalse)),
        at(&events, ("alice", What::TokenCancelled)),
        at(&events, ("alice", What::ListenerRan)),
        at(&events, ("bob", What::Acquired)),
    ];
    assert!(told.is_sorted(), "{told:?}");
    assert!(told[0] > at(&events, ("network", What::Cut)));
    assert!(time_of(&events, ("alice", What::Unlocked(false))).is_some());
    assert!(time_of(&events, ("alice", What::Unlocked(true))).is_none());
}

#[test]
fn serial_a_waiting_thread_is_interrupted_within_100_ms() {
    let events = played(&INTERRUPTION);
    let cancelled = at(&events, ("main", What::Cancels));
    let interrupted = at(&events, ("carol", What::Interrupted));
    assert!(interrupted - cancelled <= Duration::from_millis(100));
    assert!(time_of(&events, ("carol", What::Acquired)).is_none());
}

#[test]
fn serial_a_sleeping_leader_is_interrupted_before_the_rival_leads() {
    let events = played(&LOST_LEADERSHIP);
    let told = [
        at(&events, ("network", What::Cut)),
        at(&events, ("alice", What::IsHeldFalse)),
        at(&events, ("alice", What::Interrupted)),
        at(&events, ("bob", What::Leads)),
    ];
    assert!(told.is_sorted(), "{told:?}");
    let terms = events.iter().filter(|event| event.what == What::Leads).count();
    assert_eq!(terms, 2);
}

#[test]
fn an_order_that_was_not_kept_is_noticed() {
    let event = |who, what| Event { at: Duration::ZERO, who, what, detail: String::new() };
    let events = [event("bob", What::Acquired), event("alice", What::ListenerRan)];
    let told = [("alice", What::ListenerRan), ("bob", What::Acquired)];
    assert!(in_order(&events, &told).unwrap_err().contains("Acquired"));
    let silent = (LOST_MUTEX.check)(&events);
    assert!(silent.is_err());
}
