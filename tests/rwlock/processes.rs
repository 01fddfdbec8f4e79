//! Readers and writers in four processes, each behind a network that fails: never a writer beside
//! anyone, by the clock of the machine and by the history of the store.

use std::thread;
use std::time::{Duration, Instant};

use etcd_recipes::testing::{EtcdServer, FaultProxy, Mode, boot_nanos};
use etcd_recipes::{Error, RwLock, RwLockWriteGuard};

use super::faults::{Twin, full, role, until_parent_ends};
use super::history::{Past, changes};
use super::support::*;
use super::with_ttl;

const PROCESSES: usize = 4;
const PATH: &str = "/locks/a";

/// A small source of chance, the same for the same seed.
struct Chance(u64);

impl Chance {
    /// Less than `bound`.
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

/// A time in which a process knew that it held.
#[derive(Debug, Clone)]
struct Span {
    writes: bool,
    /// It wrote before on the same key, and etcd may not have heard of its reading.
    downgraded: bool,
    key: String,
    from: u64,
    to: u64,
}

impl Span {
    fn parse(said: &str) -> Span {
        let [side, key, from, to] = said.split(' ').collect::<Vec<_>>()[..] else {
            panic!("{said}")
        };
        let number = |text: &str| text.parse().unwrap();
        Span {
            writes: side == "W",
            downgraded: side == "r",
            key: key.to_owned(),
            from: number(from),
            to: number(to),
        }
    }
}

#[test]
fn no_process_is_ever_beside_a_writer() {
    if let Some(role) = role() {
        return contend(&role);
    }
    let etcd = EtcdServer::start().unwrap();
    let length = Duration::from_secs(if full() { 60 } else { 10 });
    let proxies: Vec<_> =
        (0..PROCESSES).map(|_| FaultProxy::start(etcd.endpoint()).unwrap()).collect();
    let test = "processes::no_process_is_ever_beside_a_writer";
    let seconds = length.as_secs().to_string();
    let twins: Vec<_> = proxies
        .iter()
        .enumerate()
        .map(|(seed, proxy)| {
            Twin::start(test, &[&proxy.endpoint(), &seconds, &(seed + 1).to_string()])
        })
        .collect();
    for twin in &twins {
        twin.wait_said("ready");
    }
    make_noise(&proxies, length);
    let mut spans = Vec::new();
    for twin in &twins {
        let done = twin.wait_said("done");
        println!("reads, writes, downgrades, losses, failures: {done}");
        spans.extend(twin.said("span").iter().map(|said| Span::parse(said)));
    }
    wait_keys(&etcd, PATH, 0);
    check_by_time(&mut spans);
    check_by_history(&etcd, &spans);
    let writes = spans.iter().filter(|span| span.writes).count();
    assert!(writes > 10 && spans.len() - writes > 10, "{writes} of {}", spans.len());
}

/// Resets, and cables that are unplugged for less and for more than the TTL.
fn make_noise(proxies: &[FaultProxy], length: Duration) {
    thread::scope(|scope| {
        for (number, proxy) in proxies.iter().enumerate() {
            scope.spawn(move || {
                let mut chance = Chance(77 + number as u64);
                let end = Instant::now() + length;
                while Instant::now() < end {
                    thread::sleep(ms(400 + chance.below(2_400)));
                    let (mode, time) = match chance.below(6) {
                        0 => (Mode::Reset, 300),
                        1 | 2 => (Mode::Blackhole, 200 + chance.below(800)),
                        3 => (Mode::Blackhole, 2_200 + chance.below(1_200)),
                        4 => (Mode::BlackholeDown, 1_000 + chance.below(1_500)),
                        _ => {
                            proxy.cut();
                            continue;
                        }
                    };
                    proxy.set(mode);
                    thread::sleep(ms(time));
                    proxy.set(Mode::Pass);
                }
                proxy.set(Mode::Pass);
            });
        }
    });
}

fn check_by_time(spans: &mut [Span]) {
    spans.sort_by_key(|span| span.from);
    // The one that lasts longest of those before, writers and all.
    let (mut writer, mut anyone): (Option<&Span>, Option<&Span>) = (None, None);
    let later = |one: Option<&Span>, than: u64| one.is_some_and(|one| one.to > than);
    for span in spans.iter() {
        if later(writer, span.from) {
            panic!("{span:?} beside {writer:?}");
        }
        if span.writes && later(anyone, span.from) {
            panic!("{span:?} beside {anyone:?}");
        }
        if span.writes && !later(writer, span.to) {
            writer = Some(span);
        }
        if !later(anyone, span.to) {
            anyone = Some(span);
        }
    }
}

fn check_by_history(etcd: &EtcdServer, spans: &[Span]) {
    let changes = changes(&connect(etcd));
    let past = Past::of(&changes, &format!("{PATH}/"));
    for span in spans {
        let inside = past.was_inside(&span.key, span.writes || span.downgraded);
        assert!(inside, "the store did not let it in: {span:?}");
    }
    let written: Vec<_> = changes.iter().filter(|change| change.key == "/data").collect();
    for change in &written {
        let key = change.value.as_deref().unwrap();
        assert!(past.writes_at(key, change.revision), "not the writer's: {change:?}");
    }
    println!("{} spans, {} guarded writes", spans.len(), written.len());
    assert!(!written.is_empty());
}

// ----- one of the processes ---------------------------------------------------------------------

#[derive(Default)]
struct Done {
    reads: u32,
    writes: u32,
    downgrades: u32,
    losses: u32,
    failures: u32,
}

fn contend(role: &[String]) {
    let seconds: u64 = role[1].parse().unwrap();
    let seed: u64 = role[2].parse().unwrap();
    let client = patient(Duration::from_secs(4)).endpoints([&role[0]]).connect().unwrap();
    let lock = with_ttl(&client, PATH, TTL);
    assert!(lock.read().unwrap().unlock());
    println!("\nready=");
    let end = Instant::now() + Duration::from_secs(seconds);
    let all = thread::scope(|scope| {
        let threads: Vec<_> = (0..2)
            .map(|number| {
                let lock = &lock;
                scope.spawn(move || {
                    let mut chance = Chance(seed * 1_000 + number);
                    let mut done = Done::default();
                    while Instant::now() < end {
                        if let Err(error) = once(lock, &mut chance, &mut done) {
                            let expected = error.is_unreachable() || error.is_lost();
                            assert!(expected, "{error:?}");
                            done.failures += 1;
                        }
                    }
                    done
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    let sum = |one: fn(&Done) -> u32| all.iter().map(one).sum::<u32>();
    println!(
        "\ndone={} {} {} {} {}",
        sum(|done| done.reads),
        sum(|done| done.writes),
        sum(|done| done.downgrades),
        sum(|done| done.losses),
        sum(|done| done.failures),
    );
    until_parent_ends();
}

fn once(lock: &RwLock, chance: &mut Chance, done: &mut Done) -> Result<(), Error> {
    // Now and then long enough for the network to fail meanwhile.
    let stay = if chance.below(12) == 0 { ms(1_500) } else { ms(chance.below(25)) };
    let what = chance.below(8);
    if what < 5 {
        let guard = lock.read()?;
        done.reads += 1;
        attend('R', &guard.lock_key(), stay, || guard.is_held());
        done.losses += u32::from(!guard.unlock());
        return Ok(());
    }
    let guard = lock.write()?;
    done.writes += 1;
    attend('W', &guard.lock_key(), stay / 2, || guard.is_held());
    // Refused or not answered is as good as written.
    let _ = guard.put("/data", guard.lock_key());
    attend('W', &guard.lock_key(), stay / 2, || guard.is_held());
    if what < 7 {
        done.losses += u32::from(!guard.unlock());
        return Ok(());
    }
    match RwLockWriteGuard::downgrade(guard) {
        Ok(guard) => {
            done.downgrades += 1;
            attend('r', &guard.lock_key(), stay, || guard.is_held());
            done.losses += u32::from(!guard.unlock());
            Ok(())
        }
        Err((guard, error)) => {
            done.losses += 1;
            drop(guard);
            Err(error)
        }
    }
}

/// Asks for as long as it stays, and tells from when to when the answer was yes.
fn attend(side: char, key: &str, stay: Duration, is_held: impl Fn() -> bool) {
    let mut span: Option<(u64, u64)> = None;
    let begun = Instant::now();
    loop {
        let before = boot_nanos();
        if !is_held() {
            break;
        }
        // It held at some moment between these two.
        let after = boot_nanos();
        span = Some(span.map_or((after, after), |(from, _)| (from, from.max(before))));
        if begun.elapsed() >= stay {
            break;
        }
        thread::sleep(ms(1));
    }
    if let Some((from, to)) = span {
        println!("\nspan={side} {key} {from} {to}");
    }
}
