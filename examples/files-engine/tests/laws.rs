//! The laws on the files engine: one directory, several real processes, the machine's own time.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs::File;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use lockset::Lockset;
use lockset::clock::Clock;
use lockset::engine::Engine;
use lockset_example_files::Files;
use lockset_testkit::process::Process;
use lockset_testkit::{Stage, Time, suite};

/// A directory of its own for every law.
#[derive(Debug)]
struct FilesStage {
    folder: tempfile::TempDir,
    /// While this is held, no transaction can begin: a realistic fault, which a stopped process
    /// would cause too.
    frozen: Mutex<Option<File>>,
}

impl FilesStage {
    fn start() -> Self {
        Self { folder: tempfile::tempdir().unwrap(), frozen: Mutex::new(None) }
    }

    fn folder(&self, backend: &str) -> PathBuf {
        self.folder.path().join(backend)
    }

    fn open(&self, backend: &str) -> Arc<dyn Engine> {
        Arc::new(Files::open(&self.folder(backend)).unwrap())
    }
}

#[async_trait]
impl Stage for FilesStage {
    fn time(&self) -> Time {
        Time::Real
    }

    fn clock(&self) -> Clock {
        Clock::boot()
    }

    fn ttl(&self) -> Duration {
        Duration::from_secs(2)
    }

    async fn client(&self) -> Lockset {
        Lockset::with_engine(self.engine().await).unwrap()
    }

    async fn engine(&self) -> Arc<dyn Engine> {
        self.open("here")
    }

    async fn other_backend(&self) -> Lockset {
        Lockset::with_engine(self.open("elsewhere")).unwrap()
    }

    async fn freeze(&self) {
        let guard = File::open(self.folder("here").join("guard")).unwrap();
        guard.lock().unwrap();
        *self.frozen.lock().unwrap() = Some(guard);
    }

    async fn thaw(&self) {
        *self.frozen.lock().unwrap() = None;
    }

    async fn process(&self) -> Option<Process> {
        let mut actor = Command::new(env!("CARGO_BIN_EXE_files-actor"));
        Some(Process::spawn(actor.arg(self.folder("here"))))
    }
}

suite! {
    files;
    time: Real;
    stage: FilesStage::start();
    once: [
        names_are_independent,
        a_release_can_enqueue_the_next_claim,
        an_expired_lease_is_never_returned_as_a_guard,
        many_clients_may_start_on_an_empty_backend_at_once,
        close_releases_everything,
        opposite_lock_orders_do_not_deadlock,
        an_election_shows_its_leader,
        a_changed_note_is_visible,
        a_stopped_process_sees_its_loss_on_resume,
        a_renewed_guard_survives_a_blocked_runtime,
        an_unsupported_mode_is_refused_at_once,
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
        // There is no connection that could be cut.
        a_cut_connection_is_reported_by_the_guard,
        latches_and_barriers_survive_a_cut_connection,
        // It has no readers, no permits, no cells, and no floor for tokens.
        a_token_floor_is_exact,
        raise_lifts_the_fence_and_never_lowers_it,
        permits_of_a_crashed_process_come_back,
        readers_share_and_writers_exclude,
        a_waiting_writer_is_not_starved,
        a_downgrade_lets_readers_in_and_keeps_the_token,
        permits_add_up_to_the_limit,
        permits_are_served_in_strict_order,
        any_returned_permit_admits_the_waiter,
        a_name_has_one_use_at_a_time,
        a_latch_opens_when_counted_down,
        a_barrier_releases_all_parties_together,
    ];
}
