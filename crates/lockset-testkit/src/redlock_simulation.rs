//! Fenced Redlock itself over faulty memory nodes, in virtual time, one seed after the other.
//!
//! Several clients want a few names of three or five nodes. On each way from a client to a node
//! requests are slow, lost, carried out without an answer, carried out late or twice; nodes freeze,
//! forget all they knew, and have clocks that jump; clients are cut off, have wall clocks that
//! stand still, pause beyond their leases, and stop. What they had is judged by rules of which
//! only one needs clocks: see the judge.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lockset::Lockset;
use lockset::clock::{Clock, Moment};
use lockset::engine::Engine;
use lockset::engine::redlock::{Redlock, RedlockOptions};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use tokio::sync::watch;

use crate::layer::{Ice, Iced, Layered};

mod directed;
mod flaws;
mod home;
mod judge;
mod storms;
mod wall;
mod way;
mod witness;
mod worker;

pub use directed::{TwoTokens, play_the_models_trace};
pub use flaws::Flaw;
use home::Home;
use judge::Record;
use wall::{Time, Wall};
use way::{Way, Weather};
use witness::Witness;
use worker::Worker;

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
    /// Extensions that a client asked for, or its keeper, and got.
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
    in_virtual_time(async {
        let world = Arc::new(World::draw(seed, flaw));
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

fn in_virtual_time<T>(play: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(play)
}

struct World {
    seed: u64,
    flaw: Flaw,
    clock: Clock,
    ttl: Duration,
    homes: Vec<Arc<Home>>,
    names: Vec<&'static str>,
    /// Few wait, and nobody rests.
    rush: bool,
    /// How many of the clients have wall clocks that stand still.
    standing: f64,
    time: Arc<Time>,
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
    /// What cuts its way to each node.
    scissors: Vec<Arc<Mutex<Moment>>>,
    /// It ended without a word.
    stopped: watch::Sender<bool>,
}

impl Client {
    /// From now on nothing comes through to this node, for a while.
    fn cut(&self, node: usize, until: Moment) {
        *self.scissors[node].lock().unwrap() = until;
    }

    fn join_again(&self) {
        (0..self.scissors.len()).for_each(|node| self.cut(node, Moment::from_nanos(0)));
    }

    fn is_stopped(&self) -> bool {
        *self.stopped.borrow()
    }

    /// Pending until it ends without a word.
    async fn has_stopped(&self) {
        let mut stopped = self.stopped.subscribe();
        // The sender is ours, so waiting cannot fail.
        let _ = stopped.wait_for(|stopped| *stopped).await;
    }
}

impl World {
    /// Three nodes, and no weather at all.
    fn quiet(flaw: Flaw, ttl: Duration) -> Arc<Self> {
        let world = Self::draw(0, flaw);
        let names = vec!["a"];
        let home = |number| Home::new(number, world.clock.clone(), &names, world.record.clone());
        let homes = (1..=3).map(home).collect();
        world.weather.calm();
        Arc::new(Self { homes, names, ttl, ..world })
    }

    fn draw(seed: u64, flaw: Flaw) -> Self {
        let mut random = SmallRng::seed_from_u64(seed);
        let clock = Clock::tokio();
        let nodes = if random.random_bool(0.75) { 3 } else { 5 };
        let names = ["a", "b"][..if random.random_bool(0.9) { 1 } else { 2 }].to_vec();
        let record: Arc<Mutex<Record>> = Arc::default();
        let homes: Vec<Arc<Home>> = (1..=nodes)
            .map(|number| Home::new(number, clock.clone(), &names, record.clone()))
            .collect();
        let jumps = random.random_bool(0.5);
        let forgets = random.random_bool(0.2);
        // Where nodes forget, tokens go on growing only by wall clocks that go.
        let standing = if forgets { 0.0 } else { [0.0, 0.5, 1.0][random.random_range(0..3)] };
        // Short, because waiting is what takes long.
        let ttl = Duration::from_millis(random.random_range(600..2400));
        Self {
            seed,
            flaw,
            ttl,
            homes,
            rush: random.random_bool(0.3),
            standing,
            time: Time::new(clock.clone()),
            weather: Weather::new(&mut random, ttl, jumps),
            names,
            clock,
            record,
            jumps,
            forgets,
            over: AtomicBool::new(false),
            lost: AtomicUsize::new(0),
            refused: AtomicUsize::new(0),
        }
    }

    async fn play(self: &Arc<Self>) -> Result<(), String> {
        let mut random = SmallRng::seed_from_u64(self.seed ^ 0xC11E);
        let clients: Vec<Arc<Client>> =
            (0..random.random_range(2..4)).map(|number| Arc::new(self.client(number))).collect();
        let mut workers = tokio::task::JoinSet::new();
        for (number, client) in clients.iter().enumerate() {
            // Two who stand in one line, so that one's release takes the other along.
            for _ in 0..random.random_range(1..3) {
                let random = SmallRng::seed_from_u64(random.random());
                let (world, client) = (self.clone(), client.clone());
                workers.spawn(Worker { world, client, number, random }.work_until_the_end());
            }
        }
        let storms = SmallRng::seed_from_u64(random.random());
        let storms = tokio::spawn(self.clone().storms(clients.clone(), storms));
        workers.join_all().await;
        self.over.store(true, Ordering::Relaxed);
        self.weather.calm();
        self.homes.iter().for_each(|home| home.thaw());
        clients.iter().for_each(|client| client.join_again());
        storms.await.unwrap();
        for client in clients.iter().filter(|client| !client.is_stopped()) {
            // What a storm has left under way may still disturb it.
            let _ = client.locks.close().await;
        }
        let one_stopped = clients.iter().any(|client| client.is_stopped());
        self.leaves_nothing(one_stopped).await
    }

    fn client(&self, number: u64) -> Client {
        let mut random = SmallRng::seed_from_u64(self.seed ^ number << 32);
        let stands = random.random_bool(self.standing);
        let wall = Wall::new((!stands).then(|| self.time.clone()));
        self.client_with(&wall, random, |_, way| way)
    }

    /// A client with this wall clock, whose way to each node is made by `lay` from the usual one.
    fn client_with(
        &self,
        wall: &Arc<Wall>,
        mut random: SmallRng,
        lay: impl Fn(usize, Arc<dyn Engine>) -> Arc<dyn Engine>,
    ) -> Client {
        let (ice, mut scissors) = (Ice::default(), Vec::new());
        let dress = self.flaw.for_a_client(self.clock.clone());
        let ways = self.homes.iter().enumerate().map(|(place, home)| {
            let random = SmallRng::seed_from_u64(random.random());
            let dress = dress.at(place + 1 == self.homes.len());
            let way = Way::new(home.clone(), self.weather.clone(), dress, wall.clone(), random);
            scissors.push(way.scissors());
            let inner = lay(place, Arc::new(Layered(way)));
            Arc::new(Layered(Iced { inner, ice: ice.clone() })) as Arc<dyn Engine>
        });
        let quorum = Redlock::over(ways.collect(), RedlockOptions::default(), self.clock.clone());
        let quorum = Arc::new(quorum.unwrap());
        let (record, clock) = (self.record.clone(), self.clock.clone());
        let witness = Arc::new(Layered(Witness { quorum, record, clock }));
        let locks = Lockset::with_engine(dress.over(witness), self.clock.clone()).unwrap();
        Client { locks, ice, scissors, stopped: watch::Sender::new(false) }
    }

    /// When all are gone, their last requests have arrived, and all leases are over. One that
    /// stopped while it was cut off could not withdraw, and a memory node keeps its place in the
    /// queue until somebody comes; a holder it keeps never.
    async fn leaves_nothing(&self, one_stopped: bool) -> Result<(), String> {
        tokio::time::sleep(self.ttl * 8 + self.weather.latest * 2).await;
        for home in &self.homes {
            let mut left = home.list().await;
            left.retain(|state| !one_stopped || !state.holders.is_empty());
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
