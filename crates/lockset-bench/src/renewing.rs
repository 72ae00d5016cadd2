//! What it takes to keep 10,000 locks.

use std::time::Duration;

use lockset::{Guard, Lockset};

use crate::measure::Pace;
use crate::server::Server;
use crate::table::{Table, Target};

const LOCKS: usize = 10_000;
/// A lease is renewed when a third of it has passed.
const PERIODS_PER_TTL: u32 = 3;

pub(crate) fn held_locks(server: &Server, pace: Pace, table: &mut Table) {
    let (ttl, periods) = if pace.quick { (6, 1) } else { (30, 2) };
    let ttl = Duration::from_secs(ttl);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let count = runtime.block_on(async {
        let locks = Lockset::builder(&server.url()).ttl(ttl).connect().await.unwrap();
        let mut held: Vec<Guard> = Vec::with_capacity(LOCKS);
        for number in 0..LOCKS {
            held.push(locks.mutex(format!("held/{number}")).unwrap().lock().await.unwrap());
        }
        let count = server.count_commands();
        tokio::time::sleep(ttl / PERIODS_PER_TTL * periods).await;
        let count = count.finish() as f64 / f64::from(periods);
        assert!(held.iter().all(|guard| guard.state() == lockset::State::Held));
        locks.close().await.unwrap();
        count
    });
    let work = format!("renewing 10,000 held locks, ttl {ttl:?}: round trips per period");
    table.add(work, "counted once", count, Target::AtMost(200.0));
}
