//! The health of a server: whether it was restarted, and which of its settings weaken a guarantee.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redis::{RedisError, Value};

use super::connect::{RedisAddress, RedisServers};
use super::error::{classify, unreachable_error};
use super::{REQUEST_TIMEOUT, RedisCore};
use crate::engine::{Health, same_server};
use crate::error::Result;
use crate::sync;

impl RedisCore {
    pub(super) async fn health(&self) -> Result<Health> {
        let Some(node) = self.router.masters().await.into_iter().next() else {
            return Ok(Health::default());
        };
        let servers = &node.connector.servers;
        let excluded_for = |servers: &RedisServers| {
            let quorum = servers.quorum.as_ref()?;
            quorum.excluded_for(servers.hosts.first()?).filter(|left| !left.is_zero())
        };
        if let Some(left) = excluded_for(servers) {
            return Ok(Health { counted_in: Some(left), ..Health::default() });
        }
        let connection = match node.connection.connected(REQUEST_TIMEOUT).await {
            Ok(connection) => connection,
            // The attempt to connect may have found out that the server was restarted.
            Err(error) => match excluded_for(servers) {
                Some(left) => return Ok(Health { counted_in: Some(left), ..Health::default() }),
                None => return Err(error.into_error()),
            },
        };
        let mut multiplexed = connection.multiplexed.clone();
        let info = RedisServerInfo::read(&mut multiplexed);
        let info = match tokio::time::timeout(REQUEST_TIMEOUT, info).await {
            Ok(info) => info.map_err(|error| classify(error).into_error())?,
            Err(_) => return Err(unreachable_error("no answer".to_owned(), true, None)),
        };
        Ok(Health { run: info.run_id.clone(), warnings: info.warnings(), counted_in: None })
    }
}

/// What the nodes of one quorum share.
#[derive(Debug)]
pub struct Quorum {
    restart_delay: Duration,
    /// The run id of the server behind each address, by its last main connection.
    run_ids: Mutex<HashMap<RedisAddress, String>>,
    /// The restarted servers that do not count yet, and until when.
    excluded_until: Mutex<HashMap<RedisAddress, Instant>>,
}

impl Quorum {
    /// A server that may have lost acknowledged writes does not count for `restart_delay` after a
    /// start. A server that is reachable under two addresses is refused under the second.
    pub fn new(restart_delay: Duration) -> Arc<Self> {
        let (run_ids, excluded_until) = (Mutex::default(), Mutex::default());
        Arc::new(Self { restart_delay, run_ids, excluded_until })
    }

    /// Refuses a server that must not count. Checked for each new connection, since an address may
    /// lead to another server than before. An extra connection must lead to the same server as the
    /// main one.
    pub(super) fn admit(
        &self,
        address: &RedisAddress,
        info: &RedisServerInfo,
        is_main: bool,
    ) -> Result<()> {
        let refused = |why: String| Err(unreachable_error(why, false, None));
        if let Some(run_id) = &info.run_id {
            let mut run_ids = sync::lock(&self.run_ids);
            if !is_main {
                return match run_ids.get(address) == Some(run_id) {
                    true => Ok(()),
                    false => refused("the address leads to another server than before".to_owned()),
                };
            }
            run_ids.remove(address);
            if let Some((other, _)) = run_ids.iter().find(|(_, other)| *other == run_id) {
                let [one, other] = [address, other].map(|(host, port)| format!("{host}:{port}"));
                return refused(same_server(&one, &other));
            }
            run_ids.insert(address.clone(), run_id.clone());
        }
        let excluded_for = info.excluded_for(self.restart_delay);
        if excluded_for.is_zero() {
            sync::lock(&self.excluded_until).remove(address);
            return Ok(());
        }
        sync::lock(&self.excluded_until).insert(address.clone(), Instant::now() + excluded_for);
        let what = "it was started lately and may have forgotten locks, so it is not counted yet";
        Err(unreachable_error(what.to_owned(), true, None))
    }

    /// How much longer a restarted server does not count.
    fn excluded_for(&self, address: &RedisAddress) -> Option<Duration> {
        let until = sync::lock(&self.excluded_until).get(address).copied()?;
        Some(until.saturating_duration_since(Instant::now()))
    }
}

/// What a server reports of itself.
#[derive(Debug, Default)]
pub(super) struct RedisServerInfo {
    run_id: Option<String>,
    /// In whole seconds, rounded down.
    uptime: Duration,
    /// Its settings; empty if the user may not read them.
    settings: HashMap<String, String>,
}

impl RedisServerInfo {
    pub(super) async fn read(multiplexed: &mut MultiplexedConnection) -> Result<Self, RedisError> {
        let mut pipeline = redis::pipe();
        pipeline.cmd("INFO").arg("server");
        for pattern in ["append*", "maxmemory*"] {
            pipeline.cmd("CONFIG").arg("GET").arg(pattern);
        }
        pipeline.ignore_errors();
        let replies: Vec<Result<Value, RedisError>> = pipeline.query_async(multiplexed).await?;
        let mut replies = replies.into_iter();
        let info = replies.next().unwrap_or(Ok(Value::Nil))?;
        let info = redis::from_redis_value::<String>(info)?;
        let field = |name: &str| {
            let mut fields = info.lines().filter_map(|line| line.trim_end().split_once(':'));
            fields.find(|(key, _)| *key == name).map(|(_, value)| value.to_owned())
        };
        let uptime = field("uptime_in_seconds").and_then(|text| text.parse().ok()).unwrap_or(0);
        let mut settings = HashMap::new();
        // Some servers and some ACL rules do not allow CONFIG GET.
        for reply in replies.flatten() {
            let found = redis::from_redis_value::<HashMap<String, String>>(reply);
            settings.extend(found.unwrap_or_default());
        }
        Ok(Self { run_id: field("run_id"), uptime: Duration::from_secs(uptime), settings })
    }

    fn is_set(&self, setting: &str, value: &str) -> bool {
        self.settings.get(setting).is_some_and(|found| found == value)
    }

    /// Whether the server keeps every acknowledged write.
    fn is_durable(&self) -> bool {
        self.is_set("appendonly", "yes") && self.is_set("appendfsync", "always")
    }

    /// How much longer the server does not count. After `restart_delay` all leases that it may have
    /// lost are over.
    fn excluded_for(&self, restart_delay: Duration) -> Duration {
        if self.is_durable() { Duration::ZERO } else { restart_delay.saturating_sub(self.uptime) }
    }

    fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if self.settings.is_empty() {
            warnings.push(
                "its settings may not be read (CONFIG GET), so they are not checked: see \
                 docs/redlock.md for what they must be"
                    .to_owned(),
            );
            return warnings;
        }
        if !self.is_durable() {
            warnings.push(
                "it may forget acknowledged writes when it ends (appendonly and \
                 appendfsync are not `yes` and `always`): it is not counted for max_ttl after a \
                 start, and then only the clock keeps tokens growing"
                    .to_owned(),
            );
        }
        let policy = self.settings.get("maxmemory-policy").map_or("", String::as_str);
        if !self.is_set("maxmemory", "0") && policy != "noeviction" {
            warnings.push(format!(
                "it may evict locks and their fences (maxmemory-policy is \
                 `{policy}`): set it to noeviction"
            ));
        }
        warnings
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(settings: &[(&str, &str)]) -> RedisServerInfo {
        let settings = settings.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
        let uptime = Duration::from_secs(10);
        RedisServerInfo { run_id: None, uptime, settings: settings.collect() }
    }

    #[test]
    fn settings_that_weaken_a_guarantee_are_named() {
        let durable = [("appendonly", "yes"), ("appendfsync", "always"), ("maxmemory", "0")];
        assert!(info(&durable).warnings().is_empty());
        assert_eq!(info(&durable).excluded_for(Duration::from_secs(60)), Duration::ZERO);
        let usual = info(&[("appendonly", "no"), ("appendfsync", "everysec"), ("maxmemory", "0")]);
        assert!(usual.warnings()[0].contains("appendfsync"));
        assert_eq!(usual.excluded_for(Duration::from_secs(60)), Duration::from_secs(50));
        let cache = info(&[("maxmemory", "100mb"), ("maxmemory-policy", "allkeys-lru")]);
        assert!(cache.warnings()[1].contains("allkeys-lru"));
        assert!(info(&[]).warnings()[0].contains("may not be read"));
    }
}
