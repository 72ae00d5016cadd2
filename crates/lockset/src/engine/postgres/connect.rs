//! The URL and the options of a client: its servers, database, login and TLS; and one attempt to
//! connect.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio_postgres::config::{Host, SslMode, TargetSessionAttrs};
use tokio_postgres::{AsyncMessage, Client, Config};

use super::PostgresOptions;
use super::error::{PostgresRequestError, classify, unreachable_error};
use super::tls::{PostgresTls, PostgresTlsMaker};
use crate::error::{Error, Result};
use crate::tls::{self, TlsOptions};
use crate::url::{HostPort, Url, UrlServers, identity, percent_decode};

const DEFAULT_PORT: u16 = 5432;
/// The time in which a connection must be open.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Data that the server does not acknowledge for this long ends a connection: a request must not
/// arrive after its claim's tombstone is gone.
const UNACKNOWLEDGED: Duration = Duration::from_secs(20);
const FORM: &str = "postgres://[user[:password]@]host[:port],…[/database]";
/// The longest identifier of a server, in bytes.
const MAX_IDENTIFIER: usize = 63;
/// What a session that is ours is set to, whatever its role or database says.
const SESSION: &str = "
    SET statement_timeout = '10s'; SET lock_timeout = '3s';
    SET idle_in_transaction_session_timeout = 0;
    SET default_transaction_isolation = 'read committed'; SET client_min_messages = 'error'";

impl PostgresOptions {
    pub(crate) fn from_url(url: Url) -> Result<Self> {
        let own = ["schema", "listen", "sslmode", "first_lease", "target_session_attrs"];
        url.allow_options(&[&own[..], &tls::OPTIONS].concat())?;
        if let Some(other) = url.option("target_session_attrs").filter(|it| *it != "read-write") {
            let why = "locks are written, so it is read-write";
            return Err(Error::invalid("target_session_attrs", other, why));
        }
        let mut options = Self { tls: TlsOptions::from_url(&url)?, ..Self::default() };
        options.schema = url.option("schema").unwrap_or(&options.schema).to_owned();
        options.sslmode = url.option("sslmode").map(str::parse).transpose()?;
        if let Some(first_lease) = url.duration("first_lease")? {
            options.first_lease = first_lease;
        }
        if let Some(listen) = url.option("listen") {
            let invalid = || Error::invalid("listen", "(not shown)", FORM);
            options.listen = Some(percent_decode(listen).ok_or_else(invalid)?.parse()?);
        }
        options.url = url;
        Ok(options)
    }

    pub(super) fn check(&self) -> Result<()> {
        let is_identifier = |text: &str| {
            let mut chars = text.chars();
            chars.next().is_some_and(|c| c.is_ascii_lowercase() || c == '_')
                && chars.all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
                && text.len() <= MAX_IDENTIFIER
        };
        if !is_identifier(&self.schema) || self.schema.starts_with("pg_") {
            let why = "it has lower-case letters, digits and `_`, and is not one of the server's";
            return Err(Error::invalid("schema", &self.schema, why));
        }
        Ok(())
    }
}

/// How a connection is made.
#[derive(Clone)]
pub(super) struct PostgresConnector {
    config: Config,
    tls: PostgresTlsMaker,
}

impl std::fmt::Debug for PostgresConnector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The configuration has the password.
        f.debug_struct("PostgresConnector").finish_non_exhaustive()
    }
}

/// Handles the payload of a notification.
pub(super) type OnNotification = Arc<dyn Fn(&str) + Send + Sync>;

/// An open connection, and its task.
pub(super) struct OpenClient {
    pub(super) client: Client,
    pub(super) task: AbortHandle,
    /// Its sender is dropped when the connection ends.
    pub(super) ended: watch::Receiver<()>,
}

impl PostgresConnector {
    /// To the servers of the URL, or of a configuration that the caller brought.
    pub(super) fn new(options: &PostgresOptions) -> Result<Self> {
        let config = match &options.config {
            Some(config) => config.clone(),
            None => config_of(&options.url)?,
        };
        Self::with(config, options)
    }

    /// To the server on which to listen, if it is another.
    pub(super) fn for_listening(options: &PostgresOptions) -> Result<Option<Self>> {
        let Some(url) = &options.listen else { return Ok(None) };
        let mut config = config_of(url)?;
        let main = Self::new(options)?.config;
        // Without a login of its own it has that of the other URL.
        if config.get_user().is_none()
            && let Some(user) = main.get_user()
        {
            config.user(user);
        }
        if config.get_password().is_none()
            && let Some(password) = main.get_password()
        {
            config.password(password);
        }
        Self::with(config, options).map(Some)
    }

    fn with(mut config: Config, options: &PostgresOptions) -> Result<Self> {
        let mode = options.sslmode.unwrap_or_else(|| match config.get_ssl_mode() {
            // A configuration that demands TLS leaves the check to the connector.
            SslMode::Require if options.config.is_some() => PostgresTls::VerifyFull,
            _ => PostgresTls::default_for(config.get_hosts().iter().all(is_local)),
        });
        config.ssl_mode(mode.ssl_mode());
        config.target_session_attrs(TargetSessionAttrs::ReadWrite);
        config.connect_timeout(CONNECT_TIMEOUT).tcp_user_timeout(UNACKNOWLEDGED);
        if config.get_application_name().is_none() {
            config.application_name("lockset");
        }
        Ok(Self { config, tls: PostgresTlsMaker::new(mode, &options.tls)? })
    }

    /// A URL that identifies the database, without logins.
    pub(super) fn identity(&self, schema: &str) -> String {
        let ports = self.config.get_ports();
        let port = |index: usize| ports.get(index).or(ports.first()).copied();
        let hosts: Vec<HostPort> = (self.config.get_hosts().iter().enumerate())
            .map(|(index, host)| (shown(host), port(index).unwrap_or(DEFAULT_PORT)))
            .collect();
        let database = self.config.get_dbname().or(self.config.get_user()).unwrap_or_default();
        let url = identity("postgres", &hosts, &format!("/{database}"));
        format!("{url}?schema={schema}")
    }

    /// Connects to the first server that accepts writes. Must be called on the runtime of the
    /// connection's task.
    pub(super) async fn open(
        &self,
        on_notification: Option<OnNotification>,
    ) -> Result<OpenClient, PostgresRequestError> {
        let connecting = self.config.connect(self.tls.clone());
        let (client, mut connection) =
            match tokio::time::timeout(CONNECT_TIMEOUT * 2, connecting).await {
                Ok(opened) => opened.map_err(|error| explain_standby(&self.config, error))?,
                Err(_) => {
                    let what = "the server does not respond".to_owned();
                    let error = unreachable_error(what, true, None);
                    return Err(PostgresRequestError::Refused(error));
                }
            };
        let (sender, ended) = watch::channel(());
        let task = tokio::spawn(async move {
            let _sender: watch::Sender<()> = sender;
            // Its error is also that of the requests in flight.
            while let Some(Ok(message)) =
                std::future::poll_fn(|cx| connection.poll_message(cx)).await
            {
                if let (AsyncMessage::Notification(notice), Some(on_notification)) =
                    (message, &on_notification)
                {
                    on_notification(notice.payload());
                }
            }
        });
        Ok(OpenClient { client, task: task.abort_handle(), ended })
    }
}

impl OpenClient {
    /// Sets up a session that is ours.
    pub(super) async fn set_up_session(&self) -> Result<(), PostgresRequestError> {
        self.client.batch_execute(SESSION).await.map_err(classify)
    }

    /// The process of the server that serves this connection at the moment.
    pub(super) async fn backend(&self) -> Result<i32, PostgresRequestError> {
        let rows = self.client.query_typed("SELECT pg_backend_pid()", &[]).await;
        let rows = rows.map_err(classify)?;
        Ok(rows.first().and_then(|row| row.try_get(0).ok()).unwrap_or_default())
    }
}

impl Drop for OpenClient {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A connection that fails because every server is a standby says so.
fn explain_standby(config: &Config, error: tokio_postgres::Error) -> PostgresRequestError {
    let is_standby = std::error::Error::source(&error)
        .is_some_and(|cause| cause.to_string().contains("does not allow writes"));
    if !is_standby {
        return match classify(error) {
            // Nothing was sent yet.
            PostgresRequestError::Unknown(error) => PostgresRequestError::Refused(error),
            refused => refused,
        };
    }
    let all = if config.get_hosts().len() > 1 { "every server" } else { "the server" };
    let what = format!("{all} is a standby or read-only; name the primary too");
    PostgresRequestError::Refused(unreachable_error(what, true, Some(error)))
}

fn config_of(url: &Url) -> Result<Config> {
    if !matches!(url.scheme(), "postgres" | "postgresql") {
        return Err(Error::invalid("URL", "(not shown)", FORM));
    }
    let UrlServers { hosts, logins, path } = url.servers(DEFAULT_PORT, FORM)?;
    let mut config = Config::new();
    for (host, port) in &hosts {
        config.host(host).port(*port);
    }
    if let Some(login) = logins.into_iter().flatten().next() {
        if !login.user.is_empty() {
            config.user(&login.user);
        }
        if !login.password.is_empty() {
            config.password(&login.password);
        }
    }
    if !path.is_empty() {
        config.dbname(&path);
    }
    Ok(config)
}

fn is_local(host: &Host) -> bool {
    match host {
        Host::Tcp(name) if name == "localhost" => true,
        Host::Tcp(name) => {
            name.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
        }
        #[cfg(unix)]
        Host::Unix(_) => true,
    }
}

fn shown(host: &Host) -> String {
    match host {
        Host::Tcp(name) => name.clone(),
        #[cfg(unix)]
        Host::Unix(path) => path.display().to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connector(url: &str) -> Result<PostgresConnector> {
        let options = PostgresOptions::from_url(url.parse()?)?;
        options.check()?;
        PostgresConnector::new(&options)
    }

    #[test]
    fn every_form_of_url_is_accepted() {
        let one = connector("postgresql://shop@[::1]/orders").unwrap();
        assert_eq!(one.identity("lockset"), "postgres://[::1]:5432/orders?schema=lockset");
        assert_eq!(one.config.get_ssl_mode(), SslMode::Disable, "on the machine itself");
        let many = connector("postgres://u:p%40ss@b:2,a.example/db?sslmode=require").unwrap();
        assert_eq!(many.identity("x"), "postgres://a.example:5432,b:2/db?schema=x");
        assert_eq!(many.config.get_password(), Some(&b"p@ss"[..]));
        assert_eq!(connector("postgres://u@h").unwrap().config.get_ssl_mode(), SslMode::Require);
        assert!(connector(&many.identity("x")).is_ok());
    }

    #[test]
    fn an_invalid_url_is_rejected_without_showing_its_secrets() {
        for url in [
            "postgres://u:hunter2@h:x/db",
            "postgres://u:hunter2@h/db?schema=Pg",
            "postgres://u:hunter2@h/db?sslmode=allow",
            "postgres://u:hunter2@h/db?target_session_attrs=any",
            "postgres://u:hunter2@h/db?sslmode=disable&ca=/x",
            "postgres://h/db?listen=redis://u:hunter2@h",
        ] {
            let options = PostgresOptions::from_url(url.parse().unwrap());
            let made = options.and_then(|options| {
                options.check()?;
                PostgresConnector::for_listening(&options)?;
                PostgresConnector::new(&options)
            });
            let error = made.unwrap_err().to_string();
            assert!(!error.contains("hunter2"), "{error}");
        }
        let shown = format!("{:?}", connector("postgres://u:hunter2@h/db").unwrap());
        assert!(!shown.contains("hunter2"), "{shown}");
    }

    #[test]
    fn the_listening_url_has_the_login_of_the_other_unless_it_has_its_own() {
        let login = |url: &str| {
            let options = PostgresOptions::from_url(url.parse().unwrap()).unwrap();
            let config = PostgresConnector::for_listening(&options).unwrap().unwrap().config;
            (config.get_user().unwrap().to_owned(), config.get_password().map(<[u8]>::to_vec))
        };
        let inherited = login("postgres://u:p@h/db?listen=postgres://direct/db");
        assert_eq!(inherited, ("u".to_owned(), Some(b"p".to_vec())));
        let own = login("postgres://u:p@h/db?listen=postgres%3A%2F%2Fv:q@direct/db");
        assert_eq!(own, ("v".to_owned(), Some(b"q".to_vec())));
    }
}
