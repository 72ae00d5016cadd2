//! Sending a request or a script to the server that decides on a name.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, ToRedisArgs, Value};

use super::batch::{AcquirePart, RedisRequest, ReleasePart, RequestResult};
use super::connection::RedisConnection;
use super::error::{RedisReply, RedisRequestError};
use super::keys::RedisKeys;
use super::routing::Route;
use super::scripts::Script;
use super::waiters::RedisWaiter;
use super::{REQUEST_TIMEOUT, RedisCore};
use crate::clock::Moment;
use crate::engine::Claim;
use crate::error::Error;
use crate::name::Name;

impl RedisCore {
    /// Releases a lock, acquires another of the same name, or both in one request that is sent at
    /// `sent`. Without a release, it also returns the waiter of the claim, if the request may have
    /// queued it; otherwise the caller has registered it.
    pub(super) async fn send(
        &self,
        name: &Name,
        release: Option<ReleasePart>,
        acquire: Option<AcquirePart>,
        sent: Moment,
        timeout: Duration,
    ) -> (RequestResult, Option<Arc<RedisWaiter>>) {
        let request = Arc::new(RedisRequest { keys: self.keys(name), release, acquire });
        let mut waiter = None;
        // Before the request is sent: the grant may be pushed before the reply is read.
        let mut register = || {
            if let (None, Some(acquire), None) = (&request.release, &request.acquire, &waiter) {
                waiter = Some(self.register(&acquire.claim, sent));
            }
        };
        let result = match self.router.direct_connection() {
            Some(connection) => connection.send_request(&request, timeout, &mut register).await,
            None => Box::pin(self.send_routed(&request, timeout, &mut register)).await,
        };
        (result, waiter)
    }

    /// The waiter of a claim for which a request is sent at `sent` that may queue it.
    pub(super) fn register(&self, claim: &Claim, sent: Moment) -> Arc<RedisWaiter> {
        let waiter = self.waiters.register(claim);
        waiter.on_sending(sent);
        waiter
    }

    /// The slow path: the node must be found, or its connection awaited.
    async fn send_routed(
        &self,
        request: &Arc<RedisRequest>,
        timeout: Duration,
        before_alone: &mut (impl FnMut() + Send),
    ) -> RequestResult {
        let mut route = self.route(&request.keys, timeout)?;
        loop {
            let (node, left) = route.next_node().await?;
            let connection = node.connection_for_caller(node.connection.connected(left).await?);
            let result = connection.send_request(request, left, before_alone).await;
            if let Some(result) = route.redirect(result).await {
                return result;
            }
        }
    }

    pub(super) fn route(
        &self,
        keys: &RedisKeys,
        timeout: Duration,
    ) -> Result<Route<'_>, RedisRequestError> {
        let slot = if self.router.is_cluster() { keys.slot() } else { Some(0) };
        let slot = slot.ok_or_else(|| {
            let why = "in a cluster a name with `}` needs a hash tag such as `{tag}`";
            RedisRequestError::Refused(Error::invalid("name", keys.lock(), why))
        })?;
        Ok(self.router.route(slot, timeout))
    }

    /// Runs a script on the node that serves the name of `of`.
    pub(super) async fn run_script(
        &self,
        script: &Script,
        of: &RedisKeys,
        keys: &[impl ToRedisArgs],
        args: &[impl ToRedisArgs],
    ) -> RedisReply {
        self.run_command(REQUEST_TIMEOUT, script, of, |_| script.call_with(keys, args)).await
    }

    /// The same for a script that may hand the lock over: its last argument is the server's time
    /// when the connection was opened.
    pub(super) async fn run_handover_script(
        &self,
        script: &Script,
        of: &RedisKeys,
        keys: &[impl ToRedisArgs],
        args: &[impl ToRedisArgs],
    ) -> RedisReply {
        let command = |connection: &RedisConnection| {
            let mut command = script.call_with(keys, args);
            command.arg(connection.connected_at_us);
            command
        };
        self.run_command(REQUEST_TIMEOUT, script, of, command).await
    }

    /// Runs a script whose arguments depend on the connection.
    pub(super) async fn run_command(
        &self,
        timeout: Duration,
        script: &Script,
        of: &RedisKeys,
        command: impl Fn(&RedisConnection) -> Cmd,
    ) -> RedisReply {
        let mut route = self.route(of, timeout)?;
        loop {
            let (node, left) = route.next_node().await?;
            let connection = node.connection.connected(left).await?;
            let (command, mut multiplexed) = (command(&connection), connection.multiplexed.clone());
            let reply = connection.await_reply(left, script.run(&command, &mut multiplexed)).await;
            if let Some(reply) = route.redirect(reply).await {
                return reply;
            }
        }
    }

    /// Sends a command that reads keys of a name, over the main connection. Also returns whether
    /// the server will push their next change. `script` is the script that the command runs.
    pub(super) async fn query_tracked(
        &self,
        script: Option<&Script>,
        of: &RedisKeys,
        command: &Cmd,
    ) -> Result<(Value, bool), RedisRequestError> {
        let mut route = self.route(of, REQUEST_TIMEOUT)?;
        loop {
            let (node, left) = route.next_node().await?;
            let connection = node.connection.connected(left).await?;
            let reply = connection.query_tracked(left, script, command).await;
            if let Some(reply) = route.redirect(reply).await {
                return reply;
            }
        }
    }

    /// The keys of a script: lock and queue of each claim. A script derives the others. A cluster
    /// must know them all, or it would start the script while only half of them have been moved.
    pub(super) fn declared_keys<'a>(
        &self,
        claims: impl Iterator<Item = &'a Claim> + Clone,
    ) -> Vec<String> {
        let keys = claims.clone().map(|claim| self.keys(&claim.name));
        let mut names: Vec<String> =
            keys.flat_map(|keys| [keys.lock().to_owned(), keys.queue()]).collect();
        if self.router.is_cluster() {
            for claim in claims {
                let keys = self.keys(&claim.name);
                names.extend(keys.others(claim.id));
                names.extend(self.scripts.has_courtesy.then(|| keys.handoffs()));
            }
        }
        names
    }

    /// Groups items that one script can serve, each with its index in `all`.
    pub(super) fn group_by_slot<T: Clone>(
        &self,
        all: &[T],
        max: usize,
        name: impl Fn(&T) -> &Name,
    ) -> Vec<Vec<(usize, T)>> {
        let mut by_slot = BTreeMap::<_, Vec<(usize, T)>>::new();
        for (index, item) in all.iter().enumerate() {
            let slot = if self.router.is_cluster() { self.keys(name(item)).slot() } else { None };
            by_slot.entry(slot).or_default().push((index, item.clone()));
        }
        by_slot
            .into_values()
            .flat_map(|part| part.chunks(max).map(<[_]>::to_vec).collect::<Vec<_>>())
            .collect()
    }
}
