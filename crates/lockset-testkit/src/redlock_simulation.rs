//! Simulates the real Redlock engine over faulty memory nodes, in virtual time, one run per seed.
//!
//! Several clients contend for a few names on three or five nodes. Between a client and a node,
//! requests are slow, lost, executed without a reply, executed late or twice. Nodes freeze, lose
//! their memory, and have clocks that jump. Clients are cut off, have stopped wall clocks, pause
//! for longer than their leases, and crash. The history of a run is checked by rules of which only
//! one depends on clocks, see `history.rs`.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lockset::Lockset;
use lockset::clock::{Clock, Moment};
use lockset::engine::redlock::{Redlock, RedlockOptions};
use lockset::engine::{Engine, FencedNode};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use tokio::sync::watch;

use crate::layer::{Freezable, FreezeSwitch, Layered};

mod counterexample;
mod disturbances;
mod flaws;
mod history;
mod network;
mod node;
mod recorder;
mod wall_clock;
mod worker;

pub use counterexample::{TwoTokens, replay_model_counterexample};
pub use flaws::Flaw;
use history::RunHistory;
use network::{Network, NodeLink};
use node::SimNode;
use recorder::RenewalRecorder;
use wall_clock::{SharedWallTime, WallClock};
use worker::Worker;

/// Longer than any run takes if every acquisition is finally served or refused.
const PATIENCE: Duration = Duration::from_secs(6 * 3600);

/// What happened in one run, to verify that faults did occur.
#[derive(Clone, Copy, Debug, Default)]
pub struct RunCounts {
    /// Locks held.
    pub held: usize,
    /// Locks lost.
    pub lost: usize,
    /// Acquisitions that ended without a lock.
    pub refused: usize,
    /// Successful renewals, by a client or its keeper.
    pub confirmed: usize,
    /// Writes that the register rejected because a newer token had written.
    pub stale: usize,
    /// Requests that met a fault.
    pub faults: usize,
    /// Clock jumps and lost memories of nodes.
    pub jumps: usize,
}

impl RunCounts {
    /// Adds the counts of another run.
    pub fn add(&mut self, other: &RunCounts) {
        self.held += other.held;
        self.lost += other.lost;
        self.refused += other.refused;
        self.confirmed += other.confirmed;
        self.stale += other.stale;
        self.faults += other.faults;
        self.jumps += other.jumps;
    }
}

/// Runs one seed.
///
/// # Errors
/// The violation that was found.
pub fn simulate(seed: u64, flaw: Flaw) -> Result<RunCounts, String> {
    in_virtual_time(async {
        let world = Arc::new(World::draw(seed, flaw));
        let played = tokio::time::timeout(PATIENCE, world.run()).await;
        played.map_err(|_| "an acquisition was neither served nor refused".to_owned())??;
        let history = world.history.lock().unwrap();
        history.check()?;
        Ok(RunCounts {
            held: history.acquired.len(),
            lost: world.lost.load(Ordering::Relaxed),
            refused: world.refused.load(Ordering::Relaxed),
            confirmed: history.acquired.iter().map(|one| one.confirmed.len()).sum(),
            stale: history.stale,
            faults: world.network.faults.load(Ordering::Relaxed),
            jumps: history.faults.len(),
        })
    })
}

fn in_virtual_time<T>(run: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(run)
}

struct World {
    seed: u64,
    flaw: Flaw,
    clock: Clock,
    ttl: Duration,
    nodes: Vec<Arc<SimNode>>,
    names: Vec<&'static str>,
    /// Clients rarely wait and hardly pause between acquisitions.
    is_hasty: bool,
    /// The share of clients whose wall clock is stopped.
    stopped_clock_share: f64,
    time: Arc<SharedWallTime>,
    network: Arc<Network>,
    history: Arc<Mutex<RunHistory>>,
    /// Whether clocks of nodes jump, and whether nodes lose their memory.
    jumps: bool,
    forgets: bool,
    over: AtomicBool,
    lost: AtomicUsize,
    refused: AtomicUsize,
}

/// One client: its front, and the switch that freezes it.
struct Client {
    locks: Lockset,
    switch: FreezeSwitch,
    /// For each node, until when the link to it is cut.
    cut_switch: Vec<Arc<Mutex<Moment>>>,
    /// It crashed.
    stopped: watch::Sender<bool>,
}

impl Client {
    /// Cuts the link to this node until a moment.
    fn cut(&self, node: usize, until: Moment) {
        *self.cut_switch[node].lock().unwrap() = until;
    }

    fn reconnect(&self) {
        (0..self.cut_switch.len()).for_each(|node| self.cut(node, Moment::from_nanos(0)));
    }

    fn is_stopped(&self) -> bool {
        *self.stopped.borrow()
    }

    /// Pending until it crashes.
    async fn until_stopped(&self) {
        let mut stopped = self.stopped.subscribe();
        // `self` owns the sender, so waiting cannot fail.
        let _ = stopped.wait_for(|stopped| *stopped).await;
    }
}

impl World {
    /// Three nodes and a network without faults.
    fn quiet(flaw: Flaw, ttl: Duration) -> Arc<Self> {
        let world = Self::draw(0, flaw);
        let names = vec!["a"];
        let node =
            |number| SimNode::new(number, world.clock.clone(), &names, world.history.clone());
        let nodes = (1..=3).map(node).collect();
        world.network.stop_faults();
        Arc::new(Self { nodes, names, ttl, ..world })
    }

    fn draw(seed: u64, flaw: Flaw) -> Self {
        let mut random = SmallRng::seed_from_u64(seed);
        let clock = Clock::tokio();
        let count = if random.random_bool(0.75) { 3 } else { 5 };
        let names = ["a", "b"][..if random.random_bool(0.9) { 1 } else { 2 }].to_vec();
        let history: Arc<Mutex<RunHistory>> = Arc::default();
        let nodes: Vec<Arc<SimNode>> = (1..=count)
            .map(|number| SimNode::new(number, clock.clone(), &names, history.clone()))
            .collect();
        let jumps = random.random_bool(0.5);
        let forgets = random.random_bool(0.2);
        // If nodes lose their memory, tokens keep growing only by running wall clocks.
        let stopped_clock_share =
            if forgets { 0.0 } else { [0.0, 0.5, 1.0][random.random_range(0..3)] };
        // Short, because most of a run is waiting.
        let ttl = Duration::from_millis(random.random_range(600..2400));
        Self {
            seed,
            flaw,
            ttl,
            nodes,
            is_hasty: random.random_bool(0.3),
            stopped_clock_share,
            time: SharedWallTime::new(clock.clone()),
            network: Network::new(&mut random, ttl, jumps),
            names,
            clock,
            history,
            jumps,
            forgets,
            over: AtomicBool::new(false),
            lost: AtomicUsize::new(0),
            refused: AtomicUsize::new(0),
        }
    }

    async fn run(self: &Arc<Self>) -> Result<(), String> {
        let mut random = SmallRng::seed_from_u64(self.seed ^ 0xC11E);
        let clients: Vec<Arc<Client>> =
            (0..random.random_range(2..4)).map(|number| Arc::new(self.client(number))).collect();
        let mut workers = tokio::task::JoinSet::new();
        for (number, client) in clients.iter().enumerate() {
            // Two workers queue inside one client, so that one's release can enqueue the other.
            for _ in 0..random.random_range(1..3) {
                let random = SmallRng::seed_from_u64(random.random());
                let (world, client) = (self.clone(), client.clone());
                workers.spawn(Worker { world, client, number, random }.work_until_stopped());
            }
        }
        let disturb = SmallRng::seed_from_u64(random.random());
        let disturb = tokio::spawn(self.clone().disturb(clients.clone(), disturb));
        workers.join_all().await;
        self.over.store(true, Ordering::Relaxed);
        self.network.stop_faults();
        self.nodes.iter().for_each(|node| node.thaw());
        clients.iter().for_each(|client| client.reconnect());
        disturb.await.unwrap();
        for client in clients.iter().filter(|client| !client.is_stopped()) {
            // Requests still in flight may disturb it.
            let _ = client.locks.close().await;
        }
        let one_stopped = clients.iter().any(|client| client.is_stopped());
        self.check_nothing_left(one_stopped).await
    }

    fn client(&self, number: u64) -> Client {
        let mut random = SmallRng::seed_from_u64(self.seed ^ number << 32);
        let is_stopped_clock = random.random_bool(self.stopped_clock_share);
        let wall_clock = WallClock::new((!is_stopped_clock).then(|| self.time.clone()));
        self.client_with(&wall_clock, random, |_, network| network)
    }

    /// A client with this wall clock. `wrap_link` may wrap its link to each node.
    fn client_with(
        &self,
        wall_clock: &Arc<WallClock>,
        mut random: SmallRng,
        wrap_link: impl Fn(usize, Arc<dyn Engine>) -> Arc<dyn Engine>,
    ) -> Client {
        let (switch, mut cut_switch) = (FreezeSwitch::default(), Vec::new());
        let node_flaw = self.flaw.for_a_client(self.clock.clone());
        let links = self.nodes.iter().enumerate().map(|(index, node)| {
            let random = SmallRng::seed_from_u64(random.random());
            let node_flaw = node_flaw.at(index + 1 == self.nodes.len());
            let network = NodeLink::new(
                node.clone(),
                self.network.clone(),
                node_flaw,
                wall_clock.clone(),
                random,
            );
            cut_switch.push(network.cut_switch());
            let inner = wrap_link(index, Arc::new(Layered(network)));
            Arc::new(Layered(Freezable { inner, switch: switch.clone() })) as Arc<dyn FencedNode>
        });
        let quorum = Redlock::over(links.collect(), RedlockOptions::default(), self.clock.clone());
        let quorum = Arc::new(quorum.unwrap());
        let (history, clock) = (self.history.clone(), self.clock.clone());
        let recorder = Arc::new(Layered(RenewalRecorder { quorum, history, clock }));
        let locks = Lockset::with_engine(node_flaw.over(recorder)).unwrap();
        Client { locks, switch, cut_switch, stopped: watch::Sender::new(false) }
    }

    /// Checks that nothing is left once all clients are closed, their last requests have arrived,
    /// and all leases have ended. A client that crashed while it was cut off could not withdraw; a
    /// memory node keeps its queue entry until the next request, but never a holder.
    async fn check_nothing_left(&self, one_stopped: bool) -> Result<(), String> {
        tokio::time::sleep(self.ttl * 8 + self.network.max_lateness * 2).await;
        for node in &self.nodes {
            let mut left = node.list().await;
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
