//! Calling cargo, and counting what its tests say.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use crate::Outcome;

/// Tests that passed and failed.
#[derive(Default)]
pub(crate) struct Counts {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
}

pub(crate) fn cargo(args: &[&str]) -> Outcome {
    with_env(args, &[])
}

pub(crate) fn with_env(args: &[&str], env: &[(&str, &str)]) -> Outcome {
    let status = command(args).envs(env.iter().copied()).status();
    judge(args, status.map(|status| status.success()))
}

/// Runs tests, shows their output, and adds up their closing lines. All binaries run even after
/// one has failed. Most tests wait for servers and for time to pass, so each core runs two of them.
pub(crate) fn count_tests(args: &[&str], counts: &mut Counts) -> Outcome {
    let mut args = args.to_vec();
    args.push("--no-fail-fast");
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = std::env::var("RUST_TEST_THREADS").unwrap_or((2 * cores).to_string());
    let mut child = command(&args)
        .env("RUST_TEST_THREADS", threads)
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| format!("cargo could not be started: {error}"))?;
    let output = child.stdout.take().ok_or("cargo has no output")?;
    for line in BufReader::new(output).lines().map_while(Result::ok) {
        println!("{line}");
        if let Some((passed, failed)) = closing_line(&line) {
            counts.passed += passed;
            counts.failed += failed;
        }
    }
    judge(&args, child.wait().map(|status| status.success()))
}

/// `test result: ok. 12 passed; 0 failed; …`
fn closing_line(line: &str) -> Option<(u64, u64)> {
    let rest = line.strip_prefix("test result: ")?;
    let number_before = |word: &str| -> Option<u64> {
        rest.split(word).next()?.split_whitespace().last()?.parse().ok()
    };
    Some((number_before(" passed")?, number_before(" failed")?))
}

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(args);
    command
}

fn judge(args: &[&str], succeeded: std::io::Result<bool>) -> Outcome {
    match succeeded {
        Ok(true) => Ok(()),
        Ok(false) => Err(format!("`cargo {}` failed", args.join(" "))),
        Err(error) => Err(format!("`cargo {}` could not be run: {error}", args.join(" "))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closing_lines_are_read() {
        let line =
            "test result: FAILED. 12 passed; 3 failed; 0 ignored; 0 measured; 0 filtered out";
        assert_eq!(closing_line(line), Some((12, 3)));
        assert_eq!(closing_line("test one ... ok"), None);
    }
}
