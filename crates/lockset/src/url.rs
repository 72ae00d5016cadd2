//! URLs of engines: `scheme://[user[:password]@]host[:port],…[/path][?option=value&…]`, or
//! `scheme:path` for an engine without servers. All engines parse theirs here.
//!
//! The `url` crate does not serve, because it allows one host only.

#[cfg(any(test, fuzzing))]
pub(crate) mod malformed;

use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::token::Token;

/// The engines, as their URLs are written.
const ENGINES: &[&str] = &[
    "memory:",
    "local:",
    "local:/path/file.db",
    "redis://host:port",
    "redis+sentinel://host:port,…/service",
    "redis+cluster://host:port,…",
    "redlock://host:port,host:port,host:port,…",
    "etcd://host:port,…/prefix",
    "zk://host:port,…/chroot",
    "postgres://user@host:port,…/database",
    "rediss://, redlocks://, etcds:// and zks:// for TLS",
];
/// The options that every engine has.
const COMMON_OPTIONS: &[&str] = &["token_base", "ttl"];
/// The option that contains a password.
const SENTINEL_LOGIN: &str = "sentinel_login";
/// The option that is a URL, which may contain one.
const LISTEN: &str = "listen";
/// What stands for a part of a URL that may be a secret.
const HIDDEN: &str = "…";

/// Where locks are stored: the URL of an engine, parsed. Its passwords are in neither `Debug` nor
/// `Display` nor any error.
///
/// ```
/// use lockset::Url;
///
/// let url: Url = "redis://worker@cache.example/2?ttl=5s".parse()?;
/// let url = url.with_password("s3cret")?;
/// assert_eq!(url.to_string(), "redis://worker@cache.example/2?ttl=5s");
/// # Ok::<(), lockset::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Url {
    scheme: String,
    /// What is between the first colon and the options.
    rest: String,
    options: Vec<(String, String)>,
}

/// A server's host, without brackets, and port.
#[cfg(any(feature = "redis", feature = "etcd", feature = "postgres", feature = "zookeeper"))]
pub(crate) type HostPort = (String, u16);

/// The servers of a URL, and its path.
#[cfg(any(feature = "redis", feature = "etcd", feature = "postgres", feature = "zookeeper"))]
pub(crate) struct UrlServers {
    pub(crate) hosts: Vec<HostPort>,
    /// One for each host.
    pub(crate) logins: Vec<Option<Login>>,
    /// What follows the slash after the hosts, decoded.
    pub(crate) path: String,
}

/// A user, or none if it is empty; likewise a password. It has no `Debug`.
#[cfg(any(feature = "redis", feature = "etcd", feature = "postgres", feature = "zookeeper"))]
#[derive(Clone)]
pub(crate) struct Login {
    pub(crate) user: String,
    pub(crate) password: String,
}

/// Where the logins are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Logins {
    /// One before all hosts. Its password may contain commas.
    Shared,
    /// Each host may have one.
    PerHost,
}

impl Url {
    /// The URL in `LOCKSET_URL`, or `local:` if that is empty or not set, with the password that
    /// the file named by `LOCKSET_PASSWORD_FILE` contains, or that is in `LOCKSET_PASSWORD`. The
    /// command reads the same variables.
    ///
    /// # Errors
    /// [`Error::Invalid`] if a variable, the file or the URL is invalid.
    pub fn from_env() -> Result<Self> {
        let url = variable("LOCKSET_URL")?.unwrap_or_else(|| "local:".to_owned());
        let file = variable("LOCKSET_PASSWORD_FILE")?;
        url.parse::<Self>()?.with_stored_password(file.as_ref().map(Path::new))
    }

    /// Adds a password, where the engine expects it.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the engine takes no password, or the URL has one already.
    pub fn with_password(mut self, password: &str) -> Result<Self> {
        let logins = logins(&self.scheme).zip(self.rest.strip_prefix("//"));
        let Some((logins, rest)) = logins else {
            let why = format!("the {} engine takes no password", self.scheme);
            return Err(Error::invalid("password", "(not shown)", why));
        };
        let (authority, path) = split_authority(rest);
        let encoded = percent_encode(password);
        let insert = |host: &str| match host.rsplit_once('@') {
            None => Ok(format!(":{encoded}@{host}")),
            Some((user, host)) if !user.contains(':') => Ok(format!("{user}:{encoded}@{host}")),
            Some(_) => {
                let why = "the URL has a password already";
                Err(Error::invalid("password", "(not shown)", why))
            }
        };
        // ZooKeeper needs one login; the servers of a quorum do not know each other.
        let authority = match logins == Logins::Shared || self.scheme.starts_with("zk") {
            true => insert(authority)?,
            false => authority.split(',').map(insert).collect::<Result<Vec<_>>>()?.join(","),
        };
        self.rest = format!("//{authority}{path}");
        Ok(self)
    }

    /// Adds the password that `file` contains, or without a file the one in `LOCKSET_PASSWORD`.
    /// Without either, the URL stays as it is.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the file cannot be read or is empty, or as
    /// [`with_password`](Self::with_password).
    pub fn with_stored_password(self, file: Option<&Path>) -> Result<Self> {
        let password = match file {
            None => variable("LOCKSET_PASSWORD")?,
            Some(file) => Some(password_in(file)?),
        };
        match password {
            None => Ok(self),
            Some(password) => self.with_password(&password),
        }
    }

    /// The text with `***` for every password of this URL.
    pub fn redact(&self, text: &str) -> String {
        let (authority, _) = split_authority(self.rest.strip_prefix("//").unwrap_or_default());
        // A login before all hosts, and one before each: what looks like a login may be one.
        let parts = std::iter::once(authority).chain(authority.split(','));
        let logins = parts.filter_map(|part| part.rsplit_once('@')).map(|(login, _)| login);
        let passwords = logins
            .chain(self.option(SENTINEL_LOGIN))
            .chain(self.option(LISTEN).and_then(login_in))
            .filter_map(|login| login.split_once(':'))
            .map(|(_, password)| password)
            .filter(|password| !password.is_empty());
        passwords.fold(text.to_owned(), |text, password| {
            let text = text.replace(password, "***");
            match percent_decode(password) {
                Some(decoded) => text.replace(&decoded, "***"),
                None => text,
            }
        })
    }

    /// The default ttl: `ttl=5s`.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it is not a time.
    pub fn ttl(&self) -> Result<Option<Duration>> {
        self.duration("ttl")
    }

    /// A URL without options.
    #[allow(dead_code, reason = "the engines that are compiled in decide whether it is used")]
    pub(crate) fn new(scheme: &str, rest: &str) -> Self {
        Self { scheme: scheme.to_owned(), rest: rest.to_owned(), options: Vec::new() }
    }

    pub(crate) fn scheme(&self) -> &str {
        &self.scheme
    }

    /// What is between the first colon and the options, as it was written.
    pub(crate) fn rest(&self) -> &str {
        &self.rest
    }

    /// The value of an option, as it was written.
    pub(crate) fn option(&self, key: &str) -> Option<&str> {
        self.options.iter().find(|(k, _)| k == key).map(|(_, value)| value.as_str())
    }

    /// Sets an option.
    pub(crate) fn set_option(&mut self, key: &str, value: &str) {
        self.options.retain(|(k, _)| k != key);
        self.options.push((key.to_owned(), value.to_owned()));
    }

    /// Rejects options that neither this engine nor all engines have.
    pub(crate) fn allow_options(&self, known: &[&str]) -> Result<()> {
        let is_known = |key: &str| COMMON_OPTIONS.contains(&key) || known.contains(&key);
        match self.options.iter().find(|(key, _)| !is_known(key)) {
            None => Ok(()),
            // What follows an unescaped `?` in a password looks like an option.
            Some(_) if self.options.iter().any(may_be_secret) => {
                Err(Error::invalid("URL", HIDDEN, "`?` in a user or password is written %3F"))
            }
            Some((key, _)) => {
                let all = [COMMON_OPTIONS, known].concat().join(", ");
                Err(Error::invalid("URL option", key, format!("{}: knows {all}", self.scheme)))
            }
        }
    }

    /// A time: `500ms`, `2s`, `1m`.
    pub(crate) fn duration(&self, key: &'static str) -> Result<Option<Duration>> {
        let Some(text) = self.option(key) else { return Ok(None) };
        let units = [("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000)];
        let time = units.into_iter().find_map(|(unit, millis)| {
            let number = text.strip_suffix(unit)?.parse::<u64>().ok()?;
            number.checked_mul(millis).filter(|time| (1..=86_400_000).contains(time))
        });
        let bad = || Error::invalid(key, text, "it is a time such as 500ms, 2s or 1m, up to 24h");
        time.map(Duration::from_millis).map(Some).ok_or_else(bad)
    }

    /// What is added to every token.
    pub(crate) fn token_base(&self) -> Result<u64> {
        let Some(text) = self.option("token_base") else { return Ok(0) };
        text.parse()
            .ok()
            .filter(|base| *base < Token::MAX.get() / 2)
            .ok_or_else(|| Error::invalid("token_base", text, "it is a number below 2^52"))
    }
}

#[cfg(feature = "redis")]
impl Url {
    /// A URL of each server, with its login and the path, and without options.
    pub(crate) fn of_each_server(&self, scheme: &str) -> Vec<Self> {
        let (authority, path) = split_authority(self.rest.strip_prefix("//").unwrap_or(&self.rest));
        authority.split(',').map(|host| Self::new(scheme, &format!("//{host}{path}"))).collect()
    }
}

#[cfg(any(feature = "redis", feature = "etcd", feature = "postgres", feature = "zookeeper"))]
impl Url {
    /// The servers and the path. `form` tells the user how the URLs of this engine are written.
    pub(crate) fn servers(&self, default_port: u16, form: &str) -> Result<UrlServers> {
        let invalid = |why: &str| Error::invalid("URL", "(not shown)", why);
        let rest = self.rest.strip_prefix("//").ok_or_else(|| invalid(form))?;
        let (authority, path) = split_authority(rest);
        let path = path.strip_prefix('/').unwrap_or(path);
        // A password with a slash in it would be shown as a path.
        if path.contains('@') {
            return Err(invalid("`/` in a password is written %2F, and `@` in a path %40"));
        }
        let path = percent_decode(path).ok_or_else(|| invalid("its path is not UTF-8"))?;
        let (shared, hosts) = match logins(&self.scheme) {
            Some(Logins::PerHost) => (None, authority),
            _ => match authority.rsplit_once('@') {
                Some((login, hosts)) => (Some(login), hosts),
                None => (None, authority),
            },
        };
        let parse = |part| {
            let (login, host) = match str::rsplit_once(part, '@') {
                Some((login, host)) => (Some(login), host),
                None => (shared, part),
            };
            let login = match login {
                Some(login) => Some(Login::parse(login)?),
                None => None,
            };
            Some((parse_host(host, default_port)?, login))
        };
        let servers: Option<Vec<_>> = hosts.split(',').map(parse).collect();
        let (hosts, logins) = servers.ok_or_else(|| invalid(form))?.into_iter().unzip();
        Ok(UrlServers { hosts, logins, path })
    }
}

#[cfg(any(feature = "redis", feature = "etcd", feature = "postgres", feature = "zookeeper"))]
impl Login {
    /// `user:password`, `user` or `:password`, with escapes.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (user, password) = text.split_once(':').unwrap_or((text, ""));
        Some(Self { user: percent_decode(user)?, password: percent_decode(password)? })
    }
}

impl FromStr for Url {
    type Err = Error;

    fn from_str(url: &str) -> Result<Self> {
        // What is before the colon contains no secret; the rest is never repeated.
        let is_scheme = |scheme: &str| {
            scheme.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.'))
        };
        let parts = url.split_once(':').filter(|(scheme, _)| is_scheme(scheme));
        let (scheme, rest) = parts.ok_or_else(not_a_url)?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let options = query
            .split('&')
            .filter(|option| !option.is_empty())
            .map(|option| {
                let (key, value) = option.split_once('=').unwrap_or((option, ""));
                (key.to_owned(), value.to_owned())
            })
            .collect();
        Ok(Self { scheme: scheme.to_owned(), rest: rest.to_owned(), options })
    }
}

/// The URL with its users, and without their passwords.
impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.scheme)?;
        let is_guess = !is_serverless(&self.scheme) && self.options.iter().any(may_be_secret);
        match self.rest.strip_prefix("//") {
            // An engine without servers has no passwords.
            _ if is_serverless(&self.scheme) => f.write_str(&self.rest)?,
            None => f.write_str(HIDDEN)?,
            Some(rest) => {
                let (authority, path) = split_authority(rest);
                // What is before an unescaped `/` or `?` in a password looks like a host.
                match path.contains('@') || is_guess {
                    true => write!(f, "//{HIDDEN}")?,
                    false => write!(f, "//{}{path}", without_passwords(&self.scheme, authority))?,
                }
            }
        }
        if is_guess {
            return f.write_str(HIDDEN);
        }
        let shown = self.options.iter().filter(|(key, _)| key != SENTINEL_LOGIN);
        for (index, (key, value)) in shown.enumerate() {
            let separator = if index == 0 { '?' } else { '&' };
            write!(f, "{separator}{key}={value}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A user may be a secret as well.
        write!(f, "Url({}:{HIDDEN})", self.scheme)
    }
}

/// The engines that there are.
pub(crate) fn known_engines() -> String {
    ENGINES.join(", ")
}

/// The error for a text that is not a URL.
pub(crate) fn not_a_url() -> Error {
    let why = format!("an engine's URL begins with one of {}", known_engines());
    Error::invalid("URL", "(not shown)", why)
}

/// A URL that identifies what is stored there, without logins: the order in which the servers were
/// written does not matter.
#[cfg(any(feature = "redis", feature = "etcd", feature = "postgres", feature = "zookeeper"))]
pub(crate) fn identity<'a>(
    scheme: &str,
    hosts: impl IntoIterator<Item = &'a HostPort>,
    path: &str,
) -> String {
    let mut hosts: Vec<String> = hosts.into_iter().map(host_port).collect();
    hosts.sort();
    hosts.dedup();
    let path = path.replace('%', "%25").replace('?', "%3F").replace('@', "%40");
    format!("{scheme}://{}{path}", hosts.join(","))
}

/// A server as a URL names it.
#[cfg(any(feature = "redis", feature = "etcd", feature = "postgres", feature = "zookeeper"))]
pub(crate) fn host_port((host, port): &HostPort) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// Decodes `%41` to `A`. What is no escape stays as it is. `None` if the result is not UTF-8.
pub(crate) fn percent_decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let digit = |index: usize| char::from(*after.get(index)?).to_digit(16);
        let escaped = (*first == b'%').then(|| Some(digit(0)? * 16 + digit(1)?)).flatten();
        match escaped.and_then(|byte| u8::try_from(byte).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &after[2..];
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8(bytes).ok()
}

/// Writes every byte but ASCII letters, digits and `-._~` as `%41`.
pub(crate) fn percent_encode(text: &str) -> String {
    let mut out = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out += &format!("%{byte:02X}");
        }
    }
    out
}

/// Where the URLs of an engine have their logins; `None` if it has no logins.
fn logins(scheme: &str) -> Option<Logins> {
    let base = scheme.split('+').next().unwrap_or(scheme);
    match base {
        "redis" | "rediss" | "etcd" | "etcds" | "postgres" | "postgresql" => Some(Logins::Shared),
        "redlock" | "redlocks" | "zk" | "zks" => Some(Logins::PerHost),
        _ => None,
    }
}

/// The login in a URL that is the value of an option.
fn login_in(url: &str) -> Option<&str> {
    let (authority, _) = split_authority(url.split_once("//")?.1);
    authority.rsplit_once('@').map(|(login, _)| login)
}

fn is_serverless(scheme: &str) -> bool {
    matches!(scheme, "memory" | "local")
}

/// Whether an option may be a part of a password that contains `?`.
fn may_be_secret((key, value): &(String, String)) -> bool {
    let may_contain_at = ["prefix", "ca", "cert", "key", SENTINEL_LOGIN];
    (key.contains('@') || value.contains('@')) && !may_contain_at.contains(&key.as_str())
}

/// Logins and hosts, and the path with its slash. `#` has no meaning to an engine.
fn split_authority(rest: &str) -> (&str, &str) {
    rest.split_at(rest.find('/').unwrap_or(rest.len()))
}

fn without_passwords(scheme: &str, authority: &str) -> String {
    let hide = |part: &str| match part.rsplit_once('@') {
        // It may be a piece of a password with a comma in it.
        None if !part.split(',').all(is_host) => HIDDEN.to_owned(),
        None => part.to_owned(),
        Some((login, hosts)) => match login.split(':').next() {
            None | Some("") => hosts.to_owned(),
            Some(user) => format!("{user}@{hosts}"),
        },
    };
    let is_login_or_host = |part: &str| part.contains('@') || is_host(part);
    match logins(scheme) {
        Some(Logins::PerHost) if authority.split(',').all(is_login_or_host) => {
            authority.split(',').map(hide).collect::<Vec<_>>().join(",")
        }
        // What follows a comma in a password looks like a user.
        Some(Logins::PerHost) => HIDDEN.to_owned(),
        _ => hide(authority),
    }
}

fn is_host(text: &str) -> bool {
    parse_host(text, 1).is_some()
}

/// A host and its port.
fn parse_host(text: &str, default_port: u16) -> Option<(String, u16)> {
    // `[::1]` has colons but no port.
    let (host, port) = match text.rsplit_once(':').filter(|(_, port)| !port.contains(']')) {
        Some((host, port)) => (host, port.parse().ok()?),
        None => (text, default_port),
    };
    // Only an IPv6 address has brackets: without a colon they would be lost when it is shown.
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let bare = bare.filter(|host| host.contains(':'));
    let is_allowed = |c: char| match c {
        '.' | '-' | '_' => true,
        ':' | '%' => bare.is_some(),
        c => c.is_alphanumeric(),
    };
    let host = bare.unwrap_or(host);
    let is_valid = !host.is_empty() && host.chars().all(is_allowed) && port != 0;
    is_valid.then(|| (host.to_owned(), port))
}

/// A variable of the environment; `None` if it is empty.
fn variable(name: &'static str) -> Result<Option<String>> {
    match std::env::var(name) {
        Ok(value) => Ok(Some(value).filter(|value| !value.is_empty())),
        Err(std::env::VarError::NotPresent) => Ok(None),
        Err(_) => Err(Error::invalid("variable", name, "it is not valid UTF-8")),
    }
}

fn password_in(file: &Path) -> Result<String> {
    let bad = |why: String| Error::invalid("password file", &file.display().to_string(), why);
    let text = std::fs::read_to_string(file).map_err(|error| bad(error.to_string()))?;
    match text.trim_end_matches(['\n', '\r']) {
        "" => Err(bad("it is empty".to_owned())),
        password => Ok(password.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str) -> Url {
        url.parse().unwrap()
    }

    #[test]
    fn a_password_with_an_unescaped_question_mark_is_not_shown() {
        for text in ["redis://me:hunter?2secret@host", "redis://me:hunter?a=2secret@host"] {
            let url: Url = text.parse().unwrap();
            let error = url.allow_options(&[]).unwrap_err().to_string();
            for shown in [error, url.to_string(), format!("{url:?}")] {
                assert!(!shown.contains("secret"), "{shown}");
            }
        }
    }

    #[test]
    fn a_password_goes_where_its_engine_expects_it() {
        let complete = |url: &str, password| parse(url).with_password(password).unwrap().rest;
        assert_eq!(complete("redis://h:6379/0", "p@:/"), "//:p%40%3A%2F@h:6379/0");
        assert_eq!(complete("redis://me@h", "x"), "//me:x@h");
        assert_eq!(complete("redlock://a,b@c?x=1", "s"), "//:s@a,b:s@c");
        assert_eq!(complete("zk://me@a,b/locks", "s"), "//me:s@a,b/locks");
        assert_eq!(complete("etcd://root@a:1,b:2/p", "s"), "//root:s@a:1,b:2/p");
        assert_eq!(complete("rediss+cluster://a,b", "s"), "//:s@a,b");
        assert_eq!(complete("redis+sentinel://me@a,b/m", "s"), "//me:s@a,b/m");
    }

    #[test]
    fn a_password_that_cannot_be_used_is_refused() {
        for url in ["local:", "local:/x.db", "memory:", "redis://u:p@h", "zookeeper://h"] {
            let error = parse(url).with_password("hunter2").unwrap_err().to_string();
            assert!(!error.contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn a_url_is_shown_without_its_passwords() {
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
            ("local:///var/x@y.db?mode=660", "local:///var/x@y.db?mode=660"),
            // These are no valid URLs, so what is the password is a guess.
            ("redis://me:1/hunter2@h", "redis://…"),
            ("redlock://me:hunter2,x@h", "redlock://…"),
            ("redis:hunter2@h", "redis:…"),
            ("rdeis://me:hunter2@h", "rdeis://me@h"),
        ] {
            assert_eq!(parse(url).to_string(), shown);
        }
    }

    #[test]
    fn a_password_is_taken_out_of_a_text() {
        let url = parse("redis://u:se%2Fcret@h,:other@i/0");
        assert_eq!(format!("{url:?}"), "Url(redis:…)");
        let shown = url.redact("cannot reach redis://u:se%2Fcret@h (se/cret, other)");
        assert_eq!(shown, "cannot reach redis://u:***@h (***, ***)");
        let url = parse("etcd://root:with,comma#@h,i/p");
        assert_eq!(url.redact("root, with,comma#"), "root, ***");
        let url = parse("redis+sentinel://h/m?sentinel_login=me:hidden");
        assert_eq!(url.redact("me, hidden"), "me, ***");
    }

    #[test]
    fn a_default_ttl_is_a_time() {
        assert_eq!(parse("memory:").ttl().unwrap(), None);
        assert_eq!(parse("memory:?ttl=5s").ttl().unwrap(), Some(Duration::from_secs(5)));
        for wrong in ["5", "0s", "25h", "-1s", ""] {
            let error = parse(&format!("zk://h?ttl={wrong}")).ttl().unwrap_err().to_string();
            assert!(error.contains("500ms, 2s or 1m"), "{error}");
        }
    }

    #[test]
    fn escapes_are_decoded() {
        for (text, decoded) in
            [("a%2Fb%3a", "a/b:"), ("%c3%a4", "ä"), ("100%", "100%"), ("%4", "%4"), ("%+1", "%+1")]
        {
            assert_eq!(percent_decode(text).as_deref(), Some(decoded));
        }
        assert_eq!(percent_decode("%ff"), None);
        assert_eq!(percent_decode(&percent_encode("ä:/@%?")).as_deref(), Some("ä:/@%?"));
    }

    #[cfg(any(feature = "redis", feature = "etcd", feature = "postgres", feature = "zookeeper"))]
    #[test]
    fn servers_are_parsed() {
        let servers = parse("etcd://us%40er:p,%3aw@b:77,a,[::1]/x%40y").servers(9, "").unwrap();
        let hosts: Vec<String> = servers.hosts.iter().map(host_port).collect();
        assert_eq!(hosts, ["b:77", "a:9", "[::1]:9"]);
        assert_eq!(servers.hosts[2].0, "::1");
        let login = servers.logins[2].as_ref().unwrap();
        assert_eq!((login.user.as_str(), login.password.as_str()), ("us@er", "p,:w"));
        assert_eq!(servers.path, "x@y");
        assert_eq!(identity("etcd", &servers.hosts, "/x@y"), "etcd://[::1]:9,a:9,b:77/x%40y");
        let each = parse("redlock://me:p@a,b").servers(9, "").unwrap();
        assert_eq!(each.logins.iter().map(Option::is_some).collect::<Vec<_>>(), [true, false]);
        for wrong in
            ["", "a,", "a:0", "a:x", "a:99999", "[::1", "::1", "[2%]", "a b", "u@", "a/b@c"]
        {
            let error = parse(&format!("etcd://{wrong}")).servers(9, "form").err().unwrap();
            assert!(error.to_string().contains("(not shown)"), "{error}");
        }
    }
}
