//! The parts of the URL: servers, TLS, login and prefix, checked once.

use std::fmt;
use std::time::Duration;

use tonic::transport::{Channel, ClientTlsConfig, Endpoint};

use super::EtcdOptions;
use super::keys::EtcdLayout;
use crate::error::{Error, Result};
use crate::tls::{self, TlsFiles, TlsOptions};
use crate::url::{Login, Url, UrlServers, host_port, identity};

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
    identity: String,
    pub(super) credentials: Option<Login>,
    pub(super) layout: EtcdLayout,
}

impl EtcdOptions {
    pub(crate) fn from_url(url: Url) -> Result<Self> {
        url.allow_options(&[&["names"][..], &tls::OPTIONS].concat())?;
        let raw_names = match url.option("names") {
            None | Some("escaped") => false,
            Some("raw") => true,
            Some(other) => return Err(Error::invalid("names", other, "it is `escaped` or `raw`")),
        };
        Ok(Self { raw_names, tls: TlsOptions::from_url(&url)?, url })
    }
}

impl EtcdEndpoints {
    pub(super) fn new(options: &EtcdOptions) -> Result<Self> {
        let form = "etcd://[user:password@]host[:port],…[/prefix]; etcds for TLS";
        let invalid = || Error::invalid("URL", "(not shown)", form);
        let is_tls = match options.url.scheme() {
            "etcd" => false,
            "etcds" => true,
            _ => return Err(invalid()),
        };
        let UrlServers { hosts, logins, path } = options.url.servers(DEFAULT_PORT, form)?;
        let credentials = logins.into_iter().next().flatten();
        let has_no_user = credentials.as_ref().is_some_and(|login| login.user.is_empty());
        if hosts.len() > MAX_SERVERS || has_no_user {
            return Err(invalid());
        }
        let tls = options.tls.read(is_tls, "etcds")?.map(TlsFiles::into_tonic);
        let prefix = if path.is_empty() { DEFAULT_PREFIX } else { &path };
        check_prefix(prefix)?;
        let layout = EtcdLayout::new(prefix, options.raw_names);
        let identity = identity(options.url.scheme(), &hosts, &format!("/{}", layout.prefix()));
        let hosts: Vec<String> = hosts.iter().map(host_port).collect();
        let endpoints = hosts.iter().map(|host| endpoint(host, tls.as_ref()));
        let endpoints = endpoints.collect::<Result<Vec<_>>>()?;
        Ok(Self { endpoints, hosts, identity, credentials, layout })
    }

    /// A URL without secrets. The order of the servers does not matter; raw names do, because they
    /// are other keys.
    pub(super) fn identity(&self) -> String {
        let names = if self.layout.has_raw_names() { "?names=raw" } else { "" };
        format!("{}{names}", self.identity)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str) -> Result<EtcdEndpoints> {
        EtcdEndpoints::new(&EtcdOptions::from_url(url.parse()?)?)
    }

    #[test]
    fn every_form_of_url_is_understood() {
        let one = parse("etcd://example.org").unwrap();
        assert_eq!((one.host(0), one.layout.prefix()), ("example.org:2379", "lockset"));
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
                let options = EtcdOptions::from_url(url.parse().unwrap()).unwrap();
                EtcdEndpoints::new(&EtcdOptions { raw_names, ..options }).unwrap()
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
        assert!(parse("etcd://h?ca=/nowhere").unwrap_err().to_string().contains("etcds://"));
    }
}
