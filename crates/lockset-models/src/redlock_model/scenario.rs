//! Who takes part in an exploration, what may happen, and what is looked for.

use super::node::Value;
use super::rules::{Rule, Rules};
use super::steps::{Step, steps};
use super::world::{ATTEMPTS, NODES, Violation, World};
use crate::explorer::{Model, Next};

/// What is explored.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The rules that are kept.
    pub rules: Rules,
    /// How many nodes there are.
    pub nodes: usize,
    /// How many attempts are made. They are alike, so they begin in order.
    pub attempts: usize,
    /// What a GRANT may propose.
    pub proposals: Proposals,
    /// How many GRANTs are executed once more, at any moment.
    pub duplicates: u8,
    /// How many nodes forget all they knew, at any moment.
    pub crashes: u8,
    /// When a node that forgot answers again.
    pub restart: Restart,
    /// Holders extend their holds.
    pub extensions: bool,
    /// How many times holders seed a node again.
    pub seeds: u8,
    /// How far above the token a node's own value may be and still count.
    pub margin: Value,
    /// Holders write to a register that refuses lower tokens than it has seen.
    pub register: bool,
    /// The one breach that counts; all if none.
    pub looks_for: Option<Violation>,
}

/// What a GRANT may propose as its token.
#[derive(Clone, Debug)]
pub enum Proposals {
    /// Any of these, at each node another.
    Any(Vec<Value>),
    /// Any of these, or what another node answered to the same attempt.
    Following(Vec<Value>),
    /// What a clock says that, whenever an attempt begins, is ahead of every value by so much.
    Clock(Value),
}

/// When a node that forgot answers again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Restart {
    /// At once.
    AtOnce,
    /// When all leases are over and nothing that was sent before is under way.
    AfterAllLeasesEnd,
}

impl Scenario {
    /// So many attempts at so many nodes, proposals that say nothing, no faults but lost and late
    /// messages and ended leases.
    pub fn new(nodes: usize, attempts: usize) -> Self {
        assert!(nodes <= NODES && attempts <= ATTEMPTS, "the model has no room for so many");
        Self {
            rules: Rules::ALL,
            nodes,
            attempts,
            proposals: Proposals::Any(vec![0]),
            duplicates: 0,
            crashes: 0,
            restart: Restart::AtOnce,
            extensions: false,
            seeds: 0,
            margin: 0,
            register: false,
            looks_for: None,
        }
    }

    /// Without these rules.
    pub fn without(mut self, rules: &[Rule]) -> Self {
        self.rules = Rules::without(rules);
        self
    }

    /// With so many GRANTs executed once more.
    pub fn duplicates(mut self, count: u8) -> Self {
        self.duplicates = count;
        self
    }

    /// With these proposals.
    pub fn proposals(mut self, proposals: Proposals) -> Self {
        self.proposals = proposals;
        self
    }

    /// With so many nodes that forget, and answer again so.
    pub fn crashes(mut self, count: u8, restart: Restart) -> Self {
        (self.crashes, self.restart) = (count, restart);
        self
    }

    /// With holders that extend.
    pub fn extensions(mut self) -> Self {
        self.extensions = true;
        self
    }

    /// With holders that extend, and seed a node again so many times.
    pub fn seeds(mut self, count: u8) -> Self {
        (self.seeds, self.extensions) = (count, true);
        self
    }

    /// Nodes whose own value is above the token by so much still count.
    pub fn margin(mut self, margin: Value) -> Self {
        self.margin = margin;
        self
    }

    /// With a register that the token protects.
    pub fn register(mut self) -> Self {
        self.register = true;
        self
    }

    /// Looking for this breach only.
    pub fn looks_for(mut self, violation: Violation) -> Self {
        self.looks_for = Some(violation);
        self
    }

    /// More than half.
    pub fn quorum(&self) -> usize {
        self.nodes / 2 + 1
    }
}

impl Model for Scenario {
    type State = World;
    type Step = Step;
    type Violation = Violation;

    fn first(&self) -> World {
        let Self { duplicates, seeds, crashes, .. } = *self;
        let mut world = World { duplicates, seeds, crashes, ..World::default() };
        (1..).zip(&mut world.nodes).for_each(|(name, node)| node.name = name);
        world
    }

    fn steps(&self, world: &World) -> Vec<Next<Self>> {
        steps(self, world)
    }

    fn looks_for(&self, violation: Violation) -> bool {
        self.looks_for.is_none_or(|one| one == violation)
    }
}
