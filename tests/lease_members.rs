//! Leases and waiters on a cluster of three, with one member dead, frozen, cut off or unplugged.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod faults;

use std::thread;
use std::time::{Duration, Instant};

use etcd_recipes::testing::{EtcdCluster, Mode, eventually};
use etcd_recipes::{
    Client, Loss, OwnedMutexGuard, Recipe, ResilienceConfig, Subscription, WatchResilience,
};
use faults::*;

/// What a leader's failure needs with etcd's default election timeout.
const TTL: Duration = Duration::from_secs(5);

/// A mutex and a registration that are to outlive a fault.
struct Kept {
    guard: OwnedMutexGuard,
    losses: Subscription<Loss>,
    registered: Registration,
    leases: (i64, i64),
}

impl Kept {
    fn new(client: &Client) -> Kept {
        let mutex = mutex(client, "/locks/kept", TTL);
        let registered = Registration::new(client, "/nodes/kept", TTL);
        let losses = mutex.loss_events();
        let guard = mutex.lock_owned().unwrap();
        let leases = (lease_of(&guard.lock_key()), registered.keep.current_lease_id());
        Kept { guard, losses, registered, leases }
    }

    /// Looks on for a while: nothing is lost, not even for a moment. Says what was, if it was.
    fn look_for(&self, time: Duration) -> Result<(), String> {
        let begun = Instant::now();
        while begun.elapsed() < time {
            let story = self.registered.story();
            if !self.guard.is_held() || story.contains(&"Expired") {
                let loss = self.guard.loss();
                return Err(format!("after {:?}: {loss:?}, {story:?}", begun.elapsed()));
            }
            thread::sleep(ms(10));
        }
        Ok(())
    }

    /// Still the same leases, here and in etcd.
    #[track_caller]
    fn check(&self, proxied: &Proxied, broken: usize) {
        assert!(self.losses.try_recv().is_err());
        assert_eq!(self.registered.keep.current_lease_id(), self.leases.1);
        let healthy = proxied.other(&[broken]);
        let standing =
            (lease_on(healthy, &self.guard.lock_key()), lease_on(healthy, "/nodes/kept"));
        assert_eq!(standing, (Some(self.leases.0), Some(self.leases.1)));
    }
}

/// How long the fault is looked at.
fn period() -> Duration {
    TTL * if full() { 10 } else { 2 }
}

/// LEASE-04: each member in turn is unplugged while it carries the renewals.
#[test]
fn an_unplugged_member_costs_no_lease() {
    let proxied = Proxied::start();
    let client = proxied.client(0);
    let kept = Kept::new(&client);
    let mut unplugged = Vec::new();
    for _ in 0..3 {
        let carrier = proxied.carrier(TTL / 2);
        unplugged.push(carrier);
        wait_renewal_due(&kept.guard.hold(), TTL);
        proxied.proxies[carrier].set(Mode::Blackhole);
        kept.look_for(period()).unwrap();
        kept.check(&proxied, carrier);
        proxied.proxies[carrier].set(Mode::Pass);
    }
    unplugged.sort_unstable();
    assert_eq!(unplugged, [0, 1, 2], "each member carried the renewals once");
    assert!(kept.guard.unlock());
}

/// LEASE-04, a follower frozen just before a renewal through it is due.
#[test]
fn a_frozen_follower_costs_no_lease() {
    let proxied = Proxied::start();
    proxied.cluster.move_leader(1).unwrap();
    let client = proxied.client(0);
    let kept = Kept::new(&client);
    assert_eq!(proxied.carrier(TTL / 2), 0);
    // Just after a renewal would hide the gap.
    wait_renewal_due(&kept.guard.hold(), TTL);
    proxied.cluster.member(0).freeze().unwrap();
    kept.look_for(period()).unwrap();
    kept.check(&proxied, 0);
    proxied.cluster.member(0).thaw().unwrap();
    kept.look_for(TTL).unwrap();
    kept.check(&proxied, 0);
    assert!(kept.guard.unlock());
}

/// What an election takes at most where no vote is split and the machine keeps up: a TTL of 5 s
/// has no room for more.
const ELECTION: Duration = ms(2_200);

/// The leader is frozen just before a renewal is due, and another is elected.
///
/// It stays frozen: etcd before 3.4.31 and 3.5.13, once thawed, may revoke leases that were
/// renewed at its successor, and no client can help that.
#[track_caller]
fn a_frozen_leader_costs_nothing(leader: usize, start: impl Fn() -> (Proxied, Client)) {
    for _ in 0..4 {
        let (proxied, client) = start();
        proxied.cluster.move_leader(leader).unwrap();
        let kept = Kept::new(&client);
        wait_renewal_due(&kept.guard.hold(), TTL);
        proxied.cluster.member(leader).freeze().unwrap();
        let frozen = Instant::now();
        let (outcome, election) = thread::scope(|scope| {
            let election = scope.spawn(|| {
                let leads = |i: usize| i != leader && proxied.cluster.claims_to_lead(i);
                eventually(LIMIT, "an election", || (0..3).any(leads));
                frozen.elapsed()
            });
            (kept.look_for(period()), election.join().unwrap())
        });
        if outcome.is_err() && election > ELECTION {
            println!("once more, this election took {election:?}");
            continue;
        }
        outcome.unwrap();
        kept.check(&proxied, leader);
        assert!(kept.guard.unlock());
        return;
    }
    panic!("no election within {ELECTION:?}");
}

/// LEASE-04, the leader frozen while it carries the renewals.
#[test]
fn a_frozen_leader_costs_no_lease() {
    a_frozen_leader_costs_nothing(0, || {
        let proxied = Proxied::start();
        let client = proxied.client(0);
        (proxied, client)
    });
}

/// LEASE-04, the leader frozen while the renewals go through a follower, which forwards to it.
#[test]
fn a_frozen_leader_behind_a_follower_costs_no_lease() {
    a_frozen_leader_costs_nothing(2, || {
        let proxied = Proxied::start();
        let client = proxied.client(0);
        (proxied, client)
    });
}

/// Every new connection has to log in first; an attempt that hangs in its login does not hold up
/// the next, which goes through another member.
#[test]
fn a_hanging_login_delays_no_other_attempt() {
    let (user, password) = ("root", "secret");
    let cluster = EtcdCluster::builder(3).auth(user, password).start().unwrap();
    let proxied = Proxied::before(cluster);
    proxied.cluster.move_leader(2).unwrap();
    let client = Client::builder().endpoints(proxied.endpoints()).user(user, password);
    let client = client.connect().unwrap();
    let guard = mutex(&client, "/locks/login", TTL).lock_owned().unwrap();
    let hold = guard.hold();
    wait_renewal_due(&hold, TTL);
    // The renewals' own member is silent, and so is the next, to which there is no connection.
    proxied.proxies[0].set(Mode::Blackhole);
    proxied.proxies[1].set(Mode::Blackhole);
    let (cut, before) = (Instant::now(), hold.remaining());
    eventually(LIMIT, "a renewal through the third member", || hold.remaining() > before);
    // Two pauses between attempts, and some for a login and three questions; far less than the
    // limit of the attempt that hangs.
    let took = cut.elapsed();
    assert!(took < TTL / 16 * 2 + ms(700), "{took:?}");
    assert!(guard.unlock());
}

/// LEASE-04 with a login, which is itself in want of a leader.
#[test]
fn a_frozen_leader_costs_no_lease_with_logins() {
    let (user, password) = ("root", "secret");
    a_frozen_leader_costs_nothing(0, || {
        let cluster = EtcdCluster::builder(3).auth(user, password).start().unwrap();
        let proxied = Proxied::before(cluster);
        let client = Client::builder().endpoints(proxied.endpoints()).user(user, password);
        let client = client.connect().unwrap();
        (proxied, client)
    });
}

/// Callers with less time than a request may take get past a frozen member all the same: what the
/// first of them waited for in vain, the next need not.
#[test]
fn short_limits_get_past_a_frozen_member() {
    let proxied = Proxied::start();
    proxied.cluster.move_leader(1).unwrap();
    proxied.cluster.member(0).freeze().unwrap();
    let client = proxied.client(0);
    let mutex = mutex(&client, "/locks/short", TTL);
    let first = mutex.try_lock_for(SLACK).unwrap_err();
    assert!(first.is_unreachable(), "{first}");
    let guard = mutex.try_lock_for(SLACK).unwrap().expect("two members answer");
    assert!(guard.unlock());
}

// ----- WATCH-02 -------------------------------------------------------------------------------

const PROGRESS: Duration = Duration::from_secs(1);

/// How long an etcd that has lost its peers goes on before it says so to those who ask for a
/// leader: an election timeout until it knows, and three more.
const NO_LEADER: Duration = Duration::from_secs(5);

/// A waiter whose watch goes through a member that fails gets its turn all the same.
#[track_caller]
fn a_waiter_gets_its_turn(fail: impl Fn(&Proxied), within: Duration) {
    let proxied = Proxied::start();
    proxied.cluster.move_leader(1).unwrap();
    // The holder keeps away from the member that fails.
    let direct = Client::connect([proxied.cluster.member(2).endpoint()]).unwrap();
    let holder = mutex(&direct, "/locks/turn", TTL).lock_owned().unwrap();
    let watch = WatchResilience::new().progress_interval(PROGRESS).progress_timeout(PROGRESS);
    let client = Client::builder()
        .endpoints(proxied.endpoints())
        .resilience(ResilienceConfig::new().watch(watch))
        .connect()
        .unwrap();
    let waiting = mutex(&client, "/locks/turn", TTL);
    let losses = waiting.loss_events();
    let waiter = thread::spawn({
        let waiting = waiting.clone();
        move || waiting.lock_owned().unwrap()
    });
    let watchers = || {
        let name = "etcd_debugging_mvcc_watcher_total";
        proxied.cluster.member(0).metric(name, &[]).unwrap()
    };
    eventually(LIMIT, "the waiter's watch is served by member 0", || watchers() >= 1.0);

    fail(&proxied);
    assert!(holder.unlock());
    let released = Instant::now();
    eventually(within, "the waiter's turn", || waiter.is_finished());
    println!("the turn came after {:?}", released.elapsed());
    let guard = waiter.join().unwrap();
    assert!(guard.is_held() && losses.try_recv().is_err());
    assert!(waiting.is_healthy());
    proxied.proxies[0].set(Mode::Pass);
    proxied.cluster.rejoin(0);
    assert!(guard.unlock());
}

#[test]
fn a_waiter_behind_a_killed_member_gets_its_turn() {
    let kill = |proxied: &Proxied| proxied.cluster.member(0).kill().unwrap();
    a_waiter_gets_its_turn(kill, PROGRESS * 2 + SLACK);
}

#[test]
fn a_waiter_behind_an_unplugged_member_gets_its_turn() {
    let unplug = |proxied: &Proxied| proxied.proxies[0].set(Mode::Blackhole);
    a_waiter_gets_its_turn(unplug, PROGRESS * 2 + SLACK);
}

#[test]
fn a_waiter_behind_a_frozen_member_gets_its_turn() {
    let freeze = |proxied: &Proxied| proxied.cluster.member(0).freeze().unwrap();
    a_waiter_gets_its_turn(freeze, PROGRESS * 2 + SLACK);
}

/// The member goes on answering, from a store that stands still.
#[test]
fn a_waiter_behind_an_isolated_member_gets_its_turn() {
    let isolate = |proxied: &Proxied| proxied.cluster.isolate(0);
    a_waiter_gets_its_turn(isolate, NO_LEADER + PROGRESS * 2 + SLACK);
}
