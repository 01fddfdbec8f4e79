//! Holder and rival on the library's recipes, each in a process of its own.

use std::time::Duration;

use etcd_recipes::testing::boot_nanos;
use etcd_recipes::{Client, Mutex};

use crate::options::Recipe;
use crate::polling::{Stamp, poll};
use crate::wire::{Outcome, Said, say, words};

/// Acquires, tells so, and watches its hold until it is lost.
pub(crate) fn hold(recipe: Recipe, endpoint: &str, path: &str, ttl: Duration) -> Outcome<()> {
    let words = words();
    let client = Client::connect([endpoint])?;
    match recipe {
        Recipe::Mutex => {
            let mutex = Mutex::builder(&client, path).ttl(ttl).build()?;
            let (listener, token) = (Stamp::default(), Stamp::default());
            let heard = listener.clone();
            mutex.add_loss_listener(move |_| heard.set());
            let guard = mutex.lock()?;
            let (cancelled, woken) = (guard.cancel_token().clone(), token.clone());
            std::thread::spawn(move || {
                if cancelled.wait().is_ok() {
                    woken.set();
                }
            });
            say(&Said::Held { key: guard.lock_key() });
            say(&Said::Lost(poll(|| guard.is_held(), &words, &listener, &token)?));
            // The parent ends this process.
            for _word in &words {}
            Ok(())
        }
    }
}

/// Connects, waits for the word, and acquires.
pub(crate) fn rival(recipe: Recipe, endpoint: &str, path: &str, ttl: Duration) -> Outcome<()> {
    let words = words();
    let client = Client::connect([endpoint])?;
    client.wait_ready(Duration::from_secs(10))?;
    match recipe {
        Recipe::Mutex => {
            let mutex = Mutex::builder(&client, path).ttl(ttl).build()?;
            say(&Said::Ready);
            words.recv()?;
            let guard = mutex.lock()?;
            let at = boot_nanos();
            say(&Said::Acquired { at });
            for _word in &words {}
            drop(guard);
            Ok(())
        }
    }
}
