//! The nodes of a quorum, and which of them are usable.
//!
//! A node that does not reply within its timeout is excluded, so that it costs that time once and
//! not in every request. Its health is then checked periodically. It is used again when it replies
//! quickly, or when there is no quorum without it.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::ENGINE;
use crate::clock::{Clock, Moment};
use crate::engine::{FencedNode, Health, same_server};
use crate::error::{Error, Result};
use crate::report::report;
use crate::sync;

/// The pause between health checks of an excluded node.
const PROBE_EVERY: Duration = Duration::from_millis(100);
/// An excluded node is readmitted when it has replied within this time, twice in a row: a node that
/// is only slow would cost its timeout again and again. If the timeout of a node was set and is
/// longer, that is the limit.
const QUICK_REPLY: Duration = Duration::from_millis(200);
const QUICK_REPLIES: u32 = 2;
/// The pause between health checks of a node where claims of this client queue, and how long one
/// may take; the timeout of a node, if it was set and is longer.
const MONITOR_EVERY: Duration = Duration::from_millis(500);
const MONITOR_TIMEOUT: Duration = Duration::from_millis(500);
/// The timeout of a health check. Longer than the timeouts of the engines themselves, whose errors
/// say better what is wrong.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(3);

/// One of the nodes.
#[derive(Debug)]
pub(super) struct QuorumNode {
    pub(super) engine: Arc<dyn FencedNode>,
    out: watch::Sender<bool>,
    /// It did not reply in time, but is needed for a quorum.
    silent: AtomicBool,
    /// It is the same server as another node, as far as is known.
    duplicate: AtomicBool,
    /// From when it is counted; it was started recently.
    counted_from: Mutex<Option<Moment>>,
    /// A task checks whether it is back.
    probing: AtomicBool,
    /// The number of claims that queue there and must know if it falls silent.
    monitors: AtomicUsize,
    /// A task checks its health for them.
    monitored: AtomicBool,
}

impl QuorumNode {
    pub(super) fn new(engine: Arc<dyn FencedNode>) -> Self {
        Self {
            engine,
            out: watch::Sender::new(false),
            silent: AtomicBool::new(false),
            duplicate: AtomicBool::new(false),
            counted_from: Mutex::default(),
            probing: AtomicBool::new(false),
            monitors: AtomicUsize::new(0),
            monitored: AtomicBool::new(false),
        }
    }

    fn is_out(&self) -> bool {
        *self.out.borrow()
    }

    fn is_healthy(&self) -> bool {
        !self.is_out() && !self.silent.load(Ordering::Acquire)
    }

    /// Future exclusions of this node.
    pub(super) fn exclusions(&self) -> Exclusions {
        Exclusions(self.out.subscribe())
    }
}

/// Exclusions of a node.
pub(super) struct Exclusions(watch::Receiver<bool>);

impl Exclusions {
    /// Pending until the node is excluded; if it is already, until it is excluded again.
    pub(super) async fn next(&mut self) {
        // The sender is part of the node, which outlives this receiver.
        while self.0.changed().await.is_ok() && !*self.0.borrow_and_update() {}
    }
}

/// A claim that queues at a node, until this is dropped.
pub(super) struct MonitorGuard {
    node: Arc<QuorumNode>,
}

impl Drop for MonitorGuard {
    fn drop(&mut self) {
        self.node.monitors.fetch_sub(1, Ordering::AcqRel);
    }
}

/// All nodes, in the order in which every client has them.
#[derive(Debug)]
pub(super) struct QuorumNodes {
    pub(super) all: Vec<Arc<QuorumNode>>,
    pub(super) quorum: usize,
    /// How long a node may take to reply, if that was set.
    timeout: Duration,
    clock: Clock,
    /// Where all requests run.
    runtime: Handle,
    /// The run id of each node's server, as far as it is known: no server may count twice.
    runs: Mutex<Vec<Option<String>>>,
}

impl QuorumNodes {
    pub(super) fn new(
        engines: Vec<Arc<dyn FencedNode>>,
        timeout: Option<Duration>,
        clock: Clock,
    ) -> Self {
        let runs = Mutex::new(vec![None; engines.len()]);
        let quorum = engines.len() / 2 + 1;
        let all = engines.into_iter().map(|engine| Arc::new(QuorumNode::new(engine))).collect();
        let timeout = timeout.unwrap_or_default();
        Self { all, quorum, timeout, clock, runtime: Handle::current(), runs }
    }

    /// The usable nodes.
    pub(super) fn usable(&self) -> Vec<usize> {
        (0..self.all.len()).filter(|node| self.is_usable(*node)).collect()
    }

    /// Excluded nodes are usable if there is no quorum without them: perhaps this client was slow,
    /// and asking fewer gains nothing.
    pub(super) fn is_usable(&self, node: usize) -> bool {
        let one = &self.all[node];
        !one.duplicate.load(Ordering::Acquire) && (!one.is_out() || self.lacks_quorum())
    }

    fn lacks_quorum(&self) -> bool {
        self.all.iter().filter(|node| node.is_healthy()).count() < self.quorum
    }

    /// The entry node: the first usable node, where all claims queue so that contenders do not
    /// split the votes.
    pub(super) fn entry_node(&self) -> Option<usize> {
        (0..self.all.len()).find(|node| self.is_usable(*node))
    }

    /// Excludes a node that did not reply in time, if there is a quorum without it.
    pub(super) fn exclude(self: &Arc<Self>, node: usize) {
        let one = &self.all[node];
        let others = self.all.iter().filter(|other| other.is_healthy() && !Arc::ptr_eq(one, other));
        if others.count() < self.quorum {
            one.silent.store(true, Ordering::Release);
        } else if !one.out.send_replace(true) {
            report!(warn, node = one.engine.identity(), "a node does not reply and is excluded");
        }
        if !one.probing.swap(true, Ordering::AcqRel) {
            let nodes = self.clone();
            self.runtime.spawn(async move { nodes.probe_until_back(node).await });
        }
    }

    /// A node replied, perhaps late: it is readmitted if there is no quorum without it.
    pub(super) fn on_reply(&self, node: usize) {
        if self.lacks_quorum() && self.is_usable(node) {
            self.readmit(node);
        }
    }

    fn readmit(&self, node: usize) {
        let one = &self.all[node];
        one.silent.store(false, Ordering::Release);
        if one.is_out() && one.out.send_replace(false) {
            report!(info, node = one.engine.identity(), "a node replies again and is used");
        }
    }

    /// Checks the health of an excluded node until it is usable again, then readmits it.
    async fn probe_until_back(&self, node: usize) {
        let one = &self.all[node];
        let mut quick = 0;
        while quick < QUICK_REPLIES {
            self.clock.sleep_until(self.clock.now() + PROBE_EVERY).await;
            let asked = self.clock.now();
            match self.check_health(node).await {
                Ok(_) if self.lacks_quorum() => break,
                Ok(_)
                    if self.clock.now().saturating_duration_since(asked)
                        <= QUICK_REPLY.max(self.timeout) =>
                {
                    quick += 1
                }
                Ok(_) => quick = 0,
                Err(Error::Closed) => return,
                Err(error) => {
                    report!(
                        debug,
                        node = one.engine.identity(),
                        error = error,
                        "a node is still excluded"
                    );
                    quick = 0;
                }
            }
        }
        one.probing.store(false, Ordering::Release);
        self.readmit(node);
    }

    /// Fails if the node does not reply, is not counted yet, or is the same server as another node.
    pub(super) async fn check_health(&self, node: usize) -> Result<Health> {
        let one = &self.all[node];
        let checked =
            self.clock.timeout_at(self.clock.now() + HEALTH_TIMEOUT, one.engine.health()).await;
        let silent =
            || unreachable_error(format!("{} does not answer", one.engine.identity()), true);
        let health = checked.ok_or_else(silent)??;
        let counted_from = health.counted_in.map(|left| self.clock.now() + left);
        *sync::lock(&one.counted_from) = counted_from;
        if counted_from.is_some() {
            return Err(unreachable_error(
                format!("{} is not counted yet", one.engine.identity()),
                true,
            ));
        }
        let mut runs = sync::lock(&self.runs);
        // Its former server may be another node's now.
        runs[node] = None;
        if let Some(run) = &health.run {
            let is_same = |other: &Option<String>| other.as_ref() == Some(run);
            if let Some(other) =
                (0..runs.len()).find(|other| *other != node && is_same(&runs[*other]))
            {
                one.duplicate.store(true, Ordering::Release);
                let (one, other) = (one.engine.identity(), self.all[other].engine.identity());
                return Err(unreachable_error(same_server(&one, &other), false));
            }
        }
        one.duplicate.store(false, Ordering::Release);
        runs[node] = health.run.clone();
        Ok(health)
    }

    /// The error of a request with fewer replies than a quorum: which nodes are not counted yet,
    /// and for how long, or else why a node did not reply.
    pub(super) fn too_few_replies(&self, replies: usize, first_error: Option<Error>) -> Error {
        let (all, quorum, now) = (self.all.len(), self.quorum, self.clock.now());
        let mut what = format!("{replies} of {all} nodes answered, {quorum} are needed");
        let uncounted: Vec<String> = self
            .all
            .iter()
            .filter_map(|node| {
                let left = sync::lock(&node.counted_from).as_ref()?.saturating_duration_since(now);
                let name = node.engine.identity();
                let host = name.split_once("://").map_or(name.as_str(), |(_, rest)| rest);
                let host = host.split(['/', '?']).next().unwrap_or(host);
                (!left.is_zero()).then(|| format!("{host} for {} s", left.as_secs() + 1))
            })
            .collect();
        match (uncounted.is_empty(), first_error) {
            (false, _) => what.push_str(&format!(
                "; not counted yet, because they were started lately and may have forgotten locks: \
                 {}. With `appendonly yes` and `appendfsync always` a node is counted at once, and \
                 a smaller `max_ttl=` shortens the wait",
                uncounted.join(", ")
            )),
            (true, Some(Error::Unreachable { what: why, .. })) => {
                what.push_str(&format!("; {why}"))
            }
            (true, Some(error)) => what.push_str(&format!("; {error}")),
            (true, None) => {}
        }
        unreachable_error(what, true)
    }

    /// Excludes the node if it falls silent before the result is dropped.
    pub(super) fn monitor(self: &Arc<Self>, node: usize) -> MonitorGuard {
        let one = &self.all[node];
        one.monitors.fetch_add(1, Ordering::AcqRel);
        if !one.monitored.swap(true, Ordering::AcqRel) {
            let nodes = self.clone();
            self.runtime.spawn(async move { nodes.monitor_loop(node).await });
        }
        MonitorGuard { node: one.clone() }
    }

    async fn monitor_loop(self: &Arc<Self>, node: usize) {
        let one = &self.all[node];
        loop {
            while one.monitors.load(Ordering::Acquire) > 0 {
                let limit = self.clock.now() + MONITOR_TIMEOUT.max(self.timeout);
                match self.clock.timeout_at(limit, self.check_health(node)).await {
                    Some(Ok(_)) => {}
                    Some(Err(Error::Closed)) => return,
                    _ => self.exclude(node),
                }
                self.clock.sleep_until(self.clock.now() + MONITOR_EVERY).await;
            }
            one.monitored.store(false, Ordering::Release);
            // A claim may have come just before the store, and relied on this task.
            let is_needed = one.monitors.load(Ordering::Acquire) > 0;
            if !is_needed || one.monitored.swap(true, Ordering::AcqRel) {
                return;
            }
        }
    }

    /// Runs a task on the engine's runtime.
    pub(super) fn spawn<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> JoinHandle<T> {
        self.runtime.spawn(task)
    }
}

pub(super) fn unreachable_error(what: String, retryable: bool) -> Error {
    Error::Unreachable { engine: ENGINE, what, retryable, source: None }
}
