//! Many tasks on many names: no violation, and nothing that is left behind.

use std::fmt::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use lockset::Lockset;
use lockset_testkit::stage::{EtcdServers, RedisServer};

use crate::backend::EngineKind;
use crate::schedule::Random;

/// What to run.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// Redis or etcd.
    pub engine: EngineKind,
    /// How long.
    pub seconds: u64,
    /// How many tasks.
    pub tasks: usize,
    /// How many names.
    pub names: usize,
}

/// How many connections the tasks share.
const CLIENTS: usize = 8;
/// Memory that an allocator may keep, and a runtime may need for what it has seen.
const KEPT_MEMORY: u64 = 64 << 20;
/// What `statm` counts in.
const PAGE: u64 = 4096;

/// What came out.
#[derive(Clone, Debug, Default)]
pub struct LoadOutcome {
    /// Acquisitions.
    pub grants: usize,
    /// Acquisitions that failed.
    pub failures: usize,
    /// Two holders at once, or a token that did not grow.
    pub violations: Vec<String>,
    /// What was not back where it began.
    pub leaks: Vec<String>,
    /// The median, 99 and 99.9 percent of the times to acquire, in microseconds.
    pub latencies: [u64; 3],
    /// Over time: seconds, descriptors, and memory in bytes.
    pub samples: Vec<(u64, usize, u64)>,
}

/// Runs it.
///
/// # Panics
/// If the server cannot be started.
pub fn run(options: &LoadOptions) -> LoadOutcome {
    let server = Server::start(options.engine);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let mut outcome = runtime.block_on(load(options, &server));
    // What the closed clients still have to do is done when their runtime is idle.
    let tasks = runtime.metrics().num_alive_tasks();
    drop(runtime);
    if tasks > 0 {
        outcome.leaks.push(format!("{tasks} tasks are alive"));
    }
    outcome.leaks.extend(server.left_behind());
    outcome
}

enum Server {
    Redis(RedisServer),
    Etcd(EtcdServers),
}

impl Server {
    fn start(engine: EngineKind) -> Self {
        match engine {
            EngineKind::Redis => Server::Redis(RedisServer::start()),
            EngineKind::Etcd => Server::Etcd(EtcdServers::start(1)),
            other => panic!("there is no load test on {other}"),
        }
    }

    fn url(&self) -> String {
        match self {
            Server::Redis(server) => server.url(),
            Server::Etcd(servers) => servers.url("load"),
        }
    }

    /// What is left when all clients are closed. Fences stay on purpose.
    fn left_behind(&self) -> Vec<String> {
        let mut left = Vec::new();
        match self {
            Server::Redis(server) => {
                let connections = server.ask(&["CLIENT", "LIST"]).lines().count();
                if connections > 1 {
                    left.push(format!("{} connections", connections - 1));
                }
            }
            Server::Etcd(servers) => {
                let (keys, leases) = (servers.keys("load").len(), servers.leases().len());
                if keys > 0 {
                    left.push(format!("{keys} keys in etcd"));
                }
                if leases > 0 {
                    left.push(format!("{leases} leases in etcd"));
                }
            }
        }
        left
    }
}

/// Who holds a name, and its last token.
#[derive(Debug, Default)]
struct NameState {
    is_held: AtomicBool,
    last_token: Mutex<u64>,
}

#[derive(Debug)]
struct Shared {
    names: Vec<NameState>,
    grants: AtomicUsize,
    failures: AtomicUsize,
    violations: Mutex<Vec<String>>,
    micros: Mutex<Vec<u32>>,
    is_over: AtomicBool,
}

async fn load(options: &LoadOptions, server: &Server) -> LoadOutcome {
    let mut outcome = LoadOutcome::default();
    // Once before, so that what is made once does not look like a leak.
    warm_up(server).await;
    let before = (descriptors(), memory());
    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        clients.push(Lockset::connect(&server.url()).await.unwrap());
    }
    let shared = Arc::new(Shared {
        names: (0..options.names).map(|_| NameState::default()).collect(),
        grants: AtomicUsize::new(0),
        failures: AtomicUsize::new(0),
        violations: Mutex::default(),
        micros: Mutex::default(),
        is_over: AtomicBool::new(false),
    });
    let tasks: Vec<_> = (0..options.tasks)
        .map(|task| {
            tokio::spawn(work(shared.clone(), clients[task % CLIENTS].clone(), task as u64))
        })
        .collect();
    let began = Instant::now();
    let every = (options.seconds / 60).max(1);
    while began.elapsed() < Duration::from_secs(options.seconds) {
        outcome.samples.push((began.elapsed().as_secs(), descriptors(), memory()));
        tokio::time::sleep(Duration::from_secs(every)).await;
    }
    shared.is_over.store(true, Ordering::Relaxed);
    for task in tasks {
        task.await.unwrap();
    }
    for state in clients[0].list("").await.unwrap() {
        let (holders, waiters) = (state.holders.len(), state.waiters.len());
        let name = state.name;
        if holders + waiters > 0 {
            outcome.leaks.push(format!("{name}: {holders} holders and {waiters} waiters"));
        }
    }
    for client in &clients {
        client.close().await.unwrap();
    }
    drop(clients);
    outcome.grants = shared.grants.load(Ordering::Relaxed);
    outcome.failures = shared.failures.load(Ordering::Relaxed);
    outcome.violations = shared.violations.lock().unwrap().clone();
    outcome.latencies = percentiles(std::mem::take(&mut shared.micros.lock().unwrap()));
    drop(shared);
    outcome.leaks.extend(compare(before).await);
    outcome
}

async fn warm_up(server: &Server) {
    let locks = Lockset::connect(&server.url()).await.unwrap();
    locks.mutex("warm-up").unwrap().lock().await.unwrap().release().await.unwrap();
    locks.close().await.unwrap();
}

async fn work(shared: Arc<Shared>, locks: Lockset, seed: u64) {
    let mut random = Random::new(seed);
    let mut micros = Vec::new();
    while !shared.is_over.load(Ordering::Relaxed) {
        let number = random.below(shared.names.len() as u64) as usize;
        let name = &shared.names[number];
        let began = Instant::now();
        let mutex = locks.mutex(format!("load/{number}").as_str()).unwrap();
        let Ok(guard) = mutex.lock_within(Duration::from_secs(30)).await else {
            shared.failures.fetch_add(1, Ordering::Relaxed);
            continue;
        };
        micros.push(began.elapsed().as_micros() as u32);
        let complain = |what: &str| {
            let text = format!("load/{number}, token {}: {what}", guard.token());
            shared.violations.lock().unwrap().push(text);
        };
        if name.is_held.swap(true, Ordering::SeqCst) {
            complain("held twice");
        }
        let last = std::mem::replace(&mut *name.last_token.lock().unwrap(), guard.token().get());
        if last >= guard.token().get() {
            complain("the token did not grow");
        }
        tokio::time::sleep(Duration::from_millis(random.below(5))).await;
        name.is_held.store(false, Ordering::SeqCst);
        match guard.release().await {
            Ok(()) => drop(shared.grants.fetch_add(1, Ordering::Relaxed)),
            Err(_) => drop(shared.failures.fetch_add(1, Ordering::Relaxed)),
        }
    }
    shared.micros.lock().unwrap().append(&mut micros);
}

/// What is not back where it began, after some seconds in which it may get there.
async fn compare(before: (usize, u64)) -> Vec<String> {
    let mut leaks = Vec::new();
    for _ in 0..50 {
        leaks.clear();
        let (files, bytes) = (descriptors(), memory());
        if files > before.0 {
            leaks.push(format!("{} descriptors, {} at the start", files, before.0));
        }
        if bytes > before.1 + KEPT_MEMORY {
            let mega = |bytes: u64| bytes >> 20;
            leaks.push(format!("{} MB, {} MB at the start", mega(bytes), mega(before.1)));
        }
        if leaks.is_empty() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    leaks
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

/// The memory of this process.
fn memory() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let resident = pages.split_whitespace().nth(1).and_then(|pages| pages.parse::<u64>().ok());
    resident.unwrap_or(0) * PAGE
}

fn percentiles(mut micros: Vec<u32>) -> [u64; 3] {
    micros.sort_unstable();
    let at = |part: f64| {
        let place = (micros.len() as f64 * part) as usize;
        micros.get(place.min(micros.len().saturating_sub(1))).copied().unwrap_or(0).into()
    };
    [at(0.5), at(0.99), at(0.999)]
}

/// Descriptors and memory over time, as SVG.
///
/// # Errors
/// If the file cannot be written.
pub fn plot(outcome: &LoadOutcome, path: &Path) -> std::io::Result<()> {
    let samples = &outcome.samples;
    let end = samples.last().map_or(1, |(at, ..)| (*at).max(1)) as f64;
    let line = |value: &dyn Fn(&(u64, usize, u64)) -> f64, colour: &str| {
        let most = samples.iter().map(value).fold(1.0, f64::max);
        let points = samples.iter().map(|one| {
            format!(
                "{:.1},{:.1}",
                60.0 + 700.0 * one.0 as f64 / end,
                250.0 - 200.0 * value(one) / most
            )
        });
        let points = points.collect::<Vec<_>>().join(" ");
        format!("<polyline points=\"{points}\" fill=\"none\" stroke=\"{colour}\"/>\n")
    };
    let mut body = line(&|one| one.1 as f64, "#3b6ea5");
    body.push_str(&line(&|one| one.2 as f64, "#a5733b"));
    let last = samples.last().copied().unwrap_or_default();
    writeln!(
        body,
        "<text x=\"60\" y=\"30\">descriptors (blue, at last {}) and memory (brown, at last {} MB) over {} s</text>",
        last.1,
        last.2 >> 20,
        last.0,
    )
    .unwrap();
    let size = "width=\"800\" height=\"280\" font-family=\"sans-serif\" font-size=\"12\"";
    std::fs::write(
        path,
        format!("<svg xmlns=\"http://www.w3.org/2000/svg\" {size}>\n{body}</svg>\n"),
    )
}
