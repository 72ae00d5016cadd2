//! The laws on one etcd server, each with a prefix of its own.

#[macro_use]
mod common_laws;

use lockset_testkit::stage::EtcdStage;

// Its tokens are revisions of the store.
common_laws!(
    etcd,
    EtcdStage::start,
    and: [a_cut_connection_is_reported_by_the_guard, latches_and_barriers_survive_a_cut_connection],
    not: [a_token_floor_is_exact, raise_lifts_the_fence_and_never_lowers_it]
);
