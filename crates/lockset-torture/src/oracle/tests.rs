//! Hand-written histories: for each rule one that keeps it and one that breaks it.

use lockset::Mode;

use super::{Exception, LEADER, Verdict, judge};
use crate::history::{Event, History, Nanos, Outcome, Promise, Register, Setup, What};

const SECOND: Nanos = 1_000_000_000;
const PERMITS: Mode = Mode::Permits { take: 1, limit: 2 };

/// A history in the making. Times are in seconds.
struct Story {
    engine: &'static str,
    names: Vec<String>,
    events: Vec<Event>,
}

impl Story {
    fn on(engine: &'static str) -> Self {
        Self { engine, names: Vec::new(), events: Vec::new() }
    }

    fn add(mut self, at: f64, by: &str, what: What) -> Self {
        let at = (at * SECOND as f64) as Nanos;
        self.events.push(Event { at, by: by.to_owned(), what });
        self
    }

    fn ask(self, at: f64, by: &str, op: u64, mode: Mode) -> Self {
        self.add(at, by, What::Ask { op, name: "m".to_owned(), mode })
    }

    fn enter(self, at: f64, by: &str, op: u64, token: u64, until: f64) -> Self {
        let valid_until = Some((until * SECOND as f64) as Nanos);
        self.add(at, by, What::Enter { op, token: Some(token), valid_until })
    }

    fn exit(self, at: f64, by: &str, op: u64) -> Self {
        self.add(at, by, What::Exit { op })
    }

    /// Asked just before it is entered.
    fn hold(self, by: &str, op: u64, token: u64, enter: f64, exit: f64) -> Self {
        self.hold_as(Mode::Exclusive, by, op, token, enter, exit)
    }

    fn hold_as(self, mode: Mode, by: &str, op: u64, token: u64, enter: f64, exit: f64) -> Self {
        self.ask(enter - 0.01, by, op, mode)
            .enter(enter, by, op, token, exit + 3.0)
            .exit(exit, by, op)
    }

    fn fault(self, fault: &str, begin: f64, end: f64) -> Self {
        self.fault_of(&format!("server 0{LEADER}"), fault, begin, end)
    }

    fn fault_of(self, target: &str, fault: &str, begin: f64, end: f64) -> Self {
        let number = self.events.len();
        let (fault, target) = (fault.to_owned(), target.to_owned());
        let begins = What::FaultBegins { number, fault, target };
        self.add(begin, "nemesis", begins).add(end, "nemesis", What::FaultEnds { number })
    }

    fn write(self, at: f64, register: Register, value: &str, outcome: Outcome) -> Self {
        let value = || value.to_owned();
        let (write, wrote) = (
            What::Write { op: 1, register, value: value() },
            What::Wrote { op: 1, register, value: value(), outcome },
        );
        self.add(at, "c0.1", write).add(at + 0.01, "c0.1", wrote)
    }

    fn finally(self, register: Register, values: &[&str], counter: u64) -> Self {
        let values = values.iter().map(|&value| value.to_owned()).collect();
        self.add(99.0, "harness", What::Final { name: "m".to_owned(), register, values, counter })
    }

    fn judged(self) -> Verdict {
        let setup = Setup {
            engine: self.engine.to_owned(),
            seed: 1,
            ttl_ms: 3000,
            names: self.names.clone(),
            promises: Promise::ALL.to_vec(),
            recovery_ms: 1000,
        };
        let first = Event { at: 0, by: "harness".to_owned(), what: What::Setup(setup) };
        judge(&History::new([vec![first], self.events].concat()))
    }

    #[track_caller]
    fn expect_clean(self) {
        let verdict = self.judged();
        assert!(verdict.findings.is_empty(), "{:?}", verdict.findings);
    }

    /// One violation, of this promise, whose text contains this.
    #[track_caller]
    fn breaks(self, promise: Promise, text: &str) {
        let verdict = self.judged();
        let found: Vec<_> = verdict.violations().collect();
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].promise, promise, "{found:?}");
        assert!(found[0].text.contains(text), "{found:?}");
    }
}

#[test]
fn holds_one_after_the_other_are_clean() {
    Story::on("local").hold("c0.1", 1, 5, 1.0, 2.0).hold("c1.1", 1, 6, 2.5, 3.0).expect_clean();
}

#[test]
fn overlapping_beliefs_break_exclusion() {
    Story::on("local")
        .hold("c0.1", 1, 5, 1.0, 3.0)
        .hold("c1.1", 1, 6, 2.5, 3.5)
        .breaks(Promise::Exclusion, "c1.1#1 token 6 entered while c0.1#1 token 5");
}

#[test]
fn a_belief_ends_with_its_last_deadline() {
    let paused = |deadline| {
        Story::on("local")
            .ask(1.0, "c0.1", 1, Mode::Exclusive)
            .enter(1.0, "c0.1", 1, 5, deadline)
            .exit(9.0, "c0.1", 1)
            .hold("c1.1", 1, 6, 5.0, 6.0)
    };
    paused(4.0).expect_clean();
    paused(5.5).breaks(Promise::Exclusion, "entered while");
}

#[test]
fn a_renewed_belief_lasts_longer() {
    let valid_until = 6 * SECOND;
    let state = "held".to_owned();
    Story::on("local")
        .ask(1.0, "c0.1", 1, Mode::Exclusive)
        .enter(1.0, "c0.1", 1, 5, 4.0)
        .add(3.0, "c0.1", What::Valid { op: 1, valid_until, state })
        .exit(9.0, "c0.1", 1)
        .hold("c1.1", 1, 6, 5.0, 6.0)
        .breaks(Promise::Exclusion, "for 1.000 s");
}

#[test]
fn a_lost_guard_does_not_extend_its_belief() {
    let asked = |state: &str| {
        let (valid_until, state) = (8 * SECOND, state.to_owned());
        Story::on("local")
            .ask(1.0, "c0.1", 1, Mode::Exclusive)
            .enter(1.0, "c0.1", 1, 5, 4.0)
            .add(8.0, "c0.1", What::Valid { op: 1, valid_until, state })
            .exit(9.0, "c0.1", 1)
            .hold("c1.1", 1, 6, 5.0, 6.0)
    };
    asked("lost").expect_clean();
    asked("uncertain").breaks(Promise::Exclusion, "entered while");
}

#[test]
fn a_killed_process_believes_nothing() {
    Story::on("local")
        .ask(1.0, "c0.1", 1, Mode::Exclusive)
        .enter(1.0, "c0.1", 1, 5, 9.0)
        .add(2.0, "nemesis", What::Kill { process: "c0.1".to_owned() })
        .hold("c1.1", 1, 6, 2.5, 3.0)
        .expect_clean();
}

#[test]
fn readers_share_and_writers_do_not() {
    let reader = |story: Story, by, token| story.hold_as(Mode::Shared, by, 1, token, 1.0, 3.0);
    let readers = || reader(reader(Story::on("local"), "c0.1", 5), "c1.1", 6);
    readers().expect_clean();
    readers().hold("c2.1", 1, 7, 3.5, 4.0).expect_clean();
    let verdict = readers().hold("c2.1", 1, 7, 2.0, 4.0).judged();
    assert_eq!(verdict.count(Promise::Exclusion), 2, "with each reader");
}

#[test]
fn permits_are_limited() {
    let permit =
        |story: Story, by, token, enter| story.hold_as(PERMITS, by, 1, token, enter, enter + 2.0);
    let two = || permit(permit(Story::on("local"), "c0.1", 5, 1.0), "c1.1", 6, 1.5);
    permit(two(), "c2.1", 7, 3.2).expect_clean();
    permit(two(), "c2.1", 7, 2.0).breaks(Promise::Exclusion, "3 permits of 2");
}

#[test]
fn a_repeated_token_is_found() {
    Story::on("local")
        .hold("c0.1", 1, 5, 1.0, 2.0)
        .hold("c1.1", 1, 5, 2.5, 3.0)
        .breaks(Promise::UniqueTokens, "given out before");
}

#[test]
fn a_token_that_falls_in_real_time_is_found() {
    Story::on("local")
        .hold("c0.1", 1, 6, 1.0, 2.0)
        .hold("c1.1", 1, 5, 2.5, 3.0)
        .breaks(Promise::Tokens, "asked later");
}

#[test]
fn a_waiter_with_a_lower_token_is_found() {
    let waiter = |token| {
        Story::on("local")
            .hold("c0.1", 1, 6, 1.0, 2.0)
            .ask(0.5, "c1.1", 1, Mode::Exclusive)
            .enter(2.5, "c1.1", 1, token, 5.0)
            .exit(3.0, "c1.1", 1)
    };
    waiter(7).expect_clean();
    waiter(5).breaks(Promise::Tokens, "entered later");
}

#[test]
fn the_order_inside_a_process_is_checked() {
    let two = |first: f64, second: f64| {
        Story::on("local")
            .ask(1.0, "c0.1", 1, Mode::Exclusive)
            .ask(1.1, "c0.1", 2, Mode::Exclusive)
            .enter(first, "c0.1", 1, (first * 10.0) as u64, 9.0)
            .exit(first + 0.1, "c0.1", 1)
            .enter(second, "c0.1", 2, (second * 10.0) as u64, 9.0)
            .exit(second + 0.1, "c0.1", 2)
    };
    two(2.0, 3.0).expect_clean();
    two(3.0, 2.0).breaks(Promise::Order, "asked before");
}

#[test]
fn processes_take_turns() {
    let served = |times: u64| {
        let mut story = Story::on("local").ask(1.0, "c0.1", 1, Mode::Exclusive);
        for turn in 1..=times {
            let enter = 1.0 + turn as f64;
            story = story.hold("c1.1", turn, turn, enter, enter + 0.5);
        }
        story.enter(9.0, "c0.1", 1, 9, 9.9).exit(9.5, "c0.1", 1)
    };
    served(1).expect_clean();
    served(2).breaks(Promise::Order, "overtaken twice by c1.1");
    served(2).fault("server-stop", 0.5, 1.5).expect_clean();
}

#[test]
fn a_loss_is_told_by_the_deadline() {
    let told = |at| {
        let lost = What::Lost { op: 1, reason: "expired".to_owned() };
        Story::on("local")
            .ask(1.0, "c0.1", 1, Mode::Exclusive)
            .enter(1.0, "c0.1", 1, 5, 4.0)
            .add(at, "c0.1", lost)
    };
    told(4.1).expect_clean();
    told(4.5).breaks(Promise::Loss, "0.500 s late");
    // A process that does not run cannot be told.
    told(4.5).add(4.45, "c0.1", What::Stalled { from: 3 * SECOND }).expect_clean();
}

#[test]
fn a_guard_is_not_held_after_its_deadline() {
    let asked = |at| {
        let (valid_until, state) = (4 * SECOND, "held".to_owned());
        Story::on("local")
            .ask(1.0, "c0.1", 1, Mode::Exclusive)
            .enter(1.0, "c0.1", 1, 5, 4.0)
            .add(at, "c0.1", What::Valid { op: 1, valid_until, state })
            .exit(9.0, "c0.1", 1)
    };
    asked(3.9).expect_clean();
    asked(4.0).breaks(Promise::Loss, "after its deadline");
}

#[test]
fn locks_are_granted_after_the_faults() {
    let granted = |at| {
        let mut story = Story::on("local").add(10.0, "nemesis", What::Quiet);
        story.names.push("m".to_owned());
        story.hold("c0.1", 1, 5, at, at + 0.1).add(30.0, "harness", What::Quiet)
    };
    granted(16.5).expect_clean();
    granted(17.5).breaks(Promise::Progress, "not granted within 7.000 s");
}

#[test]
fn a_fenced_register_loses_nothing() {
    use Outcome::{Acknowledged, Rejected, Unknown};
    let fenced = |outcome| Story::on("redis").write(1.0, Register::Fenced, "a", outcome);
    fenced(Acknowledged).finally(Register::Fenced, &["a"], 1).expect_clean();
    fenced(Acknowledged).finally(Register::Fenced, &[], 0).breaks(Promise::Fence, "a is lost");
    fenced(Rejected).finally(Register::Fenced, &[], 0).expect_clean();
    fenced(Rejected).finally(Register::Fenced, &["a"], 1).breaks(Promise::Fence, "was made");
    fenced(Unknown).finally(Register::Fenced, &["a"], 1).expect_clean();
    fenced(Unknown).finally(Register::Fenced, &[], 0).expect_clean();
    fenced(Acknowledged).finally(Register::Fenced, &["a"], 2).breaks(Promise::Fence, "counter");
    // Not even where the engine may lose its state.
    let wiped = fenced(Acknowledged).fault("server-wipe", 0.5, 0.7);
    wiped.finally(Register::Fenced, &[], 0).breaks(Promise::Fence, "a is lost");
}

#[test]
fn losses_without_a_fence_are_counted() {
    let plain = Story::on("local").write(1.0, Register::Plain, "a", Outcome::Acknowledged);
    let verdict = plain.finally(Register::Plain, &[], 0).judged();
    assert!(verdict.findings.is_empty(), "{:?}", verdict.findings);
    assert_eq!(verdict.data[&Register::Plain].lost, 1);
    assert_eq!(verdict.data[&Register::Plain].acknowledged, 1);
}

#[test]
fn an_exception_is_counted_where_the_guarantees_name_it() {
    let overlap = |engine, fault, begin, end| {
        Story::on(engine)
            .hold("c0.1", 1, 5, 1.0, 9.0)
            .fault(fault, begin, end)
            .hold("c1.1", 1, 6, 8.0, 9.5)
            .judged()
    };
    let excepted = [
        ("redis", "server-wipe", Exception::LostState),
        ("redis", "clock-forward", Exception::ClockJump),
        ("sentinel", "leader-kill", Exception::Failover),
        ("etcd", "leader-stop", Exception::Etcd15247),
    ];
    for (engine, fault, exception) in excepted {
        let verdict = overlap(engine, fault, 2.0, 6.0);
        assert_eq!(verdict.violations().count(), 0, "{engine} {fault}: {:?}", verdict.findings);
        assert_eq!(verdict.exceptions()[&exception], 1);
        let early = overlap(engine, fault, 0.1, 0.5);
        assert_eq!(early.violations().count(), 1, "{engine} {fault}: a fault of long ago");
    }
    let promised = [
        ("redis", "server-kill"),
        ("redis", "client-stop"),
        ("redlock", "server-wipe"),
        ("etcd", "leader-kill"),
        ("zookeeper", "leader-stop"),
        ("local", "server-stop"),
    ];
    for (engine, fault) in promised {
        assert_eq!(overlap(engine, fault, 2.0, 6.0).violations().count(), 1, "{engine} {fault}");
    }
    let follower = Story::on("etcd")
        .hold("c0.1", 1, 5, 1.0, 9.0)
        .fault_of("server 1", "server-stop", 2.0, 6.0)
        .hold("c1.1", 1, 6, 8.0, 9.5);
    follower.breaks(Promise::Exclusion, "entered while");
    let short = overlap("etcd", "leader-stop", 2.0, 4.0);
    assert_eq!(short.violations().count(), 1, "a leader stopped for less than a lease");
}

#[test]
fn an_old_master_may_grant_lower_tokens_but_none_twice() {
    let story = |engine, token| {
        Story::on(engine)
            .hold("c0.1", 1, 6, 2.0, 3.0)
            .fault("leader-stop", 1.0, 6.0)
            .hold("c1.1", 1, token, 5.0, 6.0)
    };
    assert_eq!(story("cluster", 5).judged().exceptions()[&Exception::Failover], 1);
    story("cluster", 6).breaks(Promise::UniqueTokens, "given out before");
    story("etcd", 5).breaks(Promise::Tokens, "lower token");
}

#[test]
fn tokens_may_fall_only_if_state_was_lost_and_a_clock_was_ahead() {
    let falling = || Story::on("redis").hold("c0.1", 1, 6, 1.0, 2.0).hold("c1.1", 1, 5, 5.0, 6.0);
    falling().fault("server-wipe", 3.0, 4.0).breaks(Promise::Tokens, "lower token");
    falling().fault("clock-forward", 0.1, 0.5).breaks(Promise::Tokens, "lower token");
    let both = falling().fault("clock-forward", 0.1, 0.5).fault("server-wipe", 3.0, 4.0).judged();
    assert_eq!(both.exceptions()[&Exception::LostStateAndClock], 1);
}
