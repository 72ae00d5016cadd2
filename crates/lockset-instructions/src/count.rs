//! Programs below `valgrind --tool=callgrind`, and the server that the work needs.

use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::work::Work;

/// Instructions of the client for one cycle.
pub(crate) fn client_cycle(work: Work) -> f64 {
    let server = (work.engine == "redis").then(|| Server::start(None));
    let url = server.as_ref().map_or("memory:".to_owned(), Server::url);
    let folder = tempfile::tempdir().unwrap();
    let counts = work.cycles().map(|cycles| {
        let out = folder.path().join(cycles.to_string());
        run(callgrind(&out), &url, work.tasks, cycles);
        counted(&out)
    });
    per_cycle(work, counts)
}

/// Instructions of the server for one cycle.
pub(crate) fn server_cycle(work: Work) -> f64 {
    let folder = tempfile::tempdir().unwrap();
    let counts = work.cycles().map(|cycles| {
        let out = folder.path().join(cycles.to_string());
        let server = Server::start(Some(&out));
        run(Command::new(std::env::current_exe().unwrap()), &server.url(), work.tasks, cycles);
        server.stop();
        counted(&out)
    });
    per_cycle(work, counts)
}

fn per_cycle(work: Work, [few, many]: [u64; 2]) -> f64 {
    let [fewer, more] = work.cycles();
    (many - few) as f64 / (more - fewer) as f64
}

/// Runs this program's own work by `command`.
fn run(mut command: Command, url: &str, tasks: usize, cycles: usize) {
    let args = ["work", url, &tasks.to_string(), &cycles.to_string()];
    let status = command.args(args).status().unwrap();
    assert!(status.success(), "{command:?} failed: {status}");
}

/// This program below valgrind, which writes its count to `out`.
fn callgrind(out: &Path) -> Command {
    let mut command = valgrind(out);
    command.arg(std::env::current_exe().unwrap());
    command
}

fn valgrind(out: &Path) -> Command {
    let mut command = Command::new("valgrind");
    let file = format!("--callgrind-out-file={}", out.display());
    command.args(["-q", "--tool=callgrind", &file]);
    command
}

/// The total in a file of callgrind.
fn counted(out: &Path) -> u64 {
    let text = std::fs::read_to_string(out).unwrap();
    let total = text.lines().find_map(|line| line.strip_prefix("summary: "));
    let total = total.or_else(|| text.lines().find_map(|line| line.strip_prefix("totals: ")));
    total.expect("callgrind writes a total").trim().parse().unwrap()
}

/// A `redis-server` without persistence.
struct Server {
    process: Child,
    port: u16,
    _folder: TempDir,
}

impl Server {
    /// Starts it; below valgrind if its instructions are to be counted.
    fn start(count: Option<&Path>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut command = count.map_or_else(
            || Command::new("redis-server"),
            |out| {
                let mut command = valgrind(out);
                command.arg("redis-server");
                command
            },
        );
        command.args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", ""]);
        command.arg("--dir").arg(folder.path()).stdout(Stdio::null());
        let server = Self { process: command.spawn().unwrap(), port, _folder: folder };
        let until = Instant::now() + Duration::from_secs(30);
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(Instant::now() < until, "redis-server did not start");
            std::thread::sleep(Duration::from_millis(20));
        }
        server
    }

    fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Stops it and waits until it has ended: valgrind writes its count then.
    fn stop(mut self) {
        let port = self.port.to_string();
        let _ = Command::new("redis-cli").args(["-p", &port, "shutdown", "nosave"]).output();
        self.process.wait().unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
