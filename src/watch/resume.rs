//! What one watch does with each answer of etcd: pure, so that every order of breaks, duplicates
//! and compactions can be tried without a network.
//!
//! The invariant: each revision is delivered exactly once and in order, or lies below a snapshot
//! that was delivered in its place.

use super::Event;

/// Events held back while it is not yet known whether etcd lost data; more are worth a read.
const HELD_LIMIT: usize = 1_024;

/// How far a watch has come and where it stands with etcd.
#[derive(Debug)]
pub(super) struct Resume {
    /// The first revision that was not delivered.
    next: i64,
    state: State,
    /// A fresh login was tried since this watch was last accepted.
    pardoned: bool,
    /// To be asked for from the present on, see [`Resume::at_once`].
    from_now: bool,
}

#[derive(Debug)]
enum State {
    /// On no stream; to be asked for.
    Detached,
    /// Asked for, not answered.
    Asked,
    /// The member is behind what was delivered: it lags, or the data is lost. A linearizable read
    /// tells; until then its events wait.
    Doubtful {
        held: Vec<Event>,
    },
    /// It runs from after this head on, which is beyond what was delivered. A snapshot closes the
    /// gap; until then its events wait.
    Catching {
        head: i64,
        held: Vec<Event>,
    },
    /// Refused for a reason of the login or of permissions; a read of the range tells which.
    Refused,
    Watching,
    /// What comes from a stream does not count any more until a snapshot was delivered.
    Resyncing,
}

/// What to do about an answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Action {
    Nothing,
    /// The watch stands.
    Established,
    /// The watch stands, and no write has come before it: etcd serves it at once.
    InStep,
    /// The watch stands, and these events have waited for that.
    EstablishedWith {
        revision: i64,
        events: Vec<Event>,
    },
    Deliver {
        revision: i64,
        events: Vec<Event>,
    },
    /// Read the head of the store through the watch's own range, then call [`Resume::head`].
    ReadHead,
    /// The same with the whole range, calling [`Resume::snapshot`]. The watch goes on beside it.
    ReadBeside,
    /// Give the watch up, read the whole range, then call [`Resume::snapshot`].
    ReadRange,
    /// Log in again and open a new stream: the login of a stream is that of its first request.
    LogIn,
    /// etcd ended the watch without a reason that we know: open a new stream.
    Reopen {
        reason: String,
    },
    /// etcd says no.
    Refuse {
        reason: String,
    },
}

impl Resume {
    pub(super) fn new(from: i64) -> Resume {
        Resume { next: from.max(1), state: State::Detached, pardoned: false, from_now: false }
    }

    /// For a watch that is to be served as soon as it stands.
    ///
    /// etcd puts a watch from a revision that has passed aside and serves it every 100 ms. One
    /// from the present on is served at once, save when a write comes between. What was written
    /// since the revision that is wanted has to be read then.
    pub(super) fn at_once(from: i64) -> Resume {
        Resume { from_now: true, ..Resume::new(from) }
    }

    /// The revision to ask etcd for: one more than is wanted, which is dropped when it comes; 0
    /// for the present.
    ///
    /// etcd refuses a watch from below the revision it has compacted, but accepts one from exactly
    /// there, and 3.4.23 then keeps quiet about a delete at that revision. So the first revision
    /// wanted must not be the first one asked for.
    pub(super) fn start(&self) -> i64 {
        if self.from_now { 0 } else { (self.next - 1).max(1) }
    }

    /// Whether the watch has to be asked for on the current stream.
    pub(super) fn is_detached(&self) -> bool {
        matches!(self.state, State::Detached)
    }

    #[cfg(test)]
    fn next(&self) -> i64 {
        self.next
    }

    #[cfg(test)]
    fn is_watching(&self) -> bool {
        matches!(self.state, State::Watching)
    }

    /// The request for this watch was sent.
    pub(super) fn asked(&mut self) {
        self.state = State::Asked;
    }

    /// The stream is gone.
    pub(super) fn broken(&mut self) {
        if !matches!(self.state, State::Resyncing) {
            self.state = State::Detached;
        }
    }

    /// Events are missing for a reason outside: the consumer dropped some, or an answer could not
    /// be decoded. Returns whether the range has to be read (and is not being read already).
    pub(super) fn gap(&mut self) -> bool {
        !matches!(std::mem::replace(&mut self.state, State::Resyncing), State::Resyncing)
    }

    /// etcd accepted the watch; `head` is the revision of the member, 0 if it did not say.
    pub(super) fn created(&mut self, head: i64) -> Action {
        if !matches!(self.state, State::Asked) {
            return Action::Nothing;
        }
        self.pardoned = false;
        let from_now = std::mem::take(&mut self.from_now);
        if from_now && (head == 0 || head >= self.next) {
            self.state = State::Catching { head, held: Vec::new() };
            return Action::ReadBeside;
        }
        if head != 0 && head < self.next - 1 {
            self.state = State::Doubtful { held: Vec::new() };
            return Action::ReadHead;
        }
        self.state = State::Watching;
        if from_now { Action::InStep } else { Action::Established }
    }

    /// etcd refused or ended the watch.
    pub(super) fn canceled(&mut self, compact_revision: i64, reason: &str) -> Action {
        if matches!(self.state, State::Resyncing | State::Detached) {
            return Action::Nothing;
        }
        if compact_revision != 0 {
            self.state = State::Resyncing;
            return Action::ReadRange;
        }
        let reason = reason.to_owned();
        if !speaks_of_login(&reason) {
            self.state = State::Detached;
            return Action::Reopen { reason };
        }
        if self.pardoned {
            return Action::Refuse { reason };
        }
        self.state = State::Refused;
        Action::ReadHead
    }

    /// Events came; those delivered before are dropped.
    pub(super) fn events(&mut self, mut events: Vec<Event>) -> Action {
        let known = match &self.state {
            State::Doubtful { held } | State::Catching { held, .. } => {
                held.last().map_or(0, |event| event.mod_revision)
            }
            _ => 0,
        };
        // One answer holds all events of a revision, so the revision alone tells a repetition.
        events.retain(|event| event.mod_revision >= self.next && event.mod_revision > known);
        match &mut self.state {
            State::Watching => self.advance(events),
            State::Doubtful { held } | State::Catching { held, .. } => {
                held.append(&mut events);
                if held.len() <= HELD_LIMIT {
                    return Action::Nothing;
                }
                self.state = State::Resyncing;
                Action::ReadRange
            }
            State::Detached | State::Asked | State::Refused | State::Resyncing => Action::Nothing,
        }
    }

    /// The linearizable head of the store that was asked for.
    pub(super) fn head(&mut self, head: i64) -> Action {
        match std::mem::replace(&mut self.state, State::Detached) {
            State::Doubtful { .. } if head < self.next - 1 => {
                self.state = State::Resyncing;
                Action::ReadRange
            }
            State::Doubtful { held } => self.establish(held),
            // The range may be read, so it is the stream's login that is out of date.
            State::Refused => {
                self.pardoned = true;
                Action::LogIn
            }
            other => {
                self.state = other;
                Action::Nothing
            }
        }
    }

    /// The snapshot that was asked for; the watch goes on after it, or is to be asked for anew.
    pub(super) fn snapshot(&mut self, revision: i64) -> Action {
        self.next = revision + 1;
        match std::mem::replace(&mut self.state, State::Detached) {
            // Where it is older than the watch, a store that has lost data is the reason.
            State::Catching { head, mut held } if head != 0 && revision >= head => {
                held.retain(|event| event.mod_revision > revision);
                self.establish(held)
            }
            _ => Action::Nothing,
        }
    }

    fn establish(&mut self, held: Vec<Event>) -> Action {
        self.state = State::Watching;
        match self.advance(held) {
            Action::Deliver { revision, events } => Action::EstablishedWith { revision, events },
            _ => Action::Established,
        }
    }

    fn advance(&mut self, events: Vec<Event>) -> Action {
        let Some(last) = events.last() else { return Action::Nothing };
        let revision = last.mod_revision;
        self.next = revision + 1;
        Action::Deliver { revision, events }
    }
}

/// Whether a refusal is about who we are: 3.4 says `invalid auth token` of an expired token, 3.5
/// `permission denied`, and a changed user makes it `revision of auth store is old`, or, in 3.5.1's
/// own words, `revision in header is old`.
fn speaks_of_login(reason: &str) -> bool {
    [
        "invalid auth token",
        "permission denied",
        "auth store is old",
        "revision in header is old",
        "user name is empty",
    ]
    .iter()
    .any(|part| reason.contains(part))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::EventKind;
    use super::*;

    fn event(mod_revision: i64) -> Event {
        Event {
            kind: EventKind::Put,
            key: b"k".to_vec(),
            value: Vec::new(),
            create_revision: 1,
            mod_revision,
            version: 1,
            lease: 0,
            prev: None,
        }
    }

    fn events(revisions: impl IntoIterator<Item = i64>) -> Vec<Event> {
        revisions.into_iter().map(event).collect()
    }

    fn watching(from: i64) -> Resume {
        let mut resume = Resume::new(from);
        resume.asked();
        assert_eq!(resume.created(from), Action::Established);
        resume
    }

    #[test]
    fn a_resumed_watch_asks_for_what_follows_the_last_delivery() {
        let mut resume = watching(5);
        assert_eq!(
            resume.events(events([5, 6, 6])),
            Action::Deliver { revision: 6, events: events([5, 6, 6]) }
        );
        resume.broken();
        assert!(resume.is_detached());
        assert_eq!(resume.next(), 7);
    }

    #[test]
    fn what_was_delivered_is_not_delivered_again() {
        let mut resume = watching(5);
        assert_eq!(resume.events(events([3, 4])), Action::Nothing);
        let Action::Deliver { revision: 7, .. } = resume.events(events([5, 7])) else { panic!() };
        assert_eq!(
            resume.events(events([5, 7, 9])),
            Action::Deliver { revision: 9, events: events([9]) }
        );
    }

    #[test]
    fn a_compacted_start_is_created_and_then_cancelled() {
        let mut resume = watching(5);
        assert_eq!(resume.canceled(90, ""), Action::ReadRange);
        assert_eq!(resume.events(events([91])), Action::Nothing, "the range is being read");
        assert_eq!(resume.canceled(0, ""), Action::Nothing, "the answer to our own cancel");
        resume.broken();
        assert!(!resume.is_detached(), "a break does not make up for the gap");
        resume.snapshot(95);
        assert!(resume.is_detached());
        assert_eq!(resume.next(), 96);
    }

    #[test]
    fn a_lower_head_is_doubted_until_a_linearizable_read_decides() {
        let mut resume = Resume::new(100);
        resume.asked();
        assert_eq!(resume.created(50), Action::ReadHead);
        assert_eq!(resume.events(events([100])), Action::Nothing);
        assert_eq!(resume.events(events([100])), Action::Nothing, "sent twice");
        assert_eq!(
            resume.head(100),
            Action::EstablishedWith { revision: 100, events: events([100]) }
        );
        resume.broken();
        resume.asked();
        assert_eq!(resume.created(50), Action::ReadHead);
        assert_eq!(resume.head(60), Action::ReadRange);
        resume.snapshot(61);
        assert_eq!(resume.next(), 62, "the numbers start over with the data");
    }

    #[test]
    fn a_head_just_below_the_start_is_no_doubt_and_neither_is_none() {
        for head in [99, 100, 0] {
            let mut resume = Resume::new(100);
            resume.asked();
            assert_eq!(resume.created(head), Action::Established, "{head}");
            assert_eq!(resume.next(), 100);
        }
    }

    #[test]
    fn a_watch_from_now_is_in_step_if_nothing_was_written_before() {
        let mut resume = Resume::at_once(100);
        assert_eq!(resume.start(), 0);
        resume.asked();
        resume.broken();
        assert_eq!(resume.start(), 0, "it never stood");
        resume.asked();
        assert_eq!(resume.created(99), Action::InStep);
        assert_eq!(resume.start(), 99);
        let Action::Deliver { revision: 101, .. } = resume.events(events([101])) else { panic!() };

        let mut lagging = Resume::at_once(100);
        lagging.asked();
        assert_eq!(lagging.created(50), Action::ReadHead);
    }

    #[test]
    fn what_was_written_before_a_watch_from_now_is_read_and_what_came_after_waits() {
        for (held, late) in [(vec![109, 110], 111), (vec![], 112)] {
            let mut resume = Resume::at_once(100);
            resume.asked();
            assert_eq!(resume.created(105), Action::ReadBeside);
            for revision in held {
                assert_eq!(resume.events(events([revision])), Action::Nothing);
            }
            assert_eq!(resume.events(events([late])), Action::Nothing);
            let with = Action::EstablishedWith { revision: late, events: events([late]) };
            assert_eq!(resume.snapshot(110), with);
            assert!(resume.is_watching());
        }
        let mut resume = Resume::at_once(100);
        resume.asked();
        assert_eq!(resume.created(105), Action::ReadBeside);
        assert_eq!(resume.snapshot(105), Action::Established);
        assert_eq!(resume.next(), 106);
    }

    #[test]
    fn a_watch_from_now_that_breaks_before_it_has_caught_up_goes_on_from_where_it_should_have() {
        let mut resume = Resume::at_once(100);
        resume.asked();
        assert_eq!(resume.created(105), Action::ReadBeside);
        assert_eq!(resume.events(events([107])), Action::Nothing);
        resume.broken();
        assert_eq!((resume.is_detached(), resume.start()), (true, 99));

        // Without a head nobody knows where it begins; a lower snapshot is of other data.
        for (head, snapshot) in [(0, 120), (105, 104)] {
            let mut resume = Resume::at_once(100);
            resume.asked();
            assert_eq!(resume.created(head), Action::ReadBeside);
            assert_eq!(resume.events(events([107])), Action::Nothing);
            assert_eq!(resume.snapshot(snapshot), Action::Nothing);
            assert_eq!((resume.is_detached(), resume.start()), (true, snapshot));
        }
    }

    #[test]
    fn a_flood_while_in_doubt_is_worth_a_read() {
        let mut resume = Resume::new(100);
        resume.asked();
        assert_eq!(resume.created(50), Action::ReadHead);
        assert_eq!(resume.events(events(100..100 + 1_024)), Action::Nothing);
        assert_eq!(resume.events(events([2_000])), Action::ReadRange);
        assert_eq!(resume.head(3_000), Action::Nothing, "it comes too late");
    }

    #[test]
    fn a_refusal_gets_one_fresh_login_if_the_range_may_be_read() {
        let texts = [
            "rpc error: code = Unauthenticated desc = etcdserver: invalid auth token",
            "rpc error: code = PermissionDenied desc = etcdserver: permission denied",
            "rpc error: code = InvalidArgument desc = etcdserver: revision of auth store is old",
        ];
        for text in texts {
            let mut resume = Resume::new(5);
            resume.asked();
            assert_eq!(resume.canceled(0, text), Action::ReadHead);
            assert_eq!(resume.head(9), Action::LogIn);
            assert!(resume.is_detached());
            resume.asked();
            assert_eq!(resume.canceled(0, text), Action::Refuse { reason: text.to_owned() });
        }
        let mut resume = Resume::new(5);
        resume.asked();
        assert_eq!(resume.canceled(0, texts[0]), Action::ReadHead);
        assert_eq!(resume.head(9), Action::LogIn);
        resume.asked();
        assert_eq!(resume.created(9), Action::Established);
        assert_eq!(resume.canceled(0, texts[0]), Action::ReadHead, "a new chance once accepted");
    }

    #[test]
    fn an_unexplained_end_reopens() {
        let mut resume = watching(5);
        assert_eq!(resume.canceled(0, "why not"), Action::Reopen { reason: "why not".to_owned() });
        assert!(resume.is_detached());
    }

    #[test]
    fn a_gap_is_read_once() {
        let mut resume = watching(5);
        assert!(resume.gap());
        assert!(!resume.gap());
        assert_eq!(resume.head(100), Action::Nothing);
        assert_eq!(resume.created(100), Action::Nothing);
    }

    /// What can happen between a watch and a store.
    #[derive(Debug, Clone)]
    enum Step {
        Write {
            touches_us: bool,
        },
        Compact,
        /// The server sends what the stream has not sent yet, up to so many events.
        Send {
            limit: usize,
        },
        /// The server sends the last few events once more.
        Repeat {
            back: usize,
        },
        Break,
        Open {
            lag: i64,
        },
        ReadEnds,
        Overflow,
        LoseData {
            revisions: i64,
        },
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            6 => any::<bool>().prop_map(|touches_us| Step::Write { touches_us }),
            1 => Just(Step::Compact),
            6 => (1usize..4).prop_map(|limit| Step::Send { limit }),
            2 => (1usize..4).prop_map(|back| Step::Repeat { back }),
            2 => Just(Step::Break),
            4 => (0i64..5).prop_map(|lag| Step::Open { lag }),
            4 => Just(Step::ReadEnds),
            1 => Just(Step::Overflow),
            1 => (1i64..6).prop_map(|revisions| Step::LoseData { revisions }),
        ];
        prop::collection::vec(step, 1..120)
    }

    /// A store with one stream to it, the watch under test, and what its sink has seen.
    struct World {
        head: i64,
        compacted: i64,
        /// Revisions that touch the watched range.
        ours: Vec<i64>,
        /// The revision the server's stream sends next, when the watch is on a stream.
        stream: Option<i64>,
        member_head: i64,
        reading: Option<Action>,
        resume: Resume,
        /// All revisions up to here are accounted for.
        covered: i64,
    }

    impl World {
        fn new(resume: Resume) -> World {
            World {
                head: 1,
                compacted: 0,
                ours: Vec::new(),
                stream: None,
                member_head: 1,
                reading: None,
                resume,
                covered: 1,
            }
        }

        fn act(&mut self, action: Action) {
            match action {
                Action::Nothing | Action::Established | Action::InStep => {}
                Action::EstablishedWith { revision, events }
                | Action::Deliver { revision, events } => {
                    let got: Vec<i64> = events.iter().map(|event| event.mod_revision).collect();
                    let due: Vec<i64> = self
                        .ours
                        .iter()
                        .copied()
                        .filter(|r| *r > self.covered && *r <= revision)
                        .collect();
                    assert_eq!(got, due, "delivered, against what the store has");
                    self.covered = revision;
                }
                Action::ReadRange => {
                    self.stream = None;
                    self.reading = Some(Action::ReadRange);
                }
                Action::ReadHead | Action::ReadBeside => self.reading = Some(action),
                Action::LogIn | Action::Reopen { .. } | Action::Refuse { .. } => {
                    panic!("nothing here refuses")
                }
            }
        }

        fn step(&mut self, step: &Step) {
            match *step {
                Step::Write { touches_us } => {
                    self.head += 1;
                    if touches_us {
                        self.ours.push(self.head);
                    }
                }
                Step::Compact => self.compacted = self.head,
                Step::Send { limit } => {
                    let Some(from) = self.stream else { return };
                    if from <= self.compacted {
                        self.stream = None;
                        let action = self.resume.canceled(self.compacted, "");
                        return self.act(action);
                    }
                    self.member_head = self.head;
                    let batch: Vec<i64> =
                        self.ours.iter().copied().filter(|r| *r >= from).take(limit).collect();
                    if let Some(last) = batch.last() {
                        self.stream = Some(last + 1);
                        let action = self.resume.events(events(batch));
                        self.act(action);
                    }
                }
                Step::Repeat { back } => {
                    let Some(from) = self.stream else { return };
                    let sent: Vec<i64> = self.ours.iter().copied().filter(|r| *r < from).collect();
                    let again = sent[sent.len().saturating_sub(back)..].to_vec();
                    // A repeat is of what this stream has sent, so nothing in it is new.
                    let action = self.resume.events(events(again));
                    self.act(action);
                }
                Step::Break => {
                    self.stream = None;
                    self.resume.broken();
                    if self.resume.is_detached() {
                        self.reading = None;
                    }
                }
                Step::Open { lag } => {
                    if !self.resume.is_detached() {
                        return;
                    }
                    self.member_head = (self.head - lag).max(1);
                    let from = match self.resume.start() {
                        0 => self.member_head + 1,
                        _ => self.resume.next(),
                    };
                    self.resume.asked();
                    self.stream = Some(from);
                    let action = self.resume.created(self.member_head);
                    self.act(action);
                }
                Step::ReadEnds => match self.reading.take() {
                    Some(Action::ReadHead) => {
                        let action = self.resume.head(self.head);
                        self.act(action);
                    }
                    Some(_) => {
                        let action = self.resume.snapshot(self.head);
                        self.covered = self.head;
                        if self.resume.is_detached() {
                            self.stream = None;
                        }
                        self.act(action);
                    }
                    None => {}
                },
                Step::Overflow => {
                    if self.resume.is_watching() && self.resume.gap() {
                        self.act(Action::ReadRange);
                    }
                }
                Step::LoseData { revisions } => {
                    // Every member restarts, so every stream breaks; what is read later is real.
                    self.step(&Step::Break);
                    self.head = (self.head - revisions).max(1);
                    self.compacted = self.compacted.min(self.head);
                    self.ours.retain(|r| *r <= self.head);
                    // Seen at the next opening, before anything new is written.
                    self.step(&Step::Open { lag: 0 });
                    self.step(&Step::ReadEnds);
                    self.step(&Step::ReadEnds);
                    self.covered = self.covered.min(self.head);
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..Default::default() })]

        #[test]
        fn every_revision_is_delivered_once_or_covered_by_a_snapshot(
            steps in steps(),
            at_once in any::<bool>(),
        ) {
            let resume = if at_once { Resume::at_once(2) } else { Resume::new(2) };
            let mut world = World::new(resume);
            for step in &steps {
                world.step(step);
            }
            // Then all is well again: the watch has to arrive at the head.
            world.step(&Step::Break);
            for _ in 0..4 {
                world.step(&Step::ReadEnds);
                world.step(&Step::Open { lag: 0 });
                world.step(&Step::ReadEnds);
                world.step(&Step::Send { limit: usize::MAX });
            }
            let missing: Vec<i64> =
                world.ours.iter().copied().filter(|r| *r > world.covered).collect();
            prop_assert!(missing.is_empty(), "not delivered: {missing:?}");
        }
    }
}
