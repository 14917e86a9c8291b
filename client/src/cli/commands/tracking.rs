//! Writes: checkpoints, changes, coverage.

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
use super::super::args::{CheckpointArgs, DirtyArgs, RateArgs};
use super::super::bits::BitWriter;
use super::super::output::{color, columns, progress, table};
use super::super::views::{
    CHANGED_HEADING, ChangedView, CheckpointEventView, CheckpointView, CoverageView, FileView,
    ProvenanceView, TrackedView, changed_words, coverage_words, gap_remedies,
};
use super::Context;

pub(super) async fn checkpoint(context: &mut Context, args: &CheckpointArgs) -> Result<ExitCode, CliError> {
    let client = context.client().await?;
    let made = client.checkpoint(&args.file, args.exact, args.idempotency_key).await?;
    let code = if args.exit_code && !made.coverage.exact { ExitCode::from(1) } else { ExitCode::SUCCESS };
    if context.out.json {
        context.out.json_line(&CheckpointView::from(&made))?;
        return Ok(code);
    }
    if made.unchanged {
        context.out.line(format_args!(
            "generation {} is the last one still: nothing was written since it was closed",
            made.generation
        ))?;
    } else {
        let (exact, told) = (made.observed_pages, made.conservative_pages);
        let more = if told > 0 { format!(", {told} more told conservatively") } else { String::new() };
        context.out.line(format_args!(
            "generation {} closed in {:?}: {exact} pages written{more}",
            made.generation, made.duration
        ))?;
    }
    for line in coverage_words(&made.coverage) {
        context.out.line(line)?;
    }
    Ok(code)
}

pub(super) async fn dirty(context: &mut Context, args: &DirtyArgs) -> Result<ExitCode, CliError> {
    if context.out.json && (args.map || args.bitmap.is_some()) {
        return Err(CliError::Usage("--json is another form than --map and --bitmap".to_owned()));
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
    let pages = written.exact + written.conservative;
    Ok(if args.exit_code && pages > 0 { ExitCode::from(1) } else { ExitCode::SUCCESS })
}

/// Written pages.
#[derive(Clone, Copy, Default)]
struct Written {
    exact: u64,
    conservative: u64,
}

/// Takes each run of changes in order.
async fn each(
    mut changes: Changes,
    mut take: impl FnMut(&ChangedPages) -> Result<(), CliError>,
) -> Result<Written, CliError> {
    let range = changes.header().range;
    let mut written = Written::default();
    let bar = progress(range.len(), "reading");
    while let Some(batch) = changes.next().await? {
        let ChangedBatch::Runs(runs) = batch else { continue };
        for pages in &runs {
            let count = pages.run.range.len();
            *(if pages.run.conservative { &mut written.conservative } else { &mut written.exact }) += count;
            take(pages)?;
        }
        bar.set_position(changes.reached().0 - range.start().0);
    }
    bar.finish_and_clear();
    Ok(written)
}

/// The last lines, for people.
fn totals(
    context: &mut Context,
    header: &fdmap_client::grpc::ChangesHeader,
    written: Written,
) -> Result<(), CliError> {
    let Written { exact, conservative } = written;
    context.out.line(format_args!(
        "{} of {} pages written after generation {}, up to {}: {exact} exactly, {conservative} conservatively",
        exact + conservative,
        header.range.len(),
        header.since,
        header.until_generation,
    ))?;
    for line in coverage_words(&header.coverage) {
        context.out.line(line)?;
    }
    Ok(())
}

async fn print_runs(context: &mut Context, changes: Changes) -> Result<Written, CliError> {
    let header = changes.header().clone();
    context.out.line(CHANGED_HEADING)?;
    let written = each(changes, |pages| context.out.line(changed_words(pages))).await?;
    totals(context, &header, written)?;
    Ok(written)
}

async fn print_json(context: &mut Context, changes: Changes) -> Result<Written, CliError> {
    let header = changes.header().clone();
    let head = json!({
        "since": header.since.get(),
        "until_generation": header.until_generation.get(),
        "range": { "start": header.range.start().0, "end": header.range.end().0 },
        "file_pages": header.file_pages,
        "coverage": CoverageView::from(&header.coverage),
        "provenance": header.provenance.as_ref().map(ProvenanceView::from),
    });
    context.out.bytes(b"{\"header\":")?;
    context.out.json_part(&head)?;
    context.out.bytes(b",\"runs\":[")?;
    let mut first = true;
    let written = each(changes, |pages| {
        context.out.bytes(if first { b"" } else { b"," })?;
        first = false;
        context.out.json_part(&ChangedView::from(pages))
    })
    .await?;
    context.out.bytes(b"],\"observed_pages\":")?;
    context.out.json_part(&written.exact)?;
    context.out.bytes(b",\"conservative_pages\":")?;
    context.out.json_part(&written.conservative)?;
    context.out.bytes(b"}\n")?;
    Ok(written)
}

async fn draw(context: &mut Context, changes: Changes) -> Result<Written, CliError> {
    let header = changes.header().clone();
    // The page numbers stand before the cells.
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
    let (cell, legend) = (map.pages_a_cell(), ChangedMap::legend(color));
    context.out.line(format_args!("{:>14}{cell} pages a cell: {legend}", ""))?;
    totals(context, &header, written)?;
    Ok(written)
}

async fn write_bitmap(context: &mut Context, changes: Changes, path: &Path) -> Result<Written, CliError> {
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
    // The bitmap may have gone to stdout, and what it rests on must be told all the same.
    eprintln!("generation {}", header.until_generation);
    for line in coverage_words(&header.coverage) {
        eprintln!("{line}");
    }
    Ok(written)
}

pub(super) async fn coverage(context: &mut Context, file: &FileName) -> Result<(), CliError> {
    let told = context.client().await?.coverage(file).await?;
    if context.out.json {
        return context.out.json_line(&json!({
            "generation": told.generation.get(),
            "policy": told.policy.name(),
            "writers_sealed": told.writers_sealed,
            "coverage": CoverageView::from(&told.coverage),
            "mappings": told.mappings.iter().map(TrackedView::from).collect::<Vec<_>>(),
        }));
    }
    let closed = if told.writers_sealed { "closed to further writers" } else { "not closed" };
    let (generation, policy) = (told.generation, told.policy);
    context.out.line(format_args!("last generation {generation}, policy {policy}, {closed}"))?;
    if told.mappings.is_empty() {
        context.out.line("no mapping is tracked")?;
    } else {
        let mut grid = table(&["process", "address", "size", "from page", "mapping", ""], &[0, 2, 3]);
        for mapping in &told.mappings {
            grid.add_row([
                mapping.pid.to_string(),
                format!("{:#x}", mapping.address),
                HumanBytes(mapping.length).to_string(),
                mapping.first_page.to_string(),
                mapping.id.to_string(),
                if mapping.inherited { "of a forked child" } else { "" }.to_owned(),
            ]);
        }
        context.out.line(grid.trim_fmt())?;
    }
    for line in coverage_words(&told.coverage) {
        context.out.line(line)?;
    }
    for remedy in gap_remedies(&told.coverage) {
        context.out.line(format_args!("remedy for {remedy}"))?;
    }
    Ok(())
}

pub(super) async fn close(context: &mut Context, file: &FileName) -> Result<(), CliError> {
    let (file, coverage) = context.client().await?.seal_writers(file).await?;
    if context.out.json {
        let (file, coverage) = (FileView::from(&file), CoverageView::from(&coverage));
        return context.out.json_line(&json!({ "file": file, "coverage": coverage }));
    }
    super::files::tell(context, &file)?;
    for line in coverage_words(&coverage) {
        context.out.line(line)?;
    }
    Ok(())
}

pub(super) async fn policy(
    context: &mut Context,
    file: &FileName,
    policy: CoveragePolicy,
) -> Result<(), CliError> {
    context.client().await?.set_coverage_policy(file, policy).await?;
    if context.out.json {
        context.out.json_line(&json!({ "policy": policy.name() }))?;
    }
    Ok(())
}

pub(super) async fn rate(context: &mut Context, args: &RateArgs) -> Result<(), CliError> {
    let rate = context.client().await?.dirty_rate(&args.file, args.window).await?;
    if context.out.json {
        return context.out.json_line(&json!({
            "window_ns": u64::try_from(rate.window.as_nanos()).unwrap_or(u64::MAX),
            "observed_pages": rate.observed_pages,
            "conservative_pages": rate.conservative_pages,
            "pages_per_second": rate.pages_per_second,
            "bytes_per_second": rate.bytes_per_second,
            "generation": rate.generation.get(),
            "coverage": CoverageView::from(&rate.coverage),
        }));
    }
    context.out.line(format_args!(
        "{:.0} pages/s, {:.1} MiB/s: {} pages written exactly and {} conservatively in {:?}, up to generation {}",
        rate.pages_per_second,
        rate.bytes_per_second / f64::from(1 << 20),
        rate.observed_pages,
        rate.conservative_pages,
        rate.window,
        rate.generation,
    ))?;
    for line in coverage_words(&rate.coverage) {
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
                    json!({ "event": "checkpoint", "checkpoint": CheckpointEventView::from(made) })
                }
                TrackingEvent::Deleted => json!({ "event": "deleted" }),
                TrackingEvent::Lost(checkpoints) => json!({ "event": "lost", "checkpoints": checkpoints }),
            })?;
        } else {
            match &event {
                TrackingEvent::Checkpoint(made) => {
                    let since = made.since_last.map_or(String::new(), |since| format!(" after {since:.1?}"));
                    context.out.line(format_args!(
                        "generation {}{since}: {} pages written exactly, {} conservatively, {:.0} pages/s",
                        made.generation, made.observed_pages, made.conservative_pages, made.pages_per_second
                    ))?;
                }
                TrackingEvent::Deleted => context.out.line("the file was deleted")?,
                TrackingEvent::Lost(lost) => {
                    context.out.line(format_args!("{lost} left out, since they were read too slowly"))?;
                }
            }
        }
        context.out.flush()?;
    }
    Ok(())
}
