//! One round: a holder, a rival behind it, a fault between the holder and etcd, and the stamps of
//! both sides.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::{Duration, Instant};

use etcd_recipes::Client;
use etcd_recipes::testing::{Direction, EtcdServer, FaultProxy, Mode, boot_nanos};

use crate::exchanges::{Exchange, Renewals};
use crate::options::{Fault, Options};
use crate::polling::FREEZE;
use crate::record::Record;
use crate::wire::{Actor, Outcome, Said};

/// How late the answers are under [`Fault::LateAnswers`].
const LATE: Duration = Duration::from_millis(400);

/// Longer than any round.
const NEVER: Duration = Duration::from_secs(3600);

/// etcd looks for expired leases this often, so rounds begin at any phase of it.
const EXPIRY_TICK: Duration = Duration::from_millis(500);

/// How long anything may take that nothing stands in the way of.
const SETUP_LIMIT: Duration = Duration::from_secs(10);

/// What a series of rounds is played on.
pub(crate) struct Stage {
    pub(crate) etcd: EtcdServer,
    pub(crate) observer: Client,
}

impl Stage {
    pub(crate) fn set_up() -> Outcome<Stage> {
        let etcd = EtcdServer::start()?;
        let observer = Client::connect([etcd.endpoint()])?;
        Ok(Stage { etcd, observer })
    }

    /// Plays a round on a path of its own.
    pub(crate) fn play(&self, options: &Options, number: usize) -> Outcome<Record> {
        std::thread::sleep(EXPIRY_TICK.mul_f64(random_unit()));
        let path = format!("/overlap/{}-{:x}/{number}", std::process::id(), boot_nanos());
        let proxy = FaultProxy::start(self.etcd.endpoint())?;
        proxy.record(true);
        let (recipe, seconds) = (options.recipe.to_string(), options.ttl.as_secs().to_string());
        let role = if options.control { "control" } else { "holder" };
        let near = [recipe.as_str(), &proxy.endpoint(), &path, &seconds];
        let far = [recipe.as_str(), &self.etcd.endpoint(), &path, &seconds];
        let mut rival = Actor::start("rival", &far)?;
        let mut holder = Actor::start(role, &near)?;
        let Said::Ready = rival.hear(SETUP_LIMIT)? else { return Err("the rival is ahead".into()) };
        let Said::Held { key } = holder.hear(SETUP_LIMIT)? else {
            return Err("the holder does not hold".into());
        };
        rival.tell("go")?;
        until("two in the queue", SETUP_LIMIT, || {
            let queue = options.recipe.queue(&path);
            Ok((self.observer.count_prefix(queue)? == 2).then_some(()))
        })?;
        let renewals = Renewals::of(&key).ok_or("a key without a lease id")?;
        let round = Round { stage: self, options, proxy: &proxy, renewals };
        until("a renewal", SETUP_LIMIT, || Ok(round.last_answered(u64::MAX, None)))?;
        // The phase of the renewals.
        std::thread::sleep((options.ttl / 3).mul_f64(random_unit()));

        let cut = round.strike(&mut holder, number)?;
        let limit = options.ttl * 3 + SETUP_LIMIT;
        let Said::Acquired { at } = rival.hear(limit)? else {
            return Err("the rival did not acquire".into());
        };
        if options.fault == Fault::FreezeClient {
            sleep_until(cut.done + (options.ttl + Duration::from_millis(200)).as_nanos() as u64);
            holder.resume()?;
        }
        let Said::Lost(polls) = holder.hear(limit)? else {
            return Err("the holder never lost its hold".into());
        };
        Ok(Record {
            polls,
            rival: at,
            begun: cut.begun,
            renewed: round.last_answered(cut.done, cut.late_since),
        })
    }
}

/// When the fault was made.
struct Cut {
    begun: u64,
    /// From here on the holder hears nothing.
    done: u64,
    /// Answers that came after this reached the holder late.
    late_since: Option<u64>,
}

struct Round<'a> {
    stage: &'a Stage,
    options: &'a Options,
    proxy: &'a FaultProxy,
    renewals: Renewals,
}

impl Round<'_> {
    /// The send of the last renewal whose answer can have reached the holder by `limit`, as the
    /// proxy saw it: no renewal that counted was sent later.
    fn last_answered(&self, limit: u64, late_since: Option<u64>) -> Option<u64> {
        let log = self.proxy.frame_log();
        let delivered = |exchange: &Exchange| match late_since {
            Some(since) if exchange.answered >= since => exchange.answered + nanos(LATE),
            _ => exchange.answered,
        };
        self.renewals
            .answered(&log)
            .filter(|exchange| delivered(exchange) <= limit)
            .map(|exchange| exchange.sent)
            .max()
    }

    fn strike(&self, holder: &mut Actor, number: usize) -> Outcome<Cut> {
        let begun = boot_nanos();
        let mut late_since = None;
        match self.options.fault {
            Fault::Blackhole => self.proxy.set(Mode::Blackhole),
            Fault::Reset => self.proxy.set(Mode::Reset),
            Fault::FreezeClient => {
                holder.tell(FREEZE)?;
                holder.wait_stopped()?;
            }
            Fault::FreezeEtcd => {
                self.stage.etcd.freeze()?;
                let done = boot_nanos();
                std::thread::sleep(self.options.ttl + EXPIRY_TICK);
                self.stage.etcd.thaw()?;
                return Ok(Cut { begun, done, late_since });
            }
            Fault::LateAnswers => {
                // A renewal counts for the control at its answer, for the library at the answer
                // to the read that proves it: both ends of that are tried.
                let proof = !self.options.control && number.is_multiple_of(2);
                late_since = Some(begun);
                self.answer_late(holder, begun, proof)?;
            }
        }
        Ok(Cut { begun, done: boot_nanos(), late_since })
    }

    /// Delays the answers, and cuts the holder off at the delivery of one, with nothing of its
    /// own sent in between.
    fn answer_late(&self, holder: &Actor, since: u64, proof: bool) -> Outcome<()> {
        let deliveries = self.proxy.deliveries();
        self.proxy.set(Mode::Delay { up: Duration::ZERO, down: LATE });
        let limit = self.options.ttl * 2 + SETUP_LIMIT;
        let found = until("a late answer", limit, || {
            if holder.has_spoken() {
                return Ok(Some(None));
            }
            let log = self.proxy.frame_log();
            let renewal = self.renewals.answered(&log).find(|renewal| renewal.sent >= since);
            Ok(match renewal {
                Some(renewal) if proof => {
                    let delivered = renewal.answered + nanos(LATE);
                    self.renewals.proofs(&log).find(|proof| proof.sent >= delivered)
                }
                renewal => renewal,
            }
            .map(Some))
        })?;
        if let Some(exchange) = found {
            self.proxy.set(Mode::Delay { up: NEVER, down: LATE });
            loop {
                let delivery = deliveries.recv_timeout(LATE * 2)?;
                if delivery.connection == exchange.connection
                    && delivery.direction == Direction::Down
                    && delivery.data
                    && delivery.at_nanos >= exchange.answered + nanos(LATE)
                {
                    break;
                }
            }
        }
        self.proxy.set(Mode::Blackhole);
        Ok(())
    }
}

/// Asks again and again until there is an answer.
fn until<T>(
    what: &str,
    limit: Duration,
    mut ask: impl FnMut() -> Outcome<Option<T>>,
) -> Outcome<T> {
    let end = Instant::now() + limit;
    loop {
        if let Some(answer) = ask()? {
            return Ok(answer);
        }
        if Instant::now() >= end {
            return Err(format!("not within {limit:?}: {what}").into());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn sleep_until(nanos: u64) {
    std::thread::sleep(Duration::from_nanos(nanos.saturating_sub(boot_nanos())));
}

fn nanos(duration: Duration) -> u64 {
    duration.as_nanos() as u64
}

/// From 0 (included) to 1 (excluded), from the seed of the standard library's maps.
fn random_unit() -> f64 {
    let bits = RandomState::new().build_hasher().finish() >> 11;
    bits as f64 / (1_u64 << 53) as f64
}
