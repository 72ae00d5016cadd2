//! Other processes: how drivers are told what to do. `peers/README.md` has the protocol.

use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use crate::server::Server;
use crate::turns::Stamp;

/// How long an answer may take where nothing else is said.
const PATIENCE: Duration = Duration::from_secs(120);

/// A driver that obeys; killed when dropped.
#[derive(Debug)]
pub(crate) struct Child {
    process: std::process::Child,
    orders: ChildStdin,
    answers: Receiver<String>,
    version: String,
}

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Silence {
    /// The driver has ended.
    Ended,
    /// The driver takes too long.
    TooLong,
}

impl Child {
    /// Starts it and waits until it is ready.
    pub(crate) fn start(command: &mut Command) -> Self {
        Self::try_start(command).unwrap_or_else(|why| panic!("{command:?}: {why:?}"))
    }

    pub(crate) fn try_start(command: &mut Command) -> Result<Self, Silence> {
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().map_err(|_| Silence::Ended)?;
        let orders = process.stdin.take().unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let (heard, answers) = channel();
        std::thread::spawn(move || {
            lines.map_while(Result::ok).take_while(|line| heard.send(line.clone()).is_ok()).count()
        });
        let mut child = Self { process, orders, answers, version: String::new() };
        let ready = child.answer_by(Instant::now() + PATIENCE)?;
        let version = ready.strip_prefix("ready").ok_or(Silence::Ended)?;
        child.version = version.trim().to_owned();
        Ok(child)
    }

    /// One of our own.
    pub(crate) fn ourselves(server: &Server) -> Self {
        Self::of_this_program(&["lockset", &server.url(), "30000"])
    }

    /// A driver inside this program.
    pub(crate) fn of_this_program(args: &[&str]) -> Self {
        Self::start(Command::new(std::env::current_exe().unwrap()).arg("driver").args(args))
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Of the library, as the driver says.
    pub(crate) fn version(&self) -> &str {
        &self.version
    }

    pub(crate) fn kill(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    /// A driver that has ended is found by the answer that does not come.
    pub(crate) fn tell(&mut self, order: &str) {
        let _ = writeln!(self.orders, "{order}");
    }

    pub(crate) fn expect(&mut self, answer: &str) {
        assert_eq!(self.answer_by(Instant::now() + PATIENCE).as_deref(), Ok(answer));
    }

    /// The next answer, if it comes by then.
    pub(crate) fn answer_by(&mut self, deadline: Instant) -> Result<String, Silence> {
        let left = deadline.saturating_duration_since(Instant::now());
        self.answers.recv_timeout(left).map_err(|error| match error {
            RecvTimeoutError::Timeout => Silence::TooLong,
            RecvTimeoutError::Disconnected => Silence::Ended,
        })
    }

    /// The stamps of the turns that were taken last.
    pub(crate) fn stamps(&mut self) -> Vec<Stamp> {
        self.try_stamps().expect("a driver shows its stamps")
    }

    pub(crate) fn try_stamps(&mut self) -> Result<Vec<Stamp>, Silence> {
        self.tell("show");
        let (deadline, mut stamps) = (Instant::now() + PATIENCE, Vec::new());
        loop {
            let line = self.answer_by(deadline)?;
            if line == "end" {
                return Ok(stamps);
            }
            let mut numbers = line.split(' ').map(|number| number.parse::<u64>().unwrap());
            let (granted, released) = (numbers.next().unwrap(), numbers.next().unwrap());
            stamps.push(Stamp { granted, released, token: numbers.next().unwrap_or_default() });
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.kill();
    }
}
