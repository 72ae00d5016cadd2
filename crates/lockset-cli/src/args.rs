//! The command line: its arguments, and what is rejected before anything is done.

mod fence;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum, ValueHint};
use clap_complete::Shell;
use lockset::{Name, Note, Prefix};

pub(crate) use self::fence::{CheckArgs, FenceArgs, FenceVerb, MarksArgs, TokenArgs, WriteArgs};

/// A longer duration is most likely a mistake in the unit.
const MAX_DURATION: Duration = Duration::from_secs(366 * 24 * 60 * 60);

/// Run commands under a distributed lock, and manage such locks.
///
/// The verbs are the same on every engine. The engine is given by -u URL, else by LOCKSET_URL, else
/// it is `local:`, which needs no server: one file for all processes of this machine.
#[derive(Debug, Parser)]
#[command(name = "lockset", version, max_term_width = 100, after_help = EXAMPLES)]
#[command(subcommand_required = true, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) engine: EngineArgs,

    #[command(subcommand)]
    pub(crate) verb: Verb,
}

const EXAMPLES: &str = "\
Examples:
  lockset run nightly -- ./backup.sh          wait for the lock, run, release
  lockset run -n nightly -- ./backup.sh       exit with 75 if the lock is busy
  lockset run --permits 1 --limit 4 render -- ffmpeg ...
  lockset show nightly                        who holds it, who waits
  lockset watch jobs/ --json                  every change, one JSON document per line";

/// The engine.
#[derive(Args, Clone, Debug)]
pub(crate) struct EngineArgs {
    /// The engine and its address, such as `local:/path/file.db` or `redis://host` (see --help)
    #[arg(short, long, global = true, env = "LOCKSET_URL", hide_env_values = true)]
    #[arg(long_help = URL_HELP)]
    pub(crate) url: Option<String>,

    /// Read the engine's password from this file (else from LOCKSET_PASSWORD)
    #[arg(long, global = true, value_name = "FILE", value_hint = ValueHint::FilePath)]
    #[arg(env = "LOCKSET_PASSWORD_FILE", hide_env_values = true)]
    pub(crate) password_file: Option<PathBuf>,

    /// Print more on stderr; twice for the engine's own events
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
}

const URL_HELP: &str = "\
The engine and its address; `local:` if not given:
  local:                                 a file of this user
  local:/path/file.db                    this file; ?mode=660 lets others use it too
  redis://host:port/db                   one Redis server
  redis+sentinel://host:port,.../service the master that sentinels name
  redis+cluster://host:port,...          a Redis cluster
  redlock://host:port,host:port,...      a quorum of three or more Redis servers
  etcd://host:port,.../prefix            an etcd server or cluster
  zk://host:port,.../chroot              a ZooKeeper server or ensemble
  postgres://host:port,.../database      a PostgreSQL database; by TLS if on another machine
  memory:                                this process alone
  rediss:// rediss+sentinel:// rediss+cluster:// redlocks:// etcds:// zks://   by TLS

Port, db, prefix and chroot may be left out. `?ttl=10s` sets the lease where --ttl is not \
given. A user is written `user@` before the hosts. A \
password (`user:password@`) is never printed, but others may see it in the list of processes; \
--password-file and LOCKSET_PASSWORD avoid that.";

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    Run(RunArgs),
    Elect(ElectArgs),
    Acquire(AcquireArgs),
    /// Renew the lease of a lock by its ticket
    #[command(after_help = "Example:\n  lockset renew --ticket deploy.ticket")]
    Renew(TicketArgs),
    /// Release a lock by its ticket, and remove the ticket
    #[command(after_help = "Example:\n  lockset release --ticket deploy.ticket")]
    Release(TicketArgs),
    /// List the locks that are held or waited for
    #[command(after_help = "Examples:\n  lockset ls\n  \
        lockset ls jobs/ --json | jq -r '.[].name'")]
    Ls(ListArgs),
    #[command(after_help = "Examples:\n  lockset show nightly\n  \
        lockset show nightly >/dev/null || echo free\n\n\
        Exit code:\n  0    it is held\n  1    it is free\n  125  lockset itself failed")]
    Show(ShowArgs),
    /// Print a line for every change, until interrupted
    #[command(after_help = "Examples:\n  lockset watch\n  lockset watch jobs/ --json")]
    Watch(ListArgs),
    Break(BreakArgs),
    Fence(FenceArgs),
    Schema(SchemaArgs),
    /// Print a completion script for a shell
    #[command(after_help = "Example:\n  lockset completions bash > \
        ~/.local/share/bash-completion/completions/lockset")]
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Print the manual page, or write all of them
    #[command(after_help = "Examples:\n  lockset man | man -l -\n  \
        lockset man --dir /usr/local/share/man/man1")]
    Man {
        /// Write the page of every verb into this folder
        #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
        dir: Option<PathBuf>,
    },
}

/// Print the SQL that creates what an engine stores, for an administrator
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    lockset schema postgres | psql --single-transaction -v ON_ERROR_STOP=1\n  \
    lockset schema postgres --schema shop_locks > locks.sql\n\n\
    It may be run again. A role that may create schemas needs none of this.")]
pub(crate) struct SchemaArgs {
    /// The engine
    pub(crate) engine: SchemaEngine,

    /// The name of the schema
    #[arg(long, default_value = "lockset")]
    pub(crate) schema: String,
}

/// An engine that has a schema.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum SchemaEngine {
    /// PostgreSQL
    Postgres,
}

/// Run a command while holding a lock
#[derive(Args, Debug)]
#[command(after_help = RUN_EXAMPLES, after_long_help = RUN_MORE)]
pub(crate) struct RunArgs {
    /// The lock
    pub(crate) name: Name,

    #[command(flatten)]
    pub(crate) wait_args: WaitArgs,

    #[command(flatten)]
    pub(crate) mode: ModeArgs,

    #[command(flatten)]
    pub(crate) job: JobArgs,
}

const RUN_EXAMPLES: &str = "\
Examples:
  lockset run nightly -- ./backup.sh                       one at a time
  lockset run -w 10m --note 'release 1.4' deploy -- make deploy
  lockset run --shared catalogue -- ./read.sh              readers together
  lockset run --permits 2 --limit 8 cores -- make -j2      at most 8 cores in all
  lockset run x -- sh -c 'cd /srv && ./job >log 2>&1'      a shell only if you want one";

const RUN_MORE: &str = "\
Examples:
  lockset run nightly -- ./backup.sh                       one at a time
  lockset run -w 10m --note 'release 1.4' deploy -- make deploy
  lockset run --shared catalogue -- ./read.sh              readers together
  lockset run --permits 2 --limit 8 cores -- make -j2      at most 8 cores in all
  lockset run x -- sh -c 'cd /srv && ./job >log 2>&1'      a shell only if you want one

Environment of the command:
  LOCKSET_NAME, LOCKSET_TOKEN (the fencing token: send it to the resource that the lock protects),
  LOCKSET_OWNER, LOCKSET_ENGINE, LOCKSET_TTL_MS, and LOCKSET_URL without its passwords, however it
  was given. LOCKSET_PASSWORD and LOCKSET_PASSWORD_FILE are not passed on: a lockset within the
  command uses the same engine, and fails if that needs a password.

Exit code:
  the command's own, or 128 + n if signal n ended it
  75   busy (-n)                      124  not granted in time (-w)
  76   the lock was lost              125  lockset itself failed
  126  the command cannot be executed 127  the command was not found

Signals:
  INT TERM HUP QUIT USR1 USR2 WINCH TSTP CONT are passed on to the command's process group. While
  lockset waits for the lock, INT TERM HUP QUIT end it and leave nothing behind. A job suspended
  with Ctrl-Z cannot renew its lease: if it is suspended for longer than --ttl, the lock is lost
  and the command is killed.

When the lock cannot be kept:
  The command's group gets TERM --grace before the lease ends, and it and all its descendants get
  KILL shortly before (5 % of the ttl; at least 250 ms, at most an eighth of the ttl). If the lock
  is lost outright, KILL at once. Either way lockset exits with 76.

When lockset is killed:
  A small guardian process, the parent of the command, then kills the command and all its
  descendants, also those that left the process group. On the local engine no other process is
  granted the lock before they are gone. If the guardian is killed, lockset does the same; on the
  local engine the next holder may then start a moment before the last descendant is dead.
  Not covered: lockset and its guardian killed in the same instant (the command itself still dies,
  what it started may not), processes that cannot be killed because they sleep uninterruptibly or
  have changed their user, and systems other than Linux, which have neither sub-reapers nor
  parent-death signals. There, as everywhere, the lease and the fencing token remain.";

/// Campaign for leadership, and run a command while leading
///
/// When the command ends or leadership is lost, the campaign begins again, until INT, TERM, HUP or
/// QUIT ends it, or the first time with --once.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  lockset elect scheduler -- ./scheduler\n  \
    lockset elect scheduler --note \"$(hostname):8080\" --once -- ./scheduler")]
pub(crate) struct ElectArgs {
    /// The election
    pub(crate) name: Name,

    /// Campaign once, and exit as `run` would
    #[arg(long)]
    pub(crate) once: bool,

    /// Report each change of leadership on stderr as JSON
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) wait_args: WaitArgs,

    #[command(flatten)]
    pub(crate) job: JobArgs,
}

/// How long to wait for the lock.
#[derive(Args, Debug)]
pub(crate) struct WaitArgs {
    /// Do not wait: exit with 75 if the lock is busy
    ///
    /// An engine that cannot be reached is not waited for either.
    #[arg(short = 'n', long, conflicts_with = "wait")]
    pub(crate) no_wait: bool,

    /// Wait at most this long (30s, 1h30m), then exit with 124; without it, as long as it takes
    ///
    /// An engine that cannot be reached or is not ready is waited for as well. If it does not
    /// reply in this time, lockset exits with 125.
    #[arg(short, long, value_name = "DUR", value_parser = duration, allow_hyphen_values = true)]
    pub(crate) wait: Option<Duration>,

    /// Exit with this code instead of 75 and 124
    #[arg(long, value_name = "CODE")]
    pub(crate) conflict_exit_code: Option<u8>,
}

/// The mode of the lock.
#[derive(Args, Clone, Copy, Debug, Default)]
pub(crate) struct ModeArgs {
    /// Hold it together with other shared holders
    #[arg(long, conflicts_with = "limit")]
    pub(crate) shared: bool,

    /// Take this many permits of a semaphore
    #[arg(long, value_name = "K", requires = "limit")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) permits: Option<u32>,

    /// The number of permits in all; every user of the name must give the same
    #[arg(long, value_name = "M", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) limit: Option<u32>,
}

/// The command, and how it is run and ended.
#[derive(Args, Clone, Debug)]
pub(crate) struct JobArgs {
    #[command(flatten)]
    pub(crate) options: TermArgs,

    /// Hold the lock for at most this long, then end the command
    ///
    /// TERM is sent --grace before this time is over, or a tenth of it if that is less; KILL at
    /// most a twentieth of it before its end. The ttl must not be longer; without --ttl it is the
    /// shorter of this time and the default ttl.
    #[arg(long, value_name = "DUR", value_parser = duration, allow_hyphen_values = true)]
    pub(crate) max_hold: Option<Duration>,

    /// How long before the end of the lease the command gets TERM; default and maximum: a third
    /// of the ttl (two ninths on ZooKeeper)
    #[arg(long, value_name = "DUR", value_parser = duration, allow_hyphen_values = true)]
    pub(crate) grace: Option<Duration>,

    /// Let background processes of the command continue after it ended
    ///
    /// Without this, members of its process group that still run get TERM, then KILL, before the
    /// lock is released.
    #[arg(long)]
    pub(crate) leave_children: bool,

    /// Exit with this code instead of 76 when the lock was lost
    #[arg(long, value_name = "CODE")]
    pub(crate) lost_exit_code: Option<u8>,

    /// The command and its arguments, executed directly, not by a shell
    #[arg(last = true, required = true, value_name = "COMMAND")]
    #[arg(value_hint = ValueHint::CommandWithArguments)]
    pub(crate) command: Vec<OsString>,
}

/// Options of a claim.
#[derive(Args, Clone, Debug)]
pub(crate) struct TermArgs {
    /// The lease: how long the lock outlives a crash that the engine cannot see
    #[arg(long, value_name = "DUR", value_parser = duration, allow_hyphen_values = true)]
    pub(crate) ttl: Option<Duration>,

    /// A text that others see
    #[arg(long, value_name = "TEXT", value_parser = note)]
    pub(crate) note: Option<String>,
}

/// Take a lock that outlives this command, and write a ticket for it
///
/// The lock is not renewed by itself: it ends with its lease unless `lockset renew` renews it.
/// Every process that has the ticket can renew and release the lock.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  lockset acquire deploy --ttl 10m --ticket deploy.ticket\n  \
    token=$(lockset acquire deploy --ttl 10m --ticket deploy.ticket --print token)\n  \
    lockset renew --ticket deploy.ticket\n  lockset release --ticket deploy.ticket")]
pub(crate) struct AcquireArgs {
    /// The lock
    pub(crate) name: Name,

    /// The lease: how long the lock is held unless it is renewed
    #[arg(long, value_name = "DUR", value_parser = duration, allow_hyphen_values = true)]
    pub(crate) ttl: Duration,

    /// Where to write the ticket (must not exist yet; only you will be able to read it), or `-`
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) ticket: PathBuf,

    /// A text that others see
    #[arg(long, value_name = "TEXT", value_parser = note)]
    pub(crate) note: Option<String>,

    #[command(flatten)]
    pub(crate) wait_args: WaitArgs,

    #[command(flatten)]
    pub(crate) mode: ModeArgs,

    /// Print the result as JSON
    #[arg(long)]
    pub(crate) json: bool,

    /// Print only this; the ticket must then go to a file
    #[arg(long, value_name = "WHAT", conflicts_with = "json")]
    pub(crate) print: Option<Printed>,
}

/// What `acquire` can print alone.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Printed {
    /// The fencing token
    Token,
}

/// A ticket.
#[derive(Args, Debug)]
pub(crate) struct TicketArgs {
    /// The ticket that `lockset acquire` wrote, or `-` for stdin
    ///
    /// Without -u and LOCKSET_URL the engine is the one that the ticket names.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) ticket: PathBuf,

    /// Print the outcome as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Which locks.
#[derive(Args, Debug)]
pub(crate) struct ListArgs {
    /// Only names that begin with this
    #[arg(default_value = "", hide_default_value = true, value_parser = prefix)]
    pub(crate) prefix: String,

    /// As JSON: `ls` prints one array, `watch` one document per line
    #[arg(long)]
    pub(crate) json: bool,
}

/// Show who holds a lock and who waits for it
#[derive(Args, Debug)]
pub(crate) struct ShowArgs {
    /// The lock
    pub(crate) name: Name,

    /// As JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Take a lock away from its holder
///
/// Without --now renewals are rejected and the holder is notified; the lock is free when the
/// running lease ends, and it is never held twice. With --now it is free at once, while its former
/// holder may still be working.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  lockset break nightly\n  lockset break nightly --now\n\n\
    Exit code:\n  0    it is or will be taken away\n  1    nothing was done: it is not held, or \
    its holder is not lockset\n  125  lockset itself failed")]
pub(crate) struct BreakArgs {
    /// The lock
    pub(crate) name: Name,

    /// Free it at once; only fencing tokens then protect the resource
    #[arg(long)]
    pub(crate) now: bool,

    /// Print the former holders as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// A duration such as `30s` or `1h30m`. Errors continue clap's "invalid value for ...".
fn duration(text: &str) -> Result<Duration, String> {
    if text.trim_start().starts_with('-') {
        return Err("a duration cannot be negative".into());
    }
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(format!("the unit is missing: write {text}s or {text}ms"));
    }
    let span = humantime::parse_duration(text)
        .map_err(|error| format!("not a duration such as 30s or 1h30m ({error})"))?;
    if span.is_zero() {
        return Err("it must be longer than zero".into());
    }
    if span > MAX_DURATION {
        return Err("longer than a year, which is probably a mistake".into());
    }
    Ok(span)
}

fn note(text: &str) -> Result<String, lockset::Error> {
    Note::new(text).map(|note| note.text.as_ref().to_owned())
}

fn prefix(text: &str) -> Result<String, lockset::Error> {
    text.parse::<Prefix>().map(|prefix| prefix.as_str().to_owned())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn durations_are_parsed_or_rejected_with_the_reason() {
        assert_eq!(duration("1h30m"), Ok(Duration::from_secs(5400)));
        assert_eq!(duration("250ms"), Ok(Duration::from_millis(250)));
        for (text, reason) in [
            ("0s", "longer than zero"),
            ("-5s", "negative"),
            ("5", "5s or 5ms"),
            ("", "not a duration"),
            ("soon", "not a duration"),
            ("300y", "longer than a year"),
            ("99999999999999999999s", "not a duration"),
        ] {
            let error = duration(text).unwrap_err();
            assert!(error.contains(reason), "{text:?}: {error}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_a_duration_or_rejected(text in "\\PC{0,30}|[-+]?([0-9.]{1,25}[a-zµ ]{0,8}){1,3}") {
            match duration(&text) {
                Ok(span) => prop_assert!(!span.is_zero() && span <= MAX_DURATION),
                Err(why) => prop_assert!(why.len() < 300, "{}", why),
            }
        }
    }
}
