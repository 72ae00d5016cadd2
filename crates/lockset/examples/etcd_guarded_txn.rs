//! A write to etcd that is done only while a lock is held, checked by etcd itself.
//!
//!     cargo run -p lockset --example etcd_guarded_txn
//!
//! It starts an etcd server of its own, and writes by `etcdctl txn`, as any client could.
#![allow(clippy::expect_used, reason = "an example")]

use std::io::Write;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};

use lockset::engine::etcd::EtcdOwnership;
use lockset::{Break, Lockset, Result};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let server = Server::start();
    let locks = server.connect().await;
    let guard = locks.mutex("config")?.lock().await?;
    let ownership = EtcdOwnership::of(&guard.grant());

    assert!(server.put_if_held(&ownership, "by the holder"), "it is held");
    // An operator breaks the lock, and the holder does not know it yet.
    locks.force_release("config", Break::Now).await?;
    assert!(!server.put_if_held(&ownership, "by one who lost it"), "it is not held any more");
    say(&format!("the config was written {}", server.etcdctl(&["get", "config"], "")));
    locks.close().await
}

struct Server {
    process: Child,
    port: u16,
    /// Goes with the server.
    _folder: tempfile::TempDir,
}

impl Server {
    fn start() -> Self {
        let (port, peer) = (free_port(), free_port());
        let [client, peer] = [port, peer].map(|port| format!("http://127.0.0.1:{port}"));
        let folder = tempfile::tempdir().expect("a folder");
        let process = Command::new("etcd")
            .current_dir(folder.path())
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("default={peer}")])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("etcd is needed: run `cargo xtask setup`");
        Self { process, port, _folder: folder }
    }

    /// It needs a moment to be there.
    async fn connect(&self) -> Lockset {
        loop {
            match Lockset::connect(&format!("etcd://127.0.0.1:{}", self.port)).await {
                Ok(locks) => return locks,
                Err(error) => assert!(error.is_retryable(), "{error}"),
            }
        }
    }

    /// One transaction: if the lock is held, the config is written.
    fn put_if_held(&self, ownership: &EtcdOwnership, value: &str) -> bool {
        let EtcdOwnership { key, create_revision } = ownership;
        let key = String::from_utf8_lossy(key);
        let txn = format!("c(\"{key}\") = \"{create_revision}\"\n\nput config \"{value}\"\n\n\n");
        self.etcdctl(&["txn"], &txn).starts_with("SUCCESS")
    }

    fn etcdctl(&self, command: &[&str], input: &str) -> String {
        let mut etcdctl = Command::new("etcdctl")
            .env("ETCDCTL_API", "3")
            .args(["--endpoints", &format!("127.0.0.1:{}", self.port)])
            .args(command)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("etcdctl is needed: run `cargo xtask setup`");
        let mut stdin = etcdctl.stdin.take().expect("it is piped");
        stdin.write_all(input.as_bytes()).expect("it reads");
        drop(stdin);
        let output = etcdctl.wait_with_output().expect("it ends");
        String::from_utf8_lossy(&output.stdout).trim().replace('\n', " = ")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("it is bound").port()
}

#[allow(clippy::print_stdout, reason = "an example talks to its reader")]
fn say(line: &str) {
    println!("{line}");
}
