//! A client whose connection to its backend can be cut.

use lockset::Lockset;

use crate::layer::FreezeSwitch;
use crate::proxy::Proxy;

/// A client and its connection.
#[expect(missing_debug_implementations, reason = "links are of many kinds")]
pub struct LinkedClient {
    /// The client.
    pub locks: Lockset,
    /// Everything that connects it with its backend.
    pub link: Box<dyn Link>,
}

/// The state of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkState {
    /// It works.
    Up,
    /// It is closed and new connections are refused: the client notices at once.
    Closed,
    /// Half open: nothing passes in either direction, and the client is not notified.
    Silent,
}

/// A connection that can be cut.
pub trait Link: Send + Sync {
    /// Changes its state.
    fn set(&self, to: LinkState);
}

/// One proxy per server.
impl Link for Vec<Proxy> {
    fn set(&self, to: LinkState) {
        for proxy in self {
            proxy.refuse(to == LinkState::Closed);
            proxy.set_silent(to == LinkState::Silent);
            if to == LinkState::Closed {
                proxy.cut();
            }
        }
    }
}

/// A simulated connection, for mutants: the client is never notified.
impl Link for FreezeSwitch {
    fn set(&self, to: LinkState) {
        match to {
            LinkState::Up => self.thaw(),
            LinkState::Closed | LinkState::Silent => self.freeze(),
        }
    }
}
