//! Mutants: for each law, a broken engine on which the law must fail.
//!
//! A mutant is the memory engine with one fault. A law that passes on its mutant would prove
//! nothing, so every law runs on its mutants, and must fail there with the message that belongs to
//! the fault. If no engine can break a law, the fault is in a replacement for part of the front.

use std::sync::{Arc, Once};
use std::time::Duration;

use lockset::engine::{Claim, Engine};

use crate::laws::Law;
use crate::layer::{Layer, Layered};
use crate::lock_kind::LockKind;
use crate::stage::{MemoryStage, Stage, Time};
use crate::suite::{StageFactory, run_law};

pub(crate) mod faulty_engines;

use faulty_engines::*;

/// A faulty stage on which a law must fail.
#[derive(Clone, Copy, Debug)]
pub struct Mutant {
    /// The law that must fail.
    pub law: &'static str,
    /// Part of the message with which it must fail.
    pub expected: &'static str,
    /// The kind of lock for which it must fail.
    pub kind: LockKind,
    /// How time passes on the stage.
    pub time: Time,
    /// Makes the faulty stage.
    pub stage_factory: StageFactory,
}

impl Mutant {
    /// Runs the law on this mutant without printing its panic, and panics itself if the law passes
    /// or fails with another message.
    pub fn assert_law_fails(&self) {
        silence_mutant_panics();
        let law = Law::named(self.law);
        match run_law(
            &format!("{MUTANT}{}", self.law),
            law,
            self.kind,
            self.time,
            self.stage_factory,
        ) {
            Ok(()) => panic!("{} did not detect its fault ({})", self.law, self.expected),
            Err(found) => assert!(
                found.contains(self.expected),
                "{} failed for another reason than {:?}: {found}",
                self.law,
                self.expected
            ),
        }
    }
}

const MUTANT: &str = "mutant of ";

/// Suppresses the panic messages of laws that fail on mutants, as they should.
fn silence_mutant_panics() {
    static SILENCED: Once = Once::new();
    SILENCED.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let thread = std::thread::current();
            if !thread.name().is_some_and(|name| name.starts_with(MUTANT)) {
                usual(info);
            }
        }));
    });
}

/// A factory for this stage.
macro_rules! stage_factory {
    ($stage:expr) => {
        || Box::pin(async { Box::new($stage) as Box<dyn Stage> })
    };
}

macro_rules! mutants {
    ($($law:ident as $kind:ident on $stage:expr => $expected:literal;)*) => {
        &[$(Mutant {
            law: stringify!($law),
            expected: $expected,
            kind: LockKind::$kind,
            time: Time::Virtual,
            stage_factory: stage_factory!($stage),
        },)*]
    };
}

/// The mutants in virtual time. Those that need real time are in [`REAL`].
pub const VIRTUAL: &[Mutant] = mutants! {
    two_claims_never_hold_at_once as Mutex on rename_claims(own_name) => "was inside";
    two_claims_never_hold_at_once as Writer on rename_claims(own_name) => "was inside";
    two_claims_never_hold_at_once as OnePermit on rename_claims(own_name) => "was inside";
    names_are_independent as Mutex on rename_claims(one_name) => "together with another";
    many_clients_may_start_on_an_empty_backend_at_once as Mutex
        on rename_claims(own_name) => "did not meet";
    a_waiter_is_admitted_by_the_release_and_not_by_expiry as Mutex on wrap(IgnoresRelease)
        => "admitted by the release";
    waiters_of_one_process_are_served_in_order as Writer on wrap_shared(ServesLastFirst)
        => "served out of turn";
    waiters_of_one_process_are_served_in_order as OnePermit on wrap_shared(ServesLastFirst)
        => "served out of turn";
    processes_take_turns as Mutex on wrap_shared(PrefersOwnProcess) => "two turns in a row";
    processes_take_turns as Writer on wrap_shared(ServesLastFirst) => "two turns in a row";
    a_release_can_enqueue_the_next_claim as Mutex
        on wrap(IgnoresNextOnRelease) => "was before the next";
    a_release_admits_exactly_one_waiter as Mutex on wrap_shared(AdmitsTwo) => "admitted too";
    a_renewed_guard_outlives_its_ttl as Mutex on wrap(RenewsNothing) => "free while kept";
    a_fixed_lease_ends_by_itself as Mutex on alter_leases(|ttl| ttl * 100) => "a bare lease ends";
    a_fixed_lease_ends_by_itself as Mutex
        on alter_leases(|ttl| ttl / 2) => "before the lease ended";
    max_hold_ends_the_lock as Mutex on wrap(IgnoresWithdrawals) => "when it ended";
    a_dropped_guard_releases as Mutex on wrap(IgnoresRelease) => "after the drop";
    an_expired_lease_is_never_returned_as_a_guard as Mutex on wrap(ReportsGrantLate)
        => "its home does not know it (by its own request)";
    a_release_by_another_claim_does_nothing as Mutex on wrap(ReleasesByName)
        => "a stranger released it";
    a_renewal_needs_id_and_token as Mutex on wrap_shared(RenewsById) => "another token was renewed";
    releasing_twice_is_harmless as Mutex on wrap(ReleasesByName)
        => "the next holder was not touched";
    a_repeated_acquire_changes_nothing as Mutex on wrap_shared(GrantsAgain) => "took another token";
    a_withdrawn_claim_stays_withdrawn as Mutex on wrap_shared(ForgetsWithdrawals) => "it came back";
    a_lock_is_adopted_once as Mutex on wrap_shared(AdoptsRepeatedly) => "passed on twice";
    tokens_only_grow as Mutex on wrap_shared(SameTokenForAll) => "tokens do not grow";
    tokens_grow_over_a_restart as Mutex on wrap(RestartsTokens) => "after";
    a_token_floor_is_exact as Mutex on wrap(IgnoresFloors) => "with the floor";
    raise_lifts_the_fence_and_never_lowers_it as Mutex on wrap(RaisesNothing)
        => "the raised token is the claim's";
    raise_lifts_the_fence_and_never_lowers_it as Mutex on wrap(LowersFence)
        => "it was lowered";
    a_guard_on_a_frozen_backend_is_lost_by_its_deadline as Mutex on wrap(OverpromisesLeases)
        => "the guard loses by its deadline";
    a_guard_never_reports_held_after_its_deadline as Mutex on wrap(OverpromisesLeases)
        => "promises more than its ttl";
    a_guard_never_reports_held_after_its_deadline as Mutex on wrap(OverpromisesFixedLeases)
        => "right after a pause";
    a_forced_release_is_reported_at_once as Mutex on wrap(EmitsNoEvents) => "the holder is told";
    a_forced_release_is_reported_to_an_attached_holder as Mutex on wrap(ReportsOwnClaimsOnly::new)
        => "whoever attached is told";
    a_revocation_takes_effect_when_the_lease_ends as Mutex on wrap(BreaksAtOnce) => "others see it";
    a_revocation_takes_effect_when_the_lease_ends as Mutex
        on wrap(BreaksNothing) => "the holder is told";
    a_cut_connection_is_reported_by_the_guard as Mutex
        on wrap(ForgetsSilentClients::new).with_simulated_processes()
        => "it is held again";
    a_cut_connection_is_reported_by_the_guard as Mutex
        on wrap(OverpromisesLeases).with_simulated_processes()
        => "the guard loses by its deadline";
    a_cancelled_acquire_leaves_nothing_behind as Mutex on wrap(IgnoresWithdrawals) => "is left";
    a_cancelled_acquire_leaves_nothing_behind as OnePermit on wrap(IgnoresWithdrawals) => "is left";
    a_timed_out_waiter_leaves_nothing_behind as Mutex
        on wrap(KeepsTimedOutWaiters) => "waiters: [Waiter";
    an_unresponsive_backend_does_not_extend_a_wait as Mutex
        on MemoryStage::start()
            .wrapped_outside_freeze(|inner| Arc::new(Layered(ReportsSilenceAsBusy(inner))))
        => "an error that says that nobody answers";
    close_releases_everything as Mutex on wrap(IgnoresRelease) => "when its holder closed";
    close_releases_everything as Mutex on wrap(IgnoresWithdrawals) => "is left";
    the_lock_of_a_killed_process_passes_on as Mutex
        on alter_leases(|ttl| ttl * 100).with_simulated_processes() => "the killed holder is succeeded";
    a_crashed_waiter_delays_others_by_one_lease_at_most as Mutex on alter_leases(|ttl| ttl * 100)
        => "behind the crashed waiter";
    permits_of_a_crashed_process_come_back as Mutex
        on alter_leases(|ttl| ttl * 100) => "the permits come back";
    several_locks_are_acquired_all_or_none as Mutex on wrap(IgnoresRelease)
        => "who was in the way";
    opposite_lock_orders_do_not_deadlock as Mutex on wrap_shared(InconsistentIdentity::new)
        => "all had all locks";
    readers_share_and_writers_exclude as Mutex on wrap(TreatsReadersAsWriters)
        => "another of the same client";
    readers_share_and_writers_exclude as Mutex
        on wrap(TreatsWritersAsReaders) => "a writer beside readers";
    a_waiting_writer_is_not_starved as Mutex
        on wrap(ReadersJumpQueue) => "passed the waiting writer";
    a_downgrade_lets_readers_in_and_keeps_the_token as Mutex on wrap(AmendsNothing)
        => "it comes in";
    permits_add_up_to_the_limit as Mutex on wrap(CountsClaims) => "a sixth permit";
    permits_are_served_in_strict_order as Mutex
        on wrap(SmallRequestsJumpQueue) => "one passed the queue";
    any_returned_permit_admits_the_waiter as Mutex on wrap_shared(WakesForOneHolderOnly::the_last)
        => "number 0 of 3 leaves";
    any_returned_permit_admits_the_waiter as Mutex on wrap_shared(WakesForOneHolderOnly::the_first)
        => "number 1 of 3 leaves";
    a_name_has_one_use_at_a_time as Mutex on rename_claims(name_by_mode) => "two limits";
    an_unsupported_mode_is_refused_at_once as Mutex on wrap(HangsOnReaders) => "an answer";
    a_reentered_lock_is_released_by_its_last_guard as Mutex
        on wrap(IgnoresRelease) => "the last guard released it";
    a_detached_lock_can_be_attached_by_another_client as Mutex
        on wrap(RenewsOwnClaimsOnly::new) => "Forgotten";
    a_detached_lock_can_be_attached_by_another_client as Mutex
        on wrap(SameIdentityForAll) => "at another home";
    a_ticket_is_attached_once as Mutex on wrap_shared(AdoptsRepeatedly)
        => "attached twice, by another client";
    an_election_shows_its_leader as Mutex on wrap(LosesNotes) => "first";
    a_latch_opens_when_counted_down as Mutex on wrap(LastWriteWins) => "a count was lost";
    a_barrier_releases_all_parties_together as Mutex on wrap(WatchesOnce) => "all three pass";
    latches_and_barriers_survive_a_cut_connection as Mutex
        on wrap(WatchesOnce).with_simulated_processes()
        => "it opens for who waited";
    latches_and_barriers_survive_a_cut_connection as Mutex
        on wrap(LosesFirstCellReply::new).with_simulated_processes()
        => "after Closed";
    watch_reports_every_change as Mutex on wrap(WatchesOnce) => "the grant";
    list_shows_holders_and_waiters as Mutex on wrap(ListsNoWaiters) => "patient";
    list_shows_holders_and_waiters as Mutex on wrap(ListsAll) => "only with the prefix";
    a_changed_note_is_visible as Mutex on wrap(AmendsNothing) => "the new word is seen";
};

/// The mutants in real time.
pub const REAL: &[Mutant] = &[Mutant {
    law: "a_renewed_guard_survives_a_blocked_runtime",
    expected: "after the runtime was blocked",
    kind: LockKind::Mutex,
    time: Time::Real,
    // tokio's clock puts the keeper on the user's runtime.
    stage_factory: stage_factory!(MemoryStage::start().in_real_time(Duration::from_millis(400))),
}];

/// A stage on which the engine of each client is wrapped in a layer of its own.
fn wrap<L: Layer>(layer: fn(Arc<dyn Engine>) -> L) -> MemoryStage {
    MemoryStage::start().wrapped(move |inner| Arc::new(Layered(layer(inner))))
}

/// The same for layers that share state between all clients.
fn wrap_shared<S, L>(layer: fn(Arc<dyn Engine>, Arc<S>) -> L) -> MemoryStage
where
    S: Default + Send + Sync + 'static,
    L: Layer,
{
    let state = Arc::<S>::default();
    MemoryStage::start().wrapped(move |inner| Arc::new(Layered(layer(inner, state.clone()))))
}

fn rename_claims(rename: fn(&Claim) -> String) -> MemoryStage {
    MemoryStage::start().wrapped(move |inner| Arc::new(Layered(RenamesClaims { inner, rename })))
}

fn alter_leases(actual_ttl: fn(Duration) -> Duration) -> MemoryStage {
    MemoryStage::start()
        .wrapped(move |inner| Arc::new(Layered(AlteredLeases { inner, actual_ttl })))
}
