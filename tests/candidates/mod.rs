//! What the tests of elections share: candidates in both forms, a record of who did what in which
//! order, and `etcdctl elect`.

#![allow(dead_code, unreachable_pub, reason = "each test file uses a part of it")]

use std::io::{BufRead, BufReader};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use etcd_recipes::testing::{CtlProcess, EtcdServer, eventually};
use etcd_recipes::{
    Client, LeaderLatch, LeaderSelector, LeaderSelectorBuilder, LeadershipTerm, Participant, Recipe,
};
use parking_lot::Mutex as Lock;

/// How long anything may take that is bound to happen.
pub const LIMIT: Duration = Duration::from_secs(20);

/// A TTL that nobody waits out here.
pub const LONG: Duration = Duration::from_secs(20);

/// By when a rival leads once the key is free: far less than `LONG`.
pub const SOON: Duration = Duration::from_secs(3);

/// What happened, in order.
#[derive(Clone, Default)]
pub struct Story(Arc<Lock<Vec<String>>>);

impl Story {
    pub fn new() -> Story {
        Story::default()
    }

    pub fn tell(&self, what: impl Into<String>) {
        self.0.lock().push(what.into());
    }

    pub fn told(&self) -> Vec<String> {
        self.0.lock().clone()
    }

    pub fn has(&self, what: &str) -> bool {
        self.0.lock().iter().any(|told| told == what)
    }

    #[track_caller]
    pub fn wait(&self, what: &str) {
        eventually(LIMIT, what, || if self.has(what) { Ok(()) } else { Err(self.told()) });
    }

    #[track_caller]
    pub fn wait_count(&self, count: usize) {
        eventually(LIMIT, "a longer story", || {
            let told = self.told();
            if told.len() >= count { Ok(()) } else { Err(told) }
        });
    }
}

/// A selector whose lease nobody waits out.
pub fn selector(client: &Client, path: &str) -> LeaderSelectorBuilder {
    LeaderSelector::builder(client, path).ttl(LONG)
}

/// Leads until it is told to stop.
pub fn park(term: &LeadershipTerm) -> Result<(), etcd_recipes::BoxError> {
    Ok(term.wait_until_finished()?)
}

/// A started rival that leads until it is told to stop, and says in the story that it leads.
pub fn rival(client: &Client, path: &str, story: &Story) -> LeaderSelector {
    let story = story.clone();
    let rival = selector(client, path)
        .client_id("rival")
        .on_lead(move |term| {
            story.tell("rival");
            park(term)
        })
        .build()
        .unwrap();
    rival.start().unwrap();
    rival
}

/// Waits until this many stand on the path.
#[track_caller]
pub fn wait_participants(of: &LeaderSelector, count: usize) -> Vec<Participant> {
    eventually(LIMIT, "participants", || match of.participants() {
        Ok(all) if all.len() == count => Ok(all),
        other => Err(other),
    })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    Selector,
    Latch,
}

pub const FORMS: [Form; 2] = [Form::Selector, Form::Latch];

enum Inner {
    Selector(LeaderSelector),
    Latch(LeaderLatch),
}

/// A candidate in either form that leads whenever it can, as long as it can.
pub struct Candidate {
    inner: Inner,
    term: Arc<Lock<Option<LeadershipTerm>>>,
    pub id: String,
}

impl Candidate {
    pub fn start(form: Form, client: &Client, path: &str, id: &str, ttl: Duration) -> Candidate {
        let term: Arc<Lock<Option<LeadershipTerm>>> = Arc::default();
        let inner = match form {
            Form::Selector => {
                let seen = term.clone();
                let selector = LeaderSelector::builder(client, path)
                    .ttl(ttl)
                    .client_id(id)
                    .auto_requeue(true)
                    .on_lead(move |term| {
                        *seen.lock() = Some(term.clone());
                        park(term)
                    })
                    .build()
                    .unwrap();
                selector.start().unwrap();
                Inner::Selector(selector)
            }
            Form::Latch => {
                let latch =
                    LeaderLatch::builder(client, path).ttl(ttl).client_id(id).build().unwrap();
                latch.start().unwrap();
                Inner::Latch(latch)
            }
        };
        Candidate { inner, term, id: id.to_owned() }
    }

    pub fn is_leader(&self) -> bool {
        match &self.inner {
            Inner::Selector(selector) => selector.is_leader(),
            Inner::Latch(latch) => latch.has_leadership(),
        }
    }

    /// The present term.
    pub fn term(&self) -> Option<LeadershipTerm> {
        let term = match &self.inner {
            Inner::Selector(_) => self.term.lock().clone(),
            Inner::Latch(latch) => latch.leadership(),
        };
        term.filter(LeadershipTerm::is_leader)
    }

    #[track_caller]
    pub fn wait_leads(&self) -> LeadershipTerm {
        eventually(LIMIT, &format!("{} leads", self.id), || self.term())
    }

    pub fn participants(&self) -> etcd_recipes::Result<Vec<Participant>> {
        match &self.inner {
            Inner::Selector(selector) => selector.participants(),
            Inner::Latch(latch) => latch.participants(),
        }
    }

    pub fn state(&self) -> String {
        match &self.inner {
            Inner::Selector(selector) => format!("{:?}", selector.state()),
            Inner::Latch(latch) => format!("{:?}", latch.state()),
        }
    }

    pub fn loss_events(&self) -> etcd_recipes::Subscription<etcd_recipes::Loss> {
        match &self.inner {
            Inner::Selector(selector) => selector.loss_events(),
            Inner::Latch(latch) => latch.loss_events(),
        }
    }

    pub fn is_healthy(&self) -> bool {
        match &self.inner {
            Inner::Selector(selector) => selector.is_healthy(),
            Inner::Latch(latch) => latch.is_healthy(),
        }
    }

    /// Gives the leadership up: a selector queues again, a latch is closed.
    pub fn step_down(&self) {
        match &self.inner {
            Inner::Selector(selector) => drop(selector.resign().unwrap()),
            Inner::Latch(latch) => latch.close().unwrap(),
        }
    }

    pub fn close(&self) -> etcd_recipes::Result<()> {
        match &self.inner {
            Inner::Selector(selector) => selector.close(),
            Inner::Latch(latch) => latch.close(),
        }
    }
}

/// The keys of a path in the order in which they were created.
pub fn line(etcd: &EtcdServer, path: &str) -> Vec<String> {
    let prefix = format!("{path}/");
    let text = etcd
        .ctl(["get", &prefix, "--prefix", "--keys-only", "--sort-by=CREATE", "--order=ASCEND"])
        .unwrap();
    text.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

/// The client id that a key names.
pub fn owner(key: &str) -> &str {
    key.rsplit('/').next().and_then(|name| name.splitn(3, '-').nth(2)).unwrap_or(key)
}

/// The key with which this candidate stands on the path.
pub fn key_of(etcd: &EtcdServer, path: &str, id: &str) -> Option<String> {
    line(etcd, path).into_iter().find(|key| owner(key) == id)
}

/// Starts `etcdctl elect` with these words; the receiver gets the lines it prints.
pub fn etcdctl_elect(etcd: &EtcdServer, words: &[&str]) -> (CtlProcess, Receiver<String>) {
    let mut process = etcd.spawn_ctl([&["elect"], words].concat()).unwrap();
    let output = BufReader::new(process.stdout.take().unwrap());
    let (tell, told) = channel();
    thread::spawn(move || {
        for line in output.lines().map_while(Result::ok) {
            if tell.send(line).is_err() {
                return;
            }
        }
    });
    (process, told)
}

/// `etcdctl elect` resigns when it is told to end.
pub fn interrupt(process: &mut CtlProcess) {
    let pid = i32::try_from(process.id()).ok().and_then(rustix::process::Pid::from_raw).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    process.wait().unwrap();
}
