//! What happened in a run: one JSON line per event, on one clock of the whole machine.
//!
//! Each client process appends to a file of its own, one `write` per event, so that a process that
//! is killed loses nothing it has recorded. [`History::read`] merges the files by time.
//!
//! The clock is `CLOCK_MONOTONIC` in nanoseconds, because every language can read it.
//!
//! # When to stamp an event
//! A belief must never look longer than it was, or the oracle reports an overlap that did not
//! happen. So [`What::Enter`] is stamped after the lock was granted, [`What::Exit`] before it is
//! released, and `valid_until` is computed from a time that was read before the guard was asked.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use lockset::Mode;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// Nanoseconds of the machine's monotonic clock.
pub type Nanos = u64;

/// The current time.
pub fn now() -> Nanos {
    let time = clock_gettime(ClockId::Monotonic);
    (time.tv_sec as u64) * 1_000_000_000 + time.tv_nsec as u64
}

/// A span in nanoseconds.
pub const fn nanos(span: Duration) -> Nanos {
    span.as_nanos() as u64
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// When.
    pub at: Nanos,
    /// The process that recorded it: `c2.1` is the first process of client 2, `nemesis` the one
    /// that makes the faults.
    pub by: String,
    /// What.
    #[serde(flatten)]
    pub what: What,
}

/// The kinds of events. `op` is a number for each acquisition, unique in its process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum What {
    /// The run begins; by the harness.
    Setup(Setup),
    /// A client begins to acquire a lock.
    Ask {
        /// The acquisition.
        op: u64,
        /// The lock.
        name: String,
        /// How it is to be held.
        mode: Mode,
    },
    /// The lock was granted: from now on the client believes that it holds it.
    Enter {
        /// The acquisition.
        op: u64,
        /// Its token, if the lock has tokens.
        token: Option<u64>,
        /// Until when the client may believe it; `None` if the lock does not say.
        valid_until: Option<Nanos>,
    },
    /// The holder asked its guard again.
    Valid {
        /// The acquisition.
        op: u64,
        /// Until when the client may believe it now.
        valid_until: Nanos,
        /// `held`, `uncertain` or `lost`.
        state: String,
    },
    /// The holder was told that the lock is lost, and believes nothing any more.
    Lost {
        /// The acquisition.
        op: u64,
        /// The reason, as [`lockset::LossReason::as_str`].
        reason: String,
    },
    /// The holder is about to release the lock and believes nothing any more.
    Exit {
        /// The acquisition.
        op: u64,
    },
    /// The release returned.
    Released {
        /// The acquisition.
        op: u64,
        /// The error, if it failed.
        error: Option<String>,
    },
    /// The acquisition failed, for example because it took too long.
    Failed {
        /// The acquisition.
        op: u64,
        /// Why.
        error: String,
    },
    /// The holder begins to write.
    Write {
        /// The acquisition.
        op: u64,
        /// The register.
        register: Register,
        /// The unique value that is added to the set.
        value: String,
    },
    /// The outcome of a write. A write without one may have been made.
    Wrote {
        /// The acquisition.
        op: u64,
        /// The register.
        register: Register,
        /// The value.
        value: String,
        /// The outcome.
        outcome: Outcome,
    },
    /// The process did not run from `from` until this event: it was stopped or starved.
    Stalled {
        /// Since when.
        from: Nanos,
    },
    /// The nemesis begins a fault.
    FaultBegins {
        /// Its number in the schedule.
        number: usize,
        /// What it is, by its name on the command line.
        fault: String,
        /// What it strikes.
        target: String,
    },
    /// The fault is over and what it struck works again.
    FaultEnds {
        /// Its number in the schedule.
        number: usize,
    },
    /// A client process is about to be killed. It believes nothing after this.
    Kill {
        /// Its name, as in [`Event::by`].
        process: String,
    },
    /// No fault follows.
    Quiet,
    /// What a register contains at the end.
    Final {
        /// The lock that protects it.
        name: String,
        /// The register.
        register: Register,
        /// The set.
        values: Vec<String>,
        /// The counter.
        counter: u64,
    },
}

/// A set and a counter that holders of a lock update by reading, working and writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Register {
    /// Written without any check, as most programs do.
    Plain,
    /// Written only if the guard says just before that the lock is held.
    Checked,
    /// Read and written with the token, which the register checks.
    Fenced,
}

/// The outcome of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It was made.
    Acknowledged,
    /// It was refused: by the guard, or by the fence.
    Rejected,
    /// It may have been made.
    Unknown,
}

/// What is run, and what is promised of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Setup {
    /// The engine or the peer, by its name on the command line.
    pub engine: String,
    /// The seed of the schedule.
    pub seed: u64,
    /// The ttl of all locks, in milliseconds.
    pub ttl_ms: u64,
    /// The locks.
    pub names: Vec<String>,
    /// What the oracle checks, besides the data of fenced registers.
    pub promises: Vec<Promise>,
    /// How much longer than two leases the engine may need to recover, in milliseconds.
    pub recovery_ms: u64,
}

impl Setup {
    /// The ttl in nanoseconds.
    pub fn ttl(&self) -> Nanos {
        self.ttl_ms * 1_000_000
    }

    /// Whether this is checked.
    pub fn promises(&self, promise: Promise) -> bool {
        self.promises.contains(&promise)
    }
}

/// What a lock may promise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Promise {
    /// One holder at a time, readers together, at most `limit` permits.
    Exclusion,
    /// Tokens grow.
    Tokens,
    /// No token is given out twice.
    UniqueTokens,
    /// Waiters of one process in order, processes in turn.
    Order,
    /// A holder is told of the end of its lease before it ends.
    Loss,
    /// Locks are granted again when the faults are over.
    Progress,
    /// No acknowledged write of a fenced register is lost.
    Fence,
}

impl Promise {
    /// Everything that lockset promises.
    pub const ALL: [Promise; 7] = [
        Promise::Exclusion,
        Promise::Tokens,
        Promise::UniqueTokens,
        Promise::Order,
        Promise::Loss,
        Promise::Progress,
        Promise::Fence,
    ];
}

/// Appends events of one process to its file.
#[derive(Debug)]
pub struct Recorder {
    by: String,
    file: Mutex<File>,
}

impl Recorder {
    /// A recorder of this process, into this file.
    ///
    /// # Errors
    /// If the file cannot be opened.
    pub fn open(by: &str, path: &Path) -> std::io::Result<Self> {
        let file = File::options().create(true).append(true).open(path)?;
        Ok(Self { by: by.to_owned(), file: Mutex::new(file) })
    }

    /// Records what happens now.
    pub fn record(&self, what: What) {
        self.record_at(now(), what);
    }

    /// Records what happened at this time.
    ///
    /// # Panics
    /// If the file cannot be written: a history with holes proves nothing.
    pub fn record_at(&self, at: Nanos, what: What) {
        let event = Event { at, by: self.by.clone(), what };
        let mut line = serde_json::to_vec(&event).unwrap();
        line.push(b'\n');
        self.file.lock().unwrap().write_all(&line).unwrap();
    }
}

/// All events of a run, in the order of their times.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct History {
    /// The events.
    pub events: Vec<Event>,
}

impl History {
    /// A history of these events, which it sorts.
    pub fn new(mut events: Vec<Event>) -> Self {
        events.sort_by_key(|event| event.at);
        Self { events }
    }

    /// Merges all files of a folder that end with `.jsonl`.
    ///
    /// # Errors
    /// If a file cannot be read, or a line of it is not an event. The last line of a file may be
    /// cut off.
    pub fn read(folder: &Path) -> std::io::Result<Self> {
        let mut events = Vec::new();
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "jsonl") {
                events.extend(Self::parse(&std::fs::read_to_string(&path)?).map_err(|error| {
                    std::io::Error::other(format!("{}: {error}", path.display()))
                })?);
            }
        }
        Ok(Self::new(events))
    }

    fn parse(text: &str) -> Result<Vec<Event>, serde_json::Error> {
        // What follows the last line break was cut off by a kill.
        let complete = text.rfind('\n').map_or("", |end| &text[..end]);
        complete.lines().map(serde_json::from_str).collect()
    }

    /// Writes the history as one file.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write(&self, path: &Path) -> std::io::Result<()> {
        let mut file = std::io::BufWriter::new(File::create(path)?);
        for event in &self.events {
            serde_json::to_writer(&mut file, event)?;
            file.write_all(b"\n")?;
        }
        file.flush()
    }

    /// The setup.
    ///
    /// # Panics
    /// If the history has no setup.
    pub fn setup(&self) -> &Setup {
        let mut setups = self.events.iter().filter_map(|event| match &event.what {
            What::Setup(setup) => Some(setup),
            _ => None,
        });
        setups.next().expect("a history begins with its setup")
    }

    /// When no fault followed any more.
    pub fn quiet(&self) -> Option<Nanos> {
        self.events.iter().find(|event| event.what == What::Quiet).map(|event| event.at)
    }

    /// The time of the first and of the last event.
    pub fn span(&self) -> (Nanos, Nanos) {
        let first = self.events.first().map_or(0, |event| event.at);
        (first, self.events.last().map_or(first, |event| event.at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_survive_the_way_through_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let recorder = Recorder::open("c0.1", &folder.path().join("c0.1.jsonl")).unwrap();
        let mode = Mode::Permits { take: 1, limit: 2 };
        recorder.record_at(2, What::Ask { op: 1, name: "s".to_owned(), mode });
        let other = Recorder::open("nemesis", &folder.path().join("nemesis.jsonl")).unwrap();
        other.record_at(1, What::Quiet);
        let history = History::read(folder.path()).unwrap();
        assert_eq!(history.events[0].what, What::Quiet);
        assert_eq!(history.events[1].by, "c0.1");
        assert!(matches!(history.events[1].what, What::Ask { mode: found, .. } if found == mode));
    }

    #[test]
    fn a_line_that_a_kill_cut_off_is_left_out() {
        let complete = r#"{"at":1,"by":"c0.1","event":"exit","op":1}"#;
        let cut = format!("{complete}\n{}", &complete[..20]);
        assert_eq!(History::parse(&cut).unwrap().len(), 1);
        let broken_inside = format!("{}\n{complete}\n", &complete[..20]);
        assert!(History::parse(&broken_inside).is_err());
    }
}
