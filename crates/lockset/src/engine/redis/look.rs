//! Looking: one name, all names, and what changes; and the cells.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::try_join_all;
use redis::Value;

use super::answers::{self, list, look_state, word};
use super::keys::Keys;
use super::link::Unanswered;
use super::nodes::Node;
use super::{Core, PATIENCE};
use crate::engine::{Break, Cell, ClaimId, Holder, LockState, Scope, Swap, Version};
use crate::error::Result;
use crate::name::{Name, Prefix};

/// How often a watch looks; changes of locks are not published.
const WATCH_EVERY: Duration = Duration::from_millis(100);
/// So many names are looked at together.
const LOOKS: usize = 32;

impl Core {
    pub(super) async fn look(&self, name: &Name) -> Result<LockState> {
        let keys = self.keys(name);
        let mut names = vec![keys.lock().to_owned(), keys.queue(), keys.cell()];
        names.extend(keys.others(ClaimId::from_bits(0)));
        let answer = self.run(&self.scripts.look, &keys, &names, &[] as &[String]).await;
        look_state(name, &answer.map_err(Unanswered::into_error)?)
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
        // All at once, for a watch asks again and again.
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
        let args = [u8::from(how == Break::Now).to_string()];
        let answer = self.run_handing_on(&self.scripts.force, &keys, &names, &args).await;
        answers::broken(&answer.map_err(Unanswered::into_error)?)
    }
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

/// A watch: looks again and again, and tells what is different.
pub(super) struct Watch {
    core: Arc<Core>,
    scope: Scope,
    known: BTreeMap<Name, String>,
    due: VecDeque<Result<LockState>>,
    first: bool,
}

impl Watch {
    pub(super) fn new(core: Arc<Core>, scope: Scope) -> Self {
        Self { core, scope, known: BTreeMap::new(), due: VecDeque::new(), first: true }
    }

    pub(super) async fn next(&mut self) -> Result<LockState> {
        loop {
            if let Some(state) = self.due.pop_front() {
                return state;
            }
            if !std::mem::take(&mut self.first) {
                tokio::time::sleep(WATCH_EVERY).await;
            }
            self.look().await;
        }
    }

    async fn look(&mut self) {
        let names = match &self.scope {
            Scope::Name(name) => Ok(vec![name.clone()]),
            Scope::Prefix(prefix) => self.core.names(prefix).await,
        };
        let names = match names {
            Ok(names) => names,
            Err(error) => return self.due.push_back(Err(error)),
        };
        let gone: Vec<Name> =
            self.known.keys().filter(|name| names.binary_search(name).is_err()).cloned().collect();
        for (name, state) in self.core.looks(names.into_iter().chain(gone).collect()).await {
            match state {
                Err(error) => self.due.push_back(Err(error)),
                Ok(state) => {
                    let face = face(&state);
                    let known = match (&self.scope, state.is_used()) {
                        (Scope::Prefix(_), false) => self.known.remove(&name),
                        _ => self.known.insert(name, face.clone()),
                    };
                    if known != Some(face) {
                        self.due.push_back(Ok(state));
                    }
                }
            }
        }
    }
}

/// What of a state makes a difference: all but the time that is left.
fn face(state: &LockState) -> String {
    let holders: Vec<_> = state
        .holders
        .iter()
        .map(|holder| (holder.claim, holder.token, holder.mode, &holder.note, holder.revoked))
        .collect();
    let waiters: Vec<_> = state.waiters.iter().map(|waiter| (waiter.claim, &waiter.note)).collect();
    format!("{holders:?} {waiters:?} {:?}", state.cell)
}
