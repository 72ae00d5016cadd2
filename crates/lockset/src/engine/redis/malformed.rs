//! What a server that is not what it claims to be may send: nothing of it may cause a panic, be
//! taken for more than it is, or fill an error with its text. The checks are run by property tests
//! and by `fuzz/`.

use std::sync::Arc;
use std::time::Duration;

use redis::Value;
use tokio::sync::mpsc;

use super::push::{RedisPush, on_push};
use super::reply::{parse_claim_reply, parse_former_holders, parse_lock_state, parse_swap};
use super::slots::{most_replicas, parse_slot_ranges};
use super::waiters::{RedisWaiters, WaiterState};
use super::watch::WatchList;
use crate::clock::Moment;
use crate::engine::{Claim, ClaimId};
use crate::error::{Error, Result};
use crate::name::Name;

/// The longest error text, in bytes.
const MAX_ERROR: usize = 2500;

/// Messages and invalidated keys, as a server may push them.
#[allow(clippy::unwrap_used, clippy::panic, reason = "checks")]
pub(crate) fn check_pushes(bytes: &[u8]) {
    let waiters = Arc::new(RedisWaiters::new(Duration::from_secs(10)));
    let claim = Claim { id: ClaimId::from_bits(7), ..Claim::plain("name", Duration::from_secs(9)) };
    let waiter = waiters.register(&claim);
    let (events, mut reported) = mpsc::unbounded_channel();
    let push = on_push(waiters, Arc::new(WatchList::default()), "lockset:".to_owned(), events);
    for part in [bytes, &[b"g", claim.id.to_string().as_bytes(), bytes].concat()] {
        push(RedisPush::Message(part));
        push(RedisPush::Invalidated(part));
    }
    push(RedisPush::Flushed);
    // No request was sent for this claim, so no push makes it hold.
    let now = Moment::from_nanos(60_000_000_000);
    if let WaiterState::Granted(grant) = waiter.state(now) {
        assert!(grant.valid_until < now, "a push alone granted {grant:?}");
    }
    if let Ok(event) = reported.try_recv() {
        assert!(bytes.len() >= 33, "{event:?} from {bytes:?}");
    }
}

/// A reply, given to every parser of replies.
#[allow(clippy::unwrap_used, clippy::panic, reason = "checks")]
pub(crate) fn check_reply(reply: &Value) {
    let name: Name = "name".parse().unwrap();
    bounded(parse_claim_reply(reply));
    bounded(parse_former_holders(reply));
    bounded(parse_swap(reply));
    bounded(parse_slot_ranges(reply, &("host".to_owned(), 1)));
    if let Ok(state) = parse_lock_state(&name, reply) {
        // What is shown of a lock can always be written.
        serde_json::to_string(&state).unwrap();
    }
    if let Value::BulkString(text) = reply {
        most_replicas(&String::from_utf8_lossy(text));
    }
}

fn bounded<T>(parsed: Result<T>) {
    if let Err(error) = parsed {
        let shown = error.to_string();
        assert!(shown.len() <= MAX_ERROR, "an error of {} bytes", shown.len());
        assert!(!matches!(error, Error::Invalid { .. }), "the caller is not to blame: {shown}");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Replies that look like those of the scripts.
    fn reply() -> impl Strategy<Value = Value> {
        let words = prop::sample::select(vec![
            "granted",
            "granted-now",
            "queued",
            "busy",
            "gone",
            "clash",
            "failed",
            "done",
            "=s",
            "=p:3",
            "00000000000000000000000000000007",
            "7:8:0:900:i|b|t",
            "1|0|p|2|9|i|b|t",
        ]);
        let leaf = prop_oneof![
            any::<i64>().prop_map(Value::Int),
            words.prop_map(|word| Value::BulkString(word.into())),
            prop::collection::vec(any::<u8>(), 0..40).prop_map(Value::BulkString),
            ".{0,20}".prop_map(Value::SimpleString),
            ".{3000}".prop_map(|text| Value::BulkString(text.into_bytes())),
            Just(Value::Nil),
            Just(Value::Okay),
            any::<f64>().prop_map(Value::Double),
        ];
        leaf.prop_recursive(3, 40, 8, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..8).prop_map(Value::Array),
                prop::collection::vec((inner.clone(), inner), 0..3).prop_map(Value::Map),
            ]
        })
    }

    proptest! {
        #[test]
        fn any_reply_is_parsed_or_rejected(reply in reply()) {
            check_reply(&reply);
        }

        #[test]
        fn any_push_is_survived(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            check_pushes(&bytes);
        }

        #[test]
        fn messages_with_any_number_are_survived(
            kind in "[gfbr]",
            id in "[0-9a-f+é]{30,33}",
            number in "-?[0-9]{0,25}",
        ) {
            check_pushes(format!("{kind}{id}{number}").as_bytes());
        }
    }
}
