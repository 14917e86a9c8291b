//! `fdmap diff`: differences between two snapshots.

use std::process::ExitCode;
use std::time::Duration;

use fdmap_client::grpc::SummaryOptions;
use fdmap_client::proto::{FileName, PageState, SnapshotId, SwapSlot};
use serde_json::json;

use super::super::CliError;
use super::super::args::DiffArgs;
use super::super::views::provenance_text;
use super::Context;

/// Retention beyond the waiting time of `--over`.
const RETENTION_MARGIN: Duration = Duration::from_secs(60);

/// State and swap slot on one side of a difference.
fn side(state: PageState, slot: Option<SwapSlot>) -> String {
    slot.map_or_else(|| state.to_string(), |slot| format!("{state} {slot}"))
}

pub(super) async fn diff(context: &mut Context, args: &DiffArgs) -> Result<ExitCode, CliError> {
    let client = context.client().await?;
    let range = super::pages::resolve(&client, &args.file, args.pages).await?;
    let (from, temporary) = match (args.from, args.over) {
        (Some(from), _) => (from, false),
        (None, over) => {
            let over = over.unwrap_or_default();
            let options =
                SummaryOptions { range, retain_for: over + RETENTION_MARGIN, ..SummaryOptions::default() };
            let retained = client.summary(&args.file, &options).await?.snapshot;
            tokio::time::sleep(over).await;
            (retained.ok_or(fdmap_client::ClientError::Unexpected("snapshot was not retained"))?, true)
        }
    };
    let mut diff = client.diff(&args.file, from, args.to, range, args.retain_for).await?;
    let mut changed = 0_u64;
    if context.out.json {
        let head = json!({
            "from": &diff.from,
            "to": &diff.to,
            "range": diff.range,
            "to_snapshot_id": diff.to_snapshot,
        });
        context.out.bytes(b"{\"header\":")?;
        context.out.json_part(&head)?;
        context.out.bytes(b",\"changes\":[")?;
    }
    while let Some(changes) = diff.next().await? {
        for change in &changes {
            if context.out.json {
                context.out.bytes(if changed == 0 { b"" } else { b"," })?;
                context.out.json_part(change)?;
            } else {
                let before = side(change.before, change.slot_before);
                let after = side(change.after, change.slot_after);
                let (start, end) = (change.range.start(), change.range.end());
                context.out.line(format_args!("{start:>12}..{end:<12} {before} -> {after}"))?;
            }
            changed += change.range.len();
        }
    }
    if context.out.json {
        context.out.bytes(b"],\"changed_pages\":")?;
        context.out.json_part(&changed)?;
        context.out.bytes(b"}\n")?;
    } else {
        context.out.line(format_args!("{changed} of {} pages changed", diff.range.len()))?;
        context.out.line(format_args!("from: {}", provenance_text(&diff.from)))?;
        context.out.line(format_args!("to:   {}", provenance_text(&diff.to)))?;
        if let Some(id) = diff.to_snapshot {
            context.out.line(format_args!("snapshot {id}"))?;
        }
    }
    if temporary {
        client.drop_snapshot(&args.file, from).await?;
    }
    Ok(if args.exit_code && changed > 0 { ExitCode::from(1) } else { ExitCode::SUCCESS })
}

pub(super) async fn drop_snapshot(
    context: &mut Context,
    file: &FileName,
    snapshot: SnapshotId,
) -> Result<(), CliError> {
    context.client().await?.drop_snapshot(file, snapshot).await?;
    if context.out.json {
        context.out.json_line(&json!({ "dropped": snapshot }))?;
    }
    Ok(())
}
