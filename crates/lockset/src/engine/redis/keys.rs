//! How a name is written on the server, and how a claim travels.

use std::fmt::Write;
use std::time::Duration;

use super::slots::{slot, tag};
use crate::clock::Moment;
use crate::engine::{Claim, ClaimId, Grant, Mode};
use crate::name::{Name, Note};
use crate::token::Token;

/// How the keys beside a lock end; that of a withdrawn claim ends with its id.
const ENDS: [&str; 7] = [":fence", ":queue", ":waiters", ":holders", ":held", ":cell", HANDOFFS];
const HANDOFFS: &str = ":handoffs";
const MARK: &str = ":mark:";

/// The keys of one name, all in one hash slot.
#[derive(Debug)]
pub(super) struct Keys {
    /// What the others begin with: never as a lock does, and in the same slot. A name that has a
    /// hash tag of its own keeps it; one that only has braces astray has `{}` before it, as no
    /// other has, and no slot for all of them.
    beside: String,
    /// Where in it the key of the lock itself stands.
    lock: std::ops::Range<usize>,
}

impl Keys {
    pub(super) fn new(prefix: &str, name: &Name) -> Self {
        let len = prefix.len() + name.as_str().len();
        let mut beside = String::with_capacity(2 * len + 4);
        for part in ["{", prefix, name.as_str()] {
            beside.push_str(part);
        }
        if let Some(tag) = tag(&beside[1..]).map(str::to_owned) {
            beside.insert_str(1, "}:");
            beside.insert_str(1, &tag);
            let start = tag.len() + 3;
            return Self { lock: start..start + len, beside };
        }
        if beside.contains('}') {
            beside.insert(1, '}');
            return Self { lock: 2..2 + len, beside };
        }
        beside.push('}');
        Self { lock: 1..1 + len, beside }
    }

    pub(super) fn lock(&self) -> &str {
        &self.beside[self.lock.clone()]
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

    fn beside(&self, what: &str) -> String {
        let mut key = String::with_capacity(self.beside.len() + 1 + what.len());
        self.beside_in(&mut key, what);
        key
    }

    /// The key written into a text that is used again and again.
    pub(super) fn beside_in<'t>(&self, text: &'t mut String, what: &str) -> &'t str {
        text.clear();
        text.push_str(&self.beside);
        text.push(':');
        text.push_str(what);
        text
    }

    /// Whether the lock's key could be one that stands beside another lock. Only with a prefix that
    /// is empty or begins as those do.
    pub(super) fn looks_like_another(&self) -> bool {
        let lock = self.lock();
        lock.starts_with('{') && (ENDS.iter().any(|end| lock.ends_with(end)) || lock.contains(MARK))
    }

    /// All that a script may touch on behalf of this claim, beside lock, queue and cell.
    pub(super) fn others(&self, id: ClaimId) -> [String; 5] {
        let [fence, waiters, holders, held] =
            ["fence", "waiters", "holders", "held"].map(|what| self.beside(what));
        [fence, waiters, holders, held, self.beside(&format!("mark:{id}"))]
    }

    /// What scripts with courtesy touch besides.
    pub(super) fn handoffs(&self) -> String {
        format!("{}{HANDOFFS}", self.beside)
    }

    /// Where all of them are in a cluster; `None` if the name has braces that tear them apart.
    pub(super) fn slot(&self) -> Option<u16> {
        let slot_of_all = slot(self.lock());
        (slot(&self.fence()) == slot_of_all).then_some(slot_of_all)
    }

    /// The name whose lock is this key, unless the key stands beside another name's.
    pub(super) fn name_of_lock(prefix: &str, key: &str) -> Option<Name> {
        let name = key.strip_prefix(prefix)?;
        let beside = |what: &str| key.starts_with('{') && key.contains(what);
        let is_beside = beside(":fence") || beside(MARK) || beside(HANDOFFS);
        if is_beside { None } else { name.parse().ok() }
    }

    /// The name whose cell is this key.
    pub(super) fn name_of_cell(prefix: &str, key: &str) -> Option<Name> {
        Self::name_beside(prefix, key, ":cell")
    }

    /// The name that a change of this key concerns.
    pub(super) fn name_of(prefix: &str, key: &str) -> Option<Name> {
        let beside = ENDS.iter().find_map(|end| Self::name_beside(prefix, key, end));
        let marked = || key.rfind(MARK).and_then(|at| Self::name_beside(prefix, key, &key[at..]));
        beside.or_else(marked).or_else(|| key.strip_prefix(prefix)?.parse().ok())
    }

    /// The name beside whose lock this key stands, if it ends so.
    fn name_beside(prefix: &str, key: &str, end: &str) -> Option<Name> {
        let beside = key.strip_suffix(end)?;
        let bare = beside.strip_prefix('{').and_then(|lock| lock.strip_suffix('}'));
        let tagged = beside.split_once("}:").map(|(_, lock)| lock);
        let astray = beside.strip_prefix("{}");
        [bare, tagged, astray].into_iter().flatten().find_map(|lock| {
            let name = lock.strip_prefix(prefix)?.parse().ok()?;
            (Self::new(prefix, &name).beside == beside).then_some(name)
        })
    }

    /// What all keys of all names that begin like this begin with, and few others. None of them
    /// begins with another; none at all: every key may be one.
    pub(super) fn begin_with(prefix: &str, begin: &str) -> Vec<String> {
        let locks = format!("{prefix}{begin}");
        let beside = match tag(&locks) {
            Some(tag) => format!("{{{tag}}}:{locks}"),
            // The names may have any tag.
            None => "{".to_owned(),
        };
        match locks.is_empty() {
            true => Vec::new(),
            false if locks.starts_with(&beside) => vec![beside],
            false if beside.starts_with(&locks) => vec![locks],
            false => vec![locks, beside],
        }
    }
}

/// How long those live who are not heard of: a waiter's place, `q`, and the first lease of a lock
/// that was handed over, `f`. Always q < f ≤ ttl.
#[derive(Clone, Copy, Debug)]
pub(super) struct Leases {
    pub(super) place: Duration,
    pub(super) first: Duration,
}

impl Leases {
    /// Those of a claim with this ttl, where no first lease is longer than `longest`.
    pub(super) fn new(longest: Duration, ttl: Duration) -> Self {
        let place = longest.min(ttl) / 2;
        Self { place, first: place * 2 }
    }
}

/// `q|f|ttl|mode|take|limit|floor|inbox|note`, as `common.lua` reads it.
pub(super) fn written(claim: &Claim, leases: Leases, clock_floor: u64, inbox: &str) -> String {
    let (mode, take, limit) = match claim.mode {
        Mode::Exclusive => ('x', 0, 0),
        Mode::Shared => ('s', 0, 0),
        Mode::Permits { take, limit } => ('p', take, limit),
    };
    let floor = match claim.floor {
        Some(exact) => format!("!{exact}"),
        None => clock_floor.to_string(),
    };
    let (q, f) = (leases.place.as_millis(), leases.first.as_millis());
    let (ttl, note) = (claim.ttl.as_millis(), written_note(&claim.note, inbox));
    format!("{q}|{f}|{ttl}|{mode}|{take}|{limit}|{floor}|{inbox}|{note}")
}

/// The value of a mutex that was just taken: `id:token:flag:ttl:note`, its token not written yet.
pub(super) fn write_value(to: &mut String, id: ClaimId, ttl: Duration, note: &Note, inbox: &str) {
    // Written for every lock that is taken: without the detours of formatting.
    let _ = write!(to, "{id}::0:{}:{inbox}|", ttl.as_millis());
    to.extend(note.by.chars().map(|c| if c == '|' { '/' } else { c }));
    to.push('|');
    to.push_str(&note.text);
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
pub(super) fn grant(token: Token, valid_until: Moment) -> Grant {
    Grant { token, valid_until, key: Vec::new() }
}

/// A grant whose value may still be as it was written, without the token: it is kept here.
pub(super) fn fresh_grant(token: Token, valid_until: Moment) -> Grant {
    Grant { key: token.get().to_be_bytes().to_vec(), ..grant(token, valid_until) }
}

/// Whether this token was granted together with the value that [`write_value`] writes.
pub(super) fn is_fresh(grant: &Grant) -> bool {
    grant.key == grant.token.get().to_be_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_keys_of_a_name_share_its_slot() {
        let keys = |name: &str| Keys::new("lockset:", &name.parse().unwrap());
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
    fn keys_beside_a_name_are_not_taken_for_names() {
        for prefix in ["lockset:", ""] {
            for name in ["jobs/42", "{user}/42", "a}b", "}:{"] {
                let name: Name = name.parse().unwrap();
                let keys = Keys::new(prefix, &name);
                let (fence, mark) = (keys.fence(), keys.others(ClaimId::from_bits(7))[4].clone());
                assert_eq!(Keys::name_of_lock(prefix, keys.lock()), Some(name.clone()));
                assert_eq!(Keys::name_of_lock(prefix, &fence), None, "{fence}");
                assert_eq!(Keys::name_of_lock(prefix, &mark), None, "{mark}");
                assert_eq!(Keys::name_of_lock(prefix, &keys.handoffs()), None);
                assert_eq!(Keys::name_of_cell(prefix, &keys.cell()), Some(name));
            }
        }
    }

    /// A change of any key of a name is a change of that name, and is told to whoever asks for the
    /// name or for what it begins with.
    #[test]
    fn every_key_of_a_name_is_tracked_and_known() {
        let names = ["jobs/42", "{user}/42", "jobs/{user}/42", "a}b", "}:{", "{", "{}", "a:queue"];
        for prefix in ["lockset:", "", "{all}:", "{", "x{"] {
            for name in names {
                let name: Name = name.parse().unwrap();
                let keys = Keys::new(prefix, &name);
                let others = keys.others(ClaimId::from_bits(7));
                let lock = keys.lock().to_owned();
                let all = [&[lock, keys.queue(), keys.cell(), keys.handoffs()], &others[..]];
                for key in all.concat() {
                    assert_eq!(Keys::name_of(prefix, &key), Some(name.clone()), "{prefix} {key}");
                    let begins = name.as_str().char_indices().map(|(at, _)| &name.as_str()[..at]);
                    for begin in begins.chain([name.as_str()]) {
                        let tracked = Keys::begin_with(prefix, begin);
                        let is_tracked = tracked.iter().any(|begin| key.starts_with(begin));
                        assert!(is_tracked || tracked.is_empty(), "{key} by {tracked:?}");
                    }
                }
            }
        }
        assert_eq!(Keys::name_of("lockset:", "other"), None);
        assert_eq!(Keys::begin_with("lockset:", "jobs/"), ["lockset:jobs/", "{"]);
        assert_eq!(Keys::begin_with("lockset:", "{a}/"), ["lockset:{a}/", "{a}:lockset:{a}/"]);
        assert_eq!(Keys::begin_with("{", "a"), ["{"]);
        assert_eq!(Keys::begin_with("{a}:", ""), ["{a}:"]);
        assert!(Keys::begin_with("", "").is_empty());
    }

    /// What `docs/redis-handoff.md` rests on, from the shortest ttl to the longest.
    #[test]
    fn leases_keep_their_order() {
        let millis = [200, 201, 333, 1_000, 9_999, 10_000, 10_001, 30_000, 600_000, 604_800_000];
        for ttl in millis.map(Duration::from_millis) {
            let Leases { place: q, first: f } = Leases::new(Duration::from_secs(10), ttl);
            assert!(q < f && f <= ttl, "q < f <= ttl: {q:?} {f:?} {ttl:?}");
            // They travel in whole milliseconds.
            assert!(q.as_millis() < f.as_millis() && f.as_millis() <= ttl.as_millis(), "{ttl:?}");
            // A heartbeat may be lost and the next one late, and the place still lives.
            assert!(q / 3 >= Duration::from_millis(30), "time between heartbeats: {ttl:?}");
            assert!(ttl > Duration::from_secs(10) || f >= ttl - Duration::from_millis(1));
            let shorter = Leases::new(super::super::FIRST_LEASES.0, ttl);
            assert!(shorter.place < shorter.first && shorter.first <= f, "{shorter:?}");
            assert!(shorter.place / 3 >= Duration::from_millis(30), "{shorter:?}");
        }
    }

    #[test]
    fn notes_survive_being_written() {
        let note = Note { by: "7@host".into(), text: "a|b: c".into() };
        assert_eq!(read_note(&written_note(&note, "inbox")), note);
    }
}
