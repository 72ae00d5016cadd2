//! A client whose connection to its home can be cut.

use lockset::Lockset;

use crate::layer::Ice;
use crate::proxy::Proxy;

/// A client, and its connection.
#[expect(missing_debug_implementations, reason = "links are of many kinds")]
pub struct Linked {
    /// The client.
    pub locks: Lockset,
    /// All that connects it with its home.
    pub link: Box<dyn Link>,
}

/// How a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Connection {
    /// All is well.
    Whole,
    /// It is ended, and a new one is refused: the client is told at once.
    Ended,
    /// Half open: nothing comes through in either direction, and nobody is told.
    Silent,
}

/// Something that connects.
pub trait Link: Send + Sync {
    /// From now on it is like this.
    fn set(&self, to: Connection);
}

/// One for each server.
impl Link for Vec<Proxy> {
    fn set(&self, to: Connection) {
        for proxy in self {
            proxy.refuse(to == Connection::Ended);
            proxy.silence(to == Connection::Silent);
            if to == Connection::Ended {
                proxy.cut();
            }
        }
    }
}

/// A stand-in, for mutants: nobody is told.
impl Link for Ice {
    fn set(&self, to: Connection) {
        match to {
            Connection::Whole => self.thaw(),
            Connection::Ended | Connection::Silent => self.freeze(),
        }
    }
}
