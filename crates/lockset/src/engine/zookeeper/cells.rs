//! Cells: nodes that outlive their writers, changed by compare-and-set.
//!
//! The version of a cell is the number of the transaction that last wrote it, which is never
//! reused. The server itself compares only the data version, which starts anew with every new node.
//! So each cell has a child with a random name (its generation) that lives as long as the cell. A
//! change checks the data version *and* that this child exists, and thus cannot hit another cell
//! with the same name and data version.

use super::ZooKeeperCore;
use super::client::{CreateMode, MultiOp, NodeStat, ZkErrorCode, ZkRequestError};
use crate::engine::{Cell, Swap, Version};
use crate::error::{Error, Result};
use crate::name::Name;

/// The length of the generation, in hexadecimal digits. The cell's data begins with it.
const GENERATION_LEN: usize = 32;

/// What a cell's node contains.
struct StoredCell {
    cell: Cell,
    generation: String,
    data_version: i32,
}

impl ZooKeeperCore {
    pub(super) async fn cell(
        &self,
        name: &Name,
        expect: Version,
        value: Option<Vec<u8>>,
    ) -> Result<Swap> {
        let path = self.paths.cell_node(name);
        let mut was_missing = false;
        loop {
            self.wait_connected().await?;
            let stored = self.read_cell(name, &path).await?;
            let version = stored.as_ref().map_or(Version::ABSENT, |stored| stored.cell.version);
            if version != expect {
                let found = stored.map(|stored| stored.cell).unwrap_or_default();
                return Ok(Swap::Found(found));
            }
            let ops = match (stored, &value) {
                (None, None) => return Ok(Swap::Done(Version::ABSENT)),
                (stored, value) => self.swap_ops(&path, stored, value.as_deref()),
            };
            match self.main.multi(&ops).committed().await {
                Ok(_) if value.is_none() => return Ok(Swap::Done(Version::ABSENT)),
                Ok(zxid) => return Ok(Swap::Done(version_of(zxid))),
                Err(ZkRequestError::Refused(ZkErrorCode::NO_NODE)) if expect == Version::ABSENT => {
                    let (chroot, cells) = (&self.paths.chroot, self.paths.cells_root());
                    self.create_missing(&self.main, "", chroot, CreateMode::Persistent).await?;
                    self.create_missing(&self.main, chroot, &cells, CreateMode::Persistent).await?;
                }
                // A version is never reused, so this is the same cell, without its child.
                Err(ZkRequestError::Refused(ZkErrorCode::NO_NODE)) if was_missing => {
                    let why = "a part of its cell was removed by another program".to_owned();
                    return Err(Error::Conflict { name: name.clone(), why });
                }
                Err(ZkRequestError::Refused(ZkErrorCode::NO_NODE)) => was_missing = true,
                // Another client was faster: its value decides.
                Err(ZkRequestError::Refused(
                    ZkErrorCode::BAD_VERSION | ZkErrorCode::NODE_EXISTS,
                )) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The operations that replace `stored` by `value`.
    fn swap_ops(
        &self,
        path: &str,
        stored: Option<StoredCell>,
        value: Option<&[u8]>,
    ) -> Vec<MultiOp> {
        let path = path.to_owned();
        let child = |generation: &str| format!("{path}/{generation}");
        let data = |generation: &str, value: &[u8]| [generation.as_bytes(), value].concat();
        match (stored, value) {
            (None, value) => {
                let generation = format!("{:032x}", rand::random::<u128>());
                let (acl, mode) = (self.acl, CreateMode::Persistent);
                let written = data(&generation, value.unwrap_or_default());
                let child = child(&generation);
                vec![
                    MultiOp::Create { path, data: written, acl, mode },
                    MultiOp::Create { path: child, data: Vec::new(), acl, mode },
                ]
            }
            (Some(StoredCell { generation, data_version, .. }), Some(value)) => vec![
                MultiOp::Check { path: child(&generation), version: -1 },
                MultiOp::SetData { data: data(&generation, value), path, version: data_version },
            ],
            (Some(StoredCell { generation, data_version, .. }), None) => vec![
                MultiOp::Delete { path: child(&generation), version: -1 },
                MultiOp::Delete { path, version: data_version },
            ],
        }
    }

    async fn read_cell(&self, name: &Name, path: &str) -> Result<Option<StoredCell>> {
        let (sync, data) = (self.main.sync(path), self.main.data(path, false));
        sync.done().await?;
        match data.data().await {
            Ok((data, stat)) => decode(name, &data, stat).map(Some),
            Err(error) if error.is(ZkErrorCode::NO_NODE) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

/// The cell in a node with this data and metadata.
pub(super) fn cell_of(name: &Name, data: &[u8], stat: NodeStat) -> Result<Cell> {
    decode(name, data, stat).map(|stored| stored.cell)
}

fn decode(name: &Name, data: &[u8], stat: NodeStat) -> Result<StoredCell> {
    let split = data.split_at_checked(GENERATION_LEN).and_then(|(generation, value)| {
        let generation = std::str::from_utf8(generation).ok()?;
        let is_hex = generation.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_hex.then(|| (generation.to_owned(), value.to_vec()))
    });
    let Some((generation, value)) = split else {
        let why = "its cell was written by another program".to_owned();
        return Err(Error::Conflict { name: name.clone(), why });
    };
    let cell = Cell { version: version_of(stat.mzxid), value };
    Ok(StoredCell { cell, generation, data_version: stat.version })
}

fn version_of(zxid: i64) -> Version {
    Version(u64::try_from(zxid).unwrap_or(0))
}
