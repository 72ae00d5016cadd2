//! A server whose wall clock can be made to jump while it runs.

use std::io::{Seek, Write};
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, OnceLock};

/// The skew of the clock of one server.
#[derive(Debug)]
pub struct ClockSkew {
    file: Mutex<tempfile::NamedTempFile>,
}

impl ClockSkew {
    /// A clock without skew.
    pub fn new() -> Self {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&0_i64.to_ne_bytes()).unwrap();
        Self { file: Mutex::new(file) }
    }

    /// Sets how many milliseconds the clock is ahead; negative means behind.
    pub fn set(&self, millis: i64) {
        let mut file = self.file.lock().unwrap();
        file.rewind().unwrap();
        // In one write, because the server maps the file.
        file.write_all(&(millis * 1000).to_ne_bytes()).unwrap();
        file.flush().unwrap();
    }

    /// The environment variables that give a process this clock.
    pub fn environment(&self) -> Vec<(String, String)> {
        let path = self.file.lock().unwrap().path().display().to_string();
        let shim = shim().display().to_string();
        vec![("LD_PRELOAD".to_owned(), shim), ("LOCKSET_SKEW".to_owned(), path)]
    }
}

impl Default for ClockSkew {
    fn default() -> Self {
        Self::new()
    }
}

/// The preloaded library that shifts the clock, compiled once per test process.
fn shim() -> &'static PathBuf {
    static SHIM: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (_, path) = SHIM.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("skewed.c");
        let library = folder.path().join("libskewed.so");
        std::fs::write(&source, include_str!("skewed.c")).unwrap();
        let compiled = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o"])
            .args([&library, &source])
            .status()
            .expect("a C compiler is needed");
        assert!(compiled.success(), "skewed.c does not compile");
        (folder, library)
    });
    path
}
