//! The wall clocks of the clients, from which they propose tokens.
//!
//! The quorum reads the machine's own wall clock, which knows nothing of virtual time and is far
//! ahead of every token. So what a client proposes is put in its place here: by a clock that goes
//! with virtual time and is the same for all, or by one that stands still. Proposals of the latter
//! are always behind, so that tokens grow by one, as in the model, and values that must differ
//! meet.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use lockset::Token;
use lockset::clock::Clock;

/// Proposals above this come from the machine's wall clock; no token of a run gets there.
const MACHINE: u64 = 1_000_000_000_000_000;

/// A clock that goes, and never says the same twice.
#[derive(Debug)]
pub(super) struct Time {
    clock: Clock,
    last: Mutex<u64>,
}

impl Time {
    pub(super) fn new(clock: Clock) -> Arc<Self> {
        Arc::new(Self { clock, last: Mutex::new(0) })
    }

    fn micros(&self) -> u64 {
        let mut last = self.last.lock().unwrap();
        *last = (*last + 1).max(self.clock.now().as_nanos() / 1000);
        *last
    }
}

/// The wall clock of one client.
#[derive(Debug)]
pub(super) struct Wall {
    /// What it goes by; `None`: it stands still.
    time: Option<Arc<Time>>,
    /// What stands for each proposal, which goes to several nodes.
    said: Mutex<HashMap<Token, Token>>,
}

impl Wall {
    pub(super) fn new(time: Option<Arc<Time>>) -> Arc<Self> {
        Arc::new(Self { time, said: Mutex::default() })
    }

    /// What this client proposes instead. What was granted somewhere before stays as it is.
    pub(super) fn proposes(&self, proposal: Token) -> Token {
        if proposal.get() < MACHINE {
            return proposal;
        }
        let mut said = self.said.lock().unwrap();
        let say = || Token::new(self.time.as_ref().map_or(1, |time| time.micros()));
        *said.entry(proposal).or_insert_with(say)
    }
}
