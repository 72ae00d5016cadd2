//! Looking: one name, or all names; and the cells.

use std::collections::BTreeSet;

use futures_util::StreamExt;
use futures_util::future::try_join_all;
use redis::Value;

use super::answers::{self, list, look_state, word};
use super::keys::Keys;
use super::link::Unanswered;
use super::nodes::Node;
use super::{Core, PATIENCE};
use crate::engine::{Break, Cell, ClaimId, Holder, LockState, Swap, Version};
use crate::error::Result;
use crate::name::{Name, Prefix};

/// So many names are looked at together.
const LOOKS: usize = 32;

impl Core {
    pub(super) async fn look(&self, name: &Name) -> Result<LockState> {
        let keys = self.keys(name);
        let nothing: &[String] = &[];
        let answer = self.run(&self.scripts.look, &keys, &looked_at(&keys), nothing).await;
        look_state(name, &answer.map_err(Unanswered::into_error)?)
    }

    /// The same, and whether the server will push the next change of the name.
    pub(super) async fn look_tracked(&self, name: &Name) -> Result<(LockState, bool)> {
        let (keys, script) = (self.keys(name), &self.scripts.look);
        let look = script.call_with(&looked_at(&keys), &[] as &[String]);
        let answer = self.ask_tracked(Some(script), &keys, &look).await;
        let (answer, is_tracked) = answer.map_err(Unanswered::into_error)?;
        Ok((look_state(name, &answer)?, is_tracked))
    }

    pub(super) async fn list(&self, prefix: &Prefix) -> Result<Vec<LockState>> {
        let mut states = Vec::new();
        for (_, state) in self.looks(self.names(prefix).await?).await {
            states.extend(Some(state?).filter(LockState::is_used));
        }
        Ok(states)
    }

    /// How these names are, in their order.
    async fn looks(&self, names: Vec<Name>) -> Vec<(Name, Result<LockState>)> {
        let each = names.into_iter().map(|name| async move {
            let state = self.look(&name).await;
            (name, state)
        });
        futures_util::stream::iter(each).buffered(LOOKS).collect().await
    }

    /// The names with this prefix, found by SCAN: of locks, and of cells. Keys of other types are
    /// somebody else's.
    async fn names(&self, prefix: &Prefix) -> Result<Vec<Name>> {
        let begin = format!("{}{}", escaped(&self.prefix), escaped(prefix.as_str()));
        let locks = format!("{begin}*");
        let cells = ["{", "{*}:", "{}"].map(|before| format!("{before}{begin}*:cell"));
        let nodes = self.nodes.everyone().await;
        // All at once: a watch that polls asks again and again.
        let of_locks = try_join_all(nodes.iter().map(|node| scan(node, &locks, "string")));
        let of_cells = try_join_all(
            nodes.iter().flat_map(|node| cells.iter().map(|cell| scan(node, cell, "hash"))),
        );
        let (of_locks, of_cells) = futures_util::future::try_join(of_locks, of_cells).await?;
        let mut found = BTreeSet::new();
        found.extend(
            of_locks.iter().flatten().filter_map(|key| Keys::name_of_lock(&self.prefix, key)),
        );
        found.extend(
            of_cells.iter().flatten().filter_map(|key| Keys::name_of_cell(&self.prefix, key)),
        );
        // Somebody else's key may be one that no lock can have.
        let can_be = |name: &Name| !self.nodes.by_slot() || self.keys(name).slot().is_some();
        Ok(found.into_iter().filter(can_be).collect())
    }

    pub(super) async fn cell(
        &self,
        name: &Name,
        expect: Version,
        value: Option<Vec<u8>>,
    ) -> Result<Swap> {
        self.check_name(name)?;
        let keys = self.keys(name);
        let args = [
            expect.0.to_string().into_bytes(),
            u8::from(value.is_some()).to_string().into_bytes(),
            value.unwrap_or_default(),
        ];
        let answer = self.run(&self.scripts.cell, &keys, &[keys.cell()], &args).await;
        let answer = answer.map_err(Unanswered::into_error)?;
        let parts = list(&answer)?;
        let version = Version(answers::number(parts, 1)?);
        match word(parts, 0)?.as_str() {
            "done" => Ok(Swap::Done(version)),
            _ => Ok(Swap::Found(Cell { version, value: answers::bytes(parts, 2)?.to_vec() })),
        }
    }

    pub(super) async fn force_release(&self, name: &Name, how: Break) -> Result<Vec<Holder>> {
        let keys = self.keys(name);
        let mut names = vec![keys.lock().to_owned(), keys.queue()];
        names.extend(keys.others(ClaimId::from_bits(0)));
        names.extend(self.scripts.has_courtesy.then(|| keys.handoffs()));
        let args = [u8::from(how == Break::Now).to_string()];
        let answer = self.run_handing_on(&self.scripts.force, &keys, &names, &args).await;
        answers::broken(&answer.map_err(Unanswered::into_error)?)
    }
}

/// The keys of `look.lua`: all that it may read.
fn looked_at(keys: &Keys) -> Vec<String> {
    let mut names = vec![keys.lock().to_owned(), keys.queue(), keys.cell()];
    names.extend(keys.others(ClaimId::from_bits(0)));
    names
}

async fn scan(node: &Node, pattern: &str, kind: &str) -> Result<Vec<String>> {
    let (mut cursor, mut found) = (0_u64, Vec::new());
    loop {
        let up = node.link.up(PATIENCE).await.map_err(Unanswered::into_error)?;
        let mut scan = redis::cmd("SCAN");
        scan.arg(cursor).arg("MATCH").arg(pattern).arg("COUNT").arg(500);
        scan.arg("TYPE").arg(kind);
        let mut connection = up.connection.clone();
        let answer = up.answer(PATIENCE, scan.query_async(&mut connection)).await;
        let answer = answer.map_err(Unanswered::into_error)?;
        let parts = list(&answer)?;
        cursor = answers::number(parts, 0)?;
        let keys = list(parts.get(1).unwrap_or(&Value::Array(Vec::new())))?.to_vec();
        for index in 0..keys.len() {
            found.push(word(&keys, index)?);
        }
        if cursor == 0 {
            return Ok(found);
        }
    }
}

/// A text that a pattern of SCAN takes literally.
fn escaped(text: &str) -> String {
    let special = |c: char| matches!(c, '*' | '?' | '[' | ']' | '\\');
    text.chars().flat_map(|c| special(c).then_some('\\').into_iter().chain([c])).collect()
}
