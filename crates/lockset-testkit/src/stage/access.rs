//! Authentication of test servers (password, TLS), and the user that the documentation describes.

use super::redis::RedisServer;

/// Rules that Redis 6 rejects: it has no sharded channels, and 6.0 has no channel permissions.
const NEWER_RULES: [&str; 4] = ["+ssubscribe", "+spublish", "resetchannels", "&lockset:inbox:*"];

impl RedisServer {
    /// Creates the user that `docs/redis.md` describes, with the rules that this server supports,
    /// this password and more rules.
    pub fn add_documented_user(&self, password: &str, more: &[&str]) {
        let document = include_str!("../../../../docs/redis.md");
        let rules = document.split("```acl\n").nth(1).unwrap().split("```").next().unwrap();
        let is_known = |rule: &&str| {
            !NEWER_RULES.contains(rule) || self.ask(&["ACL", "SETUSER", "nobody", rule]) == "OK"
        };
        let rules = rules.split_whitespace().filter(|rule| *rule != ">change-me").filter(is_known);
        let password = format!(">{password}");
        let own = more.iter().copied().chain([password.as_str()]);
        let set: Vec<&str> = ["ACL", "SETUSER"].into_iter().chain(rules).chain(own).collect();
        assert_eq!(self.ask(&set), "OK");
    }
}

/// How clients and other servers authenticate at a server.
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// The password of the user `default`.
    pub password: Option<String>,
    /// Only TLS connections are accepted.
    pub tls: Option<Tls>,
}

/// The files of a server that speaks TLS and nothing else.
#[derive(Clone, Debug)]
pub struct Tls {
    /// The trusted certificate authority.
    pub ca: String,
    /// The server's own certificate.
    pub cert: String,
    /// Its key.
    pub key: String,
}

impl Access {
    /// The settings of a server or a sentinel on this port, by name.
    pub(super) fn settings(&self, port: u16) -> Vec<(&'static str, String)> {
        let mut settings = Vec::new();
        if let Some(password) = &self.password {
            settings.push(("requirepass", password.clone()));
        }
        if let Some(Tls { ca, cert, key }) = &self.tls {
            settings.extend([
                ("port", "0".to_owned()),
                ("tls-port", port.to_string()),
                ("tls-ca-cert-file", ca.clone()),
                ("tls-cert-file", cert.clone()),
                ("tls-key-file", key.clone()),
                ("tls-auth-clients", "no".to_owned()),
                // It makes a sentinel use TLS for its outgoing connections too.
                ("tls-replication", "yes".to_owned()),
            ]);
        }
        settings
    }

    /// The options of a server on this port.
    pub(super) fn options(&self, port: u16) -> Vec<String> {
        let mut settings = self.settings(port);
        settings.extend(self.password.clone().map(|password| ("masterauth", password)));
        settings.into_iter().flat_map(|(name, value)| [format!("--{name}"), value]).collect()
    }

    /// The options by which `redis-cli` authenticates.
    pub(super) fn cli(&self) -> Vec<&str> {
        let mut options = Vec::new();
        if let Some(password) = &self.password {
            options.extend(["--no-auth-warning", "-a", password]);
        }
        if let Some(tls) = &self.tls {
            options.extend(["--tls", "--cacert", &tls.ca]);
        }
        options
    }

    /// The scheme of its URLs.
    pub(super) fn scheme(&self) -> &'static str {
        if self.tls.is_some() { "rediss" } else { "redis" }
    }
}
