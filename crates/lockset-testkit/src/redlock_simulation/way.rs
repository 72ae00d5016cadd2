//! What happens on the way between a client and a node.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use futures_core::future::BoxFuture;
use futures_core::stream::BoxStream;
use futures_util::{FutureExt, StreamExt};
use lockset::clock::Moment;
use lockset::engine::{Claim, Engine, Event, Grant, Health, LockState, Wait};
use lockset::{Error, LossReason, Name, Result, Token};
use rand::RngExt;
use rand::rngs::SmallRng;

use super::flaws::Dress;
use super::home::Home;
use super::span;
use super::wall::Wall;
use crate::layer::Layer;

/// The weather of one run.
#[derive(Debug)]
pub(super) struct Weather {
    /// How often a request meets a fault.
    badness: f64,
    /// The longest usual way, and how long after its caller gave up a request may still arrive.
    slowness: Duration,
    pub(super) latest: Duration,
    /// How often a node's clock jumps forward right after it has granted something.
    upset: f64,
    calm: AtomicBool,
    pub(super) faults: AtomicUsize,
}

impl Weather {
    pub(super) fn new(random: &mut SmallRng, ttl: Duration, jumps: bool) -> Arc<Self> {
        Arc::new(Self {
            upset: if jumps { random.random_range(0.0..0.1) } else { 0.0 },
            badness: random.random_range(0.0..0.3),
            slowness: Duration::from_millis(random.random_range(1..60)),
            // Marks of withdrawn claims outlive this.
            latest: ttl * 5,
            calm: AtomicBool::new(false),
            faults: AtomicUsize::new(0),
        })
    }

    /// No more faults.
    pub(super) fn calm(&self) {
        self.calm.store(true, Ordering::Relaxed);
    }

    fn upsets(&self, random: &mut SmallRng) -> bool {
        random.random_bool(self.upset) && !self.calm.load(Ordering::Relaxed)
    }

    fn fate(&self, random: &mut SmallRng) -> Fate {
        let (there, back) = (span(random, self.slowness), span(random, self.slowness));
        let usual = Fate { there, back: Some(back), insists: random.random_bool(0.2), again: None };
        if self.calm.load(Ordering::Relaxed) {
            return Fate { there: Duration::ZERO, back: Some(Duration::ZERO), ..usual };
        }
        if !random.random_bool(self.badness) {
            return usual;
        }
        self.faults.fetch_add(1, Ordering::Relaxed);
        let late = match random.random_bool(0.5) {
            true => span(random, self.latest),
            false => span(random, self.slowness * 20),
        };
        match random.random_range(0..6) {
            // Lost.
            0 => Fate { there: Duration::MAX, back: None, ..usual },
            // Carried out, but not answered.
            1 => Fate { back: None, insists: true, ..usual },
            // The same, and late.
            2 => Fate { there: late, back: None, insists: true, ..usual },
            // Answered late.
            3 => Fate { there: late, insists: true, ..usual },
            // Carried out once more, late.
            _ => Fate { again: Some(late), insists: true, ..usual },
        }
    }
}

/// What becomes of a request.
struct Fate {
    /// How long it takes to arrive.
    there: Duration,
    /// How long its answer takes; without one its caller is told of a failure instead.
    back: Option<Duration>,
    /// It is carried out even if its caller gives up.
    insists: bool,
    /// It is carried out once more, so much later.
    again: Option<Duration>,
}

/// A client's way to a node.
#[derive(Debug)]
pub(super) struct Way {
    home: Arc<Home>,
    weather: Arc<Weather>,
    dress: Dress,
    wall: Arc<Wall>,
    random: Arc<Mutex<SmallRng>>,
    /// Until when nothing comes through.
    cut_until: Arc<Mutex<Moment>>,
    /// The first run of the node, for what does not depend on it.
    first: Arc<dyn Engine>,
    /// This client at the present run of the node.
    now: Mutex<(u64, Arc<dyn Engine>)>,
}

impl Way {
    pub(super) fn new(
        home: Arc<Home>,
        weather: Arc<Weather>,
        dress: Dress,
        wall: Arc<Wall>,
        random: SmallRng,
    ) -> Self {
        let (run, memory) = home.join();
        let first = dress.on(Arc::new(memory));
        let (random, now) = (Arc::new(Mutex::new(random)), Mutex::new((run, first.clone())));
        let cut_until = Arc::new(Mutex::new(Moment::from_nanos(0)));
        Self { home, weather, dress, wall, random, cut_until, first, now }
    }

    /// What cuts it: until the moment that is written there nothing comes through.
    pub(super) fn scissors(&self) -> Arc<Mutex<Moment>> {
        self.cut_until.clone()
    }

    fn is_cut(&self) -> bool {
        *self.cut_until.lock().unwrap() > self.home.now()
    }

    /// The caller hears that something failed, after some time.
    async fn fails<T>(&self) -> Result<T> {
        let told = span(&mut self.random.lock().unwrap(), self.weather.slowness * 4);
        tokio::time::sleep(told).await;
        Err(storm())
    }

    fn at_home(&self) -> (u64, Arc<dyn Engine>) {
        let mut now = self.now.lock().unwrap();
        if now.0 != self.home.run() {
            let (run, memory) = self.home.join();
            *now = (run, self.dress.on(Arc::new(memory)));
        }
        now.clone()
    }

    /// Sends a request through the weather.
    async fn send<T: Send + 'static>(
        &self,
        request: impl Fn(Arc<dyn Engine>) -> BoxFuture<'static, Result<T>> + Send + Sync + 'static,
    ) -> Result<T> {
        if self.is_cut() {
            return self.fails().await;
        }
        let fate = self.weather.fate(&mut self.random.lock().unwrap());
        let (run, engine) = self.at_home();
        let home = self.home.clone();
        let carried_out = async move {
            if fate.there == Duration::MAX {
                return Err(storm());
            }
            tokio::time::sleep(fate.there).await;
            let arrives = async {
                home.thawed().await;
                match home.run() == run {
                    true => request(engine.clone()).await,
                    false => Err(storm()),
                }
            };
            // In this order, because most arrive at once and need not look out for an end.
            let answer = tokio::select! {
                biased;
                answer = arrives => answer,
                // It dies with the node.
                () = home.ended(run) => return Err(storm()),
            };
            if let Some(later) = fate.again {
                tokio::spawn(async move {
                    tokio::time::sleep(later).await;
                    home.thawed().await;
                    if home.run() == run {
                        drop(request(engine).await);
                    }
                });
            }
            answer
        };
        let Some(back) = fate.back else {
            if fate.insists && fate.there < Duration::MAX {
                tokio::spawn(carried_out);
            }
            return self.fails().await;
        };
        let answer = match fate.insists {
            true => tokio::spawn(carried_out).await.unwrap(),
            false => carried_out.await,
        };
        tokio::time::sleep(back).await;
        self.home.thawed().await;
        if self.is_cut() { Err(storm()) } else { answer }
    }

    /// A claim that asks for the lock, as it arrives at the node.
    fn sent(&self, claim: &Claim) -> (Claim, Duration) {
        let (ours, extra) = self.stretched(claim);
        let floor = claim.floor.map(|proposal| self.wall.proposes(proposal));
        (Claim { floor, ..ours }, extra)
    }

    /// What a node with a slow clock makes of a claim.
    fn stretched(&self, claim: &Claim) -> (Claim, Duration) {
        let extra = if self.home.is_slow() { claim.ttl } else { Duration::ZERO };
        (Claim { ttl: claim.ttl + extra, ..claim.clone() }, extra)
    }
}

fn storm() -> Error {
    let what = "the weather is bad".to_owned();
    Error::Unreachable { engine: "memory", what, retryable: true, source: None }
}

fn shortened(grant: Grant, extra: Duration) -> Grant {
    Grant { valid_until: grant.valid_until.saturating_sub(extra), ..grant }
}

#[async_trait]
impl Layer for Way {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.first
    }

    fn identity(&self) -> String {
        self.home.label.clone()
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
        let (ours, extra) = self.sent(claim);
        let upset = self.weather.upsets(&mut self.random.lock().unwrap());
        let node = self.home.clone();
        let granted = self.send(move |home| {
            let (ours, node) = (ours.clone(), node.clone());
            async move {
                let granted = home.acquire(&ours, wait).await?;
                if granted.is_some() {
                    node.hears(home.clone(), ours.clone());
                    if upset {
                        node.jump_forward().await;
                    }
                }
                Ok(granted)
            }
            .boxed()
        });
        Ok(granted.await?.map(|grant| shortened(grant, extra)))
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Grant>> {
        let stretched = batch.iter().map(|(claim, grant)| (self.stretched(claim), grant));
        let ours: Vec<(Claim, Duration, Grant)> =
            stretched.map(|((claim, extra), grant)| (claim, extra, (*grant).clone())).collect();
        let answers = self.send(move |home| {
            let ours = ours.clone();
            async move {
                let batch: Vec<_> = ours.iter().map(|(claim, _, grant)| (claim, grant)).collect();
                let answers = home.renew(&batch).await.into_iter().zip(&ours);
                let each = answers
                    .map(|(answer, (_, extra, _))| answer.map(|grant| shortened(grant, *extra)));
                Ok(each.collect::<Vec<_>>())
            }
            .boxed()
        });
        let failed = |_| batch.iter().map(|_| Err(storm())).collect();
        answers.await.unwrap_or_else(failed)
    }

    async fn raise(&self, claim: &Claim, grant: &Grant, to: Token) -> Result<Grant> {
        let (claim, grant) = (claim.clone(), grant.clone());
        self.send(move |home| {
            let (claim, grant) = (claim.clone(), grant.clone());
            async move { home.raise(&claim, &grant, to).await }.boxed()
        })
        .await
    }

    async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        let (claim, grant, node) = (claim.clone(), grant.clone(), self.home.clone());
        let (next, extra) = next.map(|next| self.sent(next)).unzip();
        let extra = extra.unwrap_or_default();
        let granted = self.send(move |home| {
            let (claim, grant, next, node) =
                (claim.clone(), grant.clone(), next.clone(), node.clone());
            async move {
                let granted = home.release(&claim, &grant, next.as_ref()).await?;
                if let (Some(_), Some(next)) = (&granted, next) {
                    node.hears(home.clone(), next);
                }
                Ok(granted)
            }
            .boxed()
        });
        Ok(granted.await?.map(|grant| shortened(grant, extra)))
    }

    async fn withdraw(&self, claim: &Claim) -> Result<()> {
        let claim = claim.clone();
        self.send(move |home| {
            let claim = claim.clone();
            async move { home.withdraw(&claim).await }.boxed()
        })
        .await
    }

    async fn inspect(&self, name: &Name) -> Result<LockState> {
        let name = name.clone();
        self.send(move |home| {
            let name = name.clone();
            async move { home.inspect(&name).await }.boxed()
        })
        .await
    }

    async fn health(&self) -> Result<Health> {
        self.send(move |home| async move { home.health().await }.boxed()).await
    }

    /// Some are lost, all are slow. Nobody is told that a clock jumped.
    fn events(&self) -> BoxStream<'static, Event> {
        let (weather, random) = (self.weather.clone(), self.random.clone());
        let (home, cut_until) = (self.home.clone(), self.cut_until.clone());
        let signals = self.first.events().filter_map(move |signal| {
            let fate = weather.fate(&mut random.lock().unwrap());
            let cut = *cut_until.lock().unwrap() > home.now();
            let told = !cut && !matches!(signal, Event::Lost(_, LossReason::Broken));
            async move {
                tokio::time::sleep(fate.back.filter(|_| told)?).await;
                Some(signal)
            }
        });
        signals.boxed()
    }
}
