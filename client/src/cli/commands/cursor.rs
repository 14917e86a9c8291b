//! `fdmap cursor`.

use fdmap_client::proto::Cursor;
use serde_json::json;

use super::super::CliError;
use super::super::args::{CursorArgs, CursorCommand};
use super::super::output::table;
use super::super::views::coverage_lines;
use super::Context;

pub(super) async fn cursor(context: &mut Context, command: &CursorCommand) -> Result<(), CliError> {
    let client = context.client().await?;
    match command {
        CursorCommand::Create { which: CursorArgs { file, cursor }, at } => {
            let cursor = client.create_cursor(file, cursor, *at).await?;
            print(context, &cursor)
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
        CursorCommand::Begin { which: CursorArgs { file, cursor }, force_scan } => {
            let begun = client.begin_cursor(file, cursor, *force_scan).await?;
            if context.out.json {
                return context.out.json_line(&begun);
            }
            print(context, &begun.cursor)?;
            let (observed, conservative) = (begun.observed_pages, begun.conservative_pages);
            context.out.line(format_args!("{observed} observed pages, {conservative} conservative pages"))?;
            for line in coverage_lines(&begun.coverage) {
                context.out.line(line)?;
            }
            Ok(())
        }
        CursorCommand::Commit { which: CursorArgs { file, cursor }, generation } => {
            let cursor = client.commit_cursor(file, cursor, *generation).await?;
            print(context, &cursor)
        }
        CursorCommand::Abort(CursorArgs { file, cursor }) => {
            let cursor = client.abort_cursor(file, cursor).await?;
            print(context, &cursor)
        }
    }
}

fn print(context: &mut Context, cursor: &Cursor) -> Result<(), CliError> {
    if context.out.json {
        return context.out.json_line(cursor);
    }
    let begun = cursor
        .until_generation
        .map_or(String::new(), |until_generation| format!(", begun, until generation {until_generation}"));
    context.out.line(format_args!("{} at generation {}{begun}", cursor.name, cursor.generation))
}

fn list(context: &mut Context, cursors: &[Cursor]) -> Result<(), CliError> {
    if context.out.json {
        return context.out.json_line(&cursors);
    }
    let mut grid = table(&["cursor", "generation", "until", "uid", "created"], &[1, 2, 3]);
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
