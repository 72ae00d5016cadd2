//! Cells: nodes that outlive their writers, changed by compare-and-set.
//!
//! The version of a cell is the number of the transaction that last wrote it, which never comes
//! back. The server itself compares only a count that begins anew with every new node, so each cell
//! has a child of a random name that lives as long as it: a change checks the count *and* that the
//! child is there, and thus cannot meet another cell of the same name and the same count.

use super::client::session::Fault;
use super::client::wire::{Kind, Part, Refusal, Stat};
use super::{Core, PATIENCE};
use crate::engine::{Cell, Swap, Version};
use crate::error::{Error, Result};
use crate::name::Name;

/// How long the name of the child is, in hexadecimal digits; the cell's data begins with it.
const GENERATION: usize = 32;

/// What a cell's node holds.
struct Stored {
    cell: Cell,
    generation: String,
    count: i32,
}

impl Core {
    pub(super) async fn cell(
        &self,
        name: &Name,
        expect: Version,
        value: Option<Vec<u8>>,
    ) -> Result<Swap> {
        let path = self.paths.cell(name);
        let mut was_missing = false;
        loop {
            self.main.ready(self.clock.now() + PATIENCE).await?;
            let stored = self.read_cell(name, &path).await?;
            let version = stored.as_ref().map_or(Version::ABSENT, |stored| stored.cell.version);
            if version != expect {
                let found = stored.map(|stored| stored.cell).unwrap_or_default();
                return Ok(Swap::Found(found));
            }
            let parts = match (stored, &value) {
                (None, None) => return Ok(Swap::Done(Version::ABSENT)),
                (stored, value) => self.swap(&path, stored, value.as_deref()),
            };
            match self.main.multi(&parts).transaction().await {
                Ok(_) if value.is_none() => return Ok(Swap::Done(Version::ABSENT)),
                Ok(zxid) => return Ok(Swap::Done(version_of(zxid))),
                Err(Fault::Refused(Refusal::NO_NODE)) if expect == Version::ABSENT => {
                    let (chroot, cells) = (&self.paths.chroot, self.paths.cells());
                    self.make_nodes(&self.main, "", chroot, Kind::Persistent).await?;
                    self.make_nodes(&self.main, chroot, &cells, Kind::Persistent).await?;
                }
                // A version never comes back, so this is the same cell, without its child.
                Err(Fault::Refused(Refusal::NO_NODE)) if was_missing => {
                    let why = "a part of its cell was removed by something else".to_owned();
                    return Err(Error::Conflict { name: name.clone(), why });
                }
                Err(Fault::Refused(Refusal::NO_NODE)) => was_missing = true,
                // Somebody was faster: what is there now decides.
                Err(Fault::Refused(Refusal::BAD_VERSION | Refusal::NODE_EXISTS)) => {}
                Err(fault) => return Err(fault.into()),
            }
        }
    }

    fn swap(&self, path: &str, stored: Option<Stored>, value: Option<&[u8]>) -> Vec<Part> {
        let path = path.to_owned();
        let child = |generation: &str| format!("{path}/{generation}");
        let data = |generation: &str, value: &[u8]| [generation.as_bytes(), value].concat();
        match (stored, value) {
            (None, value) => {
                let generation = format!("{:032x}", rand::random::<u128>());
                let (acl, kind) = (self.acl, Kind::Persistent);
                let written = data(&generation, value.unwrap_or_default());
                let below = child(&generation);
                vec![
                    Part::Create { path, data: written, acl, kind },
                    Part::Create { path: below, data: Vec::new(), acl, kind },
                ]
            }
            (Some(Stored { generation, count, .. }), Some(value)) => vec![
                Part::Check { path: child(&generation), version: -1 },
                Part::SetData { data: data(&generation, value), path, version: count },
            ],
            (Some(Stored { generation, count, .. }), None) => vec![
                Part::Delete { path: child(&generation), version: -1 },
                Part::Delete { path, version: count },
            ],
        }
    }

    async fn read_cell(&self, name: &Name, path: &str) -> Result<Option<Stored>> {
        let (sync, data) = (self.main.sync(path), self.main.data(path, false));
        sync.done().await?;
        match data.data().await {
            Ok((data, stat)) => stored(name, &data, stat).map(Some),
            Err(fault) if fault.is(Refusal::NO_NODE) => Ok(None),
            Err(fault) => Err(fault.into()),
        }
    }
}

/// The cell that a node with this data and these facts is.
pub(super) fn cell_of(name: &Name, data: &[u8], stat: Stat) -> Result<Cell> {
    stored(name, data, stat).map(|stored| stored.cell)
}

fn stored(name: &Name, data: &[u8], stat: Stat) -> Result<Stored> {
    let split = data.split_at_checked(GENERATION).and_then(|(generation, value)| {
        let generation = std::str::from_utf8(generation).ok()?;
        let is_ours = generation.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_ours.then(|| (generation.to_owned(), value.to_vec()))
    });
    let Some((generation, value)) = split else {
        let why = "its cell was written by something else".to_owned();
        return Err(Error::Conflict { name: name.clone(), why });
    };
    let cell = Cell { version: version_of(stat.mzxid), value };
    Ok(Stored { cell, generation, count: stat.version })
}

fn version_of(zxid: i64) -> Version {
    Version(u64::try_from(zxid).unwrap_or(0))
}
