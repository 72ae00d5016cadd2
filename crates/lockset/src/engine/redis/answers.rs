//! What the scripts answer, read back.

use std::time::Duration;

use redis::Value;

use super::keys::read_note;
use super::link::{failed, told};
use crate::engine::{Cell, ClaimId, Holder, LockState, Mode, Version, Waiter};
use crate::error::{Error, Result};
use crate::name::Name;
use crate::token::Token;

/// How a claim stands after a request.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Standing {
    GrantedNow(u64),
    Granted(u64, Duration),
    /// `left` is what is left of the lease before us; a foreign lock may have none, and its end is
    /// not told by a push.
    Queued {
        stamp: u64,
        place: u32,
        left: Option<Duration>,
        is_foreign: bool,
    },
    Busy,
    Gone,
    Clash(String),
}

/// The answer of `take.lua` and `heartbeat.lua`.
pub(super) fn standing(value: &Value) -> Result<Standing> {
    if let Value::Int(token) = value {
        return Ok(Standing::GrantedNow(u64::try_from(*token).unwrap_or(0)));
    }
    let parts = list(value)?;
    Ok(match word(parts, 0)?.as_str() {
        "granted-now" => Standing::GrantedNow(number(parts, 1)?),
        "granted" => Standing::Granted(number(parts, 1)?, millis(parts, 2)?),
        "queued" => Standing::Queued {
            stamp: number(parts, 1)?,
            place: u32::try_from(number(parts, 2)?).unwrap_or(u32::MAX),
            left: lease_left(parts, 3)?,
            is_foreign: number(parts, 4)? == 1,
        },
        "busy" => Standing::Busy,
        "gone" => Standing::Gone,
        "clash" => Standing::Clash(word(parts, 1)?),
        "failed" => return Err(told(&word(parts, 1)?)),
        other => return Err(unexpected(other)),
    })
}

/// The answer of `look.lua`.
pub(super) fn look_state(name: &Name, value: &Value) -> Result<LockState> {
    let parts = list(value)?;
    let mut state = LockState::free(name.clone());
    let (lock, left) = (word(parts, 0)?, millis(parts, 1)?);
    let fence = number(parts, 2)?;
    state.fence = (fence > 0).then_some(Token::new(fence));
    if !lock.is_empty() && !lock.starts_with('=') {
        state.holders.push(exclusive(&lock, state.fence, left));
    }
    let version = number(parts, 3)?;
    if version > 0 {
        state.cell = Some(Cell { version: Version(version), value: bytes(parts, 4)?.to_vec() });
    }
    state.holders.extend(others(list(part(parts, 5)?)?, &lock)?);
    state.holders.sort_by_key(|holder| holder.token);
    for waiter in list(part(parts, 6)?)?.chunks_exact(2) {
        let (id, record) = (word(waiter, 0)?, word(waiter, 1)?);
        // deadline|q|f|ttl|mode|take|limit|floor|inbox|note
        let fields: Vec<&str> = record.splitn(10, '|').collect();
        if let ([_, _, _, _, mode, take, limit, _, _, note], Ok(claim)) = (&fields[..], id.parse())
        {
            let mode = read_mode(mode, take, limit);
            state.waiters.push(Waiter { claim, mode, note: read_note(note) });
        }
    }
    Ok(state)
}

/// The answer of `break.lua`: who held.
pub(super) fn broken(value: &Value) -> Result<Vec<Holder>> {
    let parts = list(value)?;
    let (lock, token, left) = (word(parts, 0)?, word(parts, 1)?.parse().ok(), millis(parts, 2)?);
    let mut holders = others(list(part(parts, 3)?)?, &lock)?;
    if !lock.is_empty() && !lock.starts_with('=') {
        holders.push(exclusive(&lock, token, left));
    }
    Ok(holders)
}

/// The holder in `id:token:flag:ttl:note`; without a token it is what the fence says. A value of
/// another form is somebody else's lock.
fn exclusive(value: &str, fence: Option<Token>, left: Duration) -> Holder {
    let mut fields = value.splitn(5, ':');
    let id = fields.next().and_then(|id| id.parse().ok());
    let token: Option<Token> = fields.next().and_then(|token| token.parse().ok()).or(fence);
    let (flag, note) = (fields.next(), fields.nth(1));
    let id = id.filter(|_| note.is_some());
    let token = token.filter(|token| id.is_some() && token.get() > 0);
    let mut note = read_note(note.unwrap_or_default());
    if id.is_none() {
        note.text = "a lock that is not lockset's".into();
    }
    let revoked = flag == Some("1");
    Holder { claim: id, token, mode: Mode::Exclusive, note, left, revoked }
}

/// Readers and permits: id, `token|flag|mode|take|ttl|note`, what is left. The limit is in the
/// lock's own value.
fn others(parts: &[Value], lock: &str) -> Result<Vec<Holder>> {
    let limit = lock.strip_prefix("=p:").unwrap_or("0");
    let mut holders = Vec::new();
    for holder in parts.chunks_exact(3) {
        let (id, record, left) = (word(holder, 0)?, word(holder, 1)?, millis(holder, 2)?);
        let fields: Vec<&str> = record.splitn(6, '|').collect();
        if let ([token, flag, mode, take, _, note], Ok(claim)) =
            (&fields[..], id.parse::<ClaimId>())
        {
            let (note, mode) = (read_note(note), read_mode(mode, take, limit));
            let (token, revoked) = (token.parse().ok(), *flag == "1");
            holders.push(Holder { claim: Some(claim), token, mode, note, left, revoked });
        }
    }
    Ok(holders)
}

fn read_mode(mode: &str, take: &str, limit: &str) -> Mode {
    let number = |text: &str| text.parse().unwrap_or(0);
    match mode {
        "s" => Mode::Shared,
        "p" => Mode::Permits { take: number(take), limit: number(limit) },
        _ => Mode::Exclusive,
    }
}

pub(super) fn list(value: &Value) -> Result<&[Value]> {
    match value {
        Value::Array(parts) => Ok(parts),
        other => Err(unexpected(&format!("{other:?}"))),
    }
}

fn part(parts: &[Value], index: usize) -> Result<&Value> {
    parts.get(index).ok_or_else(|| unexpected("too short an answer"))
}

pub(super) fn word(parts: &[Value], index: usize) -> Result<String> {
    Ok(String::from_utf8_lossy(bytes(parts, index)?).into_owned())
}

pub(super) fn bytes(parts: &[Value], index: usize) -> Result<&[u8]> {
    match part(parts, index)? {
        Value::BulkString(bytes) => Ok(bytes),
        Value::SimpleString(text) => Ok(text.as_bytes()),
        other => Err(unexpected(&format!("{other:?}"))),
    }
}

pub(super) fn number(parts: &[Value], index: usize) -> Result<u64> {
    match part(parts, index)? {
        Value::Int(number) => Ok(u64::try_from(*number).unwrap_or(0)),
        _ => word(parts, index)?.parse().map_err(|_| unexpected("no number")),
    }
}

/// What PTTL says, unless the key has no end or is not there.
fn lease_left(parts: &[Value], index: usize) -> Result<Option<Duration>> {
    match part(parts, index)? {
        Value::Int(left) if *left < 0 => Ok(None),
        _ => millis(parts, index).map(Some),
    }
}

/// What is left of a lease; a key without one has none.
pub(super) fn millis(parts: &[Value], index: usize) -> Result<Duration> {
    number(parts, index).map(Duration::from_millis)
}

pub(super) fn unexpected(what: &str) -> Error {
    failed(format!("the server answered something unexpected: {what}"), false, None)
}
