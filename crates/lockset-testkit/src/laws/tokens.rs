//! Tokens strictly grow per name.

use lockset::engine::{Claim, Engine, Grant, Wait};
use lockset::{Break, Error, Token};

use crate::law_support::{claim, expiry_limit, options, soon, within};
use crate::lock_kind::LockKind;
use crate::stage::Stage;

/// Tokens grow over releases, expiries and forced releases, whichever client is granted.
pub async fn tokens_only_grow(stage: &dyn Stage, kind: LockKind) {
    let (ours, theirs) = (stage.client().await, stage.client().await);
    let locks = [&ours, &theirs].map(|client| kind.new_lock(client, "growing", options(stage)));
    let mut seen = Vec::new();
    for lock in locks.iter().cycle().take(4) {
        let guard = soon(stage, "it is free", lock.lock()).await.unwrap();
        seen.push(guard.token());
        guard.release().await.unwrap();
    }
    for how in [Break::Now, Break::WhenLeaseEnds] {
        let broken = locks[0].lock().await.unwrap();
        seen.push(broken.token());
        ours.force_release("growing", how).await.unwrap();
        let limit = expiry_limit(stage);
        let next = within(limit, "it is free again", locks[1].lock()).await.unwrap();
        seen.push(next.token());
        next.release().await.unwrap();
    }
    let left = claim(stage, "growing", kind.mode());
    let grant =
        stage.engine().await.acquire(&left, Wait::No).await.unwrap().granted().expect("it is free");
    seen.push(grant.token);
    let limit = expiry_limit(stage);
    let last = within(limit, "a lease ends", locks[0].lock()).await.unwrap();
    seen.push(last.token());
    assert!(seen.is_sorted_by(|a, b| a < b), "tokens do not grow: {seen:?}");
    assert!(last.token() <= Token::MAX, "too great for languages whose numbers are doubles");
}

/// A restarted backend continues where it was.
pub async fn tokens_grow_over_a_restart(stage: &dyn Stage, kind: LockKind) {
    let mut last = Token::new(0);
    for _ in 0..3 {
        let locks = stage.client().await;
        for _ in 0..3 {
            let guard = kind.new_lock(&locks, "durable", options(stage)).lock().await.unwrap();
            assert!(guard.token() > last, "{} after {last}", guard.token());
            last = guard.token();
            guard.release().await.unwrap();
        }
        locks.close().await.unwrap();
        stage.restart().await;
    }
}

/// With a floor, the caller is responsible for the clock: the token is exactly the greater of the
/// fence plus one and the floor, because a quorum needs the same value from several backends.
pub async fn a_token_floor_is_exact(stage: &dyn Stage) {
    let engine = stage.engine().await;
    let first = granted_above(stage, &*engine, None).await;
    for (floor, expected) in [
        (first + 1000, first + 1000),
        (1, first + 1001),
        (first + 1001, first + 1002),
        (first + 1003, first + 1003),
    ] {
        let token = granted_above(stage, &*engine, Some(floor)).await;
        assert_eq!(token - first, expected - first, "with the floor {floor}");
    }
}

/// Raising lifts the fence of a held lock and never lowers it.
pub async fn raise_lifts_the_fence_and_never_lowers_it(stage: &dyn Stage) {
    let engine = stage.engine().await;
    let claim = claim(stage, "floor", LockKind::Mutex.mode());
    let first = engine.acquire(&claim, Wait::No).await.unwrap().granted().expect("it is free");
    let above = Token::new(first.token.get() + 10);
    let node = engine.as_fenced_node().expect("its fence can be raised");
    let raised = node.raise(&claim, &first, above).await.unwrap();
    assert_eq!(raised.token, above);
    assert!(renews(&*engine, &claim, &raised).await, "the raised token is the claim's");
    assert!(!renews(&*engine, &claim, &first).await, "the old one no longer is");

    let below = Token::new(above.get() - 1);
    let lowered = node.raise(&claim, &raised, below).await;
    assert!(matches!(lowered, Err(Error::Lost { .. })), "it was lowered: {lowered:?}");
    let stale = node.raise(&claim, &first, Token::new(above.get() + 5)).await;
    assert!(matches!(stale, Err(Error::Lost { .. })), "by an old token: {stale:?}");
    engine.release(&claim, &raised, None).await.unwrap();
    assert_eq!(granted_above(stage, &*engine, Some(1)).await, above.get() + 1);
}

async fn granted_above(stage: &dyn Stage, engine: &dyn Engine, floor: Option<u64>) -> u64 {
    let claim =
        Claim { floor: floor.map(Token::new), ..claim(stage, "floor", LockKind::Mutex.mode()) };
    let grant = engine.acquire(&claim, Wait::No).await.unwrap().granted().expect("it is free");
    engine.release(&claim, &grant, None).await.unwrap();
    grant.token.get()
}

async fn renews(engine: &dyn Engine, claim: &Claim, grant: &Grant) -> bool {
    engine
        .renew(&[(claim, grant)])
        .await
        .pop()
        .expect("one answer")
        .is_ok_and(|reply| reply.renewed().is_some())
}
