//! Supervising the command while it runs.
//!
//! The guardian executes the command and keeps the deadlines of the lease. This side sends it how
//! long the lock may be trusted, forwards signals, and decides the exit code.

use std::ffi::OsString;
use std::time::Duration;

use lockset::{Guard, Holder, Lockset, LossReason, Name, State};
use rustix::process::Pid;

use crate::args::JobArgs;
use crate::output::{Failure, code, print_message};
use crate::run::{ExitBudget, Interrupt, Outcome, Session, guardian_gone};
use crate::sys;
use crate::terminal::Terminal;
use crate::timing::{Lease, Margins};
use crate::wire::{Ending, Order, Report, Start};

/// If a process is still alive this long after KILL, a line says why lockset does not end.
const UNKILLABLE_AFTER: Duration = Duration::from_secs(5);

/// The longest time between TERM and KILL for processes that outlive the command.
const MAX_SWEEP: Duration = Duration::from_secs(10);

/// How long the engine has to reply whether an operator revoked the lock.
const REVOKED_TIMEOUT: Duration = Duration::from_millis(300);

/// A command under a lock.
pub(crate) struct Supervisor<'a> {
    session: &'a mut Session,
    guard: &'a Guard,
    lease: Lease,
    grace: Duration,
    max_hold: Option<Duration>,
    seen: Observed,
}

/// What happened while the command ran.
#[derive(Default)]
pub(crate) struct Observed {
    group: Option<Pid>,
    ending: Option<Ending>,
    failed: Option<i32>,
    /// The command was ended because its lease was about to end, and whether the lock was uncertain
    /// then: a renewal that succeeds after all does not change why the command was ended.
    ended_by_lease: bool,
    in_doubt: bool,
    lost: Option<LossReason>,
    guardian_gone: bool,
    asked_to_end: bool,
    /// The command had the terminal.
    in_front: bool,
    /// The signal of the terminal that lockset itself got.
    own_interrupt: Option<i32>,
}

/// Ctrl-C and Ctrl-\, as signals.
const INTERRUPTING: [i32; 2] = [libc::SIGINT, libc::SIGQUIT];

impl<'a> Supervisor<'a> {
    pub(crate) fn new(session: &'a mut Session, guard: &'a Guard, job: &JobArgs) -> Self {
        let by_session = session.locks.capabilities().session.is_some();
        let lease = Lease { ttl: guard.ttl(), by_session };
        let (longest, _) = lease.longest_grace();
        let grace = job.grace.unwrap_or(longest).min(longest);
        Self { session, guard, lease, grace, max_hold: job.max_hold, seen: Observed::default() }
    }

    /// Starts the command, and returns when it and its group are gone.
    pub(crate) async fn run(mut self, job: &JobArgs) -> Observed {
        // Some engines grant a waiter a short first lease: it is renewed before the command relies
        // on it. If that fails, the command starts on the short lease.
        if self.lease.is_short(self.guard.valid_for()) {
            let _ = self.guard.confirm().await;
            if let State::Lost(reason) = self.guard.state() {
                self.seen.lost = Some(reason);
                return self.seen;
            }
        }
        self.seen.in_front = self.may_be_in_front();
        let start = self.start(job);
        // The lease first: from now on the command has a deadline, whatever happens to lockset.
        self.send_lease().await;
        self.session.link.order(&Order::Start(start)).await;
        while self.step().await {}
        if let Some(terminal) = &self.session.terminal {
            terminal.reclaim(self.seen.group);
        }
        self.seen
    }

    fn start(&self, job: &JobArgs) -> Start {
        let guard = self.guard;
        let env = [
            ("LOCKSET_NAME", guard.name().to_string()),
            ("LOCKSET_TOKEN", guard.token().to_string()),
            ("LOCKSET_OWNER", guard.claim_id().to_string()),
            ("LOCKSET_URL", self.session.url.clone()),
            ("LOCKSET_ENGINE", self.session.locks.engine().to_owned()),
            ("LOCKSET_TTL_MS", self.lease.ttl.as_millis().to_string()),
        ];
        Start {
            command: job.command.clone(),
            env: env.map(|(key, value)| (key.into(), OsString::from(value))).into(),
            foreground: self.seen.in_front,
            sweep: (!job.leave_children).then_some(self.grace.min(MAX_SWEEP)),
        }
    }

    /// Handles the next event; `false` when everything is over.
    async fn step(&mut self) -> bool {
        let patience = if self.seen.lost.is_some() {
            UNKILLABLE_AFTER
        } else {
            self.lease.look_again_in(self.guard.valid_for())
        };
        let guard = self.guard;
        let is_lost = self.seen.lost.is_some();
        tokio::select! {
            biased;
            report = self.session.link.report() => self.on_report(report).await,
            signal = self.session.signals.next() => { self.forward(signal).await; true }
            reason = guard.lost(), if !is_lost => {
                self.seen.lost = Some(reason);
                // It may be stopped, and must read the order.
                self.session.link.wake_guardian();
                self.session.link.order(&Order::KillAll).await;
                true
            }
            () = tokio::time::sleep(patience) => {
                if is_lost {
                    print_message("some of the command's processes cannot be killed; waiting for them");
                } else {
                    self.send_lease().await;
                }
                true
            }
        }
    }

    async fn on_report(&mut self, report: Option<Report>) -> bool {
        match report {
            Some(Report::Started(pid)) => self.seen.group = Pid::from_raw(pid),
            Some(Report::Stopped(signal)) => self.stop_with_command(signal).await,
            Some(Report::Warned | Report::Killing) => {
                self.seen.ended_by_lease = true;
                self.seen.in_doubt |= self.guard.state() != State::Held;
            }
            Some(Report::Ended(ending)) => self.seen.ending = Some(ending),
            Some(Report::Failed(error)) => {
                self.seen.failed = Some(error);
                return false;
            }
            // After an order to kill, `Gone` is still to come.
            Some(Report::Quiet) => return self.seen.lost.is_some(),
            // The guardian may have killed by itself and then by order: the second `Gone` of one
            // command arrives before the next has started.
            Some(Report::Gone) => return self.seen.group.is_none(),
            None => {
                self.session.link.act_for_guardian();
                self.seen.guardian_gone = true;
                return false;
            }
        }
        true
    }

    /// Whether the command may have the terminal. One that had it may have it again.
    fn may_be_in_front(&self) -> bool {
        self.session.terminal.as_ref().is_some_and(|terminal| match self.seen.in_front {
            true => terminal.is_ours(),
            false => terminal.is_for_us_alone(),
        })
    }

    async fn forward(&mut self, signal: i32) {
        self.seen.asked_to_end |= sys::ENDING.contains(&signal);
        let terminal = self.session.terminal.as_ref();
        if INTERRUPTING.contains(&signal) && terminal.is_some_and(Terminal::is_ours) {
            self.seen.own_interrupt = Some(signal);
        }
        let order = match signal {
            libc::SIGCONT => {
                let foreground = self.may_be_in_front();
                self.seen.in_front |= foreground;
                Order::Resume { foreground }
            }
            signal => Order::Signal(signal),
        };
        self.session.link.order(&order).await;
    }

    /// The command was stopped by the terminal. Lockset stops, too, so that the shell sees it; the
    /// CONT that ends this is forwarded like any other. A command that was stopped because it needs
    /// a terminal that is ours gets it. A command that was stopped by hand is continued by hand.
    async fn stop_with_command(&mut self, signal: i32) {
        let Some(terminal) = &self.session.terminal else { return };
        let wants_it = [libc::SIGTTIN, libc::SIGTTOU].contains(&signal);
        if wants_it && terminal.is_ours() {
            self.seen.in_front = true;
            return self.session.link.order(&Order::Resume { foreground: true }).await;
        }
        if !wants_it && signal != libc::SIGTSTP {
            return;
        }
        terminal.reclaim(self.seen.group);
        let stopped = sys::stop(sys::Stop::Job).unwrap_or(false);
        if !stopped && signal == libc::SIGTSTP {
            // No shell could continue us, so Ctrl-Z is undone.
            let foreground = self.may_be_in_front();
            self.session.link.order(&Order::Resume { foreground }).await;
        }
    }

    /// Sends the guardian until when the lock may be trusted, as known now.
    async fn send_lease(&mut self) {
        let lease_end = || Duration::from_nanos(self.guard.grant().valid_until.as_nanos());
        let end = LeaseEnd::read(sys::now, lease_end, || self.guard.valid_for());
        let Margins { term, kill } = match self.max_hold.filter(|_| end.is_max_hold) {
            Some(longest) => self.lease.max_hold_margins(longest, self.grace),
            None => self.lease.margins(self.grace),
        };
        let (term_at, kill_at) = (end.at.saturating_sub(term), end.at.saturating_sub(kill));
        if term_at <= sys::now() {
            // It has something to do now, and may be stopped.
            self.session.link.wake_guardian();
        }
        let order = Order::Lease { term_at, kill_at };
        self.session.link.order(&order).await;
    }
}

/// Until when the lock may be trusted.
#[derive(Debug)]
struct LeaseEnd {
    at: Duration,
    /// It is the end of `--max-hold`, which comes before the end of the lease.
    is_max_hold: bool,
}

impl LeaseEnd {
    /// The clock is read first: if this process is stopped between two readings, the result is too
    /// early, not too late.
    fn read(
        now: impl Fn() -> Duration,
        lease_end: impl Fn() -> Duration,
        left: impl Fn() -> Duration,
    ) -> Self {
        let before = now();
        let lease_end = lease_end();
        let left = left();
        Self { at: before + left, is_max_hold: now() + left < lease_end }
    }
}

impl Observed {
    /// Whether the command was ended because of its lock.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.is_some() || self.ended_by_lease
    }

    /// Why the lock was lost, if it was; determined before it is released.
    pub(crate) async fn loss(
        &self,
        locks: &Lockset,
        guard: &Guard,
        job: &JobArgs,
        exit_budget: &mut ExitBudget,
    ) -> Option<String> {
        let reason = match (self.lost, guard.state()) {
            (Some(reason), _) | (None, State::Lost(reason)) => reason,
            _ if !self.ended_by_lease => return None,
            // It is still held, but its lease was about to end.
            _ if is_revoked(locks, guard, exit_budget).await => LossReason::Revoked,
            _ if job.max_hold.is_some() && !self.in_doubt => LossReason::MaxHold,
            _ => LossReason::Expired,
        };
        let what = if self.group.is_some() { "ended" } else { "not started" };
        // The command ends, and the lock is released, before the lease runs out.
        let why = match reason {
            LossReason::Revoked => "an operator revoked it".to_owned(),
            reason => reason.to_string(),
        };
        Some(format!("the lock `{}` was lost: {why}; the command was {what}", guard.name()))
    }

    /// Prints what happened, and decides the exit code.
    pub(crate) fn finish(
        self,
        name: &Name,
        loss: Option<String>,
        released: lockset::Result<()>,
        is_silent: bool,
        job: &JobArgs,
    ) -> Result<Outcome, Failure> {
        if let Some(errno) = self.failed {
            return Err(cannot_execute(job, errno));
        }
        if let Some(loss) = loss {
            let rest = match is_silent {
                true => "; the engine does not reply, so the lock ends with its lease",
                false => "",
            };
            print_message(format_args!("{loss}{rest}"));
            return Ok(self.outcome(job.lost_exit_code.unwrap_or(code::LOST)));
        }
        if self.guardian_gone {
            print_message("the command and all its descendants were killed");
            return Err(guardian_gone());
        }
        if let Err(error) = released {
            print_message(format_args!(
                "`{name}` could not be released, its lease will end it: {error}"
            ));
        }
        let code = self.ending.map_or(code::OWN_ERROR, Ending::exit_code);
        Ok(self.outcome(code))
    }

    fn outcome(&self, code: u8) -> Outcome {
        // Ctrl-C on a terminal reaches the command only, but is meant for the whole job. (A signal
        // sent to the command by hand looks the same.)
        let ended_by = match self.ending {
            Some(Ending::Signalled(signal)) => Some(i32::from(signal)),
            _ => None,
        };
        let ended_by = ended_by.filter(|signal| INTERRUPTING.contains(signal));
        let asked_to_end = self.asked_to_end || ended_by.is_some();
        let interrupted = ended_by.filter(|_| self.lost.is_none() && !self.ended_by_lease);
        let interrupted = interrupted.and_then(|signal| match self.own_interrupt {
            Some(own) => (own == signal).then_some(Interrupt { signal, whole_job: false }),
            None => (self.in_front && !self.asked_to_end)
                .then_some(Interrupt { signal, whole_job: true }),
        });
        Outcome { code, asked_to_end, never_ran: false, interrupted }
    }
}

/// Whether an operator revoked the lock, if the engine replies soon enough.
async fn is_revoked(locks: &Lockset, guard: &Guard, exit_budget: &mut ExitBudget) -> bool {
    let state = exit_budget.wait(REVOKED_TIMEOUT, locks.inspect(guard.name().as_str())).await;
    state.and_then(Result::ok).is_some_and(|state| {
        let ours = |holder: &&Holder| holder.claim == Some(guard.claim_id());
        state.holders.iter().filter(ours).any(|holder| holder.revoked)
    })
}

fn cannot_execute(job: &JobArgs, errno: i32) -> Failure {
    let program = job.command.first().map(|word| word.to_string_lossy()).unwrap_or_default();
    match errno {
        libc::ENOENT => Failure::new(
            code::NOT_FOUND,
            format!("the command `{program}` (or the interpreter it names) was not found"),
        ),
        errno => {
            let error = std::io::Error::from_raw_os_error(errno);
            let code = match errno {
                libc::EAGAIN | libc::ENOMEM => code::OWN_ERROR,
                _ => code::CANNOT_EXECUTE,
            };
            Failure::new(code, format!("the command `{program}` cannot be executed: {error}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    const LEASE_END: Duration = Duration::from_secs(130);

    /// The end as it is read if this process is stopped for `pause` after each reading.
    fn read_with(pause: Duration, end: Duration) -> LeaseEnd {
        let time = Cell::new(Duration::from_secs(100));
        let now = || time.replace(time.get() + pause);
        LeaseEnd::read(now, || LEASE_END, || end.saturating_sub(now()))
    }

    #[test]
    fn a_pause_while_the_lease_is_read_moves_its_end_to_the_safe_side() {
        let end = read_with(Duration::from_secs(7), LEASE_END);
        assert!(end.at <= LEASE_END && !end.is_max_hold, "{end:?}");
    }

    #[test]
    fn the_end_is_that_of_the_longest_hold_if_it_comes_before_that_of_the_lease() {
        for pause in [Duration::ZERO, Duration::from_millis(1)] {
            assert!(!read_with(pause, LEASE_END).is_max_hold);
            let earlier = LEASE_END - Duration::from_millis(10);
            let end = read_with(pause, earlier);
            assert!(end.at <= earlier && end.is_max_hold, "{end:?}");
        }
    }
}
