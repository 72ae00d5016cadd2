//! Files of a folder that are written only with a token that is not stale.

use std::fs::{DirBuilder, File};
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use rustix::fs::{AtFlags, Dir, FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::name::Name;
use crate::token::Token;

use super::{FenceError, FenceMark, FenceStore, FencingToken, check};

const STORE: &str = "file";
/// The folder of the marks, inside the guarded one.
const HIDDEN: &str = ".lockset-fence";
const LOCK_FILE: &str = "lock";
/// One temporary file of each kind is enough: only the process that has locked the folder writes.
const NEW_MARK: &str = "mark.tmp";
const NEW_DATA: &str = "data.tmp";
const MARK_SUFFIX: &str = ".mark";
const VERSION: u64 = 1;
/// A mark has at most two names of 255 bytes, each of which JSON may write six times as long.
const MARK_SIZE: u64 = 8 << 10;
/// How long a write waits for the writes of other processes.
const BUSY_LIMIT: Duration = Duration::from_secs(10);
const PRIVATE_FOLDER: u32 = 0o700;
const PRIVATE_FILE: Mode = Mode::from_raw_mode(0o600);
const FOLDER: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// A folder whose files are written only with a token that is not stale.
///
/// The resource is the file: its name inside the folder. The marks are in the hidden sub-folder
/// `.lockset-fence`, one file for each resource and lock. A write first raises the mark, then
/// replaces the file: both by a temporary file, `fsync` and `rename`, under a lock (`flock`) of the
/// whole folder. A reader, which needs no lock, finds the old or the new content in full. A process
/// that is killed at any point leaves either; if only the mark was raised, the same token is
/// admitted again. The functions block, like those of `std::fs`.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let locks = lockset::Lockset::connect("memory:").await?;
/// # let temporary = tempfile::tempdir()?;
/// # let folder = temporary.path().join("reports");
/// use lockset::fence::FileFence;
///
/// let fence = FileFence::open(&folder)?;
/// let mutex = locks.mutex("reports/daily")?;
/// let guard = mutex.lock().await?;
/// fence.write("daily.csv", mutex.name(), &guard, b"day,orders\n")?;
/// assert_eq!(std::fs::read(folder.join("daily.csv"))?, b"day,orders\n");
/// # Ok(()) }
/// ```
///
/// # What it does not cover
/// The folder must be on a local file system with `flock` and an atomic `rename`; NFS is not
/// supported. Do not delete `.lockset-fence`: the marks, and with them the protection, would be
/// lost. A process that is stopped in the middle of a write blocks the others; they fail after 10
/// seconds. Owner and extended attributes of a file are not kept when it is replaced.
#[derive(Clone, Debug)]
pub struct FileFence {
    folder: PathBuf,
}

/// The content of a mark file.
#[derive(Deserialize, Serialize)]
struct MarkRecord {
    version: u64,
    resource: Name,
    lock: Name,
    token: Token,
}

/// Read first, so that a newer version may have other fields.
#[derive(Deserialize)]
struct MarkRecordVersion {
    version: u64,
}

/// The guarded folder and its hidden one, opened, and locked until it is dropped.
struct LockedFolder {
    data: OwnedFd,
    marks: OwnedFd,
    _lock: OwnedFd,
}

impl FileFence {
    /// The fence of this folder. A folder that does not exist is created, readable by its owner
    /// only; its parent must exist.
    ///
    /// # Errors
    /// [`FenceError::Store`] if the folder cannot be created or is not a folder.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self, FenceError> {
        let folder = folder.as_ref().to_path_buf();
        let failed = |error| failed("open the folder", &folder, error);
        match DirBuilder::new().mode(PRIVATE_FOLDER).create(&folder) {
            Ok(()) => {
                let parent = folder.parent().filter(|parent| !parent.as_os_str().is_empty());
                sync_path(parent.unwrap_or(Path::new("."))).map_err(failed)?;
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(failed(error)),
        }
        match DirBuilder::new().mode(PRIVATE_FOLDER).create(folder.join(HIDDEN)) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(failed(error)),
            // Also if it exists: a process may have crashed between the two steps.
            _ => sync_path(&folder).map_err(failed)?,
        }
        let fence = Self { folder };
        fence.folders()?;
        Ok(fence)
    }

    /// Replaces the content of a file if the token is admitted. `file` is its name inside the
    /// folder, as a [`Name`]: relative, at most 255 bytes, no `.` or `..`; a sub-folder must exist.
    /// A file that exists keeps its permissions, a new one is readable by its owner only.
    ///
    /// # Errors
    /// [`FenceError::Stale`], [`FenceError::WrongLock`] and [`FenceError::Invalid`]: nothing was
    /// changed. [`FenceError::Store`]: the file has its old or its new content in full.
    pub fn write(
        &self,
        file: impl AsRef<Path>,
        lock: impl TryInto<Name, Error: Into<Error>>,
        token: impl Into<FencingToken>,
        data: &[u8],
    ) -> Result<(), FenceError> {
        let (resource, lock) = (file_name(file.as_ref())?, lock.try_into().map_err(Into::into)?);
        let token = token.into();
        token.check_lock(&resource, &lock)?;
        let path = self.folder.join(resource.as_str());
        let folder = self.lock()?;
        // What is wrong with the name is found before the mark is raised.
        let (parent, leaf) = open_parent(&folder.data, &resource)
            .map_err(|error| failed("open the folder of", &path, error))?;
        let mode = mode_of(&parent, leaf).map_err(|error| failed("replace", &path, error))?;
        self.raise(&folder, &resource, &lock, &token)?;
        replace(&folder.marks, NEW_DATA, &parent, leaf, mode, data)
            .map_err(|error| failed("replace", &path, error))
    }

    /// Checks the token, and makes it the mark.
    fn raise(
        &self,
        folder: &LockedFolder,
        resource: &Name,
        lock: &Name,
        token: &FencingToken,
    ) -> Result<(), FenceError> {
        let file = mark_file_name(resource, lock);
        let path = self.mark_path(&file);
        let mark = read_mark(&folder.marks, &file, &path)?;
        if let Some(mark) = &mark
            && (&mark.resource, &mark.lock) != (resource, lock)
        {
            let what = format!(
                "{} is the mark of `{}` and `{}`, not of `{resource}` and `{lock}`: it was moved \
                 or edited; restore it",
                path.display(),
                mark.resource,
                mark.lock
            );
            return Err(FenceError::store(STORE, what));
        }
        let seen = mark.map(|mark| mark.token);
        check(resource, lock, token, seen)?;
        let raised = match seen == Some(token.token()) {
            // The process that raised it may have crashed before this step.
            true => rustix::fs::fsync(&folder.marks).map_err(Into::into),
            false => {
                let (resource, lock) = (resource.clone(), lock.clone());
                let mark = MarkRecord { version: VERSION, resource, lock, token: token.token() };
                serde_json::to_vec(&mark).map_err(std::io::Error::from).and_then(|mark| {
                    let mode = PRIVATE_FILE;
                    replace(&folder.marks, NEW_MARK, &folder.marks, &file, mode, &mark)
                })
            }
        };
        raised.map_err(|error| failed("write", &path, error))
    }

    /// Locks the folder, and removes what a crashed process left.
    fn lock(&self) -> Result<LockedFolder, FenceError> {
        let (data, marks) = self.folders()?;
        let path = self.folder.join(HIDDEN).join(LOCK_FILE);
        let failed = |error: Errno| failed("lock", &path, error.into());
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let lock = rustix::fs::openat(&marks, LOCK_FILE, flags, PRIVATE_FILE).map_err(failed)?;
        let began = Instant::now();
        let mut pause = Duration::from_micros(100);
        loop {
            match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => break,
                Err(Errno::INTR) => {}
                Err(Errno::WOULDBLOCK) if began.elapsed() < BUSY_LIMIT => {
                    std::thread::sleep(pause);
                    pause = (2 * pause).min(Duration::from_millis(5));
                }
                Err(Errno::WOULDBLOCK) => {
                    let what = format!(
                        "another process has locked {} for {BUSY_LIMIT:?}: look for one that is \
                         stopped, continue or end it, then write again",
                        path.display()
                    );
                    return Err(FenceError::store(STORE, what));
                }
                Err(error) => return Err(failed(error)),
            }
        }
        for left in [NEW_MARK, NEW_DATA] {
            match rustix::fs::unlinkat(&marks, left, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(error) => return Err(failed(error)),
            }
        }
        Ok(LockedFolder { data, marks, _lock: lock })
    }

    /// The folder and the hidden one, opened anew each time: the folder may have been replaced.
    fn folders(&self) -> Result<(OwnedFd, OwnedFd), FenceError> {
        let open = || {
            // The folder itself may be a symbolic link, nothing inside it.
            let data = rustix::fs::open(&self.folder, FOLDER - OFlags::NOFOLLOW, Mode::empty())?;
            let marks = rustix::fs::openat(&data, HIDDEN, FOLDER, Mode::empty())?;
            Ok((data, marks))
        };
        open().map_err(|error: Errno| failed("open the folder", &self.folder, error.into()))
    }

    fn mark_path(&self, file: &str) -> PathBuf {
        self.folder.join(HIDDEN).join(file)
    }

    fn all_marks(&self) -> Result<Vec<FenceMark>, FenceError> {
        let (_, folder) = self.folders()?;
        let failed = |error: Errno| failed("list", &self.folder.join(HIDDEN), error.into());
        let mut marks = Vec::new();
        for entry in Dir::read_from(&folder).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let Ok(file) = entry.file_name().to_str() else { continue };
            if file.ends_with(MARK_SUFFIX)
                && let Some(mark) = read_mark(&folder, file, &self.mark_path(file))?
            {
                marks.push(FenceMark::new(mark.resource, mark.lock, mark.token));
            }
        }
        marks.sort();
        Ok(marks)
    }
}

/// In an async runtime of tokio the file is written on its threads for blocking work. If the call
/// is cancelled, the token may be admitted nevertheless.
#[async_trait]
impl FenceStore for FileFence {
    async fn admit(
        &self,
        resource: &Name,
        lock: &Name,
        token: &FencingToken,
    ) -> Result<(), FenceError> {
        token.check_lock(resource, lock)?;
        let (fence, resource) = (self.clone(), resource.clone());
        let (lock, token) = (lock.clone(), token.clone());
        blocking(move || {
            let folder = fence.lock()?;
            fence.raise(&folder, &resource, &lock, &token)
        })
        .await
    }

    async fn marks(&self) -> Result<Vec<FenceMark>, FenceError> {
        let fence = self.clone();
        blocking(move || fence.all_marks()).await
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, FenceError> + Send + 'static,
) -> Result<T, FenceError> {
    match tokio::runtime::Handle::try_current() {
        Err(_) => work(),
        Ok(runtime) => runtime.spawn_blocking(work).await.unwrap_or_else(|error| {
            Err(FenceError::store_error(STORE, "the runtime did not finish the write", error))
        }),
    }
}

/// The resource that a file is: its name.
fn file_name(file: &Path) -> Result<Name, FenceError> {
    let shown = || file.display().to_string();
    let text = file.to_str();
    let text = text.ok_or_else(|| Error::invalid("file name", &shown(), "it is not UTF-8"))?;
    let name: Name = text.parse().map_err(|error| {
        let why = format!("it is a name relative to the folder ({error})");
        Error::invalid("file name", text, why)
    })?;
    // File systems may fold upper and lower case.
    match name.as_str().split('/').next() {
        Some(first) if first.eq_ignore_ascii_case(HIDDEN) => {
            let why = "this sub-folder contains the marks of the fence";
            Err(Error::invalid("file name", text, why).into())
        }
        _ => Ok(name),
    }
}

/// The file of a mark: a hash of both names (FNV-1a, 128 bits), because two names of 255 bytes do
/// not fit into the name of a file. The file contains the names, which are compared.
fn mark_file_name(resource: &Name, lock: &Name) -> String {
    // Names do not contain control characters.
    let bytes = resource.as_str().bytes().chain([0]).chain(lock.as_str().bytes());
    let hash = bytes.fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d_u128, |hash, byte| {
        (hash ^ u128::from(byte)).wrapping_mul(0x0100_0000_0000_0000_013b)
    });
    format!("{hash:032x}{MARK_SUFFIX}")
}

fn read_mark(folder: &OwnedFd, file: &str, path: &Path) -> Result<Option<MarkRecord>, FenceError> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let mut text = Vec::new();
    match rustix::fs::openat(folder, file, flags, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(None),
        Err(error) => return Err(failed("read", path, error.into())),
        Ok(mark) => File::from(mark).take(MARK_SIZE).read_to_end(&mut text),
    }
    .map_err(|error| failed("read", path, error))?;
    let corrupt = |why: String| {
        let what = format!(
            "{} is not a mark ({why}): restore it, or delete it once no client with an older \
             token is left",
            path.display()
        );
        FenceError::store(STORE, what)
    };
    let MarkRecordVersion { version } =
        serde_json::from_slice(&text).map_err(|error| corrupt(error.to_string()))?;
    if version > VERSION {
        let what = format!(
            "{} has version {version}, and this program knows {VERSION}: use a newer Lockset",
            path.display()
        );
        return Err(FenceError::store(STORE, what));
    }
    let mark: MarkRecord =
        serde_json::from_slice(&text).map_err(|error| corrupt(error.to_string()))?;
    let token = FencingToken::new(mark.lock.clone(), mark.token);
    token.map_err(|error| corrupt(error.to_string()))?;
    Ok(Some(mark))
}

/// The folder that contains the file, and the file's name there. No symbolic link is followed.
fn open_parent<'a>(folder: &OwnedFd, file: &'a Name) -> std::io::Result<(OwnedFd, &'a str)> {
    let mut parent = folder.try_clone()?;
    let mut segments = file.as_str().split('/');
    let leaf = segments.next_back().unwrap_or_default();
    for segment in segments {
        parent = rustix::fs::openat(&parent, segment, FOLDER, Mode::empty())?;
    }
    Ok((parent, leaf))
}

/// The permissions of the file: those it has, or those of a new one.
fn mode_of(folder: &OwnedFd, file: &str) -> std::io::Result<Mode> {
    match rustix::fs::statat(folder, file, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile => {
            Ok(Mode::from_raw_mode(stat.st_mode & 0o777))
        }
        Ok(_) => Err(std::io::Error::other("it is not a regular file")),
        Err(Errno::NOENT) => Ok(PRIVATE_FILE),
        Err(error) => Err(error.into()),
    }
}

/// Replaces a file in one step that survives a power failure.
fn replace(
    temporary: &OwnedFd,
    new: &str,
    folder: &OwnedFd,
    file: &str,
    mode: Mode,
    data: &[u8],
) -> std::io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let mut written = File::from(rustix::fs::openat(temporary, new, flags, PRIVATE_FILE)?);
    if mode != PRIVATE_FILE {
        rustix::fs::fchmod(&written, mode)?;
    }
    written.write_all(data)?;
    written.sync_all()?;
    rustix::fs::renameat(temporary, new, folder, file)?;
    rustix::fs::fsync(folder)?;
    Ok(())
}

fn sync_path(folder: &Path) -> std::io::Result<()> {
    File::open(folder)?.sync_all()
}

fn failed(verb: &str, path: &Path, error: std::io::Error) -> FenceError {
    FenceError::store_error(STORE, &format!("cannot {verb} {}", path.display()), error)
}
