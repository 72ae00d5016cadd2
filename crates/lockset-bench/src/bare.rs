//! The yardsticks: blocking sockets that speak RESP by hand, with no library between.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::measure::now;

/// Deletes the lock if it is ours.
pub(crate) const COMPARE_AND_DELETE: &str =
    "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0";
/// The same, and tells the next one: the least that a hand-off can be.
const DELETE_AND_PUBLISH: &str = "if redis.call('get', KEYS[1]) == ARGV[1] then \
     redis.call('del', KEYS[1]) redis.call('publish', ARGV[2], ARGV[3]) return 1 end return 0";
pub(crate) const ID: &str = "00000000000000000000000000000007";
pub(crate) const TTL_MS: &str = "30000";

/// `SET NX PX` and the compare-and-delete script, in matched pairs; `depth` of them at once.
#[derive(Debug)]
pub(crate) struct Raw {
    stream: TcpStream,
    set: Vec<u8>,
    release: Vec<u8>,
    set_answers: Vec<u8>,
    release_answers: Vec<u8>,
    depth: u64,
}

impl Raw {
    /// The keys are as long as those of [`Ours`](crate::peers::Ours).
    pub(crate) fn new(port: u16, depth: u64) -> Self {
        let mut stream = connect(port);
        let sha = load(&mut stream, COMPARE_AND_DELETE);
        let key = |number| format!("lockset:raws/00000000000000000000000000000000/{number}");
        let keys: Vec<String> = (0..depth).map(key).collect();
        let all = |request: &dyn Fn(&str) -> Vec<u8>| -> Vec<u8> {
            keys.iter().flat_map(|key| request(key)).collect()
        };
        Self {
            stream,
            set: all(&|key| request(&["SET", key, ID, "NX", "PX", TTL_MS])),
            release: all(&|key| request(&["EVALSHA", &sha, "1", key, ID])),
            set_answers: b"+OK\r\n".repeat(depth as usize),
            release_answers: b":1\r\n".repeat(depth as usize),
            depth,
        }
    }

    /// How many cycles were done, in at least this time.
    pub(crate) fn cycles(&mut self, span: Duration) -> u64 {
        let (until, mut cycles) = (Instant::now() + span, 0);
        while Instant::now() < until {
            self.stream.write_all(&self.set).unwrap();
            expect(&mut self.stream, &self.set_answers);
            self.stream.write_all(&self.release).unwrap();
            expect(&mut self.stream, &self.release_answers);
            cycles += self.depth;
        }
        cycles
    }
}

/// From a release script on one socket to the notice on another.
#[derive(Debug)]
pub(crate) struct Floor {
    holder: TcpStream,
    waiter: TcpStream,
    set: Vec<u8>,
    release: Vec<u8>,
    notice: Vec<u8>,
}

impl Floor {
    const HAND_OFFS: usize = 300;

    pub(crate) fn new(port: u16) -> Self {
        let (mut holder, mut waiter) = (connect(port), connect(port));
        let sha = load(&mut holder, DELETE_AND_PUBLISH);
        waiter.write_all(&request(&["SUBSCRIBE", "inbox"])).unwrap();
        expect(&mut waiter, b"*3\r\n$9\r\nsubscribe\r\n$5\r\ninbox\r\n:1\r\n");
        Self {
            holder,
            waiter,
            set: request(&["SET", "floor", ID, "NX", "PX", TTL_MS]),
            release: request(&["EVALSHA", &sha, "1", "floor", ID, "inbox", ID]),
            notice: request(&["message", "inbox", ID]),
        }
    }

    /// The median of some hand-offs, in seconds.
    pub(crate) fn measure(&mut self) -> f64 {
        crate::measure::median(self.hand_offs())
    }

    /// Some hand-offs, in seconds.
    pub(crate) fn hand_offs(&mut self) -> Vec<f64> {
        (0..Self::HAND_OFFS).map(|_| self.hand_off()).collect()
    }

    pub(crate) fn hand_off(&mut self) -> f64 {
        self.holder.write_all(&self.set).unwrap();
        expect(&mut self.holder, b"+OK\r\n");
        let start = now();
        self.holder.write_all(&self.release).unwrap();
        expect(&mut self.waiter, &self.notice);
        let end = now();
        expect(&mut self.holder, b":1\r\n");
        (end - start) as f64 / 1e9
    }
}

/// A script's name, after the server has it.
fn load(stream: &mut TcpStream, script: &str) -> String {
    stream.write_all(&request(&["SCRIPT", "LOAD", script])).unwrap();
    let mut answer = [0; "$40\r\n\r\n".len() + 40];
    stream.read_exact(&mut answer).unwrap();
    String::from_utf8(answer[5..45].to_vec()).unwrap()
}

pub(crate) fn connect(port: u16) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_nodelay(true).unwrap();
    stream
}

/// An array of strings, as RESP writes it.
pub(crate) fn request(words: &[&str]) -> Vec<u8> {
    let head = format!("*{}\r\n", words.len());
    let words = words.iter().map(|word| format!("${}\r\n{word}\r\n", word.len()));
    std::iter::once(head).chain(words).collect::<String>().into_bytes()
}

/// Every answer is known beforehand, so nothing needs to be parsed.
pub(crate) fn expect(stream: &mut TcpStream, answer: &[u8]) {
    let mut buffer = [0; 2048];
    let buffer = &mut buffer[..answer.len()];
    stream.read_exact(buffer).unwrap();
    assert_eq!(buffer, answer, "{}", String::from_utf8_lossy(buffer));
}
