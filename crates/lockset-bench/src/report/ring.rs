//! Rounds in which all players have their turn, slice by slice, with what disturbed them.

use std::time::{Duration, Instant};

use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::engines::{Engine, Field};
use super::players::{Player, Role};
use super::samples::{Sample, Samples, Series};
use crate::child::{Child, Silence};
use crate::measure::{Busy, DISTURBED, Pace, cpu_of, rotated};

/// Which cores servers and clients run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Placement {
    OneCore,
    CoreEach,
    Anywhere,
}

impl Placement {
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::OneCore => "all on one core",
            Self::CoreEach => "server and clients on a core each",
            Self::Anywhere => "all cores",
        }
    }

    /// The cores of the servers and those of the clients.
    fn cores(self) -> (Vec<usize>, Vec<usize>) {
        let allowed = sched_getaffinity(None).unwrap();
        let all: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core)).collect();
        // The first core is where most interrupts go.
        let (first, last) = (all[0], all[all.len() - 1]);
        match self {
            Self::OneCore => (vec![last], vec![last]),
            Self::CoreEach => (vec![first], vec![last]),
            Self::Anywhere => (all.clone(), all),
        }
    }
}

/// One engine with its servers, its players, and what was measured so far.
pub(crate) struct Ring<'a> {
    pub(crate) engine: &'a Engine,
    pub(crate) field: &'a dyn Field,
    pub(crate) servers: Vec<u32>,
    pub(crate) players: Vec<Player>,
    pub(crate) samples: Samples,
    pub(crate) pace: Pace,
}

/// The processes of one player.
pub(crate) struct Team {
    pub(crate) player: Player,
    pub(crate) children: Vec<Child>,
}

/// What is measured: the name of the work, where it runs, how large it is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slice {
    pub(crate) work: &'static str,
    pub(crate) placement: Placement,
    /// Added to the placement in the name of the setting.
    pub(crate) more: &'static str,
    pub(crate) size: usize,
}

/// Metrics of one slice.
pub(crate) type Measured = Vec<(&'static str, f64)>;

/// Leases of all players, where nothing else is said.
pub(crate) const TTL_MS: u64 = 20_000;

impl Ring<'_> {
    /// `processes` drivers of each player of these roles; those that cannot be started are noted.
    pub(crate) fn teams(&mut self, processes: usize, ttl: impl Fn(&Player) -> u64) -> Vec<Team> {
        let mut teams = Vec::new();
        for player in self.players.clone() {
            let started = (0..processes).map(|_| player.start(ttl(&player)));
            match started.collect::<Result<Vec<Child>, Silence>>() {
                Ok(children) => teams.push(Team { player, children }),
                Err(why) => self.note(&player.name, "was not started", why),
            }
        }
        teams
    }

    /// All rounds of one slice, interleaved. A player that fails is noted and leaves the teams.
    pub(crate) fn rounds(
        &mut self,
        slice: Slice,
        rounds: usize,
        teams: &mut Vec<Team>,
        mut measure: impl FnMut(&mut Team) -> Result<Measured, Silence>,
    ) {
        self.progress(&slice, teams.len(), rounds);
        let cores = self.place(slice.placement, teams);
        // What is measured once is long, and what it left behind would be measured with it.
        let mut again = if rounds == 1 || self.pace.quick { 0 } else { teams.len() };
        for round in 0..rounds {
            let mut failed = Vec::new();
            for place in rotated(teams.len(), round) {
                let team = &mut teams[place];
                let mut outcome = self.watched(team, &cores, &mut measure);
                // Each player has one slice that is measured again, where others disturbed it.
                let is_disturbed = outcome.as_ref().is_ok_and(|(_, disturbed)| *disturbed);
                if is_disturbed && again > 0 {
                    again -= 1;
                    outcome = self.watched(team, &cores, &mut measure);
                }
                match outcome {
                    Ok((measured, disturbed)) => {
                        let name = team.player.name.clone();
                        self.keep(&slice, &name, round, measured, disturbed);
                    }
                    Err(why) => failed.push((place, why)),
                }
            }
            failed.sort_by_key(|(place, _)| std::cmp::Reverse(*place));
            for (place, why) in failed {
                let team = teams.remove(place);
                self.note(&team.player.name, &format!("left {}", slice.title()), why);
            }
        }
    }

    /// Measures, and says whether others had the cores meanwhile.
    fn watched(
        &self,
        team: &mut Team,
        cores: &[usize],
        measure: &mut impl FnMut(&mut Team) -> Result<Measured, Silence>,
    ) -> Result<(Measured, bool), Silence> {
        let mut pids: Vec<u32> = team.children.iter().map(Child::pid).collect();
        pids.extend(&self.servers);
        pids.push(std::process::id());
        let (busy, own, start) = (Busy::now(cores), cpu_of(&pids), Instant::now());
        let measured = measure(team)?;
        let (own, span) = (cpu_of(&pids) - own, start.elapsed().as_secs_f64());
        let others = Busy::now(cores).others(busy, own, span, cores.len());
        Ok((measured, others > DISTURBED))
    }

    pub(crate) fn keep(
        &mut self,
        slice: &Slice,
        player: &str,
        round: usize,
        measured: Measured,
        disturbed: bool,
    ) {
        for (metric, value) in measured {
            let series = Series {
                work: slice.work.to_owned(),
                setting: slice.setting(),
                size: slice.size as u64,
                player: player.to_owned(),
                metric: metric.to_owned(),
            };
            self.samples.all.push(Sample { series, round, value, disturbed });
        }
    }

    pub(crate) fn note(&mut self, player: &str, what: &str, why: Silence) {
        let why = match why {
            Silence::Ended => "its driver ended",
            Silence::TooLong => "it took too long",
        };
        let note = format!("{player} {what}: {why}");
        eprintln!("  {note}");
        if !self.samples.notes.contains(&note) {
            self.samples.notes.push(note);
        }
    }

    fn progress(&self, slice: &Slice, players: usize, rounds: usize) {
        let (engine, title) = (self.engine.name, slice.title());
        eprintln!("{engine}: {title}, {players} players, {rounds} rounds");
    }

    /// Puts everything where it belongs; answers which cores are used.
    pub(crate) fn place(&self, placement: Placement, teams: &[Team]) -> Vec<usize> {
        let (server, client) = placement.cores();
        self.servers.iter().for_each(|pid| pin(*pid, &server));
        let children = teams.iter().flat_map(|team| &team.children);
        children.for_each(|child| pin(child.pid(), &client));
        let mut used = [server, client].concat();
        used.sort_unstable();
        used.dedup();
        used
    }
}

impl Slice {
    pub(crate) fn setting(&self) -> String {
        format!("{}{}", self.placement.title(), self.more)
    }

    fn title(&self) -> String {
        format!("{} {} ({})", self.work, self.size, self.setting())
    }
}

impl Team {
    pub(crate) fn hands_off(&self, engine: &Engine) -> bool {
        self.player.role != Role::Floor || engine.floor.hands_off
    }

    /// Tells the first process, and awaits this answer; answers what comes behind it.
    pub(crate) fn ask(
        &mut self,
        order: &str,
        answer: &str,
        limit: Duration,
    ) -> Result<String, Silence> {
        ask(&mut self.children[0], order, answer, limit)
    }
}

pub(crate) fn ask(
    child: &mut Child,
    order: &str,
    answer: &str,
    limit: Duration,
) -> Result<String, Silence> {
    child.tell(order);
    let line = child.answer_by(Instant::now() + limit)?;
    line.strip_prefix(answer).map(|rest| rest.trim().to_owned()).ok_or(Silence::Ended)
}

/// Leaves all threads of a process these cores; threads that it starts later inherit them.
fn pin(pid: u32, cores: &[usize]) {
    let mut set = CpuSet::new();
    cores.iter().for_each(|core| set.set(*core));
    // Twice, for threads that were started while the first list was gone through.
    for _ in 0..2 {
        let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten();
        for thread in threads.flatten() {
            let number = thread.file_name().to_string_lossy().parse().ok();
            // A thread that has ended needs no core.
            let _ =
                number.and_then(Pid::from_raw).map(|thread| sched_setaffinity(Some(thread), &set));
        }
    }
}
