//! Waiters that take turns with one lock, and what their stamps tell.

use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex as Shared};

use futures_util::poll;
use lockset::Mutex;
use tokio::sync::Notify;

use crate::measure::now;

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
    /// Starts `waiters` tasks that lock and release at once, `each` times each; answers when all
    /// are in line.
    pub(crate) async fn start(mutex: &Mutex, waiters: usize, each: usize) -> Arc<Self> {
        let turns = Arc::new(Self {
            stamps: Shared::new(Vec::with_capacity(waiters * each)),
            waiters,
            queued: AtomicUsize::new(0),
            finished: AtomicUsize::new(0),
            over: Notify::new(),
        });
        for _ in 0..waiters {
            tokio::spawn(turns.clone().wait(mutex.clone(), each));
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

    async fn wait(self: Arc<Self>, mutex: Mutex, each: usize) {
        for round in 0..each {
            let mut locking = pin!(mutex.lock());
            // In line after the first look, at the latest.
            let at_once = poll!(locking.as_mut());
            if round == 0 {
                self.queued.fetch_add(1, Ordering::AcqRel);
            }
            let guard = match at_once {
                std::task::Poll::Ready(guard) => guard.unwrap(),
                std::task::Poll::Pending => locking.await.unwrap(),
            };
            let granted = now();
            let token = guard.token().get();
            self.stamps.lock().unwrap().push(Stamp { granted, released: now(), token });
            guard.release().await.unwrap();
        }
        if self.finished.fetch_add(1, Ordering::AcqRel) + 1 == self.waiters {
            self.over.notify_one();
        }
    }
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
