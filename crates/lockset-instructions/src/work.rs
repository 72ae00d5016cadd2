//! The work whose instructions are counted.

use std::fmt;
use std::time::{Duration, Instant};

use lockset::Lockset;

/// How long connecting may take: below valgrind on a busy machine the client's own limit is short.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(60);

/// Tasks that lock and release, each a name of its own.
#[derive(Clone, Copy)]
pub(crate) struct Work {
    pub(crate) engine: &'static str,
    pub(crate) tasks: usize,
}

impl Work {
    /// The cycles of the shorter and of the longer run. Short ones, because the server is needed
    /// for them, and nothing is measured in time.
    pub(crate) fn cycles(self) -> [usize; 2] {
        match self.engine {
            "memory" => [1_000, 11_000],
            _ => [640, 3_840],
        }
    }
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { engine, tasks } = self;
        write!(f, "{engine}, {tasks} {}", if *tasks == 1 { "task" } else { "tasks" })
    }
}

/// Does this many cycles in all, on one thread.
pub(crate) fn run(url: &str, tasks: usize, cycles: usize) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let locks = connect(url).await;
        let each = (0..tasks).map(|task| {
            let mutex = locks.mutex(format!("instructions/{task}")).unwrap();
            tokio::spawn(async move {
                for _ in 0..cycles / tasks {
                    let guard = mutex.lock().await.unwrap();
                    assert_ne!(guard.token().get(), 0);
                    guard.release().await.unwrap();
                }
            })
        });
        for ended in futures_util::future::join_all(each).await {
            ended.unwrap();
        }
        locks.close().await.unwrap();
    });
}

async fn connect(url: &str) -> Lockset {
    let until = Instant::now() + CONNECT_TIMEOUT;
    loop {
        match Lockset::connect(url).await {
            Err(error) if error.is_retryable() && Instant::now() < until => {}
            connected => return connected.unwrap(),
        }
    }
}
