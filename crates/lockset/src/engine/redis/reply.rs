//! Parsing what the scripts return.

use std::time::Duration;

use redis::Value;

use super::error::{error_from_text, unreachable_error};
use super::record::{decode_exclusive, decode_shared, decode_waiter};
use crate::engine::{Cell, Holder, LockState, Swap, Version};
use crate::error::{Error, Result};
use crate::name::Name;
use crate::token::Token;

/// The state of a claim after a request.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ClaimReply {
    /// Granted by this request, for the full ttl: the token.
    GrantedNow(u64),
    /// Granted before: the token, and what is left of the lease.
    Granted(u64, Duration),
    /// `stamp` is the fence at that time. `left` is the rest of the current holder's lease; a
    /// foreign lock may have none, and its release is not announced by a message.
    Queued {
        stamp: u64,
        position: u32,
        left: Option<Duration>,
        is_foreign: bool,
    },
    Busy,
    Gone,
    Clash(String),
}

/// Parses one reply of the acquire, handover and heartbeat scripts.
pub(super) fn parse_claim_reply(value: &Value) -> Result<ClaimReply> {
    if let Value::Int(token) = value {
        return Ok(ClaimReply::GrantedNow(u64::try_from(*token).unwrap_or(0)));
    }
    let parts = array(value)?;
    Ok(match text_at(parts, 0)?.as_str() {
        "granted-now" => ClaimReply::GrantedNow(number_at(parts, 1)?),
        "granted" => ClaimReply::Granted(number_at(parts, 1)?, millis_at(parts, 2)?),
        "queued" => ClaimReply::Queued {
            stamp: number_at(parts, 1)?,
            position: u32::try_from(number_at(parts, 2)?).unwrap_or(u32::MAX),
            left: lease_left(parts, 3)?,
            is_foreign: number_at(parts, 4)? == 1,
        },
        "busy" => ClaimReply::Busy,
        "gone" => ClaimReply::Gone,
        "clash" => ClaimReply::Clash(text_at(parts, 1)?),
        "failed" => return Err(error_from_text(&text_at(parts, 1)?)),
        other => return Err(unexpected_reply(other)),
    })
}

/// Parses the reply of `inspect.lua`.
pub(super) fn parse_lock_state(name: &Name, value: &Value) -> Result<LockState> {
    let parts = array(value)?;
    let mut state = LockState::free(name.clone());
    let (lock, left) = (text_at(parts, 0)?, millis_at(parts, 1)?);
    let fence = number_at(parts, 2)?;
    state.fence = (fence > 0).then_some(Token::new(fence));
    if is_exclusive(&lock) {
        state.holders.push(decode_exclusive(&lock, state.fence, left));
    }
    let version = number_at(parts, 3)?;
    if version > 0 {
        state.cell = Some(Cell { version: Version(version), value: bytes_at(parts, 4)?.to_vec() });
    }
    state.holders.extend(parse_shared_holders(array(item_at(parts, 5)?)?, &lock)?);
    state.holders.sort_by_key(|holder| holder.token);
    for waiter in array(item_at(parts, 6)?)?.chunks_exact(2) {
        state.waiters.extend(decode_waiter(&text_at(waiter, 0)?, &text_at(waiter, 1)?));
    }
    Ok(state)
}

/// Parses the reply of `force_release.lua`: the former holders.
pub(super) fn parse_former_holders(value: &Value) -> Result<Vec<Holder>> {
    let parts = array(value)?;
    let (lock, left) = (text_at(parts, 0)?, millis_at(parts, 2)?);
    let token = text_at(parts, 1)?.parse().ok();
    let mut holders = parse_shared_holders(array(item_at(parts, 3)?)?, &lock)?;
    if is_exclusive(&lock) {
        holders.push(decode_exclusive(&lock, token, left));
    }
    Ok(holders)
}

fn is_exclusive(lock: &str) -> bool {
    !lock.is_empty() && !lock.starts_with('=')
}

/// Readers and holders of permits: id, record and what is left, for each.
fn parse_shared_holders(parts: &[Value], lock: &str) -> Result<Vec<Holder>> {
    let mut holders = Vec::new();
    for holder in parts.chunks_exact(3) {
        let (id, record, left) = (text_at(holder, 0)?, text_at(holder, 1)?, millis_at(holder, 2)?);
        holders.extend(decode_shared(&id, &record, lock, left));
    }
    Ok(holders)
}

/// Parses the reply of `cell.lua`.
pub(super) fn parse_swap(value: &Value) -> Result<Swap> {
    let parts = array(value)?;
    let version = Version(number_at(parts, 1)?);
    match text_at(parts, 0)?.as_str() {
        "done" => Ok(Swap::Done(version)),
        _ => Ok(Swap::Found(Cell { version, value: bytes_at(parts, 2)?.to_vec() })),
    }
}

pub(super) fn array(value: &Value) -> Result<&[Value]> {
    match value {
        Value::Array(parts) => Ok(parts),
        other => Err(unexpected_reply(&format!("{other:?}"))),
    }
}

fn item_at(parts: &[Value], index: usize) -> Result<&Value> {
    parts.get(index).ok_or_else(|| unexpected_reply("too short an answer"))
}

pub(super) fn text_at(parts: &[Value], index: usize) -> Result<String> {
    Ok(String::from_utf8_lossy(bytes_at(parts, index)?).into_owned())
}

fn bytes_at(parts: &[Value], index: usize) -> Result<&[u8]> {
    match item_at(parts, index)? {
        Value::BulkString(bytes) => Ok(bytes),
        Value::SimpleString(text) => Ok(text.as_bytes()),
        other => Err(unexpected_reply(&format!("{other:?}"))),
    }
}

pub(super) fn number_at(parts: &[Value], index: usize) -> Result<u64> {
    match item_at(parts, index)? {
        Value::Int(number) => Ok(u64::try_from(*number).unwrap_or(0)),
        _ => text_at(parts, index)?.parse().map_err(|_| unexpected_reply("no number")),
    }
}

/// What PTTL returned; `None` if the key has no expiry or does not exist.
fn lease_left(parts: &[Value], index: usize) -> Result<Option<Duration>> {
    match item_at(parts, index)? {
        Value::Int(left) if *left < 0 => Ok(None),
        _ => millis_at(parts, index).map(Some),
    }
}

/// What is left of a lease; zero for a key without an expiry.
fn millis_at(parts: &[Value], index: usize) -> Result<Duration> {
    number_at(parts, index).map(Duration::from_millis)
}

pub(super) fn unexpected_reply(what: &str) -> Error {
    let what = format!("the server answered something unexpected: {what}");
    unreachable_error(what, false, None)
}
