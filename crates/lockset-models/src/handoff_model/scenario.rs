//! Who takes part in an exploration, what may happen, and what is looked for.

use super::client::ClientRules;
use super::rules::{Leases, Rule, Rules};
use super::server::Id;
use super::steps::{Step, steps};
use super::world::{CLAIMS, Faults, Violation, World};
use crate::explorer::{Model, Next};

/// What is explored.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The rules and leases of all clients.
    pub client_rules: ClientRules,
    /// The process of each claim.
    pub processes: Vec<u8>,
    /// The claims are alike: they begin in order, since any other order is the same by other names.
    pub symmetric: bool,
    /// The first claim is released with the second as its next; the second begins only so.
    pub gate: bool,
    /// Who waits may give up.
    pub cancels: bool,
    /// Requests of a connection that ended may still arrive; otherwise they are all lost.
    pub late: bool,
    /// Faults that may happen, each at any moment.
    pub faults: Faults,
    /// No request is sent while so many letters are under way.
    pub messages: usize,
    /// Heartbeats of one claim that may be under way at once.
    pub heartbeats_in_flight: usize,
    /// Timers and bounded ways, to see how long the last claim waits; without them anything may
    /// take any time.
    pub timers: Option<Timers>,
    /// For how many ticks a release leaves the lock free, if it does.
    pub courtesy: u8,
    /// The one breach that counts; all if none.
    pub looks_for: Option<Violation>,
}

/// When things happen at the latest.
#[derive(Clone, Copy, Debug)]
pub struct Timers {
    /// A letter is under way for at most so many ticks.
    pub max_transit: u8,
    /// A heartbeat goes out every so many ticks.
    pub heartbeat_interval: u8,
    /// Maximum number of ticks that the last claim waits while no live client holds.
    pub bound: u8,
}

impl Scenario {
    /// So many claims, each with a process of its own, q = 1, f = 2, ttl = 3, no faults.
    pub fn clients(count: u8) -> Self {
        assert!(usize::from(count) <= CLAIMS, "the model has room for {CLAIMS} claims");
        Self {
            client_rules: ClientRules { rules: Rules::ALL, leases: Leases::new(1, 2, 3) },
            processes: (0..count).collect(),
            symmetric: true,
            gate: false,
            cancels: true,
            late: true,
            faults: Faults::default(),
            messages: 3,
            heartbeats_in_flight: 1,
            timers: None,
            courtesy: 1,
            looks_for: None,
        }
    }

    /// A gate: the first claim is released with the second, of the same process, as its next; the
    /// third is of another process.
    pub fn gate(count: u8) -> Self {
        let processes = [0, 0, 1][..usize::from(count)].to_vec();
        Self { processes, symmetric: false, gate: true, ..Self::clients(count) }
    }

    /// Without these rules.
    pub fn without(mut self, rules: &[Rule]) -> Self {
        self.client_rules.rules = Rules::without(rules);
        self
    }

    /// With so many connections cut.
    pub fn cuts(mut self, count: u8) -> Self {
        self.faults.cuts = count;
        self
    }

    /// With so many processes killed.
    pub fn crashes(mut self, count: u8) -> Self {
        self.faults.crashes = count;
        self
    }

    /// With so many pushes lost.
    pub fn lost_pushes(mut self, count: u8) -> Self {
        self.faults.lost_pushes = count;
        self
    }

    /// With so many releases that leave the lock free for so many ticks.
    pub fn courtesies(mut self, count: u8, ticks: u8) -> Self {
        (self.faults.courtesies, self.courtesy) = (count, ticks);
        self
    }

    /// With so many letters under way.
    pub fn messages(mut self, count: usize) -> Self {
        self.messages = count;
        self
    }

    /// With these leases.
    pub fn leases(mut self, q: u8, f: u8, ttl: u8) -> Self {
        self.client_rules.leases = Leases::new(q, f, ttl);
        self
    }

    /// No waiter gives up.
    pub fn without_cancels(mut self) -> Self {
        self.cancels = false;
        self
    }

    /// Nothing arrives late.
    pub fn without_late_requests(mut self) -> Self {
        self.late = false;
        self
    }

    /// With timers.
    pub fn timers(mut self, max_transit: u8, heartbeat_interval: u8, bound: u8) -> Self {
        self.timers = Some(Timers { max_transit, heartbeat_interval, bound });
        self
    }

    /// Looking for this breach only.
    pub fn looks_for(mut self, violation: Violation) -> Self {
        self.looks_for = Some(violation);
        self
    }

    /// The claims that take part.
    pub fn ids(&self) -> std::ops::Range<Id> {
        0..self.processes.len() as Id
    }

    /// The claim whose waiting is measured, if timers are explored.
    pub fn observed(&self) -> Option<Id> {
        self.timers.map(|_| self.processes.len() as Id - 1)
    }

    /// The process of a claim.
    pub fn process(&self, id: Id) -> u8 {
        self.processes[usize::from(id)]
    }
}

impl Model for Scenario {
    type State = World;
    type Step = Step;
    type Violation = Violation;

    fn first(&self) -> World {
        World { faults: self.faults, ..World::default() }
    }

    fn steps(&self, world: &World) -> Vec<Next<Self>> {
        steps(self, world)
    }

    fn looks_for(&self, violation: Violation) -> bool {
        self.looks_for.is_none_or(|one| one == violation)
    }

    fn measure(&self, world: &World) -> u8 {
        world.idle
    }
}
