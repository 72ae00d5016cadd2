//! Starts a Redis Cluster whose slots can be moved and whose masters can be killed, and its stage.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use lockset::Lockset;
use lockset::clock::Clock;
use lockset::engine::Engine;
use lockset::engine::redis::{Redis, RedisOptions};
use rustix::process::Signal;

use super::redis::RedisServer;
use super::{Access, Stage, Time};
use crate::process::{Process, StateSource};
use crate::steps::until;

const SLOTS: usize = 16_384;
const MASTERS: usize = 3;

/// Three masters with a third of the slots each, and the requested number of replicas; killed when
/// dropped. The nodes persist their data, and keep it over a restart.
#[derive(Debug)]
pub struct RedisCluster {
    /// The first three begin as masters.
    nodes: Vec<RedisServer>,
    ids: Vec<String>,
    scheme: &'static str,
}

/// A line of `CLUSTER NODES`: what one node reports about another.
#[derive(Debug)]
struct NodeLine {
    id: String,
    is_master: bool,
    is_well: bool,
    slots: Vec<(usize, usize)>,
}

impl RedisCluster {
    /// Three masters.
    pub fn start() -> Self {
        Self::start_with(0, &[])
    }

    /// Three masters with a replica each.
    pub fn start_with_replicas() -> Self {
        Self::start_with(1, &[])
    }

    /// Three masters with `replicas` replicas each, and more options.
    pub fn start_with(replicas: usize, options: &[&str]) -> Self {
        Self::start_with_access(&Access::default(), replicas, options)
    }

    /// The same with authentication.
    pub fn start_with_access(access: &Access, replicas: usize, options: &[&str]) -> Self {
        let count = MASTERS * (1 + replicas);
        let nodes: Vec<_> = (0..count).map(|_| start_node(access, options)).collect();
        let ids = nodes.iter().map(|node| node.ask(&["CLUSTER", "MYID"])).collect();
        for (index, node) in nodes.iter().enumerate() {
            let epoch = (index + 1).to_string();
            expect_ok(node, &["CLUSTER", "SET-CONFIG-EPOCH", &epoch]);
            if index < MASTERS {
                // One by one: Redis 6 has no ADDSLOTSRANGE.
                let slots = index * SLOTS / MASTERS..(index + 1) * SLOTS / MASTERS;
                let slots: Vec<String> = slots.map(|slot| slot.to_string()).collect();
                let slots: Vec<&str> = slots.iter().map(String::as_str).collect();
                expect_ok(node, &[&["CLUSTER", "ADDSLOTS"], &slots[..]].concat());
            }
            expect_ok(&nodes[0], &["CLUSTER", "MEET", "127.0.0.1", &node.port().to_string()]);
        }
        let all = Self { nodes, ids, scheme: access.scheme() };
        all.await_ok();
        for index in MASTERS..all.nodes.len() {
            let replica = &all.nodes[index];
            expect_ok(replica, &["CLUSTER", "REPLICATE", &all.ids[index % MASTERS]]);
            until("the replica follows", || is_linked(replica));
            let master = &all.nodes[index % MASTERS];
            until("it has what is written", || master.is_replicated_to(replicas));
        }
        all.await_ok();
        for node in &all.nodes {
            until("it knows of all replicas", || {
                let known = node.ask(&["CLUSTER", "NODES"]);
                known.lines().filter(|line| line.contains("slave")).count() == MASTERS * replicas
            });
        }
        all
    }

    /// `redis+cluster://…`
    pub fn url(&self) -> String {
        let nodes: Vec<String> =
            self.nodes.iter().map(|node| format!("127.0.0.1:{}", node.port())).collect();
        format!("{}+cluster://{}", self.scheme, nodes.join(","))
    }

    /// The nodes; which of them are masters can change.
    pub fn nodes(&self) -> &[RedisServer] {
        &self.nodes
    }

    /// The slot of this key or channel.
    pub fn slot_of(&self, key: &str) -> usize {
        self.nodes[0].ask(&["CLUSTER", "KEYSLOT", key]).parse().unwrap()
    }

    /// The node that owns this slot, as most nodes report.
    pub fn owner(&self, slot: usize) -> usize {
        let named: Vec<usize> =
            self.nodes.iter().filter_map(|node| self.named(node, slot)).collect();
        let votes = |node: usize| named.iter().filter(|&&other| other == node).count();
        let most = (0..self.nodes.len()).max_by_key(|&node| votes(node));
        most.expect("the slot has an owner")
    }

    /// The node that owns this slot, as this node reports.
    fn named(&self, node: &RedisServer, slot: usize) -> Option<usize> {
        let lines = look(node);
        let owner = lines
            .iter()
            .find(|line| line.slots.iter().any(|(first, last)| (*first..=*last).contains(&slot)))?;
        self.ids.iter().position(|id| *id == owner.id)
    }

    /// The name of a lock that this node serves.
    pub fn name_at(&self, node: usize) -> String {
        let is_there = |name: &String| self.owner(self.slot_of(&format!("lockset:{name}"))) == node;
        (0..).map(|number| format!("n{number}")).find(is_there).unwrap()
    }

    /// A node with slots other than this one.
    pub fn another_master(&self, than: usize) -> usize {
        let lines = look(&self.nodes[than]);
        let other = lines.iter().find(|line| line.id != self.ids[than] && !line.slots.is_empty());
        let id = &other.expect("there are several masters").id;
        self.ids.iter().position(|other| other == id).expect("it is one of ours")
    }

    /// Waits until every node reports a healthy cluster and knows all others.
    pub fn await_ok(&self) {
        for node in &self.nodes {
            until("the cluster is well", || {
                let lines = look(node);
                let covered: usize = lines
                    .iter()
                    .filter(|line| line.is_master && line.is_well)
                    .flat_map(|line| &line.slots)
                    .map(|(first, last)| last - first + 1)
                    .sum();
                covered == SLOTS
                    && lines.iter().filter(|line| line.is_well).count() == self.nodes.len()
                    && node.info(&["CLUSTER", "INFO"], "cluster_state").as_deref() == Some("ok")
            });
        }
    }

    /// Moves a slot with all its keys, as `redis-cli --cluster reshard` does.
    pub fn migrate_slot(&self, slot: usize, to: usize) {
        let from = self.begin_migration(slot, to);
        self.finish_migration(slot, from, to);
    }

    /// Begins to move a slot: new keys are created at its new node. Returns the old node.
    pub fn begin_migration(&self, slot: usize, to: usize) -> usize {
        let from = self.owner(slot);
        let number = slot.to_string();
        let old = ["CLUSTER", "SETSLOT", &number, "IMPORTING", &self.ids[from]];
        expect_ok(&self.nodes[to], &old);
        let new = ["CLUSTER", "SETSLOT", &number, "MIGRATING", &self.ids[to]];
        expect_ok(&self.nodes[from], &new);
        from
    }

    /// Moves one key of a slot whose migration has begun, if there is one.
    pub fn move_a_key(&self, slot: usize, from: usize, to: usize) -> Option<String> {
        let number = slot.to_string();
        let keys = self.nodes[from].ask(&["CLUSTER", "GETKEYSINSLOT", &number, "1"]);
        let key = keys.lines().next().filter(|key| !key.is_empty())?;
        let port = self.nodes[to].port().to_string();
        // The reply for a key that expired in between is NOKEY.
        let answer =
            self.nodes[from].ask(&["MIGRATE", "127.0.0.1", &port, key, "0", "5000", "REPLACE"]);
        assert!(["OK", "NOKEY"].contains(&answer.as_str()), "{key}: {answer}");
        Some(key.to_owned())
    }

    /// Moves the remaining keys of a slot and announces its new owner to all nodes.
    pub fn finish_migration(&self, slot: usize, from: usize, to: usize) {
        while self.move_a_key(slot, from, to).is_some() {}
        let number = slot.to_string();
        let others = (0..self.nodes.len()).filter(|node| *node != to && *node != from);
        for node in [to, from].into_iter().chain(others) {
            let lines = look(&self.nodes[node]);
            let is_master = |line: &NodeLine| line.id == self.ids[node] && line.is_master;
            if lines.iter().any(is_master) {
                let settled = ["CLUSTER", "SETSLOT", &number, "NODE", &self.ids[to]];
                expect_ok(&self.nodes[node], &settled);
            }
        }
        for node in &self.nodes {
            until("all nodes know", || self.named(node, slot) == Some(to));
        }
    }

    /// Settles and kills the node that owns this slot, and waits until a replica owns the slot.
    /// Returns the killed node.
    pub fn kill_owner(&self, slot: usize) -> usize {
        let owner = self.owner(slot);
        let port = format!("master_port:{}", self.nodes[owner].port());
        let follows = |node: &&RedisServer| node.ask(&["INFO", "replication"]).contains(&port);
        let replicas: Vec<&RedisServer> = self.nodes.iter().filter(follows).collect();
        assert!(!replicas.is_empty(), "it has no replica");
        self.nodes[owner].settle(&replicas);
        self.nodes[owner].kill();
        self.await_promotion(owner, slot);
        owner
    }

    /// Waits until the other nodes report that a node other than `old` owns this slot, and that the
    /// cluster is healthy.
    pub fn await_promotion(&self, old: usize, slot: usize) {
        let rest = || self.nodes.iter().enumerate().filter(|(index, _)| *index != old);
        until("another has the slot", || {
            rest().all(|(_, node)| {
                let is_ok = node.info(&["CLUSTER", "INFO"], "cluster_state");
                is_ok.as_deref() == Some("ok") && self.named(node, slot) != Some(old)
            })
        });
    }

    /// Stops all nodes.
    pub fn freeze(&self) {
        self.nodes.iter().for_each(|node| node.signal(Signal::STOP));
    }

    /// Resumes all nodes.
    pub fn thaw(&self) {
        self.nodes.iter().for_each(|node| node.signal(Signal::CONT));
    }

    /// Kills all nodes, one after the other, and restarts them on their data.
    pub fn restart(&self) {
        self.nodes.iter().for_each(RedisServer::restart);
        self.await_ok();
    }
}

fn start_node(access: &Access, options: &[&str]) -> RedisServer {
    let usual = ["--appendonly", "yes", "--cluster-enabled", "yes"];
    let quick = ["--cluster-node-timeout", "1000", "--cluster-replica-validity-factor", "0"];
    let replication = ["--repl-diskless-sync", "no", "--repl-ping-replica-period", "1"];
    let sealed: &[&str] = if access.tls.is_some() { &["--tls-cluster", "yes"] } else { &[] };
    let options = [&usual[..], &quick, &replication, sealed, options].concat();
    RedisServer::start_with_access(access, &options)
}

fn is_linked(node: &RedisServer) -> bool {
    let status = node.info(&["INFO", "replication"], "master_link_status");
    status.as_deref() == Some("up")
}

#[track_caller]
fn expect_ok(node: &RedisServer, command: &[&str]) {
    assert_eq!(node.ask(command), "OK", "{command:?}");
}

/// What a node reports about all nodes; empty if it does not respond.
fn look(node: &RedisServer) -> Vec<NodeLine> {
    let answer = node.ask(&["CLUSTER", "NODES"]);
    answer.lines().filter_map(read_line).collect()
}

/// `id address flags master ping pong epoch link slots…`, where a slot that moves is in brackets.
fn read_line(line: &str) -> Option<NodeLine> {
    let words: Vec<&str> = line.split(' ').collect();
    let [id, _, flags, _, _, _, _, link, slots @ ..] = &words[..] else { return None };
    let number = |text: &str| text.parse::<usize>().ok();
    let range = |text: &&str| match text.split_once('-') {
        Some((first, last)) => Some((number(first)?, number(last)?)),
        None => Some((number(text)?, number(text)?)),
    };
    let flags: Vec<&str> = flags.split(',').collect();
    let is_ill = ["fail", "fail?", "handshake", "noaddr"].iter().any(|ill| flags.contains(ill));
    Some(NodeLine {
        id: (*id).to_owned(),
        is_master: flags.contains(&"master"),
        is_well: !is_ill && *link == "connected",
        slots: slots.iter().filter_map(range).collect(),
    })
}

/// A cluster for one law.
#[derive(Debug)]
pub struct ClusterStage {
    cluster: RedisCluster,
    actor: &'static str,
}

impl ClusterStage {
    /// An empty backend; see [`LocalStage::start`](super::LocalStage::start).
    pub fn start(actor: &'static str) -> Self {
        Self { cluster: RedisCluster::start(), actor }
    }
}

#[async_trait]
impl Stage for ClusterStage {
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
        Lockset::connect(&self.cluster.url()).await.unwrap()
    }

    async fn engine(&self) -> Arc<dyn Engine> {
        let options =
            RedisOptions { url: self.cluster.url().parse().unwrap(), ..RedisOptions::default() };
        Arc::new(Redis::connect(options).await.unwrap())
    }

    async fn other_backend(&self) -> Lockset {
        Lockset::connect(&format!("{}?prefix=elsewhere:", self.cluster.url())).await.unwrap()
    }

    async fn freeze(&self) {
        self.cluster.freeze();
    }

    async fn thaw(&self) {
        self.cluster.thaw();
    }

    async fn restart(&self) {
        self.cluster.restart();
    }

    async fn process(&self) -> Option<Process> {
        Some(Process::start(self.actor, &self.cluster.url(), StateSource::Guard))
    }
}
