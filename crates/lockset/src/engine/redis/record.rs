//! What is stored for a claim, encoded and decoded. `common.lua` lists the forms.

use std::time::Duration;

use super::text::{push_id, push_number};
use super::waiters::WaiterLeases;
use crate::clock::Moment;
use crate::engine::{Claim, ClaimId, Grant, Holder, Mode, Waiter};
use crate::name::Note;
use crate::token::Token;

/// A claim as an argument of a script: `q|f|ttl|mode|take|limit|floor|inbox|note`. The floor is the
/// claim's own, marked by `!`, or the server's time when the connection was opened.
pub(super) fn encode_claim(
    claim: &Claim,
    leases: WaiterLeases,
    connected_at_us: u64,
    inbox: &str,
) -> String {
    let (mode, take, limit) = match claim.mode {
        Mode::Exclusive => ('x', 0, 0),
        Mode::Shared => ('s', 0, 0),
        Mode::Permits { take, limit } => ('p', take, limit),
    };
    let floor = match claim.floor {
        Some(exact) => format!("!{exact}"),
        None => connected_at_us.to_string(),
    };
    let (q, f) = (leases.entry.as_millis(), leases.first.as_millis());
    let (ttl, note) = (claim.ttl.as_millis(), encode_note(&claim.note, inbox));
    format!("{q}|{f}|{ttl}|{mode}|{take}|{limit}|{floor}|{inbox}|{note}")
}

/// The waiter in `deadline|q|f|ttl|mode|take|limit|floor|inbox|note`.
pub(super) fn decode_waiter(id: &str, record: &str) -> Option<Waiter> {
    let fields: Vec<&str> = record.splitn(10, '|').collect();
    let [_, _, _, _, mode, take, limit, _, _, note] = fields[..] else { return None };
    let claim = id.parse().ok()?;
    Some(Waiter { claim, mode: decode_mode(mode, take, limit), note: decode_note(note) })
}

/// The value of a mutex acquired by the fast path: `id:token:flag:ttl:note`, without the token.
pub(super) fn encode_fresh_value(
    buffer: &mut Vec<u8>,
    id: ClaimId,
    token: Option<Token>,
    ttl: Duration,
    note: &Note,
    inbox: &str,
) {
    push_id(buffer, id);
    buffer.push(b':');
    if let Some(token) = token {
        push_number(buffer, token.get());
    }
    buffer.extend_from_slice(b":0:");
    push_number(buffer, ttl.as_millis() as u64);
    let start = buffer.len() + inbox.len() + 2;
    for part in [":", inbox, "|", &note.by, "|", &note.text] {
        buffer.extend_from_slice(part.as_bytes());
    }
    let by = &mut buffer[start..start + note.by.len()];
    by.iter_mut().filter(|byte| **byte == b'|').for_each(|byte| *byte = b'/');
}

/// The holder in `id:token:flag:ttl:note`. Without a token, the fence is the token. A value of
/// another form is a foreign lock.
pub(super) fn decode_exclusive(value: &str, fence: Option<Token>, left: Duration) -> Holder {
    let mut fields = value.splitn(5, ':');
    let id = fields.next().and_then(|id| id.parse().ok());
    let token: Option<Token> = fields.next().and_then(|token| token.parse().ok()).or(fence);
    let (flag, note) = (fields.next(), fields.nth(1));
    let id = id.filter(|_| note.is_some());
    let token = token.filter(|token| id.is_some() && token.get() > 0);
    let mut note = decode_note(note.unwrap_or_default());
    if id.is_none() {
        note.text = "a lock that is not lockset's".into();
    }
    let revoked = flag == Some("1");
    Holder { claim: id, token, mode: Mode::Exclusive, note, left, revoked }
}

/// The reader or the holder of permits in `token|flag|mode|take|ttl|note`. The limit of a semaphore
/// is in the lock's own value.
pub(super) fn decode_shared(id: &str, record: &str, lock: &str, left: Duration) -> Option<Holder> {
    let limit = lock.strip_prefix("=p:").unwrap_or("0");
    let fields: Vec<&str> = record.splitn(6, '|').collect();
    let [token, flag, mode, take, _, note] = fields[..] else { return None };
    let claim = Some(id.parse::<ClaimId>().ok()?);
    let (note, mode) = (decode_note(note), decode_mode(mode, take, limit));
    Some(Holder { claim, token: token.parse().ok(), mode, note, left, revoked: flag == "1" })
}

fn decode_mode(mode: &str, take: &str, limit: &str) -> Mode {
    let number = |text: &str| text.parse().unwrap_or(0);
    match mode {
        "s" => Mode::Shared,
        "p" => Mode::Permits { take: number(take), limit: number(limit) },
        _ => Mode::Exclusive,
    }
}

/// `inbox|by|text`: where the holder receives messages, and what others see of it.
pub(super) fn encode_note(note: &Note, inbox: &str) -> String {
    format!("{inbox}|{}|{}", note.by.replace('|', "/"), note.text)
}

/// The note in `inbox|by|text`.
fn decode_note(text: &str) -> Note {
    let mut parts = text.splitn(3, '|').skip(1);
    let (by, text) = (parts.next(), parts.next());
    Note { by: by.unwrap_or_default().into(), text: text.unwrap_or_default().into() }
}

/// A grant. Its token identifies it; everything else follows from the claim.
pub(super) fn grant(token: Token, valid_until: Moment) -> Grant {
    Grant { token, valid_until, key: Vec::new() }
}

/// A grant whose stored value may still lack the token. The key of the grant says so.
pub(super) fn fresh_grant(token: Token, valid_until: Moment) -> Grant {
    Grant { key: token.get().to_be_bytes().to_vec(), ..grant(token, valid_until) }
}

/// Whether the stored value may still be as [`encode_fresh_value`] wrote it.
pub(super) fn is_fresh(grant: &Grant) -> bool {
    grant.key == grant.token.get().to_be_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fresh_value_is_decoded_as_it_was_encoded() {
        let (id, mut value) = (ClaimId::from_bits(7 << 64), Vec::new());
        let note = Note { by: "7|8@host".into(), text: "a|b: c".into() };
        let (ttl, token) = (Duration::from_secs(9), Token::new(5));
        encode_fresh_value(&mut value, id, None, ttl, &note, "inbox:1");
        let value = String::from_utf8(value).unwrap();
        assert_eq!(value, format!("{id}::0:9000:{}", encode_note(&note, "inbox:1")));
        let holder = decode_exclusive(&value, Some(token), ttl);
        let shown = Note { by: "7/8@host".into(), ..note };
        assert_eq!((holder.claim, holder.token, holder.note), (Some(id), Some(token), shown));
    }

    #[test]
    fn notes_are_decoded_as_they_were_encoded() {
        let note = Note { by: "7@host".into(), text: "a|b: c".into() };
        assert_eq!(decode_note(&encode_note(&note, "inbox")), note);
    }
}
