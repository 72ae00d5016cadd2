//! `lockset run` and `lockset elect`: hold a lock, and run a command for exactly as long.
//!
//! Acquires the lock, supervises the command while it runs (`supervise`), and releases the lock.

use std::future::Future;
use std::pin::pin;
use std::time::Duration;

use lockset::{Guard, LockOptions, Lockset, Name, State};

use crate::acquire::{LockRequest, acquire_lock};
use crate::args::{ElectArgs, JobArgs, ModeArgs, RunArgs, WaitArgs};
use crate::home::Home;
use crate::link::{Link, Prepared, Signals};
use crate::outage::EngineWait;
use crate::output::{Failure, print_message};
use crate::supervise::Supervisor;
use crate::sys;
use crate::terminal::Terminal;
use crate::timing::Lease;
use crate::wire::Order;

/// How long a release, and closing, may take before lockset exits.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// The same for both together if the lock was lost because the engine did not reply: it will
/// hardly reply now, and the lease ends the lock anyway.
const EXIT_TIMEOUT_WHEN_LOST: Duration = Duration::from_millis(600);

/// The default lease.
const DEFAULT_TTL: Duration = Duration::from_secs(30);

pub(crate) fn run(args: &RunArgs, home: &Home, verbose: bool) -> Result<u8, Failure> {
    let job = &with_url_ttl(&args.job, home)?;
    check_grace(job, false)?;
    let prepared = Prepared::begin()?;
    crate::runtime()?.block_on(async {
        let mut wait = EngineWait::new(home, &args.wait_args);
        let mut session = Session::open(prepared, &mut wait, job).await?;
        let request = request(args.mode, &args.wait_args, job);
        let outcome = match session.check_grace(job) {
            Ok(()) => session.once(&args.name, &request, wait, job, verbose).await,
            Err(failure) => Err(failure),
        };
        session.close().await;
        Ok(outcome?.exit_code())
    })
}

pub(crate) fn elect(args: &ElectArgs, home: &Home, verbose: bool) -> Result<u8, Failure> {
    let job = &with_url_ttl(&args.job, home)?;
    check_grace(job, false)?;
    let prepared = Prepared::begin()?;
    crate::runtime()?.block_on(async {
        let mut wait = EngineWait::new(home, &args.wait_args);
        let mut session = Session::open(prepared, &mut wait, job).await?;
        let outcome = match session.check_grace(job) {
            Ok(()) => campaign_repeatedly(&mut session, args, job, home, wait, verbose).await,
            Err(failure) => Err(failure),
        };
        session.close().await;
        Ok(outcome?.exit_code())
    })
}

async fn campaign_repeatedly(
    session: &mut Session,
    args: &ElectArgs,
    job: &JobArgs,
    home: &Home,
    mut wait: EngineWait,
    verbose: bool,
) -> Result<Outcome, Failure> {
    let request =
        LockRequest { election: true, ..request(ModeArgs::default(), &args.wait_args, job) };
    session.announce = Some(if args.json { Announce::Json } else { Announce::Text });
    loop {
        let began = sys::now();
        let outcome = session.once(&args.name, &request, wait, job, verbose).await?;
        if args.once || outcome.asked_to_end || outcome.never_ran {
            return Ok(outcome);
        }
        // A command that fails at once must neither spin nor keep other candidates from leading.
        let rest = Duration::from_secs(1).saturating_sub(sys::now() - began);
        if let Err(signal) = session.unless_ended(tokio::time::sleep(rest)).await? {
            return Ok(Outcome::ended_while_waiting(signal));
        }
        wait = EngineWait::new(home, &args.wait_args);
    }
}

fn request<'a>(mode: ModeArgs, wait_args: &'a WaitArgs, job: &JobArgs) -> LockRequest<'a> {
    let mut options = LockOptions::default().ttl(ttl(job));
    if let Some(longest) = job.max_hold {
        options = options.max_hold(longest);
    }
    let note = job.options.note.clone().unwrap_or_default();
    LockRequest { mode, election: false, options: options.note(note), wait_args }
}

/// The ttl of the URL is used if none is given. The hold may be limited to less.
fn with_url_ttl(job: &JobArgs, home: &Home) -> Result<JobArgs, Failure> {
    let mut job = job.clone();
    if job.options.ttl.is_none() {
        let shortened = |ttl| job.max_hold.map_or(ttl, |longest| longest.min(ttl));
        job.options.ttl = home.ttl()?.map(shortened);
    }
    Ok(job)
}

/// `--max-hold` below the default lease implies a shorter lease.
fn ttl(job: &JobArgs) -> Duration {
    let usual = job.max_hold.map_or(DEFAULT_TTL, |longest| longest.min(DEFAULT_TTL));
    job.options.ttl.unwrap_or(usual)
}

fn check_grace(job: &JobArgs, by_session: bool) -> Result<(), Failure> {
    let ttl = ttl(job);
    let (longest, part) = Lease { ttl, by_session }.longest_grace();
    match job.grace {
        Some(grace) if grace > longest => Err(Failure::own(format!(
            "--grace {} is more than {part} of the ttl ({}); the lease would not be renewed \
             before that, so the command would be ended for no reason",
            humantime::format_duration(grace),
            humantime::format_duration(ttl),
        ))
        .hint("choose a shorter --grace or a longer --ttl")),
        _ => Ok(()),
    }
}

/// How changes of leadership are reported.
#[derive(Clone, Copy)]
enum Announce {
    Text,
    Json,
}

/// Everything that one invocation has open.
pub(crate) struct Session {
    pub(crate) locks: Lockset,
    /// `LOCKSET_URL` of the command.
    pub(crate) url: String,
    pub(crate) link: Link,
    pub(crate) signals: Signals,
    pub(crate) terminal: Option<Terminal>,
    announce: Option<Announce>,
    exit_budget: ExitBudget,
}

/// The time that is left for releasing and closing.
#[derive(Clone, Copy)]
pub(crate) struct ExitBudget {
    /// `None` until the lock is lost: each request then has a time of its own.
    by: Option<Duration>,
    /// The engine did not reply to a request in time.
    pub(crate) is_silent: bool,
}

impl ExitBudget {
    const UNLIMITED: Self = Self { by: None, is_silent: false };

    fn within(span: Duration) -> Self {
        Self { by: Some(sys::now() + span), is_silent: false }
    }

    /// The engine's reply, if it comes in time.
    pub(crate) async fn wait<T>(
        &mut self,
        longest: Duration,
        request: impl Future<Output = T>,
    ) -> Option<T> {
        let left = self.by.map_or(longest, |by| by.saturating_sub(sys::now()).min(longest));
        let answer = tokio::time::timeout(left, request).await.ok();
        self.is_silent |= answer.is_none();
        answer
    }
}

/// How one hold ended.
pub(crate) struct Outcome {
    pub(crate) code: u8,
    /// Lockset itself is to end, not only this command.
    pub(crate) asked_to_end: bool,
    pub(crate) never_ran: bool,
    pub(crate) interrupted: Option<Interrupt>,
}

/// Ctrl-C or Ctrl-\ ended the command: lockset has to end by it as well, or the shell takes it as
/// handled.
#[derive(Clone, Copy)]
pub(crate) struct Interrupt {
    pub(crate) signal: i32,
    /// The terminal sent it to the command alone.
    pub(crate) whole_job: bool,
}

impl Outcome {
    /// Returns only if lockset does not have to end by a signal.
    fn exit_code(self) -> u8 {
        if let Some(Interrupt { signal, whole_job }) = self.interrupted {
            sys::interrupt(signal, whole_job);
        }
        self.code
    }

    fn ended_while_waiting(signal: u8) -> Self {
        Self { code: 128 + signal, asked_to_end: true, never_ran: true, interrupted: None }
    }
}

impl Session {
    /// Again, after connecting: whether the lease is a session is known now.
    fn check_grace(&self, job: &JobArgs) -> Result<(), Failure> {
        check_grace(job, self.locks.capabilities().session.is_some())
    }

    async fn open(
        prepared: Prepared,
        wait: &mut EngineWait,
        job: &JobArgs,
    ) -> Result<Self, Failure> {
        let guardian = prepared.guardian();
        // For engines whose locks share a session: it has to last as long as the lease.
        let builder = |home: &Home| home.builder().holder_process(guardian).ttl(ttl(job));
        let (mut link, mut signals) = prepared.attach()?;
        match unless_ended(&mut link, &mut signals, wait.connect(builder)).await? {
            Ok(Err(failure)) => Err(failure),
            Ok(Ok(locks)) => Ok(Self {
                url: wait.home().url_for_command(&locks),
                locks,
                link,
                signals,
                terminal: Terminal::open(),
                announce: None,
                exit_budget: ExitBudget::UNLIMITED,
            }),
            Err(signal) => Err(Failure::silent(128 + signal)),
        }
    }

    async fn unless_ended<T>(
        &mut self,
        work: impl Future<Output = T>,
    ) -> Result<Result<T, u8>, Failure> {
        unless_ended(&mut self.link, &mut self.signals, work).await
    }

    /// Acquires the lock, runs the command, releases the lock.
    async fn once(
        &mut self,
        name: &Name,
        request: &LockRequest<'_>,
        mut wait: EngineWait,
        job: &JobArgs,
        verbose: bool,
    ) -> Result<Outcome, Failure> {
        let locks = self.locks.clone();
        self.exit_budget = ExitBudget::UNLIMITED;
        let granted =
            self.unless_ended(acquire_lock(&locks, name, request, &mut wait, verbose)).await?;
        let guard = match granted {
            Ok(granted) => granted?,
            Err(signal) => return Ok(Outcome::ended_while_waiting(signal)),
        };
        self.report_ttl(guard.ttl(), ttl(job));
        self.announce(&guard, true);
        let outcome = Supervisor::new(self, &guard, job).run(job).await;
        self.announce(&guard, false);
        if outcome.is_lost() && guard.state() != State::Held {
            self.exit_budget = ExitBudget::within(EXIT_TIMEOUT_WHEN_LOST);
        }
        let loss = outcome.loss(&locks, &guard, job, &mut self.exit_budget).await;
        let released = self.exit_budget.wait(EXIT_TIMEOUT, guard.release()).await;
        let released = released.unwrap_or_else(|| Err(no_reply(&locks)));
        outcome.finish(name, loss, released, self.exit_budget.is_silent, job)
    }

    /// If the lease is a session, the server may have granted another ttl than requested.
    fn report_ttl(&self, granted: Duration, asked: Duration) {
        if granted == asked {
            return;
        }
        match self.announce {
            Some(Announce::Json) => crate::output::announce_ttl(granted, asked),
            _ => print_message(format_args!(
                "the ttl is {} and not {}: the server decides how long a session may last",
                humantime::format_duration(granted),
                humantime::format_duration(asked),
            )),
        }
    }

    fn announce(&self, guard: &Guard, leads: bool) {
        match self.announce {
            Some(Announce::Json) => crate::output::announce(guard.name(), guard.token(), leads),
            Some(Announce::Text) if leads => {
                print_message(format_args!("leads {}, token {}", guard.name(), guard.token()));
            }
            Some(Announce::Text) => print_message(format_args!("no longer leads {}", guard.name())),
            None => {}
        }
    }

    /// Leaves nothing behind: no claim that waits, no guardian.
    async fn close(mut self) {
        // An engine that did not reply to a release will not reply a moment later.
        if !self.exit_budget.is_silent {
            let _ = self.exit_budget.wait(EXIT_TIMEOUT, self.locks.close()).await;
        }
        self.link.order(&Order::Dismiss).await;
    }
}

/// Runs `work`, unless a signal asks lockset to end (the inner error).
async fn unless_ended<T>(
    link: &mut Link,
    signals: &mut Signals,
    work: impl Future<Output = T>,
) -> Result<Result<T, u8>, Failure> {
    let mut work = pin!(work);
    loop {
        tokio::select! {
            biased;
            signal = signals.next() => match signal {
                signal if sys::ENDING.contains(&signal) => return Ok(Err(signal as u8)),
                libc::SIGTSTP => { let _ = sys::stop(sys::Stop::Lockset); }
                _ => {}
            },
            // No command runs, so a report can only be a late one of the last.
            report = link.report() => if report.is_none() {
                return Err(guardian_gone());
            },
            answer = &mut work => return Ok(Ok(answer)),
        }
    }
}

pub(crate) fn guardian_gone() -> Failure {
    Failure::own("the guardian process was killed")
        .hint("it is the process named lock-guardian; only lockset should end it")
}

fn no_reply(locks: &Lockset) -> lockset::Error {
    lockset::Error::Unreachable {
        engine: locks.engine(),
        what: "it did not reply in time".to_owned(),
        retryable: true,
        source: None,
    }
}
