//! Waiters that take turns with one lock, and what their stamps tell.

use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex as Shared};
use std::task::Poll;

use tokio::sync::Notify;

use crate::measure::now;

/// A lock of one name, of whichever library.
pub(crate) trait Lock: Send + Sync + 'static {
    type Held: Send + 'static;

    /// Waits as long as it takes.
    fn lock(&self) -> impl Future<Output = Self::Held> + Send;

    fn unlock(&self, held: Self::Held) -> impl Future<Output = ()> + Send;

    /// Zero where the lock has none.
    fn token(_held: &Self::Held) -> u64 {
        0
    }
}

/// One grant: when `lock()` returned and when `release()` was called.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stamp {
    pub(crate) granted: u64,
    pub(crate) released: u64,
    /// Zero where the lock has none.
    pub(crate) token: u64,
}

/// Tasks that wait for one lock. They are not joined but report by a shared list: a hand-off is to
/// wake only the next holder.
#[derive(Debug)]
pub(crate) struct Turns {
    stamps: Shared<Vec<Stamp>>,
    waiters: usize,
    queued: AtomicUsize,
    finished: AtomicUsize,
    over: Notify,
}

impl Turns {
    /// Starts a task for each lock, which locks and releases at once, `each` times; answers when
    /// all are in line.
    pub(crate) async fn start<L: Lock>(
        locks: impl ExactSizeIterator<Item = L>,
        each: usize,
    ) -> Arc<Self> {
        let waiters = locks.len();
        let turns = Arc::new(Self {
            stamps: Shared::new(Vec::with_capacity(waiters * each)),
            waiters,
            queued: AtomicUsize::new(0),
            finished: AtomicUsize::new(0),
            over: Notify::new(),
        });
        for lock in locks {
            tokio::spawn(turns.clone().wait(lock, each));
        }
        while turns.queued.load(Ordering::Acquire) < waiters {
            tokio::task::yield_now().await;
        }
        turns
    }

    /// The stamps of all, once all have had their turns.
    pub(crate) async fn finish(self: Arc<Self>) -> Vec<Stamp> {
        self.over.notified().await;
        std::mem::take(&mut self.stamps.lock().unwrap())
    }

    async fn wait<L: Lock>(self: Arc<Self>, lock: L, each: usize) {
        for round in 0..each {
            let mut locking = pin!(lock.lock());
            // In line after the first look, at the latest.
            let at_once = poll_once(locking.as_mut()).await;
            if round == 0 {
                self.queued.fetch_add(1, Ordering::AcqRel);
            }
            let held = match at_once {
                Some(held) => held,
                None => locking.await,
            };
            let (granted, token) = (now(), L::token(&held));
            self.stamps.lock().unwrap().push(Stamp { granted, released: now(), token });
            lock.unlock(held).await;
        }
        if self.finished.fetch_add(1, Ordering::AcqRel) + 1 == self.waiters {
            self.over.notify_one();
        }
    }
}

/// Polls once, and returns the output if it is ready.
pub(crate) async fn poll_once<F: Future>(mut future: Pin<&mut F>) -> Option<F::Output> {
    std::future::poll_fn(|context| match future.as_mut().poll(context) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => Poll::Ready(None),
    })
    .await
}

/// What was seen of one lock's way through one or more processes.
#[derive(Debug)]
pub(crate) struct Run {
    /// Seconds from a release to the next grant, if that was in another process, or if all were in
    /// one.
    pub(crate) hand_offs: Vec<f64>,
    /// Which part of all hand-offs these are.
    pub(crate) share: f64,
    pub(crate) per_second: f64,
}

impl Run {
    /// From the stamps of each process.
    pub(crate) fn new(processes: &[Vec<Stamp>]) -> Self {
        let mut stamps: Vec<(Stamp, usize)> = processes
            .iter()
            .enumerate()
            .flat_map(|(process, stamps)| stamps.iter().map(move |stamp| (*stamp, process)))
            .collect();
        stamps.sort_by_key(|(stamp, _)| stamp.granted);
        let (mut hand_offs, alone) = (Vec::new(), processes.len() == 1);
        for pair in stamps.windows(2) {
            let [(before, here), (after, there)] = pair else { unreachable!() };
            assert!(after.granted >= before.released, "two had the lock at the same time");
            assert!(after.token > before.token || after.token == 0, "tokens out of order");
            if alone || here != there {
                hand_offs.push((after.granted - before.released) as f64 / 1e9);
            }
        }
        let count = (stamps.len() - 1) as f64;
        let took = stamps[stamps.len() - 1].0.granted - stamps[0].0.granted;
        let share = hand_offs.len() as f64 / count;
        Self { hand_offs, share, per_second: count / took as f64 * 1e9 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamp(granted: u64, released: u64, token: u64) -> Stamp {
        Stamp { granted, released, token }
    }

    #[test]
    fn only_hand_offs_to_another_process_count_where_there_are_several() {
        let here = vec![stamp(0, 10, 1), stamp(20, 30, 2)];
        let run = Run::new(&[here.clone(), vec![stamp(70, 80, 3)]]);
        assert_eq!((run.hand_offs.as_slice(), run.share), ([40e-9].as_slice(), 0.5));
        assert_eq!(Run::new(&[here]).hand_offs, [10e-9]);
    }

    #[test]
    #[should_panic(expected = "at the same time")]
    fn two_holders_at_once_are_seen() {
        Run::new(&[vec![stamp(0, 10, 1)], vec![stamp(9, 12, 2)]]);
    }
}
