//! The local engine on real files, with real processes: what can happen to either.
//!
//! Needs Linux and root, for mounts and namespaces; without them these tests fail.
#![cfg(all(feature = "local", target_os = "linux"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use futures_util::{FutureExt, StreamExt};
use lockset::engine::local::{Local, LocalOptions};
use lockset::engine::{
    Admission, Amend, Claim, ClaimId, Engine, Event, FencedNode, Grant, Mode, Renewal, Version,
    Wait,
};
use lockset::{Error, LossReason, Note, Token};

/// Well below the recheck of a second: a waiter that is this fast got a message.
const AT_ONCE: Duration = Duration::from_millis(500);
const LONG: Duration = Duration::from_secs(60);

fn open(path: &Path) -> Result<Local, Error> {
    Local::open(LocalOptions { path: Some(path.to_owned()), ..LocalOptions::default() })
}

fn claim(ttl: Duration) -> Claim {
    Claim {
        id: ClaimId::random(),
        name: "jobs/1".parse().unwrap(),
        mode: Mode::Exclusive,
        ttl,
        fixed: false,
        floor: None,
        note: Note::default(),
        detachable: false,
        replicas: None,
    }
}

async fn hold(engine: &Local, ttl: Duration) -> (Claim, Grant) {
    let claim = claim(ttl);
    let grant =
        engine.acquire(&claim, Wait::No).await.unwrap().granted().expect("the lock is free");
    (claim, grant)
}

/// The text of a failure that does not pass by itself.
fn final_words(outcome: Result<Local, Error>) -> String {
    let error = outcome.expect_err("this file cannot be used");
    assert!(matches!(error, Error::Unreachable { retryable: false, .. }), "{error:?}");
    error.to_string()
}

/// A file in a folder of its own.
fn scratch() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("locks.db");
    (folder, path)
}

#[tokio::test]
async fn all_files_are_private() {
    let (folder, path) = scratch();
    let engine = open(&path).unwrap();
    hold(&engine, LONG).await;
    for (file, mode) in [("", 0o600), ("-wal", 0o600), ("-shm", 0o600), ("-inbox", 0o700)] {
        let file = folder.path().join(format!("locks.db{file}"));
        let found = file.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!(found, mode, "{}", file.display());
    }
    let inbox = folder.path().join("locks.db-inbox");
    assert_eq!(inbox.read_dir().unwrap().count(), 1);
    engine.close().await;
    assert_eq!(inbox.read_dir().unwrap().count(), 0, "the socket is removed");
    assert!(matches!(engine.acquire(&claim(LONG), Wait::No).await, Err(Error::Closed)));
}

#[tokio::test]
async fn a_file_that_is_not_a_database_is_refused_and_unchanged() {
    let (_folder, path) = scratch();
    for text in ["short".to_owned(), "long ".repeat(4000)] {
        std::fs::write(&path, &text).unwrap();
        assert!(final_words(open(&path)).contains("is not a Lockset database"));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
    }
}

#[tokio::test]
async fn a_database_of_another_program_is_refused_and_unchanged() {
    for setup in ["PRAGMA application_id = 7", "SELECT 1"] {
        let (_folder, path) = scratch();
        let db = rusqlite::Connection::open(&path).unwrap();
        db.execute_batch(&format!("CREATE TABLE theirs (x); {setup}")).unwrap();
        drop(db);
        let before = std::fs::read(&path).unwrap();
        assert!(final_words(open(&path)).contains("another program"));
        assert_eq!(std::fs::read(&path).unwrap(), before);
    }
}

#[tokio::test]
async fn a_newer_format_is_refused() {
    let (_folder, path) = scratch();
    drop(open(&path).unwrap());
    let db = rusqlite::Connection::open(&path).unwrap();
    db.pragma_update(None, "user_version", 2).unwrap();
    drop(db);
    assert!(final_words(open(&path)).contains("use the newer lockset"));
}

#[tokio::test]
async fn a_missing_folder_is_reported() {
    let (folder, _) = scratch();
    assert!(final_words(open(&folder.path().join("no/locks.db"))).contains("does not exist"));
    assert!(final_words(open(folder.path())).contains("not a file"));
}

#[tokio::test]
async fn a_deleted_or_replaced_file_is_an_error_at_the_next_operation() {
    let (folder, path) = scratch();
    let engine = open(&path).unwrap();
    let (claim, grant) = hold(&engine, LONG).await;
    let away = folder.path().join("away");
    std::fs::rename(&path, &away).unwrap();
    let new = self::claim(LONG);
    for (words, replace) in [("was deleted or moved", false), ("was replaced", true)] {
        if replace {
            std::fs::write(&path, "another").unwrap();
        }
        // It is looked for once a millisecond at most.
        std::thread::sleep(std::time::Duration::from_millis(3));
        let error = engine.acquire(&new, Wait::No).await.unwrap_err();
        assert!(error.to_string().contains(words) && !error.is_retryable(), "{error}");
        // Who opens the file now may be granted the same lock, so ours can no longer be trusted.
        let note = Amend::Note(Note::default());
        let to = Token::new(grant.token.get() + 1);
        let renewed = engine.renew(&[(&claim, &grant)]).await.remove(0).unwrap();
        assert_eq!(renewed, Renewal::Lost(LossReason::Forgotten));
        for lost in
            [engine.amend(&claim, &grant, note).await, engine.raise(&claim, &grant, to).await]
        {
            assert!(matches!(lost, Err(Error::Lost { reason: LossReason::Forgotten, .. })));
        }
        let released = engine.release(&claim, &grant, None).await;
        assert!(matches!(released, Err(Error::NotHeld { .. })), "{released:?}");
    }
    // It is all there where the file is now.
    std::fs::rename(&away, &path).unwrap();
    engine.release(&claim, &grant, None).await.unwrap();
}

#[tokio::test]
async fn a_file_with_two_names_is_refused() {
    let (folder, path) = scratch();
    let engine = open(&path).unwrap();
    let (claim, grant) = hold(&engine, LONG).await;
    let other = folder.path().join("other.db");
    std::fs::hard_link(&path, &other).unwrap();
    for path in [&path, &other] {
        assert!(final_words(open(path)).contains("2 names"));
    }
    // A client that has it open already fails too, but its locks are not lost.
    let error = engine.renew(&[(&claim, &grant)]).await.remove(0).unwrap_err();
    assert!(error.to_string().contains("2 names"), "{error}");
    std::fs::remove_file(&other).unwrap();
    engine.renew(&[(&claim, &grant)]).await.remove(0).unwrap().renewed().unwrap();
}

#[tokio::test]
async fn a_file_mounted_by_itself_is_refused_and_its_folder_is_not() {
    let (folder, path) = scratch();
    let engine = open(&path).unwrap();
    hold(&engine, LONG).await;
    let (alone, inside) = (folder.path().join("alone.db"), folder.path().join("inside"));
    std::fs::write(&alone, "").unwrap();
    std::fs::create_dir(&inside).unwrap();
    let home = tempfile::tempdir().unwrap();
    let _alone = Bind::mount(&path, &alone);
    let _inside = Bind::mount(home.path(), &inside);
    assert!(final_words(open(&alone)).contains("mount the folder"));
    hold(&open(&inside.join("locks.db")).unwrap(), LONG).await;
}

/// What is at one path, seen at another one until this is dropped.
struct Bind(PathBuf);

impl Bind {
    fn mount(from: &Path, to: &Path) -> Self {
        run("mount", &["--bind", text(from), text(to)]);
        Self(to.to_owned())
    }
}

impl Drop for Bind {
    fn drop(&mut self) {
        run("umount", &["-l", text(&self.0)]);
    }
}

/// What no process of this boot can be.
const ELSEWHERE: &str = "1:1:1";

/// The machine's clock, as it stands in the file.
fn machine_time() -> i64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    now.tv_sec * 1_000_000_000 + now.tv_nsec
}

#[tokio::test]
async fn nothing_but_fences_and_cells_survives_a_reboot() {
    let (_folder, path) = scratch();
    let engine = open(&path).unwrap();
    let (held, before) = hold(&engine, LONG).await;
    let waits = claim(LONG);
    {
        let waiting = engine.acquire(&waits, Wait::Forever);
        tokio::pin!(waiting);
        assert!(futures_util::poll!(&mut waiting).is_pending());
    }
    engine.cell(&"jobs/1".parse().unwrap(), Version::ABSENT, Some(vec![7])).await.unwrap();
    drop(engine);
    let db = rusqlite::Connection::open(&path).unwrap();
    // The clock was an hour ahead. The processes of that boot cannot be seen.
    let earlier = "UPDATE lock SET expires = expires + 3600000000000, process = ?1,
                   seen = seen + 3600000000000 WHERE seq > 0";
    assert_eq!(db.execute(earlier, [ELSEWHERE]), Ok(2));
    // An hour ahead of the clock, so that only the fence can keep tokens growing.
    db.execute("UPDATE lock SET token = token + 3600000000 WHERE token > 0", []).unwrap();
    drop(db);
    let before = Grant { token: Token::new(before.token.get() + 3_600_000_000), ..before };
    let engine = open(&path).unwrap();
    let state = engine.inspect(&held.name).await.unwrap();
    assert!(state.holders.is_empty() && state.waiters.is_empty(), "{state:?}");
    let renewed = engine.renew(&[(&held, &before)]).await.remove(0);
    assert!(matches!(renewed, Ok(Renewal::Lost(LossReason::Forgotten))));
    let (_, after) = hold(&engine, LONG).await;
    assert_eq!(after.token.get(), before.token.get() + 1);
    let state = engine.list(&"".parse().unwrap()).await.unwrap().remove(0);
    assert_eq!(state.cell.unwrap().value, [7]);
}

#[tokio::test]
async fn a_different_boot_id_releases_no_lock() {
    let (folder, path) = scratch();
    let engine = open(&path).unwrap();
    let (claim, grant) = hold(&engine, LONG).await;
    let id = folder.path().join("boot_id");
    for text in ["11111111-2222-3333-4444-555555555555\n", ""] {
        std::fs::write(&id, text).unwrap();
        let mount = format!("mount --bind {} /proc/sys/kernel/random/boot_id", id.display());
        let script = format!("{mount} && exec \"$0\" \"$@\"");
        let elsewhere = ["unshare", "--mount", "sh", "-c", &script];
        let mut other = Other::start(&path, LONG, &elsewhere, &[("LOCKSET_TEST_WAITS", "1")]);
        other.says("waits");
        engine.renew(&[(&claim, &grant)]).await.remove(0).unwrap().renewed().unwrap();
    }
}

#[tokio::test]
async fn a_waiter_whose_death_cannot_be_detected_is_skipped_after_a_minute() {
    let (_folder, path) = scratch();
    let engine = open(&path).unwrap();
    let (held, grant) = hold(&engine, LONG).await;
    let gone = claim(LONG);
    {
        let waiting = engine.acquire(&gone, Wait::Forever);
        tokio::pin!(waiting);
        assert!(futures_util::poll!(&mut waiting).is_pending());
    }
    let claim = claim(LONG);
    let waiting = engine.acquire(&claim, Wait::Forever);
    tokio::pin!(waiting);
    let db = rusqlite::Connection::open(&path).unwrap();
    let seen = |ago: i64, process: &str| {
        let sql = "UPDATE lock SET seen = ?1, process = ?2 WHERE id = ?3";
        let id = gone.id.to_bits().to_be_bytes();
        let seen = machine_time() - ago * 1_000_000_000;
        assert_eq!(db.execute(sql, rusqlite::params![seen, process, id]), Ok(1));
    };
    let waiters = async || engine.inspect(&held.name).await.unwrap().waiters.len();
    // Who is seen to live need not show up.
    db.execute("UPDATE lock SET seen = 0 WHERE seen > 0", []).unwrap();
    assert!(futures_util::poll!(&mut waiting).is_pending());
    assert_eq!(waiters().await, 2);
    seen(50, ELSEWHERE);
    tokio::time::timeout(Duration::from_secs(2), &mut waiting).await.unwrap_err();
    assert_eq!(waiters().await, 2);
    seen(61, ELSEWHERE);
    assert_eq!(waiters().await, 1);
    tokio::time::timeout(Duration::from_secs(2), &mut waiting).await.unwrap_err();
    engine.release(&held, &grant, None).await.unwrap();
    let released = Instant::now();
    assert!(waiting.await.unwrap().granted().is_some());
    assert!(released.elapsed() < AT_ONCE, "{:?}", released.elapsed());
}

#[tokio::test]
async fn a_long_wait_refreshes_its_queue_entry() {
    let (_folder, path) = scratch();
    let engine = open(&path).unwrap();
    hold(&engine, LONG).await;
    let claim = claim(LONG);
    let waiting = engine.acquire(&claim, Wait::Forever);
    tokio::pin!(waiting);
    assert!(futures_util::poll!(&mut waiting).is_pending());
    let db = rusqlite::Connection::open(&path).unwrap();
    let a_while_ago = machine_time() - 30_000_000_000;
    db.execute("UPDATE lock SET seen = ?1 WHERE seen > 0", [a_while_ago]).unwrap();
    tokio::time::timeout(Duration::from_secs(2), &mut waiting).await.unwrap_err();
    let seen: i64 =
        db.query_row("SELECT seen FROM lock WHERE seen > 0", [], |row| row.get(0)).unwrap();
    assert!(machine_time() - seen < 5_000_000_000);
}

/// A file system of a few pages, unmounted when dropped.
struct Tmpfs(tempfile::TempDir);

impl Tmpfs {
    fn mount(options: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        run("mount", &["-t", "tmpfs", "-o", options, "lockset-test", text(folder.path())]);
        Self(folder)
    }

    fn remount(&self, options: &str) {
        run("mount", &["-o", &format!("remount,{options}"), text(self.0.path())]);
    }

    fn file(&self) -> PathBuf {
        self.0.path().join("locks.db")
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        run("umount", &["-l", text(self.0.path())]);
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn run(program: &str, arguments: &[&str]) {
    let status = Command::new(program).args(arguments).status().unwrap();
    assert!(status.success(), "{program} {arguments:?} (these tests need root): {status}");
}

#[tokio::test]
async fn a_read_only_file_system_is_reported() {
    let disk = Tmpfs::mount("size=4m");
    disk.remount("ro");
    assert!(final_words(open(&disk.file())).contains("read-only"));
    disk.remount("rw");
    drop(open(&disk.file()).unwrap());
    // Its reader ends at the next chance, and its socket with it.
    tokio::task::yield_now().await;
    disk.remount("ro");
    assert!(final_words(open(&disk.file())).contains("read-only"));
}

#[tokio::test]
async fn a_full_disk_is_reported_and_loses_nothing() {
    let disk = Tmpfs::mount("size=512k");
    let engine = open(&disk.file()).unwrap();
    let (claim, grant) = hold(&engine, LONG).await;
    let ballast = disk.0.path().join("ballast");
    let filled = std::fs::write(&ballast, vec![1; 1 << 20]);
    assert_eq!(filled.unwrap_err().kind(), std::io::ErrorKind::StorageFull);
    // A cell larger than the whole disk cannot be written, however the log is reused.
    let name = "big".parse().unwrap();
    let error = engine.cell(&name, Version::ABSENT, Some(vec![0; 1 << 20])).await.unwrap_err();
    assert!(error.to_string().contains("is full; free some space"), "{error}");
    assert!(error.is_retryable());
    std::fs::remove_file(&ballast).unwrap();
    let renewed = engine.renew(&[(&claim, &grant)]).await.remove(0).unwrap().renewed().unwrap();
    assert_eq!(renewed.token, grant.token);
    engine.release(&claim, &renewed, None).await.unwrap();
    hold(&engine, LONG).await;
}

/// What [`Other`] runs. As a test by itself it starts such a process, which must hold its lock.
#[test]
fn in_another_process() {
    let Some(path) = std::env::var_os("LOCKSET_TEST_FILE") else {
        let (_folder, path) = scratch();
        drop(Other::holding(&path, LONG, &[]));
        return;
    };
    let ttl = std::env::var("LOCKSET_TEST_TTL_MS").unwrap().parse().unwrap();
    let waits = std::env::var_os("LOCKSET_TEST_WAITS").is_some();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let engine = open(Path::new(&path)).unwrap();
        let claim = claim(Duration::from_millis(ttl));
        let acquire = engine.acquire(&claim, if waits { Wait::Forever } else { Wait::No });
        tokio::pin!(acquire);
        if waits {
            assert!(futures_util::poll!(&mut acquire).is_pending());
            println!("\nwaits");
        }
        assert!(acquire.await.unwrap().granted().is_some());
        println!("\nholds");
        // Until it is killed.
        std::future::pending::<()>().await;
    });
}

/// A process like ours, killed when dropped.
struct Other {
    child: Child,
    words: BufReader<std::process::ChildStdout>,
}

impl Other {
    fn holding(path: &Path, ttl: Duration, before: &[&str]) -> Self {
        let mut other = Self::start(path, ttl, before, &[]);
        other.says("holds");
        other
    }

    fn waiting(path: &Path, ttl: Duration) -> Self {
        let mut other = Self::start(path, ttl, &[], &[("LOCKSET_TEST_WAITS", "1")]);
        other.says("waits");
        other
    }

    fn start(path: &Path, ttl: Duration, before: &[&str], settings: &[(&str, &str)]) -> Self {
        let test = std::env::current_exe().unwrap();
        let mut whole = before.to_vec();
        whole.extend([text(&test), "--exact", "in_another_process", "--nocapture"]);
        let mut child = Command::new(whole[0])
            .args(&whole[1..])
            .env("LOCKSET_TEST_FILE", path)
            .env("LOCKSET_TEST_TTL_MS", ttl.as_millis().to_string())
            .envs(settings.iter().copied())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let words = BufReader::new(child.stdout.take().unwrap());
        Self { child, words }
    }

    fn says(&mut self, word: &str) {
        let mut line = String::new();
        while line.trim() != word {
            line.clear();
            assert!(self.words.read_line(&mut line).unwrap() > 0, "it ended before `{word}`");
        }
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // It may be dead already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test]
async fn a_waiter_succeeds_a_killed_holder_at_once() {
    let (_folder, path) = scratch();
    let engine = open(&path).unwrap();
    let mut other = Other::holding(&path, LONG, &[]);
    let claim = claim(LONG);
    let waiting = engine.acquire(&claim, Wait::Forever);
    tokio::pin!(waiting);
    assert!(futures_util::poll!(&mut waiting).is_pending());
    // Not waited for, so it becomes a zombie: its parent may never care.
    other.child.kill().unwrap();
    let killed = Instant::now();
    assert!(waiting.await.unwrap().granted().is_some());
    assert!(killed.elapsed() < AT_ONCE, "{:?}", killed.elapsed());
}

#[tokio::test]
async fn try_lock_succeeds_a_killed_holder_at_once() {
    let (_folder, path) = scratch();
    let engine = open(&path).unwrap();
    let mut other = Other::holding(&path, LONG, &[]);
    assert!(engine.acquire(&claim(LONG), Wait::No).await.unwrap().granted().is_none());
    other.kill();
    assert!(engine.list(&"".parse().unwrap()).await.unwrap().is_empty(), "it is held");
    hold(&engine, LONG).await;
}

#[tokio::test]
async fn a_client_is_notified_at_once_that_its_bound_process_died() {
    let (_folder, path) = scratch();
    let engine = open(&path).unwrap();
    let stand_in = |pid| {
        let (path, holder_process) = (Some(path.clone()), Some(pid));
        Local::open(LocalOptions { path, holder_process, ..LocalOptions::default() })
    };
    let mut process = Command::new("sleep").arg("60").spawn().unwrap();
    let client = stand_in(process.id()).unwrap();
    let mut signals = client.events();
    let (held, _) = hold(&client, LONG).await;
    let waits = claim(LONG);
    let waiting = client.acquire(&waits, Wait::Forever);
    tokio::pin!(waiting);
    assert!(futures_util::poll!(&mut waiting).is_pending());
    process.kill().unwrap();
    process.wait().unwrap();
    let mut told = Box::pin(tokio::time::timeout(AT_ONCE, signals.next()));
    hold(&engine, LONG).await;
    let lost = (&mut told).await.unwrap().unwrap();
    assert!(matches!(lost, Event::Lost(id, LossReason::Forgotten) if id == held.id), "{lost:?}");
    assert!(matches!(waiting.await, Ok(Admission::Forgotten)));
    let error = client.acquire(&claim(LONG), Wait::No).await.unwrap_err();
    assert!(error.to_string().contains("has ended"), "{error}");
    assert!(final_words(stand_in(process.id())).contains("is not running"));
}

#[tokio::test]
async fn a_killed_waiter_delays_no_other() {
    let (_folder, path) = scratch();
    let engine = open(&path).unwrap();
    let (held, grant) = hold(&engine, LONG).await;
    let mut other = Other::waiting(&path, LONG);
    let claim = claim(LONG);
    let waiting = engine.acquire(&claim, Wait::Forever);
    tokio::pin!(waiting);
    assert!(futures_util::poll!(&mut waiting).is_pending());
    other.kill();
    engine.release(&held, &grant, None).await.unwrap();
    let released = Instant::now();
    assert!(waiting.await.unwrap().granted().is_some());
    assert!(released.elapsed() < AT_ONCE, "{:?}", released.elapsed());
}

#[tokio::test]
async fn a_waiting_process_is_notified_by_the_release() {
    let (_folder, path) = scratch();
    let engine = open(&path).unwrap();
    let (held, grant) = hold(&engine, LONG).await;
    let mut other = Other::waiting(&path, LONG);
    engine.release(&held, &grant, None).await.unwrap();
    let released = Instant::now();
    other.says("holds");
    assert!(released.elapsed() < AT_ONCE, "{:?}", released.elapsed());
}

#[tokio::test]
async fn a_holder_in_another_pid_namespace_keeps_its_lease() {
    let (_folder, path) = scratch();
    let engine = open(&path).unwrap();
    let lease = Duration::from_millis(1500);
    let before = Instant::now();
    let elsewhere = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"];
    let mut other = Other::holding(&path, lease, &elsewhere);
    let granted = Instant::now();
    other.kill();
    assert!(engine.acquire(&claim(LONG), Wait::No).await.unwrap().granted().is_none());
    let claim = claim(LONG);
    assert!(engine.acquire(&claim, Wait::Forever).await.unwrap().granted().is_some());
    assert!(before.elapsed() >= lease, "not before its lease ends: {:?}", before.elapsed());
    assert!(granted.elapsed() < lease + AT_ONCE, "and then at once: {:?}", granted.elapsed());
}

/// It sees other start times than we do, and we than it; so neither takes the other for another
/// process with its pid.
#[tokio::test]
async fn a_process_in_another_time_namespace_is_not_taken_for_dead() {
    let (_folder, path) = scratch();
    let engine = open(&path).unwrap();
    let elsewhere = ["unshare", "--time", "--boottime", "100000", "--fork", "--kill-child"];
    let mut other = Other::holding(&path, LONG, &elsewhere);
    assert!(engine.acquire(&claim(LONG), Wait::No).await.unwrap().granted().is_none());
    other.kill();
    let claim = claim(LONG);
    let next = tokio::time::timeout(AT_ONCE, engine.acquire(&claim, Wait::Forever)).await;
    let grant = next.expect("its death is seen").unwrap().granted().unwrap();
    let mut other = Other::start(&path, LONG, &elsewhere, &[("LOCKSET_TEST_WAITS", "1")]);
    other.says("waits");
    engine.renew(&[(&claim, &grant)]).await.remove(0).unwrap().renewed().unwrap();
}

#[tokio::test]
async fn a_forked_child_holds_nothing_and_touches_nothing() {
    let (_folder, path) = scratch();
    let mut engine = Some(open(&path).unwrap());
    let (claim, grant) = hold(engine.as_ref().unwrap(), LONG).await;
    let forked = |error: Error| matches!(error, Error::Lost { reason: LossReason::Forked, .. });
    let answered = in_a_fork(|| {
        let engine = engine.take().unwrap();
        let renewed = engine.renew(&[(&claim, &grant)]).now_or_never().unwrap().remove(0);
        let released = engine.release(&claim, &grant, None).now_or_never().unwrap();
        let acquired = engine.acquire(&claim, Wait::Forever).now_or_never().unwrap();
        let withdrawn = engine.withdraw(&claim).now_or_never().unwrap();
        drop(engine);
        matches!(renewed, Ok(Renewal::Lost(LossReason::Forked)))
            && released.is_err_and(forked)
            && acquired.is_err_and(|error| error.to_string().contains("before a fork"))
            && withdrawn.is_err_and(|error| error.to_string().contains("before a fork"))
    });
    assert!(answered, "in the child");
    // The parent has everything as before, its inbox included.
    let engine = engine.unwrap();
    let second = open(&path).unwrap();
    let next = self::claim(LONG);
    let waiting = engine.acquire(&next, Wait::Forever);
    tokio::pin!(waiting);
    assert!(futures_util::poll!(&mut waiting).is_pending());
    second.release(&claim, &grant, None).await.unwrap();
    let released = Instant::now();
    assert!(waiting.await.unwrap().granted().is_some());
    assert!(released.elapsed() < AT_ONCE, "{:?}", released.elapsed());
}

/// Runs `work` in a forked child, and answers what it answered.
#[allow(unsafe_code)]
fn in_a_fork(work: impl FnOnce() -> bool) -> bool {
    unsafe extern "C" {
        fn fork() -> i32;
        fn _exit(code: i32) -> !;
        fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
    }
    // SAFETY: the child has one thread, takes no lock that another thread of the parent could
    // have held but the allocator's, which the C library looks after, and leaves by `_exit`, so
    // that nothing of the test harness runs twice. `status` outlives the call.
    unsafe {
        match fork() {
            0 => {
                let good = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
                _exit(if matches!(good, Ok(true)) { 0 } else { 1 })
            }
            child => {
                let mut status = -1;
                assert_eq!(waitpid(child, &mut status, 0), child);
                status == 0
            }
        }
    }
}
