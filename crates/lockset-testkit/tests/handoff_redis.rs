//! The model's server and a real one, step by step: the same answers, holder, queue and order of
//! tokens. `LOCKSET_SEED=n` plays one seed again.
//!
//! Nothing here knows how the scripts are called: claims go through the engine, and what came of
//! them is looked at from outside.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lockset::engine::redis::{Redis, RedisOptions};
use lockset::engine::{Admission, Claim, ClaimId, Engine, Grant, Renewal, Wait};
use lockset::{Error, Name, Token};
use lockset_models::handoff_model::{
    self as model, Id, Leases, Reply, Rule, Rules, Script, Server,
};
use lockset_testkit::stage::RedisServer;
use lockset_testkit::steps::claim;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use tokio::task::JoinHandle;

const SEEDS: u64 = 60;
const STEPS: usize = 40;
/// Places live for 5 s, first leases for 10 s.
const TTL: Duration = Duration::from_secs(60);
/// In the model no time passes. A play that took so long is over: the places of the dead are too.
const LONGEST_PLAY: Duration = Duration::from_secs(4);
const PATIENCE: Duration = Duration::from_secs(10);

/// A claim on both sides; its number is its place in the list.
struct Actor {
    claim: Claim,
    engine: usize,
    waiting: Option<JoinHandle<lockset::Result<Admission>>>,
    grant: Option<Grant>,
    token: model::Token,
    withdrawn: bool,
    dead: bool,
}

struct Play {
    server: Arc<RedisServer>,
    /// Which the model keeps.
    rules: Rules,
    /// Locks are left free now and then.
    has_courtesy: bool,
    /// The next release leaves the lock free.
    leaves_free: bool,
    /// Time passed that does not pass in the model.
    is_late: bool,
    name: Name,
    /// Looks on.
    observer: Arc<Redis>,
    engines: Vec<Arc<Redis>>,
    model: Server,
    actors: Vec<Actor>,
    /// The real tokens by the model's.
    tokens: BTreeMap<model::Token, u64>,
    log: Vec<String>,
}

#[tokio::test(flavor = "multi_thread")]
async fn the_server_behaves_like_the_model() {
    compare_all(SEEDS, false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_server_behaves_like_the_model_with_courtesy() {
    compare_all(SEEDS / 2, true).await;
}

async fn compare_all(seeds: u64, has_courtesy: bool) {
    let server = Arc::new(RedisServer::start());
    let chosen: Option<u64> = std::env::var("LOCKSET_SEED").ok().map(|seed| seed.parse().unwrap());
    let seeds = chosen.map_or(0..seeds, |seed| seed..seed + 1);
    let (mut steps, mut whole) = (0, 0);
    for seed in seeds.clone() {
        let nth = play(server.clone(), seed, Rules::ALL, has_courtesy).await;
        (steps, whole) = (steps + nth, whole + u64::from(nth == STEPS));
    }
    println!("{steps} steps compared, {whole} plays to their end");
    assert!(whole * 2 >= seeds.end - seeds.start, "too slow: only {whole} plays were whole");
}

/// A model that leaves out a rule of the scripts is told from the server, so the test above can
/// fail. On one thread, where what a play that fails has to say is kept back.
#[tokio::test]
async fn a_model_without_a_rule_differs_from_the_server() {
    let rules = [
        Rule::HandOverWhenFree,
        Rule::UnreachableKeepsEntry,
        Rule::AcquireIsIdempotent,
        Rule::RenewChecksToken,
        Rule::EndMatchesById,
        Rule::NextChecksTombstone,
        Rule::NextIsIdempotent,
        Rule::WithdrawalLeavesTombstone,
        Rule::LeftFreeStaysFree,
    ];
    for rule in rules {
        let has_courtesy = rule == Rule::LeftFreeStaysFree;
        let server = Arc::new(RedisServer::start());
        let mut seeds = 0..SEEDS;
        let differs = loop {
            let Some(seed) = seeds.next() else { break None };
            let rules = Rules::without(&[rule]);
            if tokio::spawn(play(server.clone(), seed, rules, has_courtesy)).await.is_err() {
                break Some(seed);
            }
        };
        println!("without {rule:?} seed {differs:?} differs");
        assert!(differs.is_some(), "no play shows whether the server keeps {rule:?}");
    }
}

/// Plays one seed; how many steps were compared.
async fn play(server: Arc<RedisServer>, seed: u64, rules: Rules, has_courtesy: bool) -> usize {
    let mut random = SmallRng::seed_from_u64(seed);
    let mut play = Play::new(server, format!("play/{seed}"), rules, has_courtesy).await;
    let began = Instant::now();
    for nth in 0..STEPS {
        play.step(&mut random).await;
        if began.elapsed() > LONGEST_PLAY || play.is_late {
            return nth;
        }
        play.compare(seed).await;
    }
    STEPS
}

/// With courtesy no play is so long that it comes by itself.
async fn connect(server: &RedisServer, has_courtesy: bool) -> Arc<Redis> {
    let courtesy = has_courtesy.then_some(Duration::from_secs(60));
    let options =
        RedisOptions { url: server.url().parse().unwrap(), courtesy, ..RedisOptions::default() };
    Arc::new(Redis::connect(options).await.unwrap())
}

async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, future).await {
        Ok(answer) => answer,
        Err(_) => panic!("not within {PATIENCE:?}: {what}"),
    }
}

impl Play {
    async fn new(server: Arc<RedisServer>, name: String, rules: Rules, has_courtesy: bool) -> Self {
        let mut engines = Vec::new();
        for _ in 0..3 {
            engines.push(connect(&server, has_courtesy).await);
        }
        Self {
            rules,
            has_courtesy,
            leaves_free: false,
            is_late: false,
            name: name.parse().unwrap(),
            observer: connect(&server, has_courtesy).await,
            server,
            engines,
            model: Server::default(),
            actors: Vec::new(),
            tokens: BTreeMap::new(),
            log: Vec::new(),
        }
    }

    async fn step(&mut self, random: &mut SmallRng) {
        let engine = random.random_range(0..self.engines.len());
        let one = random.random_range(0..self.actors.len().max(1));
        let holder = self.model.lock.map(|lock| usize::from(lock.id));
        let holder = holder.filter(|id| !self.actors[*id].dead);
        let wrong = random.random_range(0..4) == 0;
        match random.random_range(0..if self.has_courtesy { 26 } else { 20 }) {
            0..6 => self.wait(engine).await,
            6..8 => self.try_once(engine).await,
            8..11 => self.release(holder.unwrap_or(one), wrong, None).await,
            11..14 => {
                let id = holder.unwrap_or(one);
                let next = self.next_of(id, random);
                self.release(id, false, next).await;
            }
            14..16 => self.withdraw(one).await,
            16 => self.ask_again(one).await,
            17 => self.renew(holder.unwrap_or(one), wrong).await,
            18 => {
                self.lease_ends();
                self.try_once(engine).await;
            }
            19 => self.die(engine).await,
            20..25 => {
                let id = holder.unwrap_or(one);
                let next = self.next_of(id, random).filter(|_| wrong);
                self.leave_free(id, next).await;
            }
            _ => {
                self.free_ends();
                self.try_once(engine).await;
            }
        }
    }

    /// A claim of the same client to follow: a new one, or one that waits or was withdrawn.
    fn next_of(&mut self, id: usize, random: &mut SmallRng) -> Option<Id> {
        let engine = self.actors.get(id)?.engine;
        let known = |actor: &Actor| {
            actor.engine == engine && !actor.dead && (actor.waiting.is_some() || actor.withdrawn)
        };
        let known: Vec<usize> =
            (0..self.actors.len()).filter(|other| known(&self.actors[*other])).collect();
        match random.random_range(0..known.len() * 2 + 2) {
            nth if nth < known.len() => Some(known[nth] as Id),
            _ => Some(self.enter(engine)),
        }
    }

    /// Runs a script of the model; whom it wrote to learns it on the other side too.
    fn script<T>(&mut self, run: impl FnOnce(&mut Script<'_>) -> T) -> (T, Option<Id>) {
        let living = self.actors.iter().enumerate().filter(|(_, actor)| !actor.dead);
        let heard = living.fold(0, |heard, (id, _)| heard | 1 << id);
        let leases = Leases::new(1, 2, 3);
        let mut script = Script::new(&mut self.model, self.rules, leases, heard);
        if std::mem::take(&mut self.leaves_free) {
            script = script.with_courtesy(1);
        }
        let answer = run(&mut script);
        (answer, script.pushed.map(|(id, _)| id))
    }

    fn enter(&mut self, engine: usize) -> Id {
        let claim = claim(self.name.as_str(), TTL);
        let (waiting, grant) = (None, None);
        let (token, withdrawn, dead) = (0, false, false);
        self.actors.push(Actor { claim, engine, waiting, grant, token, withdrawn, dead });
        (self.actors.len() - 1) as Id
    }

    fn actor(&mut self, id: Id) -> &mut Actor {
        &mut self.actors[usize::from(id)]
    }

    fn parts(&self, id: Id) -> (Arc<Redis>, Claim) {
        let actor = &self.actors[usize::from(id)];
        (self.engines[actor.engine].clone(), actor.claim.clone())
    }

    fn spawn(&mut self, id: Id) {
        let (engine, claim) = self.parts(id);
        let waiting = tokio::spawn(async move { engine.acquire(&claim, Wait::Forever).await });
        self.actor(id).waiting = Some(waiting);
    }

    /// It holds on both sides.
    fn holds(&mut self, id: Id, grant: Grant) {
        let token = self.model.lock.filter(|lock| lock.id == id).unwrap().token;
        let actor = self.actor(id);
        (actor.token, actor.grant) = (token, Some(grant));
    }

    /// The waiter that the model wrote to is served.
    async fn served(&mut self, pushed: Option<Id>) {
        let Some(id) = pushed else { return };
        let waiting = self.actor(id).waiting.take().unwrap();
        let grant =
            within("the next waiter is served", waiting).await.unwrap().unwrap().granted().unwrap();
        self.holds(id, grant);
    }

    async fn wait(&mut self, engine: usize) {
        let id = self.enter(engine);
        let (answer, pushed) = self.script(|script| script.acquire(id, true));
        self.log.push(format!("{id} of {engine} waits: {answer:?}"));
        self.spawn(id);
        if matches!(answer, Reply::GrantedNow(_)) {
            return self.served(Some(id)).await;
        }
        assert!(matches!(answer, Reply::Queued { .. }), "{answer:?}");
        self.served(pushed).await;
        self.until_seen(id).await;
    }

    /// Until the server knows that this claim waits.
    async fn until_seen(&self, id: Id) {
        let claim = &self.actors[usize::from(id)].claim;
        let seen = async {
            loop {
                let state = self.observer.inspect(&self.name).await.unwrap();
                if state.waiters.iter().any(|waiter| waiter.claim == claim.id) {
                    return;
                }
            }
        };
        let what = format!("the waiter is seen: {:#?}", self.log);
        within(&what, seen).await;
    }

    async fn try_once(&mut self, engine: usize) {
        let id = self.enter(engine);
        let (answer, pushed) = self.script(|script| script.acquire(id, false));
        self.log.push(format!("{id} of {engine} tries: {answer:?}"));
        let (engine, claim) = self.parts(id);
        let real = within("a try", engine.acquire(&claim, Wait::No)).await.unwrap();
        match (answer, real) {
            (Reply::GrantedNow(_), Admission::Granted(grant)) => self.holds(id, grant),
            (Reply::Busy, Admission::NotInTime) => {}
            (answer, real) => panic!("{answer:?}, but {real:?}: {:#?}", self.log),
        }
        self.served(pushed).await;
    }

    /// A release by a claim that was granted the lock once, whether or not it still holds it.
    async fn release(&mut self, which: usize, wrong_token: bool, next: Option<Id>) {
        let Some((mut grant, mut token)) = self.granted(which) else { return };
        if wrong_token {
            (grant.token, token) = (Token::new(1), model::Token::MAX);
        }
        let id = which as Id;
        let ((released, answer), pushed) =
            self.script(|script| script.end(id, Some(token), false, next));
        self.log.push(format!("{id} ends by {token}, next {next:?}: {released} {answer:?}"));
        let (engine, claim) = self.parts(id);
        let next_claim = next.map(|next| self.parts(next).1);
        let real = within("a release", engine.release(&claim, &grant, next_claim.as_ref())).await;
        match (released, answer, real) {
            (true, Some(Reply::GrantedNow(_)), Ok(Some(grant))) => {
                self.holds(next.unwrap(), grant);
            }
            (true, Some(Reply::Granted(..)), Ok(None)) => self.served(next).await,
            (true, Some(Reply::Queued { .. }), Ok(None)) => {
                if self.actor(next.unwrap()).waiting.is_none() {
                    self.spawn(next.unwrap());
                }
            }
            (true, Some(Reply::Gone), Ok(None)) => {}
            (true, None, Ok(None)) | (false, None, Err(Error::NotHeld { .. })) => {}
            (_, answer, real) => panic!("{answer:?}, but {real:?}: {:#?}", self.log),
        }
        self.served(pushed).await;
    }

    /// The next release leaves the lock free, if there is a peer to leave it to.
    async fn leave_free(&mut self, which: usize, next: Option<Id>) {
        if self.granted(which).is_none() || self.model.free > 0 {
            return;
        }
        self.log.push("hand-offs have run for long".to_owned());
        let key = self.handoffs();
        assert_eq!(self.server.ask(&["SET", &key, "0|9007199254740991"]), "OK");
        self.leaves_free = true;
        self.release(which, false, next).await;
        self.leaves_free = false;
        // No time passes in the model.
        if self.model.free > 0 {
            self.is_late = self.server.ask(&["PEXPIRE", &key, "60000"]) != "1";
        } else {
            self.server.ask(&["DEL", &key]);
        }
    }

    /// The lock was free for long enough. Who comes next hands it on.
    fn free_ends(&mut self) {
        self.log.push("it was left free for long enough".to_owned());
        self.model.free = 0;
        self.server.ask(&["DEL", &self.handoffs()]);
    }

    fn handoffs(&self) -> String {
        format!("{{lockset:{}}}:handoffs", self.name)
    }

    /// What a living claim was granted once.
    fn granted(&self, which: usize) -> Option<(Grant, model::Token)> {
        let actor = self.actors.get(which).filter(|actor| !actor.dead)?;
        Some((actor.grant.clone()?, actor.token))
    }

    async fn withdraw(&mut self, which: usize) {
        if self.actors.get(which).is_none_or(|actor| actor.dead) {
            return;
        }
        let id = which as Id;
        let mark = self.rules.keep(Rule::WithdrawalLeavesTombstone);
        let (_, pushed) = self.script(|script| script.end(id, None, mark, None));
        self.log.push(format!("{id} is withdrawn"));
        let (engine, claim) = self.parts(id);
        within("a withdrawal", engine.withdraw(&claim)).await.unwrap();
        self.actor(id).withdrawn = true;
        if let Some(waiting) = self.actor(id).waiting.take() {
            let outcome = within("the withdrawn claim ends", waiting).await.unwrap();
            assert!(matches!(outcome, Ok(Admission::Forgotten)), "{outcome:?}: {:#?}", self.log);
        }
        self.served(pushed).await;
    }

    /// ACQUIRE once more, of a claim that holds or was withdrawn.
    async fn ask_again(&mut self, which: usize) {
        let id = which as Id;
        let holds = self.model.is_held_by(id);
        let asks = |actor: &&Actor| !actor.dead && (holds || actor.withdrawn);
        if self.actors.get(which).filter(asks).is_none() {
            return;
        }
        let (answer, pushed) = self.script(|script| script.acquire(id, true));
        self.log.push(format!("{id} asks again: {answer:?}"));
        let (engine, claim) = self.parts(id);
        let real = within("a repetition", engine.acquire(&claim, Wait::Forever)).await;
        match (answer, real) {
            (Reply::Granted(..), Ok(Admission::Granted(grant))) => self.holds(id, grant),
            (Reply::Gone, Ok(Admission::Forgotten)) => {}
            (answer, real) => panic!("{answer:?}, but {real:?}: {:#?}", self.log),
        }
        self.served(pushed).await;
    }

    async fn renew(&mut self, which: usize, wrong_token: bool) {
        let Some((mut grant, mut token)) = self.granted(which) else { return };
        if wrong_token {
            (grant.token, token) = (Token::new(1), model::Token::MAX);
        }
        let id = which as Id;
        let (fine, _) = self.script(|script| script.renew(id, token));
        self.log.push(format!("{id} is renewed by {token}: {fine}"));
        let (engine, claim) = self.parts(id);
        let real = within("a renewal", engine.renew(&[(&claim, &grant)])).await.remove(0);
        match (fine, real) {
            (true, Ok(Renewal::Renewed(renewed))) => {
                assert_eq!(renewed.token, grant.token, "{:#?}", self.log);
            }
            (false, Ok(Renewal::Lost(_) | Renewal::LastLease)) => {}
            (fine, real) => panic!("{fine}, but {real:?}: {:#?}", self.log),
        }
    }

    /// A lease that is over is a key that is not there. Who comes next hands the lock on; if a
    /// waiter's heartbeat comes before, it does the same.
    fn lease_ends(&mut self) {
        self.log.push("the lease ends".to_owned());
        self.model.lock = None;
        self.server.ask(&["DEL", &format!("lockset:{}", self.name)]);
    }

    /// A process dies, and the server sees it: its waiters stay, and are passed over.
    async fn die(&mut self, engine: usize) {
        self.log.push(format!("process {engine} dies"));
        let fresh = connect(&self.server, self.has_courtesy).await;
        let standing = self.connections();
        drop(std::mem::replace(&mut self.engines[engine], fresh));
        for actor in self.actors.iter_mut().filter(|actor| actor.engine == engine) {
            actor.dead = true;
            if let Some(waiting) = actor.waiting.take() {
                waiting.abort();
                let _ = waiting.await;
            }
        }
        let gone = async {
            while self.connections() >= standing {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        within("the server sees that a process died", gone).await;
    }

    fn connections(&self) -> usize {
        self.server.listeners()
    }

    /// Holder, queue and tokens are the same on both sides.
    async fn compare(&mut self, seed: u64) {
        let state = self.observer.inspect(&self.name).await.unwrap();
        let number = |claim: ClaimId| {
            self.actors.iter().position(|actor| actor.claim.id == claim).unwrap() as Id
        };
        let holder = state.holders.first().map(|holder| number(holder.claim.unwrap()));
        let queue: Vec<Id> = state.waiters.iter().map(|waiter| number(waiter.claim)).collect();
        let expected = (
            self.model.lock.map(|lock| lock.id),
            self.model.queue.iter().map(|place| place.id).collect::<Vec<_>>(),
        );
        let log = &self.log;
        assert_eq!((holder, queue), expected, "LOCKSET_SEED={seed}: {log:#?}");
        if let Some(lock) = self.model.lock {
            let real = state.holders[0].token.unwrap().get();
            let known = *self.tokens.entry(lock.token).or_insert(real);
            assert_eq!(known, real, "LOCKSET_SEED={seed}: another token: {log:#?}");
            assert!(self.tokens.values().is_sorted_by(|a, b| a < b), "{:?}: {log:#?}", self.tokens);
        }
    }
}

impl Drop for Play {
    fn drop(&mut self) {
        self.actors.iter().filter_map(|actor| actor.waiting.as_ref()).for_each(JoinHandle::abort);
    }
}
