//! One moment of the whole: the nodes, the attempts, and the register that tokens protect.

use std::hash::{Hash, Hasher};

use super::node::{Node, NodeReplies, Value};
use super::scenario::Scenario;

/// At most so many attempts.
pub(super) const ATTEMPTS: usize = 3;
/// At most so many nodes.
pub(super) const NODES: usize = 5;

/// An attempt.
pub type Id = u8;

/// A state of the model. Two states that differ only by which node is which are the same.
#[derive(Clone, Copy, Debug, Default)]
pub struct World {
    /// The nodes; those beyond the number of the scenario are not used.
    pub nodes: [Node; NODES],
    /// The attempts.
    pub attempts: [Attempt; ATTEMPTS],
    /// GRANTs that may yet be executed again.
    pub duplicates: u8,
    /// Nodes that may yet be seeded again.
    pub seeds: u8,
    /// Nodes that may yet forget all.
    pub crashes: u8,
    /// The greatest token that the register has seen.
    pub register: Value,
    /// The attempts whose writes it accepted, a bit each.
    pub written: u8,
}

impl Hash for World {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.nodes.iter().for_each(|node| node.canonical().hash(state));
        let faults = (self.duplicates, self.seeds, self.crashes);
        (self.attempts, faults, self.register, self.written).hash(state);
    }
}

/// An attempt to take the lock, and the hold that came of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Attempt {
    /// How far it is.
    pub phase: Phase,
    /// What it proposes as its token, where proposals are read from a clock.
    pub proposal: Value,
    /// The attempts that had their tokens before this one began, a bit each.
    pub preceding: u8,
    /// It extends its hold.
    pub extending: bool,
}

/// How far an attempt is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Not begun.
    #[default]
    Idle,
    /// GRANT is on its way to all nodes.
    Granting,
    /// This is to be the token: RAISE is on its way where it is lower.
    Raising(Value),
    /// It has its token, and holds as far as it knows.
    Issued(Value),
    /// Nothing of it is under way any more; the token it had, or 0.
    Ended(Value),
}

impl Attempt {
    /// The token it was issued.
    pub fn token(&self) -> Option<Value> {
        match self.phase {
            Phase::Issued(token) | Phase::Ended(token) => Some(token).filter(|token| *token > 0),
            _ => None,
        }
    }

    /// The token it has or is about to have.
    pub(super) fn target_token(&self) -> Option<Value> {
        match self.phase {
            Phase::Raising(token) | Phase::Issued(token) => Some(token),
            _ => None,
        }
    }
}

/// A broken promise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Violation {
    /// Two acquisitions have the same token.
    TokenTwice,
    /// An acquisition that began after another was done has a lower token.
    TokenFell,
    /// An extension succeeded although a newer token had been issued before it began.
    ExtendedThoughOld,
    /// The register accepted a write of an older acquisition after one of a newer.
    OlderAccepted,
}

impl World {
    /// What is wrong with the token that this attempt was just issued.
    pub(super) fn violation_of(&self, id: Id) -> Option<Violation> {
        let attempt = self.attempts[usize::from(id)];
        let token = attempt.token()?;
        for (other, one) in self.attempts.iter().enumerate() {
            let Some(others) = one.token().filter(|_| other != usize::from(id)) else { continue };
            if others == token {
                return Some(Violation::TokenTwice);
            }
            if attempt.preceding & (1 << other) != 0 && others > token {
                return Some(Violation::TokenFell);
            }
        }
        None
    }

    /// The attempts that have tokens, a bit each.
    pub(super) fn issued(&self) -> u8 {
        let has_token = |id: &usize| self.attempts[*id].token().is_some();
        (0..ATTEMPTS).filter(has_token).fold(0, |mask, id| mask | 1 << id)
    }

    /// Forgets what can make no difference any more, and which node is which.
    pub(super) fn normalize(&mut self, scenario: &Scenario) {
        for (id, attempt) in self.attempts.iter().enumerate() {
            for node in &mut self.nodes[..scenario.nodes] {
                let replies_of = &mut node.per_attempt[id];
                match attempt.target_token() {
                    _ if matches!(attempt.phase, Phase::Ended(_)) => {
                        *replies_of = NodeReplies::default()
                    }
                    // Only EXTEND asks what exactly a node answered once the token is chosen.
                    Some(token) if !scenario.extensions => replies_of.answers.coarsen(token),
                    _ => {}
                }
            }
        }
        self.nodes[..scenario.nodes].sort_by_key(Node::canonical);
    }
}
