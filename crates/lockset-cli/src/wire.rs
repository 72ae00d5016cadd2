//! The messages between lockset and its guardian: orders one way, reports the other.
//!
//! Both ends are the same binary, so there is no version; a frame is its length, a tag and fields.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io::{self, Write};
use std::mem::discriminant;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::time::Duration;

/// From lockset to the guardian. That the link closes without [`Order::Dismiss`] means that
/// lockset died, and is the order to kill everything.
#[derive(Debug, PartialEq)]
pub(crate) enum Order {
    /// Execute the command.
    Start(Start),
    /// The lease as known now: when to ask the command to end, and when to kill it. The guardian
    /// does both by its own clock, so they happen even if lockset is stopped or starved.
    Lease { term_at: Duration, kill_at: Duration },
    /// Send a signal to the command's group.
    Signal(i32),
    /// Continue the command's group, and make it the foreground group first if this says so.
    Resume { foreground: bool },
    /// Kill the command and all its descendants, now.
    KillAll,
    /// Everything is done: exit, and leave processes that still run alone.
    Dismiss,
}

/// A command to execute.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Start {
    pub(crate) command: Vec<OsString>,
    /// Variables to set; all others are inherited.
    pub(crate) env: Vec<(OsString, OsString)>,
    /// Whether the command's group becomes the foreground group of the terminal.
    pub(crate) foreground: bool,
    /// How long members of the group that outlive the command have between TERM and KILL;
    /// `None` leaves them alone.
    pub(crate) sweep: Option<Duration>,
}

/// From the guardian to lockset.
#[derive(Debug, PartialEq)]
pub(crate) enum Report {
    /// The command runs, in the group of this number.
    Started(i32),
    /// The command could not be executed; a system error number.
    Failed(i32),
    /// The command was stopped by this signal.
    Stopped(i32),
    /// The lease is about to end, so the command got TERM.
    Warned,
    /// The lease is almost over, so everything is being killed.
    Killing,
    /// The command ended: its exit code, or the signal that ended it.
    Ended(Ending),
    /// After `Ended`: no member of the command's group is left, or they are to be left alone.
    Quiet,
    /// After an order to kill, or [`Report::Killing`]: no descendant is left.
    Gone,
}

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Ending {
    Exited(u8),
    Signalled(u8),
}

impl Ending {
    pub(crate) fn exit_code(self) -> u8 {
        match self {
            Ending::Exited(code) => code,
            Ending::Signalled(signal) => 128u8.saturating_add(signal),
        }
    }
}

impl Order {
    pub(crate) fn encode(&self) -> Vec<u8> {
        match self {
            Order::Start(start) => start.encode(),
            Order::Lease { term_at, kill_at } => frame(b'L', &[&nanos(*term_at), &nanos(*kill_at)]),
            Order::Signal(signal) => frame(b'S', &[&signal.to_le_bytes()]),
            Order::Resume { foreground } => frame(b'R', &[&[u8::from(*foreground)]]),
            Order::KillAll => frame(b'K', &[]),
            Order::Dismiss => frame(b'D', &[]),
        }
    }

    pub(crate) fn decode(frame: &[u8]) -> io::Result<Self> {
        let (tag, fields) = parts(frame)?;
        match (tag, &fields[..]) {
            (b'X', fields) => Start::decode(fields).map(Order::Start),
            (b'L', [term, kill]) => {
                Ok(Order::Lease { term_at: duration(term)?, kill_at: duration(kill)? })
            }
            (b'S', [signal]) => Ok(Order::Signal(number(signal)?)),
            (b'R', [[foreground]]) => Ok(Order::Resume { foreground: *foreground != 0 }),
            (b'K', []) => Ok(Order::KillAll),
            (b'D', []) => Ok(Order::Dismiss),
            _ => Err(garbled()),
        }
    }
}

impl Start {
    fn encode(&self) -> Vec<u8> {
        let sweep = self.sweep.map(nanos);
        let flags = [u8::from(self.foreground)];
        let count = (self.command.len() as u64).to_le_bytes();
        let mut fields: Vec<&[u8]> =
            vec![&flags, sweep.as_ref().map_or(&[], |nanos| &nanos[..]), &count];
        fields.extend(self.command.iter().map(|word| word.as_bytes()));
        for (key, value) in &self.env {
            fields.extend([key.as_bytes(), value.as_bytes()]);
        }
        frame(b'X', &fields)
    }

    fn decode(fields: &[&[u8]]) -> io::Result<Self> {
        let [[foreground], sweep, count, words @ ..] = fields else { return Err(garbled()) };
        let sweep = if sweep.is_empty() { None } else { Some(duration(sweep)?) };
        let count = u64::from_le_bytes((*count).try_into().map_err(|_| garbled())?) as usize;
        let text = |bytes: &&[u8]| OsString::from_vec(bytes.to_vec());
        let (command, env) = words.split_at_checked(count).ok_or_else(garbled)?;
        Ok(Start {
            command: command.iter().map(text).collect(),
            env: env.as_chunks::<2>().0.iter().map(|[k, v]| (text(k), text(v))).collect(),
            foreground: *foreground != 0,
            sweep,
        })
    }
}

impl Report {
    pub(crate) fn encode(&self) -> Vec<u8> {
        match self {
            Report::Started(pid) => frame(b'r', &[&pid.to_le_bytes()]),
            Report::Failed(error) => frame(b'f', &[&error.to_le_bytes()]),
            Report::Stopped(signal) => frame(b's', &[&signal.to_le_bytes()]),
            Report::Warned => frame(b'w', &[]),
            Report::Killing => frame(b'k', &[]),
            Report::Ended(Ending::Exited(code)) => frame(b'e', &[&[*code]]),
            Report::Ended(Ending::Signalled(signal)) => frame(b'x', &[&[*signal]]),
            Report::Quiet => frame(b'q', &[]),
            Report::Gone => frame(b'g', &[]),
        }
    }

    pub(crate) fn decode(frame: &[u8]) -> io::Result<Self> {
        let (tag, fields) = parts(frame)?;
        match (tag, &fields[..]) {
            (b'r', [pid]) => Ok(Report::Started(number(pid)?)),
            (b'f', [error]) => Ok(Report::Failed(number(error)?)),
            (b's', [signal]) => Ok(Report::Stopped(number(signal)?)),
            (b'w', []) => Ok(Report::Warned),
            (b'k', []) => Ok(Report::Killing),
            (b'e', [[code]]) => Ok(Report::Ended(Ending::Exited(*code))),
            (b'x', [[signal]]) => Ok(Report::Ended(Ending::Signalled(*signal))),
            (b'q', []) => Ok(Report::Quiet),
            (b'g', []) => Ok(Report::Gone),
            _ => Err(garbled()),
        }
    }
}

/// Bytes as they arrive, cut into frames.
#[derive(Debug, Default)]
pub(crate) struct Inbox(Vec<u8>);

impl Inbox {
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// The next complete frame, without its length.
    pub(crate) fn next(&mut self) -> Option<Vec<u8>> {
        let length = u32::from_le_bytes(*self.0.first_chunk()?) as usize;
        let frame = self.0.get(4..4 + length)?.to_vec();
        self.0.drain(..4 + length);
        Some(frame)
    }
}

/// The reports to lockset, which may be stopped and not read them: sending never blocks.
///
/// A report supersedes an unsent one of its kind. So the queue holds at most one report of each
/// kind, and what lockset waits for (`Failed`, `Ended`, `Quiet`, `Gone`) is never dropped: these
/// occur once per command.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    queue: VecDeque<Report>,
    /// The rest of a report of which a part was sent.
    rest: Vec<u8>,
}

impl Outbox {
    pub(crate) fn push(&mut self, report: Report) {
        self.queue.retain(|unsent| discriminant(unsent) != discriminant(&report));
        self.queue.push_back(report);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.rest.is_empty()
    }

    /// Sends what a non-blocking link accepts now.
    pub(crate) fn send(&mut self, link: &mut impl Write) -> io::Result<()> {
        loop {
            if self.rest.is_empty() {
                let Some(report) = self.queue.pop_front() else { return Ok(()) };
                self.rest = report.encode();
            }
            match link.write(&self.rest) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => drop(self.rest.drain(..count)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

fn frame(tag: u8, fields: &[&[u8]]) -> Vec<u8> {
    let mut out = vec![0, 0, 0, 0, tag];
    for field in fields {
        out.extend((field.len() as u32).to_le_bytes());
        out.extend(*field);
    }
    let length = (out.len() - 4) as u32;
    out[..4].copy_from_slice(&length.to_le_bytes());
    out
}

fn parts(frame: &[u8]) -> io::Result<(u8, Vec<&[u8]>)> {
    let (tag, mut rest) = frame.split_first().ok_or_else(garbled)?;
    let mut fields = Vec::new();
    while let Some((length, after)) = rest.split_first_chunk::<4>() {
        let length = u32::from_le_bytes(*length) as usize;
        let (field, after) = after.split_at_checked(length).ok_or_else(garbled)?;
        fields.push(field);
        rest = after;
    }
    Ok((*tag, fields))
}

fn nanos(span: Duration) -> [u8; 8] {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX).to_le_bytes()
}

fn duration(bytes: &[u8]) -> io::Result<Duration> {
    bytes
        .try_into()
        .map(|nanos| Duration::from_nanos(u64::from_le_bytes(nanos)))
        .map_err(|_| garbled())
}

fn number(bytes: &[u8]) -> io::Result<i32> {
    bytes.try_into().map(i32::from_le_bytes).map_err(|_| garbled())
}

fn garbled() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "a garbled message between lockset and guardian")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn orders_and_reports_survive_the_link_however_it_cuts_them() {
        let orders = [
            Order::Start(Start {
                command: vec!["a".into(), OsString::from_vec(vec![0xff, b'=']), "".into()],
                env: vec![("K".into(), "v=w".into())],
                foreground: true,
                sweep: Some(Duration::from_millis(1500)),
            }),
            Order::Start(Start { command: vec!["x".into()], ..Start::default() }),
            Order::Lease { term_at: Duration::from_nanos(7), kill_at: Duration::MAX / 4 },
            Order::Signal(15),
            Order::Resume { foreground: true },
            Order::KillAll,
            Order::Dismiss,
        ];
        let mut inbox = Inbox::default();
        let mut seen = Vec::new();
        for byte in orders.iter().flat_map(Order::encode) {
            inbox.push(&[byte]);
            seen.extend(inbox.next().map(|frame| Order::decode(&frame).unwrap()));
        }
        assert_eq!(seen[0], orders[0]);
        assert_eq!(seen[1], orders[1]);
        assert_eq!(seen[3..], orders[3..]);

        for report in [
            Report::Started(7),
            Report::Failed(2),
            Report::Stopped(19),
            Report::Warned,
            Report::Killing,
            Report::Ended(Ending::Exited(3)),
            Report::Ended(Ending::Signalled(9)),
            Report::Quiet,
            Report::Gone,
        ] {
            assert_eq!(Report::decode(&report.encode()[4..]).unwrap(), report);
        }
    }

    /// Accepts so many bytes, and no more until it was read.
    struct Pipe {
        room: usize,
        bytes: Vec<u8>,
    }

    impl Write for Pipe {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            match bytes.len().min(self.room) {
                0 => Err(io::ErrorKind::WouldBlock.into()),
                count => {
                    self.bytes.extend(&bytes[..count]);
                    self.room -= count;
                    Ok(count)
                }
            }
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn unread_reports_are_few_and_the_last_of_each_kind_arrives() {
        let mut pipe = Pipe { room: 100, bytes: Vec::new() };
        let mut outbox = Outbox::default();
        let ending = Ending::Exited(3);
        let stops = (1..1000).map(Report::Stopped);
        let others = [Report::Warned, Report::Ended(ending), Report::Quiet, Report::Gone];
        for report in [Report::Started(7)].into_iter().chain(stops).chain(others) {
            outbox.push(report);
            outbox.send(&mut pipe).unwrap();
            assert!(outbox.queue.len() <= 5, "{outbox:?}");
        }
        assert!(!outbox.is_empty());
        let mut inbox = Inbox::default();
        let mut seen = Vec::new();
        while !pipe.bytes.is_empty() {
            inbox.push(&std::mem::take(&mut pipe.bytes));
            seen.extend(std::iter::from_fn(|| inbox.next()).map(|f| Report::decode(&f).unwrap()));
            pipe.room = 7;
            outbox.send(&mut pipe).unwrap();
        }
        assert!(outbox.is_empty());
        assert_eq!(seen[..2], [Report::Started(7), Report::Stopped(1)]);
        let last = [Report::Warned, Report::Ended(ending), Report::Quiet, Report::Gone];
        assert_eq!(seen[seen.len() - 5..][1..], last);
        assert_eq!(seen[seen.len() - 5], Report::Stopped(999));
    }

    #[test]
    fn garbage_is_an_error_and_no_panic() {
        for bytes in [&b""[..], b"?", b"X", b"S\x01\0\0\0a", b"L\xff\xff\xff\xff"] {
            assert!(Order::decode(bytes).is_err(), "{bytes:?}");
            assert!(Report::decode(bytes).is_err(), "{bytes:?}");
        }
    }

    proptest! {
        #[test]
        fn any_frame_is_read_or_rejected(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            for tag in 0..=u8::MAX {
                let frame = [&[tag], &bytes[..]].concat();
                let _ = (Order::decode(&frame), Report::decode(&frame));
            }
            let mut inbox = Inbox::default();
            inbox.push(&bytes);
            while let Some(frame) = inbox.next() {
                prop_assert!(frame.len() <= bytes.len());
            }
        }
    }
}
