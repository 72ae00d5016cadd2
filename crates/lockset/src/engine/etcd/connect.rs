//! The parts of the URL: servers, TLS, login and prefix, checked once.

use std::fmt;
use std::time::Duration;

use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};

use super::EtcdOptions;
use super::keys::EtcdLayout;
use crate::engine::common::pem::read_pem;
use crate::error::{Error, Result};

const DEFAULT_PORT: u16 = 2379;
const DEFAULT_PREFIX: &str = "lockset";
const MAX_SERVERS: usize = 32;
const MAX_PREFIX_BYTES: usize = 200;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// A server disconnects a client that sends pings more often than every five seconds.
const HTTP2_PING_INTERVAL: Duration = Duration::from_secs(6);
const HTTP2_PING_TIMEOUT: Duration = Duration::from_secs(3);

/// The servers, the login and the layout of the keys that a URL names.
pub(super) struct EtcdEndpoints {
    endpoints: Vec<Endpoint>,
    hosts: Vec<String>,
    is_tls: bool,
    pub(super) credentials: Option<EtcdCredentials>,
    pub(super) layout: EtcdLayout,
}

#[derive(Clone)]
pub(super) struct EtcdCredentials {
    pub(super) user: String,
    pub(super) password: String,
}

impl EtcdEndpoints {
    pub(super) fn parse(options: &EtcdOptions) -> Result<Self> {
        let invalid = |why: &str| Error::invalid("URL", "(not shown)", why);
        let form = "etcd://[user:password@]host[:port],…[/prefix]; etcds for TLS";
        let (scheme, rest) = options.url.split_once("://").ok_or_else(|| invalid(form))?;
        let is_tls = match scheme {
            "etcd" => false,
            "etcds" => true,
            _ => return Err(invalid(form)),
        };
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        // A password with a slash in it would be shown as a prefix.
        if path.contains('@') {
            return Err(invalid("`/` in a password is written %2F, and `@` in a prefix %40"));
        }
        let (credentials, hosts) = match authority.rsplit_once('@') {
            None => (None, authority),
            Some((text, hosts)) => {
                (Some(parse_credentials(text).ok_or_else(|| invalid(form))?), hosts)
            }
        };
        let hosts = hosts.split(',').map(parse_host).collect::<Option<Vec<String>>>();
        let hosts =
            hosts.filter(|hosts| hosts.len() <= MAX_SERVERS).ok_or_else(|| invalid(form))?;
        let tls = load_tls(options, is_tls)?;
        let endpoints = hosts.iter().map(|host| endpoint(host, tls.as_ref()));
        let endpoints = endpoints.collect::<Result<Vec<_>>>()?;
        let prefix = percent_decode(path).ok_or_else(|| invalid("its prefix is not UTF-8"))?;
        let prefix = if prefix.is_empty() { DEFAULT_PREFIX } else { &prefix };
        check_prefix(prefix)?;
        let layout = EtcdLayout::new(prefix, options.raw_names);
        Ok(Self { endpoints, hosts, is_tls, credentials, layout })
    }

    /// A URL without secrets. The order of the servers does not matter; raw names do, because they
    /// are other keys.
    pub(super) fn identity(&self) -> String {
        let scheme = if self.is_tls { "etcds" } else { "etcd" };
        let mut hosts = self.hosts.clone();
        hosts.sort();
        hosts.dedup();
        let prefix = self.layout.prefix().replace('%', "%25");
        let prefix = prefix.replace('?', "%3F").replace('@', "%40");
        let names = if self.layout.has_raw_names() { "?names=raw" } else { "" };
        format!("{scheme}://{}/{prefix}{names}", hosts.join(","))
    }

    /// One channel for each server, which connects when it is used. They live on the current
    /// runtime.
    pub(super) fn channels(&self) -> Vec<Channel> {
        self.endpoints.iter().map(Endpoint::connect_lazy).collect()
    }

    /// The host and port of the server with this index.
    pub(super) fn host(&self, index: usize) -> &str {
        self.hosts.get(index).map_or("?", String::as_str)
    }
}

impl fmt::Debug for EtcdEndpoints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The rest contains secrets.
        f.debug_struct("EtcdEndpoints").field("hosts", &self.hosts).finish_non_exhaustive()
    }
}

fn parse_credentials(text: &str) -> Option<EtcdCredentials> {
    let (user, password) = text.split_once(':').unwrap_or((text, ""));
    let credentials =
        EtcdCredentials { user: percent_decode(user)?, password: percent_decode(password)? };
    Some(credentials).filter(|credentials| !credentials.user.is_empty())
}

/// A host with its port. `[::1]` has colons but no port.
fn parse_host(host: &str) -> Option<String> {
    let (name, port) = match host.rsplit_once(':') {
        Some((name, port)) if !port.contains(']') => (name, port.parse().ok()?),
        _ => (host, DEFAULT_PORT),
    };
    let bare = name.strip_prefix('[').and_then(|name| name.strip_suffix(']'));
    let is_allowed = |c: char| {
        c.is_alphanumeric() || matches!(c, '.' | '-' | '_') || (bare.is_some() && c == ':')
    };
    let name_only = bare.unwrap_or(name);
    let is_valid = !name_only.is_empty() && name_only.chars().all(is_allowed) && port != 0;
    is_valid.then(|| format!("{name}:{port}"))
}

fn endpoint(host: &str, tls: Option<&ClientTlsConfig>) -> Result<Endpoint> {
    let invalid = |_| Error::invalid("server", host, "a host name or address is needed");
    let scheme = if tls.is_some() { "https" } else { "http" };
    let mut endpoint = Endpoint::from_shared(format!("{scheme}://{host}"))
        .map_err(invalid)?
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(HTTP2_PING_INTERVAL)
        .keep_alive_timeout(HTTP2_PING_TIMEOUT);
    if let Some(tls) = tls {
        endpoint = endpoint.tls_config(tls.clone()).map_err(|error| {
            let why = format!("{error}: check the files of the options ca, cert and key");
            Error::invalid("TLS set-up", host, why)
        })?;
    }
    Ok(endpoint)
}

fn check_prefix(prefix: &str) -> Result<()> {
    let inner = prefix.strip_prefix('/').unwrap_or(prefix);
    let why = if prefix.len() > MAX_PREFIX_BYTES {
        "it has at most 200 bytes"
    } else if prefix.chars().any(char::is_control) {
        "it contains a control character"
    } else if inner.split('/').any(str::is_empty) {
        "it may begin with a slash, but not end with one or have two in a row"
    } else {
        return Ok(());
    };
    Err(Error::invalid("prefix", prefix, why))
}

/// Decodes `%41` to `A`. What is no escape stays as it is.
fn percent_decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let escape = after.get(..2).filter(|_| *first == b'%');
        let byte = escape.and_then(|hex| std::str::from_utf8(hex).ok());
        match byte.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = after.get(2..).unwrap_or_default();
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8(bytes).ok()
}

/// Reads the certificates that the options name. The default is to trust the system's authorities.
fn load_tls(options: &EtcdOptions, is_tls: bool) -> Result<Option<ClientTlsConfig>> {
    let EtcdOptions { ca, client_certificate, .. } = options;
    if !is_tls {
        let why = "certificates are for TLS: write etcds://";
        return match ca.is_none() && client_certificate.is_none() {
            true => Ok(None),
            false => Err(Error::invalid("URL option", "ca, cert, key", why)),
        };
    }
    let mut tls = match ca {
        None => ClientTlsConfig::new().with_native_roots(),
        Some(ca) => {
            let pem = read_pem(ca, "CERTIFICATE")?;
            ClientTlsConfig::new().ca_certificate(Certificate::from_pem(pem))
        }
    };
    if let Some((cert, key)) = client_certificate {
        let (cert, key) = (read_pem(cert, "CERTIFICATE")?, read_pem(key, "PRIVATE KEY")?);
        tls = tls.identity(Identity::from_pem(cert, key));
    }
    Ok(Some(tls))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str) -> Result<EtcdEndpoints> {
        EtcdEndpoints::parse(&EtcdOptions { url: url.to_owned(), ..EtcdOptions::default() })
    }

    #[test]
    fn every_form_of_url_is_understood() {
        let one = parse("etcd://example.org").unwrap();
        assert_eq!(
            (one.hosts.as_slice(), one.layout.prefix()),
            (&["example.org:2379".into()][..], "lockset")
        );
        let three = parse("etcd://b:77,a,[::1]/").unwrap();
        assert_eq!(three.hosts, ["b:77", "a:2379", "[::1]:2379"]);
        assert_eq!(three.identity(), "etcd://[::1]:2379,a:2379,b:77/lockset");
        assert_eq!(parse("etcd://h//locks").unwrap().layout.prefix(), "/locks");
        assert_eq!(parse("etcds://h/a/b").unwrap().layout.prefix(), "a/b");
        let login = parse("etcd://us%40er:p%3aw%25@h").unwrap().credentials.unwrap();
        assert_eq!((login.user.as_str(), login.password.as_str()), ("us@er", "p:w%"));
        assert!(parse("etcd://h").unwrap().credentials.is_none());
    }

    #[test]
    fn an_identity_is_a_url_of_the_same_keys() {
        for (url, raw_names, identity) in [
            ("etcd://user:pw@b:77,a", false, "etcd://a:2379,b:77/lockset"),
            ("etcds://[::1]//locks", false, "etcds://[::1]:2379//locks"),
            ("etcd://h/a%3Fb%2525%40", true, "etcd://h:2379/a%3Fb%2525%40?names=raw"),
        ] {
            let parse = |url: &str| {
                let options =
                    EtcdOptions { url: url.to_owned(), raw_names, ..EtcdOptions::default() };
                EtcdEndpoints::parse(&options).unwrap()
            };
            assert_eq!(parse(url).identity(), identity);
            let without_options = identity.trim_end_matches("?names=raw");
            let again = parse(without_options);
            assert_eq!(again.identity(), identity);
            assert_eq!(again.layout.prefix(), parse(url).layout.prefix());
        }
    }

    #[test]
    fn an_invalid_url_is_rejected_without_showing_its_secrets() {
        for url in [
            "etcd:h",
            "etcd://",
            "etcd://a,,b",
            "etcd://h:0",
            "etcd://h:99999",
            "etcd+x://h",
            "etcd://:hunter2@h",
            "etcd://h/a/",
            "etcd://h/a//b",
            "etcd://h/%00",
            "etcd://a b",
            "etcd://user:hunter2@",
            "etcd://user:hunter2@h:x",
            "etcd://user:1/hunter2@h",
        ] {
            let error = parse(url).unwrap_err().to_string();
            assert!(!error.contains("hunter2"), "{error}");
        }
        let shown = format!("{:?}", parse("etcd://user:hunter2@a").unwrap());
        assert!(!shown.contains("hunter2"), "{shown}");
    }

    #[test]
    fn certificates_need_tls() {
        let options = EtcdOptions {
            url: "etcd://h".to_owned(),
            ca: Some("/nowhere".into()),
            ..EtcdOptions::default()
        };
        assert!(EtcdEndpoints::parse(&options).unwrap_err().to_string().contains("etcds://"));
    }
}
