//! The SQLite file: opening it, and running transactions on it.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rusqlite::config::DbConfig;
use rusqlite::{Connection, ErrorCode, OpenFlags};

use super::file::LockFile;
use super::inbox::{Inbox, Message};
use super::process::Processes;
use super::{LocalOptions, error_from, error_of};
use crate::clock::{Clock, Moment};
use crate::engine::ClaimId;
use crate::engine::common::tombstones::Tombstones;
use crate::error::{Error, Result};
use crate::fork;
use crate::report::report;
use crate::sync;

/// "Lkst": distinguishes our files from other SQLite files.
const APPLICATION_ID: i32 = 0x4C6B_7374;
/// The stored format.
const FORMAT: i32 = 1;
/// The log is written back in the background after this many transactions of this client, or if it
/// has this many bytes at the start. More means fewer syncs; fewer means that the first process
/// after a pause reads it faster.
const WRITE_BACK_EVERY: u32 = 500;
const WRITE_BACK_FROM: u64 = 1 << 21;
/// A log of this many pages is written back by the client that wrote the last one, while others
/// wait.
const CHECKPOINT_PAGES: u32 = 4000;
/// How often, in ns, it is checked that the path still leads to the file. A check costs as much as
/// a statement, and the file can be replaced right after it anyway.
const CHECK_PATH_EVERY: u64 = 1_000_000;
/// The longest pause between two attempts on a busy file.
const MAX_PAUSE: Duration = Duration::from_millis(10);

/// How long another process may take to set the file up.
const SETUP_TIMEOUT: Duration = Duration::from_secs(5);

const FLAGS: OpenFlags = OpenFlags::SQLITE_OPEN_READ_WRITE
    .union(OpenFlags::SQLITE_OPEN_NO_MUTEX)
    .union(OpenFlags::SQLITE_OPEN_PRIVATE_CACHE);
const WRITE: &str = "BEGIN IMMEDIATE";
const READ: &str = "BEGIN";

/// The result of SQLite inside a transaction. Lockset's own errors are values inside it: they do
/// not roll the transaction back.
pub(super) type SqlResult<T> = Result<T, rusqlite::Error>;

/// The file, and everything that a transaction on it needs.
#[derive(Debug)]
pub(super) struct Store {
    pub(super) file: LockFile,
    pub(super) inbox: Inbox,
    pub(super) processes: Processes,
    time: MachineClock,
    runtime: tokio::runtime::Handle,
    forks: u32,
    state: Mutex<StoreState>,
    writing_back: Arc<AtomicBool>,
}

/// What only one transaction at a time may use.
#[derive(Debug)]
struct StoreState {
    /// `None` if it is closed, or has to be opened again.
    connection: Option<Connection>,
    closed: bool,
    /// How many times the file was opened.
    opened: u64,
    withdrawn: Tombstones,
    watches: Watches,
    /// Transactions since the log was last written back.
    writes: u32,
    /// When the path was last seen to lead to the file.
    path_checked: u64,
}

/// The rows of this client's watches in the file.
#[derive(Debug, Default)]
pub(super) struct Watches {
    /// Watches that are open. A late transaction must not insert a row for any other.
    wanted: HashSet<i64>,
    /// Watches that ended and may still have a row. The next write transaction removes it.
    ended: Vec<i64>,
}

impl Watches {
    pub(super) fn is_open(&self, id: i64) -> bool {
        self.wanted.contains(&id)
    }
}

impl Store {
    pub(super) fn open(options: &LocalOptions) -> Result<Self> {
        // A new file is created through a second descriptor. Closing it would drop the locks that
        // another thread has just taken on the file.
        static OPENING: Mutex<()> = Mutex::new(());
        fork::notice();
        let runtime = tokio::runtime::Handle::try_current().map_err(|error| {
            error_from("it must be opened inside a tokio runtime", false, error)
        })?;
        let processes = Processes::new(options.holder_process, runtime.clone())?;
        let (file, connection) = {
            let _alone = sync::lock(&OPENING);
            let file = LockFile::prepare(options.path.as_deref(), options.mode)?;
            let connection = connect(&file).map_err(|error| explain(&file, error))??;
            (file, connection)
        };
        file.check_unchanged()?;
        let inbox = Inbox::open(file.path(), options.mode, &runtime)?;
        inbox.sweep();
        let store = Self {
            inbox,
            processes,
            time: MachineClock::of_this_process(),
            runtime,
            forks: fork::generation(),
            state: Mutex::new(StoreState {
                connection: Some(connection),
                closed: false,
                opened: 1,
                withdrawn: Tombstones::default(),
                watches: Watches::default(),
                writes: 0,
                path_checked: 0,
            }),
            writing_back: Arc::default(),
            file,
        };
        if std::fs::metadata(store.file.log()).is_ok_and(|log| log.len() > WRITE_BACK_FROM) {
            store.write_back();
        }
        Ok(store)
    }

    /// Writes the log back to the file, on another thread and another connection: that waits for
    /// the disk, and no request should wait with it.
    fn write_back(&self) {
        if self.writing_back.swap(true, Ordering::AcqRel) {
            return;
        }
        let (path, done) = (self.file.path().to_owned(), self.writing_back.clone());
        self.runtime.spawn_blocking(move || {
            let written = Connection::open_with_flags(&path, FLAGS).and_then(|db| {
                db.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
                db.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(()))
            });
            if let Err(error) = written {
                report!(debug, error = error, "the checkpoint failed; another process will do it");
            }
            done.store(false, Ordering::Release);
        });
    }

    /// Whether this is a child of the process that opened the file. SQLite's locks do not survive
    /// a fork, and the child's first step could damage the file.
    pub(super) fn is_forked(&self) -> bool {
        fork::generation() != self.forks
    }

    /// Fails in such a child. Checked before any mutex is locked, which may be locked there for
    /// ever.
    pub(super) fn check_not_forked(&self) -> Result<()> {
        match self.is_forked() {
            true => Err(error_of("it was opened before a fork; open it again in the child")),
            false => Ok(()),
        }
    }

    /// Runs `work` as one transaction, retried from its start until it is committed or
    /// `busy_timeout` is over.
    ///
    /// It normally runs on this thread: it is a few system calls. Only if the file stays busy does
    /// it move to a blocking thread, and there it continues even if this future is dropped.
    pub(super) async fn write<T: Send + 'static>(
        self: &Arc<Self>,
        busy_timeout: Duration,
        work: impl FnMut(&mut Transaction<'_>) -> SqlResult<T> + Send + 'static,
    ) -> Result<T> {
        self.transact(WRITE, busy_timeout, work).await
    }

    /// The same for work that changes nothing. It blocks no writer.
    pub(super) async fn read<T: Send + 'static>(
        self: &Arc<Self>,
        busy_timeout: Duration,
        work: impl FnMut(&mut Transaction<'_>) -> SqlResult<T> + Send + 'static,
    ) -> Result<T> {
        self.transact(READ, busy_timeout, work).await
    }

    async fn transact<T: Send + 'static>(
        self: &Arc<Self>,
        begin: &'static str,
        busy_timeout: Duration,
        mut work: impl FnMut(&mut Transaction<'_>) -> SqlResult<T> + Send + 'static,
    ) -> Result<T> {
        if let Some(done) = self.attempt(begin, &mut work)? {
            return Ok(done);
        }
        let store = self.clone();
        let retried = move || store.retry(begin, busy_timeout, &mut work);
        let retried = self.runtime.spawn_blocking(retried);
        match retried.await {
            Ok(outcome) => outcome,
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(error) => Err(error_from("its runtime has ended", false, error)),
        }
    }

    /// One attempt, for work that may be left undone.
    pub(super) fn try_write(&self, mut work: impl FnMut(&mut Transaction<'_>) -> SqlResult<()>) {
        if let Err(error) = self.attempt(WRITE, &mut work) {
            report!(debug, error = error, "rows were left behind for others to sweep");
        }
    }

    fn retry<T>(
        &self,
        begin: &str,
        busy_timeout: Duration,
        work: &mut impl FnMut(&mut Transaction<'_>) -> SqlResult<T>,
    ) -> Result<T> {
        let (started, mut pause) = (Instant::now(), Duration::from_micros(200));
        while started.elapsed() < busy_timeout {
            // The caller's mutex is free while this sleeps.
            std::thread::sleep(pause);
            pause = (pause * 2).min(MAX_PAUSE).mul_f64(0.5 + rand::random::<f64>() / 2.0);
            if let Some(done) = self.attempt(begin, work)? {
                return Ok(done);
            }
        }
        let path = self.file.path().display();
        let what = format!("{path} was busy for {:.1?}: other processes write to it", busy_timeout);
        Err(Error::Unreachable { engine: super::ENGINE, what, retryable: true, source: None })
    }

    /// `None` if the file is busy.
    fn attempt<T>(
        &self,
        begin: &str,
        work: &mut impl FnMut(&mut Transaction<'_>) -> SqlResult<T>,
    ) -> Result<Option<T>> {
        self.check_not_forked()?;
        let (done, messages) = {
            let mut state = sync::lock(&self.state);
            if state.closed {
                return Err(Error::Closed);
            }
            let now = self.time.now();
            if now.saturating_sub(state.path_checked) > CHECK_PATH_EVERY {
                self.file.check_unchanged()?;
                state.path_checked = now;
            }
            // Taken out of the state while it is used: after a panic the connection closes, and
            // neither its transaction nor the lock on the file stays behind.
            let db = match state.connection.take() {
                Some(db) => db,
                None => {
                    state.opened += 1;
                    connect(&self.file).map_err(|error| explain(&self.file, error))??
                }
            };
            let StoreState { opened, withdrawn, watches, .. } = &mut *state;
            let mut transaction = Transaction {
                db: &db,
                opened: *opened,
                now: 0,
                withdrawn,
                watches,
                store: self,
                after_commit: Vec::new(),
                changed: false,
                watched: true,
            };
            let outcome = transaction.run(begin, work);
            let messages = transaction.after_commit;
            match db.is_autocommit() {
                true => state.connection = Some(db),
                false => {
                    report!(warn, path = self.file.path().display(), "the file is opened again")
                }
            }
            match outcome {
                Ok(done) => {
                    state.writes += u32::from(begin == WRITE);
                    if state.writes >= WRITE_BACK_EVERY {
                        state.writes = 0;
                        self.write_back();
                    }
                    (done, messages)
                }
                Err(error) if is_busy(&error) => return Ok(None),
                Err(error) => return Err(explain(&self.file, error)),
            }
        };
        for (inbox, message) in messages {
            self.post(&inbox, message);
        }
        Ok(Some(done))
    }

    fn post(&self, inbox: &str, post: AfterCommit) {
        match post {
            AfterCommit::Send(message) => {
                if !self.inbox.send(inbox, &message) && matches!(message, Message::Changed(_)) {
                    // The watcher is gone. If this fails, the next change finds it again.
                    let inbox = inbox.to_owned();
                    self.try_write(|txn| txn.forget_watchers(&inbox));
                    self.inbox.remove_if_stale(&inbox);
                }
            }
            AfterCommit::RemoveInbox => self.inbox.remove_if_stale(inbox),
        }
    }

    /// Remembers that this claim must not be entered any more.
    pub(super) fn mark_withdrawn(&self, id: ClaimId) {
        if !self.is_forked() {
            sync::lock(&self.state).withdrawn.insert(id, Clock::boot().now());
        }
    }

    /// The id of a new watch, which inserts its row itself.
    pub(super) fn begin_watch(&self) -> i64 {
        let id = rand::random();
        sync::lock(&self.state).watches.wanted.insert(id);
        id
    }

    /// Removes the row of a watch: now if the file is not busy, otherwise with the next write.
    pub(super) fn end_watch(&self, id: i64) {
        {
            let mut state = sync::lock(&self.state);
            state.watches.wanted.remove(&id);
            state.watches.ended.push(id);
        }
        self.try_write(|_| Ok(()));
    }

    /// Removes the rows of all watches, as the last thing before the file is closed.
    pub(super) async fn end_watches(self: &Arc<Self>, busy_timeout: Duration) {
        if self.has_watches() {
            let all = self.write(busy_timeout, |txn| txn.forget_watchers(txn.store.inbox.name()));
            match all.await {
                Ok(()) => sync::lock(&self.state).watches.wanted.clear(),
                Err(error) => report!(debug, error = error, "watches were left behind"),
            }
        }
    }

    fn has_watches(&self) -> bool {
        if self.is_forked() {
            return false;
        }
        let state = sync::lock(&self.state);
        let Watches { wanted, ended } = &state.watches;
        !state.closed && (!wanted.is_empty() || !ended.is_empty())
    }

    /// The moment on this process's clock at which the machine's clock shows `nanos`.
    pub(super) fn moment(&self, nanos: u64) -> Moment {
        self.time.moment(nanos)
    }

    /// Closes the file, and the inbox with it.
    pub(super) fn close(&self) {
        if self.is_forked() {
            return;
        }
        if self.has_watches() {
            self.try_write(|txn| txn.forget_watchers(txn.store.inbox.name()));
        }
        self.inbox.close();
        self.inbox.dispatcher.close();
        let mut state = sync::lock(&self.state);
        state.closed = true;
        state.connection = None;
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        if self.is_forked() {
            // Closing it would change the file that the parent uses.
            let state = self.state.get_mut().unwrap_or_else(|poison| poison.into_inner());
            std::mem::forget(state.connection.take());
        }
    }
}

/// One transaction. `acquire`, `renew`, `release`, `inspect` and `cells` have what the verbs do in
/// it.
pub(super) struct Transaction<'a> {
    pub(super) db: &'a Connection,
    opened: u64,
    /// The machine's time, read after the transaction began.
    pub(super) now: u64,
    pub(super) withdrawn: &'a mut Tombstones,
    pub(super) watches: &'a mut Watches,
    pub(super) store: &'a Store,
    /// What is done after the commit.
    pub(super) after_commit: Vec<(String, AfterCommit)>,
    /// Something changed that watchers must be told.
    pub(super) changed: bool,
    /// There may be watchers. Read along with other rows, because there are rarely any.
    pub(super) watched: bool,
}

/// An action that follows a transaction.
#[derive(Debug)]
pub(super) enum AfterCommit {
    Send(Message),
    /// The owner of the inbox is dead: its socket can be removed.
    RemoveInbox,
}

impl Transaction<'_> {
    fn run<T>(
        &mut self,
        begin: &str,
        work: &mut impl FnMut(&mut Self) -> SqlResult<T>,
    ) -> SqlResult<T> {
        match self.run_once(begin, work) {
            Err(error) if error.sqlite_error_code() == Some(ErrorCode::DiskFull) => {
                // Writing the log back to the file makes its space usable again.
                let written_back =
                    self.db.query_row("PRAGMA wal_checkpoint(RESTART)", [], |_| Ok(()));
                written_back.and_then(|()| self.run_once(begin, work)).map_err(|_| error)
            }
            outcome => outcome,
        }
    }

    fn run_once<T>(
        &mut self,
        begin: &str,
        work: &mut impl FnMut(&mut Self) -> SqlResult<T>,
    ) -> SqlResult<T> {
        self.after_commit.clear();
        (self.changed, self.watched) = (false, true);
        self.execute(begin)?;
        if begin == READ {
            // The snapshot must not be newer than `now`: a lease renewed in between would seem to
            // end too late to be of this boot.
            self.db.prepare_cached("SELECT 1 FROM home")?.query_row([], |_| Ok(()))?;
        }
        self.now = self.store.time.now();
        let outcome = work(self).and_then(|done| {
            if begin == WRITE {
                self.watches.ended.iter().try_for_each(|id| self.remove_watcher(*id))?;
            }
            self.execute("COMMIT")?;
            if begin == WRITE {
                self.watches.ended.clear();
            }
            Ok(done)
        });
        if outcome.is_err() && !self.db.is_autocommit() {
            // If even that fails, the connection is dropped.
            let _ = self.execute("ROLLBACK");
        }
        outcome
    }

    /// Changes whenever another client has written. Writes of this client do not change it.
    pub(super) fn stamp(&self) -> SqlResult<(u64, i64)> {
        let version = self.db.prepare_cached("PRAGMA data_version")?.query_row([], |r| r.get(0))?;
        Ok((self.opened, version))
    }

    fn execute(&self, sql: &str) -> SqlResult<()> {
        self.db.prepare_cached(sql)?.execute([]).map(|_| ())
    }
}

/// The clock that all processes of the machine share: time since boot, without the offset that a
/// time namespace may add for this process.
#[derive(Debug)]
struct MachineClock {
    clock: Clock,
    offset: i64,
}

impl MachineClock {
    fn of_this_process() -> Self {
        Self { clock: Clock::boot(), offset: boot_offset() }
    }

    fn now(&self) -> u64 {
        self.clock.now().as_nanos().saturating_add_signed(self.offset.saturating_neg())
    }

    fn moment(&self, nanos: u64) -> Moment {
        Moment::from_nanos(nanos.saturating_add_signed(self.offset))
    }
}

/// The offset that a time namespace adds to the time since boot for this process.
pub(super) fn boot_offset() -> i64 {
    let offsets = std::fs::read_to_string("/proc/self/timens_offsets").unwrap_or_default();
    boot_offset_in(&offsets).unwrap_or(0)
}

/// From the lines `clock seconds nanoseconds`.
fn boot_offset_in(offsets: &str) -> Option<i64> {
    let line = offsets.lines().find(|line| line.starts_with("boottime"))?;
    let mut numbers = line.split_whitespace().skip(1).map(str::parse::<i64>);
    let (seconds, nanos) = (numbers.next()?.ok()?, numbers.next()?.ok()?);
    seconds.checked_mul(1_000_000_000)?.checked_add(nanos)
}

fn connect(file: &LockFile) -> SqlResult<Result<Connection>> {
    let mut db = Connection::open_with_flags(file.path(), FLAGS)?;
    // Setting up may take a while: another process may be doing the same.
    db.busy_timeout(SETUP_TIMEOUT)?;
    db.set_prepared_statement_cache_capacity(64);
    if let Some(error) = prepare_format(&mut db, file)? {
        return Ok(Err(error));
    }
    db.pragma_update(None, "synchronous", "NORMAL")?;
    db.pragma_update(None, "wal_autocheckpoint", CHECKPOINT_PAGES)?;
    // Otherwise SQLite, built with STAT4, plans a statement again for each new bound value.
    db.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true)?;
    // Otherwise the only client would write back and sync at each close.
    db.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
    db.busy_handler(Some(busy_wait))?;
    Ok(Ok(db))
}

/// Waits about a millisecond in all: a transaction of another process takes some 20 µs.
fn busy_wait(attempt: i32) -> bool {
    match attempt {
        0..=19 => std::thread::yield_now(),
        20..=29 => std::thread::sleep(Duration::from_micros(30)),
        _ => return false,
    }
    true
}

/// Sets up an empty file, and returns what is wrong with a file that is not ours.
fn prepare_format(db: &mut Connection, file: &LockFile) -> SqlResult<Option<Error>> {
    let number =
        |db: &Connection, name| db.pragma_query_value(None, name, |row| row.get::<_, i32>(0));
    if number(db, "application_id")? != APPLICATION_ID {
        let setup = db.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
        let tables: i64 =
            setup.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
        if number(&setup, "application_id")? == 0 && tables == 0 {
            setup.execute_batch(include_str!("schema.sql"))?;
            setup.pragma_update(None, "user_version", FORMAT)?;
            setup.pragma_update(None, "application_id", APPLICATION_ID)?;
            setup.commit()?;
        }
    }
    let path = file.path().display();
    if number(db, "application_id")? != APPLICATION_ID {
        let what = format!("{path} is a SQLite file of another program; name another file");
        return Ok(Some(error_of(what)));
    }
    let format = number(db, "user_version")?;
    if format != FORMAT {
        let what = format!(
            "{path} has the format {format}, this version of lockset knows {FORMAT}; use the newer \
             lockset, or another file"
        );
        return Ok(Some(error_of(what)));
    }
    let mode = turn_on_wal(db)?;
    let refused =
        || error_of(format!("{path} cannot have a write-ahead log here; name another file"));
    Ok((mode != "wal").then(refused))
}

/// Turns the write-ahead log on and returns the journal mode. If several clients open a new file at
/// the same time, SQLite rejects all but one without calling their busy handlers.
fn turn_on_wal(db: &Connection) -> SqlResult<String> {
    let started = Instant::now();
    loop {
        match db.query_row("PRAGMA journal_mode = WAL", [], |row| row.get(0)) {
            Err(error) if is_busy(&error) && started.elapsed() < SETUP_TIMEOUT => {
                std::thread::sleep(Duration::from_millis(1));
            }
            outcome => return outcome,
        }
    }
}

fn is_busy(error: &rusqlite::Error) -> bool {
    let code = error.sqlite_error_code();
    matches!(code, Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked))
}

/// SQLite's error as a text that says what to do.
fn explain(file: &LockFile, error: rusqlite::Error) -> Error {
    // If the file was replaced, that explains any error of SQLite.
    if let Err(replaced) = file.check_unchanged() {
        return replaced;
    }
    let path = file.path().display();
    let (what, retryable) = match error.sqlite_error_code() {
        Some(ErrorCode::DiskFull) => {
            (format!("the disk that holds {path} is full; free some space"), true)
        }
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => {
            (format!("{path} is busy: another process is setting it up"), true)
        }
        Some(ErrorCode::NotADatabase) => {
            (format!("{path} is not a Lockset database; name another file"), false)
        }
        Some(ErrorCode::ReadOnly) => {
            (format!("{path} is read-only; name a file that can be written"), false)
        }
        Some(ErrorCode::PermissionDenied | ErrorCode::CannotOpen) => (
            format!("{path}, or a file beside it, cannot be opened; look at its permissions"),
            false,
        ),
        Some(ErrorCode::DatabaseCorrupt) => {
            (format!("{path} is damaged; stop all processes that use it and delete it"), false)
        }
        Some(ErrorCode::SystemIoFailure) => (format!("{path} could not be read or written"), true),
        _ => (format!("{path} could not be used"), false),
    };
    error_from(what, retryable, error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_offset_of_a_time_namespace_is_taken_out() {
        let offsets = "monotonic           5         0\nboottime        -1000       500\n";
        assert_eq!(boot_offset_in(offsets), Some(-999_999_999_500));
        assert_eq!(boot_offset_in(""), None);
        let time = MachineClock { clock: Clock::boot(), offset: -1_000_000_000 };
        let (own, machine) = (time.clock.now(), time.now());
        assert!(machine >= own.as_nanos() + 1_000_000_000);
        assert!(time.moment(machine) >= own);
        assert!(time.moment(machine).saturating_duration_since(own) < Duration::from_millis(500));
    }

    #[tokio::test]
    async fn a_panic_does_not_block_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = Some(folder.path().join("locks.db"));
        let options = LocalOptions { path, ..LocalOptions::default() };
        let open = || Store::open(&options).unwrap();
        let (store, other) = (Arc::new(open()), open());
        fn note(txn: &mut Transaction<'_>) -> SqlResult<()> {
            txn.db.execute("UPDATE home SET swept = 'x'", []).map(|_| ())
        }
        let swept = |txn: &mut Transaction<'_>| {
            txn.db.query_row("SELECT swept FROM home", [], |row| row.get::<_, String>(0))
        };
        let panics = std::panic::AssertUnwindSafe(|| {
            store.try_write(|txn| {
                note(txn)?;
                panic!("in the middle of it")
            });
        });
        std::panic::catch_unwind(panics).unwrap_err();
        assert_eq!(other.attempt(WRITE, &mut { swept }).unwrap().as_deref(), Some(""));
        store.try_write(note);
        assert_eq!(store.read(SETUP_TIMEOUT, swept).await.unwrap(), "x");
        store.close();
        assert!(matches!(store.read(SETUP_TIMEOUT, swept).await, Err(Error::Closed)));
    }
}
