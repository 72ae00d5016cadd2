//! The URL of the engine, and its password, which is used but never shown.

use std::path::Path;

use lockset::{Builder, Lockset, Ticket};

use crate::args::EngineArgs;
use crate::output::Failure;

/// The variables that the guardian does not inherit. The command is given a URL without passwords.
pub(crate) const SECRET_VARIABLES: [&str; 3] =
    ["LOCKSET_URL", "LOCKSET_PASSWORD", "LOCKSET_PASSWORD_FILE"];

/// The schemes whose URL can contain one password for all servers.
const TAKE_PASSWORD: [&str; 11] = [
    "redis",
    "rediss",
    "redis+sentinel",
    "rediss+sentinel",
    "redis+cluster",
    "rediss+cluster",
    "etcd",
    "etcds",
    "zk",
    "zks",
    "postgres",
];
/// The schemes whose servers are independent and may have a user each.
const TAKE_PASSWORDS: [&str; 2] = ["redlock", "redlocks"];
/// The schemes with a login before each host. The others have one before all hosts, and its
/// password may contain commas.
const LOGIN_PER_HOST: [&str; 4] = ["redlock", "redlocks", "zk", "zks"];
/// The URL option that contains a password.
const SENTINEL_LOGIN: &str = "sentinel_login";

/// A complete URL, including the password. Therefore it has no `Debug` and no `Display`.
#[derive(Clone)]
pub(crate) struct Home {
    url: String,
    /// No URL was given: it is the one that a ticket names.
    from_ticket: bool,
}

impl Home {
    /// The URL that was given, else the one that the ticket names, else the default.
    pub(crate) fn from_args(args: &EngineArgs, ticket: Option<&Ticket>) -> Result<Self, Failure> {
        let given = args.url.as_deref().filter(|url| !url.is_empty());
        let (url, from_ticket) = match (given, ticket) {
            (Some(url), _) => (url, false),
            (None, Some(ticket)) => (url_of(ticket)?, true),
            (None, None) => ("local:", false),
        };
        let url = match password(args.password_file.as_deref())? {
            None => url.to_owned(),
            Some(password) => with_password(url, &password)?,
        };
        Ok(Self { url, from_ticket })
    }

    /// Connects, for verbs that do not wait.
    pub(crate) async fn connect(&self) -> Result<Lockset, Failure> {
        self.builder().connect().await.map_err(|error| match self.from_ticket {
            true => Failure::from(error).hint(format!(
                "LOCKSET_URL is not set, so the ticket's own home was tried: {}",
                without_passwords(&self.url)
            )),
            false => error.into(),
        })
    }

    pub(crate) fn builder(&self) -> Builder {
        Lockset::builder(&self.url)
    }

    /// The URL in the command's environment: without passwords, so that a nested call that needs
    /// one fails, and with the path of the file that was used, wherever the nested call runs.
    pub(crate) fn url_for_command(&self, locks: &Lockset) -> String {
        let is_local = self.url.starts_with("local:");
        // A path that is not UTF-8, or that a URL cannot name, is not replaced by another one.
        match locks.home() {
            home if is_local && !home.contains(['\u{fffd}', '?']) => {
                let options = self.url.split_once('?').map(|(_, options)| format!("?{options}"));
                format!("{home}{}", options.unwrap_or_default())
            }
            _ => without_passwords(&self.url),
        }
    }

    /// Removes every password of the URL from a text that will be shown.
    pub(crate) fn redact(&self, text: &str) -> String {
        let logins = userinfos(&self.url).chain(sentinel_login(&self.url));
        let passwords = logins.filter_map(|info| info.split_once(':'));
        passwords.filter(|(_, password)| !password.is_empty()).fold(
            text.to_owned(),
            |text, (_, password)| {
                text.replace(password, "***").replace(&percent_decoded(password), "***")
            },
        )
    }
}

/// The URL of a ticket's engine.
fn url_of(ticket: &Ticket) -> Result<&str, Failure> {
    let home = ticket.home();
    // It does not name sentinels, and another process has other memory.
    match home.contains("://") || home.starts_with("local:") {
        true => Ok(home),
        false => Err(Failure::own(format!(
            "the ticket's lock `{}` is at {home}, which is not a URL to connect to",
            ticket.name()
        ))
        .hint("set LOCKSET_URL to the URL with which it was acquired")),
    }
}

fn password(file: Option<&Path>) -> Result<Option<String>, Failure> {
    let Some(file) = file else {
        return match std::env::var("LOCKSET_PASSWORD") {
            Ok(password) if password.is_empty() => Ok(None),
            Ok(password) => Ok(Some(password)),
            Err(std::env::VarError::NotPresent) => Ok(None),
            Err(_) => Err(Failure::own("LOCKSET_PASSWORD is not valid UTF-8")),
        };
    };
    let text = std::fs::read_to_string(file).map_err(|error| {
        Failure::own(format!("cannot read the password file {}: {error}", file.display()))
    })?;
    match text.trim_end_matches(['\n', '\r']) {
        "" => Err(Failure::own(format!("the password file {} is empty", file.display()))),
        password => Ok(Some(password.to_owned())),
    }
}

/// Puts the password into the URL, where its engine looks for it.
fn with_password(url: &str, password: &str) -> Result<String, Failure> {
    let scheme = url.split(':').next().unwrap_or_default();
    let is_one = TAKE_PASSWORD.contains(&scheme);
    let takes_any = is_one || TAKE_PASSWORDS.contains(&scheme);
    let Some((_, rest)) = url.split_once("://").filter(|_| takes_any) else {
        return Err(Failure::own(format!("the {scheme} engine takes no password"))
            .hint("leave out --password-file, and unset LOCKSET_PASSWORD"));
    };
    let (authority, tail) = parted(rest);
    let encoded = percent_encoded(password);
    let with = |host: &str| match host.rsplit_once('@') {
        None => Ok(format!(":{encoded}@{host}")),
        Some((user, host)) if !user.contains(':') => Ok(format!("{user}:{encoded}@{host}")),
        Some(_) => Err(Failure::own("the URL has a password already")
            .hint("give it in one place: in the URL, in a file, or in LOCKSET_PASSWORD")),
    };
    let authority = match is_one {
        true => with(authority)?,
        false => authority.split(',').map(with).collect::<Result<Vec<_>, _>>()?.join(","),
    };
    Ok(format!("{scheme}://{authority}{tail}"))
}

/// Users and hosts of a URL, and what comes after them. `#` has no meaning to an engine.
fn parted(rest: &str) -> (&str, &str) {
    rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()))
}

/// The `user:password` parts of a URL: the one for all hosts, if it is that, and one per host.
fn userinfos(url: &str) -> impl Iterator<Item = &str> {
    let (authority, _) = parted(url.split_once("://").map_or("", |(_, rest)| rest));
    let parts = std::iter::once(authority).chain(authority.split(','));
    parts.filter_map(|part| part.rsplit_once('@')).map(|(info, _)| info)
}

/// The login of the sentinels.
fn sentinel_login(url: &str) -> Option<&str> {
    let (_, options) = url.split_once('?')?;
    let mut options = options.split('&').filter_map(|option| option.split_once('='));
    options.find(|(name, _)| *name == SENTINEL_LOGIN).map(|(_, login)| login)
}

/// The URL with its users, and without their passwords.
fn without_passwords(url: &str) -> String {
    let (url, options) = url.split_once('?').unwrap_or((url, ""));
    let is_kept = |option: &&str| option.split('=').next() != Some(SENTINEL_LOGIN);
    let options: Vec<&str> = options.split('&').filter(is_kept).collect();
    let mut shown = match url.split_once("://") {
        None => url.to_owned(),
        Some((scheme, rest)) => {
            let (authority, path) = parted(rest);
            let authority = match LOGIN_PER_HOST.contains(&scheme) {
                true => authority.split(',').map(without_password).collect::<Vec<_>>().join(","),
                false => without_password(authority),
            };
            format!("{scheme}://{authority}{path}")
        }
    };
    if options.iter().any(|option| !option.is_empty()) {
        shown += &format!("?{}", options.join("&"));
    }
    shown
}

fn without_password(authority: &str) -> String {
    let Some((login, hosts)) = authority.rsplit_once('@') else { return authority.to_owned() };
    match login.split(':').next() {
        None | Some("") => hosts.to_owned(),
        Some(user) => format!("{user}@{hosts}"),
    }
}

fn percent_encoded(text: &str) -> String {
    let mut out = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            out.push(byte as char);
        } else {
            out += &format!("%{byte:02X}");
        }
    }
    out
}

fn percent_decoded(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let hex = bytes.get(at + 1..at + 3).and_then(|hex| std::str::from_utf8(hex).ok());
        match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) if bytes[at] == b'%' => {
                out.push(byte);
                at += 3;
            }
            _ => {
                out.push(bytes[at]);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_goes_where_its_engine_looks_for_it() {
        let url = |url, password| with_password(url, password).unwrap();
        assert_eq!(url("redis://h:6379/0", "p@:/"), "redis://:p%40%3A%2F@h:6379/0");
        assert_eq!(url("redis://me@h", "x"), "redis://me:x@h");
        assert_eq!(url("redlock://a,b@c?x=1", "s"), "redlock://:s@a,b:s@c?x=1");
        assert_eq!(url("zk://me@a,b/locks", "s"), "zk://me:s@a,b/locks");
        assert_eq!(url("etcd://root@a:1,b:2/p", "s"), "etcd://root:s@a:1,b:2/p");
        assert_eq!(url("rediss+cluster://a,b", "s"), "rediss+cluster://:s@a,b");
        assert_eq!(url("redis+sentinel://me@a,b/m", "s"), "redis+sentinel://me:s@a,b/m");
    }

    #[test]
    fn a_url_is_passed_on_without_its_passwords() {
        for (url, shown) in [
            ("redis://h:6379/0?prefix=a", "redis://h:6379/0?prefix=a"),
            ("redis://:pw@h", "redis://h"),
            ("rediss://me:p%40w@h/3?ca=x", "rediss://me@h/3?ca=x"),
            ("redis+cluster://me:p,w@a,b:2", "redis+cluster://me@a,b:2"),
            ("redis+sentinel://a,b/m?sentinel_login=u:pw", "redis+sentinel://a,b/m"),
            (
                "redis+sentinel://u:p@a/m?prefix=p&sentinel_login=u:pw&first_lease=1s",
                "redis+sentinel://u@a/m?prefix=p&first_lease=1s",
            ),
            ("redlock://:p@a,me:q@b,c/1?max_ttl=1m", "redlock://a,me@b,c/1?max_ttl=1m"),
            ("etcd://root:p#,@w@a,b/x?token_base=7", "etcd://root@a,b/x?token_base=7"),
            ("zk://me:p@a,you:q@b/locks", "zk://me@a,you@b/locks"),
            ("memory:shop", "memory:shop"),
        ] {
            assert_eq!(without_passwords(url), shown);
        }
    }

    #[test]
    fn a_password_that_cannot_be_used_is_refused() {
        for url in ["local:", "local:/x.db", "memory:", "redis://u:p@h", "zookeeper://h"] {
            assert!(with_password(url, "x").is_err(), "{url}");
        }
    }

    #[test]
    fn a_password_is_never_shown() {
        let home = Home { url: "redis://u:se%2Fcret@h,:other@i/0".into(), from_ticket: false };
        let shown = home.redact("cannot reach redis://u:se%2Fcret@h (se/cret, other)");
        assert_eq!(shown, "cannot reach redis://u:***@h (***, ***)");
        let home = Home { url: "etcd://root:with,comma#@h,i/p".into(), from_ticket: false };
        assert_eq!(home.redact("root, with,comma#"), "root, ***");
        let home = Home {
            url: "redis+sentinel://h/m?sentinel_login=me:hidden".into(),
            from_ticket: false,
        };
        assert_eq!(home.redact("me, hidden"), "me, ***");
    }
}
