//! `fdmap restore`.

use std::ffi::OsString;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode};
use std::sync::Arc;

use fdmap_client::image::restore::{RestoreOptions, RestoreReport, RestoreService, restore};
use fdmap_client::image::{Control, ImageChain, ImageLocation};
use fdmap_client::proto::{Access, Lifetime};
use fdmap_sys::fd::dup2_inheritable;
use indicatif::HumanBytes;
use serde_json::json;
use tokio::runtime::Handle;

use super::super::CliError;
use super::super::args::RestoreArgs;
use super::super::output::table;
use super::Context;
use super::image_store;
use super::image_task::{elapsed_text, jobs, nanoseconds, watch};

/// First descriptor of the command.
const FIRST_DESCRIPTOR: i32 = 3;
/// Threads that read from a bucket.
const MIN_BUCKET_JOBS: usize = 8;

/// Restored files for a command.
pub(super) struct ForCommand {
    pub(super) command: Vec<OsString>,
    pub(super) descriptors: Vec<OwnedFd>,
}

pub(super) async fn run(context: &mut Context, args: RestoreArgs) -> Result<Option<ForCommand>, CliError> {
    let client = context.client().await?;
    let mut fdpass = context.fdpass()?;
    let RestoreArgs { image, file, name, lifetime, access, command, .. } = args;
    let access = access.owned_by(name.as_ref().and_then(|name| name.uid))?;
    let host = client.host_info().await?;
    let options = RestoreOptions {
        file,
        name: name.map(|name| name.name),
        access: access.over(Access::private(host.caller_uid, host.caller_gid))?,
        lifetime: lifetime.lifetime(),
        jobs: match image {
            // Threads mostly wait for the store.
            ImageLocation::Bucket { .. } if args.jobs.is_none() => jobs(None).max(MIN_BUCKET_JOBS),
            _ => jobs(args.jobs),
        },
    };
    let control = Arc::new(Control::default());
    let shared = Arc::clone(&control);
    let runtime = Handle::current();
    // It blocks in reads and writes. This thread drives its calls to the service and to object stores.
    let task = move || {
        let store = image_store::open(&image, &runtime, shared.cancellation())?;
        let chain = ImageChain::open(&store)?;
        let service = RestoreService { client: &client, fdpass: &mut fdpass, runtime };
        restore(&chain, service, &options, &shared)
    };
    let (report, descriptors) = watch(context, &control, || tokio::task::spawn_blocking(task)).await?;
    if command.is_empty() {
        print(context, &report)?;
        note_endings(&report);
        return Ok(None);
    }
    // Standard output is that of the command.
    Ok(Some(ForCommand { command, descriptors }))
}

/// Warns of files that end soon.
fn note_endings(report: &RestoreReport) {
    for file in &report.files {
        if file.info.lifetime != Lifetime::Kept {
            let name = file.info.caller_name();
            eprintln!(
                "fdmap: {name} ends soon unless a process opens it; give a command, or --keep where that is permitted"
            );
        }
    }
}

/// Replaces this process by the command. The async runtime has ended: its descriptors may have the numbers of the files.
pub(super) fn exec(files: ForCommand) -> Result<ExitCode, CliError> {
    let ForCommand { command, descriptors } = files;
    let mut words = command.into_iter();
    let program = words.next().unwrap_or_default();
    // Above all targets, so that none replaces another one.
    let count = i32::try_from(descriptors.len()).unwrap_or(i32::MAX);
    let mut above = Vec::with_capacity(descriptors.len());
    for descriptor in descriptors {
        let min = FIRST_DESCRIPTOR.saturating_add(count);
        above.push(fdmap_sys::fd::duplicate_above(descriptor.as_fd(), min)?);
    }
    for (number, descriptor) in (FIRST_DESCRIPTOR..).zip(above) {
        dup2_inheritable(descriptor, number)?;
    }
    let error = Command::new(&program).args(words).env("FDMAP_FD", FIRST_DESCRIPTOR.to_string()).exec();
    Err(CliError::Io { what: format!("running {}", program.display()), error })
}

fn print(context: &mut Context, report: &RestoreReport) -> Result<(), CliError> {
    if context.out.json {
        let files = report.files.iter().map(|file| json!({ "file": file.info, "stored_pages": file.pages }));
        return context.out.json_line(&json!({
            "files": files.collect::<Vec<_>>(),
            "images": report.images,
            "elapsed_ns": nanoseconds(report.elapsed),
        }));
    }
    let mut table = table(&["name", "size", "restored pages", "seals", "lifetime", "id"], &[1, 2]);
    for file in &report.files {
        table.add_row([
            file.info.caller_name(),
            HumanBytes(file.info.size_bytes).to_string(),
            file.pages.to_string(),
            file.info.seals.to_string(),
            file.info.lifetime.to_string(),
            file.info.id.to_string(),
        ]);
    }
    context.out.line(table.trim_fmt())?;
    let images = if report.images == 1 { "1 image".to_owned() } else { format!("{} images", report.images) };
    context.out.line(format_args!("{}, from {images}", elapsed_text(report.elapsed)))
}
