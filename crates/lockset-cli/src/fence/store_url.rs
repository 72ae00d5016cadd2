//! The URL of a store of marks, and its password, which is used but never shown.

use std::path::{Path, PathBuf};
use std::time::Duration;

use lockset::Url;
use lockset::fence::{
    FenceError, FenceStore, FileFence, PostgresFenceStore, RedisFenceStore, SqliteFenceStore,
};

use crate::output::Failure;

/// A store that does not reply in this time cannot tell.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);

const FORMS: &str = "sqlite:PATH, file:FOLDER, redis://host:port/db, postgres://user@host:port/db";

/// The store that was given. It has no `Debug`, because of its password.
pub(super) enum StoreUrl {
    Sqlite(PathBuf),
    Folder(PathBuf),
    Redis(String),
    Postgres(String),
}

impl StoreUrl {
    /// The store, with the password of the file or of LOCKSET_PASSWORD if it is a server.
    pub(super) fn parse(text: &str, password_file: Option<&Path>) -> Result<Self, Failure> {
        // What is before the colon contains no secret; the rest is not repeated.
        let is_scheme = |scheme: &str| scheme.chars().all(|c| c.is_ascii_alphanumeric());
        let parts = text.split_once(':').filter(|(scheme, _)| is_scheme(scheme));
        let Some((scheme, rest)) = parts else {
            let what = "--store is not a store of marks";
            return Err(Failure::own(what).hint(format!("it is one of {FORMS}")));
        };
        match scheme {
            "sqlite" | "file" if rest.is_empty() => {
                let what = format!("--store {scheme}: names no path");
                Err(Failure::own(what).hint(format!("it is one of {FORMS}")))
            }
            "sqlite" => Ok(Self::Sqlite(rest.into())),
            "file" => Ok(Self::Folder(rest.into())),
            "redis" | "rediss" => Ok(Self::Redis(with_password(scheme, rest, password_file)?)),
            "postgres" | "postgresql" => {
                Ok(Self::Postgres(with_password(scheme, rest, password_file)?))
            }
            _ => {
                let what = format!("there are no stores of marks with URLs `{scheme}:…`");
                Err(Failure::own(what).hint(format!("a store is one of {FORMS}")))
            }
        }
    }

    pub(super) async fn open(&self) -> Result<Box<dyn FenceStore>, FenceError> {
        Ok(match self {
            Self::Sqlite(path) => Box::new(SqliteFenceStore::open(path)?),
            Self::Folder(path) => Box::new(FileFence::open(path)?),
            Self::Redis(url) => Box::new(RedisFenceStore::connect(url).await?),
            Self::Postgres(url) => Box::new(PostgresFenceStore::connect(url).await?),
        })
    }

    /// The only kind of store that writes a file itself.
    pub(super) fn open_folder(&self) -> Result<Result<FileFence, FenceError>, Failure> {
        match self {
            Self::Folder(path) => Ok(FileFence::open(path)),
            _ => Err(Failure::own("`fence write` writes files, and --store is not a folder")
                .hint("give --store file:FOLDER; databases are written by their own clients")),
        }
    }

    /// Opening a file makes one where there is none, which is not what a reader wants.
    pub(super) fn must_exist(&self) -> Result<(), Failure> {
        match self {
            Self::Sqlite(path) | Self::Folder(path) if !path.exists() => {
                let what = format!("there is no store of marks at {}", path.display());
                Err(Failure::own(what).hint("the first `lockset fence check` makes it"))
            }
            _ => Ok(()),
        }
    }

    /// The result of a request to the store, unless it takes too long.
    pub(super) async fn bounded<T>(&self, reply: impl Future<Output = T>) -> Result<T, Failure> {
        tokio::time::timeout(REPLY_TIMEOUT, reply).await.map_err(|_| {
            let what = format!("the store did not reply within {} s", REPLY_TIMEOUT.as_secs());
            Failure::own(what).hint("it cannot be told: treat the write as rejected")
        })
    }

    /// Removes every password of the URL from a text that will be shown.
    pub(super) fn redact(&self, text: &str) -> String {
        match self {
            Self::Sqlite(_) | Self::Folder(_) => text.to_owned(),
            Self::Redis(url) | Self::Postgres(url) => match url.parse::<Url>() {
                Ok(url) => url.redact(text),
                Err(_) => String::new(),
            },
        }
    }
}

/// The URL of a server, with the password that is stored elsewhere.
fn with_password(scheme: &str, rest: &str, file: Option<&Path>) -> Result<String, Failure> {
    let invalid = |why: &str| {
        let what = format!("the URL `{scheme}:…` of the store is not valid: {why}");
        Failure::own(what).hint(format!("a store is one of {FORMS}"))
    };
    let rest = rest.strip_prefix("//").ok_or_else(|| invalid("`//` and a host are missing"))?;
    let (authority, path) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
    // A part of a password would be taken for a path or an option, and be shown.
    if path.contains('@') {
        return Err(invalid("`/`, `?` and `@` in a password are written %2F, %3F and %40"));
    }
    if path.contains("password=") {
        return Err(invalid("a password is written before the host, as `user:password@`"));
    }
    let Some(password) = stored_password(file)? else {
        return Ok(format!("{scheme}://{rest}"));
    };
    let password = percent_encode(&password);
    let authority = match authority.rsplit_once('@') {
        None => format!(":{password}@{authority}"),
        Some((user, hosts)) if !user.contains(':') => format!("{user}:{password}@{hosts}"),
        Some(_) => {
            return Err(Failure::own("the URL of the store has a password already")
                .hint("give it in one place: in the URL, in a file, or in LOCKSET_PASSWORD"));
        }
    };
    Ok(format!("{scheme}://{authority}{path}"))
}

fn stored_password(file: Option<&Path>) -> Result<Option<String>, Failure> {
    let Some(file) = file else {
        return Ok(std::env::var("LOCKSET_PASSWORD").ok().filter(|value| !value.is_empty()));
    };
    let bad = |why: String| Failure::own(format!("the password file {}: {why}", file.display()));
    let text = std::fs::read_to_string(file).map_err(|error| bad(error.to_string()))?;
    match text.trim_end_matches(['\n', '\r']) {
        "" => Err(bad("it is empty".to_owned())),
        password => Ok(Some(password.to_owned())),
    }
}

/// Writes every byte but ASCII letters, digits and `-._~` as `%41`.
fn percent_encode(text: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    let encode = |byte| match is_plain(byte) {
        true => char::from(byte).to_string(),
        false => format!("%{byte:02X}"),
    };
    text.bytes().map(encode).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<StoreUrl, Failure> {
        StoreUrl::parse(text, None)
    }

    #[test]
    fn a_password_is_put_where_the_store_expects_it() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("password");
        std::fs::write(&file, "p@ss/word\n").unwrap();
        for (text, expected) in [
            ("redis://host/2", "redis://:p%40ss%2Fword@host/2"),
            ("redis://me@host:1", "redis://me:p%40ss%2Fword@host:1"),
            ("postgres://me@host?x=1", "postgres://me:p%40ss%2Fword@host?x=1"),
        ] {
            let store = StoreUrl::parse(text, Some(&file)).map_err(|f| f.message().to_owned());
            let (StoreUrl::Redis(url) | StoreUrl::Postgres(url)) = store.unwrap() else {
                panic!("{text} is a server");
            };
            assert_eq!(url, expected);
        }
        assert!(StoreUrl::parse("redis://me:x@host", Some(&file)).is_err());
    }

    #[test]
    fn what_is_not_a_store_is_rejected_without_its_secrets() {
        for text in [
            "",
            "nonsense",
            "sqlite:",
            "file:",
            "mysql://me:s3cret@host",
            ":s3cret@host",
            "redis:s3cret@host",
            "redis://me:x/s3cret@host",
            "postgres://me:x?s3cret@host",
            "postgres://host/db?password=s3cret",
        ] {
            let failure = parse(text).err().unwrap_or_else(|| panic!("{text:?} was accepted"));
            assert!(!format!("{failure:?}").contains("s3cret"), "{failure:?}");
        }
    }

    #[test]
    fn passwords_are_redacted() {
        let store = parse("postgres://me:s3%20cret@host/db").map_err(|f| f.message().to_owned());
        assert_eq!(store.unwrap().redact("with s3%20cret, s3 cret"), "with ***, ***");
    }
}
