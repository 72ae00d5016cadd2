//! Simulates the real front over a faulty network, in virtual time, one run per seed.
//!
//! Several clients, each with its own keeper and gate, contend for a few names of one memory
//! engine. Between each client and the engine is a faulty network: requests are slow, lost,
//! executed without a reply, or executed long after their caller gave up; the engine freezes; all
//! clocks are paused. What the clients believed is recorded and checked as a
//! [history](crate::history).

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lockset::clock::{Clock, Moment};
use lockset::engine::Engine;
use lockset::engine::memory::Memory;
use lockset::{Break, Guard, LockOptions, Lockset, Result, State};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use crate::history::{HeldReport, History, HoldInterval};
use crate::layer::Layered;
use crate::lock_kind::{ExclusiveLock, LockKind};
use crate::mutants::faulty_engines::{
    AlteredLeases, IgnoresWithdrawals, OverpromisesLeases, SameTokenForAll,
};

mod network;

use network::{Network, NetworkLayer};

/// Longer than any run takes if every acquisition is finally served or refused.
const PATIENCE: Duration = Duration::from_secs(6 * 3600);

/// A bug planted in the engine, which the check of the history must find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// No bug: every history must be consistent.
    None,
    /// Leases end at home before the client is told.
    ShortensLeases,
    /// Clients are promised longer leases than they get.
    OverpromisesLeases,
    /// All grants have the same token.
    SameTokenForAll,
    /// Withdrawals are ignored.
    IgnoresWithdrawals,
}

/// What happened in one run, to verify that faults did occur.
#[derive(Clone, Copy, Debug, Default)]
pub struct RunCounts {
    /// Locks held.
    pub held: usize,
    /// Locks lost.
    pub lost: usize,
    /// Acquisitions that ended without a lock.
    pub refused: usize,
    /// Requests that met a fault.
    pub faults: usize,
    /// Immediate forced releases.
    pub breaks: usize,
}

/// Runs one seed.
///
/// # Errors
/// The violation that was found.
pub fn simulate(seed: u64, flaw: Flaw) -> Result<RunCounts, String> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(async {
        let world = World::new(seed, flaw);
        let played = tokio::time::timeout(PATIENCE, world.run()).await;
        played.map_err(|_| "an acquisition was neither served nor refused".to_owned())??;
        let history = world.history.lock().unwrap();
        history.check()?;
        Ok(RunCounts {
            held: history.intervals.len(),
            lost: world.lost.load(Ordering::Relaxed),
            refused: world.refused.load(Ordering::Relaxed),
            faults: world.network.faults.load(Ordering::Relaxed),
            breaks: history.breaks.len(),
        })
    })
}

struct World {
    seed: u64,
    flaw: Flaw,
    clock: Clock,
    memory: Memory,
    ttl: Duration,
    kind: LockKind,
    names: Vec<&'static str>,
    network: Arc<Network>,
    history: Arc<Mutex<History>>,
    over: AtomicBool,
    lost: AtomicUsize,
    refused: AtomicUsize,
}

impl World {
    fn new(seed: u64, flaw: Flaw) -> Arc<Self> {
        let mut random = SmallRng::seed_from_u64(seed);
        let clock = Clock::tokio();
        let ttl = Duration::from_millis(random.random_range(1000..10_000));
        let history = Arc::<Mutex<History>>::default();
        Arc::new(Self {
            seed,
            flaw,
            memory: Memory::new(clock.clone()),
            network: Network::new(&mut random, clock.clone(), ttl, history.clone()),
            clock,
            ttl,
            kind: LockKind::ALL[random.random_range(0..3)],
            names: ["a", "b"][..random.random_range(1..3)].to_vec(),
            history,
            over: AtomicBool::new(false),
            lost: AtomicUsize::new(0),
            refused: AtomicUsize::new(0),
        })
    }

    async fn run(self: &Arc<Self>) -> Result<(), String> {
        let mut random = SmallRng::seed_from_u64(self.seed ^ 0xC11E);
        let clients: Vec<Lockset> =
            (0..random.random_range(2..4)).map(|number| self.client(number)).collect();
        let mut workers = tokio::task::JoinSet::new();
        for (number, locks) in clients.iter().enumerate() {
            for task in 0..random.random_range(1..4) {
                let client = format!("client {number} task {task}");
                let random = SmallRng::seed_from_u64(random.random());
                let (world, locks) = (self.clone(), locks.clone());
                workers.spawn(Worker { world, locks, client, random }.work());
            }
        }
        let disturb = tokio::spawn(self.clone().disturb(SmallRng::seed_from_u64(random.random())));
        workers.join_all().await;
        self.over.store(true, Ordering::Relaxed);
        self.network.stop_faults();
        disturb.await.unwrap();
        // In some runs, clients close while delayed requests are still in flight, and closing may
        // fail. In the others they close after all requests have arrived, and closing must succeed.
        let settled = random.random_bool(0.5);
        if settled {
            tokio::time::sleep(self.network.max_lateness() + self.ttl * 10).await;
        }
        for locks in &clients {
            match locks.close().await {
                Err(error) if settled => return Err(format!("closing without faults: {error}")),
                _ => {}
            }
        }
        self.check_nothing_left().await
    }

    fn client(&self, number: usize) -> Lockset {
        let inner: Arc<dyn Engine> = Arc::new(self.memory.another_client());
        let inner: Arc<dyn Engine> = match self.flaw {
            Flaw::None => inner,
            Flaw::ShortensLeases => {
                Arc::new(Layered(AlteredLeases { inner, actual_ttl: |ttl| ttl / 2 }))
            }
            Flaw::OverpromisesLeases => Arc::new(Layered(OverpromisesLeases(inner))),
            Flaw::SameTokenForAll => Arc::new(Layered(SameTokenForAll(inner, Arc::default()))),
            Flaw::IgnoresWithdrawals => Arc::new(Layered(IgnoresWithdrawals(inner))),
        };
        let random = SmallRng::seed_from_u64(self.seed ^ (number as u64) << 32);
        let faulty = NetworkLayer::new(inner, self.network.clone(), random);
        Lockset::with_engine(Arc::new(Layered(faulty))).unwrap()
    }

    /// From time to time, pauses the clock or freezes the engine.
    async fn disturb(self: Arc<Self>, mut random: SmallRng) {
        while !self.over.load(Ordering::Relaxed) {
            tokio::time::sleep(span(&mut random, self.ttl * 3)).await;
            match random.random_range(0..3) {
                0 => tokio::time::advance(span(&mut random, self.ttl * 2)).await,
                _ => self.network.freeze(span(&mut random, self.ttl * 2)),
            }
        }
    }

    /// Checks that nothing is left once all clients are closed, their last requests have arrived,
    /// and all leases have ended.
    async fn check_nothing_left(&self) -> Result<(), String> {
        tokio::time::sleep(self.ttl * 2 + self.network.max_lateness() * 2).await;
        let left = self.memory.list(&"".parse().unwrap()).await.unwrap();
        match left.is_empty() {
            true => Ok(()),
            false => Err(format!("left behind: {left:?}")),
        }
    }
}

fn span(random: &mut SmallRng, most: Duration) -> Duration {
    most.mul_f64(random.random::<f64>())
}

/// A task of a client that acquires locks repeatedly.
struct Worker {
    world: Arc<World>,
    locks: Lockset,
    client: String,
    random: SmallRng,
}

impl Worker {
    async fn work(mut self) {
        for _ in 0..self.random.random_range(3..8) {
            let name = self.world.names[self.random.random_range(0..self.world.names.len())];
            let options = LockOptions::default().ttl(self.world.ttl);
            let options = match self.random.random_range(0..6) {
                0 => options.no_renewal(),
                1 => options.max_hold(self.world.ttl * 2),
                _ => options,
            };
            if self.random.random_bool(0.06) {
                self.force_release(name).await;
            }
            let lock = self.world.kind.new_lock(&self.locks, name, options);
            let asked = self.world.clock.now();
            match self.acquire(&lock).await {
                Some(guard) => self.hold(guard, asked).await,
                None => drop(self.world.refused.fetch_add(1, Ordering::Relaxed)),
            }
            tokio::time::sleep(span(&mut self.random, self.world.ttl / 2)).await;
        }
    }

    async fn force_release(&mut self, name: &str) {
        let how = match self.random.random_bool(0.5) {
            true => Break::Now,
            false => Break::WhenLeaseEnds,
        };
        // The network layer records when it was executed, if it was.
        let _ = self.locks.force_release(name, how).await;
    }

    async fn acquire(&mut self, lock: &ExclusiveLock) -> Option<Guard> {
        let patience = span(&mut self.random, self.world.ttl * 3);
        match self.random.random_range(0..8) {
            0 => lock.try_lock().await.ok().flatten(),
            1 | 2 => lock.lock_within(patience).await.ok(),
            // Cancelled at some point.
            3 | 4 => tokio::time::timeout(patience, lock.lock()).await.ok()?.ok(),
            _ => lock.lock().await.ok(),
        }
    }

    async fn hold(&mut self, guard: Guard, asked: Moment) {
        let clock = self.world.clock.clone();
        let enter = clock.now();
        let mut interval = HoldInterval {
            client: self.client.clone(),
            name: guard.name().to_string(),
            token: guard.token(),
            asked,
            enter,
            until: enter,
        };
        let mut held = self.read_state(&guard, &mut interval);
        for _ in 0..self.random.random_range(0..6) {
            if !held {
                break;
            }
            match self.random.random_range(0..8) {
                0 => tokio::time::advance(span(&mut self.random, self.world.ttl)).await,
                1 => drop(guard.confirm().await),
                2 => tokio::time::sleep(span(&mut self.random, self.world.ttl * 2)).await,
                _ => tokio::time::sleep(span(&mut self.random, self.world.ttl / 2)).await,
            }
            held = self.read_state(&guard, &mut interval);
        }
        if held && self.random.random_bool(0.1) {
            // It reads its last deadline after that has passed.
            guard.lost().await;
            held = self.read_state(&guard, &mut interval);
        }
        interval.until = interval.until.min(clock.now());
        self.world.history.lock().unwrap().intervals.push(interval);
        if !held {
            self.world.lost.fetch_add(1, Ordering::Relaxed);
        }
        match self.random.random_bool(0.7) {
            true => drop(guard.release().await),
            false => drop(guard),
        }
    }

    /// Reads the state of the guard, and returns whether it is not lost. The last deadline read
    /// bounds the interval.
    fn read_state(&self, guard: &Guard, interval: &mut HoldInterval) -> bool {
        let at = self.world.clock.now();
        match guard.state() {
            State::Lost(_) => return false,
            State::Held => {
                let report = HeldReport { claim: guard.claim_id(), at };
                self.world.history.lock().unwrap().held_reports.push(report);
            }
            State::Uncertain => {}
        }
        interval.until = at + guard.valid_for();
        true
    }
}
