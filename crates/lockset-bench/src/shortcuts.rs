//! What each special path of the Redis engine is worth: the same work with and without it.

use std::sync::Arc;
use std::time::Duration;

use lockset::engine::redis::{Redis, RedisOptions, RedisShortcuts};

use crate::cycles::{Variant, on, runtimes};
use crate::measure::{Pace, median, median_ratio, rotated};
use crate::peers::Ours;
use crate::server::Server;
use crate::table::{Table, Target, micros, per_second};

const ROUNDS: usize = 41;
const SLICE: Duration = Duration::from_millis(30);

const ALL: RedisShortcuts = RedisShortcuts { batches: true, fast_paths: true, late_tokens: true };
const NO_BATCHES: RedisShortcuts = RedisShortcuts { batches: false, ..ALL };
const NO_FAST_PATHS: RedisShortcuts = RedisShortcuts { fast_paths: false, ..NO_BATCHES };
const EARLY_TOKENS: RedisShortcuts = RedisShortcuts { late_tokens: false, ..ALL };

/// What is compared: a title, the engine with the path and without it.
type Comparison = (&'static str, RedisShortcuts, RedisShortcuts);

const BATCHES: Comparison = ("batch script", ALL, NO_BATCHES);
/// Without the fast halves there is no batch, because a batch consists of them.
const FAST_PATHS: Comparison = ("fast halves of the scripts", NO_BATCHES, NO_FAST_PATHS);
const LATE_TOKENS: Comparison = ("token stored late", ALL, EARLY_TOKENS);

pub(crate) fn with_and_without(server: &Server, pace: Pace, table: &mut Table) {
    for (work, tasks, names, compared) in [
        ("one task", 1, 1, &[FAST_PATHS, LATE_TOKENS][..]),
        ("64 tasks on 64 names", 64, 64, &[BATCHES, FAST_PATHS, LATE_TOKENS]),
        ("16 tasks on one name", 16, 1, &[FAST_PATHS, LATE_TOKENS]),
    ] {
        let [ct, mt] = &runtimes();
        for (title, runtime) in [("ct", ct), ("mt", mt)] {
            for (path, with, without) in compared {
                let work = format!("{work}, {title}: {path}");
                let pair = [*with, *without].map(|shortcuts| {
                    let workers = runtime.block_on(workers(server, shortcuts, tasks, names));
                    on(runtime, workers)
                });
                compare(server, pace, &work, pair, table);
            }
        }
    }
}

fn compare(server: &Server, pace: Pace, work: &str, mut pair: [Variant<'_>; 2], table: &mut Table) {
    // Connections are made and scripts loaded before the first slice that counts.
    for variant in &mut pair {
        (variant.run)(SLICE / 10);
    }
    for round in 0..pace.rounds(ROUNDS) {
        for place in rotated(2, round) {
            pair[place].slice(server, pace.span(SLICE));
        }
    }
    let [with, without] = &pair;
    let speed = per_second(median(with.per_second.iter().copied()));
    let ratio = median_ratio(&with.per_second, &without.per_second);
    table.add(format!("{work}: speed with / without"), speed, ratio, Target::None);
    let cpu = micros(median(with.server_cpu.iter().copied()));
    let ratio = median_ratio(&with.server_cpu, &without.server_cpu);
    table.add(format!("{work}: server CPU with / without"), cpu, ratio, Target::None);
}

async fn workers(
    server: &Server,
    shortcuts: RedisShortcuts,
    tasks: usize,
    names: usize,
) -> Vec<Ours> {
    let url = server.url().parse().unwrap();
    let options = RedisOptions { url, shortcuts, ..RedisOptions::default() };
    Ours::on(Arc::new(Redis::connect(options).await.unwrap()), tasks, names)
}
