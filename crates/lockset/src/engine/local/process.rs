//! The identity of a process, and whether it is alive.
//!
//! A pid alone identifies no process: pids are recycled, and every pid namespace starts at one. So
//! a process is identified by namespace, pid and start time, and counts as dead only on certain
//! evidence. In all other cases the lease alone decides. A process in a time namespace sees other
//! start times than all others, so start times are not used there.

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex};

use super::error_of;
use crate::error;
use crate::sync;

/// Maximum processes that are watched for one waiter, and maximum unused watches that are kept. The
/// recheck covers the rest.
const MAX_WATCHED: usize = 64;

/// One process of this machine since it booted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Process {
    /// The inode of its pid namespace; 0 if unknown.
    namespace: u64,
    pid: u32,
    /// In clock ticks since boot; 0 if unknown.
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

/// What this client knows about processes.
#[derive(Debug)]
pub(super) struct Processes {
    ours: Process,
    holder_process: Option<Process>,
    recorded: String,
    /// `/proc` shows our own pid namespace, so its entries are about the processes we mean.
    proc_is_ours: bool,
    runtime: tokio::runtime::Handle,
    /// Processes that held a lock lately will hold it again, and opening a watch takes about 20 µs.
    watched: Mutex<HashMap<Process, Arc<pidfd::PidWatch>>>,
}

impl Processes {
    /// `holder_process` is recorded instead of this process as the holder of this client's locks.
    ///
    /// # Errors
    /// If that process is dead, or cannot be distinguished from a later one with its pid: other
    /// clients would take its locks away at once, or never.
    pub(super) fn new(
        holder_process: Option<u32>,
        runtime: tokio::runtime::Handle,
    ) -> error::Result<Self> {
        let (namespace, pid) = (pidfd::pid_namespace(), std::process::id());
        let start = pidfd::start_of("self").unwrap_or(0);
        let ours = Process { namespace, pid, start };
        let proc_is_ours = pidfd::stat_of("self").is_some_and(|stat| stat.pid == pid);
        let holder_process = match holder_process {
            Some(pid) if proc_is_ours && !pidfd::is_shifted() => {
                Some(Process { namespace, pid, start: start_of(pid)? })
            }
            // `/proc` is missing, or shows other processes or times: the lease alone decides.
            Some(pid) => Some(Process { namespace: 0, pid, start: 0 }),
            None => None,
        };
        let recorded = holder_process.unwrap_or(ours).to_string();
        Ok(Self {
            ours,
            holder_process,
            recorded,
            proc_is_ours,
            runtime,
            watched: Mutex::default(),
        })
    }

    /// Fails if the recorded holder process is dead: a lock acquired now would be free at once.
    pub(super) fn check_holder_process(&self) -> error::Result<()> {
        match self.holder_process {
            Some(process) if self.is_dead(&self.recorded) => {
                let pid = process.pid;
                Err(error_of(format!("process {pid}, which was to hold the locks, has ended")))
            }
            _ => Ok(()),
        }
    }

    /// The process to record as the holder of this client's locks.
    pub(super) fn recorded(&self) -> &str {
        &self.recorded
    }

    /// Whether the recorded process is certainly dead.
    pub(super) fn is_dead(&self, written: &str) -> bool {
        written.parse().is_ok_and(|process: Process| {
            process != self.ours
                && self.can_see(process)
                && match self.watch_of(process) {
                    Some(watch) => watch.has_ended(),
                    None => pidfd::is_dead(process),
                }
        })
    }

    /// Whether the recorded process is certainly alive.
    pub(super) fn is_alive(&self, written: &str) -> bool {
        written.parse().is_ok_and(|process: Process| {
            let shown = || pidfd::start_of(&process.pid.to_string());
            process == self.ours
                || self.can_see(process) && process.start != 0 && shown() == Some(process.start)
        })
    }

    fn can_see(&self, process: Process) -> bool {
        self.proc_is_ours && process.namespace != 0 && process.namespace == self.ours.namespace
    }

    /// Resolves when one of these processes has died; never if none of them is visible.
    pub(super) async fn any_death(&self, written: &[String]) {
        let mut watches = Vec::new();
        for process in written.iter().filter_map(|text| text.parse::<Process>().ok()) {
            if process == self.ours || !self.can_see(process) || watches.len() == MAX_WATCHED {
                continue;
            }
            match self.watch_of(process) {
                Some(watch) => watches.push(watch),
                None if pidfd::is_dead(process) => return,
                None => {}
            }
        }
        if watches.is_empty() {
            return std::future::pending().await;
        }
        let deaths = watches.iter().map(|watch| Box::pin(watch.ended()));
        futures_util::future::select_all(deaths).await;
    }

    /// All waiters for one process share one descriptor.
    fn watch_of(&self, process: Process) -> Option<Arc<pidfd::PidWatch>> {
        let mut watched = sync::lock(&self.watched);
        if let Some(watch) = watched.get(&process) {
            return Some(watch.clone());
        }
        if watched.len() >= MAX_WATCHED {
            watched.retain(|_, watch| Arc::strong_count(watch) > 1);
        }
        let _inside = self.runtime.enter();
        let watch = Arc::new(pidfd::PidWatch::open(process)?);
        watched.insert(process, watch.clone());
        Some(watch)
    }
}

fn start_of(pid: u32) -> error::Result<u64> {
    let start = pidfd::start_of(&pid.to_string()).unwrap_or(0);
    let process = Process { namespace: 0, pid, start };
    if pidfd::is_dead(process) {
        return Err(error_of(format!("process {pid}, which is to hold the locks, is not running")));
    }
    if start == 0 {
        return Err(error_of(format!(
            "process {pid}, which is to hold the locks, is hidden from this user; name another one"
        )));
    }
    Ok(start)
}

/// What a pidfd shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pidfd {
    /// There is no such process.
    Gone,
    /// It ended, and its parent has not collected it yet.
    Ended,
    Running,
    /// This kernel, or a sandbox, does not support it.
    Unknown,
}

/// Whether a process recorded with start time `recorded` is dead, given what its pid shows now.
/// An entry of `/proc` that cannot be read (hidepid) proves nothing.
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
mod pidfd {
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

    /// When a process started, if all processes see the same time.
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

    /// Waits for the end of one process.
    #[derive(Debug)]
    pub(super) struct PidWatch(AsyncFd<OwnedFd>);

    impl PidWatch {
        /// `None` if the process does not exist any more, or cannot be watched.
        pub(super) fn open(process: Process) -> Option<Self> {
            let pidfd = open(process.pid).ok()?;
            // Deprecated for types that may change their descriptor, which `OwnedFd` cannot; the
            // replacement would need `unsafe`.
            #[allow(deprecated)]
            let watch = AsyncFd::with_interest(pidfd, Interest::READABLE).ok()?;
            // From here on the pid cannot be recycled unnoticed.
            (!is_dead(process)).then_some(Self(watch))
        }

        pub(super) fn has_ended(&self) -> bool {
            has_ended(self.0.get_ref())
        }

        pub(super) async fn ended(&self) {
            if self.0.readable().await.is_err() {
                // The runtime ends, and this future with it.
                std::future::pending::<()>().await;
            }
        }
    }
}

/// Without pidfd, the lease alone decides.
#[cfg(not(target_os = "linux"))]
mod pidfd {
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
    pub(super) struct PidWatch;

    impl PidWatch {
        pub(super) fn open(_process: Process) -> Option<Self> {
            None
        }

        pub(super) fn has_ended(&self) -> bool {
            false
        }

        pub(super) async fn ended(&self) {
            std::future::pending().await
        }
    }
}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn processes() -> Processes {
        Processes::new(None, tokio::runtime::Handle::current()).unwrap()
    }

    fn child() -> std::process::Child {
        std::process::Command::new("sleep").arg("60").spawn().unwrap()
    }

    fn process_of(child: &std::process::Child) -> Process {
        let start = pidfd::stat_of(&child.id().to_string()).unwrap().start;
        Process { namespace: pidfd::pid_namespace(), pid: child.id(), start }
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
    async fn only_a_live_process_can_be_recorded_as_the_holder() {
        let holder_process = |pid| Processes::new(Some(pid), tokio::runtime::Handle::current());
        let mut child = child();
        let process = process_of(&child);
        let seen = holder_process(child.id()).unwrap();
        assert_eq!(seen.recorded(), process.to_string());
        seen.check_holder_process().unwrap();
        child.kill().unwrap();
        seen.any_death(&[process.to_string()]).await;
        let text = |outcome: error::Result<Processes>| outcome.unwrap_err().to_string();
        assert!(text(holder_process(child.id())).contains("is not running"), "a zombie");
        child.wait().unwrap();
        assert!(text(holder_process(child.id())).contains("is not running"));
        assert!(text(holder_process(0)).contains("is not running"));
        let late = seen.check_holder_process().unwrap_err();
        assert!(late.to_string().contains("has ended"), "{late}");
    }

    #[tokio::test]
    async fn live_dead_and_recycled_processes_are_distinguished() {
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

    proptest! {
        #[test]
        fn any_record_of_a_process_is_read_or_rejected(
            text in "\\PC{0,40}|[0-9:+-]{0,30}",
            stat in "[0-9]{0,12} \\([a-z() ]{0,9}\\) ([0-9-]{1,21} ){0,22}",
        ) {
            if let Ok(process) = text.parse::<Process>() {
                prop_assert_eq!(process.to_string().parse::<Process>().ok(), Some(process));
            }
            let _ = (parse_stat(&stat), parse_stat(&text));
        }
    }
}
