//! The classic accident, and how a fence prevents it: a holder is paused beyond its lease, another
//! client is granted the lock and writes, then the first one goes on and writes too.
//!
//! A and B are processes of their own. A is stopped with SIGSTOP between its last check and its
//! write. It happens twice: with a fence in the database, and without one.
//!
//!     cargo run --example paused_holder
//!
//! All engines and stores: `cargo run -p lockset-testkit --example paused_holders -- all`.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use lockset::fence::{FenceError, FencingToken, SqliteFence};
use lockset::{LockOptions, Lockset};
use rusqlite::{Connection, TransactionBehavior};
use rustix::process::{Pid, Signal, kill_process};

const LOCK: &str = "stock";
const TTL: Duration = Duration::from_secs(1);

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Outcome {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [role, who, database, fence] = &args[..]
        && role == "client"
    {
        return client(who, database, fence == "fenced");
    }
    let lost = scenario(false)?;
    let kept = scenario(true)?;
    match (lost.as_str(), kept.as_str()) {
        ("A", "B") => Ok(()),
        other => Err(format!("expected A without the fence and B with it, found {other:?}").into()),
    }
}

/// What A and B do, and who wrote last.
fn scenario(fenced: bool) -> Outcome<String> {
    let folder = tempfile::tempdir()?;
    let database = folder.path().join("stock.db");
    Connection::open(&database)?
        .execute_batch("CREATE TABLE stock (item TEXT PRIMARY KEY, written_by TEXT)")?;
    let database = database.display().to_string();
    let timeline = Timeline::begin(if fenced { "With the fence" } else { "Without a fence" });

    let mut a = Client::start("A", &database, fenced)?;
    let token = a.reply()?;
    timeline.say("A", &format!("is granted the lock, token {token}, lease {TTL:?}"));
    a.signal(Signal::STOP)?;
    timeline.say("A", "is stopped (SIGSTOP) just before its write");

    let mut b = Client::start("B", &database, fenced)?;
    let token = b.reply()?;
    timeline.say("B", &format!("is granted the lock, token {token}: the lease of A has ended"));
    b.send("write")?;
    timeline.say("B", &format!("writes: {}", b.reply()?));

    a.send("write")?;
    a.signal(Signal::CONT)?;
    timeline.say("A", "is continued (SIGCONT) and does not know what happened");
    timeline.say("A", &format!("writes: {}", a.reply()?));

    let last: String =
        Connection::open(&database)?
            .query_row("SELECT written_by FROM stock", [], |row| row.get(0))?;
    let verdict = if last == "B" { "the update of B stands" } else { "the update of B is lost" };
    timeline.say("", &format!("the database has the value of {last}: {verdict}"));
    Ok(last)
}

/// A client in a process of its own: takes the lock, prints its token, and writes when told to.
fn client(who: &str, database: &str, fenced: bool) -> Outcome {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    // Renewed in the background for as long as this process is not stopped.
    let (_locks, guard) = runtime.block_on(async {
        let locks = Lockset::connect(&format!("local:{database}.locks")).await?;
        let mutex = locks.mutex(LOCK)?.with(LockOptions::default().ttl(TTL));
        let guard = mutex.lock().await?;
        Ok::<_, lockset::Error>((locks, guard))
    })?;
    // Taken while the lock is held. From here on the guard is not asked again: that is the client
    // which checked and was paused before it wrote.
    let token = FencingToken::from(&guard);
    say(&token.token().to_string());
    let mut order = String::new();
    std::io::stdin().read_line(&mut order)?;
    let fence = if fenced { Some(&token) } else { None };
    match write(database, fence, who) {
        Ok(()) => say("done"),
        Err(error) => match error.downcast_ref::<FenceError>() {
            Some(stale) if stale.is_stale() => say(&stale.to_string()),
            _ => return Err(error),
        },
    }
    Ok(())
}

/// The write. The check is one line more, in the same transaction.
fn write(database: &str, token: Option<&FencingToken>, who: &str) -> Outcome {
    let mut connection = Connection::open(database)?;
    let fence = SqliteFence::new(&connection, "stock")?;
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    if let Some(token) = token {
        fence.admit(&transaction, LOCK, token)?;
    }
    transaction.execute("INSERT OR REPLACE INTO stock VALUES ('shoes', ?1)", [who])?;
    Ok(transaction.commit()?)
}

/// A client process. It is killed when this is dropped.
struct Client {
    child: Child,
    orders: ChildStdin,
    replies: BufReader<std::process::ChildStdout>,
}

impl Client {
    fn start(who: &str, database: &str, fenced: bool) -> Outcome<Self> {
        let fence = if fenced { "fenced" } else { "unfenced" };
        let mut child = Command::new(std::env::current_exe()?)
            .args(["client", who, database, fence])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let orders = child.stdin.take().ok_or("no stdin")?;
        let replies = BufReader::new(child.stdout.take().ok_or("no stdout")?);
        Ok(Self { child, orders, replies })
    }

    fn send(&mut self, order: &str) -> Outcome {
        Ok(writeln!(self.orders, "{order}")?)
    }

    fn reply(&mut self) -> Outcome<String> {
        let mut line = String::new();
        match self.replies.read_line(&mut line)? {
            0 => Err("the client ended without a reply".into()),
            _ => Ok(line.trim_end().to_owned()),
        }
    }

    fn signal(&self, signal: Signal) -> Outcome {
        Ok(kill_process(Pid::from_child(&self.child), signal)?)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Prints what happens, with the time since it began.
struct Timeline(Instant);

impl Timeline {
    fn begin(title: &str) -> Self {
        say(&format!("\n{title}"));
        Self(Instant::now())
    }

    fn say(&self, who: &str, what: &str) {
        say(&format!("  {:5.2} s  {who:1}  {what}", self.0.elapsed().as_secs_f64()));
    }
}

#[allow(clippy::print_stdout, reason = "an example talks to its reader")]
fn say(line: &str) {
    println!("{line}");
}
