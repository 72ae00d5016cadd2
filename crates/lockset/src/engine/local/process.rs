//! Who a process is, and whether it lives.
//!
//! A pid alone names nobody: it is recycled, and another pid namespace counts from one again. So a
//! process is known by namespace, pid and start time, and a death is believed only where it can be
//! seen for certain. In all other cases the lease alone decides. One in a time namespace is shown
//! other start times than everybody else, and goes without.

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex};

use super::failed;
use crate::error;
use crate::sync;

/// No more than this many processes are watched for one waiter, and so many are kept in sight
/// without need; the safety net covers the rest.
const WATCHED_AT_MOST: usize = 64;

/// One process of this machine, since it booted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Process {
    /// The inode of its pid namespace; 0 where that is not known.
    namespace: u64,
    pid: u32,
    /// In clock ticks since boot; 0 where that is not known.
    start: u64,
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.namespace, self.pid, self.start)
    }
}

impl FromStr for Process {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut parts = text.splitn(3, ':');
        let mut next = || parts.next().unwrap_or_default();
        Ok(Self { namespace: next().parse()?, pid: next().parse()?, start: next().parse()? })
    }
}

/// What this process knows of others.
#[derive(Debug)]
pub(super) struct Processes {
    ours: Process,
    stand_in: Option<Process>,
    recorded: String,
    /// `/proc` shows our own pid namespace, so that its entries are about whom we mean.
    proc_is_ours: bool,
    runtime: tokio::runtime::Handle,
    /// Those who were in the way lately will be so again, and looking anew costs some 20 µs.
    watched: Mutex<HashMap<Process, Arc<eyes::Eye>>>,
}

impl Processes {
    /// `stand_in` is recorded in our place, as the process that holds what we take.
    ///
    /// # Errors
    /// If that process is dead or cannot be told from a later one with its pid: others would take
    /// away what is held in its name, or never.
    pub(super) fn new(
        stand_in: Option<u32>,
        runtime: tokio::runtime::Handle,
    ) -> error::Result<Self> {
        let (namespace, pid) = (eyes::pid_namespace(), std::process::id());
        let start = eyes::start_of("self").unwrap_or(0);
        let ours = Process { namespace, pid, start };
        let proc_is_ours = eyes::stat_of("self").is_some_and(|stat| stat.pid == pid);
        let stand_in = match stand_in {
            Some(pid) if proc_is_ours && !eyes::is_shifted() => {
                Some(Process { namespace, pid, start: start_of(pid)? })
            }
            // `/proc` is missing, or shows other processes or times: its lease alone decides.
            Some(pid) => Some(Process { namespace: 0, pid, start: 0 }),
            None => None,
        };
        let recorded = stand_in.unwrap_or(ours).to_string();
        Ok(Self { ours, stand_in, recorded, proc_is_ours, runtime, watched: Mutex::default() })
    }

    /// Fails if the process that stands in for us is dead: what we take now would be anybody's.
    pub(super) fn unless_stand_in_died(&self) -> error::Result<()> {
        match self.stand_in {
            Some(process) if self.is_dead(&self.recorded) => {
                let pid = process.pid;
                Err(failed(format!("process {pid}, which was to hold the locks, has ended")))
            }
            _ => Ok(()),
        }
    }

    /// The process to write down as the holder of what this client takes.
    pub(super) fn recorded(&self) -> &str {
        &self.recorded
    }

    /// Whether the process so written is dead beyond doubt.
    pub(super) fn is_dead(&self, written: &str) -> bool {
        written.parse().is_ok_and(|process: Process| {
            process != self.ours
                && self.can_see(process)
                && match self.eye_on(process) {
                    Some(eye) => eye.sees_death(),
                    None => eyes::is_dead(process),
                }
        })
    }

    /// Whether the process so written lives beyond doubt.
    pub(super) fn is_alive(&self, written: &str) -> bool {
        written.parse().is_ok_and(|process: Process| {
            let shown = || eyes::start_of(&process.pid.to_string());
            process == self.ours
                || self.can_see(process) && process.start != 0 && shown() == Some(process.start)
        })
    }

    fn can_see(&self, process: Process) -> bool {
        self.proc_is_ours && process.namespace != 0 && process.namespace == self.ours.namespace
    }

    /// Resolves when one of these processes has died; never, if none can be seen.
    pub(super) async fn any_death(&self, written: &[String]) {
        let mut eyes = Vec::new();
        for process in written.iter().filter_map(|text| text.parse::<Process>().ok()) {
            if process == self.ours || !self.can_see(process) || eyes.len() == WATCHED_AT_MOST {
                continue;
            }
            match self.eye_on(process) {
                Some(eye) => eyes.push(eye),
                None if eyes::is_dead(process) => return,
                None => {}
            }
        }
        if eyes.is_empty() {
            return std::future::pending().await;
        }
        let deaths = eyes.iter().map(|eye| Box::pin(eye.death()));
        futures_util::future::select_all(deaths).await;
    }

    /// All who wait for one process share one descriptor.
    fn eye_on(&self, process: Process) -> Option<Arc<eyes::Eye>> {
        let mut watched = sync::lock(&self.watched);
        if let Some(eye) = watched.get(&process) {
            return Some(eye.clone());
        }
        if watched.len() >= WATCHED_AT_MOST {
            watched.retain(|_, eye| Arc::strong_count(eye) > 1);
        }
        let _inside = self.runtime.enter();
        let eye = Arc::new(eyes::Eye::open(process)?);
        watched.insert(process, eye.clone());
        Some(eye)
    }
}

fn start_of(pid: u32) -> error::Result<u64> {
    let start = eyes::start_of(&pid.to_string()).unwrap_or(0);
    let process = Process { namespace: 0, pid, start };
    if eyes::is_dead(process) {
        return Err(failed(format!("process {pid}, which is to hold the locks, is not running")));
    }
    if start == 0 {
        return Err(failed(format!(
            "process {pid}, which is to hold the locks, is hidden from this user; name another one"
        )));
    }
    Ok(start)
}

/// What a pid's own descriptor says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pidfd {
    /// There is no such process.
    Gone,
    /// It ended, and only waits for its parent to notice.
    Ended,
    Running,
    /// This kernel, or a sandbox, does not tell.
    Unknown,
}

/// Whether a process recorded with start time `recorded` is dead, given what its pid shows now.
/// An entry of `/proc` that cannot be read (hidepid) says nothing.
fn dead(pidfd: Pidfd, recorded: u64, seen: Option<u64>) -> bool {
    match pidfd {
        Pidfd::Gone | Pidfd::Ended => true,
        // Another start time: the pid was given to another process.
        Pidfd::Running | Pidfd::Unknown => {
            seen.is_some_and(|seen| recorded != 0 && seen != recorded)
        }
    }
}

/// The fields of `/proc/PID/stat` that matter here.
struct Stat {
    pid: u32,
    start: u64,
}

/// The second field is the command in parentheses, and may itself contain anything.
fn parse_stat(line: &str) -> Option<Stat> {
    let (pid, _) = line.split_once(' ')?;
    let (_, rest) = line.rsplit_once(") ")?;
    // Field 22 of the whole line, and `rest` begins with field 3.
    let start = rest.split(' ').nth(19)?.parse().ok()?;
    Some(Stat { pid: pid.parse().ok()?, start })
}

#[cfg(target_os = "linux")]
mod eyes {
    use std::os::fd::OwnedFd;
    use std::os::unix::fs::MetadataExt;
    use std::sync::LazyLock;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::io::Errno;
    use rustix::process::{Pid, PidfdFlags, pidfd_open};
    use tokio::io::Interest;
    use tokio::io::unix::AsyncFd;

    use super::super::store::boot_offset;
    use super::{Pidfd, Process, Stat, dead, parse_stat};

    pub(super) fn pid_namespace() -> u64 {
        std::fs::metadata("/proc/self/ns/pid").map_or(0, |link| link.ino())
    }

    pub(super) fn stat_of(pid: &str) -> Option<Stat> {
        parse_stat(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
    }

    /// Whether a time namespace shifts what this process is shown as times since boot.
    pub(super) fn is_shifted() -> bool {
        static IS_SHIFTED: LazyLock<bool> = LazyLock::new(|| boot_offset() != 0);
        *IS_SHIFTED
    }

    /// When a process began, if that is the same to all who look.
    pub(super) fn start_of(pid: &str) -> Option<u64> {
        stat_of(pid).filter(|_| !is_shifted()).map(|stat| stat.start)
    }

    pub(super) fn is_dead(process: Process) -> bool {
        let pidfd = match open(process.pid) {
            Ok(fd) if has_ended(&fd) => Pidfd::Ended,
            Ok(_) => Pidfd::Running,
            Err(Errno::SRCH) => Pidfd::Gone,
            Err(_) => Pidfd::Unknown,
        };
        let seen = start_of(&process.pid.to_string());
        dead(pidfd, process.start, seen)
    }

    fn open(pid: u32) -> Result<OwnedFd, Errno> {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(Errno::SRCH)?;
        pidfd_open(pid, PidfdFlags::NONBLOCK)
    }

    fn has_ended(pidfd: &OwnedFd) -> bool {
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&at_once)).is_ok_and(|ready| ready > 0)
    }

    /// Looks at one process until it ends.
    #[derive(Debug)]
    pub(super) struct Eye(AsyncFd<OwnedFd>);

    impl Eye {
        /// `None`: there is no such process any more, or nothing can be seen of it.
        pub(super) fn open(process: Process) -> Option<Self> {
            let pidfd = open(process.pid).ok()?;
            // Deprecated for types that may change their descriptor, which `OwnedFd` cannot; the
            // replacement would need `unsafe`.
            #[allow(deprecated)]
            let eye = AsyncFd::with_interest(pidfd, Interest::READABLE).ok()?;
            // Only now can the pid not be recycled unnoticed.
            (!is_dead(process)).then_some(Self(eye))
        }

        pub(super) fn sees_death(&self) -> bool {
            has_ended(self.0.get_ref())
        }

        pub(super) async fn death(&self) {
            if self.0.readable().await.is_err() {
                // The runtime ends; whoever waits here ends with it.
                std::future::pending::<()>().await;
            }
        }
    }
}

/// Without pidfd, the lease alone decides.
#[cfg(not(target_os = "linux"))]
mod eyes {
    use super::{Process, Stat};

    pub(super) fn pid_namespace() -> u64 {
        0
    }

    pub(super) fn is_shifted() -> bool {
        false
    }

    pub(super) fn stat_of(_pid: &str) -> Option<Stat> {
        None
    }

    pub(super) fn start_of(_pid: &str) -> Option<u64> {
        None
    }

    pub(super) fn is_dead(_process: Process) -> bool {
        false
    }

    #[derive(Debug)]
    pub(super) struct Eye;

    impl Eye {
        pub(super) fn open(_process: Process) -> Option<Self> {
            None
        }

        pub(super) fn sees_death(&self) -> bool {
            false
        }

        pub(super) async fn death(&self) {
            std::future::pending().await
        }
    }
}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use super::*;

    fn processes() -> Processes {
        Processes::new(None, tokio::runtime::Handle::current()).unwrap()
    }

    fn child() -> std::process::Child {
        std::process::Command::new("sleep").arg("60").spawn().unwrap()
    }

    fn process_of(child: &std::process::Child) -> Process {
        let start = eyes::stat_of(&child.id().to_string()).unwrap().start;
        Process { namespace: eyes::pid_namespace(), pid: child.id(), start }
    }

    #[test]
    fn a_death_is_believed_only_on_evidence() {
        for (pidfd, recorded, seen, expected) in [
            (Pidfd::Gone, 7, None, true),
            (Pidfd::Ended, 7, Some(7), true),
            (Pidfd::Running, 7, Some(7), false),
            (Pidfd::Running, 7, Some(8), true),
            (Pidfd::Running, 7, None, false),
            (Pidfd::Running, 0, Some(8), false),
            (Pidfd::Unknown, 7, None, false),
            (Pidfd::Unknown, 7, Some(8), true),
        ] {
            assert_eq!(dead(pidfd, recorded, seen), expected, "{pidfd:?} {recorded} {seen:?}");
        }
    }

    #[test]
    fn a_command_with_parentheses_does_not_confuse_the_start_time() {
        let fields = "S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4242 20";
        let stat = parse_stat(&format!("77 (a) b (c) {fields}")).unwrap();
        assert_eq!((stat.pid, stat.start), (77, 4242));
    }

    #[tokio::test]
    async fn a_process_is_written_and_read_back() {
        let seen = processes();
        let ours = seen.recorded().parse::<Process>().unwrap();
        assert_eq!(ours, seen.ours);
        assert!(ours.namespace != 0 && ours.start != 0);
        assert!("1:2".parse::<Process>().is_err());
    }

    #[tokio::test]
    async fn only_the_living_stand_in() {
        let stand_in = |pid| Processes::new(Some(pid), tokio::runtime::Handle::current());
        let mut child = child();
        let process = process_of(&child);
        let seen = stand_in(child.id()).unwrap();
        assert_eq!(seen.recorded(), process.to_string());
        seen.unless_stand_in_died().unwrap();
        child.kill().unwrap();
        seen.any_death(&[process.to_string()]).await;
        let words = |outcome: error::Result<Processes>| outcome.unwrap_err().to_string();
        assert!(words(stand_in(child.id())).contains("is not running"), "a zombie");
        child.wait().unwrap();
        assert!(words(stand_in(child.id())).contains("is not running"));
        assert!(words(stand_in(0)).contains("is not running"));
        let late = seen.unless_stand_in_died().unwrap_err();
        assert!(late.to_string().contains("has ended"), "{late}");
    }

    #[tokio::test]
    async fn the_living_the_dead_and_the_recycled_are_told_apart() {
        let seen = processes();
        let mut child = child();
        let process = process_of(&child);
        assert!(!seen.is_dead(&process.to_string()) && seen.is_alive(&process.to_string()));
        assert!(seen.is_alive(seen.recorded()));
        let recycled = Process { start: process.start + 1, ..process };
        assert!(seen.is_dead(&recycled.to_string()) && !seen.is_alive(&recycled.to_string()));
        let elsewhere = Process { namespace: process.namespace + 1, start: 1, ..process };
        assert!(!seen.is_dead(&elsewhere.to_string()) && !seen.is_alive(&elsewhere.to_string()));
        child.kill().unwrap();
        seen.any_death(&[process.to_string()]).await;
        // Not yet waited for: a zombie.
        assert!(seen.is_dead(&process.to_string()));
        child.wait().unwrap();
        assert!(seen.is_dead(&process.to_string()));
        seen.any_death(&[process.to_string()]).await;
    }
}
