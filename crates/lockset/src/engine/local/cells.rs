//! Cells: the small values behind latches and barriers.

use rusqlite::{OptionalExtension, params};

use super::record::{int, unsigned};
use super::store::{SqlResult, Transaction};
use crate::clock::wall_micros;
use crate::engine::{Cell, Swap, Version};
use crate::name::Name;

impl Transaction<'_> {
    pub(super) fn cell(
        &mut self,
        name: &Name,
        expect: Version,
        value: Option<&[u8]>,
    ) -> SqlResult<Swap> {
        let own: Option<(u64, Option<Vec<u8>>)> = self
            .db
            .prepare_cached("SELECT version, value FROM lock WHERE name = ?1 AND seq = 0")?
            .query_row([name.as_str()], |row| Ok((unsigned(row, 0)?, row.get(1)?)))
            .optional()?;
        let (last, found) = own.unwrap_or_default();
        let found = found.map(|value| Cell { version: Version(last), value }).unwrap_or_default();
        if found.version != expect {
            return Ok(Swap::Found(found));
        }
        let version =
            if value.is_some() { last.saturating_add(1).max(wall_micros()) } else { last };
        self.db
            .prepare_cached(
                "INSERT INTO lock (name, seq, version, value) VALUES (?1, 0, ?2, ?3)
                 ON CONFLICT DO UPDATE SET version = excluded.version, value = excluded.value",
            )?
            .execute(params![name.as_str(), int(version), value])?;
        self.changed = true;
        self.tell_watchers(name)?;
        Ok(Swap::Done(if value.is_some() { Version(version) } else { Version::ABSENT }))
    }
}
