use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;
use std::sync::atomic::AtomicUsize;
use std::thread;
use std::time::Instant as Wall;

use super::*;

const LONG: Duration = Duration::from_secs(600);

fn pause() -> Result<()> {
    CancelToken::new().sleep(Duration::from_millis(1))
}

fn cancelled() -> CancelToken {
    let token = CancelToken::new();
    token.cancel();
    token
}

#[test]
fn cancelling_wakes_every_form_of_waiting() {
    let token = CancelToken::new();
    let spawn = |f: fn(CancelToken) -> bool| {
        let token = token.clone();
        thread::spawn(move || f(token))
    };
    let waiters = [
        spawn(|token| token.wait().is_ok()),
        spawn(|token| token.wait_for(LONG).unwrap()),
        spawn(|token| token.sleep(LONG).unwrap_err().is_interrupted()),
        spawn(|token| token.receiver().recv().is_err()),
        spawn(|token| token.child().wait().is_ok()),
        spawn(|token| token.scope(pause_long).unwrap_err().is_interrupted()),
        spawn(|token| token.scope(|| token.wait()).is_ok()),
    ];
    token.cancel();
    for waiter in waiters {
        assert!(waiter.join().unwrap());
    }
    assert!(token.is_cancelled());
    assert!(token.wait().is_ok());
    assert!(token.receiver().recv().is_err());
}

fn pause_long() -> Result<()> {
    CancelToken::new().sleep(LONG)
}

#[test]
fn a_wait_in_a_scope_is_woken_promptly() {
    let token = CancelToken::new();
    let (entered, has_entered) = crossbeam_channel::bounded(1);
    let waiter = thread::spawn({
        let token = token.clone();
        move || {
            token.scope(|| {
                entered.send(()).unwrap();
                let error = CancelToken::new().wait().unwrap_err();
                assert!(error.is_interrupted());
                Wall::now()
            })
        }
    });
    has_entered.recv().unwrap();
    let begun = Wall::now();
    token.cancel();
    let woken = waiter.join().unwrap();
    assert!(woken.saturating_duration_since(begun) < Duration::from_millis(100));
}

#[test]
fn the_limit_of_a_wait_passes_without_a_cancellation() {
    let token = CancelToken::new();
    assert!(!token.wait_for(Duration::from_millis(5)).unwrap());
    assert!(!token.wait_for(Duration::ZERO).unwrap());
    assert!(token.sleep(Duration::from_millis(5)).is_ok());
    assert!(cancelled().wait_for(Duration::ZERO).unwrap());
}

#[test]
fn a_cancelled_scope_interrupts_waiting_for_another_token() {
    cancelled().scope(|| {
        assert!(CancelToken::new().wait().unwrap_err().is_interrupted());
        assert!(CancelToken::new().wait_for(LONG).unwrap_err().is_interrupted());
        assert!(cancelled().wait().is_ok());
    });
}

#[test]
fn the_order_is_flag_then_receivers_then_hooks_then_children() {
    let token = CancelToken::new();
    let child = token.child();
    let receiver = token.receiver();
    let checked = Arc::new(AtomicBool::new(false));
    let _hook = token.on_cancel({
        let (token, child, checked) = (token.clone(), child.clone(), checked.clone());
        move || {
            assert!(token.is_cancelled());
            assert!(receiver.recv().is_err());
            assert!(!child.is_cancelled());
            checked.store(true, Ordering::Relaxed);
        }
    });
    token.cancel();
    assert!(checked.load(Ordering::Relaxed));
    assert!(child.is_cancelled());
}

#[test]
fn a_hook_runs_once_or_not_at_all() {
    let count = Arc::new(AtomicUsize::new(0));
    let add = |token: &CancelToken| {
        let count = count.clone();
        token.on_cancel(move || {
            count.fetch_add(1, Ordering::Relaxed);
        })
    };
    let token = CancelToken::new();
    drop(add(&token));
    let _kept = add(&token);
    token.cancel();
    token.cancel();
    assert_eq!(count.load(Ordering::Relaxed), 1);
    let _late = add(&token);
    assert_eq!(count.load(Ordering::Relaxed), 2);
}

#[test]
fn a_hook_may_use_the_token_and_register_another() {
    let token = CancelToken::new();
    let second = Arc::new(Mutex::new(None));
    let ran = Arc::new(AtomicBool::new(false));
    let _hook = token.on_cancel({
        let (token, second, ran) = (token.clone(), second.clone(), ran.clone());
        move || {
            let ran = ran.clone();
            *second.lock() = Some(token.on_cancel(move || ran.store(true, Ordering::Relaxed)));
            token.cancel();
        }
    });
    token.cancel();
    assert!(ran.load(Ordering::Relaxed));
}

#[test]
fn a_hook_runs_exactly_once_under_a_race() {
    for _ in 0..200 {
        let token = CancelToken::new();
        let count = Arc::new(AtomicUsize::new(0));
        let start = Arc::new(Barrier::new(3));
        let cancellers: Vec<_> = (0..2)
            .map(|_| {
                let (token, start) = (token.clone(), start.clone());
                thread::spawn(move || {
                    start.wait();
                    token.cancel();
                })
            })
            .collect();
        start.wait();
        let hooks: Vec<_> = (0..20)
            .map(|_| {
                let count = count.clone();
                token.on_cancel(move || {
                    count.fetch_add(1, Ordering::Relaxed);
                })
            })
            .collect();
        for canceller in cancellers {
            canceller.join().unwrap();
        }
        assert_eq!(count.load(Ordering::Relaxed), 20);
        drop(hooks);
        assert_eq!(count.load(Ordering::Relaxed), 20);
    }
}

#[test]
fn a_child_made_during_the_cancellation_is_cancelled() {
    for _ in 0..200 {
        let token = CancelToken::new();
        let canceller = thread::spawn({
            let token = token.clone();
            move || token.cancel()
        });
        let children: Vec<_> = (0..20).map(|_| token.child()).collect();
        canceller.join().unwrap();
        assert!(children.iter().all(CancelToken::is_cancelled));
    }
}

#[test]
fn a_dropped_child_leaves_nothing_behind() {
    let token = CancelToken::new();
    for _ in 0..100 {
        drop(token.child());
    }
    assert!(token.inner.waiting.lock().children.is_empty());
    token.scope(|| drop(CancelToken::current()));
    assert!(token.inner.waiting.lock().children.is_empty());
    assert_eq!(Arc::strong_count(&token.inner), 1);
}

#[test]
fn a_wait_leaves_no_hook_behind() {
    let token = CancelToken::new();
    token.scope(|| token.wait_for(Duration::from_millis(1))).unwrap();
    assert!(token.inner.waiting.lock().hooks.is_empty());
}

#[test]
fn a_grandchild_hears_through_a_dropped_child() {
    let token = CancelToken::new();
    let grandchild = token.child().child();
    token.cancel();
    assert!(grandchild.is_cancelled());
}

#[test]
fn a_long_line_of_children_is_cancelled_and_dropped() {
    let token = CancelToken::new();
    let mut last = token.child();
    for _ in 0..100_000 {
        last = last.child();
    }
    token.cancel();
    assert!(last.is_cancelled());
    drop(last);
    assert_eq!(Arc::strong_count(&token.inner), 1);
}

#[test]
fn scopes_nest_and_end_with_the_closure() {
    let outer = cancelled();
    outer.scope(|| {
        assert!(interrupted());
        CancelToken::new().scope(|| assert!(interrupted()));
        assert_eq!(active().len(), 1);
    });
    assert!(!interrupted());
    let panicked = catch_unwind(AssertUnwindSafe(|| outer.scope(|| panic!("in the scope"))));
    assert!(panicked.is_err());
    assert!(!interrupted());
    assert!(pause().is_ok());
}

#[test]
fn entries_may_end_in_any_order() {
    let (first, second) = (CancelToken::new(), cancelled());
    let first_entry = first.enter();
    let second_entry = second.enter();
    drop(first_entry);
    assert!(interrupted());
    drop(second_entry);
    assert!(!interrupted());
    assert!(active().is_empty());
}

#[test]
fn a_shield_masks_what_was_entered_before_and_nothing_else() {
    let token = cancelled();
    token.scope(|| {
        CancelToken::shield(|| {
            assert!(!interrupted());
            assert!(pause().is_ok());
            token.scope(|| {
                assert!(interrupted());
                CancelToken::shield(|| assert!(!interrupted()));
                assert!(interrupted());
            });
            assert!(!interrupted());
            assert!(!CancelToken::current().is_cancelled());
        });
        assert!(interrupted());
        let panicked = catch_unwind(|| CancelToken::shield(|| panic!("in the shield")));
        assert!(panicked.is_err());
        assert!(interrupted());
    });
}

#[test]
fn an_entry_that_outlives_its_shield_is_masked_by_the_next() {
    let token = cancelled();
    let entry = CancelToken::shield(|| token.enter());
    assert!(interrupted());
    CancelToken::shield(|| assert!(!interrupted()));
    drop(entry);
    assert!(!interrupted());
}

#[test]
fn current_carries_every_scope_to_another_thread() {
    let (first, second) = (CancelToken::new(), CancelToken::new());
    let carried = first.scope(|| second.scope(CancelToken::current));
    let waiter = thread::spawn({
        let carried = carried.clone();
        move || carried.scope(pause_long)
    });
    second.cancel();
    assert!(waiter.join().unwrap().unwrap_err().is_interrupted());
    assert!(carried.is_cancelled() && !first.is_cancelled());
    assert!(!CancelToken::current().is_cancelled());
}

#[test]
fn cancelling_current_leaves_the_scope_alone() {
    let token = CancelToken::new();
    token.scope(|| CancelToken::current().cancel());
    assert!(!token.is_cancelled());
    let carried = cancelled().scope(CancelToken::current);
    assert!(carried.is_cancelled());
}

#[test]
fn everything_works_in_a_thread_local_destructor() {
    struct Late(CancelToken, Sender<bool>);
    impl Drop for Late {
        fn drop(&mut self) {
            let fine = self.0.scope(|| {
                let _ = CancelToken::current().child();
                CancelToken::shield(pause).is_ok() && self.0.wait_for(LONG).is_ok()
            });
            let _ = interrupted();
            let _ = self.1.send(fine && active().is_empty());
        }
    }
    thread_local!(static LATE: RefCell<Vec<Late>> = const { RefCell::new(Vec::new()) });

    let token = CancelToken::new();
    let (sender, receiver) = crossbeam_channel::unbounded();
    // The scope is destroyed before the destructor runs in one case, after it in the other.
    for scope_first in [true, false] {
        let (token, sender) = (token.clone(), sender.clone());
        thread::spawn(move || {
            if scope_first {
                token.scope(|| ());
            }
            LATE.with(|late| late.borrow_mut().push(Late(token.clone(), sender)));
            token.scope(|| ());
        });
    }
    token.cancel();
    assert!(receiver.recv_timeout(Duration::from_secs(10)).unwrap());
    assert!(receiver.recv_timeout(Duration::from_secs(10)).unwrap());
}

#[test]
fn debug_says_whether_it_is_cancelled() {
    assert_eq!(format!("{:?}", cancelled()), "CancelToken { cancelled: true }");
}

/// How many entries this thread keeps, over or not.
fn kept() -> usize {
    SCOPE.with(|scope| scope.borrow().entries.len())
}

#[test]
fn a_stay_that_another_thread_ends_counts_no_longer_and_is_forgotten() {
    let token = cancelled();
    let stay = token.enter_until_over();
    assert!(interrupted() && pause().is_err());
    assert!(CancelToken::shield(pause).is_ok(), "a shield masks it as any other");
    let other = thread::spawn(move || {
        assert!(!interrupted(), "the scope went along");
        drop(stay);
    });
    other.join().unwrap();
    assert_eq!(kept(), 1, "nobody else can reach into this thread");
    assert!(!interrupted() && pause().is_ok());
    assert_eq!(kept(), 0);
    assert_eq!(Arc::strong_count(&token.inner), 1, "the token is kept by nobody");
}

#[test]
fn stays_end_on_their_own_thread_at_once_and_in_any_order() {
    let (calm, token) = (CancelToken::new(), cancelled());
    let first = calm.enter_until_over();
    let second = token.enter_until_over();
    let third = calm.enter_until_over();
    drop(first);
    assert_eq!(kept(), 2);
    assert!(interrupted());
    drop(second);
    assert!(!interrupted());
    drop(third);
    assert_eq!(kept(), 0);
}

#[test]
fn a_stay_outlives_its_thread() {
    let token = CancelToken::new();
    let stay = thread::scope(|scope| scope.spawn(|| token.enter_until_over()).join().unwrap());
    eventually_alone(&token);
    drop(stay);
}

fn eventually_alone(token: &CancelToken) {
    let end = Wall::now() + Duration::from_secs(10);
    while Arc::strong_count(&token.inner) > 1 {
        assert!(Wall::now() < end, "the thread's scope keeps the token");
        thread::yield_now();
    }
}
