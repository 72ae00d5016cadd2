//! `docs/fencing-sql.md`: its SQL is run on a PostgreSQL server and on a SQLite file.
#![allow(clippy::unwrap_used, reason = "tests")]

use lockset_testkit::stage::PostgresServer;
use rusqlite::Connection;

const GUIDE: &str = include_str!("../../../docs/fencing-sql.md");
const POSTGRES: &str = include_str!("../../lockset/src/fence/postgres.sql");
const SQLITE: &str = include_str!("../../lockset/src/fence/sqlite.sql");
const TRIGGERS: &str = include_str!("../../lockset/src/fence/sqlite_trigger.sql");

/// The SQL blocks of a chapter, each with the failure that it announces.
fn blocks(chapter: &str) -> Vec<(&str, Option<&str>)> {
    let (_, rest) = GUIDE.split_once(&format!("\n## {chapter}\n")).unwrap();
    let text = rest.split("\n## ").next().unwrap();
    let blocks = text.split("```sql\n").skip(1).map(|block| block.split("```").next().unwrap());
    let announced = blocks.map(|block| {
        let failure = block.lines().next().unwrap().strip_prefix("-- fails with ");
        (block, failure)
    });
    announced.collect()
}

#[test]
fn the_sql_for_postgresql_does_what_the_guide_says() {
    let server = PostgresServer::start();
    server.ask(&format!("BEGIN; {POSTGRES} COMMIT;"));
    let blocks = blocks("PostgreSQL");
    assert_eq!(blocks.iter().filter(|(_, failure)| failure.is_some()).count(), 6);
    for (block, failure) in blocks {
        let output = server.psql("postgres", block);
        let error = String::from_utf8_lossy(&output.stderr);
        match failure {
            None => assert!(output.status.success(), "{block}\n{error}"),
            Some(code) => assert!(error.contains(&format!(" {code}: ")), "{block}\n{error}"),
        }
    }
    assert_eq!(server.ask("SELECT * FROM stock"), "apple|0");
    assert_eq!(server.ask("SELECT count(*) FROM invoices"), "0");
    let marks = "SELECT resource, lock, token FROM lockset_fence.marks ORDER BY 1, 2";
    assert_eq!(server.ask(marks), "invoices|orders|18\nstock|orders|18");
}

#[test]
fn the_sql_for_sqlite_does_what_the_guide_says() {
    let db = Connection::open_in_memory().unwrap();
    db.execute_batch(SQLITE).unwrap();
    let blocks = blocks("SQLite");
    assert_eq!(blocks.iter().filter(|(_, failure)| failure.is_some()).count(), 3);
    let mut has_triggers = false;
    for (block, failure) in blocks {
        if block.contains("fence_token") && !has_triggers {
            db.execute_batch(TRIGGERS).unwrap();
            has_triggers = true;
        }
        match (db.execute_batch(block), failure) {
            (Ok(()), None) => {}
            (Err(error), Some(reason)) => {
                assert!(error.to_string().contains(reason), "{block}\n{error}");
            }
            (outcome, _) => panic!("{block}\n{outcome:?}"),
        }
    }
    let count: i64 = db.query_row("SELECT count FROM stock", [], |row| row.get(0)).unwrap();
    assert_eq!(count, 1);
    let mark = "SELECT token FROM lockset_fence_marks WHERE resource = 'stock'";
    assert_eq!(db.query_row(mark, [], |row| row.get::<_, i64>(0)).unwrap(), 18);
}
