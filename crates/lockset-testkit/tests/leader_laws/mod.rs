//! The laws about loss on servers whose leader dies in the middle of them.

macro_rules! leader_laws {
    ($start:expr) => {
        /// The others stop, too, so that nobody leads.
        mod without_a_leader {
            #[allow(unused_imports)]
            use super::*;

            leader_laws!(
                ($start)(env!("CARGO_BIN_EXE_actor")).whose_leader_dies(),
                a_frozen_server_loses_the_guard_by_its_deadline: [Mutex, Writer, OnePermit],
                a_guard_never_says_held_after_its_deadline: [Mutex, Writer, OnePermit]
            );
        }

        /// The others live on, and elect another.
        mod with_another_leader {
            #[allow(unused_imports)]
            use super::*;

            leader_laws!(
                ($start)(env!("CARGO_BIN_EXE_actor")).whose_leader_is_succeeded(),
                a_break_now_is_told_at_once: [Mutex, Writer, OnePermit],
                a_gentle_break_ends_with_the_lease: [Mutex, Writer, OnePermit],
                a_stopped_process_knows_that_it_lost: [Mutex],
                a_cut_session_is_told: [Mutex]
            );
        }
    };
    ($stage:expr, $($law:ident: [$($form:ident),*]),*) => {
        const SETTING: lockset_testkit::suite::Setting =
            || Box::pin(async { Box::new($stage) as Box<dyn lockset_testkit::Stage> });

        $(
            #[test]
            fn $law() {
                use lockset_testkit::{Form, Time, suite::obeys};
                for form in [$(Form::$form),*] {
                    obeys(stringify!($law), form, Time::Real, SETTING);
                }
            }
        )*
    };
}
