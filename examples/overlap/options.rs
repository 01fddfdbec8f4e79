//! What the command line asks for.

use std::fmt;
use std::time::Duration;

pub(crate) const USAGE: &str = "usage: overlap [--rounds N] [--ttl SECONDS] \
    [--fault blackhole|reset|freeze-etcd|freeze-client|late-answers] [--recipe mutex] [--control]";

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
}

impl fmt::Display for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Recipe::Mutex => "mutex",
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
    match value {
        "mutex" => Ok(Recipe::Mutex),
        other => Err(format!("--recipe: there is no `{other}`")),
    }
}
