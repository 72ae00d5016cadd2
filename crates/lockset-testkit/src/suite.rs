//! How laws become tests.

use std::sync::mpsc;
use std::time::Duration;

use futures_core::future::LocalBoxFuture;

use crate::form::Form;
use crate::laws::{ALL, Body, Law};
use crate::stage::{Need, Stage, Time};

/// A law that takes longer than this on its own clock is broken: something waits for ever.
const LONGEST: Duration = Duration::from_secs(120);
/// The same for virtual time, which is free.
const LONGEST_VIRTUAL: Duration = Duration::from_secs(3600);

/// Makes a stage, inside the runtime of the law.
pub type Setting = fn() -> LocalBoxFuture<'static, Box<dyn Stage>>;

/// Plays one law on one stage, on a thread of this title. What was broken, in words, is the error.
///
/// # Errors
/// The message of the law that panicked, or that it hung.
pub fn play(
    title: &str,
    law: &'static Law,
    form: Form,
    time: Time,
    setting: Setting,
) -> Result<(), String> {
    on_a_thread(title, time, move || {
        Box::pin(async move {
            let stage = setting().await;
            match form_need(form) {
                Some(need) if law.is_in_every_form() && !need.is_met(&*stage).await => {
                    crate::laws::a_refused_mode_is_refused_not_hung(&*stage).await;
                }
                _ => law.run(&*stage, form).await,
            }
        })
    })
}

/// Runs `body` on a thread and a runtime of its own, so that whatever hangs — a task, a thread, a
/// busy loop — only hangs that thread.
///
/// # Errors
/// The message of a panic, or that it hung.
pub fn on_a_thread<F>(title: &str, time: Time, body: F) -> Result<(), String>
where
    F: FnOnce() -> LocalBoxFuture<'static, ()> + Send + 'static,
{
    let (done, ended) = mpsc::channel();
    let thread = std::thread::Builder::new().name(title.to_owned()).spawn(move || {
        // Dropped, also by a panic, it tells that the law has ended.
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

fn form_need(form: Form) -> Option<Need> {
    match form {
        Form::Mutex | Form::Writer => None,
        Form::OnePermit => Some(Need::Permits),
    }
}

/// Plays a law that the engine claims to obey; all its needs must be met.
pub fn obeys(name: &str, form: Form, time: Time, setting: Setting) {
    let law = Law::named(name);
    if let Err(broken) = play(name, law, form, time, setting) {
        panic!("{name} ({form:?}) is broken: {broken}");
    }
}

/// Looks whether a law that the engine does not obey has a need that is really not met.
pub fn refuses(name: &str, time: Time, setting: Setting) {
    let law = Law::named(name);
    let outcome = on_a_thread(name, time, move || {
        Box::pin(async move {
            let stage = setting().await;
            let unmet = unmet_needs(law, &*stage).await;
            assert!(!unmet.is_empty(), "all its needs are met: {:?}", law.needs);
        })
    });
    if let Err(why) = outcome {
        panic!("{name} must be obeyed: {why}");
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

/// Every law is in exactly one of the lists, and in the right one by what the stage can do.
pub fn is_complete(lists: Lists, time: Time, setting: Setting) {
    let outcome = on_a_thread("is_complete", time, move || {
        Box::pin(async move {
            let stage = setting().await;
            for law in ALL {
                let met = unmet_needs(law, &*stage).await.is_empty();
                let list = match (met, law.is_in_every_form()) {
                    (false, _) => "refuses",
                    (true, true) => "obeys_in_every_form",
                    (true, false) => "obeys",
                };
                assert_eq!(lists.of(law.name), [list], "where {} belongs", law.name);
            }
        })
    });
    if let Err(why) = outcome {
        panic!("the suite is not complete: {why}");
    }
}

/// The lists of one suite.
#[derive(Clone, Copy, Debug)]
pub struct Lists {
    /// Laws that are played once.
    pub obeys: &'static [&'static str],
    /// Laws that are played once in each form.
    pub obeys_in_every_form: &'static [&'static str],
    /// Laws that are not played, because a need is not met.
    pub refuses: &'static [&'static str],
}

impl Lists {
    fn of(&self, name: &str) -> Vec<&'static str> {
        [
            ("obeys", self.obeys),
            ("obeys_in_every_form", self.obeys_in_every_form),
            ("refuses", self.refuses),
        ]
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

    /// Whether it is played once in each form.
    pub fn is_in_every_form(&self) -> bool {
        matches!(self.body, Body::InEveryForm(_))
    }

    /// Plays it; panics if it is broken.
    pub async fn run(&self, stage: &dyn Stage, form: Form) {
        match self.body {
            Body::Once(law) => law(stage).await,
            Body::InEveryForm(law) => law(stage, form).await,
        }
    }
}

/// One test per law and form, and one that no law was forgotten.
///
/// ```text
/// suite! {
///     memory;
///     time: Virtual;
///     stage: MemoryStage::start();
///     obeys: [names_are_independent];
///     obeys_in_every_form: [two_claims_never_hold_at_once];
///     refuses: [a_killed_holder_process_is_succeeded];
/// }
/// ```
#[macro_export]
macro_rules! suite {
    (
        $suite:ident;
        time: $time:ident;
        stage: $stage:expr;
        obeys: [$($once:ident),* $(,)?];
        obeys_in_every_form: [$($formed:ident),* $(,)?];
        refuses: [$($refused:ident),* $(,)?];
    ) => {
        mod $suite {
            #[allow(unused_imports)]
            use super::*;
            use $crate::suite::{Lists, Setting, is_complete, obeys, refuses};
            use $crate::{Form, Stage, Time};

            const SETTING: Setting = || Box::pin(async { Box::new($stage) as Box<dyn Stage> });

            #[test]
            fn no_law_is_forgotten() {
                let lists = Lists {
                    obeys: &[$(stringify!($once)),*],
                    obeys_in_every_form: &[$(stringify!($formed)),*],
                    refuses: &[$(stringify!($refused)),*],
                };
                is_complete(lists, Time::$time, SETTING);
            }

            $(
                #[test]
                fn $once() {
                    obeys(stringify!($once), Form::Mutex, Time::$time, SETTING);
                }
            )*

            $(
                mod $formed {
                    use super::*;

                    #[test]
                    fn as_a_mutex() {
                        obeys(stringify!($formed), Form::Mutex, Time::$time, SETTING);
                    }

                    #[test]
                    fn as_a_writer() {
                        obeys(stringify!($formed), Form::Writer, Time::$time, SETTING);
                    }

                    #[test]
                    fn as_one_permit() {
                        obeys(stringify!($formed), Form::OnePermit, Time::$time, SETTING);
                    }
                }
            )*

            $(
                #[test]
                fn $refused() {
                    refuses(stringify!($refused), Time::$time, SETTING);
                }
            )*
        }
    };
}
