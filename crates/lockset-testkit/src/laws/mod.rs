//! The laws: what every engine promises, one function per promise.
//!
//! The name of a law is the sentence that it checks. A broken law panics with a message that says
//! what went wrong. Each run gets a fresh [`Stage`]. No law waits longer than a quarter of the ttl
//! for a hand-off; otherwise the end of a lease would hide a release that woke no waiter.

use futures_core::future::LocalBoxFuture;

use crate::lock_kind::LockKind;
use crate::stage::{Need, Stage};

/// A promise that every engine keeps.
#[derive(Clone, Copy, Debug)]
pub struct Law {
    /// The promise as a sentence.
    pub name: &'static str,
    /// What the stage must provide. The law may be skipped only if one of these is missing.
    pub needs: &'static [Need],
    /// The check.
    pub body: LawBody,
}

/// How often a law runs.
#[derive(Clone, Copy)]
pub enum LawBody {
    /// Once.
    Once(for<'a> fn(&'a dyn Stage) -> LocalBoxFuture<'a, ()>),
    /// Once for each [`LockKind`].
    ForEachKind(for<'a> fn(&'a dyn Stage, LockKind) -> LocalBoxFuture<'a, ()>),
}

impl std::fmt::Debug for LawBody {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            LawBody::Once(_) => "Once",
            LawBody::ForEachKind(_) => "ForEachKind",
        })
    }
}

/// Declares the modules and the list of all laws. A law is public, so the compiler does not notice
/// if it is missing here; a test below compares the list with the sources.
macro_rules! laws {
    ($($module:ident {
        for_each_kind: [$($per_kind:ident $(($($per_kind_need:ident),+))?),* $(,)?];
        once: [$($once:ident $(($($need:ident),+))?),* $(,)?];
    })*) => {
        $(
            mod $module;
            pub use $module::{$($per_kind,)* $($once,)*};
        )*

        /// All laws.
        pub const ALL: &[Law] = &[$(
            $(Law {
                name: stringify!($per_kind),
                needs: &[$($(Need::$per_kind_need),+)?],
                body: LawBody::ForEachKind(|stage, kind| Box::pin($module::$per_kind(stage, kind))),
            },)*
            $(Law {
                name: stringify!($once),
                needs: &[$($(Need::$need),+)?],
                body: LawBody::Once(|stage| Box::pin($module::$once(stage))),
            },)*
        )*];
    };
}

laws! {
    exclusion {
        for_each_kind: [two_claims_never_hold_at_once];
        once: [names_are_independent, many_clients_may_start_on_an_empty_backend_at_once];
    }
    order {
        for_each_kind: [
            a_waiter_is_admitted_by_the_release_and_not_by_expiry,
            waiters_of_one_process_are_served_in_order,
            processes_take_turns,
            a_release_admits_exactly_one_waiter,
        ];
        once: [a_release_can_enqueue_the_next_claim];
    }
    lease {
        for_each_kind: [
            a_renewed_guard_outlives_its_ttl,
            a_fixed_lease_ends_by_itself,
            max_hold_ends_the_lock,
            a_dropped_guard_releases,
        ];
        once: [
            a_renewed_guard_survives_a_blocked_runtime (RealTime),
            an_expired_lease_is_never_returned_as_a_guard,
        ];
    }
    identity {
        for_each_kind: [
            a_release_by_another_claim_does_nothing,
            a_renewal_needs_id_and_token,
            releasing_twice_is_harmless,
            a_repeated_acquire_changes_nothing,
            a_withdrawn_claim_stays_withdrawn,
            a_lock_is_adopted_once,
        ];
        once: [];
    }
    tokens {
        for_each_kind: [tokens_only_grow, tokens_grow_over_a_restart (Durable)];
        once: [
            a_token_floor_is_exact (Fence),
            raise_lifts_the_fence_and_never_lowers_it (Fence),
        ];
    }
    loss {
        for_each_kind: [
            a_guard_on_a_frozen_backend_is_lost_by_its_deadline,
            a_guard_never_reports_held_after_its_deadline,
            a_forced_release_is_reported_at_once,
            a_forced_release_is_reported_to_an_attached_holder,
            a_revocation_takes_effect_when_the_lease_ends,
        ];
        once: [
            a_stopped_process_sees_its_loss_on_resume (Processes, RealTime),
            a_cut_connection_is_reported_by_the_guard (Link),
        ];
    }
    withdrawal {
        for_each_kind: [
            a_cancelled_acquire_leaves_nothing_behind,
            a_timed_out_waiter_leaves_nothing_behind,
            an_unresponsive_backend_does_not_extend_a_wait,
        ];
        once: [close_releases_everything];
    }
    crash {
        for_each_kind: [
            the_lock_of_a_killed_process_passes_on (Processes),
            a_crashed_waiter_delays_others_by_one_lease_at_most,
        ];
        once: [permits_of_a_crashed_process_come_back (Permits)];
    }
    several {
        for_each_kind: [several_locks_are_acquired_all_or_none];
        once: [opposite_lock_orders_do_not_deadlock];
    }
    sharing {
        for_each_kind: [];
        once: [
            readers_share_and_writers_exclude (Shared),
            a_waiting_writer_is_not_starved (Shared),
            a_downgrade_lets_readers_in_and_keeps_the_token (Shared),
            permits_add_up_to_the_limit (Permits),
            permits_are_served_in_strict_order (Permits),
            any_returned_permit_admits_the_waiter (Permits),
            a_name_has_one_use_at_a_time (Permits),
            an_unsupported_mode_is_refused_at_once (MissingMode),
        ];
    }
    primitives {
        for_each_kind: [
            a_reentered_lock_is_released_by_its_last_guard,
            a_detached_lock_can_be_attached_by_another_client,
            a_ticket_is_attached_once,
        ];
        once: [
            an_election_shows_its_leader,
            a_latch_opens_when_counted_down (Cells),
            a_barrier_releases_all_parties_together (Cells),
            latches_and_barriers_survive_a_cut_connection (Cells, Link),
        ];
    }
    inspection {
        for_each_kind: [watch_reports_every_change, list_shows_holders_and_waiters];
        once: [a_changed_note_is_visible];
    }
}

#[cfg(test)]
mod tests {
    use super::ALL;

    #[test]
    fn every_public_function_of_the_sources_is_a_law() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/laws");
        let mut written = Vec::new();
        for file in std::fs::read_dir(folder).unwrap() {
            let path = file.unwrap().path();
            if path.file_name().is_some_and(|name| name == "mod.rs") {
                continue;
            }
            let source = std::fs::read_to_string(path).unwrap();
            written.extend(source.lines().filter_map(|line| {
                let rest = line.strip_prefix("pub async fn ")?;
                Some(rest.split('(').next()?.to_owned())
            }));
        }
        written.sort();
        let mut listed: Vec<&str> = ALL.iter().map(|law| law.name).collect();
        listed.sort_unstable();
        assert_eq!(written, listed);
    }
}
