//! Acquiring a lock: which primitive, how long to wait, and what a terminal shows meanwhile.

use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use futures_util::StreamExt;
use lockset::{Error, Guard, LockOptions, LockState, Lockset, Name, Note};
use rustix::process::getpgrp;
use rustix::termios::{tcgetpgrp, tcgetwinsize};

use crate::args::{ModeArgs, WaitArgs};
use crate::outage::EngineWait;
use crate::output::{Failure, brief, by_with_note, code, print_message};
use crate::sys;

/// No line is shown for a shorter wait.
const SHOW_AFTER: Duration = Duration::from_millis(200);

/// The lock to acquire, and how.
pub(crate) struct LockRequest<'a> {
    pub(crate) mode: ModeArgs,
    pub(crate) election: bool,
    pub(crate) options: LockOptions,
    pub(crate) wait_args: &'a WaitArgs,
}

/// Acquires the lock, and shows on a terminal what it waits for. An engine that fails for a while
/// is waited for as well.
pub(crate) async fn acquire_lock(
    locks: &Lockset,
    name: &Name,
    request: &LockRequest<'_>,
    wait: &mut EngineWait,
    verbose: bool,
) -> Result<Guard, Failure> {
    loop {
        let line = WaitLine::new(name);
        let granted = tokio::select! {
            biased;
            granted = request_lock(locks, name, request, wait.left()) => granted,
            never = line.show(locks, verbose) => match never {},
        };
        // The next message has a line of its own.
        drop(line);
        match granted {
            Ok(Some(guard)) => return Ok(guard),
            Ok(None) => return Err(busy(locks, name, request.wait_args).await),
            Err(error @ Error::Timeout { .. }) => {
                let mut failure = Failure::from(error);
                failure.code = request.wait_args.conflict_exit_code.unwrap_or(failure.code);
                return Err(failure);
            }
            Err(error) => wait.pause_after(error).await?,
        }
    }
}

async fn request_lock(
    locks: &Lockset,
    name: &Name,
    request: &LockRequest<'_>,
    wait: Option<Duration>,
) -> lockset::Result<Option<Guard>> {
    let options = request.options.clone();
    let no_wait = request.wait_args.no_wait;
    if request.election {
        let election = locks.election(name.as_str())?.with(options);
        return match wait {
            _ if no_wait => election.try_campaign().await,
            Some(longest) => election.campaign_within(longest).await.map(Some),
            None => election.campaign().await.map(Some),
        };
    }
    if let Some(limit) = request.mode.limit {
        let semaphore = locks.semaphore(name.as_str(), limit)?.with(options);
        let permits = request.mode.permits.unwrap_or(1);
        return match wait {
            _ if no_wait => semaphore.try_acquire_many(permits).await,
            Some(longest) => semaphore.acquire_many_within(permits, longest).await.map(Some),
            None => semaphore.acquire_many(permits).await.map(Some),
        };
    }
    if request.mode.shared {
        let rwlock = locks.rwlock(name.as_str())?.with(options);
        return match wait {
            _ if no_wait => rwlock.try_read().await,
            Some(longest) => rwlock.read_within(longest).await.map(Some),
            None => rwlock.read().await.map(Some),
        };
    }
    let mutex = locks.mutex(name.as_str())?.with(options);
    match wait {
        _ if no_wait => mutex.try_lock().await,
        Some(longest) => mutex.lock_within(longest).await.map(Some),
        None => mutex.lock().await.map(Some),
    }
}

async fn busy(locks: &Lockset, name: &Name, wait_args: &WaitArgs) -> Failure {
    let holder = match locks.inspect(name.as_str()).await {
        Ok(state) => state.holders.first().map(|holder| format!(" by {}", by_with_note(holder))),
        Err(_) => None,
    };
    Failure::new(
        wait_args.conflict_exit_code.unwrap_or(code::BUSY),
        format!("`{name}` is held{}", holder.unwrap_or_default()),
    )
    .hint("leave out -n to wait for it, or wait a limited time with -w")
}

/// The line on stderr while lockset waits: rewritten in place, and gone when the wait is over.
struct WaitLine<'a> {
    name: &'a Name,
    on_terminal: bool,
    shown: std::cell::Cell<bool>,
}

enum Never {}

impl<'a> WaitLine<'a> {
    fn new(name: &'a Name) -> Self {
        let on_terminal = io::stderr().is_terminal();
        Self { name, on_terminal, shown: std::cell::Cell::new(false) }
    }

    /// Shows the line until dropped.
    async fn show(&self, locks: &Lockset, verbose: bool) -> Never {
        let began = sys::now();
        tokio::time::sleep(SHOW_AFTER).await;
        if !self.on_terminal {
            if verbose && let Ok(state) = locks.inspect(self.name.as_str()).await {
                print_message(self.text(&state, sys::now() - began));
            }
            return std::future::pending().await;
        }
        let mut changes = locks.watch_name(self.name.as_str()).ok();
        let mut state = LockState::free(self.name.clone());
        loop {
            // If the watch ends or fails, the wait continues without it.
            let next = async {
                match &mut changes {
                    Some(changes) => changes.next().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                change = next => match change {
                    Some(Ok(now)) => state = now,
                    _ => changes = None,
                },
                () = tokio::time::sleep(Duration::from_secs(1)) => {}
            }
            self.draw(&self.text(&state, sys::now() - began));
        }
    }

    fn text(&self, state: &LockState, waited: Duration) -> String {
        let mut text = format!("waiting for {}: ", self.name);
        match &state.holders[..] {
            [] => text += "free now",
            [holder] => text += &format!("held by {}", by_with_note(holder)),
            [holder, others @ ..] => {
                text += &format!("held by {} and {} more", by_with_note(holder), others.len());
            }
        }
        text += &format!(", {} so far", brief(Duration::from_secs(waited.as_secs())));
        // The name of this process in its claims.
        let own = Note::new("").unwrap_or_default().by;
        if let Some(place) = state.waiters.iter().position(|waiter| *waiter.note.by == *own) {
            text += &format!(", place {} of {}", place + 1, state.waiters.len());
        }
        text
    }

    /// Never longer than the terminal is wide: a line that wraps cannot be rewritten.
    fn draw(&self, text: &str) {
        // In the background the terminal belongs to another process group.
        if tcgetpgrp(io::stderr()).is_ok_and(|group| group != getpgrp()) {
            return;
        }
        let width = tcgetwinsize(io::stderr()).map_or(80, |size| size.ws_col);
        let width = if width == 0 { 80 } else { usize::from(width) };
        let text: String = text.chars().take(width.saturating_sub(1)).collect();
        let _ = write!(io::stderr(), "\r\x1b[K{text}");
        self.shown.set(true);
    }
}

impl Drop for WaitLine<'_> {
    fn drop(&mut self) {
        if self.shown.get() {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}
