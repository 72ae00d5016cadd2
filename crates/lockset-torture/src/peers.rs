//! Locks of other libraries in the same test: small drivers of our own, each in its language.
//!
//! A driver is a client process as ours is: it gets a [`ClientConfig`](crate::client::ClientConfig)
//! as its last argument, uses the registers, writes the same history, and ends when its standard
//! input is closed. What it needs is installed by the package manager of its language, below
//! `target/torture-peers`, and only on request.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;

use crate::backend::EngineKind;
use crate::schedule::Fault;

/// A lock of another library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Peer {
    /// `Lock` of redis-py.
    RedisPy,
    /// `Lock` of kazoo.
    Kazoo,
    /// redsync, over five servers.
    Redsync,
    /// rueidislock, over one server.
    Rueidislock,
    /// `concurrency.Mutex` of etcd's Go client.
    GoEtcd,
}

impl Peer {
    /// All of them.
    pub const ALL: [Peer; 5] =
        [Peer::RedisPy, Peer::Kazoo, Peer::Redsync, Peer::Rueidislock, Peer::GoEtcd];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Peer::RedisPy => "redis-py",
            Peer::Kazoo => "kazoo",
            Peer::Redsync => "redsync",
            Peer::Rueidislock => "rueidislock",
            Peer::GoEtcd => "go-etcd",
        }
    }

    /// The version of the library, as the files of its driver pin it.
    pub fn version(self) -> &'static str {
        match self {
            Peer::RedisPy => "redis-py 8.1.0",
            Peer::Kazoo => "kazoo 2.11.0",
            Peer::Redsync => "redsync 4.18.1",
            Peer::Rueidislock => "rueidislock 1.0.79",
            Peer::GoEtcd => "etcd/client/v3 3.5.17",
        }
    }

    /// The servers that it uses: those of our engine of this kind.
    pub fn engine(self) -> EngineKind {
        match self {
            Peer::RedisPy | Peer::Rueidislock => EngineKind::Redis,
            Peer::Kazoo => EngineKind::ZooKeeper,
            Peer::Redsync => EngineKind::Redlock,
            Peer::GoEtcd => EngineKind::Etcd,
        }
    }

    /// The faults of a comparison: those that a lock is meant to survive, and that all servers of
    /// the comparison can have.
    pub fn faults() -> Vec<Fault> {
        vec![
            Fault::ClientStop,
            Fault::ClientKill,
            Fault::ClientSilent,
            Fault::ServerStop,
            Fault::ServerKill,
            Fault::Delay,
        ]
    }

    /// The command that starts a client; the configuration follows as the last argument.
    pub fn command(self) -> Command {
        let python = |program: &str| {
            let mut command = Command::new(installed().join("venv/bin/python"));
            command.arg(sources().join("python").join(program));
            command
        };
        let go = |lock: &str| {
            let mut command = Command::new(installed().join("go-peers"));
            command.arg(lock);
            command
        };
        match self {
            Peer::RedisPy => python("redis_py.py"),
            Peer::Kazoo => python("kazoo_lock.py"),
            Peer::Redsync => go("redsync"),
            Peer::Rueidislock => go("rueidislock"),
            Peer::GoEtcd => go("etcd"),
        }
    }

    /// Installs what this peer needs, if it is not there yet.
    ///
    /// # Errors
    /// If a package manager fails, with its output.
    pub fn install(self) -> Result<(), String> {
        std::fs::create_dir_all(installed()).map_err(|error| error.to_string())?;
        match self {
            Peer::RedisPy | Peer::Kazoo => install_python(),
            Peer::Redsync | Peer::Rueidislock | Peer::GoEtcd => install_go(),
        }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Peer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|peer| peer.name() == text);
        let known = || Self::ALL.map(Self::name).join(", ");
        found.ok_or_else(|| format!("there is no peer {text}; there are {} and all", known()))
    }
}

fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("peers")
}

fn installed() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/torture-peers")
}

fn install_python() -> Result<(), String> {
    let venv = installed().join("venv");
    if !venv.join("bin/python").is_file() {
        execute(Command::new("python3").args(["-m", "venv"]).arg(&venv))?;
    }
    let packages = sources().join("python/requirements.txt");
    execute(Command::new(venv.join("bin/pip")).args(["install", "-q", "-r"]).arg(packages))
}

fn install_go() -> Result<(), String> {
    let program = installed().join("go-peers");
    if program.is_file() {
        return Ok(());
    }
    let build = ["build", "-o"];
    execute(Command::new("go").args(build).arg(program).arg(".").current_dir(sources().join("go")))
}

fn execute(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    let said = || String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() { Ok(()) } else { Err(format!("{command:?}: {}", said())) }
}
