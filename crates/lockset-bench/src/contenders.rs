//! What a hand-off and a cancelled wait cost the server when 10,000 wait, and when 1,000 do.
//!
//! Through the engine, not through a `Mutex`: the waiters of one process would otherwise stand in
//! line in the process, and the server would know of one.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

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
/// How many leave the queue in one slice: few, so that it often falls between two heartbeats.
const LEAVERS: usize = 20;
/// So many at a time join the queue, so that no request waits too long for its answer.
const JOINERS: usize = 500;
/// How many slices are tried until one is undisturbed.
const TRIES: usize = 500;

pub(crate) fn hand_off_and_cancel(server: &Server, pace: Pace, table: &mut Table) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let options =
            RedisOptions { url: server.url().parse().unwrap(), ..RedisOptions::default() };
        let engine: Arc<dyn Engine> = Arc::new(Redis::connect(options).await.unwrap());
        let mut groups =
            [Contenders::gather(&engine, FEW).await, Contenders::gather(&engine, MANY).await];
        for round in 0..pace.rounds(ROUNDS) {
            for place in rotated(groups.len(), round) {
                groups[place].round(server).await;
            }
        }
        let at_rest = at_rest(server, pace).await;
        let [few, many] = &groups;
        let mut tell = |what: &str, few: &[f64], many: &[f64]| {
            let work = format!("10,000 waiters: server CPU per {what} / with 1,000");
            let cpu = micros(median(many.iter().copied()));
            table.add(work, cpu, median_ratio(many, few), Target::AtMost(1.3));
        };
        tell("hand-off", &few.hand_off, &many.hand_off);
        tell("cancel", &few.cancel, &many.cancel);
        let work = "(10,000 and 1,000 waiters at rest: share of the server's core)";
        table.add(work, format!("{:.1} %", at_rest * 100.0), at_rest, Target::None);
    });
}

/// The part of a core that the server needs for the heartbeats, which the slices leave out.
async fn at_rest(server: &Server, pace: Pace) -> f64 {
    let (before, start) = (server.cpu(), Instant::now());
    // A few times the span between two heartbeats of the same waiter.
    tokio::time::sleep(pace.span(Duration::from_secs(15))).await;
    (server.cpu() - before) / start.elapsed().as_secs_f64()
}

/// Many who wait for one name.
struct Contenders {
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

impl Contenders {
    async fn gather(engine: &Arc<dyn Engine>, size: usize) -> Self {
        let claim = Claim {
            id: ClaimId::random(),
            name: format!("contenders/{size}").parse().unwrap(),
            mode: Mode::Exclusive,
            ttl: Duration::from_secs(30),
            fixed: false,
            floor: None,
            note: Note::default(),
            detachable: false,
            replicas: None,
        };
        let grant = engine.acquire(&claim, Wait::No).await.unwrap().granted().unwrap();
        let (grants, granted) = mpsc::unbounded_channel();
        let mut contenders = Self {
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
        contenders.fill().await;
        contenders
    }

    async fn round(&mut self, server: &Server) {
        let hand_off = self.undisturbed(server, false).await;
        self.hand_off.push(hand_off);
        let cancel = self.undisturbed(server, true).await;
        self.cancel.push(cancel);
    }

    /// The server's time for one hand-off or cancel, from a slice into which no sign of life fell:
    /// these come by the thousand here, and would be taken for a part of it.
    async fn undisturbed(&mut self, server: &Server, cancel: bool) -> f64 {
        for _ in 0..TRIES {
            self.fill().await;
            let leavers: Vec<ClaimId> = self.waiting.keys().copied().take(LEAVERS).collect();
            let (calls, before) = (server.script_calls(), server.cpu());
            for id in leavers {
                if cancel { self.cancel(id).await } else { self.hand_over().await }
            }
            let took = server.cpu() - before;
            // Each is one call of a script.
            if server.script_calls() - calls == LEAVERS as u64 {
                return took / LEAVERS as f64;
            }
        }
        panic!("in each of {TRIES} slices there was more than the {LEAVERS} calls that were made");
    }

    /// In the order of a hash map, which is none: from anywhere in the queue, that is.
    async fn cancel(&mut self, id: ClaimId) {
        let (claim, task) = self.waiting.remove(&id).unwrap();
        task.abort();
        self.engine.withdraw(&claim).await.unwrap();
    }

    async fn hand_over(&mut self) {
        let (claim, grant) = &self.holder;
        self.engine.release(claim, grant, None).await.unwrap();
        let next = self.granted.recv().await.unwrap();
        self.waiting.remove(&next.0.id).unwrap();
        self.holder = next;
    }

    /// Lets others join when a twentieth has left, and renews the lease of the holder: there is no
    /// keeper here.
    async fn fill(&mut self) {
        if self.waiting.len() > self.size * 19 / 20 {
            return self.renew().await;
        }
        while self.waiting.len() < self.size {
            for _ in 0..JOINERS.min(self.size - self.waiting.len()) {
                self.join();
            }
            while self.queued().await < self.waiting.len() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        self.renew().await;
    }

    async fn renew(&mut self) {
        let (claim, grant) = &self.holder;
        let renewed = self.engine.renew(&[(claim, grant)]).await.remove(0);
        self.holder.1 = renewed.unwrap().renewed().unwrap();
    }

    fn join(&mut self) {
        let claim = Claim { id: ClaimId::random(), ..self.claim.clone() };
        let (engine, grants, mine) = (self.engine.clone(), self.grants.clone(), claim.clone());
        let task = tokio::spawn(async move {
            let grant = engine.acquire(&mine, Wait::Forever).await.unwrap().granted().unwrap();
            let _ = grants.send((mine, grant));
        });
        self.waiting.insert(claim.id, (claim, task.abort_handle()));
    }

    async fn queued(&self) -> usize {
        self.engine.inspect(&self.claim.name).await.unwrap().waiters.len()
    }
}
