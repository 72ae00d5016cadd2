//! The fence in PostgreSQL: its laws, bad input, concurrent transactions, and other programs that
//! use only SQL.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::Path;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use lockset::fence::{
    FenceError, FenceMark, FenceStore, FencingToken, PostgresFence, PostgresFenceStore,
};
use lockset::{Name, Token};
use lockset_testkit::fence_laws::FencedRegister;
use lockset_testkit::python::PythonPeer;
use lockset_testkit::stage::PostgresServer;
use lockset_testkit::steps::{until, within};
use tokio_postgres::{Client, NoTls};

const INSTALL: &str = include_str!("../../lockset/src/fence/postgres.sql");
const PATIENCE: Duration = Duration::from_secs(30);

/// A register in a table, written in transactions that the fence checks.
struct PostgresRegister {
    server: PostgresServer,
}

impl PostgresRegister {
    async fn start() -> Self {
        let server = PostgresServer::start();
        server.ask("CREATE TABLE register (resource text PRIMARY KEY, value text)");
        Self { server }
    }
}

#[async_trait]
impl FencedRegister for PostgresRegister {
    async fn write(
        &self,
        resource: &Name,
        lock: &Name,
        token: &FencingToken,
        value: &str,
    ) -> Result<(), FenceError> {
        let connected = tokio_postgres::connect(&self.server.url(), NoTls).await;
        let (mut db, connection) =
            connected.map_err(|error| FenceError::store_error("test", "no connection", error))?;
        tokio::spawn(connection);
        let fence = PostgresFence::new(&db, resource).await?;
        let write = db.transaction().await.unwrap();
        fence.admit(&write, lock, token).await?;
        let upsert = "INSERT INTO register VALUES ($1, $2)
            ON CONFLICT (resource) DO UPDATE SET value = excluded.value";
        write.execute(upsert, &[&resource.as_str(), &value]).await.unwrap();
        write.commit().await.unwrap();
        Ok(())
    }

    async fn read(&self, resource: &Name) -> Option<String> {
        let db = connect(&self.server.url()).await;
        let select = "SELECT value FROM register WHERE resource = $1";
        db.query_opt(select, &[&resource.as_str()]).await.unwrap().map(|row| row.get(0))
    }

    async fn marks(&self) -> Result<Vec<FenceMark>, FenceError> {
        PostgresFenceStore::connect(&self.server.url()).await?.marks().await
    }

    async fn restart(&self) {
        self.server.restart();
    }

    async fn stop(&self) {
        self.server.stop();
    }
}

lockset_testkit::fence_suite!(PostgresRegister::start());

async fn connect(url: &str) -> Client {
    let (db, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    tokio::spawn(connection);
    db
}

fn token(token: u64) -> FencingToken {
    FencingToken::new("orders", Token::new(token)).unwrap()
}

/// A server with the fence installed, and a table `stock` with one row.
fn installed() -> PostgresServer {
    let server = PostgresServer::start();
    server.ask(&format!("BEGIN; {INSTALL} COMMIT;"));
    server.ask("CREATE TABLE stock (count integer); INSERT INTO stock VALUES (0)");
    server
}

const MARKS: &str = "SELECT resource, lock, token FROM lockset_fence.marks ORDER BY 1, 2";

/// Asserts that the script fails with this SQLSTATE.
#[track_caller]
fn assert_fails(server: &PostgresServer, role: &str, script: &str, code: &str) {
    let output = server.psql(role, script);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains(&format!(" {code}: ")), "{script}\nnot {code}: {error}");
    assert_eq!(output.status.code(), Some(3), "{script}\n{error}");
}

/// Waits until a session waits for a lock.
fn await_blocked(server: &PostgresServer) {
    let blocked = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
    until("a transaction waits for the mark", || server.ask(blocked) == "1");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_older_transaction_that_is_paused_blocks_a_newer_one() {
    let server = installed();
    let mut older = connect(&server.url()).await;
    let fence = PostgresFence::new(&older, "stock").await.unwrap();
    let paused = older.transaction().await.unwrap();
    fence.admit(&paused, "orders", token(7)).await.unwrap();

    let (newer_fence, url) = (fence.clone(), server.url());
    let newer = tokio::spawn(async move {
        let mut db = connect(&url).await;
        let write = db.transaction().await.unwrap();
        newer_fence.admit(&write, "orders", token(8)).await.unwrap();
        write.execute("UPDATE stock SET count = count * 10 + 8", &[]).await.unwrap();
        write.commit().await.unwrap();
    });
    await_blocked(&server);
    assert!(!newer.is_finished());
    paused.execute("UPDATE stock SET count = count * 10 + 7", &[]).await.unwrap();
    paused.commit().await.unwrap();
    within(PATIENCE, "the newer transaction goes on", newer).await.unwrap();
    assert_eq!(server.ask("SELECT count FROM stock"), "78");

    let late = older.transaction().await.unwrap();
    let error = fence.admit(&late, "orders", token(7)).await.unwrap_err();
    assert!(error.is_stale(), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_older_transaction_that_waits_for_a_newer_one_is_rejected() {
    for level in ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"] {
        let server = installed();
        let mut newer = connect(&server.url()).await;
        let fence = PostgresFence::new(&newer, "stock").await.unwrap();
        let paused = newer.transaction().await.unwrap();
        fence.admit(&paused, "orders", token(8)).await.unwrap();
        let (older_fence, url) = (fence.clone(), server.url());
        let older = tokio::spawn(async move {
            let mut db = connect(&url).await;
            let write = db.transaction().await.unwrap();
            write.batch_execute(&format!("SET TRANSACTION ISOLATION LEVEL {level}")).await.unwrap();
            older_fence.admit(&write, "orders", token(7)).await
        });
        await_blocked(&server);
        paused.commit().await.unwrap();
        let error = within(PATIENCE, "the older one ends", older).await.unwrap().unwrap_err();
        match level {
            "READ COMMITTED" => assert!(error.is_stale(), "{error}"),
            _ => assert!(error.to_string().contains("SQLSTATE 40001"), "{level}: {error}"),
        }
        assert_eq!(server.ask(MARKS), "stock|orders|8");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_single_statement_waits_for_an_older_transaction_and_sees_its_write() {
    let server = installed();
    let mut older = connect(&server.url()).await;
    let fence = PostgresFence::new(&older, "stock").await.unwrap();
    let statement = |token: u64| {
        format!(
            "WITH admitted AS (
               INSERT INTO lockset_fence.marks AS mark (resource, lock, token)
               VALUES ('stock', 'orders', {token})
               ON CONFLICT (resource, lock) DO UPDATE SET token = excluded.token
               WHERE mark.token <= excluded.token
               RETURNING 1
             )
             UPDATE stock SET count = count * 10 + {token}
             WHERE EXISTS (SELECT FROM admitted) RETURNING count"
        )
    };
    for (number, written) in [(8, Some(78)), (6, None)] {
        server.ask("UPDATE stock SET count = 0");
        let mark = server.ask("SELECT coalesce(max(token), 7) FROM lockset_fence.marks");
        let paused = older.transaction().await.unwrap();
        fence.admit(&paused, "orders", token(mark.parse().unwrap())).await.unwrap();
        paused.execute("UPDATE stock SET count = 7", &[]).await.unwrap();
        let (url, sql) = (server.url(), statement(number));
        let newer = tokio::spawn(async move {
            let rows = connect(&url).await.query_opt(&sql, &[]).await.unwrap();
            rows.map(|row| row.get::<_, i32>(0))
        });
        await_blocked(&server);
        paused.commit().await.unwrap();
        let outcome = within(PATIENCE, "the statement ends", newer).await.unwrap();
        assert_eq!(outcome, written);
    }
}

#[tokio::test]
async fn two_resources_are_written_together_or_not_at_all() {
    let server = installed();
    let mut db = connect(&server.url()).await;
    let stock = PostgresFence::new(&db, "stock").await.unwrap();
    let invoices = PostgresFence::new(&db, "invoices").await.unwrap();
    let write = db.transaction().await.unwrap();
    invoices.admit(&write, "orders", token(8)).await.unwrap();
    write.commit().await.unwrap();

    let write = db.transaction().await.unwrap();
    stock.admit(&write, "orders", token(7)).await.unwrap();
    write.execute("UPDATE stock SET count = 7", &[]).await.unwrap();
    let error = invoices.admit(&write, "orders", token(7)).await.unwrap_err();
    assert!(error.is_stale(), "{error}");
    write.rollback().await.unwrap();
    assert_eq!(server.ask("SELECT count FROM stock"), "0");
    assert_eq!(server.ask(MARKS), "invoices|orders|8");
}

/// Two transactions that check two resources in opposite orders: one fails, and says why.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deadlock_fails_one_transaction() {
    let server = installed();
    let (mut one, mut two) = (connect(&server.url()).await, connect(&server.url()).await);
    let stock = PostgresFence::new(&one, "stock").await.unwrap();
    let invoices = PostgresFence::new(&one, "invoices").await.unwrap();
    let (first, second) = (one.transaction().await.unwrap(), two.transaction().await.unwrap());
    stock.admit(&first, "orders", token(7)).await.unwrap();
    invoices.admit(&second, "orders", token(7)).await.unwrap();
    // The one that succeeds waits until the other is rolled back.
    let first = async {
        let outcome = invoices.admit(&first, "orders", token(7)).await;
        first.rollback().await.unwrap();
        outcome
    };
    let second = async {
        let outcome = stock.admit(&second, "orders", token(7)).await;
        second.rollback().await.unwrap();
        outcome
    };
    let both = async { tokio::join!(first, second) };
    let outcomes = within(PATIENCE, "the deadlock ends", both).await;
    let (Err(error), Ok(())) = (match outcomes {
        (Ok(()), failed) => (failed, Ok(())),
        (failed, other) => (failed, other),
    }) else {
        panic!("not exactly one of them failed");
    };
    assert!(error.to_string().contains("SQLSTATE 40P01"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_install_at_the_same_moment_do_not_disturb_each_other() {
    let server = PostgresServer::start();
    let mut clients = Vec::new();
    for _ in 0..8 {
        clients.push(connect(&server.url()).await);
    }
    let all = clients
        .into_iter()
        .map(|db| tokio::spawn(async move { PostgresFence::new(&db, "stock").await.map(|_| ()) }));
    for outcome in futures_util::future::join_all(all.collect::<Vec<_>>()).await {
        outcome.unwrap().unwrap();
    }
    assert_eq!(server.ask("SELECT version FROM lockset_fence.version"), "1");
    // A DBA may install it again, and inside the transaction of a program it works as well.
    server.ask(&format!("BEGIN; {INSTALL} COMMIT;"));
    server.ask("DROP SCHEMA lockset_fence CASCADE");
    let mut db = connect(&server.url()).await;
    let write = db.transaction().await.unwrap();
    let fence = PostgresFence::new(&write, "stock").await.unwrap();
    fence.admit(&write, "orders", token(7)).await.unwrap();
    write.commit().await.unwrap();
    assert_eq!(server.ask(MARKS), "stock|orders|7");
}

#[tokio::test]
async fn tables_of_a_newer_version_are_rejected() {
    let server = installed();
    server.ask("UPDATE lockset_fence.version SET version = 2");
    let db = connect(&server.url()).await;
    let error = PostgresFence::new(&db, "stock").await.unwrap_err().to_string();
    assert!(error.contains("version 2") && error.contains("update the program"), "{error}");
    let error = PostgresFenceStore::connect(&server.url()).await.unwrap_err().to_string();
    assert!(error.contains("version 2"), "{error}");
    assert_fails(&server, "postgres", &format!("BEGIN; {INSTALL} COMMIT;"), "LF002");
}

#[tokio::test]
async fn a_role_needs_few_rights_and_is_told_if_it_lacks_them() {
    let server = installed();
    server.ask("CREATE ROLE app LOGIN; CREATE ROLE caller LOGIN; CREATE ROLE writer LOGIN");
    let mut db = connect(&server.url_of("app")).await;
    let error = PostgresFence::new(&db, "stock").await.unwrap_err().to_string();
    assert!(error.contains("permission denied for schema lockset_fence"), "{error}");
    server.ask(
        "GRANT USAGE ON SCHEMA lockset_fence TO app, caller;
         GRANT SELECT ON lockset_fence.version TO app;
         GRANT SELECT ON lockset_fence.marks TO app",
    );
    let fence = PostgresFence::new(&db, "stock").await.unwrap();
    let write = db.transaction().await.unwrap();
    let error = fence.admit(&write, "orders", token(7)).await.unwrap_err();
    assert!(error.to_string().contains("permission denied for table marks"), "{error}");
    drop(write);
    server.ask("GRANT INSERT, UPDATE ON lockset_fence.marks TO app");
    let write = db.transaction().await.unwrap();
    fence.admit(&write, "orders", token(7)).await.unwrap();
    write.commit().await.unwrap();

    // A role that may only call the function cannot lower the mark.
    let admit = "SELECT lockset_fence.admit('stock', 'orders', 8)";
    assert_fails(&server, "caller", admit, "42501");
    server.ask(
        "GRANT EXECUTE ON FUNCTION lockset_fence.admit(text, text, bigint) TO caller;
         GRANT ALL ON stock TO writer;
         CREATE TRIGGER fence BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON stock
         FOR EACH STATEMENT EXECUTE FUNCTION lockset_fence.check_session('stock', 'orders')",
    );
    assert!(server.psql("caller", admit).status.success());
    assert_fails(&server, "caller", "UPDATE lockset_fence.marks SET token = 1", "42501");
    // A role that writes to a table with a trigger needs no rights on the marks.
    let write = "BEGIN; SET LOCAL lockset.token = 'orders=9'; UPDATE stock SET count = 9; COMMIT";
    assert!(server.psql("writer", write).status.success());
    assert_eq!(server.ask(MARKS), "stock|orders|9");
    // Without the schema and without the right to make it.
    server.ask("DROP SCHEMA lockset_fence CASCADE");
    let error = PostgresFence::new(&db, "stock").await.unwrap_err().to_string();
    assert!(error.contains("could not be made") && error.contains("permission denied"), "{error}");
}

#[test]
fn a_session_trigger_rejects_stale_missing_and_malformed_tokens_from_psql() {
    let server = installed();
    server.ask(
        "CREATE TRIGGER fence BEFORE INSERT OR UPDATE OR DELETE ON stock
         FOR EACH ROW EXECUTE FUNCTION lockset_fence.check_session('stock')",
    );
    let write = |token: &str| {
        format!("BEGIN; SET LOCAL lockset.token = '{token}'; UPDATE stock SET count = 1; COMMIT;")
    };
    server.ask(&write("orders/42=8"));
    assert_fails(&server, "postgres", &write("orders/42=7"), "LF001");
    assert_fails(&server, "postgres", "UPDATE stock SET count = 2", "LF003");
    // The setting of an earlier transaction is not used again.
    let later = format!("{} UPDATE stock SET count = 2;", write("orders/42=8"));
    assert_fails(&server, "postgres", &later, "LF003");
    let malformed = [
        "orders",
        "=9",
        "orders=",
        "orders=0",
        "orders=-1",
        "orders=+9",
        "orders=9x",
        "orders= 9",
        "orders=1.5",
        "orders=9223372036854775808",
        "orders=99999999999999999999999",
    ];
    for token in malformed {
        assert_fails(&server, "postgres", &write(token), "LF002");
    }
    assert_fails(&server, "postgres", &write("%ff=9"), "22021");
    let long = format!("{}=9", "x".repeat(256));
    assert_fails(&server, "postgres", &write(&long), "LF002");
    let delete = "BEGIN; SET LOCAL lockset.token = 'orders/42=7'; DELETE FROM stock; COMMIT";
    assert_fails(&server, "postgres", delete, "LF001");
    assert_eq!(server.ask("SELECT count FROM stock"), "1");
    assert_eq!(server.ask(MARKS), "stock|orders/42|8");
    server.ask(&delete.replace("=7", "=9"));
    assert_eq!(server.ask("SELECT count(*) FROM stock"), "0");
}

/// The text form of a token means the same to the database as to the library.
#[test]
fn the_database_reads_every_name_that_the_library_writes() {
    let server = installed();
    for name in ["a", "orders/42", "a=b", "ä ö", "100%", "a%2Fb", "a,b;c", "x\"y", "a'b"] {
        let token = FencingToken::new(name, Token::new(7)).unwrap();
        server.ask("TRUNCATE lockset_fence.marks");
        server.ask(&format!("SELECT lockset_fence.admit_text('stock', NULL, '{token}')"));
        assert_eq!(server.ask(MARKS), format!("stock|{name}|7"));
    }
}

#[test]
fn the_function_rejects_what_is_not_a_token_or_a_name() {
    let server = installed();
    let long = format!("'{}', 'l', 7", "x".repeat(256));
    let wrong = [
        "'r', 'l', 0",
        "'r', 'l', -1",
        "'r', 'l', NULL",
        "'', 'l', 7",
        "NULL, 'l', 7",
        "'r', '', 7",
        "'r', NULL, 7",
        &long,
    ];
    for arguments in wrong {
        let call = format!("SELECT lockset_fence.admit({arguments})");
        assert_fails(&server, "postgres", &call, "LF002");
    }
    let above = "SELECT lockset_fence.admit('r', 'l', 9223372036854775808)";
    assert_fails(&server, "postgres", above, "42883");
    assert_eq!(server.ask(MARKS), "");
}

#[test]
fn a_row_trigger_checks_the_columns_of_the_row() {
    let server = installed();
    server.ask(
        "CREATE TABLE invoices (id integer PRIMARY KEY, total integer, l text, t numeric);
         CREATE TRIGGER fence BEFORE INSERT OR UPDATE OR DELETE ON invoices
         FOR EACH ROW EXECUTE FUNCTION lockset_fence.check_row('invoices', 'l', 't');
         INSERT INTO invoices VALUES (1, 10, 'orders', 8), (2, 20, 'orders', 8)",
    );
    let rejected = [
        ("UPDATE invoices SET total = 0, t = 7", "LF001"),
        ("UPDATE invoices SET total = 0", "LF003"),
        ("UPDATE invoices SET total = 0, t = 9, l = NULL", "LF003"),
        ("UPDATE invoices SET total = 0, t = 9, l = 'other'", "LF004"),
        ("UPDATE invoices SET total = 0, t = 0", "LF002"),
        ("UPDATE invoices SET total = 0, t = -8", "LF002"),
        ("UPDATE invoices SET total = 0, t = 8.5", "LF002"),
        ("UPDATE invoices SET total = 0, t = 9223372036854775808", "LF002"),
        ("INSERT INTO invoices VALUES (3, 30, 'orders', 7)", "LF001"),
        ("INSERT INTO invoices VALUES (3, 30)", "LF003"),
        ("DELETE FROM invoices", "LF003"),
        ("BEGIN; SET LOCAL lockset.token = 'orders=7'; DELETE FROM invoices; COMMIT", "LF001"),
        ("BEGIN; SET LOCAL lockset.token = 'a=9'; DELETE FROM invoices; COMMIT", "LF004"),
    ];
    for (statement, code) in rejected {
        assert_fails(&server, "postgres", statement, code);
    }
    let truncate = "CREATE TRIGGER fence_truncate BEFORE TRUNCATE ON invoices
        FOR EACH STATEMENT EXECUTE FUNCTION lockset_fence.check_session('invoices', 'orders')";
    server.ask(truncate);
    assert_fails(&server, "postgres", "TRUNCATE invoices", "LF003");
    let upsert = "INSERT INTO invoices VALUES (1, 11, 'orders', 9)
        ON CONFLICT (id) DO UPDATE SET total = excluded.total, t = 9";
    server.ask(upsert);
    assert_eq!(server.ask("SELECT * FROM invoices ORDER BY id"), "1|11|orders|\n2|20|orders|");
    assert_eq!(server.ask(MARKS), "invoices|orders|9");
    server.ask(
        "CREATE TRIGGER wrong BEFORE INSERT ON stock
         FOR EACH ROW EXECUTE FUNCTION lockset_fence.check_row('stock', 'no', 'such')",
    );
    assert_fails(&server, "postgres", "INSERT INTO stock VALUES (1)", "LF002");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_connects_again_after_a_restart() {
    let server = PostgresServer::start();
    let store = PostgresFenceStore::connect(&server.url()).await.unwrap();
    let (resource, lock) = ("printer".parse().unwrap(), "orders".parse().unwrap());
    store.admit(&resource, &lock, &token(8)).await.unwrap();
    server.stop();
    let error = store.admit(&resource, &lock, &token(9)).await.unwrap_err();
    assert!(matches!(error, FenceError::Store { .. }), "{error}");
    assert!(store.marks().await.is_err());
    server.resume();
    assert!(store.admit(&resource, &lock, &token(7)).await.unwrap_err().is_stale());
    store.admit(&resource, &lock, &token(8)).await.unwrap();
    let mark = FenceMark::new(resource, lock, Token::new(8));
    assert_eq!(store.marks().await.unwrap(), [mark]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_is_lost_in_a_transaction_rejects() {
    let server = installed();
    let mut db = connect(&server.url()).await;
    let fence = PostgresFence::new(&db, "stock").await.unwrap();
    let write = db.transaction().await.unwrap();
    server.stop();
    let admitted = fence.admit(&write, "orders", token(7));
    let error = within(PATIENCE, "the check fails", admitted).await.unwrap_err();
    assert!(matches!(error, FenceError::Store { .. }), "{error}");
    server.resume();
    assert_eq!(server.ask(MARKS), "");
}

/// A server that accepts connections and never replies, and a mark that stays locked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_does_not_wait_for_ever() {
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("postgres://u:secret@{}/db", silent.local_addr().unwrap());
    let began = Instant::now();
    let error = PostgresFenceStore::connect(&url).await.unwrap_err();
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    assert!(!format!("{error} {error:?}").contains("secret"), "{error:?}");

    let server = installed();
    let store = PostgresFenceStore::connect(&server.url()).await.unwrap();
    let mut db = connect(&server.url()).await;
    let fence = PostgresFence::new(&db, "stock").await.unwrap();
    let paused = db.transaction().await.unwrap();
    fence.admit(&paused, "orders", token(7)).await.unwrap();
    let (resource, lock) = ("stock".parse().unwrap(), "orders".parse().unwrap());
    let newer = token(8);
    let waiting = store.admit(&resource, &lock, &newer);
    let error = within(PATIENCE, "the store gives up", waiting).await.unwrap_err();
    assert!(matches!(error, FenceError::Store { .. }), "{error}");
    paused.commit().await.unwrap();
    store.admit(&resource, &lock, &newer).await.unwrap();
}

#[tokio::test]
async fn a_password_is_in_no_error() {
    let server = PostgresServer::start();
    server.ask("CREATE ROLE app LOGIN PASSWORD 'correct horse'");
    let rules = "host all postgres 127.0.0.1/32 trust\nhost all all 127.0.0.1/32 scram-sha-256";
    server.set_access(rules);
    let error = PostgresFenceStore::connect(&server.url_of("app:battery%20staple")).await;
    let error = error.unwrap_err();
    let text = format!("{error} {error:?}");
    assert!(text.contains("password authentication failed"), "{text}");
    assert!(!text.contains("battery") && !text.contains("staple"), "{text}");
    let url = server.url_of("app:correct%20horse");
    let denied = PostgresFenceStore::connect(&url).await.unwrap_err();
    assert!(denied.to_string().contains("permission denied"), "{denied}");
    server.ask("GRANT CREATE ON DATABASE postgres TO app");
    let store = PostgresFenceStore::connect(&url).await.unwrap();
    assert!(!format!("{store:?}").contains("horse"));
    server.stop();
    let error = store.marks().await.unwrap_err();
    assert!(!format!("{error} {error:?}").contains("horse"), "{error:?}");
    let error = PostgresFenceStore::connect(&format!("{url}?sslmode=require")).await.unwrap_err();
    assert!(error.to_string().contains("TLS"), "{error}");
}

#[tokio::test]
async fn a_python_program_uses_the_fence_by_sql() {
    let server = installed();
    server.ask(
        "CREATE TABLE guarded (count integer); INSERT INTO guarded VALUES (0);
         CREATE TRIGGER fence BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON guarded
         FOR EACH STATEMENT EXECUTE FUNCTION lockset_fence.check_session('stock', 'orders')",
    );
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/peers/fence.py");
    let mut python = PythonPeer::start(&program, &["postgres", &server.url()]);
    assert_eq!(python.ask("admit 7 70"), "yes");
    let mut db = connect(&server.url()).await;
    let fence = PostgresFence::new(&db, "stock").await.unwrap();
    let write = db.transaction().await.unwrap();
    fence.admit(&write, "orders", token(8)).await.unwrap();
    write.commit().await.unwrap();
    let expected = [
        ("admit 7 71", "no LF001 "),
        ("admit 0 71", "no LF002 "),
        ("set orders=7 71", "no LF001 "),
        ("set - 71", "no LF003 "),
        ("set orders 71", "no LF002 "),
        ("set customers=9 71", "no LF004 "),
        ("set orders=8 80", "yes"),
    ];
    for (order, reply) in expected {
        let given = python.ask(order);
        assert!(given.starts_with(reply), "{order}: {given}");
    }
    assert_eq!(server.ask("SELECT stock.count, guarded.count FROM stock, guarded"), "70|80");
    assert_eq!(server.ask(MARKS), "stock|orders|8");
}
