//! TLS for connections to PostgreSQL, as `sslmode` says.

use std::io;
use std::pin::Pin;
use std::str::FromStr;
use std::sync::Arc;
use std::task::{Context, Poll};

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, SignatureScheme};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::config::SslMode;
use tokio_postgres::tls::{ChannelBinding, MakeTlsConnect, TlsConnect, TlsStream};
use tokio_rustls::TlsConnector;

use crate::error::{Error, Result};
use crate::tls::TlsOptions;

/// How a connection is protected; named as in libpq.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PostgresTls {
    /// Not encrypted.
    Disable,
    /// Encrypted if the server offers it. Anyone in between can prevent that.
    Prefer,
    /// Encrypted. The certificate is checked only if `ca` is given, and then not the host name.
    Require,
    /// Encrypted, and the certificate is that of a trusted authority.
    VerifyCa,
    /// Encrypted, and the certificate is that of a trusted authority for this host.
    VerifyFull,
}

impl FromStr for PostgresTls {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Ok(match text {
            "disable" => Self::Disable,
            "prefer" => Self::Prefer,
            "require" => Self::Require,
            "verify-ca" => Self::VerifyCa,
            "verify-full" => Self::VerifyFull,
            _ => {
                let why = "there are disable, prefer, require, verify-ca and verify-full";
                return Err(Error::invalid("sslmode", text, why));
            }
        })
    }
}

impl PostgresTls {
    /// Without `sslmode`: verified, except on the machine itself.
    pub(super) fn default_for(is_local: bool) -> Self {
        if is_local { Self::Disable } else { Self::VerifyFull }
    }

    pub(super) fn ssl_mode(self) -> SslMode {
        match self {
            Self::Disable => SslMode::Disable,
            Self::Prefer => SslMode::Prefer,
            Self::Require | Self::VerifyCa | Self::VerifyFull => SslMode::Require,
        }
    }
}

/// Makes TLS connections; none if they are not wanted.
#[derive(Clone)]
pub(super) struct PostgresTlsMaker(Option<TlsConnector>);

impl PostgresTlsMaker {
    pub(super) fn new(mode: PostgresTls, options: &TlsOptions) -> Result<Self> {
        let files = options.read(mode != PostgresTls::Disable, "sslmode=verify-full")?;
        let Some(files) = files else { return Ok(Self(None)) };
        let has_ca = options.ca.is_some();
        let mut config: ClientConfig = files.to_rustls()?;
        let provider = config.crypto_provider().clone();
        let verifier = match mode {
            PostgresTls::VerifyFull => None,
            PostgresTls::VerifyCa => Some(true),
            _ => Some(has_ca),
        };
        if let Some(checks_chain) = verifier {
            let chain =
                match checks_chain {
                    false => None,
                    true => {
                        let roots = Arc::new(files.roots()?);
                        let built =
                            WebPkiServerVerifier::builder_with_provider(roots, provider.clone())
                                .build();
                        Some(built.map_err(|error| {
                            Error::invalid("TLS set-up", "ca", error.to_string())
                        })?)
                    }
                };
            config
                .dangerous()
                .set_certificate_verifier(Arc::new(AnyHostVerifier { chain, provider }));
        }
        Ok(Self(Some(TlsConnector::from(Arc::new(config)))))
    }
}

/// Accepts a certificate for any host; without `chain`, any certificate.
#[derive(Debug)]
struct AnyHostVerifier {
    chain: Option<Arc<WebPkiServerVerifier>>,
    provider: Arc<CryptoProvider>,
}

type TlsResult<T> = std::result::Result<T, rustls::Error>;

impl ServerCertVerifier for AnyHostVerifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        host: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> TlsResult<ServerCertVerified> {
        let Some(chain) = &self.chain else { return Ok(ServerCertVerified::assertion()) };
        match chain.verify_server_cert(certificate, intermediates, host, ocsp, now) {
            Err(rustls::Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => Ok(ServerCertVerified::assertion()),
            verified => verified,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> TlsResult<HandshakeSignatureValid> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signed, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> TlsResult<HandshakeSignatureValid> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

impl<S> MakeTlsConnect<S> for PostgresTlsMaker
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    type Stream = PostgresTlsStream<S>;
    type TlsConnect = PostgresTlsConnect;
    type Error = io::Error;

    fn make_tls_connect(&mut self, host: &str) -> io::Result<PostgresTlsConnect> {
        Ok(PostgresTlsConnect { connector: self.0.clone(), host: host.to_owned() })
    }
}

/// A TLS connection that is to be made.
pub(super) struct PostgresTlsConnect {
    connector: Option<TlsConnector>,
    host: String,
}

impl<S> TlsConnect<S> for PostgresTlsConnect
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    type Stream = PostgresTlsStream<S>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<PostgresTlsStream<S>>> + Send>>;

    fn connect(self, stream: S) -> Self::Future {
        Box::pin(async move {
            let connector = self.connector.ok_or_else(|| io::Error::other("TLS is disabled"))?;
            let host = ServerName::try_from(self.host).map_err(io::Error::other)?;
            connector.connect(host, stream).await.map(PostgresTlsStream)
        })
    }
}

/// An encrypted connection.
pub(super) struct PostgresTlsStream<S>(tokio_rustls::client::TlsStream<S>);

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for PostgresTlsStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buffer)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for PostgresTlsStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> TlsStream for PostgresTlsStream<S> {
    fn channel_binding(&self) -> ChannelBinding {
        ChannelBinding::none()
    }
}
