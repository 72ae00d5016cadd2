//! The fence in SQLite: its laws, bad input, and other programs that use only SQL.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use async_trait::async_trait;
use lockset::fence::{
    FenceError, FenceMark, FenceStore, FencingToken, SqliteFence, SqliteFenceStore,
};
use lockset::{Name, Token};
use lockset_testkit::fence_laws::FencedRegister;
use lockset_testkit::python::PythonPeer;
use rusqlite::{Connection, TransactionBehavior};

const TABLES: &str = include_str!("../../lockset/src/fence/sqlite.sql");
const TRIGGERS: &str = include_str!("../../lockset/src/fence/sqlite_trigger.sql");

/// A register in a file, written in transactions that the fence checks.
struct SqliteRegister {
    folder: tempfile::TempDir,
    /// A connection that has locked the whole file.
    stopped: Mutex<Option<Connection>>,
}

impl SqliteRegister {
    async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let register = Self { folder, stopped: Mutex::new(None) };
        let db = register.connect();
        db.execute_batch("CREATE TABLE register (resource TEXT PRIMARY KEY, value TEXT)").unwrap();
        register
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("data.db")
    }

    /// Each write has a connection of its own, as another process would have it.
    fn connect(&self) -> Connection {
        let db = Connection::open(self.path()).unwrap();
        let is_stopped = self.stopped.lock().unwrap().is_some();
        let patience = if is_stopped { 50 } else { 20_000 };
        db.busy_timeout(Duration::from_millis(patience)).unwrap();
        db
    }
}

#[async_trait]
impl FencedRegister for SqliteRegister {
    async fn write(
        &self,
        resource: &Name,
        lock: &Name,
        token: &FencingToken,
        value: &str,
    ) -> Result<(), FenceError> {
        let mut db = self.connect();
        let fence = SqliteFence::new(&db, resource)?;
        // Deferred, so that it is the fence that takes the write lock.
        let write = db.transaction().unwrap();
        fence.admit(&write, lock, token)?;
        write
            .execute("INSERT OR REPLACE INTO register VALUES (?1, ?2)", [resource.as_str(), value])
            .unwrap();
        write.commit().unwrap();
        Ok(())
    }

    async fn read(&self, resource: &Name) -> Option<String> {
        let select = "SELECT value FROM register WHERE resource = ?1";
        self.connect().query_row(select, [resource.as_str()], |row| row.get(0)).ok()
    }

    async fn marks(&self) -> Result<Vec<FenceMark>, FenceError> {
        let path = self.path();
        let open = tokio::task::spawn_blocking(|| SqliteFenceStore::open(path));
        open.await.unwrap()?.marks().await
    }

    async fn restart(&self) {
        *self.stopped.lock().unwrap() = None;
    }

    async fn stop(&self) {
        let db = self.connect();
        db.execute_batch("BEGIN EXCLUSIVE").unwrap();
        *self.stopped.lock().unwrap() = Some(db);
    }
}

lockset_testkit::fence_suite!(SqliteRegister::start());

fn token(lock: &str, token: u64) -> FencingToken {
    FencingToken::new(lock, Token::new(token)).unwrap()
}

fn count(db: &Connection, table: &str) -> i64 {
    db.query_row(&format!("SELECT count FROM {table}"), [], |row| row.get(0)).unwrap()
}

fn marks(db: &Connection) -> Vec<(String, String, i64)> {
    let mut marks = db.prepare("SELECT * FROM lockset_fence_marks ORDER BY 1, 2").unwrap();
    let rows = marks.query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?))).unwrap();
    rows.map(Result::unwrap).collect()
}

#[test]
fn a_check_outside_a_transaction_fails() {
    let mut db = Connection::open_in_memory().unwrap();
    let fence = SqliteFence::new(&db, "stock").unwrap();
    let error = fence.admit(&db, "orders", token("orders", 7)).unwrap_err();
    assert!(error.to_string().contains("outside a transaction"), "{error}");
    assert_eq!(marks(&db), []);
    let write = db.transaction().unwrap();
    fence.admit(&write, "orders", token("orders", 7)).unwrap();
    drop(write);
    assert_eq!(marks(&db), [], "a write that was rolled back left its mark");
}

#[test]
fn two_resources_are_written_together_or_not_at_all() {
    let mut db = Connection::open_in_memory().unwrap();
    db.execute_batch("CREATE TABLE stock (count); INSERT INTO stock VALUES (0)").unwrap();
    let stock = SqliteFence::new(&db, "stock").unwrap();
    let invoices = SqliteFence::new(&db, "invoices").unwrap();
    let write = db.transaction().unwrap();
    invoices.admit(&write, "orders", token("orders", 8)).unwrap();
    write.commit().unwrap();

    let write = db.transaction().unwrap();
    stock.admit(&write, "orders", token("orders", 7)).unwrap();
    write.execute("UPDATE stock SET count = 7", []).unwrap();
    assert!(invoices.admit(&write, "orders", token("orders", 7)).unwrap_err().is_stale());
    write.rollback().unwrap();
    assert_eq!(count(&db, "stock"), 0);
    assert_eq!(marks(&db), [("invoices".into(), "orders".into(), 8)]);
}

#[test]
fn names_that_are_not_valid_are_rejected() {
    let mut db = Connection::open_in_memory().unwrap();
    assert!(matches!(SqliteFence::new(&db, ""), Err(FenceError::Invalid(_))));
    let fence = SqliteFence::new(&db, "stock").unwrap();
    let write = db.transaction().unwrap();
    let error = fence.admit(&write, "/orders", token("orders", 7)).unwrap_err();
    assert!(matches!(error, FenceError::Invalid(_)), "{error}");
    let rejected = "INSERT INTO lockset_fence_marks VALUES ('stock', 'orders', ";
    for token in ["0", "-1", "9223372036854775808", "'x'", "NULL", "1.5"] {
        assert!(write.execute_batch(&format!("{rejected}{token})")).is_err(), "{token}");
    }
}

#[test]
fn tables_of_a_newer_version_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("data.db");
    let db = Connection::open(&path).unwrap();
    SqliteFence::new(&db, "stock").unwrap();
    SqliteFence::new(&db, "stock").unwrap();
    db.execute_batch("UPDATE lockset_fence_version SET version = 2").unwrap();
    let error = SqliteFence::new(&db, "stock").unwrap_err().to_string();
    assert!(error.contains("version 2") && error.contains("update the program"), "{error}");
    let error = SqliteFenceStore::open(&path).unwrap_err().to_string();
    assert!(error.contains("version 2"), "{error}");
    // The file that users install does not change the version either.
    db.execute_batch(TABLES).unwrap();
    assert!(SqliteFence::new(&db, "stock").is_err());
}

#[test]
fn an_older_transaction_that_is_paused_blocks_a_newer_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("data.db");
    let (mut older, mut newer) =
        (Connection::open(&path).unwrap(), Connection::open(&path).unwrap());
    older.execute_batch("CREATE TABLE stock (count); INSERT INTO stock VALUES (0)").unwrap();
    newer.busy_timeout(Duration::ZERO).unwrap();
    let fence = SqliteFence::new(&older, "stock").unwrap();

    let paused = older.transaction().unwrap();
    fence.admit(&paused, "orders", token("orders", 7)).unwrap();
    let write = newer.transaction().unwrap();
    let error = fence.admit(&write, "orders", token("orders", 8)).unwrap_err();
    assert!(error.to_string().contains("another connection is writing"), "{error}");
    drop(write);
    paused.execute("UPDATE stock SET count = 7", []).unwrap();
    paused.commit().unwrap();

    let write = newer.transaction().unwrap();
    fence.admit(&write, "orders", token("orders", 8)).unwrap();
    write.execute("UPDATE stock SET count = 8", []).unwrap();
    write.commit().unwrap();
    let late = older.transaction().unwrap();
    assert!(fence.admit(&late, "orders", token("orders", 7)).unwrap_err().is_stale());
    drop(late);
    assert_eq!(count(&older, "stock"), 8);
}

/// A transaction that read before a newer one committed cannot write any more.
#[test]
fn a_transaction_with_an_old_snapshot_is_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("data.db");
    let (mut older, mut newer) =
        (Connection::open(&path).unwrap(), Connection::open(&path).unwrap());
    older.pragma_update(None, "journal_mode", "WAL").unwrap();
    let fence = SqliteFence::new(&older, "stock").unwrap();
    let late = older.transaction().unwrap();
    assert_eq!(marks(&late), []);
    let write = newer.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
    fence.admit(&write, "orders", token("orders", 8)).unwrap();
    write.commit().unwrap();
    let error = fence.admit(&late, "orders", token("orders", 7)).unwrap_err();
    assert!(matches!(error, FenceError::Store { .. }), "{error}");
}

#[tokio::test]
async fn a_store_is_private_and_notices_that_its_file_was_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("marks.db");
    let store = SqliteFenceStore::open(&path).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let (resource, lock) = ("printer".parse().unwrap(), "jobs".parse().unwrap());
    store.admit(&resource, &lock, &token("jobs", 8)).await.unwrap();
    let again = SqliteFenceStore::open(&path).unwrap();
    let late = again.admit(&resource, &lock, &token("jobs", 7)).await;
    assert!(late.unwrap_err().is_stale());
    let mark = FenceMark::new(resource.clone(), lock.clone(), Token::new(8));
    assert_eq!(again.marks().await.unwrap(), [mark]);

    std::fs::rename(&path, folder.path().join("old.db")).unwrap();
    let error = store.admit(&resource, &lock, &token("jobs", 9)).await.unwrap_err();
    assert!(error.to_string().contains("removed or replaced"), "{error}");
    let new = SqliteFenceStore::open(&path).unwrap();
    assert!(store.marks().await.is_err());
    assert_eq!(new.marks().await.unwrap(), []);
}

#[test]
fn a_file_that_is_no_database_is_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("text");
    std::fs::write(
        &path,
        "this is not a database, but a text of more than a hundred bytes. ".repeat(9),
    )
    .unwrap();
    for path in [path.as_path(), folder.path(), Path::new(""), &folder.path().join("no/such")] {
        let error = SqliteFenceStore::open(path).unwrap_err();
        assert!(matches!(error, FenceError::Store { .. }), "{error}");
    }
}

fn sqlite3(path: &Path, script: &str) -> Output {
    let mut child = Command::new("sqlite3")
        .arg("-bail")
        .arg(path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

/// The triggers reject what the command `sqlite3` writes with a wrong token or none.
#[test]
fn triggers_reject_writes_of_the_sqlite_shell() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("data.db");
    let table = "CREATE TABLE stock (item TEXT PRIMARY KEY, count INTEGER);
        INSERT INTO stock VALUES ('apple', 1), ('pear', 2);";
    let made = sqlite3(&path, &format!("{TABLES}{TABLES}{table}{TRIGGERS}"));
    assert!(made.status.success(), "{made:?}");
    let accepted = [
        "UPDATE stock SET count = 5, fence_token = 8 WHERE item = 'apple'",
        "UPDATE stock SET count = 6, fence_token = 8",
        "INSERT INTO stock (item, count, fence_token) VALUES ('fig', 3, 9)",
        // It inserts nothing, but raises the mark: `OR IGNORE` must not skip that.
        "INSERT OR IGNORE INTO stock (item, count, fence_token) VALUES ('fig', 4, 10)",
    ];
    for statement in accepted {
        let output = sqlite3(&path, statement);
        assert!(output.status.success(), "{statement}: {output:?}");
    }
    let rejected = [
        ("UPDATE stock SET count = 0, fence_token = 9", "stale"),
        ("UPDATE OR IGNORE stock SET count = 0, fence_token = 9", "stale"),
        ("INSERT OR IGNORE INTO stock (item, count, fence_token) VALUES ('kiwi', 3, 9)", "stale"),
        ("INSERT INTO stock (item, count, fence_token) VALUES ('kiwi', 3, 1)", "stale"),
        ("INSERT OR REPLACE INTO stock (item, count, fence_token) VALUES ('fig', 0, 8)", "stale"),
        ("UPDATE stock SET count = 0", "no token"),
        ("UPDATE OR IGNORE stock SET count = 0", "no token"),
        ("UPDATE stock SET count = 0, fence_token = NULL", "no token"),
        ("INSERT INTO stock (item, count) VALUES ('kiwi', 3)", "no token"),
        ("UPDATE stock SET count = 0, fence_token = 0", "not valid"),
        ("UPDATE stock SET count = 0, fence_token = -9", "not valid"),
        ("UPDATE stock SET count = 0, fence_token = 'x'", "not valid"),
        ("UPDATE stock SET count = 0, fence_token = 9223372036854775808", "not valid"),
        ("DELETE FROM stock", "DELETE cannot"),
    ];
    for (statement, reason) in rejected {
        let output = sqlite3(&path, statement);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.contains(reason), "{statement}: {error}");
    }
    let rows =
        sqlite3(&path, "SELECT * FROM stock ORDER BY item; SELECT * FROM lockset_fence_marks");
    let rows = String::from_utf8(rows.stdout).unwrap();
    assert_eq!(rows, "apple|6|\nfig|3|\npear|6|\nstock|orders|10\n");
}

#[test]
fn a_python_program_uses_the_fence_by_sql() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("data.db");
    let mut db = Connection::open(&path).unwrap();
    let fence = SqliteFence::new(&db, "stock").unwrap();
    let tables = "CREATE TABLE plain (count); INSERT INTO plain VALUES (0);
        CREATE TABLE stock (count); INSERT INTO stock VALUES (0);";
    db.execute_batch(&format!("{tables}{TRIGGERS}")).unwrap();
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/peers/fence.py");
    let mut python = PythonPeer::start(&program, &["sqlite", path.to_str().unwrap()]);
    assert_eq!(python.ask("admit 7 70"), "yes");
    assert_eq!(count(&db, "plain"), 70);
    let write = db.transaction().unwrap();
    fence.admit(&write, "orders", token("orders", 8)).unwrap();
    write.commit().unwrap();
    assert_eq!(python.ask("admit 7 71"), "no Rejected stale");
    assert_eq!(count(&db, "plain"), 70);
    assert_eq!(python.ask("set 8 80"), "yes");
    for order in ["set 7 81", "set - 81", "set 0 81", "set 9223372036854775808 81"] {
        let reply = python.ask(order);
        assert!(reply.starts_with("no IntegrityError lockset:"), "{order}: {reply}");
    }
    assert_eq!(count(&db, "stock"), 80);
    assert_eq!(marks(&db), [("stock".into(), "orders".into(), 8)]);
}
