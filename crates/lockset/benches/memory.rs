//! The reference engine and the front: cost of a cycle, ten thousand waiters, ten thousand guards.
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs, reason = "a benchmark")]

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{ROUNDS, cpu_time, median, note, report};
use lockset::{Guard, Lockset, Mutex};

fn main() {
    println!("-- memory");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        a_cycle_against_tokio().await;
        many_waiters().await;
        many_guards().await;
    });
}

async fn a_cycle_against_tokio() {
    const CYCLES: u32 = 50_000;
    let locks = Lockset::connect("memory:").await.unwrap();
    let ours = locks.mutex("bench").unwrap();
    let theirs = Arc::new(tokio::sync::Mutex::new(()));
    let (mut a, mut b) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let start = Instant::now();
        for _ in 0..CYCLES {
            drop(std::hint::black_box(theirs.clone().lock_owned().await));
        }
        a.push(start.elapsed().as_secs_f64() / f64::from(CYCLES));
        let start = Instant::now();
        for _ in 0..CYCLES {
            ours.lock().await.unwrap().release().await.unwrap();
        }
        b.push(start.elapsed().as_secs_f64() / f64::from(CYCLES));
    }
    let (theirs, ours) = (median(a), median(b));
    note("lock + release, uncontended", ours);
    let ratio = ours / theirs;
    report("lock + release / tokio's Mutex with a fresh Arc", ratio, "<= 20", ratio <= 20.0);
}

async fn many_waiters() {
    let (few, many) = (serve(1_000).await, serve(10_000).await);
    note("one of 10,000 waiters served", many);
    let ratio = many / few;
    report("time per waiter, 10,000 / 1,000 waiters on a name", ratio, "<= 1.5", ratio <= 1.5);
}

/// Seconds per waiter; each must be served once, in the order in which it came.
async fn serve(waiters: usize) -> f64 {
    let mut rounds = Vec::new();
    for _ in 0..5 {
        let locks = Lockset::connect("memory:").await.unwrap();
        let mutex = locks.mutex("queue").unwrap();
        let first = mutex.lock().await.unwrap();
        let (served, mut order) = tokio::sync::mpsc::unbounded_channel();
        let one = |number: usize, mutex: Mutex| {
            let served = served.clone();
            async move {
                let guard = mutex.lock().await.unwrap();
                served.send(number).unwrap();
                guard.release().await.unwrap();
            }
        };
        for number in 0..waiters {
            tokio::spawn(one(number, mutex.clone()));
        }
        tokio::task::yield_now().await; // all of them stand in line now
        let start = Instant::now();
        first.release().await.unwrap();
        for number in 0..waiters {
            assert_eq!(order.recv().await, Some(number), "served out of order");
        }
        rounds.push(start.elapsed().as_secs_f64() / waiters as f64);
        locks.close().await.unwrap();
    }
    median(rounds)
}

async fn many_guards() {
    const GUARDS: usize = 10_000;
    let locks = Lockset::connect("memory:").await.unwrap();
    let mut guards: Vec<Guard> = Vec::new();
    for number in 0..GUARDS {
        guards.push(locks.mutex(format!("held/{number}")).unwrap().lock().await.unwrap());
    }
    let (cpu, start) = (cpu_time(), Instant::now());
    tokio::time::sleep(Duration::from_secs(21)).await; // two renewals of each
    let share = (cpu_time() - cpu).as_secs_f64() / start.elapsed().as_secs_f64();
    assert!(guards.iter().all(|guard| guard.state() == lockset::State::Held));
    report("10,000 guards held: share of a core, in %", share * 100.0, "< 1", share < 0.01);
    locks.close().await.unwrap();
}
