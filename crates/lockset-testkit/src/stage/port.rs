//! Free ports for the servers of tests.

use std::fs::File;
use std::net::TcpListener;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{FlockOperation, flock};

/// The offset of the cluster bus port of a Redis Cluster node. It is fixed in Redis 6.
const BUS: u16 = 10_000;

/// A port without a listener, from below the ephemeral range: otherwise an outgoing connection
/// could take it while its server is down. The same holds for its [`BUS`] port.
pub(super) fn free_port() -> u16 {
    const PORTS: std::ops::Range<u32> = 10_000..20_000;
    static TAKEN: AtomicU32 = AtomicU32::new(0);
    // Concurrent test processes start at different ports.
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

/// Reserves the port for this process among all test processes until it ends: a server binds its
/// port some time after this check, and frees it when it is killed.
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
