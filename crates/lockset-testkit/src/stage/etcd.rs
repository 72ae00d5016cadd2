//! Starts one etcd server or a cluster of three, which can be frozen, killed and queried.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;

use rustix::process::{Pid, Signal};
use serde_json::Value;

use super::port::free_port;
use crate::proxy::Proxy;
use crate::signals;
use crate::steps::until;

/// Short enough for leases of one second and for a new leader within about a second; long enough
/// that a busy machine does not look like a dead leader.
const TIMES: [&str; 4] = ["--heartbeat-interval", "60", "--election-timeout", "600"];

/// One etcd server or several that form a cluster, on free ports, killed when dropped.
#[derive(Debug)]
pub struct EtcdServers {
    nodes: Vec<Node>,
    /// `https` if clients must speak TLS.
    scheme: &'static str,
    /// The options by which `etcdctl` authenticates.
    credentials: Mutex<Vec<String>>,
}

#[derive(Debug)]
struct Node {
    folder: tempfile::TempDir,
    port: u16,
    args: Vec<String>,
    child: Mutex<Child>,
}

impl EtcdServers {
    /// Starts `number` servers and waits until they are healthy.
    pub fn start(number: usize) -> Self {
        Self::start_with(number, &[])
    }

    /// Starts servers with more options.
    pub fn start_with(number: usize, options: &[&str]) -> Self {
        Self::run(number, "http", options, &[])
    }

    /// Starts one server that speaks TLS with clients; `credentials` are the options by which
    /// `etcdctl` authenticates.
    pub fn start_tls(options: &[&str], credentials: &[&str]) -> Self {
        Self::run(1, "https", options, credentials)
    }

    fn run(number: usize, scheme: &'static str, options: &[&str], credentials: &[&str]) -> Self {
        let ports: Vec<(u16, u16)> = (0..number).map(|_| (free_port(), free_port())).collect();
        let peer = |index: usize| format!("http://127.0.0.1:{}", ports[index].1);
        let cluster: Vec<String> =
            (0..number).map(|index| format!("e{index}={}", peer(index))).collect();
        let start = |index: usize| {
            let (name, folder) = (format!("e{index}"), tempfile::tempdir().unwrap());
            let port = ports[index].0;
            let (url, cluster) = (format!("{scheme}://127.0.0.1:{port}"), cluster.join(","));
            let own = ["--name", &name, "--listen-client-urls", &url];
            let known = ["--advertise-client-urls", &url, "--initial-cluster", &cluster];
            let peer = peer(index);
            let peers = ["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer];
            // A kill loses nothing without fsync; only a power failure would.
            let quick = ["--unsafe-no-fsync", "--logger", "zap", "--log-level", "fatal"];
            let args = [&own[..], &known, &peers, &quick, &TIMES, options].concat();
            let args: Vec<String> = args.into_iter().map(str::to_owned).collect();
            let child = Mutex::new(spawn(folder.path(), &args));
            Node { folder, port, args, child }
        };
        let nodes = (0..number).map(start).collect();
        let credentials = credentials.iter().map(|&option| option.to_owned()).collect();
        let servers = Self { nodes, scheme, credentials: Mutex::new(credentials) };
        servers.await_well();
        servers
    }

    /// How many there are.
    pub fn number(&self) -> usize {
        self.nodes.len()
    }

    /// The port of a server.
    pub fn port(&self, node: usize) -> u16 {
        self.nodes[node].port
    }

    /// All hosts and ports, as in a URL.
    pub fn hosts(&self) -> String {
        hosts(self.nodes.iter().map(|node| node.port))
    }

    /// The URL of this prefix on these servers.
    pub fn url(&self, prefix: &str) -> String {
        format!("{}://{}/{prefix}", self.our_scheme(), self.hosts())
    }

    /// A proxy in front of each server.
    pub fn proxies(&self) -> Vec<Proxy> {
        self.nodes.iter().map(|node| Proxy::before(node.port)).collect()
    }

    /// The URL of this prefix through these proxies.
    pub fn url_through(&self, proxies: &[Proxy], prefix: &str) -> String {
        format!("{}://{}/{prefix}", self.our_scheme(), hosts(proxies.iter().map(Proxy::port)))
    }

    fn our_scheme(&self) -> &'static str {
        if self.scheme == "https" { "etcds" } else { "etcd" }
    }

    /// Adds options by which `etcdctl` authenticates, for example a user.
    pub fn log_in(&self, credentials: &[&str]) {
        let mut known = self.credentials.lock().unwrap();
        known.extend(credentials.iter().map(|&option| option.to_owned()));
    }

    /// The output of an `etcdctl` command, which must succeed.
    #[track_caller]
    pub fn ask(&self, command: &[&str]) -> String {
        self.try_ask(command).unwrap_or_else(|why| panic!("etcdctl {command:?}: {why}"))
    }

    /// The output of an `etcdctl` command.
    ///
    /// # Errors
    /// Its error output, if it fails.
    pub fn try_ask(&self, command: &[&str]) -> Result<String, String> {
        let mut etcdctl = self.etcdctl(&self.hosts());
        run(etcdctl.args(["--command-timeout", "10s"]).args(command))
    }

    /// `etcdctl` with the options to reach these servers, but without a command.
    pub fn etcdctl(&self, hosts: &str) -> Command {
        let mut command = Command::new("etcdctl");
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("ETCDCTL_")) {
            command.env_remove(name);
        }
        let endpoints: Vec<String> =
            hosts.split(',').map(|host| format!("{}://{host}", self.scheme)).collect();
        command.env("ETCDCTL_API", "3").args(["--endpoints", &endpoints.join(",")]);
        command.args(&*self.credentials.lock().unwrap());
        command
    }

    /// The keys with this prefix, in their order.
    pub fn keys(&self, prefix: &str) -> Vec<String> {
        let keys = self.ask(&["get", "--prefix", "--keys-only", prefix]);
        keys.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
    }

    /// All leases, in hexadecimal digits.
    pub fn leases(&self) -> Vec<String> {
        let leases = self.ask(&["lease", "list"]);
        leases.lines().skip(1).map(|line| line.trim().to_owned()).collect()
    }

    /// The revision of the store, which counts the writes.
    pub fn revision(&self) -> u64 {
        let status = (0..self.number()).find_map(|node| self.status(node)).unwrap();
        status["header"]["revision"].as_u64().unwrap()
    }

    /// A metric of the first server, by its name in `/metrics`.
    pub fn metric(&self, name: &str) -> u64 {
        let answer = self.all_metrics();
        let value = answer.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.unwrap_or_else(|| panic!("no {name}")).parse::<f64>().unwrap() as u64
    }

    /// The sum of a metric of the first server over all its labels.
    pub fn metrics(&self, name: &str) -> f64 {
        let answer = self.all_metrics();
        let labelled = answer.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix('{'));
        labelled.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum()
    }

    fn all_metrics(&self) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port(0))).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    /// Which server leads, as the responding server with the newest term says.
    pub fn leader(&self) -> usize {
        let mut leader = None;
        until("there is a leader", || {
            leader = self.named_leader();
            leader.is_some()
        });
        leader.unwrap()
    }

    /// Makes this server lead.
    pub fn make_lead(&self, node: usize) {
        if self.leader() != node {
            let status = self.status(node).unwrap();
            let id = status["header"]["member_id"].as_u64().unwrap();
            self.ask(&["move-leader", &format!("{id:x}")]);
            until("it leads", || self.leader() == node);
        }
    }

    fn named_leader(&self) -> Option<usize> {
        let status: Vec<Option<Value>> = (0..self.number()).map(|node| self.status(node)).collect();
        let leads = |status: &Value| status["leader"] == status["header"]["member_id"];
        let leaders = status.iter().enumerate().filter(|(_, one)| one.as_ref().is_some_and(leads));
        // A former leader may not know yet that it no longer leads.
        let term = |status: &Option<Value>| status.as_ref()?["raftTerm"].as_u64();
        leaders.max_by_key(|(_, one)| term(one)).map(|(node, _)| node)
    }

    fn status(&self, node: usize) -> Option<Value> {
        let host = format!("127.0.0.1:{}", self.port(node));
        let status = ["--command-timeout", "1s", "endpoint", "status", "-w", "json"];
        let answer = run(self.etcdctl(&host).args(status)).ok()?;
        serde_json::from_str::<Value>(&answer).ok().map(|all| all[0]["Status"].clone())
    }

    /// Whether this server responds and has a leader.
    pub fn is_well(&self, node: usize) -> bool {
        let host = format!("127.0.0.1:{}", self.port(node));
        let health = ["--command-timeout", "1s", "endpoint", "health"];
        run(self.etcdctl(&host).args(health)).is_ok()
    }

    /// Waits until all servers are healthy.
    pub fn await_well(&self) {
        (0..self.number()).for_each(|node| until("the server is well", || self.is_well(node)));
    }

    /// Sends a signal to a server.
    pub fn signal(&self, node: usize, signal: Signal) {
        let pid = self.nodes[node].child.lock().unwrap().id();
        signals::send(Pid::from_raw(pid as i32).unwrap(), signal);
    }

    /// Stops all servers.
    pub fn freeze(&self) {
        (0..self.number()).for_each(|node| self.signal(node, Signal::STOP));
    }

    /// Resumes all servers.
    pub fn thaw(&self) {
        (0..self.number()).for_each(|node| self.signal(node, Signal::CONT));
    }

    /// Kills a server.
    pub fn kill(&self, node: usize) {
        let mut child = self.nodes[node].child.lock().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Starts a killed server on its data, and waits until it is healthy.
    pub fn bring_back(&self, node: usize) {
        let killed = &self.nodes[node];
        *killed.child.lock().unwrap() = spawn(killed.folder.path(), &killed.args);
        until("the server is well again", || self.is_well(node));
    }

    /// Kills the leader and restarts it on its data. Returns which server it was.
    pub fn restart_leader(&self) -> usize {
        let leader = self.leader();
        self.kill(leader);
        self.bring_back(leader);
        self.await_well();
        leader
    }
}

impl Drop for EtcdServers {
    fn drop(&mut self) {
        for node in &self.nodes {
            let mut child = node.child.lock().unwrap();
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn hosts(ports: impl Iterator<Item = u16>) -> String {
    ports.map(|port| format!("127.0.0.1:{port}")).collect::<Vec<_>>().join(",")
}

fn spawn(folder: &Path, args: &[String]) -> Child {
    Command::new("etcd")
        .args(args)
        .arg("--data-dir")
        .arg(folder.join("data"))
        .current_dir(folder)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("etcd is needed: run `cargo xtask setup`")
}

fn run(etcdctl: &mut Command) -> Result<String, String> {
    let output = etcdctl.output().expect("etcdctl is needed: run `cargo xtask setup`");
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned()),
        false => Err(String::from_utf8_lossy(&output.stderr).trim_end().to_owned()),
    }
}
