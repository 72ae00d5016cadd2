//! Lockset's side of the link to its guardian, and the signals that lockset gets.

use std::io;
use std::os::unix::net::UnixStream as StdStream;
use std::os::unix::process::CommandExt;
use std::pin::pin;
use std::process::Command;
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitOptions, kill_process};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use crate::home::SECRET_VARIABLES;
use crate::output::Failure;
use crate::wire::{Inbox, Order, Report};
use crate::{guardian, procs, sys};

/// A guardian that has not read its orders for this long was stopped.
const READ_TIMEOUT: Duration = Duration::from_millis(100);

/// What must be in place before the first thread exists and the lock is requested.
pub(crate) struct Prepared {
    guardian: u32,
    link: StdStream,
    signals: StdStream,
    /// Children that lockset must not end: `sleep 9 & exec lockset …` leaves one.
    older: Vec<i32>,
}

impl Prepared {
    /// Starts the guardian and the handling of signals.
    pub(crate) fn begin() -> Result<Self, Failure> {
        let older = procs::children();
        let failed = |error| Failure::own(format!("cannot start the guardian process: {error}"));
        sys::adopt_orphans().map_err(failed)?;
        let (link, theirs) = StdStream::pair().map_err(failed)?;
        let guardian = start_guardian(&theirs).map_err(failed)?;
        let heard: Vec<i32> = sys::FORWARDED.into_iter().chain([libc::SIGCHLD]).collect();
        let signals = sys::signal_stream(&heard).map_err(failed)?;
        sys::unblock_signals();
        Ok(Self { guardian, link, signals, older })
    }

    /// The guardian's process, which represents the whole tree.
    pub(crate) fn guardian(&self) -> u32 {
        self.guardian
    }

    /// Both streams, for the runtime this is called in.
    pub(crate) fn attach(self) -> Result<(Link, Signals), Failure> {
        let attach = |stream: StdStream| {
            stream.set_nonblocking(true)?;
            UnixStream::from_std(stream)
        };
        let failed = |error| Failure::own(format!("cannot listen to the guardian: {error}"));
        let stream = attach(self.link).map_err(failed)?;
        let signals = Signals(attach(self.signals).map_err(failed)?);
        let guardian = Pid::from_raw(self.guardian as i32);
        Ok((Link { stream, inbox: Inbox::default(), guardian, older: self.older }, signals))
    }
}

/// Not a fork: the binary is executed again, so the guardian has no copy of lockset's memory.
/// `/proc/self/exe` is this very file even if an upgrade has replaced it meanwhile.
fn start_guardian(theirs: &StdStream) -> io::Result<u32> {
    let spawn = |path: &std::path::Path| {
        let mut command = Command::new(path);
        command.arg0("lockset").arg(guardian::SUBCOMMAND);
        for variable in SECRET_VARIABLES {
            command.env_remove(variable);
        }
        sys::spawn_guardian(&mut command, theirs)
    };
    let child = spawn("/proc/self/exe".as_ref()).or_else(|_| spawn(&std::env::current_exe()?))?;
    Ok(child.id())
}

/// The link to the guardian.
#[derive(Debug)]
pub(crate) struct Link {
    stream: UnixStream,
    inbox: Inbox,
    guardian: Option<Pid>,
    older: Vec<i32>,
}

impl Link {
    /// Sends an order. A guardian that does not read its orders is continued, so that this cannot
    /// block. [`Link::report`] notices that it is gone.
    pub(crate) async fn order(&mut self, order: &Order) {
        let (order, guardian) = (order.encode(), self.guardian);
        let mut writing = pin!(self.stream.write_all(&order));
        while tokio::time::timeout(READ_TIMEOUT, &mut writing).await.is_err() {
            wake(guardian);
        }
    }

    /// The next report; `None` if the guardian is gone. May be cancelled.
    pub(crate) async fn report(&mut self) -> Option<Report> {
        loop {
            if let Some(frame) = self.inbox.next() {
                return Report::decode(&frame).ok();
            }
            let mut bytes = [0; 512];
            match self.stream.read(&mut bytes).await {
                Ok(0) | Err(_) => return None,
                Ok(count) => self.inbox.push(&bytes[..count]),
            }
        }
    }

    /// Continues the guardian, if it was stopped.
    pub(crate) fn wake_guardian(&self) {
        wake(self.guardian);
    }

    /// The guardian is gone, so its children are ours now: kills them in its place.
    pub(crate) fn act_for_guardian(&self) {
        procs::kill_descendants(&self.older, |_, _| {});
    }
}

fn wake(guardian: Option<Pid>) {
    if let Some(guardian) = guardian {
        let _ = kill_process(guardian, Signal::CONT);
    }
}

/// The signals lockset gets.
#[derive(Debug)]
pub(crate) struct Signals(UnixStream);

impl Signals {
    /// Handles the signals that ask lockset to end, when there is no command to forward them to.
    pub(crate) fn that_terminate() -> Result<Self, Failure> {
        let listen = || {
            let stream = sys::signal_stream(&sys::ENDING)?;
            UnixStream::from_std(stream)
        };
        let failed = |error: io::Error| Failure::own(format!("cannot listen to signals: {error}"));
        Ok(Self(listen().map_err(failed)?))
    }

    /// The next signal. Children that ended are reaped on the way: as process 1 of a container
    /// lockset becomes the parent of all orphans. May be cancelled.
    pub(crate) async fn next(&mut self) -> i32 {
        loop {
            let mut byte = [0; 1];
            match self.0.read(&mut byte).await {
                Ok(1) if i32::from(byte[0]) == libc::SIGCHLD => reap_orphans(),
                Ok(1) => return byte[0].into(),
                // Its other end is never closed.
                _ => std::future::pending().await,
            }
        }
    }
}

fn reap_orphans() {
    while let Ok(Some(_)) = rustix::process::wait(WaitOptions::NOHANG) {}
}
