//! Chroots on reused ZooKeeper servers: a server takes a second to start, a chroot costs nothing.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use super::{KazooClient, ZooKeeperServers};

/// Idle servers. They end with this process.
static IDLE: Mutex<Vec<ZooKeeperServers>> = Mutex::new(Vec::new());
/// How many chroots were created.
static HOMES: AtomicU32 = AtomicU32::new(0);

/// A chroot of its own on `N` servers that nothing else uses meanwhile.
#[derive(Debug)]
pub struct Chroot<const N: usize> {
    /// `None` only while it is dropped.
    servers: Option<ZooKeeperServers>,
    chroot: String,
    pub(super) actor: &'static str,
    freeze_kills_leader: bool,
    leader_changes: bool,
    /// The killed leader, which is to be restarted.
    dead: Mutex<Option<usize>>,
}

impl<const N: usize> Chroot<N> {
    /// An empty backend; see [`LocalStage::start`](crate::stage::LocalStage::start).
    pub fn start(actor: &'static str) -> Self {
        let chroot = format!("home-{}", HOMES.fetch_add(1, Ordering::Relaxed));
        let (freeze_kills_leader, leader_changes, dead) = (false, false, Mutex::new(None));
        let servers = Some(idle_servers(N));
        Self { servers, chroot, actor, freeze_kills_leader, leader_changes, dead }
    }

    /// A freeze also kills the leader, and a thaw restarts it.
    pub fn with_leader_killed_by_freeze(mut self) -> Self {
        self.freeze_kills_leader = true;
        self
    }

    /// The leader is killed in the middle of a law, and the others elect another. All sessions last
    /// long enough for that.
    pub fn with_leader_change(mut self) -> Self {
        self.leader_changes = true;
        self
    }

    pub(super) fn has_long_sessions(&self) -> bool {
        self.leader_changes
    }

    pub(super) fn kill_leader(&self) {
        if self.leader_changes {
            let leader = self.servers().leader();
            self.servers().nodes()[leader].kill();
            *self.dead.lock().unwrap() = Some(leader);
            self.servers().await_another_leader(leader);
        }
    }

    pub(super) fn freeze_all(&self) {
        let servers = self.servers();
        if self.freeze_kills_leader {
            let leader = servers.leader();
            servers.nodes()[leader].kill();
            *self.dead.lock().unwrap() = Some(leader);
        }
        servers.freeze();
    }

    pub(super) fn thaw_all(&self) {
        let servers = self.servers();
        servers.thaw();
        if let Some(dead) = self.dead.lock().unwrap().take() {
            servers.nodes()[dead].start_again();
            servers.await_serving();
        }
    }

    /// The servers.
    pub fn servers(&self) -> &ZooKeeperServers {
        self.servers.as_ref().expect("there until dropped")
    }

    /// The URL of this chroot.
    pub fn url(&self) -> String {
        self.servers().url(&self.chroot)
    }

    /// The absolute path of a node in this chroot.
    pub fn path(&self, name: &str) -> String {
        format!("/{}/{name}", self.chroot)
    }

    /// The names of the nodes of this lock.
    pub fn contenders(&self, kazoo: &mut KazooClient, name: &str) -> Vec<String> {
        kazoo.children(&self.path(name)).unwrap_or_default()
    }

    /// The path of this lock's only node.
    pub fn only_node(&self, kazoo: &mut KazooClient, name: &str) -> String {
        match &self.contenders(kazoo, name)[..] {
            [one] => self.path(&format!("{name}/{one}")),
            others => panic!("one contender, not {others:?}"),
        }
    }

    /// The URL of this chroot through other ports.
    pub fn url_by(&self, ports: &[u16]) -> String {
        let hosts: Vec<_> = ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
        format!("zk://{}/{}", hosts.join(","), self.chroot)
    }

    /// The URL of another chroot on the same servers.
    pub fn url_elsewhere(&self) -> String {
        self.servers().url(&format!("{}-elsewhere", self.chroot))
    }
}

fn idle_servers(number: usize) -> ZooKeeperServers {
    let mut idle = IDLE.lock().unwrap();
    let found = idle.iter().position(|servers| servers.nodes().len() == number);
    let found = found.map(|place| idle.swap_remove(place));
    drop(idle);
    found.unwrap_or_else(|| ZooKeeperServers::start(number))
}

impl<const N: usize> Drop for Chroot<N> {
    fn drop(&mut self) {
        let Some(servers) = self.servers.take() else { return };
        servers.thaw();
        // A law that failed may have left the servers in any state.
        if std::thread::panicking() {
            return;
        }
        if let Some(dead) = self.dead.lock().unwrap().take() {
            servers.nodes()[dead].start_again();
            servers.await_serving();
        }
        if servers.are_serving() {
            IDLE.lock().unwrap().push(servers);
        }
    }
}
