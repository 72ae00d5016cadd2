//! Grants that replicas must have before they count.
//!
//! `WAIT` covers the writes of its own connection and blocks it. So a grant is confirmed by a
//! renewal followed by `WAIT`, over a connection that nothing else uses meanwhile.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use redis::Value;
use tokio::sync::Semaphore;

use super::connection::RedisConnection;
use super::error::{RedisReply, RedisRequestError, unreachable_error};
use super::renew::{first_reply, parse_renewal};
use super::reply::array;
use super::routing::RedisNode;
use super::scripts::Script;
use super::{MIN_REQUEST_TIMEOUT, REQUEST_TIMEOUT, RedisCore};
use crate::engine::{Claim, Grant, Replicas};
use crate::error::{Error, Result};
use crate::sync;

/// Maximum connections that wait for replicas, per server.
const MAX_CONNECTIONS: usize = 32;
/// Maximum of these connections that are kept when idle.
const MAX_IDLE: usize = 4;

impl RedisCore {
    /// Returns the grant once the replicas have it; otherwise withdraws the claim.
    pub(super) async fn confirm_on_replicas(&self, claim: &Claim, grant: Grant) -> Result<Grant> {
        match self.renew_and_wait(claim, &grant, self.replica_policy(claim)).await {
            Ok(grant) => Ok(grant),
            Err(error) => {
                self.withdraw(claim).await?;
                Err(error)
            }
        }
    }

    pub(super) fn replica_policy(&self, claim: &Claim) -> Replicas {
        claim.replicas.unwrap_or(self.replicas)
    }

    async fn renew_and_wait(
        &self,
        claim: &Claim,
        grant: &Grant,
        policy: Replicas,
    ) -> Result<Grant> {
        // A fixed lease is written again without being extended.
        let extension = claim.fixed.then_some(Duration::ZERO);
        let (names, args) = self.renew_arguments(&[(claim, grant)], extension);
        let mut command = self.scripts.renew.call(names.len());
        command.arg(&names).arg("").arg(&args);
        let sent = self.clock.now();
        let keys = self.keys(&claim.name);
        let mut route =
            self.route(&keys, REQUEST_TIMEOUT).map_err(RedisRequestError::into_error)?;
        let reply = loop {
            let (node, left) = route.next_node().await.map_err(RedisRequestError::into_error)?;
            let required = node.required_replicas(policy);
            if required == 0 {
                return Ok(grant.clone());
            }
            let timeout = left.min(claim.ttl / 2);
            let reply = node.run_and_wait(&self.scripts.renew, &command, required, timeout).await;
            if let Some(reply) = route.redirect(reply).await {
                break reply.map_err(RedisRequestError::into_error)?;
            }
        };
        let renewal = parse_renewal(claim, grant, sent, first_reply(array(&reply)?)?)?;
        Ok(if claim.fixed { grant.clone() } else { renewal })
    }
}

/// Connections on which nothing else happens during `WAIT`.
#[derive(Debug)]
pub(super) struct ReplicaConnections {
    /// One permit per connection.
    permits: Semaphore,
    /// Idle connections, each with the main connection that was current when it was opened.
    idle: Mutex<Vec<(Arc<RedisConnection>, Arc<RedisConnection>)>>,
}

impl Default for ReplicaConnections {
    fn default() -> Self {
        Self { permits: Semaphore::new(MAX_CONNECTIONS), idle: Mutex::default() }
    }
}

impl RedisNode {
    /// The number of replicas that the policy requires here, without the server itself.
    fn required_replicas(&self, policy: Replicas) -> u32 {
        match policy {
            Replicas::None => 0,
            Replicas::AtLeast(count) => count,
            // A majority of the server and its replicas together.
            Replicas::Majority => self.replicas().div_ceil(2),
        }
    }

    /// Runs a script, waits until enough replicas have its writes, and returns its reply.
    async fn run_and_wait(
        &self,
        script: &Script,
        command: &redis::Cmd,
        required: u32,
        timeout: Duration,
    ) -> RedisReply {
        let began = Instant::now();
        let connections = &self.replica_connections;
        let _permit =
            tokio::time::timeout(timeout, connections.permits.acquire()).await.map_err(|_| {
                let what =
                    format!("too many locks wait for replicas: no turn within {timeout:.1?}");
                RedisRequestError::Refused(unreachable_error(what, true, None))
            })?;
        let timeout = timeout.saturating_sub(began.elapsed()).max(MIN_REQUEST_TIMEOUT);
        let main = self.connection.connected(timeout).await?;
        let idle = {
            let mut idle = sync::lock(&connections.idle);
            idle.retain(|(connection, of)| !connection.is_closed() && Arc::ptr_eq(of, &main));
            idle.pop()
        };
        let (connection, main) = match idle {
            Some(pair) => pair,
            None => (Arc::new(self.open_extra(main.clone()).await?), main),
        };
        let mut multiplexed = connection.multiplexed.clone();
        let mut pipeline = redis::pipe();
        let millis = u64::try_from(timeout.as_millis() / 2).unwrap_or(u64::MAX).max(1);
        pipeline
            .add_command(script.load())
            .add_command(command.clone())
            .cmd("WAIT")
            .arg(required)
            .arg(millis);
        let reply = connection.await_reply(timeout, pipeline.query_async(&mut multiplexed)).await?;
        let idle = &mut *sync::lock(&connections.idle);
        // If another request waits for a permit, it takes this connection over.
        if idle.len() < MAX_IDLE || connections.permits.available_permits() == 0 {
            idle.push((connection, main));
        }
        let unknown = |what| Err(RedisRequestError::Unknown(unreachable_error(what, true, None)));
        match reply {
            Value::Array(parts) => match <[Value; 3]>::try_from(parts) {
                Ok([_, reply, Value::Int(have)]) if have >= i64::from(required) => Ok(reply),
                Ok([_, _, Value::Int(have)]) => unknown(format!(
                    "{have} of the {required} replicas asked for have confirmed the lock"
                )),
                _ => unknown("no answer to WAIT".to_owned()),
            },
            _ => unknown("no answer to WAIT".to_owned()),
        }
    }

    /// Opens an extra connection on the client's own runtime, since it is kept.
    async fn open_extra(
        &self,
        main: Arc<RedisConnection>,
    ) -> std::result::Result<RedisConnection, RedisRequestError> {
        let connector = self.connector.clone();
        let opened = self.runtime.spawn(async move { connector.connect_extra(&main).await });
        opened.await.unwrap_or(Err(Error::Closed)).map_err(RedisRequestError::Refused)
    }
}
