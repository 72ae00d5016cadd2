//! Files in PEM form that a URL names, for clients that are given their bytes.

use std::path::Path;

use crate::error::{Error, Result};

/// Reads a file that must hold a `what`, such as a `CERTIFICATE`.
pub(crate) fn read_pem(path: &Path, what: &str) -> Result<Vec<u8>> {
    let bad = |why: String| Error::invalid("file", &path.display().to_string(), why);
    let pem = std::fs::read(path).map_err(|error| bad(error.to_string()))?;
    match String::from_utf8_lossy(&pem).contains(&format!("{what}-----")) {
        true => Ok(pem),
        false => Err(bad(format!("it holds no {} in PEM form", what.to_lowercase()))),
    }
}
