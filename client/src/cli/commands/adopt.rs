//! Running processes: adopt and release.

use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Command, ExitCode};

use fdmap_client::adopt::{self, AdoptError, AdoptedFile, Left, Stopped, Which, Wish};
use fdmap_client::proto::convert::FileName;
use fdmap_client::proto::{Access, Origin};
use fdmap_sys::process;
use indicatif::HumanBytes;
use serde_json::json;

use super::super::args::{AdoptArgs, ReleaseArgs};
use super::super::views::FileView;
use super::super::{ADOPT_FOR, CliError};
use super::Context;

/// Who is killed while a process has registers that are not its own leaves it so. So that is done by a process of its own: if this
/// one is killed, by whatever signal, that one is told so by one that it can put off for as long as it must.
fn by_another_process() -> Result<ExitCode, CliError> {
    let what = "running fdmap for the process to be traced";
    let failed = |error| CliError::Io { what: what.to_owned(), error };
    let status = Command::new("/proc/self/exe")
        .args(std::env::args_os().skip(1))
        .env(ADOPT_FOR, std::process::id().to_string())
        // ^C, and kill of a whole group, are for this one.
        .process_group(0)
        .status()
        .map_err(failed)?;
    // As a shell tells of a signal.
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    Ok(ExitCode::from(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(7)))
}

pub(super) fn adopt(context: &mut Context, pid: u32, args: &AdoptArgs) -> Result<ExitCode, CliError> {
    match (args.process.track, args.process.on_behalf_of) {
        (true, None) => return by_another_process(),
        (_, Some(parent)) => process::end_with(parent)?,
        (false, None) => {}
    }
    let (uid, gid) = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
    let of = &args.process;
    let wish = Wish {
        which: match (args.fd, of.all) {
            (Some(number), _) => Which::Descriptor(number),
            (None, true) => Which::All,
            (None, false) => Which::Memfds,
        },
        name: args.name.clone().or_else(|| of.name.clone()),
        access: args.access.over(Access::private(uid, gid))?,
        track: of.track,
        longer_waits: of.allow_longer_waits,
    };
    let failed = |error: AdoptError| CliError::Adopt { pid, error };
    let adopted = adopt::adopt(&mut context.fdpass()?, pid, &wish).map_err(failed)?;
    if context.out.json {
        let problems: Vec<_> = adopted
            .problems
            .iter()
            .map(|problem| json!({ "what": problem.what, "why": problem.why }))
            .collect();
        context.out.json_line(&json!({
            "pid": pid,
            "files": adopted.files.iter().map(file_json).collect::<Vec<_>>(),
            "stop": adopted.stopped.map(|stopped| stop_json(&stopped)),
            "problems": problems,
        }))?;
    } else {
        for file in &adopted.files {
            let size = HumanBytes(file.info.size_bytes);
            let was_here = if file.was_here { "  (was here already)" } else { "" };
            let tracked = match file.tracked.len() {
                0 => String::new(),
                1 => "  1 mapping tracked".to_owned(),
                count => format!("  {count} mappings tracked"),
            };
            let info = &file.info;
            context.out.line(format_args!("{}  id:{}  {size}{tracked}{was_here}", info.name, info.id))?;
        }
        if let Some(stopped) = adopted.stopped {
            context.out.line(stop_words(&stopped))?;
        }
    }
    context.out.flush()?;
    for problem in &adopted.problems {
        eprintln!("fdmap: {}: {}", problem.what, problem.why);
    }
    Ok(if adopted.problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(7) })
}

fn file_json(file: &AdoptedFile) -> serde_json::Value {
    let tracked: Vec<_> = file
        .tracked
        .iter()
        .map(|(id, mapping)| {
            json!({
                "id": id.to_string(),
                "address": mapping.address,
                "length": mapping.length,
                "first_page": mapping.first_page.0,
            })
        })
        .collect();
    json!({ "file": FileView::from(&file.info), "was_here": file.was_here, "tracked": tracked })
}

fn stop_json(stopped: &Stopped) -> serde_json::Value {
    json!({
        "thread": stopped.tid,
        "system_call": stopped.number,
        "microseconds": u64::try_from(stopped.stopped.as_micros()).unwrap_or(u64::MAX),
        "left": stopped.left.name(),
        "rest_ms": match stopped.left {
            Left::WithTheRest(rest) => Some(u64::try_from(rest.as_millis()).unwrap_or(u64::MAX)),
            _ => None,
        },
    })
}

fn stop_words(stopped: &Stopped) -> String {
    let micros = stopped.stopped.as_micros();
    let call = stopped.number.map_or_else(|| "no call".to_owned(), |number| format!("system call {number}"));
    let left = match stopped.left {
        Left::AsItWas => "went on as it was".to_owned(),
        Left::Restarted => "the kernel made it again".to_owned(),
        Left::MadeAgain => "it was made again".to_owned(),
        Left::WithTheRest(rest) => format!("it was made again with the {rest:.3?} that remained"),
        Left::Anew => "it was made again, its time anew".to_owned(),
    };
    format!("thread {} was stopped for {micros} us at most, in {call}: {left}", stopped.tid)
}

pub(super) async fn release(context: &mut Context, args: &ReleaseArgs) -> Result<ExitCode, CliError> {
    match (args.pid, &args.file, args.snapshot) {
        (Some(pid), _, _) => release_process(context, pid, args.keep).await?,
        (None, Some(file), Some(snapshot)) => {
            context.client().await?.drop_snapshot(file, snapshot).await?;
            if context.out.json {
                context.out.json_line(&json!({ "released": snapshot.to_string() }))?;
            }
        }
        _ => return Err(CliError::Usage("say a snapshot or --pid".to_owned())),
    }
    Ok(ExitCode::SUCCESS)
}

async fn release_process(context: &mut Context, pid: u32, keep: bool) -> Result<(), CliError> {
    let failed = |error: AdoptError| CliError::Adopt { pid, error };
    let released = adopt::release(&mut context.fdpass()?, pid).map_err(failed)?;
    let client = context.client().await?;
    let (own, _) = client.host_info().await?.you;
    let mut told = Vec::new();
    for one in released {
        let info = client.get(&one.file).await?;
        let file = FileName::Id(info.id);
        let deleted = !keep
            && info.origin == Origin::Adopted
            && info.access.uid == own
            && client.coverage(&file).await?.mappings.is_empty();
        if deleted {
            client.delete(&file).await?;
        }
        if context.out.json {
            told.push(json!({
                "name": info.name,
                "id": info.id.to_string(),
                "mappings": one.mappings,
                "deleted": deleted,
            }));
            continue;
        }
        let deleted = if deleted { ", deleted" } else { "" };
        context.out.line(format_args!("{}  {} mappings let go{deleted}", info.name, one.mappings))?;
    }
    if context.out.json {
        context.out.json_line(&json!({ "pid": pid, "released": told }))?;
    }
    Ok(())
}
