//! Somebody at a client who wants locks, again and again.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use futures_util::future::{Either, select};
use lockset::clock::Moment;
use lockset::{Guard, LockOptions, Mutex as Lock, State};
use rand::RngExt;
use rand::rngs::SmallRng;

use super::judge::Acquired;
use super::{Client, World, span};

/// One who wants locks.
pub(super) struct Worker {
    pub(super) world: Arc<World>,
    pub(super) client: Arc<Client>,
    pub(super) number: usize,
    pub(super) random: SmallRng,
}

impl Worker {
    /// Works until it has done all it wants, or its client has stopped.
    pub(super) async fn work_until_the_end(self) {
        let client = self.client.clone();
        let (work, end) = (std::pin::pin!(self.work()), std::pin::pin!(client.has_stopped()));
        select(work, end).await;
    }

    async fn work(mut self) {
        let most = if self.world.rush { 7 } else { 4 };
        for _ in 0..self.random.random_range(2..most) {
            let name = self.world.names[self.random.random_range(0..self.world.names.len())];
            let options = LockOptions::default().ttl(self.world.ttl);
            let options = if self.random.random_bool(0.2) { options.no_renewal() } else { options };
            let lock = self.client.locks.mutex(name).unwrap().with(options).unwrap();
            let asked = self.world.clock.now();
            match self.acquire(&lock).await {
                Some(guard) => self.hold(guard, asked).await,
                None => drop(self.world.refused.fetch_add(1, Ordering::Relaxed)),
            }
            if self.client.is_stopped() {
                return;
            }
            let rest = if self.world.rush { self.world.ttl / 40 } else { self.world.ttl / 4 };
            tokio::time::sleep(span(&mut self.random, rest)).await;
        }
    }

    async fn acquire(&mut self, lock: &Lock) -> Option<Guard> {
        let patience = span(&mut self.random, self.world.ttl * 3);
        let way = if self.world.rush { 0..4 } else { 0..8 };
        match self.random.random_range(way) {
            0 | 1 => lock.try_lock().await.ok().flatten(),
            2 => lock.lock_within(patience).await.ok(),
            // Cancelled at some moment.
            3 | 4 => tokio::time::timeout(patience, lock.lock()).await.ok()?.ok(),
            _ => lock.lock().await.ok(),
        }
    }

    async fn hold(&mut self, guard: Guard, asked: Moment) {
        let enter = self.world.clock.now();
        let place = self.world.record.lock().unwrap().acquire(Acquired {
            who: self.number,
            name: guard.name().to_string(),
            token: guard.token(),
            asked,
            enter,
            until: enter,
            confirmed: Vec::new(),
        });
        let mut held = self.look(&guard, place);
        for _ in 0..self.random.random_range(0..4) {
            if !held {
                break;
            }
            self.act_while_watching(&guard, place).await;
            held = self.look(&guard, place);
        }
        if !held {
            self.world.lost.fetch_add(1, Ordering::Relaxed);
        }
        // One who does not look before it writes: the register must know better.
        self.write(place);
        self.leave(guard, place, held).await;
    }

    /// A belief ends when the guard knows of its loss, whatever its owner is doing meanwhile.
    async fn act_while_watching(&mut self, guard: &Guard, place: usize) {
        let world = self.world.clone();
        let act = std::pin::pin!(self.act(guard, place));
        let lost = std::pin::pin!(guard.lost());
        if let Either::Left((_, act)) = select(lost, act).await {
            world.record.lock().unwrap().ends(place, world.clock.now());
            act.await;
        }
    }

    async fn act(&mut self, guard: &Guard, place: usize) {
        match self.random.random_range(0..8) {
            0 => {
                // This client alone does nothing for a while, and its requests leave later.
                self.client.ice.freeze();
                tokio::time::sleep(span(&mut self.random, self.world.ttl * 2)).await;
                self.client.ice.thaw();
                self.write(place);
            }
            1..=3 => {
                // What comes of it is witnessed where it goes to the quorum.
                let _ = guard.confirm().await;
            }
            4 => tokio::time::sleep(span(&mut self.random, self.world.ttl * 2)).await,
            _ => {
                self.write(place);
                tokio::time::sleep(span(&mut self.random, self.world.ttl / 2)).await;
            }
        }
    }

    async fn leave(&mut self, guard: Guard, place: usize, held: bool) {
        match self.random.random_range(0..10) {
            0 if held => {
                // It stops, and believes to the end.
                self.client.stopped.send_replace(true);
                self.client.ice.freeze();
                std::mem::forget(guard);
                return;
            }
            // It reads its last deadline when it is over.
            1 if held => drop(guard.lost().await),
            _ => {}
        }
        self.world.record.lock().unwrap().ends(place, self.world.clock.now());
        match self.random.random_bool(0.7) {
            true => drop(guard.release().await),
            false => drop(guard),
        }
    }

    fn write(&self, place: usize) {
        self.world.record.lock().unwrap().write(place);
    }

    /// Asks the guard; whether it may still be trusted. The last deadline read bounds the belief.
    fn look(&self, guard: &Guard, place: usize) -> bool {
        let at = self.world.clock.now();
        let held = !matches!(guard.state(), State::Lost(_));
        if held {
            self.world.record.lock().unwrap().acquired[place].until = at + guard.valid_for();
        }
        held
    }
}
