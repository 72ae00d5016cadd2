//! Every law fails on a broken engine: one test per law, and one that none was forgotten.

use lockset_testkit::mutants::{Mutant, REAL, VIRTUAL};
use lockset_testkit::stage::{LocalStage, MemoryStage};
use lockset_testkit::suite::run_law;
use lockset_testkit::{Law, LockKind, Stage, Time, laws};

/// The one that needs a real process: its actor repeats what it heard before it was stopped.
const STOPPED: Mutant = Mutant {
    law: "a_stopped_process_sees_its_loss_on_resume",
    expected: "the first word after the stop",
    kind: LockKind::Mutex,
    time: Time::Real,
    stage_factory: || {
        Box::pin(async {
            let stage = LocalStage::start(env!("CARGO_BIN_EXE_actor")).with_stale_state();
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
                mutants.into_iter().for_each(Mutant::assert_law_fails);
            }
        )*
    };
}

fail_on_their_mutants! {
    two_claims_never_hold_at_once,
    names_are_independent,
    many_clients_may_start_on_an_empty_backend_at_once,
    a_waiter_is_admitted_by_the_release_and_not_by_expiry,
    waiters_of_one_process_are_served_in_order,
    processes_take_turns,
    a_release_admits_exactly_one_waiter,
    a_release_can_enqueue_the_next_claim,
    a_renewed_guard_outlives_its_ttl,
    a_fixed_lease_ends_by_itself,
    max_hold_ends_the_lock,
    a_dropped_guard_releases,
    a_renewed_guard_survives_a_blocked_runtime,
    an_expired_lease_is_never_returned_as_a_guard,
    a_release_by_another_claim_does_nothing,
    a_renewal_needs_id_and_token,
    releasing_twice_is_harmless,
    a_repeated_acquire_changes_nothing,
    a_withdrawn_claim_stays_withdrawn,
    a_lock_is_adopted_once,
    tokens_only_grow,
    tokens_grow_over_a_restart,
    a_token_floor_is_exact,
    raise_lifts_the_fence_and_never_lowers_it,
    a_guard_on_a_frozen_backend_is_lost_by_its_deadline,
    a_guard_never_reports_held_after_its_deadline,
    a_forced_release_is_reported_at_once,
    a_forced_release_is_reported_to_an_attached_holder,
    a_revocation_takes_effect_when_the_lease_ends,
    a_stopped_process_sees_its_loss_on_resume,
    a_cut_connection_is_reported_by_the_guard,
    a_cancelled_acquire_leaves_nothing_behind,
    a_timed_out_waiter_leaves_nothing_behind,
    an_unresponsive_backend_does_not_extend_a_wait,
    close_releases_everything,
    the_lock_of_a_killed_process_passes_on,
    a_crashed_waiter_delays_others_by_one_lease_at_most,
    permits_of_a_crashed_process_come_back,
    several_locks_are_acquired_all_or_none,
    opposite_lock_orders_do_not_deadlock,
    readers_share_and_writers_exclude,
    a_waiting_writer_is_not_starved,
    a_downgrade_lets_readers_in_and_keeps_the_token,
    permits_add_up_to_the_limit,
    permits_are_served_in_strict_order,
    any_returned_permit_admits_the_waiter,
    a_name_has_one_use_at_a_time,
    an_unsupported_mode_is_refused_at_once,
    a_reentered_lock_is_released_by_its_last_guard,
    a_detached_lock_can_be_attached_by_another_client,
    a_ticket_is_attached_once,
    an_election_shows_its_leader,
    a_latch_opens_when_counted_down,
    a_barrier_releases_all_parties_together,
    latches_and_barriers_survive_a_cut_connection,
    watch_reports_every_change,
    list_shows_holders_and_waiters,
    a_changed_note_is_visible,
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
fn simulated_processes_obey_the_laws() {
    for law in [
        "the_lock_of_a_killed_process_passes_on",
        "a_crashed_waiter_delays_others_by_one_lease_at_most",
        "a_cut_connection_is_reported_by_the_guard",
        "latches_and_barriers_survive_a_cut_connection",
    ] {
        let stage_factory = || {
            Box::pin(async {
                Box::new(MemoryStage::start().with_simulated_processes()) as Box<dyn Stage>
            }) as _
        };
        run_law(law, Law::named(law), LockKind::Mutex, Time::Virtual, stage_factory).unwrap();
    }
}
