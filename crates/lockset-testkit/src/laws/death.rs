//! Processes that end without a last word.

use std::time::Duration;

use lockset::Mode;
use lockset::engine::Wait;

use crate::form::Form;
use crate::process::Process;
use crate::stage::Stage;
use crate::tools::{Line, claim, lapse, patience, prepared, state_with, options, within};

/// A holder whose process is killed is succeeded: at once where the engine sees it die, when its
/// lease ends where it does not.
pub async fn a_killed_holder_process_is_succeeded(stage: &dyn Stage, form: Form) {
    let locks = stage.client().await;
    let mut victim = stage.process().await.expect("there are processes");
    let call = victim.begin_lock("orphaned", form.mode(), stage.ttl());
    let first = victim.granted(call).await;
    let mut line = Line::new();
    line.join(1, &form.of(&locks, "orphaned", options(stage)));
    let queued = state_with(&locks, "orphaned", |state| state.waiters.len() == 1);
    prepared("the waiter is seen", queued).await;
    victim.kill();
    let limit = mourning(stage).await;
    let (_, next) = within(limit, "the killed holder is succeeded", line.next()).await;
    assert!(next.token() > first);
}

/// A waiter that vanished holds up those behind it for one lease at most, and not at all where the
/// engine sees it die.
pub async fn a_crashed_waiter_delays_nobody_for_long(stage: &dyn Stage, form: Form) {
    let (ours, theirs) = (stage.client().await, stage.client().await);
    let holder = form.of(&ours, "gap", options(stage)).lock().await.unwrap();
    let crash = Crash::waiting(stage, "gap", form.mode()).await;
    let queued = state_with(&ours, "gap", |state| state.waiters.len() == 1);
    prepared("the waiter that will crash is seen", queued).await;
    let mut line = Line::new();
    line.join(2, &form.of(&theirs, "gap", options(stage)));
    let queued = state_with(&ours, "gap", |state| state.waiters.len() == 2);
    prepared("the waiter behind it is seen", queued).await;
    let limit = crash.now(stage).await;
    holder.release().await.unwrap();
    drop(within(limit, "the one behind the crashed waiter is served", line.next()).await);
}

/// Permits of a process that died come back.
pub async fn a_crash_gives_permits_back(stage: &dyn Stage) {
    let locks = stage.client().await;
    let mode = Mode::Permits { take: 2, limit: 3 };
    let crash = Crash::waiting(stage, "licences", mode).await;
    let granted = state_with(&locks, "licences", |state| state.holders.len() == 1);
    prepared("two permits are out", granted).await;
    let semaphore = locks.semaphore("licences", 3).unwrap().with(options(stage)).unwrap();
    assert!(semaphore.try_acquire(2).await.unwrap().is_none(), "one permit is left");
    assert!(semaphore.try_acquire(1).await.unwrap().is_some(), "one permit is left");
    let limit = crash.now(stage).await;
    let all = within(limit, "the permits come back", semaphore.acquire(3)).await.unwrap();
    all.release().await.unwrap();
}

/// How long it may take until a death counts.
async fn mourning(stage: &dyn Stage) -> Duration {
    match stage.engine().await.capabilities().sees_death {
        true => patience(stage),
        false => lapse(stage),
    }
}

/// A client that has asked for a lock and will not live to give it back: a process where there
/// are any, otherwise a request that nobody asks about again.
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
            engine.acquire(&claim, Wait::Forever).await.unwrap();
            std::future::pending().await
        }))
    }

    /// It ends; answers how long its death may take to count.
    async fn now(self, stage: &dyn Stage) -> Duration {
        match self {
            Crash::Process(mut process) => {
                process.kill();
                mourning(stage).await
            }
            Crash::Task(task) => {
                task.abort();
                lapse(stage)
            }
        }
    }
}
