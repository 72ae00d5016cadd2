//! What the check of a token adds to a write, for each kind of resource.
//!
//! Each row compares one write with the check and the same write without it, in turn. The writes
//! are as durable as the store makes them by default, because that is what users pay for.

use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use lockset::fence::{
    FencingToken, FileFence, ObjectFence, PostgresFence, RedisFence, SqliteFence,
};
use lockset::{Name, Token};
use lockset_testkit::stage::{PostgresServer, RedisServer, S3Server};
use object_store::ObjectStoreExt as _;
use object_store::path::Path as ObjectPath;
use redis::AsyncCommands as _;
use tokio::runtime::{Builder, Runtime};

use crate::measure::{Order, Pace, median, median_ratio, now, rotated};
use crate::table::{Table, Target, micros};

pub(crate) const USAGE: &str = "fence [--quick] [rows…]

rows: sqlite, postgres, redis, file, s3";

const ROUNDS: usize = 15;
const SLICE: Duration = Duration::from_millis(300);
const MOST: Target = Target::AtMost(1.3);
const LOCK: &str = "orders/42";

struct Store {
    name: &'static str,
    measure: fn(Pace, &mut Table),
}

const ROWS: &[Store] = &[
    Store { name: "sqlite", measure: sqlite },
    Store { name: "postgres", measure: postgres },
    Store { name: "redis", measure: redis_set },
    Store { name: "file", measure: file },
    Store { name: "s3", measure: s3 },
];

pub(crate) fn run(args: &[&str]) -> ExitCode {
    let order = Order::read(args);
    let mut table = Table::default();
    for row in ROWS.iter().filter(|row| order.wants(row.name)) {
        eprintln!("measuring: {}", row.name);
        (row.measure)(order.pace, &mut table);
    }
    println!("-- fence (time of a guarded write / of the same write without the check)");
    println!("{table}");
    ExitCode::SUCCESS
}

/// Measures in turn a write without the check (0), with it under one token (1), and with a greater
/// token each time (2), and adds the rows.
fn compare(name: &str, pace: Pace, table: &mut Table, mut write: impl FnMut(Guarding, u64)) {
    let mut times = [const { Vec::new() }; 3];
    let mut token = 1;
    for round in 0..pace.rounds(ROUNDS) {
        for place in rotated(3, round) {
            let guarding = [Guarding::No, Guarding::SameToken, Guarding::NewToken][place];
            token += 1;
            // The first write of a slice raises the mark, which the others of the slice need not.
            write(guarding, token);
            let (start, mut writes) = (now(), 0_u32);
            let end = start + pace.span(SLICE).as_nanos() as u64;
            while now() < end {
                token += u64::from(guarding == Guarding::NewToken);
                write(guarding, token);
                writes += 1;
            }
            times[place].push((now() - start) as f64 / 1e9 / f64::from(writes));
        }
    }
    let [plain, same, new] = times;
    let middle = |times: &[f64]| micros(median(times.iter().copied()));
    let ratio = median_ratio(&same, &plain);
    table.add(format!("{name}: one more write of a holder"), middle(&same), ratio, MOST);
    let ratio = median_ratio(&new, &plain);
    table.add(format!("({name}: the first of a holder)"), middle(&new), ratio, Target::None);
}

#[derive(Clone, Copy, PartialEq)]
enum Guarding {
    No,
    SameToken,
    NewToken,
}

fn token(value: u64) -> FencingToken {
    FencingToken::new(LOCK, Token::new(value)).unwrap()
}

fn lock() -> Name {
    LOCK.parse().unwrap()
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

fn sqlite(pace: Pace, table: &mut Table) {
    let folder = tempfile::tempdir().unwrap();
    let mut db = rusqlite::Connection::open(folder.path().join("stock.db")).unwrap();
    db.execute_batch(
        "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;
         CREATE TABLE stock (item TEXT PRIMARY KEY, count INTEGER);
         INSERT INTO stock VALUES ('apple', 0)",
    )
    .unwrap();
    let (fence, lock) = (SqliteFence::new(&db, "stock").unwrap(), lock());
    compare("SQLite transaction", pace, table, |guarding, value| {
        let write = db.transaction().unwrap();
        if guarding != Guarding::No {
            fence.admit(&write, &lock, &token(value)).unwrap();
        }
        let update = "UPDATE stock SET count = count + 1 WHERE item = 'apple'";
        write.prepare_cached(update).unwrap().execute([]).unwrap();
        write.commit().unwrap();
    });
}

fn postgres(pace: Pace, table: &mut Table) {
    let server = PostgresServer::start();
    let (runtime, lock) = (runtime(), lock());
    let (mut db, fence, update) = runtime.block_on(async {
        let (db, connection) =
            tokio_postgres::connect(&server.url(), tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(connection);
        db.batch_execute(
            "CREATE TABLE stock (item text PRIMARY KEY, count bigint);
             INSERT INTO stock VALUES ('apple', 0)",
        )
        .await
        .unwrap();
        let fence = PostgresFence::new(&db, "stock").await.unwrap();
        let update = "UPDATE stock SET count = count + 1 WHERE item = 'apple'";
        let update = db.prepare(update).await.unwrap();
        (db, fence, update)
    });
    compare("PostgreSQL transaction", pace, table, |guarding, value| {
        runtime.block_on(async {
            let write = db.transaction().await.unwrap();
            if guarding != Guarding::No {
                fence.admit(&write, &lock, &token(value)).await.unwrap();
            }
            write.execute(&update, &[]).await.unwrap();
            write.commit().await.unwrap();
        });
    });
}

fn redis_set(pace: Pace, table: &mut Table) {
    let server = RedisServer::start();
    let (runtime, lock) = (runtime(), lock());
    let client = redis::Client::open(server.url()).unwrap();
    let mut connection = runtime.block_on(client.get_multiplexed_async_connection()).unwrap();
    let fence = RedisFence::new("stock").unwrap();
    compare("Redis SET", pace, table, |guarding, value| {
        runtime.block_on(async {
            match guarding {
                Guarding::No => connection.set("apple", "3").await.unwrap(),
                _ => {
                    let token = token(value);
                    fence.set(&mut connection, &lock, &token, "apple", "3").await.unwrap();
                }
            }
        });
    });
}

fn file(pace: Pace, table: &mut Table) {
    let folder = tempfile::tempdir().unwrap();
    let (fence, lock) = (FileFence::open(folder.path()).unwrap(), lock());
    compare("file, replaced durably", pace, table, |guarding, value| match guarding {
        Guarding::No => replace(folder.path(), b"3"),
        _ => fence.write("stock", &lock, &token(value), b"3").unwrap(),
    });
}

/// What a careful program does without a fence.
fn replace(folder: &Path, data: &[u8]) {
    let new = folder.join("stock.tmp");
    let mut file = std::fs::File::create(&new).unwrap();
    file.write_all(data).unwrap();
    file.sync_all().unwrap();
    std::fs::rename(&new, folder.join("stock")).unwrap();
    std::fs::File::open(folder).unwrap().sync_all().unwrap();
}

/// What counts is the number of requests: the time is that of a server written for tests.
fn s3(pace: Pace, table: &mut Table) {
    let (server, runtime, lock) = (S3Server::start(), runtime(), lock());
    let (store, path) = (Arc::new(server.store()), ObjectPath::from("stock"));
    let fence = runtime.block_on(ObjectFence::new(store.clone())).unwrap();
    let guarded = |value| {
        runtime.block_on(fence.put(&path, &lock, &token(value), "3")).unwrap();
    };
    let plain = || {
        runtime.block_on(store.put(&ObjectPath::from("plain"), "3".into())).unwrap();
    };
    let writes = pace.rounds(ROUNDS) as u64;
    let count = |write: &dyn Fn(u64)| {
        let start = server.requests();
        (1..=writes).for_each(write);
        (server.requests() - start) as f64 / writes as f64
    };
    let (of_guarded, of_plain) = (count(&guarded), count(&|_| plain()));
    let work = "object storage: requests of a write";
    table.add(work, format!("{of_guarded}"), of_guarded / of_plain, Target::AtMost(2.0));
}
