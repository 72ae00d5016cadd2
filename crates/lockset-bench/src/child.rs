//! Other processes: how they are told what to do, and what those of our own do.
//!
//! A word on stdin, an answer on stdout. `take NAME WAITERS EACH` is answered with `queued` and
//! `done`; `show` then with one line for each grant, and `end`. `wait PREFIX NAMES TASKS` is
//! answered with `queued`; those wait for good. A child ends with its stdin.

use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::poll;
use lockset::Lockset;
use rslock::LockManager;
use tokio::sync::mpsc;

use crate::redlock;
use crate::server::Server;
use crate::turns::{Stamp, Turns};

/// A process that obeys; killed when dropped.
#[derive(Debug)]
pub(crate) struct Child {
    process: std::process::Child,
    orders: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Child {
    /// Starts it and waits until it is ready.
    pub(crate) fn start(command: &mut Command) -> Self {
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let orders = process.stdin.take().unwrap();
        let answers = BufReader::new(process.stdout.take().unwrap()).lines();
        let mut child = Self { process, orders, answers };
        child.expect("ready");
        child
    }

    /// One of our own.
    pub(crate) fn ourselves(server: &Server) -> Self {
        Self::start(Command::new(std::env::current_exe().unwrap()).args(["child", &server.url()]))
    }

    pub(crate) fn tell(&mut self, order: &str) {
        writeln!(self.orders, "{order}").unwrap();
    }

    pub(crate) fn expect(&mut self, answer: &str) {
        assert_eq!(self.answer(), answer);
    }

    /// The stamps of the turns that were taken last.
    pub(crate) fn stamps(&mut self) -> Vec<Stamp> {
        self.tell("show");
        let mut stamps = Vec::new();
        loop {
            let line = self.answer();
            if line == "end" {
                return stamps;
            }
            let mut numbers = line.split(' ').map(|number| number.parse::<u64>().unwrap());
            let (granted, released) = (numbers.next().unwrap(), numbers.next().unwrap());
            stamps.push(Stamp { granted, released, token: numbers.next().unwrap_or_default() });
        }
    }

    fn answer(&mut self) -> String {
        self.answers.next().expect("the child ended").unwrap()
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// What a child of our own does until its stdin ends.
pub(crate) fn obey(url: &str) {
    let (orders, heard) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            let _ = orders.send(line);
        }
        // The parent that requested it is gone.
        std::process::exit(0);
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(obey_each(url, heard));
}

/// Whose locks a child takes.
enum Locks {
    Ours(Lockset),
    Rslock(LockManager),
}

impl Locks {
    async fn at(url: &str) -> Self {
        match url.strip_prefix(redlock::RSLOCK) {
            Some(url) => Self::Rslock(redlock::rslock_at(url)),
            None if url.starts_with("redlock:") => Self::Ours(redlock::ours_at(url).await),
            None => Self::Ours(Lockset::connect(url).await.unwrap()),
        }
    }

    async fn take(&self, name: &str, waiters: usize, each: usize) -> Vec<Stamp> {
        match self {
            Self::Ours(locks) => take(locks, name, waiters, each).await,
            Self::Rslock(locks) => redlock::contend_by_rslock(locks, name, waiters, each).await,
        }
    }
}

async fn obey_each(url: &str, mut orders: mpsc::UnboundedReceiver<String>) {
    let locks = Locks::at(url).await;
    let mut stamps = Vec::new();
    println!("ready");
    while let Some(line) = orders.recv().await {
        let words: Vec<&str> = line.split(' ').collect();
        match (words.as_slice(), &locks) {
            (["take", name, waiters, each], locks) => {
                stamps = locks.take(name, waiters.parse().unwrap(), each.parse().unwrap()).await;
            }
            (["show"], _) => show(&stamps),
            (["wait", prefix, names, tasks], Locks::Ours(locks)) => {
                wait(locks, prefix, names.parse().unwrap(), tasks.parse().unwrap()).await;
            }
            (other, _) => panic!("no such order: {other:?}"),
        }
    }
}

async fn take(locks: &Lockset, name: &str, waiters: usize, each: usize) -> Vec<Stamp> {
    let mutex = locks.mutex(name).unwrap();
    let turns = Turns::start(&mutex, waiters, each).await;
    println!("queued");
    let stamps = turns.finish().await;
    println!("done");
    stamps
}

fn show(stamps: &[Stamp]) {
    let mut output = std::io::stdout().lock();
    for Stamp { granted, released, token } in stamps {
        writeln!(output, "{granted} {released} {token}").unwrap();
    }
    writeln!(output, "end").unwrap();
}

/// Leaves behind `tasks` tasks for each of `names` names, which wait for good.
async fn wait(locks: &Lockset, prefix: &str, names: usize, tasks: usize) {
    let queued = Arc::new(AtomicUsize::new(0));
    for number in 0..names {
        let mutex = locks.mutex(format!("{prefix}/{number}")).unwrap();
        for _ in 0..tasks {
            let (mutex, queued) = (mutex.clone(), queued.clone());
            tokio::spawn(async move {
                let mut locking = std::pin::pin!(mutex.lock());
                assert!(poll!(locking.as_mut()).is_pending());
                queued.fetch_add(1, Ordering::AcqRel);
                panic!("the lock was granted: {:?}", locking.await);
            });
        }
    }
    while queued.load(Ordering::Acquire) < names * tasks {
        tokio::task::yield_now().await;
    }
    println!("queued");
}
