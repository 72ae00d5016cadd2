//! Makes the faults of a schedule, one after the other.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::backend::{Backend, Strike};
use crate::history::{Recorder, What, now};
use crate::run::Clients;
use crate::schedule::{Fault, Step};

/// Makes these faults, and returns when the last one is over.
pub(crate) fn execute(
    steps: &[Step],
    backend: &dyn Backend,
    clients: &Clients,
    log: &Recorder,
    is_shown: bool,
) {
    let began = Instant::now();
    // A fault may last longer than planned, because a cluster takes its time to recover. What
    // follows is then later by as much.
    let mut behind = Duration::ZERO;
    for step in steps {
        let planned = began + step.at + behind;
        std::thread::sleep(planned.saturating_duration_since(Instant::now()));
        behind += Instant::now().saturating_duration_since(planned);
        let at = now();
        let strike = strike(step, backend, clients, log);
        let (number, fault, target) = (step.number, step.fault.to_string(), strike.target.clone());
        show(is_shown, began, step, &target);
        log.record_at(at, What::FaultBegins { number, fault, target });
        std::thread::sleep(step.lasts);
        (strike.heal)();
        log.record(What::FaultEnds { number });
    }
    show_quiet(is_shown, began);
}

fn strike<'a>(
    step: &Step,
    backend: &'a dyn Backend,
    clients: &'a Clients,
    log: &'a Recorder,
) -> Strike<'a> {
    let client = clients.pick(step.pick);
    match step.fault {
        Fault::ClientStop => {
            clients.signal(client, Signal::STOP);
            Strike::new(format!("c{client}"), move || clients.signal(client, Signal::CONT))
        }
        Fault::ClientKill => {
            clients.kill(client, log);
            Strike::new(format!("c{client}"), move || clients.start_again(client))
        }
        fault => {
            let link = backend.links().and_then(|links| links.strike(fault, step.pick));
            link.unwrap_or_else(|| backend.strike(fault, step.pick))
        }
    }
}

#[allow(clippy::print_stderr, reason = "progress of a tool that talks to a person")]
fn show(is_shown: bool, began: Instant, step: &Step, target: &str) {
    if is_shown {
        let (at, fault) = (began.elapsed().as_secs_f64(), step.fault);
        eprintln!("  {at:6.1} s  {fault:14} {target}, for {:.1} s", step.lasts.as_secs_f64());
    }
}

#[allow(clippy::print_stderr, reason = "progress of a tool that talks to a person")]
fn show_quiet(is_shown: bool, began: Instant) {
    if is_shown {
        eprintln!("  {:6.1} s  quiet", began.elapsed().as_secs_f64());
    }
}
