//! A client in a process of its own, commanded line by line, and killed when a law says so.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lockset::{Guard, LockOptions, Lockset, Mode, Result, State, Token};
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::layer::Ice;

/// What a process is told to do; one line of JSON each. `call` names the lock in what follows.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// Waits for a lock and keeps it.
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
    /// Gives a lock back.
    Release {
        /// Which.
        call: u32,
    },
    /// Asks a guard how it is.
    State {
        /// Which.
        call: u32,
    },
}

/// What a process answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// The lock is held.
    Granted {
        /// The lock's number.
        call: u32,
        /// The token.
        token: Token,
    },
    /// The lock was given back.
    Released {
        /// Which.
        call: u32,
    },
    /// How the guard is: `held`, `uncertain` or `lost`.
    State {
        /// Which.
        call: u32,
        /// How it is.
        state: String,
    },
    /// It did not work.
    Failed {
        /// Which.
        call: u32,
        /// Why.
        why: String,
    },
}

impl Answer {
    fn call(&self) -> u32 {
        match self {
            Answer::Granted { call, .. }
            | Answer::Released { call }
            | Answer::State { call, .. }
            | Answer::Failed { call, .. } => *call,
        }
    }
}

/// Another process. Killed when dropped.
#[derive(Debug)]
pub struct Process {
    body: Body,
    answers: UnboundedReceiver<Answer>,
    /// Answers to other calls than the one that was waited for.
    early: Vec<Answer>,
    calls: u32,
}

#[derive(Debug)]
enum Body {
    Child(Child),
    /// A client of this process that lives until its ice comes.
    StandIn {
        orders: UnboundedSender<Order>,
        death: Ice,
    },
}

impl Process {
    /// Starts the binary `actor` and connects it to `url`.
    pub fn start(actor: &str, url: &str, judging: Judging) -> Self {
        let hearsay = (judging == Judging::ByHearsay).then_some("--by-hearsay");
        Self::spawn(Command::new(actor).arg(url).args(hearsay))
    }

    /// The same for an engine whose locks all have the ttl of their client.
    pub fn start_with_ttl(actor: &str, url: &str, ttl: Duration) -> Self {
        Self::spawn(Command::new(actor).arg(url).args(["--ttl-ms", &ttl.as_millis().to_string()]))
    }

    fn spawn(actor: &mut Command) -> Self {
        let mut child = actor
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{actor:?}: {error}"));
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let (tell, answers) = unbounded_channel();
        std::thread::spawn(move || {
            for line in lines.map_while(std::result::Result::ok) {
                let answer = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{line}: {e}"));
                if tell.send(answer).is_err() {
                    return;
                }
            }
        });
        Self { body: Body::Child(child), answers, early: Vec::new(), calls: 0 }
    }

    /// A client of this process, cut off from its home for ever by `death`.
    pub fn stand_in(locks: Lockset, death: Ice) -> Self {
        let (orders, theirs) = unbounded_channel();
        let (tell, answers) = unbounded_channel();
        let tell = move |answer| drop(tell.send(answer));
        tokio::spawn(obey(locks, theirs, tell, Judging::ByTheGuard));
        let body = Body::StandIn { orders, death };
        Self { body, answers, early: Vec::new(), calls: 0 }
    }

    /// Begins to wait for a lock; [`granted`](Process::granted) tells when it is there.
    pub fn begin_lock(&mut self, name: &str, mode: Mode, ttl: Duration) -> u32 {
        self.calls += 1;
        let call = self.calls;
        self.send(Order::Lock { call, name: name.to_owned(), mode, ttl });
        call
    }

    /// The token of a lock, once it is granted.
    pub async fn granted(&mut self, call: u32) -> Token {
        match self.answer(call).await {
            Answer::Granted { token, .. } => token,
            other => panic!("a lock was asked for, the process answered {other:?}"),
        }
    }

    /// Gives a lock back.
    pub async fn release(&mut self, call: u32) {
        self.send(Order::Release { call });
        let answer = self.answer(call).await;
        assert!(matches!(answer, Answer::Released { .. }), "the process answered {answer:?}");
    }

    /// How a guard says it is, at the moment the process reads the question.
    pub async fn state(&mut self, call: u32) -> String {
        self.send(Order::State { call });
        match self.answer(call).await {
            Answer::State { state, .. } => state,
            other => panic!("the state was asked for, the process answered {other:?}"),
        }
    }

    /// Ends the process without a last word (SIGKILL).
    pub fn kill(&mut self) {
        match &mut self.body {
            Body::Child(child) => {
                child.kill().unwrap();
                child.wait().unwrap();
            }
            Body::StandIn { death, .. } => death.freeze(),
        }
    }

    /// Stops the process (SIGSTOP): it does nothing, and does not know it.
    pub fn stop(&mut self) {
        self.signal(Signal::STOP);
    }

    /// Lets a stopped process go on (SIGCONT).
    pub fn resume(&mut self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        // A stand-in cannot be stopped alone; its laws pause the whole stage.
        if let Body::Child(child) = &self.body {
            kill_process(Pid::from_child(child), signal).unwrap();
        }
    }

    fn send(&mut self, order: Order) {
        match &mut self.body {
            Body::Child(child) => {
                let line = serde_json::to_string(&order).unwrap();
                writeln!(child.stdin.as_mut().unwrap(), "{line}").unwrap();
            }
            Body::StandIn { orders, .. } => orders.send(order).unwrap(),
        }
    }

    async fn answer(&mut self, call: u32) -> Answer {
        if let Some(early) = self.early.iter().position(|answer| answer.call() == call) {
            return self.early.remove(early);
        }
        loop {
            let answer = self.answers.recv().await.expect("the process ended");
            match answer.call() == call {
                true => return answer,
                false => self.early.push(answer),
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Body::Child(child) = &mut self.body {
            // It may be dead already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// How a process tells the state of its locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Judging {
    /// It asks the guard, which looks at the clock.
    ByTheGuard,
    /// It repeats what it heard last: the mistake that a guard must not make.
    ByHearsay,
}

/// What a process does: obeys until there are no more orders.
pub async fn obey(
    locks: Lockset,
    mut orders: UnboundedReceiver<Order>,
    tell: impl Fn(Answer) + Clone + Send + 'static,
    judging: Judging,
) {
    let guards: Arc<Mutex<HashMap<u32, Guard>>> = Arc::default();
    while let Some(order) = orders.recv().await {
        match order {
            Order::Lock { call, name, mode, ttl } => {
                let (locks, guards, tell) = (locks.clone(), guards.clone(), tell.clone());
                tokio::spawn(async move {
                    let answer = match lock(&locks, &name, mode, ttl).await {
                        Err(error) => Answer::Failed { call, why: error.to_string() },
                        Ok(guard) => {
                            let token = guard.token();
                            guards.lock().unwrap().insert(call, guard);
                            Answer::Granted { call, token }
                        }
                    };
                    tell(answer);
                });
            }
            Order::Release { call } => {
                let guard = guards.lock().unwrap().remove(&call).expect("a lock that is held");
                let answer = match guard.release().await {
                    Ok(()) => Answer::Released { call },
                    Err(error) => Answer::Failed { call, why: error.to_string() },
                };
                tell(answer);
            }
            Order::State { call } => {
                let state = match guards.lock().unwrap()[&call].state() {
                    _ if judging == Judging::ByHearsay => "held",
                    State::Held => "held",
                    State::Uncertain => "uncertain",
                    State::Lost(_) => "lost",
                };
                tell(Answer::State { call, state: state.to_owned() });
            }
        }
    }
}

async fn lock(locks: &Lockset, name: &str, mode: Mode, ttl: Duration) -> Result<Guard> {
    let options = LockOptions::default().ttl(ttl);
    match mode {
        Mode::Exclusive => locks.mutex(name)?.with(options)?.lock().await,
        Mode::Shared => locks.rwlock(name)?.with(options)?.read().await,
        Mode::Permits { take, limit } => {
            locks.semaphore(name, limit)?.with(options)?.acquire(take).await
        }
    }
}
