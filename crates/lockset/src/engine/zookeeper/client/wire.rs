//! ZooKeeper's wire format (Jute), as far as this client uses it. Lengths are bounded, and nothing
//! that is received is trusted.

use std::fmt;

/// Maximum length of a received frame. A server sends longer ones only if `jute.maxbuffer` was
/// raised.
pub(super) const MAX_FRAME_LEN: usize = 32 << 20;

/// The type of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum OpCode {
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

impl OpCode {
    /// Whether its reply proves that the server reached the leader.
    pub(super) fn is_answered_by_leader(self) -> bool {
        use OpCode::{Create, CreateContainer, Delete, Multi, SetData, Sync};
        matches!(self, Create | CreateContainer | Delete | SetData | Multi | Sync)
    }
}

/// The error code of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ZkErrorCode(i32);

impl ZkErrorCode {
    pub(super) const OK: ZkErrorCode = ZkErrorCode(0);
    pub(crate) const UNIMPLEMENTED: ZkErrorCode = ZkErrorCode(-6);
    pub(crate) const NO_NODE: ZkErrorCode = ZkErrorCode(-101);
    pub(crate) const NO_AUTH: ZkErrorCode = ZkErrorCode(-102);
    pub(crate) const BAD_VERSION: ZkErrorCode = ZkErrorCode(-103);
    pub(crate) const NODE_EXISTS: ZkErrorCode = ZkErrorCode(-110);
    pub(crate) const SESSION_EXPIRED: ZkErrorCode = ZkErrorCode(-112);
    pub(crate) const AUTH_FAILED: ZkErrorCode = ZkErrorCode(-115);
    pub(crate) const SESSION_MOVED: ZkErrorCode = ZkErrorCode(-118);

    /// In a failed `multi`: the operations after the one that failed.
    const RUNTIME_INCONSISTENCY: ZkErrorCode = ZkErrorCode(-2);
}

impl fmt::Display for ZkErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            -6 => "it does not know this request (its version is too old)",
            -8 => "it does not understand the request",
            -101 => "there is no such node",
            -102 => "this user is not allowed to do that here (NoAuth)",
            -103 => "the node has changed",
            -108 => "an ephemeral node cannot have children",
            -110 => "the node exists already",
            -111 => "the node has children",
            -112 => "the session has expired",
            -114 => "it does not accept the ACL",
            -115 => "it does not accept the user and password",
            -118 => "the session has moved to another server",
            -119 => "it is read-only at the moment",
            -125 => "a quota is exceeded",
            code => return write!(f, "error {code}"),
        })
    }
}

/// Bytes that are not valid in ZooKeeper's wire format.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct MalformedReply;

/// Writes requests.
#[derive(Debug, Default)]
pub(super) struct JuteWriter(pub(super) Vec<u8>);

impl JuteWriter {
    pub(super) fn int(&mut self, value: i32) -> &mut Self {
        self.0.extend_from_slice(&value.to_be_bytes());
        self
    }

    pub(super) fn long(&mut self, value: i64) -> &mut Self {
        self.0.extend_from_slice(&value.to_be_bytes());
        self
    }

    pub(super) fn boolean(&mut self, value: bool) -> &mut Self {
        self.0.push(u8::from(value));
        self
    }

    pub(super) fn buffer(&mut self, bytes: &[u8]) -> &mut Self {
        // Paths and data are far shorter than `i32::MAX`.
        self.int(i32::try_from(bytes.len()).unwrap_or(i32::MAX));
        self.0.extend_from_slice(bytes);
        self
    }

    pub(super) fn string(&mut self, text: &str) -> &mut Self {
        self.buffer(text.as_bytes())
    }

    /// Writes `body` with its length in front.
    pub(super) fn frame(&mut self, body: impl FnOnce(&mut JuteWriter)) {
        let start = self.0.len();
        self.int(0);
        body(self);
        let length = u32::try_from(self.0.len() - start - 4).unwrap_or(u32::MAX);
        self.0[start..start + 4].copy_from_slice(&length.to_be_bytes());
    }
}

/// Reads replies.
#[derive(Clone, Copy, Debug)]
pub(super) struct JuteReader<'a>(pub(super) &'a [u8]);

impl<'a> JuteReader<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8], MalformedReply> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or(MalformedReply)?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], MalformedReply> {
        self.take(N)?.try_into().map_err(|_| MalformedReply)
    }

    pub(super) fn int(&mut self) -> Result<i32, MalformedReply> {
        self.array().map(i32::from_be_bytes)
    }

    pub(super) fn long(&mut self) -> Result<i64, MalformedReply> {
        self.array().map(i64::from_be_bytes)
    }

    pub(super) fn boolean(&mut self) -> Result<bool, MalformedReply> {
        Ok(self.array::<1>()? != [0])
    }

    /// A null buffer (length -1) is read as an empty one.
    pub(super) fn buffer(&mut self) -> Result<&'a [u8], MalformedReply> {
        match self.int()? {
            -1 => Ok(&[]),
            length => self.take(usize::try_from(length).map_err(|_| MalformedReply)?),
        }
    }

    pub(super) fn string(&mut self) -> Result<&'a str, MalformedReply> {
        std::str::from_utf8(self.buffer()?).map_err(|_| MalformedReply)
    }

    pub(super) fn strings(&mut self) -> Result<Vec<String>, MalformedReply> {
        let count = usize::try_from(self.int()?.max(0)).map_err(|_| MalformedReply)?;
        // Each string takes at least four bytes, so a false count cannot reserve much memory.
        let mut strings = Vec::with_capacity(count.min(self.0.len() / 4));
        for _ in 0..count {
            strings.push(self.string()?.to_owned());
        }
        Ok(strings)
    }

    pub(super) fn stat(&mut self) -> Result<NodeStat, MalformedReply> {
        let czxid = self.long()?;
        let mzxid = self.long()?;
        self.take(16)?;
        let version = self.int()?;
        self.take(8)?;
        let ephemeral_owner = self.long()?;
        self.take(16)?;
        Ok(NodeStat { czxid, mzxid, version, ephemeral_owner })
    }
}

/// A node's metadata (`Stat`), as far as it is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct NodeStat {
    /// The transaction that created the node.
    pub(crate) czxid: i64,
    /// The transaction that last changed its data.
    pub(crate) mzxid: i64,
    /// How often its data was changed.
    pub(crate) version: i32,
    /// The session that the node ends with.
    pub(crate) ephemeral_owner: i64,
}

/// How long a node lives, and whether the server appends a sequence number to its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CreateMode {
    Persistent = 0,
    Ephemeral = 1,
    EphemeralSequential = 3,
    /// Removed by the server some time after its last child.
    Container = 4,
}

/// Who may do what with a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Acl {
    /// Everyone may do everything (`OPEN_ACL_UNSAFE`).
    Open,
    /// Only the user that created it (`CREATOR_ALL_ACL`).
    CreatorAll,
}

const ALL_PERMISSIONS: i32 = 31;

pub(super) fn write_create(
    w: &mut JuteWriter,
    path: &str,
    data: &[u8],
    acl: Acl,
    mode: CreateMode,
) {
    w.string(path).buffer(data).int(1).int(ALL_PERMISSIONS);
    match acl {
        Acl::Open => w.string("world").string("anyone"),
        Acl::CreatorAll => w.string("auth").string(""),
    };
    w.int(mode as i32);
}

/// One operation of a `multi`: all of them are done, or none.
#[derive(Clone, Debug)]
pub(crate) enum MultiOp {
    Create { path: String, data: Vec<u8>, acl: Acl, mode: CreateMode },
    Delete { path: String, version: i32 },
    SetData { path: String, data: Vec<u8>, version: i32 },
    Check { path: String, version: i32 },
}

pub(super) fn write_multi(w: &mut JuteWriter, ops: &[MultiOp]) {
    for op in ops {
        let code = match op {
            MultiOp::Create { .. } => OpCode::Create,
            MultiOp::Delete { .. } => OpCode::Delete,
            MultiOp::SetData { .. } => OpCode::SetData,
            MultiOp::Check { .. } => OpCode::Check,
        };
        w.int(code as i32).boolean(false).int(-1);
        match op {
            MultiOp::Create { path, data, acl, mode } => write_create(w, path, data, *acl, *mode),
            MultiOp::SetData { path, data, version } => {
                w.string(path).buffer(data).int(*version);
            }
            MultiOp::Delete { path, version } | MultiOp::Check { path, version } => {
                w.string(path).int(*version);
            }
        }
    }
    w.int(-1).boolean(true).int(-1);
}

/// If the `multi` failed: the index of the operation that failed first, and its error.
pub(super) fn multi_error(body: &[u8]) -> Result<Option<(usize, ZkErrorCode)>, MalformedReply> {
    let mut reader = JuteReader(body);
    let mut index = 0;
    let mut first_error = None;
    loop {
        let (op, done, _) = (reader.int()?, reader.boolean()?, reader.int()?);
        if done {
            return Ok(first_error);
        }
        match op {
            -1 => match ZkErrorCode(reader.int()?) {
                ZkErrorCode::OK | ZkErrorCode::RUNTIME_INCONSISTENCY => {}
                code => first_error = first_error.or(Some((index, code))),
            },
            // The transaction was committed; the results of its operations are not needed.
            _ => return Ok(None),
        }
        index += 1;
    }
}

/// The start of every reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ReplyHeader {
    /// The request that it replies to.
    pub(super) xid: i32,
    /// The last transaction that the server knows.
    pub(super) zxid: i64,
    pub(super) error: ZkErrorCode,
}

pub(super) const WATCH_XID: i32 = -1;
pub(super) const AUTH_XID: i32 = -4;

impl ReplyHeader {
    pub(super) fn read(reader: &mut JuteReader<'_>) -> Result<Self, MalformedReply> {
        let (xid, zxid) = (reader.int()?, reader.long()?);
        Ok(Self { xid, zxid, error: ZkErrorCode(reader.int()?) })
    }
}

/// What happened to a watched node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WatchEventKind {
    Created,
    Deleted,
    DataChanged,
    ChildrenChanged,
}

/// A change of a watched node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NodeEvent {
    pub(crate) kind: WatchEventKind,
    pub(crate) path: String,
}

impl NodeEvent {
    /// `None` for an event about the session, of which the connection itself tells more.
    pub(super) fn read(reader: &mut JuteReader<'_>) -> Result<Option<Self>, MalformedReply> {
        let (kind, _state, path) = (reader.int()?, reader.int()?, reader.string()?);
        let kind = match kind {
            1 => WatchEventKind::Created,
            2 => WatchEventKind::Deleted,
            3 => WatchEventKind::DataChanged,
            4 => WatchEventKind::ChildrenChanged,
            _ => return Ok(None),
        };
        Ok(Some(Self { kind, path: path.to_owned() }))
    }
}

/// Asks a server for a new session, or for one that exists.
#[derive(Clone, Debug)]
pub(crate) struct ConnectRequest {
    /// The newest transaction seen. A server that is behind it refuses the connection.
    pub(crate) last_zxid_seen: i64,
    pub(crate) timeout_ms: i32,
    /// 0 for a new session.
    pub(crate) session_id: i64,
    pub(crate) password: Vec<u8>,
}

impl ConnectRequest {
    pub(crate) fn new_session(timeout_ms: i32) -> Self {
        Self { last_zxid_seen: 0, timeout_ms, session_id: 0, password: vec![0; 16] }
    }

    pub(super) fn write(&self, w: &mut JuteWriter) {
        w.frame(|w| {
            w.int(0).long(self.last_zxid_seen).int(self.timeout_ms).long(self.session_id);
            w.buffer(&self.password).boolean(false);
        });
    }
}

/// The session that a server granted or took over.
#[derive(Clone, Debug)]
pub(super) struct ConnectResponse {
    pub(super) timeout_ms: i32,
    pub(super) session_id: i64,
    pub(super) password: Vec<u8>,
}

impl ConnectResponse {
    /// `None` if the session has expired.
    pub(super) fn read(frame: &[u8]) -> Result<Option<Self>, MalformedReply> {
        let mut reader = JuteReader(frame);
        let (_version, timeout_ms) = (reader.int()?, reader.int()?);
        let (session_id, password) = (reader.long()?, reader.buffer()?.to_vec());
        let is_alive = timeout_ms > 0 && session_id != 0;
        Ok(is_alive.then_some(Self { timeout_ms, session_id, password }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_written_as_the_server_reads_it() {
        let mut w = JuteWriter::default();
        w.frame(|w| {
            w.int(7).int(OpCode::Create as i32);
            write_create(w, "/a", b"x", Acl::Open, CreateMode::EphemeralSequential);
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
    fn truncated_replies_and_false_lengths_are_errors() {
        for bytes in [&[0, 0][..], &[0, 0, 0, 5, b'a'], &[0xff, 0xff, 0xff, 0xfe], &[0x7f; 4]] {
            assert_eq!(JuteReader(bytes).buffer(), Err(MalformedReply), "{bytes:?}");
        }
        assert_eq!(JuteReader(&[0x7f, 0xff, 0xff, 0xff, 0, 0]).strings(), Err(MalformedReply));
        assert_eq!(JuteReader(&[0, 0, 0, 1, 0xff]).string(), Err(MalformedReply));
        assert_eq!(JuteReader(&[0xff; 4]).buffer(), Ok(&[][..]));
        assert_eq!(JuteReader(&[0; 67]).stat(), Err(MalformedReply));
        assert_eq!(JuteReader(&[0; 68]).stat(), Ok(NodeStat::default()));
        assert!(ConnectResponse::read(&[0; 8]).is_err());
        assert!(ConnectResponse::read(&[0; 20]).unwrap().is_none(), "an expired session");
    }

    #[test]
    fn a_failed_multi_names_the_operation_that_failed() {
        let result = |error: i32| {
            let mut w = JuteWriter::default();
            w.int(-1).boolean(false).int(error).int(error);
            w.0
        };
        let end = [&[0xff; 4][..], &[1], &[0xff; 4]].concat();
        let failed = [result(0), result(-101), result(-2), end.clone()].concat();
        assert_eq!(multi_error(&failed), Ok(Some((1, ZkErrorCode::NO_NODE))));
        let committed = [&[0, 0, 0, 2, 0, 0xff, 0xff, 0xff, 0xff][..], &end].concat();
        assert_eq!(multi_error(&committed), Ok(None));
        assert_eq!(multi_error(&committed[..5]), Err(MalformedReply));
    }
}
