//! The SQLite file: opening it, and running transactions on it.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rusqlite::config::DbConfig;
use rusqlite::{Connection, ErrorCode, OpenFlags};

use super::inbox::{Inbox, Letter};
use super::place::Place;
use super::process::Processes;
use super::{LocalOptions, failed, failed_by};
use crate::clock::{Clock, Moment};
use crate::engine::ClaimId;
use crate::engine::common::tombstones::Tombstones;
use crate::error::{Error, Result};
use crate::fork;
use crate::report::report;
use crate::sync;

/// "Lkst": what tells our files from other SQLite files.
const APPLICATION_ID: i32 = 0x4C6B_7374;
/// The stored format.
const FORMAT: i32 = 1;
/// After so many transactions of this client, or if the log is so long at the start, it is written
/// back in the background. The more, the fewer syncs; the fewer, the faster the first process after
/// a pause reads it again.
const WRITE_BACK_EVERY: u32 = 500;
const WRITE_BACK_FROM: u64 = 1 << 21;
/// A log of so many pages is written back by whoever wrote the last one, while others wait.
const CHECKPOINT_PAGES: u32 = 4000;
/// So long, in ns, nobody looks again whether the path still leads to the file: a look costs as
/// much as a statement, and the file can be replaced right after it anyway.
const LOOK_EVERY: u64 = 1_000_000;
/// The longest pause between two attempts on a file that others write to all the time.
const LONGEST_PAUSE: Duration = Duration::from_millis(10);

/// How long others may take to set the file up.
const SETTING_UP: Duration = Duration::from_secs(5);

const FLAGS: OpenFlags = OpenFlags::SQLITE_OPEN_READ_WRITE
    .union(OpenFlags::SQLITE_OPEN_NO_MUTEX)
    .union(OpenFlags::SQLITE_OPEN_PRIVATE_CACHE);
const WRITE: &str = "BEGIN IMMEDIATE";
const READ: &str = "BEGIN";

/// What SQLite answers inside a transaction. Answers that are errors of lockset's own are values
/// here: they do not undo the transaction.
pub(super) type Sql<T> = Result<T, rusqlite::Error>;

/// The file, and all that a transaction on it needs.
#[derive(Debug)]
pub(super) struct Store {
    pub(super) place: Place,
    pub(super) inbox: Inbox,
    pub(super) processes: Processes,
    time: MachineTime,
    runtime: tokio::runtime::Handle,
    forks: u32,
    books: Mutex<Books>,
    writing_back: Arc<AtomicBool>,
}

/// What one transaction at a time may use.
#[derive(Debug)]
struct Books {
    /// `None`: closed, or to be opened again.
    connection: Option<Connection>,
    closed: bool,
    /// How often the file was opened.
    opened: u64,
    withdrawn: Tombstones,
    watches: Watches,
    /// Transactions since the log was last written back.
    writes: u32,
    /// When the path was last seen to lead to the file.
    looked: u64,
}

/// The rows that this client's watches have in the file.
#[derive(Debug, Default)]
pub(super) struct Watches {
    /// Those that go on; a late transaction must not enter another one.
    wanted: HashSet<i64>,
    /// Those that ended and may still be there. They go with the next transaction that writes.
    ended: Vec<i64>,
}

impl Watches {
    pub(super) fn is_wanted(&self, id: i64) -> bool {
        self.wanted.contains(&id)
    }
}

impl Store {
    pub(super) fn open(options: &LocalOptions) -> Result<Self> {
        // A new file is created by way of a second descriptor, whose closing would drop the locks
        // that another thread has just taken on it.
        static OPENING: Mutex<()> = Mutex::new(());
        fork::notice();
        let runtime = tokio::runtime::Handle::try_current()
            .map_err(|error| failed_by("it must be opened inside a tokio runtime", false, error))?;
        let processes = Processes::new(options.holder_process, runtime.clone())?;
        let (place, connection) = {
            let _alone = sync::lock(&OPENING);
            let place = Place::prepare(options.path.as_deref(), options.mode)?;
            let connection = connect(&place).map_err(|error| explain(&place, error))??;
            (place, connection)
        };
        place.unchanged()?;
        let inbox = Inbox::open(place.path(), options.mode, &runtime)?;
        inbox.sweep();
        let store = Self {
            inbox,
            processes,
            time: MachineTime::of_this_process(),
            runtime,
            forks: fork::generation(),
            books: Mutex::new(Books {
                connection: Some(connection),
                closed: false,
                opened: 1,
                withdrawn: Tombstones::default(),
                watches: Watches::default(),
                writes: 0,
                looked: 0,
            }),
            writing_back: Arc::default(),
            place,
        };
        if std::fs::metadata(store.place.log()).is_ok_and(|log| log.len() > WRITE_BACK_FROM) {
            store.write_back();
        }
        Ok(store)
    }

    /// Writes the log back to the file, on another thread and by another connection: that waits for
    /// the disk, and nobody should wait with it.
    fn write_back(&self) {
        if self.writing_back.swap(true, Ordering::AcqRel) {
            return;
        }
        let (path, done) = (self.place.path().to_owned(), self.writing_back.clone());
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

    /// Fails in such a child. Asked before any mutex, which may be locked there for ever.
    pub(super) fn unless_forked(&self) -> Result<()> {
        match self.is_forked() {
            true => Err(failed("it was opened before a fork; open it again in the child")),
            false => Ok(()),
        }
    }

    /// Runs `work` as one transaction, repeated from its start until it could be written or
    /// `patience` is over.
    ///
    /// Normally it runs right here: it is a few system calls. Only if the file stays busy does it
    /// go on elsewhere, where it may sleep, and there it goes on even if this future is dropped.
    pub(super) async fn write<T: Send + 'static>(
        self: &Arc<Self>,
        patience: Duration,
        work: impl FnMut(&mut Transaction<'_>) -> Sql<T> + Send + 'static,
    ) -> Result<T> {
        self.transact(WRITE, patience, work).await
    }

    /// The same for work that changes nothing; it stands in no writer's way.
    pub(super) async fn read<T: Send + 'static>(
        self: &Arc<Self>,
        patience: Duration,
        work: impl FnMut(&mut Transaction<'_>) -> Sql<T> + Send + 'static,
    ) -> Result<T> {
        self.transact(READ, patience, work).await
    }

    async fn transact<T: Send + 'static>(
        self: &Arc<Self>,
        begin: &'static str,
        patience: Duration,
        mut work: impl FnMut(&mut Transaction<'_>) -> Sql<T> + Send + 'static,
    ) -> Result<T> {
        if let Some(done) = self.attempt(begin, &mut work)? {
            return Ok(done);
        }
        let store = self.clone();
        let patiently = move || store.insist(begin, patience, &mut work);
        let patiently = self.runtime.spawn_blocking(patiently);
        match patiently.await {
            Ok(outcome) => outcome,
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(error) => Err(failed_by("its runtime has ended", false, error)),
        }
    }

    /// One attempt, for what may be left undone.
    pub(super) fn try_write(&self, mut work: impl FnMut(&mut Transaction<'_>) -> Sql<()>) {
        if let Err(error) = self.attempt(WRITE, &mut work) {
            report!(debug, error = error, "rows were left behind for others to sweep");
        }
    }

    fn insist<T>(
        &self,
        begin: &str,
        patience: Duration,
        work: &mut impl FnMut(&mut Transaction<'_>) -> Sql<T>,
    ) -> Result<T> {
        let (started, mut pause) = (Instant::now(), Duration::from_micros(200));
        while started.elapsed() < patience {
            // The caller's mutex is free while this sleeps.
            std::thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE).mul_f64(0.5 + rand::random::<f64>() / 2.0);
            if let Some(done) = self.attempt(begin, work)? {
                return Ok(done);
            }
        }
        let path = self.place.path().display();
        let what = format!("{path} was busy for {:.1?}: other processes write to it", patience);
        Err(Error::Unreachable { engine: super::ENGINE, what, retryable: true, source: None })
    }

    /// `None`: the file is busy.
    fn attempt<T>(
        &self,
        begin: &str,
        work: &mut impl FnMut(&mut Transaction<'_>) -> Sql<T>,
    ) -> Result<Option<T>> {
        self.unless_forked()?;
        let (done, letters) = {
            let mut books = sync::lock(&self.books);
            if books.closed {
                return Err(Error::Closed);
            }
            let now = self.time.now();
            if now.saturating_sub(books.looked) > LOOK_EVERY {
                self.place.unchanged()?;
                books.looked = now;
            }
            // Out of the books while it is used: if that ends in a panic, the connection closes,
            // and neither its transaction nor the lock on the file stays behind.
            let db = match books.connection.take() {
                Some(db) => db,
                None => {
                    books.opened += 1;
                    connect(&self.place).map_err(|error| explain(&self.place, error))??
                }
            };
            let Books { opened, withdrawn, watches, .. } = &mut *books;
            let mut transaction = Transaction {
                db: &db,
                opened: *opened,
                now: 0,
                withdrawn,
                watches,
                store: self,
                post: Vec::new(),
                changed: false,
                watched: true,
            };
            let outcome = transaction.run(begin, work);
            let letters = transaction.post;
            match db.is_autocommit() {
                true => books.connection = Some(db),
                false => {
                    report!(warn, path = self.place.path().display(), "the file is opened again")
                }
            }
            match outcome {
                Ok(done) => {
                    books.writes += u32::from(begin == WRITE);
                    if books.writes >= WRITE_BACK_EVERY {
                        books.writes = 0;
                        self.write_back();
                    }
                    (done, letters)
                }
                Err(error) if is_busy(&error) => return Ok(None),
                Err(error) => return Err(explain(&self.place, error)),
            }
        };
        for (inbox, letter) in letters {
            self.post(&inbox, letter);
        }
        Ok(Some(done))
    }

    fn post(&self, inbox: &str, post: Post) {
        match post {
            Post::Letter(letter) => {
                if !self.inbox.send(inbox, &letter) && matches!(letter, Letter::Changed(_)) {
                    // A watcher that is gone; if this fails, the next change finds it again.
                    let inbox = inbox.to_owned();
                    self.try_write(|txn| txn.forget_watchers(&inbox));
                    self.inbox.remove_if_stale(&inbox);
                }
            }
            Post::Bury => self.inbox.remove_if_stale(inbox),
        }
    }

    /// Remembers that this claim must not be entered any more.
    pub(super) fn mark_withdrawn(&self, id: ClaimId) {
        if !self.is_forked() {
            sync::lock(&self.books).withdrawn.insert(id, Clock::boot().now());
        }
    }

    /// The row of a new watch, which it enters itself.
    pub(super) fn begin_watch(&self) -> i64 {
        let id = rand::random();
        sync::lock(&self.books).watches.wanted.insert(id);
        id
    }

    /// Removes a watch's row: now if the file is not busy, otherwise soon.
    pub(super) fn end_watch(&self, id: i64) {
        {
            let mut books = sync::lock(&self.books);
            books.watches.wanted.remove(&id);
            books.watches.ended.push(id);
        }
        self.try_write(|_| Ok(()));
    }

    /// Removes the rows of all watches, as the last thing before the file is closed.
    pub(super) async fn end_watches(self: &Arc<Self>, patience: Duration) {
        if self.has_watches() {
            let all = self.write(patience, |txn| txn.forget_watchers(txn.store.inbox.name()));
            match all.await {
                Ok(()) => sync::lock(&self.books).watches.wanted.clear(),
                Err(error) => report!(debug, error = error, "watches were left behind"),
            }
        }
    }

    fn has_watches(&self) -> bool {
        if self.is_forked() {
            return false;
        }
        let books = sync::lock(&self.books);
        let Watches { wanted, ended } = &books.watches;
        !books.closed && (!wanted.is_empty() || !ended.is_empty())
    }

    /// The moment on our own clock at which the machine's shows `nanos`.
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
        self.inbox.desk.close();
        let mut books = sync::lock(&self.books);
        books.closed = true;
        books.connection = None;
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        if self.is_forked() {
            // Closing it would touch the file under the parent's feet.
            let books = self.books.get_mut().unwrap_or_else(|poison| poison.into_inner());
            std::mem::forget(books.connection.take());
        }
    }
}

/// One transaction under way. What the verbs do in it is in `claims.rs`.
pub(super) struct Transaction<'a> {
    pub(super) db: &'a Connection,
    opened: u64,
    /// The machine's time, read once the file was ours.
    pub(super) now: u64,
    pub(super) withdrawn: &'a mut Tombstones,
    pub(super) watches: &'a mut Watches,
    pub(super) store: &'a Store,
    /// What is sent once the transaction is written.
    pub(super) post: Vec<(String, Post)>,
    /// Something changed that watchers want to know.
    pub(super) changed: bool,
    /// There may be watchers. Learnt along the way, because there nearly never are.
    pub(super) watched: bool,
}

/// What follows a transaction.
#[derive(Debug)]
pub(super) enum Post {
    Letter(Letter),
    /// The inbox's owner is dead: its socket may go.
    Bury,
}

impl Transaction<'_> {
    fn run<T>(&mut self, begin: &str, work: &mut impl FnMut(&mut Self) -> Sql<T>) -> Sql<T> {
        match self.run_once(begin, work) {
            Err(error) if error.sqlite_error_code() == Some(ErrorCode::DiskFull) => {
                // What the log holds may go to the file, and its room be used again.
                let written_back =
                    self.db.query_row("PRAGMA wal_checkpoint(RESTART)", [], |_| Ok(()));
                written_back.and_then(|()| self.run_once(begin, work)).map_err(|_| error)
            }
            outcome => outcome,
        }
    }

    fn run_once<T>(&mut self, begin: &str, work: &mut impl FnMut(&mut Self) -> Sql<T>) -> Sql<T> {
        self.post.clear();
        (self.changed, self.watched) = (false, true);
        self.execute(begin)?;
        if begin == READ {
            // What is read must not be younger than `now`: a lease renewed in between would seem to
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
            // If even that fails, the connection is given up.
            let _ = self.execute("ROLLBACK");
        }
        outcome
    }

    /// Another one whenever another client has written since. What this client writes itself does
    /// not count.
    pub(super) fn stamp(&self) -> Sql<(u64, i64)> {
        let version = self.db.prepare_cached("PRAGMA data_version")?.query_row([], |r| r.get(0))?;
        Ok((self.opened, version))
    }

    fn execute(&self, sql: &str) -> Sql<()> {
        self.db.prepare_cached(sql)?.execute([]).map(|_| ())
    }
}

/// The clock that all processes of the machine share: time since boot, without the offset that a
/// time namespace may add for this process.
#[derive(Debug)]
struct MachineTime {
    clock: Clock,
    offset: i64,
}

impl MachineTime {
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

/// What a time namespace adds to the time since boot for this process.
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

fn connect(place: &Place) -> Sql<Result<Connection>> {
    let mut db = Connection::open_with_flags(place.path(), FLAGS)?;
    // While it is set up there is time: another process may be doing the same.
    db.busy_timeout(SETTING_UP)?;
    db.set_prepared_statement_cache_capacity(64);
    if let Some(error) = prepare_format(&mut db, place)? {
        return Ok(Err(error));
    }
    db.pragma_update(None, "synchronous", "NORMAL")?;
    db.pragma_update(None, "wal_autocheckpoint", CHECKPOINT_PAGES)?;
    // Or SQLite, built with STAT4, plans a statement anew for each new value bound to it.
    db.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true)?;
    // Whoever is alone would otherwise write back and sync at each close.
    db.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
    db.busy_handler(Some(a_moment))?;
    Ok(Ok(db))
}

/// Waits about a millisecond in all: a transaction of another process takes some 20 µs.
fn a_moment(attempt: i32) -> bool {
    match attempt {
        0..=19 => std::thread::yield_now(),
        20..=29 => std::thread::sleep(Duration::from_micros(30)),
        _ => return false,
    }
    true
}

/// Makes an empty file ours, and answers what is wrong with one that is not.
fn prepare_format(db: &mut Connection, place: &Place) -> Sql<Option<Error>> {
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
    let path = place.path().display();
    if number(db, "application_id")? != APPLICATION_ID {
        let what = format!("{path} is a SQLite file of another program; name another file");
        return Ok(Some(failed(what)));
    }
    let format = number(db, "user_version")?;
    if format != FORMAT {
        let what = format!(
            "{path} has the format {format}, this version of lockset knows {FORMAT}; use the newer \
             lockset, or another file"
        );
        return Ok(Some(failed(what)));
    }
    let mode = turn_on_the_log(db)?;
    let refused =
        || failed(format!("{path} cannot have a write-ahead log here; name another file"));
    Ok((mode != "wal").then(refused))
}

/// Answers the journal mode. Of several who come to a new file at the same time one turns the log
/// on, and SQLite refuses the others without asking their busy handler.
fn turn_on_the_log(db: &Connection) -> Sql<String> {
    let started = Instant::now();
    loop {
        match db.query_row("PRAGMA journal_mode = WAL", [], |row| row.get(0)) {
            Err(error) if is_busy(&error) && started.elapsed() < SETTING_UP => {
                std::thread::sleep(Duration::from_millis(1));
            }
            answer => return answer,
        }
    }
}

fn is_busy(error: &rusqlite::Error) -> bool {
    let code = error.sqlite_error_code();
    matches!(code, Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked))
}

/// SQLite's error in words that say what to do.
fn explain(place: &Place, error: rusqlite::Error) -> Error {
    // If the file was replaced, that explains whatever SQLite found.
    if let Err(replaced) = place.unchanged() {
        return replaced;
    }
    let path = place.path().display();
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
            (format!("{path} is damaged; stop all who use it and delete it"), false)
        }
        Some(ErrorCode::SystemIoFailure) => (format!("{path} could not be read or written"), true),
        _ => (format!("{path} could not be used"), false),
    };
    failed_by(what, retryable, error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_offset_of_a_time_namespace_is_taken_out() {
        let offsets = "monotonic           5         0\nboottime        -1000       500\n";
        assert_eq!(boot_offset_in(offsets), Some(-999_999_999_500));
        assert_eq!(boot_offset_in(""), None);
        let time = MachineTime { clock: Clock::boot(), offset: -1_000_000_000 };
        let (own, machine) = (time.clock.now(), time.now());
        assert!(machine >= own.as_nanos() + 1_000_000_000);
        assert!(time.moment(machine) >= own);
        assert!(time.moment(machine).saturating_duration_since(own) < Duration::from_millis(500));
    }

    #[tokio::test]
    async fn a_panic_leaves_the_file_to_others() {
        let folder = tempfile::tempdir().unwrap();
        let path = Some(folder.path().join("locks.db"));
        let options = LocalOptions { path, ..LocalOptions::default() };
        let open = || Store::open(&options).unwrap();
        let (store, other) = (Arc::new(open()), open());
        fn note(txn: &mut Transaction<'_>) -> Sql<()> {
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
        assert_eq!(store.read(SETTING_UP, swept).await.unwrap(), "x");
        store.close();
        assert!(matches!(store.read(SETTING_UP, swept).await, Err(Error::Closed)));
    }
}
