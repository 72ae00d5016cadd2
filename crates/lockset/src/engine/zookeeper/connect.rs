//! The URL and the options of a client: its servers, chroot, login and TLS.

use std::sync::Arc;

use tokio_rustls::TlsConnector;

use super::ZooKeeperOptions;
use super::client::ServerList;
use crate::error::{Error, Result};
use crate::tls::{self, TlsOptions};
use crate::url::{Url, UrlServers};

const DEFAULT_PORT: u16 = 2181;
const DEFAULT_CHROOT: &str = "/lockset";

impl ZooKeeperOptions {
    pub(crate) fn from_url(url: Url) -> Result<Self> {
        url.allow_options(&[&["layout", "names"][..], &tls::OPTIONS].concat())?;
        let raw_names = match url.option("names") {
            None | Some("escaped") => false,
            Some("raw") => true,
            Some(other) => return Err(Error::invalid("names", other, "there are escaped and raw")),
        };
        let layout = url.option("layout").map(str::parse).transpose()?.unwrap_or_default();
        let tls = TlsOptions::from_url(&url)?;
        Ok(Self { url, layout, raw_names, tls, ..Self::default() })
    }
}

impl ServerList {
    pub(super) fn new(options: &ZooKeeperOptions) -> Result<Self> {
        let form = "zk://[user:password@]host[:port],…[/chroot]; zks for TLS";
        let is_tls = match options.url.scheme() {
            "zk" => false,
            "zks" => true,
            _ => return Err(Error::invalid("URL", "(not shown)", form)),
        };
        let UrlServers { hosts, logins, path } = options.url.servers(DEFAULT_PORT, form)?;
        // One user for all servers: that of the first host with one.
        let login = logins.into_iter().flatten().find(|login| !login.user.is_empty());
        let login = login.map(|login| format!("{}:{}", login.user, login.password));
        let tls = match options.tls.read(is_tls, "zks")? {
            None => None,
            Some(files) => Some(TlsConnector::from(Arc::new(files.to_rustls()?))),
        };
        Ok(Self { hosts, chroot: chroot(&path)?, login, tls })
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str) -> Result<ServerList> {
        ServerList::new(&ZooKeeperOptions::from_url(url.parse()?)?)
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
        let error = parse("zk://a?ca=/x").unwrap_err().to_string();
        assert!(error.contains("zks://"), "{error}");
        let error = parse("zks://a?ca=/does/not/exist").unwrap_err();
        assert!(error.to_string().contains("/does/not/exist"), "{error}");
    }
}
