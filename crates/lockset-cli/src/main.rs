//! The `lockset` command: runs commands under a distributed lock, and manages such locks.

mod acquire;
mod args;
mod fence;
mod guardian;
mod home;
mod inspect;
mod link;
mod outage;
mod output;
mod procs;
mod run;
mod supervise;
mod sys;
mod terminal;
mod tickets;
mod timing;
mod wire;

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use lockset::Ticket;
use tokio::runtime::{Builder, Runtime};

use args::{Cli, SchemaArgs, SchemaEngine, Verb};
use home::Home;
use output::{Failure, code, print_message};

fn main() -> ExitCode {
    if std::env::args_os().nth(1).is_some_and(|arg| arg == guardian::SUBCOMMAND) {
        return match guardian::main() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                print_message(error);
                code::OWN_ERROR.into()
            }
        };
    }
    match Cli::try_parse() {
        Ok(cli) => execute(&cli).into(),
        Err(error) => print_usage_error(&error).into(),
    }
}

/// Executes the verb and returns the exit code.
fn execute(cli: &Cli) -> u8 {
    if cli.engine.verbose > 0 {
        init_logging(cli.engine.verbose);
    }
    let mut home = None;
    match dispatch(cli, &mut home) {
        Ok(code) => code,
        Err(failure) => {
            failure.print(|text| match &home {
                Some(home) => home.redact(text),
                None => text.to_owned(),
            });
            failure.code
        }
    }
}

fn dispatch(cli: &Cli, home: &mut Option<Home>) -> Result<u8, Failure> {
    let verbose = cli.engine.verbose > 0;
    let mut open = |ticket: Option<&Ticket>| {
        let opened: &Home = home.insert(Home::from_args(&cli.engine, ticket)?);
        Ok::<_, Failure>(opened.clone())
    };
    match &cli.verb {
        Verb::Run(args) => return run::run(args, &open(None)?, verbose),
        Verb::Elect(args) => return run::elect(args, &open(None)?, verbose),
        Verb::Acquire(args) => runtime()?.block_on(tickets::acquire(args, &open(None)?, verbose)),
        Verb::Renew(args) => {
            let ticket = tickets::read(&args.ticket)?;
            let home = open(Some(&ticket))?;
            runtime()?.block_on(tickets::renew(args, &ticket, &home))
        }
        Verb::Release(args) => {
            let ticket = tickets::read(&args.ticket)?;
            let home = open(Some(&ticket))?;
            runtime()?.block_on(tickets::release(args, &ticket, &home))
        }
        Verb::Ls(args) => runtime()?.block_on(inspect::list(args, &open(None)?)),
        Verb::Show(args) => return runtime()?.block_on(inspect::show(args, &open(None)?)),
        Verb::Watch(args) => runtime()?.block_on(inspect::watch(args, &open(None)?)),
        Verb::Break(args) => return runtime()?.block_on(inspect::break_lock(args, &open(None)?)),
        Verb::Fence(args) => {
            return fence::execute(&args.verb, cli.engine.password_file.as_deref());
        }
        Verb::Schema(args) => print_schema(args),
        Verb::Completions { shell } => completions(*shell),
        Verb::Man { dir: None } => man_page(),
        Verb::Man { dir: Some(dir) } => man_pages(dir),
    }
    .map(|()| 0)
}

/// A runtime without threads of its own.
pub(crate) fn runtime() -> Result<Runtime, Failure> {
    let runtime = Builder::new_current_thread().enable_all().build();
    runtime.map_err(|error| Failure::own(format!("cannot start: {error}")))
}

fn init_logging(verbose: u8) {
    let level = match verbose {
        1 => tracing_subscriber::filter::LevelFilter::INFO,
        2 => tracing_subscriber::filter::LevelFilter::DEBUG,
        _ => tracing_subscriber::filter::LevelFilter::TRACE,
    };
    tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .init();
}

/// Prints clap's text: help on stdout, or an error on stderr that begins like all of ours.
fn print_usage_error(error: &clap::Error) -> u8 {
    if !error.use_stderr() {
        let _ = error.print();
        return 0;
    }
    let text = error.render().to_string();
    print_message(text.trim_end().trim_start_matches("error: "));
    code::OWN_ERROR
}

fn print_schema(args: &SchemaArgs) -> Result<(), Failure> {
    let SchemaEngine::Postgres = args.engine;
    let script = lockset::engine::postgres::schema_script(&args.schema)?;
    Ok(std::io::stdout().write_all(script.as_bytes())?)
}

fn completions(shell: clap_complete::Shell) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "lockset", &mut script);
    Ok(std::io::stdout().write_all(&script)?)
}

fn man_page() -> Result<(), Failure> {
    let mut page = Vec::new();
    clap_mangen::Man::new(Cli::command()).render(&mut page)?;
    Ok(std::io::stdout().write_all(&page)?)
}

fn man_pages(dir: &Path) -> Result<(), Failure> {
    clap_mangen::generate_to(Cli::command(), dir).map_err(|error| {
        Failure::own(format!("cannot write manual pages into {}: {error}", dir.display()))
    })
}
