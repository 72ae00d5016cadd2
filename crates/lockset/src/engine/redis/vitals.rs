//! How a server is: which run of it this is, and which of its settings could break a promise.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redis::{RedisError, Value};

use super::link::{failed, judge};
use super::servers::{Address, Servers};
use super::{Core, PATIENCE};
use crate::engine::{Health, same_server};
use crate::error::Result;
use crate::sync;

/// What the nodes of one quorum share.
#[derive(Debug)]
pub struct Quorum {
    rest: Duration,
    /// Which run of a server each connection was last made to.
    runs: Mutex<HashMap<Address, String>>,
    /// The servers that are not counted yet, and until when.
    resting: Mutex<HashMap<Address, Instant>>,
}

impl Quorum {
    /// A server that does not keep every write that it acknowledged is not used for `rest` after a
    /// start. One that is there under another address as well is not used at all.
    pub fn new(rest: Duration) -> Arc<Self> {
        Arc::new(Self { rest, runs: Mutex::default(), resting: Mutex::default() })
    }

    /// Refuses a server that cannot be counted, whenever a connection to it is made: an address may
    /// lead to another server than it did before. One beside the client's own connection must lead
    /// to where that one does.
    pub(super) fn admit(&self, at: &Address, about: &About, is_own: bool) -> Result<()> {
        let refused = |why: String| Err(failed(why, false, None));
        if let Some(run) = &about.run {
            let mut runs = sync::lock(&self.runs);
            if !is_own {
                return match runs.get(at) == Some(run) {
                    true => Ok(()),
                    false => refused("the address leads to another server than before".to_owned()),
                };
            }
            runs.remove(at);
            if let Some((other, _)) = runs.iter().find(|(_, other)| *other == run) {
                let [one, other] = [at, other].map(|(host, port)| format!("{host}:{port}"));
                return refused(same_server(&one, &other));
            }
            runs.insert(at.clone(), run.clone());
        }
        let rests_for = about.rests_for(self.rest);
        if rests_for.is_zero() {
            sync::lock(&self.resting).remove(at);
            return Ok(());
        }
        sync::lock(&self.resting).insert(at.clone(), Instant::now() + rests_for);
        let what = "it was started lately and may have forgotten locks, so it is not counted yet";
        Err(failed(what.to_owned(), true, None))
    }

    /// For how long a server that was started lately is still not counted.
    fn resting(&self, at: &Address) -> Option<Duration> {
        let until = sync::lock(&self.resting).get(at).copied()?;
        Some(until.saturating_duration_since(Instant::now()))
    }
}

/// What a server says of itself.
#[derive(Debug, Default)]
pub(super) struct About {
    run: Option<String>,
    /// In whole seconds, rounded down.
    up: Duration,
    /// Its settings; empty if they may not be read.
    settings: HashMap<String, String>,
}

impl About {
    pub(super) async fn read(connection: &mut MultiplexedConnection) -> Result<Self, RedisError> {
        let mut all = redis::pipe();
        all.cmd("INFO").arg("server");
        for pattern in ["append*", "maxmemory*"] {
            all.cmd("CONFIG").arg("GET").arg(pattern);
        }
        let told = all.ignore_errors().query_async::<Vec<Result<Value, RedisError>>>(connection);
        let mut told = told.await?.into_iter();
        let info = told.next().unwrap_or(Ok(Value::Nil))?;
        let info = redis::from_redis_value::<String>(info)?;
        let field = |name: &str| {
            let mut fields = info.lines().filter_map(|line| line.trim_end().split_once(':'));
            fields.find(|(key, _)| *key == name).map(|(_, value)| value.to_owned())
        };
        let up = field("uptime_in_seconds").and_then(|text| text.parse().ok()).unwrap_or(0);
        let mut settings = HashMap::new();
        // Some servers, and some rules, do not let everybody read them.
        for found in told.flatten() {
            let found = redis::from_redis_value::<HashMap<String, String>>(found);
            settings.extend(found.unwrap_or_default());
        }
        Ok(Self { run: field("run_id"), up: Duration::from_secs(up), settings })
    }

    fn is_set(&self, setting: &str, value: &str) -> bool {
        self.settings.get(setting).is_some_and(|found| found == value)
    }

    /// Whether it keeps every write that it acknowledged.
    fn keeps_everything(&self) -> bool {
        self.is_set("appendonly", "yes") && self.is_set("appendfsync", "always")
    }

    /// How long it is still to be left alone, if it is to rest for so long after a start: leases
    /// that it may have forgotten are over then.
    pub(super) fn rests_for(&self, rest: Duration) -> Duration {
        if self.keeps_everything() { Duration::ZERO } else { rest.saturating_sub(self.up) }
    }

    fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if self.settings.is_empty() {
            warnings.push(
                "its settings may not be read (CONFIG GET); what is said of them in \
                 docs/redlock.md must be made sure by somebody else"
                    .to_owned(),
            );
            return warnings;
        }
        if !self.keeps_everything() {
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

impl Core {
    pub(super) async fn health(&self) -> Result<Health> {
        let Some(node) = self.nodes.everyone().await.into_iter().next() else {
            return Ok(Health::default());
        };
        let servers = &node.maker.servers;
        let resting = |servers: &Servers| {
            servers.quorum.as_ref()?.resting(servers.hosts.first()?).filter(|left| !left.is_zero())
        };
        if let Some(left) = resting(servers) {
            return Ok(Health { counted_in: Some(left), ..Health::default() });
        }
        let up = match node.link.up(PATIENCE).await {
            Ok(up) => up,
            // Perhaps it has just told.
            Err(why) => match resting(servers) {
                Some(left) => return Ok(Health { counted_in: Some(left), ..Health::default() }),
                None => return Err(why.into_error()),
            },
        };
        let mut connection = up.connection.clone();
        let about = match tokio::time::timeout(PATIENCE, About::read(&mut connection)).await {
            Ok(about) => about.map_err(|error| judge(error).into_error())?,
            Err(_) => return Err(failed("no answer".to_owned(), true, None)),
        };
        Ok(Health { run: about.run.clone(), warnings: about.warnings(), counted_in: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn about(settings: &[(&str, &str)]) -> About {
        let settings = settings.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
        About { run: None, up: Duration::from_secs(10), settings: settings.collect() }
    }

    #[test]
    fn settings_that_break_a_promise_are_named() {
        let durable = [("appendonly", "yes"), ("appendfsync", "always"), ("maxmemory", "0")];
        assert!(about(&durable).warnings().is_empty());
        assert_eq!(about(&durable).rests_for(Duration::from_secs(60)), Duration::ZERO);
        let usual = about(&[("appendonly", "no"), ("appendfsync", "everysec"), ("maxmemory", "0")]);
        assert!(usual.warnings()[0].contains("appendfsync"));
        assert_eq!(usual.rests_for(Duration::from_secs(60)), Duration::from_secs(50));
        let cache = about(&[("maxmemory", "100mb"), ("maxmemory-policy", "allkeys-lru")]);
        assert!(cache.warnings()[1].contains("allkeys-lru"));
        assert!(about(&[]).warnings()[0].contains("may not be read"));
    }
}
