//! TLS: the certificates that a URL names, for the library of each engine.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::url::Url;

/// The URL options of TLS.
pub(crate) const OPTIONS: [&str; 3] = ["ca", "cert", "key"];

/// The certificates to use.
#[derive(Clone, Debug, Default)]
pub struct TlsOptions {
    /// The certificates of the authorities to trust, in PEM; the system's if not given.
    pub ca: Option<PathBuf>,
    /// This client's own certificate and its key, in PEM.
    pub client_certificate: Option<(PathBuf, PathBuf)>,
}

/// The contents of the files, in PEM.
#[derive(Default)]
#[cfg_attr(
    not(any(
        feature = "redis-tls",
        feature = "etcd",
        feature = "postgres",
        feature = "zookeeper"
    )),
    allow(dead_code, reason = "nothing uses TLS")
)]
pub(crate) struct TlsFiles {
    /// Without it, the system's authorities are trusted.
    ca: Option<Vec<u8>>,
    /// A certificate and its key.
    client: Option<(Vec<u8>, Vec<u8>)>,
}

impl TlsOptions {
    #[cfg(feature = "redis")]
    pub(crate) fn is_set(&self) -> bool {
        self.ca.is_some() || self.client_certificate.is_some()
    }

    /// The options `ca`, `cert` and `key`.
    pub(crate) fn from_url(url: &Url) -> Result<Self> {
        let client_certificate = match (url.option("cert"), url.option("key")) {
            (Some(cert), Some(key)) => Some((cert.into(), key.into())),
            (None, None) => None,
            _ => {
                let why = "a certificate and its key go together";
                return Err(Error::invalid("URL options", "cert, key", why));
            }
        };
        Ok(Self { ca: url.option("ca").map(Into::into), client_certificate })
    }

    /// Reads the files. `None` if the URL is not for TLS; `tls_scheme` is the one that is.
    pub(crate) fn read(&self, is_tls: bool, tls_scheme: &str) -> Result<Option<TlsFiles>> {
        if !is_tls {
            let why = format!("certificates are for TLS: write {tls_scheme}://");
            return match self.ca.is_none() && self.client_certificate.is_none() {
                true => Ok(None),
                false => Err(Error::invalid("URL option", "ca, cert, key", why)),
            };
        }
        let ca = self.ca.as_deref().map(|path| read_pem(path, "CERTIFICATE")).transpose()?;
        let client = match &self.client_certificate {
            None => None,
            Some((cert, key)) => {
                Some((read_pem(cert, "CERTIFICATE")?, read_pem(key, "PRIVATE KEY")?))
            }
        };
        Ok(Some(TlsFiles { ca, client }))
    }
}

/// Reads a file that must contain a `what`, such as a `CERTIFICATE`.
fn read_pem(path: &Path, what: &str) -> Result<Vec<u8>> {
    let bad = |why: String| Error::invalid("file", &path.display().to_string(), why);
    let pem = std::fs::read(path).map_err(|error| bad(error.to_string()))?;
    match String::from_utf8_lossy(&pem).contains(&format!("{what}-----")) {
        true => Ok(pem),
        false => Err(bad(format!("it holds no {} in PEM form", what.to_lowercase()))),
    }
}

#[cfg(feature = "redis-tls")]
impl TlsFiles {
    /// For the Redis client; `None` if the system's authorities are all that is needed.
    pub(crate) fn into_redis(self) -> Option<redis::TlsCertificates> {
        let client_tls = self
            .client
            .map(|(client_cert, client_key)| redis::ClientTlsConfig { client_cert, client_key });
        let is_needed = client_tls.is_some() || self.ca.is_some();
        is_needed.then_some(redis::TlsCertificates { client_tls, root_cert: self.ca })
    }
}

#[cfg(feature = "etcd")]
impl TlsFiles {
    /// For the gRPC client.
    pub(crate) fn into_tonic(self) -> tonic::transport::ClientTlsConfig {
        use tonic::transport::{Certificate, ClientTlsConfig, Identity};

        let tls = match self.ca {
            None => ClientTlsConfig::new().with_native_roots(),
            Some(pem) => ClientTlsConfig::new().ca_certificate(Certificate::from_pem(pem)),
        };
        match self.client {
            None => tls,
            Some((cert, key)) => tls.identity(Identity::from_pem(cert, key)),
        }
    }
}

#[cfg(any(feature = "postgres", feature = "zookeeper"))]
impl TlsFiles {
    /// For connections without TLS of a client library.
    pub(crate) fn to_rustls(&self) -> Result<rustls::ClientConfig> {
        use rustls::pki_types::PrivateKeyDer;
        use rustls::pki_types::pem::PemObject;

        let roots = self.roots()?;
        let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| invalid_set_up(&error))?
            .with_root_certificates(roots);
        match &self.client {
            None => Ok(config.with_no_client_auth()),
            Some((cert, key)) => {
                let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| not_pem())?;
                config
                    .with_client_auth_cert(certificates(cert)?, key)
                    .map_err(|error| invalid_set_up(&error))
            }
        }
    }

    /// The authorities to trust.
    pub(crate) fn roots(&self) -> Result<rustls::RootCertStore> {
        let mut roots = rustls::RootCertStore::empty();
        match &self.ca {
            Some(pem) => {
                for certificate in certificates(pem)? {
                    roots.add(certificate).map_err(|error| invalid_set_up(&error))?;
                }
            }
            None => {
                roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            }
        }
        Ok(roots)
    }
}

#[cfg(any(feature = "postgres", feature = "zookeeper"))]
fn certificates(pem: &[u8]) -> Result<Vec<rustls::pki_types::CertificateDer<'static>>> {
    use rustls::pki_types::pem::PemObject;

    let all = rustls::pki_types::CertificateDer::pem_slice_iter(pem);
    all.collect::<std::result::Result<Vec<_>, _>>().map_err(|_| not_pem())
}

/// The text of the error may not quote a file: a key is secret.
#[cfg(any(feature = "postgres", feature = "zookeeper"))]
fn invalid_set_up(error: &dyn std::fmt::Display) -> Error {
    let why = format!("{error}: check the files of the options ca, cert and key");
    Error::invalid("TLS set-up", "(not shown)", why)
}

#[cfg(any(feature = "postgres", feature = "zookeeper"))]
fn not_pem() -> Error {
    invalid_set_up(&"a file is not in PEM form")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificates_need_tls_and_must_exist() {
        let options = TlsOptions { ca: Some("/does/not/exist".into()), ..TlsOptions::default() };
        let error = options.read(false, "zks").err().unwrap().to_string();
        assert!(error.contains("zks://"), "{error}");
        let error = options.read(true, "zks").err().unwrap().to_string();
        assert!(error.contains("/does/not/exist"), "{error}");
        assert!(TlsOptions::default().read(false, "zks").unwrap().is_none());
        assert!(TlsOptions::default().read(true, "zks").unwrap().is_some());
    }

    #[test]
    fn a_certificate_and_its_key_go_together() {
        let parse = |url: &str| TlsOptions::from_url(&url.parse().unwrap());
        assert!(parse("etcds://h?cert=a&key=b").unwrap().client_certificate.is_some());
        let error = parse("etcds://h?cert=a").unwrap_err().to_string();
        assert!(error.contains("go together"), "{error}");
    }

    #[test]
    fn a_file_of_another_kind_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "-----BEGIN PRIVATE KEY-----\n").unwrap();
        let options = TlsOptions { ca: Some(file.path().into()), ..TlsOptions::default() };
        let error = options.read(true, "zks").err().unwrap().to_string();
        assert!(error.contains("no certificate in PEM form"), "{error}");
    }
}
