//! The keys in etcd.
//!
//! | key | what |
//! |---|---|
//! | `prefix/NAME/<lease>-<claim id>` | a claim on NAME, holding or waiting; both ids in hex. The next claim of the same client reuses the key, and its value then names its owner |
//! | `prefix/NAME/<lease>` | the same of `etcdctl lock` and of every program that uses its recipe |
//! | `prefix//cell/NAME` | the cell of NAME |
//! | `prefix//gone/<claim id>` | the tombstone of a withdrawn claim; late requests for it are rejected |
//!
//! No name has an empty segment, so no claim is below `prefix//`. In NAME the characters `%` and
//! `/` are escaped as `%25` and `%2F`, so that `a/b` is not inside `a`. Raw names are not escaped.
//!
//! Every read of a range also walks over its deleted keys until the store is compacted. That is why
//! keys are reused: a client that takes a lock a million times must not leave a million keys
//! behind.

use crate::engine::ClaimId;
use crate::name::{Name, Prefix};

/// Where the keys are below a prefix.
#[derive(Clone, Debug)]
pub(super) struct EtcdLayout {
    prefix: String,
    has_raw_names: bool,
}

/// A range of keys: its first key, and the first key behind it. An empty end: one key.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct KeyRange {
    pub(super) first: Vec<u8>,
    pub(super) end: Vec<u8>,
}

impl KeyRange {
    fn with_prefix(prefix: String) -> Self {
        let first = prefix.into_bytes();
        let mut end = first.clone();
        // Keys are UTF-8, so the last byte is never 0xff.
        if let Some(last) = end.last_mut() {
            *last += 1;
        }
        Self { first, end }
    }

    pub(super) fn single(key: Vec<u8>) -> Self {
        Self { first: key, end: Vec::new() }
    }

    /// Whether the range is a single key.
    pub(super) fn is_single(&self) -> bool {
        self.end.is_empty()
    }
}

impl EtcdLayout {
    pub(super) fn new(prefix: &str, has_raw_names: bool) -> Self {
        Self { prefix: prefix.to_owned(), has_raw_names }
    }

    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    pub(super) fn has_raw_names(&self) -> bool {
        self.has_raw_names
    }

    /// The key of a claim.
    pub(super) fn claim(&self, name: &Name, lease: i64, id: ClaimId) -> Vec<u8> {
        format!("{}/{}/{lease:x}-{id}", self.prefix, self.escape(name.as_str())).into_bytes()
    }

    /// All claims on a name.
    pub(super) fn claims(&self, name: &Name) -> KeyRange {
        KeyRange::with_prefix(format!("{}/{}/", self.prefix, self.escape(name.as_str())))
    }

    /// All claims on names with this prefix. May include other keys: see [`EtcdLayout::name_of`].
    pub(super) fn claims_below(&self, prefix: &Prefix) -> KeyRange {
        KeyRange::with_prefix(format!("{}/{}", self.prefix, self.escape(prefix.as_str())))
    }

    pub(super) fn cell(&self, name: &Name) -> Vec<u8> {
        format!("{}//cell/{}", self.prefix, self.escape(name.as_str())).into_bytes()
    }

    pub(super) fn cells_below(&self, prefix: &Prefix) -> KeyRange {
        KeyRange::with_prefix(format!("{}//cell/{}", self.prefix, self.escape(prefix.as_str())))
    }

    /// The tombstone of a withdrawn claim.
    pub(super) fn tombstone(&self, id: ClaimId) -> Vec<u8> {
        format!("{}//gone/{id}", self.prefix).into_bytes()
    }

    /// A key that never exists. Reading it only shows whether a majority replies.
    pub(super) fn absent_key(&self) -> Vec<u8> {
        format!("{}//gone/", self.prefix).into_bytes()
    }

    /// Whether a key in the range `queue` of a name is a claim on that name. With escaped names, a
    /// key with a further slash is a lock of another program on a longer name.
    pub(super) fn is_claim_on(&self, queue: &KeyRange, key: &[u8]) -> bool {
        let has_no_slash = |rest: &[u8]| !rest.contains(&b'/');
        self.has_raw_names || key.get(queue.first.len()..).is_some_and(has_no_slash)
    }

    /// Whether this is the key of a claim on this name that this library wrote.
    pub(super) fn is_own_claim_key(&self, name: &Name, key: &[u8]) -> bool {
        let queue = self.claims(name);
        let is_within = *queue.first <= *key && *key < *queue.end;
        is_within && self.is_claim_on(&queue, key) && first_claim_id(key).is_some()
    }

    /// Whether claims on these names wait for each other: the names are equal or, with raw names,
    /// one is inside the other.
    pub(super) fn share_queue(&self, one: &Name, other: &Name) -> bool {
        let (one, other) = (one.as_str(), other.as_str());
        let is_inside = |inner: &str, outer: &str| {
            inner.strip_prefix(outer).is_some_and(|rest| rest.starts_with('/'))
        };
        one == other || (self.has_raw_names && (is_inside(one, other) || is_inside(other, one)))
    }

    /// Whether this key is below `prefix//`, and so not a claim.
    pub(super) fn is_reserved(&self, key: &[u8]) -> bool {
        let rest = key.strip_prefix(self.prefix.as_bytes());
        rest.is_some_and(|rest| rest.starts_with(b"//"))
    }

    /// The name of a claim or a cell.
    pub(super) fn name_of(&self, key: &[u8]) -> Option<Name> {
        let rest = std::str::from_utf8(key).ok()?.strip_prefix(self.prefix.as_str())?;
        let rest = rest.strip_prefix('/')?;
        let escaped = match rest.strip_prefix("/cell/") {
            Some(name) => name,
            None => rest.rsplit_once('/')?.0,
        };
        match (self.has_raw_names, escaped.contains('/')) {
            (true, _) => escaped.parse().ok(),
            (false, true) => None,
            (false, false) => escaped.replace("%2F", "/").replace("%25", "%").parse().ok(),
        }
    }

    fn escape(&self, name: &str) -> String {
        match self.has_raw_names {
            true => name.to_owned(),
            false => name.replace('%', "%25").replace('/', "%2F"),
        }
    }
}

/// The claim for which a key was first created; `None` if another program wrote the key.
pub(super) fn first_claim_id(key: &[u8]) -> Option<ClaimId> {
    let (rest, id) = key.split_at_checked(key.len().checked_sub(32)?)?;
    std::str::from_utf8(id).ok().filter(|_| rest.ends_with(b"-"))?.parse().ok()
}

/// The lease that a key of this library names.
pub(super) fn lease_id_in(key: &[u8]) -> Option<i64> {
    let text = std::str::from_utf8(key).ok()?;
    let (lease, _) = text.rsplit_once('/')?.1.split_once('-')?;
    i64::from_str_radix(lease, 16).ok()
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
        let layout = EtcdLayout::new("lockset", false);
        let id = ClaimId::from_bits(0xabc);
        let key = layout.claim(&name("jobs/4%2"), 0x694d_7a5f_0001_1b07, id);
        let golden = "lockset/jobs%2F4%252/694d7a5f00011b07-00000000000000000000000000000abc";
        assert_eq!(text(&key), golden);
        assert_eq!(layout.name_of(&key), Some(name("jobs/4%2")));
        assert_eq!(
            (first_claim_id(&key), lease_id_in(&key)),
            (Some(id), Some(0x694d_7a5f_0001_1b07))
        );
        assert_eq!(text(&layout.cell(&name("a/b"))), "lockset//cell/a%2Fb");
        assert_eq!(layout.name_of(&layout.cell(&name("a/b"))), Some(name("a/b")));
        assert_eq!(text(&layout.tombstone(id)), "lockset//gone/00000000000000000000000000000abc");
        let claims = layout.claims(&name("a"));
        assert_eq!((text(&claims.first), text(&claims.end)), ("lockset/a/", "lockset/a0"));
    }

    #[test]
    fn raw_names_are_written_as_they_are() {
        let layout = EtcdLayout::new("/locks", true);
        let key = layout.claim(&name("a/b%"), 7, ClaimId::from_bits(1));
        assert_eq!(text(&key), "/locks/a/b%/7-00000000000000000000000000000001");
        assert_eq!(layout.name_of(&key), Some(name("a/b%")));
    }

    #[test]
    fn ranges_of_names_neither_overlap_nor_nest() {
        let layout = EtcdLayout::new("p", false);
        let id = ClaimId::from_bits(1);
        let within = |keys: &KeyRange, key: &[u8]| *keys.first <= *key && *key < *keys.end;
        for (one, other) in [("a", "a/b"), ("a%2Fb", "a/b"), ("a%", "a%25"), ("a", "a0")] {
            let claims = layout.claims(&name(one));
            assert!(within(&claims, &layout.claim(&name(one), 1, id)));
            assert!(!within(&claims, &layout.claim(&name(other), 1, id)), "{one} and {other}");
            assert!(!within(&claims, &layout.cell(&name(other))));
            assert!(!within(&claims, &layout.tombstone(id)));
        }
        let claims = layout.claims(&name("a"));
        assert!(layout.is_claim_on(&claims, b"p/a/77") && !layout.is_claim_on(&claims, b"p/a/b/7"));
        assert!(EtcdLayout::new("p", true).is_claim_on(&claims, b"p/a/b/7"));
        for odd in ["%2F", "%25", "%252F", "a%", "%", "é/%2f"] {
            assert_eq!(layout.name_of(&layout.claim(&name(odd), 1, id)), Some(name(odd)));
        }
    }

    #[test]
    fn keys_of_other_programs_are_understood() {
        let layout = EtcdLayout::new("p", false);
        assert_eq!(layout.name_of(b"p/a/694d7a5f00011b07"), Some(name("a")));
        assert_eq!(first_claim_id(b"p/a/694d7a5f00011b07"), None);
        assert_eq!(lease_id_in(b"p/a/694d7a5f00011b07"), None);
        for alien in [&b"p/a"[..], b"q/a/1", b"p//gone/1", b"p/a/b/1", b"p", b"", b"p/\xff/1"] {
            assert_eq!(layout.name_of(alien), None, "{alien:?}");
        }
    }
}
