//! The guardian: a small process between lockset and the command, so that the command never
//! outlives the lock.
//!
//! It is lockset's own binary, executed again before the lock is requested, and the parent and
//! sub-reaper of the command: every process that the command starts, in any group or session, stays
//! below the guardian. When its link to lockset closes (lockset was killed) it kills everything
//! below itself. It also keeps the deadlines of the lease by its own clock, so that the command is
//! ended even if lockset is stopped or starved. It is single-threaded, blocks every signal, and
//! never waits for lockset: reports that lockset does not read are queued.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, kill_process_group};

use crate::wire::{Ending, Inbox, Order, Outbox, Report, Start};
use crate::{procs, sys};

/// The hidden subcommand under which lockset's binary is the guardian.
pub(crate) const SUBCOMMAND: &str = "__guardian";

/// How often a group is checked while it is being ended. The deaths of our own children are noticed
/// at once.
const SWEEP_TICK: Duration = Duration::from_millis(20);

/// The longest sleep while a lease runs. Sleeping does not count the time for which the machine is
/// suspended, so the clock is read again soon after it wakes up.
const LEASE_TICK: Duration = Duration::from_secs(1);

/// The main function of the guardian.
pub(crate) fn main() -> io::Result<()> {
    let link = sys::link_of_guardian()?;
    link.set_nonblocking(true)?;
    sys::name_process(c"lock-guardian");
    sys::adopt_orphans()?;
    sys::block_signals();
    let deaths = sys::signal_stream(&[libc::SIGCHLD])?;
    let (inbox, outbox) = (Inbox::default(), Outbox::default());
    let mut guardian = Guardian { link, deaths, inbox, outbox, lease: None, job: None };
    match guardian.serve() {
        Ok(Verdict::Dismissed) => Ok(()),
        // Lockset is gone, or the link is broken: in both cases the lock is not kept any more.
        Ok(Verdict::Abandoned) | Err(_) => {
            guardian.kill_all();
            Ok(())
        }
    }
}

struct Guardian {
    link: UnixStream,
    deaths: UnixStream,
    inbox: Inbox,
    outbox: Outbox,
    lease: Option<Lease>,
    job: Option<Job>,
}

struct Lease {
    term_at: Duration,
    kill_at: Duration,
}

/// The command, from its start until its group is quiet.
struct Job {
    group: Pid,
    phase: Phase,
    warned: bool,
    sweep: Option<Duration>,
}

#[derive(Clone, Copy, PartialEq)]
enum Phase {
    Running,
    /// The command ended, others of its group did not; they get KILL at this time.
    Sweeping {
        kill_at: Duration,
    },
    /// They were killed and need a moment to die.
    Dying,
}

enum Verdict {
    Dismissed,
    Abandoned,
}

impl Guardian {
    fn serve(&mut self) -> io::Result<Verdict> {
        loop {
            let (orders, deaths) = self.sleep()?;
            if deaths {
                drain(&self.deaths);
            }
            self.reap()?;
            if orders && let Some(verdict) = self.read_orders()? {
                return Ok(verdict);
            }
            self.keep_lease()?;
            self.sweep()?;
            self.outbox.send(&mut self.link)?;
        }
    }

    /// Waits until there is something to do. Returns whether there are orders, and whether children
    /// ended.
    fn sleep(&self) -> io::Result<(bool, bool)> {
        let timeout = self.next_wake().map(|at| {
            let wait = at.saturating_sub(sys::now()).min(LEASE_TICK);
            Timespec { tv_sec: wait.as_secs() as _, tv_nsec: wait.subsec_nanos() as _ }
        });
        let mut link = PollFlags::IN;
        link.set(PollFlags::OUT, !self.outbox.is_empty());
        let mut ready = [PollFd::new(&self.link, link), PollFd::new(&self.deaths, PollFlags::IN)];
        match poll(&mut ready, timeout.as_ref()) {
            Ok(_) => {
                // A broken link has flags of its own, and reading it reports the error.
                let orders = ready[0].revents().difference(PollFlags::OUT);
                Ok((!orders.is_empty(), !ready[1].revents().is_empty()))
            }
            Err(Errno::INTR) => Ok((false, true)),
            Err(error) => Err(error.into()),
        }
    }

    fn next_wake(&self) -> Option<Duration> {
        let job = self.job.as_ref()?;
        let lease = self.lease.as_ref();
        let lease = lease.map(|lease| if job.warned { lease.kill_at } else { lease.term_at });
        let sweep = (job.phase != Phase::Running).then(|| sys::now() + SWEEP_TICK);
        lease.into_iter().chain(sweep).min()
    }

    fn read_orders(&mut self) -> io::Result<Option<Verdict>> {
        let mut bytes = [0; 16 * 1024];
        match self.link.read(&mut bytes) {
            Ok(0) => return Ok(Some(Verdict::Abandoned)),
            Ok(count) => self.inbox.push(&bytes[..count]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(error),
        }
        while let Some(frame) = self.inbox.next() {
            match Order::decode(&frame)? {
                Order::Start(start) => self.start(&start)?,
                Order::Lease { term_at, kill_at } => self.note_lease(Lease { term_at, kill_at }),
                Order::Signal(signal) => self.signal(signal),
                Order::Resume { foreground } => self.resume(foreground),
                Order::KillAll => self.kill_all_and_report()?,
                Order::Dismiss => return Ok(Some(Verdict::Dismissed)),
            }
        }
        Ok(None)
    }

    fn note_lease(&mut self, lease: Lease) {
        // It was renewed after all: processes that outlived the last TERM get another one.
        if let Some(job) = &mut self.job {
            job.warned &= lease.term_at <= sys::now();
        }
        self.lease = Some(lease);
    }

    fn start(&mut self, start: &Start) -> io::Result<()> {
        let Some((program, args)) = start.command.split_first() else {
            return self.report(Report::Failed(libc::ENOENT));
        };
        let mut command = Command::new(program);
        command.args(args).envs(start.env.iter().map(|(key, value)| (key, value)));
        let terminal = if start.foreground { terminal() } else { None };
        match sys::spawn_command(&mut command, terminal.as_ref()) {
            Ok(child) => {
                let pid = child.id() as i32;
                self.job = Pid::from_raw(pid).map(|group| Job {
                    group,
                    phase: Phase::Running,
                    warned: false,
                    sweep: start.sweep,
                });
                self.report(Report::Started(pid))
            }
            Err(error) => {
                self.lease = None;
                self.report(Report::Failed(error.raw_os_error().unwrap_or(libc::EINVAL)))
            }
        }
    }

    fn signal(&self, signal: i32) {
        if let (Some(job), Some(signal)) = (&self.job, Signal::from_named_raw(signal)) {
            let _ = kill_process_group(job.group, signal);
        }
    }

    fn resume(&self, foreground: bool) {
        let Some(job) = &self.job else { return };
        if foreground && let Some(terminal) = terminal() {
            let _ = sys::set_foreground(&terminal, job.group);
        }
        let _ = kill_process_group(job.group, Signal::CONT);
    }

    /// Reaps every child that ended: the command, or an orphan that became our child.
    fn reap(&mut self) -> io::Result<()> {
        let options = WaitOptions::NOHANG | WaitOptions::UNTRACED;
        while let Ok(Some((pid, status))) = rustix::process::wait(options) {
            let is_command = self.job.as_ref().is_some_and(|job| job.group == pid);
            if !is_command {
                continue;
            }
            if let Some(signal) = status.stopping_signal() {
                self.report(Report::Stopped(signal))?;
            } else if let Some(ending) = ending(status) {
                self.report(Report::Ended(ending))?;
                self.begin_sweep()?;
            }
        }
        Ok(())
    }

    fn begin_sweep(&mut self) -> io::Result<()> {
        let Some(job) = &mut self.job else { return Ok(()) };
        match job.sweep {
            Some(grace) if procs::group_is_alive(job.group) => {
                // A stopped process must be continued, or it cannot handle TERM.
                let _ = kill_process_group(job.group, Signal::TERM);
                let _ = kill_process_group(job.group, Signal::CONT);
                job.phase = Phase::Sweeping { kill_at: sys::now() + grace };
                Ok(())
            }
            _ => self.quiet(),
        }
    }

    /// Continues to end the processes of the group that outlived the command.
    fn sweep(&mut self) -> io::Result<()> {
        let Some(job) = &mut self.job else { return Ok(()) };
        if job.phase == Phase::Running {
            return Ok(());
        }
        if !procs::group_is_alive(job.group) {
            return self.quiet();
        }
        if let Phase::Sweeping { kill_at } = job.phase
            && sys::now() >= kill_at
        {
            let _ = kill_process_group(job.group, Signal::KILL);
            job.phase = Phase::Dying;
        }
        Ok(())
    }

    fn quiet(&mut self) -> io::Result<()> {
        self.job = None;
        self.lease = None;
        self.report(Report::Quiet)
    }

    /// TERM, then KILL, as the lease approaches its end.
    fn keep_lease(&mut self) -> io::Result<()> {
        let (Some(lease), Some(job)) = (&self.lease, &mut self.job) else { return Ok(()) };
        let now = sys::now();
        if now >= lease.kill_at {
            self.report(Report::Killing)?;
            return self.kill_all_and_report();
        }
        if now >= lease.term_at && !job.warned {
            job.warned = true;
            let _ = kill_process_group(job.group, Signal::TERM);
            let _ = kill_process_group(job.group, Signal::CONT);
            self.report(Report::Warned)?;
        }
        Ok(())
    }

    fn kill_all_and_report(&mut self) -> io::Result<()> {
        if let Some(ending) = self.kill_all() {
            self.report(Report::Ended(ending))?;
        }
        self.report(Report::Gone)
    }

    /// Kills everything below this process. Returns how the command ended, if it had not before.
    fn kill_all(&mut self) -> Option<Ending> {
        let group = self.job.take().map(|job| job.group);
        self.lease = None;
        if let Some(group) = group {
            let _ = kill_process_group(group, Signal::KILL);
        }
        let mut how = None;
        procs::kill_descendants(&[], |pid, status| {
            if Some(pid) == group {
                how = ending(status);
            }
        });
        how
    }

    fn report(&mut self, report: Report) -> io::Result<()> {
        self.outbox.push(report);
        self.outbox.send(&mut self.link)
    }
}

fn ending(status: WaitStatus) -> Option<Ending> {
    let exited = status.exit_status().map(|code| Ending::Exited(code as u8));
    exited.or_else(|| status.terminating_signal().map(|signal| Ending::Signalled(signal as u8)))
}

/// The terminal this session is attached to, if any.
pub(crate) fn terminal() -> Option<File> {
    File::options().read(true).write(true).open("/dev/tty").ok()
}

fn drain(mut stream: &UnixStream) {
    let mut bytes = [0; 256];
    while matches!(stream.read(&mut bytes), Ok(count) if count > 0) {}
}
