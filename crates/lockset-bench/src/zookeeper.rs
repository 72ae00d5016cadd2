//! Lockset on ZooKeeper against the lock of the crate zookeeper-client, which has the same nodes.
//!
//! Not on one core, as the rest: the server is a Java machine, whose own threads then wait for each
//! other more than for us.

use std::process::ExitCode;
use std::time::Duration;

use lockset::Lockset;
use lockset_testkit::stage::ZooKeeperServers;
use tokio::runtime::{Builder, Runtime};
use zookeeper_client::{Acls, Client, CreateMode, LockOptions, LockPrefix};

use crate::contest::{Contender, Hand, Hold, Ours, Slices, Writer, cycles, drain};
use crate::measure::{Order, Pace, median, median_ratio, now, rotated};
use crate::table::{Table, Target, micros, per_second};
use crate::turns::Stamp;

pub(crate) const USAGE: &str = "zookeeper [--quick] [rows…]

rows: one task, 64 tasks, hand-off, 1,000 waiters";

const ROUNDS: usize = 15;
const SLICE: Duration = Duration::from_millis(300);
/// How often a line of 16 is drained in a round, so that its last hundredth is more than one.
const DRAINS: usize = 16;
const SESSION: Duration = Duration::from_secs(20);

pub(crate) fn run(args: &[&str]) -> ExitCode {
    let order = Order::read(args);
    let pace = order.pace;
    let mut table = Table::default();
    let field = Field::new();
    for (name, tasks, least) in [("one task", 1, 1.15), ("64 tasks", 64, 1.1)] {
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
    println!("-- zookeeper (one server, all cores)");
    println!("{table}");
    ExitCode::SUCCESS
}

/// A server, and both clients on one runtime.
struct Field {
    servers: ZooKeeperServers,
    runtime: Runtime,
    ours: Lockset,
    peer: Client,
}

impl Field {
    fn new() -> Self {
        // Reaped as seldom as by default, or some cycles would have to make their parents again.
        let servers = ZooKeeperServers::start_with(1, &["-Dznode.container.checkIntervalMs=60000"]);
        let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let (ours, peer) = runtime.block_on(async { (ours(&servers).await, peer(&servers).await) });
        Self { servers, runtime, ours, peer }
    }

    fn transactions(&self) -> u64 {
        self.servers.nodes()[0].last_transaction()
    }

    fn cycles(&self, name: &str, tasks: usize, pace: Pace, target: Target, table: &mut Table) {
        let mut ours = self.ours_on(tasks, |task| format!("cycle-{task}"));
        let mut peers = self.peers_on(tasks, |task| format!("/peer/cycle-{task}"));
        // Parents are made before the first slice that counts.
        self.slice(&mut ours, Duration::from_millis(200));
        self.slice(&mut peers, Duration::from_millis(200));
        let (mut mine, mut theirs) = (Slices::default(), Slices::default());
        for round in 0..pace.rounds(ROUNDS) {
            for place in rotated(2, round) {
                match place {
                    0 => mine.push(self.slice(&mut ours, pace.span(SLICE))),
                    _ => theirs.push(self.slice(&mut peers, pace.span(SLICE))),
                }
            }
        }
        let speed = per_second(median(mine.per_second.iter().copied()));
        let ratio = median_ratio(&mine.per_second, &theirs.per_second);
        table.add(format!("{name}: speed / zookeeper-client's"), speed, ratio, target);
        let writes = |slices: &Slices| median(slices.writes.iter().copied());
        let work = format!("{name}: writes per cycle");
        table.add(work, "counted", writes(&mine), Target::AtMost(2.05));
        let work = format!("({name}: writes per cycle of zookeeper-client)");
        table.add(work, "counted", writes(&theirs), Target::None);
    }

    fn ours_on(&self, count: usize, name: impl Fn(usize) -> String) -> Vec<Ours> {
        (0..count).map(|task| Ours(self.ours.mutex(name(task)).unwrap())).collect()
    }

    fn peers_on(&self, count: usize, folder: impl Fn(usize) -> String) -> Vec<Peer> {
        (0..count).map(|task| Peer { client: self.peer.clone(), folder: folder(task) }).collect()
    }

    /// Cycles of all tasks for so long: how many a second, and how many writes each cost.
    fn slice<C: Contender>(&self, tasks: &mut Vec<C>, span: Duration) -> (f64, f64) {
        let before = self.transactions();
        let (rate, cycles) = cycles(&self.runtime, tasks, span);
        (rate, (self.transactions() - before) as f64 / cycles as f64)
    }

    /// 16 who wait for one lock: all of one client, and each with a session of its own.
    fn hand_off(&self, pace: Pace, table: &mut Table) {
        let mut hands = [(); 4].map(|()| Hand::default());
        let (ours, peers) = self.runtime.block_on(async {
            let (mut ours, mut peers) = (Vec::new(), Vec::new());
            for _ in 0..=16 {
                let locks = self::ours(&self.servers).await;
                ours.push(Ours(locks.mutex("each").unwrap()));
                let (client, folder) = (peer(&self.servers).await, "/peer/each".to_owned());
                peers.push(Peer { client, folder });
            }
            (ours, peers)
        });
        let one_session = self.ours_on(17, |_| "line".to_owned());
        let peers_one_session = self.peers_on(17, |_| "/peer/line".to_owned());
        for round in 0..pace.rounds(ROUNDS) {
            for place in rotated(4, round) {
                // Those who wait for a mutex of ours in one process cost the server nothing.
                let stamps = |_| match place {
                    0 => self.drain(&one_session, 1),
                    1 => self.drain(&peers_one_session, 17),
                    2 => self.drain(&ours, 17),
                    _ => self.drain(&peers, 17),
                };
                hands[place].round((0..DRAINS).flat_map(stamps).collect());
            }
        }
        for (title, ours, theirs) in
            [("one session", &hands[0], &hands[1]), ("a session each", &hands[2], &hands[3])]
        {
            let work = |what: &str| format!("hand-off, 16 waiters, {title}: {what}");
            let half = micros(median(ours.half.iter().copied()));
            let ratio = median_ratio(&ours.half, &theirs.half);
            table.add(work("p50 / zookeeper-client's"), half, ratio, Target::AtMost(1.0));
            let late = micros(median(ours.late.iter().copied()));
            let ratio = median_ratio(&ours.late, &theirs.late);
            table.add(work("p99 / zookeeper-client's"), late, ratio, Target::None);
        }
    }

    /// How long each hand-off took in a line that has so many nodes.
    fn drain<C: Contender + Clone>(&self, line: &[C], nodes: u64) -> Vec<f64> {
        let server = &self.servers.nodes()[0];
        drain(&self.runtime, line, || server.figure("ephemerals_count") >= nodes)
    }

    /// How many watchers are told, and how many requests are sent, for each release.
    fn thousand(&self, pace: Pace, table: &mut Table) {
        let waiters = if pace.quick { 200 } else { 1000 };
        let rwlock = self.ours.rwlock("many").unwrap();
        let ours: Vec<_> = (0..=waiters).map(|_| Writer(rwlock.clone())).collect();
        let peers = self.peers_on(waiters + 1, |_| "/peer/many".to_owned());
        let figures = |name: &str| self.servers.nodes()[0].figure(name);
        let (events, watches) = ("sum_node_deleted_watch_count", waiters as u64);
        for (title, target) in [("", Target::AtMost(1.05)), (" of zookeeper-client", Target::None)]
        {
            let before = figures(events);
            let hand_offs = match title {
                "" => self.drain(&ours, watches + 1),
                _ => self.drain(&peers, watches + 1),
            };
            let told = (figures(events) - before) as f64 / (waiters + 1) as f64;
            let work = format!("{waiters} waiters: watch events per release{title}");
            let half = micros(median(hand_offs));
            table.add(work, format!("p50 of a hand-off {half}"), told, target);
        }
    }
}

async fn ours(servers: &ZooKeeperServers) -> Lockset {
    Lockset::builder(&servers.url("ours")).ttl(SESSION).connect().await.unwrap()
}

async fn peer(servers: &ZooKeeperServers) -> Client {
    let connector = Client::connector().with_session_timeout(SESSION);
    connector.connect(&servers.hosts()).await.unwrap()
}

#[derive(Clone)]
struct Peer {
    client: Client,
    folder: String,
}

impl Contender for Peer {
    async fn turn(&mut self, hold: Option<Hold>) -> Stamp {
        let containers = CreateMode::Container.with_acls(Acls::anyone_all());
        let options = LockOptions::new(Acls::anyone_all());
        let options = options.with_ancestor_options(containers).unwrap();
        let prefix = LockPrefix::new_curator(&self.folder, "lock-").unwrap();
        let lock = self.client.lock(prefix, b"", options).await.unwrap();
        let granted = now();
        Hold::pass(hold).await;
        let released = now();
        self.client.delete(lock.lock_path(), None).await.unwrap();
        // Its drop would delete it once more, and that could not be waited for.
        std::mem::forget(lock);
        Stamp { granted, released, token: 0 }
    }
}
