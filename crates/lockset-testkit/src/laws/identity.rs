//! The id and the token of a claim decide at the backend what a request may do.

use lockset::engine::{Admission, Claim, ClaimId, Engine, Grant, Renewal, Wait};
use lockset::{Error, LossReason, Result, Token};

use crate::law_support::{
    WaiterQueue, await_lock_state, claim, expect_free_soon, expect_ready, options, soon,
};
use crate::lock_kind::LockKind;
use crate::stage::Stage;

/// Only the claim that holds a lock can release it.
pub async fn a_release_by_another_claim_does_nothing(stage: &dyn Stage, kind: LockKind) {
    let (engine, other, locks) = (stage.engine().await, stage.engine().await, stage.client().await);
    let ours = claim(stage, "own", kind.mode());
    let grant = taken(&*engine, &ours).await;

    let stranger = Claim { id: ClaimId::random(), ..ours.clone() };
    for engine in [&engine, &other] {
        let answer = engine.release(&stranger, &grant, None).await;
        assert!(matches!(answer, Err(Error::NotHeld { .. })), "another id: {answer:?}");
    }
    other.withdraw(&stranger).await.unwrap();
    let seen = locks.inspect("own").await.unwrap();
    assert_eq!(seen.holders.len(), 1, "a stranger released it: {seen:?}");
    expect_renewed(&*engine, &ours, &grant, "the holder still holds").await;

    // With another token it is not held either. (The engine may still remove what has this id: it
    // is not in use, since a client never exchanges one token of a claim for another.)
    let answer = engine.release(&ours, &wrong(&grant), None).await;
    assert!(matches!(answer, Err(Error::NotHeld { .. })), "another token: {answer:?}");
}

/// Renewing checks id and token: a late duplicate of an old request may have acquired the lock
/// again under the same id.
pub async fn a_renewal_needs_id_and_token(stage: &dyn Stage, kind: LockKind) {
    let engine = stage.engine().await;
    let ours = claim(stage, "own", kind.mode());
    let grant = taken(&*engine, &ours).await;
    let stranger = Claim { id: ClaimId::random(), ..ours.clone() };

    for (what, claim, grant) in
        [("another id", &stranger, grant.clone()), ("another token", &ours, wrong(&grant))]
    {
        let answer = renewed(&*engine, claim, &grant).await;
        let lost = Renewal::Lost(LossReason::Forgotten);
        assert_eq!(answer.unwrap(), lost, "{what} was renewed");
    }
    let both = engine.renew(&[(&stranger, &grant), (&ours, &grant)]).await;
    let in_order = matches!(&both[..], [Ok(Renewal::Lost(_)), Ok(Renewal::Renewed(_))]);
    assert!(in_order, "a batch is answered in its order: {both:?}");
    expect_renewed(&*engine, &ours, &grant, "id and token are right").await;
}

/// Releasing and withdrawing may be repeated, also after another claim has acquired the lock.
pub async fn releasing_twice_is_harmless(stage: &dyn Stage, kind: LockKind) {
    let (engine, other) = (stage.engine().await, stage.engine().await);
    let first = claim(stage, "twice", kind.mode());
    let grant = taken(&*engine, &first).await;
    engine.release(&first, &grant, None).await.unwrap();

    let second = claim(stage, "twice", kind.mode());
    let theirs = taken(&*other, &second).await;
    assert!(theirs.token > grant.token);
    for _ in 0..2 {
        let again = engine.release(&first, &grant, None).await;
        assert!(matches!(again, Err(Error::NotHeld { .. })), "{again:?}");
        engine.withdraw(&first).await.unwrap();
    }
    expect_renewed(&*other, &second, &theirs, "the next holder was not touched").await;
    other.withdraw(&second).await.unwrap();
    other.withdraw(&second).await.unwrap();
    let third = claim(stage, "twice", kind.mode());
    taken(&*engine, &third).await;
}

/// A repeated request of the same claim gets the same reply, whether it holds or waits.
pub async fn a_repeated_acquire_changes_nothing(stage: &dyn Stage, kind: LockKind) {
    let (engine, locks) = (stage.engine().await, stage.client().await);
    let ours = claim(stage, "again", kind.mode());
    let grant = taken(&*engine, &ours).await;
    let again = taken(&*engine, &ours).await;
    assert_eq!(again.token, grant.token, "a repetition took another token");
    assert!(again.valid_until <= stage.clock().now() + stage.ttl());

    // A waiter that was interrupted and asks again has one queue entry, not two.
    let waiting = claim(stage, "again", kind.mode());
    for _ in 0..3 {
        let attempt = engine.acquire(&waiting, Wait::Forever);
        let queued = await_lock_state(&locks, "again", |state| !state.waiters.is_empty());
        tokio::select! {
            granted = attempt => panic!("granted while held: {granted:?}"),
            _ = expect_ready("the waiter is seen", queued) => {}
        }
    }
    let seen = locks.inspect("again").await.unwrap();
    assert_eq!((seen.holders.len(), seen.waiters.len()), (1, 1), "{seen:?}");
    engine.release(&ours, &grant, None).await.unwrap();
    let next = soon(stage, "it is granted", engine.acquire(&waiting, Wait::Forever)).await;
    assert!(next.unwrap().granted().expect("it waits for ever").token > grant.token);
}

/// A held lock is adopted by one other claim at most, which keeps the token. The first claim no
/// longer holds, and is not granted again.
pub async fn a_lock_is_adopted_once(stage: &dyn Stage, kind: LockKind) {
    let (engine, other, locks) = (stage.engine().await, stage.engine().await, stage.client().await);
    let [first, successor, late] =
        std::array::from_fn(|_| Claim { detachable: true, ..claim(stage, "baton", kind.mode()) });
    let grant = taken(&*engine, &first).await;
    let adopted = other.adopt(&first, &grant, &successor).await.expect("it is passed on");
    let again = other.adopt(&first, &grant, &successor).await.expect("a repetition");
    assert_eq!((adopted.token, again.token), (grant.token, grant.token));
    for engine in [&engine, &other] {
        let answer = engine.adopt(&first, &grant, &late).await;
        assert!(matches!(answer, Err(Error::Lost { .. })), "passed on twice: {answer:?}");
    }
    let answer = renewed(&*other, &first, &grant).await;
    assert!(matches!(answer, Ok(Renewal::Lost(_))), "the first one was renewed: {answer:?}");
    let answer = other.acquire(&first, Wait::No).await;
    assert!(
        !matches!(answer, Ok(Admission::Granted(_))),
        "the first one was granted again: {answer:?}"
    );
    // Neither its old client nor another can end what is no longer its own.
    for engine in [&engine, &other] {
        let answer = engine.release(&first, &grant, None).await;
        assert!(matches!(answer, Err(Error::NotHeld { .. })), "released by the first: {answer:?}");
        engine.withdraw(&first).await.unwrap();
    }
    expect_renewed(&*other, &successor, &adopted, "its successor holds").await;

    other.withdraw(&late).await.unwrap();
    let answer = other.adopt(&successor, &adopted, &late).await;
    assert!(matches!(answer, Err(Error::NotHeld { .. })), "to a withdrawn claim: {answer:?}");
    other.release(&successor, &adopted, None).await.unwrap();
    let answer = other.acquire(&first, Wait::No).await;
    assert!(!matches!(answer, Ok(Admission::Granted(_))), "the first one came back: {answer:?}");
    expect_free_soon(stage, &locks, "baton").await;
}

/// A request that arrives after its claim was withdrawn is refused.
pub async fn a_withdrawn_claim_stays_withdrawn(stage: &dyn Stage, kind: LockKind) {
    // One client: no other client ever sends a request for its claims.
    let (engine, locks) = (stage.engine().await, stage.client().await);
    let never_seen = claim(stage, "late", kind.mode());
    engine.withdraw(&never_seen).await.unwrap();
    let held = claim(stage, "late", kind.mode());
    taken(&*engine, &held).await;
    engine.withdraw(&held).await.unwrap();

    for withdrawn in [&never_seen, &held] {
        for wait in [Wait::No, Wait::Forever] {
            let late = soon(stage, "an answer", engine.acquire(withdrawn, wait)).await;
            assert!(matches!(late, Ok(Admission::Forgotten)), "it came back: {late:?}");
        }
    }
    // A late release does not enqueue it as the next claim either.
    let holder = claim(stage, "late", kind.mode());
    let grant = taken(&*engine, &holder).await;
    let mut queue = WaiterQueue::new();
    queue.join(1, &kind.new_lock(&locks, "late", options(stage)));
    let queued = await_lock_state(&locks, "late", |state| state.waiters.len() == 1);
    expect_ready("somebody else waits", queued).await;
    let next = engine.release(&holder, &grant, Some(&held)).await.unwrap();
    assert!(next.is_none(), "a late release granted it");
    let (_, guard) = soon(stage, "the one who waits has it", queue.next()).await;
    let seen = locks.inspect("late").await.unwrap();
    assert_eq!((seen.holders.len(), seen.waiters.len()), (1, 0), "{seen:?}");
    guard.release().await.unwrap();
}

async fn taken(engine: &dyn Engine, claim: &Claim) -> Grant {
    engine.acquire(claim, Wait::No).await.unwrap().granted().expect("it is free, or ours")
}

async fn renewed(engine: &dyn Engine, claim: &Claim, grant: &Grant) -> Result<Renewal> {
    engine.renew(&[(claim, grant)]).await.pop().expect("one answer to one question")
}

async fn expect_renewed(engine: &dyn Engine, claim: &Claim, grant: &Grant, what: &str) {
    let reply = renewed(engine, claim, grant).await;
    assert!(matches!(reply, Ok(Renewal::Renewed(_))), "{what}: {reply:?}");
}

fn wrong(grant: &Grant) -> Grant {
    Grant { token: Token::new(grant.token.get() + 1), ..grant.clone() }
}
