//! Cells: small values that are compared and swapped, for latches and barriers.

use super::EtcdCore;
use super::rpc::{KeyValue, TxnRequest};
use super::txn::{delete, get, kvs, mod_revision_is, put, revision_of};
use crate::engine::{Cell, Swap, Version};
use crate::error::Result;
use crate::name::Name;

impl EtcdCore {
    pub(super) async fn cell(
        &self,
        name: &Name,
        expect: Version,
        value: Option<Vec<u8>>,
    ) -> Result<Swap> {
        let key = self.layout.cell(name);
        let is_kept = value.is_some();
        let change = value.map_or_else(|| delete(&key), |value| put(&key, value, 0));
        let txn = TxnRequest {
            compare: vec![mod_revision_is(&key, i64::try_from(expect.0).unwrap_or(i64::MAX))],
            success: vec![change],
            failure: vec![get(&key)],
        };
        // Not repeated after an unknown outcome: the caller finds out by reading again.
        let reply = self.connection.txn_retry_if_not_sent(txn).await?;
        if !reply.succeeded {
            return Ok(Swap::Found(kvs(&reply, 0).first().map(decode_cell).unwrap_or_default()));
        }
        let version = if is_kept { revision_of(&reply) } else { 0 };
        Ok(Swap::Done(Version(u64::try_from(version).unwrap_or(0))))
    }
}

pub(super) fn decode_cell(kv: &KeyValue) -> Cell {
    Cell { version: Version(u64::try_from(kv.mod_revision).unwrap_or(0)), value: kv.value.clone() }
}
