//! How a name is written on the server, and how a claim travels.

use std::time::Duration;

use super::slots::{slot, tag};
use crate::clock::Moment;
use crate::engine::{Claim, ClaimId, Mode};
use crate::name::{Name, Note};
use crate::token::Token;

/// The longest time a waiter's place lives without a sign of life.
const LONGEST_PLACE: Duration = Duration::from_secs(5);

/// The keys of one name, all in one hash slot.
#[derive(Debug)]
pub(super) struct Keys {
    lock: String,
    /// What the others begin with. A name that has a hash tag of its own keeps it.
    beside: String,
}

impl Keys {
    pub(super) fn new(prefix: &str, name: &Name) -> Self {
        let lock = format!("{prefix}{name}");
        let beside = if tag(&lock).is_some() { lock.clone() } else { format!("{{{lock}}}") };
        Self { lock, beside }
    }

    pub(super) fn lock(&self) -> &str {
        &self.lock
    }

    pub(super) fn queue(&self) -> String {
        self.beside("queue")
    }

    pub(super) fn fence(&self) -> String {
        self.beside("fence")
    }

    pub(super) fn cell(&self) -> String {
        self.beside("cell")
    }

    /// The mark of a claim that was withdrawn.
    pub(super) fn mark(&self, id: ClaimId) -> String {
        format!("{}:mark:{id}", self.beside)
    }

    fn beside(&self, what: &str) -> String {
        format!("{}:{what}", self.beside)
    }

    /// Where all of them are in a cluster; `None` if the name has braces that tear them apart.
    pub(super) fn slot(&self) -> Option<u16> {
        let slot_of_all = slot(&self.lock);
        (slot(&self.fence()) == slot_of_all).then_some(slot_of_all)
    }

    /// The name whose lock is this key, unless the key stands beside another name's.
    pub(super) fn name_of_lock(prefix: &str, key: &str) -> Option<Name> {
        let beside =
            |what: &str| key.rsplit_once(what).is_some_and(|(before, _)| tag(before).is_some());
        let name = key.strip_prefix(prefix)?;
        if beside(":fence") || beside(":mark:") { None } else { name.parse().ok() }
    }

    /// The name whose cell is this key.
    pub(super) fn name_of_cell(prefix: &str, key: &str) -> Option<Name> {
        let lock = key.strip_suffix(":cell")?;
        let bare = lock.strip_prefix('{').and_then(|lock| lock.strip_suffix('}'));
        [bare, Some(lock)].into_iter().flatten().find_map(|lock| {
            let name = lock.strip_prefix(prefix)?.parse().ok()?;
            (Self::new(prefix, &name).cell() == key).then_some(name)
        })
    }
}

/// The lease of a waiter's place, `q`.
pub(super) fn place_lease(ttl: Duration) -> Duration {
    LONGEST_PLACE.min(ttl / 2)
}

/// The first lease of a lock that was handed over, `f`; longer than a place's.
pub(super) fn first_lease(ttl: Duration) -> Duration {
    place_lease(ttl) * 2
}

/// `q|f|ttl|mode|take|limit|floor|inbox|note`, as `common.lua` reads it.
pub(super) fn written(claim: &Claim, clock_floor: u64, inbox: &str) -> String {
    let (mode, take, limit) = match claim.mode {
        Mode::Exclusive => ('x', 0, 0),
        Mode::Shared => ('s', 0, 0),
        Mode::Permits { take, limit } => ('p', take, limit),
    };
    let floor = match claim.floor {
        Some(exact) => format!("!{exact}"),
        None => clock_floor.to_string(),
    };
    let (q, f) = (place_lease(claim.ttl).as_millis(), first_lease(claim.ttl).as_millis());
    let (ttl, note) = (claim.ttl.as_millis(), written_note(&claim.note, inbox));
    format!("{q}|{f}|{ttl}|{mode}|{take}|{limit}|{floor}|{inbox}|{note}")
}

/// `inbox|by|text`: where a holder is told of losses, and what others see of it.
pub(super) fn written_note(note: &Note, inbox: &str) -> String {
    format!("{inbox}|{}|{}", note.by.replace('|', "/"), note.text)
}

/// The note in what [`written_note`] wrote.
pub(super) fn read_note(text: &str) -> Note {
    let mut parts = text.splitn(3, '|').skip(1);
    let (by, text) = (parts.next(), parts.next());
    Note { by: by.unwrap_or_default().into(), text: text.unwrap_or_default().into() }
}

/// A grant is known by its token alone; the rest follows from the claim.
pub(super) fn grant(token: Token, valid_until: Moment) -> crate::engine::Grant {
    crate::engine::Grant { token, valid_until, key: Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_keys_of_a_name_share_its_slot() {
        let keys = |name: &str| Keys::new("lockset:", &name.parse().unwrap());
        assert_eq!(keys("jobs/42").lock(), "lockset:jobs/42");
        assert_eq!(keys("jobs/42").fence(), "{lockset:jobs/42}:fence");
        assert_eq!(keys("{user}/42").fence(), "lockset:{user}/42:fence");
        assert_eq!(keys("{}/42").fence(), "{lockset:{}/42}:fence");
        for name in ["jobs/42", "{user}/42", "a}b{c}"] {
            let keys = keys(name);
            for key in [keys.fence(), keys.queue(), keys.cell(), keys.mark(ClaimId::from_bits(7))] {
                assert_eq!(Some(slot(&key)), keys.slot(), "{key}");
            }
        }
        assert_eq!((keys("{}/42").slot(), keys("}{").slot()), (None, None));
    }

    #[test]
    fn keys_beside_a_name_are_not_taken_for_names() {
        for prefix in ["lockset:", ""] {
            for name in ["jobs/42", "{user}/42"] {
                let name: Name = name.parse().unwrap();
                let keys = Keys::new(prefix, &name);
                let (fence, mark) = (keys.fence(), keys.mark(ClaimId::from_bits(7)));
                assert_eq!(Keys::name_of_lock(prefix, keys.lock()), Some(name.clone()));
                assert_eq!(Keys::name_of_lock(prefix, &fence), None, "{fence}");
                assert_eq!(Keys::name_of_lock(prefix, &mark), None, "{mark}");
                assert_eq!(Keys::name_of_cell(prefix, &keys.cell()), Some(name));
            }
        }
    }

    #[test]
    fn a_first_lease_is_longer_than_a_place() {
        for ttl in [100, 1_000, 10_000, 30_000, 600_000].map(Duration::from_millis) {
            assert!(
                first_lease(ttl) > place_lease(ttl)
                    && first_lease(ttl) <= ttl.max(first_lease(ttl))
            );
            assert!(first_lease(ttl) <= ttl, "{ttl:?}");
        }
    }

    #[test]
    fn notes_survive_being_written() {
        let note = Note { by: "7@host".into(), text: "a|b: c".into() };
        assert_eq!(read_note(&written_note(&note, "inbox")), note);
    }
}
