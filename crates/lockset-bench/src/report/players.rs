//! Who takes part: Lockset, a floor, and the peers, each through a driver.
//!
//! A new peer needs a line in [`PEERS`], its name in the engines of `engines.rs`, and a branch in
//! the driver of its language.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::child::{Child, Silence};
use crate::peers::target_folder;

/// Where the driver of a peer comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Home {
    /// This program.
    BuiltIn,
    Rust,
    Python,
    Node,
    Go,
    Java,
}

/// A peer, where its driver is, and whether it renews what it holds.
pub(crate) struct Peer {
    pub(crate) name: &'static str,
    home: Home,
    renews: bool,
}

const fn peer(name: &'static str, home: Home, renews: bool) -> Peer {
    Peer { name, home, renews }
}

pub(crate) const PEERS: &[Peer] = &[
    peer("rslock", Home::BuiltIn, false),
    peer("zookeeper-client", Home::BuiltIn, true),
    peer("distkit", Home::Rust, true),
    peer("async-redis-lock", Home::Rust, true),
    peer("etcd-client", Home::Rust, true),
    peer("redis-py", Home::Python, false),
    peer("python-redis-lock", Home::Python, false),
    peer("kazoo", Home::Python, true),
    peer("redlock", Home::Node, false),
    peer("redis-semaphore", Home::Node, true),
    peer("redsync", Home::Go, false),
    peer("redislock", Home::Go, false),
    peer("rueidislock", Home::Go, true),
    peer("etcd-concurrency", Home::Go, true),
    peer("redisson", Home::Java, true),
    peer("curator", Home::Java, true),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Ours,
    Floor,
    Peer,
}

/// How Lockset is called in tables.
pub(crate) const OURS: &str = "Lockset";

#[derive(Clone, Debug)]
pub(crate) struct Player {
    pub(crate) name: String,
    pub(crate) role: Role,
    program: PathBuf,
    args: Vec<String>,
    address: String,
    /// Whether a lock outlives its ttl while its holder lives.
    pub(crate) renews: bool,
}

impl Player {
    pub(crate) fn ours(url: String) -> Self {
        Self::built_in(OURS, Role::Ours, "lockset", url)
    }

    pub(crate) fn floor(title: &str, driver: &str, address: String) -> Self {
        Self::built_in(&format!("floor: {title}"), Role::Floor, driver, address)
    }

    fn built_in(name: &str, role: Role, driver: &str, address: String) -> Self {
        let args = vec!["driver".to_owned(), driver.to_owned()];
        let program = std::env::current_exe().unwrap();
        Self { name: name.to_owned(), role, program, args, address, renews: true }
    }

    /// `None` if it is not installed.
    pub(crate) fn peer(peer: &Peer, address: String) -> Option<Self> {
        let (program, mut args) = peer.home.driver()?;
        args.push(peer.name.to_owned());
        let (name, role, renews) = (peer.name.to_owned(), Role::Peer, peer.renews);
        Some(Self { name, role, program, args, address, renews })
    }

    /// Starts a process of it.
    pub(crate) fn start(&self, ttl_ms: u64) -> Result<Child, Silence> {
        let mut command = Command::new(&self.program);
        command.args(&self.args).arg(&self.address).arg(ttl_ms.to_string());
        Child::try_start(&mut command)
    }
}

impl Home {
    /// The program and its first arguments, if they are there.
    fn driver(self) -> Option<(PathBuf, Vec<String>)> {
        let (peers, target) = (target_folder().join("peers"), target_folder());
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers");
        let text = |path: PathBuf| path.display().to_string();
        let (program, args, needed) = match self {
            Self::BuiltIn => {
                let exe = std::env::current_exe().unwrap();
                (exe.clone(), vec!["driver".to_owned()], exe)
            }
            Self::Rust => {
                let program = peers.join("rust/release/lockset-bench-peers");
                (program.clone(), Vec::new(), program)
            }
            Self::Python => {
                let python = target.join("venv/bin/python");
                (python.clone(), vec![text(source.join("python/driver.py"))], python)
            }
            Self::Node => {
                let script = peers.join("node/driver.js");
                ("node".into(), vec![text(script.clone())], script)
            }
            Self::Go => {
                let program = peers.join("go/driver");
                (program.clone(), Vec::new(), program)
            }
            Self::Java => {
                let classes = peers.join("java/classes");
                let path = format!("{}:{}/*", classes.display(), peers.join("java/lib").display());
                let args = vec!["-cp".to_owned(), path, "Driver".to_owned()];
                ("java".into(), args, classes.join("Driver.class"))
            }
        };
        needed.is_file().then_some((program, args))
    }
}
