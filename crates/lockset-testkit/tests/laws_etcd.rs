//! The laws on one etcd server, each with a prefix of its own.

#[macro_use]
mod common_laws;

use lockset_testkit::stage::EtcdStage;

// Its tokens are revisions of the store.
common_laws!(
    etcd,
    EtcdStage::start,
    and: [a_cut_session_is_told, a_cut_connection_counts_nothing_twice],
    not: [a_given_floor_is_exact, raising_lifts_the_fence_and_refuses_to_lower_it]
);
