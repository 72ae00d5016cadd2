//! The laws about loss on servers whose leader dies in the middle of them.

macro_rules! leader_laws {
    ($start:expr) => {
        const SETTING: lockset_testkit::suite::Setting = || {
            Box::pin(async {
                let stage = ($start)(env!("CARGO_BIN_EXE_actor")).whose_leader_dies();
                Box::new(stage) as Box<dyn lockset_testkit::Stage>
            })
        };
        leader_laws!(
            is_obeyed: a_frozen_server_loses_the_guard_by_its_deadline,
            a_guard_never_says_held_after_its_deadline
        );
    };
    (is_obeyed: $($law:ident),*) => {$(
        #[test]
        fn $law() {
            for form in lockset_testkit::Form::ALL {
                let time = lockset_testkit::Time::Real;
                lockset_testkit::suite::obeys(stringify!($law), form, time, SETTING);
            }
        }
    )*};
}
