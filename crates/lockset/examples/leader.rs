//! Two candidates, one leader, and an observer that sees the change.
//!
//!     cargo run -p lockset --example leader
#![allow(clippy::expect_used, reason = "an example")]

use futures_util::StreamExt;
use lockset::{LockOptions, Lockset, Result};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let locks = Lockset::connect("memory:").await?;
    let election = locks.election("scheduler")?;
    let candidate = |address: &str| election.clone().with(LockOptions::default().note(address));
    let (one, two) = (candidate("10.0.0.1:80"), candidate("10.0.0.2:80"));
    let mut leaders = one.observe();

    let term = one.campaign().await?;
    let next = tokio::spawn(async move { two.campaign().await });
    say(&format!(
        "term {}: {}",
        term.token(),
        one.leader().await?.expect("somebody leads").note.text
    ));
    term.release().await?;

    let term = next.await.expect("the campaign does not panic")?;
    say(&format!(
        "term {}: {}",
        term.token(),
        one.leader().await?.expect("somebody leads").note.text
    ));
    while let Some(leader) = leaders.next().await {
        if leader?.is_some_and(|leader| &*leader.note.text == "10.0.0.2:80") {
            break;
        }
    }
    locks.close().await
}

#[allow(clippy::print_stdout, reason = "an example talks to its reader")]
fn say(line: &str) {
    println!("{line}");
}
