//! What a claim's node says about it, and what a grant's key says to another process.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::engine::{Claim, ClaimId, Grant};
use crate::error::{Error, Result};
use crate::name::Note;
use crate::token::Token;

const VERSION: u32 = 1;

/// The data of a claim's node, as JSON. What is not this was written by somebody else.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Words {
    lockset: u32,
    ttl_ms: u64,
    #[serde(default)]
    note: Note,
    /// The token, where it is not the number of the transaction that made the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    token: Option<Token>,
    /// The claim that holds by this node, where it is not the one that the node is named after.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    claim: Option<ClaimId>,
    /// An operator wants the lock back.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) revoked: bool,
    /// Of a claim for permits that did not get them at once: whether it has them now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) admitted: Option<bool>,
}

impl Words {
    pub(super) fn of(claim: &Claim) -> Self {
        Self {
            lockset: VERSION,
            ttl_ms: u64::try_from(claim.ttl.as_millis()).unwrap_or(u64::MAX),
            note: claim.note.clone(),
            token: None,
            claim: None,
            revoked: false,
            admitted: None,
        }
    }

    pub(super) fn read(data: &[u8]) -> Option<Self> {
        serde_json::from_slice(data).ok()
    }

    pub(super) fn write(&self) -> Vec<u8> {
        // Nothing in it can fail to be written.
        serde_json::to_vec(self).unwrap_or_default()
    }

    pub(super) fn token(&self, czxid: i64) -> Token {
        self.token.unwrap_or_else(|| token_of(czxid))
    }

    pub(super) fn with_token(mut self, token: Token) -> Self {
        self.token = Some(token);
        self
    }

    /// The claim that holds, of a node that is named after `first`.
    pub(super) fn claim(&self, first: ClaimId) -> ClaimId {
        self.claim.unwrap_or(first)
    }

    /// Another claim holds by this node from now on.
    pub(super) fn pass_on(&mut self, successor: &Claim) {
        self.claim = Some(successor.id);
        self.note = successor.note.clone();
    }

    pub(super) fn note(&self) -> &Note {
        &self.note
    }

    pub(super) fn set_note(&mut self, note: Note) {
        self.note = note;
    }

    pub(super) fn ttl(&self) -> Duration {
        Duration::from_millis(self.ttl_ms)
    }
}

/// Transactions are numbered from the ensemble's beginning, and never go back.
pub(super) fn token_of(czxid: i64) -> Token {
    Token::new(u64::try_from(czxid).unwrap_or(0))
}

/// What a [`Grant`] carries for this engine: where its node is, and of a lock with a session of its
/// own, how to take that over.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Key {
    pub(super) path: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) session: Option<(i64, Vec<u8>)>,
}

impl Key {
    pub(super) fn write(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    pub(super) fn read(key: &[u8]) -> Option<Self> {
        serde_json::from_slice(key).ok()
    }
}

/// That a lock is still held, as a condition for a transaction of your own.
///
/// Put a *check* of this path and version into a `multi` that writes to ZooKeeper, and the write is
/// refused when the lock is no longer held, however long the process slept in between: no token
/// has to be compared. The path bears the claim's id and a number, so it is never used again; the
/// version is -1 (any), because notes and breaks change the data of a node that is still held. Take
/// it anew after a downgrade, which moves the lock to another node.
///
/// See `lockset-testkit/examples/zookeeper_guarded_multi.rs`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ownership {
    /// The full path of the node that is there as long as the lock is held.
    pub path: String,
    /// The version to check: any.
    pub version: i32,
}

impl Ownership {
    /// The condition that the lock with this [`grant`](crate::Guard::grant) is held.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the grant is none of the ZooKeeper engine's.
    pub fn of(grant: &Grant) -> Result<Self> {
        match Key::read(&grant.key) {
            Some(key) => Ok(Self { path: key.path, version: -1 }),
            None => Err(Error::invalid("key", "(not shown)", "it is not one of a ZooKeeper lock")),
        }
    }
}

impl Grant {
    pub(super) fn zookeeper_key(&self) -> Option<Key> {
        Key::read(&self.key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grant(key: Vec<u8>) -> Grant {
        Grant { token: Token::new(7), valid_until: crate::clock::Moment::NEVER, key }
    }

    #[test]
    fn words_of_others_are_not_taken_for_ours() {
        for data in [&b""[..], b"127.0.1.1", b"{}", b"me", b"\xff", b"{\"lockset\":1}"] {
            assert_eq!(Words::read(data), None, "{data:?}");
        }
        let ours = br#"{"lockset":1,"ttl_ms":30000,"note":{"by":"1@h","text":"x"},"new":7}"#;
        let ours = Words::read(ours).unwrap();
        assert_eq!((ours.ttl().as_secs(), ours.token(9)), (30, Token::new(9)));
        assert_eq!(Words::read(&ours.write()), Some(ours.clone()));
        assert_eq!(ours.with_token(Token::new(5)).token(9), Token::new(5));
    }

    #[test]
    fn ownership_is_read_from_a_key_without_its_secrets() {
        let session = Some((7, b"hunter2".to_vec()));
        let key = Key { path: "/lockset/a/_c_x-lock-0000000001".to_owned(), session };
        let ownership = Ownership::of(&grant(key.write())).unwrap();
        assert_eq!((ownership.path, ownership.version), (key.path, -1));
        assert!(Ownership::of(&grant(b"x".to_vec())).is_err());
    }
}
