//! One run: servers, client processes, faults, and the judgement of what they recorded.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use lockset::Mode;
use rustix::process::{Pid, Signal};

use crate::backend::{Backend, EngineKind};
use crate::broken::Broken;
use crate::client::{ClientConfig, LockSpec};
use crate::history::{History, Promise, Recorder, Setup, What};
use crate::nemesis;
use crate::oracle::{Verdict, judge};
use crate::peers::Peer;
use crate::register::Registers;
use crate::schedule::{Fault, schedule};

/// What to run.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// The engine.
    pub engine: EngineKind,
    /// The faults; those that the engine cannot have are left out.
    pub faults: Vec<Fault>,
    /// How long, servers' start not counted.
    pub seconds: u64,
    /// How many client processes.
    pub clients: usize,
    /// How many tasks in each of them.
    pub tasks: u64,
    /// The seed of the schedule.
    pub seed: u64,
    /// The ttl of all locks.
    pub ttl: Duration,
    /// The binary of this crate.
    pub program: PathBuf,
    /// Where the history goes; what is there is removed.
    pub folder: PathBuf,
    /// Uses a deliberately broken engine.
    pub broken: Option<Broken>,
    /// Uses a lock of another library, on the servers of the engine.
    pub peer: Option<Peer>,
    /// Tells about progress.
    pub is_shown: bool,
}

impl RunOptions {
    /// What is run by default on this engine.
    pub fn new(engine: EngineKind, program: impl Into<PathBuf>, folder: &Path) -> Self {
        Self {
            engine,
            faults: engine.faults(),
            seconds: 60,
            clients: 5,
            tasks: 2,
            seed: 1,
            ttl: Duration::from_secs(3),
            program: program.into(),
            folder: folder.to_owned(),
            broken: None,
            peer: None,
            is_shown: false,
        }
    }

    /// The faults of the list that the engine can have.
    pub fn possible_faults(&self) -> Vec<Fault> {
        let possible = self.engine.faults();
        self.faults.iter().copied().filter(|fault| possible.contains(fault)).collect()
    }

    fn locks(&self) -> Vec<LockSpec> {
        let lock = |name: &str, mode| LockSpec { name: name.to_owned(), mode };
        let mut locks = vec![lock("m0", Mode::Exclusive), lock("m1", Mode::Exclusive)];
        if self.engine.has_all_modes() && self.peer.is_none() {
            locks.push(lock("r0", Mode::Shared));
            locks.push(lock("s0", Mode::Permits { take: 1, limit: 2 }));
        }
        locks
    }

    fn setup(&self) -> Setup {
        Setup {
            engine: self.peer.map_or(self.engine.name(), Peer::name).to_owned(),
            seed: self.seed,
            ttl_ms: self.ttl.as_millis() as u64,
            names: self.locks().into_iter().map(|lock| lock.name).collect(),
            // What a peer promises is for its documentation to say; overlaps and data are counted.
            promises: match self.peer {
                None => Promise::ALL.to_vec(),
                Some(_) => vec![Promise::Exclusion, Promise::Fence],
            },
            recovery_ms: self.engine.recovery(self.ttl).as_millis() as u64,
        }
    }

    /// When the last fault ends, so that progress can be judged afterwards.
    fn faults_end(&self) -> Duration {
        let tail = 2 * self.ttl + self.engine.recovery(self.ttl) + Duration::from_secs(1);
        Duration::from_secs(self.seconds).saturating_sub(tail)
    }
}

/// What came out.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Everything that happened.
    pub history: History,
    /// The oracle's judgement.
    pub verdict: Verdict,
}

/// Runs it.
///
/// # Errors
/// If a file cannot be written or a process not started.
///
/// # Panics
/// If a server cannot be started.
pub fn run(options: &RunOptions) -> std::io::Result<Outcome> {
    let _ = std::fs::remove_dir_all(&options.folder);
    std::fs::create_dir_all(&options.folder)?;
    let log = Recorder::open("nemesis", &options.folder.join("nemesis.jsonl"))?;
    let registers = Registers::serve()?;
    let backend = options.engine.start(options.clients, options.ttl);
    log.record(What::Setup(options.setup()));
    let clients = Clients::start(options, &*backend, registers.port())?;
    let steps =
        schedule(options.seed, &options.possible_faults(), options.ttl, options.faults_end());
    let began = Instant::now();
    nemesis::execute(&steps, &*backend, &clients, &log, options.is_shown);
    log.record(What::Quiet);
    let quiet = Instant::now();
    // A fault may have lasted longer than planned; progress needs its time in any case.
    let tail = Duration::from_secs(options.seconds) - options.faults_end();
    let end = (began + Duration::from_secs(options.seconds)).max(quiet + tail);
    std::thread::sleep(end.saturating_duration_since(Instant::now()));
    clients.stop(&log);
    registers.contents().into_iter().for_each(|content| log.record(content));
    drop(backend);
    let history = History::read(&options.folder)?;
    let verdict = judge(&history);
    Ok(Outcome { history, verdict })
}

/// The client processes.
#[derive(Debug)]
pub(crate) struct Clients {
    program: Program,
    slots: Mutex<Vec<Slot>>,
}

#[derive(Debug)]
struct Slot {
    config: ClientConfig,
    /// How many processes this client has had.
    generation: u64,
    folder: PathBuf,
    child: Child,
}

impl Clients {
    fn start(options: &RunOptions, backend: &dyn Backend, registers: u16) -> std::io::Result<Self> {
        let mut slots = Vec::new();
        let program = match options.peer {
            None => Program::Ours(options.program.clone()),
            Some(peer) => Program::Theirs(peer),
        };
        for client in 0..options.clients {
            let mut config = ClientConfig {
                process: String::new(),
                url: backend.url(client),
                locks: options.locks(),
                ttl_ms: options.ttl.as_millis() as u64,
                registers,
                file: PathBuf::new(),
                seed: client as u64,
                tasks: options.tasks,
                broken: options.broken,
            };
            let child = spawn(&program, &mut config, &options.folder, client, 1)?;
            let folder = options.folder.clone();
            slots.push(Slot { config, generation: 1, folder, child });
        }
        Ok(Self { program, slots: Mutex::new(slots) })
    }

    /// Which client a number stands for.
    pub(crate) fn pick(&self, pick: u64) -> usize {
        pick as usize % self.slots.lock().unwrap().len()
    }

    /// Stops or resumes a client.
    pub(crate) fn signal(&self, client: usize, signal: Signal) {
        let pid = Pid::from_child(&self.slots.lock().unwrap()[client].child);
        lockset_testkit::signals::send(pid, signal);
    }

    /// Kills a client.
    pub(crate) fn kill(&self, client: usize, log: &Recorder) {
        let slot = &mut self.slots.lock().unwrap()[client];
        log.record(What::Kill { process: slot.config.process.clone() });
        let _ = slot.child.kill();
        let _ = slot.child.wait();
    }

    /// Starts another process of a killed client.
    pub(crate) fn start_again(&self, client: usize) {
        let slot = &mut self.slots.lock().unwrap()[client];
        slot.generation += 1;
        slot.config.seed += 1000;
        let generation = slot.generation;
        let folder = slot.folder.clone();
        let child = spawn(&self.program, &mut slot.config, &folder, client, generation);
        slot.child = child.expect("a client can be started");
    }

    /// Ends all clients, and kills those that do not end within some seconds.
    fn stop(&self, log: &Recorder) {
        let mut slots = self.slots.lock().unwrap();
        slots.iter_mut().for_each(|slot| drop(slot.child.stdin.take()));
        let limit = Instant::now() + Duration::from_secs(4);
        for slot in slots.iter_mut() {
            while Instant::now() < limit && matches!(slot.child.try_wait(), Ok(None)) {
                std::thread::sleep(Duration::from_millis(20));
            }
            if matches!(slot.child.try_wait(), Ok(None)) {
                log.record(What::Kill { process: slot.config.process.clone() });
                let _ = slot.child.kill();
                let _ = slot.child.wait();
            }
        }
    }
}

impl Drop for Clients {
    fn drop(&mut self) {
        for slot in self.slots.lock().unwrap().iter_mut() {
            let _ = slot.child.kill();
            let _ = slot.child.wait();
        }
    }
}

/// What a client process runs.
#[derive(Debug)]
enum Program {
    Ours(PathBuf),
    Theirs(Peer),
}

impl Program {
    fn command(&self) -> Command {
        match self {
            Program::Theirs(peer) => peer.command(),
            Program::Ours(path) => {
                let mut command = Command::new(path);
                command.arg("client");
                command
            }
        }
    }
}

fn spawn(
    program: &Program,
    config: &mut ClientConfig,
    folder: &Path,
    client: usize,
    generation: u64,
) -> std::io::Result<Child> {
    config.process = format!("c{client}.{generation}");
    config.file = folder.join(format!("{}.jsonl", config.process));
    let words = serde_json::to_string(&config)?;
    let errors = std::fs::File::create(folder.join(format!("{}.stderr", config.process)))?;
    program.command().arg(words).stdin(Stdio::piped()).stderr(errors).spawn()
}
