//! Processes that crash while they hold or wait.

use std::time::Duration;

use lockset::Mode;
use lockset::engine::Wait;

use crate::law_support::{
    WaiterQueue, await_lock_state, claim, expect_ready, expiry_limit, handoff_limit, options,
    within,
};
use crate::lock_kind::LockKind;
use crate::process::Process;
use crate::stage::Stage;

/// The lock of a killed process passes on: at once if the engine detects the death of a process,
/// otherwise when the lease ends.
pub async fn the_lock_of_a_killed_process_passes_on(stage: &dyn Stage, kind: LockKind) {
    let locks = stage.client().await;
    let mut victim = stage.process().await.expect("there are processes");
    let call = victim.begin_lock("orphaned", kind.mode(), stage.ttl());
    let first = victim.granted(call).await;
    let mut queue = WaiterQueue::new();
    queue.join(1, &kind.new_lock(&locks, "orphaned", options(stage)));
    let queued = await_lock_state(&locks, "orphaned", |state| state.waiters.len() == 1);
    expect_ready("the waiter is seen", queued).await;
    victim.kill();
    let limit = succession_limit(stage).await;
    let (_, next) = within(limit, "the killed holder is succeeded", queue.next()).await;
    assert!(next.token() > first);
}

/// A crashed waiter delays those behind it by one lease at most, and not at all if the engine
/// detects the death of a process.
pub async fn a_crashed_waiter_delays_others_by_one_lease_at_most(
    stage: &dyn Stage,
    kind: LockKind,
) {
    let (ours, theirs) = (stage.client().await, stage.client().await);
    let holder = kind.new_lock(&ours, "gap", options(stage)).lock().await.unwrap();
    let crash = Crash::waiting(stage, "gap", kind.mode()).await;
    let queued = await_lock_state(&ours, "gap", |state| state.waiters.len() == 1);
    expect_ready("the waiter that will crash is seen", queued).await;
    let mut queue = WaiterQueue::new();
    queue.join(2, &kind.new_lock(&theirs, "gap", options(stage)));
    let queued = await_lock_state(&ours, "gap", |state| state.waiters.len() == 2);
    expect_ready("the waiter behind it is seen", queued).await;
    let limit = crash.now(stage).await;
    holder.release().await.unwrap();
    drop(within(limit, "the one behind the crashed waiter is served", queue.next()).await);
}

/// The permits of a crashed process come back.
pub async fn permits_of_a_crashed_process_come_back(stage: &dyn Stage) {
    let locks = stage.client().await;
    let mode = Mode::Permits { take: 2, limit: 3 };
    let crash = Crash::waiting(stage, "licences", mode).await;
    let granted = await_lock_state(&locks, "licences", |state| state.holders.len() == 1);
    expect_ready("two permits are out", granted).await;
    let semaphore = locks.semaphore("licences", 3).unwrap().with(options(stage));
    assert!(semaphore.try_acquire_many(2).await.unwrap().is_none(), "one permit is left");
    assert!(semaphore.try_acquire().await.unwrap().is_some(), "one permit is left");
    let limit = crash.now(stage).await;
    let all = within(limit, "the permits come back", semaphore.acquire_many(3)).await.unwrap();
    all.release().await.unwrap();
}

/// Maximum time until the lock of a dead process passes on.
async fn succession_limit(stage: &dyn Stage) -> Duration {
    match stage.engine().await.capabilities().sees_death {
        true => handoff_limit(stage),
        false => expiry_limit(stage),
    }
}

/// A client that requests a lock and then crashes: a process if the stage has processes, otherwise
/// a task that is aborted.
enum Crash {
    Process(Box<Process>),
    Task(tokio::task::JoinHandle<()>),
}

impl Crash {
    async fn waiting(stage: &dyn Stage, name: &str, mode: Mode) -> Self {
        if let Some(mut process) = stage.process().await {
            process.begin_lock(name, mode, stage.ttl());
            return Crash::Process(Box::new(process));
        }
        let (engine, claim) = (stage.engine().await, claim(stage, name, mode));
        Crash::Task(tokio::spawn(async move {
            let _ = engine.acquire(&claim, Wait::Forever).await.unwrap();
            std::future::pending().await
        }))
    }

    /// Crashes it, and returns how long its lock may take to pass on.
    async fn now(self, stage: &dyn Stage) -> Duration {
        match self {
            Crash::Process(mut process) => {
                process.kill();
                succession_limit(stage).await
            }
            Crash::Task(task) => {
                task.abort();
                expiry_limit(stage)
            }
        }
    }
}
