//! `etcdctl lock` and `etcdctl elect`, which are Go's `concurrency` package, on the same keys: ours
//! exclude theirs, theirs exclude ours, and both stand in one line.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use futures_util::StreamExt;
use lockset::{Error, LockOptions, Lockset};
use lockset_testkit::stage::EtcdServers;
use lockset_testkit::steps::{self, await_served, is_free, lock, spawn_waiter, until, within};
use rustix::process::{Pid, Signal, kill_process};

const TTL: Duration = Duration::from_secs(3);
const SOON: Duration = Duration::from_millis(750);
/// How long anything may take that has no bound of its own.
const PATIENCE: Duration = Duration::from_secs(20);
/// The shortest session that `etcdctl` can have here.
const ITS_TTL: &str = "1";
/// Until its session has ended, and the server has noticed.
const ITS_END: Duration = Duration::from_millis(2500);

async fn client(server: &EtcdServers) -> Lockset {
    steps::client(&server.url("p"), TTL).await
}

/// `etcdctl` that holds, waits or observes; killed when dropped.
struct Etcdctl {
    child: Child,
    lines: mpsc::Receiver<String>,
}

impl Etcdctl {
    fn start(server: &EtcdServers, args: &[&str]) -> Self {
        let mut command: Command = server.etcdctl(&server.hosts());
        command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().expect("etcdctl is needed: run `cargo xtask setup`");
        let (tell, lines) = mpsc::channel();
        let output = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || output.lines().try_for_each(|line| tell.send(line.unwrap())));
        Self { child, lines }
    }

    /// It begins to wait for the lock, and the server knows.
    fn lock(server: &EtcdServers, key: &str) -> Self {
        let before = server.keys(&format!("{key}/")).len();
        let it = Self::start(server, &["lock", "--ttl", ITS_TTL, key]);
        until("its key is there", || server.keys(&format!("{key}/")).len() > before);
        it
    }

    /// What it says next, which it does within this time or the test fails.
    #[track_caller]
    fn says(&self, limit: Duration) -> String {
        tokio::task::block_in_place(|| self.lines.recv_timeout(limit)).expect("it says something")
    }

    fn is_silent(&self) -> bool {
        self.lines.try_recv().is_err()
    }

    /// It gives back what it holds, and ends.
    fn end(mut self) {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        until("it has ended", || self.child.try_wait().unwrap().is_some());
    }

    /// It ends without a word.
    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Etcdctl {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_held_by_etcdctl_excludes_us_until_it_is_released() {
    let server = EtcdServers::start(1);
    let ours = client(&server).await;
    let it = Etcdctl::lock(&server, "p/jobs");
    assert!(it.says(PATIENCE).starts_with("p/jobs/"));
    assert!(!is_free(&ours, "jobs").await);
    assert!(ours.rwlock("jobs").unwrap().try_read().await.unwrap().is_none(), "nor readers");
    let permit = ours.semaphore("jobs", 2).unwrap().try_acquire().await;
    assert!(!matches!(permit, Ok(Some(_))), "nor permits");
    let state = ours.inspect("jobs").await.unwrap();
    assert_eq!((state.holders.len(), state.holders[0].claim), (1, None), "{state:?}");
    let waiting = spawn_waiter(&ours, "jobs").await;
    it.end();
    let guard = await_served(SOON, waiting).await;
    guard.release().await.unwrap();
    assert_eq!(server.keys("p/jobs/"), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_lock_of_a_killed_etcdctl_is_acquired_when_its_session_ends() {
    let server = EtcdServers::start(1);
    let ours = client(&server).await;
    let it = Etcdctl::lock(&server, "p/jobs");
    it.says(PATIENCE);
    let waiting = spawn_waiter(&ours, "jobs").await;
    it.kill();
    await_served(ITS_END, waiting).await.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn etcdctl_waits_for_every_kind_of_our_locks() {
    let server = EtcdServers::start(1);
    let ours = client(&server).await;
    for how in ["mutex", "writer", "reader", "permit", "renewed"] {
        let guard = match how {
            "writer" => ours.rwlock("jobs").unwrap().write().await.unwrap(),
            "reader" => ours.rwlock("jobs").unwrap().read().await.unwrap(),
            "permit" => ours.semaphore("jobs", 2).unwrap().acquire().await.unwrap(),
            _ => lock(&ours, "jobs").await,
        };
        let it = Etcdctl::lock(&server, "p/jobs");
        if how == "renewed" {
            let early = tokio::time::timeout(TTL + SOON, guard.lost()).await;
            assert!(early.is_err(), "it was renewed");
        }
        guard.confirm().await.unwrap();
        assert!(it.is_silent(), "{how}: it has the lock beside us");
        guard.release().await.unwrap();
        let said = it.says(SOON);
        assert!(said.starts_with("p/jobs/"), "{how}: {said}");
        assert!(!is_free(&ours, "jobs").await, "{how}");
        it.end();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn etcdctl_and_lockset_share_one_queue() {
    let server = EtcdServers::start(1);
    let (ours, others) = (client(&server).await, client(&server).await);
    let guard = lock(&ours, "line").await;
    let second = Etcdctl::lock(&server, "p/line");
    let third = spawn_waiter(&others, "line").await;
    let fourth = Etcdctl::lock(&server, "p/line");
    let places = ours.inspect("line").await.unwrap();
    assert_eq!(places.holders.len(), 1, "{places:?}");
    guard.release().await.unwrap();
    second.says(SOON);
    assert!(!third.is_finished() && fourth.is_silent());
    second.end();
    let guard = await_served(SOON, third).await;
    assert!(fourth.is_silent());
    guard.release().await.unwrap();
    fourth.says(SOON);
    fourth.end();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_etcdctl_waiter_delays_others_briefly() {
    let server = EtcdServers::start(1);
    let (ours, others) = (client(&server).await, client(&server).await);
    let guard = lock(&ours, "gap").await;
    let it = Etcdctl::lock(&server, "p/gap");
    let behind = spawn_waiter(&others, "gap").await;
    it.kill();
    guard.release().await.unwrap();
    await_served(ITS_END, behind).await.release().await.unwrap();
}

/// The command that `etcdctl lock` runs adds one to a number in a file, as ours do.
#[tokio::test(flavor = "multi_thread")]
async fn a_counter_shared_with_etcdctl_loses_no_update() {
    const EACH: u64 = 25;
    let server = EtcdServers::start(1);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("count");
    std::fs::write(&file, "0\n").unwrap();
    let script = format!("n=$(cat {0}); sleep 0.002; echo $((n+1)) >{0}", file.display());
    let theirs = (0..2).map(|_| {
        let (endpoints, script) = (server.hosts(), script.clone());
        let mut command = server.etcdctl(&endpoints);
        command.args(["lock", "--ttl", "10", "p/counted", "--", "sh", "-c", &script]);
        std::thread::spawn(move || {
            (0..EACH).all(|_| command.output().is_ok_and(|output| output.status.success()))
        })
    });
    let theirs: Vec<_> = theirs.collect();
    let clients = [client(&server).await, client(&server).await];
    let ours = clients.iter().map(|locks| {
        let (mutex, file) = (locks.mutex("counted").unwrap(), file.clone());
        tokio::spawn(async move {
            for _ in 0..EACH {
                let guard = mutex.lock().await.unwrap();
                let count: u64 = std::fs::read_to_string(&file).unwrap().trim().parse().unwrap();
                tokio::time::sleep(Duration::from_millis(2)).await;
                std::fs::write(&file, format!("{}\n", count + 1)).unwrap();
                guard.release().await.unwrap();
            }
        })
    });
    for task in ours.collect::<Vec<_>>() {
        within(PATIENCE * 2, "ours count", task).await.unwrap();
    }
    let all = |thread: std::thread::JoinHandle<bool>| thread.join().unwrap();
    assert!(tokio::task::block_in_place(|| theirs.into_iter().all(all)), "etcdctl failed");
    let count = std::fs::read_to_string(&file).unwrap();
    assert_eq!(count.trim().parse::<u64>().unwrap(), EACH * 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn names_with_slashes_match_etcdctl_escaped_or_raw() {
    let server = EtcdServers::start(1);
    let escaped = client(&server).await;
    let raw = steps::client(&format!("{}?names=raw", server.url("p")), TTL).await;
    let it = Etcdctl::lock(&server, "p/a/b");
    it.says(PATIENCE);
    assert!(!is_free(&raw, "a/b").await, "raw: the same key");
    assert!(!is_free(&raw, "a").await, "raw: what is below is in the way, as it is for etcdctl");
    assert!(is_free(&escaped, "a/b").await, "escaped: another key");
    assert!(is_free(&escaped, "a").await, "escaped: nothing is below");
    it.end();
    let it = Etcdctl::lock(&server, "p/a%2Fb");
    it.says(PATIENCE);
    assert!(!is_free(&escaped, "a/b").await, "the documented form of the name");
    assert!(is_free(&raw, "a/b").await);
}

/// What we put on the server, as the documentation has it.
#[tokio::test(flavor = "multi_thread")]
async fn our_keys_are_as_documented() {
    let server = EtcdServers::start(1);
    let ours = client(&server).await;
    let guard = lock(&ours, "jobs/4%2").await;
    let keys = server.keys("");
    let [key] = &keys[..] else { panic!("one lock, one key: {keys:?}") };
    let (name, rest) = key.rsplit_once('/').unwrap();
    assert_eq!(name, "p/jobs%2F4%252");
    let (lease, id) = rest.split_once('-').unwrap();
    assert_eq!(id, guard.claim_id().to_string());
    assert!(server.leases().iter().any(|known| known.trim_start_matches('0') == lease), "{lease}");
    let found = server.ask(&["get", "-w", "json", key]);
    let found: serde_json::Value = serde_json::from_str(&found).unwrap();
    let created = found["kvs"][0]["create_revision"].as_u64().unwrap();
    assert_eq!(created, guard.token().get(), "the token is the create revision");
    let value = server.ask(&["get", "--print-value-only", key]);
    assert!(value.contains(r#""v":"v1""#), "{value}");
}

#[tokio::test(flavor = "multi_thread")]
async fn both_sides_see_the_leader_of_an_election() {
    let server = EtcdServers::start(1);
    let ours = client(&server).await;
    let election =
        ours.election("boss").unwrap().with(LockOptions::default().ttl(TTL).note("ours"));
    let observer = Etcdctl::start(&server, &["elect", "-l", "p/boss"]);

    let term = election.campaign().await.unwrap();
    let (key, value) = (observer.says(PATIENCE), observer.says(PATIENCE));
    assert!(key.ends_with(&term.claim_id().to_string()), "{key}");
    assert!(value.contains(r#""note":"ours""#), "{value}");

    let theirs = Etcdctl::start(&server, &["elect", "p/boss", "theirs"]);
    until("it campaigns", || server.keys("p/boss/").len() == 2);
    assert_eq!(election.leader().await.unwrap().unwrap().note.text.as_ref(), "ours");
    term.release().await.unwrap();
    let lead = (theirs.says(PATIENCE), theirs.says(PATIENCE));
    assert_eq!(lead.1, "theirs");
    assert_eq!((observer.says(PATIENCE), observer.says(PATIENCE)), lead);
    assert_eq!(election.leader().await.unwrap().unwrap().note.text.as_ref(), "theirs");

    let again = tokio::spawn(async move { election.campaign().await });
    until("we campaign", || server.keys("p/boss/").len() == 2);
    theirs.end();
    let term = within(PATIENCE, "we lead again", again).await.unwrap().unwrap();
    // The same key again; who it is now stands in its value.
    let (used_again, value) = (observer.says(PATIENCE), observer.says(PATIENCE));
    assert_eq!(used_again, key);
    assert!(value.contains(&format!(r#""id":"{}""#, term.claim_id())), "{value}");
}

/// It waits for a permit, and is before the next one in line: if that were admitted, it would come
/// in beside it.
#[tokio::test(flavor = "multi_thread")]
async fn an_etcdctl_waiter_for_a_permit_is_not_overtaken() {
    let server = EtcdServers::start(1);
    let ours = client(&server).await;
    let permits = ours.semaphore("used", 3).unwrap();
    let permit = permits.acquire().await.unwrap();
    let theirs = Etcdctl::lock(&server, "p/used");
    for refused in [permits.try_acquire().await.map(drop), permits.acquire().await.map(drop)] {
        let refused = refused.unwrap_err();
        assert!(matches!(refused, Error::Conflict { .. }), "{refused}");
    }
    permit.release().await.unwrap();
    theirs.says(PATIENCE);
}

/// Its end is not known, so it need not be polled all the time.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_without_a_lease_is_logged_occasionally() {
    let server = EtcdServers::start(1);
    let ours = client(&server).await;
    server.ask(&["put", "p/foreign/x", "y"]);
    let mut states = ours.watch_name("foreign").unwrap();
    let mut told = 0;
    let count = async {
        while let Some(state) = states.next().await {
            assert_eq!(state.unwrap().holders.len(), 1);
            told += 1;
        }
    };
    assert!(tokio::time::timeout(Duration::from_secs(3), count).await.is_err());
    assert!((1..=5).contains(&told), "{told}");
}
