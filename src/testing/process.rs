//! Processes that are never left behind.
//!
//! etcd takes no notice when the process that started it dies. So every server has a guard: a
//! `sh` that reads from a pipe held open by this process. The kernel closes the pipe however this
//! process ends, a SIGKILL included; the guard then kills the server and removes its directory.
//! The pipe also carries the server's current process id, an empty line while there is none. The
//! guard has a process group of its own, so what ends a test's group does not end its guard.

use std::fs::File;
use std::io::Write;
use std::ops::{Deref, DerefMut};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};

use crate::error::Result;
use crate::testing::{failed, failed_by};

const GUARD: &str = r#"
trap '' HUP INT TERM
pid=
while read -r line; do pid=$line; done
if [ -n "$pid" ]; then kill -KILL "$pid" 2>/dev/null; fi
for try in 1 2 3 4 5; do rm -rf "$@" 2>/dev/null && break; sleep 1; done
"#;

#[derive(Debug)]
struct Guard {
    shell: Child,
}

impl Guard {
    /// A guard that removes `dir`, if there is one, after the process is gone.
    fn new(dir: Option<&Path>) -> Result<Guard> {
        Command::new("sh")
            .args(["-c", GUARD, "etcd-guard"])
            .args(dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .map(|shell| Guard { shell })
            .map_err(|error| failed_by("cannot start `sh`", error))
    }

    fn watch(&mut self, child: &Child) -> Result<()> {
        self.tell(&child.id().to_string())
    }

    /// To be called while the process still owns its id, since ids are given anew.
    fn forget(&mut self) -> Result<()> {
        self.tell("")
    }

    fn tell(&mut self, line: &str) -> Result<()> {
        let Some(pipe) = &mut self.shell.stdin else { return Err(failed("the guard is gone")) };
        writeln!(pipe, "{line}").map_err(|error| failed_by("the guard is gone", error))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.shell.stdin.take());
        // A guard that cannot be waited for has ended.
        let _ = self.shell.wait();
    }
}

/// An `etcdctl` that goes on until it ends, is killed or is dropped.
///
/// It is used like the [`Child`] that it holds.
///
/// # Example: a lock held by another program
///
/// ```no_run
/// # fn main() -> etcd_recipes::Result<()> {
/// let server = etcd_recipes::testing::EtcdServer::start()?;
/// let holder = server.spawn_ctl(["lock", "/jobs/nightly"])?;
/// // … the code under test has to wait …
/// drop(holder);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct CtlProcess {
    child: Child,
    guard: Guard,
}

impl CtlProcess {
    pub(super) fn spawn(command: &mut Command) -> Result<CtlProcess> {
        let mut guard = Guard::new(None)?;
        let child = command.spawn().map_err(|error| failed_by("cannot start etcdctl", error))?;
        guard.watch(&child)?;
        Ok(CtlProcess { child, guard })
    }
}

impl Deref for CtlProcess {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.child
    }
}

impl DerefMut for CtlProcess {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.child
    }
}

impl Drop for CtlProcess {
    fn drop(&mut self) {
        // It may have ended, or been waited for, before.
        let _ = self.child.kill();
        let _ = self.guard.forget();
        let _ = self.child.wait();
    }
}

/// A server's process, which comes and goes, and the directory it works in.
#[derive(Debug)]
pub(super) struct Process {
    dir: PathBuf,
    guard: Guard,
    child: Option<Child>,
}

impl Process {
    /// Makes the directory, which lives as long as the value, and sets the guard up.
    pub(super) fn new(dir: &Path) -> Result<Process> {
        std::fs::create_dir_all(dir)
            .map_err(|error| failed_by(format!("cannot create {}", dir.display()), error))?;
        let guard = Guard::new(Some(dir))?;
        Ok(Process { dir: dir.to_owned(), guard, child: None })
    }

    pub(super) fn log(&self) -> Result<File> {
        let path = self.log_path();
        File::options()
            .create(true)
            .append(true)
            .open(&path)
            .map_err(|error| failed_by(format!("cannot open {}", path.display()), error))
    }

    fn log_path(&self) -> PathBuf {
        self.dir.join("log")
    }

    /// The last lines that the process wrote.
    pub(super) fn log_tail(&self) -> String {
        let text = std::fs::read(self.log_path()).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(30)..].join("\n")
    }

    pub(super) fn spawn(&mut self, command: &mut Command) -> Result<()> {
        if self.pid().is_some() {
            return Err(failed("the server is running already"));
        }
        let child = command
            .stdin(Stdio::null())
            .stdout(self.log()?)
            .stderr(self.log()?)
            .process_group(0)
            .spawn()
            .map_err(|error| {
                failed_by(format!("cannot start {}", command.get_program().display()), error)
            })?;
        self.guard.watch(self.child.insert(child))
    }

    /// The id of the running process, which may be frozen.
    pub(super) fn pid(&mut self) -> Option<u32> {
        match self.exited() {
            None => self.child.as_ref().map(Child::id),
            Some(_) => None,
        }
    }

    /// How the process ended, if it ended by itself.
    pub(super) fn exited(&mut self) -> Option<ExitStatus> {
        self.child.as_mut()?.try_wait().ok().flatten()
    }

    fn running(&mut self) -> Result<Pid> {
        self.pid()
            .and_then(|id| i32::try_from(id).ok())
            .and_then(Pid::from_raw)
            .ok_or_else(|| failed("the server is not running"))
    }

    fn signal(pid: Pid, signal: Signal) -> Result<()> {
        kill_process(pid, signal)
            .map_err(|error| failed_by("cannot signal the server", error.into()))
    }

    /// Stops the process in its tracks; returns once all its threads stand still.
    pub(super) fn freeze(&mut self) -> Result<()> {
        let pid = self.running()?;
        Process::signal(pid, Signal::STOP)?;
        // NOWAIT leaves an exit to be collected by the standard library.
        let until = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        let seen = waitid(WaitId::Pid(pid), until)
            .map_err(|error| failed_by("cannot wait for the server to stop", error.into()))?;
        match seen {
            Some(status) if status.stopped() => Ok(()),
            _ => Err(failed("the server ended instead of freezing")),
        }
    }

    pub(super) fn thaw(&mut self) -> Result<()> {
        Process::signal(self.running()?, Signal::CONT)
    }

    pub(super) fn kill(&mut self) -> Result<()> {
        let Some(child) = &mut self.child else { return Ok(()) };
        child.kill().map_err(|error| failed_by("cannot kill the server", error))?;
        self.collect()
    }

    /// Asks the process to end; false when it has not by the limit.
    pub(super) fn terminate(&mut self, limit: Duration) -> Result<bool> {
        if self.pid().is_some() {
            let pid = self.running()?;
            Process::signal(pid, Signal::TERM)?;
            Process::signal(pid, Signal::CONT)?;
            let end = Instant::now() + limit;
            while self.pid().is_some() {
                if Instant::now() >= end {
                    return Ok(false);
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        self.collect()?;
        Ok(true)
    }

    fn collect(&mut self) -> Result<()> {
        if self.child.is_none() {
            return Ok(());
        }
        let told = self.guard.forget();
        if let Some(mut child) = self.child.take() {
            child.wait().map_err(|error| failed_by("cannot wait for the server", error))?;
        }
        told
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Nothing can be done about a failure here, and the guard cleans up all the same.
        let _ = self.kill();
    }
}
