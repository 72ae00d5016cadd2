//! A home of its own for every test, and eyes for processes.
#![allow(unsafe_code)]

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use lockset_testkit::stage::{EtcdServers, RedisServer};
use rusqlite::Connection;
use rustix::process::{Pid, Signal};
use serde_json::Value;
use tempfile::TempDir;

/// Nothing takes this long unless it hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// A command that notes TERM and goes on.
pub(crate) const STUBBORN: &str =
    "trap 'echo TERM >>log' TERM; echo $$ >pid; while :; do sleep 0.01; done";

/// A command with a child in another session, whose own parent is gone: it left the group and
/// forked twice.
pub(crate) const TREE: &str = "echo $$ >command; \
    setsid sh -c '(sleep 1000 & echo $! >runaway); :' & wait; echo ready >ready; sleep 1000";

/// Where locks live, and a folder to work in; both are gone in the end.
pub(crate) struct Home {
    dir: TempDir,
    servers: Option<Box<dyn Servers>>,
}

/// Servers on which the locks live.
pub(crate) trait Servers {
    fn url(&self) -> String;

    /// The engine, as it calls itself.
    fn engine(&self) -> &'static str;

    /// The shortest ttl there is.
    fn short_ttl(&self) -> &'static str;

    /// For how long after a renewal a lock of this ttl is trusted.
    fn trust(&self, ttl: Duration) -> Duration {
        ttl
    }

    /// No server replies any more.
    fn freeze(&self);

    /// All servers reply again.
    fn thaw(&self);
}

impl Servers for EtcdServers {
    fn url(&self) -> String {
        EtcdServers::url(self, "cli")
    }

    fn engine(&self) -> &'static str {
        "etcd"
    }

    fn short_ttl(&self) -> &'static str {
        "2s"
    }

    fn freeze(&self) {
        EtcdServers::freeze(self);
    }

    fn thaw(&self) {
        EtcdServers::thaw(self);
    }
}

impl Servers for RedisServer {
    fn url(&self) -> String {
        RedisServer::url(self)
    }

    fn engine(&self) -> &'static str {
        "redis"
    }

    fn short_ttl(&self) -> &'static str {
        "500ms"
    }

    fn freeze(&self) {
        self.signal(Signal::STOP);
    }

    fn thaw(&self) {
        self.signal(Signal::CONT);
    }
}

impl Home {
    /// Locks that live in a file of the folder.
    pub(crate) fn new() -> Self {
        Self { dir: TempDir::new().unwrap(), servers: None }
    }

    /// Locks that live on servers.
    pub(crate) fn on(servers: impl Servers + 'static) -> Self {
        Self { dir: TempDir::new().unwrap(), servers: Some(Box::new(servers)) }
    }

    pub(crate) fn engine(&self) -> &'static str {
        self.servers.as_ref().map_or("local", |servers| servers.engine())
    }

    pub(crate) fn short_ttl(&self) -> &'static str {
        self.servers.as_ref().map_or("500ms", |servers| servers.short_ttl())
    }

    pub(crate) fn trust(&self, ttl: Duration) -> Duration {
        self.servers.as_ref().map_or(ttl, |servers| servers.trust(ttl))
    }

    /// Makes every renewal impossible for as long as it lives, as an engine that hangs does.
    pub(crate) fn block(&self) -> Block<'_> {
        let Some(servers) = &self.servers else {
            let connection = Connection::open(self.path("locks.db")).unwrap();
            connection.busy_timeout(Duration::from_secs(10)).unwrap();
            connection.execute_batch("BEGIN IMMEDIATE").unwrap();
            return Block::File { _open: connection };
        };
        servers.freeze();
        Block::Frozen(&**servers)
    }

    pub(crate) fn path(&self, file: &str) -> PathBuf {
        self.dir.path().join(file)
    }

    pub(crate) fn url(&self) -> String {
        match &self.servers {
            None => format!("local:{}", self.path("locks.db").display()),
            Some(servers) => servers.url(),
        }
    }

    /// `lockset ARGS` on this home, in its folder, with nothing to read.
    pub(crate) fn lockset(&self, args: &[&str]) -> Command {
        let mut command = Command::new(BINARY);
        command.args(args);
        self.detached(command)
    }

    /// A shell script in which `lockset` is the binary under test.
    pub(crate) fn shell(&self, script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        self.detached(command)
    }

    /// The command on this home, in a session of its own: the terminal in which the tests run
    /// is not to be played with.
    pub(crate) fn detached(&self, mut command: Command) -> Command {
        self.settle(&mut command);
        // SAFETY: only async-signal-safe calls.
        unsafe {
            command.pre_exec(|| {
                rustix::process::setsid()?;
                forget_ignored_signals();
                Ok(())
            });
        }
        command.stdin(Stdio::null());
        command
    }

    pub(crate) fn settle(&self, command: &mut Command) {
        let folder = Path::new(BINARY).parent().unwrap();
        let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap());
        command.current_dir(self.dir.path()).env("PATH", path).env("LOCKSET_URL", self.url());
        command.env_remove("LOCKSET_PASSWORD").env_remove("LOCKSET_PASSWORD_FILE");
    }

    /// The lock as `lockset show --json` tells it.
    pub(crate) fn state(&self, name: &str) -> Value {
        let output = self.lockset(&["show", name, "--json"]).output().unwrap();
        let state: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        let is_held = state["holders"].as_array().is_some_and(|holders| !holders.is_empty());
        assert_eq!(output.status.success(), is_held, "{}", stderr(&output));
        state
    }

    pub(crate) fn waiters(&self, name: &str) -> usize {
        self.state(name)["waiters"].as_array().unwrap().len()
    }

    pub(crate) fn holders(&self, name: &str) -> usize {
        self.state(name)["holders"].as_array().unwrap().len()
    }

    /// A client that holds `name` until dropped.
    pub(crate) fn hold(&self, name: &str) -> Running {
        self.hold_with(&[name])
    }

    pub(crate) fn hold_with(&self, args: &[&str]) -> Running {
        let ready = self.path(&format!("ready-{}", args.join("-").replace('/', "_")));
        let script = format!("echo yes >'{}'; exec sleep 1000", ready.display());
        let args = [&["run"], args, &["--", "sh", "-c", &script]].concat();
        let running = Running::spawn(&mut self.lockset(&args));
        until("the holder holds", || read(&ready).is_some());
        running
    }

    /// The number a script wrote into a file of this folder.
    pub(crate) fn pid(&self, file: &str) -> Pid {
        let path = self.path(file);
        until(&format!("{file} is written"), || read(&path).is_some());
        Pid::from_raw(read(&path).unwrap().trim().parse().unwrap()).unwrap()
    }

    pub(crate) fn text(&self, file: &str) -> String {
        fs::read_to_string(self.path(file)).unwrap_or_default()
    }
}

/// An engine that does not answer while this lives.
pub(crate) enum Block<'a> {
    File { _open: Connection },
    Frozen(&'a dyn Servers),
}

impl Drop for Block<'_> {
    fn drop(&mut self) {
        if let Block::Frozen(servers) = self {
            servers.thaw();
        }
    }
}

pub(crate) const BINARY: &str = env!("CARGO_BIN_EXE_lockset");

/// A process that is killed when the test is over, whatever the outcome.
pub(crate) struct Running {
    child: Option<Child>,
}

impl Running {
    pub(crate) fn spawn(command: &mut Command) -> Self {
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        Self { child: Some(child) }
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(self.child.as_ref().unwrap())
    }

    pub(crate) fn signal(&self, signal: Signal) {
        lockset_testkit::signals::send(self.pid(), signal);
    }

    /// Its guardian.
    pub(crate) fn guardian(&self) -> Pid {
        let parent = self.pid();
        let mut found = None;
        until("the guardian is there", || {
            found = processes().into_iter().find(|process| {
                process.parent == parent.as_raw_pid() && process.name == "lock-guardian"
            });
            found.is_some()
        });
        Pid::from_raw(found.unwrap().pid).unwrap()
    }

    pub(crate) fn wait(mut self) -> Output {
        let child = self.child.take().unwrap();
        let (sender, receiver) = std::sync::mpsc::channel();
        let pid = Pid::from_child(&child);
        std::thread::spawn(move || sender.send(child.wait_with_output()));
        match receiver.recv_timeout(PATIENCE) {
            Ok(output) => output.unwrap(),
            Err(_) => {
                let _ = rustix::process::kill_process(pid, Signal::KILL);
                panic!("it did not end");
            }
        }
    }

    pub(crate) fn take_stdout(&mut self) -> std::process::ChildStdout {
        self.child.as_mut().unwrap().stdout.take().unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Waits for a state of the world.
pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < PATIENCE, "in vain awaited: {what}");
        std::thread::sleep(Duration::from_millis(3));
    }
}

/// A file's text, once a whole line is in it.
pub(crate) fn read(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok().filter(|text| text.ends_with('\n'))
}

pub(crate) struct Process {
    pub(crate) pid: i32,
    pub(crate) parent: i32,
    pub(crate) name: String,
    pub(crate) state: char,
}

pub(crate) fn processes() -> Vec<Process> {
    let entries = fs::read_dir("/proc").unwrap();
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter_map(process).collect()
}

fn process(pid: i32) -> Option<Process> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (before, after) = stat.rsplit_once(") ")?;
    let mut fields = after.split(' ');
    Some(Process {
        pid,
        name: before.split_once('(')?.1.to_owned(),
        state: fields.next()?.chars().next()?,
        parent: fields.next()?.parse().ok()?,
    })
}

/// Whether this process exists and is not merely unburied.
pub(crate) fn is_alive(pid: Pid) -> bool {
    process(pid.as_raw_pid()).is_some_and(|process| !matches!(process.state, 'Z' | 'X'))
}

/// Whether all threads of this process are stopped; its parent is not told before.
pub(crate) fn is_stopped(pid: Pid) -> bool {
    let Ok(threads) = fs::read_dir(format!("/proc/{}/task", pid.as_raw_pid())) else {
        return false;
    };
    let ids = threads.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let mut states = ids.map(|id| process(id).map(|thread| thread.state)).peekable();
    states.peek().is_some() && states.all(|state| state == Some('T'))
}

pub(crate) fn parent(pid: Pid) -> Pid {
    Pid::from_raw(process(pid.as_raw_pid()).unwrap().parent).unwrap()
}

pub(crate) fn code(output: &Output) -> i32 {
    output.status.code().unwrap_or_else(|| panic!("ended by a signal: {output:?}"))
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Between fork and exec: the parent of the tests (a shell in the background, `nohup`) may have
/// had signals ignored, and they are to be obeyed here.
pub(crate) fn forget_ignored_signals() {
    for signal in 1..=31 {
        // SAFETY: async-signal-safe; KILL and STOP answer with an error, which changes nothing.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
}
