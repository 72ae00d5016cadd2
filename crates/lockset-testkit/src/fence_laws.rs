//! What every fence store promises, as laws on a register that it guards.
//!
//! A test implements [`FencedRegister`] for its store and calls
//! [`fence_suite!`](crate::fence_suite). `tests/fence_mutants.rs` has a broken register for each
//! law.

use std::sync::Arc;

use async_trait::async_trait;
use lockset::fence::{FenceError, FenceMark, FencingToken};
use lockset::{Name, Token};

/// Registers whose writes a fence store guards, and the means to break the store.
#[async_trait]
pub trait FencedRegister: Send + Sync {
    /// Writes `value` into the register `resource`, guarded by the fence.
    async fn write(
        &self,
        resource: &Name,
        lock: &Name,
        token: &FencingToken,
        value: &str,
    ) -> Result<(), FenceError>;

    /// What the register `resource` contains, read without the fence.
    async fn read(&self, resource: &Name) -> Option<String>;

    /// All marks of the store.
    async fn marks(&self) -> Result<Vec<FenceMark>, FenceError>;

    /// Ends the resource and starts it again, with the data it had.
    async fn restart(&self);

    /// Makes the store unreachable or unusable until it is restarted.
    async fn stop(&self);
}

/// A law: it panics if the register breaks it. The register has no marks when it begins.
pub type FenceLaw = fn(Arc<dyn FencedRegister>) -> futures_util::future::BoxFuture<'static, ()>;

/// All laws, by name.
pub const LAWS: &[(&str, FenceLaw)] = &[
    ("an_equal_token_is_admitted_again", |r| Box::pin(an_equal_token_is_admitted_again(r))),
    ("a_lower_token_changes_nothing", |r| Box::pin(a_lower_token_changes_nothing(r))),
    ("a_greater_token_becomes_the_mark", |r| Box::pin(a_greater_token_becomes_the_mark(r))),
    ("a_mark_survives_a_restart", |r| Box::pin(a_mark_survives_a_restart(r))),
    ("locks_have_marks_of_their_own", |r| Box::pin(locks_have_marks_of_their_own(r))),
    ("resources_have_marks_of_their_own", |r| Box::pin(resources_have_marks_of_their_own(r))),
    ("a_token_of_another_lock_is_rejected", |r| Box::pin(a_token_of_another_lock_is_rejected(r))),
    ("the_check_is_atomic_with_the_write", |r| Box::pin(the_check_is_atomic_with_the_write(r))),
    ("a_stopped_store_rejects", |r| Box::pin(a_stopped_store_rejects(r))),
    ("names_and_tokens_of_any_size_are_kept", |r| {
        Box::pin(names_and_tokens_of_any_size_are_kept(r))
    }),
];

/// Runs all laws as tests. `$register` is an async expression that makes a register without marks.
#[macro_export]
macro_rules! fence_suite {
    ($register:expr) => {
        $crate::fence_suite!(@each $register;
            an_equal_token_is_admitted_again
            a_lower_token_changes_nothing
            a_greater_token_becomes_the_mark
            a_mark_survives_a_restart
            locks_have_marks_of_their_own
            resources_have_marks_of_their_own
            a_token_of_another_lock_is_rejected
            the_check_is_atomic_with_the_write
            a_stopped_store_rejects
            names_and_tokens_of_any_size_are_kept
        );
    };
    (@each $register:expr; $($law:ident)+) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $law() {
            $crate::fence_laws::check(stringify!($law), std::sync::Arc::new($register.await)).await;
        }
    )+

        #[test]
        fn the_suite_has_every_law() {
            let laws = $crate::fence_laws::LAWS.iter().map(|(name, _)| *name);
            assert_eq!(laws.collect::<Vec<_>>(), [$(stringify!($law)),+]);
        }
    };
}

/// Checks the law of this name.
///
/// # Panics
/// If the register breaks it, or if there is no such law.
pub async fn check(law: &str, register: Arc<dyn FencedRegister>) {
    let found = LAWS.iter().find(|(name, _)| *name == law);
    let (_, law) = found.unwrap_or_else(|| panic!("there is no law {law}"));
    law(register).await;
}

const LOCK: &str = "orders/42";

async fn write(
    register: &dyn FencedRegister,
    resource: &str,
    lock: &str,
    token: u64,
    value: &str,
) -> Result<(), FenceError> {
    let token = FencingToken::new(lock, Token::new(token)).unwrap();
    let resource = resource.parse().unwrap();
    register.write(&resource, &lock.parse().unwrap(), &token, value).await
}

async fn read(register: &dyn FencedRegister, resource: &str) -> Option<String> {
    register.read(&resource.parse().unwrap()).await
}

async fn mark(register: &dyn FencedRegister, resource: &str, lock: &str) -> Option<u64> {
    let marks = register.marks().await.unwrap();
    let of_lock =
        |mark: &&FenceMark| mark.resource.as_str() == resource && mark.lock.as_str() == lock;
    let mut found = marks.iter().filter(of_lock).map(|mark| mark.token.get());
    let token = found.next();
    assert_eq!(found.next(), None, "{resource} has two marks for {lock}");
    token
}

fn assert_stale(outcome: Result<(), FenceError>, sent: u64, expected: u64) {
    match outcome {
        Err(FenceError::Stale { token, seen, .. }) => {
            assert_eq!((token.get(), seen.get()), (sent, expected));
        }
        other => panic!("token {sent} after {expected} was not rejected as stale: {other:?}"),
    }
}

async fn an_equal_token_is_admitted_again(register: Arc<dyn FencedRegister>) {
    write(&*register, "stock", LOCK, 7, "one").await.unwrap();
    write(&*register, "stock", LOCK, 7, "two").await.unwrap();
    assert_eq!(read(&*register, "stock").await.as_deref(), Some("two"));
    assert_eq!(mark(&*register, "stock", LOCK).await, Some(7));
}

async fn a_lower_token_changes_nothing(register: Arc<dyn FencedRegister>) {
    write(&*register, "stock", LOCK, 8, "new").await.unwrap();
    for token in [7, 1] {
        assert_stale(write(&*register, "stock", LOCK, token, "late").await, token, 8);
        assert_eq!(read(&*register, "stock").await.as_deref(), Some("new"));
        assert_eq!(mark(&*register, "stock", LOCK).await, Some(8));
    }
}

async fn a_greater_token_becomes_the_mark(register: Arc<dyn FencedRegister>) {
    assert_eq!(mark(&*register, "stock", LOCK).await, None);
    for token in [1, 2, 1_763_000_000_000_000] {
        write(&*register, "stock", LOCK, token, "x").await.unwrap();
        assert_eq!(mark(&*register, "stock", LOCK).await, Some(token));
    }
    assert_stale(write(&*register, "stock", LOCK, 3, "y").await, 3, 1_763_000_000_000_000);
}

async fn a_mark_survives_a_restart(register: Arc<dyn FencedRegister>) {
    write(&*register, "stock", LOCK, 8, "new").await.unwrap();
    register.restart().await;
    assert_stale(write(&*register, "stock", LOCK, 7, "late").await, 7, 8);
    assert_eq!(read(&*register, "stock").await.as_deref(), Some("new"));
    write(&*register, "stock", LOCK, 9, "newer").await.unwrap();
}

async fn locks_have_marks_of_their_own(register: Arc<dyn FencedRegister>) {
    write(&*register, "stock", "orders/42", 8, "a").await.unwrap();
    write(&*register, "stock", "orders/43", 3, "b").await.unwrap();
    write(&*register, "stock", "orders", 2, "c").await.unwrap();
    assert_eq!(mark(&*register, "stock", "orders/42").await, Some(8));
    assert_eq!(mark(&*register, "stock", "orders/43").await, Some(3));
    assert_stale(write(&*register, "stock", "orders/42", 7, "late").await, 7, 8);
}

async fn resources_have_marks_of_their_own(register: Arc<dyn FencedRegister>) {
    write(&*register, "stock", LOCK, 8, "a").await.unwrap();
    write(&*register, "invoices", LOCK, 3, "b").await.unwrap();
    assert_eq!(mark(&*register, "invoices", LOCK).await, Some(3));
    assert_stale(write(&*register, "stock", LOCK, 7, "late").await, 7, 8);
    assert_eq!(read(&*register, "invoices").await.as_deref(), Some("b"));
}

async fn a_token_of_another_lock_is_rejected(register: Arc<dyn FencedRegister>) {
    let other = FencingToken::new("orders/43", Token::new(99)).unwrap();
    let (resource, lock) = ("stock".parse().unwrap(), LOCK.parse().unwrap());
    let outcome = register.write(&resource, &lock, &other, "wrong").await;
    assert!(matches!(outcome, Err(FenceError::WrongLock { .. })), "{outcome:?}");
    assert_eq!(read(&*register, "stock").await, None);
    assert_eq!(register.marks().await.unwrap(), []);
}

/// Writers with different tokens at once: whatever their order, the register ends with the value of
/// the greatest one, and no write is acknowledged after a greater one was.
async fn the_check_is_atomic_with_the_write(register: Arc<dyn FencedRegister>) {
    const WRITERS: u64 = 8;
    for round in 0..6 {
        let first = 1 + round * WRITERS;
        let writers = (first..first + WRITERS).map(|token| {
            let register = register.clone();
            tokio::spawn(async move {
                write(&*register, "stock", LOCK, token, &token.to_string()).await
            })
        });
        // Collected, so that all are started before the first is awaited.
        for (token, writer) in (first..).zip(writers.collect::<Vec<_>>()) {
            match writer.await.unwrap() {
                Ok(()) => {}
                Err(error) => assert!(error.is_stale(), "token {token}: {error}"),
            }
        }
        let greatest = (first + WRITERS - 1).to_string();
        assert_eq!(read(&*register, "stock").await.as_deref(), Some(greatest.as_str()));
        assert_eq!(mark(&*register, "stock", LOCK).await, Some(first + WRITERS - 1));
    }
}

async fn a_stopped_store_rejects(register: Arc<dyn FencedRegister>) {
    write(&*register, "stock", LOCK, 8, "a").await.unwrap();
    register.stop().await;
    let outcome = write(&*register, "stock", LOCK, 9, "b").await;
    assert!(matches!(outcome, Err(FenceError::Store { .. })), "{outcome:?}");
    assert!(register.marks().await.is_err(), "a stopped store lists its marks");
    register.restart().await;
    assert_eq!(read(&*register, "stock").await.as_deref(), Some("a"));
    assert_stale(write(&*register, "stock", LOCK, 7, "late").await, 7, 8);
}

async fn names_and_tokens_of_any_size_are_kept(register: Arc<dyn FencedRegister>) {
    let greatest = u64::try_from(i64::MAX).unwrap();
    let long = "x".repeat(Name::MAX_LEN);
    for name in ["ä ö", "a'b\"c", "100%", "a=b", "A", "a", "{a}b", "a:b", long.as_str()] {
        write(&*register, name, name, greatest, "v").await.unwrap();
        assert_stale(
            write(&*register, name, name, greatest - 1, "w").await,
            greatest - 1,
            greatest,
        );
        assert_eq!(mark(&*register, name, name).await, Some(greatest), "{name}");
        assert_eq!(read(&*register, name).await.as_deref(), Some("v"), "{name}");
    }
    assert_eq!(register.marks().await.unwrap().len(), 9);
}
