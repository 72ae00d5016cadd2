//! A run that random faults do not produce in any reasonable number of seeds: the shortest
//! counterexample of the model to a RAISE that does not check the fence, replayed step by step.
//!
//! Nothing in it is random or artificial: the Redlock engine is the real one, over the same nodes
//! and links as in the simulation, and every step is a fault that the network can also cause.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use lockset::clock::Moment;
use lockset::engine::{Claim, Engine, Grant};
use lockset::{Guard, LockOptions, Mutex as Lock, Token};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use tokio::sync::Notify;

use super::history::Acquisition;
use super::node::repeat;
use super::{Client, Flaw, WallClock, World, in_virtual_time};
use crate::layer::{Layer, Layered, fenced_node};

const TTL: Duration = Duration::from_secs(10);

/// The tokens of two clients of one lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TwoTokens {
    /// The client that gets the lock first.
    pub quick: Token,
    /// The client whose RAISE is late.
    pub late: Token,
}

/// Replays the counterexample on nodes with this flaw.
///
/// # Errors
/// The violation that was found.
pub fn replay_model_counterexample(flaw: Flaw) -> Result<TwoTokens, String> {
    in_virtual_time(async {
        let world = World::quiet(flaw, TTL);
        let tokens = run(&world).await;
        world.history.lock().unwrap().check()?;
        Ok(tokens)
    })
}

async fn run(world: &Arc<World>) -> TwoTokens {
    let (first, third) = (&world.nodes[0], &world.nodes[2]);
    // The fences are 1, 1 and 0.
    first.use_every_lock_once().await;
    world.nodes[1].use_every_lock_once().await;
    // The late client is granted 2 at the first node and 1 at the third, and must raise the third.
    let raise = Arc::new(HeldRaise::default());
    let late = client(world, Some(&raise));
    late.cut(1, Moment::NEVER);
    let late_asked = world.clock.now();
    let late_lock = lock(&late);
    let waiting = tokio::spawn(async move { late_lock.lock_within(TTL * 4).await });
    raise.arrived.notified().await;
    // Its lease ends there. The quick client gets 2 at the second and third node: its token is 2.
    third.jump_forward().await;
    let quick = client(world, None);
    quick.cut(0, Moment::NEVER);
    let quick_asked = world.clock.now();
    let quick_guard = lock(&quick).try_lock().await.unwrap().unwrap();
    record_acquisition(world, &quick_guard, quick_asked);
    // Its lease ends too, and the request of the late client arrives at the third node again: it is
    // granted 3. Raising that to 2 must fail, or both clients have the token 2.
    third.jump_forward().await;
    repeat(&third.copies()[0]).await;
    raise.proceed.notify_one();
    // After the refusal it starts over, and gets a token of its own.
    let late_guard = waiting.await.unwrap().unwrap();
    record_acquisition(world, &late_guard, late_asked);
    TwoTokens { quick: quick_guard.token(), late: late_guard.token() }
}

/// A client with a stopped wall clock; its first RAISE at the third node may be held back.
fn client(world: &World, held: Option<&Arc<HeldRaise>>) -> Client {
    let wrap_link = |index: usize, inner: Arc<dyn Engine>| match held {
        Some(held) if index == 2 => {
            Arc::new(Layered(HoldsRaise { inner, held: held.clone() })) as Arc<dyn Engine>
        }
        _ => inner,
    };
    world.client_with(&WallClock::new(None), SmallRng::seed_from_u64(0), wrap_link)
}

fn lock(client: &Client) -> Lock {
    client.locks.mutex("a").unwrap().with(LockOptions::default().ttl(TTL))
}

fn record_acquisition(world: &World, guard: &Guard, asked: Moment) {
    let enter = world.clock.now();
    world.history.lock().unwrap().acquire(Acquisition {
        who: 0,
        name: guard.name().to_string(),
        token: guard.token(),
        asked,
        enter,
        until: enter + guard.valid_for(),
        confirmed: Vec::new(),
    });
}

/// Holds the first RAISE on a link until it may continue.
#[derive(Debug, Default)]
struct HeldRaise {
    is_first_seen: AtomicBool,
    arrived: Notify,
    proceed: Notify,
}

#[derive(Debug)]
struct HoldsRaise {
    inner: Arc<dyn Engine>,
    held: Arc<HeldRaise>,
}

#[async_trait]
impl Layer for HoldsRaise {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.inner
    }

    async fn raise(&self, claim: &Claim, grant: &Grant, to: Token) -> lockset::Result<Grant> {
        if !self.held.is_first_seen.swap(true, Ordering::Relaxed) {
            self.held.arrived.notify_one();
            self.held.proceed.notified().await;
        }
        fenced_node(&self.inner)?.raise(claim, grant, to).await
    }
}
