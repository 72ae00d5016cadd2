//! Lockset on etcd against the Lock RPC, etcd's own lock inside the server, with the same keys.
//!
//! Not on one core, as the rest: the server has threads of its own, which then wait for each other
//! more than for us.

use std::process::ExitCode;
use std::time::Duration;

use lockset::Lockset;
use lockset_testkit::stage::EtcdServers;
use tokio::runtime::{Builder, Runtime};

use self::calls::Calls;
use crate::contest::{Contender, Hand, Hold, Ours, Slices, Writer, cycles, drain};
use crate::measure::{Order, Pace, median, median_ratio, now, rotated};
use crate::table::{Table, Target, micros, per_second};
use crate::turns::Stamp;

pub(crate) mod calls;

pub(crate) const USAGE: &str = "etcd [--quick] [rows…]

rows: one task, 64 tasks, hand-off, 1,000 waiters";

const ROUNDS: usize = 15;
const SLICE: Duration = Duration::from_millis(300);
/// How often a line of 16 is drained in a round, so that its last hundredth is more than one.
const DRAINS: usize = 16;
const TTL: Duration = Duration::from_secs(20);
/// Seconds for which the peers' leases last: nothing has to keep them.
const LONG: i64 = 3600;

pub(crate) fn run(args: &[&str]) -> ExitCode {
    let order = Order::read(args);
    let pace = order.pace;
    let mut table = Table::default();
    let field = Field::new();
    for (name, tasks, least) in [("one task", 1, 1.0), ("64 tasks", 64, 2.0)] {
        if order.wants(name) {
            eprintln!("measuring: {name}");
            field.cycles(name, tasks, pace, Target::AtLeast(least), &mut table);
        }
    }
    if order.wants("hand-off") {
        eprintln!("measuring: hand-off");
        field.hand_off(pace, &mut table);
    }
    if order.wants("1,000 waiters") {
        eprintln!("measuring: 1,000 waiters");
        field.thousand(pace, &mut table);
    }
    println!("-- etcd (one server, all cores)");
    println!("{table}");
    ExitCode::SUCCESS
}

/// A server, and both clients on one runtime.
struct Field {
    servers: EtcdServers,
    runtime: Runtime,
    ours: Lockset,
    peer: Calls,
}

impl Field {
    fn new() -> Self {
        let servers = EtcdServers::start(1);
        let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let (ours, peer) = runtime.block_on(async { (ours(&servers).await, peer(&servers).await) });
        Self { servers, runtime, ours, peer }
    }

    fn revision(&self) -> i64 {
        self.runtime.block_on(self.peer.below("peer/")).revision
    }

    fn cycles(&self, name: &str, tasks: usize, pace: Pace, target: Target, table: &mut Table) {
        let mut ours = self.ours_on(tasks, |task| format!("cycle-{task}"));
        let lease = self.runtime.block_on(self.peer.lease(LONG));
        let peer =
            |task| Peer { calls: self.peer.clone(), name: format!("peer/cycle-{task}"), lease };
        let mut peers: Vec<Peer> = (0..tasks).map(peer).collect();
        let mut bare: Vec<Bare> = peers.iter().cloned().map(Bare).collect();
        // Connections and our lease are made before the first slice that counts.
        self.slice(&mut ours, Duration::from_millis(200));
        self.slice(&mut peers, Duration::from_millis(200));
        let mut slices = [(); 3].map(|()| Slices::default());
        for round in 0..pace.rounds(ROUNDS) {
            for place in rotated(3, round) {
                slices[place].push(match place {
                    0 => self.slice(&mut ours, pace.span(SLICE)),
                    1 => self.slice(&mut peers, pace.span(SLICE)),
                    _ => self.slice(&mut bare, pace.span(SLICE)),
                });
            }
        }
        let [mine, theirs, floor] = slices;
        let speed = per_second(median(mine.per_second.iter().copied()));
        let ratio = median_ratio(&mine.per_second, &theirs.per_second);
        table.add(format!("{name}: speed / Lock RPC's"), &speed, ratio, target);
        let ratio = median_ratio(&mine.per_second, &floor.per_second);
        let work = format!("({name}: speed / a bare put and delete)");
        table.add(work, &speed, ratio, Target::None);
        let writes = |slices: &Slices| median(slices.writes.iter().copied());
        let work = format!("{name}: writes per cycle");
        table.add(work, "counted", writes(&mine), Target::AtMost(2.05));
        let work = format!("({name}: writes per cycle of the Lock RPC)");
        table.add(work, "counted", writes(&theirs), Target::None);
    }

    fn ours_on(&self, count: usize, name: impl Fn(usize) -> String) -> Vec<Ours> {
        (0..count).map(|task| Ours(self.ours.mutex(name(task)).unwrap())).collect()
    }

    /// So many peers on one channel, all for one lock. Each has a lease, which is who it is.
    async fn peers_on(&self, count: usize, name: &str) -> Vec<Peer> {
        let mut peers = Vec::new();
        for _ in 0..count {
            let lease = self.peer.lease(LONG).await;
            peers.push(Peer { calls: self.peer.clone(), name: name.to_owned(), lease });
        }
        peers
    }

    /// Cycles of all tasks for so long: how many a second, and how many writes each cost.
    fn slice<C: Contender>(&self, tasks: &mut Vec<C>, span: Duration) -> (f64, f64) {
        let before = self.revision();
        let (rate, cycles) = cycles(&self.runtime, tasks, span);
        (rate, (self.revision() - before) as f64 / cycles as f64)
    }

    /// 16 who wait for one lock: all of one client, and each with a client of its own.
    fn hand_off(&self, pace: Pace, table: &mut Table) {
        let mut hands = [(); 4].map(|()| Hand::default());
        let one_client = self.ours_on(17, |_| "line".to_owned());
        let (peers_one_client, ours, peers) = self.runtime.block_on(async {
            let (mut ours, mut peers) = (Vec::new(), self.peers_on(17, "peer/each").await);
            for peer in &mut peers {
                let locks = self::ours(&self.servers).await;
                ours.push(Ours(locks.mutex("each").unwrap()));
                peer.calls = self::peer(&self.servers).await;
            }
            (self.peers_on(17, "peer/line").await, ours, peers)
        });
        for round in 0..pace.rounds(ROUNDS) {
            for place in rotated(4, round) {
                // Behind a holder of their own process, waiters for a mutex of ours stay there.
                let stamps = |_| match place {
                    0 => self.drain(&one_client, "ours/line/", 1),
                    1 => self.drain(&peers_one_client, "peer/line/", 17),
                    2 => self.drain(&ours, "ours/each/", 17),
                    _ => self.drain(&peers, "peer/each/", 17),
                };
                hands[place].round((0..DRAINS).flat_map(stamps).collect());
            }
        }
        for (title, ours, theirs) in
            [("one client", &hands[0], &hands[1]), ("a client each", &hands[2], &hands[3])]
        {
            let work = |what: &str| format!("hand-off, 16 waiters, {title}: {what}");
            let half = micros(median(ours.half.iter().copied()));
            let ratio = median_ratio(&ours.half, &theirs.half);
            table.add(work("p50 / Lock RPC's"), half, ratio, Target::AtMost(1.2));
            let late = micros(median(ours.late.iter().copied()));
            let ratio = median_ratio(&ours.late, &theirs.late);
            table.add(work("p99 / Lock RPC's"), late, ratio, Target::AtMost(0.5));
        }
    }

    /// How long each hand-off took in a line that has so many keys below this prefix.
    fn drain<C: Contender + Clone>(&self, line: &[C], prefix: &str, keys: i64) -> Vec<f64> {
        let are_there = || self.runtime.block_on(self.peer.below(prefix)).keys >= keys;
        drain(&self.runtime, line, are_there)
    }

    /// How many events the server sends to watchers for each release.
    fn thousand(&self, pace: Pace, table: &mut Table) {
        let waiters = if pace.quick { 200 } else { 1000 };
        let rwlock = self.ours.rwlock("many").unwrap();
        let ours: Vec<_> = (0..=waiters).map(|_| Writer(rwlock.clone())).collect();
        let peers = self.runtime.block_on(self.peers_on(waiters + 1, "peer/many"));
        let metric = |name: &str| self.servers.metric(&format!("etcd_debugging_mvcc_{name}"));
        for (title, target) in [("", Target::AtMost(1.05)), (" of the Lock RPC", Target::None)] {
            let (events, watchers) = (metric("events_total"), metric("watcher_total"));
            // Who has a key but does not watch yet would see a release without being told.
            let all_watch = || metric("watcher_total") >= watchers + waiters as u64;
            let hand_offs = match title {
                "" => drain(&self.runtime, &ours, all_watch),
                _ => drain(&self.runtime, &peers, all_watch),
            };
            let told = (metric("events_total") - events) as f64 / (waiters + 1) as f64;
            let work = format!("{waiters} waiters: watch events per release{title}");
            let half = micros(median(hand_offs));
            table.add(work, format!("p50 of a hand-off {half}"), told, target);
        }
    }
}

async fn ours(servers: &EtcdServers) -> Lockset {
    Lockset::builder(&servers.url("ours")).ttl(TTL).connect().await.unwrap()
}

async fn peer(servers: &EtcdServers) -> Calls {
    Calls::connect(servers.port(0)).await
}

#[derive(Clone)]
struct Peer {
    calls: Calls,
    name: String,
    lease: i64,
}

impl Contender for Peer {
    async fn turn(&mut self, hold: Option<Hold>) -> Stamp {
        let key = self.calls.lock(&self.name, self.lease).await;
        let granted = now();
        Hold::pass(hold).await;
        let released = now();
        self.calls.unlock(key).await;
        Stamp { granted, released, token: 0 }
    }
}

/// The two writes that every lock needs, and nothing else.
struct Bare(Peer);

impl Contender for Bare {
    async fn turn(&mut self, hold: Option<Hold>) -> Stamp {
        let Self(Peer { calls, name, lease }) = self;
        calls.put(name, *lease).await;
        let granted = now();
        Hold::pass(hold).await;
        let released = now();
        calls.delete(name).await;
        Stamp { granted, released, token: 0 }
    }
}
