//! Runs laws on a stage, and makes tests of them: the [`suite!`](macro@crate::suite) macro and the
//! functions that its tests call.

use std::sync::mpsc;
use std::time::Duration;

use futures_core::future::LocalBoxFuture;

use crate::laws::{ALL, Law, LawBody};
use crate::lock_kind::LockKind;
use crate::stage::{Need, Stage, Time};

/// Maximum duration of a law in real time. A law that takes longer hangs, so it fails.
const LONGEST: Duration = Duration::from_secs(120);
/// The same in virtual time, which costs nothing.
const LONGEST_VIRTUAL: Duration = Duration::from_secs(3600);

/// Makes a fresh stage. It is called inside the runtime of the law.
pub type StageFactory = fn() -> LocalBoxFuture<'static, Box<dyn Stage>>;

/// Runs one law on a fresh stage, on a thread named `title`.
///
/// If the stage lacks the mode of `kind`, [`an_unsupported_mode_is_refused_at_once`] runs instead.
///
/// [`an_unsupported_mode_is_refused_at_once`]: crate::laws::an_unsupported_mode_is_refused_at_once
///
/// # Errors
/// The panic message of the law, or that it hung.
pub fn run_law(
    title: &str,
    law: &'static Law,
    kind: LockKind,
    time: Time,
    stage_factory: StageFactory,
) -> Result<(), String> {
    run_on_thread(title, time, move || {
        Box::pin(async move {
            let stage = stage_factory().await;
            match kind_need(kind) {
                Some(need) if law.runs_for_each_kind() && !need.is_met(&*stage).await => {
                    crate::laws::an_unsupported_mode_is_refused_at_once(&*stage).await;
                }
                _ => law.run(&*stage, kind).await,
            }
        })
    })
}

/// Runs `body` on a thread and a runtime of its own, so that a hanging task, thread or busy loop
/// blocks only that thread.
///
/// # Errors
/// The panic message, or that it hung.
pub fn run_on_thread<F>(title: &str, time: Time, body: F) -> Result<(), String>
where
    F: FnOnce() -> LocalBoxFuture<'static, ()> + Send + 'static,
{
    let (done, ended) = mpsc::channel();
    let thread = std::thread::Builder::new().name(title.to_owned()).spawn(move || {
        // Dropping it, also in a panic, signals that the law has ended.
        let _done: mpsc::Sender<()> = done;
        let (runtime, limit) = match time {
            Time::Virtual => (paused_runtime(), LONGEST_VIRTUAL),
            Time::Real => (threaded_runtime(), LONGEST),
        };
        let outcome = runtime.block_on(async { tokio::time::timeout(limit, body()).await });
        runtime.shutdown_background();
        outcome.unwrap_or_else(|_| panic!("it hung for {limit:?}"));
    });
    let thread = thread.unwrap();
    match ended.recv_timeout(LONGEST * 2) {
        Err(mpsc::RecvTimeoutError::Timeout) => Err(format!("it hung for {:?}", LONGEST * 2)),
        _ => thread.join().map_err(|panic| message(&*panic)),
    }
}

fn paused_runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap()
}

fn threaded_runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

fn message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "?".to_owned())
}

fn kind_need(kind: LockKind) -> Option<Need> {
    match kind {
        LockKind::Mutex | LockKind::Writer => None,
        LockKind::OnePermit => Some(Need::Permits),
    }
}

/// Runs a law that the engine obeys, and panics if it is broken. All needs of the law must be met.
pub fn assert_law_holds(name: &str, kind: LockKind, time: Time, stage_factory: StageFactory) {
    let law = Law::named(name);
    if let Err(broken) = run_law(name, law, kind, time, stage_factory) {
        panic!("{name} ({kind:?}) is broken: {broken}");
    }
}

/// Checks that a skipped law has a need that the stage does not meet, and panics otherwise.
pub fn assert_law_skipped(name: &str, time: Time, stage_factory: StageFactory) {
    let law = Law::named(name);
    let outcome = run_on_thread(name, time, move || {
        Box::pin(async move {
            let stage = stage_factory().await;
            let unmet = unmet_needs(law, &*stage).await;
            assert!(!unmet.is_empty(), "all its needs are met: {:?}", law.needs);
        })
    });
    if let Err(why) = outcome {
        panic!("{name} must not be skipped: {why}");
    }
}

async fn unmet_needs(law: &Law, stage: &dyn Stage) -> Vec<Need> {
    let mut unmet = Vec::new();
    for need in law.needs {
        if !need.is_met(stage).await {
            unmet.push(*need);
        }
    }
    unmet
}

/// Checks that every law is in exactly one list, and in the one that fits what the stage provides.
pub fn assert_complete(lists: SuiteLists, time: Time, stage_factory: StageFactory) {
    let outcome = run_on_thread("is_complete", time, move || {
        Box::pin(async move {
            let stage = stage_factory().await;
            for law in ALL {
                let met = unmet_needs(law, &*stage).await.is_empty();
                let list = match (met, law.runs_for_each_kind()) {
                    (false, _) => "skipped",
                    (true, true) => "for_each_kind",
                    (true, false) => "once",
                };
                assert_eq!(lists.of(law.name), [list], "where {} belongs", law.name);
            }
        })
    });
    if let Err(why) = outcome {
        panic!("the suite is not complete: {why}");
    }
}

/// The lists of laws of one suite.
#[derive(Clone, Copy, Debug)]
pub struct SuiteLists {
    /// Laws that run once.
    pub once: &'static [&'static str],
    /// Laws that run once for each [`LockKind`].
    pub for_each_kind: &'static [&'static str],
    /// Laws that do not run, because a need is not met.
    pub skipped: &'static [&'static str],
}

impl SuiteLists {
    fn of(&self, name: &str) -> Vec<&'static str> {
        [("once", self.once), ("for_each_kind", self.for_each_kind), ("skipped", self.skipped)]
            .into_iter()
            .flat_map(|(list, names)| names.iter().filter(|n| **n == name).map(move |_| list))
            .collect()
    }
}

impl Law {
    /// The law of this name.
    pub fn named(name: &str) -> &'static Law {
        ALL.iter().find(|law| law.name == name).unwrap_or_else(|| panic!("no law {name}"))
    }

    /// Whether it runs once for each [`LockKind`].
    pub fn runs_for_each_kind(&self) -> bool {
        matches!(self.body, LawBody::ForEachKind(_))
    }

    /// Runs it, and panics if it is broken.
    pub async fn run(&self, stage: &dyn Stage, kind: LockKind) {
        match self.body {
            LawBody::Once(law) => law(stage).await,
            LawBody::ForEachKind(law) => law(stage, kind).await,
        }
    }
}

/// Makes one test per law (one per law and [`LockKind`] for those in `for_each_kind`), and one test
/// that no law is missing.
///
/// ```text
/// suite! {
///     memory;
///     time: Virtual;
///     stage: MemoryStage::start();
///     once: [names_are_independent];
///     for_each_kind: [two_claims_never_hold_at_once];
///     skipped: [the_lock_of_a_killed_process_passes_on];
/// }
/// ```
#[macro_export]
macro_rules! suite {
    (
        $suite:ident;
        time: $time:ident;
        stage: $stage:expr;
        once: [$($once:ident),* $(,)?];
        for_each_kind: [$($per_kind:ident),* $(,)?];
        skipped: [$($skipped:ident),* $(,)?];
    ) => {
        mod $suite {
            #[allow(unused_imports)]
            use super::*;
            use $crate::suite::{StageFactory, SuiteLists, assert_complete};
            use $crate::suite::{assert_law_holds, assert_law_skipped};
            use $crate::{LockKind, Stage, Time};

            const STAGE: StageFactory = || Box::pin(async { Box::new($stage) as Box<dyn Stage> });

            #[test]
            fn no_law_is_forgotten() {
                let lists = SuiteLists {
                    once: &[$(stringify!($once)),*],
                    for_each_kind: &[$(stringify!($per_kind)),*],
                    skipped: &[$(stringify!($skipped)),*],
                };
                assert_complete(lists, Time::$time, STAGE);
            }

            $(
                #[test]
                fn $once() {
                    assert_law_holds(stringify!($once), LockKind::Mutex, Time::$time, STAGE);
                }
            )*

            $(
                mod $per_kind {
                    use super::*;

                    const LAW: &str = stringify!($per_kind);

                    #[test]
                    fn as_a_mutex() {
                        assert_law_holds(LAW, LockKind::Mutex, Time::$time, STAGE);
                    }

                    #[test]
                    fn as_a_writer() {
                        assert_law_holds(LAW, LockKind::Writer, Time::$time, STAGE);
                    }

                    #[test]
                    fn as_one_permit() {
                        assert_law_holds(LAW, LockKind::OnePermit, Time::$time, STAGE);
                    }
                }
            )*

            $(
                #[test]
                fn $skipped() {
                    assert_law_skipped(stringify!($skipped), Time::$time, STAGE);
                }
            )*
        }
    };
}
