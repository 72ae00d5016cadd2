//! What happens between a client and its home.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use futures_core::future::BoxFuture;
use futures_core::stream::BoxStream;
use futures_util::{FutureExt, StreamExt};
use lockset::clock::{Clock, Moment};
use lockset::engine::{Amend, Claim, ClaimId, Engine, Event, Grant, Wait};
use lockset::{Break, Error, Holder, Name, Result, Token};
use rand::RngExt;
use rand::rngs::SmallRng;

use super::span;
use crate::layer::Layer;
use crate::oracle::{History, Promise};

/// The weather of one run: how bad it is, and whether the home is frozen.
#[derive(Debug)]
pub(super) struct Weather {
    clock: Clock,
    history: Arc<Mutex<History>>,
    /// How often a request meets a fault.
    badness: f64,
    /// The longest usual way, and the longest unusual one.
    slowness: Duration,
    latest: Duration,
    calm: AtomicBool,
    frozen_until: Mutex<Option<Moment>>,
    pub(super) faults: AtomicUsize,
}

impl Weather {
    pub(super) fn new(
        random: &mut SmallRng,
        clock: Clock,
        ttl: Duration,
        history: Arc<Mutex<History>>,
    ) -> Arc<Self> {
        Arc::new(Self {
            clock,
            history,
            badness: random.random_range(0.0..0.4),
            slowness: ttl.mul_f64(random.random_range(0.001..0.2)),
            // Marks of withdrawn claims outlive this.
            latest: Duration::from_secs(20),
            calm: AtomicBool::new(false),
            frozen_until: Mutex::new(None),
            faults: AtomicUsize::new(0),
        })
    }

    /// No more faults.
    pub(super) fn calm(&self) {
        self.calm.store(true, Ordering::Relaxed);
        *self.frozen_until.lock().unwrap() = None;
    }

    pub(super) fn freeze(&self, span: Duration) {
        *self.frozen_until.lock().unwrap() = Some(self.clock.now() + span);
    }

    /// How long after its caller gave up a request may still arrive.
    pub(super) fn latest(&self) -> Duration {
        self.latest
    }

    fn fate(&self, random: &mut SmallRng) -> Fate {
        if self.calm.load(Ordering::Relaxed) {
            return Fate::Arrives { there: Duration::ZERO, back: Duration::ZERO };
        }
        let (there, back) = (span(random, self.slowness), span(random, self.slowness));
        if !random.random_bool(self.badness) {
            return match random.random_bool(0.5) {
                true => Fate::Arrives { there, back },
                false => Fate::ArrivesInAnyCase { there, back },
            };
        }
        self.faults.fetch_add(1, Ordering::Relaxed);
        match random.random_range(0..5) {
            0 => Fate::Lost { told: back },
            1 => Fate::AnswerLost { there, told: there + back },
            2 => Fate::Late { there: span(random, self.latest), told: back },
            3 => Fate::Arrives { there: there * 5, back: back * 5 },
            _ => Fate::ArrivesInAnyCase { there: there * 5, back: back * 5 },
        }
    }

    async fn thawed(&self) {
        let until = *self.frozen_until.lock().unwrap();
        if let Some(until) = until {
            self.clock.sleep_until(until).await;
        }
    }
}

/// What becomes of a request.
enum Fate {
    /// It is carried out and answered, if its caller waits so long.
    Arrives { there: Duration, back: Duration },
    /// It is carried out even if its caller gives up.
    ArrivesInAnyCase { there: Duration, back: Duration },
    /// It never arrives; the caller is told of a failure.
    Lost { told: Duration },
    /// It is carried out, and the caller is told of a failure.
    AnswerLost { there: Duration, told: Duration },
    /// It is carried out long after the caller was told of a failure.
    Late { there: Duration, told: Duration },
}

/// A client's way to its home.
#[derive(Debug)]
pub(super) struct Faulty {
    inner: Arc<dyn Engine>,
    weather: Arc<Weather>,
    random: Arc<Mutex<SmallRng>>,
}

impl Faulty {
    pub(super) fn new(inner: Arc<dyn Engine>, weather: Arc<Weather>, random: SmallRng) -> Self {
        Self { inner, weather, random: Arc::new(Mutex::new(random)) }
    }

    /// Sends a request through the weather.
    async fn send<T: Send + 'static>(
        &self,
        request: impl FnOnce(Arc<dyn Engine>) -> BoxFuture<'static, T>,
    ) -> Result<T> {
        let fate = self.weather.fate(&mut self.random.lock().unwrap());
        let (weather, request) = (self.weather.clone(), request(self.inner.clone()));
        let carried_out = |there: Duration| async move {
            tokio::time::sleep(there).await;
            weather.thawed().await;
            request.await
        };
        let told = match fate {
            Fate::Arrives { there, back } => {
                let answer = carried_out(there).await;
                return Ok(self.answered(back, answer).await);
            }
            Fate::ArrivesInAnyCase { there, back } => {
                let answer = tokio::spawn(carried_out(there)).await.unwrap();
                return Ok(self.answered(back, answer).await);
            }
            Fate::AnswerLost { there, told } | Fate::Late { there, told } => {
                tokio::spawn(carried_out(there));
                told
            }
            Fate::Lost { told } => told,
        };
        tokio::time::sleep(told).await;
        Err(self.storm())
    }

    async fn answered<T>(&self, back: Duration, answer: T) -> T {
        tokio::time::sleep(back).await;
        self.weather.thawed().await;
        answer
    }

    fn storm(&self) -> Error {
        let what = "the weather is bad".to_owned();
        Error::Unreachable { engine: "memory", what, retryable: true, source: None }
    }

    /// Writes down what the client is promised at the moment it hears it.
    fn promised(&self, claim: ClaimId, grant: &Grant) {
        let (at, valid_until) = (self.weather.clock.now(), grant.valid_until);
        let promise = Promise { claim, at, valid_until };
        self.weather.history.lock().unwrap().promises.push(promise);
    }
}

#[async_trait]
impl Layer for Faulty {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.inner
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
        let ours = claim.clone();
        let request =
            move |home: Arc<dyn Engine>| async move { home.acquire(&ours, wait).await }.boxed();
        let granted = self.send(request).await??;
        if let Some(grant) = &granted {
            self.promised(claim.id, grant);
        }
        Ok(granted)
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Grant>> {
        let ours: Vec<(Claim, Grant)> =
            batch.iter().map(|(claim, grant)| ((*claim).clone(), (*grant).clone())).collect();
        let request = move |home: Arc<dyn Engine>| {
            async move {
                let ours: Vec<_> = ours.iter().map(|(claim, grant)| (claim, grant)).collect();
                home.renew(&ours).await
            }
            .boxed()
        };
        let Ok(answers) = self.send(request).await else {
            return batch.iter().map(|_| Err(self.storm())).collect();
        };
        for ((claim, _), answer) in batch.iter().zip(&answers) {
            if let Ok(grant) = answer {
                self.promised(claim.id, grant);
            }
        }
        answers
    }

    async fn raise(&self, claim: &Claim, grant: &Grant, to: Token) -> Result<Grant> {
        let (claim, grant) = (claim.clone(), grant.clone());
        self.send(move |home| async move { home.raise(&claim, &grant, to).await }.boxed()).await?
    }

    async fn amend(&self, claim: &Claim, grant: &Grant, to: Amend) -> Result<Grant> {
        let (claim, grant) = (claim.clone(), grant.clone());
        self.send(move |home| async move { home.amend(&claim, &grant, to).await }.boxed()).await?
    }

    async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        let (ours, grant, theirs) = (claim.clone(), grant.clone(), next.cloned());
        let request = move |home: Arc<dyn Engine>| {
            async move { home.release(&ours, &grant, theirs.as_ref()).await }.boxed()
        };
        let granted = self.send(request).await??;
        if let (Some(grant), Some(next)) = (&granted, next) {
            self.promised(next.id, grant);
        }
        Ok(granted)
    }

    async fn withdraw(&self, claim: &Claim) -> Result<()> {
        let claim = claim.clone();
        self.send(move |home| async move { home.withdraw(&claim).await }.boxed()).await?
    }

    async fn force_release(&self, name: &Name, how: Break) -> Result<Vec<Holder>> {
        let (name, weather) = (name.clone(), self.weather.clone());
        let request = move |home: Arc<dyn Engine>| {
            async move {
                if how == Break::Now {
                    let broken = (name.to_string(), weather.clock.now());
                    weather.history.lock().unwrap().breaks.push(broken);
                }
                home.force_release(&name, how).await
            }
            .boxed()
        };
        self.send(request).await?
    }

    /// Some are lost, all are slow.
    fn events(&self) -> BoxStream<'static, Event> {
        let (weather, random) = (self.weather.clone(), self.random.clone());
        let signals = self.inner.events().filter_map(move |signal| {
            let fate = weather.fate(&mut random.lock().unwrap());
            let weather = weather.clone();
            async move {
                let (Fate::Arrives { back, .. } | Fate::ArrivesInAnyCase { back, .. }) = fate
                else {
                    return None;
                };
                tokio::time::sleep(back).await;
                weather.thawed().await;
                Some(signal)
            }
        });
        signals.boxed()
    }
}
