//! The directory: transactions on the records in it.

use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use lockset::clock::{Clock, Moment};
use lockset::{Error, Name, Prefix, Result};

use crate::ENGINE;
use crate::record::Record;

/// The file that a transaction locks. It is never replaced, unlike the records.
const GUARD: &str = "guard";
/// A new version of a record, until it replaces the old one. There is one transaction at a time, so
/// one name is enough; what a killed process left in it is overwritten.
const NEW: &str = "new";
/// The end of a record's file name: another format gets another number.
const RECORD: &str = ".v1.json";
/// How often to try again while another transaction runs. A transaction takes far less.
const RETRY: Duration = Duration::from_millis(1);
/// The longest file name on common file systems.
const LONGEST_FILE_NAME: usize = 255;

#[derive(Clone, Debug)]
pub(crate) struct Folder {
    path: PathBuf,
}

impl Folder {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let opened = fs::create_dir_all(path).and_then(|()| fs::canonicalize(path));
        Ok(Self { path: opened.map_err(|error| failed(path, error))? })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Begins a transaction. If another one is running, this sleeps and tries again, so that a
    /// stopped process blocks no thread of this one, and the future can be dropped.
    pub(crate) async fn lock(&self) -> Result<Locked<'_>> {
        let path = self.path.join(GUARD);
        // Opened each time: an OS file lock excludes other open files, not other threads.
        let opened = File::options().create(true).truncate(false).write(true).open(&path);
        let guard = opened.map_err(|error| failed(&path, error))?;
        let clock = Clock::boot();
        loop {
            match guard.try_lock() {
                Ok(()) => return Ok(Locked { path: &self.path, guard }),
                Err(TryLockError::WouldBlock) => clock.sleep_until(clock.now() + RETRY).await,
                Err(TryLockError::Error(error)) => return Err(failed(&path, error)),
            }
        }
    }
}

/// A transaction. The operating system ends it too when the process dies.
#[derive(Debug)]
pub(crate) struct Locked<'a> {
    path: &'a Path,
    guard: File,
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        // Closing the file would do, unless a forked child has inherited it.
        let _ = self.guard.unlock();
    }
}

impl Locked<'_> {
    /// Reads a record, changes it, and writes it if it is not as it was.
    pub(crate) fn change<T>(
        &self,
        name: &Name,
        change: impl FnOnce(&mut Record, Moment) -> T,
    ) -> Result<T> {
        let path = self.path.join(file_name(name)?);
        let before = read(&path)?.unwrap_or_else(|| Record::new(name.clone()));
        let (mut after, now) = (before.clone(), Clock::boot().now());
        after.advance(now);
        let outcome = change(&mut after, now);
        if after != before {
            self.write(&path, &after)?;
        }
        Ok(outcome)
    }

    /// The records of all names with this prefix, in order.
    pub(crate) fn records(&self, prefix: &Prefix) -> Result<Vec<Record>> {
        let prefix = escaped(prefix.as_str());
        let mut records = Vec::new();
        for entry in fs::read_dir(self.path).map_err(|error| failed(self.path, error))? {
            let path = entry.map_err(|error| failed(self.path, error))?.path();
            let file = path.file_name().unwrap_or_default().to_string_lossy();
            if !file.ends_with(RECORD) || !file.starts_with(&prefix) {
                continue;
            }
            if let Some(record) = read(&path)? {
                // A waiter that is admitted now must be admitted in the file too.
                records.push(self.change(&record.name, |record, _| record.clone())?);
            }
        }
        records.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(records)
    }

    fn write(&self, path: &Path, record: &Record) -> Result<()> {
        let new = self.path.join(NEW);
        let written = serde_json::to_vec(record).map_err(io::Error::from);
        let written = written.and_then(|text| fs::write(&new, text));
        written.and_then(|()| fs::rename(&new, path)).map_err(|error| failed(path, error))
    }
}

fn read(path: &Path) -> Result<Option<Record>> {
    match fs::read(path) {
        // Some file systems leave an empty file after a power cut.
        Ok(text) if text.is_empty() => Ok(None),
        Ok(text) => serde_json::from_slice(&text).map_err(|error| failed(path, error.into())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed(path, error)),
    }
}

fn file_name(name: &Name) -> Result<String> {
    let file = escaped(name.as_str()) + RECORD;
    match file.len() <= LONGEST_FILE_NAME {
        true => Ok(file),
        false => Err(crate::unsupported(&format!("so long a name as `{name}`"))),
    }
}

/// Two names never share a file, also where the file system ignores case: only small letters and
/// digits stay as they are. Byte by byte, so that a prefix of a name is a prefix of its file name.
fn escaped(text: &str) -> String {
    let escape = |byte: u8| match byte {
        b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' => char::from(byte).to_string(),
        _ => format!("%{byte:02x}"),
    };
    text.bytes().map(escape).collect()
}

fn failed(path: &Path, error: io::Error) -> Error {
    Error::Unreachable {
        engine: ENGINE,
        what: format!("{}: {error}", path.display()),
        // A full disk may become free; a file that is not a record stays one.
        retryable: error.kind() != ErrorKind::InvalidData,
        source: Some(Arc::new(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_file_names_and_too_long_ones_are_refused() {
        assert_eq!(file_name(&"Jobs/42".parse().unwrap()).unwrap(), "%4aobs%2f42.v1.json");
        let longest = file_name(&"x".repeat(247).parse().unwrap()).unwrap();
        assert_eq!(longest.len(), LONGEST_FILE_NAME);
        let refused = file_name(&"x".repeat(248).parse().unwrap());
        assert!(matches!(refused, Err(Error::Unsupported { .. })), "{refused:?}");
    }
}
