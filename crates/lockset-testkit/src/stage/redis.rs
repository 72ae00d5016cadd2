//! Starts a Redis server, and the stage on a single server.

use std::io::Write;
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use lockset::Lockset;
use lockset::clock::Clock;
use lockset::engine::Engine;
use lockset::engine::redis::{Redis, RedisOptions};
use rustix::process::{Pid, Signal};

use super::port::free_port;
use super::{Access, ClockSkew, LinkedClient, Stage, Time};
use crate::process::{Process, StateSource};
use crate::proxy::Proxy;
use crate::signals;
use crate::steps::until;

/// A `redis-server` without persistence on a free port, killed when dropped.
#[derive(Debug)]
pub struct RedisServer {
    folder: tempfile::TempDir,
    port: u16,
    args: Vec<String>,
    environment: Vec<(String, String)>,
    access: Access,
    child: Mutex<Child>,
}

impl RedisServer {
    /// Starts a server and waits until it responds.
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// Starts a server with more options.
    pub fn start_with(options: &[&str]) -> Self {
        Self::start_on(free_port(), options)
    }

    /// Starts a server that accepts only TLS. [`ask`](Self::ask) does not work on it.
    pub fn start_tls(options: &[&str]) -> Self {
        let port = free_port();
        let tls = ["--port", "0", "--tls-port", &port.to_string()].map(str::to_owned);
        let options = tls.iter().map(String::as_str).chain(options.iter().copied());
        Self::start_on(port, &options.collect::<Vec<_>>())
    }

    /// Starts a server with authentication, which [`ask`](Self::ask) uses as well.
    pub fn start_with_access(access: &Access, options: &[&str]) -> Self {
        let port = free_port();
        let guards = access.options(port);
        let options = guards.iter().map(String::as_str).chain(options.iter().copied());
        let args = usual(port, &options.collect::<Vec<_>>());
        Self::run(tempfile::tempdir().unwrap(), port, args, Vec::new(), access)
    }

    /// Starts a server whose clock can be made to jump.
    pub fn start_skewed(skew: &ClockSkew, options: &[&str]) -> Self {
        let (port, folder) = (free_port(), tempfile::tempdir().unwrap());
        Self::run(folder, port, usual(port, options), skew.environment(), &Access::default())
    }

    fn start_on(port: u16, options: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self::run(folder, port, usual(port, options), Vec::new(), &Access::default())
    }

    /// Starts a sentinel with this configuration file.
    pub(super) fn start_sentinel(port: u16, file: &str, access: &Access) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("sentinel.conf"), file).unwrap();
        let args = ["sentinel.conf", "--sentinel"].map(str::to_owned).to_vec();
        Self::run(folder, port, args, Vec::new(), access)
    }

    fn run(
        folder: tempfile::TempDir,
        port: u16,
        args: Vec<String>,
        environment: Vec<(String, String)>,
        access: &Access,
    ) -> Self {
        let child = Mutex::new(spawn(folder.path(), port, &args, &environment));
        Self { folder, port, args, environment, access: access.clone(), child }
    }

    /// The URL of this server.
    pub fn url(&self) -> String {
        format!("{}://127.0.0.1:{}", self.access.scheme(), self.port)
    }

    /// The URL of this server through a proxy.
    pub fn url_through(&self, proxy: &Proxy) -> String {
        format!("redis://127.0.0.1:{}", proxy.port())
    }

    /// The port of this server.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Runs a command with `redis-cli` and returns its output; empty if the server does not
    /// respond.
    pub fn ask(&self, command: &[&str]) -> String {
        self.ask_within(Duration::from_secs(10), command)
    }

    /// The same with a timeout, for a server that may be stopped.
    pub fn ask_within(&self, limit: Duration, command: &[&str]) -> String {
        let output = self
            .redis_cli(limit)
            .args(command)
            .output()
            .expect("timeout is needed: run `cargo xtask setup`");
        // What `timeout` and the shell say when there is no such program.
        assert_ne!(output.status.code(), Some(127), "redis-cli: run `cargo xtask setup`");
        String::from_utf8(output.stdout).unwrap().trim_end().to_owned()
    }

    /// How often it has executed this command.
    pub fn calls(&self, command: &str) -> u64 {
        let stats = self.ask(&["INFO", "commandstats"]);
        let begin = format!("cmdstat_{command}:calls=");
        let line = stats.lines().find_map(|line| line.strip_prefix(&begin));
        line.map_or(0, |line| line.split(',').next().unwrap().parse().unwrap())
    }

    /// How many client connections are subscribed. Connections of sentinels have names and are not
    /// counted.
    pub fn listeners(&self) -> usize {
        let list = self.ask(&["CLIENT", "LIST", "TYPE", "pubsub"]);
        list.lines().filter(|line| line.contains(" name= ")).count()
    }

    /// `redis-cli` itself has no timeout.
    fn redis_cli(&self, limit: Duration) -> Command {
        let mut command = Command::new("timeout");
        command.arg(limit.as_secs_f32().to_string());
        command.args(["redis-cli", "-p", &self.port.to_string()]);
        command.args(self.access.cli());
        command
    }

    /// Whether `replicas` replicas have received a new write. Their own reports are not enough: a
    /// master may forward writes only after the next acknowledgement of a replica.
    pub fn is_replicated_to(&self, replicas: usize) -> bool {
        let mut child = self
            .redis_cli(Duration::from_secs(1))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("timeout is needed: run `cargo xtask setup`");
        // PUBLISH is replicated like a write, and leaves nothing behind.
        let lines = format!("PUBLISH nobody hears\nWAIT {replicas} 100\n");
        child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        let answers = String::from_utf8(output.stdout).unwrap();
        answers.trim_end().lines().next_back() == Some(&replicas.to_string())
    }

    /// Pauses writes, and waits until these replicas have received all earlier ones. If the master
    /// is killed then, no data is lost, so that the test observes only what the client does.
    pub fn settle(&self, replicas: &[&RedisServer]) {
        let offset = |server: &RedisServer, field: &str| {
            let offset = server.info(&["INFO", "replication"], field);
            offset.and_then(|offset| offset.parse::<u64>().ok()).unwrap_or_default()
        };
        assert_eq!(self.ask(&["CLIENT", "PAUSE", "10000", "WRITE"]), "OK");
        until("the replicas have everything", || {
            let written = offset(self, "master_repl_offset");
            replicas.iter().all(|replica| offset(replica, "slave_repl_offset") >= written)
        });
    }

    /// The value of a field of `INFO`, or of a similar reply.
    pub fn info(&self, command: &[&str], field: &str) -> Option<String> {
        let answer = self.ask(command);
        let mut fields = answer.lines().filter_map(|line| line.trim_end().split_once(':'));
        fields.find(|(name, _)| *name == field).map(|(_, value)| value.to_owned())
    }

    /// Sends a signal to the server.
    pub fn signal(&self, signal: Signal) {
        let pid = self.child.lock().unwrap().id();
        signals::send(Pid::from_raw(pid as i32).unwrap(), signal);
    }

    /// Kills the server.
    pub fn kill(&self) {
        let mut child = self.child.lock().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Kills the server and restarts it on its saved data.
    pub fn restart(&self) {
        self.restart_with(&[]);
    }

    /// Kills the server, removes its data and restarts it.
    pub fn restart_empty(&self) {
        self.kill();
        for entry in std::fs::read_dir(self.folder.path()).unwrap() {
            let path = entry.unwrap().path();
            let removed = match path.is_dir() {
                true => std::fs::remove_dir_all(&path),
                false => std::fs::remove_file(&path),
            };
            removed.unwrap();
        }
        self.restart();
    }

    /// Kills the server and restarts it on its saved data with more options.
    pub fn restart_with(&self, options: &[&str]) {
        let mut child = self.child.lock().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let more = options.iter().map(|&option| option.to_owned());
        let args: Vec<String> = self.args.iter().cloned().chain(more).collect();
        *child = spawn(self.folder.path(), self.port, &args, &self.environment);
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        let mut child = self.child.lock().unwrap();
        let _ = child.kill();
        let _ = child.wait();
    }
}

/// The common arguments of all servers, then its own.
fn usual(port: u16, options: &[&str]) -> Vec<String> {
    let port = port.to_string();
    let usual = ["--port", &port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"];
    usual.iter().chain(options).map(|&option| option.to_owned()).collect()
}

fn spawn(folder: &Path, port: u16, args: &[String], environment: &[(String, String)]) -> Child {
    let child = Command::new("redis-server")
        .args(args)
        .envs(environment.iter().map(|(key, value)| (key, value)))
        .current_dir(folder)
        .stdout(Stdio::null())
        .spawn()
        .expect("redis-server is needed: run `cargo xtask setup`");
    let began = Instant::now();
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(began.elapsed() < Duration::from_secs(10), "redis-server does not answer");
        std::thread::sleep(Duration::from_millis(5));
    }
    child
}

/// One server for one law.
#[derive(Debug)]
pub struct RedisStage {
    server: RedisServer,
    actor: &'static str,
}

impl RedisStage {
    /// An empty backend; see [`LocalStage::start`](super::LocalStage::start).
    pub fn start(actor: &'static str) -> Self {
        Self { server: RedisServer::start(), actor }
    }
}

#[async_trait]
impl Stage for RedisStage {
    fn time(&self) -> Time {
        Time::Real
    }

    fn clock(&self) -> Clock {
        Clock::boot()
    }

    fn ttl(&self) -> Duration {
        Duration::from_millis(1200)
    }

    async fn client(&self) -> Lockset {
        Lockset::connect(&self.server.url()).await.unwrap()
    }

    async fn engine(&self) -> Arc<dyn Engine> {
        let options =
            RedisOptions { url: self.server.url().parse().unwrap(), ..RedisOptions::default() };
        Arc::new(Redis::connect(options).await.unwrap())
    }

    async fn other_backend(&self) -> Lockset {
        Lockset::connect(&format!("{}?prefix=elsewhere:", self.server.url())).await.unwrap()
    }

    async fn freeze(&self) {
        self.server.signal(Signal::STOP);
    }

    async fn thaw(&self) {
        self.server.signal(Signal::CONT);
    }

    async fn restart(&self) {
        self.server.restart();
    }

    async fn process(&self) -> Option<Process> {
        Some(Process::start(self.actor, &self.server.url(), StateSource::Guard))
    }

    async fn linked_client(&self) -> Option<LinkedClient> {
        let proxy = Proxy::before(self.server.port());
        let locks = Lockset::connect(&self.server.url_through(&proxy)).await.unwrap();
        Some(LinkedClient { locks, link: Box::new(vec![proxy]) })
    }
}
