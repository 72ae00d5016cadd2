//! The memory engine on virtual time.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use lockset::Lockset;
use lockset::clock::Clock;
use lockset::engine::Engine;
use lockset::engine::memory::Memory;

use super::{LinkedClient, Stage, Time};
use crate::layer::{Freezable, FreezeSwitch, Layered};
use crate::process::Process;

type EngineWrapper = Arc<dyn Fn(Arc<dyn Engine>) -> Arc<dyn Engine> + Send + Sync>;

/// The memory engine, or a mutant of it.
pub struct MemoryStage {
    memory: Mutex<Memory>,
    clock: Clock,
    switch: FreezeSwitch,
    time: Time,
    ttl: Duration,
    wrapper: EngineWrapper,
    outer_wrapper: EngineWrapper,
    simulated_processes: bool,
}

impl std::fmt::Debug for MemoryStage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryStage").field("home", &self.memory).finish_non_exhaustive()
    }
}

impl MemoryStage {
    /// An empty memory engine on tokio's clock.
    pub fn start() -> Self {
        let clock = Clock::tokio();
        Self {
            memory: Mutex::new(Memory::new(clock.clone())),
            clock,
            switch: FreezeSwitch::default(),
            time: Time::Virtual,
            ttl: Duration::from_secs(10),
            wrapper: Arc::new(|engine| engine),
            outer_wrapper: Arc::new(|engine| engine),
            simulated_processes: false,
        }
    }

    /// Wraps the engine of every client.
    pub fn wrapped<F>(mut self, wrapper: F) -> Self
    where
        F: Fn(Arc<dyn Engine>) -> Arc<dyn Engine> + Send + Sync + 'static,
    {
        self.wrapper = Arc::new(wrapper);
        self
    }

    /// Wraps the engine of every client outside of the freeze: the wrapper sees a frozen engine as
    /// one that does not respond.
    pub fn wrapped_outside_freeze<F>(mut self, wrapper: F) -> Self
    where
        F: Fn(Arc<dyn Engine>) -> Arc<dyn Engine> + Send + Sync + 'static,
    {
        self.outer_wrapper = Arc::new(wrapper);
        self
    }

    /// Provides simulated processes and connections: clients inside this process that can be cut
    /// off as if they had crashed, or as if their connection had been cut. For mutants; the real
    /// memory engine has neither.
    pub fn with_simulated_processes(mut self) -> Self {
        self.simulated_processes = true;
        self
    }

    /// Runs in real time with tokio's clock: the keeper then runs on the user's runtime, which is a
    /// fault.
    pub fn in_real_time(mut self, ttl: Duration) -> Self {
        (self.time, self.ttl) = (Time::Real, ttl);
        self
    }

    fn engine_with(&self, switch: &FreezeSwitch) -> Arc<dyn Engine> {
        let client = self.memory.lock().unwrap().another_client();
        let wrapped = (self.wrapper)(Arc::new(client));
        (self.outer_wrapper)(Arc::new(Layered(Freezable {
            inner: wrapped,
            switch: switch.clone(),
        })))
    }
}

#[async_trait]
impl Stage for MemoryStage {
    fn time(&self) -> Time {
        self.time
    }

    fn clock(&self) -> Clock {
        self.clock.clone()
    }

    fn ttl(&self) -> Duration {
        self.ttl
    }

    async fn client(&self) -> Lockset {
        Lockset::with_engine(self.engine().await).unwrap()
    }

    async fn engine(&self) -> Arc<dyn Engine> {
        self.engine_with(&self.switch)
    }

    async fn other_backend(&self) -> Lockset {
        let memory = Memory::new(self.clock());
        Lockset::with_engine((self.wrapper)(Arc::new(memory))).unwrap()
    }

    async fn freeze(&self) {
        self.switch.freeze();
    }

    async fn thaw(&self) {
        self.switch.thaw();
    }

    async fn restart(&self) {
        // Memory is lost; only mutants that claim to be durable get here.
        *self.memory.lock().unwrap() = Memory::new(self.clock());
    }

    async fn process(&self) -> Option<Process> {
        let crash = FreezeSwitch::default();
        self.simulated_processes.then(|| {
            let locks = Lockset::with_engine(self.engine_with(&crash)).unwrap();
            Process::simulated(locks, crash)
        })
    }

    async fn linked_client(&self) -> Option<LinkedClient> {
        let switch = FreezeSwitch::default();
        self.simulated_processes.then(|| {
            let locks = Lockset::with_engine(self.engine_with(&switch)).unwrap();
            LinkedClient { locks, link: Box::new(switch) }
        })
    }
}
