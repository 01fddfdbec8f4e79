//! Events as lines for people: when, who, what.

use std::io::IsTerminal;
use std::sync::LazyLock;

use crate::recorder::{Event, What};

const BOLD: &str = "\x1b[1m";
const DIM: &str = "\x1b[2m";
const RED: &str = "\x1b[31m";
const GREEN: &str = "\x1b[32m";
const YELLOW: &str = "\x1b[33m";
const CYAN: &str = "\x1b[36m";
const PLAIN: &str = "\x1b[0m";

static COLOURED: LazyLock<bool> =
    LazyLock::new(|| std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none());

fn paint(colour: &str, text: &str) -> String {
    if *COLOURED { format!("{colour}{text}{PLAIN}") } else { text.to_owned() }
}

pub(crate) fn title(letter: char, title: &str) {
    println!("\n{}", paint(BOLD, &format!("({letter}) {title}")));
}

pub(crate) fn event(event: &Event) {
    let at = paint(DIM, &format!("{:>8} ms", event.at.as_millis()));
    let who = paint(CYAN, &format!("{:<8}", event.who));
    println!("{at}  {who}  {}", paint(colour(event.what), &event.detail));
}

pub(crate) fn verdict(result: &Result<(), String>) {
    match result {
        Ok(()) => println!("{}", paint(GREEN, "             in the promised order")),
        Err(why) => println!("{}", paint(RED, &format!("             {why}"))),
    }
}

fn colour(what: What) -> &'static str {
    match what {
        What::Cut | What::Mended | What::Cancels => YELLOW,
        What::Expired
        | What::KeyGone
        | What::IsHeldFalse
        | What::TokenCancelled
        | What::ListenerRan
        | What::Interrupted
        | What::Unlocked(false) => RED,
        What::Restored | What::KeyBack | What::Acquired | What::Leads | What::Unlocked(true) => {
            GREEN
        }
        What::KeySet | What::Waits | What::LeftTheQueue | What::Sleeps | What::Relinquishes => {
            PLAIN
        }
    }
}
