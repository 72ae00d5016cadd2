//! Servers: the parts of the URL, TLS, login, and the master that the sentinels name.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use redis::{
    Client, ClientTlsConfig, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisError,
    TlsCertificates,
};

use super::error::{classify, unreachable_error, with_server};
use super::{Quorum, RedisOptions, TOMBSTONE_LIFE};
use crate::engine::common::pem::read_pem;
use crate::engine::url_host;
use crate::error::{Error, Result};

/// The time in which a sentinel must reply, connecting included.
const SENTINEL_TIMEOUT: Duration = Duration::from_millis(500);

/// A server's host and port.
pub(super) type RedisAddress = (String, u16);

/// Which servers there are, how they are deployed, and how to connect to them.
pub(super) struct RedisServers {
    pub(super) deployment: Deployment,
    /// The servers in the URL: the server itself, the sentinels, or some nodes of the cluster.
    pub(super) hosts: Vec<RedisAddress>,
    /// User, password, database and TCP settings; the address is a placeholder.
    template: ConnectionInfo,
    tls: Option<TlsCertificates>,
    /// The same for the sentinels.
    sentinel_template: Option<ConnectionInfo>,
    pub(super) quorum: Option<Arc<Quorum>>,
}

/// How the servers are deployed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Deployment {
    Single,
    /// Sentinels, and the name of the service that they monitor.
    Sentinel(String),
    Cluster,
}

impl RedisServers {
    pub(super) fn parse(options: &RedisOptions) -> Result<Self> {
        let form = "redis://[user:password@]host[:port][/db], \
                    redis+sentinel://[user:password@]host[:port],…/service[/db] or \
                    redis+cluster://[user:password@]host[:port],…; rediss for TLS";
        let bad = || Error::invalid("URL", "(not shown)", form);
        let (scheme, rest) = options.url.split_once("://").ok_or_else(bad)?;
        let (base, deployment) = scheme.split_once('+').unwrap_or((scheme, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (user, hosts) = authority.rsplit_once('@').unwrap_or(("", authority));
        let (deployment, db) = match deployment {
            "" => (Deployment::Single, path),
            "cluster" => (Deployment::Cluster, ""),
            "sentinel" => {
                let (service, db) = path.split_once('/').unwrap_or((path, ""));
                if service.is_empty() {
                    let why = "a Sentinel URL ends with the name of its service: …/mymaster";
                    return Err(Error::invalid("URL", "(not shown)", why));
                }
                (Deployment::Sentinel(service.to_owned()), db)
            }
            _ => return Err(bad()),
        };
        let info = |user: &str, host: &str, db: &str| {
            let user = if user.is_empty() { String::new() } else { format!("{user}@") };
            format!("{base}://{user}{host}/{db}").into_connection_info().map_err(|_| bad())
        };
        let default_port = if matches!(deployment, Deployment::Sentinel(_)) { 26379 } else { 6379 };
        let hosts: Vec<&str> = hosts.split(',').collect();
        if deployment == Deployment::Single && hosts.len() > 1 {
            let why = "several servers are named: use redis+sentinel:// or redis+cluster://";
            return Err(Error::invalid("URL", "(not shown)", why));
        }
        let addresses = hosts.iter().map(|host| {
            let host = with_port(host, default_port);
            address(info("", &host, "")?.addr()).ok_or_else(bad)
        });
        let addresses = addresses.collect::<Result<Vec<_>>>()?;
        let first = with_port(hosts.first().copied().unwrap_or_default(), default_port);
        let template = configure(info(user, &first, db)?, redis::ProtocolVersion::RESP3);
        let sentinel_template = match &options.sentinel_login {
            Some(login) => info(login, &first, "")?,
            None => info("", &first, "")?,
        };
        let sentinel_template = configure(sentinel_template, redis::ProtocolVersion::RESP2);
        let sentinel_template =
            matches!(deployment, Deployment::Sentinel(_)).then_some(sentinel_template);
        let tls = load_certificates(options, base == "rediss")?;
        Ok(Self {
            deployment,
            hosts: addresses,
            template,
            tls,
            sentinel_template,
            quorum: options.quorum.clone(),
        })
    }

    /// Identifies the servers, without secrets. It is a URL except with Sentinel.
    pub(super) fn identity(&self) -> String {
        let db = self.template.redis_settings().db();
        let scheme = match self.template.addr() {
            ConnectionAddr::TcpTls { .. } => "rediss",
            _ => "redis",
        };
        let mut hosts: Vec<String> =
            self.hosts.iter().map(|(host, port)| url_host(host, *port)).collect();
        match &self.deployment {
            Deployment::Single => format!("{scheme}://{}/{db}", hosts.join(",")),
            // The URL may name the sentinels in any order, and only some of them.
            Deployment::Sentinel(service) => format!("redis+sentinel:{service}/{db}"),
            Deployment::Cluster => {
                hosts.sort();
                format!("{scheme}+cluster://{}", hosts.join(","))
            }
        }
    }

    /// A client of the server at this address.
    pub(super) fn client(&self, address: &RedisAddress) -> std::result::Result<Client, RedisError> {
        let info = with_address(&self.template, address);
        match &self.tls {
            Some(tls) => Client::build_with_tls(info, tls.clone()),
            None => Client::open(info),
        }
    }

    /// The master that the sentinels name. All are asked at once, and the highest epoch wins. A
    /// majority is not enough: in the first seconds after a failover only the sentinel that led it
    /// knows the new master, and the old one may be back, empty, and claim to be master.
    pub(super) async fn master(&self, service: &str) -> std::result::Result<SentinelMaster, Error> {
        let replies = self.hosts.iter().map(|sentinel| self.ask_sentinel(sentinel, service));
        let (mut masters, mut errors) = (Vec::new(), Vec::new());
        for reply in futures_util::future::join_all(replies).await {
            match reply {
                Ok(master) => masters.push(master),
                Err(error) => errors.push(error),
            }
        }
        let newest = masters.into_iter().max_by_key(|master: &SentinelMaster| master.epoch);
        newest.ok_or_else(|| no_master_error(service, errors))
    }

    async fn ask_sentinel(&self, sentinel: &RedisAddress, service: &str) -> Result<SentinelMaster> {
        let query = async {
            let template = self.sentinel_template.as_ref().unwrap_or(&self.template);
            let info = with_address(template, sentinel);
            let client = match &self.tls {
                Some(tls) => Client::build_with_tls(info, tls.clone())?,
                None => Client::open(info)?,
            };
            let mut multiplexed = client.get_multiplexed_async_connection().await?;
            // While it leads a failover, a sentinel reports the old master with the new epoch; only
            // the address by name is that of the promoted server.
            let mut queries = redis::pipe();
            queries.cmd("SENTINEL").arg("GET-MASTER-ADDR-BY-NAME").arg(service);
            queries.cmd("SENTINEL").arg("MASTER").arg(service);
            type SentinelReplies = (Option<(String, u16)>, HashMap<String, String>);
            queries.query_async::<SentinelReplies>(&mut multiplexed).await
        };
        let at_sentinel = |error| with_server(sentinel, error);
        let (address, fields) = match tokio::time::timeout(SENTINEL_TIMEOUT, query).await {
            Ok(replies) => replies.map_err(|error| at_sentinel(classify(error).into_error()))?,
            Err(_) => {
                let what = format!("no answer within {SENTINEL_TIMEOUT:?}");
                return Err(at_sentinel(unreachable_error(what, true, None)));
            }
        };
        let number = |key: &str| fields.get(key).and_then(|text| text.parse::<u64>().ok());
        let Some(address) = address else {
            let what = "it names no master".to_owned();
            return Err(at_sentinel(unreachable_error(what, true, None)));
        };
        Ok(SentinelMaster {
            address,
            epoch: number("config-epoch").unwrap_or(0),
            replicas: number("num-slaves").and_then(|n| u32::try_from(n).ok()).unwrap_or(0),
        })
    }
}

/// A retry may help unless it helps with no sentinel: a wrong login stays wrong.
fn no_master_error(service: &str, mut errors: Vec<Error>) -> Error {
    let what = format!("no sentinel knows the master of `{service}`");
    let retryable = errors.is_empty() || errors.iter().any(Error::is_retryable);
    match errors.pop() {
        Some(Error::Unreachable { engine, what: why, source, .. }) => {
            Error::Unreachable { engine, what: format!("{what}: {why}"), retryable, source }
        }
        _ => unreachable_error(what, retryable, None),
    }
}

impl fmt::Debug for RedisServers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The other fields contain secrets.
        f.debug_struct("RedisServers").field("hosts", &self.hosts).finish_non_exhaustive()
    }
}

/// A master, as a sentinel reports it.
#[derive(Debug)]
pub(super) struct SentinelMaster {
    pub(super) address: RedisAddress,
    /// Grows with every failover.
    epoch: u64,
    /// The number of its replicas, including those that are down.
    pub(super) replicas: u32,
}

fn with_port(host: &str, default: u16) -> String {
    // `[::1]` has colons but no port.
    match host.rsplit_once(':').is_some_and(|(_, port)| !port.contains(']')) {
        true => host.to_owned(),
        false => format!("{host}:{default}"),
    }
}

fn address(addr: &ConnectionAddr) -> Option<RedisAddress> {
    match addr {
        ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
            Some((host.clone(), *port))
        }
        _ => None,
    }
}

fn with_address(template: &ConnectionInfo, (host, port): &RedisAddress) -> ConnectionInfo {
    let addr = match template.addr() {
        ConnectionAddr::TcpTls { .. } => ConnectionAddr::TcpTls {
            host: host.clone(),
            port: *port,
            insecure: false,
            tls_params: None,
        },
        _ => ConnectionAddr::Tcp(host.clone(), *port),
    };
    template.clone().set_addr(addr)
}

fn configure(info: ConnectionInfo, protocol: redis::ProtocolVersion) -> ConnectionInfo {
    let settings = info.redis_settings().clone().set_protocol(protocol);
    // A connection that was given up must not deliver a request after the tombstone of its claim
    // has expired: unsent data is dropped, at the latest after a third of that time.
    let tcp = redis::io::tcp::TcpSettings::default();
    let tcp = tcp.set_nodelay(true).set_linger_time(Duration::ZERO);
    #[cfg(target_os = "linux")]
    let tcp = tcp.set_user_timeout(TOMBSTONE_LIFE / 3);
    info.set_redis_settings(settings).set_tcp_settings(tcp)
}

/// Reads the certificates that the options name. Without any, the system's authorities are
/// trusted.
fn load_certificates(options: &RedisOptions, is_tls: bool) -> Result<Option<TlsCertificates>> {
    let RedisOptions { ca, client_certificate, .. } = options;
    if ca.is_none() && client_certificate.is_none() {
        return Ok(None);
    }
    if !is_tls {
        let why = "certificates are for TLS: write rediss://";
        return Err(Error::invalid("URL option", "ca, cert, key", why));
    }
    let client_tls = match client_certificate {
        None => None,
        Some((cert, key)) => {
            let client_cert = read_pem(cert, "CERTIFICATE")?;
            Some(ClientTlsConfig { client_cert, client_key: read_pem(key, "PRIVATE KEY")? })
        }
    };
    let root_cert = ca.as_deref().map(|path| read_pem(path, "CERTIFICATE")).transpose()?;
    Ok(Some(TlsCertificates { client_tls, root_cert }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str) -> Result<RedisServers> {
        RedisServers::parse(&RedisOptions { url: url.to_owned(), ..RedisOptions::default() })
    }

    fn host(name: &str, port: u16) -> RedisAddress {
        (name.to_owned(), port)
    }

    #[test]
    fn every_form_of_url_is_parsed() {
        let one = parse("rediss://user:pw@example.org/3").unwrap();
        assert_eq!(
            (one.deployment, one.hosts),
            (Deployment::Single, vec![host("example.org", 6379)])
        );
        let sentinel = parse("redis+sentinel://:pw@a,b:77,[::1]/mine/2").unwrap();
        assert_eq!(sentinel.deployment, Deployment::Sentinel("mine".to_owned()));
        assert_eq!(sentinel.hosts, [host("a", 26379), host("b", 77), host("::1", 26379)]);
        assert_eq!(sentinel.template.redis_settings().password(), Some("pw"));
        assert_eq!(sentinel.sentinel_template.unwrap().redis_settings().password(), None);
        let cluster = parse("redis+cluster://a:1,b:2").unwrap();
        assert_eq!((cluster.deployment, cluster.hosts.len()), (Deployment::Cluster, 2));
    }

    #[test]
    fn an_identity_names_its_servers_as_a_url_does() {
        for (url, identity) in [
            ("redis://user:pw@h", "redis://h:6379/0"),
            ("rediss://h:77/3", "rediss://h:77/3"),
            ("redis://[::1]/1", "redis://[::1]:6379/1"),
            ("rediss+cluster://b,a:1", "rediss+cluster://a:1,b:6379"),
        ] {
            let servers = parse(url).unwrap();
            assert_eq!(servers.identity(), identity);
            assert_eq!(parse(identity).unwrap().identity(), identity);
        }
        // It does not name the sentinels, so it cannot be parsed back.
        let sentinel = parse("redis+sentinel://a,b/mine/2").unwrap().identity();
        assert_eq!(sentinel, "redis+sentinel:mine/2");
        assert!(parse(&sentinel).is_err());
    }

    /// A sentinel that reports the master's port and epoch after a delay.
    fn sentinel(after: Duration, port: &'static str, epoch: &'static str) -> String {
        use std::io::{Read, Write};
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let host = listener.local_addr().unwrap().to_string();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let (mut received, mut replied) = (String::new(), 0);
            let mut more = [0; 1024];
            while let Ok(length @ 1..) = stream.read(&mut more) {
                received.push_str(std::str::from_utf8(&more[..length]).unwrap());
                let commands: Vec<&str> = received.split('*').skip(1).collect();
                for command in &commands[replied..] {
                    let reply = match command {
                        command if command.contains("GET-MASTER") => {
                            std::thread::sleep(after);
                            format!("*2\r\n$9\r\n127.0.0.1\r\n${}\r\n{port}\r\n", port.len())
                        }
                        command if command.contains("SENTINEL") => {
                            format!("*2\r\n$12\r\nconfig-epoch\r\n${}\r\n{epoch}\r\n", epoch.len())
                        }
                        _ => "+OK\r\n".to_owned(),
                    };
                    stream.write_all(reply.as_bytes()).unwrap();
                }
                replied = commands.len();
            }
        });
        host
    }

    #[tokio::test]
    async fn the_sentinel_that_knows_the_last_failover_wins() {
        let at_once = Duration::ZERO;
        let hosts = [
            sentinel(at_once, "7001", "1"),
            sentinel(SENTINEL_TIMEOUT / 4, "7002", "2"),
            sentinel(at_once, "7001", "1"),
        ];
        let servers = parse(&format!("redis+sentinel://{}/mine", hosts.join(","))).unwrap();
        assert_eq!(servers.master("mine").await.unwrap().address, host("127.0.0.1", 7002));
    }

    #[test]
    fn invalid_urls_are_refused_without_showing_secrets() {
        for url in ["redis://a,b", "redis+sentinel://a", "redis+raft://a", "redis:a", "redis://"] {
            let refusal = parse(url).unwrap_err().to_string();
            assert!(refusal.contains("(not shown)"), "{refusal}");
        }
        let shown = format!("{:?}", parse("redis://user:hunter2@a").unwrap());
        assert!(!shown.contains("hunter2"), "{shown}");
    }
}
