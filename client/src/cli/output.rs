//! Output to stdout: lines, tables, JSON and progress bars.

use std::io::{self, BufWriter, IsTerminal as _, StdoutLock, Write as _};

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, ContentArrangement, Table};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use super::CliError;

/// Output of a command.
pub struct Output {
    out: BufWriter<StdoutLock<'static>>,
    /// Print JSON instead of text.
    pub json: bool,
}

impl Output {
    /// Writes to stdout.
    pub fn new(json: bool) -> Self {
        Self { out: BufWriter::new(io::stdout().lock()), json }
    }

    /// Writes a line of text.
    ///
    /// # Errors
    /// [`CliError::Closed`] if the reader closed the pipe; [`CliError::Io`].
    pub fn line(&mut self, text: impl std::fmt::Display) -> Result<(), CliError> {
        writeln!(self.out, "{text}").map_err(write_error)
    }

    /// Writes bytes.
    ///
    /// # Errors
    /// [`CliError::Closed`] if the reader closed the pipe; [`CliError::Io`].
    pub fn bytes(&mut self, bytes: &[u8]) -> Result<(), CliError> {
        self.out.write_all(bytes).map_err(write_error)
    }

    /// The buffered writer.
    pub fn writer(&mut self) -> &mut impl io::Write {
        &mut self.out
    }

    /// Writes a value as one line of JSON.
    ///
    /// # Errors
    /// [`CliError::Closed`] if the reader closed the pipe; [`CliError::Io`].
    pub fn json_line(&mut self, value: &impl Serialize) -> Result<(), CliError> {
        self.json_part(value)?;
        self.bytes(b"\n")
    }

    /// Writes a value as JSON without a newline.
    ///
    /// # Errors
    /// [`CliError::Closed`] if the reader closed the pipe; [`CliError::Io`].
    pub fn json_part(&mut self, value: &impl Serialize) -> Result<(), CliError> {
        serde_json::to_writer(&mut self.out, value).map_err(|error| write_error(error.into()))
    }

    /// Flushes the buffer.
    ///
    /// # Errors
    /// [`CliError::Closed`] if the reader closed the pipe; [`CliError::Io`].
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

/// Creates a table. An empty header is omitted; the columns in `numbers` are right-aligned.
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

/// Returns true if stdout is a terminal and `NO_COLOR` is not set.
pub fn color() -> bool {
    io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Width of the terminal in columns; 80 without a terminal.
pub fn columns() -> usize {
    terminal_size::terminal_size().map_or(80, |(width, _)| usize::from(width.0))
}

/// Creates a progress bar on stderr for a command that prints meanwhile. It is hidden unless stderr is a terminal and stdout is not.
pub fn progress(pages: u64, message: &'static str) -> ProgressBar {
    bar(pages, message, !io::stdout().is_terminal())
}

/// Creates a progress bar on stderr for a task that prints nothing before its end. It is hidden unless stderr is a terminal.
pub fn task_progress(message: &'static str, is_shown: bool) -> ProgressBar {
    bar(0, message, is_shown)
}

fn bar(pages: u64, message: &'static str, is_shown: bool) -> ProgressBar {
    let target = if is_shown && io::stderr().is_terminal() {
        ProgressDrawTarget::stderr()
    } else {
        ProgressDrawTarget::hidden()
    };
    let style = ProgressStyle::with_template("{msg} {bar:40} {human_pos} of {human_len} pages, {eta} left");
    let bar = ProgressBar::with_draw_target(Some(pages), target).with_message(message);
    match style {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
