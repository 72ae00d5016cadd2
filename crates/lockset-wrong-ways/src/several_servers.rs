//! Hand-made locks on replicas, quorums and ZooKeeper.

use lockset_testkit::signals;
use lockset_testkit::stage::{RedisServer, ZooKeeperServers};
use lockset_testkit::steps::until;
use rustix::process::Signal;
use zookeeper_client::{Acls, Client, CreateMode};

use crate::play::Play;

/// A master and its replica, which has everything so far.
pub(crate) struct Replicated {
    pub(crate) master: RedisServer,
    pub(crate) replica: RedisServer,
}

impl Replicated {
    pub(crate) fn start() -> Self {
        let master = RedisServer::start();
        let port = master.port().to_string();
        let replica = RedisServer::start_with(&["--replicaof", &format!("127.0.0.1 {port}")]);
        until("the replica is in step", || master.is_replicated_to(1));
        Self { master, replica }
    }

    /// From now on nothing of the master reaches the replica.
    pub(crate) fn cut(&self) {
        self.replica.signal(Signal::STOP);
        self.master.ask(&["CLIENT", "KILL", "TYPE", "replica"]);
    }

    /// The master dies, and the replica takes its place.
    pub(crate) fn promote(&self) {
        self.master.kill();
        self.replica.signal(Signal::CONT);
        assert_eq!(self.replica.ask(&["REPLICAOF", "NO", "ONE"]), "OK");
    }
}

/// The master replies before its replica has the key.
pub fn promoted_replica(play: &mut Play) {
    let servers = Replicated::start();
    servers.cut();
    play.asks("A");
    assert_eq!(play.redis("A", &servers.master, "SET lock A NX PX 30000"), "OK");
    play.enters("A");
    servers.promote();
    play.happens("the master dies before it sends the key to its replica; the replica is promoted");
    play.asks("B");
    assert_eq!(play.redis("B", &servers.replica, "SET lock B NX PX 30000"), "OK");
    play.enters("B");
    play.finishes("A");
    play.finishes("B");
}

/// Redlock by its recipe, with the wall clock: it is set back while A asks the nodes.
pub fn wall_clock_quorum(play: &mut Play) {
    let nodes = [(); 3].map(|()| RedisServer::start());
    let take = |play: &mut Play, who: &str| {
        play.asks(who);
        let command = format!("SET lock {who} NX PX 30000");
        let granted = nodes.iter().filter(|node| play.send(who, node, &command) == "OK").count();
        play.step(who, format!("SET lock {who} NX PX 30000 → {granted} of 3"));
        assert!(granted >= 2, "a majority");
    };
    play.step("A", "its clock shows 1000.0 s");
    take(play, "A");
    play.step("A", "its clock is set back to 990.0 s");
    play.step("A", "valid for 30 s - (990 s - 1000 s) = 40 s");
    play.enters("A");
    nodes.iter().for_each(|node| drop(play.send("time", node, "PEXPIRE lock 0")));
    play.happens("30 s later: the lease of A ends on all nodes");
    take(play, "B");
    play.step("B", "valid for 30 s");
    play.enters("B");
    play.finishes("A");
    play.finishes("B");
}

/// A is restarted and finds its own node, which belongs to the session of the dead process.
pub fn old_session(play: &mut Play) {
    let servers = ZooKeeperServers::start(1);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let connect = || runtime.block_on(Client::connect(&servers.hosts())).unwrap();
    let create = |client: &Client, who: &str| {
        let mode = CreateMode::EphemeralSequential.with_acls(Acls::anyone_all());
        let path = format!("/lock/{who}-");
        let (_, number) = runtime.block_on(client.create(&path, b"", &mode)).unwrap();
        format!("{who}-{number}")
    };
    let children = |client: &Client| {
        let mut all = runtime.block_on(client.list_children("/lock")).unwrap();
        all.sort_by_key(|node| node.rsplit('-').next().map(str::to_owned));
        all
    };
    let setup = connect();
    let persistent = CreateMode::Persistent.with_acls(Acls::anyone_all());
    runtime.block_on(setup.create("/lock", b"", &persistent)).unwrap();

    let first = connect();
    let node = create(&first, "A");
    play.step("A", format!("session 1: creates {node}"));
    play.step("A", "crashes, and is started again");
    let second = connect();
    play.asks("A");
    assert_eq!(children(&second), std::slice::from_ref(&node));
    play.step("A", format!("session 2: finds [{node}]"));
    play.step("A", "the first node is its own");
    play.enters("A");
    // The end of a session deletes its nodes, whether it is closed or expires.
    drop(first);
    until("the node is gone", || children(&setup).is_empty());
    play.happens("session 1 expires");
    let third = connect();
    play.asks("B");
    let node = create(&third, "B");
    play.step("B", format!("session 3: creates {node}"));
    assert_eq!(children(&third), std::slice::from_ref(&node));
    play.step("B", format!("finds [{node}]"));
    play.enters("B");
    play.finishes("A");
    play.finishes("B");
}

/// Stops a process, so that it cannot notice that time passes.
pub(crate) fn stop(pid: rustix::process::Pid, stopped: bool) {
    signals::send(pid, if stopped { Signal::STOP } else { Signal::CONT });
}
