//! The Python that `cargo xtask setup` prepares: other people's clients, in processes of their own.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

/// A Python program that answers every line with a line. Killed when dropped.
#[derive(Debug)]
pub struct Python {
    child: Child,
    answers: BufReader<ChildStdout>,
}

impl Python {
    /// Starts a program.
    pub fn start(program: &Path, args: &[&str]) -> Self {
        let mut child = Command::new(interpreter())
            .arg(program)
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("Python with redis-py is needed: run `cargo xtask setup`");
        let answers = BufReader::new(child.stdout.take().unwrap());
        Self { child, answers }
    }

    /// What it answers to this order.
    pub fn ask(&mut self, order: &str) -> String {
        self.say(order);
        self.hear()
    }

    /// Gives an order without waiting for the answer.
    pub fn say(&mut self, order: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{order}").unwrap();
    }

    /// The next answer.
    pub fn hear(&mut self) -> String {
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        assert!(line.ends_with('\n'), "the program ended in the middle of {line:?}");
        line.trim_end().to_owned()
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The virtual environment lies in the target folder, in which this test lies too.
fn interpreter() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let folders = test.ancestors().map(|folder| folder.join("venv/bin/python"));
    let mut found = folders.filter(|python| python.is_file());
    found.next().expect("a virtual environment is needed: run `cargo xtask setup`")
}
