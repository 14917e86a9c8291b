//! A dump, a restore or a migration in a thread of its own: progress and cancellation.

use std::num::NonZero;
use std::time::{Duration, Instant};

use fdmap_client::image::{Control, PAGE_BYTES, Progress};
use indicatif::HumanBytes;
use serde_json::{Value, json};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinHandle;

use super::super::CliError;
use super::super::output::task_progress;
use super::Context;

/// Interval of progress reports.
const BAR_INTERVAL: Duration = Duration::from_millis(100);
const JSON_INTERVAL: Duration = Duration::from_secs(1);

/// Number of threads; by default the number of processors.
pub(super) fn jobs(wanted: Option<NonZero<usize>>) -> usize {
    let processors = || std::thread::available_parallelism().map_or(1, NonZero::get);
    wanted.map_or_else(processors, NonZero::get)
}

/// Starts a task and shows its progress until it ends. ^C and SIGTERM cancel it.
pub(super) async fn watch<T, E>(
    context: &Context,
    control: &Control,
    start: impl FnOnce() -> JoinHandle<Result<T, E>>,
) -> Result<T, CliError>
where
    CliError: From<E>,
{
    let failed = |error| CliError::Io { what: "handling signals".to_owned(), error };
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
    // Not before the signals are handled: it has to clean up.
    let mut task = start();
    // In its place there are lines of JSON.
    let bar = task_progress("preparing", !context.out.json);
    let mut ticks = tokio::time::interval(if context.out.json { JSON_INTERVAL } else { BAR_INTERVAL });
    let begun = Instant::now();
    let result = loop {
        tokio::select! {
            result = &mut task => break result,
            _ = interrupt.recv() => control.cancel(),
            _ = terminate.recv() => control.cancel(),
            _ = ticks.tick() => {
                let now = control.progress();
                if context.out.json {
                    eprintln!("{}", progress_line(control, begun.elapsed()));
                }
                // A destination does not know how many pages follow.
                bar.set_length(now.total_pages.max(now.done_pages));
                bar.set_position(now.done_pages);
                bar.set_message(message(&now));
            }
        }
    };
    bar.finish_and_clear();
    let result = result.map_err(|error| CliError::Io { what: "copying".to_owned(), error: error.into() })?;
    Ok(result?)
}

/// The text before the bar.
fn message(now: &Progress) -> String {
    let phase =
        if now.round > 1 { format!("round {}, {}", now.round, now.phase) } else { now.phase.to_string() };
    let millis = u64::try_from(now.elapsed.as_millis()).unwrap_or(u64::MAX).max(1);
    let rate = HumanBytes((now.done_pages * PAGE_BYTES).saturating_mul(1000) / millis);
    let downtime = now.expected_downtime.map(|time| format!(", expected downtime {}", elapsed_text(time)));
    format!("{phase}, {rate}/s{}", downtime.unwrap_or_default())
}

/// One line of JSON, for programs.
fn progress_line(control: &Control, elapsed: Duration) -> Value {
    let now = control.progress();
    json!({
        "progress": now,
        "elapsed_ns": nanoseconds(elapsed),
        "pages_per_second": now.pages_per_second(),
        "remaining_ns": now.remaining().map(nanoseconds),
        "expected_downtime_ns": now.expected_downtime.map(nanoseconds),
    })
}

pub(super) fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// A duration to the millisecond.
pub(super) fn elapsed_text(time: Duration) -> String {
    let millis = Duration::from_millis(u64::try_from(time.as_millis()).unwrap_or(0));
    humantime::format_duration(millis).to_string()
}
