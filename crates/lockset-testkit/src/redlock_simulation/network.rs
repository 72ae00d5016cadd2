//! The faulty network between a client and a node.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use futures_core::future::BoxFuture;
use futures_core::stream::BoxStream;
use futures_util::{FutureExt, StreamExt};
use lockset::clock::Moment;
use lockset::engine::{Admission, Claim, Engine, Event, Grant, Health, LockState, Renewal, Wait};
use lockset::{Error, LossReason, Name, Result, Token};
use rand::RngExt;
use rand::rngs::SmallRng;

use super::flaws::NodeFlaw;
use super::node::SimNode;
use super::span;
use super::wall_clock::WallClock;
use crate::layer::{Layer, fenced_node};

/// The network of one run: its fault rate and delays.
#[derive(Debug)]
pub(super) struct Network {
    /// The probability that a request meets a fault.
    fault_rate: f64,
    /// The maximum ordinary delay, and how long after its caller gave up a request may still
    /// arrive.
    max_delay: Duration,
    pub(super) max_lateness: Duration,
    /// The probability that the clock of a node jumps forward right after a grant.
    jumps_after_grant: f64,
    stop_faults: AtomicBool,
    pub(super) faults: AtomicUsize,
}

impl Network {
    pub(super) fn new(random: &mut SmallRng, ttl: Duration, jumps: bool) -> Arc<Self> {
        Arc::new(Self {
            jumps_after_grant: if jumps { random.random_range(0.0..0.1) } else { 0.0 },
            fault_rate: random.random_range(0.0..0.3),
            max_delay: Duration::from_millis(random.random_range(1..60)),
            // Tombstones of withdrawn claims live longer than this.
            max_lateness: ttl * 5,
            stop_faults: AtomicBool::new(false),
            faults: AtomicUsize::new(0),
        })
    }

    /// Ends all faults.
    pub(super) fn stop_faults(&self) {
        self.stop_faults.store(true, Ordering::Relaxed);
    }

    fn jumps_after_grant(&self, random: &mut SmallRng) -> bool {
        random.random_bool(self.jumps_after_grant) && !self.stop_faults.load(Ordering::Relaxed)
    }

    fn delivery(&self, random: &mut SmallRng) -> Delivery {
        let (request_delay, reply_delay) =
            (span(random, self.max_delay), span(random, self.max_delay));
        let usual = Delivery {
            request_delay,
            reply_delay: Some(reply_delay),
            outlives_caller: random.random_bool(0.2),
            again: None,
        };
        if self.stop_faults.load(Ordering::Relaxed) {
            return Delivery {
                request_delay: Duration::ZERO,
                reply_delay: Some(Duration::ZERO),
                ..usual
            };
        }
        if !random.random_bool(self.fault_rate) {
            return usual;
        }
        self.faults.fetch_add(1, Ordering::Relaxed);
        let late = match random.random_bool(0.5) {
            true => span(random, self.max_lateness),
            false => span(random, self.max_delay * 20),
        };
        match random.random_range(0..6) {
            // Lost.
            0 => Delivery { request_delay: Duration::MAX, reply_delay: None, ..usual },
            // Executed, but not answered.
            1 => Delivery { reply_delay: None, outlives_caller: true, ..usual },
            // The same, and late.
            2 => {
                Delivery { request_delay: late, reply_delay: None, outlives_caller: true, ..usual }
            }
            // Answered late.
            3 => Delivery { request_delay: late, outlives_caller: true, ..usual },
            // Executed again, late.
            _ => Delivery { again: Some(late), outlives_caller: true, ..usual },
        }
    }
}

/// How a request is delivered.
struct Delivery {
    /// How long it takes to arrive.
    request_delay: Duration,
    /// How long its reply takes; `None` if the caller gets an error instead.
    reply_delay: Option<Duration>,
    /// It is executed even if its caller gives up.
    outlives_caller: bool,
    /// It is executed again after this time.
    again: Option<Duration>,
}

/// A node as a client sees it through the network.
#[derive(Debug)]
pub(super) struct NodeLink {
    node: Arc<SimNode>,
    network: Arc<Network>,
    node_flaw: NodeFlaw,
    wall_clock: Arc<WallClock>,
    random: Arc<Mutex<SmallRng>>,
    /// Until when the link is cut.
    cut_until: Arc<Mutex<Moment>>,
    /// The first run of the node, for methods that do not depend on the run.
    first: Arc<dyn Engine>,
    /// This client at the current run of the node.
    now: Mutex<(u64, Arc<dyn Engine>)>,
}

impl NodeLink {
    pub(super) fn new(
        node: Arc<SimNode>,
        network: Arc<Network>,
        node_flaw: NodeFlaw,
        wall_clock: Arc<WallClock>,
        random: SmallRng,
    ) -> Self {
        let (run, memory) = node.join();
        let first = node_flaw.on(Arc::new(memory));
        let (random, now) = (Arc::new(Mutex::new(random)), Mutex::new((run, first.clone())));
        let cut_until = Arc::new(Mutex::new(Moment::from_nanos(0)));
        Self { node, network, node_flaw, wall_clock, random, cut_until, first, now }
    }

    /// The moment until which the link is cut; writing to it cuts the link.
    pub(super) fn cut_switch(&self) -> Arc<Mutex<Moment>> {
        self.cut_until.clone()
    }

    fn is_cut(&self) -> bool {
        *self.cut_until.lock().unwrap() > self.node.now()
    }

    /// The caller gets an error after some time.
    async fn fails<T>(&self) -> Result<T> {
        let error_delay = span(&mut self.random.lock().unwrap(), self.network.max_delay * 4);
        tokio::time::sleep(error_delay).await;
        Err(unreachable())
    }

    fn current_engine(&self) -> (u64, Arc<dyn Engine>) {
        let mut now = self.now.lock().unwrap();
        if now.0 != self.node.run() {
            let (run, memory) = self.node.join();
            *now = (run, self.node_flaw.on(Arc::new(memory)));
        }
        now.clone()
    }

    /// Sends a request through the network.
    async fn send<T: Send + 'static>(
        &self,
        request: impl Fn(Arc<dyn Engine>) -> BoxFuture<'static, Result<T>> + Send + Sync + 'static,
    ) -> Result<T> {
        if self.is_cut() {
            return self.fails().await;
        }
        let delivery = self.network.delivery(&mut self.random.lock().unwrap());
        let (run, engine) = self.current_engine();
        let node = self.node.clone();
        let delivered = async move {
            if delivery.request_delay == Duration::MAX {
                return Err(unreachable());
            }
            tokio::time::sleep(delivery.request_delay).await;
            let arrives = async {
                node.until_thawed().await;
                match node.run() == run {
                    true => request(engine.clone()).await,
                    false => Err(unreachable()),
                }
            };
            // Biased, because most requests complete at once and need not watch for the end of the
            // run.
            let reply = tokio::select! {
                biased;
                reply = arrives => reply,
                // The request ends with the run of the node.
                () = node.ended(run) => return Err(unreachable()),
            };
            if let Some(later) = delivery.again {
                tokio::spawn(async move {
                    tokio::time::sleep(later).await;
                    node.until_thawed().await;
                    if node.run() == run {
                        drop(request(engine).await);
                    }
                });
            }
            reply
        };
        let Some(reply_delay) = delivery.reply_delay else {
            if delivery.outlives_caller && delivery.request_delay < Duration::MAX {
                tokio::spawn(delivered);
            }
            return self.fails().await;
        };
        let reply = match delivery.outlives_caller {
            true => tokio::spawn(delivered).await.unwrap(),
            false => delivered.await,
        };
        tokio::time::sleep(reply_delay).await;
        self.node.until_thawed().await;
        if self.is_cut() { Err(unreachable()) } else { reply }
    }

    /// An acquiring claim, as it arrives at the node.
    fn sent(&self, claim: &Claim) -> (Claim, Duration) {
        let (ours, extra) = self.stretched(claim);
        let floor = claim.floor.map(|proposal| self.wall_clock.proposes(proposal));
        (Claim { floor, ..ours }, extra)
    }

    /// A claim as a node with a slow clock treats it, and the extra time.
    fn stretched(&self, claim: &Claim) -> (Claim, Duration) {
        let extra = if self.node.is_slow() { claim.ttl } else { Duration::ZERO };
        (Claim { ttl: claim.ttl + extra, ..claim.clone() }, extra)
    }
}

fn unreachable() -> Error {
    let what = "a simulated network fault".to_owned();
    Error::Unreachable { engine: "memory", what, retryable: true, source: None }
}

fn shortened(grant: Grant, extra: Duration) -> Grant {
    Grant { valid_until: grant.valid_until.saturating_sub(extra), ..grant }
}

#[async_trait]
impl Layer for NodeLink {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.first
    }

    fn identity(&self) -> String {
        self.node.label.clone()
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        let (ours, extra) = self.sent(claim);
        let jumps_after_grant = self.network.jumps_after_grant(&mut self.random.lock().unwrap());
        let node = self.node.clone();
        let granted = self.send(move |engine| {
            let (ours, node) = (ours.clone(), node.clone());
            async move {
                let granted = engine.acquire(&ours, wait).await?;
                if let Admission::Granted(_) = granted {
                    node.keep_copy(engine.clone(), ours.clone());
                    if jumps_after_grant {
                        node.jump_forward().await;
                    }
                }
                Ok(granted)
            }
            .boxed()
        });
        Ok(granted.await?.map(|grant| shortened(grant, extra)))
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>> {
        let stretched = batch.iter().map(|(claim, grant)| (self.stretched(claim), grant));
        let ours: Vec<(Claim, Duration, Grant)> =
            stretched.map(|((claim, extra), grant)| (claim, extra, (*grant).clone())).collect();
        let replies = self.send(move |engine| {
            let ours = ours.clone();
            async move {
                let batch: Vec<_> = ours.iter().map(|(claim, _, grant)| (claim, grant)).collect();
                let replies = engine.renew(&batch).await.into_iter().zip(&ours);
                let each = replies.map(|(reply, (_, extra, _))| {
                    reply.map(|renewal| renewal.map(|grant| shortened(grant, *extra)))
                });
                Ok(each.collect::<Vec<_>>())
            }
            .boxed()
        });
        let failed = |_| batch.iter().map(|_| Err(unreachable())).collect();
        replies.await.unwrap_or_else(failed)
    }

    async fn raise(&self, claim: &Claim, grant: &Grant, to: Token) -> Result<Grant> {
        let (claim, grant) = (claim.clone(), grant.clone());
        self.send(move |engine| {
            let (claim, grant) = (claim.clone(), grant.clone());
            async move { fenced_node(&engine)?.raise(&claim, &grant, to).await }.boxed()
        })
        .await
    }

    async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        let (claim, grant, node) = (claim.clone(), grant.clone(), self.node.clone());
        let (next, extra) = next.map(|next| self.sent(next)).unzip();
        let extra = extra.unwrap_or_default();
        let granted = self.send(move |engine| {
            let (claim, grant, next, node) =
                (claim.clone(), grant.clone(), next.clone(), node.clone());
            async move {
                let granted = engine.release(&claim, &grant, next.as_ref()).await?;
                if let (Some(_), Some(next)) = (&granted, next) {
                    node.keep_copy(engine.clone(), next);
                }
                Ok(granted)
            }
            .boxed()
        });
        Ok(granted.await?.map(|grant| shortened(grant, extra)))
    }

    async fn withdraw(&self, claim: &Claim) -> Result<()> {
        let claim = claim.clone();
        self.send(move |engine| {
            let claim = claim.clone();
            async move { engine.withdraw(&claim).await }.boxed()
        })
        .await
    }

    async fn inspect(&self, name: &Name) -> Result<LockState> {
        let name = name.clone();
        self.send(move |engine| {
            let name = name.clone();
            async move { engine.inspect(&name).await }.boxed()
        })
        .await
    }

    async fn health(&self) -> Result<Health> {
        self.send(move |engine| async move { fenced_node(&engine)?.health().await }.boxed()).await
    }

    /// Some events are lost, all are delayed. A clock jump is not reported.
    fn events(&self) -> BoxStream<'static, Event> {
        let (network, random) = (self.network.clone(), self.random.clone());
        let (node, cut_until) = (self.node.clone(), self.cut_until.clone());
        let events = self.first.events().filter_map(move |event| {
            let delivery = network.delivery(&mut random.lock().unwrap());
            let cut = *cut_until.lock().unwrap() > node.now();
            let error_delay = !cut && !matches!(event, Event::Lost(_, LossReason::Broken));
            async move {
                tokio::time::sleep(delivery.reply_delay.filter(|_| error_delay)?).await;
                Some(event)
            }
        });
        events.boxed()
    }
}
