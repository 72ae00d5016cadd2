//! Hand-offs among processes: every waiter queues again after its turn, so the lock goes round.

use lockset::Lockset;
use tokio::runtime::{Builder, Runtime};

use crate::bare::Floor;
use crate::child::Child;
use crate::measure::{Pace, median, median_ratio, rotated};
use crate::peers::{hold_for_python, let_python_go, python};
use crate::server::{Server, wait_until};
use crate::table::{Table, Target, micros, per_second};
use crate::turns::Run;

const ROUNDS: usize = 9;
const PROCESSES: usize = 4;
const GRANTS: usize = 1024;
const NAME: &str = "ball";

pub(crate) fn hand_off(server: &Server, pace: Pace, table: &mut Table) {
    let mut ours = Ours::new(server);
    let mut pythons: Vec<Child> = (0..PROCESSES).map(|_| python(server)).collect();
    let mut floor = Floor::new(server.port());
    for waiters in [16, 128] {
        let (mut halves, mut floors, mut shares) = (Vec::new(), Vec::new(), Vec::new());
        let (mut rates, mut python_rates) = (Vec::new(), Vec::new());
        for round in 0..pace.rounds(ROUNDS) {
            for place in rotated(3, round) {
                match place {
                    0 => floors.push(floor.measure()),
                    1 => {
                        let run = ours.run(waiters);
                        halves.push(median(run.hand_offs));
                        shares.push(run.share);
                        rates.push(run.per_second);
                    }
                    _ => python_rates.push(python_run(server, &mut pythons, waiters).per_second),
                }
            }
        }
        let work = |what: &str| format!("hand-off over 4 processes, {waiters} waiters: {what}");
        let half = micros(median(halves.iter().copied()));
        let ratio = median_ratio(&halves, &floors);
        table.add(work("p50 / floor"), half, ratio, Target::AtMost(8.0));
        let (rate, ratio) = (median(rates.iter().copied()), median_ratio(&rates, &python_rates));
        let work_of_python = work("grants per second / python-redis-lock's");
        table.add(work_of_python, per_second(rate), ratio, Target::AtLeast(4.0));
        let crossed = work("part of the hand-offs that left the process");
        table.add(format!("({crossed})"), "only they count above", median(shares), Target::None);
    }
}

pub(crate) fn commands_per_grant(server: &Server, _: Pace, table: &mut Table) {
    let mut ours = Ours::new(server);
    let count = server.count_commands();
    ours.run(128);
    let ratio = count.finish() as f64 / GRANTS as f64;
    let work = "commands per grant while 128 wait in 4 processes";
    table.add(work, "counted once", ratio, Target::AtMost(2.1));
}

/// Four processes of our own, and a client in this one that holds the lock until all are in line.
struct Ours {
    runtime: Runtime,
    locks: Lockset,
    children: Vec<Child>,
}

impl Ours {
    fn new(server: &Server) -> Self {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let locks = runtime.block_on(Lockset::connect(&server.url())).unwrap();
        let children = (0..PROCESSES).map(|_| Child::ourselves(server)).collect();
        Self { runtime, locks, children }
    }

    fn run(&mut self, waiters: usize) -> Run {
        let mutex = self.locks.mutex(NAME).unwrap();
        let first = self.runtime.block_on(mutex.lock()).unwrap();
        start(&mut self.children, waiters);
        // One of each process queues at the server, on behalf of all.
        wait_until("every process queues", || {
            let state = self.runtime.block_on(self.locks.inspect(NAME)).unwrap();
            state.waiters.len() >= PROCESSES
        });
        self.runtime.block_on(first.release()).unwrap();
        finish(&mut self.children)
    }
}

fn python_run(server: &Server, pythons: &mut [Child], waiters: usize) -> Run {
    hold_for_python(server, NAME);
    start(pythons, waiters);
    server.wait_for_blocked(waiters);
    let_python_go(server, NAME);
    finish(pythons)
}

fn start(children: &mut [Child], waiters: usize) {
    let order = format!("take {NAME} {} {}", waiters / PROCESSES, GRANTS / waiters);
    children.iter_mut().for_each(|child| child.tell(&order));
    children.iter_mut().for_each(|child| child.expect("queued"));
}

/// No process prints anything before all are done: printing takes time from the others.
fn finish(children: &mut [Child]) -> Run {
    children.iter_mut().for_each(|child| child.expect("done"));
    let stamps: Vec<_> = children.iter_mut().map(Child::stamps).collect();
    Run::new(&stamps)
}
