//! The keys of a name.

use super::slots::{hash_tag, slot};
use crate::engine::ClaimId;
use crate::name::Name;

/// The suffixes of the auxiliary keys; a tombstone's is followed by the claim id.
const KEY_SUFFIXES: [&str; 7] =
    [":fence", ":queue", ":waiters", ":holders", ":held", ":cell", HANDOFFS_SUFFIX];
const HANDOFFS_SUFFIX: &str = ":handoffs";
const TOMBSTONE_INFIX: &str = ":tombstone:";

/// The keys of one name, all in one hash slot: the lock itself, and auxiliary keys.
#[derive(Debug)]
pub(super) struct RedisKeys {
    /// The common start of the auxiliary keys. It is in the lock's slot, and no lock starts with
    /// it. A name with a hash tag keeps it. A name with stray braces and no hash tag gets `{}` in
    /// front, as no other name does; its keys do not share a slot.
    aux_base: String,
    /// The part of it that is the key of the lock.
    lock: std::ops::Range<usize>,
}

impl RedisKeys {
    pub(super) fn new(prefix: &str, name: &Name) -> Self {
        let len = prefix.len() + name.as_str().len();
        let mut aux_base = String::with_capacity(2 * len + 4);
        for part in ["{", prefix, name.as_str()] {
            aux_base.push_str(part);
        }
        if let Some(tag) = hash_tag(&aux_base[1..]).map(str::to_owned) {
            aux_base.insert_str(1, "}:");
            aux_base.insert_str(1, &tag);
            let start = tag.len() + 3;
            return Self { lock: start..start + len, aux_base };
        }
        if aux_base.contains('}') {
            aux_base.insert(1, '}');
            return Self { lock: 2..2 + len, aux_base };
        }
        aux_base.push('}');
        Self { lock: 1..1 + len, aux_base }
    }

    pub(super) fn lock(&self) -> &str {
        &self.aux_base[self.lock.clone()]
    }

    /// Whether scripts can derive the auxiliary keys from the lock: `{lock}:` is their start.
    pub(super) fn follow_from_lock(&self) -> bool {
        self.lock.start == 1 && self.lock.end + 1 == self.aux_base.len()
    }

    pub(super) fn queue(&self) -> String {
        self.aux_key("queue")
    }

    pub(super) fn fence(&self) -> String {
        self.aux_key("fence")
    }

    pub(super) fn cell(&self) -> String {
        self.aux_key("cell")
    }

    /// Only scripts with courtesy use it.
    pub(super) fn handoffs(&self) -> String {
        format!("{}{HANDOFFS_SUFFIX}", self.aux_base)
    }

    /// All other auxiliary keys that a script may touch for this claim. The tombstone is last.
    pub(super) fn others(&self, id: ClaimId) -> [String; 5] {
        let [fence, waiters, holders, held] =
            ["fence", "waiters", "holders", "held"].map(|what| self.aux_key(what));
        [fence, waiters, holders, held, self.aux_key(&format!("tombstone:{id}"))]
    }

    fn aux_key(&self, what: &str) -> String {
        let mut key = String::with_capacity(self.aux_base.len() + 1 + what.len());
        self.write_aux_key(&mut key, what);
        key
    }

    /// Writes the key into a buffer, which replaces its content.
    pub(super) fn write_aux_key<'t>(&self, buffer: &'t mut String, what: &str) -> &'t str {
        buffer.clear();
        buffer.push_str(&self.aux_base);
        buffer.push(':');
        buffer.push_str(what);
        buffer
    }

    /// The slot of all keys in a cluster; `None` if braces in the name put them in different ones.
    pub(super) fn slot(&self) -> Option<u16> {
        let slot_of_all = slot(self.lock());
        (slot(&self.fence()) == slot_of_all).then_some(slot_of_all)
    }

    /// Whether the lock's key could be an auxiliary key of another name. Only possible with a
    /// prefix that is empty or starts with `{`.
    pub(super) fn is_ambiguous(&self) -> bool {
        let lock = self.lock();
        lock.starts_with('{')
            && (KEY_SUFFIXES.iter().any(|suffix| lock.ends_with(suffix))
                || lock.contains(TOMBSTONE_INFIX))
    }

    /// The name whose lock has this key, unless it is an auxiliary key.
    pub(super) fn name_of_lock(prefix: &str, key: &str) -> Option<Name> {
        let name = key.strip_prefix(prefix)?;
        // Of the auxiliary keys, only these are strings, as locks are.
        let is_aux = key.starts_with('{')
            && [":fence", TOMBSTONE_INFIX, HANDOFFS_SUFFIX].iter().any(|part| key.contains(part));
        if is_aux { None } else { name.parse().ok() }
    }

    /// The name whose cell has this key.
    pub(super) fn name_of_cell(prefix: &str, key: &str) -> Option<Name> {
        Self::name_of_aux_key(prefix, key, ":cell")
    }

    /// The name to which this key belongs.
    pub(super) fn name_of(prefix: &str, key: &str) -> Option<Name> {
        let by_suffix =
            KEY_SUFFIXES.iter().find_map(|suffix| Self::name_of_aux_key(prefix, key, suffix));
        let by_tombstone = || {
            let at = key.rfind(TOMBSTONE_INFIX)?;
            Self::name_of_aux_key(prefix, key, &key[at..])
        };
        by_suffix.or_else(by_tombstone).or_else(|| key.strip_prefix(prefix)?.parse().ok())
    }

    /// The name to which this auxiliary key belongs, if it has this suffix.
    fn name_of_aux_key(prefix: &str, key: &str, suffix: &str) -> Option<Name> {
        let aux_base = key.strip_suffix(suffix)?;
        let whole = aux_base.strip_prefix('{').and_then(|lock| lock.strip_suffix('}'));
        let tagged = aux_base.split_once("}:").map(|(_, lock)| lock);
        let stray = aux_base.strip_prefix("{}");
        [whole, tagged, stray].into_iter().flatten().find_map(|lock| {
            let name = lock.strip_prefix(prefix)?.parse().ok()?;
            (Self::new(prefix, &name).aux_base == aux_base).then_some(name)
        })
    }

    /// Prefixes that cover all keys of all names starting with `names`, and few other keys. None is
    /// a prefix of another. Empty: every key may belong to such a name.
    pub(super) fn tracked_prefixes(prefix: &str, names: &str) -> Vec<String> {
        let locks = format!("{prefix}{names}");
        let aux = match hash_tag(&locks) {
            Some(tag) => format!("{{{tag}}}:{locks}"),
            // The names may have any tag.
            None => "{".to_owned(),
        };
        match locks.is_empty() {
            true => Vec::new(),
            false if locks.starts_with(&aux) => vec![aux],
            false if aux.starts_with(&locks) => vec![locks],
            false => vec![locks, aux],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_keys_of_a_name_share_its_slot() {
        let keys = |name: &str| RedisKeys::new("lockset:", &name.parse().unwrap());
        assert_eq!(keys("jobs/42").lock(), "lockset:jobs/42");
        assert_eq!(keys("jobs/42").fence(), "{lockset:jobs/42}:fence");
        assert_eq!(keys("{user}/42").fence(), "{user}:lockset:{user}/42:fence");
        assert_eq!(keys("{}/42").fence(), "{}lockset:{}/42:fence");
        for name in ["jobs/42", "{user}/42", "a}b{c}"] {
            let keys = keys(name);
            for key in [
                keys.fence(),
                keys.queue(),
                keys.cell(),
                keys.others(ClaimId::from_bits(7))[4].clone(),
            ] {
                assert_eq!(Some(slot(&key)), keys.slot(), "{key}");
            }
        }
        assert_eq!((keys("{}/42").slot(), keys("}{").slot()), (None, None));
    }

    #[test]
    fn auxiliary_keys_are_not_taken_for_names() {
        for prefix in ["lockset:", ""] {
            for name in ["jobs/42", "{user}/42", "a}b", "}:{"] {
                let name: Name = name.parse().unwrap();
                let keys = RedisKeys::new(prefix, &name);
                let fence = keys.fence();
                let tombstone = keys.others(ClaimId::from_bits(7))[4].clone();
                assert_eq!(RedisKeys::name_of_lock(prefix, keys.lock()), Some(name.clone()));
                assert_eq!(RedisKeys::name_of_lock(prefix, &fence), None, "{fence}");
                assert_eq!(RedisKeys::name_of_lock(prefix, &tombstone), None, "{tombstone}");
                assert_eq!(RedisKeys::name_of_lock(prefix, &keys.handoffs()), None);
                assert_eq!(RedisKeys::name_of_cell(prefix, &keys.cell()), Some(name));
            }
        }
    }

    /// A change of any key of a name is recognised as a change of that name, and reaches a watch of
    /// the name and of each of its prefixes.
    #[test]
    fn every_key_of_a_name_is_tracked_and_recognised() {
        let names = ["jobs/42", "{user}/42", "jobs/{user}/42", "a}b", "}:{", "{", "{}", "a:queue"];
        for prefix in ["lockset:", "", "{all}:", "{", "x{"] {
            for name in names {
                let name: Name = name.parse().unwrap();
                let keys = RedisKeys::new(prefix, &name);
                let others = keys.others(ClaimId::from_bits(7));
                let lock = keys.lock().to_owned();
                let all = [&[lock, keys.queue(), keys.cell(), keys.handoffs()], &others[..]];
                for key in all.concat() {
                    assert_eq!(
                        RedisKeys::name_of(prefix, &key),
                        Some(name.clone()),
                        "{prefix} {key}"
                    );
                    let starts = name.as_str().char_indices().map(|(at, _)| &name.as_str()[..at]);
                    for start in starts.chain([name.as_str()]) {
                        let tracked = RedisKeys::tracked_prefixes(prefix, start);
                        let is_tracked = tracked.iter().any(|prefix| key.starts_with(prefix));
                        assert!(is_tracked || tracked.is_empty(), "{key} by {tracked:?}");
                    }
                }
            }
        }
        assert_eq!(RedisKeys::name_of("lockset:", "other"), None);
        assert_eq!(RedisKeys::tracked_prefixes("lockset:", "jobs/"), ["lockset:jobs/", "{"]);
        assert_eq!(
            RedisKeys::tracked_prefixes("lockset:", "{a}/"),
            ["lockset:{a}/", "{a}:lockset:{a}/"]
        );
        assert_eq!(RedisKeys::tracked_prefixes("{", "a"), ["{"]);
        assert_eq!(RedisKeys::tracked_prefixes("{a}:", ""), ["{a}:"]);
        assert!(RedisKeys::tracked_prefixes("", "").is_empty());
    }
}
