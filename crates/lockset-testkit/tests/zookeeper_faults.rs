//! What the ZooKeeper engine makes of lost answers, cut connections and ended sessions: each has a
//! clear outcome, seen on a real server by a client that shares no code with us.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::{Duration, Instant};

use lockset::{Break, Error, Guard, LockOptions, Lockset, State};
use lockset_testkit::proxy::Proxy;
use lockset_testkit::stage::{Chroot, KazooClient, SESSIONS};
use lockset_testkit::steps::{
    assert_error, await_guard_state, await_lost, await_served, client, is_free, lock, spawn_waiter,
    until, within,
};

type Home = Chroot<1>;

/// A lock is then trusted for 2 s after each renewal, which come every second.
const TTL: Duration = Duration::from_secs(3);
/// Too short for any session to end, and for a renewal after which it would be noticed anyway.
const SOON: Duration = Duration::from_millis(900);
/// A third of the ttl, and the time that an answer takes on a busy machine.
const BY_RENEWAL: Duration = Duration::from_millis(1800);
/// For what a server must be started again for.
const LONG: Duration = Duration::from_secs(15);

fn chroot() -> (Home, KazooClient) {
    let chroot = Home::start("");
    let kazoo = chroot.servers().kazoo();
    (chroot, kazoo)
}

/// The node has the claim's id in its name, as Curator writes it.
fn bears(node: &str, guard: &Guard) -> bool {
    node.replace('-', "").contains(&guard.claim_id().to_string())
}

/// The server reaps empty parents all the time, so this meets it in the middle.
#[tokio::test(flavor = "multi_thread")]
async fn an_acquisition_with_a_lost_reply_finds_its_own_node() {
    let (chroot, mut kazoo) = chroot();
    let proxy = Proxy::before(chroot.servers().nodes()[0].port());
    let (ours, theirs) =
        (client(&chroot.url_by(&[proxy.port()]), TTL).await, client(&chroot.url(), TTL).await);
    assert!(is_free(&ours, "unanswered").await);
    proxy.drop_replies();
    let mutex = ours.mutex("unanswered").unwrap();
    let asking = tokio::spawn(async move { mutex.lock().await });
    until("it was executed", || chroot.contenders(&mut kazoo, "unanswered").len() == 1);
    let node = chroot.only_node(&mut kazoo, "unanswered");
    proxy.cut();
    let guard = await_served(SOON, asking).await;
    assert_eq!(chroot.only_node(&mut kazoo, "unanswered"), node, "neither lost nor doubled");
    assert!(bears(&node, &guard), "{node} is of {}", guard.claim_id());
    assert_eq!(kazoo.stat(&node).unwrap().czxid, guard.token().get());
    assert!(!is_free(&theirs, "unanswered").await);
    guard.release().await.unwrap();
    assert!(is_free(&theirs, "unanswered").await);
}

/// A node with the claim's id is looked for where an answer was lost; but the id is only a name,
/// and what others made ends with their session, not with ours.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_of_another_session_is_not_taken_for_ours() {
    let (chroot, mut kazoo) = chroot();
    let mut stranger = chroot.servers().kazoo();
    let proxy = Proxy::before(chroot.servers().nodes()[0].port());
    // Longer than the forgery takes on a busy machine.
    let ours = client(&chroot.url_by(&[proxy.port()]), LONG).await;
    assert!(is_free(&ours, "forged").await);
    proxy.drop_replies();
    // It must not come back before the forgery is there.
    proxy.refuse(true);
    let mutex = ours.mutex("forged").unwrap();
    let asking = tokio::spawn(async move { mutex.lock().await });
    until("it was executed", || chroot.contenders(&mut kazoo, "forged").len() == 1);
    let node = chroot.only_node(&mut kazoo, "forged");
    // The number is the server's; the rest says whose it is.
    let forged = stranger.create(node.trim_end_matches(char::is_numeric), "sequential");
    assert!(stranger.delete(&node));
    proxy.refuse(false);
    proxy.cut();
    until("it stands in line, or believes to hold", || {
        asking.is_finished() || chroot.contenders(&mut kazoo, "forged").len() == 2
    });
    assert!(!asking.is_finished(), "it holds by the node of another client");
    tokio::time::sleep(SOON).await;
    assert!(!asking.is_finished(), "it did not wait for the other client");
    assert!(stranger.delete(&forged));
    let guard = await_served(SOON, asking).await;
    let node = chroot.only_node(&mut kazoo, "forged");
    assert_eq!(kazoo.stat(&node).unwrap().czxid, guard.token().get());
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_with_a_lost_reply_has_one_queue_node() {
    let (chroot, mut kazoo) = chroot();
    let proxy = Proxy::before(chroot.servers().nodes()[0].port());
    let (ours, theirs) =
        (client(&chroot.url_by(&[proxy.port()]), TTL).await, client(&chroot.url(), TTL).await);
    let third = client(&chroot.url(), TTL).await;
    assert!(is_free(&ours, "placed").await);
    let guard = lock(&theirs, "placed").await;
    proxy.drop_replies();
    let mutex = ours.mutex("placed").unwrap();
    let asking = tokio::spawn(async move { mutex.lock().await });
    until("it was executed", || chroot.contenders(&mut kazoo, "placed").len() == 2);
    proxy.cut();
    let last = spawn_waiter(&third, "placed").await;
    assert_eq!(chroot.contenders(&mut kazoo, "placed").len(), 3);
    guard.release().await.unwrap();
    await_served(SOON, asking).await.release().await.unwrap();
    await_served(SOON, last).await.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_arrives_after_the_release_acquires_nothing() {
    let (chroot, mut kazoo) = chroot();
    let proxy = Proxy::before(chroot.servers().nodes()[0].port());
    let ours = client(&chroot.url_by(&[proxy.port()]), TTL).await;
    assert!(is_free(&ours, "late").await);
    proxy.hold_requests();
    let mutex = ours.mutex("late").unwrap();
    let asking = tokio::spawn(async move { mutex.lock().await });
    proxy.until("a request is held back", |seen| seen.held > 0);
    proxy.cut();
    let guard = await_served(SOON, asking).await;
    guard.release().await.unwrap();
    let other = lock(&ours, "other").await;
    proxy.release_requests();
    proxy.until("the late request passed", |seen| seen.late > 0);
    // A session has one connection, and the server listens to no other.
    tokio::time::sleep(SOON).await;
    assert_eq!(chroot.contenders(&mut kazoo, "late"), Vec::<String>::new());
    other.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_request_of_a_cancelled_acquire_leaves_nothing() {
    let (chroot, mut kazoo) = chroot();
    let proxy = Proxy::before(chroot.servers().nodes()[0].port());
    let ours = client(&chroot.url_by(&[proxy.port()]), TTL).await;
    let kept = lock(&ours, "kept").await;
    assert!(is_free(&ours, "withdrawn").await);
    proxy.set_silent(true);
    let patience = Duration::from_millis(200);
    let began = Instant::now();
    let error = ours.mutex("withdrawn").unwrap().lock_within(patience).await.unwrap_err();
    assert!(error.is_retryable() || matches!(error, Error::Timeout { .. }), "{error:?}");
    assert!(began.elapsed() < patience + SOON, "it waited longer than it was told to");
    proxy.set_silent(false);
    kept.confirm().await.unwrap();
    until("nothing is left", || chroot.contenders(&mut kazoo, "withdrawn").is_empty());
    tokio::time::sleep(SOON).await;
    assert_eq!(chroot.contenders(&mut kazoo, "withdrawn"), Vec::<String>::new());
    kept.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_with_a_lost_reply_hands_over_once() {
    let (chroot, mut kazoo) = chroot();
    let proxy = Proxy::before(chroot.servers().nodes()[0].port());
    let (ours, theirs) =
        (client(&chroot.url_by(&[proxy.port()]), TTL).await, client(&chroot.url(), TTL).await);
    let guard = lock(&ours, "handed").await;
    let waiting = spawn_waiter(&theirs, "handed").await;
    proxy.drop_replies();
    let releasing = tokio::spawn(guard.release());
    let next = await_served(SOON, waiting).await;
    proxy.cut();
    // Whether it says that it does not know, or has found out, it does not wait for ever.
    let told = within(TTL, "it is told", releasing).await.unwrap();
    assert!(told.is_ok() || told.as_ref().unwrap_err().is_retryable(), "{told:?}");
    tokio::time::sleep(SOON).await;
    next.confirm().await.unwrap();
    assert!(bears(&chroot.only_node(&mut kazoo, "handed"), &next));
    next.release().await.unwrap();
}

/// A session goes on for as long as its client lives, so nothing else would ever remove the node.
#[tokio::test(flavor = "multi_thread")]
async fn a_release_that_did_not_reach_the_server_is_retried() {
    let (chroot, mut kazoo) = chroot();
    let server = &chroot.servers().nodes()[0];
    let ttl = Duration::from_secs(12);
    let (ours, theirs) = (client(&chroot.url(), ttl).await, client(&chroot.url(), ttl).await);
    let (kept, guard) = (lock(&ours, "kept").await, lock(&ours, "dropped").await);
    let waiting = spawn_waiter(&theirs, "dropped").await;
    server.kill();
    let told = within(LONG, "it is told", guard.release()).await;
    assert!(told.is_err(), "there is no server");
    server.start_again();
    chroot.servers().await_serving();
    let next = await_served(Duration::from_secs(5), waiting).await;
    assert!(bears(&chroot.only_node(&mut kazoo, "dropped"), &next));
    kept.confirm().await.expect("the session was never lost");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_server_keeps_locks_and_queue() {
    let (chroot, _) = chroot();
    let ttl = Duration::from_secs(12);
    let (ours, theirs) = (client(&chroot.url(), ttl).await, client(&chroot.url(), ttl).await);
    let guard = lock(&ours, "restarted").await;
    let waiting = spawn_waiter(&theirs, "restarted").await;
    chroot.servers().restart_leader();
    await_guard_state(LONG, &guard, State::Held).await;
    guard.confirm().await.unwrap();
    assert!(!waiting.is_finished());
    let token = guard.token();
    guard.release().await.unwrap();
    assert!(await_served(Duration::from_secs(5), waiting).await.token() > token);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cut_connection_is_uncertain_at_once_and_loses_neither_lock_nor_queue_position() {
    let (chroot, mut kazoo) = chroot();
    let proxy = Proxy::before(chroot.servers().nodes()[0].port());
    let by_proxy = chroot.url_by(&[proxy.port()]);
    let (ours, theirs) = (client(&by_proxy, TTL).await, client(&by_proxy, TTL).await);
    let guard = lock(&ours, "cut").await;
    let waiting = spawn_waiter(&theirs, "cut").await;
    let line = chroot.contenders(&mut kazoo, "cut");
    for _ in 0..3 {
        proxy.refuse(true);
        proxy.cut();
        // Long before a renewal would have failed.
        await_guard_state(Duration::from_millis(400), &guard, State::Uncertain).await;
        proxy.refuse(false);
        await_guard_state(BY_RENEWAL, &guard, State::Held).await;
    }
    assert_eq!(chroot.contenders(&mut kazoo, "cut"), line, "the places were kept");
    assert!(tokio::time::timeout(TTL, guard.lost()).await.is_err(), "it was renewed");
    guard.release().await.unwrap();
    await_served(SOON, waiting).await.release().await.unwrap();
}

/// The watch ended with the connection, and nothing tells of it any more.
#[tokio::test(flavor = "multi_thread")]
async fn a_forced_release_during_a_cut_is_not_confirmed_afterwards() {
    let (chroot, _) = chroot();
    let proxy = Proxy::before(chroot.servers().nodes()[0].port());
    let (ours, theirs) =
        (client(&chroot.url_by(&[proxy.port()]), TTL).await, client(&chroot.url(), TTL).await);
    for round in 0..3 {
        let name = format!("broken{round}");
        let guard = lock(&ours, &name).await;
        // The first renewal looks at the node and watches it.
        tokio::time::sleep(TTL / 2).await;
        proxy.refuse(true);
        proxy.cut();
        await_guard_state(Duration::from_millis(400), &guard, State::Uncertain).await;
        assert_eq!(theirs.force_release(&name, Break::Now).await.unwrap().len(), 1);
        let theirs = lock(&theirs, &name).await;
        let (confirmed, ()) = tokio::join!(guard.confirm(), async { proxy.refuse(false) });
        let refused = confirmed.unwrap_err();
        assert!(matches!(refused, Error::Lost { .. }), "{refused}");
        assert!(matches!(guard.state(), State::Lost(_)));
        theirs.release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_of_an_ended_session_is_never_trusted() {
    let (chroot, mut kazoo) = chroot();
    let proxy = Proxy::before(chroot.servers().nodes()[0].port());
    let (ours, theirs) =
        (client(&chroot.url_by(&[proxy.port()]), TTL).await, client(&chroot.url(), TTL).await);
    let guard = lock(&ours, "old").await;
    let node = chroot.only_node(&mut kazoo, "old");
    let session = kazoo.stat(&node).unwrap().owner;
    let holder = lock(&theirs, "busy").await;
    let waiting = spawn_waiter(&ours, "busy").await;
    proxy.set_silent(true);
    await_lost(TTL, &guard).await;
    until("its node is gone", || chroot.contenders(&mut kazoo, "old").is_empty());
    holder.release().await.unwrap();
    assert!(!waiting.is_finished(), "it could not be notified");
    proxy.set_silent(false);
    let guard = await_served(TTL + SOON, waiting).await;
    let node = chroot.only_node(&mut kazoo, "busy");
    assert_ne!(kazoo.stat(&node).unwrap().owner, session);
    assert_eq!(kazoo.stat(&node).unwrap().czxid, guard.token().get());
    let again = lock(&ours, "old").await;
    assert_eq!(again.state(), State::Held);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_ended_by_an_operator_is_reported_and_replaced() {
    let (chroot, mut kazoo) = chroot();
    let (ours, theirs) = (client(&chroot.url(), TTL).await, client(&chroot.url(), TTL).await);
    let (guard, second) = (lock(&ours, "ended").await, lock(&ours, "ended too").await);
    let node = chroot.only_node(&mut kazoo, "ended");
    let session = kazoo.stat(&node).unwrap().owner;
    let next = spawn_waiter(&theirs, "ended").await;
    let holder = lock(&theirs, "busy").await;
    let waiting = spawn_waiter(&ours, "busy").await;
    kazoo.end_session(session);
    await_lost(BY_RENEWAL, &guard).await;
    await_lost(BY_RENEWAL, &second).await;
    assert!(await_served(SOON, next).await.token() > guard.token());
    within(TTL, "new locks can be had", lock(&ours, "anew")).await.release().await.unwrap();
    holder.release().await.unwrap();
    await_served(BY_RENEWAL, waiting).await.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_ttl_is_what_the_server_grants() {
    let (chroot, _) = chroot();
    let (shortest, longest) = SESSIONS;
    for (asked, granted) in [
        (Duration::from_millis(100), shortest),
        (Duration::from_secs(5), Duration::from_secs(5)),
        (Duration::from_secs(3600), longest),
    ] {
        let locks = client(&chroot.url(), asked).await;
        let guard = lock(&locks, "granted").await;
        assert_eq!(guard.ttl(), granted, "{asked:?} were asked for");
        assert!(guard.valid_for() < granted, "it is believed for no longer");
        guard.release().await.unwrap();
        locks.close().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unused_address_in_the_url_does_not_matter() {
    let (chroot, _) = chroot();
    let port = chroot.servers().nodes()[0].port();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = listener.local_addr().unwrap().port();
    let dead = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap().port()
    };
    for ports in [[dead, port], [port, dead], [silent, port], [port, silent]] {
        let url = chroot.url_by(&ports);
        let locks = within(TTL * 2, "it finds the one that is there", client(&url, TTL)).await;
        lock(&locks, "found").await.release().await.unwrap();
        locks.close().await.unwrap();
    }
    let nowhere = Lockset::builder(&chroot.url_by(&[dead])).ttl(TTL).connect();
    let error = within(LONG, "it is told", nowhere).await.unwrap_err();
    assert_error(&error, &["refused", "reach"], true);
}

/// As long as the session may live, nothing is lost: that is for the server to say.
#[tokio::test(flavor = "multi_thread")]
async fn a_lock_survives_a_short_freeze_of_all_servers() {
    let (chroot, _) = chroot();
    let proxy = Proxy::before(chroot.servers().nodes()[0].port());
    let ours = client(&chroot.url_by(&[proxy.port()]), Duration::from_secs(30)).await;
    let guard = lock(&ours, "outlasts").await;
    proxy.refuse(true);
    proxy.cut();
    // Longer than a claim without a node would wait for a connection.
    let error = within(LONG, "it is told", guard.confirm()).await.unwrap_err();
    assert!(error.is_retryable(), "{error:?}");
    assert_eq!(guard.state(), State::Uncertain);
    proxy.refuse(false);
    await_guard_state(LONG, &guard, State::Held).await;
    guard.confirm().await.unwrap();
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_ticket_can_be_attached_through_any_server() {
    let (chroot, _) = chroot();
    let dead = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap().port()
    };
    let url = chroot.url_by(&[dead, chroot.servers().nodes()[0].port()]);
    let (ours, theirs) = (client(&url, TTL).await, client(&url, TTL).await);
    let options = || LockOptions::default().ttl(TTL).detachable();
    // Which server is tried first is left to chance.
    for _ in 0..6 {
        let mutex = ours.mutex("baton").unwrap().with(options());
        let guard = within(TTL, "a free lock", mutex.lock()).await.unwrap();
        let ticket = guard.detach().await.unwrap();
        let guard = within(TTL, "it is attached", theirs.attach(&ticket)).await.unwrap();
        guard.release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_detached_lock_is_not_touched_by_its_former_client() {
    let (chroot, _) = chroot();
    let proxy = Proxy::before(chroot.servers().nodes()[0].port());
    let url = chroot.url_by(&[proxy.port()]);
    let (ours, theirs) = (client(&url, TTL).await, client(&url, TTL).await);
    let options = LockOptions::default().ttl(TTL).detachable();
    let guard = ours.mutex("baton").unwrap().with(options).lock().await.unwrap();
    let before = proxy.connections();
    let ticket = guard.detach().await.unwrap();
    let guard = theirs.attach(&ticket).await.unwrap();
    tokio::time::sleep(SOON).await;
    assert_eq!(proxy.connections(), before + 1, "no other connection takes that session over");
    guard.confirm().await.unwrap();
    guard.release().await.unwrap();
}

/// From its first renewal on the writer's node is watched, and it is the downgrade that removes it.
#[tokio::test(flavor = "multi_thread")]
async fn a_downgrade_of_a_watched_writer_leaves_nothing_behind() {
    let (chroot, _) = chroot();
    let (ours, theirs) = (client(&chroot.url(), TTL).await, client(&chroot.url(), TTL).await);
    let (here, there) = (ours.rwlock("book").unwrap(), theirs.rwlock("book").unwrap());
    for _ in 0..5 {
        let guard = here.write().await.unwrap();
        guard.confirm().await.unwrap();
        guard.downgrade().await.unwrap();
        guard.confirm().await.unwrap();
        assert_eq!(guard.state(), State::Held);
        let reader = there.try_read().await.unwrap().expect("readers come in");
        reader.release().await.unwrap();
        assert!(there.try_write().await.unwrap().is_none(), "it is held");
        guard.release().await.unwrap();
        let writer = within(SOON, "nothing is left", there.write()).await.unwrap();
        writer.release().await.unwrap();
    }
}

/// The outcome is unknown; it was done.
#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_downgrade_can_be_repeated_renewed_and_released() {
    let (chroot, _) = chroot();
    let theirs = client(&chroot.url(), TTL).await;
    let there = theirs.rwlock("book").unwrap();
    for then in ["repeat", "renew", "release"] {
        let proxy = Proxy::before(chroot.servers().nodes()[0].port());
        let ours = client(&chroot.url_by(&[proxy.port()]), TTL).await;
        let guard = ours.rwlock("book").unwrap().write().await.unwrap();
        guard.confirm().await.unwrap();
        proxy.drop_replies();
        let given_up = tokio::time::timeout(Duration::from_millis(100), guard.downgrade()).await;
        assert!(given_up.is_err(), "no server replies");
        let reader = within(SOON, "it was done", there.read()).await.unwrap();
        reader.release().await.unwrap();
        proxy.cut();
        assert!(is_free(&ours, "another").await, "there is a connection again");
        match then {
            "repeat" => within(TTL, "it is told", guard.downgrade()).await.unwrap(),
            "renew" => within(TTL, "it is told", guard.confirm()).await.unwrap(),
            _ => {}
        }
        if then != "release" {
            await_guard_state(BY_RENEWAL, &guard, State::Held).await;
            assert!(there.try_write().await.unwrap().is_none(), "{then}: it is held");
        }
        within(TTL, "it is told", guard.release()).await.unwrap();
        let writer = within(SOON, "nothing is left", there.write()).await.unwrap();
        writer.release().await.unwrap();
        drop(ours);
    }
}

/// The writer has not noticed the break yet. The reader's node takes the break and the note along.
#[tokio::test(flavor = "multi_thread")]
async fn a_downgrade_keeps_the_break_and_the_note_that_it_overtakes() {
    let (chroot, _) = chroot();
    let (ours, theirs) = (client(&chroot.url(), TTL).await, client(&chroot.url(), TTL).await);
    let guard = ours.rwlock("book").unwrap().write().await.unwrap();
    guard.set_note("page 7").await.unwrap();
    theirs.force_release("book", Break::WhenLeaseEnds).await.unwrap();
    guard.downgrade().await.unwrap();
    let state = theirs.inspect("book").await.unwrap();
    let [holder] = &state.holders[..] else { panic!("{state:?}") };
    assert_eq!((holder.revoked, &*holder.note.text), (true, "page 7"));
    await_guard_state(BY_RENEWAL, &guard, State::Uncertain).await;
}

/// Wherever an attach is cancelled: the ticket is still good, or its lock passes on at once and not
/// when the session of the ticket ends.
#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_attach_leaves_the_ticket_or_a_free_lock() {
    let (chroot, _) = chroot();
    let (ours, theirs) = (client(&chroot.url(), TTL).await, client(&chroot.url(), TTL).await);
    let options = LockOptions::default().ttl(2 * LONG).detachable();
    let mutex = ours.mutex("handed").unwrap().with(options);
    for polls in 1.. {
        let guard = within(LONG, "the lock of the last ticket passes on", mutex.lock()).await;
        let ticket = guard.unwrap().detach().await.unwrap();
        let mut attaching = Box::pin(theirs.attach(&ticket));
        let mut polled = 0;
        let counted = std::future::poll_fn(|context| {
            polled += 1;
            match attaching.as_mut().poll(context) {
                std::task::Poll::Pending if polled == polls => std::task::Poll::Ready(None),
                poll => poll.map(Some),
            }
        });
        if let Some(attached) = counted.await {
            attached.unwrap().release().await.unwrap();
            assert!(polls > 3, "it was cancelled {polls} times only");
            break;
        }
        drop(attaching);
        if let Ok(guard) = ours.attach(&ticket).await {
            guard.release().await.unwrap();
        }
    }
}
