//! The embedded engine against bare SQLite: a cycle, a hand-off between processes, fairness.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, missing_docs)]

mod common;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{ROUNDS, cpu_time, median, note, per_call, percentile, report};
use lockset::clock::Clock;
use lockset::{Guard, Lockset};

const CYCLES: u32 = 2_000;
const HAND_OFFS: usize = 1_500;
const PROCESSES: usize = 8;
const FAIR_FOR: Duration = Duration::from_secs(3);

fn main() {
    // This program is also the other process of its own measurements.
    let role = std::env::var("LOCKSET_BENCH_ROLE").unwrap_or_default();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    match role.as_str() {
        "" => runtime.block_on(measure()),
        "partner" => runtime.block_on(hand_off(&std::env::var("LOCKSET_BENCH_URL").unwrap())),
        "contender" => runtime.block_on(contend(&std::env::var("LOCKSET_BENCH_URL").unwrap())),
        "echo" => echo(Path::new(&std::env::var("LOCKSET_BENCH_URL").unwrap())),
        other => panic!("no role {other}"),
    }
}

async fn measure() {
    println!("-- local");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bench.db");
    let url = format!("local:{}", file.display());
    let transaction = a_cycle_against_sqlite(&url, &file).await;
    let datagram = datagram_one_way(folder.path());
    note("one Unix datagram to another process", datagram);
    hand_off_between_processes(&url, transaction + datagram).await;
    fairness(&url);
    many_guards(&url).await;
}

/// Answers what one bare transaction costs.
async fn a_cycle_against_sqlite(url: &str, file: &Path) -> f64 {
    let locks = Lockset::connect(url).await.unwrap();
    let ours = locks.mutex("bench").unwrap();
    let bare = rusqlite::Connection::open(file).unwrap();
    bare.pragma_update(None, "synchronous", "NORMAL").unwrap();
    bare.pragma_update(None, "wal_autocheckpoint", 4000).unwrap();
    bare.execute_batch(
        "CREATE TABLE bare (name TEXT, seq INTEGER, token INTEGER, PRIMARY KEY (name, seq))
         WITHOUT ROWID",
    )
    .unwrap();
    let execute = |sql: &str| bare.prepare_cached(sql).unwrap().execute([]).unwrap();
    let (mut a, mut b) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        a.push(per_call(CYCLES, || {
            execute("BEGIN IMMEDIATE");
            execute("INSERT INTO bare VALUES ('bench', 1, 7)");
            execute("COMMIT");
            execute("BEGIN IMMEDIATE");
            execute("DELETE FROM bare WHERE name = 'bench' AND seq = 1");
            execute("COMMIT");
        }));
        let start = Instant::now();
        for _ in 0..CYCLES {
            ours.lock().await.unwrap().release().await.unwrap();
        }
        b.push(start.elapsed().as_secs_f64() / f64::from(CYCLES));
    }
    let (bare, ours) = (median(a), median(b));
    note("lock + release, uncontended", ours);
    note("two bare SQLite transactions", bare);
    let ratio = bare / ours;
    report("speed of lock + release / two bare transactions", ratio, ">= 0.7", ratio >= 0.7);
    locks.close().await.unwrap();
    bare / 2.0
}

fn datagram_one_way(folder: &Path) -> f64 {
    let (here, there) = (folder.join("here"), folder.join("there"));
    let socket = UnixDatagram::bind(&here).unwrap();
    let mut child = ourselves("echo", folder.to_str().unwrap());
    while socket.send_to(b"?", &there).is_err() {
        std::thread::sleep(Duration::from_millis(1));
    }
    let mut buffer = [0; 64];
    socket.recv(&mut buffer).unwrap();
    let round_trip = per_call(5_000, || {
        socket.send_to(b"a letter of usual length", &there).unwrap();
        socket.recv(&mut buffer).unwrap();
    });
    child.kill().unwrap();
    child.wait().unwrap();
    round_trip / 2.0
}

fn echo(folder: &Path) {
    let socket = UnixDatagram::bind(folder.join("there")).unwrap();
    let mut buffer = [0; 64];
    while let Ok(length) = socket.recv(&mut buffer) {
        socket.send_to(&buffer[..length], folder.join("here")).unwrap();
    }
}

/// From just before a release in one process to the other process having its guard.
async fn hand_off_between_processes(url: &str, floor: f64) {
    let mut partner = ourselves("partner", url);
    let output = BufReader::new(partner.stdout.take().unwrap());
    let mut stamps = stamps(url).await;
    for line in output.lines() {
        let numbers: Vec<u64> = line.unwrap().split(' ').map(|n| n.parse().unwrap()).collect();
        stamps.push((numbers[0], numbers[1], numbers[2]));
    }
    assert!(partner.wait().unwrap().success());
    stamps.sort();
    // Stamps are (token, granted, released); the same clock serves both processes.
    let mut times: Vec<f64> =
        stamps.windows(2).map(|pair| pair[1].1.saturating_sub(pair[0].2) as f64 / 1e9).collect();
    let half = percentile(&mut times, 0.5);
    note("hand-off to another process, p50", half);
    note("hand-off to another process, p99", percentile(&mut times, 0.99));
    let ratio = half / floor;
    report("hand-off p50 / (one transaction + one datagram)", ratio, "<= 6", ratio <= 6.0);
}

async fn hand_off(url: &str) {
    let mut output = std::io::stdout().lock();
    for (token, granted, released) in stamps(url).await {
        writeln!(output, "{token} {granted} {released}").unwrap();
    }
}

async fn stamps(url: &str) -> Vec<(u64, u64, u64)> {
    let locks = Lockset::connect(url).await.unwrap();
    locks.barrier("both-here", 2).unwrap().wait().await.unwrap();
    let (mutex, clock) = (locks.mutex("ball").unwrap(), Clock::boot());
    let mut stamps = Vec::with_capacity(HAND_OFFS);
    for _ in 0..HAND_OFFS {
        let guard = mutex.lock().await.unwrap();
        let granted = clock.now().as_nanos();
        std::thread::sleep(Duration::from_micros(300)); // the other one queues meanwhile
        let (token, released) = (guard.token().get(), clock.now().as_nanos());
        guard.release().await.unwrap();
        stamps.push((token, granted, released));
    }
    locks.close().await.unwrap();
    stamps
}

fn fairness(url: &str) {
    let contenders: Vec<Child> = (0..PROCESSES).map(|_| ourselves("contender", url)).collect();
    let counts: Vec<f64> = contenders
        .into_iter()
        .map(|child| {
            let output = child.wait_with_output().unwrap();
            String::from_utf8(output.stdout).unwrap().trim().parse().unwrap()
        })
        .collect();
    let (sum, squares) = counts.iter().fold((0.0, 0.0), |(s, q), n| (s + n, q + n * n));
    let jain = sum * sum / (PROCESSES as f64 * squares);
    println!("    grants per second, 8 processes {:>42.0}", sum / FAIR_FOR.as_secs_f64());
    report("fairness among 8 processes (Jain)", jain, ">= 0.99", jain >= 0.99);
}

async fn contend(url: &str) {
    let locks = Lockset::connect(url).await.unwrap();
    let mutex = locks.mutex("contended").unwrap();
    locks.barrier("all-here", PROCESSES as u32).unwrap().wait().await.unwrap();
    let (start, mut count) = (Instant::now(), 0_u64);
    while start.elapsed() < FAIR_FOR {
        mutex.lock().await.unwrap().release().await.unwrap();
        count += 1;
    }
    println!("{count}");
    locks.close().await.unwrap();
}

async fn many_guards(url: &str) {
    let locks = Lockset::connect(url).await.unwrap();
    let mut guards: Vec<Guard> = Vec::new();
    for number in 0..10_000 {
        guards.push(locks.mutex(format!("held/{number}")).unwrap().lock().await.unwrap());
    }
    let (cpu, start) = (cpu_time(), Instant::now());
    tokio::time::sleep(Duration::from_secs(21)).await; // two renewals of each
    let share = (cpu_time() - cpu).as_secs_f64() / start.elapsed().as_secs_f64();
    assert!(guards.iter().all(|guard| guard.state() == lockset::State::Held));
    report("10,000 guards held: share of a core, in %", share * 100.0, "< 1", share < 0.01);
    locks.close().await.unwrap();
}

fn ourselves(role: &str, url: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .env("LOCKSET_BENCH_ROLE", role)
        .env("LOCKSET_BENCH_URL", url)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}
