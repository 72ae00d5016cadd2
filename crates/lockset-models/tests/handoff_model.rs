//! The hand-off queue in every order of events: sound by all rules, broken without any of them.
//!
//! The numbers of the broken variants are those of `docs/redis-handoff.md`. A deeper search:
//! `cargo run --release -p lockset-models --example handoff_model -- deep`.
#![allow(clippy::print_stdout, reason = "states explored are to be seen")]

mod searches;

use lockset_models::explorer::explore;
use lockset_models::handoff_model::{Breach, Rule, Scenario};
use searches::{MOST, is_broken, is_sound};

fn two() -> Scenario {
    Scenario::clients(2)
}

fn three() -> Scenario {
    Scenario::clients(3)
}

/// The last claim waits for so long while nobody alive holds, in the worst case, and not longer.
/// Leases are q, f and ttl; a letter is under way for up to `way`, heartbeats go out every `beat`.
#[track_caller]
fn waits_at_most(what: &str, scenario: Scenario, way: u8, beat: u8, ticks: u8) {
    let explored = explore(&scenario.timers(way, beat, ticks), MOST);
    println!("{what}: {ticks} ticks; {explored}");
    assert!(explored.found.is_none(), "{what}: {explored}");
    assert!(explored.exhausted, "{what} is too large: {explored}");
    assert_eq!(explored.greatest, ticks, "{what}: the bound is not reached: {explored}");
}

#[test]
fn two_claims_are_sound_with_a_lost_connection_and_a_crash() {
    is_sound("two claims, 1 cut, 1 crash", &two().cuts(1).crashes(1));
}

#[test]
fn three_claims_are_sound_with_pauses_and_cancels() {
    is_sound("three claims, 2 letters", &three().letters(2));
}

#[test]
fn three_claims_are_sound_with_a_crash() {
    is_sound("three claims, 2 letters, 1 crash", &three().letters(2).patient().crashes(1));
}

#[test]
fn a_release_with_its_next_claim_is_sound_with_a_lost_connection() {
    is_sound("gate and another, 2 letters, 1 cut", &Scenario::gate(3).letters(2).cuts(1));
    is_sound("gate alone, 1 cut, 1 crash", &Scenario::gate(2).cuts(1).crashes(1));
}

#[test]
fn a_release_with_its_next_claim_is_sound_with_a_crash() {
    is_sound("gate and another, 1 crash", &Scenario::gate(3).crashes(1));
}

#[test]
fn other_leases_are_sound() {
    is_sound("two claims, q=2 f=4 ttl=5, 1 crash", &two().leases(2, 4, 5).crashes(1));
    is_sound("two claims, f = ttl, 1 cut", &two().leases(1, 2, 2).cuts(1));
}

#[test]
fn no_1_a_void_grant_is_believed_with_another() {
    let scenario = three().letters(2).cuts(1).prompt().patient().without(&[Rule::Stamp]);
    is_broken(&scenario.seeks(Breach::TwoBelievers), Breach::TwoBelievers, 19);
}

#[test]
fn no_2_an_id_is_queued_again_after_gone() {
    let scenario = three().patient().without(&[Rule::Stamp, Rule::NewIdAfterGone]);
    is_broken(&scenario.seeks(Breach::TwoBelievers), Breach::TwoBelievers, 20);
}

#[test]
fn no_3_a_claim_queues_behind_itself() {
    let scenario = two().cuts(1).without(&[Rule::AcquireKnowsItself]);
    is_broken(&scenario, Breach::BesideItself, 6);
    let scenario = two().cuts(1).without(&[Rule::AcquireKnowsItself, Rule::Stamp]);
    is_broken(&scenario.seeks(Breach::BeliefWithoutLease), Breach::BeliefWithoutLease, 12);
}

#[test]
fn no_4_a_free_lock_is_handed_to_nobody() {
    // The holder dies, 8 ticks pass: the waiter must hold then, and never does.
    let scenario = two().leases(3, 6, 8).crashes(1).without(&[Rule::HandOnWhenFree]);
    for bound in [8, 100] {
        let explored = explore(&scenario.clone().timers(0, 1, bound), MOST);
        println!("{explored}");
        let found = explored.found.as_ref().map(|(breach, _)| *breach);
        assert_eq!(found, Some(Breach::WaitsTooLong), "{explored}");
    }
}

#[test]
fn no_5_a_live_waiter_is_thrown_out() {
    let scenario = two().cuts(1).without(&[Rule::UnheardKeepsPlace]);
    is_broken(&scenario, Breach::ThrownOut, 7);
}

#[test]
fn no_6_a_late_release_revives_its_withdrawn_next() {
    let scenario = Scenario::gate(2).cuts(1).without(&[Rule::NextLooksAtMark]);
    is_broken(&scenario, Breach::AfterTheEnd, 7);
}

#[test]
fn no_7_a_late_release_queues_its_next_behind_itself() {
    let scenario = Scenario::gate(2).cuts(1).without(&[Rule::NextKnowsItself]);
    is_broken(&scenario, Breach::BesideItself, 9);
}

#[test]
fn no_8_a_late_request_comes_after_an_unmarked_release() {
    let scenario = two().cuts(1).without(&[Rule::DirtyReleaseMarks]);
    is_broken(&scenario, Breach::AfterTheEnd, 9);
}

#[test]
fn no_9_a_release_by_token_leaves_the_zombie() {
    let scenario = two().cuts(1).without(&[Rule::EndsByIdAlone]);
    is_broken(&scenario, Breach::AfterTheEnd, 12);
}

#[test]
fn no_10_a_lost_claim_is_forgotten_and_comes_back() {
    let scenario = two().cuts(1).without(&[Rule::DirtyEndsAlways]);
    is_broken(&scenario, Breach::AfterTheEnd, 13);
}

#[test]
fn control_a_heartbeat_that_does_not_tell_the_grant() {
    let scenario = two().without(&[Rule::HeartbeatTellsGrant, Rule::Stamp]);
    is_broken(&scenario, Breach::BeliefWithoutLease, 12);
    // The stamp alone makes up for it.
    is_sound("heartbeat without grant", &two().cuts(1).without(&[Rule::HeartbeatTellsGrant]));
}

#[test]
fn control_validity_from_the_request_that_was_answered_granted() {
    let scenario = two().without(&[Rule::CountsFromQueued]);
    is_broken(&scenario, Breach::BeliefWithoutLease, 11);
}

#[test]
fn control_validity_from_receipt() {
    let scenario = two().without(&[Rule::CountsFromSending]);
    is_broken(&scenario, Breach::BeliefWithoutLease, 8);
}

#[test]
fn control_a_renewal_by_id_only() {
    let scenario = two().cuts(1).without(&[Rule::RenewChecksToken]);
    is_broken(&scenario, Breach::BeliefWithoutLease, 13);
}

#[test]
fn control_a_withdrawal_without_a_mark() {
    let scenario = two().cuts(1).without(&[Rule::WithdrawalMarks]);
    is_broken(&scenario, Breach::AfterTheEnd, 4);
}

#[test]
fn a_hand_off_takes_two_ways() {
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
fn a_lost_connection_costs_the_ways_of_another_heartbeat() {
    waits_at_most("a cut", three().leases(3, 6, 8).cuts(1), 0, 1, 0);
    waits_at_most("a cut, way 1", two().leases(6, 12, 14).cuts(1), 1, 2, 4 + 2);
}

#[test]
fn courtesy_is_sound() {
    is_sound("two claims, 2 courtesies, 1 cut", &two().courtesies(2, 1).cuts(1));
    is_sound("three claims, 2 letters, 1 courtesy", &three().letters(2).courtesies(1, 1));
    let gate = Scenario::gate(3).letters(2).courtesies(1, 1);
    is_sound("gate and another, 2 letters, 1 courtesy", &gate);
    let scenario = two().courtesies(1, 1).without(&[Rule::LeftFreeStaysFree]);
    is_broken(&scenario, Breach::NotLeftFree, 9);
}

/// The lock is free for as long as it was to be, and then the first waiter has it.
#[test]
fn courtesy_costs_its_own_time() {
    let scenario = || two().leases(12, 24, 26).courtesies(1, 2);
    waits_at_most("left free for 2", scenario(), 0, 4, 2);
    waits_at_most("left free for 2 twice", three().leases(3, 6, 8).courtesies(2, 2), 0, 1, 2 + 2);
    // If nobody is told, the next heartbeat finds out.
    let untold = scenario().without(&[Rule::FirstIsTold]);
    waits_at_most("left free for 2, nobody told", untold, 0, 4, 4);
    waits_at_most("left free for 2, a lost push", scenario().lost_pushes(1), 0, 4, 4);
    // Two ways of the first acquisition, and those of release, word, look and answer.
    let far = two().leases(6, 12, 14).courtesies(1, 2);
    waits_at_most("left free for 2, way 1", far, 1, 2, 2 + 2 + 4);
}
