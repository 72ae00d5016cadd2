//! On a terminal: the foreground group, Ctrl-C, Ctrl-Z, and the line that is shown while waiting.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rustix::process::Signal;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

use crate::common::{BINARY, Home, PATIENCE, is_stopped, parent, until};

/// A terminal with a session on it; both ends with the test.
struct Terminal {
    master: File,
    screen: Arc<Mutex<String>>,
    child: Child,
}

impl Terminal {
    fn start(home: &Home, mut command: Command) -> Self {
        let master =
            openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap().into_string().unwrap();
        let slave: OwnedFd = File::options().read(true).write(true).open(name).unwrap().into();
        home.settle(&mut command);
        command.env("PS1", "prompt> ").env_remove("ENV");
        command.stdin(Stdio::from(slave.try_clone().unwrap()));
        command.stdout(Stdio::from(slave.try_clone().unwrap())).stderr(Stdio::from(slave));
        // SAFETY: both calls are async-signal-safe, and nothing else is done.
        unsafe {
            command.pre_exec(|| {
                rustix::process::setsid()?;
                rustix::process::ioctl_tiocsctty(rustix::stdio::stdin())?;
                crate::common::forget_ignored_signals();
                Ok(())
            });
        }
        let child = command.spawn().unwrap();
        drop(command);
        let master = File::from(master);
        let screen = Arc::new(Mutex::new(String::new()));
        let (mut reader, seen) = (master.try_clone().unwrap(), screen.clone());
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = reader.read(&mut bytes) {
                seen.lock().unwrap().push_str(&String::from_utf8_lossy(&bytes[..count]));
            }
        });
        Self { master, screen, child }
    }

    fn script(home: &Home, script: &str) -> Self {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Self::start(home, command)
    }

    fn interactive_shell(home: &Home) -> Self {
        let mut command = Command::new("sh");
        command.arg("-i");
        let mut terminal = Self::start(home, command);
        terminal.expect("prompt> ");
        terminal
    }

    fn type_in(&mut self, keys: &str) {
        self.master.write_all(keys.as_bytes()).unwrap();
    }

    /// Waits until the text appears, and forgets everything up to its end.
    fn expect(&mut self, text: &str) -> String {
        let began = Instant::now();
        loop {
            let mut screen = self.screen.lock().unwrap();
            if let Some(at) = screen.find(text) {
                let end = at + text.len();
                return screen.drain(..end).collect();
            }
            assert!(began.elapsed() < PATIENCE, "no {text:?} on the screen: {screen:?}");
            drop(screen);
            std::thread::sleep(std::time::Duration::from_millis(3));
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Says whether the process that runs it is in the foreground of its terminal.
const FOREGROUND: &str =
    "set -- $(sed 's/.*) //' /proc/$$/stat); [ $3 = $6 ] && echo in-front || echo behind";

#[test]
fn the_command_gets_the_foreground_and_it_is_given_back() {
    let home = Home::new();
    std::fs::write(home.path("where"), FOREGROUND).unwrap();
    let mut terminal = Terminal::script(
        &home,
        "echo before: $(sh ./where); lockset run x -- sh ./where; echo code $?; \
         sh ./where; echo done",
    );
    // A child in a pipe of the session leader's group is in front; then the command's own group;
    // then, without any shell's job control, the session leader's group again.
    let screen = terminal.expect("done");
    assert_eq!(screen.matches("in-front").count(), 3, "{screen}");
    assert!(screen.contains("code 0"), "{screen}");
}

#[test]
fn the_foreground_is_given_back_when_the_command_is_not_found_or_killed() {
    let home = Home::new();
    std::fs::write(home.path("where"), FOREGROUND).unwrap();
    let mut terminal = Terminal::script(
        &home,
        "lockset run x -- nosuch; sh ./where; lockset run x -- sh -c 'kill -9 $$'; sh ./where; \
         echo done",
    );
    let screen = terminal.expect("done");
    assert_eq!(screen.matches("in-front").count(), 2, "{screen}");
}

#[test]
fn ctrl_c_reaches_the_command() {
    let home = Home::new();
    let mut terminal = Terminal::interactive_shell(&home);
    terminal.type_in(
        "lockset run x -- sh -c 'trap \"echo interrupted; exit 7\" INT; echo rea\"\"dy; \
         while :; do sleep 0.01; done'; echo code=$?\n",
    );
    terminal.expect("ready");
    terminal.type_in("\x03");
    terminal.expect("interrupted");
    terminal.expect("code=7");
}

#[test]
fn ctrl_c_ends_the_wait() {
    let home = Home::new();
    let _holder = home.hold("x");
    let mut terminal = Terminal::interactive_shell(&home);
    terminal.type_in("lockset run x -- true; echo code=$?\n");
    terminal.expect("waiting for x: held by");
    terminal.type_in("\x03");
    terminal.expect("code=130");
    assert_eq!(home.waiters("x"), 0);
}

#[test]
fn ctrl_z_stops_the_job_and_fg_continues_it() {
    let home = Home::new();
    let mut terminal = Terminal::interactive_shell(&home);
    terminal.type_in(
        "lockset run x -- sh -c 'echo $$ >pid; echo rea\"\"dy; read line; echo got: $line; \
         exit 3'\n",
    );
    terminal.expect("ready");
    let command = home.pid("pid");
    terminal.type_in("\x1a");
    terminal.expect("Stopped");
    assert!(is_stopped(command));
    terminal.expect("prompt> ");
    // The shell has its terminal: what is typed now is for it.
    terminal.type_in("echo shell-$((1 + 1))\n");
    terminal.expect("shell-2");
    assert!(is_stopped(command));
    terminal.type_in("fg\n");
    until("it goes on", || !is_stopped(command));
    terminal.expect("lockset run");
    terminal.type_in("hello\n");
    terminal.expect("got: hello");
    terminal.type_in("echo code=$?\n");
    terminal.expect("code=3");
}

#[test]
fn ctrl_z_is_undone_if_no_shell_could_continue_the_job() {
    let home = Home::new();
    // Like the first process of a container on a terminal: no shell above it.
    let mut command = Command::new(BINARY);
    let script = "trap 'echo continued' CONT; echo ready; until read line; do :; done; \
        echo got: $line";
    command.args(["run", "x", "--", "sh", "-c", script]);
    let mut terminal = Terminal::start(&home, command);
    terminal.expect("ready");
    terminal.type_in("\x1a");
    terminal.expect("continued");
    terminal.type_in("hello\n");
    terminal.expect("got: hello");
}

#[test]
fn a_background_job_that_reads_the_terminal_stops_and_fg_brings_it_to_the_front() {
    let home = Home::new();
    let mut terminal = Terminal::interactive_shell(&home);
    terminal.type_in("lockset run x -- sh -c 'echo $$ >pid; read line; echo got: $line' &\n");
    let command = home.pid("pid");
    until("it is stopped", || is_stopped(command));
    until("lockset is stopped, too", || is_stopped(parent(parent(command))));
    terminal.type_in("jobs\n");
    terminal.expect("Stopped");
    terminal.type_in("fg\n");
    until("it goes on", || !is_stopped(command));
    terminal.type_in("hello\n");
    terminal.expect("got: hello");
}

#[test]
fn ctrl_z_while_waiting_stops_lockset_and_fg_goes_on_waiting() {
    let home = Home::new();
    let holder = home.hold("x");
    let mut terminal = Terminal::interactive_shell(&home);
    terminal.type_in("lockset run x -- echo mi\"\"ne\n");
    terminal.expect("waiting for x: held by");
    terminal.type_in("\x1a");
    terminal.expect("Stopped");
    terminal.type_in("fg\n");
    terminal.expect("waiting for x: held by");
    holder.signal(Signal::TERM);
    terminal.expect("mine");
}

#[test]
fn the_wait_line_shows_holder_time_and_position_and_is_then_removed() {
    let home = Home::new();
    let holder = home.hold_with(&["--note", "nightly", "x"]);
    let mut terminal = Terminal::script(&home, "lockset run x -- echo mine; echo after");
    let who = format!("waiting for x: held by {}@", holder.pid().as_raw_pid());
    terminal.expect(&who);
    let line = terminal.expect("place 1 of 1");
    assert!(line.contains("(nightly), ") && line.contains(" so far, "), "{line:?}");
    let rewritten = terminal.expect("place 1 of 1");
    assert!(rewritten.contains("\r\x1b[K") && !rewritten.contains('\n'), "{rewritten:?}");
    holder.signal(Signal::TERM);
    let end = terminal.expect("mine");
    assert!(end.ends_with("\r\x1b[Kmine"), "the line is cleared: {end:?}");
    terminal.expect("after");
}

#[test]
fn colour_is_for_terminals_without_no_color() {
    let home = Home::new();
    let _holder = home.hold("x");
    let mut terminal = Terminal::script(&home, "lockset show x; echo done");
    assert!(terminal.expect("done").contains("\x1b[1mx\x1b[0m"));
    let mut terminal = Terminal::script(&home, "NO_COLOR=1 lockset show x; echo done");
    assert!(!terminal.expect("done").contains('\x1b'));
}

/// A pager behind lockset has its keys from the terminal.
#[test]
fn in_a_pipeline_the_terminal_is_left_to_all() {
    let home = Home::new();
    std::fs::write(home.path("where"), FOREGROUND).unwrap();
    let mut terminal = Terminal::script(
        &home,
        "lockset run x -- sh -c 'echo from the command; sleep 0.3' | \
         (sleep 0.1; sh ./where; cat); echo done",
    );
    let screen = terminal.expect("done");
    assert!(screen.contains("in-front") && screen.contains("from the command"), "{screen}");
    // A reader of the terminal still gets it.
    let mut terminal = Terminal::script(
        &home,
        "lockset run x -- sh -c 'echo rea\"\"dy; read line </dev/tty; \
         echo got: $line' | cat; echo done",
    );
    terminal.expect("ready");
    terminal.type_in("hello\n");
    terminal.expect("got: hello");
    terminal.expect("done");
}

#[test]
fn ctrl_c_ends_the_script_around_lockset() {
    let home = Home::new();
    let mut terminal = Terminal::script(
        &home,
        "lockset run x -- sh -c 'echo rea\"\"dy; exec sleep 1000'; echo still here",
    );
    terminal.expect("ready");
    terminal.type_in("\x03");
    until("the script ends", || terminal.child.try_wait().unwrap().is_some());
    assert!(!terminal.screen.lock().unwrap().contains("still here"));
    assert_eq!(home.holders("x"), 0);
}

#[test]
fn a_command_that_is_stopped_by_hand_does_not_stop_lockset() {
    let home = Home::new();
    let script = "lockset run x -- sh -c 'echo $$ >pid; while [ ! -e end ]; do sleep 0.01; done; \
                  exit 8'; echo code=$?";
    let mut terminal = Terminal::script(&home, script);
    let command = home.pid("pid");
    rustix::process::kill_process(command, Signal::STOP).unwrap();
    until("it is stopped", || is_stopped(command));
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert!(!is_stopped(parent(parent(command))), "lockset stopped, too");
    rustix::process::kill_process(command, Signal::CONT).unwrap();
    std::fs::write(home.path("end"), "").unwrap();
    terminal.expect("code=8");
}
