//! What waiters cost the server while nothing happens: 1,000 of them in 10 processes.

use std::time::{Duration, Instant};

use lockset::{Guard, Lockset};

use crate::child::Child;
use crate::measure::Pace;
use crate::server::{Server, wait_until};
use crate::table::{Table, Target, per_second};

const PROCESSES: usize = 10;
const EACH: usize = 100;
const SPAN: Duration = Duration::from_secs(15);

pub(crate) fn waiters(server: &Server, pace: Pace, table: &mut Table) {
    // Tasks of one process that wait for one name stand in one line and cost the server one place;
    // on a hundred names, each has a place of its own. The holder is one process both times.
    for (names, title) in [(1, "on one name"), (EACH, "on 100 names, each queued at the server")] {
        let rate = commands_per_second(server, pace, names);
        let work = format!("idle waiters, 1,000 in 10 processes {title}: commands per second");
        table.add(work, per_second(rate), rate, Target::AtMost(150.0));
    }
}

fn commands_per_second(server: &Server, pace: Pace, names: usize) -> f64 {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let locks = runtime.block_on(Lockset::connect(&server.url())).unwrap();
    let name = |number| format!("idle-{names}/{number}");
    let held: Vec<Guard> = (0..names)
        .map(|number| runtime.block_on(locks.mutex(name(number)).unwrap().lock()).unwrap())
        .collect();
    let mut children: Vec<Child> = (0..PROCESSES).map(|_| Child::ourselves(server)).collect();
    for child in &mut children {
        child.tell(&format!("wait idle-{names} {names} {}", EACH / names));
        child.expect("queued");
    }
    for number in 0..names {
        wait_until("all have queued at the server", || {
            let state = runtime.block_on(locks.inspect(name(number))).unwrap();
            state.waiters.len() == PROCESSES
        });
    }
    let (count, start) = (server.count_commands(), Instant::now());
    std::thread::sleep(pace.span(SPAN));
    let rate = count.finish() as f64 / start.elapsed().as_secs_f64();
    assert!(held.iter().all(|guard| guard.state() == lockset::State::Held));
    drop(children);
    rate
}
