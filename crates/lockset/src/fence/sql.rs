//! What the fences in SQL databases share.

use crate::token::Token;

use super::FenceError;

/// Fails unless the tables have the version that this program knows.
pub(super) fn check_version(
    store: &'static str,
    found: Option<i64>,
    known: i64,
) -> Result<(), FenceError> {
    if found == Some(known) {
        return Ok(());
    }
    let found = found.map_or("none".to_owned(), |version| version.to_string());
    let what = format!(
        "the tables of the marks have version {found}, and this program knows version {known}; \
         update the program"
    );
    Err(FenceError::store(store, what))
}

/// The token that a column contains.
pub(super) fn token_of(store: &'static str, column: i64) -> Result<Token, FenceError> {
    let value = u64::try_from(column);
    value.map(Token::new).map_err(|_| FenceError::store(store, format!("a mark is {column}")))
}
