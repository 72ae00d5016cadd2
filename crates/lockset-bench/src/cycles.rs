//! Lock and release without contention: one task, and 64 tasks on 64 names.

use std::time::{Duration, Instant};

use tokio::runtime::Runtime;

use crate::bare::Raw;
use crate::measure::{Pace, median, median_ratio, rotated};
use crate::peers::{ByHand, Ours, Rslock, Worker};
use crate::server::Server;
use crate::table::{Table, Target, micros, per_second};

const ROUNDS: usize = 21;
const SLICE: Duration = Duration::from_millis(30);
const TASKS: usize = 64;

/// Something that does cycles for about as long as it is told, and says how many.
pub(crate) struct Variant<'a> {
    pub(crate) run: Box<dyn FnMut(Duration) -> u64 + 'a>,
    pub(crate) per_second: Vec<f64>,
    pub(crate) server_cpu: Vec<f64>,
}

/// The variants on one runtime.
struct OnRuntime<'a> {
    title: &'static str,
    ours: Variant<'a>,
    by_hand: Variant<'a>,
    rslock: Variant<'a>,
}

impl<'a> OnRuntime<'a> {
    fn new(title: &'static str, server: &Server, runtime: &'a Runtime, tasks: usize) -> Self {
        let (ours, by_hand, rslock) = runtime.block_on(async {
            let ours = Ours::workers(server, tasks).await;
            (ours, ByHand::workers(server, tasks).await, Rslock::workers(server, tasks).await)
        });
        let (ours, by_hand) = (on(runtime, ours), on(runtime, by_hand));
        Self { title, ours, by_hand, rslock: on(runtime, rslock) }
    }
}

/// One task on one name. The bare socket's target is for the faster of the two runtimes, and so are
/// the peers' targets, which run on the same.
pub(crate) fn one_task(server: &Server, pace: Pace, table: &mut Table) {
    let runtimes = runtimes();
    let (raw, [ct, mt]) = measure(server, pace, &runtimes, 1);
    let to_raw = |one: &OnRuntime<'_>| median_ratio(&one.ours.per_second, &raw.per_second);
    let ct_is_faster = to_raw(&ct) >= to_raw(&mt);
    for (one, is_faster) in [(&ct, ct_is_faster), (&mt, !ct_is_faster)] {
        let target = |least| if is_faster { Target::AtLeast(least) } else { Target::None };
        let work = |what: &str| format!("one task, {}: speed / {what}", one.title);
        let (ours, speed) = (&one.ours.per_second, speed(&one.ours));
        table.add(work("raw"), &speed, to_raw(one), target(0.5));
        let ratio = median_ratio(ours, &one.by_hand.per_second);
        table.add(work("redis-rs by hand"), &speed, ratio, target(0.8));
        let ratio = median_ratio(ours, &one.rslock.per_second);
        table.add(work("rslock"), &speed, ratio, target(1.0));
    }
    record_peers(&raw, [&ct, &mt], "one task", table);
}

pub(crate) fn many_tasks(server: &Server, pace: Pace, table: &mut Table) {
    let runtimes = runtimes();
    let (raw, [ct, mt]) = measure(server, pace, &runtimes, TASKS);
    for (one, least) in [(&ct, 0.7), (&mt, 0.48)] {
        let work = |what: &str| format!("64 tasks, {}: {what}", one.title);
        let (ours, speed) = (&one.ours.per_second, speed(&one.ours));
        let ratio = median_ratio(ours, &raw.per_second);
        table.add(work("speed / raw"), &speed, ratio, Target::AtLeast(least));
        let ratio = median_ratio(ours, &one.by_hand.per_second);
        table.add(work("speed / redis-rs by hand"), &speed, ratio, Target::None);
        let ratio = median_ratio(ours, &one.rslock.per_second);
        table.add(work("speed / rslock"), &speed, ratio, Target::None);
        let ratio = median_ratio(&one.ours.server_cpu, &raw.server_cpu);
        let cpu = micros(median(one.ours.server_cpu.iter().copied()));
        table.add(work("server CPU per cycle / raw"), cpu, ratio, Target::AtMost(1.2));
    }
    record_peers(&raw, [&ct, &mt], "64 tasks", table);
}

/// How far the peers are from the bare socket.
fn record_peers(raw: &Variant<'_>, both: [&OnRuntime<'_>; 2], work: &str, table: &mut Table) {
    for one in both {
        for (peer, name) in [(&one.by_hand, "redis-rs by hand"), (&one.rslock, "rslock")] {
            let ratio = median_ratio(&peer.per_second, &raw.per_second);
            let work = format!("({work}, {}: {name} / raw)", one.title);
            table.add(work, speed(peer), ratio, Target::None);
        }
    }
}

fn speed(variant: &Variant<'_>) -> String {
    per_second(median(variant.per_second.iter().copied()))
}

pub(crate) fn runtimes() -> [Runtime; 2] {
    use tokio::runtime::Builder;

    let many = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    [Builder::new_current_thread().enable_all().build().unwrap(), many]
}

/// All variants, after all their rounds.
fn measure<'a>(
    server: &'a Server,
    pace: Pace,
    [ct, mt]: &'a [Runtime; 2],
    tasks: usize,
) -> (Variant<'a>, [OnRuntime<'a>; 2]) {
    let mut bare = Raw::new(server.port(), tasks as u64);
    let mut raw = Variant::new(move |span| bare.cycles(span));
    let mut ct = OnRuntime::new("current_thread", server, ct, tasks);
    let mut mt = OnRuntime::new("multi_thread(2)", server, mt, tasks);
    let mut all = vec![&mut raw];
    for one in [&mut ct, &mut mt] {
        all.extend([&mut one.ours, &mut one.by_hand, &mut one.rslock]);
    }
    // Connections are made and scripts loaded before the first slice that counts.
    for variant in &mut all {
        (variant.run)(SLICE / 10);
    }
    for round in 0..pace.rounds(ROUNDS) {
        for place in rotated(all.len(), round) {
            all[place].slice(server, pace.span(SLICE));
        }
    }
    (raw, [ct, mt])
}

impl<'a> Variant<'a> {
    fn new(run: impl FnMut(Duration) -> u64 + 'a) -> Self {
        Self { run: Box::new(run), per_second: Vec::new(), server_cpu: Vec::new() }
    }

    pub(crate) fn slice(&mut self, server: &Server, span: Duration) {
        let (cpu, start) = (server.cpu(), Instant::now());
        let cycles = (self.run)(span) as f64;
        self.per_second.push(cycles / start.elapsed().as_secs_f64());
        self.server_cpu.push((server.cpu() - cpu) / cycles);
    }
}

/// Each worker in a task of its own on this runtime.
pub(crate) fn on<'a, W: Worker>(runtime: &'a Runtime, mut workers: Vec<W>) -> Variant<'a> {
    Variant::new(move |span| {
        let until = Instant::now() + span;
        runtime.block_on(async {
            let tasks: Vec<_> =
                workers.drain(..).map(|worker| tokio::spawn(work(worker, until))).collect();
            let mut cycles = 0;
            for task in tasks {
                let (worker, count) = task.await.unwrap();
                workers.push(worker);
                cycles += count;
            }
            cycles
        })
    })
}

async fn work<W: Worker>(mut worker: W, until: Instant) -> (W, u64) {
    let mut cycles = 0;
    while Instant::now() < until {
        worker.cycle().await;
        cycles += 1;
    }
    (worker, cycles)
}
