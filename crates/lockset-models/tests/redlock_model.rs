//! Fenced Redlock in every order of events: sound by all rules, broken without any of them.
//!
//! A deeper search: `cargo run --release -p lockset-models --example redlock_model -- deep`.
#![allow(clippy::print_stdout, reason = "states explored are to be seen")]

mod searches;

use lockset_models::redlock_model::{Proposals, Restart, Rule, Scenario, Violation};
use searches::{assert_broken, assert_sound};

fn two() -> Scenario {
    Scenario::new(3, 2)
}

fn three() -> Scenario {
    Scenario::new(3, 3)
}

fn any(values: &[u8]) -> Proposals {
    Proposals::Any(values.to_vec())
}

#[test]
fn three_attempts_are_sound() {
    assert_sound("three attempts", &three());
}

#[test]
fn duplicated_requests_are_sound() {
    assert_sound("two attempts, 3 duplicates", &two().duplicates(3));
}

#[test]
fn a_register_never_goes_back() {
    assert_sound("register, two attempts, 2 duplicates", &two().register().duplicates(2));
    assert_sound("register, three attempts", &three().register());
}

#[test]
fn any_proposals_are_sound() {
    assert_sound("proposals, 1 duplicate", &two().proposals(any(&[0, 2, 5])).duplicates(1));
}

/// Who waits at one node proposes to the others what it was granted there.
#[test]
fn proposals_that_follow_the_first_grant_are_sound() {
    let following = Proposals::Following(vec![0, 3]);
    assert_sound("following, 1 duplicate", &two().proposals(following).duplicates(1));
    assert_sound("following, three", &three().proposals(Proposals::Following(vec![0])));
}

#[test]
fn other_numbers_of_nodes_are_sound() {
    assert_sound("four nodes, 1 duplicate", &Scenario::new(4, 2).duplicates(1));
    assert_sound("five nodes", &Scenario::new(5, 2));
}

#[test]
fn an_extension_proves_that_nothing_newer_was_issued() {
    assert_sound("extension, 2 duplicates", &two().extensions().duplicates(2));
    assert_sound("extension, three attempts", &three().extensions());
}

/// A node that answered one more than the token had seen nothing newer.
#[test]
fn the_value_after_the_token_may_count() {
    assert_sound("next value counts, 2 duplicates", &two().extensions().margin(1).duplicates(2));
    assert_sound("next value counts, 2 seeds", &two().seeds(2).margin(1).duplicates(1));
    assert_broken(&two().extensions().margin(2), Violation::ExtendedThoughOld, 16);
}

#[test]
fn seeding_a_node_again_is_sound() {
    assert_sound("3 seeds", &two().seeds(3));
    assert_sound("2 seeds, 1 duplicate", &two().seeds(2).duplicates(1));
}

#[test]
fn no_1_the_greatest_of_a_majority_is_not_written_back() {
    assert_broken(&two().without(&[Rule::WritesBack]), Violation::TokenTwice, 10);
}

#[test]
fn no_2_written_back_where_another_holds() {
    let unchecked = [Rule::RaiseChecksHolder, Rule::RaiseChecksFence];
    assert_broken(&two().without(&unchecked), Violation::TokenTwice, 14);
    assert_broken(&two().without(&[Rule::RaiseChecksHolder]), Violation::TokenTwice, 14);
}

#[test]
fn no_3_written_back_under_a_higher_fence() {
    let candidate = two().without(&[Rule::RaiseChecksFence]);
    assert_sound("no look at the fence, no duplicate", &candidate);
    assert_broken(&candidate.duplicates(1), Violation::TokenTwice, 17);
}

#[test]
fn no_4_two_attempts_share_an_id() {
    assert_broken(&two().without(&[Rule::FreshIds]), Violation::TokenTwice, 8);
}

#[test]
fn no_5_an_extension_checks_only_the_holder() {
    let scenario = two().extensions().without(&[Rule::ExtendChecksFence]);
    assert_sound("extension by holder, no duplicate", &scenario);
    assert_broken(&scenario.duplicates(1), Violation::ExtendedThoughOld, 16);
}

#[test]
fn no_6_an_extension_creates_what_is_missing() {
    let scenario = two().extensions().without(&[Rule::ExtendCreatesNothing]);
    assert_broken(&scenario, Violation::ExtendedThoughOld, 15);
}

#[test]
fn no_7_an_extension_counts_a_value_above_its_token() {
    let scenario = two().extensions().without(&[Rule::HigherDoesNotCount]);
    assert_broken(&scenario, Violation::ExtendedThoughOld, 16);
}

#[test]
fn no_8_an_extension_counts_the_answers_of_another() {
    let scenario = two().extensions().without(&[Rule::ExtendCountsItsOwn]);
    assert_broken(&scenario, Violation::ExtendedThoughOld, 14);
}

#[test]
fn no_9_a_reseeded_node_counts_whatever_it_replies() {
    let scenario = two().seeds(2).without(&[Rule::SeedCountsExactly]);
    assert_broken(&scenario, Violation::ExtendedThoughOld, 14);
}

#[test]
fn no_10_a_node_forgets_its_fence() {
    let scenario = two().crashes(1, Restart::AtOnce);
    assert_broken(&scenario, Violation::TokenTwice, 9);
    let scenario = scenario.register().looks_for(Violation::OlderAccepted);
    assert_broken(&scenario, Violation::OlderAccepted, 11);
}

#[test]
fn no_11_a_node_that_forgot_waits_until_all_leases_are_over() {
    assert_broken(&two().crashes(1, Restart::AfterAllLeasesEnd), Violation::TokenTwice, 11);
}

/// Proposals ahead of every token keep acquisitions in order that do not overlap. Those that do may
/// still meet in one value above their proposals, if a node forgets and a request is repeated.
#[test]
fn a_clock_ahead_of_all_tokens_makes_up_for_most_of_a_forgotten_fence() {
    let scenario = two().crashes(1, Restart::AtOnce).proposals(Proposals::Clock(6));
    assert_sound("a crash, a clock", &scenario);
    let scenario = scenario.duplicates(1);
    let order = scenario.clone().looks_for(Violation::TokenFell);
    assert_sound("a crash, a clock, 1 duplicate: the order", &order);
    assert_broken(&scenario, Violation::TokenTwice, 17);
}

/// What a node forgot it cannot deny: a holder who seeds it again takes it from a newer one.
#[test]
fn a_reseeded_node_that_lost_its_memory_is_taken_from_a_newer_holder() {
    let scenario = two().crashes(1, Restart::AtOnce).proposals(Proposals::Clock(6)).seeds(1);
    assert_broken(&scenario, Violation::ExtendedThoughOld, 12);
}
