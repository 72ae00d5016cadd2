//! `cargo xtask torture`: breaks real servers under real clients, and judges what happened.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a tool that talks to a person")]

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use lockset_torture::backend::EngineKind;
use lockset_torture::history::History;
use lockset_torture::load::LoadOptions;
use lockset_torture::peers::Peer;
use lockset_torture::run::{Outcome, RunOptions, run};
use lockset_torture::summary::Summary;
use lockset_torture::{client, edn, load, oracle, report, timeline};

const USAGE: &str = "usage: cargo xtask torture [options] | load [options] | judge FOLDER | report

  --engine NAME    local, redis, sentinel, cluster, redlock, zookeeper (zk), etcd or all  [all]
  --faults LIST    names separated by commas, or all                                      [all]
  --seconds N      how long each engine is run                                            [60]
  --clients C      client processes                                                       [5]
  --tasks T        tasks in each client                                                   [2]
  --seed S         decides the schedule of faults                                         [1]
  --ttl MS         the ttl of all locks, in milliseconds                                  [3000]
  --broken NAME    random-token, no-deadline (redis) or minority-quorum (redlock)
  --peers LIST     locks of other libraries instead of ours, or all: redis-py, kazoo, redsync,
                   rueidislock, go-etcd; installed by pip and go below target/torture-peers
  --export edn     also write the history in Jepsen's format

  load             many tasks on many names, and what they leave behind; --engine redis,etcd,
                   --seconds 60, --tasks 1000, --names 10000
  judge FOLDER     judge the history in this folder again
  report           write docs/torture.md from all runs below target/torture";

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let outcome = match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["client", config] => {
            let config = serde_json::from_str(config).map_err(|error| error.to_string());
            config.map(|config| {
                client::run(config);
                true
            })
        }
        ["judge", folder] => judge_again(Path::new(folder)),
        ["report"] => write_page(),
        ["load", ..] => load_all(&words[1..]),
        _ => torture(&words),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(why) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
    }
}

/// Whether the oracle found nothing; or why there is no answer.
type Answer = Result<bool, String>;

fn torture(words: &[String]) -> Answer {
    let mut engines = EngineKind::ALL.to_vec();
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut options = RunOptions::new(EngineKind::Local, program, Path::new(""));
    let mut faults = None;
    let mut export = false;
    let mut peers: Vec<Peer> = Vec::new();
    let mut pairs = words.iter();
    while let Some(key) = pairs.next() {
        let value = pairs.next().ok_or(USAGE)?;
        let number = || value.parse::<u64>().map_err(|_| format!("{key} {value}: not a number"));
        match key.as_str() {
            "--engine" if value == "all" => {}
            "--engine" => engines = list(value)?,
            "--faults" if value == "all" => {}
            "--faults" => faults = Some(list(value)?),
            "--seconds" => options.seconds = number()?,
            "--clients" => options.clients = number()? as usize,
            "--tasks" => options.tasks = number()?,
            "--seed" => options.seed = number()?,
            "--ttl" => options.ttl = Duration::from_millis(number()?),
            "--broken" => options.broken = Some(value.parse()?),
            "--peers" if value == "all" => peers = Peer::ALL.to_vec(),
            "--peers" => peers = list(value)?,
            "--export" if value == "edn" => export = true,
            _ => return Err(USAGE.to_owned()),
        }
    }
    options.is_shown = true;
    let command = format!("cargo xtask torture {}", words.join(" "));
    let mut is_clean = true;
    for &peer in &peers {
        peer.install()?;
        (options.peer, options.engine) = (Some(peer), peer.engine());
        options.faults = faults.clone().unwrap_or_else(Peer::faults);
        options.tasks = 1;
        // Their overlaps and losses are results of a comparison, and no failure of this tool.
        torture_one(&mut options, &command, export)?;
    }
    let engines = if peers.is_empty() { engines } else { Vec::new() };
    for engine in engines {
        options.engine = engine;
        options.faults = faults.clone().unwrap_or_else(|| engine.faults());
        is_clean &= torture_one(&mut options, &command, export)?;
    }
    Ok(is_clean)
}

fn torture_one(options: &mut RunOptions, command: &str, export: bool) -> Answer {
    let (peer, seed) = (options.peer, options.seed);
    let name = peer.map_or(options.engine.name(), Peer::name);
    options.folder = results().join(format!("{name}-{seed}"));
    let version = peer.map_or("", Peer::version);
    println!("{name} {version}, seed {seed}, {} s", options.seconds);
    let outcome = run(options).map_err(|error| error.to_string())?;
    keep(&options.folder, &outcome, command, version, export)
}

fn list<T: std::str::FromStr<Err = String>>(text: &str) -> Result<Vec<T>, String> {
    text.split(',').map(str::parse).collect()
}

fn results() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/torture")
}

/// Writes what is kept of a run, and shows it.
fn keep(folder: &Path, outcome: &Outcome, command: &str, version: &str, export: bool) -> Answer {
    let (history, verdict) = (&outcome.history, &outcome.verdict);
    let summary = Summary::of(history, verdict, command.to_owned(), version.to_owned());
    let json = serde_json::to_string_pretty(&summary).map_err(|error| error.to_string())?;
    let write = |name: &str, text: String| {
        std::fs::write(folder.join(name), text).map_err(|error| format!("{name}: {error}"))
    };
    write("summary.json", json)?;
    write("timeline.svg", timeline::svg(history, verdict))?;
    if export {
        write("history.edn", edn::edn(history))?;
    }
    print!("{}", report::terminal(&summary));
    println!("  {}\n", folder.display());
    Ok(summary.is_clean())
}

fn load_all(words: &[String]) -> Answer {
    let mut options =
        LoadOptions { engine: EngineKind::Redis, seconds: 60, tasks: 1000, names: 10_000 };
    let mut engines = vec![EngineKind::Redis, EngineKind::Etcd];
    for pair in words.chunks(2) {
        let [key, value] = pair else { return Err(USAGE.to_owned()) };
        let number = || value.parse::<u64>().map_err(|_| format!("{key} {value}: not a number"));
        match key.as_str() {
            "--engine" => engines = list(value)?,
            "--seconds" => options.seconds = number()?,
            "--tasks" => options.tasks = number()? as usize,
            "--names" => options.names = number()? as usize,
            _ => return Err(USAGE.to_owned()),
        }
    }
    let mut is_clean = true;
    for engine in engines {
        options.engine = engine;
        let outcome = load::run(&options);
        let [p50, p99, p999] = outcome.latencies.map(|micros| micros as f64 / 1e3);
        let (grants, failures) = (outcome.grants, outcome.failures);
        println!("{engine}: {grants} grants, {failures} failed");
        println!("  time to acquire: p50 {p50:.1} ms, p99 {p99:.1} ms, p99.9 {p999:.1} ms");
        outcome.violations.iter().take(20).for_each(|text| println!("  VIOLATION: {text}"));
        outcome.leaks.iter().take(20).for_each(|text| println!("  LEFT BEHIND: {text}"));
        std::fs::create_dir_all(results()).map_err(|error| error.to_string())?;
        let picture = results().join(format!("load-{engine}.svg"));
        load::plot(&outcome, &picture).map_err(|error| error.to_string())?;
        is_clean &= outcome.violations.is_empty() && outcome.leaks.is_empty();
    }
    Ok(is_clean)
}

fn judge_again(folder: &Path) -> Answer {
    let history = History::read(folder).map_err(|error| error.to_string())?;
    let verdict = oracle::judge(&history);
    let command = format!("cargo xtask torture judge {}", folder.display());
    print!("{}", report::terminal(&Summary::of(&history, &verdict, command, String::new())));
    for finding in &verdict.findings {
        let at = finding.at.saturating_sub(history.span().0) as f64 / 1e9;
        let exception = finding.exception.map(|name| format!(" ({name})")).unwrap_or_default();
        println!("  {at:7.3} s  {:?}{exception}: {}", finding.promise, finding.text);
    }
    Ok(verdict.violations().next().is_none())
}

fn write_page() -> Answer {
    let summaries = Summary::read_all(&results()).map_err(|error| error.to_string())?;
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/torture.md");
    std::fs::write(page, report::page(&summaries)).map_err(|error| error.to_string())?;
    println!("docs/torture.md: {} runs", summaries.len());
    Ok(true)
}
