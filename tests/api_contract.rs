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
    Barrier, BarrierBuilder, Bytes, CancelToken, Client, ClientBuilder, Codec, Compare, CompareOp,
    ConnectionState, Contender, Error, ErrorEvent, ErrorKind, FencedTxn, Hold, KeyValue, Lease,
    LeaseEvent, LeaseListener, LeaseResilience, ListenerId, Loss, LossListener, LossReason, Mutex,
    MutexBuilder, MutexGuard, Op, OpResult, OwnedMutexGuard, Recipe, ResilienceConfig, Result,
    RetryPolicy, RpcResilience, SelfHealingKeepAlive, Subscription, Text, TransientBuilder,
    TransientKeyValue, Txn, TxnResult, WatchResilience,
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
    assert!(mutex.try_lock_owned_for(SECOND / 10).unwrap().is_none());
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
    assert!(!barrier.wait_for(SECOND / 10).unwrap());
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
