//! The local engine: a file on a small file system of its own.

use std::path::{Path, PathBuf};
use std::process::Command;

use lockset_testkit::stage::WriteLock;

use super::{Backend, EngineKind, Strike, unsupported};
use crate::schedule::Fault;

/// A lock file on a file system of a few megabytes.
#[derive(Debug)]
pub(super) struct LocalBackend {
    disk: SmallDisk,
}

impl LocalBackend {
    pub(super) fn start() -> Self {
        Self { disk: SmallDisk::mount() }
    }

    fn file(&self) -> PathBuf {
        self.disk.0.path().join("locks.db")
    }
}

impl Backend for LocalBackend {
    fn url(&self, _: usize) -> String {
        format!("local:{}", self.file().display())
    }

    fn strike(&self, fault: Fault, _: u64) -> Strike<'_> {
        match fault {
            Fault::DiskFull => {
                let filler = self.disk.0.path().join("filler");
                fill(&filler);
                Strike::new("the disk", move || std::fs::remove_file(filler).unwrap())
            }
            Fault::FileBusy => {
                let busy = WriteLock::on(&self.file());
                Strike::new("the file", move || drop(busy))
            }
            _ => unsupported(EngineKind::Local, fault),
        }
    }
}

/// Writes until nothing more fits.
fn fill(path: &Path) {
    let mut file = std::fs::File::create(path).unwrap();
    for size in [65_536, 4096, 1] {
        while std::io::Write::write_all(&mut file, &vec![0; size]).is_ok() {}
    }
}

/// A file system in memory, unmounted when dropped.
#[derive(Debug)]
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn mount() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=16m", "lockset-torture"])
            .arg(folder.path())
            .status();
        assert!(mounted.unwrap().success(), "root is needed to mount a small file system");
        Self(folder)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}
