//! Implementations of the commands.

mod adopt;
mod audit;
mod compare;
mod cursor;
mod diff;
mod doctor;
mod dump;
mod exec;
mod fdpass;
mod files;
mod image_store;
mod image_task;
mod lazy;
mod migrate;
mod pages;
mod restore;
mod tracking;

use std::process::ExitCode;

use clap::CommandFactory as _;
use fdmap_client::{Client, FdpassClient};

use super::args::{DoctorArgs, ServiceArgs, WatchArgs};
use super::output::Output;
use super::{Cli, CliError, Command};

/// Connection parameters and output of a command.
struct Context {
    service: ServiceArgs,
    out: Output,
}

impl Context {
    async fn client(&self) -> Result<Client, CliError> {
        let timeouts = self.service.timeouts();
        Ok(match self.service.tcp() {
            Some(address) => Client::connect_tls(&address, timeouts).await?,
            None => Client::connect(&self.service.endpoint(), timeouts).await?,
        })
    }

    fn fdpass(&self) -> Result<FdpassClient, CliError> {
        if self.service.tcp().is_some() {
            return Err(CliError::Usage(
                "commands that pass file descriptors are unavailable over TCP".to_owned(),
            ));
        }
        Ok(FdpassClient::connect(&self.service.endpoint(), self.service.timeouts())?)
    }
}

/// Runs a command.
///
/// # Errors
/// [`CliError`]
pub fn run(cli: Cli) -> Result<ExitCode, CliError> {
    let mut context = Context { service: cli.service, out: Output::new(cli.json) };
    // These commands block or replace this process and need no async runtime.
    let command = match cli.command {
        Command::Open(args) => return fdpass::open(&context, args),
        Command::Exec(args) => match exec::exec(&context, args)? {},
        Command::Adopt(args) => {
            return match args.process.pid {
                Some(pid) => adopt::adopt(&mut context, pid, &args),
                None => fdpass::adopt(&mut context, &args),
            };
        }
        Command::Snapshot(args) => return fdpass::snapshot(&mut context, &args),
        Command::Doctor(DoctorArgs { pid: Some(pid), try_descriptors }) => {
            let code = audit::audit(&mut context, pid, try_descriptors)?;
            context.out.flush()?;
            return Ok(code);
        }
        Command::Restore(args) if args.lazy => {
            let code = runtime()?.block_on(lazy::run(&mut context, args))?;
            context.out.flush()?;
            return Ok(code);
        }
        Command::Restore(args) => {
            let files = runtime()?.block_on(restore::run(&mut context, args))?;
            context.out.flush()?;
            return files.map_or(Ok(ExitCode::SUCCESS), restore::exec);
        }
        Command::Receive(args) => {
            let received = runtime()?.block_on(migrate::receive(&mut context, args))?;
            context.out.flush()?;
            return received.map_or(Ok(ExitCode::SUCCESS), |(command, descriptor)| {
                restore::exec(restore::ForCommand { command, descriptors: vec![descriptor] })
            });
        }
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "fdmap", &mut script);
            context.out.bytes(&script)?;
            context.out.flush()?;
            return Ok(ExitCode::SUCCESS);
        }
        other => other,
    };
    let code = runtime()?.block_on(run_async(&mut context, command))?;
    context.out.flush()?;
    Ok(code)
}

fn runtime() -> Result<tokio::runtime::Runtime, CliError> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(CliError::Runtime)
}

async fn run_async(context: &mut Context, command: Command) -> Result<ExitCode, CliError> {
    match command {
        Command::Create(args) => files::create(context, args).await?,
        Command::Ls => files::list(context).await?,
        Command::Delete { files } => files::delete(context, &files).await?,
        Command::Resize { file, size } => files::resize(context, &file, size).await?,
        Command::Seal { file, seals } => files::seal(context, &file, &seals).await?,
        Command::Access { file, access } => files::access(context, &file, &access).await?,
        Command::Checkpoint(args) => return tracking::checkpoint(context, &args).await,
        Command::Dirty(args) => return tracking::dirty(context, &args).await,
        Command::Cursor(command) => cursor::cursor(context, &command).await?,
        Command::Coverage { file } => tracking::coverage(context, &file).await?,
        Command::SealWriters { file } => tracking::seal_writers(context, &file).await?,
        Command::CoveragePolicy { file, policy } => {
            tracking::set_coverage_policy(context, &file, policy.policy()).await?;
        }
        Command::DirtyRate(args) => tracking::dirty_rate(context, &args).await?,
        Command::Watch(WatchArgs { checkpoints: Some(file) }) => tracking::watch(context, &file).await?,
        Command::Watch(WatchArgs { checkpoints: None }) => files::watch(context).await?,
        Command::Stat(args) => pages::stat(context, &args).await?,
        Command::Pages(args) => pages::pages(context, &args).await?,
        Command::Lookup(args) => pages::lookup(context, &args).await?,
        Command::Diff(args) => return diff::diff(context, &args).await,
        Command::DropSnapshot { file, snapshot } => diff::drop_snapshot(context, &file, snapshot).await?,
        Command::Detach(args) => adopt::detach(context, args.pid, args.keep_files).await?,
        Command::Compare(args) => return compare::compare(context, &args).await,
        Command::Dump(args) => dump::run(context, args).await?,
        Command::Migrate(args) => migrate::migrate_file(context, args).await?,
        Command::Fence(args) => migrate::fence(context, &args).await?,
        Command::Doctor(_) => return doctor::doctor(context).await,
        // run() handles these.
        Command::Open(_)
        | Command::Exec(_)
        | Command::Adopt(_)
        | Command::Snapshot(_)
        | Command::Restore(_)
        | Command::Receive(_)
        | Command::Completions { .. } => {}
    }
    Ok(ExitCode::SUCCESS)
}
