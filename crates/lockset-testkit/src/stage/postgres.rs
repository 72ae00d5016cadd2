//! Starts a PostgreSQL server.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::port::free_port;
use crate::steps::until;

/// The user that runs the server if the tests run as root, which PostgreSQL refuses.
const USER: &str = "postgres";

/// A PostgreSQL server with a data folder of its own on a free port of the loopback interface,
/// stopped when dropped. The role `postgres` is its superuser and needs no password.
#[derive(Debug)]
pub struct PostgresServer {
    folder: tempfile::TempDir,
    port: u16,
    options: Vec<String>,
    child: Mutex<Option<Child>>,
}

impl PostgresServer {
    /// Makes a data folder, starts a server on it and waits until it responds.
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// The same with more settings, each as `name=value`.
    pub fn start_with(settings: &[&str]) -> Self {
        Self::start_in(made_folder(), settings)
    }

    /// A server that also accepts TLS, with this certificate and its key.
    pub fn start_with_tls(certificate: &str, key: &str) -> Self {
        let folder = made_folder();
        // The server rejects a key that is not its own.
        let files = [("ssl_cert_file", certificate), ("ssl_key_file", key)].map(|(name, from)| {
            let own = folder.path().join(name);
            std::fs::copy(from, &own).unwrap();
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
            std::fs::set_permissions(&own, mode).unwrap();
            if is_root() {
                assert!(Command::new("chown").arg(USER).arg(&own).status().unwrap().success());
            }
            format!("{name}={}", own.display())
        });
        Self::start_in(folder, &["fsync=off", "ssl=on", &files[0], &files[1]])
    }

    /// A standby that follows `primary`, and can be promoted.
    pub fn start_standby_of(primary: &Self) -> Self {
        let folder = made_folder();
        let copied = as_user("pg_basebackup")
            .args(["-R", "-X", "stream", "-c", "fast", "-d", &primary.url(), "-D"])
            .arg(folder.path().join("data"))
            .current_dir(folder.path())
            .output()
            .expect("setpriv is needed: run `cargo xtask setup`");
        assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));
        let options = ["-c", "fsync=off"].map(str::to_owned).to_vec();
        let server = Self { folder, port: free_port(), options, child: Mutex::new(None) };
        server.resume();
        server
    }

    fn start_in(folder: tempfile::TempDir, settings: &[&str]) -> Self {
        let made = as_user("initdb")
            .args(["--no-sync", "--auth=trust", "--username=postgres"])
            .args(["--encoding=UTF8", "--locale=C", "-D"])
            .arg(folder.path().join("data"))
            .current_dir(folder.path())
            .output()
            .expect("setpriv is needed: run `cargo xtask setup`");
        assert!(made.status.success(), "initdb: {}", String::from_utf8_lossy(&made.stderr));
        let options = settings.iter().flat_map(|&one| ["-c".to_owned(), one.to_owned()]).collect();
        let server = Self { folder, port: free_port(), options, child: Mutex::new(None) };
        server.resume();
        server
    }

    /// The port of this server.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The URL of this server, as its superuser.
    pub fn url(&self) -> String {
        self.url_of("postgres")
    }

    /// The URL of this server for `user` or `user:password`.
    pub fn url_of(&self, login: &str) -> String {
        format!("postgres://{login}@127.0.0.1:{}/postgres", self.port)
    }

    /// Runs a script with `psql` as this role. It ends at the first error, with status 3.
    pub fn psql(&self, role: &str, script: &str) -> Output {
        let mut child = Command::new("psql")
            .args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-v", "VERBOSITY=verbose"])
            .args(["-f", "-", &self.url_of(role)])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("psql is needed: run `cargo xtask setup`");
        let mut input = child.stdin.take().unwrap();
        // It may end before it has read everything.
        let _ = std::io::Write::write_all(&mut input, script.as_bytes());
        drop(input);
        child.wait_with_output().unwrap()
    }

    /// The output of a script that must succeed.
    #[track_caller]
    pub fn ask(&self, script: &str) -> String {
        let output = self.psql("postgres", script);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{script}\n{error}");
        String::from_utf8(output.stdout).unwrap().trim_end().to_owned()
    }

    /// Replaces the rules that say who may connect, `pg_hba.conf`.
    pub fn set_access(&self, rules: &str) {
        std::fs::write(self.folder.path().join("data/pg_hba.conf"), rules).unwrap();
        self.signal(Signal::HUP);
        let loaded = format!("{}\n", rules.lines().count());
        let count = "SELECT count(*) FROM pg_hba_file_rules WHERE error IS NULL";
        until("the rules are loaded", || self.psql("postgres", count).stdout == loaded.as_bytes());
    }

    /// Sends a signal to the server's first process.
    pub fn signal(&self, signal: Signal) {
        if let Some(child) = self.child.lock().unwrap().as_ref() {
            kill_process(Pid::from_raw(child.id() as i32).unwrap(), signal).unwrap();
        }
    }

    /// Stops all processes of the server, so that it does not respond.
    pub fn freeze(&self) {
        // The first process before its children: a stopped one starts no others.
        self.signal(Signal::STOP);
        self.signal_backends(Signal::STOP);
    }

    /// Lets a server that was frozen continue.
    pub fn thaw(&self) {
        self.signal_backends(Signal::CONT);
        self.signal(Signal::CONT);
    }

    /// Sends a signal to all children of the server's first process.
    fn signal_backends(&self, signal: Signal) {
        let Some(parent) = self.child.lock().unwrap().as_ref().map(Child::id) else { return };
        let children = format!("/proc/{parent}/task/{parent}/children");
        let children = std::fs::read_to_string(children).unwrap_or_default();
        for child in children.split_whitespace() {
            // It may have ended by now.
            let _ = kill_process(Pid::from_raw(child.parse().unwrap()).unwrap(), signal);
        }
    }

    /// Stops the server at once, as a crash does: what is not in the log is lost.
    pub fn stop(&self) {
        let Some(mut child) = self.child.lock().unwrap().take() else { return };
        // SIGQUIT also ends the server's other processes; SIGKILL would leave them.
        let pid = Pid::from_raw(child.id() as i32).unwrap();
        let _ = kill_process(pid, Signal::QUIT);
        let began = Instant::now();
        while matches!(child.try_wait(), Ok(None)) {
            if began.elapsed() > Duration::from_secs(10) {
                let _ = child.kill();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Starts the server again on its data, and waits until it responds.
    pub fn resume(&self) {
        let mut current = self.child.lock().unwrap();
        assert!(current.is_none(), "the server is running");
        let log = std::fs::File::options().append(true).create(true).open(self.log()).unwrap();
        let child = as_user("postgres")
            .arg("-D")
            .arg(self.folder.path().join("data"))
            .args(["-p", &self.port.to_string(), "-c", "listen_addresses=127.0.0.1"])
            .args(["-c", "unix_socket_directories="])
            .args(&self.options)
            .current_dir(self.folder.path())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("setpriv is needed: run `cargo xtask setup`");
        let child = current.insert(child);
        let began = Instant::now();
        let port = self.port.to_string();
        let is_ready = ["-q", "-h", "127.0.0.1", "-p", &port];
        while !Command::new(binary("pg_isready")).args(is_ready).status().unwrap().success() {
            let runs = matches!(child.try_wait(), Ok(None));
            let log = || std::fs::read_to_string(self.log()).unwrap_or_default();
            assert!(runs, "postgres ended: {}", log());
            assert!(began.elapsed() < Duration::from_secs(60), "postgres is silent: {}", log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Stops the server at once and starts it again on its data.
    pub fn restart(&self) {
        self.stop();
        self.resume();
    }

    fn log(&self) -> PathBuf {
        self.folder.path().join("log")
    }
}

impl Drop for PostgresServer {
    fn drop(&mut self) {
        self.stop();
    }
}

fn made_folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    if is_root() {
        let chown = Command::new("chown").arg(USER).arg(folder.path()).status();
        assert!(chown.unwrap().success(), "the user {USER} is needed: run `cargo xtask setup`");
    }
    folder
}

/// A pooler in front of a server, stopped when dropped.
#[derive(Debug)]
pub struct PgBouncer {
    _folder: tempfile::TempDir,
    port: u16,
    child: Child,
}

impl PgBouncer {
    /// Starts a pooler in this mode: `session`, `transaction` or `statement`.
    pub fn before(server: &PostgresServer, mode: &str) -> Self {
        let (folder, port) = (made_folder(), free_port());
        let file = folder.path().join("pgbouncer.ini");
        let users = folder.path().join("users.txt");
        std::fs::write(&users, "\"postgres\" \"\"\n").unwrap();
        let settings = format!(
            "[databases]\n* = host=127.0.0.1 port={}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n\
             listen_port = {port}\nunix_socket_dir =\nauth_type = trust\nauth_file = {}\n\
             pool_mode = {mode}\n",
            server.port(),
            users.display(),
        );
        std::fs::write(&file, settings).unwrap();
        let child = as_user("pgbouncer")
            .arg("-q")
            .arg(&file)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("pgbouncer is needed: run `cargo xtask setup`");
        let pooler = Self { _folder: folder, port, child };
        let address = ("127.0.0.1", port);
        until("the pooler responds", || std::net::TcpStream::connect(address).is_ok());
        pooler
    }

    /// The URL of the pooler, as the server's superuser.
    pub fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port)
    }
}

impl Drop for PgBouncer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A server program, run by a user that PostgreSQL accepts.
fn as_user(program: &str) -> Command {
    if !is_root() {
        return Command::new(binary(program));
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid", USER, "--regid", USER, "--clear-groups", "--"]);
    command.arg(binary(program));
    command
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Debian keeps the server's programs outside `PATH`, by version.
fn binary(program: &str) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut folders: Vec<PathBuf> = std::env::split_paths(&path).collect();
    let versions = std::fs::read_dir(Path::new("/usr/lib/postgresql")).into_iter().flatten();
    folders.push("/usr/sbin".into());
    folders.extend(versions.filter_map(Result::ok).map(|version| version.path().join("bin")));
    let mut found = folders.iter().map(|folder| folder.join(program)).filter(|it| it.is_file());
    found.next().unwrap_or_else(|| panic!("{program} is needed: run `cargo xtask setup`"))
}
