//! Homes on ZooKeeper servers that are used again: a server takes a second to start, a folder in it
//! nothing.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use super::{Eyes, ZooKeeperServers};

/// Servers that nobody uses at the moment. They end with this process.
static IDLE: Mutex<Vec<ZooKeeperServers>> = Mutex::new(Vec::new());
/// How many homes there were.
static HOMES: AtomicU32 = AtomicU32::new(0);

/// A folder of its own on `N` servers, which nobody else uses meanwhile.
#[derive(Debug)]
pub struct Chroot<const N: usize> {
    /// Always there, until dropped.
    servers: Option<ZooKeeperServers>,
    chroot: String,
    pub(super) actor: &'static str,
    leader_dies: bool,
    leader_is_succeeded: bool,
    /// The leader that died, and is to come back.
    dead: Mutex<Option<usize>>,
}

impl<const N: usize> Chroot<N> {
    /// An empty home; see [`LocalStage::start`](crate::stage::LocalStage::start).
    pub fn start(actor: &'static str) -> Self {
        let chroot = format!("home-{}", HOMES.fetch_add(1, Ordering::Relaxed));
        let (leader_dies, leader_is_succeeded, dead) = (false, false, Mutex::new(None));
        let servers = Some(idle_servers(N));
        Self { servers, chroot, actor, leader_dies, leader_is_succeeded, dead }
    }

    /// When the home freezes its leader does not only stop but dies, and comes back in the thaw.
    pub fn whose_leader_dies(mut self) -> Self {
        self.leader_dies = true;
        self
    }

    /// The leader dies in the middle of a law, the others elect another and go on. All sessions
    /// last long enough for that.
    pub fn whose_leader_is_succeeded(mut self) -> Self {
        self.leader_is_succeeded = true;
        self
    }

    pub(super) fn has_long_sessions(&self) -> bool {
        self.leader_is_succeeded
    }

    pub(super) fn succeed_leader(&self) {
        if self.leader_is_succeeded {
            let leader = self.servers().leader();
            self.servers().nodes()[leader].kill();
            *self.dead.lock().unwrap() = Some(leader);
            self.servers().await_another_leader(leader);
        }
    }

    pub(super) fn freeze_all(&self) {
        let servers = self.servers();
        if self.leader_dies {
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

    /// The URL of this home.
    pub fn url(&self) -> String {
        self.servers().url(&self.chroot)
    }

    /// The path in this home.
    pub fn path(&self, name: &str) -> String {
        format!("/{}/{name}", self.chroot)
    }

    /// The names of the nodes of this lock.
    pub fn contenders(&self, eyes: &mut Eyes, name: &str) -> Vec<String> {
        eyes.children(&self.path(name)).unwrap_or_default()
    }

    /// The path of this lock's only node.
    pub fn only_node(&self, eyes: &mut Eyes, name: &str) -> String {
        match &self.contenders(eyes, name)[..] {
            [one] => self.path(&format!("{name}/{one}")),
            others => panic!("one contender, not {others:?}"),
        }
    }

    /// The URL of this home through other ports.
    pub fn url_by(&self, ports: &[u16]) -> String {
        let hosts: Vec<_> = ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
        format!("zk://{}/{}", hosts.join(","), self.chroot)
    }

    /// The URL of another home on the same servers.
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
        // A law that failed may have left anything behind.
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
