//! Messages between the processes of one machine: Unix datagrams.
//!
//! A message is only a hint, so it may be lost, duplicated or late: its receiver reads the file
//! again, and rechecks now and then without one.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use tokio::sync::{Notify, mpsc};

use super::error_from;
use crate::engine::common::hints::{HintReceiver, HintSenders};
use crate::engine::{ClaimId, Event, Scope};
use crate::error::{LossReason, Result};
use crate::name::Name;
use crate::report::report;
use crate::sync;

/// Maximum sockets that are examined at open, and maximum names that are listed to choose them.
const SWEPT_SOCKETS: usize = 8;
const LISTED_SOCKETS: usize = 1024;
/// The file of a younger socket may exist although the socket is not bound yet.
const MIN_SOCKET_AGE: Duration = Duration::from_secs(10);

/// What one client sends to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// This claim was granted, or its position changed: check it.
    Look(ClaimId),
    /// This claim's lock was taken away: by an operator, or because the process recorded as its
    /// holder is dead, which a client that records another process cannot know.
    Lost(ClaimId, LossReason),
    /// The state of this name changed.
    Changed(Name),
}

impl Message {
    fn to_bytes(&self) -> Vec<u8> {
        let (kind, body): (u8, &[u8]) = match self {
            Message::Look(id) => (b'l', &id.to_bits().to_be_bytes()),
            Message::Lost(id, LossReason::Forgotten) => (b'f', &id.to_bits().to_be_bytes()),
            Message::Lost(id, LossReason::Broken) => (b'b', &id.to_bits().to_be_bytes()),
            Message::Lost(id, _) => (b'r', &id.to_bits().to_be_bytes()),
            Message::Changed(name) => (b'c', name.as_str().as_bytes()),
        };
        [&[kind], body].concat()
    }

    /// `None` for a message of a later version.
    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (kind, body) = bytes.split_first()?;
        let id = || body.try_into().ok().map(|id| ClaimId::from_bits(u128::from_be_bytes(id)));
        Some(match kind {
            b'l' => Message::Look(id()?),
            b'f' => Message::Lost(id()?, LossReason::Forgotten),
            b'b' => Message::Lost(id()?, LossReason::Broken),
            b'r' => Message::Lost(id()?, LossReason::Revoked),
            b'c' => Message::Changed(std::str::from_utf8(body).ok()?.parse().ok()?),
            _ => return None,
        })
    }
}

/// The sockets by which this client receives and sends messages.
#[derive(Debug)]
pub(super) struct Inbox {
    folder: InboxFolder,
    name: String,
    outgoing: UnixDatagram,
    pub(super) dispatcher: Arc<Dispatcher>,
    reader: tokio::task::AbortHandle,
}

impl Inbox {
    /// Opens an inbox in the folder beside the file at `database`, and receives on `runtime`.
    pub(super) fn open(
        database: &Path,
        mode: u32,
        runtime: &tokio::runtime::Handle,
    ) -> Result<Self> {
        let _inside = runtime.enter();
        Self::bind(database, mode, runtime).map_err(|error| {
            let full = matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded);
            let path = database.display();
            error_from(format!("no inbox could be made at {path}-inbox"), full, error)
        })
    }

    fn bind(path: &Path, mode: u32, runtime: &tokio::runtime::Handle) -> std::io::Result<Self> {
        let folder = InboxFolder::open(path, mode)?;
        let name = format!("{:016x}", rand::random::<u64>());
        let socket = UnixDatagram::bind(folder.path_of(&name))?;
        // Users that may write to the file may send messages; the folder keeps all others out.
        let permissions = std::fs::Permissions::from_mode(mode & 0o666);
        std::fs::set_permissions(folder.path_of(&name), permissions)?;
        socket.set_nonblocking(true)?;
        let outgoing = UnixDatagram::unbound()?;
        outgoing.set_nonblocking(true)?;
        let dispatcher = Arc::<Dispatcher>::default();
        let incoming = tokio::net::UnixDatagram::from_std(socket)?;
        let reader = runtime.spawn(read(incoming, dispatcher.clone())).abort_handle();
        Ok(Self { folder, name, outgoing, dispatcher, reader })
    }

    /// The name by which others reach this inbox.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Sends without waiting. `false` if the inbox has no reader any more. A full inbox is not an
    /// error, because its owner rechecks anyway.
    pub(super) fn send(&self, to: &str, message: &Message) -> bool {
        if to == self.name {
            self.dispatcher.dispatch(message.clone());
            return true;
        }
        let Some(path) = self.folder.checked_path_of(to) else { return false };
        match self.outgoing.send_to(&message.to_bytes(), path) {
            Ok(_) => true,
            Err(error) => {
                !matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::NotFound)
            }
        }
    }

    /// Removes the socket of that name if it has no reader.
    pub(super) fn remove_if_stale(&self, name: &str) {
        let Some(path) = self.folder.checked_path_of(name) else { return };
        let refused = |path: &Path| {
            let connected = UnixDatagram::unbound().and_then(|socket| socket.connect(path));
            connected.is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
        };
        if name != self.name && is_old_enough(&path) && refused(&path) {
            // Another process may have removed it first.
            let _ = std::fs::remove_file(path);
        }
    }

    /// Removes some of the sockets that processes left behind when they were killed.
    pub(super) fn sweep(&self) {
        let Ok(entries) = std::fs::read_dir(&self.folder.path) else { return };
        let name_of = |entry: std::fs::DirEntry| entry.file_name().into_string().ok();
        let names: Vec<_> = entries.take(LISTED_SOCKETS).flatten().filter_map(name_of).collect();
        let start = rand::random::<u32>() as usize % names.len().max(1);
        for name in names.iter().cycle().skip(start).take(SWEPT_SOCKETS.min(names.len())) {
            self.remove_if_stale(name);
        }
    }

    /// Stops the reader, and removes the socket. Only for the process that opened it.
    pub(super) fn close(&self) {
        self.reader.abort();
        // If that fails, the next client sweeps it.
        let _ = std::fs::remove_file(self.folder.path_of(&self.name));
    }
}

fn is_old_enough(path: &Path) -> bool {
    let born = path.metadata().and_then(|found| found.modified());
    born.is_ok_and(|born| {
        SystemTime::now().duration_since(born).is_ok_and(|age| age > MIN_SOCKET_AGE)
    })
}

async fn read(socket: tokio::net::UnixDatagram, dispatcher: Arc<Dispatcher>) {
    // A name has at most 255 bytes.
    let mut buffer = [0; 512];
    loop {
        match socket.recv(&mut buffer).await {
            Ok(length) => {
                if let Some(message) = Message::from_bytes(&buffer[..length]) {
                    dispatcher.dispatch(message);
                }
            }
            Err(error) => {
                // Waiters and watches continue by their rechecks.
                report!(warn, error = error, "the inbox can no longer be read");
                return;
            }
        }
    }
}

/// The folder of all inboxes. The address of a socket is limited to about 100 bytes, so on Linux it
/// is given relative to the folder's descriptor.
#[derive(Debug)]
struct InboxFolder {
    path: PathBuf,
    #[cfg(target_os = "linux")]
    descriptor: std::os::fd::OwnedFd,
}

impl InboxFolder {
    fn open(database: &Path, mode: u32) -> std::io::Result<Self> {
        let mut path = database.as_os_str().to_owned();
        path.push("-inbox");
        let path = PathBuf::from(path);
        // Users that may write must also be able to search.
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

    /// A name that was read from the file must not lead out of the folder.
    fn checked_path_of(&self, name: &str) -> Option<PathBuf> {
        let plain = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_hexdigit());
        plain.then(|| self.path_of(name))
    }
}

/// Passes messages on to the waiters, watches and keeper of this process.
#[derive(Debug)]
pub(super) struct Dispatcher {
    waiters: Mutex<HashMap<ClaimId, Arc<Notify>>>,
    watchers: Mutex<HintSenders>,
    events: Mutex<Option<mpsc::UnboundedSender<Event>>>,
    listener: Mutex<Option<mpsc::UnboundedReceiver<Event>>>,
}

impl Default for Dispatcher {
    fn default() -> Self {
        let (tell, events) = mpsc::unbounded_channel();
        Self {
            waiters: Mutex::default(),
            watchers: Mutex::default(),
            events: Mutex::new(Some(tell)),
            listener: Mutex::new(Some(events)),
        }
    }
}

impl Dispatcher {
    /// A handle that is woken when `id` should be checked. It is created before the first request,
    /// so that no message is missed.
    pub(super) fn wake_handle(self: &Arc<Self>, id: ClaimId) -> WakeHandle {
        let notify = sync::lock(&self.waiters).entry(id).or_default().clone();
        WakeHandle { dispatcher: self.clone(), id, notify }
    }

    /// The names in `scope` that change from now on.
    pub(super) fn hints(&self, scope: &Scope) -> HintReceiver {
        sync::lock(&self.watchers).add(scope).1
    }

    /// All events, for the first caller.
    pub(super) fn events(&self) -> Option<mpsc::UnboundedReceiver<Event>> {
        sync::lock(&self.listener).take()
    }

    /// Ends the events.
    pub(super) fn close(&self) {
        *sync::lock(&self.events) = None;
        sync::lock(&self.watchers).close();
    }

    fn dispatch(&self, message: Message) {
        match message {
            Message::Look(id) => {
                if let Some(waiter) = sync::lock(&self.waiters).get(&id) {
                    waiter.notify_one();
                }
            }
            Message::Lost(id, reason) => {
                if let Some(events) = &*sync::lock(&self.events) {
                    // The keeper may be gone.
                    let _ = events.send(Event::from_reason(id, reason));
                }
            }
            Message::Changed(name) => sync::lock(&self.watchers).changed(&name),
        }
    }
}

/// Woken for one claim, until it is dropped.
#[derive(Debug)]
pub(super) struct WakeHandle {
    dispatcher: Arc<Dispatcher>,
    id: ClaimId,
    notify: Arc<Notify>,
}

impl WakeHandle {
    pub(super) async fn woken(&self) {
        self.notify.notified().await;
    }
}

impl Drop for WakeHandle {
    fn drop(&mut self) {
        sync::lock(&self.dispatcher.waiters).remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn letters_are_written_and_read_back() {
        let id = ClaimId::random();
        let name: Name = "größe/1".parse().unwrap();
        for message in [
            Message::Look(id),
            Message::Lost(id, LossReason::Broken),
            Message::Lost(id, LossReason::Revoked),
            Message::Lost(id, LossReason::Forgotten),
            Message::Changed(name),
        ] {
            assert_eq!(Message::from_bytes(&message.to_bytes()), Some(message));
        }
        for nonsense in [&b""[..], b"l", b"lshort", b"c", b"c\xff", b"zwhatever"] {
            assert_eq!(Message::from_bytes(nonsense), None);
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
        let wake = theirs.dispatcher.wake_handle(id);
        assert!(ours.send(theirs.name(), &Message::Look(id)));
        wake.woken().await;
        theirs.close();
        assert!(!ours.send(theirs.name(), &Message::Look(id)), "its socket is gone");
        assert!(!ours.send("../db", &Message::Look(id)), "a name leads nowhere else");
    }

    proptest! {
        #[test]
        fn any_message_is_read_or_ignored(bytes in prop::collection::vec(any::<u8>(), 0..60)) {
            for kind in [&b""[..], b"l", b"c"] {
                let bytes = [kind, &bytes].concat();
                if let Some(message) = Message::from_bytes(&bytes) {
                    prop_assert_eq!(message.to_bytes(), bytes);
                }
            }
        }
    }
}
