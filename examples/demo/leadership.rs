//! The scene of a leader that is cut off while it sleeps.

use std::thread;
use std::time::Duration;

use etcd_recipes::testing::{FaultProxy, Mode};
use etcd_recipes::{Client, LeaderSelector, LeadershipTerm};

use crate::recorder::{Event, Live, Outcome, Recorder, What, in_order, time_of};
use crate::scenes::{BEAT, LIMIT, PROMPT, Scene, TTL, between, fresh, until};

/// Longer than anybody waits for the end of the demo.
const PARKED: Duration = Duration::from_secs(3600);

pub(crate) const LOST_LEADERSHIP: Scene = Scene {
    title: "A leader asleep in its callback is cut off, and the rival takes the next term",
    play: lost_leadership,
    check: interrupted_before_the_next_term,
};

fn lost_leadership(endpoint: &str, live: Live) -> Outcome<Vec<Event>> {
    let record = Recorder::new(live);
    let path = fresh("scheduler");
    let proxy = FaultProxy::start(endpoint)?;
    let near = Client::connect([proxy.endpoint()])?;
    let far = Client::connect([endpoint])?;

    let alices = LeaderSelector::builder(&near, path.as_str())
        .ttl(TTL)
        .client_id("alice")
        .on_lead({
            let record = record.clone();
            move |term| {
                record.note("alice", What::Leads, shown(term));
                record.note("alice", What::Sleeps, "sleeps for an hour, term.sleep(..)");
                let slept = term.sleep(PARKED);
                if !term.is_leader() {
                    record.note("alice", What::IsHeldFalse, "is_leader() = false");
                }
                if let Err(error) = &slept
                    && error.is_interrupted()
                {
                    record.note("alice", What::Interrupted, "her sleep = Err(Interrupted)");
                }
                Ok(slept?)
            }
        })
        .on_relinquish({
            let record = record.clone();
            move |_| record.note("alice", What::Relinquishes, "relinquishes")
        })
        .build()?;
    alices.add_loss_listener({
        let record = record.clone();
        move |loss| {
            let detail = format_args!("her loss listener runs: {:?}", loss.reason);
            record.note("alice", What::ListenerRan, detail);
        }
    });
    let bobs = LeaderSelector::builder(&far, path.as_str())
        .ttl(TTL)
        .client_id("bob")
        .on_lead({
            let record = record.clone();
            move |term| {
                record.note("bob", What::Leads, shown(term));
                Ok(())
            }
        })
        .build()?;

    alices.start()?;
    record.wait_for(("alice", What::Sleeps), LIMIT)?;
    bobs.start()?;
    record.note("bob", What::Waits, "stands for election too");
    until("bob is a candidate", || Ok(bobs.participants()?.len() == 2))?;
    thread::sleep(BEAT);

    proxy.set(Mode::Blackhole);
    record.note("network", What::Cut, "cuts alice off from etcd");
    record.wait_for(("bob", What::Leads), LIMIT)?;
    bobs.wait_on_leadership_complete()?;
    record.wait_for(("alice", What::Relinquishes), LIMIT)?;
    proxy.set(Mode::Pass);
    alices.close()?;
    Ok(record.events())
}

fn shown(term: &LeadershipTerm) -> String {
    format!("leads, term {}", term.fencing_token())
}

fn interrupted_before_the_next_term(events: &[Event]) -> Result<(), String> {
    in_order(
        events,
        &[
            ("alice", What::Leads),
            ("alice", What::Sleeps),
            ("bob", What::Waits),
            ("network", What::Cut),
            ("alice", What::IsHeldFalse),
            ("alice", What::Interrupted),
            ("alice", What::Relinquishes),
            ("bob", What::Leads),
        ],
    )?;
    in_order(events, &[("alice", What::ListenerRan), ("bob", What::Leads)])?;
    let told = time_of(events, ("alice", What::ListenerRan));
    let interrupted = ("alice", What::Interrupted);
    let took = time_of(events, interrupted).zip(told).map(|(at, told)| at.saturating_sub(told));
    if took.is_none_or(|took| took > PROMPT) {
        return Err(format!("interrupted only {took:?} after the loss was told"));
    }
    between(events, interrupted, ("bob", What::Leads)).map(drop)
}
