//! Where the servers are: one, the master that sentinels name, or the nodes of a cluster.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use redis::{
    Client, ClientTlsConfig, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisError,
    TlsCertificates,
};

use super::link::{self, failed, judge};
use super::{Quorum, RedisOptions, TOMBSTONE_LIFE};
use crate::engine::common::pem::read_pem;
use crate::engine::url_host;
use crate::error::{Error, Result};

/// How long a sentinel may take to answer, connecting included.
const SENTINEL: Duration = Duration::from_millis(500);

/// A server's host and port.
pub(super) type Address = (String, u16);

/// What the URL says: which servers, in which arrangement, and how to speak to them.
pub(super) struct Servers {
    pub(super) shape: Shape,
    /// The servers that were named; in a cluster or with sentinels only where to begin.
    pub(super) hosts: Vec<Address>,
    /// User, password, database and the manners of TCP, with some address.
    like: ConnectionInfo,
    tls: Option<TlsCertificates>,
    /// How the sentinels are spoken to.
    sentinel_like: Option<ConnectionInfo>,
    pub(super) quorum: Option<Arc<Quorum>>,
}

/// How the servers belong together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    One,
    /// The name of the service that the sentinels watch.
    Sentinel(String),
    Cluster,
}

impl Servers {
    pub(super) fn parse(options: &RedisOptions) -> Result<Self> {
        let form = "redis://[user:password@]host[:port][/db], \
                    redis+sentinel://[user:password@]host[:port],…/service[/db] or \
                    redis+cluster://[user:password@]host[:port],…; rediss for TLS";
        let bad = || Error::invalid("URL", "(not shown)", form);
        let (scheme, rest) = options.url.split_once("://").ok_or_else(bad)?;
        let (base, shape) = scheme.split_once('+').unwrap_or((scheme, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (user, hosts) = authority.rsplit_once('@').unwrap_or(("", authority));
        let (shape, db) = match shape {
            "" => (Shape::One, path),
            "cluster" => (Shape::Cluster, ""),
            "sentinel" => {
                let (service, db) = path.split_once('/').unwrap_or((path, ""));
                if service.is_empty() {
                    let why = "a Sentinel URL ends with the name of its service: …/mymaster";
                    return Err(Error::invalid("URL", "(not shown)", why));
                }
                (Shape::Sentinel(service.to_owned()), db)
            }
            _ => return Err(bad()),
        };
        let info = |user: &str, host: &str, db: &str| {
            let user = if user.is_empty() { String::new() } else { format!("{user}@") };
            format!("{base}://{user}{host}/{db}").into_connection_info().map_err(|_| bad())
        };
        let usual_port = if matches!(shape, Shape::Sentinel(_)) { 26379 } else { 6379 };
        let hosts: Vec<&str> = hosts.split(',').collect();
        if shape == Shape::One && hosts.len() > 1 {
            let why = "several servers are named: use redis+sentinel:// or redis+cluster://";
            return Err(Error::invalid("URL", "(not shown)", why));
        }
        let addresses = hosts.iter().map(|host| {
            let host = with_port(host, usual_port);
            address(info("", &host, "")?.addr()).ok_or_else(bad)
        });
        let addresses = addresses.collect::<Result<Vec<_>>>()?;
        let first = with_port(hosts.first().copied().unwrap_or_default(), usual_port);
        let like = mannered(info(user, &first, db)?, redis::ProtocolVersion::RESP3);
        let sentinel_like = match &options.sentinel_login {
            Some(login) => info(login, &first, "")?,
            None => info("", &first, "")?,
        };
        let sentinel_like = mannered(sentinel_like, redis::ProtocolVersion::RESP2);
        let sentinel_like = matches!(shape, Shape::Sentinel(_)).then_some(sentinel_like);
        let tls = certificates(options, base == "rediss")?;
        Ok(Self {
            shape,
            hosts: addresses,
            like,
            tls,
            sentinel_like,
            quorum: options.quorum.clone(),
        })
    }

    /// Which home this is, without secrets; a URL unless sentinels are asked where it is.
    pub(super) fn identity(&self) -> String {
        let db = self.like.redis_settings().db();
        let scheme = match self.like.addr() {
            ConnectionAddr::TcpTls { .. } => "rediss",
            _ => "redis",
        };
        let mut hosts: Vec<String> =
            self.hosts.iter().map(|(host, port)| url_host(host, *port)).collect();
        match &self.shape {
            Shape::One => format!("{scheme}://{}/{db}", hosts.join(",")),
            // The sentinels may be named in any order, and not all of them.
            Shape::Sentinel(service) => format!("redis+sentinel:{service}/{db}"),
            Shape::Cluster => {
                hosts.sort();
                format!("{scheme}+cluster://{}", hosts.join(","))
            }
        }
    }

    /// A client of the server at this address.
    pub(super) fn client(&self, at: &Address) -> std::result::Result<Client, RedisError> {
        let info = with_address(&self.like, at);
        match &self.tls {
            Some(tls) => Client::build_with_tls(info, tls.clone()),
            None => Client::open(info),
        }
    }

    /// The master as the sentinels know it: all are asked at once, and the newest knowledge counts.
    /// No majority is enough: in the first seconds after a failover only the one that led it knows,
    /// and the master of yesterday may be back, empty, and say that it is one.
    pub(super) async fn master(&self, service: &str) -> std::result::Result<Master, Error> {
        let asked = self.hosts.iter().map(|at| self.ask_sentinel(at, service));
        let (mut masters, mut whys) = (Vec::new(), Vec::new());
        for answer in futures_util::future::join_all(asked).await {
            match answer {
                Ok(master) => masters.push(master),
                Err(error) => whys.push(error),
            }
        }
        let newest = masters.into_iter().max_by_key(|master: &Master| master.epoch);
        newest.ok_or_else(|| nobody_knows(service, whys))
    }

    async fn ask_sentinel(&self, at: &Address, service: &str) -> Result<Master> {
        let ask = async {
            let info = with_address(self.sentinel_like.as_ref().unwrap_or(&self.like), at);
            let client = match &self.tls {
                Some(tls) => Client::build_with_tls(info, tls.clone())?,
                None => Client::open(info)?,
            };
            let mut connection = client.get_multiplexed_async_connection().await?;
            // While it leads a failover a sentinel shows the old master beside the new epoch; only
            // the address by name is the promoted one.
            let mut questions = redis::pipe();
            questions.cmd("SENTINEL").arg("GET-MASTER-ADDR-BY-NAME").arg(service);
            questions.cmd("SENTINEL").arg("MASTER").arg(service);
            type Answers = (Option<(String, u16)>, HashMap<String, String>);
            questions.query_async::<Answers>(&mut connection).await
        };
        let sentinel = |error| link::at(at, error);
        let (at, facts) = match tokio::time::timeout(SENTINEL, ask).await {
            Ok(facts) => facts.map_err(|error| sentinel(judge(error).into_error()))?,
            Err(_) => {
                let what = format!("no answer within {SENTINEL:?}");
                return Err(sentinel(failed(what, true, None)));
            }
        };
        let number = |key: &str| facts.get(key).and_then(|text| text.parse::<u64>().ok());
        match at {
            Some(at) => Ok(Master {
                at,
                epoch: number("config-epoch").unwrap_or(0),
                replicas: number("num-slaves").and_then(|n| u32::try_from(n).ok()).unwrap_or(0),
            }),
            _ => Err(sentinel(failed("it names no master".to_owned(), true, None))),
        }
    }
}

/// Waiting helps unless it helps with none of them: a wrong login stays wrong.
fn nobody_knows(service: &str, mut whys: Vec<Error>) -> Error {
    let what = format!("no sentinel knows the master of `{service}`");
    let retryable = whys.is_empty() || whys.iter().any(Error::is_retryable);
    match whys.pop() {
        Some(Error::Unreachable { engine, what: why, source, .. }) => {
            Error::Unreachable { engine, what: format!("{what}: {why}"), retryable, source }
        }
        _ => failed(what, retryable, None),
    }
}

impl fmt::Debug for Servers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The rest carries secrets.
        f.debug_struct("Servers").field("hosts", &self.hosts).finish_non_exhaustive()
    }
}

/// What a sentinel says of a master.
#[derive(Debug)]
pub(super) struct Master {
    pub(super) at: Address,
    /// Grows with every failover.
    epoch: u64,
    /// How many replicas it has, those that are down included.
    pub(super) replicas: u32,
}

fn with_port(host: &str, usual: u16) -> String {
    // `[::1]` has colons but no port.
    match host.rsplit_once(':').is_some_and(|(_, port)| !port.contains(']')) {
        true => host.to_owned(),
        false => format!("{host}:{usual}"),
    }
}

fn address(addr: &ConnectionAddr) -> Option<Address> {
    match addr {
        ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
            Some((host.clone(), *port))
        }
        _ => None,
    }
}

fn with_address(like: &ConnectionInfo, (host, port): &Address) -> ConnectionInfo {
    let addr = match like.addr() {
        ConnectionAddr::TcpTls { .. } => ConnectionAddr::TcpTls {
            host: host.clone(),
            port: *port,
            insecure: false,
            tls_params: None,
        },
        _ => ConnectionAddr::Tcp(host.clone(), *port),
    };
    like.clone().set_addr(addr)
}

fn mannered(info: ConnectionInfo, protocol: redis::ProtocolVersion) -> ConnectionInfo {
    let settings = info.redis_settings().clone().set_protocol(protocol);
    // A connection that was given up must not deliver anything later than a mark is remembered.
    let tcp = redis::io::tcp::TcpSettings::default();
    let tcp = tcp.set_nodelay(true).set_linger_time(Duration::ZERO);
    #[cfg(target_os = "linux")]
    let tcp = tcp.set_user_timeout(TOMBSTONE_LIFE / 3);
    info.set_redis_settings(settings).set_tcp_settings(tcp)
}

/// Reads the certificates that the options name. Without any, the system's authorities count.
fn certificates(options: &RedisOptions, is_tls: bool) -> Result<Option<TlsCertificates>> {
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

    fn parse(url: &str) -> Result<Servers> {
        Servers::parse(&RedisOptions { url: url.to_owned(), ..RedisOptions::default() })
    }

    fn host(name: &str, port: u16) -> Address {
        (name.to_owned(), port)
    }

    #[test]
    fn every_form_of_url_is_understood() {
        let one = parse("rediss://user:pw@example.org/3").unwrap();
        assert_eq!((one.shape, one.hosts), (Shape::One, vec![host("example.org", 6379)]));
        let sentinel = parse("redis+sentinel://:pw@a,b:77,[::1]/mine/2").unwrap();
        assert_eq!(sentinel.shape, Shape::Sentinel("mine".to_owned()));
        assert_eq!(sentinel.hosts, [host("a", 26379), host("b", 77), host("::1", 26379)]);
        assert_eq!(sentinel.like.redis_settings().password(), Some("pw"));
        assert_eq!(sentinel.sentinel_like.unwrap().redis_settings().password(), None);
        let cluster = parse("redis+cluster://a:1,b:2").unwrap();
        assert_eq!((cluster.shape, cluster.hosts.len()), (Shape::Cluster, 2));
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
        // Which sentinels are named does not matter, so they cannot be found by it.
        let sentinel = parse("redis+sentinel://a,b/mine/2").unwrap().identity();
        assert_eq!(sentinel, "redis+sentinel:mine/2");
        assert!(parse(&sentinel).is_err());
    }

    /// Says after a while where the master is, and since which failover.
    fn sentinel(after: Duration, port: &'static str, epoch: &'static str) -> String {
        use std::io::{Read, Write};
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let host = listener.local_addr().unwrap().to_string();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let (mut heard, mut answered) = (String::new(), 0);
            let mut more = [0; 1024];
            while let Ok(length @ 1..) = stream.read(&mut more) {
                heard.push_str(std::str::from_utf8(&more[..length]).unwrap());
                let commands: Vec<&str> = heard.split('*').skip(1).collect();
                for command in &commands[answered..] {
                    let answer = match command {
                        command if command.contains("GET-MASTER") => {
                            std::thread::sleep(after);
                            format!("*2\r\n$9\r\n127.0.0.1\r\n${}\r\n{port}\r\n", port.len())
                        }
                        command if command.contains("SENTINEL") => {
                            format!("*2\r\n$12\r\nconfig-epoch\r\n${}\r\n{epoch}\r\n", epoch.len())
                        }
                        _ => "+OK\r\n".to_owned(),
                    };
                    stream.write_all(answer.as_bytes()).unwrap();
                }
                answered = commands.len();
            }
        });
        host
    }

    #[tokio::test]
    async fn the_one_who_knows_of_the_last_failover_is_waited_for() {
        let at_once = Duration::ZERO;
        let hosts = [
            sentinel(at_once, "7001", "1"),
            sentinel(SENTINEL / 4, "7002", "2"),
            sentinel(at_once, "7001", "1"),
        ];
        let servers = parse(&format!("redis+sentinel://{}/mine", hosts.join(","))).unwrap();
        assert_eq!(servers.master("mine").await.unwrap().at, host("127.0.0.1", 7002));
    }

    #[test]
    fn what_is_no_url_is_refused_without_its_secrets() {
        for url in ["redis://a,b", "redis+sentinel://a", "redis+raft://a", "redis:a", "redis://"] {
            let refusal = parse(url).unwrap_err().to_string();
            assert!(refusal.contains("(not shown)"), "{refusal}");
        }
        let shown = format!("{:?}", parse("redis://user:hunter2@a").unwrap());
        assert!(!shown.contains("hunter2"), "{shown}");
    }
}
