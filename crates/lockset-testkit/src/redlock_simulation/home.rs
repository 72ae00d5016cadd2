//! A node: a memory engine that freezes, forgets, and has a clock of its own.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use lockset::clock::{Clock, Moment};
use lockset::engine::memory::Memory;
use lockset::engine::{Claim, ClaimId, Engine, LockState, Mode, Wait};
use lockset::{Break, Name, Note, Token};
use rand::RngExt;
use rand::rngs::SmallRng;
use tokio::sync::watch;

use super::judge::Record;

/// So many of the last requests that were granted may come once more.
const ECHOES: usize = 3;

/// A request for a lock that the network has kept.
pub(super) type Copy = (Arc<dyn Engine>, Claim);

/// It arrives once more, and nobody waits for the answer.
pub(super) async fn repeat((engine, claim): &Copy) {
    drop(engine.acquire(claim, Wait::No).await);
}

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
    names: Vec<Name>,
    /// The last requests that were granted, as the network still has them.
    heard: Mutex<Vec<Copy>>,
    record: Arc<Mutex<Record>>,
}

impl Home {
    pub(super) fn new(
        number: usize,
        clock: Clock,
        names: &[&str],
        record: Arc<Mutex<Record>>,
    ) -> Arc<Self> {
        let start = Moment::from_nanos(0);
        Arc::new(Self {
            label: format!("node {number}"),
            memory: Mutex::new(Memory::new(clock.clone())),
            clock,
            run: watch::Sender::new(0),
            frozen_until: Mutex::new(start),
            slow_until: Mutex::new(start),
            names: names.iter().map(|name| name.parse().unwrap()).collect(),
            heard: Mutex::default(),
            record,
        })
    }

    pub(super) fn now(&self) -> Moment {
        self.clock.now()
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
        self.fault(true);
        self.heard.lock().unwrap().clear();
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
    pub(super) async fn jump_forward(&self) {
        self.fault(false);
        let memory = self.join().1;
        for name in &self.names {
            memory.force_release(name, Break::Now).await.unwrap();
        }
    }

    fn fault(&self, forgot: bool) {
        self.record.lock().unwrap().faults.push((self.clock.now(), forgot));
    }

    /// A request was granted, of which the network keeps a copy.
    pub(super) fn hears(&self, engine: Arc<dyn Engine>, claim: Claim) {
        let mut heard = self.heard.lock().unwrap();
        if heard.iter().any(|(_, known)| known.id == claim.id) {
            return;
        }
        if heard.len() == ECHOES {
            heard.remove(0);
        }
        heard.push((engine, claim));
    }

    /// The last requests that were granted, the newest last.
    pub(super) fn copies(&self) -> Vec<Copy> {
        self.heard.lock().unwrap().clone()
    }

    /// One of the last requests that were granted arrives once more.
    pub(super) async fn echo(&self, random: &mut SmallRng) {
        let copies = self.copies();
        if !copies.is_empty() {
            repeat(&copies[random.random_range(0..copies.len())]).await;
        }
    }

    /// Somebody had every lock once, by the token 1.
    pub(super) async fn was_used(&self) {
        let memory = self.join().1;
        for name in &self.names {
            let claim = Claim {
                id: ClaimId::random(),
                name: name.clone(),
                mode: Mode::Exclusive,
                ttl: Duration::from_secs(1),
                fixed: true,
                floor: Some(Token::new(1)),
                note: Note::default(),
                detachable: false,
                replicas: None,
            };
            let grant = memory.acquire(&claim, Wait::No).await.unwrap().unwrap();
            memory.release(&claim, &grant, None).await.unwrap();
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
