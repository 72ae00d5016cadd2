//! Where the file is, and whether it may be used there.

use std::fs::{DirBuilder, Metadata, OpenOptions, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::{error_from, error_of};
use crate::error::{Error, Result};

/// The path of the file, and which file it was when it was opened.
#[derive(Debug)]
pub(super) struct LockFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl LockFile {
    /// Finds or creates the file. It is empty if it is new.
    ///
    /// An existing file is not opened, only examined by its path: closing a second descriptor of it
    /// would drop the locks that another client of this process has on it.
    pub(super) fn prepare(path: Option<&Path>, mode: u32) -> Result<Self> {
        let path = match path {
            Some(path) => path.to_owned(),
            None => {
                let state = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from);
                default_path(state, std::env::home_dir())?
            }
        };
        let path = canonical(&path)?;
        check_not_network(&path)?;
        match OpenOptions::new().write(true).create_new(true).mode(mode).open(&path) {
            // The umask may have removed some of the permissions.
            Ok(file) => file
                .set_permissions(Permissions::from_mode(mode))
                .map_err(|error| unusable(&path, error))?,
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(unusable(&path, error)),
        }
        rustix::fs::access(&path, rustix::fs::Access::READ_OK | rustix::fs::Access::WRITE_OK)
            .map_err(|error| unusable(&path, error.into()))?;
        let found = path.metadata().map_err(|error| unusable(&path, error))?;
        if !found.is_file() {
            return Err(error_of(format!("{} is not a file", path.display())));
        }
        check_links(&path, &found)?;
        if is_mount_point(&path) {
            return Err(error_of(format!(
                "{} is mounted by itself from elsewhere, where its log is another one; mount the \
                 folder that it is in",
                path.display()
            )));
        }
        Ok(Self { path, device: found.dev(), inode: found.ino() })
    }

    /// Where SQLite keeps its log.
    pub(super) fn log(&self) -> PathBuf {
        let mut log = self.path().as_os_str().to_owned();
        log.push("-wal");
        log.into()
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the path leads to no file any more, or to another file.
    pub(super) fn is_gone(&self) -> bool {
        match self.path.metadata() {
            Ok(now) => !self.is(&now),
            Err(error) => matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory),
        }
    }

    fn is(&self, found: &Metadata) -> bool {
        (found.dev(), found.ino()) == (self.device, self.inode)
    }

    /// Fails if the path no longer leads to the file that was opened: a client that opens it now
    /// finds another set of locks.
    pub(super) fn check_unchanged(&self) -> Result<()> {
        let what = match self.path.metadata() {
            Ok(now) if self.is(&now) => return check_links(&self.path, &now),
            Ok(_) => "was replaced by another file",
            Err(_) => "was deleted or moved",
        };
        let path = self.path.display();
        Err(error_of(format!(
            "{path} {what} while it was open, and its locks with it; open it again"
        )))
    }
}

/// SQLite's log is beside the path by which the file was opened. So a client that uses another path
/// has another log, and another set of locks.
fn check_links(path: &Path, found: &Metadata) -> Result<()> {
    match found.nlink() {
        0 | 1 => Ok(()),
        links => Err(error_of(format!(
            "{} has {links} names (hard links), and clients that use another one would not see its locks; \
             remove the others, or name another file",
            path.display()
        ))),
    }
}

/// Whether something is mounted at this very path.
#[cfg(target_os = "linux")]
fn is_mount_point(path: &Path) -> bool {
    use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags};
    let root = StatxAttributes::MOUNT_ROOT;
    match rustix::fs::statx(CWD, path, AtFlags::empty(), StatxFlags::BASIC_STATS) {
        Ok(found) if found.stx_attributes_mask.contains(root) => {
            found.stx_attributes.contains(root)
        }
        // Linux before 5.8.
        _ => std::fs::read("/proc/self/mountinfo").is_ok_and(|mounts| is_listed(path, &mounts)),
    }
}

#[cfg(not(target_os = "linux"))]
fn is_mount_point(_path: &Path) -> bool {
    false
}

/// Whether `path` is the fifth field of one of the lines.
#[cfg(target_os = "linux")]
fn is_listed(path: &Path, mounts: &[u8]) -> bool {
    use std::os::unix::ffi::OsStrExt;
    let mut escaped = Vec::new();
    for byte in path.as_os_str().as_bytes() {
        match byte {
            b' ' | b'\t' | b'\n' | b'\\' => escaped.extend(format!("\\{byte:03o}").as_bytes()),
            byte => escaped.push(*byte),
        }
    }
    mounts
        .split(|byte| *byte == b'\n')
        .any(|line| line.split(|byte| *byte == b' ').nth(4) == Some(&escaped))
}

/// In the user's state folder. Under cron it needs no `HOME`: the password file has it too.
fn default_path(state: Option<PathBuf>, home: Option<PathBuf>) -> Result<PathBuf> {
    let state = match (state, home) {
        (Some(state), _) if state.is_absolute() => state,
        (_, Some(home)) if home.is_absolute() => {
            // Root would create it for a user or container that is meant to have none.
            if !home.is_dir() {
                return Err(error_of(format!(
                    "the home folder {} does not exist; name a file, as in `local:/path/file.db`",
                    home.display()
                )));
            }
            home.join(".local/state")
        }
        _ => {
            let what = "this user has no home folder; name a file, as in `local:/path/file.db`";
            return Err(error_of(what));
        }
    };
    let folder = state.join("lockset");
    let made = DirBuilder::new().recursive(true).mode(0o700).create(&folder);
    made.map_err(|error| unusable(&folder, error))?;
    Ok(folder.join("lockset.db"))
}

/// The same text for every way to write the same path.
fn canonical(path: &Path) -> Result<PathBuf> {
    if let Ok(path) = path.canonicalize() {
        return Ok(path);
    }
    let folder = match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    let name =
        path.file_name().ok_or_else(|| error_of(format!("{} names no file", path.display())))?;
    let folder = folder.canonicalize().map_err(|error| unusable(folder, error))?;
    Ok(folder.join(name))
}

fn unusable(path: &Path, error: std::io::Error) -> Error {
    let path = path.display();
    let what = match error.kind() {
        ErrorKind::NotFound => format!("{path} does not exist; create the folder first"),
        ErrorKind::ReadOnlyFilesystem => {
            format!("{path} is on a read-only file system; name a file that can be written")
        }
        ErrorKind::PermissionDenied => {
            format!("{path} may not be read and written by this user; name another file")
        }
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            return error_from(format!("no room for {path}; free some space"), true, error);
        }
        _ => format!("{path} cannot be used"),
    };
    error_from(what, false, error)
}

#[cfg(target_os = "linux")]
fn check_not_network(path: &Path) -> Result<()> {
    let folder = path.parent().unwrap_or(path);
    let kind = rustix::fs::statfs(folder).map_err(|error| unusable(folder, error.into()))?.f_type;
    let device = folder.metadata().map_err(|error| unusable(folder, error))?.dev();
    let mounts = || std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    // The magic numbers are 32 bits wide; where the field is signed, some look negative.
    match network_file_system(kind as u32, device, mounts) {
        None => Ok(()),
        Some(system) => Err(error_of(format!(
            "{} is on a network file system ({system}), where locks of one machine are not seen \
             by the others; name a file on a local disk, or use a server",
            path.display()
        ))),
    }
}

#[cfg(not(target_os = "linux"))]
fn check_not_network(_path: &Path) -> Result<()> {
    Ok(())
}

const FUSE: u32 = 0x6573_5546;

const NETWORK: &[(u32, &str)] = &[
    (0x6969, "NFS"),
    (0x517B, "SMB"),
    (0xFF53_4D42, "CIFS"),
    (0xFE53_4D42, "SMB2"),
    (0x0102_1997, "9p"),
    (0x5346_414F, "AFS"),
    (0x6B41_4653, "kAFS"),
    (0x7375_7245, "Coda"),
    (0x564C, "NCP"),
    (0x00C3_6400, "Ceph"),
    (0x0BD0_0BD0, "Lustre"),
    (0x0116_1970, "GFS2"),
    (0x7461_636F, "OCFS2"),
    (0x4750_4653, "GPFS"),
    (0xAAD7_AAEA, "PanFS"),
    (0x786F_4256, "VirtualBox shared folder"),
];

const NETWORK_FUSE: &[&str] = &[
    "sshfs",
    "s3fs",
    "gcsfuse",
    "glusterfs",
    "rclone",
    "davfs",
    "goofys",
    "ceph",
    "juicefs",
    "seaweed",
    "mfs",
    "moosefs",
    "beegfs",
    "curlftpfs",
    "smbnetfs",
    "blobfuse",
    "hdfs",
    "mount-s3",
    "virtiofs",
    "vmhgfs",
    "lizardfs",
    "cvmfs",
    "dfs",
];

/// The name of the network file system, if it is one. FUSE has local and remote file systems; the
/// list of mounts shows which one it is.
fn network_file_system(kind: u32, device: u64, mounts: impl Fn() -> String) -> Option<String> {
    if kind != FUSE {
        return NETWORK.iter().find(|(magic, _)| *magic == kind).map(|(_, name)| (*name).into());
    }
    let device = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let mounts = mounts();
    let mount = mounts.lines().find(|line| line.split(' ').nth(2) == Some(&device))?;
    let (_, after) = mount.split_once(" - ")?;
    let system = after.split(' ').next()?.to_lowercase();
    NETWORK_FUSE.iter().any(|name| system.contains(name)).then_some(system)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n\
40 22 0:44 / /far rw,nosuid shared:7 - fuse.sshfs me@host:/srv rw\n\
41 22 0:45 / /disk rw shared:8 - fuseblk /dev/sdb1 rw\n\
42 22 0:46 / /host rw - virtiofs share rw\n";

    #[test]
    fn a_home_folder_that_is_missing_is_not_created() {
        let folder = tempfile::tempdir().unwrap();
        let home = folder.path().join("missing");
        let refused = default_path(None, Some(home.clone())).unwrap_err().to_string();
        assert!(refused.contains("missing does not exist; name a file"), "{refused}");
        assert!(!home.exists(), "it was created");
        let path = default_path(None, Some(folder.path().to_owned())).unwrap();
        assert_eq!(path, folder.path().join(".local/state/lockset/lockset.db"));
        let state = folder.path().join("state");
        let path = default_path(Some(state.clone()), Some(home)).unwrap();
        assert_eq!(path, state.join("lockset/lockset.db"));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn mount_points_are_found_in_the_list() {
        let mounts = b"22 1 254:0 / / rw - ext4 /dev/vda rw\n\
            40 22 254:0 /a/l.db /b\\040\\134/l.db rw - ext4 /dev/vda rw\n";
        assert!(is_listed(Path::new("/"), mounts));
        assert!(is_listed(Path::new("/b \\/l.db"), mounts));
        assert!(!is_listed(Path::new("/a/l.db"), mounts));
        assert!(!is_listed(Path::new(""), mounts));
    }

    #[test]
    fn network_file_systems_are_distinguished_from_local_ones() {
        let on = |kind, minor| {
            network_file_system(kind, rustix::fs::makedev(0, minor), || MOUNTS.to_owned())
        };
        assert_eq!(on(0x6969, 0).as_deref(), Some("NFS"));
        assert_eq!(on(0xFF53_4D42, 0).as_deref(), Some("CIFS"));
        assert_eq!(on(FUSE, 44).as_deref(), Some("fuse.sshfs"));
        assert_eq!(on(FUSE, 46).as_deref(), Some("virtiofs"));
        assert_eq!(on(FUSE, 45), None);
        for local in [0xEF53, 0x0102_1994, 0x9123_683E, 0x5846_5342, 0x794C_7630] {
            assert_eq!(on(local, 0), None);
        }
    }
}
