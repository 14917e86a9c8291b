//! `fdmap stat`, `pages` and `lookup`: page states.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;

use fdmap_client::Client;
use fdmap_client::grpc::{Scan, ScanBatch, ScanEncoding, ScanRequest, SummaryOptions};
use fdmap_client::heatmap::HeatMap;
use fdmap_client::proto::convert::{AttributeSet, FileName};
use fdmap_client::proto::units::to_u64;
use fdmap_client::proto::{PageIndex, PageRange, StateSet};
use indicatif::HumanBytes;
use serde_json::json;

use super::super::CliError;
use super::super::args::{AttributeArg, LookupArgs, PagesArgs, ReadingArgs, StatArgs, StateArg};
use super::super::output::{color, columns, progress, table};
use super::super::range::PartialRange;
use super::super::views::{
    RUN_HEADING, attributes_text, backing_text, provenance_text, run_text, summary_counts,
};
use super::Context;

pub(super) async fn stat(context: &mut Context, args: &StatArgs) -> Result<(), CliError> {
    let client = context.client().await?;
    let ReadingArgs { max_age, swap_cached: distinguish_swap_cached, retain_for } = args.reading;
    let options = SummaryOptions { range: None, max_age, distinguish_swap_cached, retain_for };
    for (nth, file) in args.files.iter().enumerate() {
        let info = client.get(file).await?;
        let summary = client.summary(file, &options).await?;
        if context.out.json {
            let line = json!({
                "file": &info,
                "pages": &summary,
            });
            context.out.json_line(&line)?;
            continue;
        }
        if nth > 0 {
            context.out.line("")?;
        }
        let mut rows = table(&[], &[]);
        let access = info.access;
        rows.add_row(["file", &format!("{}  id:{}", info.caller_name(), info.id)]);
        rows.add_row(["size", &format!("{} ({} pages)", HumanBytes(info.size_bytes), info.pages)]);
        rows.add_row(["allocated", &HumanBytes(info.allocated_bytes).to_string()]);
        rows.add_row(["backing", &backing_text(info.backing)]);
        rows.add_row(["seals", &info.seals.to_string()]);
        rows.add_row(["owner", &format!("user {}, group {}", access.uid, access.gid)]);
        rows.add_row([
            "rights",
            &format!("owner {}, group {}, others {}", access.owner, access.group, access.other),
        ]);
        rows.add_row(["inode", &format!("device {}, inode {}", info.device, info.inode)]);
        for (state, pages) in summary_counts(&summary) {
            rows.add_row([state.to_string(), pages.to_string()]);
        }
        for (swap_type, pages) in &summary.swap_types {
            rows.add_row([format!("swap area {swap_type}"), pages.to_string()]);
        }
        if let Some(id) = summary.snapshot {
            rows.add_row(["snapshot", &id.to_string()]);
        }
        rows.add_row(["", &provenance_text(&summary.provenance)]);
        context.out.line(rows.trim_fmt())?;
    }
    Ok(())
}

/// Completes a range. Requests the size of the file only if the range has no end.
pub(super) async fn resolve(
    client: &Client,
    file: &FileName,
    range: Option<PartialRange>,
) -> Result<Option<PageRange>, CliError> {
    let Some(range) = range else { return Ok(None) };
    let file_pages = if range.end.is_some() { 0 } else { client.get(file).await?.pages };
    let whole = range.within(file_pages).filter(|range| !range.is_empty());
    let none = || {
        CliError::Usage(format!(
            "page {} is past the end of the file, which has {file_pages} pages",
            range.start
        ))
    };
    Ok(Some(whole.ok_or_else(none)?))
}

fn attribute_set(args: &[AttributeArg]) -> AttributeSet {
    let has = |which| args.contains(&which) || args.contains(&AttributeArg::All);
    AttributeSet {
        order: has(AttributeArg::Order),
        flags: has(AttributeArg::Flags),
        map_count: has(AttributeArg::MapCount),
        maybe_pinned: has(AttributeArg::Pinned),
    }
}

pub(super) async fn pages(context: &mut Context, args: &PagesArgs) -> Result<(), CliError> {
    if context.out.json && (args.map || args.entries.is_some()) {
        return Err(CliError::Usage("--json cannot be combined with --map or --entries".to_owned()));
    }
    let client = context.client().await?;
    let ReadingArgs { max_age, swap_cached: distinguish_swap_cached, retain_for } = args.reading;
    let states = match args.state.as_slice() {
        [] => StateSet::ALL,
        some => some.iter().copied().map(StateArg::state).collect(),
    };
    let options = ScanRequest {
        range: resolve(&client, &args.file, args.range).await?,
        states,
        attributes: attribute_set(&args.attributes),
        max_age,
        encoding: if args.entries.is_some() { ScanEncoding::Entries } else { ScanEncoding::Auto },
        distinguish_swap_cached,
        retain_for,
    };
    let scan = client.scan(&args.file, &options).await?;
    match &args.entries {
        Some(path) => write_entries(context, scan, path).await,
        None if args.map => draw(context, scan).await,
        None if context.out.json => print_json(context, scan).await,
        None => print_runs(context, scan).await,
    }
}

async fn print_runs(context: &mut Context, mut scan: Scan) -> Result<(), CliError> {
    let header = scan.header().clone();
    context.out.line(RUN_HEADING)?;
    let bar = progress(header.range.len(), "reading");
    while let Some(runs) = scan.next_runs().await? {
        for run in &runs {
            context.out.line(run_text(run))?;
        }
        bar.set_position(scan.reached().0 - header.range.start().0);
    }
    bar.finish_and_clear();
    context.out.line(format_args!("{}", provenance_text(&header.provenance)))?;
    if let Some(id) = header.snapshot {
        context.out.line(format_args!("snapshot {id}"))?;
    }
    Ok(())
}

async fn print_json(context: &mut Context, mut scan: Scan) -> Result<(), CliError> {
    let header = scan.header().clone();
    let bar = progress(header.range.len(), "reading");
    context.out.bytes(b"{\"range\":")?;
    context.out.json_part(&header.range)?;
    context.out.bytes(b",\"file_pages\":")?;
    context.out.json_part(&header.file_pages)?;
    context.out.bytes(b",\"provenance\":")?;
    context.out.json_part(&&header.provenance)?;
    if let Some(id) = header.snapshot {
        context.out.bytes(b",\"snapshot_id\":")?;
        context.out.json_part(&id)?;
    }
    context.out.bytes(b",\"runs\":[")?;
    let mut first = true;
    while let Some(runs) = scan.next_runs().await? {
        for run in &runs {
            context.out.bytes(if first { b"" } else { b"," })?;
            context.out.json_part(run)?;
            first = false;
        }
        bar.set_position(scan.reached().0 - header.range.start().0);
    }
    bar.finish_and_clear();
    context.out.bytes(b"]}\n")
}

async fn draw(context: &mut Context, mut scan: Scan) -> Result<(), CliError> {
    let header = scan.header().clone();
    // 14 columns for the page number.
    let mut map = HeatMap::new(header.range, columns().saturating_sub(14));
    let bar = progress(header.range.len(), "reading");
    while let Some(runs) = scan.next_runs().await? {
        runs.iter().for_each(|run| map.add(run));
        bar.set_position(scan.reached().0 - header.range.start().0);
    }
    bar.finish_and_clear();
    let color = color();
    for (first, row) in map.rows(color) {
        context.out.line(format_args!("{first:>12}  {row}"))?;
    }
    context.out.line(format_args!(
        "{:>14}{} pages per cell: {}",
        "",
        map.pages_per_cell(),
        HeatMap::legend(color)
    ))?;
    context.out.line(format_args!("{:>14}{}", "", provenance_text(&header.provenance)))?;
    if let Some(id) = header.snapshot {
        context.out.line(format_args!("{:>14}snapshot {id}", ""))?;
    }
    Ok(())
}

async fn write_entries(context: &mut Context, mut scan: Scan, path: &Path) -> Result<(), CliError> {
    let failed = |error| CliError::Io { what: format!("writing {}", path.display()), error };
    let mut file = match path.to_str() {
        Some("-") => None,
        _ => Some(File::create(path).map_err(failed)?),
    };
    let header = scan.header().clone();
    let bar = progress(header.range.len(), "reading");
    while let Some(batch) = scan.next().await? {
        let ScanBatch::Entries { bytes, .. } = batch else { continue };
        match &mut file {
            Some(file) => file.write_all(&bytes).map_err(failed)?,
            None => context.out.bytes(&bytes)?,
        }
        bar.inc(to_u64(bytes.len() / 8));
    }
    bar.finish_and_clear();
    if let Some(id) = header.snapshot {
        // stdout may contain the entries.
        eprintln!("snapshot {id}");
    }
    Ok(())
}

pub(super) async fn lookup(context: &mut Context, args: &LookupArgs) -> Result<(), CliError> {
    let client = context.client().await?;
    let pages: Vec<PageIndex> = args.pages.iter().copied().map(PageIndex).collect();
    let attributes = attribute_set(&args.attributes);
    let lookup = client.lookup(&args.file, &pages, attributes, args.max_age, args.swap_cached).await?;
    if context.out.json {
        let (pages, provenance) = (&lookup.pages, &lookup.provenance);
        return context.out.json_line(&json!({ "pages": pages, "provenance": provenance }));
    }
    let mut table = table(&["page", "state", "slot", "attributes"], &[0]);
    for page in &lookup.pages {
        table.add_row([
            page.page.to_string(),
            page.state.to_string(),
            page.slot.map_or(String::new(), |slot| slot.to_string()),
            page.attributes.as_ref().map_or(String::new(), attributes_text),
        ]);
    }
    context.out.line(table.trim_fmt())?;
    context.out.line(provenance_text(&lookup.provenance))
}
