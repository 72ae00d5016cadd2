//! The state of locks, as others may see it.

use std::collections::HashMap;
use std::time::Duration;

use rusqlite::Row;
use rusqlite::types::Type;

use super::record::{id_at, mode_at, optional, unreadable, unsigned};
use super::store::{SqlResult, Transaction};
use crate::engine::{Cell, Holder, LockState, Version, Waiter};
use crate::name::{Name, Note};
use crate::token::Token;

/// The columns that `add_to_state` reads, of the rows that the rest of the statement selects.
macro_rules! select_states {
    ($which:literal) => {
        concat!(
            "SELECT name, seq, token, id, mode, expires, revoked, by, note, process, detached, ",
            "version, value, ttl, seen FROM lock ",
            $which
        )
    };
}

impl Transaction<'_> {
    pub(super) fn state(&self, name: &Name) -> SqlResult<LockState> {
        let sql = select_states!("WHERE name = ?1 ORDER BY seq");
        let states = self.states(sql, name.as_str(), |found| found == name.as_str())?;
        Ok(states.into_iter().next().unwrap_or_else(|| LockState::free(name.clone())))
    }

    /// The states of all names that begin with `prefix`, in order.
    pub(super) fn states_below(&self, prefix: &str) -> SqlResult<Vec<LockState>> {
        let sql = select_states!("WHERE name >= ?1 ORDER BY name, seq");
        self.states(sql, prefix, |found| found.starts_with(prefix))
    }

    fn states(
        &self,
        sql: &str,
        from: &str,
        wanted: impl Fn(&str) -> bool,
    ) -> SqlResult<Vec<LockState>> {
        let mut statement = self.db.prepare_cached(sql)?;
        let mut rows = statement.query([from])?;
        let (mut states, mut dead) = (Vec::<LockState>::new(), HashMap::new());
        while let Some(row) = rows.next()? {
            let name = row.get_ref(0)?.as_str()?;
            if !wanted(name) {
                break;
            }
            if states.last().is_none_or(|last| last.name.as_str() != name) {
                let name = name.parse().map_err(|error| unreadable(0, Type::Text, error))?;
                states.push(LockState::free(name));
            }
            if let Some(state) = states.last_mut() {
                self.add_to_state(state, row, &mut dead)?;
            }
        }
        for state in &mut states {
            state.holders.sort_by_key(|holder| holder.token);
        }
        Ok(states)
    }

    /// Adds one row to a state. Claims that lapsed or whose processes died block no other claim, so
    /// they are not shown, although they are removed only by the next request for the name.
    fn add_to_state(
        &self,
        state: &mut LockState,
        row: &Row<'_>,
        dead: &mut HashMap<String, bool>,
    ) -> SqlResult<()> {
        let token = unsigned(row, 2)?;
        let mut is_dead = |process: String| {
            *dead.entry(process).or_insert_with_key(|text| self.store.processes.is_dead(text))
        };
        if row.get::<_, i64>(1)? == 0 {
            state.fence = (token > 0).then_some(Token::new(token));
            let value: Option<Vec<u8>> = row.get(12)?;
            let version = Version(unsigned(row, 11)?);
            state.cell = value.map(|value| Cell { version, value });
            return Ok(());
        }
        let (claim, mode) = (id_at(row, 3)?, mode_at(row, 4)?);
        let note = Note { by: row.get(7)?, text: row.get(8)? };
        let process: String = row.get(9)?;
        let (expires, detached) = (optional(row, 5)?, row.get::<_, bool>(10)?);
        let Some(expires) = expires else {
            if !self.has_timed_out(optional(row, 14)?, &process) && !is_dead(process) {
                state.waiters.push(Waiter { claim, mode, note });
            }
            return Ok(());
        };
        if self.lease_runs(expires, unsigned(row, 13)?) && (detached || !is_dead(process)) {
            state.holders.push(Holder {
                claim: Some(claim),
                token: Some(Token::new(token)),
                mode,
                note,
                left: Duration::from_nanos(expires - self.now),
                revoked: row.get(6)?,
            });
        }
        Ok(())
    }
}
