//! What the server pushes: messages to the client's inbox, and changes of tracked keys.

use std::sync::Arc;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{RedisError, Value};
use tokio::sync::mpsc;

use super::connect::RedisAddress;
use super::keys::RedisKeys;
use super::slots::SlotMap;
use super::waiters::RedisWaiters;
use super::watch::WatchList;
use crate::clock::Clock;
use crate::engine::{ClaimId, Event};
use crate::error::LossReason;

/// The last character of a sharded channel's name; `publish` in `common.lua` depends on it.
const SHARDED_SUFFIX: char = '~';
/// Likewise for a plain channel in a cluster, which reaches the subscribers of all nodes.
const UNSHARDED_SUFFIX: char = '^';

/// Handles a push.
pub(super) type OnPush = Arc<dyn Fn(RedisPush<'_>) + Send + Sync>;

pub(super) enum RedisPush<'a> {
    /// A message to the inbox.
    Message(&'a [u8]),
    /// A tracked key has changed.
    Invalidated(&'a [u8]),
    /// All keys were deleted.
    Flushed,
}

/// The handler for pushes to the client's main connection.
pub(super) fn on_push(
    waiters: Arc<RedisWaiters>,
    watches: Arc<WatchList>,
    prefix: String,
    events: mpsc::UnboundedSender<Event>,
) -> OnPush {
    let on_message = on_message(waiters.clone(), events);
    Arc::new(move |push| match push {
        RedisPush::Message(message) => on_message(message),
        RedisPush::Invalidated(key) => {
            let Ok(key) = str::from_utf8(key) else { return };
            waiters.on_key_changed(key);
            if let Some(name) = RedisKeys::name_of(&prefix, key) {
                watches.on_changed(&name);
            }
        }
        RedisPush::Flushed => {
            waiters.on_all_changed();
            watches.on_all_changed();
        }
    })
}

/// Messages are a kind, a claim id and a number: `g` id token (granted), `f` id ms (left free for
/// this time), `b` id (broken), `r` id (revoked).
fn on_message(
    waiters: Arc<RedisWaiters>,
    events: mpsc::UnboundedSender<Event>,
) -> impl Fn(&[u8]) + Send + Sync {
    let clock = Clock::boot();
    move |message| {
        let Ok(message) = std::str::from_utf8(message) else { return };
        let (Some(kind), Some(id), Some(rest)) =
            (message.get(..1), message.get(1..33), message.get(33..))
        else {
            return;
        };
        let Ok(id) = id.parse::<ClaimId>() else { return };
        match (kind, rest.parse()) {
            ("g", Ok(token)) => {
                if let Some(waiter) = waiters.find(id) {
                    waiter.on_grant_pushed(token);
                }
            }
            ("f", Ok(left)) => {
                if let Some(waiter) = waiters.find(id) {
                    waiter.on_left_free(clock.now(), Duration::from_millis(left));
                }
            }
            ("b", _) => {
                let _ = events.send(Event::Lost(id, LossReason::Broken));
            }
            ("r", _) => {
                let _ = events.send(Event::LastLease(id));
            }
            _ => {}
        }
    }
}

/// The channel to which the server publishes messages for this client.
#[derive(Clone, Debug)]
pub(super) struct RedisInbox {
    /// Starts with the key prefix.
    pub(super) base: String,
    /// In a cluster a script may only publish to channels in a slot of its own node.
    pub(super) slots: Option<Arc<SlotMap>>,
}

impl RedisInbox {
    /// The name of the channel on this node.
    pub(super) fn channel_at(&self, node: &RedisAddress) -> String {
        let Some(slots) = &self.slots else { return self.base.clone() };
        let names = (0_u32..1 << 18).map(|n| format!("{}:{n:x}{SHARDED_SUFFIX}", self.base));
        let sharded = slots.first_served_by(node, names);
        sharded.unwrap_or_else(|| format!("{}{UNSHARDED_SUFFIX}", self.base))
    }
}

/// Subscribes to the channel. Returns the name under which it is subscribed.
pub(super) async fn subscribe(
    multiplexed: &mut MultiplexedConnection,
    channel: String,
) -> Result<String, RedisError> {
    if !channel.ends_with(SHARDED_SUFFIX) {
        redis::cmd("SUBSCRIBE").arg(&channel).query_async::<Value>(multiplexed).await?;
        return Ok(channel);
    }
    match redis::cmd("SSUBSCRIBE").arg(&channel).query_async::<Value>(multiplexed).await {
        // Redis 6 has no sharded channels; its plain channels reach all nodes.
        Err(error) if error.to_string().contains("unknown command") => {
            let plain = format!("{}{UNSHARDED_SUFFIX}", channel.trim_end_matches(SHARDED_SUFFIX));
            redis::cmd("SUBSCRIBE").arg(&plain).query_async::<Value>(multiplexed).await?;
            Ok(plain)
        }
        reply => reply.map(|_| channel),
    }
}
