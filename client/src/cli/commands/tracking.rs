//! Commands about writes: checkpoint, dirty, coverage, seal-writers, coverage-policy, dirty-rate, watch --checkpoints.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::Path;
use std::process::ExitCode;

use fdmap_client::grpc::{ChangedBatch, Changes, ChangesOptions, TrackingEvent};
use fdmap_client::heatmap::ChangedMap;
use fdmap_client::proto::convert::{AttributeSet, FileName};
use fdmap_client::proto::{ChangedPages, CoveragePolicy, Generation};
use indicatif::HumanBytes;
use serde_json::json;

use super::super::CliError;
use super::super::args::{CheckpointArgs, DirtyArgs, DirtyRateArgs};
use super::super::bits::BitWriter;
use super::super::output::{color, columns, progress, table};
use super::super::views::{CHANGED_HEADING, changed_text, coverage_lines, gap_remedies};
use super::Context;

pub(super) async fn checkpoint(context: &mut Context, args: &CheckpointArgs) -> Result<ExitCode, CliError> {
    let client = context.client().await?;
    let made = client.checkpoint(&args.file, args.force_scan, args.idempotency_key).await?;
    let code = if args.exit_code && !made.coverage.exact { ExitCode::from(1) } else { ExitCode::SUCCESS };
    if context.out.json {
        context.out.json_line(&&made)?;
        return Ok(code);
    }
    if made.unchanged {
        context.out.line(format_args!(
            "no page was written since generation {}; no generation was closed",
            made.generation
        ))?;
    } else {
        let (observed, conservative) = (made.observed_pages, made.conservative_pages);
        context.out.line(format_args!(
            "generation {} closed in {:?}: {observed} observed pages, {conservative} conservative",
            made.generation, made.duration
        ))?;
    }
    for line in coverage_lines(&made.coverage) {
        context.out.line(line)?;
    }
    Ok(code)
}

pub(super) async fn dirty(context: &mut Context, args: &DirtyArgs) -> Result<ExitCode, CliError> {
    if context.out.json && (args.map || args.bitmap.is_some()) {
        return Err(CliError::Usage("--json cannot be combined with --map or --bitmap".to_owned()));
    }
    let client = context.client().await?;
    let options = ChangesOptions {
        since: args.since.unwrap_or(Generation::NONE),
        cursor: args.cursor.clone(),
        range: super::pages::resolve(&client, &args.file, args.range).await?,
        attributes: AttributeSet { flags: args.flags, ..AttributeSet::NONE },
        ..ChangesOptions::default()
    };
    let changes = client.changes(&args.file, options).await?;
    let written = match &args.bitmap {
        Some(path) => write_bitmap(context, changes, path).await?,
        None if args.map => draw(context, changes).await?,
        None if context.out.json => print_json(context, changes).await?,
        None => print_runs(context, changes).await?,
    };
    let pages = written.observed + written.conservative;
    Ok(if args.exit_code && pages > 0 { ExitCode::from(1) } else { ExitCode::SUCCESS })
}

/// Numbers of changed pages.
#[derive(Clone, Copy, Default)]
struct ChangedCounts {
    observed: u64,
    conservative: u64,
}

/// Calls `take` for each run in page order.
async fn each(
    mut changes: Changes,
    mut take: impl FnMut(&ChangedPages) -> Result<(), CliError>,
) -> Result<ChangedCounts, CliError> {
    let range = changes.header().range;
    let mut written = ChangedCounts::default();
    let bar = progress(range.len(), "reading");
    while let Some(batch) = changes.next().await? {
        let ChangedBatch::Runs(runs) = batch else { continue };
        for pages in &runs {
            let count = pages.run.range.len();
            *(if pages.run.conservative { &mut written.conservative } else { &mut written.observed }) +=
                count;
            take(pages)?;
        }
        bar.set_position(changes.reached().0 - range.start().0);
    }
    bar.finish_and_clear();
    Ok(written)
}

/// Prints totals and coverage.
fn totals(
    context: &mut Context,
    header: &fdmap_client::grpc::ChangesHeader,
    written: ChangedCounts,
) -> Result<(), CliError> {
    let ChangedCounts { observed, conservative } = written;
    context.out.line(format_args!(
        "{} of {} pages changed after generation {} up to generation {}: {observed} observed, {conservative} conservative",
        observed + conservative,
        header.range.len(),
        header.since,
        header.until_generation,
    ))?;
    for line in coverage_lines(&header.coverage) {
        context.out.line(line)?;
    }
    Ok(())
}

async fn print_runs(context: &mut Context, changes: Changes) -> Result<ChangedCounts, CliError> {
    let header = changes.header().clone();
    context.out.line(CHANGED_HEADING)?;
    let written = each(changes, |pages| context.out.line(changed_text(pages))).await?;
    totals(context, &header, written)?;
    Ok(written)
}

async fn print_json(context: &mut Context, changes: Changes) -> Result<ChangedCounts, CliError> {
    let header = changes.header().clone();
    let head = json!({
        "since_generation": header.since,
        "until_generation": header.until_generation,
        "range": header.range,
        "file_pages": header.file_pages,
        "coverage": &header.coverage,
        "provenance": header.provenance.as_ref(),
    });
    context.out.bytes(b"{\"header\":")?;
    context.out.json_part(&head)?;
    context.out.bytes(b",\"runs\":[")?;
    let mut first = true;
    let written = each(changes, |pages| {
        context.out.bytes(if first { b"" } else { b"," })?;
        first = false;
        context.out.json_part(&pages)
    })
    .await?;
    context.out.bytes(b"],\"observed_pages\":")?;
    context.out.json_part(&written.observed)?;
    context.out.bytes(b",\"conservative_pages\":")?;
    context.out.json_part(&written.conservative)?;
    context.out.bytes(b"}\n")?;
    Ok(written)
}

async fn draw(context: &mut Context, changes: Changes) -> Result<ChangedCounts, CliError> {
    let header = changes.header().clone();
    // 14 columns for the page number.
    let mut map = ChangedMap::new(header.range, columns().saturating_sub(14));
    let written = each(changes, |pages| {
        map.add(&pages.run);
        Ok(())
    })
    .await?;
    let color = color();
    for (first, row) in map.rows(color) {
        context.out.line(format_args!("{first:>12}  {row}"))?;
    }
    let (cell, legend) = (map.pages_per_cell(), ChangedMap::legend(color));
    context.out.line(format_args!("{:>14}{cell} pages per cell: {legend}", ""))?;
    totals(context, &header, written)?;
    Ok(written)
}

async fn write_bitmap(
    context: &mut Context,
    changes: Changes,
    path: &Path,
) -> Result<ChangedCounts, CliError> {
    let failed = |error| CliError::Io { what: format!("writing {}", path.display()), error };
    let header = changes.header().clone();
    let to_stdout = path.to_str() == Some("-");
    let to: Box<dyn std::io::Write + '_> = if to_stdout {
        Box::new(context.out.writer())
    } else {
        Box::new(BufWriter::new(File::create(path).map_err(failed)?))
    };
    let mut bits = BitWriter::new(to);
    let mut next = header.range.start();
    let write_error = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::BrokenPipe if to_stdout => CliError::Closed,
        _ => failed(error),
    };
    let written = each(changes, |pages| {
        let range = pages.run.range;
        bits.add(range.start().0 - next.0, false).map_err(write_error)?;
        next = range.end();
        bits.add(range.len(), true).map_err(write_error)
    })
    .await?;
    bits.add(header.range.end().0 - next.0, false).map_err(write_error)?;
    bits.finish().and_then(|mut to| to.flush()).map_err(write_error)?;
    // stdout may contain the bitmap; coverage goes to stderr.
    eprintln!("generation {}", header.until_generation);
    for line in coverage_lines(&header.coverage) {
        eprintln!("{line}");
    }
    Ok(written)
}

pub(super) async fn coverage(context: &mut Context, file: &FileName) -> Result<(), CliError> {
    let file_coverage = context.client().await?.coverage(file).await?;
    if context.out.json {
        return context.out.json_line(&file_coverage);
    }
    let sealed = if file_coverage.writers_sealed { "writer-sealed" } else { "not writer-sealed" };
    let (generation, policy) = (file_coverage.generation, file_coverage.policy);
    context.out.line(format_args!("last generation {generation}, coverage policy {policy}, {sealed}"))?;
    if file_coverage.mappings.is_empty() {
        context.out.line("no tracked mappings")?;
    } else {
        let mut grid = table(&["pid", "address", "size", "first page", "mapping id", ""], &[0, 2, 3]);
        for mapping in &file_coverage.mappings {
            grid.add_row([
                mapping.pid.to_string(),
                format!("{:#x}", mapping.address),
                HumanBytes(mapping.length_bytes).to_string(),
                mapping.first_page.to_string(),
                mapping.id.to_string(),
                if mapping.inherited { "inherited" } else { "" }.to_owned(),
            ]);
        }
        context.out.line(grid.trim_fmt())?;
    }
    for line in coverage_lines(&file_coverage.coverage) {
        context.out.line(line)?;
    }
    for remedy in gap_remedies(&file_coverage.coverage) {
        context.out.line(format_args!("remedy for {remedy}"))?;
    }
    Ok(())
}

pub(super) async fn seal_writers(context: &mut Context, file: &FileName) -> Result<(), CliError> {
    let (file, coverage) = context.client().await?.seal_writers(file).await?;
    if context.out.json {
        let (file, coverage) = (&file, &coverage);
        return context.out.json_line(&json!({ "file": file, "coverage": coverage }));
    }
    super::files::print(context, &file)?;
    for line in coverage_lines(&coverage) {
        context.out.line(line)?;
    }
    Ok(())
}

pub(super) async fn set_coverage_policy(
    context: &mut Context,
    file: &FileName,
    policy: CoveragePolicy,
) -> Result<(), CliError> {
    context.client().await?.set_coverage_policy(file, policy).await?;
    if context.out.json {
        context.out.json_line(&json!({ "policy": policy }))?;
    }
    Ok(())
}

pub(super) async fn dirty_rate(context: &mut Context, args: &DirtyRateArgs) -> Result<(), CliError> {
    let rate = context.client().await?.dirty_rate(&args.file, args.window).await?;
    if context.out.json {
        return context.out.json_line(&rate);
    }
    context.out.line(format_args!(
        "{:.0} pages/s, {:.1} MiB/s: {} observed pages and {} conservative pages in {:?}, up to generation {}",
        rate.pages_per_second,
        rate.bytes_per_second / f64::from(1 << 20),
        rate.observed_pages,
        rate.conservative_pages,
        rate.window,
        rate.generation,
    ))?;
    for line in coverage_lines(&rate.coverage) {
        context.out.line(line)?;
    }
    Ok(())
}

pub(super) async fn watch(context: &mut Context, file: &FileName) -> Result<(), CliError> {
    let mut watch = context.client().await?.watch_checkpoints(file).await?;
    while let Some(event) = watch.next().await? {
        if context.out.json {
            context.out.json_line(&match &event {
                TrackingEvent::Checkpoint(made) => {
                    json!({ "event": "checkpoint", "checkpoint": made })
                }
                TrackingEvent::Deleted => json!({ "event": "deleted" }),
                TrackingEvent::Lost(checkpoints) => json!({ "event": "lost", "checkpoints": checkpoints }),
            })?;
        } else {
            match &event {
                TrackingEvent::Checkpoint(made) => {
                    let since = made.since_last.map_or(String::new(), |since| format!(" after {since:.1?}"));
                    context.out.line(format_args!(
                        "generation {}{since}: {} observed pages, {} conservative pages, {:.0} pages/s",
                        made.generation, made.observed_pages, made.conservative_pages, made.pages_per_second
                    ))?;
                }
                TrackingEvent::Deleted => context.out.line("the file was deleted")?,
                TrackingEvent::Lost(lost) => {
                    context
                        .out
                        .line(format_args!("{lost} checkpoints omitted: output was read too slowly"))?;
                }
            }
        }
        context.out.flush()?;
    }
    Ok(())
}
