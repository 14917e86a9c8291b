//! What changed.

use std::process::ExitCode;
use std::time::Duration;

use fdmap_client::grpc::SummaryOptions;
use fdmap_client::proto::{Change, PageState, SwapSlot};
use serde::Serialize;
use serde_json::json;

use super::super::CliError;
use super::super::args::DiffArgs;
use super::super::views::{ProvenanceView, SlotView, provenance_words};
use super::Context;

/// A snapshot that is kept for a wait of our own is kept so much longer than the wait.
const SLACK: Duration = Duration::from_secs(60);

#[derive(Serialize)]
struct ChangeView {
    start: u64,
    end: u64,
    before: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    slot_before: Option<SlotView>,
    after: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    slot_after: Option<SlotView>,
}

impl From<&Change> for ChangeView {
    fn from(change: &Change) -> Self {
        Self {
            start: change.range.start().0,
            end: change.range.end().0,
            before: change.before.name(),
            slot_before: change.slot_before.map(SlotView::from),
            after: change.after.name(),
            slot_after: change.slot_after.map(SlotView::from),
        }
    }
}

fn side(state: PageState, slot: Option<SwapSlot>) -> String {
    slot.map_or_else(|| state.to_string(), |slot| format!("{state} {slot}"))
}

pub(super) async fn diff(context: &mut Context, args: &DiffArgs) -> Result<ExitCode, CliError> {
    let client = context.client().await?;
    let range = super::pages::resolve(&client, &args.file, args.pages).await?;
    let (from, ours) = match (args.from, args.over) {
        (Some(from), _) => (from, false),
        (None, over) => {
            let over = over.unwrap_or_default();
            let options = SummaryOptions { range, retain_for: over + SLACK, ..SummaryOptions::default() };
            let kept = client.summary(&args.file, &options).await?.snapshot;
            tokio::time::sleep(over).await;
            (kept.ok_or(fdmap_client::ClientError::Unexpected("a kept snapshot was expected"))?, true)
        }
    };
    let mut diff = client.diff(&args.file, from, args.to, range, args.keep).await?;
    let mut changed = 0_u64;
    if context.out.json {
        let head = json!({
            "from": ProvenanceView::from(&diff.from),
            "to": ProvenanceView::from(&diff.to),
            "range": { "start": diff.range.start().0, "end": diff.range.end().0 },
            "to_snapshot": diff.to_snapshot.map(|id| id.to_string()),
        });
        context.out.bytes(b"{\"header\":")?;
        context.out.json_part(&head)?;
        context.out.bytes(b",\"changes\":[")?;
    }
    while let Some(changes) = diff.next().await? {
        for change in &changes {
            if context.out.json {
                context.out.bytes(if changed == 0 { b"" } else { b"," })?;
                context.out.json_part(&ChangeView::from(change))?;
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
        context.out.line(format_args!("then: {}", provenance_words(&diff.from)))?;
        context.out.line(format_args!("now:  {}", provenance_words(&diff.to)))?;
        if let Some(id) = diff.to_snapshot {
            context.out.line(format_args!("snapshot {id}"))?;
        }
    }
    if ours {
        client.drop_snapshot(&args.file, from).await?;
    }
    Ok(if args.exit_code && changed > 0 { ExitCode::from(1) } else { ExitCode::SUCCESS })
}
