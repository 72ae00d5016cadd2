//! Signals that have taken effect when the call returns.

use std::fs;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// The longest time in which a busy machine stops a process.
const LONGEST: Duration = Duration::from_secs(30);

/// Sends a signal. After `Signal::STOP`, no thread of the process runs any more.
///
/// `kill` alone returns earlier: one thread of the process has to be scheduled to receive the
/// signal, and until then the others go on, for tens of milliseconds on a busy machine. A server
/// that was "frozen" could still answer.
///
/// # Panics
/// If the signal cannot be sent, or the process does not stop.
pub fn send(pid: Pid, signal: Signal) {
    kill_process(pid, signal).unwrap();
    if signal != Signal::STOP {
        return;
    }
    let started = Instant::now();
    while !is_stopped(pid) {
        assert!(started.elapsed() < LONGEST, "process {pid} does not stop");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Whether every thread is stopped, or has ended.
fn is_stopped(pid: Pid) -> bool {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else { return true };
    threads.flatten().all(|thread| match fs::read_to_string(thread.path().join("stat")) {
        Err(_) => true,
        // The state follows the name of the program, which may contain parentheses.
        Ok(stat) => {
            let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
            matches!(state, Some('T' | 't' | 'Z' | 'X'))
        }
    })
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_busy_process_is_stopped_when_the_call_returns() {
        let busy = "import threading\n\
                    def spin():\n    while True: pass\n\
                    for _ in range(4): threading.Thread(target=spin, daemon=True).start()\n\
                    spin()";
        let mut child = Command::new("python3").args(["-c", busy]).spawn().unwrap();
        let pid = Pid::from_child(&child);
        for _ in 0..20 {
            std::thread::sleep(Duration::from_millis(5));
            send(pid, Signal::STOP);
            assert!(is_stopped(pid));
            send(pid, Signal::CONT);
        }
        assert!(!is_stopped(pid));
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
