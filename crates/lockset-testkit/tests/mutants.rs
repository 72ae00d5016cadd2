//! Every law fails on a broken engine: one test per law, and one that none was forgotten.

use lockset_testkit::mutants::{Mutant, REAL, VIRTUAL};
use lockset_testkit::stage::{LocalStage, MemoryStage};
use lockset_testkit::suite::play;
use lockset_testkit::{Form, Law, Stage, Time, laws};

/// The one that needs a real process: its actor repeats what it heard before it was stopped.
const STOPPED: Mutant = Mutant {
    law: "a_stopped_process_knows_that_it_lost",
    says: "the first word after the stop",
    form: Form::Mutex,
    time: Time::Real,
    setting: || {
        Box::pin(async {
            let stage = LocalStage::start(env!("CARGO_BIN_EXE_actor")).by_hearsay();
            Box::new(stage) as Box<dyn Stage>
        })
    },
};

fn all() -> impl Iterator<Item = &'static Mutant> {
    VIRTUAL.iter().chain(REAL).chain([&STOPPED])
}

macro_rules! fail_on_their_mutants {
    ($($law:ident,)*) => {
        const TESTED: &[&str] = &[$(stringify!($law)),*];

        $(
            #[test]
            fn $law() {
                let mutants: Vec<_> = all().filter(|m| m.law == stringify!($law)).collect();
                assert!(!mutants.is_empty(), "it has no mutant");
                mutants.into_iter().for_each(Mutant::must_fail);
            }
        )*
    };
}

fail_on_their_mutants! {
    two_claims_never_hold_at_once,
    names_are_independent,
    many_may_come_to_a_fresh_home_at_once,
    a_release_admits_the_waiter_and_not_its_expiry,
    waiters_of_one_process_are_served_in_order,
    processes_take_turns,
    a_release_admits_exactly_one_waiter,
    a_release_takes_the_next_along,
    a_kept_guard_outlives_its_ttl,
    a_fixed_lease_ends_by_itself,
    a_longest_hold_ends_the_lock,
    a_dropped_guard_releases,
    kept_guards_survive_a_blocked_runtime,
    a_lease_that_is_over_is_not_handed_out,
    a_strangers_release_does_nothing,
    a_renewal_needs_id_and_token,
    releasing_twice_is_harmless,
    a_repeated_acquire_changes_nothing,
    a_withdrawn_claim_stays_withdrawn,
    a_lock_is_passed_on_once,
    tokens_only_grow,
    tokens_grow_over_a_restart,
    a_given_floor_is_exact,
    raising_lifts_the_fence_and_refuses_to_lower_it,
    a_frozen_server_loses_the_guard_by_its_deadline,
    a_guard_never_says_held_after_its_deadline,
    a_break_now_is_told_at_once,
    a_break_now_is_told_to_whoever_attached,
    a_gentle_break_ends_with_the_lease,
    a_stopped_process_knows_that_it_lost,
    a_cut_session_is_told,
    a_cancelled_lock_leaves_nothing,
    a_timed_out_waiter_leaves_nothing,
    a_silent_home_does_not_prolong_a_wait,
    close_releases_everything,
    a_killed_holder_process_is_succeeded,
    a_crashed_waiter_delays_nobody_for_long,
    a_crash_gives_permits_back,
    several_locks_are_taken_all_or_none,
    opposite_orders_do_not_wait_for_each_other,
    readers_share_and_writers_exclude,
    a_waiting_writer_is_not_starved,
    a_downgrade_lets_readers_in_and_keeps_the_token,
    permits_add_up_to_the_limit,
    permits_are_served_in_strict_order,
    any_permit_that_comes_back_admits_the_waiter,
    one_name_has_one_use,
    a_refused_mode_is_refused_not_hung,
    a_reentered_guard_counts,
    a_detached_lock_is_attached_elsewhere,
    a_ticket_is_attached_once,
    an_election_shows_its_leader,
    a_latch_opens_when_counted_down,
    a_barrier_lets_all_go_together,
    a_cut_connection_counts_nothing_twice,
    watch_tells_of_changes,
    list_shows_holders_and_waiters,
    a_notes_change_is_seen,
}

#[test]
fn every_law_has_a_mutant() {
    let laws: Vec<&str> = laws::ALL.iter().map(|law| law.name).collect();
    assert_eq!(TESTED, laws);
    for law in laws {
        assert!(all().any(|mutant| mutant.law == law), "{law} has no mutant");
    }
}

/// What the mutants stand on is sound: without the fault the laws pass there.
#[test]
fn stand_ins_obey() {
    for law in [
        "a_killed_holder_process_is_succeeded",
        "a_crashed_waiter_delays_nobody_for_long",
        "a_cut_session_is_told",
        "a_cut_connection_counts_nothing_twice",
    ] {
        let setting = || {
            Box::pin(async { Box::new(MemoryStage::start().with_stand_ins()) as Box<dyn Stage> })
                as _
        };
        play(law, Law::named(law), Form::Mutex, Time::Virtual, setting).unwrap();
    }
}
