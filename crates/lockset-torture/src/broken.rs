//! Deliberately broken engines. The oracle must catch each of them.

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use futures_core::stream::BoxStream;
use lockset::clock::Clock;
use lockset::engine::redis::{Redis, RedisOptions};
use lockset::engine::redlock::{Redlock, RedlockOptions};
use lockset::engine::{Admission, Claim, Engine, Event, FencedNode, Grant, Renewal, Wait};
use lockset::{ClaimId, Lockset, Result, Token};
use lockset_testkit::layer::{Layer, Layered};
use serde::{Deserialize, Serialize};

use crate::client::ClientConfig;
use crate::schedule::Random;

/// How an engine is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Broken {
    /// Redis with tokens that are random.
    RandomToken,
    /// Redis whose holders believe for ever, as without a deadline of their own.
    NoDeadline,
    /// Redlock that takes two of five nodes for a quorum.
    MinorityQuorum,
}

impl FromStr for Broken {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        serde_json::from_value(text.into()).map_err(|error| error.to_string())
    }
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Broken::RandomToken => "random-token",
            Broken::NoDeadline => "no-deadline",
            Broken::MinorityQuorum => "minority-quorum",
        })
    }
}

impl Broken {
    /// Connects a client to this engine.
    ///
    /// # Errors
    /// If a server cannot be reached.
    pub(crate) async fn connect(self, config: &ClientConfig) -> Result<Lockset> {
        let engine: Arc<dyn Engine> = match self {
            Broken::RandomToken => {
                let inner: Arc<dyn Engine> = Arc::new(redis(&config.url).await?);
                let random = Mutex::new(Random::new(config.seed));
                Arc::new(Layered(RandomTokens { inner, random, real: Mutex::default() }))
            }
            Broken::NoDeadline => {
                Arc::new(Layered(NoDeadline(Arc::new(redis(&config.url).await?))))
            }
            Broken::MinorityQuorum => Arc::new(minority(config).await?),
        };
        Lockset::with_engine(engine)
    }
}

async fn redis(url: &str) -> Result<Redis> {
    Redis::connect(RedisOptions { url: url.parse()?, ..RedisOptions::default() }).await
}

/// Three neighbouring nodes of the five, others for each client: two of three look like a quorum.
async fn minority(config: &ClientConfig) -> Result<Redlock> {
    let hosts = config.url.trim_start_matches("redlock://").split('?').next().unwrap_or_default();
    let hosts: Vec<&str> = hosts.split(',').collect();
    let mut nodes = Vec::<Arc<dyn FencedNode>>::new();
    for offset in 0..3 {
        let host = hosts[(config.seed as usize * 2 + offset) % hosts.len()];
        nodes.push(Arc::new(redis(&format!("redis://{host}")).await?));
    }
    Redlock::over(nodes, RedlockOptions::default(), Clock::boot())
}

#[derive(Debug)]
struct RandomTokens {
    inner: Arc<dyn Engine>,
    random: Mutex<Random>,
    /// The tokens that the server knows.
    real: Mutex<HashMap<ClaimId, Token>>,
}

impl RandomTokens {
    fn disguised(&self, claim: &Claim, grant: Grant) -> Grant {
        self.real.lock().unwrap().insert(claim.id, grant.token);
        let token = 1 + self.random.lock().unwrap().below(1 << 40);
        Grant { token: Token::new(token), ..grant }
    }

    fn real(&self, claim: &Claim, grant: &Grant) -> Grant {
        let token = self.real.lock().unwrap().get(&claim.id).copied();
        Grant { token: token.unwrap_or(grant.token), ..grant.clone() }
    }
}

#[async_trait]
impl Layer for RandomTokens {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.inner
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        Ok(match self.inner.acquire(claim, wait).await? {
            Admission::Granted(grant) => Admission::Granted(self.disguised(claim, grant)),
            other => other,
        })
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>> {
        let real: Vec<Grant> = batch.iter().map(|(claim, grant)| self.real(claim, grant)).collect();
        let asked: Vec<(&Claim, &Grant)> =
            batch.iter().zip(&real).map(|((claim, _), real)| (*claim, real)).collect();
        let renewed = self.inner.renew(&asked).await;
        let shown = renewed.into_iter().zip(batch).map(|(renewal, (_, grant))| match renewal {
            Ok(Renewal::Renewed(renewed)) => {
                Ok(Renewal::Renewed(Grant { token: grant.token, ..renewed }))
            }
            other => other,
        });
        shown.collect()
    }

    async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        let taken = self.inner.release(claim, &self.real(claim, grant), next).await?;
        Ok(taken.zip(next).map(|(grant, next)| self.disguised(next, grant)))
    }
}

#[derive(Debug)]
struct NoDeadline(Arc<dyn Engine>);

impl NoDeadline {
    fn for_ever(&self, grant: Grant) -> Grant {
        Grant { valid_until: self.0.clock().now() + Duration::from_secs(3600), ..grant }
    }
}

#[async_trait]
impl Layer for NoDeadline {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        Ok(match self.0.acquire(claim, wait).await? {
            Admission::Granted(grant) => Admission::Granted(self.for_ever(grant)),
            other => other,
        })
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>> {
        // What the server replies is ignored.
        let _ = self.0.renew(batch).await;
        let renewed = batch.iter().map(|(_, grant)| self.for_ever((*grant).clone()));
        renewed.map(|grant| Ok(Renewal::Renewed(grant))).collect()
    }

    async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        let taken = self.0.release(claim, grant, next).await?;
        Ok(taken.map(|grant| self.for_ever(grant)))
    }

    fn events(&self) -> BoxStream<'static, Event> {
        Box::pin(futures_util::stream::pending())
    }
}
