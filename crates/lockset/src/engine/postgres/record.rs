//! What is sent for a claim, and what the server's functions return.

use std::time::Duration;

use tokio_postgres::Row;
use tokio_postgres::types::FromSql;

use super::error::unexpected_reply;
use crate::engine::{Cell, ClaimId, Holder, LockState, Mode, Version, Waiter};
use crate::error::Result;
use crate::name::{Name, Note};
use crate::token::Token;

/// The state of a claim after a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PostgresClaimReply {
    /// Granted by this request, for the full ttl: the token.
    GrantedNow(u64),
    /// Granted before: the token, and what is left of the lease.
    Granted(u64, Duration),
    /// `stamp` is the fence at that time, `left` the rest of the current holder's lease.
    Queued {
        stamp: u64,
        position: u32,
        left: Duration,
    },
    Busy,
    Gone,
    /// In use as a semaphore of this many permits, or as a lock if 0.
    Clash(u64),
}

/// The columns kind, given, stamp, ahead, left_ms, from `first` on; `None` without a kind.
pub(super) fn parse_claim_reply(row: &Row, first: usize) -> Result<Option<PostgresClaimReply>> {
    let Some(kind) = column::<Option<i8>>(row, first)? else { return Ok(None) };
    let number = |index| -> Result<u64> {
        Ok(column::<Option<i64>>(row, first + index)?.and_then(|n| n.try_into().ok()).unwrap_or(0))
    };
    let (given, stamp, left) = (number(1)?, number(2)?, Duration::from_millis(number(4)?));
    Ok(Some(match kind as u8 {
        b'n' => PostgresClaimReply::GrantedNow(given),
        b'g' => PostgresClaimReply::Granted(given, left),
        b'q' => {
            let position = u32::try_from(number(3)?).unwrap_or(u32::MAX);
            PostgresClaimReply::Queued { stamp, position, left }
        }
        b'b' => PostgresClaimReply::Busy,
        b'x' => PostgresClaimReply::Gone,
        b'c' => PostgresClaimReply::Clash(stamp),
        other => return Err(unexpected_reply(&format!("reply {other}"))),
    }))
}

/// Mode, permits to take, and limit, as columns.
pub(super) fn encode_mode(mode: Mode) -> (i8, i32, i32) {
    let number = |n: u32| i32::try_from(n).unwrap_or(i32::MAX);
    match mode {
        Mode::Exclusive => (b'x' as i8, 0, 0),
        Mode::Shared => (b's' as i8, 0, 0),
        Mode::Permits { take, limit } => (b'p' as i8, number(take), number(limit)),
    }
}

fn decode_mode(mode: i8, take: i32, limit: i32) -> Mode {
    let number = |n: i32| u32::try_from(n).unwrap_or(0);
    match mode as u8 {
        b's' => Mode::Shared,
        b'p' => Mode::Permits { take: number(take), limit: number(limit) },
        _ => Mode::Exclusive,
    }
}

/// A time in whole milliseconds, as a column.
pub(super) fn millis(time: Duration) -> i64 {
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX)
}

/// A token as a column.
pub(super) fn encode_token(token: Token) -> i64 {
    i64::try_from(token.get()).unwrap_or(i64::MAX)
}

fn decode_token(token: i64) -> Option<Token> {
    u64::try_from(token).ok().filter(|token| *token > 0).map(Token::new)
}

/// The states in the rows of `inspect`, which are ordered by name.
pub(super) fn parse_states(rows: &[Row]) -> Result<Vec<LockState>> {
    let mut states: Vec<LockState> = Vec::new();
    for row in rows {
        // A name that is not valid was written by another program.
        let Ok(name) = column::<&str>(row, 0)?.parse::<Name>() else { continue };
        if states.last().is_none_or(|last| last.name != name) {
            states.push(LockState::free(name));
        }
        if let Some(state) = states.last_mut() {
            add_row(state, row)?;
        }
    }
    for state in &mut states {
        state.holders.sort_by_key(|holder| holder.token);
    }
    Ok(states)
}

/// Columns: name, kind, id, number, mode, take, lim, left_ms, revoked, signed, note, value.
fn add_row(state: &mut LockState, row: &Row) -> Result<()> {
    let number: i64 = column(row, 3)?;
    match column::<i8>(row, 1)? as u8 {
        b'f' => state.fence = decode_token(number),
        b'c' => {
            let version = Version(u64::try_from(number).unwrap_or(0));
            let value = column::<Option<Vec<u8>>>(row, 11)?.unwrap_or_default();
            state.cell = Some(Cell { version, value });
        }
        kind => {
            let claim = parse_id(column(row, 2)?)?;
            let mode = decode_mode(column(row, 4)?, column(row, 5)?, column(row, 6)?);
            let note = parse_note(row, 9)?;
            if kind == b'w' {
                state.waiters.push(Waiter { claim, mode, note });
                return Ok(());
            }
            state.holders.push(Holder {
                claim: Some(claim),
                token: decode_token(number),
                mode,
                note,
                left: parse_millis(row, 7)?,
                revoked: column(row, 8)?,
            });
        }
    }
    Ok(())
}

/// The holder in a row of `force_release`: id, token, mode, take, lim, left_ms, signed, note.
pub(super) fn parse_former_holder(row: &Row) -> Result<Holder> {
    Ok(Holder {
        claim: Some(parse_id(column(row, 0)?)?),
        token: decode_token(column(row, 1)?),
        mode: decode_mode(column(row, 2)?, column(row, 3)?, column(row, 4)?),
        left: parse_millis(row, 5)?,
        note: parse_note(row, 6)?,
        revoked: true,
    })
}

fn parse_note(row: &Row, first: usize) -> Result<Note> {
    let (by, text): (&str, &str) = (column(row, first)?, column(row, first + 1)?);
    Ok(Note { by: by.into(), text: text.into() })
}

fn parse_millis(row: &Row, index: usize) -> Result<Duration> {
    Ok(Duration::from_millis(u64::try_from(column::<i64>(row, index)?).unwrap_or(0)))
}

/// A claim id as the server writes a `uuid`, or as a message does.
pub(super) fn parse_id(text: &str) -> Result<ClaimId> {
    text.replace('-', "").parse()
}

pub(super) fn column<'a, T: FromSql<'a>>(row: &'a Row, index: usize) -> Result<T> {
    row.try_get(index).map_err(|error| unexpected_reply(&error.to_string()))
}
