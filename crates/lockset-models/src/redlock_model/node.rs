//! A node: its fence, its holder, and what it answered to whom.

use super::world::{ATTEMPTS, Id};

/// A fence, a proposal or a token.
pub type Value = u8;

/// A set of values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Values(u32);

impl Values {
    /// With this one.
    pub fn insert(&mut self, value: Value) {
        assert!(u32::from(value) < u32::BITS, "the model has no room for the value {value}");
        self.0 |= 1 << value;
    }

    /// Whether this one is in it.
    pub fn contains(self, value: Value) -> bool {
        self.0 & (1 << value) != 0
    }

    /// Those below this one.
    pub fn below(self, value: Value) -> Self {
        Self(self.0 & ((1 << value) - 1))
    }

    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Those of both.
    pub fn and(self, others: Self) -> Self {
        Self(self.0 | others.0)
    }

    /// Forgets all about them but whether this one is in it, and whether a lower one is.
    pub(super) fn coarsen(&mut self, value: Value) {
        *self = Self(self.0 & (1 << value) | u32::from(!self.below(value).is_empty()));
    }

    /// All of them, from the lowest.
    pub fn all(self) -> impl Iterator<Item = Value> {
        (0..u32::BITS as Value).filter(move |value| self.contains(*value))
    }
}

/// A node of the quorum.
#[derive(Clone, Copy, Debug, Default)]
pub struct Node {
    /// What it is called in a told way. Nodes are alike: it makes no difference between states.
    pub name: u8,
    /// Its fence.
    pub fence: Value,
    /// Who holds there.
    pub holder: Option<Id>,
    /// It was restarted and does not answer yet.
    pub is_down: bool,
    /// What passed between it and each attempt.
    pub per_attempt: [NodeReplies; ATTEMPTS],
}

/// What passed between a node and an attempt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeReplies {
    /// A GRANT was executed: another would be a duplicate.
    pub granted: bool,
    /// What the node answered to GRANT, and what it was raised to.
    pub answers: Values,
    /// It counts for the extension under way.
    pub counts: bool,
}

impl Node {
    /// Changes the holder, and hence the fence, if it is free; a repeat changes nothing. The
    /// answer is `None` if another holds.
    pub fn grant(&mut self, id: Id, proposal: Value) -> Option<Value> {
        if self.holder.is_none() {
            (self.fence, self.holder) = (proposal.max(self.fence + 1), Some(id));
        }
        (self.holder == Some(id)).then_some(self.fence)
    }

    /// All that makes a difference.
    pub(super) fn canonical(&self) -> (Value, Option<Id>, bool, [NodeReplies; ATTEMPTS]) {
        (self.fence, self.holder, self.is_down, self.per_attempt)
    }
}
