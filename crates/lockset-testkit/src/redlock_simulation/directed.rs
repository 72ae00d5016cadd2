//! A history that the weather does not find in any reasonable number of seeds: the shortest
//! counterexample of the model to a RAISE that does not look at the fence, played step by step.
//!
//! Nothing of it is random, and nothing of it is unreal: the quorum is the real one, over the same
//! nodes and ways as in the simulation, and every step is something that the weather does too.

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

use super::home::repeat;
use super::judge::Acquired;
use super::{Client, Flaw, Wall, World, in_virtual_time};
use crate::layer::{Layer, Layered};

const TTL: Duration = Duration::from_secs(10);

/// What two clients of one lock have got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TwoTokens {
    /// The first to have the lock.
    pub quick: Token,
    /// The one whose RAISE was late.
    pub late: Token,
}

/// Plays the counterexample over nodes with this flaw.
///
/// # Errors
/// What was wrong, in words.
pub fn play_the_models_trace(flaw: Flaw) -> Result<TwoTokens, String> {
    in_virtual_time(async {
        let world = World::quiet(flaw, TTL);
        let tokens = play(&world).await;
        world.record.lock().unwrap().judge()?;
        Ok(tokens)
    })
}

async fn play(world: &Arc<World>) -> TwoTokens {
    let (first, third) = (&world.homes[0], &world.homes[2]);
    // The fences are 1, 1 and 0.
    first.was_used().await;
    world.homes[1].was_used().await;
    // The late one is granted 2 at the first node and 1 at the third, and must lift the third.
    let raise = Arc::new(Held::default());
    let late = client(world, Some(&raise));
    late.cut(1, Moment::NEVER);
    let late_asked = world.clock.now();
    let late_lock = lock(&late);
    let waiting = tokio::spawn(async move { late_lock.lock_within(TTL * 4).await });
    raise.arrived.notified().await;
    // Its lease ends there. The quick one gets 2 at the second and the third node: its token is 2.
    third.jump_forward().await;
    let quick = client(world, None);
    quick.cut(0, Moment::NEVER);
    let quick_asked = world.clock.now();
    let quick_guard = lock(&quick).try_lock().await.unwrap().unwrap();
    note(world, &quick_guard, quick_asked);
    // Its lease ends too, and the late one's request for the third node comes once more: it is
    // granted 3. To lift that to 2 must fail, or both have the token 2.
    third.jump_forward().await;
    repeat(&third.copies()[0]).await;
    raise.goes_on.notify_one();
    // Refused, it begins anew, and gets a token of its own.
    let late_guard = waiting.await.unwrap().unwrap();
    note(world, &late_guard, late_asked);
    TwoTokens { quick: quick_guard.token(), late: late_guard.token() }
}

/// A client whose wall clock stands still; its first RAISE at the third node may be held back.
fn client(world: &World, held: Option<&Arc<Held>>) -> Client {
    let lay = |place: usize, inner: Arc<dyn Engine>| match held {
        Some(held) if place == 2 => {
            Arc::new(Layered(HoldsRaise { inner, held: held.clone() })) as Arc<dyn Engine>
        }
        _ => inner,
    };
    world.client_with(&Wall::new(None), SmallRng::seed_from_u64(0), lay)
}

fn lock(client: &Client) -> Lock {
    client.locks.mutex("a").unwrap().with(LockOptions::default().ttl(TTL)).unwrap()
}

fn note(world: &World, guard: &Guard, asked: Moment) {
    let enter = world.clock.now();
    world.record.lock().unwrap().acquire(Acquired {
        who: 0,
        name: guard.name().to_string(),
        token: guard.token(),
        asked,
        enter,
        until: enter + guard.valid_for(),
        confirmed: Vec::new(),
    });
}

/// The first RAISE on a way: under way, until it may go on.
#[derive(Debug, Default)]
struct Held {
    was_here: AtomicBool,
    arrived: Notify,
    goes_on: Notify,
}

#[derive(Debug)]
struct HoldsRaise {
    inner: Arc<dyn Engine>,
    held: Arc<Held>,
}

#[async_trait]
impl Layer for HoldsRaise {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.inner
    }

    async fn raise(&self, claim: &Claim, grant: &Grant, to: Token) -> lockset::Result<Grant> {
        if !self.held.was_here.swap(true, Ordering::Relaxed) {
            self.held.arrived.notify_one();
            self.held.goes_on.notified().await;
        }
        self.inner.raise(claim, grant, to).await
    }
}
