//! The descendants of this process: finding them, and ending all of them.

use std::collections::HashMap;
use std::fs;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, getpid, kill_process};

/// One line of the process table.
struct Process {
    pid: i32,
    parent: i32,
    group: i32,
    dead: bool,
}

/// Kills every descendant of this process, except those in `spare` and below, and reaps them,
/// until none is left. `reaped` is called for each that ended as our own child.
///
/// This process must be a sub-reaper: a process that loses its parent becomes our child, so none
/// escapes by leaving the process group or by forking twice. It does not return while a process
/// cannot die (uninterruptible sleep) or may not be killed (it changed its user).
pub(crate) fn kill_descendants(spare: &[i32], mut reaped: impl FnMut(Pid, WaitStatus)) {
    let mut pause = Duration::from_millis(1);
    let mut empty_scans = 0;
    loop {
        let alive = living_descendants(spare);
        for &pid in &alive {
            if let Some(pid) = Pid::from_raw(pid) {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
        if reap(&mut reaped) == Children::None {
            return;
        }
        // A scan is not atomic, so it may miss a chain of forks; two scans will hardly.
        empty_scans = if alive.is_empty() { empty_scans + 1 } else { 0 };
        if empty_scans >= 2 && !spare.is_empty() {
            return;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(200));
    }
}

/// Whether a process of this group is alive.
pub(crate) fn group_is_alive(group: Pid) -> bool {
    if rustix::process::test_kill_process_group(group) == Err(Errno::SRCH) {
        return false;
    }
    // The kernel counts processes that ended and were not reaped yet. `/proc` shows them; without
    // `/proc` the kernel's count decides.
    let table = process_table();
    table.is_empty() || table.iter().any(|p| p.group == group.as_raw_pid() && !p.dead)
}

/// The processes that are children of this one already.
pub(crate) fn children() -> Vec<i32> {
    let pid = std::process::id();
    let listed = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    listed.unwrap_or_default().split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// Whether there are children left.
#[derive(PartialEq)]
enum Children {
    None,
    Some,
}

fn reap(reaped: &mut impl FnMut(Pid, WaitStatus)) -> Children {
    loop {
        match rustix::process::wait(WaitOptions::NOHANG) {
            Ok(Some((pid, status))) => reaped(pid, status),
            Ok(None) => return Children::Some,
            Err(Errno::INTR) => {}
            Err(_) => return Children::None,
        }
    }
}

fn living_descendants(spare: &[i32]) -> Vec<i32> {
    let table = process_table();
    let mut children: HashMap<i32, Vec<&Process>> = HashMap::new();
    for process in &table {
        children.entry(process.parent).or_default().push(process);
    }
    let mut found = Vec::new();
    let mut open = vec![getpid().as_raw_pid()];
    while let Some(parent) = open.pop() {
        for process in children.get(&parent).into_iter().flatten() {
            if spare.contains(&process.pid) {
                continue;
            }
            open.push(process.pid);
            if !process.dead {
                found.push(process.pid);
            }
        }
    }
    found
}

/// All processes; empty where there is no `/proc`.
fn process_table() -> Vec<Process> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter_map(|pid: i32| parse_stat(pid, &fs::read(format!("/proc/{pid}/stat")).ok()?))
        .collect()
}

/// A line of `/proc/PID/stat`. The name in parentheses may contain anything, so the fields are
/// counted from the last closing parenthesis.
fn parse_stat(pid: i32, stat: &[u8]) -> Option<Process> {
    let end_of_name = stat.iter().rposition(|&byte| byte == b')')?;
    let rest = std::str::from_utf8(&stat[end_of_name + 1..]).ok()?;
    let mut fields = rest.split_whitespace();
    let state = fields.next()?;
    let parent = fields.next()?.parse().ok()?;
    let group = fields.next()?.parse().ok()?;
    Some(Process { pid, parent, group, dead: matches!(state, "Z" | "X" | "x") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_may_have_any_name() {
        let process = parse_stat(7, b"7 (a) R 1 (b) S 5 6 6 0 -1 0").unwrap();
        assert_eq!((process.parent, process.group, process.dead), (5, 6, false));
        assert!(parse_stat(7, b"7 (x) Z 5 6 6").unwrap().dead);
        assert!(parse_stat(7, b"").is_none());
    }
}
