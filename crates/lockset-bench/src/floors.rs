//! The floors that need no runtime: bare sockets, and two prepared transactions of SQLite.
//!
//! They obey `cycles`, and `take` where there is a least hand-off.

use std::io::Write;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::bare::{self, Floor, ID, Raw, TTL_MS, connect, expect, request};
use crate::measure::now;

/// The least that a lock can be on an engine.
pub(crate) trait Least {
    /// Runs this many cycles at once, again and again for this long. Returns their number.
    fn cycles(&mut self, depth: usize, span: Duration) -> u64;

    /// One hand-off, in seconds.
    fn hand_off(&mut self) -> f64 {
        panic!("this floor has no hand-off")
    }
}

pub(crate) fn obey(version: &str, mut floor: impl Least) {
    println!("ready {version}");
    let mut hand_offs: Vec<f64> = Vec::new();
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |place: usize| words[place].parse::<usize>().unwrap();
        match words[0] {
            "cycles" => {
                let start = Instant::now();
                let count = floor.cycles(number(2), Duration::from_millis(number(3) as u64));
                println!("cycles {count} {}", start.elapsed().as_nanos());
            }
            // There is no line: a bare hand-off has one waiter.
            "hold" => println!("held"),
            "take" => println!("queued"),
            "free" => {
                hand_offs = (0..512).map(|_| floor.hand_off()).collect();
                println!("done");
            }
            "show" => show(&hand_offs),
            other => panic!("no such order: {other}"),
        }
    }
}

/// Stamps that are as far apart as the hand-offs were long.
fn show(hand_offs: &[f64]) {
    let mut output = std::io::stdout().lock();
    let mut at = now();
    for hand_off in hand_offs {
        at += (hand_off * 1e9) as u64;
        writeln!(output, "{at} {at}").unwrap();
    }
    writeln!(output, "end").unwrap();
}

fn port(address: &str) -> u16 {
    address.rsplit(':').next().unwrap().parse().unwrap()
}

pub(crate) struct Redis {
    port: u16,
    raw: Option<(usize, Raw)>,
    floor: Floor,
}

impl Redis {
    pub(crate) fn new(address: &str) -> Self {
        let port = port(address);
        Self { port, raw: None, floor: Floor::new(port) }
    }
}

impl Least for Redis {
    fn cycles(&mut self, depth: usize, span: Duration) -> u64 {
        if self.raw.as_ref().is_none_or(|(ready, _)| *ready != depth) {
            self.raw = Some((depth, Raw::new(self.port, depth as u64)));
        }
        self.raw.as_mut().map_or(0, |(_, raw)| raw.cycles(span))
    }

    fn hand_off(&mut self) -> f64 {
        self.floor.hand_off()
    }
}

/// `SET NX PX` and compare-and-delete at all servers, each time until the slowest has answered.
pub(crate) struct Redlock(Vec<TcpStream>);

impl Redlock {
    pub(crate) fn new(addresses: &str) -> Self {
        Self(addresses.split(',').map(|address| connect(port(address))).collect())
    }

    fn ask(&mut self, request: &[u8], answer: &[u8]) {
        self.0.iter_mut().for_each(|socket| socket.write_all(request).unwrap());
        self.0.iter_mut().for_each(|socket| expect(socket, answer));
    }
}

impl Least for Redlock {
    fn cycles(&mut self, depth: usize, span: Duration) -> u64 {
        let key = |number| format!("lockset:raws/00000000000000000000000000000000/{number}");
        let keys: Vec<String> = (0..depth).map(key).collect();
        let all = |words: &dyn Fn(&str) -> Vec<u8>| -> Vec<u8> {
            keys.iter().flat_map(|key| words(key)).collect()
        };
        let set = all(&|key| request(&["SET", key, ID, "NX", "PX", TTL_MS]));
        let script = bare::COMPARE_AND_DELETE;
        let release = all(&|key| request(&["EVAL", script, "1", key, ID]));
        let (until, mut cycles) = (Instant::now() + span, 0);
        while Instant::now() < until {
            self.ask(&set, &b"+OK\r\n".repeat(depth));
            self.ask(&release, &b":1\r\n".repeat(depth));
            cycles += depth as u64;
        }
        cycles
    }
}

/// Two transactions, as short as a lock and its release can be.
pub(crate) struct Sqlite(rusqlite::Connection);

impl Sqlite {
    /// In a file beside that of the locks, with the same settings.
    pub(crate) fn new(url: &str) -> Self {
        let file = format!("{}.floor", url.trim_start_matches("local:"));
        let bare = rusqlite::Connection::open(file).unwrap();
        bare.pragma_update(None, "journal_mode", "WAL").unwrap();
        bare.pragma_update(None, "synchronous", "NORMAL").unwrap();
        bare.pragma_update(None, "wal_autocheckpoint", 4000).unwrap();
        bare.execute_batch(
            "CREATE TABLE IF NOT EXISTS bare
             (name TEXT, seq INTEGER, token INTEGER, PRIMARY KEY (name, seq)) WITHOUT ROWID",
        )
        .unwrap();
        Self(bare)
    }

    fn execute(&self, sql: &str) {
        self.0.prepare_cached(sql).unwrap().execute([]).unwrap();
    }
}

impl Least for Sqlite {
    /// One after the other, because SQLite has one writer at a time.
    fn cycles(&mut self, _: usize, span: Duration) -> u64 {
        let (until, mut cycles) = (Instant::now() + span, 0);
        while Instant::now() < until {
            self.execute("BEGIN IMMEDIATE");
            self.execute("INSERT INTO bare VALUES ('bench', 1, 7)");
            self.execute("COMMIT");
            self.execute("BEGIN IMMEDIATE");
            self.execute("DELETE FROM bare WHERE name = 'bench' AND seq = 1");
            self.execute("COMMIT");
            cycles += 1;
        }
        cycles
    }
}
