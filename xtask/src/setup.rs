//! What the tests need beyond Rust and a C compiler: installed where the system's package manager
//! may be used, named where it may not. Nothing is skipped because it is missing.

use std::path::Path;
use std::process::Command;

use crate::Outcome;

/// A program the tests call, and where it comes from.
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
    Need { program: "redis-cli", debian: "redis-tools", why: "faults of a Redis server" },
];

/// Packages that start a service when they are installed. Nobody asked for that.
const SERVICES: &[&str] = &["redis-server"];

pub(crate) fn setup() -> Outcome {
    let missing: Vec<&Need> = NEEDS.iter().filter(|need| !installed(need.program)).collect();
    if missing.is_empty() {
        println!("everything the tests need is here");
        return Ok(());
    }
    for need in &missing {
        println!("missing: {} ({}), for {}", need.program, need.debian, need.why);
    }
    let mut packages: Vec<&str> = missing.iter().map(|need| need.debian).collect();
    packages.sort_unstable();
    packages.dedup();
    install(&packages)?;
    // Only what was just installed: a service that was there before is somebody's.
    SERVICES.iter().filter(|name| packages.contains(name)).for_each(|name| stop(name));
    match missing.iter().find(|need| !installed(need.program)) {
        None => Ok(()),
        Some(need) => Err(format!("`{}` is still missing after the installation", need.program)),
    }
}

fn installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin"].map(Into::into))
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
