//! Starts one ZooKeeper server or an ensemble of three, and its stage.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use rustix::process::{Pid, Signal};

use super::port::free_port;
use crate::python::PythonPeer;
use crate::signals;
use crate::steps::until;

mod chroot;
mod snapshot;
mod stages;

pub use chroot::Chroot;
pub use stages::{ZooKeeperEnsembleStage, ZooKeeperStage};

/// ZooKeeper's tick: sessions expire in steps of it.
const TICK: Duration = Duration::from_millis(100);
/// The minimum and maximum session timeout that a server grants.
pub const SESSIONS: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(60));
/// Where Debian puts the server; its manifest names the libraries it needs.
const JAR: &str = "/usr/share/java/zookeeper.jar";
/// The server, and the libraries for TLS that its manifest omits.
const CLASS_PATH: &str = "/usr/share/java/zookeeper.jar:/usr/share/java/netty-codec.jar:\
                          /usr/share/java/netty-resolver.jar";
/// Options for a quick start, a small footprint and few disk writes.
const JAVA: [&str; 11] = [
    "-Xmx128m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:-UsePerfData",
    "-Xshare:auto",
    "-Dzookeeper.forceSync=no",
    "-Dfsync.warningthresholdms=60000",
    "-Dzookeeper.preAllocSize=1024",
    "-Dznode.container.checkIntervalMs=300",
    "-Dznode.container.maxPerMinute=60000",
    "-Dzookeeper.jmx.log4j.disable=true",
];
/// Runs a server until its standard input is closed, so that it also ends with a test that was
/// killed, or that keeps it in a static until its own end.
const RUN_UNTIL_STDIN_CLOSES: &str = r#""$@" </dev/null & echo $!; read _; kill -9 $!; wait $!"#;

/// ZooKeeper servers on free ports that know each other, killed when dropped.
#[derive(Debug)]
pub struct ZooKeeperServers {
    nodes: Vec<ZooKeeperNode>,
    /// The TLS port of the only server, if it has one.
    secure_port: Option<u16>,
}

impl ZooKeeperServers {
    /// Starts `number` servers (1 or 3), and waits until they serve.
    pub fn start(number: usize) -> Self {
        Self::start_with(number, &[])
    }

    /// Starts servers with more options for their Java machines.
    pub fn start_with(number: usize, java: &[&str]) -> Self {
        Self::start_configured(number, java, &[])
    }

    /// Starts servers with more options for their Java machines, and more lines in their
    /// configurations.
    pub fn start_configured(number: usize, java: &[&str], lines: &[&str]) -> Self {
        let ports: Vec<[u16; 3]> = (0..number).map(|_| [(); 3].map(|()| free_port())).collect();
        let peers = ports.iter().enumerate().map(|(index, [_, peer, election])| {
            format!("server.{}=127.0.0.1:{peer}:{election}", index + 1)
        });
        let mut peers: Vec<String> = if number > 1 { peers.collect() } else { Vec::new() };
        // The last line about a setting counts.
        peers.extend(lines.iter().map(|&line| line.to_owned()));
        let start = |(index, &[port, ..]): (usize, &[u16; 3])| {
            ZooKeeperNode::start(index + 1, port, &peers, java)
        };
        let nodes = ports.iter().enumerate().map(start).collect();
        let servers = Self { nodes, secure_port: None };
        servers.await_serving();
        servers
    }

    /// Starts one server that also speaks TLS, with these lines about certificates in its
    /// configuration.
    pub fn start_tls(lines: &[String]) -> Self {
        let port = free_port();
        let factory = "org.apache.zookeeper.server.NettyServerCnxnFactory";
        let tls = [
            format!("secureClientPort={port}"),
            "secureClientPortAddress=127.0.0.1".to_owned(),
            format!("serverCnxnFactory={factory}"),
        ];
        let node = ZooKeeperNode::start(1, free_port(), &[&tls, lines].concat(), &[]);
        let servers = Self { nodes: vec![node], secure_port: Some(port) };
        servers.await_serving();
        servers
    }

    /// `zks://…` of the server that speaks TLS, and this chroot.
    pub fn tls_url(&self, chroot: &str) -> String {
        let port = self.secure_port.expect("a server that speaks TLS");
        format!("zks://127.0.0.1:{port}/{chroot}")
    }

    /// The servers.
    pub fn nodes(&self) -> &[ZooKeeperNode] {
        &self.nodes
    }

    /// `zk://…` of all servers and this chroot.
    pub fn url(&self, chroot: &str) -> String {
        format!("zk://{}/{}", self.hosts(), chroot.trim_start_matches('/'))
    }

    /// The hosts and ports of all servers, in the form of ZooKeeper's own clients.
    pub fn hosts(&self) -> String {
        self.nodes.iter().map(ZooKeeperNode::host).collect::<Vec<_>>().join(",")
    }

    /// Which server leads; a single server does.
    pub fn leader(&self) -> usize {
        self.leads().expect("a server leads")
    }

    fn leads(&self) -> Option<usize> {
        self.nodes.iter().position(|node| node.role().is_some_and(|role| role != "follower"))
    }

    /// A server that does not lead.
    pub fn follower(&self) -> usize {
        (self.leader() + 1) % self.nodes.len()
    }

    /// Whether all servers serve.
    pub fn are_serving(&self) -> bool {
        self.nodes.iter().all(|node| node.role().is_some()) && self.leads().is_some()
    }

    /// The server to which this session is connected.
    pub fn server_of(&self, session: i64) -> Option<usize> {
        let mark = format!("sid=0x{session:x},");
        let has = |node: &ZooKeeperNode| node.ask("cons").is_some_and(|all| all.contains(&mark));
        self.nodes.iter().position(has)
    }

    /// Waits until all servers serve.
    pub fn await_serving(&self) {
        until("the ZooKeeper servers serve", || {
            self.nodes.iter().for_each(ZooKeeperNode::expect_alive);
            self.are_serving()
        });
    }

    /// Waits until a server other than `old` leads.
    pub fn await_another_leader(&self, old: usize) {
        until("another leads", || self.leads().is_some_and(|leader| leader != old));
    }

    /// Stops all servers.
    pub fn freeze(&self) {
        self.nodes.iter().for_each(ZooKeeperNode::freeze);
    }

    /// Resumes all servers.
    pub fn thaw(&self) {
        self.nodes.iter().for_each(ZooKeeperNode::thaw);
    }

    /// Kills the leader, waits until another server leads, and restarts it on its data. A single
    /// server is killed and restarted.
    pub fn restart_leader(&self) {
        let leader = self.leader();
        self.nodes[leader].kill();
        if self.nodes.len() > 1 {
            self.await_another_leader(leader);
        }
        self.nodes[leader].start_again();
        self.await_serving();
    }

    /// A kazoo client, to inspect and change nodes independently of lockset.
    pub fn kazoo(&self) -> KazooClient {
        KazooClient::on(&self.hosts())
    }
}

/// One server. Killed when dropped.
#[derive(Debug)]
pub struct ZooKeeperNode {
    folder: tempfile::TempDir,
    port: u16,
    java: Vec<String>,
    running: Mutex<Option<Running>>,
}

impl ZooKeeperNode {
    fn start(id: usize, port: u16, more: &[String], java: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (shortest, longest) = SESSIONS;
        let mut lines = vec![
            format!("tickTime={}", TICK.as_millis()),
            format!("minSessionTimeout={}", shortest.as_millis()),
            format!("maxSessionTimeout={}", longest.as_millis()),
            // With these limits a thaw after some seconds causes no election.
            "initLimit=100".to_owned(),
            "syncLimit=40".to_owned(),
            format!("dataDir={}", folder.path().display()),
            format!("clientPort={port}"),
            "clientPortAddress=127.0.0.1".to_owned(),
            "maxClientCnxns=0".to_owned(),
            "admin.enableServer=false".to_owned(),
            "4lw.commands.whitelist=*".to_owned(),
        ];
        lines.extend_from_slice(more);
        std::fs::write(folder.path().join("zoo.cfg"), lines.join("\n")).unwrap();
        std::fs::write(folder.path().join("myid"), id.to_string()).unwrap();
        let java: Vec<String> = java.iter().map(|&option| option.to_owned()).collect();
        let running = Mutex::new(Some(Running::start(folder.path(), &java)));
        Self { folder, port, java, running }
    }

    /// Its host and port.
    pub fn host(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// The port of this server.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// `leader`, `follower` or `standalone`; nothing while it does not serve.
    pub fn role(&self) -> Option<String> {
        let answer = self.ask("srvr")?;
        answer.lines().find_map(|line| line.strip_prefix("Mode: ")).map(str::to_owned)
    }

    /// The reply to one of ZooKeeper's four-letter commands.
    pub fn ask(&self, word: &str) -> Option<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
        stream.write_all(word.as_bytes()).ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        Some(answer)
    }

    /// A metric of `mntr`.
    pub fn figure(&self, name: &str) -> u64 {
        let answer = self.ask("mntr").expect("the server answers");
        let mut lines = answer.lines().filter_map(|line| line.split_once('\t'));
        let found = lines.find(|(key, _)| key.strip_prefix("zk_") == Some(name));
        let (_, value) = found.unwrap_or_else(|| panic!("no figure {name} in {answer}"));
        value.parse::<f64>().unwrap() as u64
    }

    /// The number of the last transaction.
    pub fn last_transaction(&self) -> u64 {
        let answer = self.ask("srvr").expect("the server answers");
        let found = answer.lines().find_map(|line| line.strip_prefix("Zxid: 0x"));
        u64::from_str_radix(found.expect("srvr tells the zxid"), 16).unwrap()
    }

    /// Sets the counter of children of this node. The server must be the only one; it is restarted
    /// for it.
    pub fn count_children_from(&self, path: &str, count: i32) {
        // A server writes a snapshot of all data when it starts.
        self.start_again();
        until("the server serves", || self.role().is_some());
        self.kill();
        snapshot::count_children_from(&self.folder.path().join("version-2"), path, count);
        self.start_again();
        until("the server serves", || self.role().is_some());
    }

    /// Stops it.
    pub fn freeze(&self) {
        self.signal(Signal::STOP);
    }

    /// Resumes it.
    pub fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        if let Some(running) = &*self.running.lock().unwrap() {
            signals::send(running.server, signal);
        }
    }

    /// Panics if the process has ended, because then it will never serve.
    fn expect_alive(&self) {
        if let Some(running) = &*self.running.lock().unwrap() {
            let said = std::fs::read_to_string(self.folder.path().join("stderr"));
            assert!(!running.has_ended(), "port {}: the server ended: {said:?}", self.port);
        }
    }

    /// Kills it.
    pub fn kill(&self) {
        *self.running.lock().unwrap() = None;
    }

    /// Restarts it on its data, without waiting until it serves.
    pub fn start_again(&self) {
        // Two servers must not share a folder.
        self.kill();
        *self.running.lock().unwrap() = Some(Running::start(self.folder.path(), &self.java));
    }
}

/// The process of a server, killed when dropped.
#[derive(Debug)]
struct Running {
    shell: Child,
    server: Pid,
}

impl Running {
    fn start(folder: &Path, java: &[String]) -> Self {
        assert!(Path::new(JAR).is_file(), "ZooKeeper is needed: run `cargo xtask setup`");
        let mut shell = Command::new("sh")
            .args(["-c", RUN_UNTIL_STDIN_CLOSES, "sh", "java"])
            .args(JAVA)
            .args(java)
            .args([
                "-cp",
                CLASS_PATH,
                "org.apache.zookeeper.server.quorum.QuorumPeerMain",
                "zoo.cfg",
            ])
            .current_dir(folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(std::fs::File::create(folder.join("stderr")).unwrap())
            .spawn()
            .unwrap();
        let mut pid = String::new();
        BufReader::new(shell.stdout.take().unwrap()).read_line(&mut pid).unwrap();
        let server = Pid::from_raw(pid.trim().parse().unwrap()).unwrap();
        Self { shell, server }
    }
}

impl Running {
    /// The shell has not waited for it yet, so an ended server is a zombie.
    fn has_ended(&self) -> bool {
        let file = format!("/proc/{}/stat", self.server.as_raw_pid());
        std::fs::read_to_string(file).map_or(true, |stat| stat.contains(") Z "))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.shell.stdin.take());
        // The shell kills the server and waits for it.
        let _ = self.shell.wait();
    }
}

/// A kazoo client: it shows what is on the servers without sharing code with lockset.
#[derive(Debug)]
pub struct KazooClient(PythonPeer);

impl KazooClient {
    /// A client of these servers.
    pub fn on(hosts: &str) -> Self {
        Self::start(&[hosts])
    }

    /// A client with this user and password.
    pub fn with_login(hosts: &str, login: &str) -> Self {
        Self::start(&[hosts, login])
    }

    fn start(args: &[&str]) -> Self {
        let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/peers/zookeeper.py");
        Self(PythonPeer::start(&program, args))
    }

    /// The names of the children, sorted; `None` if there is no such node.
    pub fn children(&mut self, path: &str) -> Option<Vec<String>> {
        self.answer(&["children", path])
    }

    /// The metadata of the node; `None` if there is none.
    pub fn stat(&mut self, path: &str) -> Option<Stat> {
        self.answer(&["stat", path])
    }

    /// The data of the node; `None` if there is none.
    pub fn data(&mut self, path: &str) -> Option<String> {
        self.answer(&["data", path])
    }

    /// Sets the data of the node.
    pub fn set(&mut self, path: &str, data: &str) {
        self.answer::<()>(&["set", path, data]);
    }

    /// Creates a node and its missing parents, and returns its path. The kind is `persistent`,
    /// `ephemeral`, `sequential` (and ephemeral) or, with parents, `container`.
    pub fn create(&mut self, path: &str, kind: &str) -> String {
        self.answer(&["create", path, kind]).expect("a path")
    }

    /// Deletes a node and its descendants, and returns whether it existed.
    pub fn delete(&mut self, path: &str) -> bool {
        self.answer(&["delete", path]).expect("yes or no")
    }

    /// Ends the session of another client, like an operator who can compute session passwords.
    pub fn end_session(&mut self, session: i64) {
        self.answer::<()>(&["end_session", &session.to_string()]);
    }

    /// Any other command of `zookeeper.py`.
    pub fn ask(&mut self, words: &[&str]) -> String {
        self.0.ask(&serde_json::to_string(words).unwrap())
    }

    /// Sends a command without waiting for the reply.
    pub fn send(&mut self, words: &[&str]) {
        self.0.send(&serde_json::to_string(words).unwrap());
    }

    /// The next reply.
    pub fn receive(&mut self) -> String {
        self.0.receive()
    }

    fn answer<T: serde::de::DeserializeOwned>(&mut self, words: &[&str]) -> Option<T> {
        let answer = self.ask(words);
        serde_json::from_str(&answer).unwrap_or_else(|error| panic!("{words:?}: {answer}: {error}"))
    }
}

/// The metadata of a node.
#[derive(Clone, Debug, serde::Deserialize, PartialEq, Eq)]
pub struct Stat {
    /// The transaction that created it.
    pub czxid: u64,
    /// The session that owns it; 0 if it is not ephemeral.
    pub owner: i64,
    /// How often its data was written.
    pub version: i32,
    /// How often its children changed.
    pub cversion: i32,
    /// How many children it has.
    pub children: u32,
}
