//! `ls`, `show`, `watch`, `break`: looking at locks, and taking them away.

use futures_util::StreamExt;
use lockset::{Break, Holder};
use serde_json::json;

use crate::args::{BreakArgs, ListArgs, ShowArgs};
use crate::home::Home;
use crate::output::{self, Failure, Paint, code, complain, print, print_json};

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

/// Shows one lock; the exit code tells whether it is held.
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
    let mut trouble: Option<Failure> = None;
    while let Some(state) = changes.next().await {
        let state = match state {
            Err(error) if error.is_retryable() => {
                // Said once, until there is something to tell again.
                if trouble.is_none() {
                    trouble.insert(error.into()).print(|text| home.redact(text));
                }
                continue;
            }
            state => state?,
        };
        trouble = None;
        if args.json {
            print_json(&state)?;
        } else {
            print(output::line(&state, Paint::for_stdout()))?;
        }
    }
    Err(trouble.unwrap_or_else(|| Failure::own("the engine has nothing more to tell")))
}

/// Takes a lock away; the exit code tells whether there was anything to take.
pub(crate) async fn break_lock(args: &BreakArgs, home: &Home) -> Result<u8, Failure> {
    let locks = home.connect().await?;
    let how = if args.now { Break::Now } else { Break::WhenLeaseEnds };
    let holders = locks.force_release(args.name.as_str(), how).await?;
    let is_broken = holders.iter().any(|holder| args.now || !is_left_alone(holder));
    if args.json {
        print_json(&json!({ "name": args.name, "now": args.now, "holders": holders }))?;
    } else if holders.is_empty() {
        complain(format_args!("`{}` is not held; nothing was done", args.name));
    } else {
        describe_break(args, &holders)?;
    }
    Ok(if is_broken { 0 } else { code::NOT_HELD })
}

/// A holder that is not lockset cannot be asked to give its lock back, and keeps it unless the
/// engine can end its lease.
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
                "{name} is held by {who}, which is not lockset and cannot be told; --now takes it\n"
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
            "its holder may still be at work, for as long as it takes it to notice: until then two \
             may act at once, and only a resource that checks fencing tokens is safe\n",
        );
    }
    match holders.iter().any(|holder| holder.claim.is_some()) {
        true => {
            print("its renewals are refused and it was told; until then it holds the lock alone\n")
        }
        false => Ok(()),
    }
}
