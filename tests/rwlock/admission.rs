//! Who gets in, and in which order.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::sync::{Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use etcd_recipes::testing::EtcdServer;

use super::support::*;
use super::{Held, Side, Waiter, crowd, line, long, wait_line};

#[test]
fn readers_share_and_a_writer_is_alone() {
    let etcd = EtcdServer::start().unwrap();
    let locks = crowd(&etcd, "/locks/a", 3);
    let together = Barrier::new(13);
    let enough = Barrier::new(13);
    thread::scope(|scope| {
        for lock in &locks {
            for _ in 0..4 {
                scope.spawn(|| {
                    let guard = lock.read().unwrap();
                    together.wait();
                    assert!(guard.is_held());
                    enough.wait();
                    assert!(guard.unlock());
                });
            }
        }
        together.wait();
        assert_eq!(line(&locks[0]), ["R+"; 12].join(" "));
        for lock in &locks {
            assert!(lock.try_write().unwrap().is_none());
            assert!(lock.try_write_for(ms(50)).unwrap().is_none());
        }
        enough.wait();
    });
    let guard = locks[0].write().unwrap();
    for lock in &locks[1..] {
        assert!(lock.try_read().unwrap().is_none());
        assert!(lock.try_write().unwrap().is_none());
        assert!(lock.try_read_for(ms(50)).unwrap().is_none());
        assert!(lock.try_write_for(ms(50)).unwrap().is_none());
        assert!(lock.try_read_owned().unwrap().is_none());
        assert!(lock.try_write_owned().unwrap().is_none());
        assert!(lock.try_read_owned_for(ms(50)).unwrap().is_none());
        assert!(lock.try_write_owned_for(ms(50)).unwrap().is_none());
    }
    // The other threads of the same lock are others too.
    thread::scope(|scope| {
        scope.spawn(|| {
            assert!(locks[0].try_read().unwrap().is_none());
            assert!(locks[0].try_write().unwrap().is_none());
        });
    });
    assert_eq!(line(&locks[0]), "W+");
    assert!(guard.is_held() && guard.unlock());
    assert!(keys(&etcd, "/locks/").is_empty());
}

#[test]
fn every_form_gets_in_where_nobody_is() {
    let etcd = EtcdServer::start().unwrap();
    let lock = long(&connect(&etcd), "/locks/a");
    assert!(lock.read().unwrap().unlock());
    assert!(lock.try_read().unwrap().unwrap().unlock());
    assert!(lock.try_read_for(ms(500)).unwrap().unwrap().unlock());
    assert!(lock.read_owned().unwrap().unlock());
    assert!(lock.try_read_owned().unwrap().unwrap().unlock());
    assert!(lock.try_read_owned_for(ms(500)).unwrap().unwrap().unlock());
    assert!(lock.write().unwrap().unlock());
    assert!(lock.try_write().unwrap().unwrap().unlock());
    assert!(lock.try_write_for(ms(500)).unwrap().unwrap().unlock());
    assert!(lock.write_owned().unwrap().unlock());
    assert!(lock.try_write_owned().unwrap().unwrap().unlock());
    assert!(lock.try_write_owned_for(ms(500)).unwrap().unwrap().unlock());
    assert_eq!(lock.with_read(|guard| guard.is_held()).unwrap(), true);
    assert_eq!(lock.with_write(|guard| guard.put("/data", "1").unwrap()).unwrap(), true);
    assert!(keys(&etcd, "/locks/").is_empty());
}

#[test]
fn a_queue_of_both_is_served_group_by_group() {
    let etcd = EtcdServer::start().unwrap();
    let locks = crowd(&etcd, "/locks/a", 3);
    for round in 0..5 {
        let first = Held::take(&locks[round % 3], Side::R).unwrap();
        let rest = [Side::R, Side::W, Side::R, Side::R, Side::W, Side::W, Side::R];
        let waiting: Vec<_> = rest
            .iter()
            .enumerate()
            .map(|(at, side)| Waiter::queue(&locks[(at + round) % 3], *side))
            .collect();
        assert_eq!(line(&locks[0]), "R+ R+ W R R W W R");
        let second = waiting[0].enters();
        waiting[1].stays_out();
        assert!(first.unlock());
        assert!(second.verify() && waiting[1].is_waiting());
        assert!(second.unlock());
        let writer = waiting[1].enters();
        assert_eq!(line(&locks[0]), "W+ R R W W R");
        waiting[2].stays_out();
        assert!(writer.unlock());
        let (third, fourth) = (waiting[2].enters(), waiting[3].enters());
        assert_eq!(line(&locks[0]), "R+ R+ W W R");
        // In the order in which they did not come.
        assert!(fourth.unlock());
        waiting[4].stays_out();
        assert!(third.unlock());
        let writer = waiting[4].enters();
        waiting[5].stays_out();
        assert!(writer.unlock());
        let writer = waiting[5].enters();
        assert!(waiting[6].is_waiting() && writer.unlock());
        assert!(waiting[6].enters().unlock());
    }
    assert!(keys(&etcd, "/locks/").is_empty());
}

#[test]
fn a_waiter_that_gives_up_lets_those_behind_it_pass() {
    let etcd = EtcdServer::start().unwrap();
    let locks = crowd(&etcd, "/locks/a", 3);
    let reader = Held::take(&locks[0], Side::R).unwrap();
    thread::scope(|scope| {
        let impatient = scope.spawn(|| locks[1].try_write_owned_for(ms(600)).unwrap().is_none());
        wait_line(&locks[0], 2);
        let behind = Waiter::queue(&locks[2], Side::R);
        let neighbour = Waiter::queue(&locks[0], Side::R);
        behind.stays_out();
        assert!(impatient.join().unwrap());
        // The writer's going lets them in beside the reader who is still there.
        let (behind, neighbour) = (behind.enters(), neighbour.enters());
        assert_eq!(line(&locks[0]), "R+ R+ R+");
        assert!(reader.verify() && behind.verify() && neighbour.verify());
        assert!(reader.unlock() && behind.unlock() && neighbour.unlock());
    });
}

#[test]
fn a_stream_of_readers_does_not_keep_a_writer_out() {
    let etcd = EtcdServer::start().unwrap();
    let locks = crowd(&etcd, "/locks/a", 3);
    let (over, reads) = (AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|scope| {
        // Eight threads that read for 20 ms: one comes every few milliseconds.
        for number in 0..8 {
            let (lock, over, reads) = (&locks[number % 2], &over, &reads);
            scope.spawn(move || {
                thread::sleep(ms(3) * u32::try_from(number).unwrap());
                while !over.load(Ordering::Acquire) {
                    let guard = lock.read().unwrap();
                    thread::sleep(ms(20));
                    reads.fetch_add(1, Ordering::AcqRel);
                    assert!(guard.unlock());
                }
            });
        }
        for _ in 0..10 {
            let before = reads.load(Ordering::Acquire);
            while reads.load(Ordering::Acquire) < before + 16 {
                thread::sleep(ms(1));
            }
            let (guard, took) = timed(|| locks[2].write().unwrap());
            assert!(took < Duration::from_secs(2), "{took:?}");
            let seen = reads.load(Ordering::Acquire);
            thread::sleep(ms(30));
            assert_eq!(reads.load(Ordering::Acquire), seen, "a reader beside the writer");
            assert!(guard.unlock());
        }
        over.store(true, Ordering::Release);
    });
}

#[test]
fn writers_enter_in_the_order_in_which_they_came() {
    let etcd = EtcdServer::start().unwrap();
    let locks = crowd(&etcd, "/locks/a", 3);
    let first = locks[0].write_owned().unwrap();
    let mut token = first.fencing_token();
    let waiting: Vec<_> = (0..9).map(|at| Waiter::queue(&locks[at % 3], Side::W)).collect();
    let mut last = Held::W(first);
    for (at, waiter) in waiting.iter().enumerate() {
        assert!(waiting[at..].iter().all(Waiter::is_waiting));
        assert!(last.unlock());
        last = waiter.enters();
        let Held::W(guard) = &last else { panic!("{last:?}") };
        assert!(guard.fencing_token() > token);
        token = guard.fencing_token();
    }
    assert!(last.unlock());
}

#[test]
fn a_busy_try_writes_nothing_and_a_reader_beside_readers_gets_in() {
    let etcd = EtcdServer::start().unwrap();
    let locks = crowd(&etcd, "/locks/a", 2);
    let rival = long(&connect(&etcd), "/locks/a");
    let nothing_written = |what: &str, readers_too: bool| {
        let revision = etcd.revision().unwrap();
        assert!(rival.try_write().unwrap().is_none(), "{what}");
        assert!(rival.try_write_owned().unwrap().is_none(), "{what}");
        if readers_too {
            assert!(rival.try_read().unwrap().is_none(), "{what}");
            assert!(rival.try_read_owned().unwrap().is_none(), "{what}");
        }
        assert_eq!(etcd.revision().unwrap(), revision, "{what}");
    };
    let writer = locks[0].write_owned().unwrap();
    nothing_written("a writer", true);
    let queued = Waiter::queue(&locks[1], Side::R);
    nothing_written("a writer, then a reader", true);
    assert!(writer.unlock());
    let reader = queued.enters();
    nothing_written("a reader", false);
    let beside = rival.try_read().unwrap().expect("readers share");
    assert_eq!(line(&rival), "R+ R+");
    nothing_written_by_a_reader_that_writes(&rival, &etcd);
    assert!(beside.unlock());
    let queued = Waiter::queue(&locks[0], Side::W);
    nothing_written("a reader, then a writer", true);
    assert!(reader.unlock());
    assert!(queued.enters().unlock());
    assert!(keys(&etcd, "/locks/").is_empty());
}

fn nothing_written_by_a_reader_that_writes(lock: &etcd_recipes::RwLock, etcd: &EtcdServer) {
    let revision = etcd.revision().unwrap();
    assert!(lock.try_write().is_err());
    assert_eq!(etcd.revision().unwrap(), revision);
}

/// The answer to a reader's enqueue shows 32 keys, and so not everybody here.
#[test]
fn more_readers_than_an_answer_shows_share() {
    let etcd = EtcdServer::start().unwrap();
    let locks = crowd(&etcd, "/locks/a", 2);
    let readers: Vec<_> = (0..45).map(|at| locks[at % 2].read_owned().unwrap()).collect();
    // Of these, the first knows nothing of the queue, and the others have a mirror of it.
    let newcomer = long(&connect(&etcd), "/locks/a");
    let tried = newcomer.try_read_owned().unwrap().expect("nobody writes");
    assert!(newcomer.try_write().unwrap().is_none());
    let read = newcomer.read_owned().unwrap();
    assert_eq!(line(&newcomer), ["R+"; 47].join(" "));
    assert!(readers.iter().all(|guard| guard.verify().unwrap()));
    assert!(tried.unlock() && read.unlock());
    assert!(readers.into_iter().all(|guard| guard.unlock()));
    let alone = newcomer.try_write().unwrap().expect("all have gone");
    assert!(alone.unlock());
}

/// All that the answer shows read, and the writer before them is not among it.
#[test]
fn a_writer_far_ahead_of_many_readers_keeps_them_out() {
    let etcd = EtcdServer::start().unwrap();
    let locks = crowd(&etcd, "/locks/a", 2);
    let first = locks[0].write_owned().unwrap();
    let crowd_of = |count: usize| -> Vec<_> {
        let start = |at: usize| Waiter::start(&locks[at % 2], Side::R);
        (0..count).map(start).collect()
    };
    let mut waiting = crowd_of(41);
    wait_line(&locks[0], 42);
    // With and without a mirror of the queue.
    let newcomer = long(&connect(&etcd), "/locks/a");
    let revision = etcd.revision().unwrap();
    assert!(newcomer.try_read().unwrap().is_none());
    assert_eq!(etcd.revision().unwrap(), revision);
    waiting.push(Waiter::queue(&newcomer, Side::R));
    waiting.push(Waiter::queue(&locks[0], Side::R));
    waiting[42].stays_out();
    assert!(waiting.iter().all(Waiter::is_waiting));
    assert!(newcomer.try_read_for(ms(100)).unwrap().is_none());
    let last = Waiter::queue(&newcomer, Side::W);
    assert!(first.is_held() && first.unlock());
    let inside: Vec<_> = waiting.iter().map(Waiter::enters).collect();
    assert_eq!(line(&newcomer), format!("{} W", ["R+"; 43].join(" ")));
    assert!(inside.iter().all(Held::is_held) && last.is_waiting());
    assert!(inside.into_iter().all(Held::unlock));
    assert!(last.enters().unlock());
    assert!(keys(&etcd, "/locks/").is_empty());
}

#[test]
fn nobody_is_ever_beside_a_writer() {
    let etcd = EtcdServer::start().unwrap();
    let locks = crowd(&etcd, "/locks/a", 3);
    let (readers, writers) = (AtomicI32::new(0), AtomicI32::new(0));
    let most = AtomicI32::new(0);
    let tokens = Mutex::new(Vec::new());
    let end = Instant::now() + Duration::from_secs(3);
    thread::scope(|scope| {
        for number in 0..9 {
            let (lock, readers, writers) = (&locks[number % 3], &readers, &writers);
            let (most, tokens) = (&most, &tokens);
            scope.spawn(move || {
                let mut turn = number;
                while Instant::now() < end {
                    turn += 1;
                    if turn % 3 == 0 {
                        let guard = lock.write().unwrap();
                        assert_eq!(writers.fetch_add(1, Ordering::SeqCst), 0);
                        assert_eq!(readers.load(Ordering::SeqCst), 0);
                        tokens.lock().unwrap().push(guard.fencing_token());
                        assert!(guard.put("/data", "").unwrap());
                        assert_eq!(readers.load(Ordering::SeqCst), 0);
                        writers.fetch_sub(1, Ordering::SeqCst);
                        assert!(guard.unlock());
                    } else {
                        let guard = lock.read().unwrap();
                        let inside = readers.fetch_add(1, Ordering::SeqCst) + 1;
                        most.fetch_max(inside, Ordering::SeqCst);
                        assert_eq!(writers.load(Ordering::SeqCst), 0);
                        thread::sleep(ms(2));
                        assert_eq!(writers.load(Ordering::SeqCst), 0);
                        readers.fetch_sub(1, Ordering::SeqCst);
                        assert!(guard.unlock());
                    }
                }
            });
        }
    });
    let tokens = tokens.into_inner().unwrap();
    assert!(tokens.windows(2).all(|pair| pair[0] < pair[1]), "{tokens:?}");
    let most = most.into_inner();
    println!("{} writers, up to {most} readers at once", tokens.len());
    assert!(tokens.len() > 20 && most > 1);
    assert!(keys(&etcd, "/locks/").is_empty());
}
