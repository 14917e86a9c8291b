//! `fdmap restore --lazy`: fills the memory of a process that passes its userfaultfd.

use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fdmap_client::image::lazy::{LazyEnd, LazyNotice, LazyReport, accept, serve, single_file};
use fdmap_client::image::{Control, ImageChain, ImageError};
use fdmap_client::proto::error_chain;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use tokio::runtime::Handle;
use tokio::signal::unix::{SignalKind, signal};

use super::super::CliError;
use super::super::args::RestoreArgs;
use super::super::private_socket::PrivateSocket;
use super::Context;
use super::image_store;
use super::image_task::{elapsed_text, nanoseconds, watch};

/// Environment variable with the path of the socket.
const SOCKET_VARIABLE: &str = "FDMAP_UFFD_SOCKET";
/// Exit code of local errors.
const DAMAGED_CODE: u8 = 7;
/// Time between two looks at reads that were cancelled.
const READS_INTERVAL: Duration = Duration::from_millis(2);
/// Longest time until reads of the image have ended that were cancelled.
const READS_END_TIMEOUT: Duration = Duration::from_secs(1);

pub(super) async fn run(context: &mut Context, args: RestoreArgs) -> Result<ExitCode, CliError> {
    let RestoreArgs { image, file, uffd_socket, command, .. } = args;
    let path = uffd_socket.ok_or_else(|| CliError::Usage("--lazy needs --uffd-socket".to_owned()))?;
    let failed = |error| CliError::Io { what: format!("resolving {}", path.display()), error };
    let path = std::path::absolute(&path).map_err(failed)?;
    let control = Arc::new(Control::default());
    let (cancellation, runtime) = (control.cancellation(), Handle::current());
    // It blocks. This thread drives its calls to object stores.
    let open = move || {
        let chain = Arc::new(ImageChain::open(&image_store::open(&image, &runtime, cancellation)?)?);
        let file = single_file(&chain, file.as_deref())?;
        Ok::<_, ImageError>((chain, file))
    };
    let (chain, file) = watch(context, &control, || tokio::task::spawn_blocking(open)).await?;
    let socket = PrivateSocket::listen(path)?;
    let mut child = spawn(command, &socket.path)?;
    let shared = Arc::clone(&control);
    // It blocks. This thread shows progress and handles signals.
    let task = move || {
        let refused = |reason: &str| eprintln!("fdmap: {reason}");
        let accepted = accept(&socket.listener, &shared, || check_command(child.as_mut()), &refused);
        // It takes one hand-off.
        drop(socket);
        let served = accepted.and_then(|handoff| serve(&chain, &file, handoff, &shared, &report));
        shared.cancel();
        wait_for_reads(&chain);
        Ok::<_, ImageError>((served, child))
    };
    let (served, child) = watch(context, &control, || tokio::task::spawn_blocking(task)).await?;
    if let Ok(report) = &served {
        print(context, report, child.is_some())?;
    }
    let status = match child {
        Some(child) => Some(wait(child, served.is_err()).await?),
        None => None,
    };
    let damaged = served?.counts.damaged_pages > 0;
    Ok(status.map_or(if damaged { ExitCode::from(DAMAGED_CODE) } else { ExitCode::SUCCESS }, exit_code))
}

fn report(notice: LazyNotice<'_>) {
    match notice {
        LazyNotice::Damaged(error) => eprintln!("fdmap: {}", error_chain(error)),
        LazyNotice::Repeated(error) => eprintln!("fdmap: {}; trying again", error_chain(error)),
    }
}

/// Waits until no thread reads the image: object stores need the runtime until then. Reads were cancelled, but one may hang in a file system.
fn wait_for_reads(chain: &Arc<ImageChain>) {
    let begun = Instant::now();
    while Arc::strong_count(chain) > 1 && begun.elapsed() < READS_END_TIMEOUT {
        std::thread::sleep(READS_INTERVAL);
    }
}

fn spawn(command: Vec<OsString>, socket: &Path) -> Result<Option<Child>, CliError> {
    let mut words = command.into_iter();
    let Some(program) = words.next() else { return Ok(None) };
    let child = Command::new(&program).args(words).env(SOCKET_VARIABLE, socket).spawn();
    let what = || format!("running {}", program.display());
    child.map(Some).map_err(|error| CliError::Io { what: what(), error })
}

/// Fails once the command has ended, which has passed no userfaultfd then.
fn check_command(child: Option<&mut Child>) -> Result<(), ImageError> {
    match child.map(Child::try_wait) {
        Some(Ok(Some(status))) => {
            let reason = format!("the command ended before it passed a userfaultfd ({status})");
            Err(ImageError::HandOff(reason))
        }
        _ => Ok(()),
    }
}

/// Waits until the command ends. `ends`: it lacks memory that it needs. SIGTERM is passed to it.
async fn wait(mut child: Child, ends: bool) -> Result<ExitStatus, CliError> {
    let id = child.id();
    let failed = |what: &str| {
        let what = format!("{what} process {id}");
        move |error| CliError::Io { what, error }
    };
    let mut terminate = signal(SignalKind::terminate()).map_err(failed("handling signals for"))?;
    let pid = Pid::from_raw(i32::try_from(id).unwrap_or(i32::MAX));
    // It may have ended before: it keeps its pid until it is waited for.
    let end = || {
        let _ = kill(pid, Signal::SIGTERM);
    };
    if ends {
        end();
    }
    let mut waiting = tokio::task::spawn_blocking(move || child.wait());
    loop {
        tokio::select! {
            ended = &mut waiting => {
                let status = ended.map_err(std::io::Error::from).and_then(|status| status);
                return status.map_err(failed("waiting for"));
            }
            _ = terminate.recv() => end(),
        }
    }
}

/// As shells report it.
fn exit_code(status: ExitStatus) -> ExitCode {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    ExitCode::from(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX))
}

/// To stderr if there is a command: standard output is its own.
fn print(context: &mut Context, report: &LazyReport, has_command: bool) -> Result<(), CliError> {
    let text = if context.out.json {
        json!({ "lazy": report, "elapsed_ns": nanoseconds(report.elapsed) }).to_string()
    } else {
        text(report)
    };
    if has_command {
        eprintln!("{text}");
        return Ok(());
    }
    context.out.line(text)
}

fn text(report: &LazyReport) -> String {
    let end = match report.end {
        LazyEnd::Complete => "complete",
        LazyEnd::ProcessEnded => "the process ended before all pages were copied",
    };
    let counts = &report.counts;
    format!(
        "{end}, {}: {} page faults with {} pages, {} pages by the stream, {} removed, {} damaged",
        elapsed_text(report.elapsed),
        counts.faults,
        counts.fault_pages,
        counts.streamed_pages,
        counts.removed_pages,
        counts.damaged_pages
    )
}
