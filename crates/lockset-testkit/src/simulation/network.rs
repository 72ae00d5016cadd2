//! The faulty network between a client and the engine.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use futures_core::future::BoxFuture;
use futures_core::stream::BoxStream;
use futures_util::{FutureExt, StreamExt};
use lockset::clock::{Clock, Moment};
use lockset::engine::{Admission, Amend, Claim, ClaimId, Engine, Event, Grant, Renewal, Wait};
use lockset::{Break, Error, Holder, Name, Result, Token};
use rand::RngExt;
use rand::rngs::SmallRng;

use super::span;
use crate::history::{History, LeasePromise};
use crate::layer::{Layer, fenced_node};

/// The network of one run: its fault rate, its delays, and whether the engine is frozen.
#[derive(Debug)]
pub(super) struct Network {
    clock: Clock,
    history: Arc<Mutex<History>>,
    /// The probability that a request meets a fault.
    fault_rate: f64,
    /// The maximum delay of an ordinary request, and of a late one.
    max_delay: Duration,
    max_lateness: Duration,
    stop_faults: AtomicBool,
    frozen_until: Mutex<Option<Moment>>,
    pub(super) faults: AtomicUsize,
}

impl Network {
    pub(super) fn new(
        random: &mut SmallRng,
        clock: Clock,
        ttl: Duration,
        history: Arc<Mutex<History>>,
    ) -> Arc<Self> {
        Arc::new(Self {
            clock,
            history,
            fault_rate: random.random_range(0.0..0.4),
            max_delay: ttl.mul_f64(random.random_range(0.001..0.2)),
            // Tombstones of withdrawn claims live longer than this.
            max_lateness: Duration::from_secs(20),
            stop_faults: AtomicBool::new(false),
            frozen_until: Mutex::new(None),
            faults: AtomicUsize::new(0),
        })
    }

    /// Ends all faults.
    pub(super) fn stop_faults(&self) {
        self.stop_faults.store(true, Ordering::Relaxed);
        *self.frozen_until.lock().unwrap() = None;
    }

    pub(super) fn freeze(&self, span: Duration) {
        *self.frozen_until.lock().unwrap() = Some(self.clock.now() + span);
    }

    /// How long after its caller gave up a request may still arrive.
    pub(super) fn max_lateness(&self) -> Duration {
        self.max_lateness
    }

    fn delivery(&self, random: &mut SmallRng) -> Delivery {
        if self.stop_faults.load(Ordering::Relaxed) {
            return Delivery::Delivered {
                request_delay: Duration::ZERO,
                reply_delay: Duration::ZERO,
            };
        }
        let (request_delay, reply_delay) =
            (span(random, self.max_delay), span(random, self.max_delay));
        if !random.random_bool(self.fault_rate) {
            return match random.random_bool(0.5) {
                true => Delivery::Delivered { request_delay, reply_delay },
                false => Delivery::DeliveredAlways { request_delay, reply_delay },
            };
        }
        self.faults.fetch_add(1, Ordering::Relaxed);
        match random.random_range(0..5) {
            0 => Delivery::Lost { error_delay: reply_delay },
            1 => Delivery::ReplyLost { request_delay, error_delay: request_delay + reply_delay },
            2 => Delivery::Late {
                request_delay: span(random, self.max_lateness),
                error_delay: reply_delay,
            },
            3 => Delivery::Delivered {
                request_delay: request_delay * 5,
                reply_delay: reply_delay * 5,
            },
            _ => Delivery::DeliveredAlways {
                request_delay: request_delay * 5,
                reply_delay: reply_delay * 5,
            },
        }
    }

    async fn until_thawed(&self) {
        let until = *self.frozen_until.lock().unwrap();
        if let Some(until) = until {
            self.clock.sleep_until(until).await;
        }
    }
}

/// How a request is delivered.
enum Delivery {
    /// Executed and answered, if its caller waits long enough.
    Delivered { request_delay: Duration, reply_delay: Duration },
    /// Executed even if its caller gives up.
    DeliveredAlways { request_delay: Duration, reply_delay: Duration },
    /// Never executed; the caller gets an error.
    Lost { error_delay: Duration },
    /// Executed, but the caller gets an error.
    ReplyLost { request_delay: Duration, error_delay: Duration },
    /// Executed long after the caller got an error.
    Late { request_delay: Duration, error_delay: Duration },
}

/// The engine as a client sees it through the network.
#[derive(Debug)]
pub(super) struct NetworkLayer {
    inner: Arc<dyn Engine>,
    network: Arc<Network>,
    random: Arc<Mutex<SmallRng>>,
}

impl NetworkLayer {
    pub(super) fn new(inner: Arc<dyn Engine>, network: Arc<Network>, random: SmallRng) -> Self {
        Self { inner, network, random: Arc::new(Mutex::new(random)) }
    }

    /// Sends a request through the network.
    async fn send<T: Send + 'static>(
        &self,
        request: impl FnOnce(Arc<dyn Engine>) -> BoxFuture<'static, T>,
    ) -> Result<T> {
        let delivery = self.network.delivery(&mut self.random.lock().unwrap());
        let (network, request) = (self.network.clone(), request(self.inner.clone()));
        let delivered = |request_delay: Duration| async move {
            tokio::time::sleep(request_delay).await;
            network.until_thawed().await;
            request.await
        };
        let error_delay = match delivery {
            Delivery::Delivered { request_delay, reply_delay } => {
                let reply = delivered(request_delay).await;
                return Ok(self.delay_reply(reply_delay, reply).await);
            }
            Delivery::DeliveredAlways { request_delay, reply_delay } => {
                let reply = tokio::spawn(delivered(request_delay)).await.unwrap();
                return Ok(self.delay_reply(reply_delay, reply).await);
            }
            Delivery::ReplyLost { request_delay, error_delay }
            | Delivery::Late { request_delay, error_delay } => {
                tokio::spawn(delivered(request_delay));
                error_delay
            }
            Delivery::Lost { error_delay } => error_delay,
        };
        tokio::time::sleep(error_delay).await;
        Err(self.unreachable())
    }

    async fn delay_reply<T>(&self, reply_delay: Duration, reply: T) -> T {
        tokio::time::sleep(reply_delay).await;
        self.network.until_thawed().await;
        reply
    }

    fn unreachable(&self) -> Error {
        let what = "a simulated network fault".to_owned();
        Error::Unreachable { engine: "memory", what, retryable: true, source: None }
    }

    /// Records what the client is promised, at the moment it receives the reply.
    fn record_promise(&self, claim: ClaimId, grant: &Grant) {
        let (at, valid_until) = (self.network.clock.now(), grant.valid_until);
        let promise = LeasePromise { claim, at, valid_until };
        self.network.history.lock().unwrap().promises.push(promise);
    }
}

#[async_trait]
impl Layer for NetworkLayer {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.inner
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        let ours = claim.clone();
        let request =
            move |engine: Arc<dyn Engine>| async move { engine.acquire(&ours, wait).await }.boxed();
        let granted = self.send(request).await??;
        if let Admission::Granted(grant) = &granted {
            self.record_promise(claim.id, grant);
        }
        Ok(granted)
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>> {
        let ours: Vec<(Claim, Grant)> =
            batch.iter().map(|(claim, grant)| ((*claim).clone(), (*grant).clone())).collect();
        let request = move |engine: Arc<dyn Engine>| {
            async move {
                let ours: Vec<_> = ours.iter().map(|(claim, grant)| (claim, grant)).collect();
                engine.renew(&ours).await
            }
            .boxed()
        };
        let Ok(replies) = self.send(request).await else {
            return batch.iter().map(|_| Err(self.unreachable())).collect();
        };
        for ((claim, _), reply) in batch.iter().zip(&replies) {
            if let Ok(Renewal::Renewed(grant)) = reply {
                self.record_promise(claim.id, grant);
            }
        }
        replies
    }

    async fn raise(&self, claim: &Claim, grant: &Grant, to: Token) -> Result<Grant> {
        let (claim, grant) = (claim.clone(), grant.clone());
        let raise = move |engine: Arc<dyn Engine>| {
            async move { fenced_node(&engine)?.raise(&claim, &grant, to).await }.boxed()
        };
        self.send(raise).await?
    }

    async fn amend(&self, claim: &Claim, grant: &Grant, to: Amend) -> Result<Grant> {
        let (claim, grant) = (claim.clone(), grant.clone());
        self.send(move |engine| async move { engine.amend(&claim, &grant, to).await }.boxed())
            .await?
    }

    async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        let (ours, grant, theirs) = (claim.clone(), grant.clone(), next.cloned());
        let request = move |engine: Arc<dyn Engine>| {
            async move { engine.release(&ours, &grant, theirs.as_ref()).await }.boxed()
        };
        let granted = self.send(request).await??;
        if let (Some(grant), Some(next)) = (&granted, next) {
            self.record_promise(next.id, grant);
        }
        Ok(granted)
    }

    async fn withdraw(&self, claim: &Claim) -> Result<()> {
        let claim = claim.clone();
        self.send(move |engine| async move { engine.withdraw(&claim).await }.boxed()).await?
    }

    async fn force_release(&self, name: &Name, how: Break) -> Result<Vec<Holder>> {
        let (name, network) = (name.clone(), self.network.clone());
        let request = move |engine: Arc<dyn Engine>| {
            async move {
                if how == Break::Now {
                    let broken = (name.to_string(), network.clock.now());
                    network.history.lock().unwrap().breaks.push(broken);
                }
                engine.force_release(&name, how).await
            }
            .boxed()
        };
        self.send(request).await?
    }

    /// Some events are lost, all are delayed.
    fn events(&self) -> BoxStream<'static, Event> {
        let (network, random) = (self.network.clone(), self.random.clone());
        let events = self.inner.events().filter_map(move |event| {
            let delivery = network.delivery(&mut random.lock().unwrap());
            let network = network.clone();
            async move {
                let (Delivery::Delivered { reply_delay, .. }
                | Delivery::DeliveredAlways { reply_delay, .. }) = delivery
                else {
                    return None;
                };
                tokio::time::sleep(reply_delay).await;
                network.until_thawed().await;
                Some(event)
            }
        });
        events.boxed()
    }
}
