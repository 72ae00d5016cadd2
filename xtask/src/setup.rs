//! What the tests need beyond Rust and a C compiler: installed where the system's package manager
//! may be used, named where it may not. Nothing is skipped because it is missing.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Outcome;

/// A program the tests call, and where it comes from. One with arguments must succeed with them:
/// Debian's Python comes without what its `venv` module needs.
struct Need {
    program: &'static str,
    debian: &'static str,
    why: &'static str,
}

const NEEDS: &[Need] = &[
    Need { program: "unshare", debian: "util-linux", why: "processes in other namespaces" },
    Need { program: "flock", debian: "util-linux", why: "the yardstick of `lockset run`" },
    Need { program: "mount", debian: "mount", why: "full and read-only file systems" },
    Need { program: "setsid", debian: "util-linux", why: "commands that leave their group" },
    Need { program: "redis-server", debian: "redis-server", why: "the Redis engine" },
    Need { program: "timeout", debian: "coreutils", why: "servers that do not answer" },
    Need { program: "redis-cli", debian: "redis-tools", why: "faults of a Redis server" },
    Need { program: "java", debian: "default-jre-headless", why: "ZooKeeper servers" },
    Need { program: ZOOKEEPER, debian: "libzookeeper-java", why: "the ZooKeeper engine" },
    Need { program: "etcd", debian: "etcd-server", why: "the etcd engine" },
    Need { program: "etcdctl", debian: "etcd-client", why: "faults of etcd, and its own locks" },
    Need { program: "psql", debian: "postgresql-client", why: "a fence from plain SQL" },
    Need { program: "postgres", debian: "postgresql", why: "PostgreSQL: its engine and fences" },
    Need { program: "pgbouncer", debian: "pgbouncer", why: "PostgreSQL behind a pooler" },
    Need { program: "setpriv", debian: "util-linux", why: "servers that refuse to run as root" },
    Need { program: "sqlite3", debian: "sqlite3", why: "a fence from plain SQL" },
    Need { program: "valgrind", debian: "valgrind", why: "counting instructions" },
    Need { program: "python3", debian: "python3", why: "other people's locks" },
    Need {
        program: "python3 -m ensurepip --version",
        debian: "python3-venv",
        why: "a Python environment of our own",
    },
];

/// The server is a library, whose package brings what it needs, and no service.
const ZOOKEEPER: &str = "/usr/share/java/zookeeper.jar";

/// Packages that start a service when they are installed, which is not wanted here.
const SERVICES: &[Service] = &[
    Service { debian: "redis-server", unit: "redis-server" },
    Service { debian: "etcd-server", unit: "etcd" },
    Service { debian: "postgresql", unit: "postgresql" },
    Service { debian: "pgbouncer", unit: "pgbouncer" },
];

struct Service {
    debian: &'static str,
    unit: &'static str,
}

/// The Python packages whose locks ours are tried with and measured against, and an S3 server.
const PYTHON_PACKAGES: &str = include_str!("../python.txt");

pub(crate) fn setup() -> Outcome {
    programs()?;
    python()?;
    println!("everything the tests need is here");
    Ok(())
}

fn programs() -> Outcome {
    let missing: Vec<&Need> = NEEDS.iter().filter(|need| !installed(need.program)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    for need in &missing {
        println!("missing: {} ({}), for {}", need.program, need.debian, need.why);
    }
    let mut packages: Vec<&str> = missing.iter().map(|need| need.debian).collect();
    packages.sort_unstable();
    packages.dedup();
    install(&packages)?;
    // Only what was just installed: a service that was there before is in use.
    let new = SERVICES.iter().filter(|service| packages.contains(&service.debian));
    new.for_each(|service| stop(service.unit));
    match missing.iter().find(|need| !installed(need.program)) {
        None => Ok(()),
        Some(need) => Err(format!("`{}` is still missing after the installation", need.program)),
    }
}

/// A program that only a peer of the benchmarks needs.
pub(crate) fn need(program: &str, debian: &str) -> Outcome {
    if installed(program) { Ok(()) } else { install(&[debian]) }
}

/// Makes `target/venv`, or brings it to the pinned versions; fetches nothing if they are there.
pub(crate) fn python() -> Outcome {
    let venv = target_folder().join("venv");
    let python = venv.join("bin/python");
    if has_python_packages(&python) {
        return Ok(());
    }
    let pinned = Path::new(env!("CARGO_MANIFEST_DIR")).join("python.txt");
    println!("making {} with {}", venv.display(), pinned.display());
    // `--clear`: what is there may be half made, or made for a Python that is gone.
    let made = Command::new("python3").args(["-m", "venv", "--clear"]).arg(&venv).status();
    if !made.is_ok_and(|status| status.success()) {
        return Err(format!("`python3 -m venv --clear {}` failed", venv.display()));
    }
    let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r"];
    let filled = Command::new(&python).args(pip).arg(&pinned).status();
    match filled.is_ok_and(|status| status.success()) && has_python_packages(&python) {
        true => Ok(()),
        false => Err(format!("`pip install -r {}` failed", pinned.display())),
    }
}

fn has_python_packages(python: &Path) -> bool {
    let pip = ["-m", "pip", "freeze", "--disable-pip-version-check"];
    let Ok(output) = Command::new(python).args(pip).output() else { return false };
    let present = String::from_utf8_lossy(&output.stdout);
    let is_present = |pin: &str| present.lines().any(|line| line == pin);
    output.status.success() && PYTHON_PACKAGES.lines().all(is_present)
}

pub(crate) fn target_folder() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(folder) => folder.into(),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("target"),
    }
}

fn installed(program: &str) -> bool {
    if let Some((program, args)) = program.split_once(' ') {
        let output = Command::new(program).args(args.split(' ')).output();
        return output.is_ok_and(|output| output.status.success());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    // Debian keeps the server's programs in a folder for each version.
    let postgres = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin"].map(Into::into))
        .chain(postgres.map(|version| version.path().join("bin")))
        .any(|folder| folder.join(program).is_file())
}

fn install(packages: &[&str]) -> Outcome {
    let by_hand = || format!("install these packages, then run this again: {}", packages.join(" "));
    if !Path::new("/usr/bin/apt-get").exists() || !is_root() {
        return Err(by_hand());
    }
    let apt = |args: &[&str]| {
        let mut command = Command::new("apt-get");
        command.args(args).env("DEBIAN_FRONTEND", "noninteractive");
        command.status().is_ok_and(|status| status.success())
    };
    let mut args = vec!["install", "-y", "--no-install-recommends"];
    args.extend(packages);
    // A fresh machine has no package lists yet; a used one need not fetch them again.
    match apt(&args) || (apt(&["update"]) && apt(&args)) {
        true => Ok(()),
        false => Err(format!("apt-get failed; {}", by_hand())),
    }
}

/// The tests' servers have ports of their own, so a service that cannot be stopped is no failure.
fn stop(service: &str) {
    let run = |program: &str, args: &[&str]| {
        Command::new(program).args(args).status().is_ok_and(|status| status.success())
    };
    let stopped = match Path::new("/run/systemd/system").exists() {
        true => run("systemctl", &["disable", "--now", service]),
        false => run("service", &[service, "stop"]) && run("update-rc.d", &[service, "disable"]),
    };
    if !stopped {
        println!("the service {service} may be running; stop it if it is not wanted");
    }
}

fn is_root() -> bool {
    let id = Command::new("id").arg("-u").output();
    id.is_ok_and(|output| output.stdout.trim_ascii() == b"0")
}
