//! Names and places: which node stands for which claim, and in which order they stand.
//!
//! The order is that of the layout's other users, to the letter: text is compared, not numbers,
//! because whoever sorts differently next to them makes two holders.

use std::str::FromStr;

use crate::engine::{ClaimId, Mode};
use crate::error::{Error, Result};
use crate::name::Name;

/// The node below the chroot that cells live under. No lock has this name, since a `%` in a name
/// is written `%25`.
const CELLS: &str = "%cells";
const PERMITS: &str = "__PERM__";

/// Whose nodes ours stand among.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Layout {
    /// Apache Curator's `InterProcessMutex`: an exclusive lock is a node `_c_<uuid>-lock-<number>`.
    #[default]
    Curator,
    /// Apache Curator's `InterProcessReadWriteLock`: the same, but an exclusive lock is a node
    /// `_c_<uuid>-__WRIT__<number>`.
    CuratorRw,
    /// kazoo's `Lock`, `WriteLock` and `ReadLock`.
    Kazoo,
}

impl FromStr for Layout {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "curator" => Ok(Self::Curator),
            "curator-rw" => Ok(Self::CuratorRw),
            "kazoo" => Ok(Self::Kazoo),
            _ => Err(Error::invalid("layout", text, "there are curator, curator-rw and kazoo")),
        }
    }
}

impl Layout {
    /// What the name of a claim's node begins with; the server adds the number.
    pub(super) fn node_prefix(self, id: ClaimId, mode: Mode) -> String {
        let marker = match (self, mode) {
            (_, Mode::Permits { take, limit }) => format!("{take}.{limit}{PERMITS}"),
            (Layout::Curator, Mode::Exclusive) => "lock-".to_owned(),
            (Layout::CuratorRw, Mode::Exclusive) => "__WRIT__".to_owned(),
            (Layout::Curator | Layout::CuratorRw, Mode::Shared) => "__READ__".to_owned(),
            (Layout::Kazoo, Mode::Exclusive) => "__lock__".to_owned(),
            (Layout::Kazoo, Mode::Shared) => "__rlock__".to_owned(),
        };
        match (self, mode) {
            (Layout::Kazoo, Mode::Permits { .. }) => format!("{id}-{marker}"),
            (Layout::Kazoo, _) => format!("{id}{marker}"),
            _ => format!("{}{marker}", protection(id)),
        }
    }

    /// Whether a node with this name was made for this claim.
    pub(super) fn bears(self, node: &str, id: ClaimId) -> bool {
        match self {
            Layout::Kazoo => node.starts_with(&id.to_string()),
            _ => node.starts_with(&protection(id)),
        }
    }

    /// Whether lock parents are containers, which the server removes when they are empty.
    pub(super) fn has_containers(self) -> bool {
        self != Layout::Kazoo
    }

    /// A child of a lock's parent, as it stands in the queue; `None` if it cannot be a claim.
    pub(super) fn place(self, node: &str) -> Option<Place> {
        let (key, mode) = self.key(node)?;
        Some(Place { key: key.to_owned(), node: node.to_owned(), mode })
    }

    /// What decides the order of a claim, and its mode. A node without a number that the server
    /// gave is no claim, such as the children `locks` and `leases` of Curator's semaphores.
    fn key(self, node: &str) -> Option<(&str, ModeByName)> {
        match self {
            Layout::Kazoo => kazoo_key(node),
            Layout::Curator | Layout::CuratorRw => {
                Some(curator_key(node)).filter(|(key, _)| number_of(key).is_some())
            }
        }
    }

    /// All who hold or wait, in their order.
    pub(super) fn queue(self, children: &[String]) -> Vec<Place> {
        let mut queue: Vec<Place> = children.iter().filter_map(|child| self.place(child)).collect();
        queue.sort();
        queue
    }

    /// Whether a node could be somebody's claim, and not the parent of other locks.
    pub(super) fn is_claim(self, node: &str) -> bool {
        self.key(node).is_some()
    }

    /// The claim that a node bears in its name.
    pub(super) fn claim_of(self, node: &str) -> Option<ClaimId> {
        let hex = match self {
            Layout::Kazoo => node.get(..32)?.to_owned(),
            _ => node.strip_prefix("_c_")?.get(..36)?.replace('-', ""),
        };
        hex.parse().ok()
    }
}

/// One claim's place in the queue of a name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    /// What decides the order.
    key: String,
    pub(super) node: String,
    pub(super) mode: ModeByName,
}

impl Place {
    /// Its number, as the server wrote it.
    pub(super) fn number(&self) -> &str {
        &self.key
    }
}

/// How a claim shares, as far as the name of its node says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ModeByName {
    Exclusive,
    Shared,
    Permits { take: u32, limit: u32 },
}

impl From<ModeByName> for Mode {
    fn from(mode: ModeByName) -> Mode {
        match mode {
            ModeByName::Exclusive => Mode::Exclusive,
            ModeByName::Shared => Mode::Shared,
            ModeByName::Permits { take, limit } => Mode::Permits { take, limit },
        }
    }
}

/// The number that the server gave a node.
pub(super) fn number_of(node: &str) -> Option<i32> {
    let digits = node.len().checked_sub(10)?;
    let start = match node.as_bytes().get(digits.wrapping_sub(1)) {
        // `…lock--2147483648`: one dash is the marker's, one the number's.
        Some(b'-') if node[..digits].ends_with("--") || node[..digits].ends_with("__-") => {
            digits - 1
        }
        Some(b'-') if digits == 1 => 0,
        _ => digits,
    };
    node.get(start..)?.parse().ok()
}

/// Curator: what follows the last marker, otherwise the whole name.
fn curator_key(node: &str) -> (&str, ModeByName) {
    if let Some((_, key)) = node.rsplit_once("lock-") {
        return (key, ModeByName::Exclusive);
    }
    if let Some((_, key)) = node.rsplit_once("__READ__") {
        return (key, ModeByName::Shared);
    }
    if let Some((_, key)) = node.rsplit_once("__WRIT__") {
        return (key, ModeByName::Exclusive);
    }
    match node.rsplit_once(PERMITS) {
        Some((head, key)) => (key, permits(head).unwrap_or(ModeByName::Exclusive)),
        None => (node, ModeByName::Exclusive),
    }
}

/// kazoo: only what ends with a marker and a number counts.
fn kazoo_key(node: &str) -> Option<(&str, ModeByName)> {
    let (head, key) = node.rsplit_once("__")?;
    let digits = key.strip_prefix('-').unwrap_or(key);
    if digits.len() != 10 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    match head.rsplit_once("__")? {
        (_, "lock") => Some((key, ModeByName::Exclusive)),
        (_, "rlock") => Some((key, ModeByName::Shared)),
        (head, "PERM") => Some((key, permits(head)?)),
        _ => None,
    }
}

/// `…-<take>.<limit>`.
fn permits(head: &str) -> Option<ModeByName> {
    let (take, limit) = head.rsplit_once('-')?.1.split_once('.')?;
    Some(ModeByName::Permits { take: take.parse().ok()?, limit: limit.parse().ok()? })
}

/// Curator's protection of a create whose answer is lost: `_c_<uuid>-`.
fn protection(id: ClaimId) -> String {
    let hex = id.to_string();
    let (a, rest) = hex.split_at(8);
    let (b, rest) = rest.split_at(4);
    let (c, rest) = rest.split_at(4);
    let (d, e) = rest.split_at(4);
    format!("_c_{a}-{b}-{c}-{d}-{e}-")
}

/// From names to paths and back.
#[derive(Clone, Debug)]
pub(super) struct Paths {
    pub(super) chroot: String,
    /// Names are paths as they stand: for locks that others take, too.
    pub(super) raw: bool,
}

impl Paths {
    /// The node whose children are the claims of `name`.
    pub(super) fn lock(&self, name: &Name) -> Result<String> {
        if !self.raw {
            return Ok(format!("{}/{}", self.chroot, escaped(name.as_str())));
        }
        let text = name.as_str();
        let why = match text.chars().any(must_be_escaped) {
            true => "it has a character that no ZooKeeper path may have; use it without names=raw",
            false if text.split('/').next() == Some(CELLS) => {
                "cells live there; use it without names=raw"
            }
            false => return Ok(format!("{}/{text}", self.chroot)),
        };
        Err(Error::invalid("lock name", text, why))
    }

    pub(super) fn cells(&self) -> String {
        format!("{}/{CELLS}", self.chroot)
    }

    pub(super) fn cell(&self, name: &Name) -> String {
        format!("{}/{CELLS}/{}", self.chroot, escaped(name.as_str()))
    }

    /// The name whose cell is this child of the cells' node.
    pub(super) fn name_of_cell(&self, node: &str) -> Option<Name> {
        unescaped(node)?.parse().ok().filter(|name: &Name| escaped(name.as_str()) == node)
    }

    /// The name whose lock has this parent, given below the chroot.
    pub(super) fn name_of_lock(&self, below: &str) -> Option<Name> {
        if self.raw {
            return below.parse().ok().filter(|name| self.lock(name).is_ok());
        }
        // The same text: one name has one node.
        unescaped(below)?.parse().ok().filter(|name: &Name| escaped(name.as_str()) == below)
    }

    /// The name that a change at `path` concerns.
    pub(super) fn name_at(&self, path: &str, layout: Layout) -> Option<Name> {
        let below = path.strip_prefix(&self.chroot)?.strip_prefix('/')?;
        let (first, rest) = below.split_once('/').unwrap_or((below, ""));
        if first == CELLS {
            return self.name_of_cell(rest.split('/').next()?);
        }
        if !self.raw {
            return self.name_of_lock(first);
        }
        let (parent, last) = below.rsplit_once('/')?;
        layout.is_claim(last).then(|| self.name_of_lock(parent)).flatten()
    }

    pub(super) fn is_cells(&self, child: &str) -> bool {
        child == CELLS
    }
}

/// Names become one segment of a path, so that `a` and `a/b` never meet.
pub(super) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c == '/' || c == '%' || must_be_escaped(c) {
            let mut bytes = [0; 4];
            for byte in c.encode_utf8(&mut bytes).bytes() {
                out.push_str(&format!("%{byte:02X}"));
            }
        } else {
            out.push(c);
        }
    }
    out
}

/// What ZooKeeper refuses in a path: private characters, some specials, and whatever Java writes
/// with surrogates.
fn must_be_escaped(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{E000}'..='\u{F8FF}' | '\u{FFF0}'..='\u{FFFF}')
        || c > '\u{FFFF}'
}

/// The text that was written with `%XX`.
pub(super) fn unescaped(text: &str) -> Option<String> {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        out.push(match byte {
            b'%' => {
                let (high, low) = (bytes.next()? as char, bytes.next()? as char);
                u8::try_from(high.to_digit(16)? * 16 + low.to_digit(16)?).ok()?
            }
            byte => byte,
        });
    }
    String::from_utf8(out).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0123456789abcdef0123456789abcdef";

    fn id() -> ClaimId {
        ID.parse().unwrap()
    }

    fn order(layout: Layout, children: &[&str]) -> Vec<String> {
        let children: Vec<String> = children.iter().map(|child| (*child).to_owned()).collect();
        layout.queue(&children).into_iter().map(|place| place.node).collect()
    }

    #[test]
    fn nodes_are_named_as_in_curator_and_kazoo() {
        let uuid = "_c_01234567-89ab-cdef-0123-456789abcdef-";
        let permits = Mode::Permits { take: 2, limit: 5 };
        for (layout, mode, expected) in [
            (Layout::Curator, Mode::Exclusive, format!("{uuid}lock-")),
            (Layout::Curator, Mode::Shared, format!("{uuid}__READ__")),
            (Layout::Curator, permits, format!("{uuid}2.5__PERM__")),
            (Layout::CuratorRw, Mode::Exclusive, format!("{uuid}__WRIT__")),
            (Layout::CuratorRw, Mode::Shared, format!("{uuid}__READ__")),
            (Layout::Kazoo, Mode::Exclusive, format!("{ID}__lock__")),
            (Layout::Kazoo, Mode::Shared, format!("{ID}__rlock__")),
            (Layout::Kazoo, permits, format!("{ID}-2.5__PERM__")),
        ] {
            let prefix = layout.node_prefix(id(), mode);
            assert_eq!(prefix, expected);
            for number in ["0000000007", "2147483647", "-2147483648"] {
                let node = format!("{prefix}{number}");
                assert!(layout.bears(&node, id()) && layout.is_claim(&node), "{node}");
                assert_eq!(layout.claim_of(&node), Some(id()));
                assert_eq!(number_of(&node), number.parse().ok(), "{node}");
                let place = layout.place(&node).unwrap();
                assert_eq!((Mode::from(place.mode), &*place.key), (mode, number), "{node}");
            }
        }
        assert!(Layout::Curator.has_containers() && Layout::CuratorRw.has_containers());
        assert!(!Layout::Kazoo.has_containers());
    }

    #[test]
    fn the_order_is_curators_to_the_letter() {
        // The text after the last `lock-`: a negative number comes first, and the smaller of two
        // negative ones last. What has no marker sorts by its whole name. What has no number is
        // no claim.
        let (a, b) = ("_c_ffffffff-ffff-ffff-ffff-ffffffffffff", "_c_00000000-lock-clock");
        let children = [
            format!("{a}-lock-0000000010"),
            format!("{b}-lock-0000000009"),
            format!("{a}-lock--2147483648"),
            format!("{b}-lock--2147483647"),
            format!("{a}-lock-2147483647"),
            "lock-0000000003".to_owned(),
            "somebody-0000000001".to_owned(),
            "somebody".to_owned(),
            "locks".to_owned(),
            "leases".to_owned(),
            "!".to_owned(),
            "_c_00000000-lock-".to_owned(),
        ];
        let children: Vec<&str> = children.iter().map(String::as_str).collect();
        let expected = [3, 2, 5, 1, 0, 4, 6].map(|index| children[index].to_owned());
        assert_eq!(order(Layout::Curator, &children), expected);
    }

    #[test]
    fn readers_and_writers_of_curator_stand_in_one_line() {
        let children =
            ["_c_b-__READ__0000000002", "_c_c-__WRIT__0000000001", "_c_a-__READ__0000000001"];
        // A downgraded writer has the number that it had before.
        let expected = [children[2], children[1], children[0]];
        assert_eq!(order(Layout::CuratorRw, &children), expected);
    }

    #[test]
    fn kazoo_counts_only_what_it_would_itself() {
        let children = [
            "b0__lock__0000000002",
            "a0__rlock__0000000001",
            "a0__lock__-2147483648",
            "x__lock__1",
            "_c_b-lock-0000000000",
            "junk",
        ];
        let expected = [children[2], children[1], children[0]];
        assert_eq!(order(Layout::Kazoo, &children), expected);
    }

    #[test]
    fn a_name_is_one_segment_and_comes_back() {
        let paths = Paths { chroot: "/lockset".to_owned(), raw: false };
        for (name, path) in [
            ("a", "/lockset/a"),
            ("a/b", "/lockset/a%2Fb"),
            ("%cells", "/lockset/%25cells"),
            ("a%2Fb", "/lockset/a%252Fb"),
            ("größe 1", "/lockset/größe 1"),
            ("\u{E000}\u{FFFD}😀", "/lockset/%EE%80%80%EF%BF%BD%F0%9F%98%80"),
        ] {
            let name: Name = name.parse().unwrap();
            assert_eq!(paths.lock(&name).unwrap(), path);
            assert_eq!(
                paths.name_of_lock(path.strip_prefix("/lockset/").unwrap()),
                Some(name.clone())
            );
            let node = format!("{path}/_c_x-lock-0000000001");
            assert_eq!(paths.name_at(&node, Layout::Curator), Some(name.clone()));
            let cell = format!("{}/generation", paths.cell(&name));
            assert_eq!(paths.name_at(&cell, Layout::Curator), Some(name));
        }
        assert_eq!(paths.name_at("/lockset/%cells", Layout::Curator), None);
        assert_eq!(paths.name_of_lock("a%2fb"), None, "another spelling is another node");
        assert_eq!(paths.name_at("/locksets/a", Layout::Curator), None);
    }

    #[test]
    fn raw_names_are_paths_for_others() {
        let paths = Paths { chroot: "/shared".to_owned(), raw: true };
        let name = |text: &str| text.parse::<Name>().unwrap();
        assert_eq!(paths.lock(&name("jobs/42")).unwrap(), "/shared/jobs/42");
        assert_eq!(
            paths.name_at("/shared/jobs/42/_c_x-lock-0000000001", Layout::Curator),
            Some(name("jobs/42"))
        );
        assert_eq!(paths.name_at("/shared/jobs/42", Layout::Curator), None);
        assert!(paths.lock(&name("%cells/x")).is_err() && paths.lock(&name("😀")).is_err());
    }
}
