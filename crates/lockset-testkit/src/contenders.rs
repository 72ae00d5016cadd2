//! Tasks that contend for the same locks while a test runs, with a history that is checked at the
//! end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use lockset::clock::Clock;
use lockset::{Error, Guard, Lockset, Mutex, State};
use tokio::task::JoinHandle;

use crate::history::{History, HoldInterval};
use crate::steps::within;

/// Timeout of one acquisition: longer than any queue entry lives.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a contender holds the lock.
const HOLD: Duration = Duration::from_millis(5);

/// Tasks that acquire, hold and release until they are stopped.
#[derive(Debug)]
pub struct Contenders {
    /// How often each was served.
    served: Arc<[AtomicU64]>,
    stop: Arc<AtomicBool>,
    contenders: Vec<JoinHandle<Vec<HoldInterval>>>,
}

impl Contenders {
    /// Starts `each` contenders per client. The names are distributed round-robin.
    pub fn start(clients: &[Lockset], each: usize, names: &[&str]) -> Self {
        let count = clients.len() * each;
        let served: Arc<[AtomicU64]> = (0..count).map(|_| AtomicU64::new(0)).collect();
        let stop = Arc::<AtomicBool>::default();
        let numbered = (0..count).map(|number| (number, &clients[number / each]));
        let contenders = numbered.map(|(number, client)| {
            let name = names[number % names.len()];
            let contender = Contender {
                number,
                client: format!("contender {number}"),
                mutex: client.mutex(name).unwrap(),
                name: name.to_owned(),
                clock: Clock::boot(),
            };
            tokio::spawn(contender.contend(served.clone(), stop.clone()))
        });
        let contenders = contenders.collect();
        Self { served, stop, contenders }
    }

    /// Waits until `more` further acquisitions were served.
    pub async fn wait_served(&self, more: u64, limit: Duration) {
        let total = || self.served.iter().map(|one| one.load(Ordering::Relaxed)).sum::<u64>();
        let before = total();
        let enough = async {
            while total() < before + more {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        within(limit, &format!("{more} more are served"), enough).await;
    }

    /// Waits until each contender was served `times` times.
    pub async fn wait_each_served(&self, times: u64, limit: Duration) {
        let all = async {
            while self.served.iter().any(|one| one.load(Ordering::Relaxed) < times) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        within(limit, &format!("each is served {times} times"), all).await;
    }

    /// Stops all contenders and checks the history of their holds; a violation fails the test.
    pub async fn stop_and_check(self) -> Vec<HoldInterval> {
        self.stop.store(true, Ordering::Relaxed);
        let mut history = History::default();
        for contender in self.contenders {
            let intervals = within(PATIENCE * 3, "the contender ends", contender).await;
            history.intervals.extend(intervals.unwrap());
        }
        if let Err(broken) = history.check() {
            panic!("of {} holds: {broken}", history.intervals.len());
        }
        history.intervals
    }
}

struct Contender {
    number: usize,
    client: String,
    mutex: Mutex,
    name: String,
    clock: Clock,
}

impl Contender {
    async fn contend(self, served: Arc<[AtomicU64]>, stop: Arc<AtomicBool>) -> Vec<HoldInterval> {
        let mut intervals = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            let asked = self.clock.now();
            match self.mutex.lock_within(PATIENCE).await {
                Ok(guard) => {
                    intervals.push(self.hold(&guard, asked).await);
                    self.release(guard).await;
                    served[self.number].fetch_add(1, Ordering::Relaxed);
                }
                // The backend is not available at the moment.
                Err(error) if error.is_retryable() => {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                Err(error) => panic!("{}: {error}", self.client),
            }
        }
        intervals
    }

    async fn hold(&self, guard: &Guard, asked: lockset::clock::Moment) -> HoldInterval {
        let enter = self.clock.now();
        let mut deadline = enter;
        let until = loop {
            let now = self.clock.now();
            if matches!(guard.state(), State::Lost(_)) {
                break deadline.min(now);
            }
            deadline = now + guard.valid_for();
            if now >= enter + HOLD {
                break deadline.min(now);
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        };
        let (client, name, token) = (self.client.clone(), self.name.clone(), guard.token());
        HoldInterval { client, name, token, asked, enter, until }
    }

    async fn release(&self, guard: Guard) {
        match guard.release().await {
            Ok(()) | Err(Error::Lost { .. } | Error::NotHeld { .. }) => {}
            Err(error) if error.is_retryable() => {}
            Err(error) => panic!("{}: {error}", self.client),
        }
    }
}
