//! A holder sleeps past its lease and then writes: the token lets the resource refuse it.
//!
//!     cargo run -p lockset --example fencing

use std::time::Duration;

use lockset::{LockOptions, Lockset, Result, State, Token};

/// A register that refuses any token lower than the greatest it has seen.
#[derive(Default)]
struct Register {
    greatest: Option<Token>,
    value: String,
}

impl Register {
    fn write(&mut self, token: Token, value: &str) -> bool {
        if self.greatest.is_some_and(|greatest| token < greatest) {
            return false;
        }
        (self.greatest, self.value) = (Some(token), value.to_owned());
        true
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let locks = Lockset::connect("memory:").await?;
    // A lease that is not renewed stands in for a process that is paused.
    let paused = LockOptions::default().ttl(Duration::from_millis(200)).no_renewal();
    let mut register = Register::default();

    let old = locks.mutex("register")?.with(paused).lock().await?;
    let new = locks.mutex("register")?.lock().await?; // granted when the old lease is over
    assert!(matches!(old.state(), State::Lost(_)), "the old guard knows");
    assert!(old.token() < new.token());

    assert!(register.write(new.token(), "from the new holder"));
    let accepted = register.write(old.token(), "late, from the old holder");
    say(&format!("late write accepted: {accepted}; the register says: {}", register.value));
    assert!(!accepted);

    new.release().await?;
    locks.close().await
}

#[allow(clippy::print_stdout, reason = "an example talks to its reader")]
fn say(line: &str) {
    println!("{line}");
}
