//! Letters between the processes of one machine: Unix datagrams.
//!
//! A letter is only a hint to look, so it may get lost, come twice or come late: whoever gets one
//! reads the file again, and whoever gets none looks now and then.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use tokio::sync::{Notify, mpsc};

use super::failed_by;
use crate::engine::common::hints::{HintReceiver, HintSenders};
use crate::engine::{ClaimId, Event, Scope};
use crate::error::{LossReason, Result};
use crate::name::Name;
use crate::report::report;
use crate::sync;

/// At most this many sockets are examined at open, and at most so many names read to choose them.
const EXAMINED: usize = 8;
const LISTED: usize = 1024;
/// A younger socket may not yet be bound although its file exists.
const GROWN_UP: Duration = Duration::from_secs(10);

/// What one client tells another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Letter {
    /// This claim of yours was granted, or has another place.
    Look(ClaimId),
    /// This claim's lock was taken away: by an operator, or because its process is dead, which is
    /// news to a client for which another process stands in.
    Lost(ClaimId, LossReason),
    /// Something about this name changed.
    Changed(Name),
}

impl Letter {
    fn to_bytes(&self) -> Vec<u8> {
        let (kind, body): (u8, &[u8]) = match self {
            Letter::Look(id) => (b'l', &id.to_bits().to_be_bytes()),
            Letter::Lost(id, LossReason::Forgotten) => (b'f', &id.to_bits().to_be_bytes()),
            Letter::Lost(id, LossReason::Broken) => (b'b', &id.to_bits().to_be_bytes()),
            Letter::Lost(id, _) => (b'r', &id.to_bits().to_be_bytes()),
            Letter::Changed(name) => (b'c', name.as_str().as_bytes()),
        };
        [&[kind], body].concat()
    }

    /// `None` for what a later version may send.
    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (kind, body) = bytes.split_first()?;
        let id = || body.try_into().ok().map(|id| ClaimId::from_bits(u128::from_be_bytes(id)));
        Some(match kind {
            b'l' => Letter::Look(id()?),
            b'f' => Letter::Lost(id()?, LossReason::Forgotten),
            b'b' => Letter::Lost(id()?, LossReason::Broken),
            b'r' => Letter::Lost(id()?, LossReason::Revoked),
            b'c' => Letter::Changed(std::str::from_utf8(body).ok()?.parse().ok()?),
            _ => return None,
        })
    }
}

/// Where this client gets its letters, and from where it sends.
#[derive(Debug)]
pub(super) struct Inbox {
    folder: Folder,
    name: String,
    outgoing: UnixDatagram,
    pub(super) desk: Arc<Desk>,
    reader: tokio::task::AbortHandle,
}

impl Inbox {
    /// Opens an inbox in the folder beside the file at `database`, and reads it on `runtime`.
    pub(super) fn open(
        database: &Path,
        mode: u32,
        runtime: &tokio::runtime::Handle,
    ) -> Result<Self> {
        let _inside = runtime.enter();
        Self::bind(database, mode, runtime).map_err(|error| {
            let full = matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded);
            let path = database.display();
            failed_by(format!("no inbox could be made at {path}-inbox"), full, error)
        })
    }

    fn bind(path: &Path, mode: u32, runtime: &tokio::runtime::Handle) -> std::io::Result<Self> {
        let folder = Folder::open(path, mode)?;
        let name = format!("{:016x}", rand::random::<u64>());
        let socket = UnixDatagram::bind(folder.path_of(&name))?;
        // Who may write to the file may write to us; the folder keeps all others out.
        let permissions = std::fs::Permissions::from_mode(mode & 0o666);
        std::fs::set_permissions(folder.path_of(&name), permissions)?;
        socket.set_nonblocking(true)?;
        let outgoing = UnixDatagram::unbound()?;
        outgoing.set_nonblocking(true)?;
        let desk = Arc::<Desk>::default();
        let incoming = tokio::net::UnixDatagram::from_std(socket)?;
        let reader = runtime.spawn(read(incoming, desk.clone())).abort_handle();
        Ok(Self { folder, name, outgoing, desk, reader })
    }

    /// The name under which others reach this inbox.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Sends without waiting. `false`: nobody reads that inbox any more. An inbox that is full is
    /// no fault, because its owner will look anyway.
    pub(super) fn send(&self, to: &str, letter: &Letter) -> bool {
        if to == self.name {
            self.desk.take(letter.clone());
            return true;
        }
        let Some(path) = self.folder.checked_path_of(to) else { return false };
        match self.outgoing.send_to(&letter.to_bytes(), path) {
            Ok(_) => true,
            Err(error) => {
                !matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::NotFound)
            }
        }
    }

    /// Removes the socket of that name if nobody reads it.
    pub(super) fn remove_if_stale(&self, name: &str) {
        let Some(path) = self.folder.checked_path_of(name) else { return };
        let refused = |path: &Path| {
            let knock = UnixDatagram::unbound().and_then(|socket| socket.connect(path));
            knock.is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
        };
        if name != self.name && grown_up(&path) && refused(&path) {
            // Somebody else may have been faster.
            let _ = std::fs::remove_file(path);
        }
    }

    /// Removes some of the sockets that processes left behind when they were killed.
    pub(super) fn sweep(&self) {
        let Ok(entries) = std::fs::read_dir(&self.folder.path) else { return };
        let name_of = |entry: std::fs::DirEntry| entry.file_name().into_string().ok();
        let names: Vec<_> = entries.take(LISTED).flatten().filter_map(name_of).collect();
        let start = rand::random::<u32>() as usize % names.len().max(1);
        for name in names.iter().cycle().skip(start).take(EXAMINED.min(names.len())) {
            self.remove_if_stale(name);
        }
    }

    /// Ends the reading, and removes the socket. For the process that opened it only.
    pub(super) fn close(&self) {
        self.reader.abort();
        // If that fails, the next client sweeps it.
        let _ = std::fs::remove_file(self.folder.path_of(&self.name));
    }
}

fn grown_up(path: &Path) -> bool {
    let born = path.metadata().and_then(|found| found.modified());
    born.is_ok_and(|born| SystemTime::now().duration_since(born).is_ok_and(|age| age > GROWN_UP))
}

async fn read(socket: tokio::net::UnixDatagram, desk: Arc<Desk>) {
    // A name has at most 255 bytes.
    let mut buffer = [0; 512];
    loop {
        match socket.recv(&mut buffer).await {
            Ok(length) => {
                if let Some(letter) = Letter::from_bytes(&buffer[..length]) {
                    desk.take(letter);
                }
            }
            Err(error) => {
                // Waiters and watchers go on by looking now and then.
                report!(warn, error = error, "the inbox can no longer be read");
                return;
            }
        }
    }
}

/// The folder of all inboxes. The address of a socket may have about 100 bytes only, so on Linux it
/// is written by way of the folder's descriptor.
#[derive(Debug)]
struct Folder {
    path: PathBuf,
    #[cfg(target_os = "linux")]
    descriptor: std::os::fd::OwnedFd,
}

impl Folder {
    fn open(database: &Path, mode: u32) -> std::io::Result<Self> {
        let mut path = database.as_os_str().to_owned();
        path.push("-inbox");
        let path = PathBuf::from(path);
        // Who may write must also be able to search.
        let mode = mode | ((mode & 0o222) >> 1);
        match std::fs::DirBuilder::new().mode(mode).create(&path) {
            Ok(()) => std::fs::set_permissions(&path, PermissionsExt::from_mode(mode))?,
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
        #[cfg(target_os = "linux")]
        let descriptor = {
            use rustix::fs::{Mode, OFlags};
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            rustix::fs::open(&path, flags, Mode::empty())?
        };
        Ok(Self {
            path,
            #[cfg(target_os = "linux")]
            descriptor,
        })
    }

    #[cfg(target_os = "linux")]
    fn path_of(&self, name: &str) -> PathBuf {
        use std::os::fd::AsRawFd;
        format!("/proc/self/fd/{}/{name}", self.descriptor.as_raw_fd()).into()
    }

    #[cfg(not(target_os = "linux"))]
    fn path_of(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// A name that comes from the file must not lead out of the folder.
    fn checked_path_of(&self, name: &str) -> Option<PathBuf> {
        let plain = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_hexdigit());
        plain.then(|| self.path_of(name))
    }
}

/// Where letters are handed to whoever in this process waits for them.
#[derive(Debug)]
pub(super) struct Desk {
    bells: Mutex<HashMap<ClaimId, Arc<Notify>>>,
    watchers: Mutex<HintSenders>,
    events: Mutex<Option<mpsc::UnboundedSender<Event>>>,
    listener: Mutex<Option<mpsc::UnboundedReceiver<Event>>>,
}

impl Default for Desk {
    fn default() -> Self {
        let (tell, events) = mpsc::unbounded_channel();
        Self {
            bells: Mutex::default(),
            watchers: Mutex::default(),
            events: Mutex::new(Some(tell)),
            listener: Mutex::new(Some(events)),
        }
    }
}

impl Desk {
    /// A bell that rings when `id` should look. Hung before the first request, so that no ring is
    /// missed.
    pub(super) fn bell(self: &Arc<Self>, id: ClaimId) -> Bell {
        let notify = sync::lock(&self.bells).entry(id).or_default().clone();
        Bell { desk: self.clone(), id, notify }
    }

    /// The names in `scope` that change from now on.
    pub(super) fn hints(&self, scope: &Scope) -> HintReceiver {
        sync::lock(&self.watchers).add(scope).1
    }

    /// All events, for the one who asks first.
    pub(super) fn events(&self) -> Option<mpsc::UnboundedReceiver<Event>> {
        sync::lock(&self.listener).take()
    }

    /// Ends the events.
    pub(super) fn close(&self) {
        *sync::lock(&self.events) = None;
        sync::lock(&self.watchers).close();
    }

    fn take(&self, letter: Letter) {
        match letter {
            Letter::Look(id) => {
                if let Some(bell) = sync::lock(&self.bells).get(&id) {
                    bell.notify_one();
                }
            }
            Letter::Lost(id, reason) => {
                if let Some(events) = &*sync::lock(&self.events) {
                    // Nobody listens any more.
                    let _ = events.send(Event::Lost(id, reason));
                }
            }
            Letter::Changed(name) => sync::lock(&self.watchers).changed(&name),
        }
    }
}

/// Rings for one claim, until it is dropped.
#[derive(Debug)]
pub(super) struct Bell {
    desk: Arc<Desk>,
    id: ClaimId,
    notify: Arc<Notify>,
}

impl Bell {
    pub(super) async fn rung(&self) {
        self.notify.notified().await;
    }
}

impl Drop for Bell {
    fn drop(&mut self) {
        sync::lock(&self.desk.bells).remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_are_written_and_read_back() {
        let id = ClaimId::random();
        let name: Name = "größe/1".parse().unwrap();
        for letter in [
            Letter::Look(id),
            Letter::Lost(id, LossReason::Broken),
            Letter::Lost(id, LossReason::Revoked),
            Letter::Lost(id, LossReason::Forgotten),
            Letter::Changed(name),
        ] {
            assert_eq!(Letter::from_bytes(&letter.to_bytes()), Some(letter));
        }
        for nonsense in [&b""[..], b"l", b"lshort", b"c", b"c\xff", b"zwhatever"] {
            assert_eq!(Letter::from_bytes(nonsense), None);
        }
    }

    #[tokio::test]
    async fn a_letter_arrives_also_in_a_folder_with_a_long_path() {
        let home = tempfile::tempdir().unwrap();
        let folder = home.path().join("x".repeat(200));
        std::fs::create_dir(&folder).unwrap();
        let runtime = tokio::runtime::Handle::current();
        let open = || Inbox::open(&folder.join("db"), 0o600, &runtime).unwrap();
        let (ours, theirs) = (open(), open());
        let id = ClaimId::random();
        let bell = theirs.desk.bell(id);
        assert!(ours.send(theirs.name(), &Letter::Look(id)));
        bell.rung().await;
        theirs.close();
        assert!(!ours.send(theirs.name(), &Letter::Look(id)), "its socket is gone");
        assert!(!ours.send("../db", &Letter::Look(id)), "a name leads nowhere else");
    }
}
