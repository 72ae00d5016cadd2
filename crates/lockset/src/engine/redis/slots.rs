//! Which node of a cluster serves which keys.

use std::collections::HashMap;
use std::sync::Mutex;

use redis::Value;

use super::connect::RedisAddress;
use super::reply::{array, number_at, text_at, unexpected_reply};
use crate::error::Result;
use crate::sync;

/// The number of slots in a cluster.
const SLOTS: u16 = 16_384;

/// The slot of a key. Only its hash tag counts, if it has one.
pub(super) fn slot(key: &str) -> u16 {
    crc16(hash_tag(key).unwrap_or(key).as_bytes()) % SLOTS
}

/// The text between the first `{` and the next `}`, if it is not empty.
pub(super) fn hash_tag(key: &str) -> Option<&str> {
    let (tag, _) = key.split_once('{')?.1.split_once('}')?;
    (!tag.is_empty()).then_some(tag)
}

/// CRC16-XMODEM, as Redis Cluster specifies it.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| {
        (0..8).fold(crc ^ (u16::from(*byte) << 8), |crc, _| {
            if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 }
        })
    })
}

/// The masters and their slots, as far as known.
#[derive(Debug, Default)]
pub(super) struct SlotMap(Mutex<Vec<SlotRange>>);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SlotRange {
    first: u16,
    last: u16,
    master: RedisAddress,
}

impl SlotMap {
    pub(super) fn owner(&self, slot: u16) -> Option<RedisAddress> {
        let ranges = sync::lock(&self.0);
        let range = ranges.iter().find(|range| (range.first..=range.last).contains(&slot))?;
        Some(range.master.clone())
    }

    pub(super) fn masters(&self) -> Vec<RedisAddress> {
        let mut masters: Vec<RedisAddress> =
            sync::lock(&self.0).iter().map(|range| range.master.clone()).collect();
        masters.sort();
        masters.dedup();
        masters
    }

    pub(super) fn replace(&self, ranges: Vec<SlotRange>) {
        *sync::lock(&self.0) = ranges;
    }

    /// The first of these keys that the given master serves.
    pub(super) fn first_served_by(
        &self,
        master: &RedisAddress,
        mut keys: impl Iterator<Item = String>,
    ) -> Option<String> {
        let ranges = sync::lock(&self.0);
        let own: Vec<&SlotRange> = ranges.iter().filter(|range| range.master == *master).collect();
        let serves = |slot| own.iter().any(|range| (range.first..=range.last).contains(&slot));
        if own.is_empty() { None } else { keys.find(|key| serves(slot(key))) }
    }
}

/// Parses the reply of the node at `replied` to `CLUSTER SLOTS`. A node that does not know its own
/// address leaves it out.
pub(super) fn parse_slot_ranges(reply: &Value, replied: &RedisAddress) -> Result<Vec<SlotRange>> {
    let mut ranges = Vec::new();
    for entry in array(reply)? {
        let entry = array(entry)?;
        let master =
            array(entry.get(2).ok_or_else(|| unexpected_reply("slots without a master"))?)?;
        let host = match master.first() {
            Some(Value::Nil) | None => String::new(),
            Some(_) => text_at(master, 0)?,
        };
        let host = if host.is_empty() || host == "?" { replied.0.clone() } else { host };
        let bound = |index| {
            u16::try_from(number_at(entry, index)?)
                .map_err(|_| unexpected_reply("slots beyond the last"))
        };
        let port = u16::try_from(number_at(master, 1)?).map_err(|_| unexpected_reply("no port"))?;
        ranges.push(SlotRange { first: bound(0)?, last: bound(1)?, master: (host, port) });
    }
    Ok(ranges)
}

/// The greatest number of replicas of any master, by the reply to `CLUSTER NODES`: lines of `id
/// address flags master …`. All masters count, since one that was just promoted may have none yet.
/// `CLUSTER SLOTS` would not do: it omits replicas that are down or not yet known.
pub(super) fn most_replicas(nodes: &str) -> u32 {
    let mut replicas: HashMap<&str, u32> = HashMap::new();
    for line in nodes.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        if let [_, _, flags, master, ..] = words[..]
            && flags.split(',').any(|flag| flag == "slave")
        {
            *replicas.entry(master).or_default() += 1;
        }
    }
    replicas.into_values().max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_computed_as_by_the_servers() {
        assert_eq!(crc16(b"123456789"), 0x31c3);
        assert_eq!(slot("foo"), 12_182);
        assert_eq!(slot("{user1000}.following"), slot("{user1000}.followers"));
        assert_eq!(slot("foo{}{bar}"), crc16(b"foo{}{bar}") % SLOTS);
        assert_eq!(slot("foo{{bar}}zap"), slot("{bar"));
    }

    #[test]
    fn replicas_that_are_down_are_counted() {
        let line = |id: &str, flags: &str, master: &str| {
            format!("{id} 127.0.0.1:1@2,host {flags} {master} 0 1 1 connected\n")
        };
        let nodes = [
            line("a", "myself,master", "-"),
            line("b", "slave", "a"),
            line("c", "slave,fail", "a"),
            line("d", "master,fail", "-"),
            line("e", "slave,fail?", "d"),
            "\nslave\n".to_owned(),
        ];
        assert_eq!(most_replicas(&nodes.concat()), 2);
        assert_eq!(most_replicas(&nodes[0]), 0);
    }

    #[test]
    fn a_key_is_found_for_every_master() {
        let at = |port| ("h".to_owned(), port);
        let slots = SlotMap::default();
        slots.replace(vec![
            SlotRange { first: 0, last: 8_000, master: at(1) },
            SlotRange { first: 8_001, last: 8_001, master: at(2) },
            SlotRange { first: 8_002, last: SLOTS - 1, master: at(1) },
        ]);
        let keys = || (0..1 << 18).map(|n| format!("inbox:{n}"));
        for master in slots.masters() {
            let key = slots.first_served_by(&master, keys()).unwrap();
            assert_eq!(slots.owner(slot(&key)), Some(master));
        }
        assert_eq!(slots.first_served_by(&at(3), keys()), None);
    }
}
