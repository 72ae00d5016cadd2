//! The client process: it locks, works and releases until its standard input is closed, and records
//! what it believes.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use lockset::{Guard, LockOptions, Lockset, Mode, State};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufStream};
use tokio::net::TcpStream;

use crate::broken::Broken;
use crate::history::{Nanos, Outcome, Recorder, Register, What, nanos, now};
use crate::schedule::Random;

/// What a client process is told.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ClientConfig {
    /// Its name in the history.
    pub process: String,
    /// The URL of the locks.
    pub url: String,
    /// The locks, and how each is held.
    pub locks: Vec<LockSpec>,
    /// The ttl of all locks, in milliseconds.
    pub ttl_ms: u64,
    /// The port of the registers.
    pub registers: u16,
    /// The file of its history.
    pub file: PathBuf,
    /// Decides which lock it takes and how long it works.
    pub seed: u64,
    /// How many tasks it has.
    pub tasks: u64,
    /// Uses a deliberately broken engine.
    pub broken: Option<Broken>,
}

/// A lock and how it is used.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LockSpec {
    /// Its name.
    pub name: String,
    /// How it is held; a lock in mode [`Mode::Shared`] is also held exclusively now and then.
    pub mode: Mode,
}

/// A pause of the process that is longer than this is recorded.
const STALL: Duration = Duration::from_millis(40);
/// How often the process looks whether it was paused.
const TICK: Duration = Duration::from_millis(20);
/// After a failed acquisition.
const PAUSE: Duration = Duration::from_millis(100);

/// Runs a client process until its standard input is closed.
///
/// # Panics
/// If it cannot connect within a minute, or not record.
pub fn run(config: ClientConfig) {
    let recorder = Recorder::open(&config.process, &config.file).unwrap();
    let client = Arc::new(Client {
        recorder,
        ops: AtomicU64::new(1),
        stopping: AtomicBool::new(false),
        config,
    });
    watch_stalls(&client);
    stop_at_end_of_input(&client);
    // One thread, so that tasks ask in the order in which they record it.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(client.work());
}

#[derive(Debug)]
struct Client {
    recorder: Recorder,
    ops: AtomicU64,
    stopping: AtomicBool,
    config: ClientConfig,
}

fn watch_stalls(client: &Arc<Client>) {
    let client = client.clone();
    std::thread::spawn(move || {
        loop {
            let before = now();
            std::thread::sleep(TICK);
            if now() - before > nanos(TICK + STALL) {
                client.recorder.record(What::Stalled { from: before });
            }
        }
    });
}

fn stop_at_end_of_input(client: &Arc<Client>) {
    let client = client.clone();
    std::thread::spawn(move || {
        let mut line = String::new();
        while std::io::stdin().read_line(&mut line).is_ok_and(|length| length > 0) {
            line.clear();
        }
        client.stopping.store(true, Ordering::Relaxed);
    });
}

impl Client {
    async fn work(self: Arc<Self>) {
        let locks = self.connect().await;
        let mut tasks = tokio::task::JoinSet::new();
        for task in 0..self.config.tasks {
            let (client, locks) = (self.clone(), locks.clone());
            tasks.spawn(async move {
                let random = Random::new(client.config.seed.wrapping_mul(31).wrapping_add(task));
                client.run_task(&locks, random).await;
            });
        }
        tasks.join_all().await;
        let _ = locks.close().await;
    }

    async fn connect(&self) -> Lockset {
        let limit = tokio::time::Instant::now() + Duration::from_secs(60);
        loop {
            let connected = match self.config.broken {
                Some(broken) => broken.connect(&self.config).await,
                None => Lockset::builder(&self.config.url).ttl(self.ttl()).connect().await,
            };
            match connected {
                Ok(locks) => return locks,
                Err(error) if tokio::time::Instant::now() > limit => panic!("{error}"),
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
        }
    }

    fn ttl(&self) -> Duration {
        Duration::from_millis(self.config.ttl_ms)
    }

    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    async fn run_task(&self, locks: &Lockset, mut random: Random) {
        let mut registers = RegisterClient::new(self.config.registers);
        while !self.is_stopping() {
            let spec = &self.config.locks[random.below(self.config.locks.len() as u64) as usize];
            let mode = match spec.mode {
                Mode::Shared if random.below(3) == 0 => Mode::Exclusive,
                mode => mode,
            };
            let op = self.ops.fetch_add(1, Ordering::Relaxed);
            self.recorder.record(What::Ask { op, name: spec.name.clone(), mode });
            match self.lock(locks, &spec.name, mode).await {
                Ok(guard) => self.hold(op, guard, &mut registers, &mut random).await,
                Err(error) => {
                    self.recorder.record(What::Failed { op, error: error.to_string() });
                    tokio::time::sleep(PAUSE).await;
                }
            }
            tokio::time::sleep(Duration::from_millis(random.below(20))).await;
        }
    }

    async fn lock(&self, locks: &Lockset, name: &str, mode: Mode) -> lockset::Result<Guard> {
        let limit = 2 * self.ttl();
        // A broken engine is not made by the builder, which would set the ttl.
        let options = match self.config.broken {
            Some(_) => LockOptions::default().ttl(self.ttl()),
            None => LockOptions::default(),
        };
        match mode {
            Mode::Exclusive if name.starts_with('r') => {
                locks.rwlock(name)?.with(options).write_within(limit).await
            }
            Mode::Exclusive => locks.mutex(name)?.with(options).lock_within(limit).await,
            Mode::Shared => locks.rwlock(name)?.with(options).read_within(limit).await,
            Mode::Permits { take, limit: permits } => {
                let semaphore = locks.semaphore(name, permits)?.with(options);
                semaphore.acquire_many_within(take, limit).await
            }
        }
    }

    async fn hold(
        &self,
        op: u64,
        guard: Guard,
        registers: &mut RegisterClient,
        random: &mut Random,
    ) {
        let (entered, valid_until, _) = believed(&guard);
        let token = Some(guard.token().get());
        let valid_until = Some(valid_until);
        self.recorder.record_at(entered, What::Enter { op, token, valid_until });
        {
            let work = self.use_lock(op, &guard, registers, random);
            tokio::pin!(work);
            let mut is_told = false;
            loop {
                tokio::select! {
                    reason = guard.lost(), if !is_told => {
                        is_told = true;
                        let reason = reason.as_str().to_owned();
                        self.recorder.record(What::Lost { op, reason });
                    }
                    () = &mut work => break,
                }
            }
        }
        self.recorder.record(What::Exit { op });
        let error = guard.release().await.err().map(|error| error.to_string());
        self.recorder.record(What::Released { op, error });
    }

    /// Reads, works, and writes back: without a check, with the guard's word, with the fence.
    async fn use_lock(
        &self,
        op: u64,
        guard: &Guard,
        registers: &mut RegisterClient,
        random: &mut Random,
    ) {
        let writes = guard.mode() == Mode::Exclusive;
        let name = guard.name().as_str();
        let token = guard.token().get();
        let all = [Register::Plain, Register::Checked, Register::Fenced];
        let mut read = Vec::new();
        if writes {
            for register in all {
                read.push((register, registers.read(register, name, token).await));
            }
        }
        self.think(op, guard, random).await;
        for (register, snapshot) in read {
            let value = format!("{}-{op}-{}", self.config.process, register as u8);
            self.recorder.record(What::Write { op, register, value: value.clone() });
            let is_believed = || guard.state() == State::Held;
            let outcome = match snapshot {
                Err(outcome) => outcome,
                Ok(_) if register == Register::Checked && !is_believed() => Outcome::Rejected,
                Ok(snapshot) => registers.write(register, name, token, snapshot, &value).await,
            };
            self.recorder.record(What::Wrote { op, register, value, outcome });
        }
    }

    /// Mostly short; sometimes longer than a lease, so that it must be renewed.
    async fn think(&self, op: u64, guard: &Guard, random: &mut Random) {
        let ttl = self.ttl();
        let span = match random.below(40) {
            0 => ttl.mul_f64(random.between(0.8, 1.3)),
            1..5 => ttl.mul_f64(random.between(0.1, 0.4)),
            _ => Duration::from_millis(random.below(30)),
        };
        let end = tokio::time::Instant::now() + span;
        while tokio::time::Instant::now() < end && !self.is_stopping() {
            tokio::time::sleep_until(end.min(tokio::time::Instant::now() + ttl / 8)).await;
            let (at, valid_until, state) = believed(guard);
            self.recorder.record_at(at, What::Valid { op, valid_until, state: state.to_owned() });
        }
    }
}

/// The time, until when the guard is valid from then on, and what it says. In this order, so that
/// a deadline that passes in between does not look like a guard that is held too long.
fn believed(guard: &Guard) -> (Nanos, Nanos, &'static str) {
    let at = now();
    let valid_until = at + nanos(guard.valid_for());
    let state = match guard.state() {
        State::Held => "held",
        State::Uncertain => "uncertain",
        State::Lost(_) => "lost",
    };
    (at, valid_until, state)
}

/// A snapshot of a register, and its counter.
type Snapshot = (usize, u64);

/// A connection to the registers of the harness.
#[derive(Debug)]
struct RegisterClient {
    port: u16,
    stream: Option<BufStream<TcpStream>>,
}

impl RegisterClient {
    fn new(port: u16) -> Self {
        Self { port, stream: None }
    }

    async fn read(
        &mut self,
        register: Register,
        name: &str,
        token: u64,
    ) -> Result<Snapshot, Outcome> {
        let register = word(register);
        let reply = self.ask(&format!("read {register} {name} {token}\n")).await;
        let reply = reply.map_err(|_| Outcome::Rejected)?;
        let mut words = reply.split_whitespace();
        match (words.next(), words.next(), words.next()) {
            (Some("ok"), Some(snapshot), Some(counter)) => {
                Ok((snapshot.parse().unwrap(), counter.parse().unwrap()))
            }
            _ => Err(Outcome::Rejected),
        }
    }

    async fn write(
        &mut self,
        register: Register,
        name: &str,
        token: u64,
        (snapshot, counter): Snapshot,
        value: &str,
    ) -> Outcome {
        let (register, counter) = (word(register), counter + 1);
        let request = format!("write {register} {name} {token} {snapshot} {counter} {value}\n");
        match self.ask(&request).await.as_deref().map(str::trim) {
            Ok("ok") => Outcome::Acknowledged,
            Ok(_) => Outcome::Rejected,
            Err(_) => Outcome::Unknown,
        }
    }

    async fn ask(&mut self, request: &str) -> std::io::Result<String> {
        let mut stream = match self.stream.take() {
            Some(stream) => stream,
            None => {
                let stream = TcpStream::connect(("127.0.0.1", self.port)).await?;
                stream.set_nodelay(true)?;
                BufStream::new(stream)
            }
        };
        stream.write_all(request.as_bytes()).await?;
        stream.flush().await?;
        let mut reply = String::new();
        stream.read_line(&mut reply).await?;
        self.stream = Some(stream);
        Ok(reply)
    }
}

fn word(register: Register) -> &'static str {
    match register {
        Register::Plain => "plain",
        Register::Checked => "checked",
        Register::Fenced => "fenced",
    }
}
