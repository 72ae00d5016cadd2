//! A Redis master with replicas under the eyes of sentinels.

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
use crate::process::{Judging, Process};
use crate::steps::until;

/// What the sentinels call the master.
const SERVICE: &str = "locks";
/// What makes replicas quick: after a snapshot without a file they would wait for a second. The
/// file is removed, so that whoever is killed comes back empty.
const REPLICATION: [&str; 6] = [
    "--repl-diskless-sync",
    "no",
    "--rdb-del-sync-files",
    "yes",
    "--repl-ping-replica-period",
    "1",
];
/// How often a sentinel does what it does every second, or every ten: in milliseconds. One that
/// was stopped distrusts its clock for a while.
///
/// What is known of a replica is trusted for five pings, and asked for every second. A new master
/// is pinged after one period, and must not be taken for dead before: else one failover causes the
/// next.
const HASTE: [&str; 10] = [
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
/// How long a silent master is waited for.
const SILENCE_MS: u32 = 1000;

/// One master, two replicas and three sentinels that know each other; killed when dropped.
#[derive(Debug)]
pub struct RedisSentinel {
    servers: Vec<RedisServer>,
    sentinels: Vec<RedisServer>,
    scheme: &'static str,
}

impl RedisSentinel {
    /// Starts all, and waits until they know each other.
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// Starts servers with more options.
    pub fn start_with(options: &[&str]) -> Self {
        Self::start_guarded(&Access::default(), &Access::default(), options)
    }

    /// Starts servers and sentinels that are entered like this.
    pub fn start_guarded(to_servers: &Access, to_sentinels: &Access, options: &[&str]) -> Self {
        let start = |options: &[&str]| RedisServer::start_guarded(to_servers, options);
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
        all.await_peace(0);
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

    /// Which of the servers is the master, as most sentinels say.
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

    /// Kills the master, settled, and waits until another is one; gives back which was killed.
    pub fn kill_master(&self) -> usize {
        let old = self.settled_master();
        self.servers[old].kill();
        self.await_promotion(old);
        old
    }

    /// Stops the master, settled, and waits until another is one; gives back which it was.
    pub fn stop_master(&self) -> usize {
        let old = self.settled_master();
        self.servers[old].signal(Signal::STOP);
        self.await_promotion(old);
        old
    }

    /// Cuts the settled master off from its replicas: what it is told from now on is lost with it.
    /// Gives back which it is; [`lose_master`](Self::lose_master) comes next, and soon.
    pub fn cut_off_master(&self) -> usize {
        let master = self.settled_master();
        self.replicas_of(master).for_each(|replica| replica.signal(Signal::STOP));
        self.servers[master].ask(&["CLIENT", "KILL", "TYPE", "replica"]);
        // To settle it was paused.
        self.servers[master].ask(&["CLIENT", "UNPAUSE"]);
        master
    }

    /// Kills a master that was cut off, and waits until another is one.
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

    /// Waits until most sentinels name another master than `old`, and it is one.
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

    /// Starts a killed server again, empty, and waits until it follows the master.
    pub fn bring_back(&self, server: usize) {
        self.servers[server].restart();
        self.await_peace(self.master());
    }

    /// Lets a stopped server go on, and waits until it follows the master.
    pub fn resume(&self, server: usize) {
        self.servers[server].signal(Signal::CONT);
        self.await_peace(self.master());
    }

    /// Waits until all servers follow this one, and all sentinels know all.
    fn await_peace(&self, master: usize) {
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

    /// Nobody answers any more.
    pub fn freeze(&self) {
        // Sentinels first: they are not to see the others stop.
        for one in self.sentinels.iter().chain(&self.servers) {
            one.signal(Signal::STOP);
        }
    }

    /// Everybody answers again.
    pub fn thaw(&self) {
        self.servers.iter().for_each(|server| server.signal(Signal::CONT));
        for server in &self.servers {
            until("the server answers", || server.ask(&["PING"]) == "PONG");
        }
        self.sentinels.iter().for_each(|sentinel| sentinel.signal(Signal::CONT));
    }
}

/// `master` or `slave`; nothing if the server does not answer.
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

/// Sentinels that are told of each other: to find out takes them seconds.
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
            lines.extend(what_it_watches(servers, to_servers));
            // How they enter each other.
            let password = to_sentinels.password.iter();
            lines.extend(password.map(|password| format!("sentinel sentinel-pass {password}")));
            let others = known.iter().filter(|(port, _)| port != own);
            lines.extend(others.map(|(port, id)| {
                format!("sentinel known-sentinel {SERVICE} 127.0.0.1 {port} {id}")
            }));
            let file = format!("{}\n", lines.join("\n"));
            let sentinel = RedisServer::start_sentinel(*own, &file, to_sentinels);
            let hurry = [&["SENTINEL", "DEBUG"], &HASTE[..]].concat();
            let answer = sentinel.ask(&hurry);
            // Redis 6 cannot be hurried: there the same takes seconds longer.
            assert!(answer == "OK" || answer.starts_with("ERR Unknown "), "{answer}");
            sentinel
        };
    known.iter().map(start).collect()
}

/// The lines in a sentinel's file about the servers.
fn what_it_watches(servers: &[RedisServer], to_servers: &Access) -> Vec<String> {
    let mut lines = vec![
        format!("sentinel monitor {SERVICE} 127.0.0.1 {} 2", servers[0].port()),
        format!("sentinel down-after-milliseconds {SERVICE} {SILENCE_MS}"),
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
    master_is_succeeded: bool,
}

impl SentinelStage {
    /// An empty home; see [`LocalStage::start`](super::LocalStage::start).
    pub fn start(actor: &'static str) -> Self {
        Self { servers: RedisSentinel::start(), actor, master_is_succeeded: false }
    }

    /// The master dies in the middle of a law, settled, and a replica goes on. All leases last long
    /// enough for that.
    pub fn whose_master_is_succeeded(mut self) -> Self {
        self.master_is_succeeded = true;
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
        Duration::from_millis(if self.master_is_succeeded { 12_000 } else { 1200 })
    }

    async fn client(&self) -> Lockset {
        Lockset::connect(&self.servers.url()).await.unwrap()
    }

    async fn engine(&self) -> Arc<dyn Engine> {
        let options = RedisOptions { url: self.servers.url(), ..RedisOptions::default() };
        Arc::new(Redis::connect(options).await.unwrap())
    }

    async fn elsewhere(&self) -> Lockset {
        Lockset::connect(&format!("{}?prefix=elsewhere:", self.servers.url())).await.unwrap()
    }

    async fn freeze(&self) {
        self.servers.freeze();
    }

    async fn thaw(&self) {
        self.servers.thaw();
    }

    async fn change_leader(&self) {
        if self.master_is_succeeded {
            let clients = self.servers.servers[self.servers.master()].listeners();
            self.servers.kill_master();
            let new = &self.servers.servers[self.servers.master()];
            let began = Instant::now();
            // Those who live follow soon; a process that was stopped does not.
            while new.listeners() < clients && began.elapsed() < Duration::from_secs(3) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }

    /// The master dies, a replica goes on, and the old master comes back as its replica.
    async fn restart(&self) {
        let old = self.servers.kill_master();
        self.servers.bring_back(old);
    }

    async fn process(&self) -> Option<Process> {
        Some(Process::start(self.actor, &self.servers.url(), Judging::ByTheGuard))
    }
}
