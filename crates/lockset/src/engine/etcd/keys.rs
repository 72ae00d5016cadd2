//! What is written in etcd: keys and values.
//!
//! | key | what |
//! |---|---|
//! | `prefix/NAME/<lease>-<claim id>` | a claim on NAME, holding or waiting; both ids in hex. The next claim of the same client takes the same key again, and says in its value who it is |
//! | `prefix/NAME/<lease>` | the same of `etcdctl lock` and of everybody who uses its recipe |
//! | `prefix//cell/NAME` | the cell of NAME |
//! | `prefix//gone/<claim id>` | a claim that was withdrawn; a late request for it is refused |
//!
//! No name has an empty segment, so none meets what is below `prefix//`. In NAME the signs `%` and
//! `/` are written `%25` and `%2F`, so that `a` and `a/b` are neighbours and not one inside the
//! other; raw names are written as they are.
//!
//! A key that was deleted costs everybody who reads its neighbours until the store is compacted,
//! so that a client that takes a lock a million times must not leave a million keys behind.

use serde::{Deserialize, Serialize};

use super::rpc::KeyValue;
use crate::engine::{Claim, ClaimId, Mode};
use crate::name::{Name, Note, Prefix};

const VERSION: &str = "v1";

/// Where things lie below a prefix.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    prefix: String,
    raw: bool,
}

/// A range of keys: its first, and the first behind it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Keys {
    pub(super) first: Vec<u8>,
    pub(super) end: Vec<u8>,
}

impl Keys {
    /// All keys that begin like this.
    fn beginning(with: String) -> Self {
        let first = with.into_bytes();
        let mut end = first.clone();
        // No key of ours ends with the greatest byte: it is not UTF-8.
        if let Some(last) = end.last_mut() {
            *last += 1;
        }
        Self { first, end }
    }

    /// One key.
    pub(super) fn one(key: Vec<u8>) -> Self {
        Self { first: key, end: Vec::new() }
    }
}

impl Layout {
    pub(super) fn new(prefix: &str, raw: bool) -> Self {
        Self { prefix: prefix.to_owned(), raw }
    }

    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    pub(super) fn has_raw_names(&self) -> bool {
        self.raw
    }

    /// The key of a claim.
    pub(super) fn claim(&self, name: &Name, lease: i64, id: ClaimId) -> Vec<u8> {
        format!("{}/{}/{lease:x}-{id}", self.prefix, self.written(name.as_str())).into_bytes()
    }

    /// All claims on a name.
    pub(super) fn claims(&self, name: &Name) -> Keys {
        Keys::beginning(format!("{}/{}/", self.prefix, self.written(name.as_str())))
    }

    /// All claims on names with this prefix; also others, which [`Layout::name_of`] tells apart.
    pub(super) fn claims_below(&self, prefix: &Prefix) -> Keys {
        Keys::beginning(format!("{}/{}", self.prefix, self.written(prefix.as_str())))
    }

    pub(super) fn cell(&self, name: &Name) -> Vec<u8> {
        format!("{}//cell/{}", self.prefix, self.written(name.as_str())).into_bytes()
    }

    pub(super) fn cells_below(&self, prefix: &Prefix) -> Keys {
        Keys::beginning(format!("{}//cell/{}", self.prefix, self.written(prefix.as_str())))
    }

    /// The mark of a withdrawn claim.
    pub(super) fn mark(&self, id: ClaimId) -> Vec<u8> {
        format!("{}//gone/{id}", self.prefix).into_bytes()
    }

    /// A key that never exists: reading it asks nothing but whether there is an answer.
    pub(super) fn nothing(&self) -> Vec<u8> {
        format!("{}//gone/", self.prefix).into_bytes()
    }

    /// Whether a key of those `of` a name is a claim on it. With escaped names, what has a slash
    /// more is somebody else's lock on a longer name.
    pub(super) fn is_claim_on(&self, of: &Keys, key: &[u8]) -> bool {
        self.raw || key.get(of.first.len()..).is_some_and(|rest| !rest.contains(&b'/'))
    }

    /// Whether this is the key of a claim of ours on this name.
    pub(super) fn is_ours(&self, name: &Name, key: &[u8]) -> bool {
        let claims = self.claims(name);
        let is_within = *claims.first <= *key && *key < *claims.end;
        is_within && self.is_claim_on(&claims, key) && id_in(key).is_some()
    }

    /// Whether claims on these names stand in one line: the names are the same, or, with raw
    /// names, one lies within the other.
    pub(super) fn meet(&self, one: &Name, other: &Name) -> bool {
        let (one, other) = (one.as_str(), other.as_str());
        let within = |inner: &str, outer: &str| {
            inner.strip_prefix(outer).is_some_and(|rest| rest.starts_with('/'))
        };
        one == other || (self.raw && (within(one, other) || within(other, one)))
    }

    /// Whether this key is not a claim: it lies below `prefix//`.
    pub(super) fn is_beside(&self, key: &[u8]) -> bool {
        let rest = key.strip_prefix(self.prefix.as_bytes());
        rest.is_some_and(|rest| rest.starts_with(b"//"))
    }

    /// The name that a claim or a cell is about.
    pub(super) fn name_of(&self, key: &[u8]) -> Option<Name> {
        let rest = std::str::from_utf8(key).ok()?.strip_prefix(self.prefix.as_str())?;
        let rest = rest.strip_prefix('/')?;
        let written = match rest.strip_prefix("/cell/") {
            Some(name) => name,
            None => rest.rsplit_once('/')?.0,
        };
        match (self.raw, written.contains('/')) {
            (true, _) => written.parse().ok(),
            (false, true) => None,
            (false, false) => written.replace("%2F", "/").replace("%25", "%").parse().ok(),
        }
    }

    fn written(&self, name: &str) -> String {
        match self.raw {
            true => name.to_owned(),
            false => name.replace('%', "%25").replace('/', "%2F"),
        }
    }
}

/// The claim that a key belongs to; `None` if another program wrote it.
pub(super) fn id_of(kv: &KeyValue, word: &Word) -> Option<ClaimId> {
    id_in(&kv.key).map(|first| word.id.unwrap_or(first))
}

/// The claim for which a key was first made.
fn id_in(key: &[u8]) -> Option<ClaimId> {
    let (rest, id) = key.split_at_checked(key.len().checked_sub(32)?)?;
    std::str::from_utf8(id).ok().filter(|_| rest.ends_with(b"-"))?.parse().ok()
}

/// The lease that a key of ours names.
pub(super) fn lease_of(key: &[u8]) -> Option<i64> {
    let text = std::str::from_utf8(key).ok()?;
    let (lease, _) = text.rsplit_once('/')?.1.split_once('-')?;
    i64::from_str_radix(lease, 16).ok()
}

/// What a claim says of itself: the value of its key.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Word {
    v: String,
    pub(super) mode: Mode,
    ttl_ms: u64,
    by: String,
    pub(super) note: String,
    /// An operator wants the lock back.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) revoked: bool,
    /// Whose key it is, if it was first made for another claim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    id: Option<ClaimId>,
}

impl Word {
    /// What this claim writes into this key.
    pub(super) fn of(claim: &Claim, key: &[u8]) -> Self {
        Self {
            v: VERSION.to_owned(),
            mode: claim.mode,
            ttl_ms: u64::try_from(claim.ttl.as_millis()).unwrap_or(u64::MAX),
            by: claim.note.by.as_ref().to_owned(),
            note: claim.note.text.as_ref().to_owned(),
            revoked: false,
            id: Some(claim.id).filter(|id| id_in(key) != Some(*id)),
        }
    }

    pub(super) fn write(&self) -> Vec<u8> {
        // Text and numbers are always written.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// What another program wrote, or nothing, counts as exclusive; as far as it is text it is its
    /// note, as the proposal of an election is.
    pub(super) fn read(value: &[u8]) -> Self {
        serde_json::from_slice::<Word>(value).ok().filter(|word| word.v == VERSION).unwrap_or_else(
            || Self {
                v: VERSION.to_owned(),
                mode: Mode::Exclusive,
                ttl_ms: 0,
                by: String::new(),
                note: foreign_note(value),
                revoked: false,
                id: None,
            },
        )
    }

    pub(super) fn note(&self) -> Note {
        Note { by: self.by.as_str().into(), text: self.note.as_str().into() }
    }

    /// The key belongs to another claim from now on.
    pub(super) fn pass_on(&mut self, successor: &Claim) {
        self.id = Some(successor.id);
        self.set_note(&successor.note);
    }

    pub(super) fn set_note(&mut self, note: &Note) {
        self.by = note.by.as_ref().to_owned();
        self.note = note.text.as_ref().to_owned();
    }
}

fn foreign_note(value: &[u8]) -> String {
    let text = std::str::from_utf8(value).unwrap_or_default();
    let text: String = text.chars().filter(|c| !c.is_control()).collect();
    let end = (0..=text.len().min(Note::MAX_LEN)).rev().find(|end| text.is_char_boundary(*end));
    text.get(..end.unwrap_or(0)).unwrap_or_default().to_owned()
}

/// How a key's claim shares its lock.
pub(super) fn mode_of(kv: &KeyValue) -> Mode {
    Word::read(&kv.value).mode
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(key: &[u8]) -> &str {
        std::str::from_utf8(key).unwrap()
    }

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    #[test]
    fn keys_are_as_documented() {
        let layout = Layout::new("lockset", false);
        let id = ClaimId::from_bits(0xabc);
        let key = layout.claim(&name("jobs/4%2"), 0x694d_7a5f_0001_1b07, id);
        let golden = "lockset/jobs%2F4%252/694d7a5f00011b07-00000000000000000000000000000abc";
        assert_eq!(text(&key), golden);
        assert_eq!(layout.name_of(&key), Some(name("jobs/4%2")));
        assert_eq!((id_in(&key), lease_of(&key)), (Some(id), Some(0x694d_7a5f_0001_1b07)));
        assert_eq!(text(&layout.cell(&name("a/b"))), "lockset//cell/a%2Fb");
        assert_eq!(layout.name_of(&layout.cell(&name("a/b"))), Some(name("a/b")));
        assert_eq!(text(&layout.mark(id)), "lockset//gone/00000000000000000000000000000abc");
        let claims = layout.claims(&name("a"));
        assert_eq!((text(&claims.first), text(&claims.end)), ("lockset/a/", "lockset/a0"));
    }

    #[test]
    fn raw_names_are_written_as_they_are() {
        let layout = Layout::new("/locks", true);
        let key = layout.claim(&name("a/b%"), 7, ClaimId::from_bits(1));
        assert_eq!(text(&key), "/locks/a/b%/7-00000000000000000000000000000001");
        assert_eq!(layout.name_of(&key), Some(name("a/b%")));
    }

    #[test]
    fn names_neither_meet_nor_nest() {
        let layout = Layout::new("p", false);
        let id = ClaimId::from_bits(1);
        let within = |keys: &Keys, key: &[u8]| *keys.first <= *key && *key < *keys.end;
        for (one, other) in [("a", "a/b"), ("a%2Fb", "a/b"), ("a%", "a%25"), ("a", "a0")] {
            let claims = layout.claims(&name(one));
            assert!(within(&claims, &layout.claim(&name(one), 1, id)));
            assert!(!within(&claims, &layout.claim(&name(other), 1, id)), "{one} and {other}");
            assert!(!within(&claims, &layout.cell(&name(other))));
            assert!(!within(&claims, &layout.mark(id)));
        }
        let claims = layout.claims(&name("a"));
        assert!(layout.is_claim_on(&claims, b"p/a/77") && !layout.is_claim_on(&claims, b"p/a/b/7"));
        assert!(Layout::new("p", true).is_claim_on(&claims, b"p/a/b/7"));
        for odd in ["%2F", "%25", "%252F", "a%", "%", "é/%2f"] {
            assert_eq!(layout.name_of(&layout.claim(&name(odd), 1, id)), Some(name(odd)));
        }
    }

    #[test]
    fn what_others_write_is_understood() {
        let layout = Layout::new("p", false);
        assert_eq!(layout.name_of(b"p/a/694d7a5f00011b07"), Some(name("a")));
        assert_eq!(id_in(b"p/a/694d7a5f00011b07"), None);
        assert_eq!(lease_of(b"p/a/694d7a5f00011b07"), None);
        for alien in [&b"p/a"[..], b"q/a/1", b"p//gone/1", b"p/a/b/1", b"p", b"", b"p/\xff/1"] {
            assert_eq!(layout.name_of(alien), None, "{alien:?}");
        }
        for value in [&b""[..], b"node-7", b"{}", br#"{"v":"v2","mode":"shared"}"#, b"\xff"] {
            assert_eq!(Word::read(value).mode, Mode::Exclusive);
        }
        assert_eq!(&*Word::read(b"node-7\n").note().text, "node-7");
        assert_eq!(Word::read("é".repeat(2000).as_bytes()).note.len(), Note::MAX_LEN);
    }

    #[test]
    fn a_word_survives_being_written_down() {
        let golden = br#"{"v":"v1","mode":{"permits":{"take":1,"limit":3}},"ttl_ms":30000,"by":"7@h","note":"n"}"#;
        let mut word = Word::read(golden);
        assert_eq!(word.mode, Mode::Permits { take: 1, limit: 3 });
        assert_eq!(word.write(), golden);
        word.revoked = true;
        assert!(Word::read(&word.write()).revoked);
    }
}
