//! The two other processes of a round, seen from the parent: lines of JSON one way, words the
//! other.

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, bounded, unbounded};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use serde::{Deserialize, Serialize};

pub(crate) type Outcome<T> = Result<T, Box<dyn Error>>;

/// What holder and rival say. All stamps are nanoseconds of the boot-time clock, which all
/// processes of the machine share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Said {
    /// Rival: connected, waiting for the word.
    Ready,
    /// Holder: it holds, by this key.
    Held { key: String },
    /// Holder: it holds no more.
    Lost(Polls),
    /// Rival: `lock()` returned at this time.
    Acquired { at: u64 },
    /// Whoever: it cannot go on.
    Failed(String),
}

/// What the holder saw.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Polls {
    /// When the last `is_held()` that said `true` was asked.
    pub(crate) last_true: u64,
    /// When the first one that said `false` was asked.
    pub(crate) first_false: u64,
    /// When the loss listener ran.
    pub(crate) listener: Option<u64>,
    /// When somebody who waited for the hold's cancel token was woken.
    pub(crate) token: Option<u64>,
}

/// Says a line to the parent.
pub(crate) fn say(said: &Said) {
    // A parent that is gone wants no lines: the end of stdin ends this process.
    if let Ok(line) = serde_json::to_string(said) {
        let _ = writeln!(std::io::stdout().lock(), "{line}");
    }
}

/// The parent's words, one per line. When the parent is gone, so is this process.
pub(crate) fn words() -> Receiver<String> {
    let (sender, receiver) = unbounded();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines() {
            let Ok(line) = line else { break };
            let _ = sender.send(line);
        }
        std::process::exit(0);
    });
    receiver
}

/// A process of a round; killed when dropped.
pub(crate) struct Actor {
    name: &'static str,
    process: Child,
    words: ChildStdin,
    said: Receiver<Said>,
}

impl Actor {
    /// Starts this program again in another role.
    pub(crate) fn start(role: &'static str, args: &[&str]) -> Outcome<Actor> {
        let mut process = Command::new(std::env::current_exe()?)
            .arg(role)
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let words = process.stdin.take().ok_or("no pipe to the child")?;
        let output = process.stdout.take().ok_or("no pipe from the child")?;
        let (sender, said) = bounded(16);
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines() {
                let Ok(line) = line else { return };
                let said = serde_json::from_str(&line).unwrap_or(Said::Failed(line));
                if sender.send(said).is_err() {
                    return;
                }
            }
        });
        Ok(Actor { name: role, process, words, said })
    }

    pub(crate) fn tell(&mut self, word: &str) -> Outcome<()> {
        Ok(writeln!(self.words, "{word}")?)
    }

    /// What it says next, which has to come within the limit.
    pub(crate) fn hear(&self, limit: Duration) -> Outcome<Said> {
        match self.said.recv_timeout(limit) {
            Ok(Said::Failed(why)) => Err(format!("{}: {why}", self.name).into()),
            Ok(said) => Ok(said),
            Err(RecvTimeoutError::Timeout) => {
                Err(format!("{} said nothing for {limit:?}", self.name).into())
            }
            Err(RecvTimeoutError::Disconnected) => Err(format!("{} is gone", self.name).into()),
        }
    }

    /// Whether it has said something that was not heard yet.
    pub(crate) fn has_spoken(&self) -> bool {
        !self.said.is_empty()
    }

    fn pid(&self) -> Outcome<Pid> {
        let pid = Pid::from_child(&self.process);
        Ok(pid)
    }

    /// Whether the process, told to stop itself, stands still.
    pub(crate) fn has_stopped(&self) -> Outcome<bool> {
        match waitpid(Some(self.pid()?), WaitOptions::UNTRACED | WaitOptions::NOHANG)? {
            None => Ok(false),
            Some((_, status)) if status.stopped() => Ok(true),
            other => Err(format!("{} did not stop: {other:?}", self.name).into()),
        }
    }

    pub(crate) fn resume(&self) -> Outcome<()> {
        Ok(kill_process(self.pid()?, Signal::CONT)?)
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        // Both fail only for a process that has ended, which is what they are for.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
