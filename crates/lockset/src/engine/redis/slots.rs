//! Which node of a cluster serves which keys.

use std::collections::HashMap;
use std::sync::Mutex;

use redis::Value;

use super::answers::{list, number, unexpected, word};
use super::servers::Address;
use crate::error::Result;
use crate::sync;

/// A cluster divides all keys into so many slots.
const SLOTS: u16 = 16_384;

/// The slot of a key: of its hash tag, if it has one.
pub(super) fn slot(key: &str) -> u16 {
    crc16(tag(key).unwrap_or(key).as_bytes()) % SLOTS
}

/// What stands between the first `{` and the next `}`, if that is not empty.
pub(super) fn tag(key: &str) -> Option<&str> {
    let (tag, _) = key.split_once('{')?.1.split_once('}')?;
    (!tag.is_empty()).then_some(tag)
}

/// CRC16-XMODEM, as Redis Cluster prescribes it.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| {
        (0..8).fold(crc ^ (u16::from(*byte) << 8), |crc, _| {
            if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 }
        })
    })
}

/// The masters and their slots, as far as they are known.
#[derive(Debug, Default)]
pub(super) struct Map(Mutex<Vec<Range>>);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Range {
    first: u16,
    last: u16,
    master: Address,
}

impl Map {
    pub(super) fn owner(&self, slot: u16) -> Option<Address> {
        let ranges = sync::lock(&self.0);
        let range = ranges.iter().find(|range| (range.first..=range.last).contains(&slot))?;
        Some(range.master.clone())
    }

    pub(super) fn masters(&self) -> Vec<Address> {
        let mut masters: Vec<Address> =
            sync::lock(&self.0).iter().map(|range| range.master.clone()).collect();
        masters.sort();
        masters.dedup();
        masters
    }

    pub(super) fn replace(&self, ranges: Vec<Range>) {
        *sync::lock(&self.0) = ranges;
    }

    /// The first of these keys that this master serves.
    pub(super) fn first_at(
        &self,
        master: &Address,
        mut keys: impl Iterator<Item = String>,
    ) -> Option<String> {
        let ranges = sync::lock(&self.0);
        let own: Vec<&Range> = ranges.iter().filter(|range| range.master == *master).collect();
        let serves = |slot| own.iter().any(|range| (range.first..=range.last).contains(&slot));
        if own.is_empty() { None } else { keys.find(|key| serves(slot(key))) }
    }
}

/// The answer of `CLUSTER SLOTS`, asked at `asked`: a node that does not know its own address
/// leaves it out.
pub(super) fn read_ranges(answer: &Value, asked: &Address) -> Result<Vec<Range>> {
    let mut ranges = Vec::new();
    for entry in list(answer)? {
        let entry = list(entry)?;
        let master = list(entry.get(2).ok_or_else(|| unexpected("slots without a master"))?)?;
        let host = match master.first() {
            Some(Value::Nil) | None => String::new(),
            Some(_) => word(master, 0)?,
        };
        let host = if host.is_empty() || host == "?" { asked.0.clone() } else { host };
        let bound = |index| {
            u16::try_from(number(entry, index)?).map_err(|_| unexpected("slots beyond the last"))
        };
        let port = u16::try_from(number(master, 1)?).map_err(|_| unexpected("no port"))?;
        ranges.push(Range { first: bound(0)?, last: bound(1)?, master: (host, port) });
    }
    Ok(ranges)
}

/// How many replicas the master has that has most, by the answer of `CLUSTER NODES`: lines of
/// `id address flags master …`. Of all masters, since one that was just promoted may have none yet;
/// and not by `CLUSTER SLOTS`, which leaves out replicas that are down or were not heard of yet.
pub(super) fn most_replicas(nodes: &str) -> u32 {
    let mut of: HashMap<&str, u32> = HashMap::new();
    for line in nodes.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        if let [_, _, flags, master, ..] = words[..]
            && flags.split(',').any(|flag| flag == "slave")
        {
            *of.entry(master).or_default() += 1;
        }
    }
    of.into_values().max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_those_of_the_servers() {
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
    fn every_master_has_keys_of_its_own() {
        let at = |port| ("h".to_owned(), port);
        let map = Map::default();
        map.replace(vec![
            Range { first: 0, last: 8_000, master: at(1) },
            Range { first: 8_001, last: 8_001, master: at(2) },
            Range { first: 8_002, last: SLOTS - 1, master: at(1) },
        ]);
        let keys = || (0..1 << 18).map(|n| format!("inbox:{n}"));
        for master in map.masters() {
            let key = map.first_at(&master, keys()).unwrap();
            assert_eq!(map.owner(slot(&key)), Some(master));
        }
        assert_eq!(map.first_at(&at(3), keys()), None);
    }
}
