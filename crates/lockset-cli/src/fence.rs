//! `fence`: checks of tokens at a resource, for shell scripts.

mod store_url;

use std::io::{self, Read};
use std::path::Path;

use lockset::Token;
use lockset::fence::{FenceError, FencingToken};

use crate::args::{CheckArgs, FenceVerb, MarksArgs, TokenArgs, WriteArgs};
use crate::output::{self, Failure, Paint, code, print, print_json};

use self::store_url::StoreUrl;

/// The longest content that `write` accepts: it is in memory while the token is checked.
const MAX_CONTENT: u64 = 64 << 20;

/// Executes a verb of `fence` and returns the exit code.
pub(crate) fn execute(verb: &FenceVerb, password_file: Option<&Path>) -> Result<u8, Failure> {
    let store = match verb {
        FenceVerb::Check(args) => &args.store.store,
        FenceVerb::Write(args) => &args.store.store,
        FenceVerb::Show(args) => &args.store.store,
    };
    let store = StoreUrl::parse(store, password_file)?;
    let done = async {
        match verb {
            FenceVerb::Check(args) => check(args, &store).await,
            FenceVerb::Write(args) => write(args, &store),
            FenceVerb::Show(args) => show(args, &store).await,
        }
    };
    let outcome = crate::runtime()?.block_on(done);
    outcome.map(|()| 0).map_err(|failure| failure.redacted(|text| store.redact(text)))
}

async fn check(args: &CheckArgs, store: &StoreUrl) -> Result<(), Failure> {
    let token = fencing_token(&args.token)?;
    let resource = args.resource.as_ref().unwrap_or(token.lock());
    let admitted = store.bounded(async {
        let opened = store.open().await?;
        opened.admit(resource, token.lock(), &token).await
    });
    admitted.await?.map_err(rejected)
}

fn write(args: &WriteArgs, store: &StoreUrl) -> Result<(), Failure> {
    let token = fencing_token(&args.token)?;
    let file = args.file.as_ref().unwrap_or(token.lock());
    let fence = store.open_folder()?.map_err(rejected)?;
    let content = content()?;
    fence.write(file.as_str(), token.lock(), &token, &content).map_err(rejected)
}

async fn show(args: &MarksArgs, store: &StoreUrl) -> Result<(), Failure> {
    store.must_exist()?;
    let marks = store.bounded(async { store.open().await?.marks().await }).await?;
    let marks = marks.map_err(|error| Failure::own(output::with_sources(&error)))?;
    if args.json {
        return print_json(&marks);
    }
    match &marks[..] {
        [] => print("no token was admitted yet\n"),
        marks => print(output::table_of_marks(marks, Paint::for_stdout())),
    }
}

/// The token that was given, else the one that `lockset run` exports.
fn fencing_token(args: &TokenArgs) -> Result<FencingToken, Failure> {
    let (name, token) = match (&args.name, &args.token) {
        (Some(name), Some(token)) => (name.clone(), token.clone()),
        _ => (exported("LOCKSET_NAME")?.parse()?, exported("LOCKSET_TOKEN")?),
    };
    Ok(FencingToken::new(name, parse_token(&token)?)?)
}

/// `u64::from_str` also takes a sign. The range is checked with the name.
fn parse_token(text: &str) -> Result<Token, Failure> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let token = is_number.then(|| text.parse().ok()).flatten();
    token.ok_or_else(|| {
        let what = format!("`{}` is not a fencing token", text.escape_debug());
        Failure::own(what).hint("it is a whole number from 1 to 9223372036854775807")
    })
}

fn exported(variable: &str) -> Result<String, Failure> {
    let value = std::env::var(variable).ok().filter(|value| !value.is_empty());
    value.ok_or_else(|| {
        Failure::own(format!("no lock and token are given, and {variable} is not set"))
            .hint("give NAME and TOKEN, or run this within `lockset run`, which sets both")
    })
}

fn content() -> Result<Vec<u8>, Failure> {
    let mut content = Vec::new();
    let read = io::stdin().lock().take(MAX_CONTENT + 1).read_to_end(&mut content);
    read.map_err(|error| Failure::own(format!("cannot read stdin: {error}; nothing was written")))?;
    match content.len() as u64 <= MAX_CONTENT {
        true => Ok(content),
        false => {
            let what = format!("stdin is longer than {MAX_CONTENT} bytes; nothing was written");
            Err(Failure::own(what).hint("write it in parts, to a file each"))
        }
    }
}

fn rejected(error: FenceError) -> Failure {
    let message = output::with_sources(&error);
    match &error {
        FenceError::Stale { lock, .. } => Failure::new(code::STALE, message)
            .hint(format!("another client has held `{lock}` since; take the lock again")),
        _ => Failure::own(message).hint("it cannot be told: treat the write as rejected"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_a_plain_number() {
        assert_eq!(parse_token("17").unwrap(), Token::new(17));
        for text in ["", "-1", "+1", "1x", " 1", "1.0", "99999999999999999999"] {
            assert!(parse_token(text).is_err(), "{text:?}");
        }
    }
}
