//! Writing to the terminal, or to whatever stands in its place.

use std::io::{self, BufWriter, IsTerminal as _, StdoutLock, Write as _};

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, ContentArrangement, Table};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use super::CliError;

/// Where a command's answer goes.
pub struct Output {
    out: BufWriter<StdoutLock<'static>>,
    /// JSON instead of tables.
    pub json: bool,
}

impl Output {
    /// To stdout.
    #[must_use]
    pub fn new(json: bool) -> Self {
        Self { out: BufWriter::new(io::stdout().lock()), json }
    }

    /// A line of text.
    ///
    /// # Errors
    /// [`CliError::Closed`] if nobody reads any more.
    pub fn line(&mut self, text: impl std::fmt::Display) -> Result<(), CliError> {
        writeln!(self.out, "{text}").map_err(write_error)
    }

    /// Bytes as they are.
    ///
    /// # Errors
    /// [`CliError::Closed`] if nobody reads any more.
    pub fn bytes(&mut self, bytes: &[u8]) -> Result<(), CliError> {
        self.out.write_all(bytes).map_err(write_error)
    }

    /// For what writes bytes by itself.
    pub fn writer(&mut self) -> &mut impl io::Write {
        &mut self.out
    }

    /// A value as JSON, on a line of its own.
    ///
    /// # Errors
    /// [`CliError::Closed`] if nobody reads any more.
    pub fn json_line(&mut self, value: &impl Serialize) -> Result<(), CliError> {
        self.json_part(value)?;
        self.bytes(b"\n")
    }

    /// A value as JSON.
    ///
    /// # Errors
    /// [`CliError::Closed`] if nobody reads any more.
    pub fn json_part(&mut self, value: &impl Serialize) -> Result<(), CliError> {
        serde_json::to_writer(&mut self.out, value).map_err(|error| write_error(error.into()))
    }

    /// Hands over what is buffered.
    ///
    /// # Errors
    /// [`CliError::Closed`] if nobody reads any more.
    pub fn flush(&mut self) -> Result<(), CliError> {
        self.out.flush().map_err(write_error)
    }
}

fn write_error(error: io::Error) -> CliError {
    if error.kind() == io::ErrorKind::BrokenPipe {
        return CliError::Closed;
    }
    CliError::Io { what: "writing to stdout".to_owned(), error }
}

/// A table for people, with a heading or without; the columns in `numbers` stand to the right.
#[must_use]
pub fn table(header: &[&str], numbers: &[usize]) -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    if !header.is_empty() {
        table.set_header(header);
    }
    for number in numbers {
        if let Some(column) = table.column_mut(*number) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// True if colours are wanted: stdout is a terminal and nobody says no.
#[must_use]
pub fn color() -> bool {
    io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Columns of the terminal; 80 where there is none.
#[must_use]
pub fn columns() -> usize {
    terminal_size::terminal_size().map_or(80, |(width, _)| usize::from(width.0))
}

/// A progress bar on stderr, if that is a terminal and the answer does not go there as well.
#[must_use]
pub fn progress(pages: u64, what: &'static str) -> ProgressBar {
    let target = if io::stderr().is_terminal() && !io::stdout().is_terminal() {
        ProgressDrawTarget::stderr()
    } else {
        ProgressDrawTarget::hidden()
    };
    let style = ProgressStyle::with_template("{msg} {bar:40} {human_pos} of {human_len} pages, {eta} left");
    let bar = ProgressBar::with_draw_target(Some(pages), target).with_message(what);
    match style {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
