//! Mutexes that outlive a panic, and futures that are watched.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex`. A panic elsewhere never leaves what our mutexes protect half changed, so a
/// poisoned one is still good.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Awaits `future`. If it is not ready at once, `begin` is called before the first wait, and what
/// it returned is returned too.
pub(crate) async fn on_first_wait<F: Future, T>(
    future: F,
    begin: impl FnOnce() -> T,
) -> (F::Output, Option<T>) {
    let mut future = pin!(future);
    let (mut begin, mut begun) = (Some(begin), None);
    let output = poll_fn(|context| {
        let polled = future.as_mut().poll(context);
        if polled.is_pending()
            && let Some(begin) = begin.take()
        {
            begun = Some(begin());
        }
        polled
    })
    .await;
    (output, begun)
}
