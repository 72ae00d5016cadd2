//! A grant that so many replicas must have before it is believed.
//!
//! `WAIT` covers the writes of its own connection and blocks it. So a grant is confirmed by a
//! renewal and a `WAIT` behind it, over a connection that nobody else uses meanwhile.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use redis::Value;
use tokio::sync::Semaphore;

use super::LEAST_PATIENCE;
use super::link::{Answer, Unanswered, Up, failed};
use super::nodes::Node;
use super::scripts::Script;
use crate::engine::Replicas;
use crate::error::Error;
use crate::sync;

/// How many connections there are at most, and how many of them are kept when they are idle.
const MOST: usize = 32;
const KEPT: usize = 4;

/// Connections for this purpose.
#[derive(Debug)]
pub(super) struct Sure {
    /// One turn for each connection that there may be.
    turns: Semaphore,
    /// Those that are idle at the moment; and the one that each was opened beside.
    idle: Mutex<Vec<(Arc<Up>, Arc<Up>)>>,
}

impl Default for Sure {
    fn default() -> Self {
        Self { turns: Semaphore::new(MOST), idle: Mutex::default() }
    }
}

impl Node {
    /// How many replicas that is here, the server itself not counted.
    pub(super) fn wanted(&self, policy: Replicas) -> u32 {
        match policy {
            Replicas::None => 0,
            Replicas::AtLeast(count) => count,
            // Of the server and its replicas together.
            Replicas::Majority => self.replicas().div_ceil(2),
        }
    }

    /// Runs a script, waits for so many replicas, and answers what the script said.
    pub(super) async fn confirm(
        &self,
        script: &Script,
        command: &redis::Cmd,
        wanted: u32,
        patience: Duration,
    ) -> Answer {
        let began = Instant::now();
        let _turn =
            tokio::time::timeout(patience, self.sure.turns.acquire()).await.map_err(|_| {
                let what =
                    format!("too many locks wait for replicas: no turn within {patience:.1?}");
                Unanswered::Refused(failed(what, true, None))
            })?;
        let patience = patience.saturating_sub(began.elapsed()).max(LEAST_PATIENCE);
        let main = self.link.up(patience).await?;
        let idle = {
            let mut idle = sync::lock(&self.sure.idle);
            idle.retain(|(up, of)| !up.is_over() && Arc::ptr_eq(of, &main));
            idle.pop()
        };
        let (up, of) = match idle {
            Some(pair) => pair,
            None => (Arc::new(self.opened_beside(main.clone()).await?), main),
        };
        let mut connection = up.connection.clone();
        let mut both = redis::pipe();
        let millis = u64::try_from(patience.as_millis() / 2).unwrap_or(u64::MAX).max(1);
        both.add_command(script.load())
            .add_command(command.clone())
            .cmd("WAIT")
            .arg(wanted)
            .arg(millis);
        let answer = up.answer(patience, both.query_async(&mut connection)).await?;
        let idle = &mut *sync::lock(&self.sure.idle);
        // Whoever waits for a turn takes it over.
        if idle.len() < KEPT || self.sure.turns.available_permits() == 0 {
            idle.push((up, of));
        }
        match answer {
            Value::Array(parts) => match <[Value; 3]>::try_from(parts) {
                Ok([_, said, Value::Int(have)]) if have >= i64::from(wanted) => Ok(said),
                Ok([_, _, Value::Int(have)]) => Err(Unanswered::Unknown(failed(
                    format!("{have} of the {wanted} replicas asked for have confirmed the lock"),
                    true,
                    None,
                ))),
                _ => Err(Unanswered::Unknown(failed("no answer to WAIT".to_owned(), true, None))),
            },
            _ => Err(Unanswered::Unknown(failed("no answer to WAIT".to_owned(), true, None))),
        }
    }

    /// On the client's own runtime, since it is kept.
    async fn opened_beside(&self, main: Arc<Up>) -> Result<Up, Unanswered> {
        let maker = self.maker.clone();
        let opened = self.home.spawn(async move { maker.beside(&main).await });
        opened.await.unwrap_or(Err(Error::Closed)).map_err(Unanswered::Refused)
    }
}
