//! The Lua scripts, and how one is run.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{Cmd, RedisError, ToRedisArgs, Value};

use super::text::push_number;
use super::{RedisOptions, RedisShortcuts};

/// The scripts compute in doubles, which are exact below this.
pub(super) const TOKENS_END: u64 = 1 << 53;

/// How long courtesy leaves a lock free: longer than most libraries pause between two attempts.
const COURTESY_FREE: Duration = Duration::from_millis(150);

/// Everything that is decided on the server.
#[derive(Debug)]
pub(super) struct Scripts {
    pub(super) acquire: Script,
    pub(super) release: Script,
    pub(super) handover: Script,
    pub(super) batch: Script,
    pub(super) heartbeat: Script,
    pub(super) renew: Script,
    pub(super) withdraw: Script,
    pub(super) adopt: Script,
    pub(super) amend: Script,
    pub(super) inspect: Script,
    pub(super) cell: Script,
    pub(super) force_release: Script,
    /// Whether locks are left free for other clients now and then.
    pub(super) has_courtesy: bool,
    pub(super) shortcuts: RedisShortcuts,
}

impl Scripts {
    pub(super) fn new(options: &RedisOptions) -> Self {
        let RedisOptions { fence_idle, courtesy, shortcuts, .. } = options;
        let idle = fence_idle.as_millis().to_string();
        let after = courtesy.map_or(0, |after| after.as_millis()).to_string();
        let late = shortcuts.late_tokens.to_string();
        let free = COURTESY_FREE.as_millis().to_string();
        let end = TOKENS_END.to_string();
        let new = |code: String| {
            let code = code.replace("FENCE_IDLE_MS", &idle).replace("TOKENS_END", &end);
            let code = code.replace("LATE_TOKENS", &late);
            Script::new(code.replace("COURTESY_MS", &after).replace("FREE_MS", &free))
        };
        let (token, common) = (include_str!("next_token.lua"), include_str!("common.lua"));
        let script = |body: &str| new([token, common, body].join("\n"));
        let early = if shortcuts.late_tokens { "" } else { include_str!("store_early.lua") };
        // The fast path runs before the functions in `common.lua` are even defined.
        let with_fast_path =
            |fast: &str, full: &str| new([token, early, fast, common, full].join("\n"));
        let (release_fast, release) =
            (include_str!("release_fast.lua"), include_str!("release.lua"));
        Self {
            acquire: with_fast_path(include_str!("acquire_fast.lua"), include_str!("acquire.lua")),
            release: new([release_fast, token, common, release].join("\n")),
            handover: with_fast_path(
                include_str!("handover_fast.lua"),
                include_str!("handover.lua"),
            ),
            batch: new([token, early, include_str!("batch.lua")].join("\n")),
            heartbeat: script(include_str!("heartbeat.lua")),
            renew: script(include_str!("renew.lua")),
            withdraw: script(include_str!("withdraw.lua")),
            adopt: script(include_str!("adopt.lua")),
            amend: script(include_str!("amend.lua")),
            inspect: script(include_str!("inspect.lua")),
            cell: Script::new(include_str!("cell.lua").to_owned()),
            force_release: script(include_str!("force_release.lua")),
            has_courtesy: courtesy.is_some(),
            shortcuts: *shortcuts,
        }
    }
}

/// A script, and its SHA-1 by which the server knows it.
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

    /// The command that runs it; the caller adds keys and arguments.
    pub(super) fn call(&self, keys: usize) -> Cmd {
        self.call_sized(keys, 16, 512)
    }

    /// The same, with room for `args` arguments of `bytes` bytes in all.
    pub(super) fn call_sized(&self, keys: usize, args: usize, bytes: usize) -> Cmd {
        let mut command = Cmd::with_capacity(3 + args, 64 + bytes);
        let mut count = Vec::with_capacity(20);
        push_number(&mut count, keys as u64);
        command.arg("EVALSHA").arg(&self.hash).arg(&count);
        command
    }

    pub(super) fn call_with(&self, keys: &[impl ToRedisArgs], args: &[impl ToRedisArgs]) -> Cmd {
        let mut command = self.call(keys.len());
        command.arg(keys).arg(args);
        command
    }

    /// The command that loads it into the server.
    pub(super) fn load(&self) -> Cmd {
        let mut command = redis::cmd("SCRIPT");
        command.arg("LOAD").arg(&self.code);
        command
    }

    /// Runs a command of this script; loads the script first if the server does not know it.
    pub(super) async fn run(
        &self,
        command: &Cmd,
        multiplexed: &mut MultiplexedConnection,
    ) -> Result<Value, RedisError> {
        match command.query_async(multiplexed).await {
            // The script was not run.
            Err(error) if error.code() == Some("NOSCRIPT") => {
                Box::pin(self.load_and_run(command, multiplexed)).await
            }
            reply => reply,
        }
    }

    async fn load_and_run(
        &self,
        command: &Cmd,
        multiplexed: &mut MultiplexedConnection,
    ) -> Result<Value, RedisError> {
        self.load().query_async::<Value>(multiplexed).await?;
        command.query_async(multiplexed).await
    }
}
