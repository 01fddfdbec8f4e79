//! Names of keys that are used again: what is said of one life of a key must not touch the next.

use std::collections::HashSet;
use std::sync::Arc;

use super::*;
use crate::client::Client;
use crate::lock::{Mutex, OwnedMutexGuard};
use crate::testing::EtcdServer;

const PATH: &str = "/locks/a";

struct Stage {
    _etcd: EtcdServer,
    client: Client,
    mutex: Mutex,
}

impl Stage {
    fn new() -> Stage {
        let etcd = EtcdServer::start().unwrap();
        let client = Client::connect([etcd.endpoint()]).unwrap();
        let mutex = Mutex::new(&client, PATH).unwrap();
        Stage { _etcd: etcd, client, mutex }
    }

    fn session_of(&self, guard: &OwnedMutexGuard) -> Arc<Session> {
        let key = guard.lock_key();
        let (lease, _) = key.strip_prefix("/locks/a/").unwrap().split_once('-').unwrap();
        let lease = i64::from_str_radix(lease, 16).unwrap();
        self.client.core().sessions.find(lease).unwrap()
    }

    /// A hold whose key has had a life before, and that life's token.
    fn second_life(&self) -> (OwnedMutexGuard, i64) {
        let first = self.mutex.lock_owned().unwrap();
        let (key, token) = (first.lock_key(), first.fencing_token());
        assert!(first.unlock());
        let second = self.mutex.lock_owned().unwrap();
        assert_eq!(second.lock_key(), key);
        assert!(second.fencing_token() > token);
        (second, token)
    }
}

#[test]
fn a_read_of_before_the_hold_says_nothing_about_it() {
    let stage = Stage::new();
    let (guard, former) = stage.second_life();
    let (session, key) = (stage.session_of(&guard), guard.lock_key());
    session.probed(key.as_bytes(), former, None);
    session.probed(key.as_bytes(), guard.fencing_token() - 1, None);
    assert!(guard.is_held());
    // The first revision at which the key stands.
    session.probed(key.as_bytes(), guard.fencing_token(), None);
    assert!(!guard.is_held());
    assert!(!guard.unlock());
}

#[test]
fn who_is_asked_for_by_a_former_token_is_not_the_one_who_is_here() {
    let stage = Stage::new();
    let (guard, former) = stage.second_life();
    let (session, key) = (stage.session_of(&guard), guard.lock_key());
    let token = guard.fencing_token();
    assert!(session.tenant(key.as_bytes(), former).is_none());
    assert!(session.condemn(key.as_bytes(), former).is_none());
    assert!(session.tenant(key.as_bytes(), token).is_some());
    assert!(session.condemn(key.as_bytes(), token).is_some());
    assert!(guard.unlock());
}

#[test]
fn a_condemned_attempt_becomes_no_hold_and_its_name_no_burden() {
    let stage = Stage::new();
    let guard = stage.mutex.lock_owned().unwrap();
    let (session, contender) = (stage.session_of(&guard), &stage.mutex.base().contender);
    let ticket = |session: &Arc<Session>| session.enter(contender, 1).unwrap().remove(0);
    let nobody = || Weak::<crate::contend::Hold>::new() as Weak<dyn Tenant>;

    let waiting = ticket(&session);
    let key = waiting.key().to_vec();
    assert!(session.condemn(&key, 7).is_none());
    assert!(waiting.install(nobody(), 8), "somebody else was meant");
    assert!(!waiting.install(nobody(), 7));
    waiting.free();
    let next = ticket(&session);
    assert_eq!(next.key(), key);
    assert!(next.install(nobody(), 7), "forgotten with the attempt");
    next.free();
    assert!(guard.unlock());
}

#[test]
fn only_names_whose_keys_are_known_to_be_gone_are_used_again() {
    let stage = Stage::new();
    let guard = stage.mutex.lock_owned().unwrap();
    let (session, contender) = (stage.session_of(&guard), &stage.mutex.base().contender);
    let ticket = || session.enter(contender, 1).unwrap().remove(0);
    let (free, settled) = (ticket(), ticket());
    let (free_key, settled_key) = (free.key().to_vec(), settled.key().to_vec());
    settled.settle();
    free.free();
    let names: Vec<_> = (0..3).map(|_| ticket()).collect();
    let keys: HashSet<_> = names.iter().map(|ticket| ticket.key().to_vec()).collect();
    assert_eq!(keys.len(), 3, "no two at a time");
    assert!(keys.contains(&free_key) && !keys.contains(&settled_key));
    assert!(!keys.contains(guard.lock_key().as_bytes()));
    names.into_iter().for_each(Ticket::free);

    // An open attempt ends the session, and with it all its names.
    ticket().leave_open(Box::new(()));
    assert!(session.enter(contender, 1).is_none());
    assert!(guard.unlock());
    let other = stage.mutex.lock_owned().unwrap();
    assert_ne!(stage.session_of(&other).lease(), session.lease());
    assert!(other.unlock());
}
