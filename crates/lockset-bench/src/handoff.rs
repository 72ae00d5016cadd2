//! Hand-offs among the tasks of one process: a line of waiters, each served once.

use lockset::Lockset;
use tokio::runtime::{Builder, Runtime};

use crate::bare::Floor;
use crate::child::Child;
use crate::measure::{Pace, median, median_ratio, percentile, rotated};
use crate::peers::{hold_for_python, let_python_go, python};
use crate::server::Server;
use crate::table::{Table, Target, micros};
use crate::turns::{Run, Turns};

const ROUNDS: usize = 9;
const LINES: [usize; 3] = [16, 128, 1024];
/// A short line is drained again and again until there are so many hand-offs in a round that their
/// last hundredth is more than one of them.
const HAND_OFFS: usize = 512;

/// One line of a certain length, over all rounds.
#[derive(Default)]
struct Line {
    floor: Hand,
    ct: Hand,
    mt: Hand,
    python: Hand,
}

/// The percentiles of each round.
#[derive(Default)]
struct Hand {
    half: Vec<f64>,
    late: Vec<f64>,
}

impl Hand {
    fn round(&mut self, waiters: usize, mut drain: impl FnMut(usize) -> Run) {
        let times = HAND_OFFS.div_ceil(waiters);
        self.note((0..times).flat_map(|_| drain(waiters).hand_offs).collect());
    }

    fn note(&mut self, hand_offs: Vec<f64>) {
        self.half.push(median(hand_offs.iter().copied()));
        self.late.push(percentile(hand_offs, 0.99));
    }

    fn half(&self) -> f64 {
        median(self.half.iter().copied())
    }

    fn late(&self) -> f64 {
        median(self.late.iter().copied())
    }
}

pub(crate) fn in_a_process(server: &Server, pace: Pace, table: &mut Table) {
    let ct = Ours::new(server, Builder::new_current_thread().enable_all().build().unwrap());
    let many = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let mt = Ours::new(server, many);
    let (mut python, mut floor) = (python(server), Floor::new(server.port()));
    let mut lines = LINES.map(|_| Line::default());
    for round in 0..pace.rounds(ROUNDS) {
        for (line, waiters) in lines.iter_mut().zip(LINES) {
            for place in rotated(4, round) {
                match place {
                    0 => line.floor.note(floor.hand_offs()),
                    1 => line.ct.round(waiters, |waiters| ct.drain(waiters)),
                    2 => line.mt.round(waiters, |waiters| mt.drain(waiters)),
                    _ => line
                        .python
                        .round(waiters, |waiters| drain_python(server, &mut python, waiters)),
                }
            }
        }
    }
    for (line, waiters) in lines.iter().zip(LINES) {
        tell(line, waiters, table);
    }
    let [few, .., many] = &lines;
    // The issue asks for "flat"; a third more over sixty-four times the waiters is taken for that.
    for (title, many, few) in [("ct", &many.ct, &few.ct), ("mt", &many.mt, &few.mt)] {
        let work = format!("hand-off in a process, {title}: p50 with 1024 / with 16 waiters");
        let ratio = median_ratio(&many.half, &few.half);
        table.add(work, micros(many.half()), ratio, Target::AtMost(1.3));
    }
    for waiters in LINES {
        let count = server.count_commands();
        ct.drain(waiters);
        // The first grant, to the one who holds while the line forms, is one more.
        let ratio = count.finish() as f64 / (waiters + 1) as f64;
        let work = format!("hand-off in a process, {waiters} waiters: commands per grant");
        table.add(work, "counted once", ratio, Target::AtMost(1.1));
    }
}

fn tell(line: &Line, waiters: usize, table: &mut Table) {
    for (title, hand) in [("ct", &line.ct), ("mt", &line.mt)] {
        let work =
            |what: &str| format!("hand-off in a process, {waiters} waiters, {title}: {what}");
        let ratio = median_ratio(&hand.half, &line.floor.half);
        table.add(work("p50 / floor"), micros(hand.half()), ratio, Target::AtMost(2.5));
        let ratio = median_ratio(&hand.late, &line.python.late);
        table.add(
            work("p99 / python-redis-lock's"),
            micros(hand.late()),
            ratio,
            Target::AtMost(0.1),
        );
    }
    let work = |what: &str| format!("(hand-off in a process, {waiters} waiters: {what})");
    let ratio = median_ratio(&line.python.half, &line.floor.half);
    let half = micros(line.python.half());
    table.add(work("python-redis-lock p50 / floor"), half, ratio, Target::None);
    let ratio = median_ratio(&line.floor.late, &line.python.late);
    let late = micros(line.floor.late());
    table.add(work("floor p99 / python-redis-lock's"), late, ratio, Target::None);
}

/// A client of ours on a runtime.
struct Ours {
    runtime: Runtime,
    locks: Lockset,
}

impl Ours {
    fn new(server: &Server, runtime: Runtime) -> Self {
        let locks = runtime.block_on(Lockset::connect(&server.url())).unwrap();
        Self { runtime, locks }
    }

    /// Lets a line form behind a holder, then lets go.
    fn drain(&self, waiters: usize) -> Run {
        self.runtime.block_on(async {
            let mutex = self.locks.mutex("line").unwrap();
            let first = mutex.lock().await.unwrap();
            let turns = Turns::start((0..waiters).map(|_| mutex.clone()), 1).await;
            first.release().await.unwrap();
            Run::new(&[turns.finish().await])
        })
    }
}

fn drain_python(server: &Server, python: &mut Child, waiters: usize) -> Run {
    hold_for_python(server, "line");
    python.tell(&format!("take line {waiters} 1"));
    python.expect("queued");
    server.wait_for_blocked(waiters);
    let_python_go(server, "line");
    python.expect("done");
    Run::new(&[python.stamps()])
}
