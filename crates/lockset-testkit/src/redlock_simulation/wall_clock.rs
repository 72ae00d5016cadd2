//! The wall clocks of the clients, from which they derive proposed tokens.
//!
//! The Redlock engine reads the machine's wall clock, which does not follow virtual time and is far
//! ahead of every token. So proposals are replaced here: by a shared clock that follows virtual
//! time, or by a stopped one. Proposals of a stopped clock are always behind, so that tokens grow
//! by one, as in the model, and values that must differ can collide.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use lockset::Token;
use lockset::clock::Clock;

/// Proposals above this come from the machine's wall clock; no token of a run reaches it.
const MACHINE: u64 = 1_000_000_000_000_000;

/// A running clock that never returns the same value twice.
#[derive(Debug)]
pub(super) struct SharedWallTime {
    clock: Clock,
    last: Mutex<u64>,
}

impl SharedWallTime {
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
pub(super) struct WallClock {
    /// The clock that it follows; `None` if it is stopped.
    time: Option<Arc<SharedWallTime>>,
    /// The replacement of each proposal, which is sent to several nodes.
    proposed: Mutex<HashMap<Token, Token>>,
}

impl WallClock {
    pub(super) fn new(time: Option<Arc<SharedWallTime>>) -> Arc<Self> {
        Arc::new(Self { time, proposed: Mutex::default() })
    }

    /// What this client proposes instead. Values that were granted before are unchanged.
    pub(super) fn proposes(&self, proposal: Token) -> Token {
        if proposal.get() < MACHINE {
            return proposal;
        }
        let mut proposed = self.proposed.lock().unwrap();
        let propose = || Token::new(self.time.as_ref().map_or(1, |time| time.micros()));
        *proposed.entry(proposal).or_insert_with(propose)
    }
}
