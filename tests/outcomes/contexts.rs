//! The same outcome wherever a call is made: in an async worker, in `block_on`, in a destructor,
//! in a thread-local destructor, during unwinding.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::Instant;

use etcd_recipes::testing::EtcdServer;
use etcd_recipes::{Barrier, Client, Mutex};

use crate::stage::{connect, plain, show};
use crate::table::{AFTER_OP, AT_LIMIT, AT_ONCE, BUDGET, L, WITHIN_OP, Window};

/// A call that is ready to be made anywhere.
type Call = Box<dyn FnOnce() -> String + Send>;

/// What a call came to, and how long it took.
type Outcome = (String, std::time::Duration);

struct Sample {
    name: &'static str,
    prepare: fn(Client, String) -> Call,
    /// With etcd at hand, and with etcd frozen.
    expected: [(&'static str, Window); 2],
}

const SAMPLES: [Sample; 7] = [
    Sample {
        name: "Mutex::lock",
        prepare: |client, path| {
            let mutex = Mutex::new(&client, path).unwrap();
            Box::new(move || show(mutex.lock(), |_| "held".to_owned()))
        },
        expected: [("Ok(held)", AT_ONCE), ("Err(Unreachable)", AFTER_OP)],
    },
    Sample {
        name: "Mutex::try_lock_for",
        prepare: |client, path| {
            let mutex = Mutex::new(&client, path).unwrap();
            Box::new(move || show(mutex.try_lock_for(L), |got| got.is_some().to_string()))
        },
        expected: [("Ok(true)", AT_ONCE), ("Err(Unreachable)", AT_LIMIT)],
    },
    Sample {
        name: "OwnedMutexGuard::unlock",
        prepare: |client, path| {
            let guard = Mutex::new(&client, path).unwrap().lock_owned().unwrap();
            Box::new(move || guard.unlock().to_string())
        },
        expected: [("true", AT_ONCE), ("true", BUDGET)],
    },
    Sample {
        name: "drop of a guard",
        prepare: |client, path| {
            let guard = Mutex::new(&client, path).unwrap().lock_owned().unwrap();
            Box::new(move || {
                let hold = guard.hold();
                drop(guard);
                format!("held: {}, lost: {}", hold.is_held(), hold.loss().is_some())
            })
        },
        expected: [("held: false, lost: false", AT_ONCE), ("held: false, lost: false", BUDGET)],
    },
    Sample {
        name: "Client::put",
        prepare: |client, path| {
            Box::new(move || show(client.put(path, "value"), |_| "put".to_owned()))
        },
        expected: [("Ok(put)", AT_ONCE), ("Err(OutcomeUnknown)", WITHIN_OP)],
    },
    Sample {
        name: "Barrier::wait_for",
        prepare: |client, path| {
            client.put(path.as_str(), "somebody's").unwrap();
            let barrier = Barrier::new(&client, path).unwrap();
            Box::new(move || plain(barrier.wait_for(L)))
        },
        expected: [("Ok(false)", AT_LIMIT), ("Err(Unreachable)", AT_LIMIT)],
    },
    Sample {
        name: "Client::close",
        prepare: |client, path| {
            let guard = Mutex::new(&client, path).unwrap().lock_owned().unwrap();
            Box::new(move || {
                let closed = plain(client.close());
                drop(guard);
                closed
            })
        },
        expected: [("Ok(())", AT_ONCE), ("Err(CleanupUnconfirmed)", BUDGET)],
    },
];

#[derive(Debug, Clone, Copy)]
enum Context {
    Thread,
    AsyncWorker,
    BlockOn,
    Destructor,
    ThreadLocalDestructor,
    Unwinding,
}

const CONTEXTS: [Context; 6] = [
    Context::Thread,
    Context::AsyncWorker,
    Context::BlockOn,
    Context::Destructor,
    Context::ThreadLocalDestructor,
    Context::Unwinding,
];

fn make(call: Call) -> Outcome {
    let began = Instant::now();
    let value = catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|_| "panicked".to_owned());
    (value, began.elapsed())
}

/// Makes its call when it is dropped.
struct OnDrop(Option<Call>, Sender<Outcome>);

impl Drop for OnDrop {
    fn drop(&mut self) {
        if let Some(call) = self.0.take() {
            let _ = self.1.send(make(call));
        }
    }
}

thread_local! {
    static AT_THREAD_END: RefCell<Option<OnDrop>> = const { RefCell::new(None) };
}

impl Context {
    /// Makes the call in this context, on a thread of its own.
    fn run(self, call: Call) -> Outcome {
        let (tell, told) = channel();
        let on_drop = |call| OnDrop(Some(call), tell);
        let thread = thread::spawn(move || match self {
            Context::Thread | Context::Destructor => drop(on_drop(call)),
            Context::AsyncWorker => {
                let runtime =
                    tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
                let on_drop = on_drop(call);
                runtime.block_on(runtime.spawn(async move { drop(on_drop) })).unwrap();
            }
            Context::BlockOn => {
                let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
                let on_drop = on_drop(call);
                runtime.block_on(async move { drop(on_drop) });
            }
            Context::ThreadLocalDestructor => {
                AT_THREAD_END.set(Some(on_drop(call)));
            }
            Context::Unwinding => {
                let on_drop = on_drop(call);
                let _ = catch_unwind(AssertUnwindSafe(|| {
                    let _on_drop = on_drop;
                    // Unwinds as a panic does, without its message.
                    resume_unwind(Box::new(()));
                }));
            }
        });
        thread.join().unwrap();
        told.recv().unwrap()
    }
}

#[test]
fn every_calling_context_sees_the_same_outcome() {
    let etcd = EtcdServer::start().unwrap();
    let mut differs = Vec::new();
    for (frozen, column) in [(false, 0), (true, 1)] {
        let mut calls = Vec::new();
        // The calls under test are not to close their client besides.
        let mut clients = Vec::new();
        for (at, sample) in SAMPLES.iter().enumerate() {
            for context in CONTEXTS {
                let client = connect(&etcd.endpoint());
                let path = format!("/contexts/{column}/{at}/{context:?}");
                calls.push((sample, context, (sample.prepare)(client.clone(), path)));
                clients.push(client);
            }
        }
        if frozen {
            etcd.freeze().unwrap();
        }
        let threads: Vec<_> = calls
            .into_iter()
            .map(|(sample, context, call)| {
                (sample, context, thread::spawn(move || context.run(call)))
            })
            .collect();
        for (sample, context, thread) in threads {
            let (value, took) = thread.join().unwrap();
            let (expected, when) = sample.expected[column];
            if value != expected || took < when.from || took > when.to {
                differs.push(format!(
                    "{} in {context:?}, frozen: {frozen}: {value} after {took:.2?}, not {expected} \
                     in {:?}..{:?}",
                    sample.name, when.from, when.to
                ));
            }
        }
        etcd.thaw().unwrap();
    }
    assert!(differs.is_empty(), "{}", differs.join("\n"));
}
