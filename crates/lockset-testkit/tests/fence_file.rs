//! The laws of a fence on files, processes that are killed at every step, and bad input.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use async_trait::async_trait;
use lockset::fence::{FenceError, FenceMark, FenceStore, FencingToken, FileFence};
use lockset::{Name, Token};
use lockset_testkit::fence_laws::FencedRegister;
use lockset_testkit::fence_suite;

const WRITER: &str = env!("CARGO_BIN_EXE_fence_file_writer");
const HIDDEN: &str = ".lockset-fence";

struct Files {
    temporary: tempfile::TempDir,
    fence: std::sync::Mutex<FileFence>,
}

impl Files {
    async fn start() -> Self {
        let temporary = tempfile::tempdir().unwrap();
        let fence = FileFence::open(temporary.path().join("data")).unwrap();
        Self { temporary, fence: fence.into() }
    }

    fn folder(&self) -> PathBuf {
        self.temporary.path().join("data")
    }

    fn away(&self) -> PathBuf {
        self.temporary.path().join("away")
    }

    fn fence(&self) -> FileFence {
        self.fence.lock().unwrap().clone()
    }
}

#[async_trait]
impl FencedRegister for Files {
    async fn write(
        &self,
        resource: &Name,
        lock: &Name,
        token: &FencingToken,
        value: &str,
    ) -> Result<(), FenceError> {
        let (fence, resource, lock) = (self.fence(), resource.to_string(), lock.clone());
        let (token, value) = (token.clone(), value.to_owned());
        let writing = move || fence.write(resource, lock, token, value.as_bytes());
        tokio::task::spawn_blocking(writing).await.unwrap()
    }

    async fn read(&self, resource: &Name) -> Option<String> {
        fs::read_to_string(self.folder().join(resource.as_str())).ok()
    }

    async fn marks(&self) -> Result<Vec<FenceMark>, FenceError> {
        self.fence().marks().await
    }

    async fn restart(&self) {
        if self.away().exists() {
            fs::remove_file(self.folder()).unwrap();
            fs::rename(self.away(), self.folder()).unwrap();
        }
        *self.fence.lock().unwrap() = FileFence::open(self.folder()).unwrap();
    }

    /// Tests may run as root, whom no permission stops: a file takes the folder's place.
    async fn stop(&self) {
        fs::rename(self.folder(), self.away()).unwrap();
        fs::write(self.folder(), "not a folder").unwrap();
    }
}

fence_suite!(Files::start());

fn token(value: u64) -> FencingToken {
    FencingToken::new("orders", Token::new(value)).unwrap()
}

fn write(folder: &Path, value: u64, data: &str) -> Result<(), FenceError> {
    FileFence::open(folder)?.write("stock", "orders", token(value), data.as_bytes())
}

fn mark(folder: &Path) -> Option<u64> {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let marks = runtime.block_on(FileFence::open(folder).unwrap().marks()).unwrap();
    assert!(marks.len() <= 1, "{marks:?}");
    marks.first().map(|mark| mark.token.get())
}

fn mark_file(folder: &Path) -> PathBuf {
    let mut files = fs::read_dir(folder.join(HIDDEN)).unwrap().map(|file| file.unwrap().path());
    files.find(|file| file.extension().is_some_and(|end| end == "mark")).unwrap()
}

/// The program that kills another one before its Nth system call.
fn kill_at(folder: &Path) -> PathBuf {
    let (source, program) = (folder.join("kill_at.c"), folder.join("kill_at"));
    fs::write(&source, include_str!("../src/stage/kill_at.c")).unwrap();
    let mut cc = Command::new("cc");
    cc.args(["-O1", "-Wall", "-Werror", "-o"]).args([&program, &source]);
    assert!(cc.status().unwrap().success(), "kill_at.c does not compile");
    program
}

/// Kills a writer before each of its system calls, and checks what it left each time. Returns how
/// often it left the old data with the old mark, the old data with the new mark, and the new data.
fn kill_at_every_step(
    prepare: impl Fn(&Path),
    old: Option<&str>,
    old_mark: Option<u64>,
) -> [u32; 3] {
    let temporary = tempfile::tempdir().unwrap();
    let kill_at = kill_at(temporary.path());
    let new = "new".repeat(20_000);
    let mut left = [0; 3];
    for step in 1.. {
        let folder = temporary.path().join(format!("data{step}"));
        prepare(&folder);
        let mut command = Command::new(&kill_at);
        command.arg(step.to_string()).arg(WRITER).arg(&folder);
        let outcome = command.args(["stock", "orders=6", &new]).status().unwrap().code();
        assert!(matches!(outcome, Some(0 | 99)), "step {step}: {outcome:?}");
        let data = fs::read_to_string(folder.join("stock")).ok();
        let is_new = data.as_deref() == Some(new.as_str());
        assert!(is_new || data.as_deref() == old, "step {step}: the file is torn");
        let mark = mark(&folder);
        assert!(mark == Some(6) || mark == old_mark && !is_new, "step {step}: {mark:?}");
        left[if is_new { 2 } else { usize::from(mark == Some(6)) }] += 1;
        if mark == Some(6) {
            let stale = write(&folder, 5, "late").unwrap_err();
            assert!(stale.is_stale(), "step {step}: {stale}");
        }
        write(&folder, 6, "again").unwrap();
        assert_eq!(fs::read_to_string(folder.join("stock")).unwrap(), "again");
        assert!(write(&folder, 5, "late").unwrap_err().is_stale());
        let files = fs::read_dir(folder.join(HIDDEN)).unwrap().count();
        assert_eq!(files, 2, "step {step}: the lock and the mark, and nothing that was left over");
        fs::remove_dir_all(&folder).unwrap();
        if outcome == Some(0) {
            break;
        }
    }
    left
}

#[test]
fn a_writer_that_is_killed_at_any_step_leaves_the_old_or_the_new_file() {
    let prepare = |folder: &Path| write(folder, 5, "old").unwrap();
    let left = kill_at_every_step(prepare, Some("old"), Some(5));
    assert!(left.iter().all(|times| *times > 1), "not all steps were seen: {left:?}");
}

#[test]
fn a_first_writer_may_be_killed_at_any_step_too() {
    let left = kill_at_every_step(|_| {}, None, None);
    assert!(left.iter().all(|times| *times > 1), "not all steps were seen: {left:?}");
}

#[test]
fn processes_that_write_at_once_leave_the_greatest_token() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = temporary.path().join("data");
    let start = |value: u64| {
        let mut command = Command::new(WRITER);
        command.arg(&folder).args(["stock", &format!("orders={value}"), &value.to_string()]);
        command.stderr(std::process::Stdio::piped()).spawn().unwrap()
    };
    // All are started before the first is awaited.
    let writers: Vec<_> = (1..=12).rev().map(|value| (value, start(value))).collect();
    for (value, writer) in writers {
        let output = writer.wait_with_output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success() || error.contains("Stale"), "{value}: {error}");
        assert!(output.status.success() || value < 12, "the greatest was rejected: {error}");
    }
    assert_eq!(fs::read_to_string(folder.join("stock")).unwrap(), "12");
    assert_eq!(mark(&folder), Some(12));
}

#[test]
fn a_process_waits_for_the_one_that_writes() {
    let temporary = tempfile::tempdir().unwrap();
    write(temporary.path(), 5, "old").unwrap();
    let lock = fs::File::open(temporary.path().join(HIDDEN).join("lock")).unwrap();
    lock.lock().unwrap();
    let folder = temporary.path().to_path_buf();
    let writer = std::thread::spawn(move || write(&folder, 6, "new"));
    // A writer that did not wait would be done by now: it has nothing else to wait for.
    let began = std::time::Instant::now();
    while began.elapsed() < std::time::Duration::from_millis(300) {
        assert_eq!(fs::read_to_string(temporary.path().join("stock")).unwrap(), "old");
        assert!(!writer.is_finished());
    }
    lock.unlock().unwrap();
    writer.join().unwrap().unwrap();
    assert_eq!(fs::read_to_string(temporary.path().join("stock")).unwrap(), "new");
}

#[test]
fn a_mark_that_cannot_be_understood_rejects_every_write() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = temporary.path();
    write(folder, 5, "old").unwrap();
    let file = mark_file(folder);
    let mark = fs::read_to_string(&file).unwrap();
    assert_eq!(mark, r#"{"version":1,"resource":"stock","lock":"orders","token":"5"}"#);
    let newer = r#"{"version":2,"what":"else"}"#.to_owned();
    let cases = [
        (newer, "has version 2"),
        (String::new(), "is not a mark"),
        (mark[..20].to_owned(), "is not a mark"),
        (mark.replace("\"5\"", "\"0\""), "is not a mark"),
        (mark.replace("\"5\"", "\"9223372036854775808\""), "is not a mark"),
        (mark.replace("\"5\"", "\"-5\""), "is not a mark"),
        (mark.replace("stock", "../stock"), "is not a mark"),
        (mark.replace("orders", "other"), "was moved or edited"),
        ("x".repeat(100_000), "is not a mark"),
    ];
    for (text, expected) in cases {
        fs::write(&file, &text).unwrap();
        let error = write(folder, 9, "new").unwrap_err();
        assert!(matches!(error, FenceError::Store { .. }), "{text:.60}: {error}");
        assert!(error.to_string().contains(expected), "{text:.60}: {error}");
        assert!(error.to_string().contains(file.to_str().unwrap()), "{error}");
        assert_eq!(fs::read_to_string(folder.join("stock")).unwrap(), "old");
        assert_eq!(fs::read_to_string(&file).unwrap(), text, "the mark was changed");
    }
    fs::write(&file, &mark).unwrap();
    write(folder, 9, "new").unwrap();
}

#[test]
fn a_name_cannot_leave_the_folder() {
    let temporary = tempfile::tempdir().unwrap();
    let (folder, outside) = (temporary.path().join("data"), temporary.path().join("outside"));
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("victim"), "safe").unwrap();
    let fence = FileFence::open(&folder).unwrap();
    let absolute = outside.join("victim");
    let too_long = "x".repeat(256);
    let names = [
        "",
        ".",
        "..",
        "../outside/victim",
        "a/../../outside/victim",
        "./stock",
        "a//b",
        "stock/",
        ".lockset-fence/lock",
        ".Lockset-Fence/x",
        ".lockset-fence",
        "a\0b",
        &too_long,
        absolute.to_str().unwrap(),
    ];
    for name in names {
        let error = fence.write(name, "orders", token(9), b"new").unwrap_err();
        assert!(matches!(error, FenceError::Invalid(_)), "{name:?}: {error}");
    }
    symlink(&outside, folder.join("link")).unwrap();
    symlink(outside.join("victim"), folder.join("file")).unwrap();
    fs::create_dir(folder.join("sub")).unwrap();
    for name in ["link/victim", "file", "sub", "missing/stock"] {
        let error = fence.write(name, "orders", token(9), b"new").unwrap_err();
        assert!(matches!(error, FenceError::Store { .. }), "{name:?}: {error}");
    }
    assert_eq!(fs::read_to_string(outside.join("victim")).unwrap(), "safe");
    assert_eq!(mark(&folder), None, "a write that cannot be made has raised a mark");
    fence.write("sub/stock", "orders", token(9), b"new").unwrap();
    assert_eq!(fs::read_to_string(folder.join("sub/stock")).unwrap(), "new");
}

#[test]
fn files_are_private_and_keep_their_permissions() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = temporary.path().join("data");
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    write(&folder, 5, "old").unwrap();
    assert_eq!((mode(&folder), mode(&folder.join(HIDDEN))), (0o700, 0o700));
    assert_eq!((mode(&folder.join("stock")), mode(&mark_file(&folder))), (0o600, 0o600));
    fs::set_permissions(folder.join("stock"), fs::Permissions::from_mode(0o644)).unwrap();
    write(&folder, 6, "new").unwrap();
    assert_eq!(mode(&folder.join("stock")), 0o644);
}

#[test]
fn a_folder_that_cannot_be_made_is_an_error() {
    let temporary = tempfile::tempdir().unwrap();
    fs::write(temporary.path().join("file"), "").unwrap();
    for name in ["file", "file/data", "missing/data"] {
        let error = FileFence::open(temporary.path().join(name)).unwrap_err();
        assert!(error.to_string().contains(name), "{error}");
    }
}
