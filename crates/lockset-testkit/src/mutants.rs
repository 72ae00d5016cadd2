//! For each law, an engine that breaks it.
//!
//! Each mutant is the memory engine with one thing wrong. A law that passes on its mutant would
//! prove nothing; so every law is played on its mutants, and must fail there in the words that
//! belong to the fault. Where the law is about what no engine can break, the fault is in a stand-in
//! for the front.

use std::sync::{Arc, Once};
use std::time::Duration;

use lockset::engine::{Claim, Engine};

use crate::form::Form;
use crate::laws::Law;
use crate::layer::{Layer, Layered};
use crate::stage::{MemoryStage, Stage, Time};
use crate::suite::{Setting, play};

pub(crate) mod faults;

use faults::*;

/// A fault that a law must find.
#[derive(Clone, Copy, Debug)]
pub struct Mutant {
    /// The law that must fail.
    pub law: &'static str,
    /// Part of what it must say.
    pub says: &'static str,
    /// The form in which it must fail.
    pub form: Form,
    /// How time passes on its stage.
    pub time: Time,
    /// The broken stage.
    pub setting: Setting,
}

impl Mutant {
    /// Plays the law on this mutant, in silence; panics if the law does not find the fault.
    pub fn must_fail(&self) {
        silence_mutants();
        let law = Law::named(self.law);
        match play(&format!("{MUTANT}{}", self.law), law, self.form, self.time, self.setting) {
            Ok(()) => panic!("{} did not find its fault ({})", self.law, self.says),
            Err(found) => assert!(
                found.contains(self.says),
                "{} failed for another reason than {:?}: {found}",
                self.law,
                self.says
            ),
        }
    }
}

const MUTANT: &str = "mutant of ";

/// Laws fail on mutants as they should; that is nothing to read about.
fn silence_mutants() {
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

/// A setting whose engines are all dressed in one layer.
macro_rules! setting {
    ($stage:expr) => {
        || Box::pin(async { Box::new($stage) as Box<dyn Stage> })
    };
}

macro_rules! mutants {
    ($($law:ident as $form:ident on $stage:expr => $says:literal;)*) => {
        &[$(Mutant {
            law: stringify!($law),
            says: $says,
            form: Form::$form,
            time: Time::Virtual,
            setting: setting!($stage),
        },)*]
    };
}

/// The mutants in virtual time. Those that need real time are in [`REAL`].
pub const VIRTUAL: &[Mutant] = mutants! {
    two_claims_never_hold_at_once as Mutex on renamed(own_name) => "was inside";
    two_claims_never_hold_at_once as Writer on renamed(own_name) => "was inside";
    two_claims_never_hold_at_once as OnePermit on renamed(own_name) => "was inside";
    names_are_independent as Mutex on renamed(one_name) => "together with another";
    many_may_come_to_a_fresh_home_at_once as Mutex on renamed(own_name) => "did not meet";
    a_release_admits_the_waiter_and_not_its_expiry as Mutex on dressed(DeafToRelease)
        => "admitted by the release";
    waiters_of_one_process_are_served_in_order as Writer on shared(LastComeFirst)
        => "served out of turn";
    waiters_of_one_process_are_served_in_order as OnePermit on shared(LastComeFirst)
        => "served out of turn";
    processes_take_turns as Mutex on shared(FamilyFirst) => "two turns in a row";
    processes_take_turns as Writer on shared(LastComeFirst) => "two turns in a row";
    a_release_takes_the_next_along as Mutex on dressed(LeavesTheNext) => "was before the next";
    a_release_admits_exactly_one_waiter as Mutex on shared(TwoAtOnce) => "admitted too";
    a_kept_guard_outlives_its_ttl as Mutex on dressed(RenewsNothing) => "free while kept";
    a_fixed_lease_ends_by_itself as Mutex on leases(|ttl| ttl * 100) => "a bare lease ends";
    a_fixed_lease_ends_by_itself as Mutex on leases(|ttl| ttl / 2) => "before the lease ended";
    a_longest_hold_ends_the_lock as Mutex on dressed(IgnoresWithdrawals) => "when it ended";
    a_dropped_guard_releases as Mutex on dressed(DeafToRelease) => "after the drop";
    a_lease_that_is_over_is_not_handed_out as Mutex on dressed(TellsLate)
        => "its home does not know it (by its own request)";
    a_strangers_release_does_nothing as Mutex on dressed(ReleasesByName)
        => "a stranger released it";
    a_renewal_needs_id_and_token as Mutex on shared(RenewsById) => "another token was renewed";
    releasing_twice_is_harmless as Mutex on dressed(ReleasesByName)
        => "the next holder was not touched";
    a_repeated_acquire_changes_nothing as Mutex on shared(TakesAgain) => "took another token";
    a_withdrawn_claim_stays_withdrawn as Mutex on shared(ForgetsWithdrawals) => "it came back";
    a_lock_is_passed_on_once as Mutex on shared(PassesOnToAll) => "passed on twice";
    tokens_only_grow as Mutex on shared(OneToken) => "tokens do not grow";
    tokens_grow_over_a_restart as Mutex on dressed(CountsFromOne) => "after";
    a_given_floor_is_exact as Mutex on dressed(IgnoresFloors) => "with the floor";
    raising_lifts_the_fence_and_refuses_to_lower_it as Mutex on dressed(RaisesNothing)
        => "the raised token is the claim's";
    raising_lifts_the_fence_and_refuses_to_lower_it as Mutex on dressed(Lowers)
        => "it was lowered";
    a_frozen_server_loses_the_guard_by_its_deadline as Mutex on dressed(PromisesTooMuch)
        => "the guard loses by its deadline";
    a_guard_never_says_held_after_its_deadline as Mutex on dressed(PromisesTooMuch)
        => "promises more than its ttl";
    a_guard_never_says_held_after_its_deadline as Mutex on dressed(RenewsTooMuch)
        => "right after a pause";
    a_break_now_is_told_at_once as Mutex on dressed(TellsNothing) => "the holder is told";
    a_break_now_is_told_to_whoever_attached as Mutex on dressed(TellsOfItsOwnOnly::new)
        => "whoever attached is told";
    a_gentle_break_ends_with_the_lease as Mutex on dressed(BreaksAtOnce) => "others see it";
    a_gentle_break_ends_with_the_lease as Mutex on dressed(BreaksNothing) => "the holder is told";
    a_cut_session_is_told as Mutex on dressed(ForgetsTheSilent::new).with_stand_ins()
        => "it is held again";
    a_cut_session_is_told as Mutex on dressed(PromisesTooMuch).with_stand_ins()
        => "the guard loses by its deadline";
    a_cancelled_lock_leaves_nothing as Mutex on dressed(IgnoresWithdrawals) => "is left";
    a_cancelled_lock_leaves_nothing as OnePermit on dressed(IgnoresWithdrawals) => "is left";
    a_timed_out_waiter_leaves_nothing as Mutex on dressed(StaysInLine) => "waiters: [Waiter";
    a_silent_home_does_not_prolong_a_wait as Mutex
        on MemoryStage::start().dressed_outside(|inner| Arc::new(Layered(SaysItIsBusy(inner))))
        => "an error that says that nobody answers";
    close_releases_everything as Mutex on dressed(DeafToRelease) => "when its holder closed";
    close_releases_everything as Mutex on dressed(IgnoresWithdrawals) => "is left";
    a_killed_holder_process_is_succeeded as Mutex
        on leases(|ttl| ttl * 100).with_stand_ins() => "the killed holder is succeeded";
    a_crashed_waiter_delays_nobody_for_long as Mutex on leases(|ttl| ttl * 100)
        => "behind the crashed waiter";
    a_crash_gives_permits_back as Mutex on leases(|ttl| ttl * 100) => "the permits come back";
    several_locks_are_taken_all_or_none as Mutex on dressed(DeafToRelease)
        => "who was in the way";
    opposite_orders_do_not_wait_for_each_other as Mutex on shared(NamesItsHomeAnew::new)
        => "all had all locks";
    readers_share_and_writers_exclude as Mutex on dressed(ReadersAreWriters)
        => "another of the same client";
    readers_share_and_writers_exclude as Mutex on dressed(WritersAreReaders) => "a writer beside readers";
    a_waiting_writer_is_not_starved as Mutex on dressed(ReadersPass) => "passed the waiting writer";
    a_downgrade_lets_readers_in_and_keeps_the_token as Mutex on dressed(AmendsNothing)
        => "it comes in";
    permits_add_up_to_the_limit as Mutex on dressed(CountsClaims) => "a sixth permit";
    permits_are_served_in_strict_order as Mutex on dressed(SmallOnesPass) => "one passed the queue";
    any_permit_that_comes_back_admits_the_waiter as Mutex on shared(HeedsOne::the_last)
        => "number 0 of 3 leaves";
    any_permit_that_comes_back_admits_the_waiter as Mutex on shared(HeedsOne::the_first)
        => "number 1 of 3 leaves";
    one_name_has_one_use as Mutex on renamed(name_by_mode) => "two limits";
    a_refused_mode_is_refused_not_hung as Mutex on dressed(HangsOnReaders) => "an answer";
    a_reentered_guard_counts as Mutex on dressed(DeafToRelease) => "the last guard released it";
    a_detached_lock_is_attached_elsewhere as Mutex on dressed(RenewsItsOwnOnly::new) => "Forgotten";
    a_detached_lock_is_attached_elsewhere as Mutex on dressed(OneHome) => "at another home";
    a_ticket_is_attached_once as Mutex on shared(PassesOnToAll)
        => "attached twice, by another client";
    an_election_shows_its_leader as Mutex on dressed(LosesNotes) => "first";
    a_latch_opens_when_counted_down as Mutex on dressed(LastWriteWins) => "a count was lost";
    a_barrier_lets_all_go_together as Mutex on dressed(WatchesOnce) => "all three pass";
    a_cut_connection_counts_nothing_twice as Mutex on dressed(WatchesOnce).with_stand_ins()
        => "it opens for who waited";
    a_cut_connection_counts_nothing_twice as Mutex on dressed(CountsAgain::new).with_stand_ins()
        => "after Ended";
    watch_tells_of_changes as Mutex on dressed(WatchesOnce) => "the grant";
    list_shows_holders_and_waiters as Mutex on dressed(ListsNoWaiters) => "patient";
    list_shows_holders_and_waiters as Mutex on dressed(ListsAll) => "only with the prefix";
    a_notes_change_is_seen as Mutex on dressed(AmendsNothing) => "the new word is seen";
};

/// The mutants in real time.
pub const REAL: &[Mutant] = &[Mutant {
    law: "kept_guards_survive_a_blocked_runtime",
    says: "after the runtime was blocked",
    form: Form::Mutex,
    time: Time::Real,
    // tokio's clock puts the keeper on the user's runtime.
    setting: setting!(MemoryStage::start().in_real_time(Duration::from_millis(400))),
}];

/// A stage where each client's engine is wrapped in a layer.
fn dressed<L: Layer>(layer: fn(Arc<dyn Engine>) -> L) -> MemoryStage {
    MemoryStage::start().dressed(move |inner| Arc::new(Layered(layer(inner))))
}

/// The same for layers that share something between all clients.
fn shared<S, L>(layer: fn(Arc<dyn Engine>, Arc<S>) -> L) -> MemoryStage
where
    S: Default + Send + Sync + 'static,
    L: Layer,
{
    let state = Arc::<S>::default();
    MemoryStage::start().dressed(move |inner| Arc::new(Layered(layer(inner, state.clone()))))
}

fn renamed(rename: fn(&Claim) -> String) -> MemoryStage {
    MemoryStage::start().dressed(move |inner| Arc::new(Layered(Renamed { inner, rename })))
}

fn leases(at_home: fn(Duration) -> Duration) -> MemoryStage {
    MemoryStage::start().dressed(move |inner| Arc::new(Layered(Leases { inner, at_home })))
}
