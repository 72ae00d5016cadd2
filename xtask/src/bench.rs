//! `bench`: the report, and the tables with targets.
//!
//! Peers are installed by their own package managers, only when they are asked for by name or by
//! `--peer all`, and only into the target folder.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::Outcome;
use crate::cargo::cargo;
use crate::setup::{need, python, target_folder};

pub(crate) const USAGE: &str =
    "usage: cargo xtask bench [--quick] [--engine NAME]… [--peer NAME | --peer all | --peer none]…

  --quick    three short rounds of everything: to see that it works, not to judge by
  --engine   only this one: memory, local, redis, redlock, etcd, zookeeper, fence
  --peer     only these, installed if they are not yet; without it, all that are installed";

/// The peers of a language, and how they are installed.
type Language = (&'static [&'static str], fn() -> Outcome);

const LANGUAGES: &[Language] = &[
    (&["rslock", "zookeeper-client"], || Ok(())),
    (&["distkit", "async-redis-lock", "etcd-client"], rust),
    (&["redis-py", "python-redis-lock", "kazoo"], python),
    (&["redlock", "redis-semaphore"], node),
    (&["redsync", "redislock", "rueidislock", "etcd-concurrency"], go),
    (&["redisson", "curator"], java),
];

/// What prints a table with targets, by engine.
const TARGETS: &[(&str, &[&str])] = &[
    ("memory", &["bench", "-q", "-p", "lockset", "--bench", "memory"]),
    ("local", &["bench", "-q", "-p", "lockset", "--bench", "local"]),
    ("run", &["bench", "-q", "-p", "lockset-cli", "--bench", "run"]),
    ("redis", &["run", "-q", "--release", "-p", "lockset-bench", "--", "redis"]),
    ("etcd", &["run", "-q", "--release", "-p", "lockset-bench", "--", "etcd"]),
    ("zookeeper", &["run", "-q", "--release", "-p", "lockset-bench", "--", "zookeeper"]),
    ("redlock", &["run", "-q", "--release", "-p", "lockset-bench", "--", "redlock"]),
    ("fence", &["run", "-q", "--release", "-p", "lockset-bench", "--", "fence"]),
];

pub(crate) fn bench(args: &[String]) -> Outcome {
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let values = |option: &str| -> Vec<&str> {
        args.windows(2).filter(|pair| pair[0] == option).map(|pair| pair[1]).collect()
    };
    let (engines, peers) = (values("--engine"), values("--peer"));
    let quick = args.contains(&"--quick");
    if args.len() != 2 * (engines.len() + peers.len()) + usize::from(quick) {
        return Err(USAGE.to_owned());
    }
    // Built before the first is run, so that nothing disturbs the measuring.
    install(&peers)?;
    let benches = ["-p", "lockset", "-p", "lockset-cli", "--benches"];
    cargo(&[&["bench", "-q", "--no-run"], &benches[..]].concat())?;
    cargo(&["build", "-q", "--release", "-p", "lockset-bench"])?;
    for (name, command) in TARGETS {
        // The command has the engine `local`, so its row belongs there.
        let engine = if *name == "run" { "local" } else { name };
        if engines.is_empty() || engines.contains(&engine) {
            let is_ours = command.contains(&"lockset-bench");
            let more: &[&str] = if quick && is_ours { &["--quick"] } else { &[] };
            keep(name, &[command, more].concat())?;
        }
    }
    let report = ["run", "-q", "--release", "-p", "lockset-bench", "--", "report"];
    let args: Vec<&str> = without_fence(&args);
    match engines == ["fence"] {
        true => cargo(&["run", "-q", "--release", "-p", "lockset-bench", "--", "page"]),
        false => cargo(&[&report[..], &args].concat()),
    }
}

/// Fences have a table and no locks to compare.
fn without_fence<'a>(args: &[&'a str]) -> Vec<&'a str> {
    let mut kept = Vec::new();
    let mut rest = args.iter().peekable();
    while let Some(arg) = rest.next() {
        if *arg == "--engine" && rest.peek() == Some(&&"fence") {
            rest.next();
        } else {
            kept.push(*arg);
        }
    }
    kept
}

/// Runs a benchmark, shows its table, and keeps it for the report.
fn keep(name: &str, args: &[&str]) -> Outcome {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    let output = command.args(args).stderr(Stdio::inherit()).output();
    let output = output.map_err(|error| format!("cargo could not be started: {error}"))?;
    let table = String::from_utf8_lossy(&output.stdout);
    println!("{table}");
    if !output.status.success() {
        return Err(format!("`cargo {}` failed", args.join(" ")));
    }
    let folder = Path::new("bench/targets");
    let file = folder.join(format!("{name}.md"));
    // A table of Markdown stays one; the lines of the plain benches are shown as they are.
    let text = if table.contains("|--") || table.contains("| --") {
        table.into_owned()
    } else {
        format!("```text\n{table}```\n")
    };
    let written = std::fs::create_dir_all(folder).and_then(|()| std::fs::write(&file, text));
    written.map_err(|error| format!("{}: {error}", file.display()))
}

fn install(peers: &[&str]) -> Outcome {
    let known = |peer: &&str| LANGUAGES.iter().any(|(names, _)| names.contains(peer));
    let words = ["all", "none"];
    if let Some(unknown) = peers.iter().find(|peer| !known(peer) && !words.contains(peer)) {
        return Err(format!("no peer {unknown}\n\n{USAGE}"));
    }
    for (names, install) in LANGUAGES {
        if peers.contains(&"all") || names.iter().any(|name| peers.contains(name)) {
            println!("installing: {}", names.join(", "));
            install()?;
        }
    }
    Ok(())
}

fn source(language: &str) -> PathBuf {
    Path::new("crates/lockset-bench/peers").join(language)
}

/// A folder of the target folder, which is made if it is not there; absolute, because package
/// managers are run elsewhere.
fn home(language: &str) -> Outcome<PathBuf> {
    let folder = target_folder().join("peers").join(language);
    let made = std::fs::create_dir_all(&folder).and_then(|()| folder.canonicalize());
    made.map_err(|error| format!("{}: {error}", folder.display()))
}

fn run(command: &mut Command) -> Outcome {
    let status = command.status();
    match status.is_ok_and(|status| status.success()) {
        true => Ok(()),
        false => Err(format!("{command:?} failed")),
    }
}

fn rust() -> Outcome {
    need("protoc", "protobuf-compiler")?;
    let manifest = source("rust").join("Cargo.toml").display().to_string();
    let folder = home("rust")?.display().to_string();
    let target = ["--manifest-path", &manifest, "--target-dir", &folder];
    cargo(&[&["build", "--release", "--locked"], &target[..]].concat())
}

/// Node looks for packages beside the script, so the script is beside them.
fn node() -> Outcome {
    need("npm", "npm")?;
    let folder = home("node")?;
    for file in ["package.json", "package-lock.json", "driver.js"] {
        let copied = std::fs::copy(source("node").join(file), folder.join(file));
        copied.map_err(|error| format!("{file}: {error}"))?;
    }
    let quiet = ["ci", "--no-audit", "--no-fund", "--cache"];
    run(Command::new("npm").args(quiet).arg(folder.join("cache")).current_dir(&folder))
}

fn go() -> Outcome {
    need("go", "golang-go")?;
    let folder = home("go")?;
    let build = ["build", "-o"];
    let mut go = Command::new("go");
    go.args(build).arg(folder.join("driver")).arg(".").current_dir(source("go"));
    go.env("GOFLAGS", "-mod=mod -modcacherw -buildvcs=false");
    run(go.env("GOMODCACHE", folder.join("modules")).env("GOCACHE", folder.join("cache")))
}

fn java() -> Outcome {
    need("javac", "default-jdk-headless")?;
    need("mvn", "maven")?;
    let folder = home("java")?;
    let mut maven = Command::new("mvn");
    maven.args(["-q", "-B", "dependency:copy-dependencies"]);
    maven.arg(format!("-DoutputDirectory={}", folder.join("lib").display()));
    maven.arg(format!("-Dmaven.repo.local={}", folder.join("repository").display()));
    run(maven.current_dir(source("java")))?;
    let mut javac = Command::new("javac");
    javac.arg("-cp").arg(folder.join("lib/*")).arg("-d").arg(folder.join("classes"));
    run(javac.arg(source("java").join("src/main/java/Driver.java")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fence_has_no_part_in_the_report() {
        let args = ["--quick", "--engine", "fence", "--engine", "redis", "--peer", "none"];
        let kept = ["--quick", "--engine", "redis", "--peer", "none"];
        assert_eq!(without_fence(&args), kept);
    }

    #[test]
    fn unknown_peers_and_options_are_refused() {
        assert!(install(&["nothing-of-the-kind"]).is_err());
        assert!(bench(&["--slow".to_owned()]).is_err());
        assert!(bench(&["--engine".to_owned()]).is_err());
    }
}
