//! Rows of the file as Rust values, and back.

use std::borrow::Cow;

use rusqlite::Row;
use rusqlite::types::Type;

use super::store::SqlResult;
use crate::engine::{ClaimId, Grant, Mode};
use crate::error::Error;

/// The columns that [`ClaimRow::read`] reads, of the rows that the rest of the statement selects.
macro_rules! select_claims {
    ($which:literal) => {
        concat!(
            "SELECT seq, token, id, mode, ttl, floor, expires, detached, process, inbox, seen, ",
            "EXISTS (SELECT 1 FROM watcher) FROM lock ",
            $which
        )
    };
}

pub(super) use select_claims;

/// One claim, as far as other claims depend on it.
pub(super) struct ClaimRow {
    pub(super) seq: i64,
    pub(super) token: u64,
    pub(super) id: ClaimId,
    pub(super) mode: Mode,
    pub(super) ttl: u64,
    pub(super) floor: Option<u64>,
    pub(super) expires: Option<u64>,
    pub(super) detached: bool,
    pub(super) process: String,
    pub(super) inbox: String,
    pub(super) seen: Option<u64>,
}

impl ClaimRow {
    pub(super) fn read(row: &Row<'_>) -> SqlResult<Self> {
        Ok(Self {
            seq: row.get(0)?,
            token: unsigned(row, 1)?,
            id: id_at(row, 2)?,
            mode: mode_at(row, 3)?,
            ttl: unsigned(row, 4)?,
            floor: optional(row, 5)?,
            expires: optional(row, 6)?,
            detached: row.get(7)?,
            process: row.get(8)?,
            inbox: row.get(9)?,
            seen: optional(row, 10)?,
        })
    }
}

/// The row that a grant names. A key of another engine matches no row.
pub(super) fn seq_of(grant: &Grant) -> i64 {
    grant.key.as_slice().try_into().map_or(-1, i64::from_be_bytes)
}

/// SQLite's integers are signed.
pub(super) fn int(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

pub(super) fn unsigned(row: &Row<'_>, column: usize) -> SqlResult<u64> {
    row.get::<_, i64>(column).map(|value| u64::try_from(value).unwrap_or(0))
}

pub(super) fn optional(row: &Row<'_>, column: usize) -> SqlResult<Option<u64>> {
    Ok(row.get::<_, Option<i64>>(column)?.map(|value| u64::try_from(value).unwrap_or(0)))
}

pub(super) fn id_at(row: &Row<'_>, column: usize) -> SqlResult<ClaimId> {
    row.get(column).map(|bytes| ClaimId::from_bits(u128::from_be_bytes(bytes)))
}

pub(super) fn written(mode: Mode) -> Cow<'static, str> {
    match mode {
        Mode::Exclusive => "exclusive".into(),
        Mode::Shared => "shared".into(),
        Mode::Permits { take, limit } => format!("{take}/{limit}").into(),
    }
}

pub(super) fn mode_at(row: &Row<'_>, column: usize) -> SqlResult<Mode> {
    let permits = |text: &str| {
        let (take, limit) = text.split_once('/')?;
        Some(Mode::Permits { take: take.parse().ok()?, limit: limit.parse().ok()? })
    };
    match row.get_ref(column)?.as_str()? {
        "exclusive" => Ok(Mode::Exclusive),
        "shared" => Ok(Mode::Shared),
        other => permits(other).ok_or_else(|| {
            let error = Error::invalid("mode", other, "it is none of this version");
            unreadable(column, Type::Text, error)
        }),
    }
}

pub(super) fn unreadable(column: usize, kind: Type, error: Error) -> rusqlite::Error {
    rusqlite::Error::FromSqlConversionFailure(column, kind, Box::new(error))
}
