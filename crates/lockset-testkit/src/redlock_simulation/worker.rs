//! A task of a client that acquires locks repeatedly.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use futures_util::future::{Either, select};
use lockset::clock::Moment;
use lockset::{Guard, LockOptions, Mutex as Lock, State};
use rand::RngExt;
use rand::rngs::SmallRng;

use super::history::Acquisition;
use super::{Client, World, span};

/// A task that acquires locks.
pub(super) struct Worker {
    pub(super) world: Arc<World>,
    pub(super) client: Arc<Client>,
    pub(super) number: usize,
    pub(super) random: SmallRng,
}

impl Worker {
    /// Works until all its acquisitions are done, or its client has crashed.
    pub(super) async fn work_until_stopped(self) {
        let client = self.client.clone();
        let (work, end) = (std::pin::pin!(self.work()), std::pin::pin!(client.until_stopped()));
        select(work, end).await;
    }

    async fn work(mut self) {
        let most = if self.world.is_hasty { 7 } else { 4 };
        for _ in 0..self.random.random_range(2..most) {
            let name = self.world.names[self.random.random_range(0..self.world.names.len())];
            let options = LockOptions::default().ttl(self.world.ttl);
            let options = if self.random.random_bool(0.2) { options.no_renewal() } else { options };
            let lock = self.client.locks.mutex(name).unwrap().with(options);
            let asked = self.world.clock.now();
            match self.acquire(&lock).await {
                Some(guard) => self.hold(guard, asked).await,
                None => drop(self.world.refused.fetch_add(1, Ordering::Relaxed)),
            }
            if self.client.is_stopped() {
                return;
            }
            let rest = if self.world.is_hasty { self.world.ttl / 40 } else { self.world.ttl / 4 };
            tokio::time::sleep(span(&mut self.random, rest)).await;
        }
    }

    async fn acquire(&mut self, lock: &Lock) -> Option<Guard> {
        let patience = span(&mut self.random, self.world.ttl * 3);
        let method = if self.world.is_hasty { 0..4 } else { 0..8 };
        match self.random.random_range(method) {
            0 | 1 => lock.try_lock().await.ok().flatten(),
            2 => lock.lock_within(patience).await.ok(),
            // Cancelled at some point.
            3 | 4 => tokio::time::timeout(patience, lock.lock()).await.ok()?.ok(),
            _ => lock.lock().await.ok(),
        }
    }

    async fn hold(&mut self, guard: Guard, asked: Moment) {
        let enter = self.world.clock.now();
        let index = self.world.history.lock().unwrap().acquire(Acquisition {
            who: self.number,
            name: guard.name().to_string(),
            token: guard.token(),
            asked,
            enter,
            until: enter,
            confirmed: Vec::new(),
        });
        let mut held = self.read_state(&guard, index);
        for _ in 0..self.random.random_range(0..4) {
            if !held {
                break;
            }
            self.act_while_watching(&guard, index).await;
            held = self.read_state(&guard, index);
        }
        if !held {
            self.world.lost.fetch_add(1, Ordering::Relaxed);
        }
        // It writes without checking the guard: the register must reject a stale token.
        self.write(index);
        self.leave(guard, index, held).await;
    }

    /// The interval ends when the guard knows of its loss, whatever the worker is doing.
    async fn act_while_watching(&mut self, guard: &Guard, index: usize) {
        let world = self.world.clone();
        let act = std::pin::pin!(self.act(guard, index));
        let lost = std::pin::pin!(guard.lost());
        if let Either::Left((_, act)) = select(lost, act).await {
            world.history.lock().unwrap().ends(index, world.clock.now());
            act.await;
        }
    }

    async fn act(&mut self, guard: &Guard, index: usize) {
        match self.random.random_range(0..8) {
            0 => {
                // Only this client pauses; its requests are sent later.
                self.client.switch.freeze();
                tokio::time::sleep(span(&mut self.random, self.world.ttl * 2)).await;
                self.client.switch.thaw();
                self.write(index);
            }
            1..=3 => {
                // The outcome is recorded at the quorum, see `recorder.rs`.
                let _ = guard.confirm().await;
            }
            4 => tokio::time::sleep(span(&mut self.random, self.world.ttl * 2)).await,
            _ => {
                self.write(index);
                tokio::time::sleep(span(&mut self.random, self.world.ttl / 2)).await;
            }
        }
    }

    async fn leave(&mut self, guard: Guard, index: usize, held: bool) {
        match self.random.random_range(0..10) {
            0 if held => {
                // It crashes while it believes to hold.
                self.client.stopped.send_replace(true);
                self.client.switch.freeze();
                std::mem::forget(guard);
                return;
            }
            // It reads its last deadline after that has passed.
            1 if held => drop(guard.lost().await),
            _ => {}
        }
        self.world.history.lock().unwrap().ends(index, self.world.clock.now());
        match self.random.random_bool(0.7) {
            true => drop(guard.release().await),
            false => drop(guard),
        }
    }

    fn write(&self, index: usize) {
        self.world.history.lock().unwrap().write(index);
    }

    /// Reads the state of the guard, and returns whether it is not lost. The last deadline read
    /// bounds the interval.
    fn read_state(&self, guard: &Guard, index: usize) -> bool {
        let at = self.world.clock.now();
        let held = !matches!(guard.state(), State::Lost(_));
        if held {
            self.world.history.lock().unwrap().acquired[index].until = at + guard.valid_for();
        }
        held
    }
}
