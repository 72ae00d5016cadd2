//! The arguments of `fence`.

use clap::{Args, Subcommand, ValueHint};
use lockset::Name;

/// Check fencing tokens at a resource, so that a write with a stale one is rejected
///
/// A store has one mark for each resource and lock: the greatest token that was admitted. A lower
/// token is stale, because another client has held the lock since.
#[derive(Args, Debug)]
#[command(subcommand_required = true, arg_required_else_help = true, after_help = EXAMPLES)]
pub(crate) struct FenceArgs {
    #[command(subcommand)]
    pub(crate) verb: FenceVerb,
}

const EXAMPLES: &str = "\
Examples:
  lockset fence check --store sqlite:stock.db orders 17
  lockset run orders -- sh -c 'lockset fence check --store file:marks && ./ship'
  ./report | lockset fence write --store file:reports --file daily.csv orders 17
  lockset fence show --store sqlite:stock.db";

#[derive(Debug, Subcommand)]
pub(crate) enum FenceVerb {
    Check(CheckArgs),
    Write(WriteArgs),
    /// Print the marks of a store
    #[command(after_help = "Examples:\n  lockset fence show --store sqlite:stock.db\n  \
        lockset fence show --store file:reports --json | jq -r '.[].token'")]
    Show(MarksArgs),
}

/// Check a token, and raise the mark to it
///
/// The check and what follows are two steps: a process that is paused between them can still
/// write late. Where that does harm, let the write itself be guarded: `lockset fence write` for
/// files, the fences of the library and its SQL files for databases.
#[derive(Args, Debug)]
#[command(after_help = CHECK_MORE)]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,

    /// What is written to; the lock's name if not given
    ///
    /// Programs that write to the same resource must give the same name.
    #[arg(long, value_name = "R")]
    pub(crate) resource: Option<Name>,

    #[command(flatten)]
    pub(crate) token: TokenArgs,
}

const CHECK_MORE: &str = "\
Examples:
  lockset fence check --store sqlite:stock.db orders 17 && ./ship
  lockset run orders -- sh -c 'lockset fence check --store redis://cache && ./ship'

Exit code:
  0    admitted
  77   stale: another client has held the lock since
  125  it cannot be told: treat it as rejected";

/// Write stdin to a file, unless the token is stale
///
/// All of stdin is read first, then the token is checked and the file is replaced, as one step. A
/// file whose write was rejected is unchanged. What is read must fit into 64 MiB.
#[derive(Args, Debug)]
#[command(after_help = WRITE_MORE)]
pub(crate) struct WriteArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,

    /// The file in the store's folder; the lock's name if not given
    #[arg(long, value_name = "F")]
    pub(crate) file: Option<Name>,

    #[command(flatten)]
    pub(crate) token: TokenArgs,
}

const WRITE_MORE: &str = "\
Examples:
  ./report | lockset fence write --store file:reports --file daily.csv orders 17
  lockset run orders -- sh -c './report | lockset fence write --store file:reports'

Exit code:
  0    written
  77   stale: another client has held the lock since; the file is unchanged
  125  it cannot be told: treat it as rejected, or repeat it with the same token";

/// Which store's marks.
#[derive(Args, Debug)]
pub(crate) struct MarksArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,

    /// As JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// The store of the marks.
#[derive(Args, Debug)]
pub(crate) struct StoreArgs {
    /// The store of the marks, such as `sqlite:stock.db` (see --help)
    #[arg(long, value_name = "STORE", value_hint = ValueHint::Other, long_help = STORE_HELP)]
    pub(crate) store: String,
}

const STORE_HELP: &str = "\
The store of the marks:
  sqlite:PATH                      a SQLite database
  file:FOLDER                      a folder
  redis://host:port/db             a Redis server
  postgres://user@host:port/db     a PostgreSQL database

A password (`user:password@`) is never printed, but others may see it in the list of processes; \
--password-file and LOCKSET_PASSWORD are used for the store, and avoid that.";

/// The lock and its token.
#[derive(Args, Debug)]
pub(crate) struct TokenArgs {
    /// The lock; LOCKSET_NAME if neither it nor the token is given
    #[arg(requires = "token")]
    pub(crate) name: Option<Name>,

    /// The fencing token; LOCKSET_TOKEN if not given
    #[arg(allow_hyphen_values = true)]
    pub(crate) token: Option<String>,
}
