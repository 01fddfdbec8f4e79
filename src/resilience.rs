//! How patient the library is: retry policies, time limits, and the timing of a lease.
//!
//! Everything here is pure: a policy is asked with the random number it may use, and the timing of
//! a lease is checked before anything is sent.

use std::fmt;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, Result};

/// The delay a policy without an end keeps at least, so that a zero cannot become a busy loop.
const SHORTEST_DELAY: Duration = Duration::from_millis(1);

/// The longest TTL that etcd takes.
const LONGEST_TTL: Duration = Duration::from_secs(9_000_000_000);

/// When a failed attempt is repeated.
///
/// Only failures of the connection are repeated; what etcd refused is returned as it is. Retries
/// stay inside the limit of the operation they belong to.
///
/// # Example: a policy of one's own
///
/// ```
/// use std::time::Duration;
/// use etcd_recipes::RetryPolicy;
///
/// // Twice a second for a minute, then no more.
/// let policy = RetryPolicy::custom(|_attempt, elapsed| {
///     (elapsed < Duration::from_secs(60)).then_some(Duration::from_millis(500))
/// });
/// # let _ = policy;
/// ```
#[derive(Clone)]
pub struct RetryPolicy(Rule);

#[derive(Clone)]
enum Rule {
    Exponential { initial: Duration, max: Duration },
    Bounded { attempts: u32, delay: Duration },
    Forever { delay: Duration },
    Never,
    Custom(CustomPolicy),
}

/// A retry closure of the user's. It is user code, so it is asked on a thread for user code.
pub(crate) type CustomPolicy = Arc<dyn Fn(u32, Duration) -> Option<Duration> + Send + Sync>;

/// What a policy says after a failed attempt.
pub(crate) enum Next {
    After(Duration),
    Stop,
    /// The user's closure decides: ask it with the attempt and the elapsed time.
    Ask(CustomPolicy),
}

impl RetryPolicy {
    /// Repeats without an end: after 250 ms at first, doubling up to 15 s, each ±25 % at random.
    pub fn exponential_backoff() -> RetryPolicy {
        RetryPolicy::exponential(Duration::from_millis(250), Duration::from_secs(15))
    }

    /// Repeats without an end: after `initial` at first, doubling up to `max`, each ±25 % at
    /// random. Delays below 1 ms count as 1 ms.
    pub fn exponential(initial: Duration, max: Duration) -> RetryPolicy {
        RetryPolicy(Rule::Exponential { initial, max })
    }

    /// Makes at most `attempts` attempts, the first one included, with `delay` between them.
    pub fn bounded(attempts: u32, delay: Duration) -> RetryPolicy {
        RetryPolicy(Rule::Bounded { attempts, delay })
    }

    /// Repeats without an end, with `delay` between the attempts. Delays below 1 ms count as 1 ms.
    pub fn forever(delay: Duration) -> RetryPolicy {
        RetryPolicy(Rule::Forever { delay })
    }

    /// Repeats nothing.
    pub fn never() -> RetryPolicy {
        RetryPolicy(Rule::Never)
    }

    /// Asks `policy` after each failure: with the number of attempts that have failed so far (1
    /// after the first) and the time since the first began. It returns the delay before the next
    /// attempt, or `None` to give up.
    ///
    /// The closure runs on a thread for user code, never on the one that talks to etcd. A panic in
    /// it counts as `None`.
    pub fn custom(
        policy: impl Fn(u32, Duration) -> Option<Duration> + Send + Sync + 'static,
    ) -> RetryPolicy {
        RetryPolicy(Rule::Custom(Arc::new(policy)))
    }

    /// What follows when `attempt` attempts have failed. `random` is from 0 (included) to 1
    /// (excluded). Only a closure of the user's looks at the elapsed time, when it is asked.
    pub(crate) fn next(&self, attempt: u32, _elapsed: Duration, random: f64) -> Next {
        match &self.0 {
            Rule::Exponential { initial, max } => {
                let doublings = attempt.saturating_sub(1).min(31);
                let delay = initial.saturating_mul(1 << doublings).min(*max);
                let jitter = 0.75 + 0.5 * random;
                // In whole nanoseconds, since a float could overflow a `Duration`.
                let nanos = delay.as_nanos() as f64 * jitter;
                Next::After(Duration::from_nanos(nanos as u64).max(SHORTEST_DELAY))
            }
            Rule::Bounded { attempts, delay } if attempt < *attempts => Next::After(*delay),
            Rule::Forever { delay } => Next::After((*delay).max(SHORTEST_DELAY)),
            Rule::Bounded { .. } | Rule::Never => Next::Stop,
            Rule::Custom(policy) => Next::Ask(policy.clone()),
        }
    }
}

impl fmt::Debug for RetryPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Rule::Exponential { initial, max } => {
                write!(f, "RetryPolicy::exponential({initial:?}, {max:?})")
            }
            Rule::Bounded { attempts, delay } => {
                write!(f, "RetryPolicy::bounded({attempts}, {delay:?})")
            }
            Rule::Forever { delay } => write!(f, "RetryPolicy::forever({delay:?})"),
            Rule::Never => f.write_str("RetryPolicy::never()"),
            Rule::Custom(_) => f.write_str("RetryPolicy::custom(..)"),
        }
    }
}

/// A number from 0 (included) to 1 (excluded), from the seed the standard library's maps use.
pub(crate) fn random_unit() -> f64 {
    let bits = RandomState::new().build_hasher().finish() >> 11;
    bits as f64 / (1_u64 << 53) as f64
}

/// How a single request to etcd is repeated and limited.
///
/// # Example: giving up after five seconds of silence
///
/// ```
/// use std::time::Duration;
/// use etcd_recipes::RpcResilience;
///
/// let rpc = RpcResilience::new().operation_timeout(Duration::from_secs(5));
/// assert_eq!(rpc.get_operation_timeout(), Duration::from_secs(5));
/// ```
#[derive(Debug, Clone)]
pub struct RpcResilience {
    retry_policy: RetryPolicy,
    operation_timeout: Duration,
}

impl RpcResilience {
    /// The defaults: `RetryPolicy::bounded(4, 250 ms)` inside 30 s.
    pub fn new() -> RpcResilience {
        RpcResilience {
            retry_policy: RetryPolicy::bounded(4, Duration::from_millis(250)),
            operation_timeout: Duration::from_secs(30),
        }
    }

    /// When a request that failed on its way is repeated. Default: `bounded(4, 250 ms)`.
    #[must_use]
    pub fn retry_policy(mut self, policy: RetryPolicy) -> Self {
        self.retry_policy = policy;
        self
    }

    /// How long etcd may be silent before a call ends with
    /// [`Unreachable`](crate::ErrorKind::Unreachable); retries are inside it. Default: 30 s.
    #[must_use]
    pub fn operation_timeout(mut self, timeout: Duration) -> Self {
        self.operation_timeout = timeout;
        self
    }

    /// The retry policy set, or the default.
    pub fn get_retry_policy(&self) -> &RetryPolicy {
        &self.retry_policy
    }

    /// The operation timeout set, or the default.
    pub fn get_operation_timeout(&self) -> Duration {
        self.operation_timeout
    }
}

impl Default for RpcResilience {
    fn default() -> Self {
        RpcResilience::new()
    }
}

/// How a watch is resumed and how soon its silence is noticed.
///
/// # Example: noticing a dead watch within two seconds
///
/// ```
/// use std::time::Duration;
/// use etcd_recipes::WatchResilience;
///
/// let watch = WatchResilience::new()
///     .progress_interval(Duration::from_secs(1))
///     .progress_timeout(Duration::from_secs(1));
/// assert_eq!(watch.get_progress_interval(), Duration::from_secs(1));
/// ```
#[derive(Debug, Clone)]
pub struct WatchResilience {
    retry_policy: RetryPolicy,
    progress_interval: Duration,
    progress_timeout: Duration,
}

impl WatchResilience {
    /// The defaults: exponential back-off without an end, asked after 5 s of silence, given up
    /// after 3 s without an answer.
    pub fn new() -> WatchResilience {
        WatchResilience {
            retry_policy: RetryPolicy::exponential_backoff(),
            progress_interval: Duration::from_secs(5),
            progress_timeout: Duration::from_secs(3),
        }
    }

    /// When a broken watch is opened again. Default: [`RetryPolicy::exponential_backoff`].
    #[must_use]
    pub fn retry_policy(mut self, policy: RetryPolicy) -> Self {
        self.retry_policy = policy;
        self
    }

    /// How long a silent stream is left alone before it is asked for its progress. Default: 5 s.
    #[must_use]
    pub fn progress_interval(mut self, interval: Duration) -> Self {
        self.progress_interval = interval;
        self
    }

    /// How long the answer may take before the stream counts as dead. Default: 3 s.
    #[must_use]
    pub fn progress_timeout(mut self, timeout: Duration) -> Self {
        self.progress_timeout = timeout;
        self
    }

    /// The retry policy set, or the default.
    pub fn get_retry_policy(&self) -> &RetryPolicy {
        &self.retry_policy
    }

    /// The progress interval set, or the default.
    pub fn get_progress_interval(&self) -> Duration {
        self.progress_interval
    }

    /// The progress timeout set, or the default.
    pub fn get_progress_timeout(&self) -> Duration {
        self.progress_timeout
    }
}

impl Default for WatchResilience {
    fn default() -> Self {
        WatchResilience::new()
    }
}

/// How a lease is renewed and, where it may be, healed.
///
/// Parts that are not set follow from the TTL `T`. The recipe's builder checks them against its
/// TTL and refuses what cannot work, naming the values.
///
/// # Example: a lease of one second
///
/// Below 2 s the timing has to be explicit.
///
/// ```
/// use std::time::Duration;
/// use etcd_recipes::LeaseResilience;
///
/// let lease = LeaseResilience::new()
///     .renew_interval(Duration::from_millis(250))
///     .hedge_delay(Duration::from_millis(100))
///     .attempt_limit(Duration::from_millis(300));
/// assert_eq!(lease.get_margin(), None);
/// ```
#[derive(Debug, Clone)]
pub struct LeaseResilience {
    retry_policy: RetryPolicy,
    heal_operation_timeout: Duration,
    timing: ExplicitTiming,
}

/// The parts of a lease's timing that the user has set.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
struct ExplicitTiming {
    margin: Option<Duration>,
    renew_interval: Option<Duration>,
    hedge_delay: Option<Duration>,
    attempt_limit: Option<Duration>,
}

impl LeaseResilience {
    /// The defaults: healing repeated with exponential back-off without an end, 10 s for each heal,
    /// and a timing that follows from the TTL.
    pub fn new() -> LeaseResilience {
        LeaseResilience {
            retry_policy: RetryPolicy::exponential_backoff(),
            heal_operation_timeout: Duration::from_secs(10),
            timing: ExplicitTiming::default(),
        }
    }

    /// When a failed heal is repeated; if it found no etcd, its delay ends early when etcd answers
    /// again. Default: [`RetryPolicy::exponential_backoff`].
    #[must_use]
    pub fn retry_policy(mut self, policy: RetryPolicy) -> Self {
        self.retry_policy = policy;
        self
    }

    /// How long one attempt to heal may take. Default: 10 s.
    #[must_use]
    pub fn heal_operation_timeout(mut self, timeout: Duration) -> Self {
        self.heal_operation_timeout = timeout;
        self
    }

    /// How much earlier than etcd this side counts the lease as over. It covers the difference of
    /// clock rates and scheduling, no more. Default: the larger of `T`/10 and 200 ms. Has to be
    /// below `T`/2.
    #[must_use]
    pub fn margin(mut self, margin: Duration) -> Self {
        self.timing.margin = Some(margin);
        self
    }

    /// How long after the last renewal that counted the next one is sent. Default: `T`/3.
    #[must_use]
    pub fn renew_interval(mut self, interval: Duration) -> Self {
        self.timing.renew_interval = Some(interval);
        self
    }

    /// How long a renewal may be unanswered before another goes out through the next member.
    /// Default: the larger of `T`/16 and 100 ms.
    #[must_use]
    pub fn hedge_delay(mut self, delay: Duration) -> Self {
        self.timing.hedge_delay = Some(delay);
        self
    }

    /// How long one renewal may take. Default: the larger of `T`/4 and 500 ms.
    #[must_use]
    pub fn attempt_limit(mut self, limit: Duration) -> Self {
        self.timing.attempt_limit = Some(limit);
        self
    }

    /// The retry policy set, or the default.
    pub fn get_retry_policy(&self) -> &RetryPolicy {
        &self.retry_policy
    }

    /// The limit of one heal set, or the default.
    pub fn get_heal_operation_timeout(&self) -> Duration {
        self.heal_operation_timeout
    }

    /// The margin set; `None` where it follows from the TTL.
    pub fn get_margin(&self) -> Option<Duration> {
        self.timing.margin
    }

    /// The renew interval set; `None` where it follows from the TTL.
    pub fn get_renew_interval(&self) -> Option<Duration> {
        self.timing.renew_interval
    }

    /// The hedge delay set; `None` where it follows from the TTL.
    pub fn get_hedge_delay(&self) -> Option<Duration> {
        self.timing.hedge_delay
    }

    /// The attempt limit set; `None` where it follows from the TTL.
    pub fn get_attempt_limit(&self) -> Option<Duration> {
        self.timing.attempt_limit
    }
}

impl Default for LeaseResilience {
    fn default() -> Self {
        LeaseResilience::new()
    }
}

/// Everything about patience, in one value for a client or a recipe.
///
/// # Example: no retries in a test
///
/// ```
/// use std::time::Duration;
/// use etcd_recipes::{ResilienceConfig, RetryPolicy, RpcResilience};
///
/// let config = ResilienceConfig::new().rpc(RpcResilience::new().retry_policy(RetryPolicy::never()));
/// assert_eq!(config.get_rpc().get_operation_timeout(), Duration::from_secs(30));
/// ```
#[derive(Debug, Clone, Default)]
pub struct ResilienceConfig {
    rpc: RpcResilience,
    watch: WatchResilience,
    lease: LeaseResilience,
}

impl ResilienceConfig {
    /// The defaults of the three parts.
    pub fn new() -> ResilienceConfig {
        ResilienceConfig::default()
    }

    /// No retry, no resumed watch, no healing: the first failure is final. Leases are still
    /// renewed, and time limits stay as they are.
    pub fn disabled() -> ResilienceConfig {
        ResilienceConfig {
            rpc: RpcResilience::new().retry_policy(RetryPolicy::never()),
            watch: WatchResilience::new().retry_policy(RetryPolicy::never()),
            lease: LeaseResilience::new().retry_policy(RetryPolicy::never()),
        }
    }

    /// Single requests. Default: [`RpcResilience::new`].
    #[must_use]
    pub fn rpc(mut self, rpc: RpcResilience) -> Self {
        self.rpc = rpc;
        self
    }

    /// Watches. Default: [`WatchResilience::new`].
    #[must_use]
    pub fn watch(mut self, watch: WatchResilience) -> Self {
        self.watch = watch;
        self
    }

    /// Leases. Default: [`LeaseResilience::new`].
    #[must_use]
    pub fn lease(mut self, lease: LeaseResilience) -> Self {
        self.lease = lease;
        self
    }

    /// The part for single requests.
    pub fn get_rpc(&self) -> &RpcResilience {
        &self.rpc
    }

    /// The part for watches.
    pub fn get_watch(&self) -> &WatchResilience {
        &self.watch
    }

    /// The part for leases.
    pub fn get_lease(&self) -> &LeaseResilience {
        &self.lease
    }
}

/// The timing of one lease, checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct LeaseTiming {
    /// In whole seconds, as etcd counts.
    pub(crate) ttl: Duration,
    pub(crate) margin: Duration,
    pub(crate) renew_interval: Duration,
    pub(crate) hedge_delay: Duration,
    pub(crate) attempt_limit: Duration,
    explicit: ExplicitTiming,
}

impl LeaseTiming {
    /// The timing for the TTL a user asks for, rounded up to whole seconds.
    ///
    /// # Errors
    ///
    /// `InvalidArgument`, naming the values, where a lease with this timing could not be kept.
    pub(crate) fn for_ttl(ttl: Duration, config: &LeaseResilience) -> Result<LeaseTiming> {
        if ttl.is_zero() {
            return Err(Error::invalid(format!("TTL {ttl:?} is not above zero")));
        }
        if ttl > LONGEST_TTL {
            return Err(Error::invalid(format!(
                "TTL {ttl:?} is longer than etcd's limit of {LONGEST_TTL:?}"
            )));
        }
        let whole = Duration::from_secs(ttl.as_secs() + u64::from(ttl.subsec_nanos() > 0));
        let explicit = config.timing;
        let all_set = explicit.renew_interval.is_some()
            && explicit.hedge_delay.is_some()
            && explicit.attempt_limit.is_some();
        if whole < Duration::from_secs(2) && !all_set {
            return Err(Error::invalid(format!(
                "TTL {whole:?} is below 2s and needs explicit timing: \
                 renew_interval, hedge_delay and attempt_limit"
            )));
        }
        let timing = LeaseTiming::derive(whole, explicit);
        timing.check()?;
        Ok(timing)
    }

    /// The timing for the TTL that etcd granted, which may differ from the one asked for. Explicit
    /// parts stay, except that the margin is kept below half of the TTL.
    pub(crate) fn granted(&self, granted: Duration) -> LeaseTiming {
        let timing = LeaseTiming::derive(granted, self.explicit);
        let below_half = (granted / 2).saturating_sub(Duration::from_millis(1));
        LeaseTiming { margin: timing.margin.min(below_half), ..timing }
    }

    fn derive(ttl: Duration, explicit: ExplicitTiming) -> LeaseTiming {
        let part = |divisor: u32, least: u64| (ttl / divisor).max(Duration::from_millis(least));
        LeaseTiming {
            ttl,
            margin: explicit.margin.unwrap_or_else(|| part(10, 200)),
            renew_interval: explicit.renew_interval.unwrap_or(ttl / 3),
            hedge_delay: explicit.hedge_delay.unwrap_or_else(|| part(16, 100)),
            attempt_limit: explicit.attempt_limit.unwrap_or_else(|| part(4, 500)),
            explicit,
        }
    }

    fn check(&self) -> Result<()> {
        let LeaseTiming { ttl, margin, renew_interval, hedge_delay, attempt_limit, .. } = *self;
        let parts = [
            ("renew_interval", renew_interval),
            ("hedge_delay", hedge_delay),
            ("attempt_limit", attempt_limit),
        ];
        if let Some((name, _)) = parts.iter().find(|(_, value)| value.is_zero()) {
            return Err(Error::invalid(format!("{name} has to be above zero")));
        }
        if margin >= ttl / 2 {
            return Err(Error::invalid(format!(
                "margin {margin:?} is not below half of the TTL {ttl:?}"
            )));
        }
        let needed = parts.iter().fold(Duration::ZERO, |sum, (_, part)| sum.saturating_add(*part));
        if needed > ttl - margin {
            return Err(Error::invalid(format!(
                "renew_interval {renew_interval:?} + hedge_delay {hedge_delay:?} + attempt_limit \
                 {attempt_limit:?} is more than TTL {ttl:?} - margin {margin:?}"
            )));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    const fn secs(secs: u64) -> Duration {
        Duration::from_secs(secs)
    }

    fn delay(policy: &RetryPolicy, attempt: u32, random: f64) -> Option<Duration> {
        match policy.next(attempt, Duration::ZERO, random) {
            Next::After(delay) => Some(delay),
            Next::Stop => None,
            Next::Ask(policy) => policy(attempt, Duration::ZERO),
        }
    }

    #[test]
    fn back_off_doubles_up_to_its_maximum() {
        let policy = RetryPolicy::exponential_backoff();
        let delays: Vec<_> = (1..=8).map(|n| delay(&policy, n, 0.5).unwrap()).collect();
        let expected = [250, 500, 1000, 2000, 4000, 8000, 15_000, 15_000].map(ms);
        assert_eq!(delays, expected);
        assert_eq!(delay(&policy, u32::MAX, 0.5), Some(secs(15)));
        assert_eq!(delay(&policy, 0, 0.5), Some(ms(250)));
    }

    #[test]
    fn bounded_counts_the_first_attempt() {
        let policy = RetryPolicy::bounded(3, ms(10));
        let delays: Vec<_> = (1..=4).map(|n| delay(&policy, n, 0.0)).collect();
        assert_eq!(delays, [Some(ms(10)), Some(ms(10)), None, None]);
        assert_eq!(delay(&RetryPolicy::bounded(0, ms(10)), 1, 0.0), None);
    }

    #[test]
    fn never_forever_and_custom() {
        assert_eq!(delay(&RetryPolicy::never(), 1, 0.0), None);
        assert_eq!(delay(&RetryPolicy::forever(secs(1)), 9, 0.0), Some(secs(1)));
        assert_eq!(delay(&RetryPolicy::forever(Duration::ZERO), 9, 0.0), Some(ms(1)));
        let custom = RetryPolicy::custom(|attempt, _| (attempt < 2).then_some(ms(7)));
        assert!(matches!(custom.next(1, Duration::ZERO, 0.0), Next::Ask(_)));
        assert_eq!(delay(&custom, 1, 0.0), Some(ms(7)));
        assert_eq!(delay(&custom, 2, 0.0), None);
        assert_eq!(format!("{custom:?}"), "RetryPolicy::custom(..)");
    }

    proptest! {
        #[test]
        fn jitter_stays_within_a_quarter(
            initial in 1_u64..100_000, max in 1_u64..100_000, attempt: u32, random in 0.0..1.0,
        ) {
            let got = delay(&RetryPolicy::exponential(ms(initial), ms(max)), attempt, random);
            let got = got.unwrap();
            prop_assert!(got <= ms(max).mul_f64(1.25));
            prop_assert!(got >= ms(initial.min(max)).mul_f64(0.75).max(ms(1)) - ms(1));
        }

        #[test]
        fn a_checked_timing_leaves_room_for_a_second_attempt(millis in 2_000_u64..10_000_000) {
            let timing = LeaseTiming::for_ttl(ms(millis), &LeaseResilience::new()).unwrap();
            prop_assert!(timing.ttl >= ms(millis) && timing.ttl < ms(millis) + secs(1));
            prop_assert!(timing.margin < timing.ttl / 2);
            prop_assert!(timing.check().is_ok());
        }

        #[test]
        fn a_granted_timing_keeps_the_margin_below_half(asked in 2_u64..1000, got in 1_u64..1000) {
            let config = LeaseResilience::new().margin(ms(asked * 499));
            let fits = LeaseTiming::for_ttl(secs(asked), &config);
            let asked = fits.or_else(|_| LeaseTiming::for_ttl(secs(asked), &LeaseResilience::new()));
            let timing = asked.unwrap().granted(secs(got));
            prop_assert_eq!(timing.ttl, secs(got));
            prop_assert!(timing.margin < timing.ttl / 2);
        }
    }

    #[test]
    fn a_policy_never_overflows() {
        let policy = RetryPolicy::exponential(Duration::MAX, Duration::MAX);
        assert!(delay(&policy, u32::MAX, 0.999).unwrap() > secs(1_000_000));
    }

    #[test]
    fn random_numbers_are_in_range_and_differ() {
        let numbers: Vec<f64> = (0..100).map(|_| random_unit()).collect();
        assert!(numbers.iter().all(|number| (0.0..1.0).contains(number)));
        assert!(numbers.iter().any(|number| *number != numbers[0]));
    }

    #[test]
    fn the_defaults_follow_from_the_ttl() {
        let timing = LeaseTiming::for_ttl(secs(10), &LeaseResilience::new()).unwrap();
        assert_eq!(timing.margin, secs(1));
        assert_eq!(timing.renew_interval, secs(10) / 3);
        assert_eq!(timing.hedge_delay, ms(625));
        assert_eq!(timing.attempt_limit, ms(2500));

        let short = LeaseTiming::for_ttl(ms(1_001), &LeaseResilience::new()).unwrap();
        assert_eq!(short.ttl, secs(2));
        assert_eq!(short.margin, ms(200));
        assert_eq!(short.hedge_delay, ms(125));
        assert_eq!(short.attempt_limit, ms(500));
    }

    fn refusal(ttl: Duration, config: &LeaseResilience) -> String {
        let error = LeaseTiming::for_ttl(ttl, config).unwrap_err();
        assert!(error.is_invalid_argument());
        error.to_string()
    }

    #[test]
    fn what_cannot_work_is_refused_by_name() {
        let plain = LeaseResilience::new();
        assert!(refusal(Duration::ZERO, &plain).contains("above zero"));
        assert!(refusal(secs(9_000_000_001), &plain).contains("9000000000s"));
        assert!(refusal(Duration::MAX, &plain).contains("etcd's limit"));
        assert!(refusal(ms(900), &plain).contains("needs explicit timing"));
        assert!(refusal(secs(10), &plain.clone().margin(secs(5))).contains("margin 5s"));
        let slow = plain.clone().renew_interval(secs(8));
        let text = refusal(secs(10), &slow);
        for part in ["8s", "625ms", "2.5s", "TTL 10s", "margin 1s"] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert!(refusal(secs(10), &plain.hedge_delay(Duration::ZERO)).contains("hedge_delay"));
    }

    #[test]
    fn the_longest_ttl_and_an_explicit_short_one_are_taken() {
        let plain = LeaseResilience::new();
        assert!(LeaseTiming::for_ttl(LONGEST_TTL, &plain).is_ok());
        let quick = plain.renew_interval(ms(250)).hedge_delay(ms(100)).attempt_limit(ms(300));
        let timing = LeaseTiming::for_ttl(secs(1), &quick).unwrap();
        assert_eq!((timing.ttl, timing.margin), (secs(1), ms(200)));
    }

    #[test]
    fn a_grant_rescales_the_defaults_and_keeps_the_rest() {
        let config = LeaseResilience::new().hedge_delay(ms(300));
        let timing = LeaseTiming::for_ttl(secs(10), &config).unwrap().granted(secs(60));
        assert_eq!(timing.ttl, secs(60));
        assert_eq!(timing.margin, secs(6));
        assert_eq!(timing.renew_interval, secs(20));
        assert_eq!(timing.hedge_delay, ms(300));
    }

    #[test]
    fn disabled_repeats_nothing() {
        let config = ResilienceConfig::disabled();
        let policies = [
            config.get_rpc().get_retry_policy(),
            config.get_watch().get_retry_policy(),
            config.get_lease().get_retry_policy(),
        ];
        assert!(policies.iter().all(|policy| delay(policy, 1, 0.5).is_none()));
    }
}
