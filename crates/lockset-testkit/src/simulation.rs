//! The real front over a faulty engine, in virtual time, one seed after the other.
//!
//! Several clients, each with its own keeper and gate, want a few names of one memory home. Between
//! each client and the home there is weather: requests are slow, lost, carried out without an
//! answer, carried out long after their caller gave up, refused; the home freezes; the world is
//! paused. What the clients believed is recorded and judged by the [oracle](crate::oracle).

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lockset::clock::{Clock, Moment};
use lockset::engine::Engine;
use lockset::engine::memory::Memory;
use lockset::{Break, Guard, LockOptions, Lockset, Result, State};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use crate::form::{Alone, Form};
use crate::layer::Layered;
use crate::mutants::faults::{IgnoresWithdrawals, Leases, OneToken, PromisesTooMuch};
use crate::oracle::{Belief, History, Word};

mod weather;

use weather::{Faulty, Weather};

/// Longer than any run takes if everybody is finally served or refused.
const PATIENCE: Duration = Duration::from_secs(6 * 3600);

/// A fault of the engine below the weather, which the oracle must find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// None: every history must be good.
    Sound,
    /// Leases end at home before the client is told.
    EndsEarly,
    /// Clients are promised more than they get.
    PromisesTooMuch,
    /// All grants have the same token.
    OneToken,
    /// Withdrawn claims stay.
    IgnoresWithdrawals,
}

/// What happened in one run, to see that the weather was real.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    /// Locks held.
    pub held: usize,
    /// Locks lost.
    pub lost: usize,
    /// Acquisitions that ended without a lock.
    pub refused: usize,
    /// Requests that did not go as they should.
    pub faults: usize,
    /// Locks taken away at once.
    pub breaks: usize,
}

/// Plays one seed.
///
/// # Errors
/// What was wrong, in words.
pub fn simulate(seed: u64, flaw: Flaw) -> Result<Tally, String> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(async {
        let world = World::new(seed, flaw);
        let played = tokio::time::timeout(PATIENCE, world.play()).await;
        played.map_err(|_| "somebody was neither served nor refused".to_owned())??;
        let history = world.history.lock().unwrap();
        history.judge()?;
        Ok(Tally {
            held: history.beliefs.len(),
            lost: world.lost.load(Ordering::Relaxed),
            refused: world.refused.load(Ordering::Relaxed),
            faults: world.weather.faults.load(Ordering::Relaxed),
            breaks: history.breaks.len(),
        })
    })
}

struct World {
    seed: u64,
    flaw: Flaw,
    clock: Clock,
    home: Memory,
    ttl: Duration,
    form: Form,
    names: Vec<&'static str>,
    weather: Arc<Weather>,
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
            home: Memory::new(clock.clone()),
            weather: Weather::new(&mut random, clock.clone(), ttl, history.clone()),
            clock,
            ttl,
            form: Form::ALL[random.random_range(0..3)],
            names: ["a", "b"][..random.random_range(1..3)].to_vec(),
            history,
            over: AtomicBool::new(false),
            lost: AtomicUsize::new(0),
            refused: AtomicUsize::new(0),
        })
    }

    async fn play(self: &Arc<Self>) -> Result<(), String> {
        let mut random = SmallRng::seed_from_u64(self.seed ^ 0xC11E);
        let clients: Vec<Lockset> =
            (0..random.random_range(2..4)).map(|number| self.client(number)).collect();
        let mut workers = tokio::task::JoinSet::new();
        for (number, locks) in clients.iter().enumerate() {
            for task in 0..random.random_range(1..4) {
                let who = format!("client {number} task {task}");
                let random = SmallRng::seed_from_u64(random.random());
                let (world, locks) = (self.clone(), locks.clone());
                workers.spawn(Worker { world, locks, who, random }.work());
            }
        }
        let storms = tokio::spawn(self.clone().storms(SmallRng::seed_from_u64(random.random())));
        workers.join_all().await;
        self.over.store(true, Ordering::Relaxed);
        self.weather.calm();
        storms.await.unwrap();
        // Some close while requests of the storm are still on their way, and may be cut short; the
        // others close when these have arrived, and then nothing can go wrong.
        let settled = random.random_bool(0.5);
        if settled {
            tokio::time::sleep(self.weather.latest() + self.ttl * 10).await;
        }
        for locks in &clients {
            match locks.close().await {
                Err(error) if settled => return Err(format!("closing in calm weather: {error}")),
                _ => {}
            }
        }
        self.leaves_nothing().await
    }

    fn client(&self, number: usize) -> Lockset {
        let inner: Arc<dyn Engine> = Arc::new(self.home.another_client());
        let inner: Arc<dyn Engine> = match self.flaw {
            Flaw::Sound => inner,
            Flaw::EndsEarly => Arc::new(Layered(Leases { inner, at_home: |ttl| ttl / 2 })),
            Flaw::PromisesTooMuch => Arc::new(Layered(PromisesTooMuch(inner))),
            Flaw::OneToken => Arc::new(Layered(OneToken(inner, Arc::default()))),
            Flaw::IgnoresWithdrawals => Arc::new(Layered(IgnoresWithdrawals(inner))),
        };
        let random = SmallRng::seed_from_u64(self.seed ^ (number as u64) << 32);
        let faulty = Faulty::new(inner, self.weather.clone(), random);
        Lockset::with_engine(Arc::new(Layered(faulty)), self.clock.clone()).unwrap()
    }

    /// The world is paused, or the home freezes, now and then.
    async fn storms(self: Arc<Self>, mut random: SmallRng) {
        while !self.over.load(Ordering::Relaxed) {
            tokio::time::sleep(span(&mut random, self.ttl * 3)).await;
            match random.random_range(0..3) {
                0 => tokio::time::advance(span(&mut random, self.ttl * 2)).await,
                _ => self.weather.freeze(span(&mut random, self.ttl * 2)),
            }
        }
    }

    /// When all are gone, their last requests have arrived, and all leases are over.
    async fn leaves_nothing(&self) -> Result<(), String> {
        tokio::time::sleep(self.ttl * 2 + self.weather.latest() * 2).await;
        let left = self.home.list(&"".parse().unwrap()).await.unwrap();
        match left.is_empty() {
            true => Ok(()),
            false => Err(format!("left behind: {left:?}")),
        }
    }
}

fn span(random: &mut SmallRng, most: Duration) -> Duration {
    most.mul_f64(random.random::<f64>())
}

/// A task of a client that wants locks, again and again.
struct Worker {
    world: Arc<World>,
    locks: Lockset,
    who: String,
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
                self.take_away(name).await;
            }
            let lock = self.world.form.of(&self.locks, name, options);
            let asked = self.world.clock.now();
            match self.acquire(&lock).await {
                Some(guard) => self.hold(guard, asked).await,
                None => drop(self.world.refused.fetch_add(1, Ordering::Relaxed)),
            }
            tokio::time::sleep(span(&mut self.random, self.world.ttl / 2)).await;
        }
    }

    async fn take_away(&mut self, name: &str) {
        let how = match self.random.random_bool(0.5) {
            true => Break::Now,
            false => Break::WhenLeaseEnds,
        };
        // The weather records when it was done, if it was.
        let _ = self.locks.force_release(name, how).await;
    }

    async fn acquire(&mut self, lock: &Alone) -> Option<Guard> {
        let patience = span(&mut self.random, self.world.ttl * 3);
        match self.random.random_range(0..8) {
            0 => lock.try_lock().await.ok().flatten(),
            1 | 2 => lock.lock_within(patience).await.ok(),
            // Cancelled at some moment.
            3 | 4 => tokio::time::timeout(patience, lock.lock()).await.ok()?.ok(),
            _ => lock.lock().await.ok(),
        }
    }

    async fn hold(&mut self, guard: Guard, asked: Moment) {
        let clock = self.world.clock.clone();
        let enter = clock.now();
        let mut belief = Belief {
            who: self.who.clone(),
            name: guard.name().to_string(),
            token: guard.token(),
            asked,
            enter,
            until: enter,
        };
        let mut held = self.look(&guard, &mut belief);
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
            held = self.look(&guard, &mut belief);
        }
        if held && self.random.random_bool(0.1) {
            // It reads its last deadline when it is over.
            guard.lost().await;
            held = self.look(&guard, &mut belief);
        }
        belief.until = belief.until.min(clock.now());
        self.world.history.lock().unwrap().beliefs.push(belief);
        if !held {
            self.world.lost.fetch_add(1, Ordering::Relaxed);
        }
        match self.random.random_bool(0.7) {
            true => drop(guard.release().await),
            false => drop(guard),
        }
    }

    /// Asks the guard; whether it may still be trusted. The last deadline read bounds the belief.
    fn look(&self, guard: &Guard, belief: &mut Belief) -> bool {
        let at = self.world.clock.now();
        match guard.state() {
            State::Lost(_) => return false,
            State::Held => {
                let word = Word { claim: guard.claim_id(), at };
                self.world.history.lock().unwrap().words.push(word);
            }
            State::Uncertain => {}
        }
        belief.until = at + guard.valid_for();
        true
    }
}
