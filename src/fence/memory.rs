//! The gate that remembers in memory, and lets a write run under it.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use parking_lot::{Mutex, ReentrantMutex};

use super::token::FencingToken;

/// Remembers the highest token of each resource and refuses lower ones, for the one process that
/// a resource's writes go through. Usable from any thread; resources do not wait for each other.
///
/// It lives and dies with the process: after a restart it knows of nobody, and two processes know
/// nothing of each other. [`StoredFenceGate`](crate::StoredFenceGate) is for that.
///
/// **It grows.** Each name of a resource that ever passed stays, some hundred bytes and the name,
/// until [`forget`](FenceGate::forget). Where others choose the names, somebody has to bound them.
///
/// # Example: a write that came too late
///
/// ```
/// use etcd_recipes::{FenceGate, FencingToken};
///
/// let gate = FenceGate::new();
/// // As they came over the wire.
/// let (old, new) = (FencingToken::from_wire(17), FencingToken::from_wire(23));
/// let mut pages = Vec::new();
/// assert_eq!(gate.guard("printer", old, || pages.push("a")), Some(()));
/// assert_eq!(gate.guard("printer", new, || pages.push("b")), Some(()));
/// assert_eq!(gate.guard("printer", old, || pages.push("c")), None);
/// assert_eq!(pages, ["a", "b"]);
/// ```
#[derive(Default)]
pub struct FenceGate {
    resources: Mutex<HashMap<String, Arc<Resource>>>,
}

/// What is known of one resource.
#[derive(Default)]
struct Resource {
    /// 0: nobody has passed. Changed by whose turn it is, read by anybody.
    highest: AtomicI64,
    /// Whose turn it is. Reentrant so that a write that asks for its own resource is found out
    /// instead of waiting for itself.
    turn: ReentrantMutex<RefCell<Turn>>,
}

#[derive(Default)]
struct Turn {
    /// No longer the gate's: whoever waited for this turn has to look the name up again.
    forgotten: bool,
}

impl Resource {
    fn highest(&self) -> Option<FencingToken> {
        let token = FencingToken::from_wire(self.highest.load(Ordering::Acquire));
        token.is_possible().then_some(token)
    }

    /// Waits for the turn and has it while `then` runs; `None` if the gate has forgotten this.
    fn in_turn<R>(&self, resource: &str, then: impl FnOnce(&mut Turn) -> R) -> Option<R> {
        let turn = self.turn.lock();
        let Ok(mut turn) = turn.try_borrow_mut() else {
            panic!("a write under the fence gate asks for its own resource `{resource}`");
        };
        (!turn.forgotten).then(|| then(&mut turn))
    }
}

impl FenceGate {
    /// A gate that knows of nobody.
    pub fn new() -> FenceGate {
        FenceGate::default()
    }

    /// Whether the token is at least as high as every one before it on this resource. Equal
    /// passes, since one hold writes more than once. Waits for a write that runs under
    /// [`guard`](FenceGate::guard): once this says `true`, no write of a lower token is under
    /// way there.
    ///
    /// A write made after this is not covered: a higher token may pass in between. Use `guard`
    /// where the write can be made inside.
    ///
    /// # Panics
    ///
    /// In a write under `guard` for the same resource.
    #[must_use = "a write whose token was refused must not be done"]
    pub fn pass(&self, resource: &str, token: impl Into<FencingToken>) -> bool {
        self.guard(resource, token, || ()).is_some()
    }

    /// Runs `write` if the token passes, and keeps every other token of the resource waiting
    /// meanwhile, so that the check and the write are one. `None`: refused, not run.
    ///
    /// `write` runs on this thread under the resource's own lock. So it should be bounded in
    /// time, and it may ask this gate for other resources only if no other write asks for the two
    /// the other way round. When it panics or fails, the token has passed all the same: lower
    /// ones stay refused.
    ///
    /// # Panics
    ///
    /// In a write under `guard` for the same resource; and when `write` does.
    #[must_use = "`None` says that the write was not done"]
    pub fn guard<R>(
        &self,
        resource: &str,
        token: impl Into<FencingToken>,
        write: impl FnOnce() -> R,
    ) -> Option<R> {
        let token = token.into();
        if !token.is_possible() {
            return None;
        }
        let mut write = Some(write);
        loop {
            let known = self.known(resource);
            let decided = known.in_turn(resource, |_| {
                if known.highest() > Some(token) {
                    return None;
                }
                // Before the write, so that it stands whatever comes of the write.
                known.highest.store(token.to_wire(), Ordering::Release);
                write.take().map(|write| write())
            });
            if let Some(outcome) = decided {
                return outcome;
            }
        }
    }

    /// The highest token that has passed; `None` if none has. Never waits for a write.
    pub fn highest(&self, resource: &str) -> Option<FencingToken> {
        self.resources.lock().get(resource)?.highest()
    }

    /// Forgets a resource, and returns what its highest token was. Any token passes next, that of
    /// a holder long gone too: only for a resource that nobody writes any more, or for an etcd
    /// that has lost its data. Waits for a write that runs under [`guard`](FenceGate::guard).
    ///
    /// # Panics
    ///
    /// In a write under `guard` for the same resource.
    pub fn forget(&self, resource: &str) -> Option<FencingToken> {
        let known = self.resources.lock().get(resource)?.clone();
        known.in_turn(resource, |turn| {
            turn.forgotten = true;
            self.resources.lock().remove(resource);
            known.highest()
        })?
    }

    fn known(&self, resource: &str) -> Arc<Resource> {
        let mut resources = self.resources.lock();
        if let Some(known) = resources.get(resource) {
            return known.clone();
        }
        resources.entry(resource.to_owned()).or_default().clone()
    }
}

impl fmt::Debug for FenceGate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let resources = self.resources.lock();
        f.debug_map().entries(resources.iter().map(|(name, one)| (name, one.highest()))).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc::channel;
    use std::thread;
    use std::time::Duration;

    use super::*;

    fn token(number: i64) -> FencingToken {
        FencingToken::from_wire(number)
    }

    #[test]
    fn lower_tokens_are_refused_and_equal_ones_pass() {
        let gate = FenceGate::new();
        assert_eq!(gate.highest("a"), None);
        assert!(gate.pass("a", token(5)) && gate.pass("a", token(5)));
        assert!(!gate.pass("a", token(4)));
        assert!(gate.pass("a", token(9)) && !gate.pass("a", token(5)));
        assert_eq!(gate.highest("a"), Some(token(9)));
        assert!(gate.pass("b", token(1)), "another resource has a memory of its own");
        assert_eq!(gate.guard("a", token(8), || panic!("was refused")), None::<()>);
    }

    #[test]
    fn numbers_of_no_hold_pass_nowhere_and_leave_nothing() {
        let gate = FenceGate::new();
        for number in [0, -1, i64::MIN] {
            assert!(!gate.pass("a", token(number)));
        }
        assert_eq!(format!("{gate:?}"), "{}");
    }

    #[test]
    fn a_write_that_panics_has_passed_and_blocks_nobody() {
        let gate = FenceGate::new();
        let write = || gate.guard("a", token(7), || panic!("halfway"));
        catch_unwind(AssertUnwindSafe(write)).map(drop).unwrap_err();
        assert!(!gate.pass("a", token(6)) && gate.pass("a", token(7)));
    }

    #[test]
    fn a_write_that_asks_for_its_own_resource_panics_instead_of_hanging() {
        let gate = FenceGate::new();
        let inner = || gate.guard("a", token(7), || gate.pass("a", token(8)));
        catch_unwind(AssertUnwindSafe(inner)).map(drop).unwrap_err();
        let inner = || gate.guard("a", token(7), || gate.forget("a"));
        catch_unwind(AssertUnwindSafe(inner)).map(drop).unwrap_err();
        assert_eq!(gate.highest("a"), Some(token(7)));
        let looks = gate.guard("a", token(7), || (gate.highest("a"), gate.pass("b", token(1))));
        assert_eq!(looks, Some((Some(token(7)), true)));
    }

    #[test]
    fn what_is_forgotten_begins_anew_after_the_write_that_runs() {
        let gate = FenceGate::new();
        assert_eq!(gate.forget("a"), None);
        let (started, begun) = channel();
        let (go, gone) = channel::<()>();
        let (say, heard) = channel();
        thread::scope(|scope| {
            let gate = &gate;
            scope.spawn(move || {
                gate.guard("a", token(9), || {
                    started.send(()).unwrap();
                    gone.recv().unwrap();
                })
            });
            begun.recv().unwrap();
            scope.spawn({
                let say = say.clone();
                move || say.send(("forget", gate.forget("a"))).unwrap()
            });
            scope.spawn(move || {
                let passed = gate.pass("a", token(9)).then(|| token(9));
                say.send(("pass", passed)).unwrap();
            });
            assert!(heard.recv_timeout(Duration::from_millis(50)).is_err(), "both wait");
            go.send(()).unwrap();
            // In either order the token passes, and the memory of 9 was there to be forgotten.
            for (who, found) in heard.iter() {
                assert_eq!(found, Some(token(9)), "{who}");
            }
        });
    }

    /// Eight writers, and one that makes the gate forget: two writes never run side by side.
    #[test]
    fn writes_of_one_resource_never_overlap() {
        let gate = FenceGate::new();
        let inside = AtomicUsize::new(0);
        thread::scope(|scope| {
            let write = || {
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                thread::yield_now();
                inside.fetch_sub(1, Ordering::SeqCst);
            };
            let writer = || {
                for _ in 0..500 {
                    assert!(gate.guard("a", token(3), write).is_some());
                }
            };
            let writers: Vec<_> = (0..8).map(|_| scope.spawn(writer)).collect();
            while !writers.iter().all(|writer| writer.is_finished()) {
                gate.forget("a");
                thread::yield_now();
            }
        });
    }
}
