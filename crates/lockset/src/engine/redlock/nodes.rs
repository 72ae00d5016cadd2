//! The nodes of a quorum, and which of them are worth asking.
//!
//! A node that does not answer in its time is left out, so that it costs that time once and not in
//! every request. It is asked how it is now and then, and used again when it answers quickly, or
//! when there is no quorum without it.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::watch;

use super::ENGINE;
use crate::clock::{Clock, Moment};
use crate::engine::{Engine, Health, same_server};
use crate::error::{Error, Result};
use crate::report::report;
use crate::sync;

/// How often a node that was left out is asked whether it is back.
const ASK_AGAIN: Duration = Duration::from_millis(100);
/// It is back when it has answered within this time, so often in a row: one that is only slow would
/// cost its time again and again. Where nodes may take longer to answer, it may take as long.
const QUICK: Duration = Duration::from_millis(200);
const QUICK_IN_A_ROW: u32 = 2;
/// How often the node where somebody queues is asked how it is, and how long it may take; likewise.
const LOOK_AGAIN: Duration = Duration::from_millis(500);
const SILENT: Duration = Duration::from_millis(500);
/// How long a node that was left out may take to tell how it is. Longer than the patience of
/// engines, which know better what is wrong.
const TELL: Duration = Duration::from_secs(3);

/// One of the nodes.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) engine: Arc<dyn Engine>,
    out: watch::Sender<bool>,
    /// It did not answer in its time, and is needed for a quorum all the same.
    silent: AtomicBool,
    /// It is another node under a second address, as far as is known.
    doubled: AtomicBool,
    /// Until when it is not counted, because it was started lately.
    rests_until: Mutex<Option<Moment>>,
    /// Somebody asks already whether it is back.
    asked_for: AtomicBool,
    /// How many queue there and want to know if it falls silent.
    watchers: AtomicUsize,
    /// Somebody asks for them.
    watched: AtomicBool,
}

impl Node {
    pub(super) fn new(engine: Arc<dyn Engine>) -> Self {
        Self {
            engine,
            out: watch::Sender::new(false),
            silent: AtomicBool::new(false),
            doubled: AtomicBool::new(false),
            rests_until: Mutex::default(),
            asked_for: AtomicBool::new(false),
            watchers: AtomicUsize::new(0),
            watched: AtomicBool::new(false),
        }
    }

    fn is_out(&self) -> bool {
        *self.out.borrow()
    }

    fn is_well(&self) -> bool {
        !self.is_out() && !self.silent.load(Ordering::Acquire)
    }

    /// Tells whenever the node is left out, from now on.
    pub(super) fn leavings(&self) -> Leavings {
        Leavings(self.out.subscribe())
    }
}

/// When a node is left out.
pub(super) struct Leavings(watch::Receiver<bool>);

impl Leavings {
    /// Pending until the node is left out, once more if it is already.
    pub(super) async fn next(&mut self) {
        // The sender lives as long as the node, which is never dropped before whoever asks here.
        while self.0.changed().await.is_ok() && !*self.0.borrow_and_update() {}
    }
}

/// Somebody who queues at a node, until this is dropped.
pub(super) struct Watching {
    node: Arc<Node>,
}

impl Drop for Watching {
    fn drop(&mut self) {
        self.node.watchers.fetch_sub(1, Ordering::AcqRel);
    }
}

/// All nodes, in the order in which every client has them.
#[derive(Debug)]
pub(super) struct Nodes {
    pub(super) all: Vec<Arc<Node>>,
    pub(super) quorum: usize,
    /// How long a node may take to answer, if that was set.
    timeout: Duration,
    clock: Clock,
    /// Where everything goes on that nobody waits for.
    pub(super) home: Handle,
    /// Who is who, as far as it is known: no server may count twice.
    runs: std::sync::Mutex<Vec<Option<String>>>,
}

impl Nodes {
    pub(super) fn new(
        engines: Vec<Arc<dyn Engine>>,
        timeout: Option<Duration>,
        clock: Clock,
    ) -> Self {
        let runs = std::sync::Mutex::new(vec![None; engines.len()]);
        let quorum = engines.len() / 2 + 1;
        let all = engines.into_iter().map(|engine| Arc::new(Node::new(engine))).collect();
        let timeout = timeout.unwrap_or_default();
        Self { all, quorum, timeout, clock, home: Handle::current(), runs }
    }

    /// The nodes that are worth asking.
    pub(super) fn worth_asking(&self) -> Vec<usize> {
        (0..self.all.len()).filter(|node| self.is_worth_asking(*node)).collect()
    }

    /// If there is no quorum without those left out, they are: perhaps it was this client that was
    /// slow, and nothing is won by asking fewer.
    pub(super) fn is_worth_asking(&self, node: usize) -> bool {
        let one = &self.all[node];
        !one.doubled.load(Ordering::Acquire) && (!one.is_out() || self.lacks_a_quorum())
    }

    fn lacks_a_quorum(&self) -> bool {
        self.all.iter().filter(|node| node.is_well()).count() < self.quorum
    }

    /// Where everybody queues, so that contenders do not split the votes: the first that is worth
    /// asking.
    pub(super) fn door(&self) -> Option<usize> {
        (0..self.all.len()).find(|node| self.is_worth_asking(*node))
    }

    /// This node did not answer in its time. It is left out if there is a quorum without it.
    pub(super) fn leave_out(self: &Arc<Self>, node: usize) {
        let one = &self.all[node];
        let others = self.all.iter().filter(|other| other.is_well() && !Arc::ptr_eq(one, other));
        if others.count() < self.quorum {
            one.silent.store(true, Ordering::Release);
        } else if !one.out.send_replace(true) {
            report!(warn, node = one.engine.identity(), "a node does not answer and is left out");
        }
        if !one.asked_for.swap(true, Ordering::AcqRel) {
            let nodes = self.clone();
            self.home.spawn(async move { nodes.ask_for(node).await });
        }
    }

    /// This node answered, however late: it is used again if there is no quorum without it.
    pub(super) fn answered(&self, node: usize) {
        if self.lacks_a_quorum() && self.is_worth_asking(node) {
            self.is_back(node);
        }
    }

    fn is_back(&self, node: usize) {
        let one = &self.all[node];
        one.silent.store(false, Ordering::Release);
        if one.is_out() && one.out.send_replace(false) {
            report!(info, node = one.engine.identity(), "a node answers again");
        }
    }

    /// Asks how the node is until it is worth asking for locks.
    async fn ask_for(&self, node: usize) {
        let one = &self.all[node];
        let mut quick = 0;
        while quick < QUICK_IN_A_ROW {
            self.clock.sleep_until(self.clock.now() + ASK_AGAIN).await;
            let asked = self.clock.now();
            match self.look_at(node).await {
                Ok(_) if self.lacks_a_quorum() => break,
                Ok(_)
                    if self.clock.now().saturating_duration_since(asked)
                        <= QUICK.max(self.timeout) =>
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
                        "a node is still left out"
                    );
                    quick = 0;
                }
            }
        }
        one.asked_for.store(false, Ordering::Release);
        self.is_back(node);
    }

    /// How a node is. Fails if it does not answer, or is another node under a second address.
    pub(super) async fn look_at(&self, node: usize) -> Result<Health> {
        let one = &self.all[node];
        let told = self.clock.timeout_at(self.clock.now() + TELL, one.engine.health()).await;
        let silent = || failed(format!("{} does not answer", one.engine.identity()), true);
        let vitals = told.ok_or_else(silent)??;
        let rests_until = vitals.counted_in.map(|left| self.clock.now() + left);
        *sync::lock(&one.rests_until) = rests_until;
        if rests_until.is_some() {
            return Err(failed(format!("{} is not counted yet", one.engine.identity()), true));
        }
        let mut runs = sync::lock(&self.runs);
        // What it was before is past, and may be where another address leads now.
        runs[node] = None;
        if let Some(run) = &vitals.run {
            let is_it = |other: &Option<String>| other.as_ref() == Some(run);
            if let Some(other) =
                (0..runs.len()).find(|other| *other != node && is_it(&runs[*other]))
            {
                one.doubled.store(true, Ordering::Release);
                let (one, other) = (one.engine.identity(), self.all[other].engine.identity());
                return Err(failed(same_server(&one, &other), false));
            }
        }
        one.doubled.store(false, Ordering::Release);
        runs[node] = vitals.run.clone();
        Ok(vitals)
    }

    /// The error of a request that fewer than a quorum answered: which nodes are not counted yet,
    /// and for how long, or what one of the others said.
    pub(super) fn too_few(&self, answered: usize, trouble: Option<Error>) -> Error {
        let (all, quorum, now) = (self.all.len(), self.quorum, self.clock.now());
        let mut what = format!("{answered} of {all} nodes answered, {quorum} are needed");
        let resting: Vec<String> = self
            .all
            .iter()
            .filter_map(|node| {
                let left = sync::lock(&node.rests_until).as_ref()?.saturating_duration_since(now);
                let name = node.engine.identity();
                let host = name.split_once("://").map_or(name.as_str(), |(_, rest)| rest);
                let host = host.split(['/', '?']).next().unwrap_or(host);
                (!left.is_zero()).then(|| format!("{host} for {} s", left.as_secs() + 1))
            })
            .collect();
        match (resting.is_empty(), trouble) {
            (false, _) => what.push_str(&format!(
                "; not counted yet, because they were started lately and may have forgotten locks: \
                 {}. With `appendonly yes` and `appendfsync always` a node is counted at once, and \
                 a smaller `max_ttl=` shortens the wait",
                resting.join(", ")
            )),
            (true, Some(Error::Unreachable { what: why, .. })) => {
                what.push_str(&format!("; {why}"))
            }
            (true, Some(error)) => what.push_str(&format!("; {error}")),
            (true, None) => {}
        }
        failed(what, true)
    }

    /// Somebody queues at this node: if it falls silent it is left out.
    pub(super) fn watch_over(self: &Arc<Self>, node: usize) -> Watching {
        let one = &self.all[node];
        one.watchers.fetch_add(1, Ordering::AcqRel);
        if !one.watched.swap(true, Ordering::AcqRel) {
            let nodes = self.clone();
            self.home.spawn(async move { nodes.keep_an_eye_on(node).await });
        }
        Watching { node: one.clone() }
    }

    async fn keep_an_eye_on(self: &Arc<Self>, node: usize) {
        let one = &self.all[node];
        loop {
            while one.watchers.load(Ordering::Acquire) > 0 {
                let limit = self.clock.now() + SILENT.max(self.timeout);
                match self.clock.timeout_at(limit, self.look_at(node)).await {
                    Some(Ok(_)) => {}
                    Some(Err(Error::Closed)) => return,
                    _ => self.leave_out(node),
                }
                self.clock.sleep_until(self.clock.now() + LOOK_AGAIN).await;
            }
            one.watched.store(false, Ordering::Release);
            // Somebody may have come just before, and found that an eye was kept.
            let anybody = one.watchers.load(Ordering::Acquire) > 0;
            if !anybody || one.watched.swap(true, Ordering::AcqRel) {
                return;
            }
        }
    }

    /// Goes on with `work` whether anybody waits for it or not.
    pub(super) fn in_background(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.home.spawn(work);
    }

    /// Goes on with requests that were begun on the caller's runtime and belong there: their timers
    /// do. If that runtime ends, they are dropped.
    pub(super) fn beside_the_caller(&self, work: impl Future<Output = ()> + Send + 'static) {
        Handle::try_current().unwrap_or_else(|_| self.home.clone()).spawn(work);
    }
}

pub(super) fn failed(what: String, retryable: bool) -> Error {
    Error::Unreachable { engine: ENGINE, what, retryable, source: None }
}
