//! A node: a memory engine that freezes, loses its memory, and has a clock of its own.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use lockset::clock::{Clock, Moment};
use lockset::engine::memory::Memory;
use lockset::engine::{Claim, ClaimId, Engine, LockState, Mode, Wait};
use lockset::{Break, Name, Note, Token};
use rand::RngExt;
use rand::rngs::SmallRng;
use tokio::sync::watch;

use super::history::RunHistory;

/// How many of the last granted requests may be repeated.
const COPIES_KEPT: usize = 3;

/// A copy of a granted request, kept by the network.
pub(super) type RequestCopy = (Arc<dyn Engine>, Claim);

/// Delivers the request again; the reply is dropped.
pub(super) async fn repeat((engine, claim): &RequestCopy) {
    drop(engine.acquire(claim, Wait::No).await);
}

/// A node of the quorum, shared by all clients.
#[derive(Debug)]
pub(super) struct SimNode {
    pub(super) label: String,
    clock: Clock,
    memory: Mutex<Memory>,
    /// The number of restarts.
    run: watch::Sender<u64>,
    frozen_until: Mutex<Moment>,
    slow_until: Mutex<Moment>,
    names: Vec<Name>,
    /// Copies of the last granted requests.
    copies: Mutex<Vec<RequestCopy>>,
    history: Arc<Mutex<RunHistory>>,
}

impl SimNode {
    pub(super) fn new(
        number: usize,
        clock: Clock,
        names: &[&str],
        history: Arc<Mutex<RunHistory>>,
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
            copies: Mutex::default(),
            history,
        })
    }

    pub(super) fn now(&self) -> Moment {
        self.clock.now()
    }

    /// A client of the current run of the node, and the number of the run.
    pub(super) fn join(&self) -> (u64, Memory) {
        (*self.run.borrow(), self.memory.lock().unwrap().another_client())
    }

    pub(super) fn run(&self) -> u64 {
        *self.run.borrow()
    }

    /// Pending until this run of the node has ended.
    pub(super) async fn ended(&self, run: u64) {
        let mut runs = self.run.subscribe();
        // `self` owns the sender, so waiting cannot fail.
        let _ = runs.wait_for(|now| *now != run).await;
    }

    /// Restarts empty.
    pub(super) fn restart(&self) {
        self.record_fault(true);
        self.copies.lock().unwrap().clear();
        *self.memory.lock().unwrap() = Memory::new(self.clock.clone());
        self.run.send_modify(|run| *run += 1);
    }

    pub(super) fn freeze(&self, span: Duration) {
        *self.frozen_until.lock().unwrap() = self.clock.now() + span;
    }

    pub(super) fn thaw(&self) {
        *self.frozen_until.lock().unwrap() = self.clock.now();
    }

    pub(super) async fn until_thawed(&self) {
        let until = *self.frozen_until.lock().unwrap();
        self.clock.sleep_until(until).await;
    }

    /// Its clock jumps forward by more than any ttl: every lease ends, and no client is notified.
    pub(super) async fn jump_forward(&self) {
        self.record_fault(false);
        let memory = self.join().1;
        for name in &self.names {
            memory.force_release(name, Break::Now).await.unwrap();
        }
    }

    fn record_fault(&self, forgot: bool) {
        self.history.lock().unwrap().faults.push((self.clock.now(), forgot));
    }

    /// Keeps a copy of a granted request.
    pub(super) fn keep_copy(&self, engine: Arc<dyn Engine>, claim: Claim) {
        let mut copies = self.copies.lock().unwrap();
        if copies.iter().any(|(_, known)| known.id == claim.id) {
            return;
        }
        if copies.len() == COPIES_KEPT {
            copies.remove(0);
        }
        copies.push((engine, claim));
    }

    /// Copies of the last granted requests, the newest last.
    pub(super) fn copies(&self) -> Vec<RequestCopy> {
        self.copies.lock().unwrap().clone()
    }

    /// Delivers one of the last granted requests again.
    pub(super) async fn repeat_a_request(&self, random: &mut SmallRng) {
        let copies = self.copies();
        if !copies.is_empty() {
            repeat(&copies[random.random_range(0..copies.len())]).await;
        }
    }

    /// Acquires and releases every lock once, with the token 1.
    pub(super) async fn use_every_lock_once(&self) {
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
            let grant = memory.acquire(&claim, Wait::No).await.unwrap().granted().unwrap();
            memory.release(&claim, &grant, None).await.unwrap();
        }
    }

    /// Its clock jumps back: leases granted before it has caught up last longer than they should.
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
