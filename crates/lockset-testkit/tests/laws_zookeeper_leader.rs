//! The laws about loss on an ensemble of three ZooKeeper servers whose leader dies in the
//! middle of them.

use lockset_testkit::stage::ZooKeeperEnsembleStage;
use lockset_testkit::suite::{Setting, obeys};
use lockset_testkit::{Form, Stage, Time};

const SETTING: Setting = || {
    Box::pin(async {
        let stage = ZooKeeperEnsembleStage::start(env!("CARGO_BIN_EXE_actor")).whose_leader_dies();
        Box::new(stage) as Box<dyn Stage>
    })
};

#[test]
fn a_frozen_server_loses_the_guard_by_its_deadline() {
    for form in Form::ALL {
        obeys("a_frozen_server_loses_the_guard_by_its_deadline", form, Time::Real, SETTING);
    }
}

#[test]
fn a_guard_never_says_held_after_its_deadline() {
    for form in Form::ALL {
        obeys("a_guard_never_says_held_after_its_deadline", form, Time::Real, SETTING);
    }
}
