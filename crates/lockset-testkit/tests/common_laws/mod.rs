//! The laws that all engines obey which have every mode and are shared by processes. Those that
//! some of them refuse are named where they are used, on one side or the other.

macro_rules! common_laws {
    ($suite:ident, $start:expr, and: [$($more:ident),* $(,)?], not: [$($less:ident),*]) => {
        lockset_testkit::suite! {
            $suite;
            time: Real;
            stage: ($start)(env!("CARGO_BIN_EXE_actor"));
            obeys: [
                names_are_independent,
                a_release_takes_the_next_along,
                a_lease_that_is_over_is_not_handed_out,
                many_may_come_to_a_fresh_home_at_once,
                close_releases_everything,
                a_crash_gives_permits_back,
                opposite_orders_do_not_wait_for_each_other,
                readers_share_and_writers_exclude,
                a_waiting_writer_is_not_starved,
                a_downgrade_lets_readers_in_and_keeps_the_token,
                permits_add_up_to_the_limit,
                permits_are_served_in_strict_order,
                any_permit_that_comes_back_admits_the_waiter,
                one_name_has_one_use,
                an_election_shows_its_leader,
                a_latch_opens_when_counted_down,
                a_barrier_lets_all_go_together,
                a_notes_change_is_seen,
                a_stopped_process_knows_that_it_lost,
                kept_guards_survive_a_blocked_runtime,
                $($more,)*
            ];
            obeys_in_every_form: [
                two_claims_never_hold_at_once,
                a_release_admits_the_waiter_and_not_its_expiry,
                waiters_of_one_process_are_served_in_order,
                processes_take_turns,
                a_release_admits_exactly_one_waiter,
                a_kept_guard_outlives_its_ttl,
                a_fixed_lease_ends_by_itself,
                a_longest_hold_ends_the_lock,
                a_dropped_guard_releases,
                a_strangers_release_does_nothing,
                a_renewal_needs_id_and_token,
                releasing_twice_is_harmless,
                a_repeated_acquire_changes_nothing,
                a_withdrawn_claim_stays_withdrawn,
                a_lock_is_passed_on_once,
                tokens_only_grow,
                a_frozen_server_loses_the_guard_by_its_deadline,
                a_guard_never_says_held_after_its_deadline,
                a_break_now_is_told_at_once,
                a_break_now_is_told_to_whoever_attached,
                a_gentle_break_ends_with_the_lease,
                a_cancelled_lock_leaves_nothing,
                a_timed_out_waiter_leaves_nothing,
                a_silent_home_does_not_prolong_a_wait,
                a_crashed_waiter_delays_nobody_for_long,
                several_locks_are_taken_all_or_none,
                a_reentered_guard_counts,
                a_detached_lock_is_attached_elsewhere,
                a_ticket_is_attached_once,
                watch_tells_of_changes,
                list_shows_holders_and_waiters,
                tokens_grow_over_a_restart,
                a_killed_holder_process_is_succeeded,
            ];
            refuses: [
                $($less,)*
                // It has all modes.
                a_refused_mode_is_refused_not_hung,
            ];
        }
    };
}
