//! `fdmap adopt --pid`, and the end of tracking a process.

use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Command, ExitCode};

use fdmap_client::adopt::{
    self, AdoptError, AdoptOptions, Adopted, AdoptedFile, ResumeOutcome, Selection, ThreadStop,
};
use fdmap_client::proto::convert::FileName;
use fdmap_client::proto::{Access, Origin};
use fdmap_sys::process;
use indicatif::HumanBytes;
use serde_json::json;

use super::super::args::AdoptArgs;
use super::super::{ADOPT_FOR, CliError};
use super::Context;

/// Runs the command again in a child process. SIGKILL to the tracer during an injected call harms the traced process; this way
/// SIGKILL hits only the parent, and the kernel then sends SIGTERM to the child, which defers it until the thread runs again.
fn run_in_child() -> Result<ExitCode, CliError> {
    let failed = |error| CliError::Io { what: "starting fdmap as tracer".to_owned(), error };
    let status = Command::new("/proc/self/exe")
        .args(std::env::args_os().skip(1))
        .env(ADOPT_FOR, std::process::id().to_string())
        // ^C, and kill of the process group, reach the parent only.
        .process_group(0)
        .status()
        .map_err(failed)?;
    // A shell reports death by a signal the same way.
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    Ok(ExitCode::from(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(7)))
}

pub(super) fn adopt(context: &mut Context, pid: u32, args: &AdoptArgs) -> Result<ExitCode, CliError> {
    match (args.process.track, args.process.on_behalf_of) {
        (true, None) => return run_in_child(),
        (_, Some(parent)) => process::terminate_with_parent(parent)?,
        (false, None) => {}
    }
    let (uid, gid) = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
    let process = &args.process;
    let name = args.name.clone().or_else(|| process.name.clone());
    let access = args.access.clone().owned_by(name.as_ref().and_then(|name| name.uid))?;
    let options = AdoptOptions {
        selection: match (args.fd, process.all) {
            (Some(number), _) => Selection::Descriptor(number),
            (None, true) => Selection::All,
            (None, false) => Selection::Memfds,
        },
        name: name.map(|name| name.name),
        access: access.over(Access::private(uid, gid))?,
        lifetime: args.lifetime.lifetime(),
        track: process.track,
        allow_eintr: process.allow_eintr,
    };
    let failed = |error: AdoptError| CliError::Adopt { pid, error };
    let adopted = adopt::adopt(&mut context.fdpass()?, pid, &options).map_err(failed)?;
    if context.out.json {
        context.out.json_line(&adopted_json(pid, &adopted))?;
    } else {
        for file in &adopted.files {
            context.out.line(file_line(file))?;
        }
        if let Some(stop) = adopted.stop {
            context.out.line(stop_line(&stop))?;
        }
    }
    context.out.flush()?;
    for problem in &adopted.problems {
        eprintln!("fdmap: {}: {}", problem.subject, problem.reason);
    }
    Ok(if adopted.problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(7) })
}

fn adopted_json(pid: u32, adopted: &Adopted) -> serde_json::Value {
    let problems: Vec<_> = adopted
        .problems
        .iter()
        .map(|problem| json!({ "subject": problem.subject, "reason": problem.reason }))
        .collect();
    json!({
        "pid": pid,
        "files": adopted.files.iter().map(file_json).collect::<Vec<_>>(),
        "stop": adopted.stop.map(|stop| stop_json(&stop)),
        "problems": problems,
    })
}

fn file_json(file: &AdoptedFile) -> serde_json::Value {
    let tracked: Vec<_> = file
        .tracked
        .iter()
        .map(|(id, mapping)| {
            json!({
                "id": id.to_string(),
                "address": mapping.address,
                "length_bytes": mapping.length_bytes,
                "first_page": mapping.first_page.0,
            })
        })
        .collect();
    json!({
        "file": &file.info,
        "already_registered": file.already_registered,
        "tracked": tracked,
    })
}

fn file_line(file: &AdoptedFile) -> String {
    let info = &file.info;
    let size = HumanBytes(info.size_bytes);
    let tracked = match file.tracked.len() {
        0 => String::new(),
        1 => "  1 mapping tracked".to_owned(),
        count => format!("  {count} mappings tracked"),
    };
    let registered = if file.already_registered { "  (already registered)" } else { "" };
    format!("{}  id:{}  {size}{tracked}{registered}", info.caller_name(), info.id)
}

fn stop_json(stop: &ThreadStop) -> serde_json::Value {
    json!({
        "tid": stop.tid,
        "syscall": stop.syscall,
        "duration_us": u64::try_from(stop.duration.as_micros()).unwrap_or(u64::MAX),
        "outcome": stop.outcome.name(),
    })
}

fn stop_line(stop: &ThreadStop) -> String {
    let micros = stop.duration.as_micros();
    let call =
        stop.syscall.map_or_else(|| "no system call".to_owned(), |number| format!("system call {number}"));
    let outcome = match stop.outcome {
        ResumeOutcome::Unchanged => "which did not change",
        ResumeOutcome::Restarted => "which the kernel restarted",
        ResumeOutcome::Reissued => "which was made again",
        ResumeOutcome::Interrupted => "which returned EINTR",
    };
    format!("thread {} stopped for at most {micros} us in {call}, {outcome}", stop.tid)
}

pub(super) async fn detach(context: &mut Context, pid: u32, keep_files: bool) -> Result<(), CliError> {
    let failed = |error: AdoptError| CliError::Adopt { pid, error };
    let detached = adopt::detach(&mut context.fdpass()?, pid).map_err(failed)?;
    let client = context.client().await?;
    let own = client.host_info().await?.caller_uid;
    let mut entries = Vec::new();
    for one in detached {
        let info = client.get(&one.file).await?;
        let file = FileName::Id(info.id);
        let deleted = !keep_files
            && info.origin == Origin::Adopted
            && info.access.uid == own
            && client.coverage(&file).await?.mappings.is_empty();
        if deleted {
            client.delete(&file).await?;
        }
        if context.out.json {
            entries.push(json!({
                "name": info.name,
                "uid": info.access.uid,
                "id": info.id.to_string(),
                "mappings": one.mappings,
                "deleted": deleted,
            }));
            continue;
        }
        let deleted = if deleted { ", deleted" } else { "" };
        let name = info.caller_name();
        context.out.line(format_args!("{name}  {} mappings no longer tracked{deleted}", one.mappings))?;
    }
    if context.out.json {
        context.out.json_line(&json!({ "pid": pid, "detached": entries }))?;
    }
    Ok(())
}
