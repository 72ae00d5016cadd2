//! `lockset run` and `lockset elect`: hold a lock, and run a command for exactly as long.
//!
//! Takes the lock, has the command watched while it runs (`supervise`), and gives the lock back.

use std::future::Future;
use std::pin::pin;
use std::time::Duration;

use lockset::{Guard, LockOptions, Lockset, Name, State};

use crate::args::{ElectArgs, JobArgs, ModeArgs, Patience, RunArgs};
use crate::home::Home;
use crate::link::{Link, Prepared, Signals};
use crate::outage::EngineWait;
use crate::output::{Failure, complain};
use crate::supervise::Watch;
use crate::sys;
use crate::take::{Wish, take};
use crate::terminal::Terminal;
use crate::timing::Lease;
use crate::wire::Order;

/// The longest time that a release, and closing, may take on the way out.
const FAREWELL: Duration = Duration::from_secs(5);

/// The same for both together if the lock was lost because the engine did not answer: it will
/// hardly answer now, and the lease ends the lock anyway.
const FAREWELL_WHEN_LOST: Duration = Duration::from_millis(600);

/// The lease, unless told otherwise.
const USUAL_TTL: Duration = Duration::from_secs(30);

pub(crate) fn run(args: &RunArgs, home: &Home, verbose: bool) -> Result<u8, Failure> {
    let job = &with_url_ttl(&args.job, home)?;
    check_grace(job, false)?;
    let prepared = Prepared::begin()?;
    crate::runtime()?.block_on(async {
        let mut wait = EngineWait::new(home, &args.patience);
        let mut session = Session::open(prepared, &mut wait, job).await?;
        let wish = wish(args.mode, &args.patience, job);
        let outcome = match session.check_grace(job) {
            Ok(()) => session.once(&args.name, &wish, wait, job, verbose).await,
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
        let mut wait = EngineWait::new(home, &args.patience);
        let mut session = Session::open(prepared, &mut wait, job).await?;
        let outcome = match session.check_grace(job) {
            Ok(()) => campaign_again_and_again(&mut session, args, job, home, wait, verbose).await,
            Err(failure) => Err(failure),
        };
        session.close().await;
        Ok(outcome?.exit_code())
    })
}

async fn campaign_again_and_again(
    session: &mut Session,
    args: &ElectArgs,
    job: &JobArgs,
    home: &Home,
    mut wait: EngineWait,
    verbose: bool,
) -> Result<Outcome, Failure> {
    let wish = Wish { election: true, ..wish(ModeArgs::default(), &args.patience, job) };
    session.announce = Some(if args.json { Announce::Json } else { Announce::Text });
    loop {
        let began = sys::now();
        let outcome = session.once(&args.name, &wish, wait, job, verbose).await?;
        if args.once || outcome.asked_to_end || outcome.never_ran {
            return Ok(outcome);
        }
        // A command that fails at once must neither spin nor keep others from their turn.
        let rest = Duration::from_secs(1).saturating_sub(sys::now() - began);
        if let Err(signal) = session.unless_ended(tokio::time::sleep(rest)).await? {
            return Ok(Outcome::ended_while_waiting(signal));
        }
        wait = EngineWait::new(home, &args.patience);
    }
}

fn wish<'a>(mode: ModeArgs, patience: &'a Patience, job: &JobArgs) -> Wish<'a> {
    let mut options = LockOptions::default().ttl(ttl(job));
    if let Some(longest) = job.max_hold {
        options = options.max_hold(longest);
    }
    let note = job.options.note.clone().unwrap_or_default();
    Wish { mode, election: false, options: options.note(note), patience }
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

/// Whoever limits the hold to less than the usual lease means a shorter lease, too.
fn ttl(job: &JobArgs) -> Duration {
    let usual = job.max_hold.map_or(USUAL_TTL, |longest| longest.min(USUAL_TTL));
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

/// How to tell about leadership.
#[derive(Clone, Copy)]
enum Announce {
    Text,
    Json,
}

/// Everything one invocation has open.
pub(crate) struct Session {
    pub(crate) locks: Lockset,
    /// The URL that the command finds.
    pub(crate) url: String,
    pub(crate) link: Link,
    pub(crate) signals: Signals,
    pub(crate) terminal: Option<Terminal>,
    announce: Option<Announce>,
    farewell: Farewell,
}

/// The time that is left for the way out.
#[derive(Clone, Copy)]
pub(crate) struct Farewell {
    /// `None` until the lock is lost: each request then has a time of its own.
    by: Option<Duration>,
    /// The engine did not answer a request in time.
    pub(crate) is_silent: bool,
}

impl Farewell {
    const UNHURRIED: Self = Self { by: None, is_silent: false };

    fn within(span: Duration) -> Self {
        Self { by: Some(sys::now() + span), is_silent: false }
    }

    /// The engine's answer, if it comes in time.
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

/// How one hold went.
pub(crate) struct Outcome {
    pub(crate) code: u8,
    /// Somebody wants lockset itself to end, not only this command.
    pub(crate) asked_to_end: bool,
    pub(crate) never_ran: bool,
    pub(crate) interrupted: Option<Interrupt>,
}

/// Ctrl-C or Ctrl-\, of which the command died: lockset is to end by it as well, or the shell takes
/// it for dealt with.
#[derive(Clone, Copy)]
pub(crate) struct Interrupt {
    pub(crate) signal: i32,
    /// The terminal sent it to the command alone.
    pub(crate) whole_job: bool,
}

impl Outcome {
    /// Returns only if lockset is not to end by a signal.
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
    /// Again, now that it is known what a lease is here.
    fn check_grace(&self, job: &JobArgs) -> Result<(), Failure> {
        check_grace(job, self.locks.capabilities().session.is_some())
    }

    async fn open(
        prepared: Prepared,
        wait: &mut EngineWait,
        job: &JobArgs,
    ) -> Result<Self, Failure> {
        let guardian = prepared.guardian();
        // For engines whose locks share a session: it is to last as long as the lease.
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
                farewell: Farewell::UNHURRIED,
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

    /// Takes the lock, runs the command, releases the lock.
    async fn once(
        &mut self,
        name: &Name,
        wish: &Wish<'_>,
        mut wait: EngineWait,
        job: &JobArgs,
        verbose: bool,
    ) -> Result<Outcome, Failure> {
        let locks = self.locks.clone();
        self.farewell = Farewell::UNHURRIED;
        let granted = self.unless_ended(take(&locks, name, wish, &mut wait, verbose)).await?;
        let guard = match granted {
            Ok(granted) => granted?,
            Err(signal) => return Ok(Outcome::ended_while_waiting(signal)),
        };
        self.tell_of_ttl(guard.ttl(), ttl(job));
        self.announce(&guard, true);
        let outcome = Watch::new(self, &guard, job).run(job).await;
        self.announce(&guard, false);
        if outcome.is_lost() && guard.state() != State::Held {
            self.farewell = Farewell::within(FAREWELL_WHEN_LOST);
        }
        let loss = outcome.loss(&locks, &guard, job, &mut self.farewell).await;
        let released = self.farewell.wait(FAREWELL, guard.release()).await;
        let released = released.unwrap_or_else(|| Err(no_answer(&locks)));
        outcome.finish(name, loss, released, self.farewell.is_silent, job)
    }

    /// Where the lease is that of a session, a server may have granted another than was asked for.
    fn tell_of_ttl(&self, granted: Duration, asked: Duration) {
        if granted == asked {
            return;
        }
        match self.announce {
            Some(Announce::Json) => crate::output::announce_ttl(granted, asked),
            _ => complain(format_args!(
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
                complain(format_args!("leads {}, token {}", guard.name(), guard.token()));
            }
            Some(Announce::Text) => complain(format_args!("no longer leads {}", guard.name())),
            None => {}
        }
    }

    /// Leaves nothing behind: no claim that waits, no guardian.
    async fn close(mut self) {
        // An engine that did not answer a release will not answer a moment later.
        if !self.farewell.is_silent {
            let _ = self.farewell.wait(FAREWELL, self.locks.close()).await;
        }
        self.link.order(&Order::Dismiss).await;
    }
}

/// Does `work`, unless a signal asks lockset to end (the inner error).
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
        .hint("it is the process named lock-guardian; nobody but lockset should end it")
}

fn no_answer(locks: &Lockset) -> lockset::Error {
    lockset::Error::Unreachable {
        engine: locks.engine(),
        what: "it did not answer in time".to_owned(),
        retryable: true,
        source: None,
    }
}
