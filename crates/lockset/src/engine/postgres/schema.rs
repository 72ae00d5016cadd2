//! The schema on the server: created, checked, and printed for an administrator.

use tokio_postgres::types::Type;

use super::ENGINE;
use super::connect::OpenClient;
use super::error::{PostgresRequestError, classify, unreachable_error};
use crate::error::{Error, Result};

/// The version of the schema.
const VERSION: i32 = 1;
const SCRIPT: &[&str] = &[
    include_str!("schema.sql"),
    include_str!("queue.sql"),
    include_str!("held.sql"),
    include_str!("operations.sql"),
];
/// As in `schema.sql`: one set-up at a time.
const SERIALIZE: &str =
    "SELECT pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended('lockset schema', 0))";

/// The SQL that creates the schema, for an administrator; it may be run again.
///
/// # Errors
/// [`Error::Invalid`] if the name of the schema is not valid.
pub fn schema_script(schema: &str) -> Result<String> {
    super::PostgresOptions { schema: schema.to_owned(), ..Default::default() }.check()?;
    Ok(script(schema))
}

fn script(schema: &str) -> String {
    let text = SCRIPT.join("\n");
    text.replace("@schema@", schema).replace("@version@", &VERSION.to_string())
}

/// Creates the schema if it is missing or older, and checks that this program knows its version.
pub(super) async fn set_up(
    connection: &OpenClient,
    schema: &str,
) -> Result<(), PostgresRequestError> {
    if version(connection, schema).await? == Some(VERSION) {
        return Ok(());
    }
    // A pooler may change the server's session between two transactions, but not inside one.
    connection.client.batch_execute(&format!("BEGIN; {SERIALIZE}")).await.map_err(explain_mode)?;
    let created = create(connection, schema).await;
    let end = if created.is_ok() { "COMMIT" } else { "ROLLBACK" };
    let ended = connection.client.batch_execute(end).await.map_err(classify);
    created.and(ended)
}

async fn create(connection: &OpenClient, schema: &str) -> Result<(), PostgresRequestError> {
    match version(connection, schema).await? {
        Some(VERSION) => return Ok(()),
        Some(newer) if newer > VERSION => {
            let what = format!(
                "the schema `{schema}`: it has version {newer}, and this program knows version \
                 {VERSION}; update the program"
            );
            let error = Error::Unsupported { engine: ENGINE, what };
            return Err(PostgresRequestError::Refused(error));
        }
        _ => {}
    }
    connection.client.batch_execute(&script(schema)).await.map_err(|error| {
        let refused = error.code().is_some_and(|code| code.code() == "42501");
        if !refused {
            return classify(error);
        }
        let what = format!(
            "the schema `{schema}` of the locks is missing or old, and the role may not create \
             it; let an administrator run `lockset schema postgres --schema {schema} | psql`"
        );
        PostgresRequestError::Refused(unreachable_error(what, false, Some(error)))
    })
}

/// The version that is installed.
async fn version(
    connection: &OpenClient,
    schema: &str,
) -> Result<Option<i32>, PostgresRequestError> {
    // Asks the catalog, because a failed statement would end the transaction.
    let find = "SELECT EXISTS (
        SELECT FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
        WHERE n.nspname = $1 AND p.proname = 'schema_version')";
    let rows = connection.client.query_typed(find, &[(&schema, Type::TEXT)]).await;
    let found = rows.map_err(classify)?.first().and_then(|row| row.try_get(0).ok());
    if found != Some(true) {
        return Ok(None);
    }
    let newest = format!("SELECT {schema}.schema_version()");
    let rows = connection.client.query_typed(&newest, &[]).await.map_err(classify)?;
    Ok(rows.first().and_then(|row| row.try_get(0).ok()))
}

/// PgBouncer in statement mode refuses transactions.
fn explain_mode(error: tokio_postgres::Error) -> PostgresRequestError {
    match error.as_db_error().is_some_and(|db| db.message().contains("statement pooling")) {
        true => PostgresRequestError::Refused(statement_mode()),
        false => classify(error),
    }
}

fn statement_mode() -> Error {
    let what = "a pooler in statement mode: it forbids transactions, by which the schema is set \
                up and `assert_held` protects writes; use transaction or session mode"
        .to_owned();
    Error::Unsupported { engine: ENGINE, what }
}

/// Refuses a pooler in statement mode.
pub(super) async fn check_transactions(
    connection: &OpenClient,
) -> Result<(), PostgresRequestError> {
    connection.client.batch_execute("BEGIN").await.map_err(explain_mode)?;
    connection.client.batch_execute("COMMIT").await.map_err(classify)
}
