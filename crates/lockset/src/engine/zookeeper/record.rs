//! What is stored at a claim's node, and what a grant's key tells another process.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::client::{Session, ZkErrorCode, ZkRequestError, ZkResult};
use crate::engine::{Claim, ClaimId, Grant};
use crate::error::{Error, Result};
use crate::name::Note;
use crate::token::Token;

const FORMAT_VERSION: u32 = 1;

/// The data of a claim's node, as JSON. A node with other data belongs to another program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct NodeRecord {
    /// The version of this format.
    lockset: u32,
    ttl_ms: u64,
    #[serde(default)]
    note: Note,
    /// The token, if it is not the number of the transaction that created the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    token: Option<Token>,
    /// The claim that holds by this node, if it is not the one that the node is named after.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    claim: Option<ClaimId>,
    /// An operator asks for the lock back.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) revoked: bool,
}

impl NodeRecord {
    pub(super) fn new(claim: &Claim) -> Self {
        Self {
            lockset: FORMAT_VERSION,
            ttl_ms: u64::try_from(claim.ttl.as_millis()).unwrap_or(u64::MAX),
            note: claim.note.clone(),
            token: None,
            claim: None,
            revoked: false,
        }
    }

    pub(super) fn decode(data: &[u8]) -> Option<Self> {
        serde_json::from_slice(data).ok()
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        // Serializing these fields cannot fail.
        serde_json::to_vec(self).unwrap_or_default()
    }

    pub(super) fn token(&self, czxid: i64) -> Token {
        self.token.unwrap_or_else(|| token_of(czxid))
    }

    pub(super) fn with_token(mut self, token: Token) -> Self {
        self.token = Some(token);
        self
    }

    /// The claim that holds by a node that is named after `first`.
    pub(super) fn claim(&self, first: ClaimId) -> ClaimId {
        self.claim.unwrap_or(first)
    }

    /// From now on `successor` holds by this node.
    pub(super) fn transfer_to(&mut self, successor: &Claim) {
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

/// Transactions are numbered from the ensemble's beginning, and the numbers never go back.
pub(super) fn token_of(czxid: i64) -> Token {
    Token::new(u64::try_from(czxid).unwrap_or(0))
}

/// Changes the record at a node. Fails with `NO_NODE` if the node is gone or has no record.
pub(super) async fn edit_record(
    session: &Session,
    path: &str,
    change: impl Fn(&mut NodeRecord),
) -> ZkResult<()> {
    loop {
        let (data, stat) = session.data(path, false).data().await?;
        // Other data cannot be there: the path contains the id of a claim of ours.
        let Some(mut record) = NodeRecord::decode(&data) else {
            return Err(ZkRequestError::Refused(ZkErrorCode::NO_NODE));
        };
        change(&mut record);
        match session.set_data(path, &record.encode(), stat.version).done().await {
            Err(error) if error.is(ZkErrorCode::BAD_VERSION) => {}
            done => return done,
        }
    }
}

/// The key of a [`Grant`] of this engine: where the node is, and how to take over the session if
/// the lock has its own.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ZooKeeperKey {
    pub(super) path: String,
    /// Id and password.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) session: Option<(i64, Vec<u8>)>,
}

impl ZooKeeperKey {
    pub(super) fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    pub(super) fn decode(key: &[u8]) -> Option<Self> {
        serde_json::from_slice(key).ok()
    }
}

impl Grant {
    pub(super) fn zookeeper_key(&self) -> Option<ZooKeeperKey> {
        ZooKeeperKey::decode(&self.key)
    }
}

/// That a lock is still held, as a condition for a transaction of your own.
///
/// Put a *check* of this path and version into a `multi` that writes to ZooKeeper. The write is
/// refused if the lock is no longer held, however long the process was stalled in between: no token
/// has to be compared. The path contains the claim's id and a sequence number, so it is never
/// reused. The version is -1 (any), because notes and breaks change the data of a node that is
/// still held. Take a new `ZooKeeperOwnership` after a downgrade, which moves the lock to another
/// node.
///
/// See `lockset-testkit/examples/zookeeper_guarded_multi.rs`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZooKeeperOwnership {
    /// The full path of a node that exists as long as the lock is held.
    pub path: String,
    /// The version to check: any.
    pub version: i32,
}

impl ZooKeeperOwnership {
    /// The condition that the lock with this [`grant`](crate::Guard::grant) is held.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the grant is not one of the ZooKeeper engine.
    pub fn of(grant: &Grant) -> Result<Self> {
        match ZooKeeperKey::decode(&grant.key) {
            Some(key) => Ok(Self { path: key.path, version: -1 }),
            None => {
                let why = "it is not the key of a lock on ZooKeeper";
                Err(Error::invalid("key", "(not shown)", why))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grant(key: Vec<u8>) -> Grant {
        Grant { token: Token::new(7), valid_until: crate::clock::Moment::NEVER, key }
    }

    #[test]
    fn data_of_other_programs_is_not_a_record() {
        for data in [&b""[..], b"127.0.1.1", b"{}", b"me", b"\xff", b"{\"lockset\":1}"] {
            assert_eq!(NodeRecord::decode(data), None, "{data:?}");
        }
        let ours = br#"{"lockset":1,"ttl_ms":30000,"note":{"by":"1@h","text":"x"},"new":7}"#;
        let ours = NodeRecord::decode(ours).unwrap();
        assert_eq!((ours.ttl().as_secs(), ours.token(9)), (30, Token::new(9)));
        assert_eq!(NodeRecord::decode(&ours.encode()), Some(ours.clone()));
        assert_eq!(ours.with_token(Token::new(5)).token(9), Token::new(5));
    }

    #[test]
    fn ownership_is_read_from_a_key_without_its_secrets() {
        let session = Some((7, b"hunter2".to_vec()));
        let key = ZooKeeperKey { path: "/lockset/a/_c_x-lock-0000000001".to_owned(), session };
        let ownership = ZooKeeperOwnership::of(&grant(key.encode())).unwrap();
        assert_eq!((ownership.path, ownership.version), (key.path, -1));
        assert!(ZooKeeperOwnership::of(&grant(b"x".to_vec())).is_err());
    }
}
