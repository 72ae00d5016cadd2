//! In place of `telemetry.rs` without the feature `metrics`: the same functions, which do nothing.

use std::time::Duration;

use crate::clock::Clock;
use crate::error::LossReason;
use crate::name::Name;

#[derive(Debug)]
pub(crate) struct Telemetry;

#[derive(Clone, Copy)]
pub(crate) enum Outcome {
    Granted,
    NotGranted,
    Error,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum RenewalOutcome {
    Renewed,
    Failed,
    Lost,
}

pub(crate) struct Waiting;

impl Telemetry {
    pub(crate) fn new(_: &'static str, _: bool) -> Self {
        Self
    }

    pub(crate) fn answered_at_once(&self, _: &Name, _: Outcome) {}

    pub(crate) fn waiting(&self, _: &Clock, _: &Name) -> Waiting {
        Waiting
    }

    pub(crate) fn held(&self, _: &Name) {}

    pub(crate) fn ended(&self, _: &Name, _: Duration, _: Option<LossReason>) {}

    pub(crate) fn renewals(&self, _: RenewalOutcome, _: u64) {}
}

impl Waiting {
    pub(crate) fn ended(self, _: Outcome) {}
}
