//! The report: Lockset, a floor and the peers in the same rounds, on every engine.
//!
//! Every player is a driver in a process of its own and speaks one protocol (`peers/README.md`), so
//! that all are measured alike. `bench/results/ENGINE.csv` has every sample of the last run with an
//! engine; the page and its plots are made from these files.

mod engines;
mod page;
mod players;
mod ring;
mod samples;
mod works;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use engines::{ENGINES, Engine};
use players::{PEERS, Player};
use ring::Ring;
use samples::Samples;
use works::WORKS;

use crate::measure::Pace;
use crate::server::allow_many_files;

pub(crate) const USAGE: &str =
    "report [--quick] [--engine NAME]… [--peer NAME | --peer none]… [--out FOLDER] [works…]

engines: memory, local, redis, redlock, etcd, zookeeper
works: uncontended, drain, fairness, waiting, holding, recovery, one node frozen";

/// What was asked for.
#[derive(Debug)]
struct Order<'a> {
    quick: bool,
    engines: Vec<&'a str>,
    peers: Vec<&'a str>,
    out: PathBuf,
    works: Vec<&'a str>,
}

impl<'a> Order<'a> {
    fn read(args: &[&'a str]) -> Result<Self, String> {
        let out = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench");
        let (engines, peers, works) = (Vec::new(), Vec::new(), Vec::new());
        let mut order = Self { quick: false, engines, peers, out, works };
        let mut rest = args.iter();
        while let Some(arg) = rest.next() {
            let mut value = || rest.next().copied().ok_or(format!("{arg} needs a value"));
            match *arg {
                "--quick" => order.quick = true,
                "--engine" => order.engines.push(value()?),
                "--peer" => order.peers.push(value()?),
                "--out" => order.out = value()?.into(),
                other if other.starts_with('-') => return Err(format!("no option {other}")),
                work => order.works.push(work),
            }
        }
        let unknown =
            order.engines.iter().find(|name| ENGINES.iter().all(|one| one.name != **name));
        match unknown {
            Some(name) => Err(format!("no engine {name}")),
            None => Ok(order),
        }
    }

    /// Whether nothing else was asked for, or this too.
    fn wants(asked: &[&str], name: &str) -> bool {
        asked.is_empty() || asked.contains(&"all") || asked.contains(&name)
    }
}

pub(crate) fn run(args: &[&str]) -> ExitCode {
    let order = match Order::read(args) {
        Ok(order) => order,
        Err(why) => {
            eprintln!("{why}\n\n{USAGE}");
            return ExitCode::FAILURE;
        }
    };
    allow_many_files();
    let results = order.out.join("results");
    std::fs::create_dir_all(&results).unwrap();
    for engine in ENGINES.iter().filter(|one| Order::wants(&order.engines, one.name)) {
        let file = results.join(format!("{}.csv", engine.name));
        let samples = measure(engine, &order, &file);
        std::fs::write(&file, samples.to_csv()).unwrap();
    }
    page::write(&order.out).unwrap();
    eprintln!("written: {}", order.out.join("REPORT.md").display());
    ExitCode::SUCCESS
}

/// Writes the page again, from the results that are there.
pub(crate) fn write_page(args: &[&str]) -> ExitCode {
    let Ok(order) = Order::read(args) else { return ExitCode::FAILURE };
    page::write(&order.out).unwrap();
    ExitCode::SUCCESS
}

fn measure(engine: &Engine, order: &Order<'_>, file: &Path) -> Samples {
    eprintln!("{}: starting", engine.name);
    let before = children_of_this_process();
    let field = (engine.start)();
    let servers =
        children_of_this_process().into_iter().filter(|pid| !before.contains(pid)).collect();
    let mut samples = Samples::default();
    let players = players_of(engine, &*field, order, &mut samples);
    describe(&mut samples, order, field.version(), &players);
    let pace = Pace { quick: order.quick };
    let mut ring = Ring { engine, field: &*field, servers, players, samples, pace };
    for work in WORKS.iter().filter(|work| Order::wants(&order.works, work.name)) {
        (work.measure)(&mut ring);
        // What was measured is kept even if a later work fails.
        std::fs::write(file, ring.samples.to_csv()).unwrap();
    }
    ring.samples.fact("ended", date());
    ring.samples
}

fn players_of(
    engine: &Engine,
    field: &dyn engines::Field,
    order: &Order<'_>,
    samples: &mut Samples,
) -> Vec<Player> {
    let floor = &engine.floor;
    let mut players =
        vec![Player::ours(field.url()), Player::floor(floor.title, floor.driver, field.address())];
    for name in engine.peers.iter().filter(|name| Order::wants(&order.peers, name)) {
        let peer = PEERS.iter().find(|peer| peer.name == *name).expect("a peer is in the list");
        match Player::peer(peer, field.address()) {
            Some(player) => players.push(player),
            None => samples.notes.push(format!(
                "{name} is not installed: `cargo xtask bench --engine {} --peer {name}` installs it",
                engine.name
            )),
        }
    }
    players
}

/// The machine, the versions, the date.
fn describe(samples: &mut Samples, order: &Order<'_>, server: String, players: &[Player]) {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpu.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    samples.fact("began", date());
    let model = model.map_or("unknown", |(_, model)| model);
    samples.fact("machine", format!("{model}, {cores} cores, Linux {}", kernel.trim()));
    let build = if cfg!(debug_assertions) { "unoptimised" } else { "release" };
    samples.fact("build", format!("{build}, {}", first_line("rustc", &["--version"])));
    samples.fact("commit", first_line("git", &["rev-parse", "--short", "HEAD"]));
    samples.fact("load before", load.split(' ').next().unwrap_or_default());
    let pace = if order.quick { "quick: three short rounds" } else { "full" };
    samples.fact("pace", pace);
    samples.fact("server", server);
    let versions: Vec<String> = players
        .iter()
        .filter_map(|player| {
            let child = player.start(ring::TTL_MS).ok()?;
            Some(format!("{} {}", player.name, child.version()))
        })
        .collect();
    samples.fact("players", versions.join("; "));
}

fn date() -> String {
    first_line("date", &["-u", "+%Y-%m-%d %H:%M UTC"])
}

fn first_line(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    text.unwrap_or_default().lines().next().unwrap_or("unknown").to_owned()
}

/// The processes that this one has started and that still run.
fn children_of_this_process() -> Vec<u32> {
    let own = std::process::id().to_string();
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    processes
        .filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse::<u32>().ok()?;
            let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
            let (_, rest) = stat.rsplit_once(')')?;
            let mut words = rest.split_whitespace();
            (words.nth(1)? == own).then_some(pid)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_read() {
        let order = Order::read(&["--quick", "--engine", "redis", "drain", "--peer", "none"]);
        let order = order.unwrap();
        assert!(order.quick && order.engines == ["redis"] && order.works == ["drain"]);
        assert!(!Order::wants(&order.peers, "rslock") && Order::wants(&[], "rslock"));
        assert!(Order::read(&["--engine", "mysql"]).is_err());
        assert!(Order::read(&["--fast"]).is_err());
    }

    #[test]
    fn every_peer_is_measured_on_some_engine_and_every_engine_knows_its_peers() {
        for peer in PEERS {
            assert!(ENGINES.iter().any(|engine| engine.peers.contains(&peer.name)));
        }
        for name in ENGINES.iter().flat_map(|engine| engine.peers) {
            assert!(PEERS.iter().any(|peer| peer.name == *name), "{name}");
        }
    }
}
