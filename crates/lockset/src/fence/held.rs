//! Exact fencing: a lock in PostgreSQL that waits for the transaction it protects.

use std::sync::Arc;

use tokio_postgres::Transaction;
use tokio_postgres::types::Type;

use crate::error::{Error, LossReason, Result};
use crate::guard::Guard;

/// The code of an error that says that the token does not hold.
const NOT_HELD: &str = "LF001";

/// Checks, inside a transaction that writes, that `guard` holds its lock, and keeps the lock from
/// moving on until that transaction has ended. `schema` is that of the locks, which is `lockset`
/// unless the URL says otherwise.
///
/// The lock must be in the same PostgreSQL database. No pause, however long, lets a stale write
/// through: the next holder is admitted only after this transaction was committed or rolled back.
/// A [`FencingToken`](super::FencingToken) checked at the resource rejects writes that come after
/// the next holder's; this also rejects the one that comes before it.
///
/// Call it before the first write, and roll back if it fails. In a transaction that is isolated by
/// `REPEATABLE READ` or more, make it the first statement. The server ends a transaction that is
/// idle for 30 seconds after it, so that a client that is gone does not keep the lock for ever.
///
/// ```no_run
/// # async fn example(
/// #     mut db: tokio_postgres::Client, guard: lockset::Guard,
/// # ) -> Result<(), Box<dyn std::error::Error>> {
/// use lockset::fence::assert_held;
///
/// let write = db.transaction().await?;
/// assert_held(&write, "lockset", &guard).await?;
/// write.execute("UPDATE stock SET count = count - 1 WHERE item = 'apple'", &[]).await?;
/// write.commit().await?;
/// # Ok(()) }
/// ```
///
/// # Errors
/// [`Error::Lost`] if the lock is not held any more; [`Error::Invalid`] if the schema is not an
/// identifier; [`Error::Unreachable`] if the server fails, with the `tokio_postgres::Error` as its
/// source.
///
/// # Cancel safety
/// If dropped, the lock may wait for the transaction. Roll it back.
pub async fn assert_held(write: &Transaction<'_>, schema: &str, guard: &Guard) -> Result<()> {
    let is_identifier = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    if schema.is_empty() || !schema.chars().all(is_identifier) {
        return Err(Error::invalid("schema", schema, "it is that of the locks' URL"));
    }
    let name = guard.name().as_str();
    // The engine's own token: the database does not know of a `token_base`.
    let token = i64::try_from(guard.grant().token.get()).unwrap_or(i64::MAX);
    let call = format!("SELECT {schema}.assert_held($1, $2)");
    let checked = write.query_typed(&call, &[(&name, Type::TEXT), (&token, Type::INT8)]).await;
    checked.map(drop).map_err(|error| match error.code().map(|code| code.code()) {
        Some(NOT_HELD) => Error::lost(guard.name(), LossReason::Forgotten),
        _ => {
            let reply = error.as_db_error().map_or(error.to_string(), |db| db.message().to_owned());
            let what = format!("the lock could not be checked: {reply}");
            let source = Some(Arc::new(error) as _);
            Error::Unreachable { engine: "postgres", what, retryable: false, source }
        }
    })
}
