//! A quorum of five Redis servers against bare sockets and the crate rslock with the same servers.
//!
//! Not on one core, as a single server: five that take turns on it measure how they take turns.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use lockset::{Lockset, Mutex};
use lockset_testkit::stage::{RedisServer, RedlockNodes};
use rslock::LockManager;
use rustix::process::Signal;
use tokio::runtime::{Builder, Runtime};

use crate::child::Child;
use crate::measure::{Order, Pace, median, median_ratio, rotated};
use crate::table::{Table, Target, micros, per_second};
use crate::turns::Run;

pub(crate) const USAGE: &str = "redlock [--quick] [rows…]

rows: acquire, one task, 64 tasks, a frozen node, 16 contenders";

const NODES: usize = 5;
const ROUNDS: usize = 15;
const SLICE: Duration = Duration::from_millis(60);
/// Acquisitions in one slice of those that are timed one by one.
const EACH: usize = 200;
/// Servers without persistence are not used for so long after their start, so it is short here.
const TTL: Duration = Duration::from_secs(3);
const PROCESSES: usize = 4;
const CONTENDERS: usize = 16;
const GRANTS: usize = 320;

pub(crate) fn run(args: &[&str]) -> ExitCode {
    let order = Order::read(args);
    let pace = order.pace;
    let field = Field::new();
    let mut table = Table::default();
    let rows: [(&str, Measure); 5] = [
        ("acquire", Field::acquire),
        ("one task", |field, pace, table| field.cycles("one task", 1, pace, table)),
        ("64 tasks", |field, pace, table| field.cycles("64 tasks", 64, pace, table)),
        ("a frozen node", Field::frozen),
        ("16 contenders", Field::contenders),
    ];
    for (name, measure) in rows.into_iter().filter(|(name, _)| order.wants(name)) {
        eprintln!("measuring: {name}");
        measure(&field, pace, &mut table);
    }
    println!("-- redlock (five servers, all cores)");
    println!("{table}");
    ExitCode::SUCCESS
}

/// Measures rows.
type Measure = fn(&Field, Pace, &mut Table);

/// The servers, and both clients on one runtime.
struct Field {
    servers: RedlockNodes,
    url: String,
    runtime: Runtime,
    ours: Lockset,
    rslock: LockManager,
}

impl Field {
    fn new() -> Self {
        let servers = RedlockNodes::start(NODES, &[]);
        let url = format!("{}?max_ttl={}s", servers.url(), TTL.as_secs());
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        std::thread::sleep(TTL + Duration::from_secs(1));
        let ours = runtime.block_on(ours_at(&url));
        let rslock = rslock(&servers);
        Self { servers, url, runtime, ours, rslock }
    }

    /// Taking a free lock, against the slowest of five plain requests sent at once.
    fn acquire(&self, pace: Pace, table: &mut Table) {
        let mut bare = Bare::connect(&self.servers);
        let mutex = self.ours.mutex("acquire").unwrap();
        self.timed(&mutex);
        let (mut ours, mut floors) = (Vec::new(), Vec::new());
        for round in 0..pace.rounds(ROUNDS) {
            for place in rotated(2, round) {
                match place {
                    0 => ours.push(self.timed(&mutex)),
                    _ => floors.push(median((0..EACH).map(|_| bare.set_and_delete()))),
                }
            }
        }
        let half = micros(median(ours.iter().copied()));
        let ratio = median_ratio(&ours, &floors);
        let work = "acquire: p50 / slowest of five plain SET NX PX";
        table.add(work, half, ratio, Target::AtMost(1.5));
    }

    /// The median time that taking this lock took; giving it back is not timed.
    fn timed(&self, mutex: &Mutex) -> f64 {
        let each = (0..EACH).map(|_| {
            self.runtime.block_on(async {
                let start = Instant::now();
                let guard = mutex.lock().await.unwrap();
                let took = start.elapsed().as_secs_f64();
                guard.release().await.unwrap();
                took
            })
        });
        median(each)
    }

    fn cycles(&self, name: &str, tasks: usize, pace: Pace, table: &mut Table) {
        let names: Vec<String> = (0..tasks).map(|task| format!("cycle/{task}")).collect();
        let mutexes: Vec<Mutex> = names.iter().map(|name| self.ours.mutex(name).unwrap()).collect();
        let our_cycle = async |task: usize| {
            mutexes[task].lock().await.unwrap().release().await.unwrap();
        };
        let their_cycle = async |task: usize| {
            let lock = self.rslock.lock(names[task].as_str(), TTL).await.unwrap();
            self.rslock.unlock(&lock).await;
        };
        self.slice(tasks, SLICE, &our_cycle);
        self.slice(tasks, SLICE, &their_cycle);
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for round in 0..pace.rounds(ROUNDS) {
            for place in rotated(2, round) {
                match place {
                    0 => ours.push(self.slice(tasks, pace.span(SLICE), &our_cycle)),
                    _ => theirs.push(self.slice(tasks, pace.span(SLICE), &their_cycle)),
                }
            }
        }
        let speed = per_second(median(ours.iter().copied()));
        let ratio = median_ratio(&ours, &theirs);
        table.add(format!("{name}: speed / rslock's"), speed, ratio, Target::AtLeast(2.0));
    }

    /// Cycles per second of so many tasks.
    fn slice(&self, tasks: usize, span: Duration, cycle: &impl AsyncFn(usize)) -> f64 {
        let start = Instant::now();
        let cycles: usize = self.runtime.block_on(async {
            let each = (0..tasks).map(async |task| {
                let mut cycles = 0;
                while start.elapsed() < span {
                    cycle(task).await;
                    cycles += 1;
                }
                cycles
            });
            futures_util::future::join_all(each).await.into_iter().sum()
        });
        cycles as f64 / start.elapsed().as_secs_f64()
    }

    /// One server stands still; it has been noticed.
    fn frozen(&self, pace: Pace, table: &mut Table) {
        let mutex = self.ours.mutex("frozen").unwrap();
        let (mut with, mut without) = (Vec::new(), Vec::new());
        self.timed(&mutex);
        for _ in 0..pace.rounds(ROUNDS / 2) {
            with.push(self.timed(&mutex));
            self.servers.signal(&[NODES - 1], Signal::STOP);
            self.timed(&mutex);
            std::thread::sleep(Duration::from_millis(600));
            self.timed(&mutex);
            without.push(self.timed(&mutex));
            self.servers.signal(&[NODES - 1], Signal::CONT);
            // Until it is used again.
            std::thread::sleep(Duration::from_secs(1));
        }
        let half = micros(median(without.iter().copied()));
        let ratio = median_ratio(&without, &with);
        table.add("a frozen node: p50 / all well", half, ratio, Target::AtMost(1.2));
    }

    fn contenders(&self, pace: Pace, table: &mut Table) {
        let ttl = TTL.as_millis().to_string();
        let start = |peer: &str, address: &str| -> Vec<Child> {
            let child = |_| Child::of_this_program(&[peer, address, &ttl]);
            (0..PROCESSES).map(child).collect()
        };
        let mut ours = start("lockset", &self.url);
        let mut theirs = start("rslock", self.servers.url().trim_start_matches("redlock://"));
        let (mut rates, mut their_rates) = (Vec::new(), Vec::new());
        for round in 0..pace.rounds(5) {
            for place in rotated(2, round) {
                match place {
                    0 => rates.push(contend(&mut ours, GRANTS)),
                    _ => their_rates.push(contend(&mut theirs, GRANTS)),
                }
            }
        }
        let rate = per_second(median(rates.iter().copied()));
        let ratio = median_ratio(&rates, &their_rates);
        let work = "16 contenders in 4 processes: grants per second / rslock's";
        table.add(work, rate, ratio, Target::AtLeast(5.0));
    }
}

fn contend(children: &mut [Child], grants: usize) -> f64 {
    let order = format!("take ball {} {}", CONTENDERS / PROCESSES, grants / CONTENDERS);
    children.iter_mut().for_each(|child| child.tell(&order));
    children.iter_mut().for_each(|child| child.expect("queued"));
    children.iter_mut().for_each(|child| child.expect("done"));
    let stamps: Vec<_> = children.iter_mut().map(Child::stamps).collect();
    Run::new(&stamps).per_second
}

async fn ours_at(url: &str) -> Lockset {
    Lockset::builder(url).ttl(TTL).connect().await.unwrap()
}

fn rslock(servers: &RedlockNodes) -> LockManager {
    LockManager::new(servers.nodes.iter().map(RedisServer::url).collect::<Vec<_>>())
}

/// A bare blocking socket to each server.
struct Bare {
    sockets: Vec<TcpStream>,
}

impl Bare {
    fn connect(servers: &RedlockNodes) -> Self {
        let sockets = servers.nodes.iter().map(|node| {
            let socket = TcpStream::connect(("127.0.0.1", node.port())).unwrap();
            socket.set_nodelay(true).unwrap();
            socket
        });
        Self { sockets: sockets.collect() }
    }

    /// How long it takes until the slowest of all has answered. Giving back is not timed.
    fn set_and_delete(&mut self) -> f64 {
        let start = Instant::now();
        self.ask(b"SET bare 0123456789abcdef NX PX 30000\r\n", b"+OK\r\n");
        let took = start.elapsed().as_secs_f64();
        self.ask(b"DEL bare\r\n", b":1\r\n");
        took
    }

    fn ask(&mut self, request: &[u8], expected: &[u8]) {
        self.sockets.iter_mut().for_each(|socket| socket.write_all(request).unwrap());
        for socket in &mut self.sockets {
            let mut answer = vec![0; expected.len()];
            socket.read_exact(&mut answer).unwrap();
            assert_eq!(answer, expected);
        }
    }
}
