//! Every public name of the families built so far, used once with its types spelt out. That it
//! compiles is the test; that it also runs shows that the names mean what they say.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::convert::Infallible;
use std::error::Error as StdError;
use std::fmt::{Debug, Display};
use std::time::{Duration, SystemTime};

use crossbeam_channel::Receiver;
use etcd_recipes::testing::EtcdServer;
use etcd_recipes::{
    Barrier, BarrierBuilder, BoxError, Bytes, CancelToken, CandidateState, Client, ClientBuilder,
    CloseMode, Codec, Compare, CompareOp, ConnectionState, Contender, ContenderMode, Error,
    ErrorEvent, ErrorKind, FencedTxn, Hold, KeyValue, LatchEvent, LatchListener, LeaderChange,
    LeaderLatch, LeaderLatchBuilder, LeaderObserver, LeaderObserverBuilder, LeaderSelector,
    LeaderSelectorBuilder, LeaderSelectorListener, Leadership, LeadershipTerm, Lease, LeaseEvent,
    LeaseListener, LeaseResilience, ListenerId, Loss, LossListener, LossReason, MultiLock,
    MultiLockGuard, Mutex, MutexBuilder, MutexGuard, Op, OpResult, OwnedMutexGuard,
    OwnedRwLockReadGuard, OwnedRwLockWriteGuard, Participant, Permit, Recipe, ResilienceConfig,
    Result, RetryPolicy, RpcResilience, RwLock, RwLockBuilder, RwLockReadGuard, RwLockWriteGuard,
    SelfHealingKeepAlive, Semaphore, SemaphoreBuilder, SharedHold, Subscription, Text,
    TransientBuilder, TransientKeyValue, Txn, TxnResult, WatchResilience,
};

const SECOND: Duration = Duration::from_secs(1);
const LIMIT: Duration = Duration::from_secs(20);

// ----- what the types promise ---------------------------------------------------------------

const fn send_sync<T: Send + Sync>() {}
const fn sends<T: Send>() {}
const fn syncs<T: Sync>() {}
const fn clones<T: Clone>() {}
const fn shows<T: Debug>() {}
const fn outlives_all<T: 'static>() {}

/// `T: Send` makes the method below ambiguous, and then this does not compile.
macro_rules! not_send {
    ($type:ty) => {
        const _: fn() = || {
            trait AmbiguousIfSend<A> {
                fn some() {}
            }
            impl<T: ?Sized> AmbiguousIfSend<()> for T {}
            struct Sends;
            impl<T: ?Sized + Send> AmbiguousIfSend<Sends> for T {}
            let _ = <$type as AmbiguousIfSend<_>>::some;
        };
    };
}

not_send!(MutexGuard<'static>);
not_send!(RwLockReadGuard<'static>);
not_send!(RwLockWriteGuard<'static>);

const _: () = {
    syncs::<MutexGuard<'static>>();
    send_sync::<OwnedMutexGuard>();
    outlives_all::<OwnedMutexGuard>();
    send_sync::<Hold>();
    clones::<Hold>();
    send_sync::<Mutex>();
    clones::<Mutex>();
    send_sync::<Client>();
    clones::<Client>();
    send_sync::<CancelToken>();
    clones::<CancelToken>();
    send_sync::<Error>();
    clones::<Error>();
    send_sync::<Loss>();
    clones::<Loss>();
    send_sync::<LeaseEvent>();
    clones::<LeaseEvent>();
    send_sync::<ErrorEvent>();
    clones::<ErrorEvent>();
    send_sync::<SelfHealingKeepAlive>();
    send_sync::<Subscription<Loss>>();
    send_sync::<ResilienceConfig>();
    clones::<ResilienceConfig>();
    sends::<ClientBuilder>();
    sends::<MutexBuilder>();
    clones::<Txn>();
    clones::<TxnResult>();
    clones::<Contender>();
    shows::<Client>();
    shows::<ClientBuilder>();
    shows::<Mutex>();
    shows::<MutexGuard<'static>>();
    shows::<OwnedMutexGuard>();
    shows::<Hold>();
    shows::<SelfHealingKeepAlive>();
    shows::<Subscription<LeaseEvent>>();
};

const _: () = {
    send_sync::<RwLock>();
    clones::<RwLock>();
    shows::<RwLock>();
    sends::<RwLockBuilder>();
    shows::<RwLockBuilder>();
    syncs::<RwLockReadGuard<'static>>();
    syncs::<RwLockWriteGuard<'static>>();
    shows::<RwLockReadGuard<'static>>();
    shows::<RwLockWriteGuard<'static>>();
    send_sync::<OwnedRwLockReadGuard>();
    send_sync::<OwnedRwLockWriteGuard>();
    outlives_all::<OwnedRwLockReadGuard>();
    outlives_all::<OwnedRwLockWriteGuard>();
    shows::<OwnedRwLockReadGuard>();
    shows::<OwnedRwLockWriteGuard>();
    send_sync::<SharedHold>();
    clones::<SharedHold>();
    shows::<SharedHold>();
    send_sync::<Semaphore>();
    clones::<Semaphore>();
    shows::<Semaphore>();
    sends::<SemaphoreBuilder>();
    send_sync::<Permit>();
    outlives_all::<Permit>();
    shows::<Permit>();
    send_sync::<MultiLock>();
    clones::<MultiLock>();
    shows::<MultiLock>();
    send_sync::<MultiLockGuard>();
    outlives_all::<MultiLockGuard>();
    shows::<MultiLockGuard>();
    send_sync::<LeaderSelector>();
    shows::<LeaderSelector>();
    sends::<LeaderSelectorBuilder>();
    send_sync::<LeadershipTerm>();
    clones::<LeadershipTerm>();
    outlives_all::<LeadershipTerm>();
    shows::<LeadershipTerm>();
    send_sync::<LeaderLatch>();
    shows::<LeaderLatch>();
    sends::<LeaderLatchBuilder>();
    send_sync::<LeaderObserver>();
    shows::<LeaderObserver>();
    sends::<LeaderObserverBuilder>();
    send_sync::<Participant>();
    clones::<Participant>();
    send_sync::<CandidateState>();
    clones::<CandidateState>();
    clones::<CandidateState>();
    clones::<LatchEvent>();
    send_sync::<LeaderChange>();
    clones::<LeaderChange>();
};

/// Recipes are used through the trait, listeners' closures infer their argument.
fn recipe(recipe: &impl Recipe) {
    let _: &str = recipe.path();
    let _: &str = recipe.client_id();
    let _: ConnectionState = recipe.connection_state();
    let id: ListenerId = recipe.add_connection_state_listener(|state| {
        let _: &ConnectionState = state;
    });
    assert!(recipe.remove_connection_state_listener(id));
    let _: Subscription<ConnectionState> = recipe.connection_events();
    let _: bool = recipe.is_healthy();
    let _: bool = recipe.ping();
    let _: Vec<Error> = recipe.errors();
    let _: u64 = recipe.error_count();
    recipe.clear_errors();
    let id: ListenerId = recipe.add_error_listener(|event: &ErrorEvent| {
        let _: (&String, &Error) = (&event.identity, &event.error);
    });
    assert!(recipe.remove_error_listener(id));
    let _: Result<()> = recipe.close();
}

/// A trait object works where no listener is added.
fn any_recipe(recipe: &dyn Recipe) -> (&str, bool) {
    (recipe.path(), recipe.is_healthy())
}

#[test]
fn errors() {
    let error: Error = Client::connect(["nonsense"]).unwrap_err();
    let as_std: &(dyn StdError + Send + Sync) = &error;
    let _: &dyn Display = &error;
    let _: Option<&(dyn StdError + 'static)> = as_std.source();
    let _: Option<&str> = error.key();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.is_invalid_argument());
    let others: [fn(&Error) -> bool; 7] = [
        Error::is_timeout,
        Error::is_unreachable,
        Error::is_lost,
        Error::is_closed,
        Error::is_interrupted,
        Error::is_ambiguous,
        Error::is_permission,
    ];
    assert!(others.iter().all(|is| !is(&error)));
    let _kinds = [
        ErrorKind::InvalidArgument,
        ErrorKind::Unreachable,
        ErrorKind::TimedOut,
        ErrorKind::AuthenticationFailed,
        ErrorKind::PermissionDenied,
        ErrorKind::Closed,
        ErrorKind::Interrupted,
        ErrorKind::OutcomeUnknown,
        ErrorKind::Lost,
        ErrorKind::LeaseGone,
        ErrorKind::Compacted,
        ErrorKind::WrongCluster,
        ErrorKind::Forked,
        ErrorKind::ForeignKey,
        ErrorKind::Rejected,
        ErrorKind::NotEstablished,
        ErrorKind::ListenerPanicked,
        ErrorKind::CleanupUnconfirmed,
        ErrorKind::Testing,
        ErrorKind::Internal,
    ];
}

#[test]
fn resilience() {
    let policies = [
        RetryPolicy::exponential_backoff(),
        RetryPolicy::exponential(SECOND, SECOND * 4),
        RetryPolicy::bounded(4, SECOND / 4),
        RetryPolicy::forever(SECOND),
        RetryPolicy::never(),
        RetryPolicy::custom(|attempt: u32, elapsed: Duration| (attempt < 3).then_some(elapsed)),
    ];
    let [backoff, _, bounded, ..] = policies;
    let lease = LeaseResilience::new()
        .retry_policy(backoff.clone())
        .heal_operation_timeout(SECOND * 10)
        .margin(SECOND)
        .renew_interval(SECOND)
        .hedge_delay(SECOND)
        .attempt_limit(SECOND);
    let _: &RetryPolicy = lease.get_retry_policy();
    let _: Duration = lease.get_heal_operation_timeout();
    let _: [Option<Duration>; 4] = [
        lease.get_margin(),
        lease.get_renew_interval(),
        lease.get_hedge_delay(),
        lease.get_attempt_limit(),
    ];
    let rpc = RpcResilience::new().retry_policy(bounded).operation_timeout(SECOND * 30);
    let _: (&RetryPolicy, Duration) = (rpc.get_retry_policy(), rpc.get_operation_timeout());
    let watch = WatchResilience::new()
        .retry_policy(backoff)
        .progress_interval(SECOND)
        .progress_timeout(SECOND);
    let _: (&RetryPolicy, Duration, Duration) =
        (watch.get_retry_policy(), watch.get_progress_interval(), watch.get_progress_timeout());
    let config = ResilienceConfig::new().rpc(rpc).watch(watch).lease(lease);
    let _: (&RpcResilience, &WatchResilience, &LeaseResilience) =
        (config.get_rpc(), config.get_watch(), config.get_lease());
    let _: ResilienceConfig = ResilienceConfig::disabled();
    let _: ResilienceConfig = ResilienceConfig::default();
    // The defaults are part of the contract.
    assert_eq!(RpcResilience::new().get_operation_timeout(), SECOND * 30);
    assert_eq!(LeaseResilience::new().get_heal_operation_timeout(), SECOND * 10);
    assert_eq!(LeaseResilience::new().get_margin(), None);
}

#[test]
fn cancellation() {
    let token = CancelToken::new();
    let child: CancelToken = token.child();
    let receiver: Receiver<Infallible> = token.receiver();
    assert!(!token.wait_for(Duration::from_millis(1)).unwrap());
    let slept: Result<()> = token.sleep(Duration::from_millis(1));
    slept.unwrap();
    let value: i32 = token.scope(|| CancelToken::shield(|| 7));
    assert_eq!(value, 7);
    let carried: CancelToken = token.scope(CancelToken::current);
    token.cancel();
    let waited: Result<()> = token.wait();
    waited.unwrap();
    assert!(token.is_cancelled() && child.is_cancelled() && carried.is_cancelled());
    assert!(receiver.recv().is_err());
}

#[test]
fn the_client() {
    let etcd = EtcdServer::start().unwrap();
    let plain: Client = Client::connect(vec![etcd.endpoint()]).unwrap();
    assert!(!plain.client_id().is_empty() && !plain.client_id().contains(['/', ':']));
    let builder: ClientBuilder = Client::builder();
    let client: Client = builder
        .endpoints([etcd.endpoint()])
        .user("somebody", "authentication is off, so that it does not matter")
        .namespace(String::from("/prod"))
        .connect_timeout(SECOND * 5)
        .keep_alive(SECOND * 10, SECOND * 5)
        .resilience(ResilienceConfig::new())
        .client_id("host-7")
        .connect()
        .unwrap();
    assert_eq!(client.client_id(), "host-7");
    client.wait_ready(LIMIT).unwrap();
    assert!(client.ping());

    let _: i64 = client.put("key", "value").unwrap();
    let found: Option<KeyValue> = client.get(String::from("key")).unwrap();
    let KeyValue { key, value, create_revision, mod_revision, version, lease } = found.unwrap();
    assert_eq!((key, value), (b"key".to_vec(), b"value".to_vec()));
    assert_eq!((create_revision, version, lease), (mod_revision, 1, 0));
    let _: Vec<KeyValue> = client.get_prefix("k").unwrap();
    let _: u64 = client.count_prefix(b"k".to_vec()).unwrap();
    let (lease, granted): (i64, Duration) = client.grant_lease(LIMIT).unwrap();
    assert_eq!(granted, LIMIT);
    let _: i64 = client.put_with_lease("leased", vec![0_u8, 1], lease).unwrap();
    let _: Option<Duration> = client.time_to_live(lease).unwrap();
    client.revoke_lease(lease).unwrap();

    let txn: Txn = Txn::new()
        .when([
            Compare::absent("none"),
            Compare::version("key", CompareOp::Greater, 0),
            Compare::create_revision("key", CompareOp::Equal, create_revision),
            Compare::mod_revision("key", CompareOp::Less, i64::MAX),
            Compare::lease("key", CompareOp::NotEqual, 1),
            Compare::value("key", CompareOp::Equal, "value"),
        ])
        .and_then([
            Op::put("a", "1"),
            Op::put_with_lease("b", "2", 0),
            Op::get("a"),
            Op::get_prefix("a"),
            Op::delete("c"),
            Op::delete_prefix("d"),
            Op::txn(Txn::new().and_then([Op::get("key")])),
        ])
        .or_else([Op::get("key")]);
    let result: TxnResult = client.txn(txn).unwrap();
    let TxnResult { succeeded, revision, results, .. } = result;
    assert!(succeeded && revision > create_revision);
    for one in results {
        match &one {
            OpResult::Put | OpResult::Delete(_) => {}
            OpResult::Get(found) => drop::<Vec<KeyValue>>(found.clone()),
            OpResult::Txn(inner) => assert!(inner.succeeded),
            _ => panic!("{one:?}"),
        }
    }
    let _: bool = client.delete("key").unwrap();
    let _: u64 = client.delete_prefix("").unwrap();
    let raw: Result<bool> = client.with_raw(LIMIT, |mut etcd: etcd_client::Client| async move {
        etcd.status().await.is_ok()
    });
    assert!(raw.unwrap());
    client.close().unwrap();
    assert!(client.is_closed());
}

#[test]
fn leases() {
    struct Listener;
    impl LeaseListener for Listener {
        fn on_lease_event(&self, event: &LeaseEvent) {
            match event {
                LeaseEvent::Suspended { lease, cause }
                | LeaseEvent::Expired { lease, cause }
                | LeaseEvent::Failed { lease, cause } => {
                    let _: (&i64, &Error) = (lease, cause);
                }
                LeaseEvent::Restored { old, new } => {
                    let _: (&i64, &i64) = (old, new);
                }
                _ => {}
            }
        }
    }
    let etcd = EtcdServer::start().unwrap();
    let client = Client::connect([etcd.endpoint()]).unwrap();
    let hook = |lease: &Lease| -> Result<bool> { Ok(lease.id() > 0 && lease.ttl() >= SECOND) };
    let kept: SelfHealingKeepAlive = client.self_healing_keep_alive(LIMIT, hook).unwrap();
    assert!(kept.is_healthy() && kept.current_lease_id() > 0);
    let id: ListenerId = kept.add_listener(|_event: &LeaseEvent| ());
    let other: ListenerId = kept.add_listener_with(Box::new(Listener));
    assert!(kept.remove_listener(id) && kept.remove_listener(other));
    let events: Subscription<LeaseEvent> = kept.events();
    assert_eq!(events.missed(), 0);
    let _: Vec<Error> = kept.errors();
    kept.close().unwrap();
    assert!(events.recv().is_err(), "a close ends the channel");
    let built: SelfHealingKeepAlive = SelfHealingKeepAlive::builder(&client, LIMIT)
        .resilience(LeaseResilience::new())
        .listener(|_event| ())
        .listener_with(Box::new(Listener))
        .start(hook)
        .unwrap();
    drop(built);
}

#[test]
fn the_mutex() {
    struct Listener;
    impl LossListener for Listener {
        fn on_loss(&self, loss: &Loss) {
            let _: (&LossReason, &String, &String, i64, SystemTime) =
                (&loss.reason, &loss.path, &loss.key, loss.token, loss.last_renewal);
        }
    }
    let etcd = EtcdServer::start().unwrap();
    let client = Client::connect([etcd.endpoint()]).unwrap();
    let plain: Mutex = Mutex::new(&client, String::from("/locks/plain")).unwrap();
    let builder: MutexBuilder = Mutex::builder(&client, "/locks/a");
    let mutex: Mutex = builder
        .ttl(SECOND * 5)
        .client_id("host-7")
        .interrupt_on_lock_loss(true)
        .resilience(LeaseResilience::new())
        .build()
        .unwrap();
    assert_eq!(any_recipe(&mutex), ("/locks/a", true));

    let guard: MutexGuard<'_> = mutex.lock().unwrap();
    let again: Option<MutexGuard<'_>> = mutex.try_lock().unwrap();
    let third: Option<MutexGuard<'_>> = mutex.try_lock_for(SECOND).unwrap();
    assert_eq!(mutex.hold_count(), 3);
    assert!(mutex.is_locked().unwrap() && mutex.is_held_by_current_thread());
    drop(third);
    assert!(Mutex::unlock(again.unwrap()));
    assert!(guard.is_held());
    let _: Duration = guard.remaining();
    let token: i64 = guard.fencing_token();
    let _: &CancelToken = guard.cancel_token();
    let _: String = guard.lock_key();
    let _: Option<Loss> = guard.loss();
    let verified: Result<bool> = guard.verify();
    assert!(verified.unwrap());
    let written: Result<bool> = guard.put("/data", "1");
    assert!(written.unwrap());
    match guard.txn(Txn::new().and_then([Op::get("/data")])).unwrap() {
        FencedTxn::Applied(result) | FencedTxn::CompareFailed(result) => {
            let _: TxnResult = result;
        }
        FencedTxn::Fenced => panic!("fenced"),
    }
    let view: Hold = guard.hold();
    assert!(view.is_held() && view.token() == token && view.fencing_token() == token);
    let _: (Duration, &CancelToken, Option<Loss>) =
        (view.remaining(), view.cancel_token(), view.loss());

    let contenders: Vec<Contender> = mutex.contenders().unwrap();
    let first = &contenders[0];
    assert_eq!((&*first.client_id, first.token, first.position), ("host-7", token, 0));
    let _: (&Option<String>, Option<u32>, Option<SystemTime>) =
        (&first.host, first.pid, first.since);
    assert!(first.is_holder);

    let id: ListenerId = mutex.add_loss_listener(|loss| {
        let _: &Loss = loss;
    });
    let other: ListenerId = mutex.add_loss_listener_with(Box::new(Listener));
    assert!(mutex.remove_loss_listener(id) && mutex.remove_loss_listener(other));
    let events: Subscription<Loss> = mutex.loss_events();
    let _: &Receiver<Loss> = &events;
    assert!(guard.unlock());

    let owned: OwnedMutexGuard = mutex.lock_owned().unwrap();
    let busy: Option<OwnedMutexGuard> = mutex.try_lock_owned().unwrap();
    assert!(busy.is_none());
    assert!(mutex.try_lock_owned_for(SECOND).unwrap().is_none());
    assert!(owned.is_held() && owned.verify().unwrap() && owned.put("/data", "2").unwrap());
    assert!(owned.hold().is_held() && owned.fencing_token() > token);
    let _: (Duration, &CancelToken, String, Option<Loss>) =
        (owned.remaining(), owned.cancel_token(), owned.lock_key(), owned.loss());
    let _: FencedTxn = owned.txn(Txn::new()).unwrap();
    assert!(std::thread::spawn(move || owned.unlock()).join().unwrap());

    let value: Result<i32> = plain.with_lock(|guard: &MutexGuard<'_>| {
        assert!(guard.is_held());
        7
    });
    assert_eq!(value.unwrap(), 7);
    let _reasons = [
        LossReason::DeadlinePassed,
        LossReason::LeaseGone,
        LossReason::KeyDeleted,
        LossReason::KeyOverwritten,
        LossReason::Closed,
        LossReason::AuthRevoked,
        LossReason::WrongCluster,
    ];
    let _states = [
        ConnectionState::Connected,
        ConnectionState::Suspended,
        ConnectionState::Reconnected,
        ConnectionState::Lost,
    ];
    recipe(&mutex);
    recipe(&plain);
    assert!(events.recv().is_err(), "a close ends the channel");
}

#[test]
fn barriers() {
    let etcd = EtcdServer::start().unwrap();
    let client = Client::connect([etcd.endpoint()]).unwrap();
    let plain: Barrier = Barrier::new(&client, "/barriers/plain").unwrap();
    let builder: BarrierBuilder = Barrier::builder(&client, String::from("/barriers/a"));
    let barrier: Barrier = builder
        .ttl(SECOND * 5)
        .client_id("host-7")
        .wait_on_missing(false)
        .resilience(LeaseResilience::new())
        .build()
        .unwrap();
    let set: Result<bool> = barrier.set();
    assert!(set.unwrap() && barrier.is_set().unwrap());
    assert!(!barrier.wait_for(SECOND).unwrap());
    let removed: Result<bool> = barrier.remove();
    assert!(removed.unwrap());
    let waited: Result<()> = barrier.wait();
    waited.unwrap();
    recipe(&barrier);
    recipe(&plain);
    send_sync::<Barrier>();
}

#[test]
fn transient_values_and_codecs() {
    struct Listener;
    impl LeaseListener for Listener {
        fn on_lease_event(&self, _event: &LeaseEvent) {}
    }
    fn items<C: Codec>(_codec: &C) -> Option<C::Item> {
        None
    }
    let (_, _): (Option<String>, Option<Vec<u8>>) = (items(&Text), items(&Bytes));
    let etcd = EtcdServer::start().unwrap();
    let client = Client::connect([etcd.endpoint()]).unwrap();
    let text: TransientKeyValue = TransientKeyValue::new(&client, "/nodes/1", "up").unwrap();
    let started: Result<()> = text.start();
    started.unwrap();
    let changed: Result<()> = text.set("busy");
    changed.unwrap();
    let value: Result<String> = text.value();
    assert_eq!(value.unwrap(), "busy");
    let _: ListenerId = text.add_lease_listener(|_event| ());
    let _: ListenerId = text.add_lease_listener_with(Box::new(Listener));
    let _: Subscription<LeaseEvent> = text.lease_events();
    let builder: TransientBuilder<Vec<u8>, Text> =
        TransientKeyValue::builder(&client, "/nodes/2", vec![0_u8, 255]);
    let bytes: TransientKeyValue<Bytes> = builder
        .ttl(SECOND * 5)
        .codec(Bytes)
        .client_id("host-7")
        .resilience(LeaseResilience::new())
        .build()
        .unwrap();
    bytes.start().unwrap();
    assert_eq!(client.get("/nodes/2").unwrap().unwrap().value, [0, 255]);
    recipe(&text);
    recipe(&bytes);
    send_sync::<TransientKeyValue>();
}

/// Adds and removes what hears of losses.
macro_rules! loss_listeners {
    ($recipe:expr) => {{
        struct Listener;
        impl LossListener for Listener {
            fn on_loss(&self, _loss: &Loss) {}
        }
        let id: ListenerId = $recipe.add_loss_listener(|_loss: &Loss| ());
        let other: ListenerId = $recipe.add_loss_listener_with(Box::new(Listener));
        assert!($recipe.remove_loss_listener(id) && $recipe.remove_loss_listener(other));
        let events: Subscription<Loss> = $recipe.loss_events();
        assert_eq!(events.missed(), 0);
    }};
}

/// What every guard tells.
macro_rules! guard {
    ($guard:expr) => {{
        assert!($guard.is_held() && $guard.verify().unwrap());
        let _: (Duration, &CancelToken, String, Option<Loss>) =
            ($guard.remaining(), $guard.cancel_token(), $guard.lock_key(), $guard.loss());
    }};
}

/// What the guard of an exclusive hold does besides.
macro_rules! exclusive {
    ($guard:expr) => {{
        guard!($guard);
        let token: i64 = $guard.fencing_token();
        let hold: Hold = $guard.hold();
        assert_eq!(hold.fencing_token(), token);
        let written: Result<bool> = $guard.put("/data", "1");
        assert!(written.unwrap());
        let done: Result<FencedTxn> = $guard.txn(Txn::new());
        assert!(matches!(done.unwrap(), FencedTxn::Applied(_)));
    }};
}

#[test]
fn the_read_write_lock() {
    let etcd = EtcdServer::start().unwrap();
    let client = Client::connect([etcd.endpoint()]).unwrap();
    let plain: RwLock = RwLock::new(&client, String::from("/locks/plain")).unwrap();
    let builder: RwLockBuilder = RwLock::builder(&client, "/locks/a");
    let lock: RwLock = builder
        .ttl(SECOND * 5)
        .client_id("host-7")
        .interrupt_on_lock_loss(true)
        .resilience(LeaseResilience::new())
        .build()
        .unwrap();

    let read: RwLockReadGuard<'_> = lock.read().unwrap();
    let again: Option<RwLockReadGuard<'_>> = lock.try_read().unwrap();
    let third: Option<RwLockReadGuard<'_>> = lock.try_read_for(SECOND).unwrap();
    assert_eq!((lock.read_count(), lock.write_count()), (3, 0));
    guard!(read);
    let shared: SharedHold = read.hold();
    let _: (bool, Duration, &CancelToken, Option<Loss>) =
        (shared.is_held(), shared.remaining(), shared.cancel_token(), shared.loss());
    let upgrade = lock.write().unwrap_err();
    assert_eq!(upgrade.kind(), ErrorKind::WouldDeadlock);
    let contenders: Vec<Contender> = lock.contenders().unwrap();
    assert_eq!((contenders[0].mode, contenders[0].is_holder), (ContenderMode::Read, true));
    drop((again, third));
    assert!(read.unlock());

    let write: RwLockWriteGuard<'_> = lock.write().unwrap();
    let again: Option<RwLockWriteGuard<'_>> = lock.try_write().unwrap();
    let third: Option<RwLockWriteGuard<'_>> = lock.try_write_for(SECOND).unwrap();
    let reads_too: RwLockReadGuard<'_> = lock.read().unwrap();
    assert_eq!((lock.read_count(), lock.write_count()), (1, 3));
    exclusive!(write);
    let (write, refused): (RwLockWriteGuard<'_>, Error) =
        RwLockWriteGuard::downgrade(write).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidArgument, "refused while nested");
    drop((again, third, reads_too));
    let downgraded: RwLockReadGuard<'_> = RwLockWriteGuard::downgrade(write).unwrap();
    assert!(downgraded.is_held());

    let beside: OwnedRwLockReadGuard = lock.read_owned().unwrap();
    let second: Option<OwnedRwLockReadGuard> = lock.try_read_owned().unwrap();
    let third: Option<OwnedRwLockReadGuard> = lock.try_read_owned_for(SECOND).unwrap();
    guard!(beside);
    let _: SharedHold = beside.hold();
    assert!(lock.try_write_owned().unwrap().is_none());
    assert!(lock.try_write_owned_for(SECOND).unwrap().is_none());
    assert!(downgraded.unlock() && second.unwrap().unlock() && third.unwrap().unlock());
    assert!(std::thread::spawn(move || beside.unlock()).join().unwrap());
    let alone: OwnedRwLockWriteGuard = lock.write_owned().unwrap();
    exclusive!(alone);
    let alone: OwnedRwLockReadGuard = OwnedRwLockWriteGuard::downgrade(alone).unwrap();
    assert!(alone.unlock());

    let seven: Result<i32> = plain.with_read(|guard: &RwLockReadGuard<'_>| {
        assert!(guard.is_held());
        7
    });
    let eight: Result<i32> = plain.with_write(|guard: &RwLockWriteGuard<'_>| {
        assert!(guard.is_held());
        8
    });
    assert_eq!((seven.unwrap(), eight.unwrap()), (7, 8));
    loss_listeners!(lock);
    recipe(&lock);
    recipe(&plain);
}

#[test]
fn the_semaphore() {
    let etcd = EtcdServer::start().unwrap();
    let client = Client::connect([etcd.endpoint()]).unwrap();
    let plain: Semaphore = Semaphore::new(&client, String::from("/limits/a"), 3).unwrap();
    let builder: SemaphoreBuilder = Semaphore::builder(&client, "/limits/a", 3);
    let semaphore: Semaphore = builder
        .ttl(SECOND * 5)
        .client_id("host-7")
        .interrupt_on_permit_loss(false)
        .resilience(LeaseResilience::new())
        .build()
        .unwrap();
    let first: Permit = semaphore.acquire().unwrap();
    let second: Option<Permit> = semaphore.try_acquire().unwrap();
    let third: Option<Permit> = semaphore.try_acquire_for(SECOND).unwrap();
    let available: Result<u32> = semaphore.available_permits();
    assert_eq!(available.unwrap(), 0);
    let contenders: Vec<Contender> = semaphore.contenders().unwrap();
    assert!(contenders.iter().all(|one| one.is_holder && one.mode == ContenderMode::Permit));
    guard!(first);
    let _: SharedHold = first.hold();
    assert_eq!(first.count(), 1);
    drop((second, third));
    assert!(std::thread::spawn(move || first.release()).join().unwrap(), "from any thread");
    let two: Permit = semaphore.acquire_many(2).unwrap();
    assert_eq!(two.count(), 2);
    let busy: Option<Permit> = semaphore.try_acquire_many(2).unwrap();
    assert!(busy.is_none());
    assert!(semaphore.try_acquire_many_for(2, SECOND).unwrap().is_none());
    assert!(two.release());
    let value: Result<i32> = plain.with_permit(|permit: &Permit| {
        assert!(permit.is_held());
        7
    });
    assert_eq!(value.unwrap(), 7);
    let other = Semaphore::new(&client, "/limits/a", 5).unwrap();
    let mismatch = other.try_acquire().unwrap_err();
    assert_eq!(mismatch.kind(), ErrorKind::PermitMismatch { expected: 5, found: 3 });
    let former: Result<Option<u32>> = semaphore.resize(4);
    assert_eq!(former.unwrap(), Some(3));
    let deleted: Result<bool> = Semaphore::delete(&client, "/limits/a");
    assert!(deleted.unwrap());
    loss_listeners!(semaphore);
    recipe(&semaphore);
    recipe(&plain);
}

#[test]
fn the_lock_of_several_mutexes() {
    let etcd = EtcdServer::start().unwrap();
    let client = Client::connect([etcd.endpoint()]).unwrap();
    let a = Mutex::new(&client, "/locks/a").unwrap();
    let b = Mutex::new(&client, "/locks/b").unwrap();
    let both: MultiLock = MultiLock::new([b.clone(), a.clone()]).unwrap();
    assert!(MultiLock::new(vec![a.clone()]).is_ok());
    let mutexes: &[Mutex] = both.mutexes();
    assert_eq!(mutexes.len(), 2);
    let guard: MultiLockGuard = both.lock().unwrap();
    let busy: Option<MultiLockGuard> = both.try_lock().unwrap();
    assert!(busy.is_none());
    assert!(both.try_lock_for(SECOND).unwrap().is_none());
    assert!(guard.is_held() && guard.verify().unwrap());
    let _: (Duration, &CancelToken, Option<Loss>) =
        (guard.remaining(), guard.cancel_token(), guard.loss());
    let token: Option<i64> = guard.fencing_token("/locks/a");
    assert!(token.is_some() && guard.fencing_token("/locks/c").is_none());
    let hold: Option<Hold> = guard.hold("/locks/b");
    assert!(hold.unwrap().is_held());
    let written: Result<bool> = guard.put("/data", "1");
    assert!(written.unwrap());
    let done: Result<FencedTxn> = guard.txn(Txn::new());
    assert!(matches!(done.unwrap(), FencedTxn::Applied(_)));
    assert!(std::thread::spawn(move || guard.unlock()).join().unwrap());
    let value: Result<i32> = both.with_lock(|guard: &MultiLockGuard| {
        assert!(guard.is_held());
        7
    });
    assert_eq!(value.unwrap(), 7);
    let _set_lost: LossReason = LossReason::SetLost;
}

#[test]
fn the_selector_and_its_terms() {
    struct Listener(crossbeam_channel::Sender<LeadershipTerm>);
    impl LeaderSelectorListener for Listener {
        fn take_leadership(&self, term: &LeadershipTerm) -> std::result::Result<(), BoxError> {
            self.0.send(term.clone())?;
            Ok(term.wait_until_finished()?)
        }
        fn relinquish_leadership(&self, _term: &LeadershipTerm) {}
    }
    let etcd = EtcdServer::start().unwrap();
    let client = Client::connect([etcd.endpoint()]).unwrap();
    let builder: LeaderSelectorBuilder = LeaderSelector::builder(&client, "/elections/a");
    let selector: LeaderSelector = builder
        .ttl(SECOND * 5)
        .client_id("host-7")
        .interrupt_on_lease_loss(true)
        .auto_requeue(false)
        .resilience(LeaseResilience::new())
        .on_lead(|term: &LeadershipTerm| -> std::result::Result<(), BoxError> {
            assert!(term.is_leader());
            Ok(())
        })
        .on_relinquish(|_term: &LeadershipTerm| ())
        .build()
        .unwrap();
    assert!(!selector.is_leader() && !selector.is_finished());
    assert!(matches!(selector.state(), CandidateState::Idle));
    for _term in 0..2 {
        let started: Result<()> = selector.start();
        started.unwrap();
        let waited: Result<()> = selector.wait_on_leadership_complete();
        waited.unwrap();
        let done: Result<bool> = selector.wait_on_leadership_complete_for(SECOND);
        assert!(done.unwrap() && selector.is_finished());
    }
    loss_listeners!(selector);
    recipe(&selector);
    assert!(matches!(selector.state(), CandidateState::Closed));

    let (tell, told) = crossbeam_channel::unbounded();
    let selector = LeaderSelector::builder(&client, String::from("/elections/a"))
        .client_id("host-8")
        .listener(Box::new(Listener(tell)))
        .build()
        .unwrap();
    selector.start().unwrap();
    let term: LeadershipTerm = told.recv_timeout(LIMIT).unwrap();
    assert!(term.is_leader() && term.verify().unwrap());
    let number: i64 = term.fencing_token();
    assert!(matches!(selector.state(), CandidateState::Leading { term } if term == number));
    let _: (Duration, &CancelToken, String, Option<Loss>) =
        (term.remaining(), term.cancel_token(), term.lock_key(), term.loss());
    assert!(!term.wait_until_finished_for(SECOND / 100).unwrap());
    let slept: Result<()> = term.sleep(SECOND / 100);
    slept.unwrap();
    let written: Result<bool> = term.put("/data", "1");
    let proclaimed: Result<bool> = term.proclaim("at host-8");
    assert!(written.unwrap() && proclaimed.unwrap());
    let done: Result<FencedTxn> = term.txn(Txn::new());
    assert!(matches!(done.unwrap(), FencedTxn::Applied(_)));
    let participants: Vec<Participant> = selector.participants().unwrap();
    let leader = &participants[0];
    assert_eq!((&*leader.client_id, leader.is_leader, leader.position), ("host-8", true, 0));
    assert_eq!((leader.term, leader.proposal_text()), (number, "at host-8".to_owned()));
    let _: &Vec<u8> = &leader.proposal;
    let resigned: Result<bool> = selector.resign();
    assert!(resigned.unwrap() && !selector.resign_for(SECOND).unwrap());
    term.wait_until_finished().unwrap();
    let closed: Result<()> = selector.close();
    closed.unwrap();
    let _states = |position| [CandidateState::Waiting { position }, CandidateState::Closed];
    let _failed: fn(Error) -> CandidateState = CandidateState::Failed;
}

#[test]
fn the_latch() {
    struct Listener;
    impl LatchListener for Listener {
        fn is_leader(&self, _term: i64) {}
        fn not_leader(&self, _term: i64) {}
    }
    let etcd = EtcdServer::start().unwrap();
    let client = Client::connect([etcd.endpoint()]).unwrap();
    let plain: LeaderLatch = LeaderLatch::new(&client, String::from("/elections/plain")).unwrap();
    let builder: LeaderLatchBuilder = LeaderLatch::builder(&client, "/elections/a");
    let latch: LeaderLatch = builder
        .ttl(SECOND * 5)
        .client_id("host-7")
        .interrupt_on_lease_loss(true)
        .resilience(LeaseResilience::new())
        .build()
        .unwrap();
    let id: ListenerId = latch.add_listener(|event: &LatchEvent| match event {
        LatchEvent::IsLeader { term } | LatchEvent::NotLeader { term } => {
            let _: &i64 = term;
        }
        _ => {}
    });
    let other: ListenerId = latch.add_listener_with(Box::new(Listener));
    let events: Subscription<LatchEvent> = latch.events();
    assert!(matches!(latch.state(), CandidateState::Idle));
    let started: Result<()> = latch.start();
    started.unwrap();
    let waited: Result<()> = latch.wait();
    waited.unwrap();
    assert!(latch.wait_for(SECOND).unwrap() && latch.has_leadership());
    let leadership: Option<Leadership> = latch.leadership();
    let leadership: LeadershipTerm = leadership.unwrap();
    let term = leadership.fencing_token();
    assert!(leadership.put("/data", "1").unwrap());
    assert!(matches!(latch.state(), CandidateState::Leading { term: led } if led == term));
    assert_eq!(events.recv_timeout(LIMIT).unwrap(), LatchEvent::IsLeader { term });
    let participants: Vec<Participant> = latch.participants().unwrap();
    assert!(participants[0].is_leader);
    assert!(latch.remove_listener(id) && latch.remove_listener(other));
    loss_listeners!(latch);
    let closed: Result<()> = latch.close_with(CloseMode::Notify);
    closed.unwrap();
    assert_eq!(events.recv_timeout(LIMIT).unwrap(), LatchEvent::NotLeader { term });
    assert!(matches!(latch.state(), CandidateState::Closed));
    recipe(&latch);
    plain.close_with(CloseMode::Silent).unwrap();
    recipe(&plain);
    let _states = |position| CandidateState::Waiting { position };
    let _failed: fn(Error) -> CandidateState = CandidateState::Failed;
}

#[test]
fn the_observer() {
    let etcd = EtcdServer::start().unwrap();
    let client = Client::connect([etcd.endpoint()]).unwrap();
    let plain: LeaderObserver = LeaderObserver::new(&client, "/elections/plain").unwrap();
    let builder: LeaderObserverBuilder =
        LeaderObserver::builder(&client, String::from("/elections/a"));
    let observer: LeaderObserver = builder.start_event(true).build().unwrap();
    let id: ListenerId = observer.add_listener(|change: &LeaderChange| match change {
        LeaderChange::Elected(leader) | LeaderChange::Proclaimed(leader) => {
            let _: &Participant = leader;
        }
        LeaderChange::WatchFailed(error) => {
            let _: &Error = error;
        }
        LeaderChange::Vacated => {}
        _ => {}
    });
    let events: Subscription<LeaderChange> = observer.events();
    let started: Result<()> = observer.start();
    started.unwrap();
    assert!(matches!(events.recv_timeout(LIMIT), Ok(LeaderChange::Vacated)));
    let leader: Option<Participant> = observer.current_leader();
    assert!(leader.is_none() && observer.remove_listener(id));
    recipe(&observer);
    recipe(&plain);
}
