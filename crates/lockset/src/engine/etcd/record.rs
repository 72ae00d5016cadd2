//! The record of a claim: the value of its key.

use serde::{Deserialize, Serialize};

use super::keys::first_claim_id;
use super::request_error::unreachable_error;
use super::rpc::KeyValue;
use crate::engine::{Claim, ClaimId, Mode};
use crate::error::Result;
use crate::name::Note;
use crate::token::Token;

const VERSION: &str = "v1";

/// What is stored for a claim, as JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct KeyRecord {
    v: String,
    pub(super) mode: Mode,
    ttl_ms: u64,
    by: String,
    pub(super) note: String,
    /// An operator has asked for the lock back.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) revoked: bool,
    /// The owner of the key, if it was first created for another claim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    id: Option<ClaimId>,
}

impl KeyRecord {
    /// The record of this claim in this key.
    pub(super) fn for_claim(claim: &Claim, key: &[u8]) -> Self {
        Self {
            v: VERSION.to_owned(),
            mode: claim.mode,
            ttl_ms: u64::try_from(claim.ttl.as_millis()).unwrap_or(u64::MAX),
            by: claim.note.by.as_ref().to_owned(),
            note: claim.note.text.as_ref().to_owned(),
            revoked: false,
            id: Some(claim.id).filter(|id| first_claim_id(key) != Some(*id)),
        }
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        // Encoding text and numbers does not fail.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// The value of another program, or an empty one, counts as exclusive. If it is text, it is
    /// shown as the note: for example the proposal of an election.
    pub(super) fn decode(value: &[u8]) -> Self {
        let record = serde_json::from_slice::<Self>(value).ok();
        record.filter(|record| record.v == VERSION).unwrap_or_else(|| Self {
            v: VERSION.to_owned(),
            mode: Mode::Exclusive,
            ttl_ms: 0,
            by: String::new(),
            note: foreign_note(value),
            revoked: false,
            id: None,
        })
    }

    pub(super) fn note(&self) -> Note {
        Note { by: self.by.as_str().into(), text: self.note.as_str().into() }
    }

    pub(super) fn set_note(&mut self, note: &Note) {
        self.by = note.by.as_ref().to_owned();
        self.note = note.text.as_ref().to_owned();
    }

    /// Makes another claim the owner of the key.
    pub(super) fn transfer_to(&mut self, successor: &Claim) {
        self.id = Some(successor.id);
        self.set_note(&successor.note);
    }
}

/// The claim that owns a key; `None` if another program wrote it.
pub(super) fn claim_id_of(kv: &KeyValue, record: &KeyRecord) -> Option<ClaimId> {
    first_claim_id(&kv.key).map(|first| record.id.unwrap_or(first))
}

pub(super) fn mode_of(kv: &KeyValue) -> Mode {
    KeyRecord::decode(&kv.value).mode
}

/// A token is the revision at which the claim's key was created.
pub(super) fn token_from_revision(revision: i64) -> Result<Token> {
    let token = u64::try_from(revision).ok().map(Token::new);
    token.filter(|token| *token <= Token::MAX).ok_or_else(|| {
        unreachable_error(format!("the store's revision {revision} is beyond any token"), false)
    })
}

fn foreign_note(value: &[u8]) -> String {
    let text = std::str::from_utf8(value).unwrap_or_default();
    let text: String = text.chars().filter(|c| !c.is_control()).collect();
    let end = (0..=text.len().min(Note::MAX_LEN)).rev().find(|end| text.is_char_boundary(*end));
    text.get(..end.unwrap_or(0)).unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_other_programs_are_understood() {
        for value in [&b""[..], b"node-7", b"{}", br#"{"v":"v2","mode":"shared"}"#, b"\xff"] {
            assert_eq!(KeyRecord::decode(value).mode, Mode::Exclusive);
        }
        assert_eq!(&*KeyRecord::decode(b"node-7\n").note().text, "node-7");
        assert_eq!(KeyRecord::decode("é".repeat(2000).as_bytes()).note.len(), Note::MAX_LEN);
    }

    #[test]
    fn a_record_is_the_same_after_encoding_and_decoding() {
        let golden = br#"{"v":"v1","mode":{"permits":{"take":1,"limit":3}},"ttl_ms":30000,"by":"7@h","note":"n"}"#;
        let mut record = KeyRecord::decode(golden);
        assert_eq!(record.mode, Mode::Permits { take: 1, limit: 3 });
        assert_eq!(record.encode(), golden);
        record.revoked = true;
        assert!(KeyRecord::decode(&record.encode()).revoked);
    }
}
