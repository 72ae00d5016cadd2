//! The memory engine on virtual time.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use lockset::Lockset;
use lockset::clock::Clock;
use lockset::engine::Engine;
use lockset::engine::memory::Memory;

use super::{Linked, Stage, Time};
use crate::layer::{Ice, Iced, Layered};
use crate::process::Process;

type Dress = Arc<dyn Fn(Arc<dyn Engine>) -> Arc<dyn Engine> + Send + Sync>;

/// The memory engine, or a mutant dressed as it.
pub struct MemoryStage {
    home: Mutex<Memory>,
    clock: Clock,
    ice: Ice,
    time: Time,
    ttl: Duration,
    dress: Dress,
    outside: Dress,
    stand_ins: bool,
}

impl std::fmt::Debug for MemoryStage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryStage").field("home", &self.home).finish_non_exhaustive()
    }
}

impl MemoryStage {
    /// An empty home on tokio's clock.
    pub fn start() -> Self {
        let clock = Clock::tokio();
        Self {
            home: Mutex::new(Memory::new(clock.clone())),
            clock,
            ice: Ice::default(),
            time: Time::Virtual,
            ttl: Duration::from_secs(10),
            dress: Arc::new(|engine| engine),
            outside: Arc::new(|engine| engine),
            stand_ins: false,
        }
    }

    /// Every client's engine is dressed like this.
    pub fn dressed<F>(mut self, dress: F) -> Self
    where
        F: Fn(Arc<dyn Engine>) -> Arc<dyn Engine> + Send + Sync + 'static,
    {
        self.dress = Arc::new(dress);
        self
    }

    /// Every client's engine is dressed like this on its own side, where a frozen home is silence.
    pub fn dressed_outside<F>(mut self, dress: F) -> Self
    where
        F: Fn(Arc<dyn Engine>) -> Arc<dyn Engine> + Send + Sync + 'static,
    {
        self.outside = Arc::new(dress);
        self
    }

    /// Laws about processes meet stand-ins: clients in this process that can be cut off as if
    /// they had died, or their connection. For mutants; the real engine has neither.
    pub fn with_stand_ins(mut self) -> Self {
        self.stand_ins = true;
        self
    }

    /// Time is not paused, although the clock is tokio's: the keeper then lives on the user's
    /// runtime, as it must not.
    pub fn in_real_time(mut self, ttl: Duration) -> Self {
        (self.time, self.ttl) = (Time::Real, ttl);
        self
    }

    fn engine_with(&self, ice: &Ice) -> Arc<dyn Engine> {
        let client = self.home.lock().unwrap().another_client();
        let dressed = (self.dress)(Arc::new(client));
        (self.outside)(Arc::new(Layered(Iced { inner: dressed, ice: ice.clone() })))
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
        Lockset::with_engine(self.engine().await, self.clock()).unwrap()
    }

    async fn engine(&self) -> Arc<dyn Engine> {
        self.engine_with(&self.ice)
    }

    async fn elsewhere(&self) -> Lockset {
        let home = Memory::new(self.clock());
        Lockset::with_engine((self.dress)(Arc::new(home)), self.clock()).unwrap()
    }

    async fn freeze(&self) {
        self.ice.freeze();
    }

    async fn thaw(&self) {
        self.ice.thaw();
    }

    async fn restart(&self) {
        // Memory forgets; only mutants that claim to be durable come here.
        *self.home.lock().unwrap() = Memory::new(self.clock());
    }

    async fn process(&self) -> Option<Process> {
        let death = Ice::default();
        self.stand_ins.then(|| {
            let locks = Lockset::with_engine(self.engine_with(&death), self.clock()).unwrap();
            Process::stand_in(locks, death)
        })
    }

    async fn linked(&self) -> Option<Linked> {
        let ice = Ice::default();
        self.stand_ins.then(|| {
            let locks = Lockset::with_engine(self.engine_with(&ice), self.clock()).unwrap();
            Linked { locks, link: Box::new(ice) }
        })
    }
}
