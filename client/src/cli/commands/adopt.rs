//! Running processes: adopt and release.

use std::process::ExitCode;

use fdmap_client::adopt::{self, AdoptError, AdoptedFile, Left, Stopped, Which, Wish};
use fdmap_client::proto::convert::FileName;
use fdmap_client::proto::{Access, Origin};
use indicatif::HumanBytes;
use serde_json::json;

use super::super::CliError;
use super::super::args::{AdoptArgs, ReleaseArgs};
use super::super::views::FileView;
use super::Context;

pub(super) fn adopt(context: &mut Context, pid: u32, args: &AdoptArgs) -> Result<ExitCode, CliError> {
    let (uid, gid) = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
    let process = &args.process;
    let wish = Wish {
        which: match (args.fd, process.all) {
            (Some(number), _) => Which::Descriptor(number),
            (None, true) => Which::All,
            (None, false) => Which::Memfds,
        },
        name: args.name.clone().or_else(|| process.name.clone()),
        access: args.access.over(Access::private(uid, gid))?,
        track: process.track,
        longer_waits: process.allow_longer_waits,
    };
    let failed = |error: AdoptError| CliError::Adopt { pid, error };
    let adopted = adopt::adopt(&mut context.handover()?, pid, &wish).map_err(failed)?;
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
            context.client().await?.release(file, snapshot).await?;
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
    let released = adopt::release(&mut context.handover()?, pid).map_err(failed)?;
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
