//! Primitives that are built on a lock: reentrance, tickets, elections, latches, barriers.

use futures_util::StreamExt;
use futures_util::future::join_all;
use lockset::{Error, LossReason, State, Ticket};

use crate::law_support::{
    WaiterQueue, await_lock_state, expect_free_soon, expect_ready, expiry_limit, handoff_limit,
    not_within, options, soon, within,
};
use crate::lock_kind::LockKind;
use crate::stage::{LinkState, Stage};

/// A reentered lock is released with its last guard.
pub async fn a_reentered_lock_is_released_by_its_last_guard(stage: &dyn Stage, kind: LockKind) {
    let (ours, theirs) = (stage.client().await, stage.client().await);
    let outer = kind.new_lock(&ours, "room", options(stage)).lock().await.unwrap();
    let (inner, dropped) = (outer.reenter().unwrap(), outer.reenter().unwrap());
    assert_eq!((inner.token(), inner.claim_id()), (outer.token(), outer.claim_id()));
    let mut queue = WaiterQueue::new();
    queue.join(1, &kind.new_lock(&theirs, "room", options(stage)));
    outer.release().await.unwrap();
    drop(dropped);
    not_within(handoff_limit(stage), "it was released with a guard left", queue.next()).await;
    assert_eq!(inner.state(), State::Held);
    inner.confirm().await.unwrap();
    inner.release().await.unwrap();
    drop(soon(stage, "the last guard released it", queue.next()).await);
}

/// A detached lock can be attached by another client, but only on its own backend.
pub async fn a_detached_lock_can_be_attached_by_another_client(stage: &dyn Stage, kind: LockKind) {
    let (ours, theirs, far) =
        (stage.client().await, stage.client().await, stage.other_backend().await);
    let lock = kind.new_lock(&ours, "baton", options(stage).detachable().note("runner"));
    let guard = lock.lock().await.unwrap();
    let token = guard.token();
    let written = guard.detach().await.unwrap().to_string();
    let ticket: Ticket = written.parse().unwrap();
    assert!(lock.try_lock().await.unwrap().is_none(), "detached is not released");
    ours.close().await.unwrap();

    let refused = far.attach(&ticket).await;
    assert!(matches!(refused, Err(Error::Invalid { .. })), "at another home: {refused:?}");
    let other_engine = written.replace(&format!("\"{}\"", ticket.engine()), "\"nowhere\"");
    let refused = theirs.attach(&other_engine.parse().unwrap()).await;
    assert!(matches!(refused, Err(Error::Invalid { .. })), "of another engine: {refused:?}");

    let guard = soon(stage, "it is attached", theirs.attach(&ticket)).await.unwrap();
    assert_eq!((guard.token(), guard.state()), (token, State::Held));
    tokio::time::sleep(stage.ttl() * 2).await;
    assert_eq!(guard.state(), State::Held, "it is looked after");
    let seen = theirs.inspect("baton").await.unwrap();
    assert_eq!(seen.holders.first().and_then(|holder| holder.token), Some(token));
    guard.release().await.unwrap();
    expect_free_soon(stage, &theirs, "baton").await;
    let stale = theirs.attach(&ticket).await;
    assert!(matches!(stale, Err(Error::Lost { .. })), "a used ticket: {stale:?}");
}

/// A ticket can be attached once. A second attempt is refused and does not disturb the first
/// holder.
pub async fn a_ticket_is_attached_once(stage: &dyn Stage, kind: LockKind) {
    let (ours, theirs, late) = (stage.client().await, stage.client().await, stage.client().await);
    let lock = kind.new_lock(&ours, "baton", options(stage).detachable());
    let ticket = lock.lock().await.unwrap().detach().await.unwrap();
    let guard = soon(stage, "it is attached", theirs.attach(&ticket)).await.unwrap();
    for (who, client) in [("another client", &late), ("the first one", &ours), ("itself", &theirs)]
    {
        let refused = client.attach(&ticket).await;
        let used = matches!(refused, Err(Error::Lost { reason: LossReason::TicketUsed, .. }));
        assert!(used, "attached twice, by {who}: {refused:?}");
        let refused = client.renew(&ticket).await;
        assert!(refused.is_err(), "a used ticket was renewed by {who}");
    }
    tokio::time::sleep(stage.ttl() * 2).await;
    assert_eq!(guard.state(), State::Held, "the first holder was disturbed");
    guard.confirm().await.unwrap();

    // Detaching again makes a new ticket. Of two simultaneous attempts, one at most succeeds.
    let ticket = guard.detach().await.unwrap();
    let (one, other) = tokio::join!(late.attach(&ticket), ours.attach(&ticket));
    assert!(one.is_err() || other.is_err(), "attached twice at once");
}

/// All clients see the leader, also after a change.
pub async fn an_election_shows_its_leader(stage: &dyn Stage) {
    let (ours, theirs, contenders) =
        (stage.client().await, stage.client().await, stage.client().await);
    let election = |locks: &lockset::Lockset, word: &str| {
        locks.election("chair").unwrap().with(options(stage).note(word))
    };
    let watching = election(&contenders, "");
    assert_eq!(watching.leader().await.unwrap(), None);
    let mut leaders = watching.observe();
    let mut changes = async || {
        let change = soon(stage, "a change is seen", leaders.next()).await;
        change.expect("observing does not end").unwrap().map(|leader| leader.note.text)
    };
    assert_eq!(changes().await, None);

    let term = soon(stage, "it leads", election(&ours, "first").campaign()).await.unwrap();
    assert_eq!(changes().await.as_deref(), Some("first"));
    let leader = watching.leader().await.unwrap().expect("there is a leader");
    assert_eq!((&*leader.note.text, leader.token), ("first", Some(term.token())));
    let follower = election(&theirs, "second");
    assert!(follower.try_campaign().await.unwrap().is_none(), "two leaders");
    let next = tokio::spawn(async move { follower.campaign().await });
    let queued = await_lock_state(&ours, "chair", |state| state.waiters.len() == 1);
    expect_ready("a candidate waits", queued).await;
    term.release().await.unwrap();
    let term = soon(stage, "the next leads", next).await.unwrap().unwrap();
    // There may be a moment without a leader between two terms.
    let mut seen = changes().await;
    while seen.as_deref() != Some("second") {
        assert!(matches!(seen.as_deref(), None | Some("first")), "{seen:?}");
        seen = changes().await;
    }
    term.release().await.unwrap();
    assert_eq!(changes().await, None);
}

/// A latch opens for all waiters once it is counted down, by any client, and stays open.
pub async fn a_latch_opens_when_counted_down(stage: &dyn Stage) {
    let (ours, theirs) = (stage.client().await, stage.client().await);
    let (here, there) = (ours.latch("start", 4).unwrap(), theirs.latch("start", 4).unwrap());
    let waiting = here.clone();
    let mut waiter = tokio::spawn(async move { waiting.wait().await });
    assert_eq!(here.count_down().await.unwrap(), 3);
    // Concurrent counts from both clients: none is lost.
    let both = join_all([here.count_down(), there.count_down()]).await;
    let mut left: Vec<u32> = both.into_iter().map(|left| left.unwrap()).collect();
    left.sort_unstable();
    assert_eq!(left, [1, 2], "a count was lost or counted twice");
    assert_eq!(here.remaining().await.unwrap(), 1);
    not_within(handoff_limit(stage), "it opened too soon", &mut waiter).await;
    assert_eq!(there.count_down().await.unwrap(), 0);
    soon(stage, "it opens for who waited", waiter).await.unwrap().unwrap();
    soon(stage, "it stays open", there.wait()).await.unwrap();
    assert_eq!(here.count_down().await.unwrap(), 0, "an open latch stays open");
    let other = theirs.latch("start", 5).unwrap().wait().await;
    assert!(matches!(other, Err(Error::Conflict { .. })), "another count: {other:?}");
    here.clear().await.unwrap();
    assert_eq!(there.remaining().await.unwrap(), 4, "cleared, it begins anew");
}

/// No party passes a barrier before all have arrived, in every round; a cancelled party leaves.
pub async fn a_barrier_releases_all_parties_together(stage: &dyn Stage) {
    let (ours, theirs) = (stage.client().await, stage.client().await);
    let parties = [&ours, &ours, &theirs].map(|locks| locks.barrier("phase", 3).unwrap());
    for _ in 0..2 {
        let early = join_all(parties[..2].iter().map(lockset::Barrier::wait));
        not_within(handoff_limit(stage), "two of three passed", early).await;
        let left = async {
            while parties[2].waiting().await.unwrap() > 0 {
                tokio::time::sleep(stage.ttl() / 200).await;
            }
        };
        soon(stage, "who was cancelled left", left).await;

        let all = join_all(parties.iter().map(lockset::Barrier::wait));
        let passed = within(stage.ttl(), "all three pass", all).await;
        let last = passed.into_iter().filter(|last| *last.as_ref().unwrap()).count();
        assert_eq!(last, 1, "exactly one came last");
    }
}

/// A cut connection does not disturb a latch or a barrier: waiters continue to wait, and a request
/// without a reply is counted once.
pub async fn latches_and_barriers_survive_a_cut_connection(stage: &dyn Stage) {
    let ours = stage.client().await;
    let linked_client = stage.linked_client().await.expect("there is a connection");
    let (here, there) =
        (ours.latch("start", 4).unwrap(), linked_client.locks.latch("start", 4).unwrap());
    let one = ours.barrier("phase", 2).unwrap();
    let other = linked_client.locks.barrier("phase", 2).unwrap();
    let waiting = there.clone();
    let opened = tokio::spawn(async move { waiting.wait().await });
    let passed = tokio::spawn(async move { other.wait().await });
    let arrived = async {
        while one.waiting().await.unwrap() == 0 {
            tokio::time::sleep(stage.ttl() / 200).await;
        }
    };
    expect_ready("the party has arrived", arrived).await;

    for (cut, remaining) in [(LinkState::Closed, 3), (LinkState::Silent, 2)] {
        let counting = there.clone();
        let counting = tokio::spawn(async move { counting.count_down().await });
        tokio::task::yield_now().await;
        linked_client.link.set(cut);
        tokio::time::sleep(stage.ttl() / 8).await;
        linked_client.link.set(LinkState::Up);
        let counted = within(expiry_limit(stage), "it is counted", counting).await.unwrap();
        // Five seconds are not enough for every engine after a silence, so the call may be
        // repeated.
        let counted = match counted {
            Err(error) if error.is_retryable() => there.count_down().await,
            counted => counted,
        };
        assert_eq!(counted.unwrap(), remaining, "after {cut:?}");
        assert_eq!(here.remaining().await.unwrap(), remaining, "after {cut:?}");
    }
    for remaining in [1, 0] {
        assert_eq!(here.count_down().await.unwrap(), remaining);
    }
    within(expiry_limit(stage), "it opens for who waited", opened).await.unwrap().unwrap();
    assert!(one.wait().await.unwrap(), "the other one had arrived");
    let last = within(expiry_limit(stage), "it passes", passed).await.unwrap().unwrap();
    assert!(!last, "it came first");
}
