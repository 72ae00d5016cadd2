//! The driver's side of the protocol that `peers/README.md` describes, for locks in Rust.
//!
//! The crate of the Rust peers includes this file, so that it needs no library but tokio.

use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex as Shared};
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::turns::{Lock, Stamp, Turns, poll_once};

/// How many tasks take locks side by side for `hold`.
const SIDE_BY_SIDE: usize = 64;

/// A client: makes locks by name.
pub(crate) trait Locks: Send + Sync + 'static {
    type Lock: Lock;

    fn named(&self, name: &str) -> Self::Lock;

    /// No lock of an earlier order is in use any more.
    fn begin(&self) {}
}

/// Obeys the orders on stdin until it ends. One thread runs everything, as in most services that
/// share a core with other things; what a library starts itself comes on top.
pub(crate) fn obey<L: Locks>(version: &str, connect: impl AsyncFnOnce() -> L) {
    let (orders, heard) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            let _ = orders.send(line);
        }
        // The parent that gave the orders is gone.
        std::process::exit(0);
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let driver = Driver { locks: connect().await, held: Vec::new(), stamps: Arc::default() };
        println!("ready {version}");
        driver.obey(heard).await;
    });
}

struct Driver<L: Locks> {
    locks: L,
    held: Vec<(L::Lock, <L::Lock as Lock>::Held)>,
    stamps: Arc<Shared<Vec<Stamp>>>,
}

impl<L: Locks> Driver<L> {
    async fn obey(mut self, mut orders: mpsc::UnboundedReceiver<String>) {
        while let Some(line) = orders.recv().await {
            let words: Vec<&str> = line.split(' ').collect();
            let number = |place: usize| words[place].parse::<usize>().unwrap();
            match words[0] {
                "cycles" => self.cycles(words[1], number(2), number(3)).await,
                "hold" => self.hold(words[1], number(2)).await,
                "free" => self.free().await,
                "take" => self.take(words[1], number(2), number(3)).await,
                "show" => self.show(),
                "wait" => self.wait(words[1], number(2), number(3)).await,
                "contend" => self.contend(words[1], number(2), number(3)).await,
                other => panic!("no such order: {other}"),
            }
        }
    }

    async fn cycles(&self, prefix: &str, tasks: usize, millis: usize) {
        self.locks.begin();
        let start = Instant::now();
        let locks = (0..tasks).map(|task| self.locks.named(&format!("{prefix}/{task}")));
        let counts = count_until(locks, start + Duration::from_millis(millis as u64)).await;
        println!("cycles {} {}", counts.iter().sum::<u64>(), start.elapsed().as_nanos());
    }

    async fn contend(&self, name: &str, tasks: usize, millis: usize) {
        self.locks.begin();
        let until = Instant::now() + Duration::from_millis(millis as u64);
        let counts = count_until((0..tasks).map(|_| self.locks.named(name)), until).await;
        let counts: Vec<String> = counts.iter().map(u64::to_string).collect();
        println!("counts {}", counts.join(" "));
    }

    async fn hold(&mut self, prefix: &str, count: usize) {
        let parts: Vec<JoinHandle<_>> = (0..SIDE_BY_SIDE.min(count))
            .map(|part| {
                let numbers = (part..count).step_by(SIDE_BY_SIDE);
                let locks: Vec<L::Lock> =
                    numbers.map(|number| self.locks.named(&format!("{prefix}/{number}"))).collect();
                tokio::spawn(async move {
                    let mut held = Vec::with_capacity(locks.len());
                    for lock in locks {
                        let one = lock.lock().await;
                        held.push((lock, one));
                    }
                    held
                })
            })
            .collect();
        for part in parts {
            self.held.extend(part.await.unwrap());
        }
        println!("held");
    }

    async fn free(&mut self) {
        for (lock, held) in self.held.drain(..) {
            lock.unlock(held).await;
        }
        self.locks.begin();
    }

    async fn take(&self, name: &str, waiters: usize, each: usize) {
        let locks = (0..waiters).map(|_| self.locks.named(name));
        let turns = Turns::start(locks, each).await;
        println!("queued");
        let stamps = self.stamps.clone();
        tokio::spawn(async move {
            *stamps.lock().unwrap() = turns.finish().await;
            println!("done");
        });
    }

    fn show(&self) {
        let mut output = std::io::stdout().lock();
        for Stamp { granted, released, token } in self.stamps.lock().unwrap().drain(..) {
            writeln!(output, "{granted} {released} {token}").unwrap();
        }
        writeln!(output, "end").unwrap();
    }

    /// Leaves behind `tasks` tasks for each of `names` names, which wait for good.
    async fn wait(&self, prefix: &str, names: usize, tasks: usize) {
        let queued = Arc::new(AtomicUsize::new(0));
        for number in 0..names {
            for _ in 0..tasks {
                let lock = self.locks.named(&format!("{prefix}/{number}"));
                let queued = queued.clone();
                tokio::spawn(async move {
                    let mut locking = std::pin::pin!(lock.lock());
                    assert!(poll_once(locking.as_mut()).await.is_none());
                    queued.fetch_add(1, Ordering::AcqRel);
                    locking.await;
                    panic!("the lock was granted");
                });
            }
        }
        while queued.load(Ordering::Acquire) < names * tasks {
            tokio::task::yield_now().await;
        }
        println!("queued");
    }
}

/// How often each locks and releases until then.
async fn count_until<K: Lock>(locks: impl Iterator<Item = K>, until: Instant) -> Vec<u64> {
    let tasks: Vec<JoinHandle<u64>> = locks
        .map(|lock| {
            tokio::spawn(async move {
                let mut count = 0;
                while Instant::now() < until {
                    let held = lock.lock().await;
                    lock.unlock(held).await;
                    count += 1;
                }
                count
            })
        })
        .collect();
    let mut counts = Vec::with_capacity(tasks.len());
    for task in tasks {
        counts.push(task.await.unwrap());
    }
    counts
}
