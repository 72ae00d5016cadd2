//! The servers of an ensemble, and how to connect to one of them.

use std::fmt;
use std::io;
use std::time::Duration;

use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::url::{HostPort, host_port, identity};

/// The servers, the node that everything is below, and how to log in.
pub(crate) struct ServerList {
    /// Host and port of each server.
    pub(crate) hosts: Vec<HostPort>,
    /// The node that all others are below, such as `/lockset`.
    pub(crate) chroot: String,
    /// `user:password`, of the `digest` scheme.
    pub(crate) login: Option<String>,
    pub(crate) tls: Option<TlsConnector>,
}

impl ServerList {
    /// A URL without secrets.
    pub(crate) fn identity(&self) -> String {
        let scheme = if self.tls.is_some() { "zks" } else { "zk" };
        identity(scheme, &self.hosts, &self.chroot)
    }

    pub(super) fn count(&self) -> usize {
        self.hosts.len()
    }

    /// Connects to the server at `index`, modulo their number.
    pub(super) async fn connect(
        &self,
        index: usize,
        timeout: Duration,
    ) -> io::Result<Box<dyn ServerStream>> {
        let (host, port) = &self.hosts[index % self.hosts.len()];
        let connecting = async {
            let stream = TcpStream::connect((host.as_str(), *port)).await?;
            stream.set_nodelay(true)?;
            let Some(tls) = &self.tls else {
                return Ok(Box::new(stream) as Box<dyn ServerStream>);
            };
            let name = ServerName::try_from(host.clone()).map_err(io::Error::other)?;
            let encrypted = tls.connect(name, stream).await.map_err(explain_tls_eof)?;
            Ok(Box::new(encrypted) as Box<dyn ServerStream>)
        };
        let timed_out = || io::Error::new(io::ErrorKind::TimedOut, "no answer");
        tokio::time::timeout(timeout, connecting).await.unwrap_or_else(|_| Err(timed_out()))
    }

    /// The error, with the server at `index` that it is about.
    pub(super) fn describe_error(&self, index: usize, error: &io::Error) -> String {
        format!("{}: {error}", host_port(&self.hosts[index % self.hosts.len()]))
    }
}

impl fmt::Debug for ServerList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The login is a secret.
        f.debug_struct("ServerList")
            .field("hosts", &self.hosts)
            .field("chroot", &self.chroot)
            .finish_non_exhaustive()
    }
}

/// A connection, with or without TLS.
pub(super) trait ServerStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> ServerStream for T {}

/// Whether one side rejects the other's certificate. Another attempt would fail in the same way.
pub(super) fn is_certificate_error(error: &io::Error) -> bool {
    let error = error.get_ref().and_then(|error| error.downcast_ref::<rustls::Error>());
    matches!(error, Some(rustls::Error::InvalidCertificate(_) | rustls::Error::AlertReceived(_)))
}

/// A port without TLS closes the connection without an error message.
fn explain_tls_eof(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => {
            let what = "it ended the TLS handshake; is this a port for TLS?";
            io::Error::new(error.kind(), what)
        }
        _ => error,
    }
}
