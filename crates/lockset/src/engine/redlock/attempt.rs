//! One attempt at a lock: what each node replied, and what follows from it. No requests here.

use std::sync::{Mutex, MutexGuard};

use crate::clock::Moment;
use crate::engine::{Claim, ClaimId, Grant};
use crate::error::{LossReason, Result};
use crate::sync;
use crate::token::Token;

/// The version of the format of a grant's key.
const KEY_VERSION: u8 = 1;

/// The claim that an attempt belongs to. Every attempt has an id of its own, whose last byte is its
/// number, because a late request of one attempt must never count for another.
pub(super) fn claim_of(attempt: ClaimId) -> ClaimId {
    ClaimId::from_bits(attempt.to_bits() & !0xff)
}

/// The id of a claim's attempt with this number.
pub(super) fn attempt_id(claim: ClaimId, number: u8) -> ClaimId {
    ClaimId::from_bits(claim.to_bits() | u128::from(number))
}

/// Whether a node's own value counts for a holder of `token`. `token + 1` proves that the fence
/// there was the token itself until just before. A greater value may have come after a newer token
/// of another claim: such a node is kept and released, but proves nothing.
pub(super) fn counts(value: Token, token: Token) -> bool {
    value.get() <= token.get().saturating_add(1)
}

/// One attempt, on all nodes.
#[derive(Debug)]
pub(super) struct Attempt {
    /// The claim, under the attempt's own id.
    pub(super) claim: Claim,
    state: Mutex<AttemptState>,
}

#[derive(Debug)]
pub(super) struct AttemptState {
    at: Vec<AtNode>,
    phase: AttemptPhase,
    /// Bit sets of the nodes that refuse renewals, and of those whose state is in doubt.
    revoked: u64,
    in_doubt: u64,
}

/// The state of an attempt at one node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum AtNode {
    /// It has nothing there.
    Nothing,
    /// The lock was requested, and the reply may still come.
    Requested,
    /// It holds the lock there.
    Granted(Grant),
    /// Another claim holds the lock there, or it was lost.
    Refused,
    /// It may have something there.
    Unknown,
}

/// The phase of an attempt as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AttemptPhase {
    Open,
    Held(Token),
    Ended,
}

/// What follows from the replies so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// A quorum granted this value.
    Won(Token),
    /// A quorum granted different values; this is the greatest.
    Raise(Token),
    /// The replies that may still come cannot make a quorum.
    Lost,
    Open,
}

impl Attempt {
    pub(super) fn new(claim: Claim, nodes: usize) -> Self {
        let at = vec![AtNode::Nothing; nodes];
        let state = AttemptState { at, phase: AttemptPhase::Open, revoked: 0, in_doubt: 0 };
        Self { claim, state: Mutex::new(state) }
    }

    /// The attempt that a grant's key describes, for a process that attaches a ticket. Nodes that
    /// the key does not mention are unknown.
    pub(super) fn from_key(claim: &Claim, grant: &Grant, nodes: usize) -> Option<Self> {
        let (version, rest) = grant.key.split_first()?;
        let (number, tokens) = rest.split_first()?;
        if *version != KEY_VERSION || tokens.len() != nodes * 8 {
            return None;
        }
        let at = tokens.chunks_exact(8).map(|token| {
            match u64::from_le_bytes(token.try_into().unwrap_or_default()) {
                0 => AtNode::Unknown,
                token => AtNode::Granted(Grant {
                    token: Token::new(token),
                    valid_until: grant.valid_until,
                    key: Vec::new(),
                }),
            }
        });
        let state = AttemptState {
            at: at.collect(),
            phase: AttemptPhase::Held(grant.token),
            revoked: 0,
            in_doubt: 0,
        };
        let id = attempt_id(claim.id, *number);
        Some(Self { claim: Claim { id, ..claim.clone() }, state: Mutex::new(state) })
    }

    /// The claim as it requests a value of at least `floor` from a node.
    pub(super) fn with_floor(&self, floor: Token) -> Claim {
        Claim { floor: Some(floor), ..self.claim.clone() }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, AttemptState> {
        sync::lock(&self.state)
    }

    /// Whether it was held, and its last lease ended more than a ttl ago.
    pub(super) fn is_expired(&self, now: Moment) -> bool {
        let state = self.state();
        let last = state.granted().map(|(_, grant)| grant.valid_until).max();
        let is_over = last.is_some_and(|last| last + self.claim.ttl < now);
        is_over && matches!(state.phase, AttemptPhase::Held(_))
    }

    /// Whether its lease at this node is much shorter than elsewhere: a first lease.
    pub(super) fn has_first_lease_at(&self, node: usize) -> bool {
        let state = self.state();
        let latest = state.granted().map(|(_, grant)| grant.valid_until).max();
        let (AtNode::Granted(grant), Some(latest)) = (state.at(node), latest) else { return false };
        grant.valid_until + self.claim.ttl / 4 < latest
    }

    /// The grant over all nodes: with this token, valid as long as a quorum keeps it.
    pub(super) fn grant(&self, token: Token, quorum: usize) -> Grant {
        let state = self.state();
        let mut key = vec![KEY_VERSION, self.claim.id.to_bits() as u8];
        for at in &state.at {
            let token = if let AtNode::Granted(grant) = at { grant.token.get() } else { 0 };
            key.extend(token.to_le_bytes());
        }
        Grant { token, valid_until: state.valid_until(token, quorum), key }
    }
}

impl AttemptState {
    pub(super) fn at(&self, node: usize) -> &AtNode {
        &self.at[node]
    }

    pub(super) fn set(&mut self, node: usize, at: AtNode) {
        if matches!(at, AtNode::Granted(_)) {
            self.in_doubt &= !(1 << node);
        }
        self.at[node] = at;
    }

    /// Records the reply to a request for the lock. After an error the state is unknown.
    pub(super) fn on_reply(&mut self, node: usize, reply: &Result<Option<Grant>>) {
        self.set(
            node,
            match reply {
                Ok(Some(grant)) => AtNode::Granted(grant.clone()),
                Ok(None) => AtNode::Refused,
                Err(_) => AtNode::Unknown,
            },
        );
    }

    pub(super) fn phase(&self) -> AttemptPhase {
        self.phase
    }

    /// Ends it, and returns the phase before.
    pub(super) fn end(&mut self) -> AttemptPhase {
        std::mem::replace(&mut self.phase, AttemptPhase::Ended)
    }

    /// Makes it held, unless it has ended meanwhile; returns whether it is.
    pub(super) fn hold(&mut self, token: Token) -> bool {
        let open = self.phase == AttemptPhase::Open;
        if open {
            self.phase = AttemptPhase::Held(token);
        }
        open
    }

    /// The nodes where it holds, and their grants.
    pub(super) fn granted(&self) -> impl Iterator<Item = (usize, &Grant)> {
        self.at.iter().enumerate().filter_map(|(node, at)| match at {
            AtNode::Granted(grant) => Some((node, grant)),
            _ => None,
        })
    }

    /// The nodes where its state is as given.
    pub(super) fn nodes_where(&self, is: impl Fn(&AtNode) -> bool) -> Vec<usize> {
        (0..self.at.len()).filter(|node| is(&self.at[*node])).collect()
    }

    pub(super) fn verdict(&self, quorum: usize) -> Verdict {
        let values: Vec<Token> = self.granted().map(|(_, grant)| grant.token).collect();
        let asked = self.nodes_where(|at| *at == AtNode::Requested).len();
        let owners = |value: &Token| values.iter().filter(|other| *other == value).count();
        let won = values.iter().find(|value| owners(value) >= quorum);
        match (won, values.iter().max()) {
            (Some(value), _) => Verdict::Won(*value),
            _ if values.len() + asked < quorum => Verdict::Lost,
            (None, Some(greatest)) if asked == 0 => Verdict::Raise(*greatest),
            _ => Verdict::Open,
        }
    }

    /// The number of nodes that granted or refused.
    pub(super) fn replies(&self) -> usize {
        self.nodes_where(|at| matches!(at, AtNode::Granted(_) | AtNode::Refused)).len()
    }

    /// The number of nodes that granted or refused, or may still do so in time.
    pub(super) fn reachable(&self) -> usize {
        self.replies() + self.nodes_where(|at| *at == AtNode::Requested).len()
    }

    /// Until when a quorum keeps it: the quorum-th greatest end of the leases that count.
    pub(super) fn valid_until(&self, token: Token, quorum: usize) -> Moment {
        let counted = self.granted().filter(|(_, grant)| counts(grant.token, token));
        let mut ends: Vec<Moment> = counted.map(|(_, grant)| grant.valid_until).collect();
        ends.sort_unstable_by(|a, b| b.cmp(a));
        ends.get(quorum - 1).copied().unwrap_or(Moment::from_nanos(0))
    }

    /// The nodes that may still hold it, and count.
    pub(super) fn possible_nodes(&self, token: Token) -> Vec<usize> {
        self.nodes_where(|at| match at {
            AtNode::Granted(grant) => counts(grant.token, token),
            AtNode::Requested | AtNode::Unknown => true,
            AtNode::Nothing | AtNode::Refused => false,
        })
    }

    /// A node reports that it has taken the lock away, or will not renew it. Returns why the lock
    /// as a whole is lost, if it is.
    pub(super) fn on_lost(
        &mut self,
        node: usize,
        why: LossReason,
        quorum: usize,
    ) -> Option<LossReason> {
        match why {
            LossReason::Revoked => self.revoked |= 1 << node,
            _ => self.set(node, AtNode::Refused),
        }
        let AttemptPhase::Held(token) = self.phase else { return None };
        let is_unrevoked = |node: &usize| self.revoked & (1 << node) == 0;
        let possible = self.possible_nodes(token).into_iter().filter(is_unrevoked).count();
        (possible < quorum).then_some(why)
    }

    /// A node cannot be reached now. Returns whether fewer than a quorum are beyond doubt.
    pub(super) fn on_doubt(&mut self, node: usize, quorum: usize) -> bool {
        self.in_doubt |= 1 << node;
        let AttemptPhase::Held(token) = self.phase else { return false };
        let certain = self
            .granted()
            .filter(|(node, grant)| self.in_doubt & (1 << node) == 0 && counts(grant.token, token));
        certain.count() < quorum
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn claim() -> Claim {
        Claim::plain("n", Duration::from_secs(1))
    }

    fn granted(token: u64, ends: u64) -> AtNode {
        let valid_until = Moment::from_nanos(ends);
        AtNode::Granted(Grant { token: Token::new(token), valid_until, key: Vec::new() })
    }

    /// The verdict of five nodes in these states.
    fn verdict(at: [AtNode; 5]) -> Verdict {
        let attempt = Attempt::new(claim(), 5);
        at.into_iter().enumerate().for_each(|(node, at)| attempt.state().set(node, at));
        attempt.state().verdict(3)
    }

    #[test]
    fn a_value_from_a_quorum_is_a_token_whatever_the_others_say() {
        let (five, nine) = (granted(5, 1), granted(9, 1));
        let all = [five.clone(), five.clone(), five.clone(), nine.clone(), AtNode::Refused];
        assert_eq!(verdict(all), Verdict::Won(Token::new(5)));
        let split = [five.clone(), five.clone(), nine.clone(), AtNode::Refused, AtNode::Unknown];
        assert_eq!(verdict(split), Verdict::Raise(Token::new(9)));
        let early = [five.clone(), five.clone(), nine.clone(), AtNode::Requested, AtNode::Refused];
        assert_eq!(verdict(early), Verdict::Open);
        let few = [five.clone(), five, AtNode::Refused, AtNode::Refused, AtNode::Unknown];
        assert_eq!(verdict(few), Verdict::Lost);
    }

    #[test]
    fn the_whole_is_valid_as_long_as_a_quorum_is() {
        let attempt = Attempt::new(claim(), 5);
        for (node, ends) in [(0, 30), (1, 10), (3, 20), (4, 40)] {
            attempt.state().set(node, granted(7, ends));
        }
        let token = Token::new(7);
        assert_eq!(attempt.state().valid_until(token, 3), Moment::from_nanos(20));
        // `token + 1` proves that the fence was the token; `token + 2` may hide a newer token.
        attempt.state().set(4, granted(8, 40));
        assert_eq!(attempt.state().valid_until(token, 3), Moment::from_nanos(20));
        attempt.state().set(4, granted(9, 40));
        assert_eq!(attempt.state().valid_until(token, 3), Moment::from_nanos(10));
        attempt.state().set(0, AtNode::Refused);
        assert_eq!(attempt.state().valid_until(token, 3), Moment::from_nanos(0));
    }

    #[test]
    fn an_attempt_is_long_over_one_ttl_after_its_end() {
        let attempt = Attempt::new(claim(), 3);
        let second = 1_000_000_000;
        (0..3).for_each(|node| attempt.state().set(node, granted(7, 10 * second)));
        let give_up_at = |secs: u64| attempt.is_expired(Moment::from_nanos(secs * second));
        assert!(!give_up_at(100), "it is still being acquired");
        assert!(attempt.state().hold(Token::new(7)));
        assert!(!give_up_at(11));
        assert!(give_up_at(12));
    }

    #[test]
    fn a_key_tells_another_process_what_it_needs() {
        let claim = claim();
        let own = Claim { id: attempt_id(claim.id, 3), ..claim.clone() };
        let attempt = Attempt::new(own.clone(), 3);
        attempt.state().set(0, granted(7, 1));
        attempt.state().set(2, granted(8, 1));
        let grant = attempt.grant(Token::new(7), 2);
        let again = Attempt::from_key(&claim, &grant, 3).unwrap();
        assert_eq!(again.claim.id, own.id);
        assert_eq!(claim_of(again.claim.id), claim.id);
        assert_eq!(*again.state().at(1), AtNode::Unknown);
        assert_eq!(again.state().granted().map(|(_, g)| g.token.get()).collect::<Vec<_>>(), [7, 8]);
        assert!(Attempt::from_key(&claim, &grant, 5).is_none());
        assert!(Attempt::from_key(&claim, &Grant { key: vec![], ..grant }, 3).is_none());
    }
}
