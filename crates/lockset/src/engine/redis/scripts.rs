//! The scripts, and how one is run.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{Cmd, RedisError, ToRedisArgs, Value};

/// The scripts count in doubles, which are exact below this.
pub(super) const TOKENS_END: u64 = 1 << 53;

/// How long courtesy leaves a lock free: longer than most libraries pause between two attempts.
const LEFT_FREE: Duration = Duration::from_millis(150);

/// All that is decided on the server.
#[derive(Debug)]
pub(super) struct Scripts {
    pub(super) take: Script,
    pub(super) give: Script,
    pub(super) pass: Script,
    pub(super) batch: Script,
    pub(super) heartbeat: Script,
    pub(super) renew: Script,
    pub(super) finish: Script,
    pub(super) adopt: Script,
    pub(super) amend: Script,
    pub(super) look: Script,
    pub(super) cell: Script,
    pub(super) force: Script,
    /// Whether locks are left free for others now and then.
    pub(super) has_courtesy: bool,
}

impl Scripts {
    pub(super) fn new(fence_idle: Duration, courtesy: Option<Duration>) -> Self {
        let idle = fence_idle.as_millis().to_string();
        let after = courtesy.map_or(0, |after| after.as_millis()).to_string();
        let free = LEFT_FREE.as_millis().to_string();
        let common = include_str!("common.lua");
        let end = TOKENS_END.to_string();
        let new = |code: String| {
            let code = code.replace("FENCE_IDLE_MS", &idle).replace("TOKENS_END", &end);
            Script::new(code.replace("COURTESY_MS", &after).replace("FREE_MS", &free))
        };
        let script = |body: &str| new(format!("{common}\n{body}"));
        // The usual case, what it needs otherwise, and then the rest.
        let usual = |usual: &str, rest: &str| new(format!("{usual}\n{common}\n{rest}"));
        let drawing = |usual: &str| format!("{}\n{usual}", include_str!("draw.lua"));
        Self {
            take: usual(&drawing(include_str!("take.lua")), include_str!("take_rest.lua")),
            give: usual(include_str!("give.lua"), include_str!("give_rest.lua")),
            pass: usual(&drawing(include_str!("pass.lua")), include_str!("pass_rest.lua")),
            batch: new(drawing(include_str!("batch.lua"))),
            heartbeat: script(include_str!("heartbeat.lua")),
            renew: script(include_str!("renew.lua")),
            finish: script(include_str!("finish.lua")),
            adopt: script(include_str!("adopt.lua")),
            amend: script(include_str!("amend.lua")),
            look: script(include_str!("look.lua")),
            cell: Script::new(include_str!("cell.lua").to_owned()),
            force: script(include_str!("break.lua")),
            has_courtesy: courtesy.is_some(),
        }
    }
}

/// A script, and the hash by which the server knows it.
#[derive(Debug)]
pub(super) struct Script {
    code: String,
    hash: String,
}

impl Script {
    fn new(code: String) -> Self {
        let hash = redis::Script::new(&code).get_hash().to_owned();
        Self { code, hash }
    }

    /// The command that runs it; keys and arguments are to follow.
    pub(super) fn call(&self, keys: usize) -> Cmd {
        let mut command = redis::cmd("EVALSHA");
        command.arg(&self.hash).arg(keys);
        command
    }

    pub(super) fn call_with(&self, keys: &[impl ToRedisArgs], args: &[impl ToRedisArgs]) -> Cmd {
        let mut command = self.call(keys.len());
        command.arg(keys).arg(args);
        command
    }

    /// The command that makes the server know it.
    pub(super) fn load(&self) -> Cmd {
        let mut command = redis::cmd("SCRIPT");
        command.arg("LOAD").arg(&self.code);
        command
    }

    /// Sends a command of this script, and the script if the server does not know it.
    pub(super) async fn run(
        &self,
        command: &Cmd,
        connection: &mut MultiplexedConnection,
    ) -> Result<Value, RedisError> {
        match command.query_async(connection).await {
            // It was not run.
            Err(error) if error.code() == Some("NOSCRIPT") => {
                Box::pin(self.load_and_run(command, connection)).await
            }
            answer => answer,
        }
    }

    async fn load_and_run(
        &self,
        command: &Cmd,
        connection: &mut MultiplexedConnection,
    ) -> Result<Value, RedisError> {
        self.load().query_async::<Value>(connection).await?;
        command.query_async(connection).await
    }
}
