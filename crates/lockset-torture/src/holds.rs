//! What the events of a history say together: holds, faults and stalls.

use std::collections::{BTreeMap, HashMap};

use lockset::Mode;

use crate::history::{History, Nanos, What};

/// An acquisition that was granted.
#[derive(Clone, Debug)]
pub struct Hold {
    /// The process, as `c2.1`.
    pub process: String,
    /// Its number of the acquisition.
    pub op: u64,
    /// The lock.
    pub name: String,
    /// How it is held.
    pub mode: Mode,
    /// When the client began to acquire it. Its grant cannot be older.
    pub asked: Nanos,
    /// When the client received it.
    pub entered: Nanos,
    /// Its token, if the lock has tokens.
    pub token: Option<u64>,
    /// The last deadline that the client saw.
    pub valid_until: Option<Nanos>,
    /// When the client was told that it is lost, and why.
    pub lost: Option<(Nanos, String)>,
    /// When the client released it, gave it up or was killed.
    pub exited: Option<Nanos>,
    /// The end of the client's belief: its exit, or the last deadline that it saw.
    pub believed_until: Nanos,
}

impl Hold {
    /// Whether the client believed anything: a guard that is lost when it arrives is no belief.
    pub fn is_belief(&self) -> bool {
        self.entered < self.believed_until
    }

    /// The client, without the number of its process.
    pub fn client(&self) -> &str {
        client_of(&self.process)
    }

    /// A short name for messages.
    pub fn label(&self) -> String {
        let token = self.token.map(|token| format!(" token {token}")).unwrap_or_default();
        format!("{}#{}{token}", self.process, self.op)
    }
}

/// The client of a process: `c2` of `c2.1`.
pub fn client_of(process: &str) -> &str {
    process.split_once('.').map_or(process, |(client, _)| client)
}

/// A fault that the nemesis made.
#[derive(Clone, Debug)]
pub struct FaultSpan {
    /// Its number in the schedule.
    pub number: usize,
    /// What it is.
    pub fault: String,
    /// What it struck.
    pub target: String,
    /// When it began.
    pub begin: Nanos,
    /// When what it struck worked again; the end of the history if that is not recorded.
    pub end: Nanos,
}

/// What the rules of the oracle look at.
#[derive(Clone, Debug)]
pub struct Facts {
    /// All holds, in the order in which they were received.
    pub holds: Vec<Hold>,
    /// All faults, in the order in which they began.
    pub faults: Vec<FaultSpan>,
    /// When a process did not run.
    pub stalls: Vec<(String, Nanos, Nanos)>,
}

impl Facts {
    /// The facts of a history.
    pub fn of(history: &History) -> Self {
        let stalls = history.events.iter().filter_map(|event| match event.what {
            What::Stalled { from } => Some((event.by.clone(), from, event.at)),
            _ => None,
        });
        Self { holds: holds(history), faults: faults(history), stalls: stalls.collect() }
    }

    /// For how long this process did not run between these times.
    pub fn stalled(&self, process: &str, from: Nanos, to: Nanos) -> Nanos {
        let own = self.stalls.iter().filter(|(by, ..)| by == process);
        own.map(|(_, begin, end)| end.min(&to).saturating_sub(*begin.max(&from))).sum()
    }

    /// The faults that touch this span of time.
    pub fn faults_in(&self, from: Nanos, to: Nanos) -> impl Iterator<Item = &FaultSpan> {
        self.faults.iter().filter(move |fault| fault.begin <= to && fault.end >= from)
    }

    /// The holds of each lock, in the order in which they were received.
    pub fn by_name(&self) -> BTreeMap<&str, Vec<&Hold>> {
        let mut names: BTreeMap<&str, Vec<&Hold>> = BTreeMap::new();
        for hold in &self.holds {
            names.entry(&hold.name).or_default().push(hold);
        }
        names
    }
}

fn holds(history: &History) -> Vec<Hold> {
    let mut asked: HashMap<(&str, u64), (Nanos, &str, Mode)> = HashMap::new();
    let mut places: HashMap<(&str, u64), usize> = HashMap::new();
    let mut holds: Vec<Hold> = Vec::new();
    for event in &history.events {
        let by = event.by.as_str();
        let place = |op: &u64| places.get(&(by, *op)).copied();
        match &event.what {
            What::Ask { op, name, mode } => drop(asked.insert((by, *op), (event.at, name, *mode))),
            What::Enter { op, token, valid_until } => {
                let Some(&(at, name, mode)) = asked.get(&(by, *op)) else { continue };
                places.insert((by, *op), holds.len());
                holds.push(Hold {
                    process: by.to_owned(),
                    op: *op,
                    name: name.to_owned(),
                    mode,
                    asked: at,
                    entered: event.at,
                    token: *token,
                    valid_until: *valid_until,
                    lost: None,
                    exited: None,
                    believed_until: 0,
                });
            }
            What::Valid { op, valid_until, .. } => {
                if let Some(place) = place(op) {
                    holds[place].valid_until = Some(*valid_until);
                }
            }
            What::Lost { op, reason } => {
                if let Some(place) = place(op) {
                    holds[place].lost = Some((event.at, reason.clone()));
                    holds[place].exited.get_or_insert(event.at);
                }
            }
            What::Exit { op } => {
                if let Some(place) = place(op) {
                    holds[place].exited.get_or_insert(event.at);
                }
            }
            What::Kill { process } => {
                for hold in holds.iter_mut().filter(|hold| hold.process == *process) {
                    hold.exited.get_or_insert(event.at);
                }
            }
            _ => {}
        }
    }
    let end = history.span().1;
    for hold in &mut holds {
        let last = hold.valid_until.unwrap_or(Nanos::MAX);
        hold.believed_until = hold.exited.unwrap_or(end).min(last);
    }
    holds
}

fn faults(history: &History) -> Vec<FaultSpan> {
    let end = history.span().1;
    let mut faults: Vec<FaultSpan> = Vec::new();
    for event in &history.events {
        match &event.what {
            What::FaultBegins { number, fault, target } => faults.push(FaultSpan {
                number: *number,
                fault: fault.clone(),
                target: target.clone(),
                begin: event.at,
                end,
            }),
            What::FaultEnds { number } => {
                for fault in faults.iter_mut().filter(|fault| fault.number == *number) {
                    fault.end = event.at;
                }
            }
            _ => {}
        }
    }
    faults
}
