//! The laws about loss on servers whose leader dies in the middle of them.

macro_rules! leader_laws {
    ($start:expr) => {
        /// The others stop, too, so that there is no leader.
        mod without_a_leader {
            #[allow(unused_imports)]
            use super::*;

            leader_laws!(
                ($start)(env!("CARGO_BIN_EXE_actor")).with_leader_killed_by_freeze(),
                a_guard_on_a_frozen_backend_is_lost_by_its_deadline: [Mutex, Writer, OnePermit],
                a_guard_never_reports_held_after_its_deadline: [Mutex, Writer, OnePermit]
            );
        }

        /// The others live on, and elect another.
        mod with_another_leader {
            #[allow(unused_imports)]
            use super::*;

            leader_laws!(
                ($start)(env!("CARGO_BIN_EXE_actor")).with_leader_change(),
                a_forced_release_is_reported_at_once: [Mutex, Writer, OnePermit],
                a_revocation_takes_effect_when_the_lease_ends: [Mutex, Writer, OnePermit],
                a_stopped_process_sees_its_loss_on_resume: [Mutex],
                a_cut_connection_is_reported_by_the_guard: [Mutex]
            );
        }
    };
    ($stage:expr, $($law:ident: [$($kind:ident),*]),*) => {
        const STAGE: lockset_testkit::suite::StageFactory =
            || Box::pin(async { Box::new($stage) as Box<dyn lockset_testkit::Stage> });

        $(
            #[test]
            fn $law() {
                use lockset_testkit::{LockKind, Time, suite::assert_law_holds};
                for kind in [$(LockKind::$kind),*] {
                    assert_law_holds(stringify!($law), kind, Time::Real, STAGE);
                }
            }
        )*
    };
}
