//! Two clients of one server, measured in the same rounds: those who lock and release by turns, and
//! what is seen of them.

use std::time::{Duration, Instant};

use lockset::{Mutex, RwLock};
use tokio::runtime::Runtime;
use tokio::sync::oneshot;

use crate::measure::{median, now, percentile};
use crate::server::wait_until;
use crate::turns::{Run, Stamp};

/// A contender that locks and releases, and records when.
pub(crate) trait Contender: Send + 'static {
    fn turn(&mut self, hold: Option<Hold>) -> impl Future<Output = Stamp> + Send;
}

/// A holder says that it has the lock, and keeps it until it is told to go on.
pub(crate) struct Hold {
    granted: oneshot::Sender<()>,
    go_on: oneshot::Receiver<()>,
}

impl Hold {
    pub(crate) async fn pass(hold: Option<Self>) {
        if let Some(Self { granted, go_on }) = hold {
            granted.send(()).unwrap();
            go_on.await.unwrap();
        }
    }
}

#[derive(Clone)]
pub(crate) struct Ours(pub(crate) Mutex);

impl Contender for Ours {
    async fn turn(&mut self, hold: Option<Hold>) -> Stamp {
        let guard = self.0.lock().await.unwrap();
        let (granted, token) = (now(), guard.token().get());
        Hold::pass(hold).await;
        let released = now();
        guard.release().await.unwrap();
        Stamp { granted, released, token }
    }
}

/// Writers do not wait for each other in their process: each stands in line at the server.
#[derive(Clone)]
pub(crate) struct Writer(pub(crate) RwLock);

impl Contender for Writer {
    async fn turn(&mut self, hold: Option<Hold>) -> Stamp {
        let guard = self.0.write().await.unwrap();
        let (granted, token) = (now(), guard.token().get());
        Hold::pass(hold).await;
        let released = now();
        guard.release().await.unwrap();
        Stamp { granted, released, token }
    }
}

/// Cycles of all tasks for so long: how many a second, and how many there were.
pub(crate) fn cycles<C: Contender>(
    runtime: &Runtime,
    tasks: &mut Vec<C>,
    span: Duration,
) -> (f64, u64) {
    let start = Instant::now();
    let cycles = runtime.block_on(async {
        let running: Vec<_> =
            tasks.drain(..).map(|task| tokio::spawn(cycle(task, start + span))).collect();
        let mut cycles = 0;
        for task in running {
            let (task, count) = task.await.unwrap();
            tasks.push(task);
            cycles += count;
        }
        cycles
    });
    (cycles as f64 / start.elapsed().as_secs_f64(), cycles)
}

async fn cycle<C: Contender>(mut task: C, until: Instant) -> (C, u64) {
    let mut cycles = 0;
    while Instant::now() < until {
        task.turn(None).await;
        cycles += 1;
    }
    (task, cycles)
}

/// The first holds until all others are in line; answers how long each hand-off took.
pub(crate) fn drain<C: Contender + Clone>(
    runtime: &Runtime,
    line: &[C],
    are_in_line: impl FnMut() -> bool,
) -> Vec<f64> {
    let (tell, granted) = oneshot::channel();
    let (go_on, wait) = oneshot::channel();
    let mut line = line.iter().cloned();
    let mut first = line.next().expect("a line is not empty");
    let spawn = |mut one: C| runtime.spawn(async move { one.turn(None).await });
    let holding = Hold { granted: tell, go_on: wait };
    let holder = runtime.spawn(async move { first.turn(Some(holding)).await });
    runtime.block_on(granted).unwrap();
    let waiting: Vec<_> = line.map(spawn).collect();
    wait_until("all are in line", are_in_line);
    // Those who do not come to the server are in line as soon as they have run once.
    std::thread::sleep(Duration::from_millis(5));
    go_on.send(()).unwrap();
    let stamps = runtime.block_on(async {
        let mut stamps = vec![holder.await.unwrap()];
        for one in waiting {
            stamps.push(one.await.unwrap());
        }
        stamps
    });
    Run::new(&[stamps]).hand_offs
}

/// Slices of cycles: how many a second, and how many writes each cost.
#[derive(Default)]
pub(crate) struct Slices {
    pub(crate) per_second: Vec<f64>,
    pub(crate) writes: Vec<f64>,
}

impl Slices {
    pub(crate) fn push(&mut self, (per_second, writes): (f64, f64)) {
        self.per_second.push(per_second);
        self.writes.push(writes);
    }
}

/// The percentiles of each round of hand-offs.
#[derive(Default)]
pub(crate) struct Hand {
    pub(crate) half: Vec<f64>,
    pub(crate) late: Vec<f64>,
}

impl Hand {
    pub(crate) fn round(&mut self, hand_offs: Vec<f64>) {
        self.half.push(median(hand_offs.iter().copied()));
        self.late.push(percentile(hand_offs, 0.99));
    }
}
