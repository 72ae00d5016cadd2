//! Where the tests' servers listen.

use std::fs::File;
use std::net::TcpListener;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{FlockOperation, flock};

/// How far above its port a node of a cluster listens to the other nodes. Redis 6 cannot be told
/// another.
const BUS: u16 = 10_000;

/// A port that nobody listens on, from below those that the system gives to connections: else a
/// connection could take it while its server is down, even one that was meant for that server. The
/// same is true of its [`BUS`] port.
pub(super) fn free_port() -> u16 {
    const PORTS: std::ops::Range<u32> = 10_000..20_000;
    static TAKEN: AtomicU32 = AtomicU32::new(0);
    // Test processes that run at the same time begin in different places.
    let begin = std::process::id().wrapping_mul(97);
    loop {
        let number = begin.wrapping_add(TAKEN.fetch_add(1, Ordering::Relaxed));
        let port = (PORTS.start + number % (PORTS.end - PORTS.start)) as u16;
        let is_free = |port: u16| TcpListener::bind(("127.0.0.1", port)).is_ok();
        if is_ours(port) && is_free(port) && is_free(port + BUS) {
            return port;
        }
    }
}

/// Makes the port ours until the end of this process, among all who look for one here: a server
/// comes to its port some time after it was looked for, and leaves it when it is killed.
fn is_ours(port: u16) -> bool {
    static OURS: Mutex<Vec<File>> = Mutex::new(Vec::new());
    let folder = std::env::temp_dir().join("lockset-test-ports");
    std::fs::create_dir_all(&folder).unwrap();
    let file = File::options().append(true).create(true).open(folder.join(port.to_string()));
    let file = file.unwrap();
    if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        return false;
    }
    OURS.lock().unwrap().push(file);
    true
}
