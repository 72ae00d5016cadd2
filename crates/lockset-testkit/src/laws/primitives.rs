//! What is built on a lock.

use futures_util::StreamExt;
use futures_util::future::join_all;
use lockset::{Error, LossReason, State, Ticket};

use crate::form::Form;
use crate::stage::{Connection, Stage};
use crate::tools::{
    Line, lapse, not_within, patience, prepared, soon, soon_free, state_with, options, within,
};

/// A reentered lock is released when its last guard is gone.
pub async fn a_reentered_guard_counts(stage: &dyn Stage, form: Form) {
    let (ours, theirs) = (stage.client().await, stage.client().await);
    let outer = form.of(&ours, "room", options(stage)).lock().await.unwrap();
    let (inner, dropped) = (outer.reenter().unwrap(), outer.reenter().unwrap());
    assert_eq!((inner.token(), inner.claim_id()), (outer.token(), outer.claim_id()));
    let mut line = Line::new();
    line.join(1, &form.of(&theirs, "room", options(stage)));
    outer.release().await.unwrap();
    drop(dropped);
    not_within(patience(stage), "it was released with a guard left", line.next()).await;
    assert_eq!(inner.state(), State::Held);
    inner.confirm().await.unwrap();
    inner.release().await.unwrap();
    drop(soon(stage, "the last guard released it", line.next()).await);
}

/// A lock travels on paper to another client, and only to its own home.
pub async fn a_detached_lock_is_attached_elsewhere(stage: &dyn Stage, form: Form) {
    let (ours, theirs, far) = (stage.client().await, stage.client().await, stage.elsewhere().await);
    let lock = form.of(&ours, "baton", options(stage).detachable().note("runner"));
    let guard = lock.lock().await.unwrap();
    let token = guard.token();
    let paper = guard.detach().await.unwrap().to_string();
    let ticket: Ticket = paper.parse().unwrap();
    assert!(lock.try_lock().await.unwrap().is_none(), "detached is not released");
    ours.close().await.unwrap();

    let refused = far.attach(&ticket).await;
    assert!(matches!(refused, Err(Error::Invalid { .. })), "at another home: {refused:?}");
    let other_engine = paper.replace(&format!("\"{}\"", ticket.engine()), "\"nowhere\"");
    let refused = theirs.attach(&other_engine.parse().unwrap()).await;
    assert!(matches!(refused, Err(Error::Invalid { .. })), "of another engine: {refused:?}");

    let guard = soon(stage, "it is attached", theirs.attach(&ticket)).await.unwrap();
    assert_eq!((guard.token(), guard.state()), (token, State::Held));
    tokio::time::sleep(stage.ttl() * 2).await;
    assert_eq!(guard.state(), State::Held, "it is looked after");
    let seen = theirs.inspect("baton").await.unwrap();
    assert_eq!(seen.holders.first().and_then(|holder| holder.token), Some(token));
    guard.release().await.unwrap();
    soon_free(stage, &theirs, "baton").await;
    let stale = theirs.attach(&ticket).await;
    assert!(matches!(stale, Err(Error::Lost { .. })), "a used ticket: {stale:?}");
}

/// One ticket has one holder: whoever attaches it second is refused, and does not disturb the
/// first.
pub async fn a_ticket_is_attached_once(stage: &dyn Stage, form: Form) {
    let (ours, theirs, late) = (stage.client().await, stage.client().await, stage.client().await);
    let lock = form.of(&ours, "baton", options(stage).detachable());
    let ticket = lock.lock().await.unwrap().detach().await.unwrap();
    let guard = soon(stage, "it is attached", theirs.attach(&ticket)).await.unwrap();
    for (who, client) in [("another client", &late), ("the first one", &ours), ("itself", &theirs)] {
        let refused = client.attach(&ticket).await;
        let used = matches!(refused, Err(Error::Lost { reason: LossReason::TicketUsed, .. }));
        assert!(used, "attached twice, by {who}: {refused:?}");
        let refused = client.renew(&ticket).await;
        assert!(refused.is_err(), "a used ticket was renewed by {who}");
    }
    tokio::time::sleep(stage.ttl() * 2).await;
    assert_eq!(guard.state(), State::Held, "the first holder was disturbed");
    guard.confirm().await.unwrap();

    // Let go of again, there is a new ticket. Two who come at once do not both get it.
    let ticket = guard.detach().await.unwrap();
    let (one, other) = tokio::join!(late.attach(&ticket), ours.attach(&ticket));
    assert!(one.is_err() || other.is_err(), "attached twice at once");
}

/// The leader is known to all, also when it changes.
pub async fn an_election_shows_its_leader(stage: &dyn Stage) {
    let (ours, theirs, contenders) = (stage.client().await, stage.client().await, stage.client().await);
    let election = |locks: &lockset::Lockset, word: &str| {
        locks.election("chair").unwrap().with(options(stage).note(word)).unwrap()
    };
    let watching = election(&contenders, "");
    assert_eq!(watching.leader().await.unwrap(), None);
    let mut leaders = watching.observe();
    let mut changes = async || {
        let change = soon(stage, "a change is seen", leaders.next()).await;
        change.expect("observing does not end").unwrap().map(|leader| leader.note)
    };
    assert_eq!(changes().await, None);

    let term = soon(stage, "it leads", election(&ours, "first").campaign()).await.unwrap();
    assert_eq!(changes().await.as_deref(), Some("first"));
    let leader = watching.leader().await.unwrap().expect("there is a leader");
    assert_eq!((leader.note.as_str(), leader.token), ("first", Some(term.token())));
    let follower = election(&theirs, "second");
    assert!(follower.try_campaign().await.unwrap().is_none(), "two leaders");
    let next = tokio::spawn(async move { follower.campaign().await });
    let queued = state_with(&ours, "chair", |state| state.waiters.len() == 1);
    prepared("a candidate waits", queued).await;
    term.release().await.unwrap();
    let term = soon(stage, "the next leads", next).await.unwrap().unwrap();
    // Between two terms there may be a moment without a leader.
    let mut seen = changes().await;
    while seen.as_deref() != Some("second") {
        assert!(matches!(seen.as_deref(), None | Some("first")), "{seen:?}");
        seen = changes().await;
    }
    term.release().await.unwrap();
    assert_eq!(changes().await, None);
}

/// A latch opens for all when it was counted down from anywhere, and stays open.
pub async fn a_latch_opens_when_counted_down(stage: &dyn Stage) {
    let (ours, theirs) = (stage.client().await, stage.client().await);
    let (here, there) = (ours.latch("start", 4).unwrap(), theirs.latch("start", 4).unwrap());
    let waiting = here.clone();
    let mut waiter = tokio::spawn(async move { waiting.wait().await });
    assert_eq!(here.count_down().await.unwrap(), 3);
    // At the same time from both sides: none is lost.
    let both = join_all([here.count_down(), there.count_down()]).await;
    let mut left: Vec<u32> = both.into_iter().map(|left| left.unwrap()).collect();
    left.sort_unstable();
    assert_eq!(left, [1, 2], "a count was lost or counted twice");
    assert_eq!(here.remaining().await.unwrap(), 1);
    not_within(patience(stage), "it opened too soon", &mut waiter).await;
    assert_eq!(there.count_down().await.unwrap(), 0);
    soon(stage, "it opens for who waited", waiter).await.unwrap().unwrap();
    soon(stage, "it stays open", there.wait()).await.unwrap();
    assert_eq!(here.count_down().await.unwrap(), 0, "an open latch stays open");
    let other = theirs.latch("start", 5).unwrap().wait().await;
    assert!(matches!(other, Err(Error::Conflict { .. })), "another count: {other:?}");
    here.clear().await.unwrap();
    assert_eq!(there.remaining().await.unwrap(), 4, "cleared, it begins anew");
}

/// Nobody passes a barrier before all are there, round after round; who is cancelled leaves.
pub async fn a_barrier_lets_all_go_together(stage: &dyn Stage) {
    let (ours, theirs) = (stage.client().await, stage.client().await);
    let parties = [&ours, &ours, &theirs].map(|locks| locks.barrier("phase", 3).unwrap());
    for _ in 0..2 {
        let early = join_all(parties[..2].iter().map(lockset::Barrier::wait));
        not_within(patience(stage), "two of three passed", early).await;
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

/// A connection that is cut costs a latch and a barrier nothing: whoever waits goes on waiting, and
/// what was asked for without an answer is counted once.
pub async fn a_cut_connection_counts_nothing_twice(stage: &dyn Stage) {
    let ours = stage.client().await;
    let linked = stage.linked().await.expect("there is a connection");
    let (here, there) = (ours.latch("start", 4).unwrap(), linked.locks.latch("start", 4).unwrap());
    let one = ours.barrier("phase", 2).unwrap();
    let other = linked.locks.barrier("phase", 2).unwrap();
    let waiting = there.clone();
    let opened = tokio::spawn(async move { waiting.wait().await });
    let passed = tokio::spawn(async move { other.wait().await });
    let arrived = async {
        while one.waiting().await.unwrap() == 0 {
            tokio::time::sleep(stage.ttl() / 200).await;
        }
    };
    prepared("the party has arrived", arrived).await;

    for (cut, remaining) in [(Connection::Ended, 3), (Connection::Silent, 2)] {
        let counting = there.clone();
        let counting = tokio::spawn(async move { counting.count_down().await });
        tokio::task::yield_now().await;
        linked.link.set(cut);
        tokio::time::sleep(stage.ttl() / 8).await;
        linked.link.set(Connection::Whole);
        let counted = within(lapse(stage), "it is counted", counting).await.unwrap();
        // Five seconds are not enough for every engine that was silent: it may be asked again.
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
    within(lapse(stage), "it opens for who waited", opened).await.unwrap().unwrap();
    assert!(one.wait().await.unwrap(), "the other one had arrived");
    let last = within(lapse(stage), "it passes", passed).await.unwrap().unwrap();
    assert!(!last, "it came first");
}
