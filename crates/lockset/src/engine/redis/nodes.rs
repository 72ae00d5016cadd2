//! Which connection a request takes: to the one server, or to the node that serves the name; over
//! the client's own connection, or over one beside it that lives on the caller's runtime.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redis::Value;
use tokio::runtime::{Handle, Id};
use tokio::sync::watch;
use tokio::time::Instant;

use super::link::{self, Inbox, Link, Maker, Postman, Unanswered, Up, again, failed, judge};
use super::scripts::Scripts;
use super::servers::{Address, Servers, Shape};
use super::slots::{Map, most_replicas, read_ranges};
use super::sure::Sure;
use crate::error::{Error, Result};
use crate::report::report;
use crate::sync;

/// So many requests of one runtime go over the client's own connection before it gets one of its
/// own. Whoever takes a lock now and then needs none.
const WORTH_A_CONNECTION: u32 = 32;
/// At most so many runtimes have one; a program that makes many of them does not keep them.
const MOST_BESIDE: usize = 8;
/// How long a node may take to tell the map of its cluster.
const MAP: Duration = Duration::from_millis(500);
/// The pauses of a request whose node is not the right one, or is not there.
const REDIRECTED: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(100));

/// All servers of a client.
#[derive(Debug)]
pub(super) struct Nodes {
    all: All,
    made: watch::Receiver<u64>,
}

#[derive(Debug)]
enum All {
    One(Arc<Node>),
    Cluster(Box<Cluster>),
}

impl Nodes {
    /// Connects, on the runtime of the caller.
    pub(super) async fn open(
        servers: Servers,
        inbox: String,
        postman: Postman,
        scripts: Arc<Scripts>,
    ) -> Result<Self> {
        let (made, receiver) = watch::channel(0);
        let map = (servers.shape == Shape::Cluster).then(Arc::<Map>::default);
        let maker = Maker {
            servers: Arc::new(servers),
            node: None,
            inbox: Inbox { stem: inbox, map: map.clone() },
            postman,
            scripts,
            replicas: Arc::default(),
            made,
        };
        let all = match map {
            None => All::One(Arc::new(Node::new(maker.clone(), one_link(maker).await?))),
            Some(map) => All::Cluster(Box::new(Cluster::open(maker, map).await?)),
        };
        Ok(Self { all, made: receiver })
    }

    /// Tells whenever another connection was made.
    pub(super) fn made(&self) -> watch::Receiver<u64> {
        self.made.clone()
    }

    /// Claims of different slots cannot travel in one script.
    pub(super) fn by_slot(&self) -> bool {
        matches!(self.all, All::Cluster(_))
    }

    /// The connection to take if there is one server only, and it is connected.
    pub(super) fn at_hand(&self) -> Option<Arc<Up>> {
        match &self.all {
            All::One(node) => node.link.now().map(|main| node.nearest(main)),
            All::Cluster(_) => None,
        }
    }

    /// The way of a request to the node that serves `slot`.
    pub(super) fn way(&self, slot: u16, patience: Duration) -> Way<'_> {
        Way { nodes: self, slot, until: Instant::now() + patience, pause: REDIRECTED.0 }
    }

    /// Every node that has keys.
    pub(super) async fn everyone(&self) -> Vec<Arc<Node>> {
        match &self.all {
            All::One(node) => vec![node.clone()],
            All::Cluster(cluster) => {
                cluster.look_again().await;
                let masters = cluster.map.masters();
                masters.iter().map(|master| cluster.node_at(master)).collect()
            }
        }
    }

    /// The runtime on which the client's own connections live.
    pub(super) fn home(&self) -> &Handle {
        match &self.all {
            All::One(node) => &node.home,
            All::Cluster(cluster) => &cluster.home,
        }
    }

    pub(super) fn close(&self) {
        match &self.all {
            All::One(node) => node.link.close(),
            All::Cluster(cluster) => {
                sync::lock(&cluster.nodes).values().for_each(|node| node.link.close());
            }
        }
    }
}

/// The connection to the one server. A node of a quorum is not waited for: it may be down for now.
async fn one_link(maker: Maker) -> Result<Link> {
    match &maker.servers.quorum {
        None => Link::open(maker).await,
        Some(_) => Ok(Link::begin(maker)),
    }
}

/// A request looks for its node: in a cluster it may have to ask more than one.
pub(super) struct Way<'a> {
    nodes: &'a Nodes,
    slot: u16,
    until: Instant,
    pause: Duration,
}

impl Way<'_> {
    /// The node to ask now, and how long it may take.
    pub(super) async fn node(&mut self) -> std::result::Result<(Arc<Node>, Duration), Unanswered> {
        let mut why = failed("the time was over before it could be asked".to_owned(), true, None);
        loop {
            let left = self.until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                // Sent now, nobody would wait for its answer, and it would be unknown.
                return Err(Unanswered::Refused(why));
            }
            let cluster = match &self.nodes.all {
                All::One(node) => return Ok((node.clone(), left)),
                All::Cluster(cluster) => cluster,
            };
            let down = match cluster.node_of(self.slot) {
                None => failed("no node serves this lock at the moment".to_owned(), true, None),
                // One that is down may have been succeeded: the map is asked before long.
                Some(node) => match node.link.up(left.min(REDIRECTED.1)).await {
                    Ok(_) => return Ok((node, left)),
                    Err(down) => down.into_error(),
                },
            };
            why = again(&down);
            self.look_again(cluster, down).await.map_err(Unanswered::Refused)?;
        }
    }

    /// The answer, unless another node is to be asked.
    pub(super) async fn follow<T>(
        &mut self,
        answer: std::result::Result<T, Unanswered>,
    ) -> Option<std::result::Result<T, Unanswered>> {
        match (answer, &self.nodes.all) {
            (Err(Unanswered::Elsewhere(error)), All::One(_)) => {
                Some(Err(Unanswered::Refused(error)))
            }
            (Err(Unanswered::Elsewhere(error)), All::Cluster(cluster)) => {
                let refused = self.look_again(cluster, error).await.err()?;
                Some(Err(Unanswered::Refused(refused)))
            }
            (answer, _) => Some(answer),
        }
    }

    /// Looks at the map again after a pause; gives up with `why` when the time is over.
    async fn look_again(&mut self, cluster: &Cluster, why: Error) -> Result<()> {
        if Instant::now() >= self.until {
            return Err(why);
        }
        cluster.look_again().await;
        tokio::time::sleep(self.pause).await;
        self.pause = (self.pause * 2).min(REDIRECTED.1);
        Ok(())
    }
}

/// A server that has keys.
pub(super) struct Node {
    pub(super) link: Link,
    pub(super) maker: Maker,
    /// Connections for replicas to be waited for.
    pub(super) sure: Sure,
    beside: Mutex<HashMap<Id, Beside>>,
    pub(super) home: Handle,
}

/// A connection beside the client's own, on the runtime of a caller.
enum Beside {
    /// So many requests so far.
    NotYet(u32),
    Opening,
    /// It, and the one that it was opened beside.
    Open(Arc<Up>, Arc<Up>),
}

impl Node {
    fn new(maker: Maker, link: Link) -> Self {
        let (sure, beside) = (Sure::default(), Mutex::default());
        Self { link, maker, sure, beside, home: Handle::current() }
    }

    /// The greatest number of replicas that was seen.
    pub(super) fn replicas(&self) -> u32 {
        self.maker.replicas.load(Ordering::Relaxed)
    }

    /// The connection for a request that is made now: one on the caller's own runtime if it has
    /// many, for then no other thread has to be woken on the way.
    pub(super) fn nearest(self: &Arc<Self>, main: Arc<Up>) -> Arc<Up> {
        let Ok(here) = Handle::try_current() else { return main };
        if here.id() == self.home.id() {
            return main;
        }
        let mut beside = sync::lock(&self.beside);
        if beside.len() >= MOST_BESIDE && !beside.contains_key(&here.id()) {
            beside.clear();
        }
        let place = beside.entry(here.id()).or_insert(Beside::NotYet(0));
        match place {
            Beside::Open(up, of) if !up.is_over() && Arc::ptr_eq(of, &main) => {
                return up.clone();
            }
            Beside::Open(..) => *place = Beside::NotYet(0),
            Beside::Opening => {}
            Beside::NotYet(count) if *count < WORTH_A_CONNECTION => *count += 1,
            Beside::NotYet(_) => {
                *place = Beside::Opening;
                let (node, of) = (self.clone(), main.clone());
                here.spawn(async move { node.open_beside(of).await });
            }
        }
        main
    }

    async fn open_beside(self: Arc<Self>, of: Arc<Up>) {
        let place = match self.maker.beside(&of).await {
            Ok(up) => Beside::Open(Arc::new(up), of),
            Err(_) => Beside::NotYet(0),
        };
        sync::lock(&self.beside).insert(Handle::current().id(), place);
    }
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node").field("link", &self.link).finish_non_exhaustive()
    }
}

/// The nodes of a cluster, as far as they were needed.
#[derive(Debug)]
struct Cluster {
    maker: Maker,
    map: Arc<Map>,
    nodes: Mutex<HashMap<Address, Arc<Node>>>,
    looked: tokio::sync::Mutex<Option<Instant>>,
    home: Handle,
}

impl Cluster {
    async fn open(maker: Maker, map: Arc<Map>) -> Result<Self> {
        let cluster = Self {
            maker,
            map,
            nodes: Mutex::default(),
            looked: tokio::sync::Mutex::default(),
            home: Handle::current(),
        };
        cluster.look().await?;
        Ok(cluster)
    }

    fn node_of(&self, slot: u16) -> Option<Arc<Node>> {
        self.map.owner(slot).map(|master| self.node_at(&master))
    }

    fn node_at(&self, master: &Address) -> Arc<Node> {
        let mut nodes = sync::lock(&self.nodes);
        let node = nodes.entry(master.clone()).or_insert_with(|| {
            // Its tasks live where the client's do.
            let _home = self.home.enter();
            let maker = Maker { node: Some(master.clone()), ..self.maker.clone() };
            Arc::new(Node::new(maker.clone(), Link::begin(maker)))
        });
        node.clone()
    }

    /// Asks for the map again, unless that was done a moment ago.
    async fn look_again(&self) {
        let mut looked = self.looked.lock().await;
        if looked.is_some_and(|at| at.elapsed() < REDIRECTED.0) {
            return;
        }
        if let Err(error) = self.look().await {
            report!(debug, error = error, "no node tells the map of the cluster");
        }
        *looked = Some(Instant::now());
    }

    /// Any node tells the map; which one is asked first changes, for one may be cut off.
    async fn look(&self) -> Result<()> {
        let mut known = self.map.masters();
        known.extend(self.maker.servers.hosts.iter().cloned());
        let first = rand::random_range(0..known.len().max(1));
        known.rotate_left(first);
        let mut why = failed("no node is known".to_owned(), false, None);
        for at in known {
            match self.map_told_by(&at).await {
                Ok(()) => return Ok(()),
                Err(error) => why = error,
            }
        }
        Err(why)
    }

    async fn map_told_by(&self, at: &Address) -> Result<()> {
        let standing = sync::lock(&self.nodes).get(at).and_then(|node| node.link.now());
        let ask = async {
            let mut connection = match standing {
                Some(up) => up.connection.clone(),
                None => self.maker.servers.client(at)?.get_multiplexed_async_connection().await?,
            };
            let mut both = redis::pipe();
            both.cmd("CLUSTER").arg("SLOTS").cmd("CLUSTER").arg("NODES");
            both.query_async::<(Value, String)>(&mut connection).await
        };
        let (slots, nodes) = match tokio::time::timeout(MAP, ask).await {
            Ok(answer) => answer.map_err(|error| link::at(at, judge(error).into_error()))?,
            Err(_) => {
                let what = format!("no answer within {MAP:?}");
                return Err(link::at(at, failed(what, true, None)));
            }
        };
        let ranges = read_ranges(&slots, at)?;
        self.maker.replicas.fetch_max(most_replicas(&nodes), Ordering::Relaxed);
        if ranges.is_empty() {
            let what = "the node serves no slots: it is in no cluster yet".to_owned();
            return Err(link::at(at, failed(what, true, None)));
        }
        self.map.replace(ranges);
        let masters = self.map.masters();
        sync::lock(&self.nodes).retain(|at, _| masters.contains(at));
        Ok(())
    }
}
