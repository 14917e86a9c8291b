//! Cursors.

use fdmap_client::proto::Cursor;
use serde_json::json;

use super::super::CliError;
use super::super::args::{CursorArgs, CursorCommand};
use super::super::output::table;
use super::super::views::{CoverageView, CursorView, coverage_words};
use super::Context;

pub(super) async fn cursor(context: &mut Context, command: &CursorCommand) -> Result<(), CliError> {
    let client = context.client().await?;
    match command {
        CursorCommand::Create { which: CursorArgs { file, cursor }, at } => {
            let cursor = client.create_cursor(file, cursor, *at).await?;
            tell(context, &cursor)
        }
        CursorCommand::Ls { file } => {
            let cursors = client.cursors(file).await?;
            list(context, &cursors)
        }
        CursorCommand::Rm(CursorArgs { file, cursor }) => {
            client.delete_cursor(file, cursor).await?;
            if context.out.json {
                context.out.json_line(&json!({ "deleted": cursor }))?;
            }
            Ok(())
        }
        CursorCommand::Begin { which: CursorArgs { file, cursor }, exact } => {
            let begun = client.begin_cursor(file, cursor, *exact).await?;
            if context.out.json {
                return context.out.json_line(&json!({
                    "cursor": CursorView::from(&begun.cursor),
                    "observed_pages": begun.observed_pages,
                    "conservative_pages": begun.conservative_pages,
                    "coverage": CoverageView::from(&begun.coverage),
                }));
            }
            tell(context, &begun.cursor)?;
            let (exact, conservative) = (begun.observed_pages, begun.conservative_pages);
            context.out.line(format_args!("{exact} pages written exactly, {conservative} conservatively"))?;
            for line in coverage_words(&begun.coverage) {
                context.out.line(line)?;
            }
            Ok(())
        }
        CursorCommand::Commit { which: CursorArgs { file, cursor }, generation } => {
            let cursor = client.commit_cursor(file, cursor, *generation).await?;
            tell(context, &cursor)
        }
        CursorCommand::Abort(CursorArgs { file, cursor }) => {
            let cursor = client.abort_cursor(file, cursor).await?;
            tell(context, &cursor)
        }
    }
}

fn tell(context: &mut Context, cursor: &Cursor) -> Result<(), CliError> {
    if context.out.json {
        return context.out.json_line(&CursorView::from(cursor));
    }
    let begun = cursor
        .until_generation
        .map_or(String::new(), |until_generation| format!(", begun, until_generation {until_generation}"));
    context.out.line(format_args!("{} at generation {}{begun}", cursor.name, cursor.generation))
}

fn list(context: &mut Context, cursors: &[Cursor]) -> Result<(), CliError> {
    if context.out.json {
        return context.out.json_line(&cursors.iter().map(CursorView::from).collect::<Vec<_>>());
    }
    let mut grid = table(&["cursor", "generation", "until_generation", "owner", "made"], &[1, 2, 3]);
    for cursor in cursors {
        grid.add_row([
            cursor.name.clone(),
            cursor.generation.to_string(),
            cursor.until_generation.map_or(String::new(), |until_generation| until_generation.to_string()),
            cursor.uid.to_string(),
            humantime::format_rfc3339_seconds(cursor.created).to_string(),
        ]);
    }
    context.out.line(grid.trim_fmt())
}
