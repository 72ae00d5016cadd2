//! All that can happen next: a node executes a request, an attempt acts on its answers, a lease
//! ends, a node forgets.

use std::fmt;

use super::node::{Node, NodeReplies, Value, Values};
use super::rules::Rule;
use super::scenario::{Proposals, Restart, Scenario};
use super::world::{Attempt, Id, NODES, Phase, Violation, World};
use crate::explorer::Next;

/// Something that happens, and the nodes after it.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// What happens.
    pub action: Action,
    /// How many nodes there are.
    count: usize,
    /// What they are called, their fences and their holders.
    nodes: [(u8, Value, Option<Id>); NODES],
}

/// What happens. Nodes are named by their numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// An attempt begins: GRANT is sent to all nodes.
    Begin(Id),
    /// A node executes GRANT and answers; for the second time if it is a duplicate.
    Grant(Id, u8, Value, bool),
    /// The lease of the holder ends, or it is released.
    Expire(Id, u8),
    /// An attempt has a majority, but no common value: RAISE is sent where the value is lower.
    Decide(Id, Value),
    /// A node executes RAISE.
    Raise(Id, u8, Value),
    /// An attempt has its token.
    Issue(Id, Value),
    /// A holder that is not the newest any more sends EXTEND to all nodes.
    BeginExtend(Id),
    /// A node executes EXTEND.
    Extend(Id, u8),
    /// A node executes the GRANT of a holder who found that it does not hold there, and answers.
    Seed(Id, u8, Value),
    /// A node forgets all.
    Crash(u8),
    /// It answers again.
    Return(u8),
    /// The register accepts a write.
    Write(Id, Value),
}

fn label(id: Id) -> char {
    char::from(b'A' + id)
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Action::Begin(id) => write!(f, "{} begins", label(id)),
            Action::Grant(id, node, value, again) => {
                let again = if again { ", a duplicate" } else { "" };
                write!(f, "{}: GRANT at n{node} -> {value}{again}", label(id))
            }
            Action::Expire(id, node) => write!(f, "{}'s lease ends at n{node}", label(id)),
            Action::Decide(id, token) => write!(f, "{} wants token {token}", label(id)),
            Action::Raise(id, node, token) => {
                write!(f, "{}: RAISE({token}) at n{node} -> OK", label(id))
            }
            Action::Issue(id, token) => write!(f, "{} HAS TOKEN {token}", label(id)),
            Action::BeginExtend(id) => write!(f, "{} begins to extend", label(id)),
            Action::Extend(id, node) => write!(f, "{}: EXTEND at n{node} -> OK", label(id)),
            Action::Seed(id, node, value) => {
                write!(f, "{}: GRANT at n{node}, again -> {value}", label(id))
            }
            Action::Crash(node) => write!(f, "n{node} forgets all"),
            Action::Return(node) => write!(f, "n{node} answers again"),
            Action::Write(id, token) => write!(f, "{} WRITES with token {token}", label(id)),
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:36}", self.action.to_string())?;
        let mut nodes = self.nodes;
        nodes[..self.count].sort_unstable();
        for (name, fence, holder) in &nodes[..self.count] {
            write!(f, " n{name}[{fence} {}]", holder.map_or('-', label))?;
        }
        Ok(())
    }
}

/// All steps from here.
pub(super) fn steps(scenario: &Scenario, world: &World) -> Vec<Next<Scenario>> {
    let mut all = Steps { scenario, world, found: Vec::with_capacity(16) };
    for id in 0..scenario.attempts as Id {
        match all.attempt(id).phase {
            Phase::Idle => {
                all.begin(id);
                break;
            }
            Phase::Granting => all.decide(id),
            Phase::Raising(token) => all.conclude(id, token),
            Phase::Issued(token) => all.hold(id, token),
            Phase::Ended(_) => {}
        }
        all.write(id);
        for at in 0..scenario.nodes {
            all.request(id, at);
        }
    }
    for at in 0..scenario.nodes {
        all.fail(at);
    }
    all.found
}

struct Steps<'a> {
    scenario: &'a Scenario,
    world: &'a World,
    found: Vec<Next<Scenario>>,
}

impl Steps<'_> {
    fn attempt(&self, id: Id) -> &Attempt {
        &self.world.attempts[usize::from(id)]
    }

    fn nodes(&self) -> &[Node] {
        &self.world.nodes[..self.scenario.nodes]
    }

    fn replies_of(&self, id: Id, at: usize) -> NodeReplies {
        self.world.nodes[at].per_attempt[usize::from(id)]
    }

    fn keeps(&self, rule: Rule) -> bool {
        self.scenario.rules.keep(rule)
    }

    /// By what name a node knows an attempt.
    fn known_as(&self, id: Id) -> Id {
        if self.keeps(Rule::FreshIds) { id } else { 0 }
    }

    fn add(&mut self, action: Action, world: World) {
        self.add_with(action, world, None);
    }

    fn add_with(&mut self, action: Action, mut world: World, violation: Option<Violation>) {
        world.normalize(self.scenario);
        let nodes = world.nodes.map(|node| (node.name, node.fence, node.holder));
        let step = Step { action, count: self.scenario.nodes, nodes };
        self.found.push((step, world, violation));
    }

    fn begin(&mut self, id: Id) {
        let mut world = *self.world;
        let attempt = &mut world.attempts[usize::from(id)];
        attempt.phase = Phase::Granting;
        attempt.preceding = self.world.issued();
        if let Proposals::Clock(ahead) = self.scenario.proposals {
            attempt.proposal = self.greatest_value() + ahead;
        }
        self.add(Action::Begin(id), world);
    }

    /// The greatest value that any client has seen.
    fn greatest_value(&self) -> Value {
        let fences = self.nodes().iter().map(|node| node.fence);
        let attempts = self.world.attempts.iter();
        let known = attempts.flat_map(|one| [one.proposal, one.token().unwrap_or(0)]);
        fences.chain(known).max().unwrap_or(0)
    }

    /// A majority granted: is there a common value, or one to raise the others to?
    fn decide(&mut self, id: Id) {
        let of = |node: &Node| node.per_attempt[usize::from(id)].answers;
        let answered = self.nodes().iter().map(of).fold(Values::default(), Values::and);
        for token in answered.all() {
            let count = |has: &dyn Fn(Values) -> bool| {
                self.nodes().iter().filter(|node| has(of(node))).count()
            };
            let own = count(&|answers| answers.contains(token));
            let lower = count(&|answers| !answers.below(token).is_empty());
            let either =
                count(&|answers| answers.contains(token) || !answers.below(token).is_empty());
            let quorum = self.scenario.quorum();
            if own >= quorum || (either >= quorum && !self.keeps(Rule::WritesBack)) {
                self.issue(id, token);
            }
            if either >= quorum && lower > 0 && self.keeps(Rule::WritesBack) {
                let mut world = *self.world;
                world.attempts[usize::from(id)].phase = Phase::Raising(token);
                self.add(Action::Decide(id, token), world);
            }
        }
    }

    /// A majority was raised, or had the value already.
    fn conclude(&mut self, id: Id, token: Value) {
        let owns = |at: &usize| self.replies_of(id, *at).answers.contains(token);
        if (0..self.scenario.nodes).filter(owns).count() >= self.scenario.quorum() {
            self.issue(id, token);
        }
    }

    fn issue(&mut self, id: Id, token: Value) {
        let mut world = *self.world;
        world.attempts[usize::from(id)].phase = Phase::Issued(token);
        let violation = world.violation_of(id);
        self.add_with(Action::Issue(id, token), world, violation);
    }

    /// An extension that begins while its token is the newest can prove nothing wrong, and EXTEND
    /// changes nothing at a node: only those that begin later are explored, one of each holder,
    /// since a second is one that begins later still.
    fn hold(&mut self, id: Id, token: Value) {
        let is_newer = |attempt: &Attempt| attempt.token().is_some_and(|newer| newer > token);
        let is_old = self.world.attempts.iter().any(is_newer);
        if self.scenario.extensions && is_old && !self.attempt(id).extending {
            let mut world = *self.world;
            world.attempts[usize::from(id)].extending = true;
            self.add(Action::BeginExtend(id), world);
        }
    }

    fn write(&mut self, id: Id) {
        let token = self.attempt(id).token().filter(|token| *token >= self.world.register);
        let Some(token) = token.filter(|_| self.scenario.register) else { return };
        let mut world = *self.world;
        (world.register, world.written) = (token, world.written | 1 << id);
        let is_newer = |(other, one): (usize, &Attempt)| {
            world.written & (1 << other) != 0 && one.preceding & (1 << id) != 0
        };
        let older = world.attempts.iter().enumerate().any(is_newer);
        self.add_with(Action::Write(id, token), world, older.then_some(Violation::OlderAccepted));
    }

    /// A request of this attempt is executed at this node, now or again.
    fn request(&mut self, id: Id, at: usize) {
        let attempt = *self.attempt(id);
        if self.world.nodes[at].is_down || matches!(attempt.phase, Phase::Idle | Phase::Ended(_)) {
            return;
        }
        self.grant(id, at);
        if let Some(token) = attempt.target_token() {
            self.raise(id, at, token);
        }
        if let Phase::Issued(token) = attempt.phase {
            if attempt.extending || !self.keeps(Rule::ExtendCountsItsOwn) {
                self.extend(id, at, token);
            }
            if self.world.seeds > 0 {
                self.seed(id, at, token);
            }
        }
    }

    fn grant(&mut self, id: Id, at: usize) {
        let again = self.replies_of(id, at).granted;
        if again && self.world.duplicates == 0 {
            return;
        }
        let mut tried = Values::default();
        for proposal in self.proposals(id) {
            let mut world = *self.world;
            world.duplicates -= u8::from(again);
            let node = &mut world.nodes[at];
            let Some(value) = node.grant(self.known_as(id), proposal) else { return };
            if tried.contains(value) {
                continue;
            }
            tried.insert(value);
            let replies_of = &mut node.per_attempt[usize::from(id)];
            replies_of.granted = true;
            replies_of.answers.insert(value);
            self.add(Action::Grant(id, node.name, value, again), world);
        }
    }

    fn proposals(&self, id: Id) -> Vec<Value> {
        let of = |node: &Node| node.per_attempt[usize::from(id)].answers;
        match &self.scenario.proposals {
            Proposals::Any(values) => values.clone(),
            Proposals::Clock(_) => vec![self.attempt(id).proposal],
            Proposals::Following(values) => {
                let answered = self.nodes().iter().map(of).fold(Values::default(), Values::and);
                values.iter().copied().chain(answered.all()).collect()
            }
        }
    }

    /// Before the token is issued, to make it common; after that, to adopt a late grant.
    fn raise(&mut self, id: Id, at: usize, token: Value) {
        let replies_of = self.replies_of(id, at);
        let mut world = *self.world;
        let node = &mut world.nodes[at];
        let is_holder = node.holder == Some(self.known_as(id));
        if replies_of.answers.below(token).is_empty()
            || (!is_holder && self.keeps(Rule::RaiseChecksHolder))
            || (node.fence > token && self.keeps(Rule::RaiseChecksFence))
            || (node.fence >= token && replies_of.answers.contains(token))
        {
            return;
        }
        node.fence = node.fence.max(token);
        node.per_attempt[usize::from(id)].answers.insert(token);
        self.add(Action::Raise(id, node.name, token), world);
    }

    fn extend(&mut self, id: Id, at: usize, token: Value) {
        let replies_of = self.replies_of(id, at);
        let mut world = *self.world;
        let node = &mut world.nodes[at];
        let creates = node.holder.is_none() && replies_of.granted;
        let is_accepted = match node.holder == Some(self.known_as(id)) {
            true if self.keeps(Rule::ExtendChecksFence) => {
                replies_of.answers.contains(node.fence) && self.is_counted(node.fence, token)
            }
            true => replies_of.answers.all().any(|value| self.is_counted(value, token)),
            false => creates && !self.keeps(Rule::ExtendCreatesNothing),
        };
        if is_accepted && !replies_of.counts {
            node.holder = Some(self.known_as(id));
            let name = node.name;
            self.count(Action::Extend(id, name), world, id, at);
        }
    }

    /// Whether a node whose own value is `value` proves that nothing newer than `token` was there.
    fn is_counted(&self, value: Value, token: Value) -> bool {
        value <= token + self.scenario.margin || !self.keeps(Rule::HigherDoesNotCount)
    }

    /// A holder who found that it does not hold here proposes its own token.
    fn seed(&mut self, id: Id, at: usize, token: Value) {
        let mut world = *self.world;
        world.seeds -= 1;
        let node = &mut world.nodes[at];
        let Some(value) = node.grant(self.known_as(id), token) else { return };
        let replies_of = &mut node.per_attempt[usize::from(id)];
        replies_of.granted = true;
        replies_of.answers.insert(value);
        let action = Action::Seed(id, node.name, value);
        let exact = value <= token + self.scenario.margin;
        let counts = exact || !self.keeps(Rule::SeedCountsExactly);
        match counts && self.attempt(id).extending {
            true => self.count(action, world, id, at),
            false => self.add(action, world),
        }
    }

    /// This node counts for the extension; with a majority it succeeds.
    fn count(&mut self, action: Action, mut world: World, id: Id, at: usize) {
        world.nodes[at].per_attempt[usize::from(id)].counts = true;
        let counts = |node: &&Node| node.per_attempt[usize::from(id)].counts;
        let enough = world.nodes.iter().filter(counts).count() >= self.scenario.quorum();
        let extended = enough && self.attempt(id).extending;
        self.add_with(action, world, extended.then_some(Violation::ExtendedThoughOld));
    }

    fn fail(&mut self, at: usize) {
        let node = self.world.nodes[at];
        if let Some(holder) = node.holder {
            let mut world = *self.world;
            world.nodes[at].holder = None;
            self.add(Action::Expire(holder, node.name), world);
        }
        if self.world.crashes > 0 {
            let mut world = *self.world;
            world.crashes -= 1;
            let is_down = self.scenario.restart == Restart::AfterAllLeasesEnd;
            world.nodes[at] = Node { fence: 0, holder: None, is_down, ..node };
            self.add(Action::Crash(node.name), world);
        }
        if node.is_down && self.nodes().iter().all(|node| node.holder.is_none()) {
            let mut world = *self.world;
            world.nodes[at].is_down = false;
            for attempt in &mut world.attempts {
                if attempt.phase != Phase::Idle {
                    attempt.phase = Phase::Ended(attempt.token().unwrap_or(0));
                }
            }
            self.add(Action::Return(node.name), world);
        }
    }
}
