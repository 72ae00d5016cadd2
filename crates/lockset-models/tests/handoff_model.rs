//! The hand-off queue in every order of events: sound by all rules, broken without any of them.
//!
//! The numbers of the broken variants are those of `docs/redis-handoff.md`. A deeper search:
//! `cargo run --release -p lockset-models --example handoff_model -- deep`.
#![allow(clippy::print_stdout, reason = "states explored are to be seen")]

mod searches;

use lockset_models::explorer::explore;
use lockset_models::handoff_model::{Rule, Scenario, Violation};
use searches::{MAX_STATES, assert_broken, assert_sound};

fn two() -> Scenario {
    Scenario::clients(2)
}

fn three() -> Scenario {
    Scenario::clients(3)
}

/// The last claim waits for so long while no live client holds, in the worst case, and not longer.
/// Leases are q, f and ttl; a letter is under way for up to `way`, heartbeats go out every `beat`.
#[track_caller]
fn waits_at_most(what: &str, scenario: Scenario, transit: u8, heartbeat_interval: u8, ticks: u8) {
    let explored = explore(&scenario.timers(transit, heartbeat_interval, ticks), MAX_STATES);
    println!("{what}: {ticks} ticks; {explored}");
    assert!(explored.found.is_none(), "{what}: {explored}");
    assert!(explored.exhausted, "{what} is too large: {explored}");
    assert_eq!(explored.max_measure, ticks, "{what}: the bound is not reached: {explored}");
}

#[test]
fn two_claims_are_sound_with_a_lost_connection_and_a_crash() {
    assert_sound("two claims, 1 cut, 1 crash", &two().cuts(1).crashes(1));
}

#[test]
fn three_claims_are_sound_with_pauses_and_cancels() {
    assert_sound("three claims, 2 letters", &three().messages(2));
}

#[test]
fn three_claims_are_sound_with_a_crash() {
    assert_sound(
        "three claims, 2 letters, 1 crash",
        &three().messages(2).without_cancels().crashes(1),
    );
}

#[test]
fn a_release_with_its_next_claim_is_sound_with_a_lost_connection() {
    assert_sound("gate and another, 2 letters, 1 cut", &Scenario::gate(3).messages(2).cuts(1));
    assert_sound("gate alone, 1 cut, 1 crash", &Scenario::gate(2).cuts(1).crashes(1));
}

#[test]
fn a_release_with_its_next_claim_is_sound_with_a_crash() {
    assert_sound("gate and another, 1 crash", &Scenario::gate(3).crashes(1));
}

#[test]
fn other_leases_are_sound() {
    assert_sound("two claims, q=2 f=4 ttl=5, 1 crash", &two().leases(2, 4, 5).crashes(1));
    assert_sound("two claims, f = ttl, 1 cut", &two().leases(1, 2, 2).cuts(1));
}

#[test]
fn no_1_a_void_grant_is_trusted_beside_another() {
    let scenario = three()
        .messages(2)
        .cuts(1)
        .without_late_requests()
        .without_cancels()
        .without(&[Rule::Stamp]);
    assert_broken(&scenario.looks_for(Violation::TwoHolders), Violation::TwoHolders, 19);
}

#[test]
fn no_2_an_id_is_queued_again_after_gone() {
    let scenario = three().without_cancels().without(&[Rule::Stamp, Rule::NewIdAfterGone]);
    assert_broken(&scenario.looks_for(Violation::TwoHolders), Violation::TwoHolders, 20);
}

#[test]
fn no_3_a_claim_queues_behind_itself() {
    let scenario = two().cuts(1).without(&[Rule::AcquireIsIdempotent]);
    assert_broken(&scenario, Violation::DuplicateEntry, 6);
    let scenario = two().cuts(1).without(&[Rule::AcquireIsIdempotent, Rule::Stamp]);
    assert_broken(
        &scenario.looks_for(Violation::HeldWithoutLease),
        Violation::HeldWithoutLease,
        12,
    );
}

#[test]
fn no_4_a_free_lock_is_not_handed_over() {
    // The holder dies, 8 ticks pass: the waiter must hold then, and never does.
    let scenario = two().leases(3, 6, 8).crashes(1).without(&[Rule::HandOverWhenFree]);
    for bound in [8, 100] {
        let explored = explore(&scenario.clone().timers(0, 1, bound), MAX_STATES);
        println!("{explored}");
        let found = explored.found.as_ref().map(|(violation, _)| *violation);
        assert_eq!(found, Some(Violation::WaitsTooLong), "{explored}");
    }
}

#[test]
fn no_5_a_live_waiter_is_evicted() {
    let scenario = two().cuts(1).without(&[Rule::UnreachableKeepsEntry]);
    assert_broken(&scenario, Violation::LiveWaiterEvicted, 7);
}

#[test]
fn no_6_a_late_release_revives_its_withdrawn_next() {
    let scenario = Scenario::gate(2).cuts(1).without(&[Rule::NextChecksTombstone]);
    assert_broken(&scenario, Violation::AliveAfterEnd, 7);
}

#[test]
fn no_7_a_late_release_queues_its_next_behind_itself() {
    let scenario = Scenario::gate(2).cuts(1).without(&[Rule::NextIsIdempotent]);
    assert_broken(&scenario, Violation::DuplicateEntry, 9);
}

#[test]
fn no_8_a_late_request_follows_a_release_without_a_tombstone() {
    let scenario = two().cuts(1).without(&[Rule::DirtyReleaseLeavesTombstone]);
    assert_broken(&scenario, Violation::AliveAfterEnd, 9);
}

#[test]
fn no_9_a_release_by_token_leaves_the_zombie() {
    let scenario = two().cuts(1).without(&[Rule::EndMatchesById]);
    assert_broken(&scenario, Violation::AliveAfterEnd, 12);
}

#[test]
fn no_10_a_lost_claim_is_forgotten_and_comes_back() {
    let scenario = two().cuts(1).without(&[Rule::DirtyEndsAlways]);
    assert_broken(&scenario, Violation::AliveAfterEnd, 13);
}

#[test]
fn control_a_heartbeat_that_does_not_report_the_grant() {
    let scenario = two().without(&[Rule::HeartbeatReportsGrant, Rule::Stamp]);
    assert_broken(&scenario, Violation::HeldWithoutLease, 12);
    // The stamp alone makes up for it.
    assert_sound("heartbeat without grant", &two().cuts(1).without(&[Rule::HeartbeatReportsGrant]));
}

#[test]
fn control_validity_from_the_request_that_was_answered_granted() {
    let scenario = two().without(&[Rule::CountsFromQueued]);
    assert_broken(&scenario, Violation::HeldWithoutLease, 11);
}

#[test]
fn control_validity_from_receipt() {
    let scenario = two().without(&[Rule::CountsFromSending]);
    assert_broken(&scenario, Violation::HeldWithoutLease, 8);
}

#[test]
fn control_a_renewal_by_id_only() {
    let scenario = two().cuts(1).without(&[Rule::RenewChecksToken]);
    assert_broken(&scenario, Violation::HeldWithoutLease, 13);
}

#[test]
fn control_a_withdrawal_without_a_tombstone() {
    let scenario = two().cuts(1).without(&[Rule::WithdrawalLeavesTombstone]);
    assert_broken(&scenario, Violation::AliveAfterEnd, 4);
}

#[test]
fn a_handoff_takes_two_message_delays() {
    waits_at_most("no fault, no delay", three().leases(3, 6, 8), 0, 1, 0);
    // The first acquisition, and one hand-off.
    waits_at_most("no fault, way 1", two().leases(3, 6, 8), 1, 1, 2 + 2);
}

#[test]
fn a_crash_costs_one_ttl() {
    waits_at_most("a crash", two().leases(3, 6, 8).crashes(1), 0, 1, 8);
    waits_at_most("a crash, three claims", three().leases(3, 6, 8).crashes(1), 0, 1, 8);
    waits_at_most("two crashes", three().leases(3, 6, 8).crashes(2), 0, 1, 8 + 8);
    // Six ways: the first acquisition, the release or renewal under way, the look and its answer.
    waits_at_most("a crash, way 1", two().leases(6, 12, 14).crashes(1), 1, 2, 14 + 6);
    // Who was second looks one step later, even if it has become the first since.
    waits_at_most("rare heartbeats", two().leases(12, 24, 26).crashes(1), 0, 4, 26);
    waits_at_most("rare heartbeats", three().leases(12, 24, 26).crashes(1), 0, 4, 26 + 1);
}

#[test]
fn a_lost_push_costs_one_heartbeat() {
    waits_at_most("a lost push", three().leases(12, 24, 26).lost_pushes(1), 0, 4, 4);
    // Besides the two ways of the first acquisition and the two of the hand-off.
    let scenario = two().leases(6, 12, 14).lost_pushes(1);
    waits_at_most("a lost push, way 1", scenario, 1, 2, 4 + 2 + 1);
}

#[test]
fn a_lost_connection_costs_the_delays_of_another_heartbeat() {
    waits_at_most("a cut", three().leases(3, 6, 8).cuts(1), 0, 1, 0);
    waits_at_most("a cut, way 1", two().leases(6, 12, 14).cuts(1), 1, 2, 4 + 2);
}

#[test]
fn courtesy_is_sound() {
    assert_sound("two claims, 2 courtesies, 1 cut", &two().courtesies(2, 1).cuts(1));
    assert_sound("three claims, 2 letters, 1 courtesy", &three().messages(2).courtesies(1, 1));
    let gate = Scenario::gate(3).messages(2).courtesies(1, 1);
    assert_sound("gate and another, 2 letters, 1 courtesy", &gate);
    let scenario = two().courtesies(1, 1).without(&[Rule::LeftFreeStaysFree]);
    assert_broken(&scenario, Violation::NotLeftFree, 9);
}

/// The lock is free for as long as it was to be, and then the first waiter has it.
#[test]
fn courtesy_costs_its_own_time() {
    let scenario = || two().leases(12, 24, 26).courtesies(1, 2);
    waits_at_most("left free for 2", scenario(), 0, 4, 2);
    waits_at_most("left free for 2 twice", three().leases(3, 6, 8).courtesies(2, 2), 0, 1, 2 + 2);
    // If no message is sent, the next heartbeat finds out.
    let untold = scenario().without(&[Rule::FirstIsNotified]);
    waits_at_most("left free for 2, without a message", untold, 0, 4, 4);
    waits_at_most("left free for 2, a lost push", scenario().lost_pushes(1), 0, 4, 4);
    // Two ways of the first acquisition, and those of release, word, look and answer.
    let far = two().leases(6, 12, 14).courtesies(1, 2);
    waits_at_most("left free for 2, way 1", far, 1, 2, 2 + 2 + 4);
}
