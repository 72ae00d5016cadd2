//! The server that is measured with: its processor time, and the commands clients send to it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use lockset_testkit::stage::RedisServer;
use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Leaves this process, and all it will start, one core; answers which. Also lets it have as many
/// connections as the system allows: some peers need one for each waiter.
pub(crate) fn pin_to_one_core() -> usize {
    let allowed = sched_getaffinity(None).unwrap();
    // The first core is where most interrupts go.
    let core = (0..CpuSet::MAX_CPU).rev().find(|core| allowed.is_set(*core)).unwrap();
    let mut one = CpuSet::new();
    one.set(core);
    sched_setaffinity(None, &one).unwrap();
    allow_many_files();
    core
}

/// Lets this process, and all it will start, have as many connections as the system allows.
pub(crate) fn allow_many_files() {
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
}

/// A `redis-server` without persistence on a port of its own.
#[derive(Debug)]
pub(crate) struct Server {
    redis: RedisServer,
    pid: u32,
    /// To look at the server without starting a process for it.
    control: TcpStream,
}

impl Server {
    pub(crate) fn start() -> Self {
        let redis = RedisServer::start();
        let info = redis.ask(&["info", "server"]);
        let pid = field(&info, "process_id").expect("the server tells its process id") as u32;
        let control = TcpStream::connect(("127.0.0.1", redis.port())).unwrap();
        Self { redis, pid, control }
    }

    pub(crate) fn url(&self) -> String {
        self.redis.url()
    }

    pub(crate) fn port(&self) -> u16 {
        self.redis.port()
    }

    pub(crate) fn ask(&self, command: &[&str]) -> String {
        self.redis.ask(command)
    }

    /// A field of a section of `INFO`.
    pub(crate) fn info(&self, section: &str, name: &str) -> Option<String> {
        self.redis.info(&["info", section], name)
    }

    pub(crate) fn signal(&self, signal: Signal) {
        self.redis.signal(signal);
    }

    /// Seconds for which the server's main thread, which runs all commands, has been on a core.
    pub(crate) fn cpu(&self) -> f64 {
        let path = format!("/proc/{}/schedstat", self.pid);
        let text = std::fs::read_to_string(&path).expect("the kernel keeps schedstat");
        let nanos = text.split_whitespace().next().and_then(|first| first.parse::<u64>().ok());
        nanos.expect("schedstat begins with nanoseconds") as f64 / 1e9
    }

    /// Waits until this many clients are blocked in a command such as `BLPOP`.
    pub(crate) fn wait_for_blocked(&self, clients: usize) {
        let blocked = || field(&self.ask(&["info", "clients"]), "blocked_clients");
        wait_until("the peer's waiters block", || blocked() == Some(clients as u64));
    }

    /// How many scripts have been called so far. Scripts do not call scripts, so this is one number
    /// of `INFO` that tells what clients sent.
    pub(crate) fn script_calls(&self) -> u64 {
        (&self.control).write_all(b"INFO commandstats\r\n").unwrap();
        let mut answer = BufReader::new(&self.control);
        let mut head = String::new();
        answer.read_line(&mut head).unwrap();
        let mut text =
            vec![0; head.trim_start_matches('$').trim_end().parse::<usize>().unwrap() + 2];
        answer.read_exact(&mut text).unwrap();
        let text = String::from_utf8(text).unwrap();
        let calls = text.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
        calls.and_then(|calls| calls.split(',').next()?.parse().ok()).unwrap_or_default()
    }

    /// Begins to count what clients send.
    pub(crate) fn count_commands(&self) -> CommandCount<'_> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port())).unwrap();
        stream.write_all(b"MONITOR\r\n").unwrap();
        let mut lines = BufReader::new(stream);
        let mut answer = String::new();
        lines.read_line(&mut answer).unwrap();
        assert_eq!(answer, "+OK\r\n");
        CommandCount { server: self, lines }
    }
}

/// Counts commands as clients send them.
///
/// By `MONITOR`, because no counter of `INFO` can tell them: `total_commands_processed` and
/// `commandstats` also count each call that a script makes. `MONITOR` marks those. It makes the
/// server slower, so nothing is timed meanwhile; it is read only at the end, so it wakes no
/// process.
#[derive(Debug)]
pub(crate) struct CommandCount<'a> {
    server: &'a Server,
    lines: BufReader<TcpStream>,
}

impl CommandCount<'_> {
    /// How many commands were sent since the counting began.
    pub(crate) fn finish(mut self) -> u64 {
        const LAST: &str = "the-last-command-that-counts";
        self.server.ask(&["echo", LAST]);
        let (mut count, mut line) = (0, String::new());
        loop {
            line.clear();
            assert_ne!(self.lines.read_line(&mut line).unwrap(), 0, "the server hung up");
            if line.contains(LAST) {
                return count;
            }
            count += u64::from(is_from_a_client(&line));
        }
    }
}

/// `+1339518083.107412 [0 127.0.0.1:60866] "get" "x"`; within a script `[0 lua]`.
fn is_from_a_client(line: &str) -> bool {
    !line.split(']').next().is_some_and(|head| head.ends_with(" lua"))
}

/// The number behind `name:` in an answer to `INFO`.
fn field(info: &str, name: &str) -> Option<u64> {
    info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')?.trim().parse().ok())
}

/// Looks every few milliseconds whether it is so.
pub(crate) fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(60), "waited a minute until {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_of_scripts_are_distinguished_from_those_of_clients() {
        assert!(is_from_a_client("+1339518083.107412 [0 127.0.0.1:60866] \"get\" \"x lua]\""));
        assert!(!is_from_a_client("+1339518083.107412 [0 lua] \"get\" \"x\""));
    }

    #[test]
    fn only_what_clients_send_is_counted() {
        let server = Server::start();
        let count = server.count_commands();
        server.ask(&["eval", "redis.call('set', KEYS[1], 1) redis.call('del', KEYS[1])", "1", "x"]);
        server.ask(&["get", "x"]);
        assert_eq!(count.finish(), 2);
    }
}
