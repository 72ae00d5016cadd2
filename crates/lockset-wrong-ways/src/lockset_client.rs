//! A process with a Lockset client. It reads one command per line and replies with one line, so
//! that a schedule can stop it, kill it or give it a wrong clock between two steps.

use std::io::{BufRead, BufReader, Lines, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use lockset::{Error, Guard, LockOptions, Lockset, State};
use lockset_torture::history::{Nanos, nanos, now};
use rustix::process::Pid;

use crate::play::{LOCK, Play};
use crate::several_servers::stop;

/// The argument that makes the command `lockset-wrong-ways` such a process; its URL follows.
pub const CLIENT: &str = "--client";
/// The command, if it is not this program: a test names it.
pub static COMMAND: OnceLock<PathBuf> = OnceLock::new();

/// The process: executes the commands of its standard input.
pub fn serve(url: &str) {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let locks = runtime.block_on(Lockset::connect(url)).unwrap();
    let mut held: Option<Guard> = None;
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let words: Vec<&str> = line.split(' ').collect();
        let reply = match words[..] {
            ["lock", ttl_ms, renewal, wait_ms] => {
                let millis = |text: &str| Duration::from_millis(text.parse().unwrap());
                let options = LockOptions::default().ttl(millis(ttl_ms));
                let options = if renewal == "once" { options.no_renewal() } else { options };
                let mutex = locks.mutex(LOCK).unwrap().with(options);
                match runtime.block_on(mutex.lock_within(millis(wait_ms))) {
                    Err(error) => format!("refused {}", reason(&error)),
                    Ok(guard) => {
                        let granted = format!("granted {} {}", guard.token(), valid_until(&guard));
                        held = Some(guard);
                        granted
                    }
                }
            }
            ["state"] => {
                let at = now();
                match held.as_ref().map(|guard| (guard.state(), valid_until(guard))) {
                    Some((State::Held, until)) => format!("held {until} {at}"),
                    Some((State::Uncertain, until)) => format!("uncertain {until} {at}"),
                    _ => format!("lost 0 {at}"),
                }
            }
            ["release"] => match runtime.block_on(held.take().expect("a guard").release()) {
                Ok(()) => "released".to_owned(),
                Err(error) => format!("refused {}", reason(&error)),
            },
            ["panic"] => {
                let guard = held.take().expect("a guard");
                let work = runtime.spawn(async move {
                    let _guard = guard;
                    std::panic::resume_unwind(Box::new("the work fails"));
                });
                format!("panicked {}", runtime.block_on(work).is_err())
            }
            _ => panic!("{line}"),
        };
        let mut out = std::io::stdout().lock();
        writeln!(out, "{reply}").unwrap();
        out.flush().unwrap();
    }
}

/// Read before the guard is asked, so that it is never too late.
fn valid_until(guard: &Guard) -> Nanos {
    let now = now();
    now + nanos(guard.valid_for())
}

fn reason(error: &Error) -> String {
    match error {
        Error::Timeout { .. } => "timeout".to_owned(),
        Error::Lost { .. } => "lost".to_owned(),
        other => other.to_string().replace('\n', " "),
    }
}

/// A client process, seen by the schedule.
pub struct LocksetClient {
    who: &'static str,
    child: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl std::fmt::Debug for LocksetClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LocksetClient").field("who", &self.who).finish_non_exhaustive()
    }
}

/// Whether a lock is renewed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renewal {
    /// As usual.
    Renewed,
    /// It ends with its first lease.
    Once,
}

impl LocksetClient {
    /// Starts a client of the server at `url`.
    pub fn start(who: &'static str, url: &str) -> Self {
        Self::start_with(who, url, &[])
    }

    /// The same with more environment variables.
    pub fn start_with(who: &'static str, url: &str, environment: &[(String, String)]) -> Self {
        let command = COMMAND.get_or_init(|| std::env::current_exe().unwrap());
        let mut child = Command::new(command)
            .args([CLIENT, url])
            .envs(environment.iter().map(|(key, value)| (key, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{}: {error}", command.display()));
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { who, child, input, output }
    }

    fn call(&mut self, command: &str) -> String {
        writeln!(self.input, "{command}").unwrap();
        self.output.next().expect("the client ended").unwrap()
    }

    /// Takes the lock, if that is possible in this time. Returns whether it was granted.
    pub fn lock(&mut self, play: &mut Play, lease: (Duration, Renewal), within: Duration) -> bool {
        let (ttl, wait) = (lease.0.as_millis(), within.as_millis());
        let renewal = if lease.1 == Renewal::Once { "once" } else { "renewed" };
        play.asks(self.who);
        let reply = self.call(&format!("lock {ttl} {renewal} {wait}"));
        let words: Vec<&str> = reply.split(' ').collect();
        if let ["granted", token, until] = words[..] {
            let (token, until) = (token.parse().ok(), until.parse().ok());
            let token = play.enters_until(self.who, token, until);
            play.step(self.who, format!("lock() → {token}"));
            return true;
        }
        play.fails(self.who, &reply);
        let shown = match reply.as_str() {
            "refused timeout" => "timeout",
            reply if reply.contains("replica") => "refused: no replica has it",
            reply => reply,
        };
        play.step(self.who, format!("lock() → {shown}"));
        false
    }

    /// Asks the guard. Returns what it says.
    pub fn state(&mut self, play: &mut Play) -> String {
        let reply = self.call("state");
        let words: Vec<&str> = reply.split(' ').collect();
        let [state, until, at] = words[..] else { panic!("{reply}") };
        play.says(self.who, at.parse().unwrap(), state, until.parse().unwrap());
        play.step(self.who, format!("the guard says: {state}"));
        state.to_owned()
    }

    /// Releases the lock. Returns whether it was held until then.
    pub fn release(&mut self, play: &mut Play) -> bool {
        play.exits(self.who);
        let reply = self.call("release");
        let error = reply.strip_prefix("refused ");
        play.released(self.who, error);
        let shown = error.map_or("released".to_owned(), |error| format!("error: {error}"));
        play.step(self.who, format!("release() → {shown}"));
        error.is_none()
    }

    /// Its work panics while it holds the lock.
    pub fn panic(&mut self, play: &mut Play) {
        play.exits(self.who);
        assert_eq!(self.call("panic"), "panicked true");
        play.step(self.who, "the work panics; the guard is dropped");
    }

    /// Kills the process.
    pub fn kill(&mut self, play: &mut Play) {
        play.crashes(self.who);
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Kills the process. Its successor has the same name.
    pub fn kill_and_restart(&mut self, play: &mut Play) {
        play.restarts(self.who);
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Stops the process.
    pub fn stop(&mut self, play: &mut Play) {
        stop(Pid::from_child(&self.child), true);
        play.step(self.who, "is stopped (SIGSTOP)");
    }

    /// Lets it go on.
    pub fn resume(&mut self, play: &mut Play) {
        stop(Pid::from_child(&self.child), false);
        play.step(self.who, "goes on");
    }
}

impl Drop for LocksetClient {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
