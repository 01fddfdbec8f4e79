//! Processes that measure: this program, started again with a hidden argument. It is told what to
//! do by lines on its standard input, and answers each of them by one line.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use crate::measure::Outcome;
use crate::{processes, quiet};

/// The hidden argument.
pub(crate) const FLAG: &str = "--worker";

/// How long an answer may take; none of what is asked for takes more than a few seconds.
const LIMIT: Duration = Duration::from_secs(60);

/// Such a process. Dropped, it is killed and waited for.
pub(crate) struct Worker {
    child: Child,
    orders: ChildStdin,
    answers: Receiver<String>,
}

impl Worker {
    /// Starts one and waits until it is ready.
    pub(crate) fn start(kind: &str, endpoint: &str) -> Outcome<Worker> {
        let mut child = Command::new(std::env::current_exe()?)
            .args([FLAG, kind, endpoint])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (Some(orders), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err("a worker without pipes".into());
        };
        let (send, answers) = channel();
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if send.send(line).is_err() {
                    return;
                }
            }
        });
        let worker = Worker { child, orders, answers };
        worker.answer()?;
        Ok(worker)
    }

    pub(crate) fn tell(&mut self, order: &str) -> Outcome<()> {
        Ok(writeln!(self.orders, "{order}")?)
    }

    pub(crate) fn answer(&self) -> Outcome<String> {
        self.answers.recv_timeout(LIMIT).map_err(|_| "a worker ended or is stuck".into())
    }

    pub(crate) fn ask(&mut self, order: &str) -> Outcome<String> {
        self.tell(order)?;
        self.answer()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // It may have ended before.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What carries out the orders in such a process.
pub(crate) type Orders = Box<dyn FnMut(&str) -> Outcome<String>>;

/// The worker's side: ends with its input, so with the process that started it, in the middle of
/// an order if need be.
pub(crate) fn work(mut args: impl Iterator<Item = String>) -> Outcome<()> {
    let (Some(kind), Some(endpoint)) = (args.next(), args.next()) else {
        return Err("a worker needs a kind and an endpoint".into());
    };
    let mut carry_out: Orders = match kind.as_str() {
        processes::KIND => processes::worker(&endpoint)?,
        quiet::KIND => quiet::worker(&endpoint)?,
        other => return Err(format!("no such worker: {other}").into()),
    };
    let (send, orders) = channel();
    thread::spawn(move || {
        for order in std::io::stdin().lines().map_while(Result::ok) {
            if send.send(order).is_err() {
                return;
            }
        }
        // Nobody waits for what is being measured, and it may never end.
        std::process::exit(0);
    });
    println!("ready");
    for order in orders {
        println!("{}", carry_out(&order)?);
    }
    Ok(())
}
