//! A node: a memory engine that freezes, forgets, and has a clock of its own.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use lockset::clock::{Clock, Moment};
use lockset::engine::memory::Memory;
use lockset::engine::{Engine, LockState};
use lockset::{Break, Name};
use tokio::sync::watch;

/// A node of the quorum, as all clients have it.
#[derive(Debug)]
pub(super) struct Home {
    pub(super) label: String,
    clock: Clock,
    memory: Mutex<Memory>,
    /// Counts the restarts.
    run: watch::Sender<u64>,
    frozen_until: Mutex<Moment>,
    slow_until: Mutex<Moment>,
}

impl Home {
    pub(super) fn new(number: usize, clock: Clock) -> Arc<Self> {
        let start = Moment::from_nanos(0);
        Arc::new(Self {
            label: format!("node {number}"),
            memory: Mutex::new(Memory::new(clock.clone())),
            clock,
            run: watch::Sender::new(0),
            frozen_until: Mutex::new(start),
            slow_until: Mutex::new(start),
        })
    }

    /// A client of this run of the node, and which run it is.
    pub(super) fn join(&self) -> (u64, Memory) {
        (*self.run.borrow(), self.memory.lock().unwrap().another_client())
    }

    pub(super) fn run(&self) -> u64 {
        *self.run.borrow()
    }

    /// Pending until this run of the node is over.
    pub(super) async fn ended(&self, run: u64) {
        let mut runs = self.run.subscribe();
        // The sender is ours, so waiting cannot fail.
        let _ = runs.wait_for(|now| *now != run).await;
    }

    /// Begins anew, with nothing.
    pub(super) fn restart(&self) {
        *self.memory.lock().unwrap() = Memory::new(self.clock.clone());
        self.run.send_modify(|run| *run += 1);
    }

    pub(super) fn freeze(&self, span: Duration) {
        *self.frozen_until.lock().unwrap() = self.clock.now() + span;
    }

    pub(super) fn thaw(&self) {
        *self.frozen_until.lock().unwrap() = self.clock.now();
    }

    pub(super) async fn thawed(&self) {
        let until = *self.frozen_until.lock().unwrap();
        self.clock.sleep_until(until).await;
    }

    /// Its clock jumps ahead by more than any ttl: every lease ends, and nobody is told.
    pub(super) async fn jump_forward(&self, names: &[&str]) {
        let memory = self.join().1;
        for name in names {
            let name: Name = name.parse().unwrap();
            memory.force_release(&name, Break::Now).await.unwrap();
        }
    }

    /// Its clock jumps back: leases given before it has caught up last longer than they should.
    pub(super) fn jump_back(&self, span: Duration) {
        *self.slow_until.lock().unwrap() = self.clock.now() + span;
    }

    pub(super) fn is_slow(&self) -> bool {
        *self.slow_until.lock().unwrap() > self.clock.now()
    }

    pub(super) async fn list(&self) -> Vec<LockState> {
        self.join().1.list(&"".parse().unwrap()).await.unwrap()
    }
}
