//! Starts a Redis master with replicas and sentinels, and its stage.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use lockset::Lockset;
use lockset::clock::Clock;
use lockset::engine::Engine;
use lockset::engine::redis::{Redis, RedisOptions};
use rustix::process::Signal;

use super::port::free_port;
use super::redis::RedisServer;
use super::{Access, Stage, Time};
use crate::process::{Process, StateSource};
use crate::steps::until;

/// The name of the service at the sentinels.
const SERVICE: &str = "locks";
/// Makes replicas synchronise quickly: a diskless sync would wait for a second. The file is
/// removed, so that a killed server restarts empty.
const REPLICATION: [&str; 6] = [
    "--repl-diskless-sync",
    "no",
    "--rdb-del-sync-files",
    "yes",
    "--repl-ping-replica-period",
    "1",
];
/// Intervals of the periodic work of a sentinel, in milliseconds, shortened from one or ten
/// seconds. A sentinel that was stopped distrusts its clock for the tilt period.
///
/// Information about a replica is trusted for five pings and refreshed by INFO. A new master is
/// pinged after one period and must not be considered down before; otherwise one failover causes
/// the next.
const SENTINEL_PERIODS: [&str; 10] = [
    "info-period",
    "500",
    "publish-period",
    "300",
    "ask-period",
    "200",
    "ping-period",
    "400",
    "tilt-period",
    "1000",
];
/// After this silence a master is considered down.
const DOWN_AFTER_MS: u32 = 1000;

/// One master, two replicas and three sentinels that know each other; killed when dropped.
#[derive(Debug)]
pub struct RedisSentinel {
    servers: Vec<RedisServer>,
    sentinels: Vec<RedisServer>,
    scheme: &'static str,
}

impl RedisSentinel {
    /// Starts all servers, and waits until they know each other.
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// Starts servers with more options.
    pub fn start_with(options: &[&str]) -> Self {
        Self::start_with_access(&Access::default(), &Access::default(), options)
    }

    /// Starts servers and sentinels with authentication.
    pub fn start_with_access(to_servers: &Access, to_sentinels: &Access, options: &[&str]) -> Self {
        let start = |options: &[&str]| RedisServer::start_with_access(to_servers, options);
        let master = start(&[&REPLICATION, options].concat());
        let port = master.port().to_string();
        let follow = ["--replicaof", "127.0.0.1", &port];
        let replica = || start(&[&REPLICATION[..], &follow, options].concat());
        let servers = vec![master, replica(), replica()];
        for replica in &servers[1..] {
            until("the replica follows", || follows(replica, servers[0].port()));
        }
        let sentinels = start_sentinels(&servers, to_servers, to_sentinels);
        let all = Self { servers, sentinels, scheme: to_servers.scheme() };
        all.await_settled(0);
        all
    }

    /// `redis+sentinel://…`
    pub fn url(&self) -> String {
        let sentinels: Vec<String> =
            self.sentinels.iter().map(|one| format!("127.0.0.1:{}", one.port())).collect();
        format!("{}+sentinel://{}/{SERVICE}", self.scheme, sentinels.join(","))
    }

    /// The servers; which of them is the master can change.
    pub fn servers(&self) -> &[RedisServer] {
        &self.servers
    }

    /// The sentinels.
    pub fn sentinels(&self) -> &[RedisServer] {
        &self.sentinels
    }

    /// Which server is the master, as most sentinels report.
    pub fn master(&self) -> usize {
        let named: Vec<usize> = self.sentinels.iter().filter_map(|one| self.named(one)).collect();
        let votes = |server: usize| named.iter().filter(|&&other| other == server).count();
        let mut servers = 0..self.servers.len();
        servers.find(|&server| votes(server) >= 2).expect("the sentinels agree on a master")
    }

    /// Which server this sentinel names.
    fn named(&self, sentinel: &RedisServer) -> Option<usize> {
        let question = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE];
        let answer = sentinel.ask_within(Duration::from_millis(500), &question);
        let port = answer.lines().nth(1)?.parse::<u16>().ok()?;
        self.servers.iter().position(|server| server.port() == port)
    }

    /// Settles and kills the master, and waits for a promotion. Returns the killed server.
    pub fn kill_master(&self) -> usize {
        let old = self.settled_master();
        self.servers[old].kill();
        self.await_promotion(old);
        old
    }

    /// Settles and stops the master, and waits for a promotion. Returns the stopped server.
    pub fn stop_master(&self) -> usize {
        let old = self.settled_master();
        self.servers[old].signal(Signal::STOP);
        self.await_promotion(old);
        old
    }

    /// Settles the master and cuts it off from its replicas: later writes are lost with it. Returns
    /// the master; [`lose_master`](Self::lose_master) comes next, and soon.
    pub fn cut_off_master(&self) -> usize {
        let master = self.settled_master();
        self.replicas_of(master).for_each(|replica| replica.signal(Signal::STOP));
        self.servers[master].ask(&["CLIENT", "KILL", "TYPE", "replica"]);
        // Settling paused its writes.
        self.servers[master].ask(&["CLIENT", "UNPAUSE"]);
        master
    }

    /// Kills a master that was cut off, and waits for a promotion.
    pub fn lose_master(&self, master: usize) {
        self.servers[master].kill();
        self.replicas_of(master).for_each(|replica| replica.signal(Signal::CONT));
        self.await_promotion(master);
    }

    fn replicas_of(&self, master: usize) -> impl Iterator<Item = &RedisServer> {
        let others = self.servers.iter().enumerate().filter(move |(index, _)| *index != master);
        others.map(|(_, server)| server)
    }

    fn settled_master(&self) -> usize {
        let master = self.master();
        let replicas: Vec<&RedisServer> = self.replicas_of(master).collect();
        self.servers[master].settle(&replicas);
        master
    }

    /// Waits until most sentinels name a master other than `old`, and that server has the role.
    pub fn await_promotion(&self, old: usize) {
        until("another is promoted", || {
            let named: Vec<_> = self.sentinels.iter().filter_map(|one| self.named(one)).collect();
            let new = named.iter().find(|&&new| new != old);
            new.is_some_and(|new| {
                let agreed = named.iter().filter(|&other| other == new).count() >= 2;
                agreed && role(&self.servers[*new]) == "master"
            })
        });
    }

    /// Restarts a killed server, empty, and waits until it replicates the master.
    pub fn bring_back(&self, server: usize) {
        self.servers[server].restart();
        self.await_settled(self.master());
    }

    /// Resumes a stopped server, and waits until it replicates the master.
    pub fn resume(&self, server: usize) {
        self.servers[server].signal(Signal::CONT);
        self.await_settled(self.master());
    }

    /// Waits until all servers replicate this one, and all sentinels know all servers.
    fn await_settled(&self, master: usize) {
        let port = self.servers[master].port();
        for server in self.replicas_of(master) {
            until("the server follows", || follows(server, port));
        }
        let replicas = self.servers.len() - 1;
        until("all have what is written", || self.servers[master].is_replicated_to(replicas));
        for sentinel in &self.sentinels {
            until("the sentinel knows all", || self.knows_all(sentinel, master));
        }
    }

    fn knows_all(&self, sentinel: &RedisServer, master: usize) -> bool {
        let answer = sentinel.ask(&["SENTINEL", "MASTER", SERVICE]);
        let lines: Vec<&str> = answer.lines().collect();
        let says = |field: &str| {
            let place = lines.iter().position(|line| *line == field);
            place.and_then(|place| lines.get(place + 1)).copied().unwrap_or_default()
        };
        let replicas = sentinel.ask(&["SENTINEL", "REPLICAS", SERVICE]);
        let up = replicas.matches("master-link-status\nok").count();
        self.named(sentinel) == Some(master)
            && says("flags") == "master"
            && says("num-other-sentinels") == "2"
            && up == self.servers.len() - 1
            && !replicas.contains("s_down")
            && !replicas.contains("disconnected")
    }

    /// Stops all servers and sentinels.
    pub fn freeze(&self) {
        // Sentinels first, so that they do not notice the others stop.
        for one in self.sentinels.iter().chain(&self.servers) {
            one.signal(Signal::STOP);
        }
    }

    /// Resumes all servers and sentinels.
    pub fn thaw(&self) {
        self.servers.iter().for_each(|server| server.signal(Signal::CONT));
        for server in &self.servers {
            until("the server answers", || server.ask(&["PING"]) == "PONG");
        }
        self.sentinels.iter().for_each(|sentinel| sentinel.signal(Signal::CONT));
    }
}

/// `master` or `slave`; empty if the server does not respond.
fn role(server: &RedisServer) -> String {
    server
        .ask_within(Duration::from_secs(1), &["ROLE"])
        .lines()
        .next()
        .unwrap_or_default()
        .to_owned()
}

fn follows(server: &RedisServer, master: u16) -> bool {
    let replication = server.ask(&["INFO", "replication"]);
    ["role:slave", "master_link_status:up", &format!("master_port:{master}")]
        .iter()
        .all(|part| replication.lines().any(|line| line.trim_end() == *part))
}

/// Starts sentinels that are configured with each other, because discovery takes seconds.
fn start_sentinels(
    servers: &[RedisServer],
    to_servers: &Access,
    to_sentinels: &Access,
) -> Vec<RedisServer> {
    let known: Vec<(u16, String)> =
        (1..=3).map(|number| (free_port(), format!("{number:040x}"))).collect();
    let start =
        |(own, id): &(u16, String)| {
            let mut lines = vec![format!("port {own}\nbind 127.0.0.1\nsentinel myid {id}")];
            let settings = to_sentinels.settings(*own).into_iter();
            lines.extend(settings.map(|(name, value)| format!("{name} {value}")));
            lines.extend(monitor_lines(servers, to_servers));
            // How they authenticate at each other.
            let password = to_sentinels.password.iter();
            lines.extend(password.map(|password| format!("sentinel sentinel-pass {password}")));
            let others = known.iter().filter(|(port, _)| port != own);
            lines.extend(others.map(|(port, id)| {
                format!("sentinel known-sentinel {SERVICE} 127.0.0.1 {port} {id}")
            }));
            let file = format!("{}\n", lines.join("\n"));
            let sentinel = RedisServer::start_sentinel(*own, &file, to_sentinels);
            let shorten = [&["SENTINEL", "DEBUG"], &SENTINEL_PERIODS[..]].concat();
            let answer = sentinel.ask(&shorten);
            // Redis 6 lacks these settings: there the same takes seconds longer.
            assert!(answer == "OK" || answer.starts_with("ERR Unknown "), "{answer}");
            sentinel
        };
    known.iter().map(start).collect()
}

/// The lines about the servers in the configuration of a sentinel.
fn monitor_lines(servers: &[RedisServer], to_servers: &Access) -> Vec<String> {
    let mut lines = vec![
        format!("sentinel monitor {SERVICE} 127.0.0.1 {} 2", servers[0].port()),
        format!("sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}"),
        format!("sentinel failover-timeout {SERVICE} 3000"),
        format!("sentinel parallel-syncs {SERVICE} 2"),
    ];
    let password = to_servers.password.iter();
    lines.extend(password.map(|password| format!("sentinel auth-pass {SERVICE} {password}")));
    let replicas = servers[1..].iter().map(RedisServer::port);
    lines.extend(replicas.map(|port| format!("sentinel known-replica {SERVICE} 127.0.0.1 {port}")));
    lines
}

/// A master, its replicas and sentinels for one law.
#[derive(Debug)]
pub struct SentinelStage {
    servers: RedisSentinel,
    actor: &'static str,
    master_changes: bool,
}

impl SentinelStage {
    /// An empty backend; see [`LocalStage::start`](super::LocalStage::start).
    pub fn start(actor: &'static str) -> Self {
        Self { servers: RedisSentinel::start(), actor, master_changes: false }
    }

    /// The master is settled and killed in the middle of a law, and a replica is promoted. All
    /// leases last long enough for that.
    pub fn with_master_change(mut self) -> Self {
        self.master_changes = true;
        self
    }
}

#[async_trait]
impl Stage for SentinelStage {
    fn time(&self) -> Time {
        Time::Real
    }

    fn clock(&self) -> Clock {
        Clock::boot()
    }

    fn ttl(&self) -> Duration {
        Duration::from_millis(if self.master_changes { 12_000 } else { 1200 })
    }

    async fn client(&self) -> Lockset {
        Lockset::connect(&self.servers.url()).await.unwrap()
    }

    async fn engine(&self) -> Arc<dyn Engine> {
        let options =
            RedisOptions { url: self.servers.url().parse().unwrap(), ..RedisOptions::default() };
        Arc::new(Redis::connect(options).await.unwrap())
    }

    async fn other_backend(&self) -> Lockset {
        Lockset::connect(&format!("{}?prefix=elsewhere:", self.servers.url())).await.unwrap()
    }

    async fn freeze(&self) {
        self.servers.freeze();
    }

    async fn thaw(&self) {
        self.servers.thaw();
    }

    async fn change_leader(&self) {
        if self.master_changes {
            let clients = self.servers.servers[self.servers.master()].listeners();
            self.servers.kill_master();
            let new = &self.servers.servers[self.servers.master()];
            let began = Instant::now();
            // Running clients reconnect soon; a stopped process does not.
            while new.listeners() < clients && began.elapsed() < Duration::from_secs(3) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }

    /// Kills the master; a replica is promoted, and the old master returns as its replica.
    async fn restart(&self) {
        let old = self.servers.kill_master();
        self.servers.bring_back(old);
    }

    async fn process(&self) -> Option<Process> {
        Some(Process::start(self.actor, &self.servers.url(), StateSource::Guard))
    }
}
