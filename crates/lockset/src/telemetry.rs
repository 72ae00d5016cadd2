//! What operators see: counters and histograms through the `metrics` facade.
//! `telemetry.md` is their list, shown in the crate's documentation.

use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};

use crate::clock::{Clock, Moment};
use crate::error::LossReason;
use crate::name::Name;
use crate::report;

/// The metrics of one client.
pub(crate) struct Telemetry {
    engine: &'static str,
    label_names: bool,
    common: Meters,
    renewals: [Counter; 3],
}

/// What is counted for all names together, or for one name.
#[derive(Clone)]
struct Meters {
    /// By [`Outcome`].
    waited: [Histogram; 4],
    waiters: Gauge,
    held: Gauge,
    hold: Histogram,
}

impl std::fmt::Debug for Telemetry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Telemetry").field("label_names", &self.label_names).finish_non_exhaustive()
    }
}

/// How an acquisition ended.
#[derive(Clone, Copy)]
pub(crate) enum Outcome {
    Granted,
    NotGranted,
    Error,
    Cancelled,
}

/// How a renewal ended.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum RenewalOutcome {
    Renewed,
    Failed,
    Lost,
}

impl Telemetry {
    pub(crate) fn new(engine: &'static str, label_names: bool) -> Self {
        let renewals = ["renewed", "failed", "lost"].map(
            |outcome| counter!("lockset_renewals_total", "engine" => engine, "outcome" => outcome),
        );
        let common = Meters::new(&[("engine", engine)]);
        Self { engine, label_names, common, renewals }
    }

    /// An acquisition returned without waiting.
    pub(crate) fn answered_at_once(&self, name: &Name, outcome: Outcome) {
        self.with(name, move |meters| meters.waited(outcome).record(0.0));
    }

    /// An acquisition begins to wait.
    pub(crate) fn waiting<'a>(&'a self, clock: &'a Clock, name: &'a Name) -> Waiting<'a> {
        self.with(name, |meters| meters.waiters.increment(1));
        Waiting { telemetry: self, clock, name, since: clock.now(), outcome: Outcome::Cancelled }
    }

    /// A lock is held from now on.
    pub(crate) fn held(&self, name: &Name) {
        self.with(name, |meters| meters.held.increment(1));
    }

    /// A lock is no longer held: it was released, handed on, or lost.
    pub(crate) fn ended(&self, name: &Name, held: Duration, lost: Option<LossReason>) {
        self.with(name, move |meters| {
            meters.held.decrement(1);
            meters.hold.record(held);
        });
        if let Some(reason) = lost {
            let (engine, reason) = (self.engine, reason.as_str());
            report::emit(move || {
                let losses =
                    counter!("lockset_losses_total", "engine" => engine, "reason" => reason);
                losses.increment(1);
            });
        }
    }

    /// So many renewals ended like this.
    pub(crate) fn renewals(&self, outcome: RenewalOutcome, count: u64) {
        let renewals = self.renewals[outcome as usize].clone();
        report::emit(move || renewals.increment(count));
    }

    fn with(&self, name: &Name, record: impl FnOnce(&Meters) + Send + 'static) {
        if self.label_names {
            let (engine, name) = (self.engine, name.clone());
            report::emit(move || {
                record(&Meters::new(&[("engine", engine), ("name", name.as_str())]));
            });
        } else if report::is_keeping() {
            let meters = self.common.clone();
            report::emit(move || record(&meters));
        } else {
            record(&self.common);
        }
    }
}

impl Meters {
    fn waited(&self, outcome: Outcome) -> &Histogram {
        &self.waited[outcome as usize]
    }

    fn new(labels: &[(&'static str, &str)]) -> Self {
        let labels: Vec<metrics::Label> = labels
            .iter()
            .map(|(key, value)| metrics::Label::new(*key, (*value).to_owned()))
            .collect();
        let waited = |outcome| {
            let mut labels = labels.clone();
            labels.push(metrics::Label::from_static_parts("outcome", outcome));
            histogram!("lockset_wait_seconds", labels)
        };
        Self {
            waited: ["granted", "not_granted", "error", "cancelled"].map(waited),
            waiters: gauge!("lockset_waiters", labels.clone()),
            held: gauge!("lockset_held", labels.clone()),
            hold: histogram!("lockset_hold_seconds", labels.clone()),
        }
    }
}

/// An acquisition that waits. If it is dropped before `ended`, it was cancelled.
pub(crate) struct Waiting<'a> {
    telemetry: &'a Telemetry,
    clock: &'a Clock,
    name: &'a Name,
    since: Moment,
    outcome: Outcome,
}

impl Waiting<'_> {
    pub(crate) fn ended(mut self, outcome: Outcome) {
        self.outcome = outcome;
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let (waited, outcome) =
            (self.clock.now().saturating_duration_since(self.since), self.outcome);
        self.telemetry.with(self.name, move |meters| {
            meters.waiters.decrement(1);
            meters.waited(outcome).record(waited);
        });
    }
}
