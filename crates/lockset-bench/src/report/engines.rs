//! What is measured on each engine: its servers, its floor, its peers. A new engine is one more
//! entry of [`ENGINES`] and one more [`Field`].

use lockset_testkit::stage::{EtcdServers, ZooKeeperServers};
use rustix::process::Signal;

use crate::server::Server;

/// An engine, and whom it is compared with.
pub(crate) struct Engine {
    pub(crate) name: &'static str,
    pub(crate) start: fn() -> Box<dyn Field>,
    pub(crate) floor: Floor,
    /// Names of `players::PEERS`.
    pub(crate) peers: &'static [&'static str],
    /// Whether locks are shared between processes.
    pub(crate) crosses_processes: bool,
}

/// The least that a lock can cost on an engine.
pub(crate) struct Floor {
    pub(crate) title: &'static str,
    pub(crate) driver: &'static str,
    pub(crate) hands_off: bool,
}

/// The servers of one engine.
pub(crate) trait Field {
    /// For Lockset.
    fn url(&self) -> String;

    /// For the floor and the peers.
    fn address(&self) -> String {
        self.url()
    }

    /// The name and version of the server.
    fn version(&self) -> String;

    /// Begins to count what clients send; the result ends it and returns the number. Nothing is
    /// timed meanwhile, because counting may cost something. `None` where nothing can be counted.
    fn count_requests(&self) -> Option<Box<dyn FnOnce() -> f64 + '_>> {
        None
    }

    /// Bytes that the server's data take. `None` where that cannot be told.
    fn memory(&self) -> Option<f64> {
        None
    }

    /// Bytes that clients have sent to the server so far. `None` where that cannot be told.
    fn received(&self) -> Option<f64> {
        None
    }

    /// Forgets what drivers that were killed have left behind, where that is simple.
    fn clear(&self) {}

    /// Stops one of several servers, or lets it go on. `false` where there is only one.
    fn freeze_one(&self, _frozen: bool) -> bool {
        false
    }
}

pub(crate) const ENGINES: &[Engine] = &[
    Engine {
        name: "memory",
        start: || Box::new(Memory),
        floor: Floor { title: "tokio's Mutex", driver: "floor-memory", hands_off: true },
        peers: &[],
        crosses_processes: false,
    },
    Engine {
        name: "local",
        start: || Box::new(Local(tempfile::tempdir().unwrap())),
        floor: Floor { title: "two SQLite transactions", driver: "floor-local", hands_off: false },
        peers: &[],
        crosses_processes: true,
    },
    Engine {
        name: "redis",
        start: || Box::new(Redis(Server::start())),
        floor: Floor { title: "bare socket", driver: "floor-redis", hands_off: true },
        peers: &[
            "rslock",
            "distkit",
            "async-redis-lock",
            "redis-py",
            "python-redis-lock",
            "redlock",
            "redis-semaphore",
            "redsync",
            "redislock",
            "rueidislock",
            "redisson",
        ],
        crosses_processes: true,
    },
    Engine {
        name: "redlock",
        start: || Box::new(Redlock::start()),
        floor: Floor { title: "five bare sockets", driver: "floor-redlock", hands_off: false },
        peers: &["rslock", "redlock", "redis-semaphore", "redsync"],
        crosses_processes: true,
    },
    Engine {
        name: "etcd",
        start: || Box::new(Etcd(EtcdServers::start(1))),
        floor: Floor { title: "put and delete", driver: "floor-etcd", hands_off: false },
        peers: &["etcd-client", "etcd-concurrency"],
        crosses_processes: true,
    },
    Engine {
        name: "zookeeper",
        start: || {
            // Reaped as seldom as by default, or some cycles would make their parents again.
            let options = ["-Dznode.container.checkIntervalMs=60000"];
            Box::new(ZooKeeper(ZooKeeperServers::start_with(1, &options)))
        },
        floor: Floor { title: "create and delete", driver: "floor-zookeeper", hands_off: false },
        peers: &["zookeeper-client", "kazoo", "curator"],
        crosses_processes: true,
    },
];

struct Memory;

impl Field for Memory {
    fn url(&self) -> String {
        "memory:".to_owned()
    }

    fn version(&self) -> String {
        "in the process".to_owned()
    }
}

struct Local(tempfile::TempDir);

impl Field for Local {
    fn url(&self) -> String {
        format!("local:{}", self.0.path().join("bench.db").display())
    }

    fn version(&self) -> String {
        format!("SQLite {}, on {}", rusqlite::version(), std::env::temp_dir().display())
    }
}

struct Redis(Server);

impl Field for Redis {
    fn url(&self) -> String {
        self.0.url()
    }

    fn address(&self) -> String {
        format!("127.0.0.1:{}", self.0.port())
    }

    fn version(&self) -> String {
        let version = self.0.info("server", "redis_version").unwrap_or_default();
        format!("redis-server {version} without persistence")
    }

    fn count_requests(&self) -> Option<Box<dyn FnOnce() -> f64 + '_>> {
        let count = self.0.count_commands();
        Some(Box::new(move || count.finish() as f64))
    }

    fn memory(&self) -> Option<f64> {
        self.0.info("memory", "used_memory")?.parse().ok()
    }

    fn received(&self) -> Option<f64> {
        self.0.info("stats", "total_net_input_bytes")?.parse().ok()
    }

    fn clear(&self) {
        self.0.ask(&["flushall"]);
    }
}

/// Servers without persistence are not used for so long after their start, so it is short here.
const REDLOCK_MAX_TTL: std::time::Duration = std::time::Duration::from_secs(21);

struct Redlock(Vec<Server>);

impl Redlock {
    fn start() -> Self {
        let servers = (0..5).map(|_| Server::start()).collect();
        std::thread::sleep(REDLOCK_MAX_TTL + std::time::Duration::from_secs(1));
        Self(servers)
    }
}

impl Field for Redlock {
    fn url(&self) -> String {
        format!("redlock://{}?max_ttl={}s", self.address(), REDLOCK_MAX_TTL.as_secs())
    }

    fn address(&self) -> String {
        let hosts: Vec<String> =
            self.0.iter().map(|one| format!("127.0.0.1:{}", one.port())).collect();
        hosts.join(",")
    }

    fn version(&self) -> String {
        let version = self.0[0].info("server", "redis_version").unwrap_or_default();
        format!("five redis-server {version} without persistence")
    }

    fn count_requests(&self) -> Option<Box<dyn FnOnce() -> f64 + '_>> {
        let counts: Vec<_> = self.0.iter().map(Server::count_commands).collect();
        Some(Box::new(move || counts.into_iter().map(|count| count.finish() as f64).sum()))
    }

    fn freeze_one(&self, frozen: bool) -> bool {
        self.0[4].signal(if frozen { Signal::STOP } else { Signal::CONT });
        true
    }
}

struct Etcd(EtcdServers);

impl Field for Etcd {
    fn url(&self) -> String {
        self.0.url("ours")
    }

    fn address(&self) -> String {
        format!("127.0.0.1:{}", self.0.port(0))
    }

    fn version(&self) -> String {
        format!("one {}", first_line("etcd", "--version"))
    }

    fn count_requests(&self) -> Option<Box<dyn FnOnce() -> f64 + '_>> {
        let before = self.0.metrics("grpc_server_msg_received_total");
        Some(Box::new(move || self.0.metrics("grpc_server_msg_received_total") - before))
    }

    fn received(&self) -> Option<f64> {
        Some(self.0.metric("etcd_network_client_grpc_received_bytes_total") as f64)
    }
}

struct ZooKeeper(ZooKeeperServers);

impl Field for ZooKeeper {
    fn url(&self) -> String {
        self.0.url("ours")
    }

    fn address(&self) -> String {
        self.0.hosts()
    }

    fn version(&self) -> String {
        let answer = self.0.nodes()[0].ask("srvr").unwrap_or_default();
        let line = answer.lines().next().unwrap_or_default();
        let version = line.trim_start_matches("Zookeeper version: ").split('-').next();
        format!("one ZooKeeper {}", version.unwrap_or_default())
    }

    fn count_requests(&self) -> Option<Box<dyn FnOnce() -> f64 + '_>> {
        let received = || self.0.nodes()[0].figure("packets_received") as f64;
        let before = received();
        Some(Box::new(move || received() - before))
    }
}

fn first_line(program: &str, arg: &str) -> String {
    let output = std::process::Command::new(program).arg(arg).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    text.unwrap_or_default().lines().next().unwrap_or_default().to_owned()
}
