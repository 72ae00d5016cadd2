//! What every player is made to do.

use std::time::{Duration, Instant};

use super::players::{Player, Role};
use super::ring::{Measured, Placement, Ring, Slice, TTL_MS, Team, ask};
use crate::child::{Child, Silence};
use crate::measure::{jain, memory_of, now, percentile};
use crate::turns::Stamp;

const ROUNDS: usize = 5;
const TASKS: &[usize] = &[1, 16, 64, 256];
const FEW_TASKS: &[usize] = &[1, 64];
const LINES: &[usize] = &[16, 128, 1024];
const SHORT_LINES: &[usize] = &[16, 128];
const PROCESSES: usize = 4;
/// How long a driver may take for one order.
const LIMIT: Duration = Duration::from_secs(45);
/// A lease that outlasts any measurement, for those who do not renew.
const FOR_GOOD_MS: u64 = 900_000;

pub(crate) const UNCONTENDED: &str = "uncontended";
pub(crate) const DRAIN: &str = "drain";
pub(crate) const FAIRNESS: &str = "fairness";
pub(crate) const WAITING: &str = "waiting";
pub(crate) const HOLDING: &str = "holding";
pub(crate) const RECOVERY: &str = "recovery";
pub(crate) const FROZEN: &str = "one node frozen";

/// The percentiles by which the distribution of hand-offs is drawn.
pub(crate) const PERCENTILES: [(&str, f64); 7] = [
    ("p10", 0.1),
    ("p25", 0.25),
    ("p50", 0.5),
    ("p75", 0.75),
    ("p90", 0.9),
    ("p99", 0.99),
    ("p99.9", 0.999),
];

/// A work, by the name by which it is asked for.
pub(crate) struct Work {
    pub(crate) name: &'static str,
    pub(crate) measure: fn(&mut Ring<'_>),
}

pub(crate) const WORKS: &[Work] = &[
    Work { name: UNCONTENDED, measure: uncontended },
    Work { name: DRAIN, measure: drain },
    Work { name: FAIRNESS, measure: fairness },
    Work { name: WAITING, measure: waiting },
    Work { name: HOLDING, measure: holding },
    Work { name: RECOVERY, measure: recovery },
    Work { name: FROZEN, measure: frozen },
];

/// Lock and release by a number of tasks, each on a name of its own.
fn uncontended(ring: &mut Ring<'_>) {
    let mut teams = ring.teams(1, |_| TTL_MS);
    let sizes = if ring.pace.quick { FEW_TASKS } else { TASKS };
    // Those with a compiler at run time get some time for it.
    let span = if ring.pace.quick { 30 } else { 1_000 };
    warm_up(ring, &mut teams, (16, span));
    for placement in [Placement::OneCore, Placement::CoreEach] {
        for size in sizes {
            let slice = Slice { work: UNCONTENDED, placement, more: "", size: *size };
            cycles(ring, slice, &mut teams);
        }
    }
}

fn cycles(ring: &mut Ring<'_>, slice: Slice, teams: &mut Vec<Team>) {
    let span = ring.pace.span(Duration::from_millis(300)).as_millis();
    // Connections are made and scripts loaded before the first slice that counts.
    ring.place(slice.placement, teams);
    warm_up(ring, teams, (slice.size, 30));
    let (servers, rounds) = (ring.servers.clone(), ring.pace.rounds(ROUNDS));
    ring.rounds(slice, rounds, teams, |team| {
        let (server, client) = cpu(&servers, team);
        let (count, nanos) = one_cycles(team, slice.size, span as u64)?;
        let (server, client) = {
            let (later_server, later_client) = cpu(&servers, team);
            (later_server - server, later_client - client)
        };
        Ok(vec![
            ("per_second", count / nanos * 1e9),
            ("client_cpu", client / count),
            ("server_cpu", server / count),
        ])
    });
}

/// Cycles that do not count. A player that does not answer leaves, or its late answer would be
/// taken for that to a later order.
fn warm_up(ring: &mut Ring<'_>, teams: &mut Vec<Team>, (tasks, millis): (usize, u64)) {
    teams.retain_mut(|team| match one_cycles(team, tasks, millis) {
        Ok(_) => true,
        Err(why) => {
            ring.note(&team.player.name, &format!("left before {tasks} tasks"), why);
            false
        }
    });
}

fn one_cycles(team: &mut Team, tasks: usize, millis: u64) -> Result<(f64, f64), Silence> {
    let order = format!("cycles {}-cycle {tasks} {millis}", team.prefix());
    let answer = team.ask(&order, "cycles", LIMIT)?;
    let numbers: Vec<f64> = answer.split(' ').filter_map(|word| word.parse().ok()).collect();
    match numbers[..] {
        [count, nanos] if count > 0.0 => Ok((count, nanos)),
        _ => Err(Silence::Ended),
    }
}

/// A line of waiters behind a holder, each served once.
fn drain(ring: &mut Ring<'_>) {
    let over: &[(usize, &str)] = match ring.engine.crosses_processes {
        true => &[(1, "; one process"), (PROCESSES, "; four processes")],
        false => &[(1, "; one process")],
    };
    let sizes = if ring.pace.quick { SHORT_LINES } else { LINES };
    for (processes, more) in over {
        let mut teams = ring.teams(*processes, lease);
        teams.retain(|team| team.hands_off(ring.engine));
        // A bare hand-off has two sides, wherever they are.
        let floors = teams.iter_mut().filter(|team| team.player.role == Role::Floor);
        floors.for_each(|team| team.children.truncate(1));
        for placement in [Placement::OneCore, Placement::CoreEach] {
            for size in sizes {
                let slice = Slice { work: DRAIN, placement, more, size: *size };
                let (servers, rounds) = (ring.servers.clone(), ring.pace.rounds(ROUNDS));
                ring.rounds(slice, rounds, &mut teams, |team| {
                    let (server, client) = cpu(&servers, team);
                    let stamps = one_drain(team, *size)?;
                    let after = cpu(&servers, team);
                    Ok(of_drain(&stamps, after.0 - server, after.1 - client))
                });
            }
        }
        for size in sizes {
            let slice = Slice { work: DRAIN, placement: Placement::Anywhere, more, size: *size };
            commands_per_grant(ring, slice, &mut teams);
        }
    }
}

/// Counted, not timed, because counting costs the server something.
fn commands_per_grant(ring: &mut Ring<'_>, slice: Slice, teams: &mut Vec<Team>) {
    let field = ring.field;
    if field.count_requests().is_none() {
        return;
    }
    // The floor has no line whose commands could be counted.
    teams.retain(|team| team.player.role != Role::Floor);
    ring.rounds(slice, 1, teams, |team| {
        let count = field.count_requests();
        let grants = one_drain(team, slice.size)?.len() as f64;
        Ok(count.map(|count| ("requests", count() / grants)).into_iter().collect())
    });
}

fn one_drain(team: &mut Team, waiters: usize) -> Result<Vec<Stamp>, Silence> {
    let name = format!("{}-line", team.prefix());
    team.ask(&format!("hold {name} 1"), "held", LIMIT)?;
    let each = waiters / team.children.len();
    for child in &mut team.children {
        ask(child, &format!("take {name}/0 {each} 1"), "queued", LIMIT)?;
    }
    // Those who have begun are in line soon; no protocol tells it of every peer.
    std::thread::sleep(Duration::from_millis(50) + Duration::from_micros(400) * waiters as u32);
    let limit = Instant::now() + LIMIT;
    team.children[0].tell("free");
    for child in &mut team.children {
        let answer = child.answer_by(limit)?;
        assert_eq!(answer, "done", "a driver answers in order");
    }
    let mut stamps = Vec::new();
    for child in &mut team.children {
        stamps.extend(child.try_stamps()?);
    }
    stamps.sort_by_key(|stamp| stamp.granted);
    Ok(stamps)
}

fn of_drain(stamps: &[Stamp], server: f64, client: f64) -> Measured {
    let grants = stamps.len() as f64;
    let took = stamps[stamps.len() - 1].granted - stamps[0].granted;
    let gap = |pair: &[Stamp]| pair[1].granted.saturating_sub(pair[0].released) as f64 / 1e9;
    let hand_offs: Vec<f64> = stamps.windows(2).map(gap).collect();
    let overlaps = stamps.windows(2).filter(|pair| pair[1].granted < pair[0].released).count();
    let mut measured = vec![
        ("per_second", (grants - 1.0) / (took as f64 / 1e9)),
        ("server_cpu", server / grants),
        ("client_cpu", client / grants),
        ("overlaps", overlaps as f64),
    ];
    let percentiles = PERCENTILES.iter();
    measured.extend(
        percentiles.map(|(name, part)| (*name, percentile(hand_offs.iter().copied(), *part))),
    );
    measured
}

/// Tasks of several processes that take one lock again and again.
fn fairness(ring: &mut Ring<'_>) {
    const EACH: usize = 4;
    let processes = if ring.engine.crosses_processes { PROCESSES } else { 1 };
    let span = if ring.pace.quick { 1_000 } else { 10_000 };
    let mut teams = ring.teams(processes, lease);
    teams.retain(|team| team.player.role != Role::Floor);
    let size = processes * EACH;
    let slice = Slice { work: FAIRNESS, placement: Placement::Anywhere, more: "", size };
    let mut shares = Vec::new();
    ring.rounds(slice, 1, &mut teams, |team| {
        let order = format!("contend {}-fair {EACH} {span}", team.prefix());
        team.children.iter_mut().for_each(|child| child.tell(&order));
        let (start, mut counts) = (Instant::now(), Vec::new());
        for child in &mut team.children {
            let answer = child.answer_by(start + LIMIT)?;
            let numbers = answer.trim_start_matches("counts ").split(' ');
            counts.extend(numbers.filter_map(|number| number.parse::<f64>().ok()));
        }
        let grants = counts.iter().sum::<f64>() / start.elapsed().as_secs_f64();
        counts.sort_by(|a, b| b.total_cmp(a));
        let index = jain(&counts);
        shares.push((team.player.name.clone(), counts));
        Ok(vec![("jain", index), ("per_second", grants)])
    });
    for (player, counts) in shares {
        // The round is the rank of a task.
        for (rank, count) in counts.into_iter().enumerate() {
            ring.keep(&slice, &player, rank + 1, vec![("grants", count)], false);
        }
    }
}

/// What waiters cost while nothing happens: 10, 100, 1,000 of them in ten processes, on as many
/// names as a process has waiters.
fn waiting(ring: &mut Ring<'_>) {
    const WAITERS: usize = 10;
    if !ring.engine.crosses_processes {
        return;
    }
    let sizes: &[usize] = if ring.pace.quick { &[1, 10] } else { &[1, 10, 100] };
    let span = ring.pace.span(Duration::from_secs(6));
    // One player after the other: eleven processes each are enough.
    for player in ring.players.clone().into_iter().filter(|one| one.role != Role::Floor) {
        let started =
            (0..=WAITERS).map(|_| player.start(lease(&player))).collect::<Result<Vec<_>, _>>();
        let Ok(children) = started else {
            ring.note(&player.name, "was not started", Silence::Ended);
            continue;
        };
        let mut team = vec![Team { player, children }];
        ring.field.clear();
        let mut before = 0;
        for each in sizes {
            let slice = Slice {
                work: WAITING,
                placement: Placement::Anywhere,
                more: "",
                size: each * WAITERS,
            };
            let (field, servers) = (ring.field, ring.servers.clone());
            let new = each - before;
            ring.rounds(slice, 1, &mut team, |team| {
                let pids: Vec<u32> = team.children[1..].iter().map(Child::pid).collect();
                let memory = (memory_of(&pids), field.memory());
                queue(team, new, *each)?;
                // Until all have settled.
                std::thread::sleep(span / 2);
                let added = (new * WAITERS) as f64;
                let mut measured = idle(field, &servers, team, span);
                measured.push(("client_bytes", (memory_of(&pids) - memory.0) / added));
                if let (Some(before), Some(after)) = (memory.1, field.memory()) {
                    measured.push(("server_bytes", (after - before) / added));
                }
                Ok(measured)
            });
            before = *each;
        }
    }
}

/// Lets one process hold `names` more names, and each of the others wait for all of them.
fn queue(team: &mut Team, names: usize, total: usize) -> Result<(), Silence> {
    let prefix = format!("{}-idle-{total}", team.prefix());
    team.ask(&format!("hold {prefix} {names}"), "held", LIMIT)?;
    for child in &mut team.children[1..] {
        ask(child, &format!("wait {prefix} {names} 1"), "queued", LIMIT)?;
    }
    Ok(())
}

/// Requests and processor time per second while nothing is asked of a team.
fn idle(
    field: &dyn super::engines::Field,
    servers: &[u32],
    team: &mut Team,
    span: Duration,
) -> Measured {
    let ((server, client), received) = (cpu(servers, team), field.received());
    let start = Instant::now();
    std::thread::sleep(span);
    let seconds = start.elapsed().as_secs_f64();
    let after = cpu(servers, team);
    let received = field.received().zip(received).map(|(after, before)| after - before);
    let mut measured = vec![
        ("server_cpu", (after.0 - server) / seconds),
        ("client_cpu", (after.1 - client) / seconds),
    ];
    measured.extend(received.map(|bytes| ("received", bytes / seconds)));
    // After that, because counting costs the server something.
    if let Some(count) = field.count_requests() {
        let start = Instant::now();
        std::thread::sleep(span);
        measured.push(("requests", count() / start.elapsed().as_secs_f64()));
    }
    measured
}

/// What held locks cost: time to take them, memory on both sides, what keeps them alive.
fn holding(ring: &mut Ring<'_>) {
    let sizes: &[usize] = if ring.pace.quick { &[10, 100] } else { &[100, 1_000, 10_000] };
    // A third of the ttl, in which each lock is renewed once.
    let span = ring.pace.span(Duration::from_millis(TTL_MS / 3 + 1_500));
    for size in sizes {
        // One player after the other, so that nothing is held while others are measured.
        for player in ring.players.clone().into_iter().filter(|one| one.role != Role::Floor) {
            let Ok(child) = player.start(lease(&player)) else {
                ring.note(&player.name, "was not started", Silence::Ended);
                continue;
            };
            let mut team = vec![Team { player, children: vec![child] }];
            hold(ring, *size, span, &mut team);
        }
    }
}

fn hold(ring: &mut Ring<'_>, size: usize, span: Duration, team: &mut Vec<Team>) {
    let slice = Slice { work: HOLDING, placement: Placement::Anywhere, more: "", size };
    let (field, servers) = (ring.field, ring.servers.clone());
    ring.rounds(slice, 1, team, |team| {
        let pids = [team.children[0].pid()];
        let _ = one_cycles(team, 16, 30)?;
        field.clear();
        let (memory, server) = (memory_of(&pids), field.memory());
        let start = Instant::now();
        let order = format!("hold {}-held-{size} {size}", team.prefix());
        team.ask(&order, "held", LIMIT * 2)?;
        let (took, count) = (start.elapsed().as_secs_f64(), size as f64);
        let mut measured =
            vec![("take", took / count), ("client_bytes", (memory_of(&pids) - memory) / count)];
        if let (Some(before), Some(after)) = (server, field.memory()) {
            measured.push(("server_bytes", (after - before) / count));
        }
        measured.extend(idle(field, &servers, team, span));
        Ok(measured)
    });
}

/// From the death of a holder to the next grant. All players wait side by side.
fn recovery(ring: &mut Ring<'_>) {
    const LEASE_MS: u64 = 5_000;
    if !ring.engine.crosses_processes {
        return;
    }
    for round in 0..if ring.pace.quick { 1 } else { ROUNDS } {
        let mut teams = ring.teams(2, |_| LEASE_MS);
        teams.retain(|team| team.player.role != Role::Floor);
        let size = LEASE_MS as usize / 1000;
        let slice = Slice { work: RECOVERY, placement: Placement::Anywhere, more: "", size };
        ring.place(slice.placement, &teams);
        eprintln!("{}: recovery, round {}", ring.engine.name, round + 1);
        for team in &mut teams {
            let name = format!("{}-lost-{round}", team.prefix());
            let held = team.ask(&format!("hold {name} 1"), "held", LIMIT);
            let order = format!("take {name}/0 1 1");
            let queued = held.and_then(|_| ask(&mut team.children[1], &order, "queued", LIMIT));
            if let Err(why) = queued {
                ring.note(&team.player.name, "left recovery", why);
            }
        }
        std::thread::sleep(Duration::from_millis(500));
        let killed: Vec<u64> = teams
            .iter_mut()
            .map(|team| {
                team.children[0].kill();
                now()
            })
            .collect();
        let limit = Instant::now() + LIMIT;
        for (team, killed) in teams.iter_mut().zip(killed) {
            let done = team.children[1].answer_by(limit);
            match done.and_then(|_| team.children[1].try_stamps()) {
                Ok(stamps) if !stamps.is_empty() => {
                    let seconds = stamps[0].granted.saturating_sub(killed) as f64 / 1e9;
                    let name = team.player.name.clone();
                    ring.keep(&slice, &name, round, vec![("seconds", seconds)], false);
                }
                Ok(_) => ring.note(&team.player.name, "left recovery", Silence::Ended),
                Err(why) => ring.note(&team.player.name, "left recovery", why),
            }
        }
    }
}

/// The uncontended work again, while one of several servers does not answer.
fn frozen(ring: &mut Ring<'_>) {
    let field = ring.field;
    if !field.freeze_one(false) {
        return;
    }
    let mut teams = ring.teams(1, |_| TTL_MS);
    teams.retain(|team| team.player.role != Role::Floor);
    warm_up(ring, &mut teams, (1, 100));
    field.freeze_one(true);
    // Until those who notice it have noticed it.
    warm_up(ring, &mut teams, (1, 1_000));
    for size in [1, 64] {
        let placement = Placement::Anywhere;
        cycles(ring, Slice { work: FROZEN, placement, more: "", size }, &mut teams);
    }
    field.freeze_one(false);
}

/// Long enough for all that is held here.
fn lease(player: &Player) -> u64 {
    if player.renews { TTL_MS } else { FOR_GOOD_MS }
}

fn cpu(servers: &[u32], team: &Team) -> (f64, f64) {
    let pids: Vec<u32> = team.children.iter().map(Child::pid).collect();
    (crate::measure::cpu_of(servers), crate::measure::cpu_of(&pids))
}

impl Team {
    /// Names of its own, because some libraries use a name as the key.
    fn prefix(&self) -> String {
        self.player.name.replace([':', ' ', '\''], "-").to_lowercase()
    }
}
