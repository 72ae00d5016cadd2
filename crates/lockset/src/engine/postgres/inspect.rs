//! Inspecting one name, and listing all; and the cells, for latches and barriers.

use tokio_postgres::types::Type;

use super::connection::Argument;
use super::error::{PostgresRequestError, unexpected_reply};
use super::record::{column, parse_states};
use super::statements::Call;
use super::{LIST_TIMEOUT, PostgresCore, REQUEST_TIMEOUT};
use crate::engine::{Cell, LockState, Swap, Version};
use crate::error::Result;
use crate::name::{Name, Prefix};

impl PostgresCore {
    pub(super) async fn inspect(&self, name: &Name) -> Result<LockState> {
        let mut states = self.states(name.as_str(), true).await?;
        Ok(states.pop().unwrap_or_else(|| LockState::free(name.clone())))
    }

    pub(super) async fn list(&self, prefix: &Prefix) -> Result<Vec<LockState>> {
        let mut states = self.states(prefix.as_str(), false).await?;
        states.retain(LockState::is_used);
        Ok(states)
    }

    async fn states(&self, scope: &str, exact: bool) -> Result<Vec<LockState>> {
        let arguments: &[Argument<'_>] = &[(&scope, Type::TEXT), (&exact, Type::BOOL)];
        let timeout = if exact { REQUEST_TIMEOUT } else { LIST_TIMEOUT };
        let rows = self.reads.call(Call::Inspect, arguments, timeout).await;
        parse_states(&rows.map_err(PostgresRequestError::into_error)?)
    }

    pub(super) async fn cell(
        &self,
        name: &Name,
        expect: Version,
        value: Option<Vec<u8>>,
    ) -> Result<Swap> {
        let (name, expected) = (name.as_str(), i64::try_from(expect.0).unwrap_or(i64::MAX));
        let arguments: &[Argument<'_>] =
            &[(&name, Type::TEXT), (&expected, Type::INT8), (&value, Type::BYTEA)];
        let rows = self.reads.call(Call::Swap, arguments, REQUEST_TIMEOUT).await;
        let rows = rows.map_err(PostgresRequestError::into_error)?;
        let row = rows.first().ok_or_else(|| unexpected_reply("no row"))?;
        let version = Version(u64::try_from(column::<i64>(row, 1)?).unwrap_or(0));
        match column(row, 0)? {
            true => Ok(Swap::Done(version)),
            false => {
                let value = column::<Option<Vec<u8>>>(row, 2)?.unwrap_or_default();
                Ok(Swap::Found(Cell { version, value }))
            }
        }
    }
}
