//! Fenced Redlock itself over faulty memory nodes, in virtual time, one seed after the other.
//!
//! Several clients want a few names of three or five nodes. On each way from a client to a node
//! requests are slow, lost, carried out without an answer, carried out late or twice; nodes freeze,
//! forget all they knew, and have clocks that jump; clients pause beyond their leases, and stop.
//! What they had is judged by rules of which only one needs clocks: see the judge.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::{Either, select};
use lockset::clock::{Clock, Moment};
use lockset::engine::Engine;
use lockset::engine::redlock::{Redlock, RedlockOptions};
use lockset::{Guard, Lockset, Mutex as Lock, State, Terms};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use crate::layer::{Ice, Iced, Layered};

mod flaws;
mod home;
mod judge;
mod way;

pub use flaws::Flaw;
use home::Home;
use judge::{Acquired, Record};
use way::{Way, Weather};

/// Longer than any run takes if everybody is finally served or refused.
const PATIENCE: Duration = Duration::from_secs(6 * 3600);

/// What happened in one run, to see that the weather was real.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    /// Locks held.
    pub held: usize,
    /// Locks lost.
    pub lost: usize,
    /// Acquisitions that ended without a lock.
    pub refused: usize,
    /// Extensions that a client asked for and got.
    pub confirmed: usize,
    /// Writes that the register refused because a newer token had written.
    pub stale: usize,
    /// Requests that did not go as they should.
    pub faults: usize,
    /// Clocks that jumped and nodes that forgot.
    pub jumps: usize,
}

impl Tally {
    /// Adds what happened in another run.
    pub fn add(&mut self, other: &Tally) {
        self.held += other.held;
        self.lost += other.lost;
        self.refused += other.refused;
        self.confirmed += other.confirmed;
        self.stale += other.stale;
        self.faults += other.faults;
        self.jumps += other.jumps;
    }
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
        let record = world.record.lock().unwrap();
        record.judge()?;
        Ok(Tally {
            held: record.acquired.len(),
            lost: world.lost.load(Ordering::Relaxed),
            refused: world.refused.load(Ordering::Relaxed),
            confirmed: record.acquired.iter().map(|one| one.confirmed.len()).sum(),
            stale: record.stale,
            faults: world.weather.faults.load(Ordering::Relaxed),
            jumps: record.faults.len(),
        })
    })
}

struct World {
    seed: u64,
    flaw: Flaw,
    clock: Clock,
    ttl: Duration,
    homes: Vec<Arc<Home>>,
    names: Vec<&'static str>,
    weather: Arc<Weather>,
    record: Arc<Mutex<Record>>,
    /// Whether clocks of nodes jump, and whether nodes forget.
    jumps: bool,
    forgets: bool,
    over: AtomicBool,
    lost: AtomicUsize,
    refused: AtomicUsize,
}

/// One client: its front, and the ice that stops it.
struct Client {
    locks: Lockset,
    ice: Ice,
    /// It ended without a word.
    stopped: AtomicBool,
}

impl World {
    fn new(seed: u64, flaw: Flaw) -> Arc<Self> {
        let mut random = SmallRng::seed_from_u64(seed);
        let clock = Clock::tokio();
        let nodes = if random.random_bool(0.6) { 3 } else { 5 };
        Arc::new(Self {
            seed,
            flaw,
            ttl: Duration::from_millis(random.random_range(1000..6000)),
            homes: (1..=nodes).map(|number| Home::new(number, clock.clone())).collect(),
            names: ["a", "b"][..if random.random_bool(0.8) { 1 } else { 2 }].to_vec(),
            weather: Weather::new(&mut random),
            clock,
            record: Arc::default(),
            jumps: random.random_bool(0.4),
            forgets: random.random_bool(0.2),
            over: AtomicBool::new(false),
            lost: AtomicUsize::new(0),
            refused: AtomicUsize::new(0),
        })
    }

    async fn play(self: &Arc<Self>) -> Result<(), String> {
        let mut random = SmallRng::seed_from_u64(self.seed ^ 0xC11E);
        let clients: Vec<Arc<Client>> =
            (0..random.random_range(2..5)).map(|number| Arc::new(self.client(number))).collect();
        let mut workers = tokio::task::JoinSet::new();
        for (number, client) in clients.iter().enumerate() {
            let random = SmallRng::seed_from_u64(random.random());
            let (world, client) = (self.clone(), client.clone());
            workers.spawn(Worker { world, client, number, random }.work());
        }
        let storms = tokio::spawn(self.clone().storms(SmallRng::seed_from_u64(random.random())));
        workers.join_all().await;
        self.over.store(true, Ordering::Relaxed);
        self.weather.calm();
        self.homes.iter().for_each(|home| home.thaw());
        storms.await.unwrap();
        for client in clients.iter().filter(|client| !client.stopped.load(Ordering::Relaxed)) {
            // What a storm has left under way may still disturb it.
            let _ = client.locks.close().await;
        }
        self.leaves_nothing().await
    }

    fn client(&self, number: u64) -> Client {
        let ice = Ice::default();
        let dress = self.flaw.for_a_client(self.clock.clone());
        let ways = self.homes.iter().enumerate().map(|(place, home)| {
            let random = SmallRng::seed_from_u64(self.seed ^ number << 32 ^ (place as u64) << 48);
            let is_last = place + 1 == self.homes.len();
            let way = Way::new(home.clone(), self.weather.clone(), dress.at(is_last), random);
            let inner: Arc<dyn Engine> = Arc::new(Layered(way));
            Arc::new(Layered(Iced { inner, ice: ice.clone() })) as Arc<dyn Engine>
        });
        let quorum = Redlock::over(ways.collect(), RedlockOptions::default(), self.clock.clone());
        let locks = Lockset::on(Arc::new(quorum.unwrap()), self.clock.clone()).unwrap();
        Client { locks, ice, stopped: AtomicBool::new(false) }
    }

    /// Now and then the world is paused, or something happens to a node.
    async fn storms(self: Arc<Self>, mut random: SmallRng) {
        while !self.over.load(Ordering::Relaxed) {
            tokio::time::sleep(span(&mut random, self.ttl * 2)).await;
            let home = self.homes[random.random_range(0..self.homes.len())].clone();
            match random.random_range(0..8) {
                0 => tokio::time::advance(span(&mut random, self.ttl * 2)).await,
                1..=4 => home.freeze(span(&mut random, self.ttl * 2)),
                5 if self.jumps => {
                    self.fault(false);
                    home.jump_forward(&self.names).await;
                }
                6 if self.jumps => home.jump_back(span(&mut random, self.ttl * 2)),
                7 if self.forgets => {
                    self.fault(true);
                    home.restart();
                }
                _ => {}
            }
        }
    }

    fn fault(&self, forgot: bool) {
        self.record.lock().unwrap().faults.push((self.clock.now(), forgot));
    }

    /// When all are gone, their last requests have arrived, and all leases are over.
    async fn leaves_nothing(&self) -> Result<(), String> {
        tokio::time::sleep(self.ttl * 8 + self.weather.latest * 2).await;
        for home in &self.homes {
            let left = home.list().await;
            if !left.is_empty() {
                return Err(format!("left behind: {left:?}"));
            }
        }
        Ok(())
    }
}

fn span(random: &mut SmallRng, most: Duration) -> Duration {
    most.mul_f64(random.random::<f64>())
}

/// Somebody at a client who wants locks, again and again.
struct Worker {
    world: Arc<World>,
    client: Arc<Client>,
    number: usize,
    random: SmallRng,
}

impl Worker {
    async fn work(mut self) {
        for _ in 0..self.random.random_range(2..6) {
            let name = self.world.names[self.random.random_range(0..self.world.names.len())];
            let terms = Terms::default().ttl(self.world.ttl);
            let fixed = self.random.random_bool(0.2);
            let terms = if fixed { terms.fixed() } else { terms };
            let lock = self.client.locks.mutex(name).unwrap().with(terms).unwrap();
            let asked = self.world.clock.now();
            match self.acquire(&lock).await {
                Some(guard) => self.hold(guard, asked, fixed).await,
                None => drop(self.world.refused.fetch_add(1, Ordering::Relaxed)),
            }
            if self.client.stopped.load(Ordering::Relaxed) {
                return;
            }
            tokio::time::sleep(span(&mut self.random, self.world.ttl / 4)).await;
        }
    }

    async fn acquire(&mut self, lock: &Lock) -> Option<Guard> {
        let patience = span(&mut self.random, self.world.ttl * 3);
        match self.random.random_range(0..8) {
            0 | 1 => lock.try_lock().await.ok().flatten(),
            2 => lock.lock_within(patience).await.ok(),
            // Cancelled at some moment.
            3 | 4 => tokio::time::timeout(patience, lock.lock()).await.ok()?.ok(),
            _ => lock.lock().await.ok(),
        }
    }

    async fn hold(&mut self, guard: Guard, asked: Moment, fixed: bool) {
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
        for _ in 0..self.random.random_range(0..5) {
            if !held {
                break;
            }
            self.act_while_watching(&guard, place, fixed).await;
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
    async fn act_while_watching(&mut self, guard: &Guard, place: usize, fixed: bool) {
        let world = self.world.clone();
        let act = std::pin::pin!(self.act(guard, place, fixed));
        let lost = std::pin::pin!(guard.lost());
        if let Either::Left((_, act)) = select(lost, act).await {
            world.record.lock().unwrap().ends(place, world.clock.now());
            act.await;
        }
    }

    async fn act(&mut self, guard: &Guard, place: usize, fixed: bool) {
        let clock = self.world.clock.clone();
        match self.random.random_range(0..8) {
            0 => {
                // This client alone does nothing for a while, and its requests leave later.
                self.client.ice.freeze();
                tokio::time::sleep(span(&mut self.random, self.world.ttl * 2)).await;
                self.client.ice.thaw();
                self.write(place);
            }
            1..=3 => {
                let began = clock.now();
                if guard.confirm().await.is_ok() && !fixed {
                    self.world.record.lock().unwrap().acquired[place].confirmed.push(began);
                }
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
                self.client.stopped.store(true, Ordering::Relaxed);
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
