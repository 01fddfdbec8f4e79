//! Permits that are lost, whose answers never come, or whose process dies; and what noise on the
//! network may do to them.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod faults;
mod support;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use etcd_recipes::testing::{EtcdServer, FaultProxy, Mode, boot_nanos, eventually};
use etcd_recipes::{
    Client, ConnectionState, ErrorKind, Loss, LossReason, Permit, Recipe, Semaphore, SharedHold,
    Subscription,
};
use faults::{SLACK, Twin, full, role, ttl, until_parent_ends};
use support::*;

/// A TTL that nobody waits out here.
const LONG: Duration = Duration::from_secs(20);

/// Longer than a hold goes without a watch on its own key.
const LASTING: Duration = Duration::from_millis(1_300);

const PATH: &str = "/limits/a";
const HOLDERS: &str = "/limits/a/holders/";

fn with_ttl(client: &Client, permits: u32, ttl: Duration) -> Semaphore {
    Semaphore::builder(client, PATH, permits).ttl(ttl).build().unwrap()
}

/// Waits until so many keys stand in line.
fn wait_line(semaphore: &Semaphore, count: usize) {
    eventually(LIMIT, "keys in line", || match semaphore.contenders() {
        Ok(all) if all.len() == count => Ok(()),
        other => Err(other),
    });
}

/// The lease that a holder's key names, in hexadecimal.
fn lease_of(key: &str) -> &str {
    key.rsplit(':').next().unwrap().split('-').next().unwrap()
}

fn revoke(etcd: &EtcdServer, key: &str) {
    etcd.ctl(["lease", "revoke", lease_of(key)]).unwrap();
}

fn delete(etcd: &EtcdServer, key: &str) {
    etcd.ctl(["del", key]).unwrap();
}

fn overwrite(etcd: &EtcdServer, key: &str) {
    etcd.ctl(["put", key, "mine"]).unwrap();
}

/// What a semaphore tells of one loss: once in every form, the flag first.
struct Told {
    losses: Arc<parking_lot::Mutex<Vec<Loss>>>,
    channel: Subscription<Loss>,
    states: Subscription<ConnectionState>,
    errors_before: u64,
}

impl Told {
    fn of(semaphore: &Semaphore, hold: SharedHold) -> Told {
        let losses: Arc<parking_lot::Mutex<Vec<Loss>>> = Arc::default();
        semaphore.add_loss_listener({
            let losses = losses.clone();
            move |loss| {
                assert!(!hold.is_held() && hold.cancel_token().is_cancelled());
                losses.lock().push(loss.clone());
            }
        });
        Told {
            losses,
            channel: semaphore.loss_events(),
            states: semaphore.connection_events(),
            errors_before: semaphore.error_count(),
        }
    }

    #[track_caller]
    fn check(self, semaphore: &Semaphore, permit: &Permit, reason: LossReason) {
        let loss = self.channel.recv_timeout(LIMIT).unwrap();
        assert_eq!((loss.reason, loss.path.as_str()), (reason, PATH));
        assert_eq!(loss.key, permit.lock_key());
        assert_eq!(permit.loss().as_ref(), Some(&loss));
        assert!(!permit.is_held() && permit.remaining().is_zero());
        assert!(permit.cancel_token().is_cancelled() && !permit.verify().unwrap());
        let losses = self.losses.clone();
        eventually(LIMIT, "the listener ran", || !losses.lock().is_empty());
        assert_eq!(*self.losses.lock(), [loss]);
        assert!(self.channel.try_recv().is_err(), "one loss was told twice");
        assert!(self.states.try_iter().any(|state| state == ConnectionState::Lost));
        assert_eq!(semaphore.error_count(), self.errors_before + 1);
        assert!(semaphore.errors().last().unwrap().is_lost());
    }
}

// ----- ELEC-04: the own key goes --------------------------------------------------------------

/// A holder of one or several permits loses a key while a rival waits.
fn lose(many: u32, take: fn(&EtcdServer, &str), reason: LossReason) {
    let etcd = EtcdServer::start().unwrap();
    let (ours, theirs) = (connect(&etcd), connect(&etcd));
    let (semaphore, other) = (with_ttl(&ours, 3, LONG), with_ttl(&theirs, 3, LONG));
    let permit = semaphore.acquire_many(many).unwrap();
    // The last of its keys, so that the one that stands for all is another.
    let key = keys(&etcd, HOLDERS).pop().unwrap();
    let neighbours: Vec<_> = (many..3).map(|_| other.acquire().unwrap()).collect();
    let told = Told::of(&semaphore, permit.hold());
    thread::sleep(LASTING);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| other.acquire_many(many).unwrap());
        wait_line(&semaphore, 3 + many as usize);
        let taken = Instant::now();
        take(&etcd, &key);
        eventually(LIMIT, "the holder is told", || !permit.is_held());
        assert!(taken.elapsed() < SLACK + PROMPT, "{:?}", taken.elapsed());
        let rival = waiter.join().unwrap();
        println!("{reason:?}: the rival is in after {:?}", taken.elapsed());
        assert!(taken.elapsed() < SLACK * 2, "{:?}", taken.elapsed());
        told.check(&semaphore, &permit, reason);
        assert!(semaphore.try_acquire().unwrap().is_none());
        assert_eq!(keys(&etcd, HOLDERS).len(), 3, "a key of the lost permit is left");
        assert!(neighbours.iter().all(Permit::is_held));
        assert!(rival.verify().unwrap() && rival.release());
    });
    assert!(!permit.release());
    assert!(neighbours.into_iter().all(Permit::release));
    let again = semaphore.acquire().unwrap();
    assert_eq!(semaphore.connection_state(), ConnectionState::Reconnected);
    assert!(again.release());
    assert!(keys(&etcd, HOLDERS).is_empty());
}

#[test]
fn a_permit_whose_lease_is_revoked_is_lost_and_told_once() {
    lose(1, revoke, LossReason::LeaseGone);
}

#[test]
fn a_permit_whose_key_is_deleted_is_lost_and_told_once() {
    lose(1, delete, LossReason::KeyDeleted);
}

#[test]
fn a_permit_whose_key_is_overwritten_is_lost_and_makes_room() {
    lose(1, overwrite, LossReason::KeyOverwritten);
}

#[test]
fn several_permits_are_lost_with_their_lease() {
    lose(3, revoke, LossReason::LeaseGone);
}

#[test]
fn several_permits_are_lost_with_one_deleted_key_and_the_others_go() {
    lose(3, delete, LossReason::KeyDeleted);
}

#[test]
fn several_permits_are_lost_with_one_overwritten_key_and_all_go() {
    lose(2, overwrite, LossReason::KeyOverwritten);
}

#[test]
fn a_young_permit_that_is_gone_shows_when_it_is_asked_or_released() {
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let semaphore = with_ttl(&client, 3, LONG);
    let permit = semaphore.acquire().unwrap();
    assert!(client.delete(permit.lock_key()).unwrap());
    assert!(!permit.release(), "etcd answered that the key was gone");
    let many = semaphore.acquire_many(3).unwrap();
    let last = client.get_prefix(HOLDERS).unwrap().pop().unwrap().key;
    assert!(client.delete(last).unwrap());
    assert!(!many.release(), "one of three was gone");
    assert!(keys(&etcd, HOLDERS).is_empty());
    let many = semaphore.acquire_many(2).unwrap();
    let last = client.get_prefix(HOLDERS).unwrap().pop().unwrap().key;
    assert!(client.delete(last).unwrap());
    assert!(!many.verify().unwrap() && !many.is_held());
    wait_keys(&etcd, HOLDERS, 0);
    drop(many);
}

/// A waiter between a holder and one who came later loses a key; it must go to the tail.
fn lose_the_place(many: u32, take: fn(&EtcdServer, &str)) {
    let etcd = EtcdServer::start().unwrap();
    let clients = [connect(&etcd), connect(&etcd), connect(&etcd)];
    let [first, second, third] = [0, 1, 2].map(|n| with_ttl(&clients[n], 2, LONG));
    let held = first.acquire_many(2).unwrap();
    let before = keys(&etcd, HOLDERS);
    let order = parking_lot::Mutex::new(Vec::new());
    let run = |name: &'static str, semaphore: &Semaphore, many| {
        let permit = semaphore.acquire_many(many).unwrap();
        assert!(permit.verify().unwrap());
        order.lock().push(name);
        assert!(permit.release());
    };
    let line = 2 + many as usize;
    thread::scope(|scope| {
        scope.spawn(|| run("second", &second, many));
        wait_line(&first, line);
        let place = first.contenders().unwrap()[2].token;
        let theirs: Vec<_> =
            keys(&etcd, HOLDERS).into_iter().filter(|key| !before.contains(key)).collect();
        scope.spawn(|| run("third", &third, 2));
        wait_line(&first, line + 2);
        take(&etcd, theirs.last().unwrap());
        eventually(LIMIT, "it queued anew", || {
            let all = first.contenders().unwrap();
            all.len() == line + 2 && all.iter().all(|contender| contender.token != place)
        });
        assert!(held.release());
    });
    assert_eq!(*order.lock(), ["third", "second"]);
    assert!(keys(&etcd, HOLDERS).is_empty());
}

#[test]
fn a_waiter_whose_key_is_deleted_goes_to_the_tail() {
    lose_the_place(1, delete);
}

#[test]
fn a_waiter_whose_lease_is_revoked_goes_to_the_tail() {
    lose_the_place(1, revoke);
}

#[test]
fn a_waiter_for_two_whose_second_key_is_deleted_goes_to_the_tail() {
    lose_the_place(2, delete);
}

// ----- answers that never come ----------------------------------------------------------------

#[test]
fn requests_without_an_answer_are_recognised() {
    let (etcd, proxy, client) = proxied(Duration::from_secs(10));
    let semaphore = with_ttl(&client, 3, Duration::from_secs(60));
    let reads = || etcd.unary_calls().unwrap().get("Range").copied().unwrap_or_default();
    let before = reads();
    assert!(semaphore.acquire().unwrap().release());
    eventually(LIMIT, "the first renewal is proven", || reads() > before);
    for many in [1, 3] {
        proxy.drop_next_reply();
        let permit = semaphore.acquire_many(many).unwrap();
        assert!(!proxy.awaits_request());
        assert_eq!(keys(&etcd, HOLDERS).len(), many as usize);
        assert!(permit.verify().unwrap());
        proxy.drop_next_reply();
        assert!(permit.release(), "{many} were released, and etcd did not say so");
        assert!(!proxy.awaits_request());
        wait_keys(&etcd, HOLDERS, 0);
        // The release has made its session retire; the next one is to be quiet as well.
        let before = reads();
        assert!(semaphore.acquire().unwrap().release());
        eventually(LIMIT, "the first renewal is proven", || reads() > before);
    }
    // A first acquire on a new path, its number's answer lost.
    let fresh =
        Semaphore::builder(&client, "/limits/b", 2).ttl(Duration::from_secs(60)).build().unwrap();
    proxy.drop_next_reply();
    assert!(fresh.acquire_many(2).unwrap().release());
    wait_keys(&etcd, "/limits/b/holders/", 0);
}

#[test]
fn a_limit_that_passes_in_a_blackhole_takes_no_permit() {
    let (etcd, proxy, client) = proxied(Duration::from_secs(5));
    let semaphore = with_ttl(&client, 2, TTL);
    let other = with_ttl(&connect(&etcd), 2, TTL);
    assert!(semaphore.acquire().unwrap().release());
    proxy.set(Mode::Blackhole);
    let (outcome, took) = timed(|| semaphore.try_acquire_many_for(2, ms(500)).map(drop));
    assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Unreachable);
    assert!(ms(500) <= took && took < ms(500) + PROMPT, "{took:?}");
    // The enqueue is in the cable, and arrives now.
    proxy.set(Mode::Pass);
    let all = other.try_acquire_many_for(2, TTL + SLACK).unwrap();
    assert!(all.expect("a permit is gone").release());
    wait_keys(&etcd, HOLDERS, 0);
}

// ----- LOCK-10 --------------------------------------------------------------------------------

/// LOCK-10: a process that holds two of three is killed; both are back with its lease.
#[test]
fn permits_of_a_killed_process_are_back_within_their_ttl() {
    if let Some(role) = role() {
        let client = Client::connect([&role[0]]).unwrap();
        let semaphore = with_ttl(&client, 3, ttl());
        let permits = (semaphore.acquire().unwrap(), semaphore.acquire().unwrap());
        println!("\nheld=2");
        until_parent_ends();
        return drop(permits);
    }
    let etcd = EtcdServer::start().unwrap();
    let twin =
        Twin::start("permits_of_a_killed_process_are_back_within_their_ttl", &[&etcd.endpoint()]);
    twin.wait_said("held");
    let client = connect(&etcd);
    let semaphore = with_ttl(&client, 3, LONG);
    let third = semaphore.acquire().unwrap();
    assert!(semaphore.try_acquire().unwrap().is_none());
    let killed = Instant::now();
    drop(twin);
    let both = semaphore.try_acquire_many_for(2, LIMIT).unwrap().expect("they are not back");
    let took = killed.elapsed();
    println!("both are back after {took:?}");
    assert!(took > ttl() / 3, "{took:?}: they were released, or not held");
    assert!(took < ttl() + SLACK, "{took:?}");
    assert!(both.release() && third.release());
}

/// Numbers that look random, from a seed that is printed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// For how long there is noise.
fn noise() -> Duration {
    Duration::from_secs(if full() { 120 } else { 12 })
}

/// One of the twenty: takes and gives back until the time has come, and says when it held for
/// sure, by the clock that all processes of the machine share.
fn work(semaphore: &Semaphore, end: u64, seed: u64) {
    let mut dice = Dice(seed);
    let hurried = |error: &etcd_recipes::Error| {
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    };
    while boot_nanos() < end {
        let taken = match dice.below(4) {
            0 => semaphore.try_acquire(),
            _ => semaphore.try_acquire_for(ms(300)),
        };
        let permit = match taken {
            Ok(Some(permit)) => permit,
            Ok(None) => continue,
            Err(error) => {
                hurried(&error);
                thread::sleep(ms(20));
                continue;
            }
        };
        let begun = boot_nanos();
        let until = begun + dice.below(60) * 1_000_000;
        // What is_held says to a question asked now was true before it was asked.
        let mut held = None;
        loop {
            let asked = boot_nanos();
            if !permit.is_held() {
                break;
            }
            held = Some(asked);
            if asked >= until {
                break;
            }
            thread::sleep(ms(1));
        }
        if let Some(held) = held {
            println!("\nheld={begun},{held},{}", permit.lock_key());
        }
        if dice.below(3) > 0 {
            permit.release();
        }
    }
}

/// A hold as its owner is sure of it.
#[derive(Debug)]
struct Stay {
    from: u64,
    to: u64,
    key: String,
}

fn stays(twins: &[Twin]) -> Vec<Stay> {
    let parse = |line: String| {
        let mut parts = line.splitn(3, ',');
        let mut next = || parts.next().unwrap().to_owned();
        Stay { from: next().parse().unwrap(), to: next().parse().unwrap(), key: next() }
    };
    twins.iter().flat_map(|twin| twin.said("held")).map(parse).collect()
}

/// How many were inside at once at most.
fn most_at_once(stays: &[Stay]) -> usize {
    let mut steps: Vec<(u64, i32)> = Vec::new();
    for stay in stays {
        steps.push((stay.from, 1));
        steps.push((stay.to, -1));
    }
    // At one instant, who leaves goes before who comes.
    steps.sort_unstable();
    let (mut now, mut most) = (0, 0);
    for (_, step) in steps {
        now += step;
        most = most.max(now);
    }
    usize::try_from(most).unwrap()
}

/// What stood in etcd for the whole of a moment, first to last.
struct Look {
    from: u64,
    to: u64,
    line: Vec<(i64, String)>,
}

fn look(client: &Client) -> Look {
    let from = boot_nanos();
    let all = client.get_prefix(HOLDERS).unwrap();
    let to = boot_nanos();
    let mut line: Vec<_> = all
        .iter()
        .map(|kv| (kv.create_revision, String::from_utf8(kv.key.clone()).unwrap()))
        .collect();
    line.sort();
    Look { from, to, line }
}

/// LOCK-10: three permits, twenty workers in four processes, and a network that breaks again and
/// again for less than the TTL. Never more than three are inside, by the clock and by the keys;
/// when the noise is over, nothing is missing.
#[test]
fn serial_noise_neither_multiplies_permits_nor_loses_any() {
    if let Some(role) = role() {
        let end: u64 = role[1].parse().unwrap();
        let seed: u64 = role[2].parse().unwrap();
        let client = patient(Duration::from_secs(3)).endpoints([&role[0]]).connect().unwrap();
        let semaphore = with_ttl(&client, 3, ttl());
        thread::scope(|scope| {
            for worker in 1..=5 {
                let semaphore = semaphore.clone();
                scope.spawn(move || work(&semaphore, end, seed * 7 + worker));
            }
        });
        println!("\nended=1");
        until_parent_ends();
        return;
    }
    let etcd = EtcdServer::start().unwrap();
    let client = connect(&etcd);
    let seed = boot_nanos() | 1;
    println!("seed {seed}");
    let end = boot_nanos() + faults::nanos(noise());
    let proxies: Vec<_> = (0..4).map(|_| FaultProxy::start(etcd.endpoint()).unwrap()).collect();
    let test = "serial_noise_neither_multiplies_permits_nor_loses_any";
    let twins: Vec<_> = proxies
        .iter()
        .zip(1..)
        .map(|(proxy, number)| {
            let seed = (seed % 1_000_000_007) * 10 + number;
            Twin::start(test, &[&proxy.endpoint(), &end.to_string(), &seed.to_string()])
        })
        .collect();
    let mut looks = Vec::new();
    thread::scope(|scope| {
        for (number, proxy) in proxies.iter().enumerate() {
            let mut dice = Dice(seed + 100 * number as u64);
            scope.spawn(move || {
                let longest = u64::try_from((ttl() - ms(300)).as_millis()).unwrap();
                while boot_nanos() < end {
                    thread::sleep(ms(300 + dice.below(2_500)));
                    match dice.below(3) {
                        0 => proxy.cut(),
                        1 => proxy.set(Mode::Reset),
                        _ => proxy.set(Mode::Blackhole),
                    }
                    let left = end.saturating_sub(boot_nanos()) / 1_000_000;
                    thread::sleep(ms(dice.below(longest).min(left)));
                    proxy.set(Mode::Pass);
                }
                proxy.set(Mode::Pass);
            });
        }
        while boot_nanos() < end {
            looks.push(look(&client));
            thread::sleep(ms(5));
        }
    });
    let calm = Instant::now();
    let semaphore = with_ttl(&client, 3, LONG);
    let all = semaphore.try_acquire_many_for(3, LIMIT).unwrap().expect("a permit is missing");
    let back = calm.elapsed();
    assert!(all.verify().unwrap());
    for twin in &twins {
        twin.wait_said("ended");
    }
    let stays = stays(&twins);
    println!("{} stays, {} looks; all three back after {back:?}", stays.len(), looks.len());
    assert!(stays.len() > 100, "{} stays", stays.len());
    assert!(back < ttl() + SLACK, "{back:?}");
    let most = most_at_once(&stays);
    println!("at most {most} at a time");
    assert_eq!(most, 3);
    let mut compared = 0;
    for look in &looks {
        let sure = stays.iter().filter(|stay| stay.from <= look.from && look.to <= stay.to);
        for stay in sure {
            compared += 1;
            let own = look.line.iter().find(|(_, key)| *key == stay.key);
            let (created, _) = own.unwrap_or_else(|| panic!("held without its key: {stay:?}"));
            let rank = look.line.iter().filter(|(other, _)| other <= created).count();
            assert!(rank <= 3, "held as number {rank}: {stay:?}, {:?}", look.line);
        }
    }
    println!("{compared} claims compared with the store");
    assert!(compared > 50, "{compared}");
    assert!(all.release());
    wait_keys(&etcd, HOLDERS, 0);
}
