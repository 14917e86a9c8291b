//! Whether all that a process writes would be seen. Asks no service.

use std::process::ExitCode;

use fdmap_client::audit::checks::writers;
use fdmap_client::audit::parse::SmapsEntry;
use fdmap_client::audit::{Finding, Seen, gather, judge};
use indicatif::HumanBytes;
use serde_json::{Value, json};

use super::super::CliError;
use super::super::output::table;
use super::Context;

pub(super) fn inspect(context: &mut Context, pid: u32, try_descriptors: bool) -> Result<ExitCode, CliError> {
    let facts = gather(pid, try_descriptors)?;
    let findings = judge(&facts);
    let mappings: Vec<_> = facts.mappings.iter().flat_map(|all| writers(all)).collect();
    let all_seen = findings.iter().all(|finding| finding.seen == Seen::Yes);
    let code = if all_seen { ExitCode::SUCCESS } else { ExitCode::from(1) };
    if context.out.json {
        context.out.json_line(&json!({
            "pid": facts.pid,
            "command": facts.command,
            "all_seen": all_seen,
            "checks": findings.iter().map(check_view).collect::<Vec<_>>(),
            "mappings": mappings.into_iter().map(mapping_view).collect::<Vec<_>>(),
        }))?;
        return Ok(code);
    }
    context.out.line(format_args!("process {} ({})", facts.pid, facts.command))?;
    let mut grid = table(&["all seen", "in respect of", "what was found"], &[]);
    for finding in &findings {
        grid.add_row([finding.seen.name(), finding.name, &finding.detail]);
    }
    context.out.line(grid.trim_fmt())?;
    for finding in findings.iter().filter(|finding| finding.seen != Seen::Yes) {
        context.out.line(format_args!("{}: {}", finding.name, finding.meaning))?;
        context.out.line(format_args!("{:>width$}  {}", "", finding.remedy, width = finding.name.len()))?;
    }
    if !mappings.is_empty() {
        let mut grid = table(&["writable mapping", "size", "inode", "write-protected", "of"], &[1, 2]);
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
    let sum = if all_seen {
        "all that it writes would be seen, once each of its mappings is tracked"
    } else {
        "not all that it writes would surely be seen"
    };
    context.out.line(sum)?;
    Ok(code)
}

fn check_view(finding: &Finding) -> Value {
    json!({
        "name": finding.name,
        "seen": finding.seen.name(),
        "detail": finding.detail,
        "meaning": finding.meaning,
        "remedy": finding.remedy,
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
