//! Servers: the parts of the URL, TLS, login, and the master that the sentinels name.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use redis::{Client, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisError};

use super::error::{classify, unreachable_error, with_server};
use super::{ENGINE, Quorum, RedisOptions, TOMBSTONE_LIFE};
use crate::error::{Error, Result};
use crate::tls::{self, TlsFiles, TlsOptions};
use crate::url::{Login, Url, UrlServers, identity};

const DEFAULT_PORT: u16 = 6379;
const DEFAULT_SENTINEL_PORT: u16 = 26379;
const FORM: &str = "redis://[user:password@]host[:port][/db], \
                    redis+sentinel://[user:password@]host[:port],…/service[/db] or \
                    redis+cluster://[user:password@]host[:port],…; rediss for TLS";
/// The time in which a sentinel must reply, connecting included.
const SENTINEL_TIMEOUT: Duration = Duration::from_millis(500);

/// A server's host and port.
pub(super) type RedisAddress = (String, u16);

/// Which servers there are, how they are deployed, and how to connect to them.
pub(super) struct RedisServers {
    pub(super) deployment: Deployment,
    /// The servers in the URL: the server itself, the sentinels, or some nodes of the cluster.
    pub(super) hosts: Vec<RedisAddress>,
    /// TLS, user, password, database and TCP settings; the host is a placeholder.
    template: ConnectionInfo,
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

impl RedisOptions {
    /// The options that the URL of one server, of sentinels or of a cluster has.
    pub(crate) fn from_url(url: Url) -> Result<Self> {
        let own = ["prefix", "replicas", "fence_idle", "first_lease", "courtesy", "sentinel_login"];
        url.allow_options(&[&own[..], &tls::OPTIONS].concat())?;
        let mut options = Self::common(&url)?;
        if let Some(replicas) = url.option("replicas") {
            options.replicas = replicas.parse()?;
        }
        if let Some(idle) = url.option("fence_idle") {
            let days = idle.parse::<u64>().ok().filter(|days| (1..=3650).contains(days));
            let days = days.ok_or_else(|| {
                Error::invalid("fence_idle", idle, "it is a number of days from 1 to 3650")
            })?;
            options.fence_idle = Duration::from_secs(days * 86_400);
        }
        if let Some(longest) = url.duration("first_lease")? {
            options.first_lease = longest;
        }
        options.courtesy = url.duration("courtesy")?;
        options.sentinel_login = url.option("sentinel_login").map(str::to_owned);
        Ok(Self { url, ..options })
    }

    /// The options of each node of a quorum, by the URL of the quorum.
    pub(crate) fn of_nodes(url: &Url, quorum: &Arc<Quorum>) -> Result<Vec<Self>> {
        let options = Self { quorum: Some(quorum.clone()), ..Self::common(url)? };
        let scheme = if url.scheme() == "redlocks" { "rediss" } else { "redis" };
        let nodes = url.of_each_server(scheme).into_iter();
        Ok(nodes.map(|url| Self { url, ..options.clone() }).collect())
    }

    fn common(url: &Url) -> Result<Self> {
        let mut options = Self { tls: TlsOptions::from_url(url)?, ..Self::default() };
        if let Some(prefix) = url.option("prefix") {
            options.prefix = prefix.to_owned();
        }
        Ok(options)
    }
}

impl RedisServers {
    pub(super) fn new(options: &RedisOptions) -> Result<Self> {
        let quorum = options.quorum.clone();
        match &options.client {
            Some(_) if options.tls.is_set() || options.sentinel_login.is_some() => {
                let why = "the client that was passed in brings its own";
                Err(Error::invalid("options", "ca, cert, key, sentinel_login", why))
            }
            Some(client) => Self::of_client(client, quorum),
            None => Ok(Self { quorum, ..Self::of_url(options)? }),
        }
    }

    fn of_client(client: &Client, quorum: Option<Arc<Quorum>>) -> Result<Self> {
        let info = client.get_connection_info();
        let address = match info.addr() {
            ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
                (host.clone(), *port)
            }
            _ => {
                let what = "a client that is not connected by TCP or TLS".to_owned();
                return Err(Error::Unsupported { engine: ENGINE, what });
            }
        };
        Ok(Self {
            deployment: Deployment::Single,
            hosts: vec![address],
            template: configure(info.clone(), redis::ProtocolVersion::RESP3),
            sentinel_template: None,
            quorum,
        })
    }

    fn of_url(options: &RedisOptions) -> Result<Self> {
        let invalid = |why: &str| Error::invalid("URL", "(not shown)", why);
        let scheme = options.url.scheme();
        let (base, deployment) = scheme.split_once('+').unwrap_or((scheme, ""));
        let is_sentinel = deployment == "sentinel";
        let default_port = if is_sentinel { DEFAULT_SENTINEL_PORT } else { DEFAULT_PORT };
        let UrlServers { hosts, logins, path } = options.url.servers(default_port, FORM)?;
        let (deployment, db) = match deployment {
            "" if hosts.len() > 1 => {
                let why = "several servers are named: use redis+sentinel:// or redis+cluster://";
                return Err(invalid(why));
            }
            "" => (Deployment::Single, path.as_str()),
            "cluster" => (Deployment::Cluster, ""),
            "sentinel" => {
                let (service, db) = path.split_once('/').unwrap_or((&path, ""));
                if service.is_empty() {
                    let why = "a Sentinel URL ends with the name of its service: …/mymaster";
                    return Err(invalid(why));
                }
                (Deployment::Sentinel(service.to_owned()), db)
            }
            _ => return Err(invalid(FORM)),
        };
        let db = match db.trim_matches('/') {
            "" => 0,
            db => db.parse().map_err(|_| invalid(FORM))?,
        };
        let is_tls = match base {
            "redis" => false,
            "rediss" => true,
            _ => return Err(invalid(FORM)),
        };
        // To connect to a wildcard address means to connect to this machine, by accident.
        if hosts.iter().any(|(host, _)| matches!(host.as_str(), "0.0.0.0" | "::")) {
            return Err(invalid("it names no host, but every address of this machine"));
        }
        let [first, ..] = hosts.as_slice() else { return Err(invalid(FORM)) };
        let addr = match options.tls.read(is_tls, "rediss")? {
            None => ConnectionAddr::Tcp(first.0.clone(), first.1),
            Some(files) => tls_address(first, files)?,
        };
        let info = addr.into_connection_info().map_err(|_| invalid(FORM))?;
        let template = login(info.clone(), logins.into_iter().next().flatten(), db);
        let sentinel_login = match &options.sentinel_login {
            Some(text) => Some(Login::parse(text).ok_or_else(|| invalid(FORM))?),
            None => None,
        };
        let sentinel_template =
            configure(login(info, sentinel_login, 0), redis::ProtocolVersion::RESP2);
        Ok(Self {
            deployment,
            hosts,
            template: configure(template, redis::ProtocolVersion::RESP3),
            sentinel_template: is_sentinel.then_some(sentinel_template),
            quorum: None,
        })
    }

    /// Identifies the servers, without secrets. It is a URL except with Sentinel.
    pub(super) fn identity(&self) -> String {
        let db = self.template.redis_settings().db();
        let scheme = match self.template.addr() {
            ConnectionAddr::TcpTls { .. } => "rediss",
            _ => "redis",
        };
        match &self.deployment {
            Deployment::Single => identity(scheme, &self.hosts, &format!("/{db}")),
            // The URL may name the sentinels in any order, and only some of them.
            Deployment::Sentinel(service) => format!("redis+sentinel:{service}/{db}"),
            Deployment::Cluster => identity(&format!("{scheme}+cluster"), &self.hosts, ""),
        }
    }

    /// A client of the server at this address.
    pub(super) fn client(&self, address: &RedisAddress) -> std::result::Result<Client, RedisError> {
        Client::open(with_address(&self.template, address))
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
            let client = Client::open(with_address(template, sentinel))?;
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

/// An address that is connected to with TLS.
#[cfg(feature = "redis-tls")]
fn tls_address((host, port): &RedisAddress, files: TlsFiles) -> Result<ConnectionAddr> {
    let (host, port) = (host.clone(), *port);
    let addr = ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None };
    let Some(certificates) = files.into_redis() else { return Ok(addr) };
    let client = Client::build_with_tls(addr, certificates).map_err(|error| {
        let why = format!("{error}: check the files of the options ca, cert and key");
        Error::invalid("TLS set-up", "(not shown)", why)
    })?;
    Ok(client.get_connection_info().addr().clone())
}

#[cfg(not(feature = "redis-tls"))]
fn tls_address(_: &RedisAddress, _: TlsFiles) -> Result<ConnectionAddr> {
    let what = "TLS: it was not compiled in; enable the cargo feature `redis-tls`".to_owned();
    Err(Error::Unsupported { engine: ENGINE, what })
}

fn with_address(template: &ConnectionInfo, (host, port): &RedisAddress) -> ConnectionInfo {
    let (host, port) = (host.clone(), *port);
    let addr = match template.addr().clone() {
        ConnectionAddr::TcpTls { insecure, tls_params, .. } => {
            ConnectionAddr::TcpTls { host, port, insecure, tls_params }
        }
        _ => ConnectionAddr::Tcp(host, port),
    };
    template.clone().set_addr(addr)
}

fn login(info: ConnectionInfo, login: Option<Login>, db: i64) -> ConnectionInfo {
    let mut settings = info.redis_settings().clone().set_db(db);
    if let Some(Login { user, password }) = login {
        settings = if user.is_empty() { settings } else { settings.set_username(user) };
        settings = if password.is_empty() { settings } else { settings.set_password(password) };
    }
    info.set_redis_settings(settings)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str) -> Result<RedisServers> {
        RedisServers::new(&RedisOptions::from_url(url.parse()?)?)
    }

    fn host(name: &str, port: u16) -> RedisAddress {
        (name.to_owned(), port)
    }

    #[cfg(feature = "redis-tls")]
    #[test]
    fn tls_urls_are_parsed() {
        for identity in ["rediss://h:77/3", "rediss+cluster://a:1,b:6379"] {
            assert_eq!(parse(identity).unwrap().identity(), identity);
        }
    }

    #[test]
    fn every_form_of_url_is_parsed() {
        let one = parse("redis://user:pw@example.org/3").unwrap();
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
            ("redis://h:77/3", "redis://h:77/3"),
            ("redis://[::1]/1", "redis://[::1]:6379/1"),
            ("redis+cluster://b,a:1", "redis+cluster://a:1,b:6379"),
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

    #[cfg(not(feature = "redis-tls"))]
    #[test]
    fn tls_that_is_not_compiled_in_names_its_feature() {
        for url in ["rediss://h", "rediss+sentinel://h/mine", "rediss+cluster://h"] {
            let error = parse(url).unwrap_err().to_string();
            assert!(error.contains("cargo feature `redis-tls`"), "{error}");
        }
    }

    #[test]
    fn the_address_and_the_login_of_a_client_are_used() {
        let client = Client::open("redis://me:hunter2@cache.example:77/3").unwrap();
        let options = RedisOptions { client: Some(client), ..RedisOptions::default() };
        let servers = RedisServers::new(&options).unwrap();
        assert_eq!(servers.identity(), "redis://cache.example:77/3");
        let settings = servers.template.redis_settings();
        assert_eq!((settings.username(), settings.password()), (Some("me"), Some("hunter2")));
        assert_eq!(settings.protocol(), redis::ProtocolVersion::RESP3);
        let socket = ConnectionAddr::Unix("/run/redis.sock".into());
        let client = Some(Client::open(socket.into_connection_info().unwrap()).unwrap());
        let options = RedisOptions { client, ..RedisOptions::default() };
        assert!(matches!(RedisServers::new(&options), Err(Error::Unsupported { .. })));
    }

    #[cfg(feature = "redis-tls")]
    #[test]
    fn the_tls_settings_of_a_client_are_used() {
        let client = Client::open("rediss://cache.example/#insecure").unwrap();
        let options = RedisOptions { client: Some(client), ..RedisOptions::default() };
        let servers = RedisServers::new(&options).unwrap();
        assert_eq!(servers.identity(), "rediss://cache.example:6379/0");
        let info = with_address(&servers.template, &host("other.example", 1));
        assert!(matches!(info.addr(), ConnectionAddr::TcpTls { insecure: true, .. }));
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
        for url in [
            "redis://a,b",
            "redis+sentinel://a",
            "redis+raft://a",
            "redis:a",
            "redis://",
            "redis://[::]",
        ] {
            let refusal = parse(url).unwrap_err().to_string();
            assert!(refusal.contains("(not shown)"), "{refusal}");
        }
        let shown = format!("{:?}", parse("redis://user:hunter2@a").unwrap());
        assert!(!shown.contains("hunter2"), "{shown}");
    }
}
