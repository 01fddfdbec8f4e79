//! Waiting for a condition with a limit, in place of a sleep and a hope.

use std::fmt::Debug;
use std::time::{Duration, Instant};

/// What the closure of [`eventually`] may return: a `bool`, an `Option` or a `Result`.
pub trait Condition {
    /// What the wait returns once the condition is met.
    type Value;

    /// The value, or a word on why there is none yet.
    ///
    /// # Errors
    ///
    /// The condition is not met; the text says what was seen in its place.
    fn met(self) -> Result<Self::Value, String>;
}

impl Condition for bool {
    type Value = ();

    fn met(self) -> Result<(), String> {
        if self { Ok(()) } else { Err("false".to_owned()) }
    }
}

impl<T> Condition for Option<T> {
    type Value = T;

    fn met(self) -> Result<T, String> {
        self.ok_or_else(|| "None".to_owned())
    }
}

impl<T, E: Debug> Condition for Result<T, E> {
    type Value = T;

    fn met(self) -> Result<T, String> {
        self.map_err(|error| format!("{error:?}"))
    }
}

/// Asks `condition` every few milliseconds until it is met, and returns its value.
///
/// The condition is asked at least once, and once more after the limit has passed.
///
/// # Panics
///
/// When `limit` passes first; the message names `what` and the last answer.
///
/// # Example: a thread gets there
///
/// ```
/// use std::time::Duration;
/// use etcd_recipes::testing::eventually;
///
/// let worker = std::thread::spawn(|| 42);
/// eventually(Duration::from_secs(5), "the worker ends", || worker.is_finished());
/// ```
#[track_caller]
pub fn eventually<C: Condition>(
    limit: Duration,
    what: &str,
    mut condition: impl FnMut() -> C,
) -> C::Value {
    let end = Instant::now() + limit;
    loop {
        let late = Instant::now() >= end;
        match condition().met() {
            Ok(value) => return value,
            Err(seen) if late => panic!("not within {limit:?}: {what} (last seen: {seen})"),
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_value_comes_back() {
        let mut left = 3;
        let value = eventually(Duration::from_secs(5), "three tries", || {
            left -= 1;
            (left == 0).then_some("there")
        });
        assert_eq!(value, "there");
    }

    #[test]
    #[should_panic(expected = "not within 10ms: pigs fly (last seen: false)")]
    fn a_limit_that_passes_names_what_was_awaited() {
        eventually(Duration::from_millis(10), "pigs fly", || false);
    }
}
