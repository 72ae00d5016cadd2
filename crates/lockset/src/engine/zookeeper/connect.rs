//! Where the servers are, and how a connection to one of them is made.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::ZooKeeperOptions;
use super::layout::unescaped;
use crate::engine::url_host;
use crate::error::{Error, Result};

const USUAL_PORT: u16 = 2181;

/// What the URL says: which servers, below which node, and how to speak to them.
pub(super) struct Servers {
    /// Host and port of each.
    hosts: Vec<(String, u16)>,
    /// The node that all others are below, such as `/lockset`.
    pub(super) chroot: String,
    /// `user:password`.
    login: Option<String>,
    tls: Option<TlsConnector>,
}

impl Servers {
    pub(super) fn parse(options: &ZooKeeperOptions) -> Result<Self> {
        let form = "zk://[user:password@]host[:port],…[/chroot]; zks for TLS";
        let bad = || Error::invalid("URL", "(not shown)", form);
        let (scheme, rest) = options.url.split_once("://").ok_or_else(bad)?;
        let is_tls = match scheme {
            "zk" => false,
            "zks" => true,
            _ => return Err(bad()),
        };
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (mut hosts, mut login) = (Vec::new(), None);
        for part in authority.split(',') {
            let (user, host) = match part.rsplit_once('@') {
                Some((user, host)) => (Some(user), host),
                None => (None, part),
            };
            hosts.push(host_and_port(host).ok_or_else(bad)?);
            // One user for all servers: that of the first host that names one.
            let user = user.filter(|user| login.is_none() && !user.starts_with(':'));
            if let Some(user) = user {
                let (name, password) = user.split_once(':').unwrap_or((user, ""));
                let name = unescaped(name).ok_or_else(bad)?;
                let password = unescaped(password).ok_or_else(bad)?;
                login = Some(format!("{name}:{password}"));
            }
        }
        let chroot = chroot(path)?;
        Ok(Self { hosts, chroot, login, tls: tls(options, is_tls)? })
    }

    /// Which home this is: a URL without secrets.
    pub(super) fn identity(&self) -> String {
        let scheme = if self.tls.is_some() { "zks" } else { "zk" };
        let mut hosts: Vec<String> =
            self.hosts.iter().map(|(host, port)| url_host(host, *port)).collect();
        hosts.sort();
        format!("{scheme}://{}{}", hosts.join(","), self.chroot)
    }

    pub(super) fn count(&self) -> usize {
        self.hosts.len()
    }

    pub(super) fn login(&self) -> Option<&str> {
        self.login.as_deref()
    }

    /// A connection to the server of this number.
    pub(super) async fn connect(
        &self,
        number: usize,
        within: Duration,
    ) -> std::io::Result<Box<dyn Stream>> {
        let (host, port) = &self.hosts[number % self.hosts.len()];
        let connecting = async {
            let stream = TcpStream::connect((host.as_str(), *port)).await?;
            stream.set_nodelay(true)?;
            let Some(tls) = &self.tls else { return Ok(Box::new(stream) as Box<dyn Stream>) };
            let name = ServerName::try_from(host.clone()).map_err(std::io::Error::other)?;
            let sealed = tls.connect(name, stream).await.map_err(unsealed)?;
            Ok(Box::new(sealed) as Box<dyn Stream>)
        };
        let late = || std::io::Error::new(std::io::ErrorKind::TimedOut, "no answer");
        tokio::time::timeout(within, connecting).await.unwrap_or_else(|_| Err(late()))
    }

    /// What went wrong, and with the server of this number.
    pub(super) fn told(&self, number: usize, why: &std::io::Error) -> String {
        let (host, port) = &self.hosts[number % self.hosts.len()];
        format!("{host}:{port}: {why}")
    }
}

impl fmt::Debug for Servers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The login is a secret.
        f.debug_struct("Servers")
            .field("hosts", &self.hosts)
            .field("chroot", &self.chroot)
            .finish_non_exhaustive()
    }
}

/// Whether one of the two sides does not accept the other's certificate: a next attempt would end
/// in the same way.
pub(super) fn is_refusal(why: &std::io::Error) -> bool {
    let why = why.get_ref().and_then(|why| why.downcast_ref::<rustls::Error>());
    matches!(why, Some(rustls::Error::InvalidCertificate(_) | rustls::Error::AlertReceived(_)))
}

/// A port that does not speak TLS ends the connection without a word.
fn unsealed(why: std::io::Error) -> std::io::Error {
    match why.kind() {
        std::io::ErrorKind::UnexpectedEof => {
            let what = "it ended the TLS handshake; is this a port for TLS?";
            std::io::Error::new(why.kind(), what)
        }
        _ => why,
    }
}

/// A connection, with or without TLS.
pub(super) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

fn host_and_port(text: &str) -> Option<(String, u16)> {
    // `[::1]` has colons but no port.
    let (host, port) = match text.rsplit_once(':').filter(|(_, port)| !port.contains(']')) {
        Some((host, port)) => (host, port.parse().ok()?),
        None => (text, USUAL_PORT),
    };
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    (!host.is_empty() && port > 0).then(|| (host.to_owned(), port))
}

fn chroot(path: &str) -> Result<String> {
    if path.is_empty() {
        return Ok("/lockset".to_owned());
    }
    let reserved = |part: &str| matches!(part, "" | "." | "..") || part.contains(char::is_control);
    if path.split('/').any(reserved) || path.split('/').next() == Some("zookeeper") {
        let why = "it is a path of nodes such as /apps/locks, not below /zookeeper";
        return Err(Error::invalid("chroot", path, why));
    }
    Ok(format!("/{path}"))
}

fn tls(options: &ZooKeeperOptions, is_tls: bool) -> Result<Option<TlsConnector>> {
    let ZooKeeperOptions { ca, client_certificate, .. } = options;
    if !is_tls {
        return match ca.is_some() || client_certificate.is_some() {
            false => Ok(None),
            true => {
                let why = "certificates are for TLS: write zks://";
                Err(Error::invalid("URL option", "ca, cert, key", why))
            }
        };
    }
    let mut roots = rustls::RootCertStore::empty();
    match ca {
        Some(ca) => {
            for certificate in certificates(ca)? {
                roots.add(certificate).map_err(|error| bad_file(ca, &error))?;
            }
        }
        None => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let failed = |error: rustls::Error| Error::invalid("URL", "(not shown)", error.to_string());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(failed)?
        .with_root_certificates(roots);
    let config = match client_certificate {
        None => config.with_no_client_auth(),
        Some((cert, key)) => {
            let private = PrivateKeyDer::from_pem_file(key).map_err(|error| bad_pem(key, error))?;
            config.with_client_auth_cert(certificates(cert)?, private).map_err(failed)?
        }
    };
    Ok(Some(TlsConnector::from(Arc::new(config))))
}

fn certificates(path: &PathBuf) -> Result<Vec<CertificateDer<'static>>> {
    let read = CertificateDer::pem_file_iter(path).map_err(|error| bad_pem(path, error))?;
    let all: Vec<_> =
        read.collect::<std::result::Result<_, _>>().map_err(|error| bad_pem(path, error))?;
    match all.is_empty() {
        true => Err(bad_file(path, &"it holds no certificate in PEM form")),
        false => Ok(all),
    }
}

fn bad_pem(path: &Path, error: rustls::pki_types::pem::Error) -> Error {
    use rustls::pki_types::pem::Error::{Io, NoItemsFound};
    match error {
        Io(error) => bad_file(path, &error),
        NoItemsFound => bad_file(path, &"it holds nothing of this kind in PEM form"),
        // What the file says may be a secret.
        _ => bad_file(path, &"it is not in PEM form"),
    }
}

fn bad_file(path: &Path, why: &dyn fmt::Display) -> Error {
    Error::invalid("file", &path.display().to_string(), why.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str) -> Result<Servers> {
        Servers::parse(&ZooKeeperOptions { url: url.to_owned(), ..ZooKeeperOptions::default() })
    }

    #[test]
    fn every_form_of_url_is_understood() {
        let one = parse("zk://example.org").unwrap();
        assert_eq!(one.hosts, [("example.org".to_owned(), 2181)]);
        assert_eq!((one.chroot.as_str(), one.login()), ("/lockset", None));
        assert_eq!(parse("zk://h/").unwrap().chroot, "/lockset");
        let many = parse("zk://me:p%40ss@b:2,a:1,[::1]/apps/locks").unwrap();
        assert_eq!(many.login(), Some("me:p@ss"));
        assert_eq!(many.hosts[2], ("::1".to_owned(), 2181));
        assert_eq!(many.identity(), "zk://[::1]:2181,a:1,b:2/apps/locks");
        assert_eq!(parse(&many.identity()).unwrap().identity(), many.identity());
        assert_eq!(parse("zks://h").unwrap().identity(), "zks://h:2181/lockset");
        // As the command writes it when the password comes from elsewhere.
        assert_eq!(parse("zk://me:pw@a,:pw@b").unwrap().login(), Some("me:pw"));
        assert!(parse("zks://h").unwrap().tls.is_some());
    }

    #[test]
    fn what_is_no_url_is_refused_without_its_secrets() {
        for url in ["zk://", "zk:a", "zk://a:x", "zk://a,", "zk://a/zookeeper/x", "zk://a//b"] {
            assert!(parse(url).is_err(), "{url}");
        }
        let shown = format!("{:?}", parse("zk://user:hunter2@a").unwrap());
        assert!(!shown.contains("hunter2"), "{shown}");
        let refusal = parse("zk://user:hunter2@a:b").unwrap_err().to_string();
        assert!(!refusal.contains("hunter2"), "{refusal}");
    }

    #[test]
    fn certificates_are_for_tls_and_must_be_there() {
        let options = |url: &str, ca: &str| ZooKeeperOptions {
            url: url.to_owned(),
            ca: Some(ca.into()),
            ..ZooKeeperOptions::default()
        };
        let refusal = Servers::parse(&options("zk://a", "/x")).unwrap_err().to_string();
        assert!(refusal.contains("zks://"), "{refusal}");
        let refusal = Servers::parse(&options("zks://a", "/does/not/exist")).unwrap_err();
        assert!(refusal.to_string().contains("/does/not/exist"), "{refusal}");
    }
}
