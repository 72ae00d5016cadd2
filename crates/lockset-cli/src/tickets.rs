//! `acquire`, `renew`, `release`: a lock that outlives the command, held by a ticket.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use lockset::{Error, Guard, LockOptions, Lockset, LossReason, Name, Ticket, Token};
use serde_json::json;

use crate::acquire::{LockRequest, acquire_lock};
use crate::args::{AcquireArgs, Printed, TicketArgs};
use crate::home::Home;
use crate::link::Signals;
use crate::outage::EngineWait;
use crate::output::{Failure, brief, code, print, print_json, print_message};

pub(crate) async fn acquire(args: &AcquireArgs, home: &Home, verbose: bool) -> Result<(), Failure> {
    if args.print.is_some() && args.ticket == Path::new("-") {
        return Err(Failure::own("--ticket - and --print cannot both write to stdout")
            .hint("let the ticket go to a file"));
    }
    // Before the lock is acquired: without a ticket it could not be released.
    let file = TicketFile::create(&args.ticket)?;
    let outcome = acquire_unless_ended(&file, args, home, verbose).await;
    if outcome.is_err() {
        file.remove();
    }
    // The ticket is written, so the lock is held, even if printing fails.
    match (outcome?, args.json) {
        (_, _) if file.is_stdout() => Ok(()),
        (held, _) if matches!(args.print, Some(Printed::Token)) => {
            print(format_args!("{}\n", held.token))
        }
        (held, true) => print_json(&json!({
            "name": args.name,
            "token": held.token,
            "ttl_ms": held.ttl.as_millis() as u64,
        })),
        (held, false) => print(format_args!(
            "{} is held for {}, token {}, ticket {}\n",
            args.name,
            humantime::format_duration(args.ttl),
            held.token,
            args.ticket.display(),
        )),
    }
}

/// A lock whose ticket is written.
struct Held {
    token: Token,
    ttl: Duration,
}

async fn acquire_unless_ended(
    file: &TicketFile<'_>,
    args: &AcquireArgs,
    home: &Home,
    verbose: bool,
) -> Result<Held, Failure> {
    let mut signals = Signals::that_terminate()?;
    let mut wait = EngineWait::new(home, &args.wait_args);
    let ended = |signal| Err(Failure::silent(128 + signal as u8));
    let locks = tokio::select! {
        biased;
        locks = wait.connect(Home::builder) => locks?,
        signal = signals.next() => return ended(signal),
    };
    let outcome = tokio::select! {
        biased;
        outcome = acquire_into(file, args, &locks, &mut wait, verbose) => outcome,
        signal = signals.next() => ended(signal),
    };
    // After a signal this withdraws the claim; after a success nothing is left that could fail.
    let _ = locks.close().await;
    outcome
}

async fn acquire_into(
    file: &TicketFile<'_>,
    args: &AcquireArgs,
    locks: &Lockset,
    wait: &mut EngineWait,
    verbose: bool,
) -> Result<Held, Failure> {
    let options = LockOptions::default().ttl(args.ttl).detachable();
    let request = LockRequest {
        mode: args.mode,
        election: false,
        options: options.note(args.note.clone().unwrap_or_default()),
        wait_args: &args.wait_args,
    };
    let guard = acquire_lock(locks, &args.name, &request, wait, verbose).await?;
    let held = Held { token: guard.token(), ttl: guard.ttl() };
    let ticket = guard.detach().await?;
    if let Err(mut error) = file.write(&ticket.to_string()) {
        // No process could ever release it: attach it again, and release it.
        if let Ok(guard) = locks.attach(&ticket).await {
            let _ = guard.release().await;
        }
        // A reader that went away did not get the ticket.
        error.code = code::OWN_ERROR;
        return Err(error);
    }
    Ok(held)
}

pub(crate) async fn renew(args: &TicketArgs, ticket: &Ticket, home: &Home) -> Result<(), Failure> {
    let locks = home.connect().await?;
    let renewed = locks.renew(ticket).await;
    let name = ticket.name();
    if let Err(Error::Lost { reason: LossReason::Revoked, .. }) = renewed {
        return Err(revoked(&locks, name).await);
    }
    let lease = renewed.map_err(|error| of_ticket(ticket, error))?;
    locks.close().await?;
    if args.json {
        let (token, left) = (lease.token, lease.valid_for.as_millis() as u64);
        return print_json(&json!({ "name": name, "token": token, "left_ms": left }));
    }
    print(format_args!("{name} is held for another {}\n", brief(lease.valid_for)))
}

async fn revoked(locks: &Lockset, name: &Name) -> Failure {
    let state = locks.inspect(name.as_str()).await;
    let left = state.ok().and_then(|state| state.holders.first().map(|holder| holder.left));
    let ends = left.map(|left| format!(", and ends in {}", brief(left))).unwrap_or_default();
    let what = format!("`{name}` was revoked: its lease is its last{ends}");
    Failure::new(code::LOST, what).hint("`lockset release` releases it before that")
}

pub(crate) async fn release(
    args: &TicketArgs,
    ticket: &Ticket,
    home: &Home,
) -> Result<(), Failure> {
    let released = async {
        let (locks, guard) = attach(ticket, home).await?;
        let name = guard.name().clone();
        guard.release().await?;
        locks.close().await?;
        Ok(name)
    };
    let outcome = released.await;
    // The ticket of a lock that is gone is as useless as that of a released lock.
    let spent = outcome.as_ref().map_or_else(|failure: &Failure| failure.code == 76, |_| true);
    if spent
        && args.ticket != Path::new("-")
        && let Err(error) = fs::remove_file(&args.ticket)
    {
        print_message(format_args!("cannot remove {}: {error}", args.ticket.display()));
    }
    let name = outcome?;
    if args.json {
        return print_json(&json!({ "name": name, "released": true }));
    }
    print(format_args!("{name} is released\n"))
}

async fn attach(ticket: &Ticket, home: &Home) -> Result<(Lockset, Guard), Failure> {
    let locks = home.connect().await?;
    match locks.attach(ticket).await {
        Ok(guard) => Ok((locks, guard)),
        Err(error) => Err(of_ticket(ticket, error)),
    }
}

/// The failure of a request by a ticket, with a hint.
fn of_ticket(ticket: &Ticket, error: Error) -> Failure {
    let is_gone = matches!(error, Error::Lost { .. } | Error::NotHeld { .. });
    let failure = Failure::from(error);
    match is_gone {
        true => failure.hint(format!("`lockset show {}` shows who holds it now", ticket.name())),
        false => failure,
    }
}

/// The ticket in a file, or from stdin.
pub(crate) fn read(path: &Path) -> Result<Ticket, Failure> {
    let text = if path == Path::new("-") {
        let mut text = String::new();
        io::stdin().take(1 << 20).read_to_string(&mut text).map(|_| text)
    } else {
        fs::read_to_string(path)
    };
    let text = text.map_err(|error| {
        Failure::own(format!("cannot read the ticket {}: {error}", path.display()))
    })?;
    Ok(text.trim().parse()?)
}

/// The file of a ticket, or stdout.
struct TicketFile<'a> {
    path: &'a Path,
    file: Option<File>,
}

impl<'a> TicketFile<'a> {
    /// A new file that only its owner can read, or stdout.
    fn create(path: &'a Path) -> Result<Self, Failure> {
        if path == Path::new("-") {
            return Ok(Self { path, file: None });
        }
        let file = File::options().write(true).create_new(true).mode(0o600).open(path);
        let failed = |error: io::Error| {
            let failure = format!("cannot create the ticket {}: {error}", path.display());
            match error.kind() {
                io::ErrorKind::AlreadyExists => Failure::own(failure)
                    .hint("it may belong to a lock that is held; release that one first"),
                _ => Failure::own(failure),
            }
        };
        Ok(Self { path, file: Some(file.map_err(failed)?) })
    }

    fn is_stdout(&self) -> bool {
        self.file.is_none()
    }

    fn write(&self, ticket: &str) -> Result<(), Failure> {
        let Some(mut file) = self.file.as_ref() else { return print(format_args!("{ticket}\n")) };
        let written = writeln!(file, "{ticket}").and_then(|()| file.sync_all());
        written.map_err(|error| {
            Failure::own(format!("cannot write the ticket {}: {error}", self.path.display()))
        })
    }

    fn remove(&self) {
        if self.file.is_some() {
            let _ = fs::remove_file(self.path);
        }
    }
}
