use proptest::prelude::*;

use super::*;
use crate::lease::word::{DeadlineWord, Life};
use crate::resilience::LeaseResilience;

const TTL: Duration = Duration::from_secs(10);
const MARGIN: Duration = Duration::from_secs(1);

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

fn at(n: u64) -> Instant {
    Instant::from_nanos(1_000_000_000) + ms(n)
}

fn timing() -> LeaseTiming {
    LeaseTiming::for_ttl(TTL, &LeaseResilience::new()).unwrap()
}

fn exclusive() -> Renewal {
    Renewal::new(Proof::Required, timing(), at(0))
}

fn begun(actions: &[Action]) -> AttemptId {
    let begun = actions.iter().find_map(|action| match action {
        Action::Begin { attempt, .. } => Some(*attempt),
        _ => None,
    });
    begun.expect("an attempt begins")
}

fn acked(attempt: AttemptId, sent: u64, term: u64, highest: u64) -> Event {
    Event::Acked { attempt, sent: at(sent), ttl: TTL, term, highest }
}

#[test]
fn the_deadline_counts_from_the_send_and_moves_only_with_proof() {
    let mut renewal = exclusive();
    let first = begun(&renewal.step(at(1), Event::Tick));
    let actions = renewal.step(at(400), acked(first, 2, 7, 7));
    assert_eq!(actions, [Action::Prove { attempt: first }]);
    assert_eq!(renewal.deadline(), at(9_000), "an answer alone moves nothing");
    let actions = renewal.step(at(500), Event::Proved { attempt: first, term: 7, highest: 7 });
    assert!(actions.contains(&Action::Counted {
        attempt: first,
        sent: at(2),
        deadline: at(9_002)
    }));
    assert_eq!(renewal.deadline(), at(9_002));
}

/// On a slow network the answer alone may take most of the limit; the proof has one of its own.
#[test]
fn the_limit_of_an_attempt_is_that_of_each_question() {
    let mut renewal = exclusive();
    let limit = timing().attempt_limit;
    let first = begun(&renewal.step(at(1), Event::Tick));
    let actions = renewal.step(at(2_400), acked(first, 2, 7, 7));
    assert!(actions.contains(&Action::Prove { attempt: first }));
    let actions = renewal.step(at(4_800), Event::Tick);
    assert!(!actions.contains(&Action::Abort { attempt: first }), "given up before its answer");
    let actions = renewal.step(at(2_400) + limit, Event::Tick);
    assert!(actions.contains(&Action::Abort { attempt: first }));
}

#[test]
fn a_deposed_leaders_answer_never_counts() {
    for (ack_term, ack_highest, read_term, read_highest) in
        [(6, 7, 6, 7), (6, 6, 7, 7), (6, 6, 6, 7)]
    {
        let mut renewal = exclusive();
        let first = begun(&renewal.step(at(1), Event::Tick));
        renewal.step(at(10), acked(first, 2, ack_term, ack_highest));
        let proved = Event::Proved { attempt: first, term: read_term, highest: read_highest };
        renewal.step(at(20), proved);
        assert_eq!(renewal.deadline(), at(9_000));
    }
}

#[test]
fn unanswered_attempts_are_hedged_and_given_up_but_not_forgotten() {
    let mut renewal = exclusive();
    let mut begins = Vec::new();
    let mut now = at(0);
    let mut lost = None;
    let mut suspended = None;
    let since_start = |now: Instant| now.saturating_since(at(0)).as_millis();
    while lost.is_none() {
        for action in renewal.step(now, Event::Tick) {
            match action {
                Action::Begin { fresh, .. } => begins.push((since_start(now), fresh)),
                Action::Suspended => suspended = Some(since_start(now)),
                Action::Over(why) => lost = Some((since_start(now), why)),
                _ => {}
            }
        }
        let next = renewal.next_wake();
        assert!(next > now || lost.is_some(), "a tick at its own wake has to get somewhere");
        now = next;
    }
    assert_eq!(begins[..4], [(0, false), (625, true), (1_250, true), (1_875, true)]);
    assert!(begins.len() > 10);
    assert_eq!(lost, Some((9_000, Over::DeadlinePassed)));
    // Due at a third of the TTL (3,333 ms), suspended half way from there to the deadline.
    assert_eq!(suspended, Some(6_166));
}

#[test]
fn a_denied_lease_is_over_only_after_a_second_question() {
    let mut renewal = exclusive();
    let first = begun(&renewal.step(at(1), Event::Tick));
    let denied =
        Event::Acked { attempt: first, sent: at(2), ttl: Duration::ZERO, term: 1, highest: 1 };
    assert!(renewal.step(at(3), denied).contains(&Action::ConfirmGone { attempt: first }));
    let mut twin = exclusive();
    let same = begun(&twin.step(at(1), Event::Tick));
    twin.step(
        at(3),
        Event::Acked { attempt: same, sent: at(2), ttl: Duration::ZERO, term: 1, highest: 1 },
    );
    assert!(
        renewal
            .step(at(4), Event::Gone { attempt: first })
            .contains(&Action::Over(Over::LeaseGone))
    );
    let actions = twin.step(at(4), Event::Failed { attempt: same });
    assert!(!actions.iter().any(|a| matches!(a, Action::Over(_))));
}

#[test]
fn a_long_round_trip_has_time_for_every_step() {
    let mut renewal = exclusive();
    let first = begun(&renewal.step(at(1), Event::Tick));
    // The limit of one step at this TTL is 2.5 s; three steps of 2 s each are well.
    renewal.step(at(2_000), Event::Opened { attempt: first });
    renewal.step(at(4_000), acked(first, 2_000, 7, 7));
    let actions = renewal.step(at(6_000), Event::Proved { attempt: first, term: 7, highest: 7 });
    assert!(matches!(actions[0], Action::Counted { .. }), "{actions:?}");
    assert_eq!(renewal.deadline(), at(11_000));
}

#[test]
fn presence_counts_an_answer_without_proof() {
    let mut renewal = Renewal::new(Proof::Advisory, timing(), at(0));
    let first = begun(&renewal.step(at(1), Event::Tick));
    let actions = renewal.step(at(5), acked(first, 2, 7, 7));
    assert!(matches!(actions[0], Action::Counted { .. }));
    assert_eq!(actions[1], Action::Prove { attempt: first });
    assert_eq!(renewal.deadline(), at(9_002));
}

/// What a run of the machine meets: answers that are late, buffered, reordered, stale or forged.
#[derive(Debug, Clone)]
enum Happening {
    Wait(u64),
    Jump(u64),
    Ack { pick: usize, term_lag: u64, ttl: u64 },
    Prove { pick: usize, term_lag: u64 },
    Gone { pick: usize },
    Open { pick: usize },
    Fail { pick: usize },
    Election,
    Ask,
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        4 => (1_u64..800).prop_map(Happening::Wait),
        1 => (1_000_u64..20_000).prop_map(Happening::Jump),
        6 => (0_usize..6, 0_u64..2, prop_oneof![Just(0_u64), Just(10), Just(10), Just(10), Just(30)])
            .prop_map(|(pick, term_lag, ttl)| Happening::Ack { pick, term_lag, ttl }),
        6 => (0_usize..6, 0_u64..2)
            .prop_map(|(pick, term_lag)| Happening::Prove { pick, term_lag }),
        1 => (0_usize..6).prop_map(|pick| Happening::Gone { pick }),
        1 => (0_usize..6).prop_map(|pick| Happening::Open { pick }),
        2 => (0_usize..6).prop_map(|pick| Happening::Fail { pick }),
        1 => Just(Happening::Election),
        3 => Just(Happening::Ask),
    ]
}

/// The shell in miniature: one machine, one word, and a record of what was really sent when.
struct World {
    renewal: Renewal,
    word: DeadlineWord,
    now: Instant,
    term: u64,
    sends: Vec<(AttemptId, Instant)>,
    latest_counted: Instant,
    overs: usize,
    seen_lost: bool,
}

impl World {
    fn new(proof: Proof) -> World {
        let renewal = Renewal::new(proof, timing(), at(0));
        World {
            word: DeadlineWord::new(renewal.deadline()),
            renewal,
            now: at(0),
            term: 5,
            sends: Vec::new(),
            latest_counted: at(0),
            overs: 0,
            seen_lost: false,
        }
    }

    fn feed(&mut self, event: Event) {
        for action in self.renewal.step(self.now, event) {
            match action {
                Action::Begin { attempt, .. } => {
                    assert_eq!(self.overs, 0, "nothing begins after the end");
                    self.sends.push((attempt, self.now));
                }
                Action::Counted { sent, deadline, .. } => {
                    let really = self.sends.iter().any(|(_, at)| *at == sent);
                    assert!(really, "only a send that happened counts");
                    assert!(deadline <= sent + TTL - MARGIN);
                    if self.word.extend(self.now, deadline) {
                        self.latest_counted = self.latest_counted.max(sent);
                    }
                }
                Action::Over(_) => {
                    self.overs += 1;
                    self.word.lose();
                }
                _ => {}
            }
        }
        self.ask();
    }

    fn ask(&mut self) {
        let held = self.word.check(self.now) == Life::Alive;
        if held {
            assert!(!self.seen_lost, "lost turned back into held");
            assert!(self.now < self.latest_counted + TTL - MARGIN, "held after the deadline");
        } else {
            self.seen_lost = true;
        }
        assert!(self.overs <= 1);
    }

    fn picked(&self, pick: usize) -> (AttemptId, Instant) {
        match self.sends.len() {
            0 => (AttemptId(99), at(0)),
            n => self.sends[n - 1 - pick % n],
        }
    }

    fn run(&mut self, happening: Happening) {
        match happening {
            Happening::Wait(n) | Happening::Jump(n) => {
                self.now = self.now + ms(n);
                self.feed(Event::Tick);
            }
            Happening::Ack { pick, term_lag, ttl } => {
                let (attempt, sent) = self.picked(pick);
                let (term, highest) = (self.term - term_lag, self.term);
                let ttl = Duration::from_secs(ttl);
                self.feed(Event::Acked { attempt, sent, ttl, term, highest });
            }
            Happening::Prove { pick, term_lag } => {
                let (attempt, _) = self.picked(pick);
                let (term, highest) = (self.term - term_lag, self.term);
                self.feed(Event::Proved { attempt, term, highest });
            }
            Happening::Gone { pick } => {
                let (attempt, _) = self.picked(pick);
                self.feed(Event::Gone { attempt });
            }
            Happening::Open { pick } => {
                let (attempt, _) = self.picked(pick);
                self.feed(Event::Opened { attempt });
            }
            Happening::Fail { pick } => {
                let (attempt, _) = self.picked(pick);
                self.feed(Event::Failed { attempt });
            }
            Happening::Election => self.term += 1,
            // A thread asks at a moment when no event is about.
            Happening::Ask => self.ask(),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

    #[test]
    fn no_order_of_answers_holds_past_the_deadline_or_revives(
        exclusive in any::<bool>(),
        script in prop::collection::vec(happening(), 1..120),
    ) {
        let proof = if exclusive { Proof::Required } else { Proof::Advisory };
        let mut world = World::new(proof);
        for happening in script {
            world.run(happening);
        }
        // Left alone, it ends by the deadline and stays ended.
        world.run(Happening::Jump(20_000));
        prop_assert_eq!(world.word.check(world.now), Life::Lost);
        let ended_at = world.now;
        for n in 0..40 {
            world.run(Happening::Ack { pick: n, term_lag: 0, ttl: 10 });
            world.run(Happening::Prove { pick: n, term_lag: 0 });
        }
        prop_assert_eq!(world.now, ended_at);
        prop_assert_eq!(world.overs, 1);
    }

    #[test]
    fn an_exclusive_deadline_moves_only_with_a_proof_of_the_same_newest_term(
        script in prop::collection::vec(happening(), 1..120),
    ) {
        let mut world = World::new(Proof::Required);
        for happening in script {
            let before = world.renewal.deadline();
            let proves = matches!(happening, Happening::Prove { term_lag: 0, .. });
            world.run(happening);
            prop_assert!(proves || world.renewal.deadline() == before);
        }
    }
}

#[test]
fn a_refusal_is_not_hurried_and_a_failure_is() {
    for (refused, next) in [(true, timing().hedge_delay), (false, AFTER_FAILURE)] {
        let mut renewal = exclusive();
        let due = timing().renew_interval;
        let first = begun(&renewal.step(at(0) + due, Event::Tick));
        let event = match refused {
            true => Event::Refused { attempt: first },
            false => Event::Failed { attempt: first },
        };
        let actions = renewal.step(at(0) + due, event);
        assert_eq!(actions, [Action::Abort { attempt: first }]);
        assert_eq!(renewal.next_wake(), at(0) + due + next);
    }
}
