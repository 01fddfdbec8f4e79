//! What the command line asks for.

use std::fmt;
use std::time::Duration;

pub(crate) const USAGE: &str = "\
usage: overlap [--rounds N] [--ttl SECONDS] [--fault FAULT] [--recipe RECIPE] [--control]

faults (default blackhole), by which the holder is parted from etcd:
  blackhole      no byte moves, the connections stay
  reset          the connections are reset, new ones refused
  freeze-etcd    etcd stands still for longer than the TTL
  freeze-client  the holder's process stands still until its rival is in
  late-answers   answers come late, and the last one is cut off from what would follow

recipes (default mutex), by which holder and rival hold; what is asked and what is told:
  mutex          a Mutex: the guard's is_held(), the mutex's loss listener
  rwlock-write   the write side of an RwLock: the guard's is_held(), the lock's loss listener
  semaphore1     a Semaphore of one permit: the permit's is_held(), its loss listener
  selector       a LeaderSelector with its callback parked: is_leader(), its loss listener
  latch          a LeaderLatch: has_leadership() and the leadership's is_leader(), its loss
                 listener

--control: the holder is a small one on raw etcd-client, in place of a mutex";

/// How the holder is parted from etcd.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// No byte moves between the holder and etcd; the connections stay.
    Blackhole,
    /// The holder's connections are reset and new ones refused.
    Reset,
    /// etcd stands still for longer than the TTL.
    FreezeEtcd,
    /// The holder's process stands still until its rival is in.
    FreezeClient,
    /// Answers come late, and the last one is cut off from whatever would follow it.
    LateAnswers,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Fault::Blackhole => "blackhole",
            Fault::Reset => "reset",
            Fault::FreezeEtcd => "freeze-etcd",
            Fault::FreezeClient => "freeze-client",
            Fault::LateAnswers => "late-answers",
        })
    }
}

/// Whose promise is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Recipe {
    Mutex,
    RwLockWrite,
    Semaphore1,
    Selector,
    Latch,
}

impl Recipe {
    /// What the keys of its contenders begin with.
    pub(crate) fn queue(self, path: &str) -> String {
        match self {
            Recipe::Semaphore1 => format!("{path}/holders/"),
            _ => format!("{path}/"),
        }
    }
}

impl fmt::Display for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Recipe::Mutex => "mutex",
            Recipe::RwLockWrite => "rwlock-write",
            Recipe::Semaphore1 => "semaphore1",
            Recipe::Selector => "selector",
            Recipe::Latch => "latch",
        })
    }
}

/// A series of rounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Options {
    pub(crate) rounds: usize,
    pub(crate) ttl: Duration,
    pub(crate) fault: Fault,
    pub(crate) recipe: Recipe,
    /// The holder is the small one on raw etcd-client.
    pub(crate) control: bool,
}

impl Options {
    pub(crate) fn parse(args: impl IntoIterator<Item = String>) -> Result<Options, String> {
        let mut options = Options {
            rounds: 25,
            ttl: Duration::from_secs(2),
            fault: Fault::Blackhole,
            recipe: Recipe::Mutex,
            control: false,
        };
        let mut args = args.into_iter();
        while let Some(name) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("{name} needs a value"));
            match name.as_str() {
                "--control" => options.control = true,
                "--rounds" => options.rounds = number(&name, &value()?)?,
                "--ttl" => options.ttl = Duration::from_secs(number(&name, &value()?)?),
                "--fault" => options.fault = fault(&value()?)?,
                "--recipe" => options.recipe = recipe(&value()?)?,
                other => return Err(format!("unknown option {other}")),
            }
        }
        if options.rounds == 0 {
            return Err("--rounds must be at least 1".to_owned());
        }
        if options.control && options.recipe != Recipe::Mutex {
            return Err("--control stands in for the mutex only".to_owned());
        }
        Ok(options)
    }
}

fn number<T: std::str::FromStr>(name: &str, value: &str) -> Result<T, String> {
    value.parse().map_err(|_| format!("{name}: `{value}` is no whole number"))
}

fn fault(value: &str) -> Result<Fault, String> {
    let all = [
        Fault::Blackhole,
        Fault::Reset,
        Fault::FreezeEtcd,
        Fault::FreezeClient,
        Fault::LateAnswers,
    ];
    all.into_iter()
        .find(|fault| fault.to_string() == value)
        .ok_or_else(|| format!("--fault: there is no `{value}`"))
}

pub(crate) fn recipe(value: &str) -> Result<Recipe, String> {
    let all =
        [Recipe::Mutex, Recipe::RwLockWrite, Recipe::Semaphore1, Recipe::Selector, Recipe::Latch];
    all.into_iter()
        .find(|recipe| recipe.to_string() == value)
        .ok_or_else(|| format!("--recipe: there is no `{value}`"))
}
