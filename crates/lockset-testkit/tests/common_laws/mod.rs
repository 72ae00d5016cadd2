//! The laws that all engines obey which have every mode and are shared by processes. Those that
//! some of them refuse are named where they are used, on one side or the other.

macro_rules! common_laws {
    ($suite:ident, $start:expr, and: [$($more:ident),* $(,)?], not: [$($less:ident),*]) => {
        lockset_testkit::suite! {
            $suite;
            time: Real;
            stage: ($start)(env!("CARGO_BIN_EXE_actor"));
            once: [
                names_are_independent,
                a_release_can_enqueue_the_next_claim,
                an_expired_lease_is_never_returned_as_a_guard,
                many_clients_may_start_on_an_empty_backend_at_once,
                close_releases_everything,
                permits_of_a_crashed_process_come_back,
                opposite_lock_orders_do_not_deadlock,
                readers_share_and_writers_exclude,
                a_waiting_writer_is_not_starved,
                a_downgrade_lets_readers_in_and_keeps_the_token,
                permits_add_up_to_the_limit,
                permits_are_served_in_strict_order,
                any_returned_permit_admits_the_waiter,
                a_name_has_one_use_at_a_time,
                an_election_shows_its_leader,
                a_latch_opens_when_counted_down,
                a_barrier_releases_all_parties_together,
                a_changed_note_is_visible,
                a_stopped_process_sees_its_loss_on_resume,
                a_renewed_guard_survives_a_blocked_runtime,
                $($more,)*
            ];
            for_each_kind: [
                two_claims_never_hold_at_once,
                a_waiter_is_admitted_by_the_release_and_not_by_expiry,
                waiters_of_one_process_are_served_in_order,
                processes_take_turns,
                a_release_admits_exactly_one_waiter,
                a_renewed_guard_outlives_its_ttl,
                a_fixed_lease_ends_by_itself,
                max_hold_ends_the_lock,
                a_dropped_guard_releases,
                a_release_by_another_claim_does_nothing,
                a_renewal_needs_id_and_token,
                releasing_twice_is_harmless,
                a_repeated_acquire_changes_nothing,
                a_withdrawn_claim_stays_withdrawn,
                a_lock_is_adopted_once,
                tokens_only_grow,
                a_guard_on_a_frozen_backend_is_lost_by_its_deadline,
                a_guard_never_reports_held_after_its_deadline,
                a_forced_release_is_reported_at_once,
                a_forced_release_is_reported_to_an_attached_holder,
                a_revocation_takes_effect_when_the_lease_ends,
                a_cancelled_acquire_leaves_nothing_behind,
                a_timed_out_waiter_leaves_nothing_behind,
                an_unresponsive_backend_does_not_extend_a_wait,
                a_crashed_waiter_delays_others_by_one_lease_at_most,
                several_locks_are_acquired_all_or_none,
                a_reentered_lock_is_released_by_its_last_guard,
                a_detached_lock_can_be_attached_by_another_client,
                a_ticket_is_attached_once,
                watch_reports_every_change,
                list_shows_holders_and_waiters,
                tokens_grow_over_a_restart,
                the_lock_of_a_killed_process_passes_on,
            ];
            skipped: [
                $($less,)*
                // It has all modes.
                an_unsupported_mode_is_refused_at_once,
            ];
        }
    };
}
