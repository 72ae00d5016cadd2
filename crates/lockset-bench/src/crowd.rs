//! What a hand-off and a cancelled wait cost the server when 10,000 wait, and when 1,000 do.
//!
//! Through the engine, not through a `Mutex`: the waiters of one process would otherwise stand in
//! line in the process, and the server would know of one.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use lockset::Note;
use lockset::engine::redis::{Redis, RedisOptions};
use lockset::engine::{Claim, ClaimId, Engine, Grant, Mode, Wait};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use crate::measure::{Pace, median, median_ratio, rotated};
use crate::server::Server;
use crate::table::{Table, Target, micros};

const ROUNDS: usize = 11;
const FEW: usize = 1_000;
const MANY: usize = 10_000;
/// How many leave the queue in one slice.
const LEAVERS: usize = 100;
/// So many at a time join the queue, so that no request waits too long for its answer.
const JOINERS: usize = 500;

pub(crate) fn hand_off_and_cancel(server: &Server, pace: Pace, table: &mut Table) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let options = RedisOptions { url: server.url(), ..RedisOptions::default() };
        let engine: Arc<dyn Engine> = Arc::new(Redis::connect(options).await.unwrap());
        let mut crowds = [Crowd::gather(&engine, FEW).await, Crowd::gather(&engine, MANY).await];
        for round in 0..pace.rounds(ROUNDS) {
            for place in rotated(crowds.len(), round) {
                crowds[place].round(server).await;
            }
        }
        let [few, many] = &crowds;
        let mut tell = |what: &str, few: &[f64], many: &[f64]| {
            let work = format!("10,000 waiters: server CPU per {what} / with 1,000");
            let cpu = micros(median(many.iter().copied()));
            table.add(work, cpu, median_ratio(many, few), Target::AtMost(1.3));
        };
        tell("hand-off", &few.hand_off, &many.hand_off);
        tell("cancel", &few.cancel, &many.cancel);
    });
}

/// Many who wait for one name.
struct Crowd {
    engine: Arc<dyn Engine>,
    claim: Claim,
    size: usize,
    holder: (Claim, Grant),
    waiting: HashMap<ClaimId, (Claim, AbortHandle)>,
    granted: mpsc::UnboundedReceiver<(Claim, Grant)>,
    grants: mpsc::UnboundedSender<(Claim, Grant)>,
    /// Seconds of the server's time, of each round.
    hand_off: Vec<f64>,
    cancel: Vec<f64>,
}

impl Crowd {
    async fn gather(engine: &Arc<dyn Engine>, size: usize) -> Self {
        let claim = Claim {
            id: ClaimId::random(),
            name: format!("crowd/{size}").parse().unwrap(),
            mode: Mode::Exclusive,
            ttl: Duration::from_secs(30),
            fixed: false,
            floor: None,
            note: Note::default(),
            detachable: false,
        };
        let grant = engine.acquire(&claim, Wait::No).await.unwrap().unwrap();
        let (grants, granted) = mpsc::unbounded_channel();
        let mut crowd = Self {
            engine: engine.clone(),
            holder: (claim.clone(), grant),
            claim,
            size,
            waiting: HashMap::new(),
            granted,
            grants,
            hand_off: Vec::new(),
            cancel: Vec::new(),
        };
        crowd.fill().await;
        crowd
    }

    async fn round(&mut self, server: &Server) {
        let before = server.cpu();
        for _ in 0..LEAVERS {
            self.hand_over().await;
        }
        self.hand_off.push((server.cpu() - before) / LEAVERS as f64);
        self.fill().await;
        // In the order of a hash map, which is none: from the middle of the queue, that is.
        let leavers: Vec<ClaimId> = self.waiting.keys().copied().take(LEAVERS).collect();
        let before = server.cpu();
        for id in leavers {
            let (claim, task) = self.waiting.remove(&id).unwrap();
            task.abort();
            self.engine.withdraw(&claim).await.unwrap();
        }
        self.cancel.push((server.cpu() - before) / LEAVERS as f64);
        self.fill().await;
    }

    async fn hand_over(&mut self) {
        let (claim, grant) = &self.holder;
        self.engine.release(claim, grant, None).await.unwrap();
        let next = self.granted.recv().await.unwrap();
        self.waiting.remove(&next.0.id).unwrap();
        self.holder = next;
    }

    /// Lets others join until the queue has its size, and renews the lease of the holder, which
    /// nobody else does here.
    async fn fill(&mut self) {
        while self.waiting.len() < self.size {
            for _ in 0..JOINERS.min(self.size - self.waiting.len()) {
                self.join();
            }
            while self.queued().await < self.waiting.len() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        let (claim, grant) = &self.holder;
        let renewed = self.engine.renew(&[(claim, grant)]).await.remove(0);
        self.holder.1 = renewed.unwrap();
    }

    fn join(&mut self) {
        let claim = Claim { id: ClaimId::random(), ..self.claim.clone() };
        let (engine, grants, mine) = (self.engine.clone(), self.grants.clone(), claim.clone());
        let task = tokio::spawn(async move {
            let grant = engine.acquire(&mine, Wait::Forever).await.unwrap().unwrap();
            let _ = grants.send((mine, grant));
        });
        self.waiting.insert(claim.id, (claim, task.abort_handle()));
    }

    async fn queued(&self) -> usize {
        self.engine.inspect(&self.claim.name).await.unwrap().waiters.len()
    }
}
