//! Many who want the same locks for as long as a test goes on, and what they believed meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use lockset::clock::Clock;
use lockset::{Error, Guard, Lockset, Mutex, State};
use tokio::task::JoinHandle;

use crate::oracle::{Belief, History};
use crate::steps::within;

/// How long one waits before it asks again: longer than any place in a line lives.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long one holds.
const HOLD: Duration = Duration::from_millis(5);

/// Contenders who take, hold and give back until they are told to part.
#[derive(Debug)]
pub struct Contenders {
    /// How often each was.
    served: Arc<[AtomicU64]>,
    over: Arc<AtomicBool>,
    contenders: Vec<JoinHandle<Vec<Belief>>>,
}

impl Contenders {
    /// For every client so many contenders, who take the names in turn.
    pub fn gather(clients: &[Lockset], each: usize, names: &[&str]) -> Self {
        let count = clients.len() * each;
        let served: Arc<[AtomicU64]> = (0..count).map(|_| AtomicU64::new(0)).collect();
        let over = Arc::<AtomicBool>::default();
        let places = (0..count).map(|number| (number, &clients[number / each]));
        let contenders = places.map(|(number, client)| {
            let name = names[number % names.len()];
            let contender = Contender {
                number,
                who: format!("contender {number}"),
                mutex: client.mutex(name).unwrap(),
                name: name.to_owned(),
                clock: Clock::boot(),
            };
            tokio::spawn(contender.contend(served.clone(), over.clone()))
        });
        let contenders = contenders.collect();
        Self { served, over, contenders }
    }

    /// Returns when so many more were served.
    pub async fn served(&self, more: u64, limit: Duration) {
        let so_far = || self.served.iter().map(|one| one.load(Ordering::Relaxed)).sum::<u64>();
        let before = so_far();
        let enough = async {
            while so_far() < before + more {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        within(limit, &format!("{more} more are served"), enough).await;
    }

    /// Returns when everybody was served so often.
    pub async fn each_served(&self, times: u64, limit: Duration) {
        let all = async {
            while self.served.iter().any(|one| one.load(Ordering::Relaxed) < times) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        within(limit, &format!("everybody is served {times} times"), all).await;
    }

    /// Ends it all. What they believed fits together, or the test fails.
    pub async fn part(self) -> Vec<Belief> {
        self.over.store(true, Ordering::Relaxed);
        let mut history = History::default();
        for contender in self.contenders {
            let beliefs = within(PATIENCE * 3, "the contender ends", contender).await;
            history.beliefs.extend(beliefs.unwrap());
        }
        if let Err(broken) = history.judge() {
            panic!("of {} beliefs: {broken}", history.beliefs.len());
        }
        history.beliefs
    }
}

struct Contender {
    number: usize,
    who: String,
    mutex: Mutex,
    name: String,
    clock: Clock,
}

impl Contender {
    async fn contend(self, served: Arc<[AtomicU64]>, over: Arc<AtomicBool>) -> Vec<Belief> {
        let mut beliefs = Vec::new();
        while !over.load(Ordering::Relaxed) {
            let asked = self.clock.now();
            match self.mutex.lock_within(PATIENCE).await {
                Ok(guard) => {
                    beliefs.push(self.hold(&guard, asked).await);
                    self.give_back(guard).await;
                    served[self.number].fetch_add(1, Ordering::Relaxed);
                }
                // There is no home at the moment.
                Err(error) if error.is_retryable() => {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                Err(error) => panic!("{}: {error}", self.who),
            }
        }
        beliefs
    }

    async fn hold(&self, guard: &Guard, asked: lockset::clock::Moment) -> Belief {
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
        let (who, name, token) = (self.who.clone(), self.name.clone(), guard.token());
        Belief { who, name, token, asked, enter, until }
    }

    async fn give_back(&self, guard: Guard) {
        match guard.release().await {
            Ok(()) | Err(Error::Lost { .. } | Error::NotHeld { .. }) => {}
            Err(error) if error.is_retryable() => {}
            Err(error) => panic!("{}: {error}", self.who),
        }
    }
}
