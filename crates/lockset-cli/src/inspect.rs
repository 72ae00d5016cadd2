//! `ls`, `show`, `watch`, `break`: inspecting locks, and taking them away.

use futures_util::StreamExt;
use lockset::{Break, Holder};
use serde_json::json;

use crate::args::{BreakArgs, ListArgs, ShowArgs};
use crate::home::Home;
use crate::output::{self, Failure, Paint, code, print, print_json, print_message};

pub(crate) async fn list(args: &ListArgs, home: &Home) -> Result<(), Failure> {
    let locks = home.connect().await?;
    let states = locks.list(&args.prefix).await?;
    if args.json {
        return print_json(&states);
    }
    match &states[..] {
        [] => print("no lock is held or waited for\n"),
        states => print(output::table(states, Paint::for_stdout())),
    }
}

/// Shows one lock. The exit code says whether it is held.
pub(crate) async fn show(args: &ShowArgs, home: &Home) -> Result<u8, Failure> {
    let locks = home.connect().await?;
    let state = locks.inspect(args.name.as_str()).await?;
    match args.json {
        true => print_json(&state)?,
        false => print(output::description(&state, Paint::for_stdout()))?,
    }
    Ok(if state.holders.is_empty() { code::NOT_HELD } else { 0 })
}

/// Prints every change until a signal or a closed stdout ends it.
pub(crate) async fn watch(args: &ListArgs, home: &Home) -> Result<(), Failure> {
    let locks = home.connect().await?;
    let mut changes = locks.watch(&args.prefix)?;
    let mut failed: Option<Failure> = None;
    while let Some(state) = changes.next().await {
        let state = match state {
            Err(error) if error.is_retryable() => {
                // Printed once, until a change was read again.
                if failed.is_none() {
                    failed.insert(error.into()).print(|text| home.redact(text));
                }
                continue;
            }
            state => state?,
        };
        failed = None;
        if args.json {
            print_json(&state)?;
        } else {
            print(output::line(&state, Paint::for_stdout()))?;
        }
    }
    Err(failed.unwrap_or_else(|| Failure::own("the engine ended the watch")))
}

/// Takes a lock away. The exit code says whether there was one to take away.
pub(crate) async fn break_lock(args: &BreakArgs, home: &Home) -> Result<u8, Failure> {
    let locks = home.connect().await?;
    let how = if args.now { Break::Now } else { Break::WhenLeaseEnds };
    let holders = locks.force_release(args.name.as_str(), how).await?;
    let is_broken = holders.iter().any(|holder| args.now || !is_left_alone(holder));
    if args.json {
        print_json(&json!({ "name": args.name, "now": args.now, "holders": holders }))?;
    } else if holders.is_empty() {
        print_message(format_args!("`{}` is not held; nothing was done", args.name));
    } else {
        describe_break(args, &holders)?;
    }
    Ok(if is_broken { 0 } else { code::NOT_HELD })
}

/// A holder that is not lockset cannot be notified, and keeps its lock unless the engine can end
/// its lease.
fn is_left_alone(holder: &Holder) -> bool {
    holder.claim.is_none() && !holder.revoked
}

fn describe_break(args: &BreakArgs, holders: &[Holder]) -> Result<(), Failure> {
    let name = &args.name;
    for holder in holders {
        let who = output::by_with_note(holder);
        if args.now {
            print(format_args!("{name} was taken from {who} at once\n"))?;
        } else if is_left_alone(holder) {
            print(format_args!(
                "{name} is held by {who}, which is not lockset and cannot be notified; --now takes it\n"
            ))?;
        } else {
            let left = output::brief(holder.left);
            print(format_args!(
                "{name} will be taken from {who} when its lease ends, in {left}\n"
            ))?;
        }
    }
    if args.now {
        return print(
            "its former holder may still be working until it notices; until then only a resource \
             that checks fencing tokens is safe\n",
        );
    }
    match holders.iter().any(|holder| holder.claim.is_some()) {
        true => print(
            "its renewals are rejected and it was notified; until then it holds the lock alone\n",
        ),
        false => Ok(()),
    }
}
