//! Inspecting one name, and listing all.

use std::collections::BTreeSet;

use futures_util::StreamExt;
use futures_util::future::try_join_all;
use redis::Value;

use super::error::RedisRequestError;
use super::keys::RedisKeys;
use super::reply::{array, number_at, parse_lock_state, text_at};
use super::routing::RedisNode;
use super::{REQUEST_TIMEOUT, RedisCore};
use crate::engine::{ClaimId, LockState};
use crate::error::Result;
use crate::name::{Name, Prefix};

/// The number of names that are inspected at once.
const PARALLEL_INSPECTS: usize = 32;

impl RedisCore {
    /// Reads a name. If it is watched, the server pushes its next change.
    pub(super) async fn inspect(&self, name: &Name) -> Result<LockState> {
        let (keys, script) = (self.keys(name), &self.scripts.inspect);
        let (read, no_args): (_, &[String]) = (inspected_keys(&keys), &[]);
        let reply = match self.watches.has_name(name) {
            false => self.run_script(script, &keys, &read, no_args).await,
            true => {
                let command = script.call_with(&read, no_args);
                let reply = self.query_tracked(Some(script), &keys, &command).await;
                reply.map(|(reply, is_tracked)| {
                    self.watches.on_read(is_tracked);
                    reply
                })
            }
        };
        parse_lock_state(name, &reply.map_err(RedisRequestError::into_error)?)
    }

    pub(super) async fn list(&self, prefix: &Prefix) -> Result<Vec<LockState>> {
        let names = self.names(prefix).await?.into_iter();
        let each = names.map(|name| async move { self.inspect(&name).await });
        let inspected: Vec<Result<LockState>> =
            futures_util::stream::iter(each).buffered(PARALLEL_INSPECTS).collect().await;
        let mut states = Vec::new();
        for state in inspected {
            states.extend(Some(state?).filter(LockState::is_used));
        }
        Ok(states)
    }

    /// The names with this prefix that have a lock or a cell, found by SCAN. Keys of other types
    /// belong to other programs.
    async fn names(&self, prefix: &Prefix) -> Result<Vec<Name>> {
        let start = format!("{}{}", escape_glob(&self.prefix), escape_glob(prefix.as_str()));
        let locks = format!("{start}*");
        let cells = ["{", "{*}:", "{}"].map(|before| format!("{before}{start}*:cell"));
        let nodes = self.router.masters().await;
        // All at once: a watch that polls lists again and again.
        let of_locks = try_join_all(nodes.iter().map(|node| scan(node, &locks, "string")));
        let of_cells = try_join_all(
            nodes.iter().flat_map(|node| cells.iter().map(|cell| scan(node, cell, "hash"))),
        );
        let (of_locks, of_cells) = futures_util::future::try_join(of_locks, of_cells).await?;
        let mut found = BTreeSet::new();
        found.extend(
            of_locks.iter().flatten().filter_map(|key| RedisKeys::name_of_lock(&self.prefix, key)),
        );
        found.extend(
            of_cells.iter().flatten().filter_map(|key| RedisKeys::name_of_cell(&self.prefix, key)),
        );
        // A key of another program may be one that no lock can have.
        let can_be = |name: &Name| !self.router.is_cluster() || self.keys(name).slot().is_some();
        Ok(found.into_iter().filter(can_be).collect())
    }
}

/// The keys of `inspect.lua`: all that it may read.
fn inspected_keys(keys: &RedisKeys) -> Vec<String> {
    let mut names = vec![keys.lock().to_owned(), keys.queue(), keys.cell()];
    names.extend(keys.others(ClaimId::from_bits(0)));
    names
}

async fn scan(node: &RedisNode, pattern: &str, kind: &str) -> Result<Vec<String>> {
    let (mut cursor, mut found) = (0_u64, Vec::new());
    loop {
        let connection = node.connection.connected(REQUEST_TIMEOUT).await;
        let connection = connection.map_err(RedisRequestError::into_error)?;
        let mut scan = redis::cmd("SCAN");
        scan.arg(cursor).arg("MATCH").arg(pattern).arg("COUNT").arg(500);
        scan.arg("TYPE").arg(kind);
        let mut multiplexed = connection.multiplexed.clone();
        let reply =
            connection.await_reply(REQUEST_TIMEOUT, scan.query_async(&mut multiplexed)).await;
        let reply = reply.map_err(RedisRequestError::into_error)?;
        let parts = array(&reply)?;
        cursor = number_at(parts, 0)?;
        let keys = array(parts.get(1).unwrap_or(&Value::Array(Vec::new())))?.to_vec();
        for index in 0..keys.len() {
            found.push(text_at(&keys, index)?);
        }
        if cursor == 0 {
            return Ok(found);
        }
    }
}

/// Escapes a text for a pattern of SCAN.
fn escape_glob(text: &str) -> String {
    let special = |c: char| matches!(c, '*' | '?' | '[' | ']' | '\\');
    text.chars().flat_map(|c| special(c).then_some('\\').into_iter().chain([c])).collect()
}
