//! The URL and the options of a client: its servers, chroot, login and TLS.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsConnector;

use super::ZooKeeperOptions;
use super::client::ServerList;
use super::paths::unescape;
use crate::error::{Error, Result};

const DEFAULT_PORT: u16 = 2181;
const DEFAULT_CHROOT: &str = "/lockset";

impl ServerList {
    pub(super) fn parse(options: &ZooKeeperOptions) -> Result<Self> {
        let form = "zk://[user:password@]host[:port],…[/chroot]; zks for TLS";
        let invalid = || Error::invalid("URL", "(not shown)", form);
        let (scheme, rest) = options.url.split_once("://").ok_or_else(invalid)?;
        let is_tls = match scheme {
            "zk" => false,
            "zks" => true,
            _ => return Err(invalid()),
        };
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (mut hosts, mut login) = (Vec::new(), None);
        for part in authority.split(',') {
            let (user, host) = match part.rsplit_once('@') {
                Some((user, host)) => (Some(user), host),
                None => (None, part),
            };
            hosts.push(host_and_port(host).ok_or_else(invalid)?);
            // One user for all servers: that of the first host with one.
            let user = user.filter(|user| login.is_none() && !user.starts_with(':'));
            if let Some(user) = user {
                let (name, password) = user.split_once(':').unwrap_or((user, ""));
                let name = unescape(name).ok_or_else(invalid)?;
                let password = unescape(password).ok_or_else(invalid)?;
                login = Some(format!("{name}:{password}"));
            }
        }
        let chroot = chroot(path)?;
        Ok(Self { hosts, chroot, login, tls: tls_connector(options, is_tls)? })
    }
}

fn host_and_port(text: &str) -> Option<(String, u16)> {
    // `[::1]` contains colons but no port.
    let (host, port) = match text.rsplit_once(':').filter(|(_, port)| !port.contains(']')) {
        Some((host, port)) => (host, port.parse().ok()?),
        None => (text, DEFAULT_PORT),
    };
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    (!host.is_empty() && port > 0).then(|| (host.to_owned(), port))
}

fn chroot(path: &str) -> Result<String> {
    if path.is_empty() {
        return Ok(DEFAULT_CHROOT.to_owned());
    }
    let is_invalid =
        |part: &str| matches!(part, "" | "." | "..") || part.contains(char::is_control);
    if path.split('/').any(is_invalid) || path.split('/').next() == Some("zookeeper") {
        let why = "it must be a path of nodes such as /apps/locks, not below /zookeeper";
        return Err(Error::invalid("chroot", path, why));
    }
    Ok(format!("/{path}"))
}

fn tls_connector(options: &ZooKeeperOptions, is_tls: bool) -> Result<Option<TlsConnector>> {
    let ZooKeeperOptions { ca, client_certificate, .. } = options;
    if !is_tls {
        return match ca.is_some() || client_certificate.is_some() {
            false => Ok(None),
            true => {
                let why = "certificates need TLS: use zks://";
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
    let invalid = |error: rustls::Error| Error::invalid("URL", "(not shown)", error.to_string());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(invalid)?
        .with_root_certificates(roots);
    let config = match client_certificate {
        None => config.with_no_client_auth(),
        Some((cert, key)) => {
            let private = PrivateKeyDer::from_pem_file(key).map_err(|error| bad_pem(key, error))?;
            config.with_client_auth_cert(certificates(cert)?, private).map_err(invalid)?
        }
    };
    Ok(Some(TlsConnector::from(Arc::new(config))))
}

fn certificates(path: &PathBuf) -> Result<Vec<CertificateDer<'static>>> {
    let read = CertificateDer::pem_file_iter(path).map_err(|error| bad_pem(path, error))?;
    let all: Vec<_> =
        read.collect::<std::result::Result<_, _>>().map_err(|error| bad_pem(path, error))?;
    match all.is_empty() {
        true => Err(bad_file(path, &"it contains no certificate in PEM form")),
        false => Ok(all),
    }
}

fn bad_pem(path: &Path, error: rustls::pki_types::pem::Error) -> Error {
    use rustls::pki_types::pem::Error::{Io, NoItemsFound};
    match error {
        Io(error) => bad_file(path, &error),
        NoItemsFound => bad_file(path, &"it contains nothing of this kind in PEM form"),
        // The content of the file may be secret.
        _ => bad_file(path, &"it is not in PEM form"),
    }
}

fn bad_file(path: &Path, why: &dyn fmt::Display) -> Error {
    Error::invalid("file", &path.display().to_string(), why.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str) -> Result<ServerList> {
        ServerList::parse(&ZooKeeperOptions { url: url.to_owned(), ..ZooKeeperOptions::default() })
    }

    #[test]
    fn every_form_of_url_is_accepted() {
        let one = parse("zk://example.org").unwrap();
        assert_eq!(one.hosts, [("example.org".to_owned(), 2181)]);
        assert_eq!((one.chroot.as_str(), one.login.as_deref()), ("/lockset", None));
        assert_eq!(parse("zk://h/").unwrap().chroot, "/lockset");
        let many = parse("zk://me:p%40ss@b:2,a:1,[::1]/apps/locks").unwrap();
        assert_eq!(many.login.as_deref(), Some("me:p@ss"));
        assert_eq!(many.hosts[2], ("::1".to_owned(), 2181));
        assert_eq!(many.identity(), "zk://[::1]:2181,a:1,b:2/apps/locks");
        assert_eq!(parse(&many.identity()).unwrap().identity(), many.identity());
        assert_eq!(parse("zks://h").unwrap().identity(), "zks://h:2181/lockset");
        // As the command writes it when the password comes from another source.
        assert_eq!(parse("zk://me:pw@a,:pw@b").unwrap().login.as_deref(), Some("me:pw"));
        assert!(parse("zks://h").unwrap().tls.is_some());
    }

    #[test]
    fn an_invalid_url_is_rejected_without_showing_its_secrets() {
        for url in ["zk://", "zk:a", "zk://a:x", "zk://a,", "zk://a/zookeeper/x", "zk://a//b"] {
            assert!(parse(url).is_err(), "{url}");
        }
        let shown = format!("{:?}", parse("zk://user:hunter2@a").unwrap());
        assert!(!shown.contains("hunter2"), "{shown}");
        let error = parse("zk://user:hunter2@a:b").unwrap_err().to_string();
        assert!(!error.contains("hunter2"), "{error}");
    }

    #[test]
    fn certificates_need_tls_and_must_exist() {
        let options = |url: &str, ca: &str| ZooKeeperOptions {
            url: url.to_owned(),
            ca: Some(ca.into()),
            ..ZooKeeperOptions::default()
        };
        let error = ServerList::parse(&options("zk://a", "/x")).unwrap_err().to_string();
        assert!(error.contains("zks://"), "{error}");
        let error = ServerList::parse(&options("zks://a", "/does/not/exist")).unwrap_err();
        assert!(error.to_string().contains("/does/not/exist"), "{error}");
    }
}
