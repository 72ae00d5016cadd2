//! Runs clients written in Python, in the virtual environment that `cargo xtask setup` prepares.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

/// A Python program that replies to each line of input with one line. Killed when dropped.
#[derive(Debug)]
pub struct PythonPeer {
    child: Child,
    replies: BufReader<ChildStdout>,
}

impl PythonPeer {
    /// Starts a program.
    pub fn start(program: &Path, args: &[&str]) -> Self {
        let mut child = Command::new(interpreter())
            .arg(program)
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("Python with redis-py is needed: run `cargo xtask setup`");
        let replies = BufReader::new(child.stdout.take().unwrap());
        Self { child, replies }
    }

    /// Sends a request and returns the reply.
    pub fn ask(&mut self, request: &str) -> String {
        self.send(request);
        self.receive()
    }

    /// Sends a request without waiting for the reply.
    pub fn send(&mut self, request: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{request}").unwrap();
    }

    /// The next reply.
    pub fn receive(&mut self) -> String {
        let mut line = String::new();
        self.replies.read_line(&mut line).unwrap();
        assert!(line.ends_with('\n'), "the program ended in the middle of {line:?}");
        line.trim_end().to_owned()
    }
}

impl Drop for PythonPeer {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The virtual environment is in the target folder, which also contains this test binary.
pub(crate) fn interpreter() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let folders = test.ancestors().map(|folder| folder.join("venv/bin/python"));
    let mut found = folders.filter(|python| python.is_file());
    found.next().expect("a virtual environment is needed: run `cargo xtask setup`")
}
