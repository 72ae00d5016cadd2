//! A client in a process of its own that executes commands line by line and can be killed.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lockset::fence::FencingToken;
use lockset::{Guard, LockOptions, Lockset, Mode, Result, State, Token};
use rustix::process::{Pid, Signal};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::layer::FreezeSwitch;
use crate::paused_holder::{Register, Verdict};
use crate::signals;

/// A command to the process, one line of JSON each. `call` identifies the lock in later commands.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ActorCommand {
    /// Acquires a lock and holds it.
    Lock {
        /// The new lock's number.
        call: u32,
        /// Its name.
        name: String,
        /// How it is held.
        mode: Mode,
        /// Its ttl.
        ttl: Duration,
    },
    /// Releases a lock.
    Release {
        /// Which.
        call: u32,
    },
    /// Reads the state of a guard.
    State {
        /// Which.
        call: u32,
    },
    /// Writes into a register with the token of a lock, as it was when the lock was granted. The
    /// guard is not asked.
    Write {
        /// Which lock.
        call: u32,
        /// The register.
        register: Register,
        /// The value.
        value: String,
    },
}

/// A reply of the process.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ActorReply {
    /// The lock is held.
    Granted {
        /// The lock's number.
        call: u32,
        /// The token.
        token: Token,
    },
    /// The lock was released.
    Released {
        /// Which.
        call: u32,
    },
    /// The state of the guard: `held`, `uncertain` or `lost`.
    State {
        /// Which.
        call: u32,
        /// The state.
        state: String,
    },
    /// The outcome of a write.
    Wrote {
        /// With the token of which lock.
        call: u32,
        /// Whether it was written.
        verdict: Verdict,
    },
    /// The command failed.
    Failed {
        /// Which.
        call: u32,
        /// The error.
        why: String,
    },
}

impl ActorReply {
    fn call(&self) -> u32 {
        match self {
            ActorReply::Granted { call, .. }
            | ActorReply::Released { call }
            | ActorReply::State { call, .. }
            | ActorReply::Wrote { call, .. }
            | ActorReply::Failed { call, .. } => *call,
        }
    }
}

/// A client process. Killed when dropped.
#[derive(Debug)]
pub struct Process {
    backend: ProcessBackend,
    replies: UnboundedReceiver<ActorReply>,
    /// Replies to other calls than the awaited one.
    unclaimed: Vec<ActorReply>,
    calls: u32,
}

#[derive(Debug)]
enum ProcessBackend {
    Child(Child),
    /// A client inside this process; freezing it for ever simulates a crash.
    Simulated {
        commands: UnboundedSender<ActorCommand>,
        crash: FreezeSwitch,
    },
}

impl Process {
    /// Starts the binary `actor` and connects it to `url`.
    pub fn start(actor: &str, url: &str, state_source: StateSource) -> Self {
        let stale = (state_source == StateSource::Stale).then_some("--report-stale-state");
        Self::spawn(Command::new(actor).arg(url).args(stale))
    }

    /// The same for engines on which the ttl is a setting of the client.
    pub fn start_with_ttl(actor: &str, url: &str, ttl: Duration) -> Self {
        Self::spawn(Command::new(actor).arg(url).args(["--ttl-ms", &ttl.as_millis().to_string()]))
    }

    /// Starts a client process by any command. The process has to call [`serve_stdio`].
    pub fn spawn(actor: &mut Command) -> Self {
        let mut child = actor
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{actor:?}: {error}"));
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let (send_reply, replies) = unbounded_channel();
        std::thread::spawn(move || {
            for line in lines.map_while(std::result::Result::ok) {
                let reply = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{line}: {e}"));
                if send_reply.send(reply).is_err() {
                    return;
                }
            }
        });
        Self { backend: ProcessBackend::Child(child), replies, unclaimed: Vec::new(), calls: 0 }
    }

    /// A client inside this process. Killing it cuts it off from its backend by freezing `crash`.
    pub fn simulated(locks: Lockset, crash: FreezeSwitch) -> Self {
        let (commands, received) = unbounded_channel();
        let (send_reply, replies) = unbounded_channel();
        let send_reply = move |reply| drop(send_reply.send(reply));
        tokio::spawn(run_actor(locks, received, send_reply, StateSource::Guard));
        let backend = ProcessBackend::Simulated { commands, crash };
        Self { backend, replies, unclaimed: Vec::new(), calls: 0 }
    }

    /// Begins to acquire a lock; [`granted`](Process::granted) waits for it.
    pub fn begin_lock(&mut self, name: &str, mode: Mode, ttl: Duration) -> u32 {
        self.calls += 1;
        let call = self.calls;
        self.send(ActorCommand::Lock { call, name: name.to_owned(), mode, ttl });
        call
    }

    /// The token of a lock, once it is granted.
    pub async fn granted(&mut self, call: u32) -> Token {
        match self.reply(call).await {
            ActorReply::Granted { token, .. } => token,
            other => panic!("expected a grant, got {other:?}"),
        }
    }

    /// Releases a lock.
    pub async fn release(&mut self, call: u32) {
        self.send(ActorCommand::Release { call });
        let reply = self.reply(call).await;
        assert!(matches!(reply, ActorReply::Released { .. }), "the process answered {reply:?}");
    }

    /// The state of a guard at the moment the process reads the command.
    pub async fn state(&mut self, call: u32) -> String {
        self.send(ActorCommand::State { call });
        match self.reply(call).await {
            ActorReply::State { state, .. } => state,
            other => panic!("expected a state, got {other:?}"),
        }
    }

    /// Begins a write with the token of a lock; [`written`](Process::written) waits for it. A
    /// stopped process writes as soon as it is resumed.
    pub fn begin_write(&mut self, call: u32, register: &Register, value: &str) {
        let (register, value) = (register.clone(), value.to_owned());
        self.send(ActorCommand::Write { call, register, value });
    }

    /// The outcome of a write.
    pub async fn written(&mut self, call: u32) -> Verdict {
        match self.reply(call).await {
            ActorReply::Wrote { verdict, .. } => verdict,
            other => panic!("expected the outcome of a write, got {other:?}"),
        }
    }

    /// Kills the process (SIGKILL).
    pub fn kill(&mut self) {
        match &mut self.backend {
            ProcessBackend::Child(child) => {
                child.kill().unwrap();
                child.wait().unwrap();
            }
            ProcessBackend::Simulated { crash, .. } => crash.freeze(),
        }
    }

    /// Stops the process (SIGSTOP); it cannot notice that.
    pub fn stop(&mut self) {
        self.signal(Signal::STOP);
    }

    /// Resumes a stopped process (SIGCONT).
    pub fn resume(&mut self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        // A simulated process cannot be stopped alone; its laws pause the whole stage.
        if let ProcessBackend::Child(child) = &self.backend {
            signals::send(Pid::from_child(child), signal);
        }
    }

    fn send(&mut self, command: ActorCommand) {
        match &mut self.backend {
            ProcessBackend::Child(child) => {
                let line = serde_json::to_string(&command).unwrap();
                writeln!(child.stdin.as_mut().unwrap(), "{line}").unwrap();
            }
            ProcessBackend::Simulated { commands, .. } => commands.send(command).unwrap(),
        }
    }

    async fn reply(&mut self, call: u32) -> ActorReply {
        if let Some(unclaimed) = self.unclaimed.iter().position(|reply| reply.call() == call) {
            return self.unclaimed.remove(unclaimed);
        }
        loop {
            let reply = self.replies.recv().await.expect("the process ended");
            match reply.call() == call {
                true => return reply,
                false => self.unclaimed.push(reply),
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let ProcessBackend::Child(child) = &mut self.backend {
            // It may have ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Where a process takes the reported state of its locks from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateSource {
    /// From the guard, which reads the clock.
    Guard,
    /// From the last reply of the backend: the mistake that a guard must not make.
    Stale,
}

/// A client process by its arguments: `URL [--report-stale-state | --ttl-ms N]`.
pub fn serve_arguments() {
    let url = std::env::args().nth(1).unwrap_or_else(|| "local:".to_owned());
    let option = std::env::args().nth(2).unwrap_or_default();
    let state_source = match option.as_str() {
        "--report-stale-state" => StateSource::Stale,
        _ => StateSource::Guard,
    };
    let mut builder = Lockset::builder(&url);
    if option == "--ttl-ms" {
        let ttl = std::env::args().nth(3).unwrap().parse().unwrap();
        builder = builder.ttl(Duration::from_millis(ttl));
    }
    serve_stdio(state_source, async { builder.connect().await.unwrap() });
}

/// The whole of a client process: connects, then executes the commands that come in on stdin and
/// writes the replies to stdout.
pub fn serve_stdio(state_source: StateSource, connect: impl Future<Output = Lockset>) {
    let (send_command, commands) = unbounded_channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines() {
            send_command.send(serde_json::from_str(&line.unwrap()).unwrap()).unwrap();
        }
    });
    let send_reply = |reply| {
        let mut line = serde_json::to_string(&reply).unwrap();
        line.push('\n');
        std::io::stdout().write_all(line.as_bytes()).unwrap();
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        run_actor(connect.await, commands, send_reply, state_source).await;
    });
}

/// The main loop of a client process: executes commands until there are no more.
pub async fn run_actor(
    locks: Lockset,
    mut commands: UnboundedReceiver<ActorCommand>,
    send_reply: impl Fn(ActorReply) + Clone + Send + 'static,
    state_source: StateSource,
) {
    let guards: Arc<Mutex<HashMap<u32, Guard>>> = Arc::default();
    let tokens: Arc<Mutex<HashMap<u32, FencingToken>>> = Arc::default();
    while let Some(command) = commands.recv().await {
        match command {
            ActorCommand::Lock { call, name, mode, ttl } => {
                let (locks, guards, tokens, send_reply) =
                    (locks.clone(), guards.clone(), tokens.clone(), send_reply.clone());
                tokio::spawn(async move {
                    let reply = match lock(&locks, &name, mode, ttl).await {
                        Err(error) => ActorReply::Failed { call, why: error.to_string() },
                        Ok(guard) => {
                            let token = guard.token();
                            tokens.lock().unwrap().insert(call, FencingToken::from(&guard));
                            guards.lock().unwrap().insert(call, guard);
                            ActorReply::Granted { call, token }
                        }
                    };
                    send_reply(reply);
                });
            }
            ActorCommand::Release { call } => {
                let guard = guards.lock().unwrap().remove(&call).expect("a lock that is held");
                let reply = match guard.release().await {
                    Ok(()) => ActorReply::Released { call },
                    Err(error) => ActorReply::Failed { call, why: error.to_string() },
                };
                send_reply(reply);
            }
            ActorCommand::State { call } => {
                let state = match guards.lock().unwrap()[&call].state() {
                    _ if state_source == StateSource::Stale => "held",
                    State::Held => "held",
                    State::Uncertain => "uncertain",
                    State::Lost(_) => "lost",
                };
                send_reply(ActorReply::State { call, state: state.to_owned() });
            }
            ActorCommand::Write { call, register, value } => {
                let token = tokens.lock().unwrap()[&call].clone();
                let reply = match register.write(&token, &value).await {
                    Ok(verdict) => ActorReply::Wrote { call, verdict },
                    Err(error) => ActorReply::Failed { call, why: error.to_string() },
                };
                send_reply(reply);
            }
        }
    }
}

async fn lock(locks: &Lockset, name: &str, mode: Mode, ttl: Duration) -> Result<Guard> {
    let options = LockOptions::default().ttl(ttl);
    match mode {
        Mode::Exclusive => locks.mutex(name)?.with(options).lock().await,
        Mode::Shared => locks.rwlock(name)?.with(options).read().await,
        Mode::Permits { take, limit } => {
            locks.semaphore(name, limit)?.with(options).acquire_many(take).await
        }
    }
}
