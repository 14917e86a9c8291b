//! `fdmap doctor --pid`: can all writes of a process be tracked? Contacts no service.

use std::process::ExitCode;

use fdmap_client::audit::checks::writable_mappings;
use fdmap_client::audit::parse::SmapsEntry;
use fdmap_client::audit::{Check, Observed, check_process, read_process};
use indicatif::HumanBytes;
use serde_json::{Value, json};

use super::super::CliError;
use super::super::output::table;
use super::Context;

pub(super) fn audit(context: &mut Context, pid: u32, try_descriptors: bool) -> Result<ExitCode, CliError> {
    let process = read_process(pid, try_descriptors)?;
    let checks = check_process(&process);
    let mappings: Vec<_> = process.mappings.iter().flat_map(|all| writable_mappings(all)).collect();
    let all_observed = checks.iter().all(|check| check.observed == Observed::Yes);
    let code = if all_observed { ExitCode::SUCCESS } else { ExitCode::from(1) };
    if context.out.json {
        context.out.json_line(&json!({
            "pid": process.pid,
            "command": process.command,
            "all_observed": all_observed,
            "checks": checks.iter().map(check_view).collect::<Vec<_>>(),
            "mappings": mappings.into_iter().map(mapping_view).collect::<Vec<_>>(),
        }))?;
        return Ok(code);
    }
    context.out.line(format_args!("process {} ({})", process.pid, process.command))?;
    let mut grid = table(&["observed", "check", "found"], &[]);
    for check in &checks {
        grid.add_row([check.observed.name(), check.name, &check.detail]);
    }
    context.out.line(grid.trim_fmt())?;
    for check in checks.iter().filter(|check| check.observed != Observed::Yes) {
        context.out.line(format_args!("{}: {}", check.name, check.reason))?;
        context.out.line(format_args!("{:>width$}  {}", "", check.remedy, width = check.name.len()))?;
    }
    if !mappings.is_empty() {
        let mut grid = table(&["writable mapping", "size", "inode", "write-protected", "file"], &[1, 2]);
        for entry in mappings {
            grid.add_row([
                format!("{:#x}-{:#x}", entry.start, entry.end),
                HumanBytes(entry.end - entry.start).to_string(),
                entry.inode.to_string(),
                if entry.write_protect { "yes" } else { "no" }.to_owned(),
                entry.name.clone(),
            ]);
        }
        context.out.line(grid.trim_fmt())?;
    }
    let summary = if all_observed {
        "all writes of the process can be observed once each of its mappings is tracked"
    } else {
        "some writes of the process may not be observed"
    };
    context.out.line(summary)?;
    Ok(code)
}

fn check_view(check: &Check) -> Value {
    json!({
        "name": check.name,
        "observed": check.observed.name(),
        "detail": check.detail,
        "reason": check.reason,
        "remedy": check.remedy,
    })
}

fn mapping_view(entry: &SmapsEntry) -> Value {
    json!({
        "start": entry.start,
        "end": entry.end,
        "inode": entry.inode,
        "name": entry.name,
        "writable": entry.writable,
        "write_protected": entry.write_protect,
    })
}
