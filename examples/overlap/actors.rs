//! Holder and rival on the library's recipes, each in a process of its own.

use std::time::Duration;

use crossbeam_channel::bounded;
use etcd_recipes::testing::boot_nanos;
use etcd_recipes::{
    CancelToken, Client, LeaderLatch, LeaderSelector, Loss, Mutex, RwLock, Semaphore,
};

use crate::options::Recipe;
use crate::polling::{Stamp, poll};
use crate::wire::{Outcome, Said, say, words};

/// What was taken, by whatever recipe.
struct Taken {
    /// The recipe had given it.
    at: u64,
    key: String,
    token: CancelToken,
    is_held: Box<dyn Fn() -> bool>,
}

/// Waits for it.
type Take = Box<dyn FnOnce() -> Outcome<Taken>>;

/// Makes the recipe, with a listener that stamps a loss.
fn prepare(
    recipe: Recipe,
    client: &Client,
    path: &str,
    ttl: Duration,
    told: &Stamp,
) -> Outcome<Take> {
    let told = told.clone();
    let listener = move |_: &Loss| told.set();
    Ok(match recipe {
        Recipe::Mutex => {
            let mutex = Mutex::builder(client, path).ttl(ttl).build()?;
            mutex.add_loss_listener(listener);
            Box::new(move || {
                let guard = mutex.lock_owned()?;
                Ok(Taken {
                    at: boot_nanos(),
                    key: guard.lock_key(),
                    token: guard.cancel_token().clone(),
                    is_held: Box::new(move || guard.is_held()),
                })
            })
        }
        Recipe::RwLockWrite => {
            let lock = RwLock::builder(client, path).ttl(ttl).build()?;
            lock.add_loss_listener(listener);
            Box::new(move || {
                let guard = lock.write_owned()?;
                Ok(Taken {
                    at: boot_nanos(),
                    key: guard.lock_key(),
                    token: guard.cancel_token().clone(),
                    is_held: Box::new(move || guard.is_held()),
                })
            })
        }
        Recipe::Semaphore1 => {
            let semaphore = Semaphore::builder(client, path, 1).ttl(ttl).build()?;
            semaphore.add_loss_listener(listener);
            Box::new(move || {
                let permit = semaphore.acquire()?;
                Ok(Taken {
                    at: boot_nanos(),
                    key: permit.lock_key(),
                    token: permit.cancel_token().clone(),
                    is_held: Box::new(move || permit.is_held()),
                })
            })
        }
        Recipe::Selector => {
            let (won, wins) = bounded(1);
            let selector = LeaderSelector::builder(client, path)
                .ttl(ttl)
                .on_lead(move |term| {
                    won.send((boot_nanos(), term.clone()))?;
                    Ok(term.wait_until_finished()?)
                })
                .build()?;
            selector.add_loss_listener(listener);
            Box::new(move || {
                selector.start()?;
                let (at, term) = wins.recv()?;
                Ok(Taken {
                    at,
                    key: term.lock_key(),
                    token: term.cancel_token().clone(),
                    is_held: Box::new(move || selector.is_leader() || term.is_leader()),
                })
            })
        }
        Recipe::Latch => {
            let latch = LeaderLatch::builder(client, path).ttl(ttl).build()?;
            latch.add_loss_listener(listener);
            Box::new(move || {
                latch.start()?;
                latch.wait()?;
                let at = boot_nanos();
                let leadership = latch.leadership().ok_or("the latch led and leads no more")?;
                Ok(Taken {
                    at,
                    key: leadership.lock_key(),
                    token: leadership.cancel_token().clone(),
                    is_held: Box::new(move || latch.has_leadership() || leadership.is_leader()),
                })
            })
        }
    })
}

/// Acquires, tells so, and watches its hold until it is lost.
pub(crate) fn hold(recipe: Recipe, endpoint: &str, path: &str, ttl: Duration) -> Outcome<()> {
    let words = words();
    let client = Client::connect([endpoint])?;
    let (listener, token) = (Stamp::default(), Stamp::default());
    let taken = prepare(recipe, &client, path, ttl, &listener)?()?;
    let (cancelled, woken) = (taken.token.clone(), token.clone());
    std::thread::spawn(move || {
        if cancelled.wait().is_ok() {
            woken.set();
        }
    });
    say(&Said::Held { key: taken.key.clone() });
    say(&Said::Lost(poll(&taken.is_held, &words, &listener, &token)?));
    // A latch stands in the queue again, and where the rival lost its place too, before it.
    drop(taken);
    // The parent ends this process.
    for _word in &words {}
    Ok(())
}

/// Connects, waits for the word, and acquires.
pub(crate) fn rival(recipe: Recipe, endpoint: &str, path: &str, ttl: Duration) -> Outcome<()> {
    let words = words();
    let client = Client::connect([endpoint])?;
    client.wait_ready(Duration::from_secs(10))?;
    let take = prepare(recipe, &client, path, ttl, &Stamp::default())?;
    say(&Said::Ready);
    words.recv()?;
    let taken = take()?;
    say(&Said::Acquired { at: taken.at });
    for _word in &words {}
    Ok(())
}
