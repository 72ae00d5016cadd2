//! A schedule that is played: what a person reads, and what the oracle judges.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use lockset::Mode;
use lockset_testkit::stage::RedisServer;
use lockset_torture::history::{
    Event, History, Nanos, Outcome, Promise, Register, Setup, What, now,
};
use lockset_torture::oracle::{Finding, judge};
use redis::Value;

/// The only lock of a schedule.
pub const LOCK: &str = "lock";

/// The timeline of a schedule and its history.
pub struct Play {
    setup: Setup,
    events: Vec<Event>,
    lines: Vec<Line>,
    /// The last acquisition of each client.
    ops: BTreeMap<String, u64>,
    /// Tokens in the order in which they were seen: a timeline shows their rank.
    tokens: Vec<u64>,
    connections: BTreeMap<(String, u16), redis::Connection>,
}

/// What one client does, or what happens to all of them.
struct Line {
    who: Option<String>,
    text: String,
}

impl std::fmt::Debug for Play {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Play").field("events", &self.events).finish_non_exhaustive()
    }
}

impl Play {
    /// An empty play of which these promises are checked.
    pub fn new(engine: &str, promises: &[Promise]) -> Self {
        let setup = Setup {
            engine: engine.to_owned(),
            seed: 0,
            ttl_ms: 100,
            names: vec![LOCK.to_owned()],
            promises: promises.to_vec(),
            recovery_ms: 0,
        };
        let (ops, connections) = (BTreeMap::new(), BTreeMap::new());
        Self { setup, events: Vec::new(), lines: Vec::new(), ops, tokens: Vec::new(), connections }
    }

    /// The lease that progress is measured by.
    pub fn set_ttl(&mut self, ttl: Duration, recovery: Duration) {
        self.setup.ttl_ms = ttl.as_millis() as u64;
        self.setup.recovery_ms = recovery.as_millis() as u64;
    }

    /// A step of a client.
    pub fn step(&mut self, who: &str, text: impl Into<String>) {
        self.lines.push(Line { who: Some(who.to_owned()), text: text.into() });
    }

    /// Something that no client does.
    pub fn happens(&mut self, text: impl Into<String>) {
        self.lines.push(Line { who: None, text: text.into() });
    }

    /// A command of a client to a Redis server, and its reply.
    pub fn redis(&mut self, who: &str, server: &RedisServer, command: &str) -> String {
        let reply = self.send(who, server, command);
        self.step(who, format!("{command} → {reply}"));
        reply
    }

    /// The lease ends: the server forgets the key.
    pub fn lease_ends(&mut self, server: &RedisServer, whose: &str) {
        self.send("time", server, "PEXPIRE lock 0");
        self.happens(format!("the lease of {whose} ends"));
    }

    /// Sends a command without showing it.
    pub fn send(&mut self, who: &str, server: &RedisServer, command: &str) -> String {
        let key = (who.to_owned(), server.port());
        let connection = self.connections.entry(key).or_insert_with(|| {
            let client = redis::Client::open(server.url()).unwrap();
            client.get_connection().unwrap()
        });
        let mut words = command.split(' ');
        let mut request = redis::cmd(words.next().unwrap());
        for word in words {
            request.arg(word);
        }
        match request.query::<Value>(connection).unwrap() {
            Value::Nil => "nil".to_owned(),
            Value::Okay => "OK".to_owned(),
            Value::Int(number) => number.to_string(),
            Value::BulkString(bytes) => String::from_utf8(bytes).unwrap(),
            other => format!("{other:?}"),
        }
    }

    /// A client begins to acquire the lock.
    pub fn asks(&mut self, who: &str) {
        let op = self.ops.entry(who.to_owned()).or_default();
        *op += 1;
        let what = What::Ask { op: *op, name: LOCK.to_owned(), mode: Mode::Exclusive };
        self.record(who, now(), what);
    }

    /// A client believes that it holds a lock that has no token and tells no deadline.
    pub fn enters(&mut self, who: &str) {
        self.enters_until(who, None, None);
        self.step(who, "holds the lock");
    }

    /// A client was granted the lock. Returns how the token is shown.
    pub fn enters_until(
        &mut self,
        who: &str,
        token: Option<u64>,
        valid_until: Option<Nanos>,
    ) -> String {
        self.record(who, now(), What::Enter { op: self.op(who), token, valid_until });
        let Some(token) = token else { return String::new() };
        if !self.tokens.contains(&token) {
            self.tokens.push(token);
        }
        let rank = self.tokens.iter().position(|known| *known == token).unwrap();
        format!("token {}", rank + 1)
    }

    /// What a guard says.
    pub fn says(&mut self, who: &str, at: Nanos, state: &str, valid_until: Nanos) {
        let state = state.to_owned();
        self.record(who, at, What::Valid { op: self.op(who), valid_until, state });
    }

    /// The token that was seen last.
    pub fn last_token(&self) -> u64 {
        self.tokens[self.tokens.len() - 1]
    }

    /// A client believes nothing any more.
    pub fn exits(&mut self, who: &str) {
        self.record(who, now(), What::Exit { op: self.op(who) });
    }

    /// The work of a client is done.
    pub fn finishes(&mut self, who: &str) {
        self.exits(who);
        self.step(who, "has done its work");
    }

    /// An acquisition failed.
    pub fn fails(&mut self, who: &str, error: &str) {
        self.record(who, now(), What::Failed { op: self.op(who), error: error.to_owned() });
    }

    /// A release returned.
    pub fn released(&mut self, who: &str, error: Option<&str>) {
        let error = error.map(str::to_owned);
        self.record(who, now(), What::Released { op: self.op(who), error });
    }

    /// A client process ends without releasing anything. Nothing else goes wrong.
    pub fn crashes(&mut self, who: &str) {
        self.record("nemesis", now(), What::Kill { process: process(who) });
        self.record("nemesis", now(), What::Quiet);
        self.step(who, "crashes");
    }

    /// A client process ends without releasing anything, and another one takes its place.
    pub fn restarts(&mut self, who: &str) {
        self.record("nemesis", now(), What::Kill { process: process(who) });
        self.step(who, "crashes, and is started again");
    }

    /// From now on the lock must be granted again.
    pub fn quiet(&mut self) {
        self.record("nemesis", now(), What::Quiet);
    }

    /// The deadline by which the lock must have been granted.
    pub fn progress_limit(&self) -> Option<Nanos> {
        let quiet = self.events.iter().find(|event| event.what == What::Quiet)?.at;
        Some(quiet + (2 * self.setup.ttl_ms + self.setup.recovery_ms) * 1_000_000)
    }

    /// A write to the data, and its outcome.
    pub fn writes(&mut self, who: &str, value: &str, outcome: Outcome) {
        let (op, value) = (self.op(who), value.to_owned());
        let register = Register::Fenced;
        self.record(who, now(), What::Write { op, register, value: value.clone() });
        self.record(who, now(), What::Wrote { op, register, value, outcome });
    }

    /// What the data contains at the end.
    pub fn ends_with(&mut self, values: &[&str]) {
        let values: Vec<String> = values.iter().map(|value| (*value).to_owned()).collect();
        let (name, counter) = (LOCK.to_owned(), values.len() as u64);
        let what = What::Final { name, register: Register::Fenced, values, counter };
        self.record("register", now(), what);
    }

    fn op(&self, who: &str) -> u64 {
        self.ops[who]
    }

    fn record(&mut self, who: &str, at: Nanos, what: What) {
        let by = match who {
            "nemesis" | "register" => who.to_owned(),
            client => process(client),
        };
        self.events.push(Event { at, by, what });
    }

    /// What the oracle finds.
    pub fn findings(&self) -> Vec<Finding> {
        let begin = self.events.first().map_or(0, |event| event.at);
        let setup = What::Setup(self.setup.clone());
        let mut events = vec![Event { at: begin, by: "harness".to_owned(), what: setup }];
        events.extend(self.events.iter().cloned());
        // A lock must have had its time to be granted.
        if let Some(limit) = self.progress_limit() {
            let what = What::FaultEnds { number: 0 };
            events.push(Event { at: now(), by: "harness".to_owned(), what });
            assert!(now() >= limit, "the schedule ended before its time");
        }
        judge(&History::new(events)).violations().cloned().collect()
    }

    /// Waits until a lock that makes progress would have been granted.
    pub fn wait_for_progress(&self) {
        while self.progress_limit().is_some_and(|limit| now() <= limit) {
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// The verdict in words, without times.
    pub fn verdict(&self) -> String {
        let findings = self.findings();
        match findings.first() {
            None => "nothing found".to_owned(),
            Some(finding) => format!("{} broken: {}", rule(finding.promise), short(finding)),
        }
    }

    /// The timeline: a column for each client, a row for each step.
    pub fn timeline(&self) -> String {
        let mut clients: Vec<&str> = self.lines.iter().filter_map(|l| l.who.as_deref()).collect();
        clients.sort_unstable();
        clients.dedup();
        let width = |client: &str| {
            let own = self.lines.iter().filter(|line| line.who.as_deref() == Some(client));
            own.map(|line| line.text.chars().count()).max().unwrap_or(0).max(10) + 3
        };
        let mut starts = vec![4];
        clients.iter().for_each(|client| starts.push(starts[starts.len() - 1] + width(client)));
        let mut out = String::from("    ");
        for client in &clients {
            let _ = write!(out, "{client:<width$}", width = width(client));
        }
        let mut out = format!("{}\n", out.trim_end());
        for (index, line) in self.lines.iter().enumerate() {
            let number = index + 1;
            let _ = match &line.who {
                None => writeln!(out, "{number:>2}  ── {} ──", line.text),
                Some(who) => {
                    let column = clients.iter().position(|client| client == who).unwrap();
                    writeln!(out, "{number:>2}{:<1$}{2}", "", starts[column] - 2, line.text)
                }
            };
        }
        out
    }
}

/// The oracle's name of a client's process.
fn process(who: &str) -> String {
    format!("{who}.1")
}

fn rule(promise: Promise) -> &'static str {
    match promise {
        Promise::Exclusion => "exclusion",
        Promise::Tokens => "tokens",
        Promise::UniqueTokens => "unique tokens",
        Promise::Order => "order",
        Promise::Loss => "loss",
        Promise::Progress => "progress",
        Promise::Fence => "fence",
    }
}

/// The text of a finding for a timeline: clients as they are called there, and no times.
fn short(finding: &Finding) -> String {
    let text = finding.text.replace(".1#1", "").replace(".1#2", "");
    let words: Vec<&str> = text.split(", for ").next().unwrap_or_default().split(' ').collect();
    let end = words.iter().position(|word| *word == "within").unwrap_or(words.len());
    match end < words.len() {
        true => format!("{} again", words[..end].join(" ")),
        false => words.join(" "),
    }
}
