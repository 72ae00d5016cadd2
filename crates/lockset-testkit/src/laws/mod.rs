//! What every engine promises, one function per promise.
//!
//! A law is named as a sentence. It panics with a telling message when it is broken, and it gets a
//! fresh [`Stage`] each time. No law waits longer for a hand-off than a quarter of the ttl, or the
//! end of a lease would hide that a release woke nobody.

use futures_core::future::LocalBoxFuture;

use crate::form::Form;
use crate::stage::{Need, Stage};

/// A promise.
#[derive(Clone, Copy, Debug)]
pub struct Law {
    /// The sentence.
    pub name: &'static str,
    /// Without these an engine may refuse it.
    pub needs: &'static [Need],
    /// What is done.
    pub body: Body,
}

/// How a law is played.
#[derive(Clone, Copy)]
pub enum Body {
    /// Once.
    Once(for<'a> fn(&'a dyn Stage) -> LocalBoxFuture<'a, ()>),
    /// Once in each form.
    InEveryForm(for<'a> fn(&'a dyn Stage, Form) -> LocalBoxFuture<'a, ()>),
}

impl std::fmt::Debug for Body {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Body::Once(_) => "Once",
            Body::InEveryForm(_) => "InEveryForm",
        })
    }
}

/// Makes the modules, and the list of all laws. Whatever is not named here is dead code to the
/// compiler only if it is private, so a test below compares the list with the sources.
macro_rules! laws {
    ($($module:ident {
        in_every_form: [$($formed:ident $(($($formed_need:ident),+))?),* $(,)?];
        once: [$($once:ident $(($($need:ident),+))?),* $(,)?];
    })*) => {
        $(
            mod $module;
            pub use $module::{$($formed,)* $($once,)*};
        )*

        /// All laws.
        pub const ALL: &[Law] = &[$(
            $(Law {
                name: stringify!($formed),
                needs: &[$($(Need::$formed_need),+)?],
                body: Body::InEveryForm(|stage, form| Box::pin($module::$formed(stage, form))),
            },)*
            $(Law {
                name: stringify!($once),
                needs: &[$($(Need::$need),+)?],
                body: Body::Once(|stage| Box::pin($module::$once(stage))),
            },)*
        )*];
    };
}

laws! {
    exclusion {
        in_every_form: [two_claims_never_hold_at_once];
        once: [names_are_independent, many_may_come_to_a_fresh_home_at_once];
    }
    order {
        in_every_form: [
            a_release_admits_the_waiter_and_not_its_expiry,
            waiters_of_one_process_are_served_in_order,
            processes_take_turns,
            a_release_admits_exactly_one_waiter,
        ];
        once: [a_release_takes_the_next_along];
    }
    lease {
        in_every_form: [
            a_kept_guard_outlives_its_ttl,
            a_fixed_lease_ends_by_itself,
            a_longest_hold_ends_the_lock,
            a_dropped_guard_releases,
        ];
        once: [
            kept_guards_survive_a_blocked_runtime (RealTime),
            a_lease_that_is_over_is_not_handed_out,
        ];
    }
    identity {
        in_every_form: [
            a_strangers_release_does_nothing,
            a_renewal_needs_id_and_token,
            releasing_twice_is_harmless,
            a_repeated_acquire_changes_nothing,
            a_withdrawn_claim_stays_withdrawn,
            a_lock_is_passed_on_once,
        ];
        once: [];
    }
    tokens {
        in_every_form: [tokens_only_grow, tokens_grow_over_a_restart (Durable)];
        once: [
            a_given_floor_is_exact (Fence),
            raising_lifts_the_fence_and_refuses_to_lower_it (Fence),
        ];
    }
    loss {
        in_every_form: [
            a_frozen_server_loses_the_guard_by_its_deadline,
            a_guard_never_says_held_after_its_deadline,
            a_break_now_is_told_at_once,
            a_break_now_is_told_to_whoever_attached,
            a_gentle_break_ends_with_the_lease,
        ];
        once: [
            a_stopped_process_knows_that_it_lost (Processes, RealTime),
            a_cut_session_is_told (Link),
        ];
    }
    leaving {
        in_every_form: [
            a_cancelled_lock_leaves_nothing,
            a_timed_out_waiter_leaves_nothing,
            a_silent_home_does_not_prolong_a_wait,
        ];
        once: [close_releases_everything];
    }
    death {
        in_every_form: [
            a_killed_holder_process_is_succeeded (Processes),
            a_crashed_waiter_delays_nobody_for_long,
        ];
        once: [a_crash_gives_permits_back (Permits)];
    }
    several {
        in_every_form: [several_locks_are_taken_all_or_none];
        once: [opposite_orders_do_not_wait_for_each_other];
    }
    sharing {
        in_every_form: [];
        once: [
            readers_share_and_writers_exclude (Shared),
            a_waiting_writer_is_not_starved (Shared),
            a_downgrade_lets_readers_in_and_keeps_the_token (Shared),
            permits_add_up_to_the_limit (Permits),
            permits_are_served_in_strict_order (Permits),
            any_permit_that_comes_back_admits_the_waiter (Permits),
            one_name_has_one_use (Permits),
            a_refused_mode_is_refused_not_hung (MissingMode),
        ];
    }
    primitives {
        in_every_form: [
            a_reentered_guard_counts,
            a_detached_lock_is_attached_elsewhere,
            a_ticket_is_attached_once,
        ];
        once: [
            an_election_shows_its_leader,
            a_latch_opens_when_counted_down (Cells),
            a_barrier_lets_all_go_together (Cells),
            a_cut_connection_counts_nothing_twice (Cells, Link),
        ];
    }
    sight {
        in_every_form: [watch_tells_of_changes, list_shows_holders_and_waiters];
        once: [a_notes_change_is_seen];
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
