//! What is known of a lock: who holds it, who waits for it, and its cell.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::name::{Name, Note};
use crate::token::Token;

/// Everything that is known about one name at one moment.
#[derive(Clone, Debug, Serialize)]
pub struct LockState {
    /// The name.
    pub name: Name,
    /// The holders.
    pub holders: Vec<Holder>,
    /// The waiters, in queue order.
    pub waiters: Vec<Waiter>,
    /// The greatest token given so far, if the engine stores it.
    pub fence: Option<Token>,
    /// Its cell, if it has one.
    #[serde(skip)]
    pub cell: Option<Cell>,
}

impl LockState {
    /// The state of an unused name.
    pub fn free(name: Name) -> Self {
        Self { name, holders: Vec::new(), waiters: Vec::new(), fence: None, cell: None }
    }

    /// Whether it is held or waited for, or has a cell: then a listing shows it.
    pub fn is_used(&self) -> bool {
        !self.holders.is_empty() || !self.waiters.is_empty() || self.cell.is_some()
    }
}

/// A holder of a lock.
#[derive(Clone, Debug, Serialize)]
pub struct Holder {
    /// The claim; `None` for a lock of another library.
    pub claim: Option<ClaimId>,
    /// Its token, where it has one.
    pub token: Option<Token>,
    /// Its mode.
    pub mode: Mode,
    /// Its note.
    pub note: Note,
    /// How much of its lease is left.
    #[serde(rename = "left_ms", serialize_with = "as_millis")]
    pub left: Duration,
    /// An operator revoked the lock; the lease will not be renewed.
    pub revoked: bool,
}

/// A waiter for a lock.
#[derive(Clone, Debug, Serialize)]
pub struct Waiter {
    /// The claim.
    pub claim: ClaimId,
    /// Its mode.
    pub mode: Mode,
    /// Its note.
    pub note: Note,
}

fn as_millis<S: serde::Serializer>(span: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(u64::try_from(span.as_millis()).unwrap_or(u64::MAX))
}

/// A small piece of state beside a name, changed by compare-and-set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cell {
    /// Changes with every write and never returns.
    pub version: Version,
    /// What was written.
    pub value: Vec<u8>,
}

/// The version of a [`Cell`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u64);

impl Version {
    /// The version of a cell that does not exist.
    pub const ABSENT: Version = Version(0);
}

/// How a claim shares its lock with others.
///
/// One predicate decides all modes. All claims *before* a claim in the queue, holding or waiting,
/// count as holding. Then an exclusive claim must be alone, a shared claim must meet no exclusive
/// one, and the permits must add up to at most the limit. Strict order and freedom from starvation
/// follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Alone.
    Exclusive,
    /// Together with other shared claims.
    Shared,
    /// Some of a number of permits.
    Permits {
        /// How many this claim takes.
        take: u32,
        /// How many there are.
        limit: u32,
    },
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Mode::Exclusive => f.write_str("exclusive"),
            Mode::Shared => f.write_str("shared"),
            Mode::Permits { take, limit } => write!(f, "{take} of {limit} permits"),
        }
    }
}

/// 120 random bits and a zero byte, new for every acquisition and chosen before the first byte is
/// sent. An engine that makes several attempts at one lock counts them in the last byte.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClaimId(u128);

impl ClaimId {
    /// A fresh id.
    pub fn random() -> Self {
        Self(rand::random::<u128>() << 8)
    }

    /// The id with these bits.
    pub const fn from_bits(bits: u128) -> Self {
        Self(bits)
    }

    /// The id's bits.
    pub const fn to_bits(self) -> u128 {
        self.0
    }
}

impl fmt::Display for ClaimId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for ClaimId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for ClaimId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        // `from_str_radix` also takes a sign.
        let is_hex = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        match u128::from_str_radix(text, 16) {
            Ok(bits) if is_hex => Ok(Self(bits)),
            _ => Err(Error::invalid("claim id", text, "32 hexadecimal digits are needed")),
        }
    }
}

impl Serialize for ClaimId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ClaimId {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_claim_id_is_32_digits(text in "\\PC{0,40}|[0-9a-fA-F+-]{31,33}") {
            if let Ok(id) = text.parse::<ClaimId>() {
                prop_assert_eq!(id.to_string(), text.to_lowercase());
            }
        }
    }
}
