//! Authorities whose certificates tests use, and eyes for secrets that are shown.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use lockset::{Error, Lockset};
use lockset_testkit::log_capture::LogCapture;
use lockset_testkit::steps::{assert_error, error_chain, within};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
};

/// Part of every secret, so that it is found wherever it is shown.
pub(crate) const MARK: &str = "xyzzy";

/// An authority of our own, and what it signs, in a folder of their own.
pub(crate) struct Authority {
    folder: tempfile::TempDir,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    pub(crate) fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        // Unlike the names of what it signs, which would otherwise look self-signed.
        params.distinguished_name.push(DnType::CommonName, "the authority");
        let folder = tempfile::tempdir().unwrap();
        let certificate = params.self_signed(&key).unwrap();
        std::fs::write(folder.path().join("ca.pem"), certificate.pem()).unwrap();
        Self { folder, issuer: Issuer::new(params, key) }
    }

    pub(crate) fn ca(&self) -> String {
        self.file("ca.pem").display().to_string()
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes a certificate and its key, and gives back where they are.
    pub(crate) fn sign(
        &self,
        who: &str,
        change: impl FnOnce(&mut CertificateParams),
    ) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new([who.to_owned()]).unwrap();
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        change(&mut params);
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let [pem, secret] = ["pem", "key"].map(|end| self.file(&format!("{who}.{end}")));
        std::fs::write(&pem, certificate.pem()).unwrap();
        std::fs::write(&secret, key.serialize_pem()).unwrap();
        (pem.display().to_string(), secret.display().to_string())
    }
}

/// All that any test of this program traces.
pub(crate) fn traced() -> &'static LogCapture {
    static LOG: OnceLock<LogCapture> = OnceLock::new();
    LOG.get_or_init(|| {
        let log = LogCapture::default();
        let writer = log.clone();
        tracing_subscriber::fmt()
            .with_max_level(tracing::Level::TRACE)
            .with_ansi(false)
            .with_writer(move || writer.clone())
            .init();
        log
    })
}

/// The secret is in no word of this.
#[track_caller]
pub(crate) fn assert_hidden(shown: &str) {
    assert!(!shown.contains(MARK), "a secret is shown: {shown}");
}

#[track_caller]
pub(crate) fn assert_hidden_in(error: &Error) {
    assert_hidden(&format!("{} {error:?} {error:#?}", error_chain(error)));
}

/// Files of a certificate that are not there, or something else, are named by the error.
pub(crate) async fn assert_files_are_named(
    limit: Duration,
    authority: &Authority,
    (certificate, key): &(String, String),
    url: impl Fn(&str) -> String,
) {
    let missing = authority.file("missing.pem").display().to_string();
    let garbage = authority.file("garbage.pem").display().to_string();
    std::fs::write(&garbage, "not a certificate").unwrap();
    let ca = authority.ca();
    for (options, word) in [
        (format!("?ca={missing}"), missing.as_str()),
        (format!("?ca={garbage}"), &garbage),
        (format!("?ca={ca}&cert={missing}&key={key}"), &missing),
        (format!("?ca={ca}&cert={certificate}&key={missing}"), &missing),
        (format!("?ca={ca}&cert={certificate}&key={garbage}"), &garbage),
        (format!("?ca={ca}&cert={certificate}"), "key"),
    ] {
        let url = url(&options);
        let refused = within(limit, "a refusal", Lockset::connect(&url)).await;
        assert_error(&refused.unwrap_err(), &[word], false);
    }
}
