//! ZooKeeper's wire format, as far as this engine speaks it: bounded, and nothing is trusted.

use std::fmt;

/// The longest frame that is read; a server sends more only if it was told to.
pub(in crate::engine::zookeeper) const LONGEST_FRAME: usize = 32 << 20;

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(in crate::engine::zookeeper) enum Op {
    Delete = 2,
    GetData = 4,
    SetData = 5,
    Sync = 9,
    GetChildren = 12,
    Check = 13,
    Multi = 14,
    Create = 15,
    RemoveWatches = 18,
    CreateContainer = 19,
    Auth = 100,
    AddWatch = 106,
    CloseSession = -11,
}

impl Op {
    /// Whether its answer has been with the leader.
    pub(in crate::engine::zookeeper) fn is_answered_by_leader(self) -> bool {
        use Op::{Create, CreateContainer, Delete, Multi, SetData, Sync};
        matches!(self, Create | CreateContainer | Delete | SetData | Multi | Sync)
    }
}

/// What a server answers instead of doing what it was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine::zookeeper) struct Refusal(pub(super) i32);

impl Refusal {
    pub(in crate::engine::zookeeper) const UNIMPLEMENTED: Refusal = Refusal(-6);
    pub(in crate::engine::zookeeper) const NO_NODE: Refusal = Refusal(-101);
    pub(in crate::engine::zookeeper) const NO_AUTH: Refusal = Refusal(-102);
    pub(in crate::engine::zookeeper) const BAD_VERSION: Refusal = Refusal(-103);
    pub(in crate::engine::zookeeper) const NODE_EXISTS: Refusal = Refusal(-110);
    pub(in crate::engine::zookeeper) const SESSION_EXPIRED: Refusal = Refusal(-112);
    pub(in crate::engine::zookeeper) const AUTH_FAILED: Refusal = Refusal(-115);
    pub(in crate::engine::zookeeper) const SESSION_MOVED: Refusal = Refusal(-118);

    /// In a transaction that was not done, the parts that were not looked at.
    const NOT_TRIED: Refusal = Refusal(-2);
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            -6 => "it does not know this request (its version is too old)",
            -8 => "it does not understand the request",
            -101 => "there is no such node",
            -102 => "this user is not allowed to do that here (NoAuth)",
            -103 => "the node has changed",
            -108 => "an ephemeral node has no children",
            -110 => "there is such a node already",
            -111 => "the node has children",
            -112 => "the session has expired",
            -114 => "it does not accept the ACL",
            -115 => "it does not accept the user and password",
            -118 => "the session has moved to another server",
            -119 => "it is read-only at the moment",
            -125 => "a quota is used up",
            code => return write!(f, "error {code}"),
        })
    }
}

/// Bytes that make no sense.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::engine::zookeeper) struct Garbled;

/// What is to be sent.
#[derive(Debug, Default)]
pub(in crate::engine::zookeeper) struct Writer(pub(super) Vec<u8>);

impl Writer {
    pub(in crate::engine::zookeeper) fn int(&mut self, value: i32) -> &mut Self {
        self.0.extend_from_slice(&value.to_be_bytes());
        self
    }

    pub(in crate::engine::zookeeper) fn long(&mut self, value: i64) -> &mut Self {
        self.0.extend_from_slice(&value.to_be_bytes());
        self
    }

    pub(in crate::engine::zookeeper) fn boolean(&mut self, value: bool) -> &mut Self {
        self.0.push(u8::from(value));
        self
    }

    pub(in crate::engine::zookeeper) fn buffer(&mut self, bytes: &[u8]) -> &mut Self {
        // Names, notes and cells are far shorter than this can count.
        self.int(i32::try_from(bytes.len()).unwrap_or(i32::MAX));
        self.0.extend_from_slice(bytes);
        self
    }

    pub(in crate::engine::zookeeper) fn text(&mut self, text: &str) -> &mut Self {
        self.buffer(text.as_bytes())
    }

    /// Writes `body` after its length.
    pub(in crate::engine::zookeeper) fn frame(&mut self, body: impl FnOnce(&mut Writer)) {
        let start = self.0.len();
        self.int(0);
        body(self);
        let length = u32::try_from(self.0.len() - start - 4).unwrap_or(u32::MAX);
        self.0[start..start + 4].copy_from_slice(&length.to_be_bytes());
    }
}

/// What was received.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine::zookeeper) struct Reader<'a>(pub(super) &'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8], Garbled> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or(Garbled)?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Garbled> {
        self.take(N)?.try_into().map_err(|_| Garbled)
    }

    pub(in crate::engine::zookeeper) fn int(&mut self) -> Result<i32, Garbled> {
        self.array().map(i32::from_be_bytes)
    }

    pub(in crate::engine::zookeeper) fn long(&mut self) -> Result<i64, Garbled> {
        self.array().map(i64::from_be_bytes)
    }

    pub(in crate::engine::zookeeper) fn boolean(&mut self) -> Result<bool, Garbled> {
        Ok(self.array::<1>()? != [0])
    }

    /// A missing buffer is an empty one.
    pub(in crate::engine::zookeeper) fn buffer(&mut self) -> Result<&'a [u8], Garbled> {
        match self.int()? {
            -1 => Ok(&[]),
            length => self.take(usize::try_from(length).map_err(|_| Garbled)?),
        }
    }

    pub(in crate::engine::zookeeper) fn text(&mut self) -> Result<&'a str, Garbled> {
        std::str::from_utf8(self.buffer()?).map_err(|_| Garbled)
    }

    pub(in crate::engine::zookeeper) fn texts(&mut self) -> Result<Vec<String>, Garbled> {
        let count = usize::try_from(self.int()?.max(0)).map_err(|_| Garbled)?;
        // Each takes at least its length, so a lying count cannot make us reserve much.
        let mut texts = Vec::with_capacity(count.min(self.0.len() / 4));
        for _ in 0..count {
            texts.push(self.text()?.to_owned());
        }
        Ok(texts)
    }

    pub(in crate::engine::zookeeper) fn stat(&mut self) -> Result<Stat, Garbled> {
        let czxid = self.long()?;
        let mzxid = self.long()?;
        self.take(16)?;
        let version = self.int()?;
        self.take(8)?;
        let owner = self.long()?;
        self.take(16)?;
        Ok(Stat { czxid, mzxid, version, owner })
    }
}

/// What matters of a node's facts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::engine::zookeeper) struct Stat {
    /// The transaction that created the node.
    pub(in crate::engine::zookeeper) czxid: i64,
    /// The transaction that last changed its data.
    pub(in crate::engine::zookeeper) mzxid: i64,
    /// How often its data was changed.
    pub(in crate::engine::zookeeper) version: i32,
    /// The session whose end is the node's.
    pub(in crate::engine::zookeeper) owner: i64,
}

/// How a node lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine::zookeeper) enum Kind {
    Persistent = 0,
    Ephemeral = 1,
    EphemeralSequential = 3,
    /// Removed by the server when its last child is gone.
    Container = 4,
}

/// Who may do what with a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine::zookeeper) enum Acl {
    Anybody,
    /// Only the user that made it.
    Creator,
}

const ALL_PERMISSIONS: i32 = 31;

pub(in crate::engine::zookeeper) fn create(
    w: &mut Writer,
    path: &str,
    data: &[u8],
    acl: Acl,
    kind: Kind,
) {
    w.text(path).buffer(data).int(1).int(ALL_PERMISSIONS);
    match acl {
        Acl::Anybody => w.text("world").text("anyone"),
        Acl::Creator => w.text("auth").text(""),
    };
    w.int(kind as i32);
}

/// Part of a transaction.
#[derive(Clone, Debug)]
pub(in crate::engine::zookeeper) enum Part {
    Create { path: String, data: Vec<u8>, acl: Acl, kind: Kind },
    Delete { path: String, version: i32 },
    SetData { path: String, data: Vec<u8>, version: i32 },
    Check { path: String, version: i32 },
}

pub(in crate::engine::zookeeper) fn multi(w: &mut Writer, parts: &[Part]) {
    for part in parts {
        let op = match part {
            Part::Create { .. } => Op::Create,
            Part::Delete { .. } => Op::Delete,
            Part::SetData { .. } => Op::SetData,
            Part::Check { .. } => Op::Check,
        };
        w.int(op as i32).boolean(false).int(-1);
        match part {
            Part::Create { path, data, acl, kind } => create(w, path, data, *acl, *kind),
            Part::SetData { path, data, version } => {
                w.text(path).buffer(data).int(*version);
            }
            Part::Delete { path, version } | Part::Check { path, version } => {
                w.text(path).int(*version);
            }
        }
    }
    w.int(-1).boolean(true).int(-1);
}

/// Why a transaction was not done, if it was not: which part, and why.
pub(in crate::engine::zookeeper) fn multi_refusal(
    answer: &[u8],
) -> Result<Option<(usize, Refusal)>, Garbled> {
    let mut reader = Reader(answer);
    let mut index = 0;
    let mut refusal = None;
    loop {
        let (op, done, _) = (reader.int()?, reader.boolean()?, reader.int()?);
        if done {
            return Ok(refusal);
        }
        match op {
            -1 => match Refusal(reader.int()?) {
                Refusal(0) | Refusal::NOT_TRIED => {}
                why => refusal = refusal.or(Some((index, why))),
            },
            // The transaction was done; what it answers in detail is not needed.
            _ => return Ok(None),
        }
        index += 1;
    }
}

/// What begins every answer: which request it is for, the server's transaction, and a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine::zookeeper) struct Head {
    pub(in crate::engine::zookeeper) xid: i32,
    pub(in crate::engine::zookeeper) zxid: i64,
    pub(in crate::engine::zookeeper) error: i32,
}

pub(in crate::engine::zookeeper) const WATCH_XID: i32 = -1;
pub(in crate::engine::zookeeper) const AUTH_XID: i32 = -4;

pub(in crate::engine::zookeeper) fn head(reader: &mut Reader<'_>) -> Result<Head, Garbled> {
    Ok(Head { xid: reader.int()?, zxid: reader.long()?, error: reader.int()? })
}

/// What happened to a watched node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine::zookeeper) enum Change {
    Created,
    Deleted,
    Data,
    Children,
}

/// A change of a watched node; `None` for words about the session, which the connection itself
/// tells better.
pub(in crate::engine::zookeeper) fn event<'a>(
    reader: &mut Reader<'a>,
) -> Result<Option<(Change, &'a str)>, Garbled> {
    let (kind, _state, path) = (reader.int()?, reader.int()?, reader.text()?);
    let change = match kind {
        1 => Change::Created,
        2 => Change::Deleted,
        3 => Change::Data,
        4 => Change::Children,
        _ => return Ok(None),
    };
    Ok(Some((change, path)))
}

/// How a session is asked for, or for again.
#[derive(Clone, Debug)]
pub(in crate::engine::zookeeper) struct Hello {
    /// The newest transaction seen: a server that is behind it must not be believed.
    pub(in crate::engine::zookeeper) seen: i64,
    pub(in crate::engine::zookeeper) timeout_ms: i32,
    /// 0 for a new one.
    pub(in crate::engine::zookeeper) session: i64,
    pub(in crate::engine::zookeeper) password: Vec<u8>,
}

impl Hello {
    pub(in crate::engine::zookeeper) fn write(&self, w: &mut Writer) {
        w.frame(|w| {
            w.int(0).long(self.seen).int(self.timeout_ms).long(self.session);
            w.buffer(&self.password).boolean(false);
        });
    }
}

/// The answer to a [`Hello`]: the session, or `None` if it has expired.
pub(in crate::engine::zookeeper) fn welcome(frame: &[u8]) -> Result<Option<Hello>, Garbled> {
    let mut reader = Reader(frame);
    let (_version, timeout_ms) = (reader.int()?, reader.int()?);
    let (session, password) = (reader.long()?, reader.buffer()?.to_vec());
    let is_alive = timeout_ms > 0 && session != 0;
    Ok(is_alive.then_some(Hello { seen: 0, timeout_ms, session, password }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_written_as_the_server_reads_it() {
        let mut w = Writer::default();
        w.frame(|w| {
            w.int(7).int(Op::Create as i32);
            create(w, "/a", b"x", Acl::Anybody, Kind::EphemeralSequential);
        });
        let expected: Vec<u8> = [
            &[0, 0, 0, 51][..],
            &[0, 0, 0, 7, 0, 0, 0, 15],
            &[0, 0, 0, 2, b'/', b'a', 0, 0, 0, 1, b'x'],
            &[0, 0, 0, 1, 0, 0, 0, 31, 0, 0, 0, 5],
            b"world",
            &[0, 0, 0, 6],
            b"anyone",
            &[0, 0, 0, 3],
        ]
        .concat();
        let length = expected.len() as u8 - 4;
        assert_eq!(w.0[3], length);
        assert_eq!(w.0[4..], expected[4..]);
    }

    #[test]
    fn truncated_and_lying_answers_are_refused_not_believed() {
        for bytes in [&[0, 0][..], &[0, 0, 0, 5, b'a'], &[0xff, 0xff, 0xff, 0xfe], &[0x7f; 4]] {
            assert_eq!(Reader(bytes).buffer(), Err(Garbled), "{bytes:?}");
        }
        assert_eq!(Reader(&[0x7f, 0xff, 0xff, 0xff, 0, 0]).texts(), Err(Garbled));
        assert_eq!(Reader(&[0, 0, 0, 1, 0xff]).text(), Err(Garbled));
        assert_eq!(Reader(&[0xff; 4]).buffer(), Ok(&[][..]));
        assert_eq!(Reader(&[0; 67]).stat(), Err(Garbled));
        assert_eq!(Reader(&[0; 68]).stat(), Ok(Stat::default()));
        assert!(welcome(&[0; 8]).is_err());
        assert!(welcome(&[0; 20]).unwrap().is_none(), "an expired session");
    }

    #[test]
    fn a_transaction_tells_which_part_was_refused() {
        let part = |error: i32| {
            let mut w = Writer::default();
            w.int(-1).boolean(false).int(error).int(error);
            w.0
        };
        let end = [&[0xff; 4][..], &[1], &[0xff; 4]].concat();
        let refused = [part(0), part(-101), part(-2), end.clone()].concat();
        assert_eq!(multi_refusal(&refused), Ok(Some((1, Refusal::NO_NODE))));
        let done = [&[0, 0, 0, 2, 0, 0xff, 0xff, 0xff, 0xff][..], &end].concat();
        assert_eq!(multi_refusal(&done), Ok(None));
        assert_eq!(multi_refusal(&done[..5]), Err(Garbled));
    }
}
