//! Each mistake breaks its promise, and Lockset keeps all promises in the same schedule. The
//! timelines are those of the guide.

#![allow(clippy::unwrap_used, reason = "tests")]

use lockset_wrong_ways::lockset_client::COMMAND;
use lockset_wrong_ways::{MISTAKES, Mistake};

fn check(name: &str) {
    let mistake = Mistake::named(name).unwrap();
    let wrong = mistake.play_wrong();
    let broken: Vec<_> = wrong.findings().into_iter().map(|finding| finding.promise).collect();
    assert_eq!(broken, [mistake.breaks], "{wrong:?}");
    let right = mistake.play_right();
    assert_eq!(right.findings(), [], "{}", right.timeline());
    let guide = include_str!("../../../docs/wrong-ways.md");
    for shown in [
        format!("{}verdict: {}\n", wrong.timeline(), wrong.verdict()),
        format!("{}verdict: {}\n", right.timeline(), right.verdict()),
    ] {
        assert!(guide.contains(&shown), "docs/wrong-ways.md does not contain\n{shown}");
    }
}

macro_rules! verdicts {
    ($($test:ident $name:literal)*) => {
        $(
            #[test]
            fn $test() {
                COMMAND.get_or_init(|| env!("CARGO_BIN_EXE_lockset-wrong-ways").into());
                check($name);
            }
        )*

        #[test]
        fn every_mistake_has_a_test() {
            let tested = [$($name),*];
            assert_eq!(MISTAKES.iter().map(|mistake| mistake.name).collect::<Vec<_>>(), tested);
        }
    };
}

#[test]
fn both_languages_show_the_same_schedules() {
    let blocks = |text: &'static str| text.split("```").skip(1).step_by(2).collect::<Vec<_>>();
    let english = blocks(include_str!("../../../docs/wrong-ways.md"));
    assert_eq!(english.len(), 2 * MISTAKES.len());
    assert_eq!(english, blocks(include_str!("../../../docs/wrong-ways.zh-CN.md")));
}

verdicts! {
    check_then_set "check-then-set"
    always_true "always-true"
    timeout_is_success "timeout-is-success"
    no_expiry "no-expiry"
    expire_later "expire-later"
    clock_in_value "clock-in-value"
    delete_any "delete-any"
    look_then_delete "get-then-delete"
    silent_unlock "silent-unlock"
    no_renewal "no-renewal"
    deaf_watchdog "deaf-watchdog"
    orphaned_watchdog "orphaned-watchdog"
    late_watchdog "late-watchdog"
    promoted_replica "promoted-replica"
    wall_clock_quorum "wall-clock-quorum"
    old_session "old-session"
    no_fence "no-fence"
}
